"""A clock on which only sleeping takes time: what a profiler measures does not depend on how busy the machine is.

Knows: nothing of layers or profilers. Does not know: who looks at it; tests put it in the place of `time`.
"""

from __future__ import annotations


class SleepClock:
    """A sleep takes exactly as long as asked, and every look at the clock takes a microsecond."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def perf_counter(self) -> float:
        self._now_s += 1e-6
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds

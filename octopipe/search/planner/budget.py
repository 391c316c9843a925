"""One budget of wall-clock time for a whole search, and the expected duration of its tasks.

Knows: when the search must end, and how long simulation and tuning have taken per op so far on this machine, so that no
task is started that would end too late. Does not know: what the tasks are for (`search.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

Stop = Callable[[], bool]
"""Whether a stop has been requested; the search then returns its best result so far."""
FIRST_S_PER_OP = 2e-5
"""Assumed seconds per op of a simulation, until one has been timed."""
ENDING = 0.03
"""Share of the budget that is reserved for the output: pricing its parts, writing files, printing the table."""
MOST_ENDING = 0.1
"""The largest share that is reserved for the output, on a slow machine."""
AROUND_TUNING = 6.0
"""Assumed overhead of a tuning run beyond its own budget (its bound, the last simulations), in units of one simulation
of the plan, until one has been timed."""


def never() -> bool:
    return False


@dataclass(slots=True, kw_only=True)
class Budget:
    """A time budget that starts at `began` on a clock: wall-clock time, or `time.process_time` for comparisons on a
    busy machine."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    began: float | None = None
    stop: Stop = never
    s_per_op: float = FIRST_S_PER_OP
    around_tuning: float = AROUND_TUNING

    ending_s: float = 0.0
    """Seconds that are reserved for the output."""

    def __post_init__(self) -> None:
        now = self.clock()
        self.began = now if self.began is None else self.began
        # The time since `began` (Python's start) shows how slow the machine is; the output takes about as long.
        self.ending_s = min(max(ENDING * self.seconds, now - self.began), MOST_ENDING * self.seconds)

    def used(self) -> float:
        assert self.began is not None
        return self.clock() - self.began

    def left(self, ops: int = 0) -> float:
        """Return the seconds until the search must end, if the plan that is output has this many ops."""
        return self.seconds - self.ending_s - self.simulating_s(ops) - self.used()

    def over(self, share: float = 1.0) -> bool:
        """Whether this share of the budget has been spent, or a stop has been requested."""
        return self.stop() or self.used() >= share * (self.seconds - self.ending_s)

    def after(self, seconds: float) -> Stop:
        """Return a function that says whether this many seconds have passed from now, or a stop has been requested."""
        until = self.used() + seconds
        return lambda: self.stop() or self.used() >= until

    def simulating_s(self, ops: int) -> float:
        return ops * self.s_per_op

    def tuning_s(self, ops: int) -> float:
        """Return the time that a tuning run takes in addition to its own budget."""
        return 0.1 + self.around_tuning * self.simulating_s(ops)

    def simulated(self, ops: int, seconds: float) -> None:
        """Record how long a simulation took. Small ones are ignored, because they say little about the time per op."""
        if ops >= 500:
            self.s_per_op = 0.5 * self.s_per_op + 0.5 * seconds / ops

    def tuned(self, ops: int, seconds: float) -> None:
        """Record how much longer a tuning took than its own budget."""
        one = self.simulating_s(ops)
        if one > 0:
            self.around_tuning = max(0.5 * self.around_tuning, min((seconds - 0.1) / one, 50.0))

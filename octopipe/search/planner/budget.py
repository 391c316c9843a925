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
"""Seconds per op of a simulation, before one was timed."""
ENDING = 0.03
"""Share of the budget that is left for the answer: its parts are priced, files written, the table printed."""
MOST_ENDING = 0.1
"""The largest such share, on a slow machine."""
AROUND_TUNING = 6.0
"""What surrounds a search for an order (its bound, the last simulations), in simulations, before one was timed."""


def never() -> bool:
    return False


@dataclass(slots=True, kw_only=True)
class Budget:
    """Seconds from `began` on a clock: wall-clock time, or for comparisons on a busy machine `time.process_time`."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    began: float | None = None
    stop: Stop = never
    s_per_op: float = FIRST_S_PER_OP
    around_tuning: float = AROUND_TUNING

    ending_s: float = 0.0
    """Seconds left for the answer."""

    def __post_init__(self) -> None:
        now = self.clock()
        self.began = now if self.began is None else self.began
        # Python's start tells how slow this machine is now, and an answer takes about as long.
        self.ending_s = min(max(ENDING * self.seconds, now - self.began), MOST_ENDING * self.seconds)

    def used(self) -> float:
        assert self.began is not None
        return self.clock() - self.began

    def left(self, ops: int = 0) -> float:
        """The seconds that remain until the search must end, if the plan of its answer has this many ops."""
        return self.seconds - self.ending_s - self.simulating_s(ops) - self.used()

    def over(self, share: float = 1.0) -> bool:
        """Whether this share of the budget has been spent, or a stop has been requested."""
        return self.stop() or self.used() >= share * (self.seconds - self.ending_s)

    def after(self, seconds: float) -> Stop:
        """A function that tells whether this many seconds have passed from now, or a stop has been requested."""
        until = self.used() + seconds
        return lambda: self.stop() or self.used() >= until

    def simulating_s(self, ops: int) -> float:
        return ops * self.s_per_op

    def tuning_s(self, ops: int) -> float:
        """The time that a tuning takes in addition to its own budget."""
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

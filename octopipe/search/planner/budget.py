"""One budget of wall-clock time for a whole search, and the expected duration of its tasks.

Knows: when the search must end, and how long simulation and tuning have taken per op so far on this machine, so that no
task is started that would end too late. Does not know: what the tasks are for (`search.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

Stop = Callable[[], bool]
"""Whether somebody has asked to end with what there is."""
FIRST_S_PER_OP = 2e-5
"""Seconds per op of a simulation, before one was timed."""
ENDING = 0.03
"""Share of the budget that is left for the answer: its parts are priced, files written, the table printed."""
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

    def __post_init__(self) -> None:
        self.began = self.clock() if self.began is None else self.began

    def used(self) -> float:
        assert self.began is not None
        return self.clock() - self.began

    def left(self, ops: int = 0) -> float:
        """Seconds until the search must end, where the answer's plan has so many ops."""
        return (1.0 - ENDING) * self.seconds - self.simulating_s(ops) - self.used()

    def over(self, share: float = 1.0) -> bool:
        """Whether this share of the budget is spent, or somebody has asked to end."""
        return self.stop() or self.used() >= share * (1.0 - ENDING) * self.seconds

    def simulating_s(self, ops: int) -> float:
        return ops * self.s_per_op

    def tuning_s(self, ops: int) -> float:
        """What a search takes beside its own time."""
        return 0.1 + self.around_tuning * self.simulating_s(ops)

    def simulated(self, ops: int, seconds: float) -> None:
        """Take note of a simulation; small ones tell little about an op."""
        if ops >= 500:
            self.s_per_op = 0.5 * self.s_per_op + 0.5 * seconds / ops

    def tuned(self, ops: int, seconds: float) -> None:
        """Take note of what surrounded a search."""
        one = self.simulating_s(ops)
        if one > 0:
            self.around_tuning = max(0.5 * self.around_tuning, min((seconds - 0.1) / one, 50.0))

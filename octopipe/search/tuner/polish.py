"""Local search on given orders: of any plan, with one route or several, by step time or by its mean under jitter.

Knows: one annealing walk over orders and the best result so far. Does not know: time, threads, or where orders come
from.

Plans that hold layers more than once (Chimera, DualPipe) are improved here too: a copy of a heavy layer lets two ranks
share its work, which is impossible without copies. The copy costs weights, optimizer state and a gradient reduction,
all of which are counted.
"""

from __future__ import annotations

import numpy as np

from octopipe.search.tuner.core.decode import LAPS
from octopipe.search.tuner.core.follow import Orders, make_orders, make_times, polish
from octopipe.search.tuner.core.problem import Problem, Scratch, make_scratch, make_structure
from octopipe.search.tuner.mechanics import JITTER_DRAWS, JITTER_OPS

NO_JITTER = np.zeros((0, 2, 1, 1, 1))


def jitter_factors(problem: Problem, max_stages: int, stages: int, sigma: float, seed: int) -> np.ndarray:
    """Random factors for every op and its transfer, log-normal with mean 1; the same draws for all moves and plans."""
    ops = 3 * stages * problem.micro_batches
    draws = max(JITTER_DRAWS, JITTER_OPS // ops)
    shape = (draws, 2, 4, max_stages, problem.micro_batches)
    # Drawn as log-normal, because the last digit of np.exp of an array depends on the processor.
    return np.random.default_rng((seed, 4)).lognormal(-(sigma**2) / 2, sigma, shape)


class Polisher:
    """A walk over given orders."""

    def __init__(
        self, problem: Problem, max_stages: int, rng: np.ndarray, structure: np.ndarray, orders: Orders,
        factors: np.ndarray | None = None, scratch: Scratch | None = None, name: str = "orders",
    ) -> None:  # fmt: skip
        """`best_ms` is infinite if the orders cannot run or do not fit."""
        self.problem, self.rng, self.name = problem, rng, name
        self.factors = NO_JITTER if factors is None else factors
        self.scratch = make_scratch(problem, max_stages, LAPS) if scratch is None else scratch
        self.structure, self.best, self.back = (make_structure(problem, max_stages) for _ in range(3))
        self.orders, self.best_orders, self.back_orders = (make_orders(problem, max_stages) for _ in range(3))
        self.structure[:] = structure
        for r in range(problem.ranks):
            n = int(orders.length[r])
            self.orders.seq[r, :n] = orders.seq[r, :n]
            self.orders.length[r] = n
        self.times = make_times(problem, max_stages)
        self.log = np.zeros((64, 4))
        self.best_ms = float("inf")
        self.run(0, 0.0)

    def run(self, moves: int, temperature: float) -> np.ndarray:
        """Make some moves at one temperature (a share of the step time); returns a log line for every improvement."""
        _, best_ms, lines = polish(
            self.problem, self.structure, self.orders, self.best, self.best_orders, self.back, self.back_orders,
            self.scratch, self.times, self.rng, moves, temperature, self.best_ms, self.log, self.factors,
        )  # fmt: skip
        self.best_ms = float(best_ms)
        return self.log[:lines].copy()

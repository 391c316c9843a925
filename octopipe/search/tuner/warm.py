"""Prepares the kernels of a search before its time budget starts, so that compilation does not count.

Knows: which kernels a search calls; it calls each once, on a problem with a few layers. Does not know: their results,
or the kernels of bounds, which are computed before a search begins. With a filled cache this is quick.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from octopipe.search.algorithm1 import IterativeSearch
from octopipe.costs.table import CostTable
from octopipe.base.errors import OctoPipeError
from octopipe.simulation.hide_transfers import hide_transfers
from octopipe.simulation.simulator import simulate
from octopipe.search.systems import build_plan
from octopipe.search.tuner.core.problem import make_problem, make_rng
from octopipe.search.tuner.encode import arrays_of
from octopipe.search.tuner.polish import Polisher
from octopipe.search.tuner.population import Judge
from octopipe.search.tuner.starts import Starts

RANKS, MICRO_BATCHES = 2, 4


@cache
def compile_kernels(method: str) -> None:
    """Compile the kernels that a method calls, or load them from the cache."""
    costs = CostTable.uniform(num_layers=4, activation_bytes=1.0).replace(
        rank_memory_bytes=(1e3,), forward_ms=np.array([1.0, 2.0, 1.0, 3.0])
    )
    plan = build_plan("zb-v", costs, RANKS, MICRO_BATCHES, split_backward=True)
    simulate(plan, costs)
    hide_transfers(plan, costs, moves=1)
    for system in ("adapipe", "chimera"):
        try:
            build_plan(system, costs, RANKS, MICRO_BATCHES, split_backward=True)
        except OctoPipeError:
            continue
    if method == "best":
        problem = make_problem(costs, RANKS, MICRO_BATCHES)
        Starts(Judge(problem, 4, make_rng(0)), (0, 0)).draw(False)
        Polisher(problem, 4, make_rng(0), *arrays_of(problem, 4, plan)).run(1, 0.0)
    else:
        IterativeSearch(costs, RANKS, MICRO_BATCHES, budget_s=600.0, iterations=6).run()

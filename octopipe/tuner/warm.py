"""The search's kernels made ready before a clock starts: a budget is for searching, not for compiling.

Knows: which kernels a search calls, in four groups, and that a second process can compile some of them meanwhile. Does
not know: what they find. Where their code is kept from an earlier run all this takes a moment.

Otherwise this process compiles the kernels of structures while a second one compiles those of plans (bounds, the
simulator), which is what a search needs to begin; the second process goes on with those of orders and of published
systems, which the search waits for when it comes to them (`wait_for`). Where no process can be started, or code cannot
be kept, this one compiles everything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from octopipe.bounds import lower_bound
from octopipe.cost import CostTable
from octopipe.errors import OctoPipeError
from octopipe.simulator import makespan_ms, simulate
from octopipe.systems import build_plan
from octopipe.tuner.core.problem import make_problem, make_rng
from octopipe.tuner.encode import arrays_of
from octopipe.tuner.polish import Polisher
from octopipe.tuner.population import Judge
from octopipe.tuner.starts import Starts


def _tiny() -> CostTable:
    return CostTable.uniform(num_layers=4, activation_bytes=1.0).replace(
        rank_memory_bytes=(1e3,), forward_ms=np.array([1.0, 2.0, 1.0, 3.0])
    )


def _structures() -> None:
    Starts(Judge(make_problem(_tiny(), 2, 2), 4, make_rng(0)), (0, 0)).draw(False)


def _plans() -> None:
    costs = _tiny()
    lower_bound(costs, 2, 2)
    simulate(build_plan("gpipe", costs, 2, 2), costs)


def _orders() -> None:
    costs = _tiny()
    problem, plan = make_problem(costs, 2, 2), build_plan("gpipe", costs, 2, 2)
    Polisher(problem, 4, make_rng(0), *arrays_of(problem, 4, plan)).run(1, 0.0)
    makespan_ms(plan, costs)


def _systems() -> None:
    for name in ("zb-v", "adapipe", "chimera"):
        try:
            build_plan(name, _tiny(), 2, 4, split_backward=True)
        except OctoPipeError:
            continue


GROUPS: dict[str, Callable[[], None]] = {
    "structures": _structures,
    "plans": _plans,
    "orders": _orders,
    "systems": _systems,
}


@cache
def compile_search() -> None:
    """Compile, or load what is kept from an earlier run."""
    for group in GROUPS.values():
        group()

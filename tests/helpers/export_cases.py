"""Small plans and timelines for the tests of exports."""

from __future__ import annotations

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline


def small_costs(layers: int = 8, p2p_ms: float = 0.3) -> CostTable:
    return CostTable.uniform(num_layers=layers, p2p_ms=p2p_ms, activation_bytes=1 << 28, model="uniform")


def small_case(system: str, ranks: int = 4, micro_batches: int = 8) -> tuple[Plan, Timeline]:
    costs = small_costs()
    plan = build_plan(system, costs, ranks, micro_batches)
    return plan, simulate(plan, costs)

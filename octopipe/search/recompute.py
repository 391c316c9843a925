"""How much must be recomputed to fit: in the costs of a set-up, or as R ops in a finished plan.

Knows: how many layers must be recomputed to fit in memory, and how R ops are inserted into orders. Does not know: what
recomputation costs (`analytic/`, `price.py`), or systems that decide it themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan
from octopipe.simulation.simulator import simulate


def recomputing(plan: Plan, layers: Mapping[int, int] | None = None) -> Plan:
    """The plan with the first `layers[rank]` layers of every rank recomputed (all of them where none are given), R
    right before the backward. The head is never recomputed: its backward follows its forward at once."""
    stages = list(plan.stages)
    for rank in range(plan.num_ranks):
        left = plan.num_layers if layers is None else layers.get(rank, 0)
        for s in plan.stages_of_rank(rank):
            stage = stages[s]
            stop = min(stage.stop, plan.num_layers - 1)
            again = tuple(range(stage.first, max(stage.first, min(stop, stage.first + left))))
            left -= len(again)
            whole = len(again) == stage.num_layers
            stages[s] = replace(stage, recompute=True if whole and again else again or False)
    orders = []
    for rank in range(plan.num_ranks):
        out: list[Op] = []
        for slot in plan.slots(rank):  # what a pair's backward needs again is made before the pair
            out += [Op(op.stage, "R", op.micro_batch) for op in slot if op.kind in "IB" and stages[op.stage].recompute]
            out += slot
        orders.append(tuple(out))
    return replace(plan, stages=tuple(stages), orders=tuple(orders))


def recomputes(plan: Plan) -> bool:
    return any(stage.recompute for stage in plan.stages)


def least_recomputing(plan: Plan, costs: CostTable) -> Plan:
    """The plan with as few recomputed layers per rank as let it fit; unchanged where it fits or nothing helps.

    Memory of a rank depends on its own layers alone, so every rank's number is halved towards on its own, all ranks
    in the same few simulations.
    """
    if recomputes(plan) or costs.not_repeatable():
        return plan
    held = [sum(plan.stages[s].num_layers for s in plan.stages_of_rank(r)) for r in range(plan.num_ranks)]

    def fits(layers: Mapping[int, int]) -> list[bool]:
        timeline = simulate(recomputing(plan, layers), costs, check=False)
        return [p <= c * (1 + 1e-12) for p, c in zip(timeline.peak_bytes, timeline.capacity_bytes, strict=True)]

    low, high = [0] * plan.num_ranks, list(held)
    fitting = fits(dict(enumerate(low)))
    if all(fitting):
        return plan
    high = [0 if ok else h for ok, h in zip(fitting, held, strict=True)]
    if not all(fits(dict(enumerate(high)))):
        return recomputing(plan)
    while any(h - w > 1 for w, h in zip(low, high, strict=True)):
        middle = [(w + h) // 2 if h - w > 1 else h for w, h in zip(low, high, strict=True)]
        for r, ok in enumerate(fits(dict(enumerate(middle)))):
            if high[r] - low[r] > 1:
                low[r], high[r] = (low[r], middle[r]) if ok else (middle[r], high[r])
    return recomputing(plan, dict(enumerate(high)))


class Price(Protocol):
    """Costs under a mode of recomputation (none, selective, full) and, with full, a number of layers."""

    def __call__(self, mode: str, layers: int | None = None, /) -> CostTable: ...


def plan_under(mode: str, build: Callable[[CostTable], Plan], price: Price) -> tuple[Plan, CostTable]:
    """A system's plan under a mode of recomputation, and the costs to price it with.

    Whole layers are recomputed one at a time inside the backward, as Megatron, FSDP and Hugging Face do it: a matter
    of prices, not of the plan's ops. `auto` takes the first that fits: nothing, selective recomputation, beyond it as
    few whole layers as do, then all. A plan that recomputes by itself is left alone.
    """
    if mode != "auto":
        costs = price(mode)
        return build(costs), costs
    for step in ("none", "selective"):
        costs = price(step)
        plan = build(costs)
        if recomputes(plan) or simulate(plan, costs, check=False).fits:
            return plan, costs
    layers = plan.num_layers - 2
    costs = price("full")
    plan = build(costs)
    if layers < 2 or not simulate(plan, costs, check=False).fits:
        return plan, costs
    low, high, found = 0, layers, (plan, costs)
    while high - low > 1:
        middle = (low + high) // 2
        costs = price("full", middle)
        plan = build(costs)
        if simulate(plan, costs, check=False).fits:
            high, found = middle, (plan, costs)
        else:
            low = middle
    return found

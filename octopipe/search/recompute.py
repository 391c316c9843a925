"""How much must be recomputed to fit: in the costs of a set-up, or as R ops in a finished plan.

Knows: how many layers must be recomputed to fit in memory, and how R ops are inserted into orders. Does not know: what
recomputation costs (`analytic/`, `price.py`), or systems that decide it themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline


def recomputing(plan: Plan, layers: Mapping[int, int] | None = None, *, head: bool = False) -> Plan:
    """The plan with the first `layers[rank]` layers of every rank recomputed (all of them where none are given), R
    right before the backward. The head is recomputed only if `head` asks for it: its backward follows its forward at
    once, so that nothing is gained."""
    stages = list(plan.stages)
    for rank in range(plan.num_ranks):
        left = plan.num_layers if layers is None else layers.get(rank, 0)
        for s in plan.stages_of_rank(rank):
            stage = stages[s]
            stop = min(stage.stop, plan.num_layers if head else plan.num_layers - 1)
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


def without_needless_recomputation(plan: Plan, costs: CostTable, timeline: Timeline) -> tuple[Plan, Timeline]:
    """The plan with no stage recomputed whose activations could be kept without making the step longer or the plan too
    large, and its timeline. A search does not avoid these: where a rank waits, R costs no time in its simulation. Plans
    with pairs, paths or activations in host memory stay as they are."""
    if plan.pairs or plan.forks or plan.offloads:
        return plan, timeline
    left = deque(number for number, stage in enumerate(plan.stages) if stage.recompute)
    refused = 0
    while refused < len(left):  # without one of them, another one that was needed may not be
        number = left.popleft()
        after = simulate(kept := _keeping(plan, number), costs, check=False)
        if after.fits >= timeline.fits and after.step_ms <= timeline.step_ms:
            plan, timeline, refused = kept, after, 0
        else:
            left.append(number)
            refused += 1
    return plan, timeline


def _keeping(plan: Plan, number: int) -> Plan:
    """The plan with one stage that keeps its activations."""
    stages, orders = list(plan.stages), plan.orders
    stages[number] = replace(stages[number], recompute=False)
    return replace(
        plan,
        stages=tuple(stages),
        orders=tuple(tuple(op for op in order if op.kind != "R" or op.stage != number) for order in orders),
    )


def checkpointed_per_stage(plan: Plan, layers: int) -> tuple[int, int]:
    """The least number of layers that, recomputed in every stage, are at least `layers` in all, and how many that is.
    Embedding and head are not recomputed."""
    blocks = [min(s.stop, plan.num_layers - 1) - max(s.first, 1) for s in plan.stages]
    total = [sum(min(each, max(n, 0)) for n in blocks) for each in range(max(blocks) + 1)]
    each = next((n for n, found in enumerate(total) if found >= layers), len(total) - 1)
    return each, total[each]


class Price(Protocol):
    """Costs under a mode of recomputation (none, selective, full) and, with full, a number of layers."""

    def __call__(self, mode: str, layers: int | None = None, /) -> CostTable: ...


PROBES = 6
"""How many numbers of recomputed layers are tried, evenly apart, where recomputing all of them does not fit."""
NEAR = 0.1
"""By which share of the memory recomputing all layers may be over it where that is done."""


def plan_under(mode: str, build: Callable[[CostTable], Plan], price: Price) -> tuple[Plan, CostTable]:
    """A system's plan under a mode of recomputation, and the costs to price it with.

    Whole layers are recomputed one at a time inside the backward, as Megatron, FSDP and Hugging Face do it: a matter
    of prices, not of the plan's ops. `auto` takes the first that fits: nothing, selective recomputation, beyond it as
    few whole layers as do, then all. A plan that recomputes by itself is left alone. Where nothing fits, the plan that
    recomputes all layers is returned.

    Recomputing more layers does not always need less memory: a layer that runs again needs its workspace on top of
    everything that is kept, so a few recomputed layers may fit where all of them do not.
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

    def made(number: int | None = None) -> tuple[Plan, CostTable, Timeline]:
        costs = price("full", number)
        plan = build(costs)
        return plan, costs, simulate(plan, costs, check=False)

    whole = best = made()
    low, high = 0, layers
    if not whole[2].fits:
        for number in _spread_numbers(layers) if _nearly_fits(whole[2]) else ():
            best = made(number)
            if best[2].fits:
                high = number
                break
            low = number
        if not best[2].fits:
            return whole[:2]
    while high - low > 1:
        middle = (low + high) // 2
        fewer = made(middle)
        if fewer[2].fits:
            high, best = middle, fewer
        else:
            low = middle
    return best[:2]


def _spread_numbers(layers: int) -> list[int]:
    """Numbers of layers between none and all of them, evenly apart.

    >>> _spread_numbers(61), _spread_numbers(3), _spread_numbers(1)
    ([9, 17, 26, 35, 44, 52], [1, 2], [])
    """
    return sorted({round(k * layers / (PROBES + 1)) for k in range(1, PROBES + 1)} - {0, layers})


def _nearly_fits(timeline: Timeline) -> bool:
    """Whether less workspace could make a plan fit. A plan that is far from it holds too much, whatever its workspace,
    and is not worth the time of further simulations."""
    both = zip(timeline.peak_bytes, timeline.capacity_bytes, strict=True)
    return all(peak <= (1.0 + NEAR) * capacity for peak, capacity in both)

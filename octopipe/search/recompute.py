"""How much must be recomputed to fit: as costs under a recomputation mode, or as R ops in a finished plan.

Knows: how many layers must be recomputed to fit in memory, and how R ops are inserted into orders. Does not know: what
recomputation costs (`analytic/`, `price.py`), or systems that decide it themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from octopipe.costs.table import CostTable
from octopipe.plans.pair_price import op_durations
from octopipe.plans.plan import F, Op, Plan, R
from octopipe.plans.price import stage_memory, static_bytes
from octopipe.simulation.simulator import changes_of_ops, simulate
from octopipe.simulation.timeline import Timeline


def recomputing(plan: Plan, layers: Mapping[int, int] | None = None, *, head: bool = False) -> Plan:
    """Return the plan with the first `layers[rank]` layers of every rank recomputed (all if `layers` is None), and R
    right before the backward. The last layer (the head) is recomputed only if `head` is True: its backward follows
    its forward at once, so recomputing it gains nothing."""
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
        for slot in plan.slots(rank):  # R of a pair's backward runs before the pair
            out += [Op(op.stage, "R", op.micro_batch) for op in slot if op.kind in "IB" and stages[op.stage].recompute]
            out += slot
        orders.append(tuple(out))
    return replace(plan, stages=tuple(stages), orders=tuple(orders))


def recomputes(plan: Plan) -> bool:
    return any(stage.recompute for stage in plan.stages)


def least_recomputing(plan: Plan, costs: CostTable) -> Plan:
    """Return the plan with the smallest number of recomputed layers per rank with which it fits.

    It is unchanged if it fits, recomputes already or has layers that must not run twice. If some rank does
    not fit even with all of its layers recomputed, the plan that recomputes all layers of all ranks is returned. The
    memory of a rank depends on its own layers alone, so the numbers of all ranks are bisected independently, in the
    same few simulations.
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


SIMULATED_OPS = 500_000
"""Maximum number of ops that are simulated to find out which stages need not recompute: a second or two of one core."""
SLACK = 1e-9
"""The share by which a sum of bytes may exceed the memory due to rounding; a simulation then decides exactly."""


def without_needless_recomputation(plan: Plan, costs: CostTable, timeline: Timeline) -> tuple[Plan, Timeline]:
    """Remove the recomputation of stages whose activations can be kept without a longer step and within memory; return
    the plan and its timeline. A search leaves such stages behind because R costs no time while its rank waits anyway.
    Plans with pairs, forks or activations in host memory are returned unchanged. If `SIMULATED_OPS` is reached first,
    some needless recomputation may be left."""
    if plan.pairs or plan.forks or plan.offloads or not recomputes(plan):
        return plan, timeline
    left = SIMULATED_OPS
    refused: set[int] = set()
    while together := _may_be_kept(plan, costs, refused):
        waiting, kept = [together], False
        while waiting and left > 0:
            stages = waiting.pop(0)
            fewer = _keeping(plan, stages)
            after = simulate(fewer, costs, check=False)
            left -= sum(map(len, fewer.orders))
            if after.fits >= timeline.fits and after.step_ms <= timeline.step_ms:
                plan, timeline, kept = fewer, after, True
            elif len(stages) == 1:
                refused.update(stages)
            else:
                half = len(stages) // 2
                waiting[:0] = [stages[:half], stages[half:]]
        if left <= 0:
            break
        if kept:  # without one of them, another one that was needed may not be
            refused.clear()
    return plan, timeline


def _may_be_kept(plan: Plan, costs: CostTable, refused: Collection[int]) -> list[int]:
    """Return the recomputing stages that could all keep their activations, judged by the orders alone. While an op
    runs, its rank holds at least what the ops before it left, at whatever times they run. In plans that fill their
    memory, this rules out most stages without a simulation."""
    t, static = plan.table(), static_bytes(plan, costs)
    at_start, at_end = changes_of_ops(plan, costs)
    memory = stage_memory(plan, costs)
    freed = (memory.activation - memory.after_forward)[t.stage, t.micro_batch]
    lasts = op_durations(plan, costs) > 0.0
    found = []
    for rank in range(plan.num_ranks):
        mine = slice(int(t.offsets[rank]), int(t.offsets[rank + 1]))
        before = np.cumsum(at_start[mine] + at_end[mine]) - at_end[mine]
        counts, limit = lasts[mine].copy(), (1 + SLACK) * costs.capacity_bytes(rank) - static[rank]
        for number in plan.stages_of_rank(rank):
            if not plan.stages[number].recompute or number in refused:
                continue
            own, kind = t.stage[mine] == number, t.kind[mine]
            again = own & (kind == R)
            more = np.cumsum(np.where(own & (kind == F), freed[mine], 0.0) - np.where(again, freed[mine], 0.0))
            held = (before + more)[counts & ~again]
            if held.max(initial=0.0) <= limit:
                before, counts = before + more, counts & ~again
                found.append(number)
    return sorted(found)


def _keeping(plan: Plan, numbers: Collection[int]) -> Plan:
    """Return the plan in which these stages keep their activations and have no R."""
    whole = set(numbers)
    stages = tuple(replace(s, recompute=False) if k in whole else s for k, s in enumerate(plan.stages))
    orders = (tuple(op for op in order if op.kind != "R" or op.stage not in whole) for order in plan.orders)
    return replace(plan, stages=stages, orders=tuple(orders))


def checkpointed_per_stage(plan: Plan, layers: int) -> tuple[int, int]:
    """Return the smallest number of layers to recompute in every stage so that at least `layers` are recomputed in all,
    and how many that is. Embedding and head are not recomputed."""
    blocks = [min(s.stop, plan.num_layers - 1) - max(s.first, 1) for s in plan.stages]
    total = [sum(min(each, max(n, 0)) for n in blocks) for each in range(max(blocks) + 1)]
    each = next((n for n, found in enumerate(total) if found >= layers), len(total) - 1)
    return each, total[each]


class Price(Protocol):
    """A function that returns the costs under a mode of recomputation (none, selective or full); for full, optionally
    with the number of layers that are recomputed."""

    def __call__(self, mode: str, layers: int | None = None, /) -> CostTable: ...


PROBES = 6
"""How many numbers of recomputed layers, evenly spaced, are tried if recomputing all layers does not fit."""
NEAR = 0.1
"""They are tried only if recomputing all layers exceeds the memory by at most this share of it."""


def plan_under(mode: str, build: Callable[[CostTable], Plan], price: Price) -> tuple[Plan, CostTable]:
    """Return a system's plan under a mode of recomputation, and the costs to price it with.

    Whole layers are recomputed one at a time inside the backward, as Megatron, FSDP and Hugging Face do: this changes
    the costs, not the ops of the plan. `auto` takes the first of these that fits: no recomputation, selective
    recomputation, the smallest number of whole layers that fits, all layers. A plan that has R ops of its own is
    returned as it is. If nothing fits, the plan that recomputes all layers is returned.

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
    """Return evenly spaced numbers of layers between 0 and `layers`, both excluded.

    >>> _spread_numbers(61), _spread_numbers(3), _spread_numbers(1)
    ([9, 17, 26, 35, 44, 52], [1, 2], [])
    """
    return sorted({round(k * layers / (PROBES + 1)) for k in range(1, PROBES + 1)} - {0, layers})


def _nearly_fits(timeline: Timeline) -> bool:
    """Whether every peak exceeds its memory limit by at most the share `NEAR`, so that less workspace could make the
    plan fit. Plans that need much more are not worth the time of further simulations."""
    both = zip(timeline.peak_bytes, timeline.capacity_bytes, strict=True)
    return all(peak <= (1.0 + NEAR) * capacity for peak, capacity in both)

"""Plans that use host memory: activations leave where memory is short, instead of being recomputed.

Knows: which stages of a plan must offload for it to fit, which recomputation host memory makes unnecessary, and how a
search with more memory than there is leads to plans that fit with offload. Does not know: when activations travel
(`simulation/host_moves.py`), or how plans are searched.

Lowering moves only what the link has time for, so that marking a stage never makes the predicted step longer; what
counts is whether the plan fits then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from octopipe.base.errors import DoesNotFitError, StoppedError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.search.result import Found, Step
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline

SearchMore = Callable[[CostTable, float], Found]
"""The default search, on these costs and for so many seconds."""
ROOMS = (1.3, 1.8, 3.0, math.inf)
"""How much memory the searches for plans to offload believe to have, in times of what there is."""


def offloading(plan: Plan, stages: Iterable[int]) -> Plan:
    """The plan with these stages' activations in host memory between F and backward; none of them recomputes."""
    chosen = set(stages)
    orders = plan.orders
    if any(plan.stages[s].recompute for s in chosen):
        orders = tuple(tuple(op for op in row if not (op.kind == "R" and op.stage in chosen)) for row in orders)
    return replace(
        plan,
        stages=tuple(
            replace(s, offload=True, recompute=False) if k in chosen else s for k, s in enumerate(plan.stages)
        ),
        orders=orders,
    )


def fitting(plan: Plan, costs: CostTable) -> tuple[Plan, Timeline] | None:
    """The plan with offload on the ranks where it does not fit otherwise; None where that does not suffice."""
    timeline = simulate(plan, costs, check=False)
    if timeline.fits:
        return plan, timeline
    over = {r for r, (p, c) in enumerate(zip(timeline.peak_bytes, timeline.capacity_bytes, strict=True)) if p > c}
    mine = [k for k, s in enumerate(plan.stages) if s.rank in over and s.first < s.stop and not s.recompute]
    plan = offloading(plan, mine)
    timeline = simulate(plan, costs, check=False)
    return (plan, timeline) if timeline.fits else None


def without_recomputing(plan: Plan, costs: CostTable) -> tuple[Plan, Timeline]:
    """The plan with as many recomputing stages as fit into host memory instead, those that take longest first."""
    best, timeline = plan, simulate(plan, costs, check=False)
    again = [k for k, s in enumerate(plan.stages) if s.recompute]
    cost = costs.layer_times("R")
    again.sort(key=lambda k: -float(cost[list(plan.stages[k].recomputed_layers)].sum()))
    rest = [k for k, s in enumerate(plan.stages) if not s.recompute and s.first < s.stop]
    for k in again:
        for also in ([], [s for s in rest if plan.stages[s].rank == plan.stages[k].rank]):
            tried = offloading(best, [k, *also])
            after = simulate(tried, costs, check=False)
            if after.fits and after.step_ms < timeline.step_ms:
                best, timeline = tried, after
                break
    return best, timeline


def with_offload(
    found: Found | None, costs: CostTable, *, budget_s: float, search: SearchMore, stopped: Callable[[], bool]
) -> Found | None:
    """What was found without host memory, or the fastest plan that fits with it; None where nothing fits."""
    best = found
    if found is not None:
        better = _taken(found, *without_recomputing(found.plan, costs), name="offload instead of recomputing")
        best = better or found
    limits = [b for b in costs.rank_memory_bytes if math.isfinite(b)]
    for room in ROOMS if limits else ():
        if stopped():
            break
        roomy = costs.replace(rank_memory_bytes=tuple(b * room for b in costs.rank_memory_bytes))
        if math.isinf(room):
            roomy = costs.replace(rank_memory_bytes=())
        try:
            more = search(roomy, budget_s / len(ROOMS))
        except DoesNotFitError:
            continue
        except StoppedError:
            break
        for plan in (more.plan, *more.finalists[:2]):
            made = fitting(plan, costs)
            if made is None:
                continue
            if best is None:
                best = replace(more, plan=made[0], timeline=made[1], finalists=[made[0]])
            else:
                best = _taken(best, *made, name=f"offload with {room:g} times the memory") or best
        if more.interrupted:
            return None if best is None else replace(best, interrupted=True)
    return best


def _taken(found: Found, plan: Plan, timeline: Timeline, *, name: str) -> Found | None:
    """The plan in the place of what was found, where it is faster."""
    before = found.timeline.step_ms
    if timeline.step_ms >= before * (1 - 1e-9):
        return None
    seconds = found.log[-1].seconds if found.log else 0.0
    step = Step(found.iterations, seconds, "schedule", name, before, timeline.step_ms, timeline.step_ms)
    return replace(found, plan=plan, timeline=timeline, log=[*found.log, step], finalists=[plan])


def offload_words(plan: Plan, timeline: Timeline, without_ms: float | None) -> str:
    """What host memory has brought, in a line."""
    if not plan.offloads or timeline.host is None:
        return "no plan that uses host memory was faster"
    gib = timeline.host_peak_bytes / 2**30
    compared = (
        "no plan was found that fits without it"
        if without_ms is None
        else f"{without_ms / timeline.step_ms:.3f}x the speed of the best plan found without it ({without_ms:.2f} ms)"
    )
    stages = sum(s.offload for s in plan.stages)
    return (
        f"activations of {stages} of {len(plan.stages)} stages go to host memory, up to {gib.max():.1f} GiB a rank: "
        f"{compared}"
    )

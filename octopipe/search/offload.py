"""Plans that use host memory: if memory is short, activations are offloaded instead of recomputed.

Knows: which stages of a plan must offload for it to fit, which recomputation offloading makes unnecessary, and how a
search with a larger memory limit leads to plans that fit with offloading. Does not know: when activations are copied
(`simulation/host_moves.py`), or how plans are searched.

Lowering copies only as much as the link can transfer in time, so marking a stage never makes the predicted step longer;
the question is only whether the plan then fits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from octopipe.base.errors import DoesNotFitError, OctoPipeError, StoppedError
from octopipe.costs.table import CostTable
from octopipe.plans.paths import Edge
from octopipe.plans.plan import Op, Plan, Stage
from octopipe.search.result import Found, Step
from octopipe.search.systems import build_plan
from octopipe.search.systems.interleaved import MOST_CHUNKS
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline

SearchMore = Callable[[CostTable, float], Found]
"""The default search: (costs, seconds) -> its result."""
SYSTEMS = ("interleaved", "1f1b", "breadth-first", "hanayo", "v-min", "v-half", "zb-h1", "zb-v", "gpipe")
"""Published systems whose plans are tried with offload."""
ROOMS = (1.3, 1.8, 3.0, math.inf)
"""Memory limits of the searches for plans to offload, as multiples of the real memory."""


def offloading(plan: Plan, stages: Iterable[int]) -> Plan:
    """Return the plan in which these stages keep their activations in host memory between F and backward, instead of
    recomputing them."""
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
    """Return the plan with all stages offloaded on the ranks that exceed their memory; None if it still does not fit.

    The activations of a stage are moved as a whole, so coarse stages need much memory on the device while they run. If
    they do not fit, the stages are divided into finer ones.
    """
    timeline = simulate(plan, costs, check=False)
    if timeline.fits:
        return plan, timeline
    over = {r for r, (p, c) in enumerate(zip(timeline.peak_bytes, timeline.capacity_bytes, strict=True)) if p > c}
    largest = max(s.num_layers for s in plan.stages)
    for layers in sorted({largest, -(-largest // 2), 1}, reverse=True):
        cut = finer(plan, layers)
        mine = [k for k, s in enumerate(cut.stages) if s.rank in over and s.first < s.stop and not s.recompute]
        made = offloading(cut, mine)
        timeline = simulate(made, costs, check=False)
        if timeline.fits:
            return made, timeline
    return None


def finer(plan: Plan, layers: int) -> Plan:
    """Divide stages into parts of at most this many layers, which run one after the other on the rank of the stage.
    Stages that recompute stay whole; plans with pairs or with shards of layers are returned unchanged."""
    if plan.pairs or plan.shards() or all(s.num_layers <= layers for s in plan.stages):
        return plan
    parts: list[list[int]] = []
    stages: list[Stage] = []
    for s in plan.stages:
        cuts = [*range(s.first, s.stop, s.num_layers if s.recompute else layers), s.stop]
        parts.append(list(range(len(stages), len(stages) + len(cuts) - 1)))
        stages += [replace(s, first=a, stop=b) for a, b in itertools.pairwise(cuts)]
    return replace(
        plan,
        stages=tuple(stages),
        orders=tuple(
            tuple(
                Op(part, op.kind, op.micro_batch)
                for op in row
                for part in (parts[op.stage] if op.kind in "FR" else reversed(parts[op.stage]))
            )
            for row in plan.orders
        ),
        routes=tuple(tuple(part for s in route for part in parts[s]) for route in plan.routes),
        edges=tuple(_edges(route, edges, parts) for route, edges in zip(plan.routes, plan.edges)),
    )


def _edges(route: Sequence[int], edges: Iterable[Edge], parts: Sequence[Sequence[int]]) -> tuple[Edge, ...]:
    """Return the edges of a route between the parts: edges between stages connect the last part of one with the first
    part of the next, and the parts of one stage are connected in sequence."""
    between = [(parts[a][-1], parts[b][0]) for a, b in edges]
    return (*between, *(pair for s in route for pair in itertools.pairwise(parts[s])))


def without_recomputing(plan: Plan, costs: CostTable) -> tuple[Plan, Timeline]:
    """Return the plan in which stages offload instead of recomputing, and its timeline. Recomputing stages are tried
    one by one, the slowest to recompute first, each alone and then with all stages of its rank that do not recompute; a
    change is kept if the plan then fits and is faster."""
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


def published(costs: CostTable, num_ranks: int, num_micro_batches: int) -> Iterator[Plan]:
    """Yield plans of published systems that hold each layer once and recompute nothing, built without a memory limit.
    Fused backwards are not split: what waits for W after I stays on the device, where host memory does not help."""
    free = costs.replace(rank_memory_bytes=())
    for name in SYSTEMS:
        most = min(MOST_CHUNKS, costs.num_layers // num_ranks) if name == "interleaved" else 0
        every: list[dict[str, Any]] = [{"chunks": v} for v in range(2, most + 1)]
        for options in every or [{}]:
            try:
                yield build_plan(name, free, num_ranks, num_micro_batches, **options)
            except OctoPipeError:
                continue


def with_offload(
    found: Found | None,
    costs: CostTable,
    num_ranks: int,
    num_micro_batches: int,
    *,
    budget_s: float,
    search: SearchMore,
    stopped: Callable[[], bool],
) -> Found | None:
    """Return the fastest of the plan found without host memory and the plans that fit with it; None if none fits.

    The plans tried are `found` with offload instead of recomputation, those of published systems, and those of
    searches with a larger memory limit (`ROOMS`), which share `budget_s`.
    """
    best = found
    if found is not None:
        better = _taken(found, *without_recomputing(found.plan, costs), name="offload instead of recomputing")
        best = better or found
    limits = [b for b in costs.rank_memory_bytes if math.isfinite(b)]
    for plan in published(costs, num_ranks, num_micro_batches) if limits else ():
        made = fitting(plan, costs)
        if made is None:
            continue
        name = f"{plan.extra.get('system')} with offload"
        if best is None:
            best = Found(plan=made[0], timeline=made[1], iterations=0, log=[], interrupted=False, finalists=[made[0]])
        else:
            best = _taken(best, *made, name=name) or best
    for room in ROOMS if limits else ():
        if stopped():
            break
        more_bytes = () if math.isinf(room) else tuple(b * room for b in costs.rank_memory_bytes)
        roomy = costs.replace(rank_memory_bytes=more_bytes)
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
    """Return the result with this plan in place of the one found before; None if the plan is not faster."""
    before = found.timeline.step_ms
    if timeline.step_ms >= before * (1 - 1e-9):
        return None
    seconds = found.log[-1].seconds if found.log else 0.0
    step = Step(found.iterations, seconds, "schedule", name, before, timeline.step_ms, timeline.step_ms)
    return replace(found, plan=plan, timeline=timeline, log=[*found.log, step], finalists=[plan])


def offload_words(plan: Plan, timeline: Timeline, without_ms: float | None) -> str:
    """Describe in one line which stages offload and what that has gained."""
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

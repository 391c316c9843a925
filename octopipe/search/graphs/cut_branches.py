"""Plans for layers that fork whose heads are split by vocabulary: the heads of all paths, each part on one rank.

Knows: that heads with a common weight are cut into the same parts on the same ranks, the places of the parts' ops in
their ranks' orders, and how a partition leaves room for the parts. Does not know: how plans with whole heads are found
(`branches.py`), or how a cut head runs (docs/cut-head.md).

The heads of a plan are cut as follows. When a head's forward ended, its parts run on their ranks, followed by the stage
that computes the loss; when the head's backward began, the backwards of the parts run. A second search for plans with
whole heads spreads the heads' work over all other layers, so that its partition leaves room for the parts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.op import Op, Stage
from octopipe.plans.plan import KINDS, Plan
from octopipe.search.graphs.branches import polished
from octopipe.search.result import Found, Step
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline

SPREAD = ("forward_ms", "input_ms", "weight_ms", "activation_bytes", "stash_bytes", "static_bytes")
FORWARD, OTHER = (0, 1, 2), 5
LOSS_BACK, PART_BACK = 3, 4
"""The order of ops that begin at the same time: forwards of whole stages, of parts and of the loss (FORWARD), then
backwards of the loss, of parts, and of whole stages (OTHER)."""
WHOLE_SHARE, SPREAD_SHARE = 0.4, 0.4
"""Shares of the time for plans with whole heads, and for a partition that leaves room for parts. The rest polishes."""
Judged = tuple[Plan, Timeline]
SearchWhole = Callable[[CostTable, float], Found]
Polish = Callable[[Judged], Judged]


def check_cut(costs: CostTable) -> None:
    """Raise an error if a head shares its weight with the embedding, which cannot be cut with it."""
    assert costs.graph is not None
    heads = costs.graph.ends
    for layers, _ in costs.graph.shared:
        if 0 in layers and set(layers) & set(heads):
            raise OctoPipeError(
                f"{costs.model}: its heads share their weight with the embedding, and an embedding whose output forks "
                "cannot be cut; leave --cut-head out"
            )


def search_cut(
    costs: CostTable, num_ranks: int, *, budget_s: float, seed: int, counted: bool, search: SearchWhole,
    search_bare: SearchWhole,
) -> tuple[Found, float]:  # fmt: skip
    """The best plan found whose heads are whole or cut, and the step time of the best one with whole heads.

    `search` finds plans with whole heads, `search_bare` those that hold each layer once and recompute nothing.
    `counted`: moves are counted, so the result does not depend on time.
    """
    check_cut(costs)
    until = None if counted else time.monotonic() + budget_s
    whole = search(costs, budget_s * WHOLE_SHARE)
    found = with_cut_branches(
        whole, costs, num_ranks, budget_s=budget_s * SPREAD_SHARE, search_bare=search_bare,
        polish=lambda one: polished(one, costs, seed=seed, until=until),
    )  # fmt: skip
    return found, whole.timeline.step_ms


def with_cut_branches(
    whole: Found, costs: CostTable, num_ranks: int, *, budget_s: float, search_bare: SearchWhole, polish: Polish
) -> Found:
    """The given result with whole heads, or a faster plan whose heads are cut, with the effort of the search added."""
    assert costs.graph is not None
    heads = costs.graph.ends
    if num_ranks < 2 or whole.interrupted:
        return whole
    starts = [(whole.plan, costs)]
    try:
        spread = spread_heads(costs, heads, num_ranks)
        found = search_bare(spread, budget_s)
        starts.append((found.plan, spread))
        effort = whole.iterations + found.iterations
        whole = replace(whole, iterations=effort, interrupted=whole.interrupted or found.interrupted)
    except OctoPipeError:  # no plan fits with this partition, but parts of the heads of `whole` may
        pass
    made = []
    for plan, prices in starts:
        for count in sorted({2, num_ranks}):
            cut = cut_plan(plan, prices, heads, count)
            if cut is not None and (after := simulate(cut, costs)).fits:
                made.append((cut, after))
    made.sort(key=lambda one: one[1].step_ms)
    if not made:
        return whole
    best = polish(made[0])
    before, after_ms = whole.timeline.step_ms, best[1].step_ms
    if after_ms >= before:
        return whole
    seconds = whole.log[-1].seconds if whole.log else 0.0
    step = Step(whole.iterations, seconds, "schedule", "cut heads", before, after_ms, after_ms)
    return replace(whole, plan=best[0], timeline=best[1], log=[*whole.log, step], finalists=[best[0]])


def spread_heads(costs: CostTable, heads: tuple[int, ...], parts: int) -> CostTable:
    """The costs with 1/`parts` of every head's work and memory, and the rest of it spread over all layers but the
    embedding and the heads, in proportion to their times."""
    inner = np.array([k not in (0, *heads) for k in range(costs.num_layers)])
    share = np.where(inner, costs.layer_ms, 0.0)
    share = share / share.sum() if share.sum() > 0 else inner / max(1, int(inner.sum()))
    changed: dict[str, object] = {}
    for name in SPREAD:
        values = getattr(costs, name).copy()
        moved = float(values[list(heads)].sum()) * (parts - 1) / parts
        values[list(heads)] /= parts
        changed[name] = values + moved * share
    changed["stash_bytes"] = np.minimum(changed["stash_bytes"], changed["activation_bytes"])  # type: ignore[call-overload]
    assert costs.graph is not None
    shared = tuple((layers, held / parts if set(layers) <= set(heads) else held) for layers, held in costs.graph.shared)
    return costs.replace(graph=replace(costs.graph, shared=shared), segments=None, **changed)


def _ranks_for(plan: Plan, timeline: Timeline, heads: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The `count` ranks with the least work, not counting the heads."""
    spans = timeline.spans
    work = np.zeros(plan.num_ranks)
    body = np.array([stage.first not in heads for stage in plan.stages])[spans.stage]
    np.add.at(work, spans.rank[body], (spans.end_ms - spans.start_ms)[body])
    return tuple(sorted(np.argsort(work, kind="stable")[:count].tolist()))


def cut_plan(plan: Plan, costs: CostTable, heads: tuple[int, ...], count: int) -> Plan | None:
    """The plan with every head cut into so many parts, on the ranks with the least other work; None if it holds layers
    twice or recomputes, or if the result is not valid. Ops are sorted by the times that they have with these costs."""
    if len(plan.routes) > 1 or plan.replicas() or any(stage.recompute for stage in plan.stages):
        return None
    plan = _heads_apart(replace(plan, pairs=frozenset()), heads)
    timeline = simulate(plan, costs)
    mine = {s: stage.first for s, stage in enumerate(plan.stages) if stage.first in heads}
    ranks = _ranks_for(plan, timeline, heads, count)
    stages, number, parts, loss = _cut_stages(plan, mine, ranks)
    rows: list[list[tuple[float, int, int, Op]]] = [[] for _ in range(plan.num_ranks)]
    place = {op: k for order in plan.orders for k, op in enumerate(order)}
    spans, done = timeline.spans, dict[tuple[int, int], float]()
    ops = [(int(spans.stage[k]), KINDS[spans.kind[k]], int(spans.micro_batch[k])) for k in range(spans.stage.size)]
    for k, (s, kind, m) in enumerate(ops):
        if s in mine and kind == "F":
            done[s, m] = float(spans.end_ms[k])
    for k, (s, kind, m) in enumerate(ops):
        start = float(spans.start_ms[k])
        if s not in mine:
            turn = FORWARD[0] if kind == "F" else OTHER
            rows[int(spans.rank[k])].append((start, turn, place[Op(s, kind, m)], Op(number[s], kind, m)))
            continue
        at = done[s, m]
        if kind == "F":
            here = rows[stages[loss[s]].rank]
            here += [(at, FORWARD[2], 0, Op(loss[s], "F", m)), (at, LOSS_BACK, 0, Op(loss[s], "B", m))]
        for part in parts[s]:
            turn, when = (FORWARD[1], at) if kind == "F" else (PART_BACK, max(at, start))
            for one in "IW" if kind == "B" else kind:
                rows[stages[part].rank].append((when, turn, 0, Op(part, one, m)))
    cut = replace(
        plan,
        stages=tuple(stages),
        orders=tuple(tuple(op for *_, op in sorted(row, key=lambda entry: entry[:3])) for row in rows),
        routes=(tuple(new for s in plan.routes[0] for new in ((*parts[s], loss[s]) if s in mine else (number[s],))),),
        edges=(_cut_edges(plan, mine, number, parts, loss),),
    )
    return cut if not cut.problems() else None


def _heads_apart(plan: Plan, heads: tuple[int, ...]) -> Plan:
    """The plan with every head in a stage of its own, on the same rank, with its ops next to those of the layers with
    which it shared a stage."""
    stages: list[Stage] = []
    parts: list[list[int]] = []
    for stage in plan.stages:
        cuts = [stage.first, *(k for k in heads if stage.first < k < stage.stop), stage.stop]
        parts.append(list(range(len(stages), len(stages) + len(cuts) - 1)))
        stages += [replace(stage, first=first, stop=stop) for first, stop in itertools.pairwise(cuts)]

    def made(op: Op) -> list[Op]:
        mine = parts[op.stage]
        return [Op(s, op.kind, op.micro_batch) for s in (mine if op.kind == "F" else reversed(mine))]

    inner = tuple(pair for mine in parts for pair in itertools.pairwise(mine))
    return replace(
        plan,
        stages=tuple(stages),
        orders=tuple(tuple(new for op in order for new in made(op)) for order in plan.orders),
        routes=(tuple(new for s in plan.routes[0] for new in parts[s]),),
        edges=((*((parts[a][-1], parts[b][0]) for a, b in plan.edges[0]), *inner),),
    )


def _cut_stages(
    plan: Plan, heads: dict[int, int], ranks: tuple[int, ...]
) -> tuple[list[Stage], dict[int, int], dict[int, list[int]], dict[int, int]]:
    """The stages after heads were cut, and three maps from the number of an old stage: to its new number, to the parts
    of a head, and to the stage of a head's loss."""
    stages: list[Stage] = []
    number: dict[int, int] = {}
    parts: dict[int, list[int]] = {}
    loss: dict[int, int] = {}
    for s, stage in enumerate(plan.stages):
        if s not in heads:
            number[s] = len(stages)
            stages.append(stage)
            continue
        parts[s] = list(range(len(stages), len(stages) + len(ranks)))
        stages += [replace(stage, rank=rank, shard=(k, len(ranks))) for k, rank in enumerate(ranks)]
        loss[s] = len(stages)
        stages.append(Stage(first=stage.stop, stop=stage.stop, rank=stage.rank))
    return stages, number, parts, loss


def _cut_edges(
    plan: Plan, heads: dict[int, int], number: dict[int, int], parts: dict[int, list[int]], loss: dict[int, int]
) -> tuple[tuple[int, int], ...]:
    out: list[tuple[int, int]] = []
    for a, b in plan.edges[0]:
        out += [(number[a], part) for part in parts[b]] if b in heads else [(number[a], number[b])]
    return (*out, *((part, loss[s]) for s in heads for part in parts[s]))

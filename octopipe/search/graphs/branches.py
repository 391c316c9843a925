"""Plans for layers that fork and join: found for the layers as a chain, then improved along their graph.

Knows: that plans of the chain become plans of the graph, that stages of branches may go to any rank, and local search
on the orders. Does not know: how plans of chains are found, or how they are converted (`plans/branches`).

The default search finds plans for chains, and the layers of a graph are numbered so that they form one. The stages of
such a plan are reconnected as the graph says, which can only shorten the step. Then every stage of a branch is tried on
every rank, and in the rest of the time single ops are moved within their ranks' orders.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from octopipe.base.errors import DoesNotFitError, OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.branches import along_graph
from octopipe.plans.paths import neighbours
from octopipe.plans.plan import KINDS, Op, Plan
from octopipe.plans.price import boundary_bytes, stage_memory, stage_times, static_bytes, workspace_bytes
from octopipe.search.graphs.layout import Priced, Prices
from octopipe.search.graphs.orders import Waits, follow, polish
from octopipe.search.result import Found, Step
from octopipe.search.tuner.core.problem import make_rng
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline

SearchChain = Callable[[CostTable, float], Found]
BRANCH_SHARE = 0.25
"""Share of the time for improving plans of the graph; the rest is for the search for chains."""
TRIED, TIGHTER, ATTEMPTS = 3, 0.9, 4
"""The TRIED best plans of the chain become plans of the graph. If none of them fits, chains are searched again with the
share TIGHTER of the memory, in at most ATTEMPTS searches."""
HOT, COLD, MOVES = 4e-4, 2e-5, 200
"""Temperature of polishing at the start and at the end, as a share of the makespan; moves between two looks at the
clock."""
POLISH_MOVES = 200
"""If moves are counted instead of time, polishing makes this many times `MOVES` moves."""
Judged = tuple[Plan, Timeline]


def check_graph(costs: CostTable, target: str, start: Plan | None) -> None:
    """Raise an error for a runtime or a start that searches along a graph of layers do not support."""
    what, why = f"--for {target}" if target != "octopipe" else "", "that runtime runs chains"
    if not what and start is not None and start.forks:
        what, why = "--start", "the search begins with chains"
    if what:
        raise OctoPipeError(f"{costs.model} has layers that fork (multi-token prediction), and {why}; leave {what} out")


def search_graph(
    costs: CostTable, num_ranks: int, *, budget_s: float, seed: int, counted: bool, search_chain: SearchChain
) -> Found:
    """The best plan found along the graph of the costs. `counted`: moves are counted, so the result does not depend on
    time."""
    began = time.monotonic()
    chain, searched = costs.as_chain().replace(segments=costs.segments), budget_s * (1.0 - BRANCH_SHARE)
    for attempt in range(ATTEMPTS):
        found = search_chain(chain, searched if attempt == 0 else searched / ATTEMPTS)
        plans = [found.plan, *(plan for plan in found.finalists if plan is not found.plan)][:TRIED]
        judged = [(plan, simulate(plan, costs)) for plan in (along_graph(plan, costs.graph) for plan in plans)]
        fitting = sorted((one for one in judged if one[1].fits), key=lambda one: one[1].step_ms)
        if fitting:
            break
        room = tuple(TIGHTER * chain.capacity_bytes(r) for r in range(num_ranks))
        chain = chain.replace(rank_memory_bytes=room)
    else:
        raise DoesNotFitError(
            f"{costs.model}: no plan was found that has memory for the tensors that pass between the branches of its "
            "path (without them, plans fit); give more memory, or a smaller --micro-batch-size"
        )
    best = fitting[0]
    before = best[1].step_ms
    if not found.interrupted:
        until = began + budget_s

        def over() -> bool:
            return not counted and time.monotonic() > until

        best = min((_placed(one, costs, over) for one in fitting), key=lambda one: one[1].step_ms)
        best = polished(best, costs, seed=seed, until=None if counted else until)
    seconds = time.monotonic() - began
    step = Step(found.iterations, seconds, "schedule", "branches", before, best[1].step_ms, best[1].step_ms)
    return replace(found, plan=best[0], timeline=best[1], log=[*found.log, step], finalists=[best[0]])


def _branches(plan: Plan, costs: CostTable) -> list[int]:
    """The stages that begin after the last layer whose output forks, or from the first head on."""
    assert costs.graph is not None
    consumers: dict[int, int] = {}
    for row in costs.graph.takes:
        for k in row:
            consumers[k] = consumers.get(k, 0) + 1
    fork = max((k for k, count in consumers.items() if count > 1 and k > 0), default=costs.num_layers)
    first = next((k for k in costs.graph.ends if k > 0), costs.num_layers)
    return [s for s, stage in enumerate(plan.stages) if stage.first > min(fork, first - 1)]


def placed(plan: Plan, costs: CostTable, over: Callable[[], bool]) -> Plan:
    """A plan of the graph with every stage of a branch on the rank where it is best, as far as this was found before
    `over` returned True. If no move of a stage is faster and fits, the plan is returned as it is."""
    return _placed((plan, simulate(plan, costs)), costs, over)[0]


def _placed(best: Judged, costs: CostTable, over: Callable[[], bool] = lambda: False) -> Judged:
    """Move the stages of branches, one at a time, to ranks where the step is shorter and memory suffices, until no move
    helps. Plans with copies, several routes or pairs are returned unchanged."""
    if best[0].replicas() or len(best[0].routes) > 1 or best[0].pairs:
        return best
    better = True
    while better:
        better = False
        for s in _branches(best[0], costs):
            for rank in range(best[0].num_ranks):
                if rank == best[0].stages[s].rank:
                    continue
                if over():
                    return best
                plan = _moved(best, s, rank)
                timeline = simulate(plan, costs)
                if timeline.fits and timeline.step_ms < best[1].step_ms - 1e-9:
                    best, better = (plan, timeline), True
    return best


def _moved(judged: Judged, stage: int, rank: int) -> Plan:
    """The plan with a stage on another rank, where its ops are sorted in by the times at which they ran before. The
    plan itself if that is not valid."""
    plan, spans = judged[0], judged[1].spans
    rows: list[list[tuple[float, float, Op]]] = [[] for _ in range(plan.num_ranks)]
    for k in range(spans.stage.size):
        op = Op(int(spans.stage[k]), KINDS[spans.kind[k]], int(spans.micro_batch[k]))
        at = rank if op.stage == stage else int(spans.rank[k])
        rows[at].append((float(spans.start_ms[k]), float(spans.end_ms[k]), op))
    stages = tuple(replace(one, rank=rank) if s == stage else one for s, one in enumerate(plan.stages))
    depth = {s: k for k, s in enumerate(plan.routes[0])}

    def turn(entry: tuple[float, float, Op]) -> tuple[float, float, int]:
        start, end, op = entry  # sort ops that take no time by their dependencies
        return start, end, depth[op.stage] if op.kind == "F" else len(depth) - depth[op.stage]

    orders = tuple(tuple(op for *_, op in sorted(row, key=turn)) for row in rows)
    moved = replace(plan, stages=stages, orders=orders)
    return moved if not moved.problems() else plan


def priced(plan: Plan, costs: CostTable) -> Priced:
    """The costs of a plan as the kernels of `orders` read them."""
    stages, count = len(plan.stages), plan.num_micro_batches
    prices = Prices(costs, plan.num_ranks, count)
    times, memory = stage_times(plan, costs), stage_memory(plan, costs)
    before, after = neighbours(plan.routes, plan.edges, stages)
    rank = np.array([s.rank for s in plan.stages], np.int64)
    share = np.ones((len(plan.routes), stages))
    for path, row in enumerate(after):
        for s in range(stages):
            share[path, s] = max(1, len({int(rank[t]) for t in row[s] if t >= 0} - {int(rank[s])}))
    space, room = np.zeros(plan.num_ranks), np.array([costs.capacity_bytes(r) for r in range(plan.num_ranks)])
    np.maximum.at(space, rank, workspace_bytes(plan, costs))
    turns, counts = np.zeros((stages, count), np.int64), np.zeros(stages, np.int64)
    contiguous = np.ascontiguousarray
    return Priced(
        contiguous(times[[KINDS.index(kind) for kind in "FIW"]]), contiguous(memory.activation),
        contiguous(memory.stash), contiguous(boundary_bytes(plan, costs)[0]), rank, before.astype(np.int64),
        after.astype(np.int64), share, room - static_bytes(plan, costs) - space, np.zeros(stages),
        np.asarray(plan.route_of_micro_batch, np.int64), turns, counts, prices.latency, prices.per_byte,
    )  # fmt: skip


def polished(best: Judged, costs: CostTable, *, seed: int, until: float | None) -> Judged:
    """The plan after moves of single ops; as given if it recomputes, has pairs or a B other than that of a loss, or if
    nothing better fits. The B of a loss, which has no weights, is moved as an I. `until`: the time of the monotonic
    clock at which polishing ends, or None if moves are counted."""
    plan = best[0]
    if plan.pairs:
        return best
    losses = {s for s, stage in enumerate(plan.stages) if stage.first == stage.stop}
    if any(op.kind not in "FIW" and op.stage not in losses for order in plan.orders for op in order):
        return best
    p, size, count = priced(plan, costs), len(plan.stages), plan.num_micro_batches
    needed = np.zeros((2, size, count), np.int64)
    path = np.asarray(plan.route_of_micro_batch)
    needed[0] = (p.before >= 0).sum(axis=2)[path].T
    needed[1] = 1 + (p.after >= 0).sum(axis=2)[path].T
    waits = Waits(needed, np.zeros_like(needed), np.zeros(needed.shape))
    lengths = np.array([len(order) for order in plan.orders], np.int64)
    seq = np.zeros((plan.num_ranks, int(lengths.max(initial=1))), np.int64)
    for r, order in enumerate(plan.orders):
        kinds = [KINDS.index("I" if op.kind == "B" else op.kind) for op in order]
        seq[r, : len(order)] = [(k * size + op.stage) * count + op.micro_batch for k, op in zip(kinds, order)]
    tidy, rng = seq.copy(), make_rng(seed, size)
    now = least = float(follow(p, seq, lengths, waits, math.inf))
    began, done = time.monotonic(), 0
    while now < math.inf:
        passed = done / POLISH_MOVES if until is None else (time.monotonic() - began) / max(until - began, 1e-9)
        if passed >= 1.0:
            break
        heat = HOT * (COLD / HOT) ** passed * least
        now, least = polish(p, seq, tidy, lengths, waits, rng, MOVES, heat, now, least)
        done += 1
    orders = []
    for r in range(plan.num_ranks):
        codes = [divmod(code, count) for code in tidy[r, : lengths[r]].tolist()]
        ops = [Op(rest % size, KINDS[rest // size], m) for rest, m in codes]
        orders.append(tuple(op._replace(kind="B") if op.stage in losses and op.kind == "I" else op for op in ops))
    better = replace(plan, orders=tuple(orders))
    if better.problems():
        return best
    after = simulate(better, costs)
    return (better, after) if after.fits and after.step_ms < best[1].step_ms else best


__all__ = ["check_graph", "placed", "polished", "priced", "search_graph"]

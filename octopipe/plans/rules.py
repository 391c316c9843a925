"""Validity rules for plans; each problem is one line that names the op, the rank and the remedy.

Knows: how stages, routes and orders must fit together. Does not know: files, costs, transfers.

Valid plans are recognised by array operations, because searches check plans of 100,000 ops. Only if that check fails is
the problem located op by op.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from octopipe.base.graph import find_cycle
from octopipe.base.limits import plan_too_large
from octopipe.plans.op import KINDS, B, F, I, Op, R, W, with_rank_order
from octopipe.plans.pair_rules import pair_problems
from octopipe.plans.paths import Edge, path_problems, too_many_edges

if TYPE_CHECKING:
    from octopipe.plans.plan import Plan

MAX_PROBLEMS = 20


def problems(plan: Plan) -> list[str]:
    """All problems of the plan; empty if it can run."""
    return _structure_problems(plan) or pair_problems(plan) or _op_problems(plan) or _order_problems(plan)


def _structure_problems(plan: Plan) -> list[str]:
    out = plan_too_large(plan) + too_many_edges(plan.edges)
    if out:
        return out
    for name in ("num_layers", "num_ranks", "num_micro_batches"):
        if getattr(plan, name) < 1:
            out.append(f"{name} is {getattr(plan, name)}; it must be at least 1")
    if not plan.stages:
        out.append("there are no stages; give at least one")
    if len(plan.orders) != plan.num_ranks:
        out.append(f"orders has {len(plan.orders)} rows for {plan.num_ranks} ranks; give one row per rank")
    behind = {plan.num_layers, *(s.stop for s in plan.stages if s.shard)}
    for i, s in enumerate(plan.stages):
        is_loss = s.first == s.stop and s.stop in behind and s.shard is None and not s.recompute
        if not 0 <= s.first < s.stop <= plan.num_layers and not is_loss:
            out.append(f"stage {i} has layers [{s.first}, {s.stop}); they must lie inside [0, {plan.num_layers})")
        if not 0 <= s.rank < plan.num_ranks:
            out.append(f"stage {i} is on rank {s.rank}; ranks go from 0 to {plan.num_ranks - 1}")
        again = () if isinstance(s.recompute, bool) else s.recompute
        if any(not s.first <= k < s.stop for k in again) or len(set(again)) != len(again):
            out.append(f"stage {i} recomputes layers {list(again)[:8]}; name some of [{s.first}, {s.stop}) once")
        if s.offload and (s.recompute or s.first == s.stop):
            why = "recomputes as well" if s.recompute else "has no layers"
            out.append(f"stage {i} offloads its activations and {why}; set its offload to false")
        if s.shard is not None and not 0 <= s.shard[0] < s.shard[1]:
            out.append(f"stage {i} is shard {list(s.shard)}; give [k, n] with 0 <= k < n")
    if out:
        return out[:MAX_PROBLEMS]
    if len(plan.route_of_micro_batch) != plan.num_micro_batches:
        out.append(
            f"route_of_micro_batch has {len(plan.route_of_micro_batch)} entries for "
            f"{plan.num_micro_batches} micro-batches; give one route per micro-batch"
        )
    for m, r in enumerate(plan.route_of_micro_batch):
        if not 0 <= r < len(plan.routes):
            out.append(f"micro-batch {m} takes route {r}; routes go from 0 to {len(plan.routes) - 1}")
    if plan.edges and len(plan.edges) != len(plan.routes):
        return [f"edges has {len(plan.edges)} rows for {len(plan.routes)} paths; give one row per path"]
    used: set[int] = set()
    held = [(s.first, s.stop, s.shard) for s in plan.stages]
    for r, route in enumerate(plan.routes):
        out += path_problems(r, route, plan.edges[r], held) if plan.edges else _route_problems(plan, r, route)
        out += [] if out else _loss_problems(plan, r, route)
        used.update(route)
    for i in range(len(plan.stages)):
        if i not in used:
            out.append(f"stage {i} is on no route; add it to a route or remove it")
    return (out or _layers_nowhere(plan) or _held_differently(plan))[:MAX_PROBLEMS]


def _layers_nowhere(plan: Plan) -> list[str]:
    """Return the problem of layers that no stage holds: a path may leave layers out, but somebody must train them."""
    held = np.zeros(plan.num_layers, bool)
    for s in plan.stages:
        held[s.first : s.stop] = True
    gone = np.flatnonzero(~held)
    return [f"no stage holds layer {gone[0]} of {plan.num_layers}; add it to a stage of a path"] if gone.size else []


def _held_differently(plan: Plan) -> list[str]:
    """Return the problem of layers that some paths split and others do not, or that are split twice: their gradients
    could not be summed, because every row of a split layer exists once."""
    held: dict[int, dict[Edge | None, tuple[int, int]]] = {}
    for i, s in enumerate(plan.stages if plan.shards() else ()):
        for layer in range(s.first, s.stop):
            known = held.setdefault(layer, {})
            count, rank = (None if s.shard is None else s.shard[1]), s.rank
            other = next((k for k in known if (None if k is None else k[1]) != count), s.shard)
            if other != s.shard:
                how = ["whole" if k is None else f"in {k[1]} shards" for k in (other, s.shard)]
                return [
                    f"layer {layer} is {how[0]} in stage {known[other][1]} and {how[1]} in stage {i}; split it alike "
                    "on all paths"
                ]
            if s.shard is not None and known.setdefault(s.shard, (rank, i))[0] != rank:
                return [
                    f"stages {known[s.shard][1]} and {i} are the same shard of layer {layer} on ranks "
                    f"{known[s.shard][0]} and {rank}; keep every shard on one rank"
                ]
            known.setdefault(s.shard, (rank, i))
    return []


def _route_problems(plan: Plan, number: int, route: tuple[int, ...]) -> list[str]:
    unknown = [s for s in route if not 0 <= s < len(plan.stages)]
    if unknown:
        return [f"route {number} names stage {unknown[0]}; stages go from 0 to {len(plan.stages) - 1}"]
    if not route:
        return [f"route {number} is empty; list its stages"]
    cut = [s for s in route if plan.stages[s].shard is not None]
    if cut:
        return [f"stage {cut[0]} is a shard, but route {number} is a chain; give the path's edges"]
    reached = 0
    for s in route:
        if plan.stages[s].first != reached:
            return [
                f"route {number}: stage {s} starts at layer {plan.stages[s].first} but layer {reached} comes next; "
                "stages of a route must cover the layers without gap or overlap"
            ]
        reached = plan.stages[s].stop
    if reached != plan.num_layers:
        return [f"route {number} ends at layer {reached} of {plan.num_layers}; add the missing layers"]
    return []


def _loss_problems(plan: Plan, number: int, route: tuple[int, ...]) -> list[str]:
    """Return the problems of stages without layers: such a stage must end the path, and take all shards of the layer
    before it and nothing else. A layer has one such stage at most."""
    edges = plan.edges[number] if plan.edges else ()
    behind: dict[int, list[int]] = {}
    for s in route:
        if plan.stages[s].first == plan.stages[s].stop:
            behind.setdefault(plan.stages[s].stop, []).append(s)
    for layer, found in behind.items():
        if len(found) > 1:
            return [f"path {number}: stages {found[:6]} all compute the loss of layer {layer - 1}; keep one"]
    for s in route:
        layer = plan.stages[s].stop - 1
        if plan.stages[s].first <= layer:
            continue
        into = {a for a, b in edges if b == s}
        parts = {k for k in route if plan.stages[k].shard and plan.stages[k].first <= layer < plan.stages[k].stop}
        if into != parts or any(a == s for a, _ in edges):
            return [f"path {number}: stage {s} has no layers; let it end the path behind the shards of layer {layer}"]
    return []


def _ops_are_right(plan: Plan) -> bool:
    """Whether `_op_problems` would be empty, computed on arrays, because plans of 100,000 ops are checked often."""
    count = sum(map(len, plan.orders))
    try:
        columns = [np.fromiter((op[i] for order in plan.orders for op in order), np.int64, count) for i in (0, 2)]
    except (OverflowError, TypeError, ValueError):
        return False
    for values, size in zip(columns, (len(plan.stages), plan.num_micro_batches)):
        if count and not 0 <= values.min() <= values.max() < size:
            return False
    t = plan.table()
    has = t.index >= 0
    members = np.zeros((len(plan.routes), len(plan.stages)), bool)
    for number, route in enumerate(plan.routes):
        members[number, list(route)] = True
    passed = members[np.array(plan.route_of_micro_batch, np.int64)].T
    homes = np.array([s.rank for s in plan.stages])
    again = np.array([bool(s.recompute) for s in plan.stages])[:, None]
    whole = (has[B] & ~has[I] & ~has[W]) | (~has[B] & has[I] & has[W])
    return bool(
        np.count_nonzero(has) == count
        and (homes[t.stage] == t.rank).all()
        and (has[F] == passed).all()
        and (whole == passed).all()
        and not (has.any(axis=0) & ~passed).any()
        and not (has[R] & ~again).any()
    )


def _op_problems(plan: Plan) -> list[str]:
    if _ops_are_right(plan):
        return []
    out: list[str] = []
    seen: dict[Op, int] = {}
    members = [set(route) for route in plan.routes]
    for rank, order in enumerate(plan.orders):
        for op in order:
            if not 0 <= op.stage < len(plan.stages) or not 0 <= op.micro_batch < plan.num_micro_batches:
                out.append(
                    f"rank {rank} runs {op}, but stages go to {len(plan.stages) - 1} and micro-batches to "
                    f"{plan.num_micro_batches - 1}; remove it"
                )
            elif op in seen:
                out.append(f"rank {rank} runs {op} and rank {seen[op]} does too; each op runs once: remove one")
            elif plan.stages[op.stage].rank != rank:
                home = plan.stages[op.stage].rank
                out.append(f"rank {rank} runs {op}, but stage {op.stage} is on rank {home}; move it to rank {home}")
            elif op.stage not in members[plan.route_of_micro_batch[op.micro_batch]]:
                out.append(f"rank {rank} runs {op}, but micro-batch {op.micro_batch} does not pass that stage")
            seen[op] = rank
            if len(out) >= MAX_PROBLEMS:
                return out
    for m in range(plan.num_micro_batches):
        for s in plan.routes[plan.route_of_micro_batch[m]]:
            out += _cell_problems(plan, s, m, seen)
            if len(out) >= MAX_PROBLEMS:
                return out
    return out


def _cell_problems(plan: Plan, s: int, m: int, seen: Mapping[Op, int]) -> list[str]:
    """Return the problems of the set of ops of one stage and micro-batch: missing, conflicting or needless ops."""
    rank = plan.stages[s].rank
    has = {kind for kind in KINDS if Op(s, kind, m) in seen}
    out = []
    if "F" not in has:
        out.append(f"rank {rank} never runs {s}F{m}; add it")
    if "B" in has and has & {"I", "W"}:
        extra = next(k for k in "IW" if k in has)
        out.append(f"rank {rank} runs both {s}B{m} and {s}{extra}{m}; B is I and W in one: keep one form")
    elif "B" not in has:
        if "I" not in has and "W" not in has:
            out.append(f"rank {rank} has no backward for {s}F{m}; add {s}B{m}, or {s}I{m} and {s}W{m}")
        elif "I" not in has:
            out.append(f"rank {rank} runs {s}W{m} without {s}I{m}; add {s}I{m} before it")
        elif "W" not in has:
            out.append(f"rank {rank} runs {s}I{m} without {s}W{m}; add {s}W{m} after it")
    if "R" in has and not plan.stages[s].recompute:
        out.append(f"rank {rank} runs {s}R{m}, but stage {s} does not recompute; set its recompute or remove it")
    return out


def _order_problems(plan: Plan) -> list[str]:
    t, preds = plan.table(), plan.predecessor_table()
    out: list[str] = []
    later = (preds > np.arange(len(preds))[:, None]) & (t.rank[preds] == t.rank[:, None])
    for number, column in np.argwhere(later)[:MAX_PROBLEMS]:
        op, needed = plan.op(int(number)), plan.op(int(preds[number, column]))
        out.append(f"rank {t.rank[number]} runs {op} before {needed}; move {needed} earlier")
    if t.lead is not None:
        inside = (preds >= 0) & (t.lead[np.maximum(preds, 0)] == t.lead[:, None])
        for number, column in np.argwhere(inside)[:MAX_PROBLEMS]:
            op, needed = plan.op(int(number)), plan.op(int(preds[number, column]))
            out.append(f"rank {t.rank[number]} pairs {op} with {needed}, which it needs; run one after the other")
    out += missing_recompute(plan)
    if out:
        return out[:MAX_PROBLEMS]
    cycle = find_cycle(with_rank_order(t, preds))
    if cycle:
        words = [f"{_slot_words(plan, n)} (rank {t.rank[n]})" for n in cycle]
        out.append(
            "the orders wait for each other in a cycle: "
            + " needs ".join([*words[:12], "..." if len(words) > 12 else words[0]])
            + "; reorder one of these ranks"
        )
    return out


def _slot_words(plan: Plan, number: int) -> str:
    """Return the text of an op, or of the pair that it begins."""
    t = plan.table()
    if t.lead is None:
        return str(plan.op(number))
    return "+".join(str(plan.op(int(n))) for n in np.flatnonzero(t.lead == t.lead[number]))


def missing_recompute(plan: Plan) -> list[str]:
    """Return the problems of stages that recompute: they must run R before the backward, unless the backward directly
    follows F."""
    t = plan.table()
    out = []
    for s, stage in enumerate(plan.stages):
        if not stage.recompute:
            continue
        forward, backward = t.index[F, s], np.maximum(t.index[I, s], t.index[B, s])
        for m in np.flatnonzero((forward >= 0) & (t.index[R, s] < 0) & (backward != forward + 1)):
            out.append(
                f"rank {stage.rank} keeps no activations of {s}F{m} (stage {s} recomputes) but never runs "
                f"{s}R{m}; add it before {plan.op(int(backward[m]))}"
            )
    return out

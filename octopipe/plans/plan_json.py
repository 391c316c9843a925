"""The plan file format: reads and writes `octopipe.plan/1` and `/2` JSON (docs/plan-format.md).

Knows: the file format and its errors. Does not know: when a plan is valid (`rules`).

Version 2 is written only for plans that version 1 cannot express: pairs, paths that fork or join, shards, offload.
Every other plan is written as version 1, with the same bytes as before version 2 existed.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Any

import msgspec

from octopipe.base.errors import MAX_MICRO_BATCHES, OctoPipeError, PlanError
from octopipe.base.files import check_format, decode_json, plain
from octopipe.base.limits import MAX_OPS, MAX_RANKS, MAX_STAGES, over
from octopipe.costs.table import CostTable
from octopipe.costs.table_file import record_of
from octopipe.plans.op import Stage, parse_orders, parse_slots

if TYPE_CHECKING:
    from octopipe.plans.plan import Plan

FORMAT = "octopipe.plan/1"
FORMAT_2 = "octopipe.plan/2"
_KNOWN = {
    "format",
    "model",
    "num_layers",
    "num_ranks",
    "num_micro_batches",
    "stages",
    "routes",
    "route_of_micro_batch",
    "orders",
}
_KNOWN_2 = _KNOWN | {"paths", "path_of_micro_batch"}


class _StageFile(msgspec.Struct):
    layers: tuple[int, int]
    rank: int
    recompute: bool | tuple[int, ...] = False
    offload: bool = False
    shard: tuple[int, int] | None = None


class _PathFile(msgspec.Struct):
    stages: tuple[int, ...] = ()
    edges: tuple[tuple[int, int], ...] | None = None


class _PlanFile(msgspec.Struct):
    format: str
    num_layers: int
    num_ranks: int
    num_micro_batches: int
    stages: list[_StageFile]
    orders: list[list[str]]
    model: str = ""
    routes: list[tuple[int, ...]] = []
    route_of_micro_batch: tuple[int, ...] = ()
    paths: list[_PathFile] = []
    path_of_micro_batch: tuple[int, ...] = ()


def plan_fields(data: bytes | str, where: str) -> dict[str, Any]:
    """The fields of the plan in a JSON text, not yet validated; `where` names the source in errors."""
    raw: Any = decode_json(data, where, most_values=2 * MAX_OPS)
    if not isinstance(raw, dict):
        raise OctoPipeError(f'{where}: not a plan; expected a JSON object with "format": "{FORMAT_2}"')
    check_format(raw.get("format"), (FORMAT, FORMAT_2), where)
    second = raw["format"] == FORMAT_2
    try:
        # In a file of version 1, the keys of version 2 are provenance like any other unknown key.
        file = msgspec.convert({k: v for k, v in raw.items() if second or k in _KNOWN}, _PlanFile)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise OctoPipeError(f"{where}: not a valid plan file: {_one_line(error)}") from None
    too_many = [
        *over("ranks", len(file.orders), MAX_RANKS),
        *over("stages", len(file.stages), MAX_STAGES),
        *over("ops in orders", sum(map(len, file.orders)), MAX_OPS),
    ]
    if too_many:
        raise PlanError([f"{where}: {too_many[0]}"])
    known = _KNOWN_2 if second else _KNOWN
    try:
        orders, pairs = parse_slots(file.orders) if second else (parse_orders(file.orders), frozenset())
        routes, edges, taken = _paths(file)
    except PlanError as error:
        raise PlanError([f"{where}: {p}" for p in error.problems]) from None
    return {
        "model": file.model,
        "num_layers": file.num_layers,
        "num_ranks": file.num_ranks,
        "num_micro_batches": file.num_micro_batches,
        "stages": tuple(
            Stage(
                first=s.layers[0],
                stop=s.layers[1],
                rank=s.rank,
                recompute=s.recompute,
                shard=s.shard if second else None,
                offload=s.offload and second,
            )
            for s in file.stages
        ),
        "orders": orders,
        "routes": routes,
        "route_of_micro_batch": taken,
        "edges": edges,
        "pairs": pairs,
        "extra": {key: value for key, value in raw.items() if key not in known},
    }


def _paths(
    file: _PlanFile,
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[tuple[int, int], ...], ...], tuple[int, ...]]:
    """Routes, their edges if any route is not a chain, and the route of each micro-batch."""
    if not file.paths:
        return tuple(file.routes), (), file.route_of_micro_batch
    if file.routes:
        raise PlanError(['both "routes" and "paths" are given; keep one of the two'])
    routes, edges = [], []
    for number, path in enumerate(file.paths):
        path_edges = path.edges if path.edges is not None else tuple(itertools.pairwise(path.stages))
        stages = path.stages or _forward_order(number, path_edges)
        routes.append(stages)
        edges.append(path_edges)
    taken = file.path_of_micro_batch or file.route_of_micro_batch
    if not taken and len(routes) == 1:
        taken = (0,) * file.num_micro_batches if 0 <= file.num_micro_batches <= MAX_MICRO_BATCHES else ()
    return tuple(routes), tuple(edges), taken


def _forward_order(number: int, path_edges: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """The stages of the edges in the lexicographically smallest topological order."""
    left = {s: 0 for edge in path_edges for s in edge}
    after: dict[int, list[int]] = {}
    for a, b in path_edges:
        left[b] += 1
        after.setdefault(a, []).append(b)
    ready = sorted(s for s, count in left.items() if count == 0)
    out = []
    while ready:
        out.append(heapq.heappop(ready))
        for b in after.get(out[-1], ()):
            left[b] -= 1
            if left[b] == 0:
                heapq.heappush(ready, b)
    if len(out) < len(left):
        raise PlanError([f"path {number}: its edges form a cycle; remove one"])
    return tuple(out)


def plan_to_json(plan: Plan) -> bytes:
    """The plan in the oldest version that can express it, one line per stage and per rank for readable diffs."""

    def encode(value: Any) -> str:
        # msgspec encodes dataclasses in its own way; `record_of` preserves arrays and keys that are pairs of ranks.
        value = record_of(value) if isinstance(value, CostTable) else value
        return msgspec.json.encode(value, enc_hook=plain).decode()

    def rows(values: list[Any]) -> str:
        return "[\n  " + ",\n  ".join(encode(v) for v in values) + "\n ]"

    stages = [
        {
            "layers": [s.first, s.stop],
            "rank": s.rank,
            "recompute": s.recompute if isinstance(s.recompute, bool) else list(s.recompute),
        }
        | ({"offload": True} if s.offload else {})
        | ({} if s.shard is None else {"shard": list(s.shard)})
        for s in plan.stages
    ]
    second = bool(plan.pairs) or plan.forks or plan.offloads
    parts = {
        "format": encode(FORMAT_2 if second else FORMAT),
        "model": encode(plan.model),
        "num_layers": encode(plan.num_layers),
        "num_ranks": encode(plan.num_ranks),
        "num_micro_batches": encode(plan.num_micro_batches),
        "stages": rows(stages),
    }
    if plan.edges:
        paths = [
            {"stages": route, "edges": path_edges} for route, path_edges in zip(plan.routes, plan.edges, strict=True)
        ]
        parts |= {"paths": rows(paths), "path_of_micro_batch": encode(plan.route_of_micro_batch)}
    else:
        parts |= {"routes": encode(plan.routes), "route_of_micro_batch": encode(plan.route_of_micro_batch)}
    slots = (plan.slots(rank) for rank in range(len(plan.orders))) if plan.pairs else None
    parts["orders"] = rows(
        [[str(op) for op in order] for order in plan.orders]
        if slots is None
        else [["+".join(map(str, slot)) for slot in row] for row in slots]
    )
    known = _KNOWN_2 if second else _KNOWN
    parts |= {key: encode(value) for key, value in plan.extra.items() if key not in known}
    return ("{\n " + ",\n ".join(f"{encode(k)}: {v}" for k, v in parts.items()) + "\n}\n").encode()


def _one_line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return " ".join(text.split())[:200]

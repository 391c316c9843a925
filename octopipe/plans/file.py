"""Plans as files: `octopipe.plan/1` JSON in, the same JSON out.

Knows: the file format and how files go wrong. Does not know: what a good plan is (plan.py's check does).
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from octopipe.base.errors import OctoPipeError, PlanError
from octopipe.base.files import check_format, decode_json, plain, read_bytes, shown, write_whole
from octopipe.base.limits import MAX_OPS, MAX_PLAN_BYTES, MAX_RANKS, MAX_STAGES, over
from octopipe.costs.table import CostTable
from octopipe.costs.table_file import record_of
from octopipe.plans.plan import Plan, Stage, parse_orders

FORMAT = "octopipe.plan/1"
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


class _StageFile(msgspec.Struct):
    layers: tuple[int, int]
    rank: int
    recompute: bool | tuple[int, ...] = False


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


def plan_from_json(data: bytes | str, where: str = "plan") -> Plan:
    """A checked plan from JSON text; `where` names the source in errors."""
    raw: Any = decode_json(data, where, most_values=2 * MAX_OPS)
    if not isinstance(raw, dict):
        raise OctoPipeError(f'{where}: not a plan; expected a JSON object with "format": "{FORMAT}"')
    check_format(raw.get("format"), FORMAT, where)
    try:
        file = msgspec.convert(raw, _PlanFile)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise OctoPipeError(f"{where}: not a valid plan file: {_one_line(error)}") from None
    too_many = [
        *over("ranks", len(file.orders), MAX_RANKS),
        *over("stages", len(file.stages), MAX_STAGES),
        *over("ops in orders", sum(map(len, file.orders)), MAX_OPS),
    ]
    if too_many:
        raise PlanError([f"{where}: {too_many[0]}"])
    try:
        plan = Plan(
            model=file.model,
            num_layers=file.num_layers,
            num_ranks=file.num_ranks,
            num_micro_batches=file.num_micro_batches,
            stages=tuple(
                Stage(first=s.layers[0], stop=s.layers[1], rank=s.rank, recompute=s.recompute) for s in file.stages
            ),
            orders=parse_orders(file.orders),
            routes=tuple(file.routes),
            route_of_micro_batch=file.route_of_micro_batch,
            extra={key: value for key, value in raw.items() if key not in _KNOWN},
        )
    except PlanError as error:
        raise PlanError([f"{where}: {p}" for p in error.problems]) from None
    return plan.check(where)


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read and check a plan file."""
    return plan_from_json(read_bytes(path, most_bytes=MAX_PLAN_BYTES), shown(path))


def plan_to_json(plan: Plan) -> bytes:
    """The plan as `octopipe.plan/1`, one line per stage and per rank so that it reads and diffs well."""

    def encode(value: Any) -> str:
        # msgspec has a form of its own for dataclasses; the costs' one keeps arrays and pairs of ranks.
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
        for s in plan.stages
    ]
    parts = {
        "format": encode(FORMAT),
        "model": encode(plan.model),
        "num_layers": encode(plan.num_layers),
        "num_ranks": encode(plan.num_ranks),
        "num_micro_batches": encode(plan.num_micro_batches),
        "stages": rows(stages),
        "routes": encode(plan.routes),
        "route_of_micro_batch": encode(plan.route_of_micro_batch),
        "orders": rows([[str(op) for op in order] for order in plan.orders]),
    }
    parts |= {key: encode(value) for key, value in plan.extra.items() if key not in _KNOWN}
    return ("{\n " + ",\n ".join(f"{encode(k)}: {v}" for k, v in parts.items()) + "\n}\n").encode()


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan; an interrupted write leaves the old file whole."""
    write_whole(path, plan_to_json(plan))


def _one_line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return " ".join(text.split())[:200]

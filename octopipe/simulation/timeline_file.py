"""Timeline files as validated records: `octopipe.timeline/1`, with all references checked.

Knows: the columns of the file, their types, their limits and the relations between them. Does not know: timelines
(`timeline.py` builds one from the record).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from octopipe.base.errors import MAX_MICRO_BATCHES, OctoPipeError
from octopipe.base.files import check_format, decode_json
from octopipe.base.limits import MAX_BYTES, MAX_OPS, MAX_RANKS, MAX_STAGES, MAX_TIME_MS, MAX_TIMELINE_VALUES

FORMAT = "octopipe.timeline/1"
MOST_NODES = 4 * MAX_OPS
"""The most ops and transfers together that a file may contain."""
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Node = Annotated[int, Meta(ge=0, lt=MOST_NODES)]
Time = Annotated[float, Meta(ge=0, le=MAX_TIME_MS)]
Bytes = Annotated[float, Meta(ge=0, le=MAX_BYTES)]


class SpanColumns(msgspec.Struct):
    """Compute ops, rank after rank in execution order."""

    rank: list[Rank]
    stage: list[Annotated[int, Meta(ge=0, lt=MAX_STAGES)]]
    kind: list[Annotated[int, Meta(ge=0, lt=5)]]
    micro_batch: list[Annotated[int, Meta(ge=0, lt=MAX_MICRO_BATCHES)]]
    start_ms: list[Time]
    end_ms: list[Time]


class TransferColumns(msgspec.Struct):
    """Transfers between ranks; producer and consumer are indices of spans."""

    producer: list[Node]
    consumer: list[Node]
    source: list[Rank]
    destination: list[Rank]
    start_ms: list[Time]
    end_ms: list[Time]
    nbytes: list[Bytes]


class LaneColumns(msgspec.Struct):
    """Compute and exchange within the spans."""

    span: list[Node]
    lane: list[Annotated[int, Meta(ge=0, lt=2)]]
    start_ms: list[Time]
    end_ms: list[Time]


class HostColumns(msgspec.Struct):
    """Moves of activations to host memory (down) and back (up)."""

    rank: list[Rank]
    stage: list[Annotated[int, Meta(ge=0, lt=MAX_STAGES)]]
    micro_batch: list[Annotated[int, Meta(ge=0, lt=MAX_MICRO_BATCHES)]]
    down_start_ms: list[Time]
    down_end_ms: list[Time]
    up_start_ms: list[Time]
    up_end_ms: list[Time]
    nbytes: list[Bytes]


class CurveRecord(msgspec.Struct):
    """Memory of one rank."""

    times_ms: list[Time]
    bytes: list[Bytes]
    static_bytes: Bytes


class ExtraRecord(msgspec.Struct):
    """A span outside the compute lane."""

    name: str
    rank: Rank
    start_ms: Time
    end_ms: Time


class TimelineRecord(msgspec.Struct):
    """The whole file; unknown keys are ignored."""

    num_ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    spans: SpanColumns
    transfers: TransferColumns
    memory: list[CurveRecord]
    extras: list[ExtraRecord]
    capacity_bytes: list[Bytes | None]
    binding: list[Annotated[int, Meta(ge=-1, lt=MOST_NODES)]]
    measured: bool
    label: str
    model: str
    setting: dict[str, Any] | None = None
    lanes: LaneColumns | None = None
    host: HostColumns | None = None


def read_record(data: bytes, where: str) -> TimelineRecord:
    """Return the record in a timeline file. Raises an error if it is malformed or contradicts itself."""
    raw: Any = decode_json(data, where, most_values=MAX_TIMELINE_VALUES)
    if not isinstance(raw, dict) or not str(raw.get("format")).startswith("octopipe.timeline"):
        raise OctoPipeError(f'{where}: not a timeline; expected a JSON object with "format": "{FORMAT}"')
    check_format(raw["format"], FORMAT, where)
    try:
        record = msgspec.convert(raw, TimelineRecord)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        why = " ".join((str(error) or type(error).__name__).split())[:200]
        raise OctoPipeError(f"{where}: not a valid timeline file: {why}") from None
    wrong = _problem(record)
    if wrong:
        raise OctoPipeError(f"{where}: {wrong}; the file is damaged")
    return record


def _problem(record: TimelineRecord) -> str:
    """Describe the first contradiction in the record; empty if there is none."""
    spans, transfers, ranks = record.spans, record.transfers, record.num_ranks
    lanes = record.lanes or LaneColumns([], [], [], [])
    host = record.host or HostColumns(*([] for _ in range(8)))
    for name, columns in (("spans", spans), ("transfers", transfers), ("lanes", lanes), ("host", host)):
        lengths = {field: len(getattr(columns, field)) for field in columns.__struct_fields__}
        if len(set(lengths.values())) > 1:
            return f"columns of {name} differ in length ({', '.join(f'{k} {n}' for k, n in lengths.items())})"
    ops, nodes = len(spans.rank), len(spans.rank) + len(transfers.source)
    for what, numbers, stop in (
        ("rank of an op", spans.rank, ranks),
        ("source of a transfer", transfers.source, ranks),
        ("destination of a transfer", transfers.destination, ranks),
        ("rank of an extra", [e.rank for e in record.extras], ranks),
        ("producer of a transfer", transfers.producer, ops),
        ("consumer of a transfer", transfers.consumer, ops),
        ("binding node", record.binding, nodes),
        ("span of a lane", lanes.span, ops),
        ("rank of a move to host memory", host.rank, ranks),
    ):
        if numbers and max(numbers) >= stop:
            return f"{what} is {max(numbers)}; they go from 0 to {stop - 1}"
    if len(record.binding) not in (0, nodes):
        return f"binding has {len(record.binding)} entries for {nodes} ops and transfers"
    if not _ends(np.array(record.binding, np.int32)):
        return "binding forms a cycle: no op there is first"
    for what, part in (("op", spans), ("transfer", transfers), ("part of a lane", lanes)):
        late = np.flatnonzero(np.array(part.end_ms, float) < np.array(part.start_ms, float))
        if late.size:
            return f"{what} {int(late[0])} ends before it starts"
    if any(e.end_ms < e.start_ms for e in record.extras):
        return "an extra ends before it starts"
    rank, start = np.array(spans.rank, np.int64), np.array(spans.start_ms, float)
    if np.any(np.diff(rank) < 0) or np.any((np.diff(rank) == 0) & (np.diff(start) < 0)):
        return "ops must stand rank after rank, each rank's in order of their start"
    for name in ("memory", "capacity_bytes"):
        if len(getattr(record, name)) not in (0, ranks):
            return f"{name} has {len(getattr(record, name))} rows for {ranks} ranks"
    for r, curve in enumerate(record.memory):
        if len(curve.times_ms) != len(curve.bytes) or np.any(np.diff(np.array(curve.times_ms, float)) < 0):
            return f"memory of rank {r} must have as many times as bytes, in order of time"
    return ""


def _ends(binding: NDArray[np.int32]) -> bool:
    """Return whether every walk along `binding` reaches -1. Each round doubles the steps taken by all walks at once."""
    at = np.append(binding, np.int32(-1))  # index -1 is the last entry: a walk that has arrived stays there
    for _ in range(max(1, int(binding.size).bit_length())):
        at = at[at]
    return bool(np.all(at == -1))

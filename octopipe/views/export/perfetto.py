"""Timelines in the Trace Event format, for ui.perfetto.dev and chrome://tracing.

Knows: the format: one process per rank, threads for compute, the exchange between expert ranks, each send and receive
direction and what follows the step, flows from producer to consumer, memory counters. Does not know: where a timeline
came from.

Thread ids are unique in the whole file (both viewers mix threads up otherwise), and threads have sort indexes. Slices
of one thread never overlap: transfers that overlap, in a measured timeline, are drawn on additional threads.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from octopipe.plans.plan import KINDS, Plan
from octopipe.simulation.timeline import GIB, Timeline

US = 1000.0
"""Microseconds (the format's unit) per millisecond."""
_COMPUTE, _EXCHANGE, _SEND, _RECEIVE, _AFTER, _DOWN, _UP = range(7)


def trace_events(timeline: Timeline, plan: Plan | None = None) -> dict[str, Any]:
    """Return the trace as a JSON-ready object."""
    threads = _Threads(timeline.num_ranks)
    events = [
        *_compute(timeline, plan, threads),
        *_exchange(timeline, threads),
        *_transfers(timeline, threads),
        *_host(timeline, threads),
        *_extras(timeline, threads),
        *_memory(timeline),
    ]
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "tool": "octopipe",
            "model": timeline.model,
            "label": timeline.label,
            "measured": "yes" if timeline.measured else "no, predicted",
        },
        "traceEvents": [*threads.metadata(), *sorted(events, key=lambda e: e["ts"])],
    }


def trace_bytes(timeline: Timeline, plan: Plan | None = None, *, compress: bool = True) -> bytes:
    """Return the trace as the content of a file; the same timeline always gives the same bytes."""
    data = msgspec.json.encode(trace_events(timeline, plan))
    return gzip.compress(data, mtime=0) if compress else data


class _Threads:
    """Assigns thread ids, which are unique in the whole trace: one per (rank, group, peer, row)."""

    def __init__(self, num_ranks: int):
        self._digits = len(str(max(num_ranks - 1, 0)))
        self._num_ranks = num_ranks
        self._ids: dict[tuple[int, int, int, int], int] = {}

    def tid(self, rank: int, group: int, peer: int = 0, row: int = 0) -> int:
        return self._ids.setdefault((rank, group, peer, row), len(self._ids) + 1)

    def pid(self, rank: int) -> int:
        return rank + 1

    def metadata(self) -> Iterator[dict[str, Any]]:
        for rank in range(self._num_ranks):
            self.tid(rank, _COMPUTE)
            yield self._meta("process_name", rank, 0, name=f"rank {rank:0{self._digits}}")
            yield self._meta("process_sort_index", rank, 0, sort_index=rank)
        for place, ((rank, group, peer, row), tid) in enumerate(sorted(self._ids.items())):
            digits = f"{peer:0{self._digits}}"
            words = (
                "compute", "exchange", f"send to {digits}", f"receive from {digits}", "after the step",
                "to host memory", "from host memory",
            )[group]  # fmt: skip
            yield self._meta("thread_name", rank, tid, name=words + (f" ({row + 1})" if row else ""))
            yield self._meta("thread_sort_index", rank, tid, sort_index=place)

    def _meta(self, event: str, rank: int, tid: int, /, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": event, "pid": self.pid(rank), "tid": tid, "args": args}


def _compute(timeline: Timeline, plan: Plan | None, threads: _Threads) -> Iterator[dict[str, Any]]:
    """Yield slices for all ops. Ops that run together share one slice, which contains a slice for each computation."""
    s = timeline.spans
    second = np.zeros(s.rank.size, np.bool_)
    if plan is not None and (lead := plan.table().lead) is not None:
        second = lead != np.arange(lead.size)
    for i in range(s.rank.size):
        if second[i]:
            continue
        ops = [i, i + 1] if i + 1 < second.size and second[i + 1] else [i]
        stage, rank = int(s.stage[i]), int(s.rank[i])
        args: dict[str, Any] = {"stage": stage, "micro_batch": int(s.micro_batch[i])}
        if len(ops) == 2:
            args = {"stage": [int(s.stage[k]) for k in ops], "micro_batch": [int(s.micro_batch[k]) for k in ops]}
        if plan is not None:
            held = [f"{plan.stages[s.stage[k]].first} to {plan.stages[s.stage[k]].stop - 1}" for k in ops]
            args["layers"] = " and ".join(dict.fromkeys(held))
        if timeline.binding.size:
            args["waited_for"] = _waited_for(timeline, i)
        yield {
            "ph": "X",
            "name": "+".join(str(timeline.op(k)) for k in ops),
            "cat": "+".join(KINDS[s.kind[k]] for k in ops),
            "pid": threads.pid(rank),
            "tid": threads.tid(rank, _COMPUTE),
            "ts": float(s.start_ms[i]) * US,
            "dur": float(s.end_ms[i] - s.start_ms[i]) * US,
            "args": args,
        }


def _exchange(timeline: Timeline, threads: _Threads) -> Iterator[dict[str, Any]]:
    """Yield slices for the exchange between expert ranks, on a thread of its own, and for the computation of paired
    ops, inside the slices of their pairs."""
    n = timeline.lanes
    if n is None:
        return
    s = timeline.spans
    # The second op of a pair has an empty span; the segments of both lie within the span of the first.
    paired = np.zeros(s.rank.size + 1, np.bool_)
    paired[:-1] = s.end_ms <= s.start_ms
    paired[:-1] |= paired[1:]
    for span, lane, start, end in zip(*(column.tolist() for column in n), strict=True):
        if lane == 0 and not paired[span]:
            continue
        rank = int(s.rank[span])
        yield {
            "ph": "X",
            "name": str(timeline.op(span)),
            "cat": "exchange" if lane else KINDS[s.kind[span]],
            "pid": threads.pid(rank),
            "tid": threads.tid(rank, _EXCHANGE if lane else _COMPUTE),
            "ts": start * US,
            "dur": max(end - start, 0.0) * US,
            "args": {"stage": int(s.stage[span]), "micro_batch": int(s.micro_batch[span])},
        }


def _waited_for(timeline: Timeline, i: int) -> str:
    because, ops = int(timeline.binding[i]), timeline.spans.rank.size
    if because < 0:
        return "nothing"
    if because < ops:
        return str(timeline.op(because))
    transfer = because - ops
    producer = int(timeline.transfers.producer[transfer])
    return f"transfer of {timeline.op(producer)} from rank {int(timeline.transfers.source[transfer])}"


def _transfers(timeline: Timeline, threads: _Threads) -> Iterator[dict[str, Any]]:
    s, t = timeline.spans, timeline.transfers
    rows = _rows(timeline)
    for i in range(t.source.size):
        producer, consumer = int(t.producer[i]), int(t.consumer[i])
        a, b, row = int(t.source[i]), int(t.destination[i]), int(rows[i])
        send, receive = threads.tid(a, _SEND, b, row), threads.tid(b, _RECEIVE, a, row)
        start, length = float(t.start_ms[i]) * US, float(t.end_ms[i] - t.start_ms[i]) * US
        name = str(timeline.op(producer))
        for rank, tid, word in ((a, send, "send"), (b, receive, "receive")):
            yield {
                "ph": "X",
                "name": f"{word} {name}",
                "cat": "transfer",
                "pid": threads.pid(rank),
                "tid": tid,
                "ts": start,
                "dur": length,
                "args": {"bytes": float(t.nbytes[i]), "peer": b if rank == a else a},
            }
        # A flow binds to the slice that contains its time stamp: just before the producer's end, and at the consumer's
        # start.
        took = float(s.end_ms[producer] - s.start_ms[producer]) * US
        leaves = float(s.end_ms[producer]) * US - min(0.001, took / 2)
        flow = {"name": "transfer", "cat": "transfer", "id": i + 1}
        yield flow | {"ph": "s", "pid": threads.pid(a), "tid": threads.tid(a, _COMPUTE), "ts": leaves}
        if length > 0:
            yield flow | {"ph": "t", "pid": threads.pid(a), "tid": send, "ts": start}
            yield flow | {"ph": "t", "pid": threads.pid(b), "tid": receive, "ts": start + length / 2}
        arrives = float(s.start_ms[consumer]) * US
        yield flow | {
            "ph": "f",
            "bp": "e",
            "pid": threads.pid(b),
            "tid": threads.tid(b, _COMPUTE),
            "ts": arrives,
        }


def _host(timeline: Timeline, threads: _Threads) -> Iterator[dict[str, Any]]:
    """Yield slices for activations that move to host memory and back, with one thread per direction."""
    h = timeline.host
    if h is None:
        return
    for i in range(h.rank.size):
        rank, stage, micro_batch = int(h.rank[i]), int(h.stage[i]), int(h.micro_batch[i])
        for thread, start, end in (
            (_DOWN, h.down_start_ms[i], h.down_end_ms[i]),
            (_UP, h.up_start_ms[i], h.up_end_ms[i]),
        ):
            yield {
                "ph": "X",
                "name": f"activations of {stage}F{micro_batch}",
                "cat": "host memory",
                "pid": threads.pid(rank),
                "tid": threads.tid(rank, thread),
                "ts": float(start) * US,
                "dur": float(end - start) * US,
                "args": {"bytes": float(h.nbytes[i]), "stage": stage, "micro_batch": micro_batch},
            }


def _rows(timeline: Timeline) -> np.ndarray:
    """Return a row for every transfer, so that transfers of one direction and row never overlap (row 0 if possible)."""
    t = timeline.transfers
    row = np.zeros(t.source.size, np.int32)
    free_at: dict[tuple[int, int], list[float]] = {}
    for i in np.lexsort((t.end_ms, t.start_ms)).tolist():
        ends = free_at.setdefault((int(t.source[i]), int(t.destination[i])), [])
        start, end = float(t.start_ms[i]), float(t.end_ms[i])
        place = next((k for k, e in enumerate(ends) if e <= start + 1e-9), len(ends))
        if place == len(ends):
            ends.append(end)
        ends[place], row[i] = max(ends[place], end), place
    return row


def _extras(timeline: Timeline, threads: _Threads) -> Iterator[dict[str, Any]]:
    for e in timeline.extras:
        yield {
            "ph": "X",
            "name": e.name,
            "cat": "after",
            "pid": threads.pid(e.rank),
            "tid": threads.tid(e.rank, _AFTER),
            "ts": float(e.start_ms) * US,
            "dur": float(e.end_ms - e.start_ms) * US,
            "args": {},
        }


def _memory(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank, curve in enumerate(timeline.memory):
        if float(curve.bytes.max(initial=0.0)) <= 0:
            continue
        # A counter shows one value per time stamp: the highest, so that peaks are kept; the last value follows 0.5 ns
        # later.
        times, first = np.unique(curve.times_ms, return_index=True)
        highest = np.maximum.reduceat(curve.bytes, first)
        last = curve.bytes[np.append(first[1:], curve.bytes.size) - 1]
        for at, high, low in zip(times.tolist(), highest.tolist(), last.tolist()):
            for nudge, value in ((0.0, high), (0.0005, low)) if high != low else ((0.0, high),):
                yield {
                    "ph": "C",
                    "name": "memory",
                    "pid": rank + 1,
                    "tid": 0,
                    "ts": at * US + nudge,
                    "args": {"GiB": value / GIB},
                }

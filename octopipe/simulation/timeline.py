"""Timeline: what happened, or is predicted to happen, on every lane, and the metrics derived from it.

Knows: spans, transfers, memory curves and their metrics. Does not know: whether a device or the simulator produced it.
Predicted and measured timelines have the same type, so fidelity is the difference of two timelines.

Metrics:
- step_ms: from the first op's start (time 0) to the end of everything, reductions and optimizer included;
- makespan_ms: the same for compute ops alone; span_ms: the longest of the ranks' (last end - first start);
- idle time of a rank within the makespan, divided completely into boundary (before its first and after
  its last op), communication (a needed transfer was in flight), imbalance (less work than the busiest rank)
  and residual.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from octopipe.base.display import html_of, one_line
from octopipe.base.files import plain, read_bytes, shown, write_whole
from octopipe.base.limits import MAX_TIMELINE_BYTES
from octopipe.plans.plan import KINDS, Op
from octopipe.simulation.timeline_file import FORMAT, read_record

GIB = float(1 << 30)
ROUNDING = 1e-12
"""Share of a capacity by which sums of bytes may exceed it for rounding alone."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


class Spans(NamedTuple):
    """Compute ops, rank after rank in execution order."""

    rank: Ints
    stage: Ints
    kind: Ints
    micro_batch: Ints
    start_ms: Floats
    end_ms: Floats


class Transfers(NamedTuple):
    """Tensors in transit between ranks; producer and consumer are indices of spans."""

    producer: Ints
    consumer: Ints
    source: Ints
    destination: Ints
    start_ms: Floats
    end_ms: Floats
    nbytes: Floats


class Extra(NamedTuple):
    """A span outside the compute lane: a gradient reduction or the optimizer."""

    name: str
    rank: int
    start_ms: float
    end_ms: float


class HostSpans(NamedTuple):
    """Moves of activations to host memory (down) and back (up), one entry per stage and micro-batch."""

    rank: Ints
    stage: Ints
    micro_batch: Ints
    down_start_ms: Floats
    down_end_ms: Floats
    up_start_ms: Floats
    up_end_ms: Floats
    nbytes: Floats


class LaneSpans(NamedTuple):
    """What the two lanes of every rank did within the spans, for ops that have an exchange and for pairs."""

    span: Ints
    """The index of the span that it is part of."""
    lane: Ints
    """0 compute, 1 exchange."""
    start_ms: Floats
    end_ms: Floats


class Exchange(NamedTuple):
    """Exchanges between expert ranks, over all ranks."""

    total_ms: float
    hidden_ms: float
    """The part of it during which the same rank computed."""

    @property
    def share(self) -> float:
        """Share that is hidden; 1 if there is no exchange."""
        return self.hidden_ms / self.total_ms if self.total_ms > 0 else 1.0


class MemoryCurve(NamedTuple):
    """Bytes in use on a rank, static bytes included: `bytes[i]` applies from `times_ms[i]` on."""

    times_ms: Floats
    bytes: Floats
    static_bytes: float


class Bubbles(NamedTuple):
    """Idle time per rank; the four parts add up to `idle_ms`."""

    idle_ms: Floats
    boundary_ms: Floats
    communication_ms: Floats
    imbalance_ms: Floats
    residual_ms: Floats


class Overlap(NamedTuple):
    """Sends and receives counted one by one, as in the paper's Table III."""

    communications: int
    overlapped: int
    """Sends and receives during all of which their rank was computing."""
    rate: float
    hidden_ms: float
    total_ms: float
    overlappable: int = 0
    """Sends and receives during at least part of which their rank was computing; the paper counts these."""

    @property
    def overlappable_rate(self) -> float:
        return self.overlappable / self.communications if self.communications else 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """Spans, transfers and memory of one pipeline step."""

    num_ranks: int
    spans: Spans
    transfers: Transfers
    memory: tuple[MemoryCurve, ...] = ()
    extras: tuple[Extra, ...] = ()
    capacity_bytes: tuple[float, ...] = ()
    """Per rank; infinite if there is no limit."""
    binding: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    """Per span, then per transfer: the node (spans first, then transfers) that ended last before it, or -1."""
    measured: bool = False
    label: str = ""
    model: str = ""
    setting: Mapping[str, Any] = field(default_factory=dict)
    """The set-up it was predicted or measured for, as far as it is known: GPU, TP, sequence length, ..."""
    lanes: LaneSpans | None = None
    """Compute and exchange within the spans; None if no op has an exchange and none is paired."""
    host: HostSpans | None = None
    """Moves to host memory; None without offloading, and in measured timelines, which do not record them."""

    @cached_property
    def makespan_ms(self) -> float:
        return float(self.spans.end_ms.max(initial=0.0))

    @cached_property
    def reduced_ms(self) -> float:
        """The time to the end of the ops and of the gradient reductions; the optimizer follows."""
        return float(max([self.makespan_ms, *(e.end_ms for e in self.extras if e.name.startswith("reduce"))]))

    @cached_property
    def step_ms(self) -> float:
        return float(max([self.makespan_ms, *(e.end_ms for e in self.extras)]))

    def _edges(self) -> tuple[Floats, Floats]:
        """Return the first start and the last end of every rank (both 0 if it runs nothing)."""
        first, last = np.full(self.num_ranks, np.inf), np.zeros(self.num_ranks)
        np.minimum.at(first, self.spans.rank, self.spans.start_ms)
        np.maximum.at(last, self.spans.rank, self.spans.end_ms)
        return np.where(np.isfinite(first), first, 0.0), last

    @cached_property
    def span_ms(self) -> float:
        first, last = self._edges()
        return float((last - first).max(initial=0.0))

    @cached_property
    def busy_ms(self) -> Floats:
        took = self._took()
        return np.bincount(self.spans.rank, weights=took, minlength=self.num_ranks).astype(np.float64)

    def _took(self) -> Floats:
        """Return the part of every span that no earlier span of its rank covers: paired ops count once."""
        start, end = self.spans.start_ms, self.spans.end_ms
        if self.lanes is None:
            return end - start
        out = end - start
        for rank in np.unique(self.spans.rank):
            mine = self.spans.rank == rank
            covered = np.concatenate(([0.0], np.maximum.accumulate(end[mine])[:-1]))
            out[mine] = np.maximum(end[mine] - np.maximum(start[mine], covered), 0.0)
        return out

    @cached_property
    def host_peak_bytes(self) -> Floats:
        """The most bytes that every rank has in host memory at one time."""
        out, host = np.zeros(self.num_ranks), self.host
        if host is None:
            return out
        for rank in range(self.num_ranks):
            mine = host.rank == rank
            when = np.concatenate((host.down_start_ms[mine], host.up_end_ms[mine]))
            change = np.concatenate((host.nbytes[mine], -host.nbytes[mine]))
            out[rank] = max(0.0, np.cumsum(change[np.lexsort((change, when))]).max(initial=0.0))
        return out

    @cached_property
    def exchange(self) -> Exchange:
        """How much of the exchanges between expert ranks is hidden behind computation."""
        if self.lanes is None:
            return Exchange(0.0, 0.0)
        n = self.lanes
        rank = self.spans.rank[n.span]
        total = hidden = 0.0
        for r in range(self.num_ranks):
            exchanging, computing = ((rank == r) & (n.lane == lane) for lane in (1, 0))
            total += float((n.end_ms[exchanging] - n.start_ms[exchanging]).sum())
            busy = _union(n.start_ms[computing], n.end_ms[computing])
            until, since = (_covered(*busy, times[exchanging]) for times in (n.end_ms, n.start_ms))
            hidden += float((until - since).sum())
        return Exchange(total, min(hidden, total))

    @cached_property
    def bubble_ratio(self) -> float:
        """1 - mean busy time / step time."""
        return 1.0 - float(self.busy_ms.mean()) / self.step_ms if self.step_ms > 0 else 0.0

    @cached_property
    def span_bubble_ratio(self) -> float:
        """(span - the busiest rank's work) / span: the Zero Bubble papers' rate."""
        return (self.span_ms - float(self.busy_ms.max())) / self.span_ms if self.span_ms > 0 else 0.0

    @cached_property
    def bubbles(self) -> Bubbles:
        """Every rank's idle time within the makespan, divided by cause."""
        first, last = self._edges()
        idle = np.maximum(self.makespan_ms - self.busy_ms, 0.0)
        ran = np.bincount(self.spans.rank, minlength=self.num_ranks) > 0
        boundary = np.minimum(np.where(ran, first + (self.makespan_ms - last), idle), idle)
        gap_start, gap_end = self._gaps()
        # The part of the gap before each op in which the latest transfer it needs was in flight.
        arrival, departure = np.full(gap_end.size, -np.inf), np.full(gap_end.size, np.inf)
        by_end = np.argsort(self.transfers.end_ms, kind="stable")
        consumer = self.transfers.consumer[by_end]
        arrival[consumer], departure[consumer] = self.transfers.end_ms[by_end], self.transfers.start_ms[by_end]
        waited = np.minimum(gap_end, arrival) - np.maximum(gap_start, departure)
        waiting = np.bincount(self.spans.rank, weights=np.maximum(waited, 0.0), minlength=self.num_ranks)
        inside = idle - boundary
        communication = np.minimum(waiting, inside)
        left = inside - communication
        imbalance = np.minimum(self.busy_ms.max(initial=0.0) - self.busy_ms, left)
        return Bubbles(idle, boundary, communication, imbalance, left - imbalance)

    def _gaps(self) -> tuple[Floats, Floats]:
        """Return the idle interval before every span inside its rank's work (empty before a rank's first op)."""
        end_before = np.concatenate(([0.0], self.spans.end_ms[:-1]))
        new_rank = np.concatenate(([True], self.spans.rank[1:] != self.spans.rank[:-1]))
        gap_end = self.spans.start_ms
        return np.where(new_rank, gap_end, end_before), gap_end

    @cached_property
    def overlap(self) -> Overlap:
        """How many sends and receives ran wholly behind their rank's compute."""
        t = self.transfers
        ends = 2 * t.source.size
        duration = t.end_ms - t.start_ms
        hidden_total, overlapped, overlappable = 0.0, 0, 0
        for rank_of_end in (t.source, t.destination):
            # Not np.unique: its first call imports numpy.ma, which every command that simulates would wait for.
            for rank in np.flatnonzero(np.bincount(rank_of_end)):
                mine = rank_of_end == rank
                hidden = self._busy_until(int(rank), t.end_ms[mine]) - self._busy_until(int(rank), t.start_ms[mine])
                hidden_total += float(hidden.sum())
                slack = 1e-9 * (1.0 + duration[mine])
                overlapped += int(np.count_nonzero(hidden >= duration[mine] - slack))
                overlappable += int(np.count_nonzero((hidden > slack) | (duration[mine] <= slack)))
        total = 2.0 * float(duration.sum())
        return Overlap(ends, overlapped, overlapped / ends if ends else 1.0, hidden_total, total, overlappable)

    def _busy_until(self, rank: int, times: Floats) -> Floats:
        """Return the compute time of a rank before each of `times`."""
        mine = self.spans.rank == rank
        start, end = self.spans.start_ms[mine], self.spans.end_ms[mine]
        if self.lanes is not None:
            start, end = _union(start, end)
        return _covered(start, end, times)

    @cached_property
    def peak_bytes(self) -> Floats:
        return np.array([float(c.bytes.max(initial=c.static_bytes)) for c in self.memory])

    @property
    def peak_gib(self) -> tuple[float, ...]:
        return tuple(float(b) / GIB for b in self.peak_bytes)

    @property
    def fits(self) -> bool:
        """No rank exceeds its capacity (rounding of sums aside)."""
        return all(p <= c * (1 + ROUNDING) for p, c in zip(self.peak_bytes, self.capacity_bytes))

    def op(self, span: int) -> Op:
        s = self.spans
        return Op(int(s.stage[span]), KINDS[s.kind[span]], int(s.micro_batch[span]))

    def critical_path(self) -> tuple[int, ...]:
        """Return the nodes (spans, then transfers) that decided the makespan, from the start to the last op."""
        if self.binding.size == 0 or self.spans.end_ms.size == 0:
            return ()
        path = [int(np.argmax(self.spans.end_ms))]
        while self.binding[path[-1]] >= 0 and len(path) <= self.binding.size:
            path.append(int(self.binding[path[-1]]))
        return tuple(reversed(path))

    def summary(self) -> dict[str, Any]:
        """Return the numbers that every command prints as JSON."""
        b, o = self.bubbles, self.overlap
        return {
            "step_ms": self.step_ms,
            "makespan_ms": self.makespan_ms,
            "span_ms": self.span_ms,
            "bubble_ratio": self.bubble_ratio,
            "span_bubble_ratio": self.span_bubble_ratio,
            "busy_ms": self.busy_ms.tolist(),
            "bubbles_ms": {name[:-3]: getattr(b, name).tolist() for name in Bubbles._fields},
            "peak_memory_gib": list(self.peak_gib),
            "fits": self.fits,
            "communications": o.communications,
            "overlapped": o.overlapped,
            "overlap_rate": o.rate,
        } | (
            {}
            if self.lanes is None
            else {"exchange_ms": self.exchange.total_ms, "exchange_hidden": self.exchange.share}
        )

    def __repr__(self) -> str:
        return one_line(
            "Timeline",
            " on ".join(t for t in (self.label, self.model) if t),
            f"{'measured' if self.measured else 'predicted'} {self.step_ms:.2f} ms",
            f"{100 * self.bubble_ratio:.1f} % bubble on {self.num_ranks} ranks",
        )

    def _repr_html_(self) -> str | None:
        return html_of(self)

    def to_json(self) -> bytes:
        return msgspec.json.encode(
            {
                "format": FORMAT,
                "num_ranks": self.num_ranks,
                "spans": {k: v.tolist() for k, v in self.spans._asdict().items()},
                "transfers": {k: v.tolist() for k, v in self.transfers._asdict().items()},
                "memory": [
                    {"times_ms": c.times_ms.tolist(), "bytes": c.bytes.tolist(), "static_bytes": c.static_bytes}
                    for c in self.memory
                ],
                "extras": [e._asdict() for e in self.extras],
                "capacity_bytes": [c if np.isfinite(c) else None for c in self.capacity_bytes],
                "binding": self.binding.tolist(),
                "measured": self.measured,
                "label": self.label,
                "model": self.model,
                "setting": dict(self.setting),
            }
            | {
                name: {k: v.tolist() for k, v in some._asdict().items()}
                for name, some in (("lanes", self.lanes), ("host", self.host))
                if some is not None
            },
            enc_hook=plain,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        write_whole(path, self.to_json())


def load_timeline(path: str | os.PathLike[str]) -> Timeline:
    """Read a timeline file."""
    return timeline_from_json(read_bytes(path, most_bytes=MAX_TIMELINE_BYTES), shown(path))


def timeline_from_json(data: bytes, where: str = "timeline") -> Timeline:
    """Return the timeline in a file's bytes. Raises an error whose one line starts with `where` if they are invalid."""
    record = read_record(data, where)
    return Timeline(
        num_ranks=record.num_ranks,
        spans=_columns(Spans, record.spans),
        transfers=_columns(Transfers, record.transfers),
        memory=tuple(
            MemoryCurve(np.array(c.times_ms, float), np.array(c.bytes, float), c.static_bytes) for c in record.memory
        ),
        extras=tuple(Extra(e.name, e.rank, e.start_ms, e.end_ms) for e in record.extras),
        capacity_bytes=tuple(float("inf") if c is None else c for c in record.capacity_bytes),
        binding=np.array(record.binding, np.int32),
        measured=record.measured,
        label=record.label,
        model=record.model,
        setting=record.setting or {},
        lanes=None if record.lanes is None else _columns(LaneSpans, record.lanes),
        host=None if record.host is None else _columns(HostSpans, record.host),
    )


def _covered(start: Floats, end: Floats, times: Floats) -> Floats:
    """Return how much of the intervals, which are in order and do not overlap, lies before each of `times`."""
    if start.size == 0:
        return np.zeros(times.size)
    before = np.concatenate(([0.0], np.cumsum(end - start)))
    k = np.searchsorted(start, times, side="right")
    last = np.maximum(k - 1, 0)
    running = np.minimum(times, end[last]) - start[last]  # negative before the first interval
    return np.asarray(before[last] + np.maximum(running, 0.0))


def _union(start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """Merge intervals into as few as possible that do not overlap, in order of time."""
    if start.size == 0:
        return start, end
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    fresh = np.concatenate(([True], start[1:] > end[:-1]))
    return start[fresh], np.maximum.reduceat(end, np.flatnonzero(fresh))


def _columns(kind: Any, record: Any) -> Any:
    return kind(
        *(
            np.array(getattr(record, name), np.float64 if name.endswith("_ms") or name == "nbytes" else np.int32)
            for name in kind._fields
        )
    )

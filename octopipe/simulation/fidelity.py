"""Fidelity: a predicted and a measured Timeline of one plan, compared op by op.

Knows: what is compared and how errors are defined. Does not know: how either timeline was obtained.

Errors are relative to the measurement: (predicted - measured) / measured; mean errors are means of absolute values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octopipe.base.errors import OctoPipeError
from octopipe.plans.plan import KINDS
from octopipe.simulation.timeline import Timeline

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpError:
    """One op whose duration differs from the prediction."""

    op: str
    rank: int
    predicted_ms: float
    measured_ms: float
    start_off_ms: float
    """How much later it started than predicted."""


class Hidden(NamedTuple):
    """How much of the communication ran behind computation: sends and receives, each on its own rank."""

    wholly: float
    """The share of them during all of which their rank computed."""
    partly: float
    """The share of them during some part of which their rank computed; the paper marks these as overlappable."""
    time: float
    """Overlapped communication time divided by communication time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """The result of a comparison."""

    label: str
    predicted_ms: float
    measured_ms: float
    step_error: float
    """Of the time from the first op to the last one."""
    predicted_reduced_ms: float
    measured_reduced_ms: float
    """To the end of the gradient reductions; the time of the pipeline if there are none."""
    busy_error: tuple[float, ...]
    """Per rank: error of the time at which it is busy."""
    kind_error: dict[str, float]
    """Per op kind: error of the summed durations."""
    op_error: float
    """Mean over ops of the absolute error of the duration."""
    predicted_gib: tuple[float, ...]
    measured_gib: tuple[float, ...]
    """Peak per rank; empty if the device has no allocator that reports it."""
    memory_error: tuple[float, ...]
    worst: tuple[OpError, ...]
    """The ops whose durations differ most, in milliseconds."""
    measured_overlap: Hidden
    predicted_overlap: Hidden

    @property
    def mean_memory_error(self) -> float:
        return float(np.mean(np.abs(self.memory_error))) if self.memory_error else float("nan")

    def summary(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "predicted_ms": self.predicted_ms,
            "predicted_reduced_ms": self.predicted_reduced_ms,
            "measured_reduced_ms": self.measured_reduced_ms,
            "measured_ms": self.measured_ms,
            "step_error": self.step_error,
            "op_error": self.op_error,
            "busy_error": list(self.busy_error),
            "kind_error": self.kind_error,
            "predicted_gib": list(self.predicted_gib),
            "measured_gib": list(self.measured_gib),
            "memory_error": list(self.memory_error),
            "mean_memory_error": None if not self.memory_error else self.mean_memory_error,
            "predicted_overlap": self.predicted_overlap._asdict(),
            "measured_overlap": self.measured_overlap._asdict(),
            "worst": [
                {
                    "op": w.op,
                    "rank": w.rank,
                    "predicted_ms": w.predicted_ms,
                    "measured_ms": w.measured_ms,
                    "start_off_ms": w.start_off_ms,
                }
                for w in self.worst
            ],
        }


def compare(
    predicted: Timeline,
    measured: Timeline,
    *,
    measured_bytes: Sequence[float] = (),
    step_ms: float | None = None,
    worst: int = 5,
) -> Fidelity:
    """Compare two timelines of one program. `step_ms` replaces the measured timeline's own makespan (the median of
    several steps, say); `measured_bytes` are the allocator's peaks per rank."""
    a, b = predicted.spans, measured.spans
    same = all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("rank", "stage", "kind", "micro_batch"))
    if not same:
        raise OctoPipeError("the two timelines are of different plans; compare timelines of one plan")
    took = step_ms if step_ms is not None else measured.makespan_ms
    ours, theirs = a.end_ms - a.start_ms, b.end_ms - b.start_ms
    kinds = {}
    for code, kind in enumerate(KINDS):
        mine = a.kind == code
        if mine.any():
            kinds[kind] = _relative(float(ours[mine].sum()), float(theirs[mine].sum()))
    off = np.abs(ours - theirs)
    by = np.argsort(-off, kind="stable")[:worst]
    sizes = tuple(float(x) / (1 << 30) for x in measured_bytes)
    return Fidelity(
        label=predicted.label or measured.label,
        predicted_ms=predicted.makespan_ms,
        predicted_reduced_ms=predicted.reduced_ms,
        measured_reduced_ms=took + measured.reduced_ms - measured.makespan_ms,
        measured_ms=took,
        step_error=_relative(predicted.makespan_ms, took),
        busy_error=tuple(_relative(float(p), float(m)) for p, m in zip(predicted.busy_ms, measured.busy_ms)),
        kind_error=kinds,
        op_error=float(np.mean(off / np.maximum(theirs, 1e-9))) if off.size else 0.0,
        predicted_gib=predicted.peak_gib,
        measured_gib=sizes,
        memory_error=tuple(_relative(p, m) for p, m in zip(predicted.peak_gib, sizes)),
        worst=tuple(
            OpError(
                op=str(predicted.op(int(i))),
                rank=int(a.rank[i]),
                predicted_ms=float(ours[i]),
                measured_ms=float(theirs[i]),
                start_off_ms=float(b.start_ms[i] - a.start_ms[i]),
            )
            for i in by
        ),
        measured_overlap=hidden(measured),
        predicted_overlap=hidden(predicted),
    )


def hidden(timeline: Timeline, gap_ms: float = 0.05) -> Hidden:
    """Return the overlap of a timeline. Gaps below `gap_ms` count as compute, since real ops are microseconds apart."""
    s, t = timeline.spans, timeline.transfers
    if t.source.size == 0:
        return Hidden(1.0, 1.0, 1.0)
    end = s.end_ms.copy()
    follows = (s.rank[1:] == s.rank[:-1]) & (s.start_ms[1:] - end[:-1] < gap_ms)
    end[:-1] = np.where(follows, np.maximum(s.start_ms[1:], end[:-1]), end[:-1])
    took = np.concatenate([t.end_ms - t.start_ms] * 2)
    behind = np.zeros(took.size)
    ends = np.concatenate([t.source, t.destination])
    starts, stops = np.tile(t.start_ms, 2), np.tile(t.end_ms, 2)
    for rank in range(timeline.num_ranks):
        mine, ops = ends == rank, s.rank == rank
        busy = _busy_before(s.start_ms[ops], end[ops])
        behind[mine] = busy(stops[mine]) - busy(starts[mine])
    slack = 1e-9 * (1.0 + took)
    # The overlap of a transfer that takes no time cannot be measured, so it counts as hidden.
    return Hidden(
        wholly=float(np.mean(behind >= took - slack)),
        partly=float(np.mean((behind > slack) | (took <= slack))),
        time=float(min(1.0, behind.sum() / took.sum())) if took.sum() > 0 else 1.0,
    )


def _busy_before(start: Floats, end: Floats) -> Callable[[Floats], Floats]:
    """Return a function that gives the busy time before each of some times, for ops that follow one another."""
    before = np.concatenate(([0.0], np.cumsum(end - start)))

    def busy(times: Floats) -> Floats:
        k = np.searchsorted(start, times, side="right")
        last = np.maximum(k - 1, 0)
        running = np.where(k > 0, np.minimum(times, end[last]) - start[last], 0.0)
        return before[last] + np.maximum(running, 0.0)

    return busy


def _relative(predicted: float, measured: float) -> float:
    return 0.0 if measured <= 0 else (predicted - measured) / measured

"""Costs of ops, including pairs: the segments of a stage's ops, and the time of two ops that run together.

Knows: how the segments of layers are concatenated in a stage (backward: the last layer first), and which op of a pair
has W that can fill exposed exchange time. Does not know: how two sequences are interleaved (`two_lanes`), or when
anything happens.

Without segments in the costs, every op is one compute segment, and a pair takes as long as its two ops one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octopipe.costs.segments import Segments
from octopipe.costs.table import CostTable
from octopipe.plans.plan import KINDS, Op, Plan, Stage, W
from octopipe.plans.price import Array, stage_times, time_parts
from octopipe.plans.two_lanes import Sequence, Walk, interleave, sequence, with_filler

EMPTY = Sequence(0, np.zeros(0))


class Together(NamedTuple):
    """Two ops that run together."""

    ms: float
    walk: Walk
    filler_ms: float
    """W that fills the exposed exchange time."""
    one_by_one: bool
    """Whether they run one after the other, because that is shorter."""


def op_durations(plan: Plan, costs: CostTable) -> Array:
    """Time of every op, in the op table's numbering; the first op of a pair has its time, the second op has zero."""
    t = plan.table()
    alone = np.ascontiguousarray(stage_times(plan, costs)[t.kind, t.stage, t.micro_batch])
    return alone if t.lead is None else paired(plan, costs, alone)


def paired(plan: Plan, costs: CostTable, alone: Array) -> Array:
    """The times of single ops, with the time of every pair at its first op and zero at its second."""
    t = plan.table()
    assert t.lead is not None
    out = alone.copy()
    prices = PairPrices(plan, costs)
    for second in np.flatnonzero(t.lead != np.arange(t.lead.size)):
        first = int(t.lead[second])
        out[first] = prices.together(plan.op(first), plan.op(int(second))).ms
        out[second] = 0.0
    return out


class PairPrices:
    """Prices of the pairs of one plan; each price is computed once."""

    def __init__(self, plan: Plan, costs: CostTable):
        self.plan, self.costs = plan, costs
        self.segments = costs.segments
        self.times = stage_times(plan, costs)
        self._known: dict[tuple[object, ...], Together] = {}
        self._sequences: dict[tuple[object, ...], Sequence] = {}
        factor = costs.micro_batch_factor
        # Micro-batches of one size share their prices.
        self._size: list[object] = [0] * plan.num_micro_batches
        if factor is not None:
            self._size = [factor[m].tobytes() for m in range(plan.num_micro_batches)]

    @property
    def slowing(self) -> tuple[float, float]:
        return (0.0, 0.0) if self.segments is None else (self.segments.slows_compute, self.segments.slows_exchange)

    def alone_ms(self, op: Op) -> float:
        return float(self.times[KINDS.index(op.kind), op.stage, op.micro_batch])

    def kind_of(self, op: Op) -> tuple[object, ...]:
        """A key that is equal for ops with equal costs."""
        return op.kind, op.stage, self._size[op.micro_batch]

    def sequence(self, op: Op) -> Sequence:
        """The segments of an op; W has none, and those of B are those of its I."""
        key = self.kind_of(op)
        if key not in self._sequences:
            self._sequences[key] = self._sequence(op)
        return self._sequences[key]

    def _sequence(self, op: Op) -> Sequence:
        if op.kind == "W":
            return EMPTY
        kind = "I" if op.kind == "B" else op.kind
        if self.segments is None:
            return sequence([("compute", float(self.times[KINDS.index(kind), op.stage, op.micro_batch]))])
        stage = self.plan.stages[op.stage]
        return stage_sequence(self.segments, self.costs, stage, kind, op.micro_batch)

    def filler_ms(self, op: Op) -> float:
        """The W part of an op, which can be placed anywhere."""
        return float(self.times[W, op.stage, op.micro_batch]) if op.kind in "WB" else 0.0

    def together(self, first: Op, second: Op) -> Together:
        """The time of two ops that run together."""
        key = (self.kind_of(first), self.kind_of(second))
        found = self._known.get(key)
        if found is None:
            walk = interleave(self.sequence(first), self.sequence(second), *self.slowing)
            filler = self.filler_ms(first) + self.filler_ms(second)
            took = with_filler(walk, filler, *self.slowing)
            apart = self.alone_ms(first) + self.alone_ms(second)
            found = self._known[key] = Together(min(took, apart), walk, filler, apart <= took)
        return found


def stage_sequence(segments: Segments, costs: CostTable, stage: Stage, kind: str, micro_batch: int = 0) -> Sequence:
    """Return the merged segments of one F, R or I of a stage on its rank, for the micro-batch with this number."""
    return sequence(stage_parts(segments, costs, stage, kind, micro_batch))


def stage_parts(
    segments: Segments, costs: CostTable, stage: Stage, kind: str, micro_batch: int = 0
) -> list[tuple[str, float]]:
    """Return the segments of `stage_sequence` before they are merged: those of every layer in turn, with `beside` for
    compute that may overlap an exchange in an op that runs alone."""
    layers = stage.recomputed_layers if kind == "R" else range(stage.first, stage.stop)
    times = costs.layer_times(kind) * costs.factor(micro_batch) * costs.slowdown(stage.rank)
    if stage.shard is not None:
        times[stage.first : stage.stop] *= time_parts(stage, costs, kind)
    order = reversed(layers) if kind == "I" else layers
    return [(lane, float(times[k]) * share) for k in order for lane, share in segments.parts(kind, k)]

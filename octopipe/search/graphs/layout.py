"""A structure with a split head: its stages, their connections and their costs.

Knows: how a body of consecutive stages, shards of the head (and of the embedding) and the loss become stages and
edges, and their costs in the form that the scheduler reads. Does not know: keys, orders or how structures are searched.

    body 0 -> body 1 -> ... -> body n-1 -> each shard of the head -> the loss

If the embedding is split as well, its shards precede the body, which adds their outputs. A head that is tied to the
embedding is split in the same way on the same ranks, so that every rank holds each of its rows once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octopipe.costs.table import CostTable
from octopipe.plans.paths import Edge, neighbours
from octopipe.plans.plan import Stage
from octopipe.plans.price import PARTIAL_BYTES, time_parts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Partition and placement of a model whose head is split."""

    bounds: tuple[int, ...]
    """The first layer of every stage of the body, followed by the head. The body begins with the first layer that is
    not cut."""
    ranks: tuple[int, ...]
    """The rank of every stage of the body."""
    shards: tuple[int, ...]
    """The rank of every shard of the head."""
    loss: int
    """The rank of the stage that computes the loss from the partial sums of the shards."""

    @property
    def cuts_embedding(self) -> bool:
        return self.bounds[0] > 0

    def stages(self) -> list[Stage]:
        """The stages in the order of the path: shards of the embedding, the body, shards of the head, the loss."""
        count, head = len(self.shards), self.bounds[-1]
        parts = [(k, count) for k in range(count)]
        out = []
        if self.cuts_embedding:
            out += [Stage(first=0, stop=1, rank=r, shard=part) for r, part in zip(self.shards, parts, strict=True)]
        out += [
            Stage(first=a, stop=b, rank=r) for a, b, r in zip(self.bounds, self.bounds[1:], self.ranks, strict=False)
        ]
        out += [
            Stage(first=head, stop=head + 1, rank=r, shard=part) for r, part in zip(self.shards, parts, strict=True)
        ]
        return [*out, Stage(first=head + 1, stop=head + 1, rank=self.loss)]

    @property
    def fork(self) -> int:
        """The last stage of the body, whose output goes to every shard."""
        return (len(self.shards) if self.cuts_embedding else 0) + len(self.ranks) - 1

    def edges(self) -> tuple[Edge, ...]:
        count, last = len(self.shards), self.fork
        first = count if self.cuts_embedding else 0
        loss = last + 1 + count
        out = [(k, first) for k in range(first)]
        out += [(s, s + 1) for s in range(first, last)]
        return (*out, *((last, last + 1 + k) for k in range(count)), *((last + 1 + k, loss) for k in range(count)))


class Priced(NamedTuple):
    """The costs of a layout as the kernels `schedule` and `orders` read them."""

    ms: Floats
    """[F, I or W, stage, micro-batch]"""
    held: Floats
    """[stage, micro-batch]: bytes that an activation takes from F until I."""
    stash: Floats
    """[stage, micro-batch]: bytes that stay from I until W."""
    nbytes: Floats
    """[stage, micro-batch]: bytes of a stage's output."""
    rank: Ints
    before: Ints
    """[path, stage, k]: the stages whose outputs a stage takes, padded with -1; `after`: the stages that take its
    output."""
    after: Ints
    share: Floats
    """[path, stage]: to how many other ranks its output is sent, at least 1. Every one of these transfers takes this
    many times as long per byte."""
    room: Floats
    """[rank]: bytes that are free for activations."""
    later: Floats
    """[stage]: bytes that one micro-batch will still take in later stages of the same rank."""
    path: Ints
    """[micro-batch]: its path."""
    turns: Ints
    """[stage, k]: the micro-batches that pass a stage, in their order."""
    counts: Ints
    """[stage]: how many micro-batches pass it."""
    latency: Floats
    """[rank, rank], ms"""
    per_byte: Floats
    """[rank, rank], ms per byte"""


class Prices:
    """The costs of layouts of one model on one cluster."""

    def __init__(self, costs: CostTable, num_ranks: int, num_micro_batches: int):
        self.costs, self.num_ranks, self.num_micro_batches = costs, num_ranks, num_micro_batches
        factor = costs.micro_batch_factor
        size = np.ones((1, costs.num_layers)) if factor is None else factor[:num_micro_batches]

        def summed(values: Floats) -> Floats:
            rows = size * values
            return np.concatenate((np.zeros((rows.shape[0], 1)), np.cumsum(rows, axis=1)), axis=1)

        self._times = [summed(v) for v in (costs.forward_ms, costs.input_ms, costs.weight_ms)]
        self._bytes = [summed(v) for v in (costs.activation_bytes, costs.stash_bytes)]
        handed = size if costs.handed_factor is None else costs.handed_factor[:num_micro_batches]
        self._boundary = handed * costs.boundary_bytes
        self._partial = size[:, -1] * PARTIAL_BYTES * (costs.tokens_per_micro_batch or 0)
        self._static = np.concatenate(([0.0], np.cumsum(costs.static_bytes)))
        self._slow = np.array([costs.slowdown(r) for r in range(num_ranks)])
        self._capacity = np.array([costs.capacity_bytes(r) for r in range(num_ranks)])
        self.latency, self.per_byte = np.zeros((num_ranks, num_ranks)), np.zeros((num_ranks, num_ranks))
        for a in range(num_ranks):
            for b in range(num_ranks):
                if a != b:
                    link = costs.network.link(a, b)
                    self.latency[a, b], self.per_byte[a, b] = link.latency_ms, link.ms_per_byte
        self.layer_ms = size.mean(axis=0) * costs.layer_ms

    def _time_parts(self, stages: list[Stage], part: Floats) -> list[Floats]:
        """For F, I and W: the share of its layers' time that every stage takes."""
        if not self.costs.shard_times:
            return [part, part, part]
        return [
            np.array([time_parts(s, self.costs, kind)[0] if s.shard else 1.0 for s in stages])  # a shard has one layer
            for kind in "FIW"
        ]

    def of(self, layout: Layout, tight: float) -> Priced | None:
        """The costs of a layout; None if weights and one micro-batch do not fit. `tight` is the share of the free
        memory that may be used; the rest is for what schedules do not count (tensors between stages)."""
        stages, path_edges = layout.stages(), layout.edges()
        count, shape = len(stages), (len(stages), self.num_micro_batches)
        rank = np.array([s.rank for s in stages], np.int64)
        part = np.array([1.0 if s.shard is None else 1.0 / s.shard[1] for s in stages])
        first = np.array([s.first for s in stages])
        stop = np.array([s.stop for s in stages])
        ms = np.stack(
            [
                np.broadcast_to((self._slow[rank] * share_of_time)[:, None] * (t[:, stop] - t[:, first]).T, shape)
                for t, share_of_time in zip(self._times, self._time_parts(stages, part), strict=True)
            ]
        )
        held, stash = (np.broadcast_to(part[:, None] * (t[:, stop] - t[:, first]).T, shape) for t in self._bytes)
        nbytes = np.broadcast_to(self._boundary[:, stop - 1].T, shape).copy()
        nbytes[[k for k, s in enumerate(stages) if s.shard is not None and s.first > 0]] = self._partial
        route = tuple(range(count))
        before, after = neighbours((route,), (path_edges,), count)
        share = np.ones((1, count))
        fork = layout.fork
        share[0, fork] = max(1, len({*layout.shards} - {layout.ranks[-1]}))
        room = np.full(self.num_ranks, np.inf)
        most, later, so_far = held.max(axis=1).tolist(), np.zeros(count), [0.0] * self.num_ranks
        for s in range(count - 1, -1, -1):
            r = stages[s].rank
            later[s] = so_far[r]
            so_far[r] += most[s]
        if np.isfinite(self._capacity).any():
            static, space = np.zeros(self.num_ranks), np.zeros(self.num_ranks)
            for stage in stages:
                share_of = 1.0 if stage.shard is None else 1.0 / stage.shard[1]
                static[stage.rank] += share_of * (self._static[stage.stop] - self._static[stage.first])
                work = self.costs.workspace_bytes[stage.first : stage.stop].max(initial=0.0)
                space[stage.rank] = max(space[stage.rank], share_of * work)
            if self.costs.tied_bytes and layout.cuts_embedding:
                for r in layout.shards:
                    static[r] -= self.costs.tied_bytes / len(layout.shards)
            room = (self._capacity - static - space) * np.where(np.isfinite(self._capacity), tight, 1.0)
            if np.any(room < so_far):
                return None
        contiguous = np.ascontiguousarray
        return Priced(
            contiguous(ms), contiguous(held), contiguous(stash), nbytes, rank, before.astype(np.int64),
            after.astype(np.int64), share, room, later, np.zeros(shape[1], np.int64),
            np.tile(np.arange(shape[1], dtype=np.int64), (count, 1)), np.full(count, shape[1], np.int64),
            self.latency, self.per_byte,
        )  # fmt: skip

"""Repetends: one period of a pipeline's steady state, in which every block of a micro-batch runs once.

Knows: the blocks of a micro-batch (stage, kind, rank, span, bytes) and what they wait for; how a period is unrolled
into orders for any number of micro-batches. Does not know: solvers (repetend_solver.py) or systems (tessel.py).

A repetend is a period T and a flat start for every block: block i of micro-batch n runs at flat_i + n T. The
micro-batch ids of Tessel's repetend are floor(flat_i / T); its cuts of the chain are the places where these grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octopipe.costs.table import CostTable
from octopipe.plans.plan import KINDS, Op, Plan, Stage
from octopipe.plans.price import hop_times, stage_memory, stage_times
from octopipe.search.systems.shapes import make_plan

Floats = NDArray[np.float64]
RESOLUTION = 500
"""Number of time units into which the busiest rank's work of one micro-batch is divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One op of every micro-batch; times in units."""

    stage: int
    kind: str
    rank: int
    span: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """The blocks of a micro-batch in an order that respects their dependencies."""

    costs: CostTable
    num_ranks: int
    stages: tuple[Stage, ...]
    blocks: tuple[Block, ...]
    edges: tuple[tuple[int, int, int], ...]
    """(block before, block after, units of transfer between them), sorted by the block after."""
    activation: Floats
    """[stage]: bytes held from F to I (or B)."""
    stash: Floats
    """[stage]: the part of them that is held until W; zero if the backward is not split."""
    unit_ms: float

    @classmethod
    def of(cls, costs: CostTable, num_ranks: int, stages: tuple[Stage, ...], *, split: bool) -> Blocks:
        """Return the blocks of a micro-batch of mean duration on these stages."""
        kinds = "FIW" if split else "FB"
        m = 1 if costs.micro_batch_factor is None else costs.micro_batch_factor.shape[0]
        orders: list[list[Op]] = [[] for _ in range(num_ranks)]
        for s, stage in enumerate(stages):
            orders[stage.rank] += [Op(s, kind, k) for k in range(m) for kind in kinds]
        sample = make_plan(costs, num_ranks, m, stages, orders)
        times = stage_times(sample, costs).mean(axis=2)
        forward, gradient = (hop.mean(axis=1) for hop in hop_times(sample, costs))
        memory = stage_memory(sample, costs)
        depth = len(stages)
        chain = [(s, "F") for s in range(depth)]
        for s in range(depth - 1, -1, -1):
            chain += [(s, "I"), (s, "W")] if split else [(s, "B")]
        work = np.zeros(num_ranks)
        for s, kind in chain:
            work[stages[s].rank] += times[KINDS.index(kind), s]
        unit = float(work.max()) / RESOLUTION or 1.0

        def units(ms: float) -> int:
            return round(float(ms) / unit)

        number = {cell: i for i, cell in enumerate(chain)}
        back = "I" if split else "B"
        edges = []
        for s in range(depth):
            if s + 1 < depth:
                edges.append((number[s, "F"], number[s + 1, "F"], units(forward[s])))
                edges.append((number[s + 1, back], number[s, back], units(gradient[s + 1])))
            else:
                edges.append((number[s, "F"], number[s, back], 0))
            if split:
                edges.append((number[s, "I"], number[s, "W"], 0))
        return cls(
            costs=costs,
            num_ranks=num_ranks,
            stages=stages,
            blocks=tuple(
                Block(stage=s, kind=kind, rank=stages[s].rank, span=units(times[KINDS.index(kind), s]))
                for s, kind in chain
            ),
            edges=tuple(sorted(edges, key=lambda edge: edge[1])),
            activation=memory.activation.max(axis=1),
            stash=memory.stash.max(axis=1) if split else np.zeros(depth),
            unit_ms=unit,
        )

    @property
    def work(self) -> list[int]:
        """[rank]: time units of work per micro-batch; the maximum is the shortest possible period."""
        out = [0] * self.num_ranks
        for block in self.blocks:
            out[block.rank] += block.span
        return out

    def waits_for(self) -> list[list[tuple[int, int]]]:
        """Return for every block the (block, units of transfer) that it waits for."""
        out: list[list[tuple[int, int]]] = [[] for _ in self.blocks]
        for a, b, transfer in self.edges:
            out[b].append((a, transfer))
        return out

    def on_rank(self, rank: int) -> list[int]:
        return [i for i, block in enumerate(self.blocks) if block.rank == rank]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Repetend:
    """A period and the flat start of every block, in units."""

    of: Blocks
    period: int
    flat: tuple[int, ...]

    @property
    def depth(self) -> tuple[int, ...]:
        """[block]: how many periods after the first block of its micro-batch it runs.

        The period of a rank is counted from its own first block, so that a period is a contiguous part of its order.
        """
        begin = [0] * self.of.num_ranks
        for rank in range(self.of.num_ranks):
            begin[rank] = min((self.flat[i] for i in self.of.on_rank(rank)), default=0) % self.period
        shifted = [(f - begin[b.rank]) // self.period for f, b in zip(self.flat, self.of.blocks)]
        least = min(shifted)
        return tuple(k - least for k in shifted)

    @property
    def micro_batches(self) -> int:
        """R: number of micro-batches in one repetend."""
        return max(self.depth) + 1

    def order(self, num_micro_batches: int) -> list[list[tuple[int, int]]]:
        """Return for every rank its (block, micro-batch), sorted by the unrolled flat starts."""
        rows: list[list[tuple[int, int, int]]] = [[] for _ in range(self.of.num_ranks)]
        for i, block in enumerate(self.of.blocks):
            for n in range(num_micro_batches):
                rows[block.rank].append((self.flat[i] + n * self.period, i, n))
        return [[(i, n) for _, i, n in sorted(row)] for row in rows]

    def plan(self, num_micro_batches: int) -> Plan:
        """Return the unrolled plan, with warm-up, repetends and cool-down as they follow from the flat starts."""
        return plan_of(self.of, num_micro_batches, self.order(num_micro_batches))


def plan_of(blocks: Blocks, num_micro_batches: int, order: Sequence[Sequence[tuple[int, int]]]) -> Plan:
    """Return the plan of these orders of (block, micro-batch)."""
    rows = [[Op(blocks.blocks[i].stage, blocks.blocks[i].kind, n) for i, n in row] for row in order]
    return make_plan(blocks.costs, blocks.num_ranks, num_micro_batches, blocks.stages, rows)


def packed(blocks: Blocks, reversed_ranks: Sequence[int]) -> Repetend:
    """Return a repetend of Tessel's fast mode: each rank packs its blocks without gaps, some ranks in reverse order.
    One scan of the chain finds the ids: a block that would run too early is moved back by whole periods."""
    period = max(blocks.work)
    begin = [0] * len(blocks.blocks)
    for rank in range(blocks.num_ranks):
        clock = 0
        mine = blocks.on_rank(rank)
        for i in reversed(mine) if rank in reversed_ranks else mine:
            begin[i] = clock
            clock += blocks.blocks[i].span
    flat, before = list(begin), blocks.waits_for()
    for i in range(len(flat)):  # blocks stand in dependency order
        need = max((flat[a] + blocks.blocks[a].span + t for a, t in before[i]), default=begin[i])
        flat[i] += period * max(0, -((begin[i] - need) // period))
    return Repetend(of=blocks, period=period, flat=tuple(flat))


def serial(blocks: Blocks) -> Repetend:
    """Return the repetend that runs one micro-batch after another, which needs the least memory."""
    before, free = blocks.waits_for(), [0] * blocks.num_ranks
    flat: list[int] = []
    for i, block in enumerate(blocks.blocks):  # blocks stand in dependency order
        arrived = [flat[a] + blocks.blocks[a].span + transfer for a, transfer in before[i]]
        flat.append(max([free[block.rank], *arrived]))
        free[block.rank] = flat[i] + block.span
    return Repetend(of=blocks, period=max(f + b.span for f, b in zip(flat, blocks.blocks)), flat=tuple(flat))


def packed_tightly(blocks: Blocks, period: int) -> Repetend:
    """Return a good repetend, found quickly: blocks are placed in dependency order, each as early as its rank is free.

    A block is placed only if the remaining blocks of its rank still fit into the gaps. Of several randomised tries,
    the one that ends first is returned; if all fail, a packed repetend.
    """
    tried = [_first_fit(blocks, period, seed) for seed in range(64)]
    found = [flat for flat in tried if flat]
    if not found:
        return packed(blocks, range(1, blocks.num_ranks, 2))
    return Repetend(of=blocks, period=period, flat=tuple(min(found, key=max)))


def _first_fit(blocks: Blocks, period: int, seed: int) -> list[int] | None:
    draw = np.random.default_rng(seed)
    before = blocks.waits_for()
    left = [sorted(blocks.blocks[i].span for i in blocks.on_rank(r)) for r in range(blocks.num_ranks)]
    taken: list[list[tuple[int, int]]] = [[] for _ in range(blocks.num_ranks)]
    flat: list[int] = []
    for i, block in enumerate(blocks.blocks):
        ready = max((flat[a] + blocks.blocks[a].span + t for a, t in before[i]), default=0)
        left[block.rank].remove(block.span)
        starts = [ready]
        for begin, end in taken[block.rank]:
            starts += [ready + (end - ready) % period, ready + (begin - block.span - ready) % period]
        for start in sorted(starts):
            if not _free(taken[block.rank], start % period, block.span, period):
                continue
            mine = [*taken[block.rank], (start % period, (start % period + block.span) % period)]
            if _packs(mine, left[block.rank], period) and (seed == 0 or draw.random() < 0.9):
                break
        else:
            return None
        taken[block.rank] = mine
        flat.append(start)
    return flat


def _free(taken: list[tuple[int, int]], place: int, span: int, period: int) -> bool:
    for begin, end in taken:
        length = (end - begin) % period
        if (begin - place) % period < span or (place - begin) % period < length:
            return False
    return True


def _packs(taken: list[tuple[int, int]], spans: list[int], period: int) -> bool:
    """Whether the other spans still fit into the gaps, by best fit with the longest span first (a heuristic)."""
    edges = sorted(taken)
    gaps = [(nxt[0] - here[1]) % period for here, nxt in zip(edges, [*edges[1:], edges[0]])]
    if len(edges) == 1:
        gaps = [period - (edges[0][1] - edges[0][0]) % period]
    for span in sorted(spans, reverse=True):
        fitting = [g for g in gaps if g >= span]
        if not fitting:
            return False
        gap = min(fitting)
        gaps.remove(gap)
        gaps.append(gap - span)
    return True

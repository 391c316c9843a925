"""Ops, stages and orders: the components of a plan, and orders as text and as arrays.

Knows: the notation of an op, and the sequence of ops of each rank. Does not know: plans, or the dependencies of ops
(`plan`).

>>> op = Op.parse("2F0"); op.stage, op.kind, op.micro_batch, str(op)
(2, 'F', 0, '2F0')
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octopipe.base.errors import OctoPipeError, PlanError

KINDS = "FRIWB"
"""Forward, recompute, input gradient, weight gradient, fused backward; the index in this tuple is the array code."""
F, R, I, W, B = range(5)
CODES = {kind: code for code, kind in enumerate(KINDS)}
_OP = re.compile(r"([0-9]{1,9})([FRIWB])([0-9]{1,9})")


class Op(NamedTuple):
    """One unit of compute: a stage, a kind (one of F, R, I, W, B) and a micro-batch."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Op:
        match = _OP.fullmatch(text.strip())
        if match is None:
            raise OctoPipeError(f"{text[:40]!r} is not an op; write stage, kind (F, I, W, B, R), micro-batch: 2F0")
        return cls(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A run of consecutive layers on one rank."""

    first: int
    stop: int
    """Exclusive: layers first .. stop-1. A stage without layers, after a split head, is the loss of the shards."""
    rank: int
    recompute: bool | tuple[int, ...] = False
    """False: keep all activations. True: recompute every layer. A tuple: recompute just these layers."""
    offload: bool = False
    """Whether its activations go to host memory between F and the backward, if the link has time for it."""
    shard: tuple[int, int] | None = None
    """(k, n): the k-th of n equal parts of its layers, each a separate stage (a head split by vocabulary)."""

    @property
    def num_layers(self) -> int:
        return self.stop - self.first

    @property
    def recomputed_layers(self) -> tuple[int, ...]:
        if self.recompute is True:
            return tuple(range(self.first, self.stop))
        return () if self.recompute is False else self.recompute


class OpTable(NamedTuple):
    """A plan's orders as integer arrays, rank after rank, used by validation, lowering and simulation."""

    stage: NDArray[np.int32]
    kind: NDArray[np.int8]
    micro_batch: NDArray[np.int32]
    rank: NDArray[np.int32]
    offsets: NDArray[np.int32]
    """Ops of rank r are offsets[r] .. offsets[r+1]-1, in execution order."""
    index: NDArray[np.int32]  # type: ignore[assignment]  # shadows tuple.index, which nobody needs here
    """index[kind, stage, micro_batch]: the op's number, or -1."""
    lead: NDArray[np.int32] | None = None
    """The first op of the op's pair, or the op itself if it has none; None in plans without pairs."""


def slot_text(slot: Sequence[Op]) -> str:
    """An op, or a pair as PyTorch's schedule text writes it.

    >>> slot_text((Op(2, "F", 3), Op(1, "I", 0)))
    '(2F3;1I0)OVERLAP_F_B'
    """
    return str(slot[0]) if len(slot) == 1 else f"({';'.join(map(str, slot))})OVERLAP_F_B"


def parse_orders(rows: Sequence[Sequence[str]]) -> tuple[tuple[Op, ...], ...]:
    """Orders from ops as text; errors name the rank and the position."""
    return parse_slots(rows, pairs=False)[0]


def parse_slots(
    rows: Sequence[Sequence[str]], *, pairs: bool = True
) -> tuple[tuple[tuple[Op, ...], ...], frozenset[tuple[Op, Op]]]:
    """Orders and their pairs from text, in which a pair is two ops joined by a plus sign.

    >>> parse_slots([["0F1+0B0"]])[0]
    ((Op(stage=0, kind='F', micro_batch=1), Op(stage=0, kind='B', micro_batch=0)),)
    """
    orders = []
    together = set()
    for rank, row in enumerate(rows):
        ops: list[Op] = []
        for position, text in enumerate(row):
            try:
                found = [Op.parse(part) for part in (text.split("+") if pairs else [text])]
            except OctoPipeError as error:
                raise PlanError([f"rank {rank}, position {position}: {error}"]) from None
            if len(found) > 2:
                raise PlanError(
                    [f"rank {rank}, position {position}: {text[:40]!r} joins more than two ops; a pair has two"]
                )
            if len(found) == 2:
                together.add((found[0], found[1]))
            ops += found
        orders.append(tuple(ops))
    return tuple(orders), frozenset(together)


def with_rank_order(t: OpTable, preds: NDArray[np.int32]) -> NDArray[np.int32]:
    """The data dependencies plus, as an additional column, the preceding op on the same rank.

    A pair is one node: its first op waits for the inputs of both, and its second op, which takes no time of
    its own, for the first. `preds` may name other nodes (transfers) as well.
    """
    previous = np.arange(-1, t.stage.size - 1, dtype=np.int32)
    starts = t.offsets[:-1]
    previous[starts[starts < t.stage.size]] = -1
    return np.ascontiguousarray(np.column_stack((joined(t, preds), previous)).astype(np.int32))


def joined(t: OpTable, preds: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the predecessors with every pair as one node (see `with_rank_order`); without pairs, `preds` itself."""
    if t.lead is None:
        return preds
    second = np.flatnonzero(t.lead != np.arange(t.lead.size))
    first = t.lead[second]
    width = preds.shape[1]
    out = np.full((preds.shape[0], 2 * width), -1, np.int32)
    out[:, :width] = preds
    out[first, width:] = preds[second]
    out[second, :width] = -1
    out[second, 0] = first
    return out

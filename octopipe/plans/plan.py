"""Plan: every decision about a pipeline and nothing else, with the one rule for what an op depends on.

Knows: stages, ranks, routes, orders. Does not know: times, transfers, memory, what makes a plan wrong (`plan_rules`).

>>> op = Op.parse("2F0"); op.stage, op.kind, op.micro_batch, str(op)
(2, 'F', 0, '2F0')
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octopipe.base.display import html_of, one_line
from octopipe.base.errors import OctoPipeError, PlanError

KINDS = "FRIWB"
"""Forward, recompute, input gradient, weight gradient, fused backward; the position is the array code."""
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
    """Half-open: layers first .. stop-1."""
    rank: int
    recompute: bool | tuple[int, ...] = False
    """False: keep all activations. True: recompute every layer. A tuple: recompute just these layers."""

    @property
    def num_layers(self) -> int:
        return self.stop - self.first

    @property
    def recomputed_layers(self) -> tuple[int, ...]:
        if self.recompute is True:
            return tuple(range(self.first, self.stop))
        return () if self.recompute is False else self.recompute


class OpTable(NamedTuple):
    """A plan's orders as integer arrays, rank after rank: what check, lowering and simulation compute on."""

    stage: NDArray[np.int32]
    kind: NDArray[np.int8]
    micro_batch: NDArray[np.int32]
    rank: NDArray[np.int32]
    offsets: NDArray[np.int32]
    """Ops of rank r are offsets[r] .. offsets[r+1]-1, in execution order."""
    index: NDArray[np.int32]  # type: ignore[assignment]  # shadows tuple.index, which nobody needs here
    """index[kind, stage, micro_batch]: the op's number, or -1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Partition, placement, order and recomputation of one pipeline step."""

    num_layers: int
    num_ranks: int
    num_micro_batches: int
    stages: tuple[Stage, ...]
    orders: tuple[tuple[Op, ...], ...]
    """One row per rank: its compute ops in sequence."""
    routes: tuple[tuple[int, ...], ...] = ()
    """The stages a micro-batch passes, in order; left out: one route over all stages."""
    route_of_micro_batch: tuple[int, ...] = ()
    model: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Provenance that never changes what the plan means (system, predicted numbers, cost digest)."""
    _table: OpTable | None = field(default=None, init=False, repr=False, compare=False)
    _preds: NDArray[np.int32] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.routes:
            object.__setattr__(self, "routes", (tuple(range(len(self.stages))),))
        if not self.route_of_micro_batch and len(self.routes) == 1:
            operations = sum(map(len, self.orders))
            if self.num_micro_batches > max(operations, 1):
                raise PlanError([f"{self.num_micro_batches} micro-batches but {operations} ops in orders"])
            object.__setattr__(self, "route_of_micro_batch", (0,) * self.num_micro_batches)

    # -- what an op depends on -------------------------------------------------------------------------

    def stage_before(self, stage: int, micro_batch: int) -> tuple[int, ...]:
        """Stages whose forward output `stage` consumes for this micro-batch (a chain today: none or one)."""
        route = self.routes[self.route_of_micro_batch[micro_batch]]
        at = route.index(stage)
        return (route[at - 1],) if at > 0 else ()

    def stage_after(self, stage: int, micro_batch: int) -> tuple[int, ...]:
        """Stages that consume this stage's forward output for this micro-batch."""
        route = self.routes[self.route_of_micro_batch[micro_batch]]
        at = route.index(stage)
        return (route[at + 1],) if at + 1 < len(route) else ()

    def table(self) -> OpTable:
        """The orders as arrays (computed once)."""
        if self._table is None:
            object.__setattr__(self, "_table", _encode(self))
        assert self._table is not None
        return self._table

    def predecessor_table(self) -> NDArray[np.int32]:
        """Data dependencies of every op as rows of op numbers padded with -1.

        This is the one rule that check, lowering, simulation and execution share:
        F needs the forward of the stage before; R its own F; I (or B) its own F, its R where there is one,
        and the I (or B) of the stage after; W its own I.
        """
        if self._preds is None:
            object.__setattr__(self, "_preds", _predecessors(self))
        assert self._preds is not None
        return self._preds

    def predecessors(self, op: Op) -> tuple[Op, ...]:
        """The ops whose results `op` needs."""
        table = self.table()
        number = int(table.index[CODES[op.kind], op.stage, op.micro_batch])
        return tuple(self.op(int(p)) for p in self.predecessor_table()[number] if p >= 0)

    def op(self, number: int) -> Op:
        """The op with this number in the table."""
        t = self.table()
        return Op(int(t.stage[number]), KINDS[t.kind[number]], int(t.micro_batch[number]))

    # -- views -----------------------------------------------------------------------------------------

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        return tuple(i for i, s in enumerate(self.stages) if s.rank == rank)

    @property
    def splits_backward(self) -> bool:
        return any(op.kind == "I" for order in self.orders for op in order)

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers per stage, in stage order."""
        return tuple(s.num_layers for s in self.stages)

    def replicas(self) -> dict[int, tuple[int, ...]]:
        """Layers that more than one rank holds, with those ranks: their gradients must be reduced."""
        holders: dict[int, set[int]] = {}
        for stage in self.stages:
            for layer in range(stage.first, stage.stop):
                holders.setdefault(layer, set()).add(stage.rank)
        return {layer: tuple(sorted(ranks)) for layer, ranks in holders.items() if len(ranks) > 1}

    def with_extra(self, **extra: Any) -> Plan:
        """The same plan with more provenance beside it."""
        return replace(self, extra={**self.extra, **extra})

    def to_csv(self) -> str:
        """One line per rank, ops separated by commas: PyTorch's compute-only schedule text."""
        return "".join(",".join(map(str, order)) + "\n" for order in self.orders)

    def __repr__(self) -> str:
        name = " on ".join(filter(None, (str(self.extra.get("system") or ""), self.model)))
        stages = f"{self.num_layers} layers in {len(self.stages)} stages on {self.num_ranks} ranks"
        return one_line("Plan", name, stages, f"{self.num_micro_batches} micro-batches")

    def _repr_html_(self) -> str | None:
        return html_of(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read and check a plan file (`octopipe.plan/1`)."""
        from octopipe.plans.file import load_plan  # the format is a module of its own, and it builds plans

        return load_plan(path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan with what is known about it; an interrupted write leaves the old file whole."""
        from octopipe.plans.file import save_plan

        save_plan(self, path)

    # -- being right -----------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Everything wrong with the plan, a line each that names op, rank and mend; empty when it can run."""
        from octopipe.plans.rules import problems  # a module of its own, and it looks at plans

        return problems(self)

    def check(self, where: str = "") -> Plan:
        """Raise PlanError unless the plan can run; returns the plan, so that calls chain."""
        problems = self.problems()
        if problems:
            raise PlanError([f"{where}: {p}" if where else p for p in problems])
        return self


def parse_orders(rows: Sequence[Sequence[str]]) -> tuple[tuple[Op, ...], ...]:
    """Orders from text ops; the error names rank and position."""
    orders = []
    for rank, row in enumerate(rows):
        ops = []
        for position, text in enumerate(row):
            try:
                ops.append(Op.parse(text))
            except OctoPipeError as error:
                raise PlanError([f"rank {rank}, position {position}: {error}"]) from None
        orders.append(tuple(ops))
    return tuple(orders)


def _encode(plan: Plan) -> OpTable:
    sizes = [len(order) for order in plan.orders]
    count = sum(sizes)
    flat = [op for order in plan.orders for op in order]
    stage = np.fromiter((op[0] for op in flat), np.int32, count)
    kind = np.fromiter((CODES[op[1]] for op in flat), np.int8, count)
    micro_batch = np.fromiter((op[2] for op in flat), np.int32, count)
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    rank = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    index = np.full((len(KINDS), len(plan.stages), plan.num_micro_batches), -1, np.int32)
    index[kind, stage, micro_batch] = np.arange(count, dtype=np.int32)
    return OpTable(stage, kind, micro_batch, rank, offsets, index)


def route_neighbours(plan: Plan) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """before[route, stage] and after[route, stage], -1 where there is none."""
    shape = (len(plan.routes), len(plan.stages))
    before, after = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    for r, route in enumerate(plan.routes):
        for a, b in itertools.pairwise(route):
            before[r, b] = a
            after[r, a] = b
    return before, after


def _predecessors(plan: Plan) -> NDArray[np.int32]:
    t = plan.table()
    before, after = route_neighbours(plan)
    route = np.asarray(plan.route_of_micro_batch, np.int32)[t.micro_batch]
    preds = np.full((t.stage.size, 3), -1, np.int32)

    def lookup(kind: int, stage: NDArray[np.int32], micro_batch: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.where(stage >= 0, t.index[kind, stage, micro_batch], -1)

    own_forward = t.index[F, t.stage, t.micro_batch]
    is_f, is_r, is_w = t.kind == F, t.kind == R, t.kind == W
    is_back = (t.kind == I) | (t.kind == B)
    preds[is_f, 0] = lookup(F, before[route, t.stage], t.micro_batch)[is_f]
    preds[is_r, 0] = own_forward[is_r]
    preds[is_w, 0] = t.index[I, t.stage, t.micro_batch][is_w]
    preds[is_back, 0] = own_forward[is_back]
    preds[is_back, 1] = t.index[R, t.stage, t.micro_batch][is_back]
    following = after[route, t.stage]
    gradient = np.maximum(lookup(I, following, t.micro_batch), lookup(B, following, t.micro_batch))
    preds[is_back, 2] = gradient[is_back]
    return preds


def with_rank_order(t: OpTable, preds: NDArray[np.int32]) -> NDArray[np.int32]:
    """The data dependencies plus, as one more column, the op before on the same rank."""
    previous = np.arange(-1, t.stage.size - 1, dtype=np.int32)
    starts = t.offsets[:-1]
    previous[starts[starts < t.stage.size]] = -1
    return np.ascontiguousarray(np.column_stack((preds, previous)).astype(np.int32))

"""Plan: every decision about a pipeline and nothing else, and the single rule for what an op depends on.

Knows: stages, ranks, paths, orders, pairs. Does not know: times, transfers, memory, when a plan is valid (`rules`), or
the file format (`plan_json`; docs/plan-format.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octopipe.base.display import html_of, one_line
from octopipe.base.errors import OctoPipeError, PlanError
from octopipe.base.files import read_bytes, shown, write_whole
from octopipe.base.limits import MAX_PLAN_BYTES
from octopipe.plans.op import (
    CODES,
    KINDS,
    B,
    F,
    I,
    Op,
    OpTable,
    R,
    Stage,
    W,
    joined,
    parse_orders,
    parse_slots,
    slot_text,
    with_rank_order,
)
from octopipe.plans.paths import Edge, neighbours, only_chains
from octopipe.plans.plan_json import plan_fields, plan_to_json
from octopipe.plans.rules import problems


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
    """The stages that a micro-batch passes, in order; default: one route over all stages."""
    route_of_micro_batch: tuple[int, ...] = ()
    edges: tuple[tuple[Edge, ...], ...] = ()
    """If paths fork or join: for each route the edges (from, to) between its stages, which are then listed in any
    topological order. Empty: every route is the chain of its stages."""
    pairs: frozenset[tuple[Op, Op]] = frozenset()
    """Ops that run together: each pair is two adjacent ops of one rank's order, in this sequence."""
    model: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Provenance that never changes what the plan means (system, predicted numbers, cost digest)."""
    _table: OpTable | None = field(default=None, init=False, repr=False, compare=False)
    _preds: NDArray[np.int32] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.routes:
            object.__setattr__(self, "routes", (tuple(range(len(self.stages))),))
        if self.edges and only_chains(
            self.routes, self.edges, [(s.first, s.stop, s.shard) for s in self.stages], self.num_layers
        ):
            object.__setattr__(self, "edges", ())
        if not self.route_of_micro_batch and len(self.routes) == 1:
            operations = sum(map(len, self.orders))
            if self.num_micro_batches > max(operations, 1):
                raise PlanError([f"{self.num_micro_batches} micro-batches but {operations} ops in orders"])
            object.__setattr__(self, "route_of_micro_batch", (0,) * self.num_micro_batches)

    # -- what an op depends on -------------------------------------------------------------------------

    def stage_before(self, stage: int, micro_batch: int) -> tuple[int, ...]:
        """Stages whose forward output `stage` consumes for this micro-batch."""
        return self._beside(stage, micro_batch, 0)

    def stage_after(self, stage: int, micro_batch: int) -> tuple[int, ...]:
        """Stages that consume this stage's forward output for this micro-batch."""
        return self._beside(stage, micro_batch, 1)

    def _beside(self, stage: int, micro_batch: int, side: int) -> tuple[int, ...]:
        number = self.route_of_micro_batch[micro_batch]
        route = self.routes[number]
        if self.edges:
            if stage not in route:
                raise ValueError(f"micro-batch {micro_batch} does not pass stage {stage}")
            return tuple(edge[side] for edge in self.edges[number] if edge[1 - side] == stage)
        at = route.index(stage) + (1 if side else -1)
        return (route[at],) if 0 <= at < len(route) else ()

    def table(self) -> OpTable:
        """The orders as arrays (computed once)."""
        if self._table is None:
            object.__setattr__(self, "_table", _encode(self))
        assert self._table is not None
        return self._table

    def predecessor_table(self) -> NDArray[np.int32]:
        """Data dependencies of every op as rows of op numbers padded with -1.

        This is the single rule that validation, lowering, simulation and execution share:
        F depends on the F of all preceding stages; R on its own F; I (or B) on its own F, on its R if there is one,
        and on the I (or B) of all following stages; W on its own I.
        Columns: an F has its preceding stages in column 0 and from column 3 on; I and B have F, R and the first
        following stage in columns 0 to 2, and further following stages from column 3 on. Chains have three columns.
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
        """Layers that more than one rank holds, with these ranks; their gradients must be reduced.

        Shards of a layer are different parts of it, so a layer that is split into shards is not a replica.
        """
        holders: dict[int, set[int]] = {}
        for stage in self.stages:
            for layer in range(stage.first, stage.stop) if stage.shard is None else ():
                holders.setdefault(layer, set()).add(stage.rank)
        return {layer: tuple(sorted(ranks)) for layer, ranks in holders.items() if len(ranks) > 1}

    def shards(self) -> dict[int, tuple[int, ...]]:
        """Layers that are split into shards, with the ranks of their shards in the order of the shards."""
        parts: dict[int, dict[int, int]] = {}
        for stage in self.stages:
            if stage.shard is not None:
                for layer in range(stage.first, stage.stop):
                    parts.setdefault(layer, {})[stage.shard[0]] = stage.rank
        return {layer: tuple(rank for _, rank in sorted(held.items())) for layer, held in parts.items()}

    def with_extra(self, **extra: Any) -> Plan:
        """The same plan with additional provenance."""
        return replace(self, extra={**self.extra, **extra})

    def adds_up(self, stage: int, into: Sequence[int]) -> bool:
        """Whether a stage takes the sum of its inputs: if they are the outputs of shards of one layer. The loss of a
        split head takes them one by one."""
        given = [self.stages[s] for s in into]
        parts = {(s.first, s.stop) for s in given}
        of_one = len(given) > 1 and len(parts) == 1 and all(s.shard for s in given)
        return of_one and self.stages[stage].first < self.stages[stage].stop

    @property
    def cut_heads(self) -> frozenset[int]:
        """Layers whose shards are parts of a vocabulary: the last layer, and those whose shards meet in a stage without
        layers, which computes the loss."""
        last = self.num_layers
        return frozenset(s.stop - 1 for s in self.stages if s.first == s.stop or (s.shard and s.stop == last))

    @property
    def forks(self) -> bool:
        """Whether some path is not a chain, or some layer is split into shards."""
        return bool(self.edges) or any(s.shard is not None for s in self.stages)

    @property
    def offloads(self) -> bool:
        """Whether some stage's activations may go to host memory."""
        return any(s.offload for s in self.stages)

    def slots(self, rank: int) -> tuple[tuple[Op, ...], ...]:
        """Return the rank's order as tuples: of a single op each, or of the two ops of a pair."""
        out: list[tuple[Op, ...]] = []
        for op in self.orders[rank]:
            if self.pairs and out and len(out[-1]) == 1 and (out[-1][0], op) in self.pairs:
                out[-1] = (out[-1][0], op)
            else:
                out.append((op,))
        return tuple(out)

    def to_csv(self) -> str:
        """One line per rank, ops separated by commas: PyTorch's compute-only schedule text."""
        if not self.pairs:
            return "".join(",".join(map(str, order)) + "\n" for order in self.orders)
        rows = ([slot_text(slot) for slot in self.slots(rank)] for rank in range(len(self.orders)))
        return "".join(",".join(row) + "\n" for row in rows)

    def __repr__(self) -> str:
        name = " on ".join(filter(None, (str(self.extra.get("system") or ""), self.model)))
        stages = f"{self.num_layers} layers in {len(self.stages)} stages on {self.num_ranks} ranks"
        return one_line("Plan", name, stages, f"{self.num_micro_batches} micro-batches")

    def _repr_html_(self) -> str | None:
        return html_of(self)

    @classmethod
    def from_json(cls, data: bytes | str, where: str = "plan") -> Plan:
        """A checked plan from JSON text; `where` names the source in errors."""
        fields = plan_fields(data, where)
        try:
            plan = cls(**fields)
        except PlanError as error:
            raise PlanError([f"{where}: {p}" for p in error.problems]) from None
        return plan.check(where)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read and check a plan file (`octopipe.plan/1` or `/2`)."""
        return cls.from_json(read_bytes(path, most_bytes=MAX_PLAN_BYTES), shown(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan with its provenance; an interrupted write leaves the old file intact."""
        write_whole(path, plan_to_json(self))

    def with_op_at(self, rank: int, here: int, there: int) -> Plan:
        """Return the plan with the op at position `here` of a rank's order moved to position `there`."""
        order = list(self.orders[rank])
        order.insert(there, order.pop(here))
        moved = replace(self, orders=(*self.orders[:rank], tuple(order), *self.orders[rank + 1 :]))
        if self._table is not None and not self.pairs:  # a search over orders need not encode each one from scratch
            object.__setattr__(moved, "_table", _with_row_moved(self._table, rank, here, there))
        return moved

    # -- validity --------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """All problems of the plan, one line each with op, rank and remedy; empty if the plan can run."""
        return problems(self)

    def check(self, where: str = "") -> Plan:
        """Raise PlanError unless the plan can run; returns the plan, so that calls chain."""
        problems = self.problems()
        if problems:
            raise PlanError([f"{where}: {p}" if where else p for p in problems])
        return self


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
    return OpTable(stage, kind, micro_batch, rank, offsets, index, _leads(plan, index))


def _with_row_moved(t: OpTable, rank: int, here: int, there: int) -> OpTable:
    """Return the table with one op moved to another position of its rank's order."""
    start = int(t.offsets[rank])
    first, last = start + min(here, there), start + max(here, there)
    among = np.roll(np.arange(first, last + 1), -1 if here < there else 1)
    stage, kind, micro_batch, index = t.stage.copy(), t.kind.copy(), t.micro_batch.copy(), t.index.copy()
    for column in (stage, kind, micro_batch):
        column[first : last + 1] = column[among]
    here_now = slice(first, last + 1)
    index[kind[here_now], stage[here_now], micro_batch[here_now]] = np.arange(first, last + 1, dtype=np.int32)
    return OpTable(stage, kind, micro_batch, t.rank, t.offsets, index, None)


def _leads(plan: Plan, index: NDArray[np.int32]) -> NDArray[np.int32] | None:
    if not plan.pairs:
        return None
    lead = np.arange(sum(map(len, plan.orders)), dtype=np.int32)
    for first, second in plan.pairs:
        lead[index[CODES[second.kind], second.stage, second.micro_batch]] = index[
            CODES[first.kind], first.stage, first.micro_batch
        ]
    return lead


def route_neighbours(plan: Plan) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return before[route, stage] and after[route, stage]: the neighbouring stages, or -1.

    Raise an error if paths fork or join.
    """
    if plan.edges:
        raise OctoPipeError(
            "this plan's paths fork or join, and this operation supports chains of stages only; use a plan made "
            "without --mtp and --cut-head"
        )
    before, after = neighbours(plan.routes, plan.edges, len(plan.stages))
    return np.ascontiguousarray(before[:, :, 0]), np.ascontiguousarray(after[:, :, 0])


def _predecessors(plan: Plan) -> NDArray[np.int32]:
    t = plan.table()
    before, after = neighbours(plan.routes, plan.edges, len(plan.stages))
    route = np.asarray(plan.route_of_micro_batch, np.int32)[t.micro_batch]
    preds = np.full((t.stage.size, 2 + max(before.shape[2], after.shape[2])), -1, np.int32)

    def lookup(kind: int, stage: NDArray[np.int32], micro_batch: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.where(stage >= 0, t.index[kind, stage, micro_batch], -1)

    own_forward = t.index[F, t.stage, t.micro_batch]
    is_f, is_r, is_w = t.kind == F, t.kind == R, t.kind == W
    is_back = (t.kind == I) | (t.kind == B)
    for k in range(before.shape[2]):
        column = 0 if k == 0 else 2 + k
        preds[is_f, column] = lookup(F, before[route, t.stage, k], t.micro_batch)[is_f]
    preds[is_r, 0] = own_forward[is_r]
    preds[is_w, 0] = t.index[I, t.stage, t.micro_batch][is_w]
    preds[is_back, 0] = own_forward[is_back]
    preds[is_back, 1] = t.index[R, t.stage, t.micro_batch][is_back]
    for k in range(after.shape[2]):
        following = after[route, t.stage, k]
        gradient = np.maximum(lookup(I, following, t.micro_batch), lookup(B, following, t.micro_batch))
        preds[is_back, 2 + k] = gradient[is_back]
    return preds


__all__ = [
    "CODES",
    "KINDS",
    "B",
    "F",
    "I",
    "Op",
    "OpTable",
    "Plan",
    "R",
    "Stage",
    "W",
    "joined",
    "parse_orders",
    "parse_slots",
    "route_neighbours",
    "slot_text",
    "with_rank_order",
]

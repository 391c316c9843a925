"""Plan: every decision about a pipeline and nothing else, with the one rule for what an op depends on.

Knows: stages, ranks, routes, orders, what makes a plan wrong. Does not know: times, transfers, memory.

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

from octopipe._graph import find_cycle
from octopipe.display import html_of, one_line
from octopipe.errors import OctoPipeError, PlanError
from octopipe.limits import plan_too_large

KINDS = "FRIWB"
"""Forward, recompute, input gradient, weight gradient, fused backward; the position is the array code."""
F, R, I, W, B = range(5)
CODES = {kind: code for code, kind in enumerate(KINDS)}
_OP = re.compile(r"([0-9]{1,9})([FRIWB])([0-9]{1,9})")
_MAX_PROBLEMS = 20


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
        from octopipe.plan_file import load_plan  # the format is a module of its own, and it builds plans

        return load_plan(path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan with what is known about it; an interrupted write leaves the old file whole."""
        from octopipe.plan_file import save_plan

        save_plan(self, path)

    # -- being right -----------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Everything wrong with the plan, a line each that names op, rank and mend; empty when it can run."""
        problems = _structure_problems(self)
        if not problems:
            problems = _op_problems(self)
        if not problems:
            problems = _order_problems(self)
        return problems

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


def _structure_problems(plan: Plan) -> list[str]:
    out = plan_too_large(plan)
    if out:
        return out
    for name in ("num_layers", "num_ranks", "num_micro_batches"):
        if getattr(plan, name) < 1:
            out.append(f"{name} is {getattr(plan, name)}; it must be at least 1")
    if not plan.stages:
        out.append("there are no stages; give at least one")
    if len(plan.orders) != plan.num_ranks:
        out.append(f"orders has {len(plan.orders)} rows for {plan.num_ranks} ranks; give one row per rank")
    for i, s in enumerate(plan.stages):
        if not 0 <= s.first < s.stop <= plan.num_layers:
            out.append(f"stage {i} has layers [{s.first}, {s.stop}); they must lie inside [0, {plan.num_layers})")
        if not 0 <= s.rank < plan.num_ranks:
            out.append(f"stage {i} is on rank {s.rank}; ranks go from 0 to {plan.num_ranks - 1}")
        again = () if isinstance(s.recompute, bool) else s.recompute
        if any(not s.first <= k < s.stop for k in again) or len(set(again)) != len(again):
            out.append(f"stage {i} recomputes layers {list(again)[:8]}; name some of [{s.first}, {s.stop}) once")
    if out:
        return out[:_MAX_PROBLEMS]
    if len(plan.route_of_micro_batch) != plan.num_micro_batches:
        out.append(
            f"route_of_micro_batch has {len(plan.route_of_micro_batch)} entries for "
            f"{plan.num_micro_batches} micro-batches; give one route per micro-batch"
        )
    for m, r in enumerate(plan.route_of_micro_batch):
        if not 0 <= r < len(plan.routes):
            out.append(f"micro-batch {m} takes route {r}; routes go from 0 to {len(plan.routes) - 1}")
    used: set[int] = set()
    for r, route in enumerate(plan.routes):
        out += _route_problems(plan, r, route)
        used.update(route)
    for i in range(len(plan.stages)):
        if i not in used:
            out.append(f"stage {i} is on no route; add it to a route or remove it")
    return out[:_MAX_PROBLEMS]


def _route_problems(plan: Plan, number: int, route: tuple[int, ...]) -> list[str]:
    unknown = [s for s in route if not 0 <= s < len(plan.stages)]
    if unknown:
        return [f"route {number} names stage {unknown[0]}; stages go from 0 to {len(plan.stages) - 1}"]
    if not route:
        return [f"route {number} is empty; list its stages"]
    reached = 0
    for s in route:
        if plan.stages[s].first != reached:
            return [
                f"route {number}: stage {s} starts at layer {plan.stages[s].first} but layer {reached} comes next; "
                "stages of a route must cover the layers without gap or overlap"
            ]
        reached = plan.stages[s].stop
    if reached != plan.num_layers:
        return [f"route {number} ends at layer {reached} of {plan.num_layers}; add the missing layers"]
    return []


def _op_problems(plan: Plan) -> list[str]:
    out: list[str] = []
    seen: dict[Op, int] = {}
    members = [set(route) for route in plan.routes]
    for rank, order in enumerate(plan.orders):
        for op in order:
            if not 0 <= op.stage < len(plan.stages) or not 0 <= op.micro_batch < plan.num_micro_batches:
                out.append(
                    f"rank {rank} runs {op}, but stages go to {len(plan.stages) - 1} and micro-batches to "
                    f"{plan.num_micro_batches - 1}; remove it"
                )
            elif op in seen:
                out.append(f"rank {rank} runs {op} and rank {seen[op]} does too; each op runs once: remove one")
            elif plan.stages[op.stage].rank != rank:
                home = plan.stages[op.stage].rank
                out.append(f"rank {rank} runs {op}, but stage {op.stage} is on rank {home}; move it to rank {home}")
            elif op.stage not in members[plan.route_of_micro_batch[op.micro_batch]]:
                out.append(f"rank {rank} runs {op}, but micro-batch {op.micro_batch} does not pass that stage")
            seen[op] = rank
            if len(out) >= _MAX_PROBLEMS:
                return out
    for m in range(plan.num_micro_batches):
        for s in plan.routes[plan.route_of_micro_batch[m]]:
            out += _cell_problems(plan, s, m, seen)
            if len(out) >= _MAX_PROBLEMS:
                return out
    return out


def _cell_problems(plan: Plan, s: int, m: int, seen: Mapping[Op, int]) -> list[str]:
    """Is the set of ops of one stage and micro-batch complete?"""
    rank = plan.stages[s].rank
    has = {kind for kind in KINDS if Op(s, kind, m) in seen}
    out = []
    if "F" not in has:
        out.append(f"rank {rank} never runs {s}F{m}; add it")
    if "B" in has and has & {"I", "W"}:
        extra = next(k for k in "IW" if k in has)
        out.append(f"rank {rank} runs both {s}B{m} and {s}{extra}{m}; B is I and W in one: keep one form")
    elif "B" not in has:
        if "I" not in has and "W" not in has:
            out.append(f"rank {rank} has no backward for {s}F{m}; add {s}B{m}, or {s}I{m} and {s}W{m}")
        elif "I" not in has:
            out.append(f"rank {rank} runs {s}W{m} without {s}I{m}; add {s}I{m} before it")
        elif "W" not in has:
            out.append(f"rank {rank} runs {s}I{m} without {s}W{m}; add {s}W{m} after it")
    if "R" in has and not plan.stages[s].recompute:
        out.append(f"rank {rank} runs {s}R{m}, but stage {s} does not recompute; set its recompute or remove it")
    return out


def _order_problems(plan: Plan) -> list[str]:
    t, preds = plan.table(), plan.predecessor_table()
    out: list[str] = []
    for number, row in enumerate(preds):
        for p in row:
            if p > number and t.rank[p] == t.rank[number]:
                op, needed = plan.op(number), plan.op(int(p))
                out.append(f"rank {t.rank[number]} runs {op} before {needed}; move {needed} earlier")
    out += _missing_recompute(plan)
    if out:
        return out[:_MAX_PROBLEMS]
    cycle = find_cycle(with_rank_order(t, preds))
    if cycle:
        words = [f"{plan.op(n)} (rank {t.rank[n]})" for n in cycle]
        out.append(
            "the orders wait for each other in a circle: "
            + " needs ".join([*words[:12], "..." if len(words) > 12 else words[0]])
            + "; reorder one of these ranks"
        )
    return out


def _missing_recompute(plan: Plan) -> list[str]:
    """A recomputing stage runs R between F and backward, except where the backward follows F at once."""
    t = plan.table()
    out = []
    for s, stage in enumerate(plan.stages):
        if not stage.recompute:
            continue
        for m in range(plan.num_micro_batches):
            forward = int(t.index[F, s, m])
            if forward < 0 or t.index[R, s, m] >= 0:
                continue
            backward = max(int(t.index[I, s, m]), int(t.index[B, s, m]))
            if backward != forward + 1:
                out.append(
                    f"rank {stage.rank} keeps no activations of {s}F{m} (stage {s} recomputes) but never runs "
                    f"{s}R{m}; add it before {plan.op(backward)}"
                )
    return out


def with_rank_order(t: OpTable, preds: NDArray[np.int32]) -> NDArray[np.int32]:
    """The data dependencies plus, as one more column, the op before on the same rank."""
    previous = np.arange(-1, t.stage.size - 1, dtype=np.int32)
    starts = t.offsets[:-1]
    previous[starts[starts < t.stage.size]] = -1
    return np.ascontiguousarray(np.column_stack((preds, previous)).astype(np.int32))

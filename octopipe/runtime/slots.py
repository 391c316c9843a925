"""A rank's program prepared for execution: cells, slots, and when sent tensors are known to have been received.

Knows: one rank's part of a `Program`, and the happened-before relation of the whole plan. Does not know: torch,
tensors or how they are transferred.

A *cell* is one stage and one micro-batch on this rank; a *slot* is one end of one transfer; a *step* is one
instruction with everything it needs at hand. They are made once and used every training step.

When can a sent tensor be freed? The receiver sends no acknowledgement. But an op of this rank that depends on an op
that the receiver ran after consuming the tensor can only start after the tensor has arrived. Vector clocks over the
plan's dependencies give, for every send, the first such op of this rank (`Step.release`). The send is complete by then,
so the executor frees the tensor without waiting, without asking and without a thread. Tensors without such an op are
freed at the end of the training step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octopipe.base.errors import OctoPipeError
from octopipe.base.graph import topological_order
from octopipe.plans.plan import CODES, KINDS, Op, Plan, R, with_rank_order
from octopipe.simulation.lowering import Program


@dataclass(slots=True, eq=False)
class Cell:
    """One stage and one micro-batch: the state that F leaves for the backward, and the neighbours."""

    stage: int
    micro_batch: int
    takes_batch: bool
    """Whether it takes its input from the batch."""
    computes_loss: bool
    """Whether it computes the loss."""
    recomputes: bool
    before: Cell | None = None
    """The preceding cell if it is on this rank and passes its output on directly."""
    after: Cell | None = None
    gradient_slot: Slot | None = None
    """Where this cell's output gradient arrives, if it comes from another rank."""
    runs: Any = None
    value: Any = None
    """The output until it has been passed on."""
    needs: Any = None
    gradients: Any = None
    """Gradients of the inputs until they have been passed on."""
    output_message: Any = None
    """The form of the message that carried the output; its gradients have the same form."""
    input_message: Any = None
    """The form of the message that brought the input, which states the gradients to send back."""
    offloads: bool = False
    """Whether its activations go to host memory after F."""
    parcel: Any = None
    """The activations that are in host memory."""
    graphs: Any = None
    """Its captured ops by kind, if ops are replayed from CUDA graphs; kept from step to step."""

    def clear(self) -> None:
        """Discard the state of an interrupted step."""
        self.runs = self.value = self.needs = self.gradients = self.parcel = None
        self.output_message = self.input_message = None


@dataclass(slots=True, eq=False)
class Slot:
    """One end of one transfer. The transport keeps what it needs in `state`."""

    number: int
    peer: int
    sending: bool
    forward: bool
    """Whether it carries a stage's output; otherwise it carries an input gradient."""
    op: Op
    consumer: Op
    queue: tuple[int, ...]
    """The in-order queue it belongs to under the program's channel model."""
    cell: Cell
    """Sending: where the tensor comes from. Receiving: where it goes."""
    posted: bool = False
    deferred: bool = False
    """Whether the receive was due before the form of its message was known."""
    state: Any = None
    started: float = 0.0
    """When a send was issued (on the clock of `measured`)."""
    ended: float = 0.0
    """When a receive was known to be complete."""
    nbytes: int = 0

    def describe(self) -> str:
        what = "output" if self.forward else "input gradient"
        way = f"to rank {self.peer}" if self.sending else f"from rank {self.peer}"
        return f"{what} of {self.op} (micro-batch {self.op.micro_batch}) {way} for {self.consumer}"


@dataclass(slots=True, eq=False)
class Moves:
    """Transfers between device and host memory that happen before an op."""

    release: list[Cell] = field(default_factory=list)
    """Activations whose memory on the device is released."""
    fetch: list[Cell] = field(default_factory=list)
    """Activations that are copied back to the device."""
    fetch_with_op: list[Cell] = field(default_factory=list)
    """Activations that are copied back once the op's input has arrived."""


SEND, RECEIVE = len(KINDS), len(KINDS) + 1
"""Codes of the instructions that are not ops; ops have the codes of `plan`."""


@dataclass(slots=True, eq=False)
class Step:
    """One instruction of this rank."""

    code: int
    cell: Cell
    slot: Slot | None
    """F, I, B: the slot in which the op's input arrives from another rank. SEND, RECEIVE: the transfer."""
    op: Op
    number: int = -1
    """Compute: the op's position in the rank's order."""
    release: tuple[Slot, ...] = ()
    """Sends whose tensors have certainly been received once this op's inputs are there."""
    layers_done: tuple[int, ...] = ()
    """Layers whose gradients are complete on this rank after this op."""
    moves: Moves | None = None
    """Activations that are moved to host memory or back before this op."""
    beside: Step | None = None
    """The op that runs together with this one."""
    is_second: bool = False
    """Whether it is the second op of a pair, which runs together with the step before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """Everything one rank runs in a training step."""

    program: Program
    rank: int
    steps: tuple[Step, ...]
    cells: tuple[Cell, ...]
    slots: tuple[Slot, ...]
    needs_batch: bool
    needs_target: bool
    last_releases: tuple[Slot, ...] = field(default=())
    """Sends that are not proven to be received before the end of the step."""

    @property
    def plan(self) -> Plan:
        return self.program.plan


def rank_program(program: Program, rank: int) -> RankProgram:
    """Return the steps of one rank."""
    plan = program.plan
    if plan.forks:
        raise OctoPipeError("this plan's paths fork or join: `graph_program` makes its steps")
    cells = _cells(plan, rank)
    transfers = {}
    steps: list[Step] = []
    t = plan.table()
    for kind, op, consumer, peer, number, beside in program.instructions(rank):
        if kind == "compute":
            steps += op_steps(cells, op, beside)
            continue
        assert consumer is not None
        sending = kind == "send"
        mine = op if sending else consumer
        slot = Slot(
            number,
            peer,
            sending,
            op.kind == "F",
            op,
            consumer,
            queue_of(program.channel, rank, peer, sending),
            cells[mine.stage, mine.micro_batch],
        )
        transfers[number, sending] = slot
        if not sending and not slot.forward:
            slot.cell.gradient_slot = slot
        steps.append(Step(SEND if sending else RECEIVE, slot.cell, slot, op))
    base = int(t.offsets[rank])
    for k, step in enumerate(s for s in steps if s.code < SEND):
        carried = [int(n) for n in program.transfer_of[base + k] if n >= 0]
        if carried:
            step.slot = transfers[carried[0], False]
    needs_target = any(c.computes_loss for c in cells.values())
    return finished(program, rank, steps, list(cells.values()), list(transfers.values()), needs_target=needs_target)


def finished(
    program: Program,
    rank: int,
    steps: Sequence[Step],
    cells: Sequence[Cell],
    slots: Sequence[Slot],
    *,
    needs_target: bool,
) -> RankProgram:
    """The program of a rank whose steps are complete: its ops are numbered, and with each stands what ends with it,
    what may be released before it and what moves to or from host memory."""
    computes = [s for s in steps if s.code < SEND]
    done = layers_done(program.plan, rank)
    released = proven_releases(program, rank, [s for s in slots if s.sending])
    for k, step in enumerate(computes):
        step.number = k
        step.layers_done = done.get(k, ())
        step.release = tuple(released.get(k, ()))
    set_moves(program, rank, computes)
    return RankProgram(
        program=program,
        rank=rank,
        steps=tuple(steps),
        cells=tuple(cells),
        slots=tuple(slots),
        needs_batch=any(c.takes_batch for c in cells),
        needs_target=needs_target,
        last_releases=tuple(released.get(-1, ())),
    )


def op_steps(cells: Mapping[tuple[int, int], Cell], op: Op, beside: Op | None) -> list[Step]:
    """Return the step of an op, followed by that of the op which runs beside it as a pair."""
    step = Step(CODES[op.kind], cells[op.stage, op.micro_batch], None, op)
    if beside is None:
        return [step]
    step.beside = Step(CODES[beside.kind], cells[beside.stage, beside.micro_batch], None, beside, is_second=True)
    return [step, step.beside]


def set_moves(program: Program, rank: int, computes: list[Step]) -> None:
    """Add to a rank's steps which activations are moved to host memory and back."""
    moves = program.moves
    if moves is None or moves.number == 0:
        return
    if program.plan.pairs:
        raise OctoPipeError(
            "the plan has both pairs and stages that offload, and the executor supports one of the two; remove the "
            '"offload" marks, or write the pairs as single ops'
        )
    t = program.plan.table()
    base = int(t.offsets[rank])
    # Moves back are in the order of the backwards, as in the lane.
    for k in sorted(range(moves.number), key=lambda k: int(moves.back[k])):
        if t.rank[moves.forward[k]] != rank:
            continue
        cell = computes[int(moves.forward[k]) - base].cell
        cell.offloads = True
        fetch = "fetch_with_op" if moves.with_op[k] else "fetch"
        for op, name in ((moves.release[k], "release"), (moves.fetch[k], fetch)):
            step = computes[int(op) - base]
            if step.moves is None:
                step.moves = Moves()
            getattr(step.moves, name).append(cell)


def queue_of(channel: str, rank: int, peer: int, sending: bool) -> tuple[int, ...]:
    """Return the in-order queue of a transfer. Both ends use the same name, except for `single`, where a rank has one
    queue."""
    if channel == "directed":
        return (rank, peer) if sending else (peer, rank)
    if channel == "pair":
        return (min(rank, peer), max(rank, peer))
    return ()


def _cells(plan: Plan, rank: int) -> dict[tuple[int, int], Cell]:
    t = plan.table()
    again = t.index[R]
    cells: dict[tuple[int, int], Cell] = {}
    for m, r in enumerate(plan.route_of_micro_batch):
        route = plan.routes[r]
        previous: Cell | None = None
        for at, s in enumerate(route):
            if plan.stages[s].rank != rank:
                previous = None
                continue
            cell = Cell(s, m, at == 0, at == len(route) - 1, bool(again[s, m] >= 0), before=previous)
            if previous is not None:
                previous.after = cell
            cells[s, m] = previous = cell
    return cells


def layers_done(plan: Plan, rank: int) -> dict[int, tuple[int, ...]]:
    """Return, by position in the rank's order, the layers that get no more gradient on this rank after it."""
    last: dict[int, int] = {}
    for k, op in enumerate(plan.orders[rank]):
        if op.kind in "WB":
            stage = plan.stages[op.stage]
            for layer in range(stage.first, stage.stop):
                last[layer] = k
    out: dict[int, tuple[int, ...]] = {}
    for layer, k in last.items():
        out[k] = (*out.get(k, ()), layer)
    return out


def _clocks(plan: Plan) -> NDArray[np.int32]:
    """Return clocks[op, rank]: how many of the rank's ops have certainly ended when the op starts."""
    t = plan.table()
    graph = with_rank_order(t, plan.predecessor_table())
    position = np.arange(t.rank.size, dtype=np.int32) - t.offsets[t.rank]
    clocks = np.zeros((t.rank.size + 1, plan.num_ranks), np.int32)  # the last row stays zero: "no predecessor"
    for node in topological_order(graph):
        row = graph[node]
        before = row[row >= 0]
        if before.size:
            clock = clocks[before].max(axis=0)
            np.maximum.at(clock, t.rank[before], position[before] + 1)
            clocks[node] = clock
    return clocks[:-1]


def proven_releases(program: Program, rank: int, sends: list[Slot]) -> dict[int, list[Slot]]:
    """Return, by position in the rank's order, the sends proven to be received by then; -1: at the end of the step."""
    plan = program.plan
    t = plan.table()
    out: dict[int, list[Slot]] = {}
    if not sends:
        return out
    lo, hi = int(t.offsets[rank]), int(t.offsets[rank + 1])
    clocks = _clocks(plan)[lo:hi]
    for slot in sends:
        consumer, producer = int(program.target[slot.number]), int(program.source[slot.number])
        peer = int(t.rank[consumer])
        # Later ops of this rank know at least as much; the first that knows of the consumer is after the producer.
        k = int(np.searchsorted(clocks[:, peer], consumer - int(t.offsets[peer]) + 1))
        k = max(k, producer - lo + 1)
        out.setdefault(k if k < hi - lo else -1, []).append(slot)
    return out

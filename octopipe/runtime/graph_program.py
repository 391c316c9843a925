"""A rank's program for paths that fork and join: cells with several inputs and consumers, and a port for every edge.

Knows: which edges of which micro-batch begin or end on this rank, and which transfers carry them. Does not know:
tensors, or how they are transferred.

A *port* is one end of one edge (both ends if its two stages are on this rank). For a transport it plays the role of a
cell in a chain: it stores the form of the message that was sent along the edge, which its gradient shares.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octopipe.plans.paths import edges_of
from octopipe.plans.plan import Plan, R
from octopipe.runtime.slots import (
    RECEIVE,
    SEND,
    Cell,
    RankProgram,
    Slot,
    Step,
    finished,
    op_steps,
    queue_of,
)
from octopipe.simulation.lowering import Program


@dataclass(slots=True, eq=False)
class Port(Cell):
    """One edge of one micro-batch, as far as it is on this rank."""

    producer: GraphCell | None = None
    """The cell on this rank whose output is sent along the edge."""
    consumer: GraphCell | None = None
    """The cell on this rank that receives the output."""
    receive: Slot | None = None
    """The slot in which the output arrives if it comes from another rank."""


@dataclass(slots=True, eq=False)
class GraphCell(Cell):
    """One stage and one micro-batch with any number of edges in and out."""

    sources: tuple[Port, ...] = ()
    """The incoming edges, in the order of the path's edges."""
    consumers: tuple[Port, ...] = ()
    adds: bool = False
    """Whether its inputs are parts of one sum: outputs of the shards of a layer."""
    is_shard: bool = False
    """Whether it is a shard of a head, whose outputs are partial sums of the loss."""
    left: int = 0
    """Number of consumers that have not received the output yet."""
    versions: list[int] = field(default_factory=list)
    """Version counters of the output's tensors when F made them: a consumer must not modify what others receive as
    well."""
    counts: list[int] = field(default_factory=list)
    """Number of leaves of every input."""

    def clear(self) -> None:
        Cell.clear(self)
        self.left, self.versions, self.counts = 0, [], []


def graph_program(program: Program, rank: int) -> RankProgram:
    """Return the steps of one rank of a plan whose paths fork or join."""
    plan = program.plan
    cells, ports = _cells(plan, rank)
    transfers: dict[tuple[int, bool], Slot] = {}
    steps: list[Step] = []
    for kind, op, consumer, peer, number, beside in program.instructions(rank):
        if kind == "compute":
            steps += op_steps(cells, op, beside)
            continue
        assert consumer is not None
        sending, forward = kind == "send", op.kind == "F"
        edge = (op.stage, consumer.stage) if forward else (consumer.stage, op.stage)
        port = ports[*edge, op.micro_batch]
        slot = Slot(number, peer, sending, forward, op, consumer, queue_of(program.channel, rank, peer, sending), port)
        transfers[number, sending] = slot
        if not sending and forward:
            port.receive = slot
        elif not sending:
            port.gradient_slot = slot
        steps.append(Step(SEND if sending else RECEIVE, port, slot, op))
    all_cells: list[Cell] = [*cells.values(), *ports.values()]
    needs_target = any(c.computes_loss or c.is_shard for c in cells.values())
    return finished(program, rank, steps, all_cells, list(transfers.values()), needs_target=needs_target)


def _cells(plan: Plan, rank: int) -> tuple[dict[tuple[int, int], GraphCell], dict[tuple[int, int, int], Port]]:
    """Return cells by stage and micro-batch, and ports by edge and micro-batch."""
    again, heads = plan.table().index[R], plan.cut_heads
    cells: dict[tuple[int, int], GraphCell] = {}
    ports: dict[tuple[int, int, int], Port] = {}
    for m, number in enumerate(plan.route_of_micro_batch):
        path_edges = edges_of(plan.routes, plan.edges, number)
        for s in plan.routes[number]:
            if plan.stages[s].rank == rank:
                into = [a for a, b in path_edges if b == s]
                is_shard = plan.stages[s].shard is not None and plan.stages[s].stop - 1 in heads
                cells[s, m] = GraphCell(
                    s,
                    m,
                    not into,
                    all(a != s for a, _ in path_edges),
                    bool(again[s, m] >= 0),
                    adds=plan.adds_up(s, into),
                    is_shard=is_shard,
                )
        for a, b in path_edges:
            producer, consumer = cells.get((a, m)), cells.get((b, m))
            if producer is None and consumer is None:
                continue
            mine: Any = producer or consumer
            port = ports[a, b, m] = Port(mine.stage, m, False, False, False, producer=producer, consumer=consumer)
            if producer is not None:
                producer.consumers = (*producer.consumers, port)
            if consumer is not None:
                consumer.sources = (*consumer.sources, port)
    return cells, ports

"""Lowering: Plan -> Program, the exact instruction list the simulator times and the executor runs.

Knows: where to place sends and receives so that no channel model can deadlock and transfers overlap with compute.
Does not know: what happens on a device. The plan's compute order is never changed.

How it works (paper, section VII). An unconstrained simulation gives every op an interval, and so every
transfer a window: from the end of its producer to the start of its consumer. A transfer gets one key inside
its window; each rank's program is its ops (keyed by their end) and its sends and receives merged by key.
*Proof of deadlock freedom:* every edge of the rendezvous graph (compute order, queue order, producer ->
transfer -> consumer, instruction before a posted send or receive) leads from a smaller key to a larger one,
so there is no cycle. `prove_deadlock_free` checks the finished program again, from its instructions alone.

A pair is one instruction: the receives of both ops come before it, the sends of both after it.

The cost is near-linear: one topological pass, one sort, at most `blocking.CANDIDATES` positions per transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octopipe.base.compile import njit
from octopipe.base.display import one_line
from octopipe.base.errors import DeadlockError, OctoPipeError
from octopipe.base.graph import find_cycle, topological_order
from octopipe.costs.table import CostTable
from octopipe.plans.pair_price import op_durations
from octopipe.plans.plan import F, Op, OpTable, Plan, joined, with_rank_order
from octopipe.plans.price import boundary_bytes, match
from octopipe.simulation import engine as _engine
from octopipe.simulation.blocking import CANDIDATES, cheapest_positions, meetings
from octopipe.simulation.host_moves import HostMoves, moves_of, with_moves

Channel = Literal["directed", "pair", "single", "blocking"]
CHANNELS: tuple[Channel, ...] = ("directed", "pair", "single", "blocking")
"""One in-order queue per direction of a rank pair; per rank pair; per rank; no queue at all (inline)."""
PREFETCH = 2
"""How many compute ops before its window a directed receive is posted, as slack for jitter."""
COMPUTE, SEND, RECEIVE = range(3)

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


class Instruction(NamedTuple):
    """One instruction of a rank: run `op` (together with `beside`, if the two are a pair), or send or receive the
    tensor that `op` produced for `consumer`."""

    kind: Literal["compute", "send", "receive"]
    op: Op
    consumer: Op | None = None
    peer: int = -1
    transfer: int = -1
    beside: Op | None = None

    def __str__(self) -> str:
        if self.kind == "compute":
            return str(self.op) if self.beside is None else f"{self.op}+{self.beside}"
        arrow = "->" if self.kind == "send" else "<-"
        return f"{self.kind}[{self.op} {arrow} rank {self.peer}]"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """The compute ops, sends and receives of every rank in order, as arrays; `instructions` makes them readable."""

    plan: Plan
    channel: Channel
    source: Ints
    """Producer op of every transfer."""
    target: Ints
    """Consumer op of every transfer."""
    nbytes: Floats
    transfer_ms: Floats
    transfer_of: Ints
    """transfer_of[op, k]: the transfer that carries data predecessor k of the op, or -1."""
    instr_offsets: Ints
    instr_kind: Ints
    instr_id: Ints
    """The op of a compute instruction (the first one of a pair), or the transfer of a send or receive."""
    preds: Ints
    """The rendezvous graph: ops first, then transfers, then the moves to host memory, then those back."""
    moves: HostMoves | None = None
    """Activations that are moved to host memory and back; None if no stage offloads."""
    mismatched: int
    """Transfers whose naive position (receive right before use) disagrees between the two ends."""

    def __repr__(self) -> str:
        ops = self.plan.table().stage.size
        plan = f"{self.plan.num_ranks} ranks, {ops} ops, {self.num_transfers} transfers"
        return one_line("Program", str(self.plan.extra.get("system") or ""), plan, f"{self.channel} channels")

    @property
    def num_transfers(self) -> int:
        return int(self.source.size)

    def node_ms(self, op_ms: Floats) -> Floats:
        """Return the time of every node of the rendezvous graph, given the times of the ops."""
        lanes = () if self.moves is None else (self.moves.ms, self.moves.ms)
        return np.concatenate((op_ms, self.transfer_ms, *lanes))

    def instructions(self, rank: int) -> tuple[Instruction, ...]:
        return tuple(self._walk(rank))

    def _walk(self, rank: int) -> Iterator[Instruction]:
        t = self.plan.table()
        for i in range(self.instr_offsets[rank], self.instr_offsets[rank + 1]):
            kind, number = int(self.instr_kind[i]), int(self.instr_id[i])
            if kind == COMPUTE:
                pair = t.lead is not None and number + 1 < t.lead.size and t.lead[number + 1] == number
                yield Instruction("compute", self.plan.op(number), beside=self.plan.op(number + 1) if pair else None)
                continue
            a, b = int(self.source[number]), int(self.target[number])
            peer = int(t.rank[b] if kind == SEND else t.rank[a])
            yield Instruction("send" if kind == SEND else "receive", self.plan.op(a), self.plan.op(b), peer, number)

    def describe(self, node: int) -> str:
        """Describe a node of the rendezvous graph in words."""
        t = self.plan.table()
        if node < t.stage.size:
            return f"{self.plan.op(node)} (rank {t.rank[node]})"
        k = node - t.stage.size
        if k >= self.num_transfers and self.moves is not None:
            k -= self.num_transfers
            way = "to" if k < self.moves.number else "from"
            op = int(self.moves.forward[k % self.moves.number])
            return f"activations of {self.plan.op(op)} {way} host memory (rank {t.rank[op]})"
        a, b = int(self.source[k]), int(self.target[k])
        return f"transfer of {self.plan.op(a)} (rank {t.rank[a]} -> {t.rank[b]})"


def lower(
    plan: Plan, costs: CostTable, *, channel: Channel = "directed", naive: bool = False, check: bool = True
) -> Program:
    """Return the deadlock-free program of a plan, with transfers that overlap with compute, after proving it.

    `check` validates the plan first; pass False if that was done before. `naive` places every receive directly before
    its use and every send directly after its producer, which may deadlock (figure 4 of the paper); it is kept for
    comparison and tests. Only with `naive` does `check=False` also skip the proof.
    """
    if channel not in CHANNELS:
        raise OctoPipeError(f"unknown channel model {channel!r}; one of {', '.join(CHANNELS)}")
    if check:
        plan.check()
    match(plan, costs)
    t = plan.table()
    data = plan.predecessor_table()
    computes = t.stage.size
    crossing = (data >= 0) & (t.rank[np.maximum(data, 0)] != t.rank[:, None])
    target, column = (x.astype(np.int32) for x in np.nonzero(crossing))
    source = data[target, column]
    transfer_of = np.full(data.shape, -1, np.int32)
    transfer_of[target, column] = np.arange(source.size, dtype=np.int32)
    nbytes, transfer_ms = _transfer_prices(plan, costs, source, target)
    duration = op_durations(plan, costs)

    start, end, place = _uncrowded_times(t, data, source, target, column, np.concatenate((duration, transfer_ms)))

    def program(sorting: tuple[NDArray[np.float64], ...]) -> Program:
        return program_of(*_instructions(t, source, target, sorting))

    def program_of(kinds: Ints, ids: Ints, offsets: Ints) -> Program:
        preds = _rendezvous(plan, channel, source, target, transfer_of, offsets, kinds, ids)
        return Program(
            plan=plan,
            channel=channel,
            source=source,
            target=target,
            nbytes=nbytes,
            transfer_ms=transfer_ms,
            transfer_of=transfer_of,
            instr_offsets=offsets,
            instr_kind=kinds,
            instr_id=ids,
            preds=preds,
            mismatched=_count_mismatches(t, source, target),
        )

    def by_key(key: Floats) -> Program:
        return program(_sorted_by_key(key, end[:computes], place, source))

    ready, need = end[source], start[target]
    if naive:
        best = program(_sorted_naively(t, source, target))
    elif channel == "directed":
        best = program(_sorted_by_readiness(t, source, target, ready, end[:computes]))
    elif channel == "blocking":
        chosen = cheapest_positions(
            t.rank, t.offsets, source, target, ready, need, transfer_ms, start[:computes], end[:computes], CANDIDATES
        )
        met = _meetings(plan, transfer_of, source, target, duration, transfer_ms)
        candidates = [by_key(ready), by_key(chosen), program_of(*met)]
        best = min(candidates, key=lambda p: _makespan(p, duration))
    else:
        # An in-order queue delays everything behind a late transfer; re-keying by the delayed times of the
        # first program often finds a better common order. Both are safe; keep the faster.
        first = by_key(ready)
        delayed = _simulate_nodes(first, duration)[1][source]
        second = by_key(np.clip(delayed, ready, np.maximum(need, ready)))
        best = min((first, second), key=lambda p: _makespan(p, duration))
    if plan.offloads:
        if not naive:
            start, end, _ = _simulate_nodes(best, duration)
        moves = moves_of(plan, costs, pairs_start_together(t, start)[:computes], end[:computes])
        best = replace(best, moves=moves, preds=with_moves(best.preds, moves, t.offsets))
    if check or not naive:
        prove_deadlock_free(best)
    return best


def _uncrowded_times(
    t: OpTable, data: Ints, source: Ints, target: Ints, column: Ints, took: Floats
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Return starts and ends of ops and transfers if only transfers of one direction of a rank pair queue, and the
    position of each node in a topological order. These times give the windows of transfers."""
    computes = t.stage.size
    nodes = data.copy()
    nodes[target, column] = computes + np.arange(source.size, dtype=np.int32)
    graph = with_rank_order(t, nodes)
    free = np.full((computes + source.size, graph.shape[1]), -1, np.int32)
    free[:computes] = graph
    free[computes:, 0] = source
    free[computes:, 1] = _before_in_direction(t, source, target)
    order = topological_order(free)
    place = np.empty(order.size, np.int64)
    place[order] = np.arange(order.size)
    start, end, _ = _engine.longest_path(order, free, took)
    return pairs_start_together(t, start), end, place


_MODES: dict[str, int] = {"directed": 0, "pair": 1, "single": 2, "blocking": 3}


def _rendezvous(
    plan: Plan, channel: Channel, source: Ints, target: Ints, transfer_of: Ints, offsets: Ints, kinds: Ints, ids: Ints
) -> Ints:
    """Return the rendezvous graph of these instructions as a predecessor table."""
    t = plan.table()
    data, carried = joined(t, plan.predecessor_table()), transfer_of
    if t.lead is not None:
        carried = np.where(data >= 0, joined(t, transfer_of), -1).astype(np.int32)
        # The second op of a pair waits for the first, and that is no transfer.
        carried[t.lead != np.arange(t.lead.size)] = -1
    return _engine.program_predecessors(
        data, carried, t.rank, source, target, offsets, kinds, ids, _MODES[channel], plan.num_ranks
    )


def pairs_start_together(t: OpTable, start: Floats) -> Floats:
    """Return the starts with the second op of every pair moved to the first one's; in the graph it only waits for the
    first."""
    if t.lead is None:
        return start
    out = start.copy()
    out[: t.lead.size] = start[t.lead]
    return out


def _meetings(
    plan: Plan, transfer_of: Ints, source: Ints, target: Ints, duration: Floats, transfer_ms: Floats
) -> tuple[Ints, Ints, Ints]:
    """Call `blocking.meetings` with every pair as one op."""
    t = plan.table()
    data = plan.predecessor_table()
    if t.lead is None:
        return meetings(t.rank, t.offsets, data, transfer_of, source, target, duration, transfer_ms, plan.num_ranks)
    first = np.flatnonzero(t.lead == np.arange(t.lead.size)).astype(np.int32)
    short = (np.cumsum(t.lead == np.arange(t.lead.size)) - 1).astype(np.int32)[t.lead]
    needs = joined(t, data)[first]
    needs = np.where(needs >= 0, short[needs], -1).astype(np.int32)
    carried = joined(t, transfer_of)[first]
    sizes = np.bincount(t.rank[first], minlength=plan.num_ranks)
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    kinds, ids, stops = meetings(
        np.ascontiguousarray(t.rank[first]),
        offsets,
        needs,
        np.ascontiguousarray(carried),
        np.ascontiguousarray(short[source]),
        np.ascontiguousarray(short[target]),
        np.ascontiguousarray(duration[first]),
        transfer_ms,
        plan.num_ranks,
    )
    compute = kinds == COMPUTE
    ids[compute] = first[ids[compute]]
    return kinds, ids, stops


def with_instructions(program: Program, kinds: Ints, ids: Ints, offsets: Ints) -> Program:
    """Return the program with other instruction lists (another rank's, say) for the same transfers; not proven."""
    graph = _rendezvous(
        program.plan, program.channel, program.source, program.target, program.transfer_of, offsets, kinds, ids
    )
    if program.moves is not None:
        graph = with_moves(graph, program.moves, program.plan.table().offsets)
    return replace(program, instr_kind=kinds, instr_id=ids, instr_offsets=offsets, preds=graph)


def prove_deadlock_free(program: Program) -> None:
    """Raise DeadlockError with the cycle unless the program's rendezvous graph is acyclic.

    Each send/receive pair is one node; edges are compute order, queue order at both ends and data
    dependencies, all read off the finished instruction lists.
    """
    p = program
    graph = _rendezvous(p.plan, p.channel, p.source, p.target, p.transfer_of, p.instr_offsets, p.instr_kind, p.instr_id)
    if p.moves is not None:
        graph = with_moves(graph, p.moves, p.plan.table().offsets)
    cycle = find_cycle(graph)
    if cycle:
        words = tuple(program.describe(n) for n in cycle)
        shown = " waits for ".join([*words[:12], "..." if len(words) > 12 else words[0]])
        raise DeadlockError(f"deadlock under the {program.channel} channel model: {shown}", words)


def _transfer_prices(plan: Plan, costs: CostTable, source: Ints, target: Ints) -> tuple[Floats, Floats]:
    t = plan.table()
    # A gradient has the size of the output that it belongs to, which the gradient's consumer produced.
    maker = np.where(t.kind[source] == F, source, target)
    nbytes = boundary_bytes(plan, costs)[0][t.stage[maker], t.micro_batch[maker]]
    latency, per_byte = np.zeros(source.size), np.zeros(source.size)
    a, b = t.rank[source], t.rank[target]
    for x, y in {(int(p), int(q)) for p, q in zip(a, b)}:
        link = costs.network.link(x, y)
        mine = (a == x) & (b == y)
        latency[mine], per_byte[mine] = link.latency_ms, link.ms_per_byte
    if plan.edges:
        # A tensor that one rank sends to several others shares one link, and so do the gradients that come back.
        per_byte *= _sharing(t, maker, np.where(t.kind[source] == F, b, a), t.kind[source] == F)
    return nbytes, latency + nbytes * per_byte


def _sharing(t: OpTable, maker: Ints, other: Ints, forward: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return, per transfer, to how many ranks its tensor is sent, or from how many ranks the tensor's gradients
    come."""
    peers: dict[tuple[int, bool], set[int]] = {}
    keys = [(int(m), bool(f)) for m, f in zip(maker, forward, strict=True)]
    for key, rank in zip(keys, other, strict=True):
        peers.setdefault(key, set()).add(int(rank))
    return np.array([len(peers[key]) for key in keys], np.int64)


def _simulate_nodes(program: Program, duration: Floats) -> tuple[Floats, Floats, Ints]:
    order = topological_order(program.preds)
    return _engine.longest_path(order, program.preds, program.node_ms(duration))


def _makespan(program: Program, duration: Floats) -> float:
    return float(_simulate_nodes(program, duration)[1].max())


def _instructions(
    t: OpTable, source: Ints, target: Ints, sorting: tuple[NDArray[np.float64], ...]
) -> tuple[Ints, Ints, Ints]:
    """Return the programs of all ranks: ops, sends and receives (in this numbering) sorted within their rank."""
    computes, transfers = t.rank.size, source.size
    lane = np.concatenate((t.rank, t.rank[source], t.rank[target]))
    kinds = np.repeat(np.array([COMPUTE, SEND, RECEIVE], np.int32), [computes, transfers, transfers])
    ids = np.concatenate((np.arange(computes), np.arange(transfers), np.arange(transfers))).astype(np.int32)
    columns: list[NDArray[Any]] = [ids, *reversed(sorting), lane]
    order = np.lexsort(columns)
    if t.lead is not None:  # the second op of a pair has no instruction of its own
        second = np.concatenate((t.lead != np.arange(computes), np.zeros(2 * transfers, bool)))
        order = order[~second[order]]
        lane = lane[~second]
    sizes = np.bincount(lane, minlength=t.offsets.size - 1)
    return kinds[order], ids[order], np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)


def _sorted_by_key(key: Floats, end: Floats, place: NDArray[np.int64], source: Ints) -> tuple[NDArray[np.float64], ...]:
    """Return sort keys: ops by their end, transfers by their key; ties by place, a transfer after its producer."""
    made = place[source] + 0.5
    return np.concatenate((end, key, key)), np.concatenate((place[: end.size], made, made)).astype(float)


def _sorted_by_readiness(
    t: OpTable, source: Ints, target: Ints, ready: Floats, end: Floats
) -> tuple[NDArray[np.float64], ...]:
    """Return sort keys for directed queues: sends follow their producer; receives are posted before their data is
    ready.

    A receive stands after the ops that its rank has finished by then, less PREFETCH ops of slack. A later receive of
    the same direction never stands before an earlier one (the queue's order is the sender's).
    """
    position = _positions(t)
    first = target if t.lead is None else np.ascontiguousarray(t.lead[target])
    slot = _receive_slots(t.rank, t.offsets, source, first, ready, end, PREFETCH, _by_direction(t, source, target))
    slots = np.concatenate((position + 0.5, position[source] + 1.0, slot))
    return slots, np.concatenate((position, source, source)).astype(float)


def _sorted_naively(t: OpTable, source: Ints, target: Ints) -> tuple[NDArray[np.float64], ...]:
    """Return sort keys that place a send right after its producer and a receive right before its consumer."""
    position = _positions(t)
    slots = np.concatenate((position + 0.5, position[source] + 1.0, position[target] + 0.0))
    after_sends = np.concatenate((np.zeros(t.rank.size + source.size), np.ones(target.size)))
    return slots, after_sends


def _positions(t: OpTable) -> NDArray[np.int64]:
    """Return every op's position in its rank's order; both ops of a pair have that of the first one."""
    lead = np.arange(t.rank.size) if t.lead is None else t.lead
    return lead - t.offsets[t.rank]


def _by_direction(t: OpTable, source: Ints, target: Ints) -> NDArray[np.int64]:
    """Return the transfers sorted by (source rank, target rank) and then by the sender's order."""
    return np.lexsort((target, source, t.rank[target], t.rank[source]))


def _before_in_direction(t: OpTable, source: Ints, target: Ints) -> Ints:
    """Return the transfer (as a graph node) before each one in its direction's queue, or -1."""
    queue = _by_direction(t, source, target)
    a, b = t.rank[source][queue], t.rank[target][queue]
    out = np.full(source.size, -1, np.int32)
    same = (a[1:] == a[:-1]) & (b[1:] == b[:-1])
    out[queue[1:][same]] = t.rank.size + queue[:-1][same]
    return out


@njit
def _receive_slots(rank, offsets, source, target, ready, end, prefetch, queue):  # type: ignore[no-untyped-def]
    out = np.empty(source.size)
    for k in range(queue.size - 1, -1, -1):
        i = queue[k]
        r = rank[target[i]]
        done = np.searchsorted(end[offsets[r] : offsets[r + 1]], ready[i], side="right")
        slot = max(min(done, target[i] - offsets[r]) - prefetch, 0)
        if k + 1 < queue.size:
            j = queue[k + 1]
            if rank[source[j]] == rank[source[i]] and rank[target[j]] == r:
                slot = min(slot, out[j])
        out[i] = slot
    return out


def _count_mismatches(t: OpTable, source: Ints, target: Ints) -> int:
    """Count the transfers consumed in another order than they were sent in: naive positions would disagree there."""
    queue = _by_direction(t, source, target)
    a, b, used = t.rank[source][queue], t.rank[target][queue], target[queue]
    same = (a[1:] == a[:-1]) & (b[1:] == b[:-1])
    return int(np.count_nonzero(same & (used[1:] < used[:-1])))

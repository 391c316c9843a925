"""A second simulator for paths that fork and join, written from docs/plan-format.md for clarity alone.

It knows edges, shards, recomputation and activations that leave the device for a time, but no pairs and no exchanges.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan, Stage

TIMES = {"F": "forward_ms", "R": "forward_ms", "I": "input_ms", "W": "weight_ms"}
HAIR = 1e-9
Interval = tuple[float, float]
Away = tuple[int, float, float, float]
"""A rank, from when, until when, and how many bytes of activations are in its host's memory."""


class GraphTwin:
    """Start and end of every op (`times`) and of every transfer (`sent`) under directed channels."""

    def __init__(self, plan: Plan, costs: CostTable):
        self.plan, self.costs = plan, costs
        self.ops = {op for order in plan.orders for op in order}
        self.times: dict[Op, Interval] = {}
        self.sent: dict[tuple[Op, Op], Interval] = {}
        self.consumers: dict[Op, list[Op]] = {}
        for order in plan.orders:
            for op in order:
                for p in self.needs(op):
                    if p.stage != op.stage:
                        self.consumers.setdefault(p, []).append(op)
        self._run()

    def _rank(self, op: Op) -> int:
        return self.plan.stages[op.stage].rank

    def _edges(self, m: int) -> Iterable[tuple[int, int]]:
        number = self.plan.route_of_micro_batch[m]
        return self.plan.edges[number] if self.plan.edges else itertools.pairwise(self.plan.routes[number])

    def _size(self, m: int, layer: int) -> float:
        factor = self.costs.micro_batch_factor
        return 1.0 if factor is None else float(factor[m, layer])

    def _sum(self, values: object, layers: Iterable[int], m: int) -> float:
        return sum(float(values[k]) * self._size(m, k) for k in layers)  # type: ignore[index]

    def needs(self, op: Op) -> list[Op]:
        s, kind, m = op
        if kind == "F":
            return [Op(a, "F", m) for a, b in self._edges(m) if b == s]
        if kind == "R":
            return [Op(s, "F", m)]
        if kind == "W":
            return [Op(s, "I", m)]
        own = [Op(s, "F", m)] + [Op(s, "R", m)] * (Op(s, "R", m) in self.ops)
        behind = [Op(b, back, m) for a, b in self._edges(m) if a == s for back in "IB"]
        return own + [op for op in behind if op in self.ops]

    def op_ms(self, op: Op) -> float:
        stage, total = self.plan.stages[op.stage], 0.0
        for layer in stage.recomputed_layers if op.kind == "R" else range(stage.first, stage.stop):
            for kind in "IW" if op.kind == "B" else op.kind:
                whole = float(getattr(self.costs, TIMES[kind])[layer]) * self._size(op.micro_batch, layer)
                total += whole * self._share(stage, layer, kind)
        return total * (self.costs.rank_slowdown[stage.rank] if self.costs.rank_slowdown else 1.0)

    def _share(self, stage: Stage, layer: int, kind: str) -> float:
        if stage.shard is None:
            return 1.0
        for one in self.costs.shard_times:
            if one.layer == layer:
                k = {"F": 0, "R": 0, "I": 1, "W": 2}[kind]
                return one.fixed[k] + one.share[k] / stage.shard[1]
        return 1.0 / stage.shard[1]

    def _out_bytes(self, s: int, m: int) -> float:
        last = self.plan.stages[s].stop - 1
        of_loss = self.plan.stages[s].shard is not None and last in self.plan.cut_heads
        one = 8.0 * (self.costs.tokens_per_micro_batch or 0) if of_loss else float(self.costs.boundary_bytes[last])
        return one * self._size(m, last)

    def _hop_ms(self, op: Op, consumer: Op) -> float:
        """Ranks that take one output, or send its gradients back, share one link."""
        maker, m = (op if op.kind == "F" else consumer).stage, op.micro_batch
        home = self.plan.stages[maker].rank
        others = {self.plan.stages[b].rank for a, b in self._edges(m) if a == maker} - {home}
        several = len(others) if self.plan.edges else 1
        return self.costs.network.transfer_ms(self._rank(op), self._rank(consumer), self._out_bytes(maker, m) * several)

    def _run(self) -> None:
        place = {op: k for order in self.plan.orders for k, op in enumerate(order)}
        queues = [list(order) for order in self.plan.orders]
        clock = [0.0] * self.plan.num_ranks
        free: dict[tuple[int, int], float] = {}
        while any(queues):
            for rank, queue in enumerate(queues):
                if not queue or any(p not in self.times for p in self.needs(queue[0])):
                    continue
                op = queue.pop(0)
                there = [self.sent[p, op] if self._rank(p) != rank else self.times[p] for p in self.needs(op)]
                start = max([clock[rank], *(end for _, end in there)])
                clock[rank] = end = start + self.op_ms(op)
                self.times[op] = start, end
                for consumer in sorted(self.consumers.get(op, ()), key=place.__getitem__):
                    way = rank, self._rank(consumer)
                    if way[0] != way[1]:
                        begin = max(end, free.get(way, 0.0))
                        free[way] = begin + self._hop_ms(op, consumer)
                        self.sent[op, consumer] = begin, free[way]

    def kept_bytes(self, s: int, m: int) -> tuple[float, float]:
        """What a stage that recomputes or offloads keeps on the device, and its whole activation."""
        stage, costs = self.plan.stages[s], self.costs
        part = 1.0 if stage.shard is None else 1.0 / stage.shard[1]
        layers = range(stage.first, stage.stop)
        again = set(layers) if stage.offload else set(stage.recomputed_layers)
        full = part * self._sum(costs.activation_bytes, layers, m)
        kept = part * self._sum(costs.activation_bytes, set(layers) - again, m)
        kept += self._sum(costs.boundary_bytes, [k - 1 for k in again if k > stage.first and k - 1 not in again], m)
        if stage.first in again:
            into = [a for a, b in self._edges(m) if b == s]
            given = {(self.plan.stages[a].first, self.plan.stages[a].shard is not None) for a in into}
            one_sum = len(given) == 1 and next(iter(given))[1] and stage.first < stage.stop
            kept += sum(self._out_bytes(a, m) for a in (into[:1] if one_sum else into))
        return min(kept, full), full

    def peaks(self, away: Iterable[Away] = ()) -> list[float]:
        """The most bytes of every rank: the levels between any two events."""
        plan, costs = self.plan, self.costs
        held: list[list[tuple[float, float, float]]] = [[] for _ in range(plan.num_ranks)]
        for s, m in {(op.stage, op.micro_batch) for op in self.ops}:
            stage = plan.stages[s]
            part = 1.0 if stage.shard is None else 1.0 / stage.shard[1]
            kept, full = self.kept_bytes(s, m)
            split = Op(s, "I", m) in self.ops
            begin, back = self.times[Op(s, "F", m)][0], self.times[Op(s, "I" if split else "B", m)][1]
            if Op(s, "R", m) in self.ops:
                again = self.times[Op(s, "R", m)][0]
                held[stage.rank].append((begin, again, kept))
                begin = again
            held[stage.rank].append((begin, back, full))
            if split:
                stash = part * self._sum(costs.stash_bytes, range(stage.first, stage.stop), m)
                held[stage.rank].append((back, self.times[Op(s, "W", m)][1], stash))
        for op, (begin, end) in self.times.items():
            stage, rank = plan.stages[op.stage], self._rank(op)
            part = 1.0 if stage.shard is None else 1.0 / stage.shard[1]
            held[rank].append((begin, end, part * max(costs.workspace_bytes[stage.first : stage.stop], default=0.0)))
            let_go = [end]
            for consumer in self.consumers.get(op, ()):
                size = self._out_bytes((op if op.kind == "F" else consumer).stage, op.micro_batch)
                used = self.times[consumer][0 if op.kind == "F" else 1]
                sent = self.sent.get((op, consumer))
                let_go.append(used if sent is None else sent[1])
                if sent is not None:
                    held[self._rank(consumer)].append((sent[0], used, size))
                if op.kind != "F":  # a gradient for every edge
                    held[rank].append((end, let_go[-1], size))
            if op.kind == "F":  # one output for all edges
                held[rank].append((end, max(let_go), self._out_bytes(op.stage, op.micro_batch)))
        for rank, begin, end, nbytes in away:
            held[rank].append((begin, end, -nbytes))
        return [self._static(rank) + _most(rows) for rank, rows in enumerate(held)]

    def _static(self, rank: int) -> float:
        mine = [s for s in self.plan.stages if s.rank == rank]
        return sum(
            float(self.costs.static_bytes[k]) / (1 if s.shard is None else s.shard[1])
            for s in mine
            for k in range(s.first, s.stop)
        )


def _most(rows: list[tuple[float, float, float]]) -> float:
    points = sorted({t for begin, end, _ in rows for t in (begin, end)})
    middles = [(a + b) / 2 for a, b in itertools.pairwise(points) if b - a > HAIR]
    return max([sum(n for begin, end, n in rows if begin < t < end) for t in middles], default=0.0)

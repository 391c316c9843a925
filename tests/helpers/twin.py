"""A second simulator, written for clarity alone: dictionaries, recursion-free relaxation, no numba.

It knows the semantics from the design and nothing of the package's engine, so agreement means something.
"""

from __future__ import annotations

import itertools

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan


def op_ms(plan: Plan, costs: CostTable, op: Op) -> float:
    stage = plan.stages[op.stage]
    layers = stage.recomputed_layers if op.kind == "R" else range(stage.first, stage.stop)
    total = 0.0
    for layer in layers:
        each = {
            "F": costs.forward_ms[layer],
            "R": costs.forward_ms[layer],
            "I": costs.input_ms[layer],
            "W": costs.weight_ms[layer],
            "B": costs.input_ms[layer] + costs.weight_ms[layer],
        }[op.kind]
        size = 1.0 if costs.micro_batch_factor is None else costs.micro_batch_factor[op.micro_batch, layer]
        total += each * size
    return total * (costs.rank_slowdown[stage.rank] if costs.rank_slowdown else 1.0)


def inputs_of(plan: Plan, op: Op, ops: set[Op]) -> list[Op]:
    path = plan.routes[plan.route_of_micro_batch[op.micro_batch]]
    at = path.index(op.stage)
    m = op.micro_batch
    if op.kind == "F":
        return [Op(path[at - 1], "F", m)] if at else []
    if op.kind == "R":
        return [Op(op.stage, "F", m)]
    if op.kind == "W":
        return [Op(op.stage, "I", m)]
    needed = [Op(op.stage, "F", m)]
    if Op(op.stage, "R", m) in ops:
        needed.append(Op(op.stage, "R", m))
    if at + 1 < len(path):
        needed += [o for o in (Op(path[at + 1], "I", m), Op(path[at + 1], "B", m)) if o in ops]
    return needed


def hop_ms(plan: Plan, costs: CostTable, producer: Op, consumer: Op) -> float:
    a, b = plan.stages[producer.stage], plan.stages[consumer.stage]
    if a.rank == b.rank:
        return 0.0
    layer = a.stop - 1 if producer.kind == "F" else a.first - 1
    size = 1.0 if costs.micro_batch_factor is None else costs.micro_batch_factor[producer.micro_batch, layer]
    return costs.network.transfer_ms(a.rank, b.rank, costs.boundary_bytes[layer] * size)


Interval = tuple[float, float]


def run(plan: Plan, costs: CostTable) -> tuple[dict[Op, Interval], dict[int, float]]:
    """Start and end of every op under directed channels, and the peak bytes of every rank."""
    times, arrived, consumers = timing(plan, costs)
    return times, _peaks(plan, costs, times, arrived, consumers)


def timing(
    plan: Plan, costs: CostTable
) -> tuple[dict[Op, Interval], dict[tuple[Op, Op], Interval], dict[Op, list[Op]]]:
    """Intervals of ops and of transfers, and who consumes what."""
    ops = {op for order in plan.orders for op in order}
    times: dict[Op, tuple[float, float]] = {}
    arrived: dict[tuple[Op, Op], tuple[float, float]] = {}
    free: dict[tuple[int, int], float] = {}
    consumers: dict[Op, list[Op]] = {}
    for order in plan.orders:
        for op in order:
            for p in inputs_of(plan, op, ops):
                consumers.setdefault(p, []).append(op)
    head = [0] * plan.num_ranks
    while any(head[r] < len(plan.orders[r]) for r in range(plan.num_ranks)):
        for r, order in enumerate(plan.orders):
            if head[r] == len(order):
                continue
            op = order[head[r]]
            needed = inputs_of(plan, op, ops)
            if any(p not in times for p in needed):
                continue
            begin = times[order[head[r] - 1]][1] if head[r] else 0.0
            for p in needed:
                local = plan.stages[p.stage].rank == r
                begin = max(begin, times[p][1] if local else arrived[p, op][1])
            end = begin + op_ms(plan, costs, op)
            times[op] = (begin, end)
            head[r] += 1
            for c in consumers.get(op, []):
                to = plan.stages[c.stage].rank
                if to != r:
                    go = max(end, free.get((r, to), 0.0))
                    arrived[op, c] = (go, go + hop_ms(plan, costs, op, c))
                    free[r, to] = arrived[op, c][1]
    return times, arrived, consumers


def _peaks(plan, costs, times, arrived, consumers):  # type: ignore[no-untyped-def]
    """Peak bytes: sample the level inside every interval between two events, and inside every op."""
    held: dict[int, list[tuple[float, float, float]]] = {r: [] for r in range(plan.num_ranks)}

    def sized(values, layers, m):  # type: ignore[no-untyped-def]
        f = costs.micro_batch_factor
        return sum(values[k] * (1.0 if f is None else f[m, k]) for k in layers)

    ops = set(times)
    for s, stage in enumerate(plan.stages):
        layers = range(stage.first, stage.stop)
        for m in range(plan.num_micro_batches):
            if Op(s, "F", m) not in ops:
                continue
            full, stash = sized(costs.activation_bytes, layers, m), sized(costs.stash_bytes, layers, m)
            split = Op(s, "I", m) in ops
            back = times[Op(s, "I" if split else "B", m)]
            begin = times[Op(s, "F", m)][0]
            if Op(s, "R", m) in ops:
                again = set(stage.recomputed_layers)
                kept = sized(costs.activation_bytes, [k for k in layers if k not in again], m)
                kept += sized(costs.boundary_bytes, [k - 1 for k in sorted(again) if k - 1 not in again and k > 0], m)
                kept = min(kept, full)
                held[stage.rank].append((begin, times[Op(s, "R", m)][0], kept))
                begin = times[Op(s, "R", m)][0]
            held[stage.rank].append((begin, back[1], full))
            if split:
                held[stage.rank].append((back[1], times[Op(s, "W", m)][1], stash))
    for op, (begin, end) in times.items():
        stage = plan.stages[op.stage]
        held[stage.rank].append((begin, end, max(costs.workspace_bytes[stage.first : stage.stop])))
        for c in consumers.get(op, []):
            if c.stage == op.stage:
                continue
            layer = stage.stop - 1 if op.kind == "F" else stage.first - 1
            size = sized(costs.boundary_bytes, [layer], op.micro_batch)
            until = times[c][0] if op.kind == "F" else times[c][1]
            to = plan.stages[c.stage].rank
            if to == stage.rank:
                held[to].append((end, until, size))
            else:
                held[stage.rank].append((end, arrived[op, c][1], size))
                held[to].append((arrived[op, c][0], until, size))
    peaks = {}
    for r in range(plan.num_ranks):
        layers = {k for s in plan.stages if s.rank == r for k in range(s.first, s.stop)}  # a rank has each once
        static = sum(costs.static_bytes[k] for k in layers)
        points = sorted({t for a, b, _ in held[r] for t in (a, b)})
        middles = [(a + b) / 2 for a, b in itertools.pairwise(points)]
        peaks[r] = static + max([sum(x for a, b, x in held[r] if a < t < b) for t in middles], default=0.0)
    return peaks

"""Plans that hold layers more than once (Chimera, DualPipe): a published one, improved by small steps.

Knows: how to anneal the orders and the common partition of a plan with several routes over copies of the same stages.
Does not know: how such plans are made; the lanes' own search is over plans that hold a layer once.

A copy of a heavy layer lets two ranks share its work, which no plan with single copies can; it costs its weights, its
optimizer state and a reduction of gradients, all of which the simulator charges. Where that pays, the tuner must not
hand back something slower.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from octopipe._engine import evaluate
from octopipe.plan import KINDS, F, I, Op, Plan, Stage, W, route_neighbours
from octopipe.tuner.anneal import below, uniform
from octopipe.tuner.kernels import Problem

BOUNDARIES = 0.25
"""How often a move shifts a boundary instead of an op."""
REACH = 8
"""How far an op jumps at most."""


def improvable(plan: Plan) -> bool:
    """Split backward, nothing recomputed, and routes that cut the layers alike."""
    if len(plan.routes) < 2 or any(stage.recompute for stage in plan.stages):
        return False
    if any(op.kind not in "FIW" for order in plan.orders for op in order):
        return False
    cuts = {tuple((plan.stages[s].first, plan.stages[s].stop) for s in route) for route in plan.routes}
    return len(cuts) == 1 and len({s for route in plan.routes for s in route}) == len(plan.stages)


class Copies:
    """The walk over one such plan."""

    def __init__(self, plan: Plan, problem: Problem, seed: int) -> None:
        self.plan, self.problem = plan, problem
        t = plan.table()
        self.routes = np.array(plan.routes, np.int32)
        self.cuts = np.array([plan.stages[s].first for s in plan.routes[0]] + [plan.num_layers], np.int32)
        self.rank = np.array([stage.rank for stage in plan.stages], np.int32)
        self.before, self.after = route_neighbours(plan)
        self.route = np.asarray(plan.route_of_micro_batch, np.int32)
        self.offsets = t.offsets
        self.ops = np.stack([t.stage.astype(np.int32), t.kind.astype(np.int32), t.micro_batch.astype(np.int32)], axis=1)
        self.rng = np.random.default_rng((seed, 77)).integers(1, 1 << 62, 1).astype(np.uint64)
        self.best_cuts, self.best_ops = self.cuts.copy(), self.ops.copy()
        self.current_ms = self.best_ms = np.inf
        self.run(0, 0.0)

    def run(self, moves: int, temperature: float) -> None:
        """Some moves at one temperature."""
        self.current_ms, self.best_ms = _anneal(
            self.problem, self.routes, self.cuts, self.rank, self.before, self.after, self.route, self.offsets,
            self.ops, self.best_cuts, self.best_ops, moves, temperature, self.current_ms, self.best_ms, self.rng,
        )  # fmt: skip

    def best_plan(self) -> Plan:
        place = {int(s): k for route in self.routes for k, s in enumerate(route)}
        stages = tuple(
            Stage(first=int(self.best_cuts[place[s]]), stop=int(self.best_cuts[place[s] + 1]), rank=stage.rank)
            for s, stage in enumerate(self.plan.stages)
        )
        rows = (self.best_ops[a:b].tolist() for a, b in zip(self.offsets[:-1], self.offsets[1:]))
        return Plan(
            model=self.plan.model,
            num_layers=self.plan.num_layers,
            num_ranks=self.plan.num_ranks,
            num_micro_batches=self.plan.num_micro_batches,
            stages=stages,
            orders=tuple(tuple(Op(s, KINDS[k], m) for s, k, m in row) for row in rows),
            routes=self.plan.routes,
            route_of_micro_batch=self.plan.route_of_micro_batch,
        )


@njit(cache=True, nogil=True)
def _price(p, routes, cuts, rank, route, duration, forward_ms, gradient_ms, held, stash, static):  # type: ignore[no-untyped-def]
    """Times, transfers and memory of every stage."""
    M = p.num_micro_batches
    static[:] = 0.0
    work = np.zeros(p.num_ranks)
    for r in range(routes.shape[0]):
        for k in range(routes.shape[1]):
            s, a, z = routes[r, k], cuts[k], cuts[k + 1]
            here = rank[s]
            slow = p.slow[here]
            duration[s, F] = (p.forward[0, z] - p.forward[0, a]) * slow
            duration[s, I] = (p.input[0, z] - p.input[0, a]) * slow
            duration[s, W] = (p.weight[0, z] - p.weight[0, a]) * slow
            held[s] = p.activation[0, z] - p.activation[0, a]
            stash[s] = p.stash[0, z] - p.stash[0, a]
            static[here] += p.static[z] - p.static[a]
            for l in range(a, z):
                work[here] = max(work[here], p.workspace[l])
            after = rank[routes[r, k + 1]] if k + 1 < routes.shape[1] else here
            ahead = rank[routes[r, k - 1]] if k > 0 else here
            for m in range(M):
                if route[m] == r:
                    forward_ms[s, m] = p.latency[here, after] + p.boundary[0, z] * p.per_byte[here, after]
                    gradient_ms[s, m] = p.latency[here, ahead] + p.boundary[0, a] * p.per_byte[here, ahead]
    static += work


@njit(cache=True, nogil=True)
def _fits(p, r, offsets, ops, held, stash, static):  # type: ignore[no-untyped-def]
    used = static[r]
    for i in range(offsets[r], offsets[r + 1]):
        s = ops[i, 0]
        if ops[i, 1] == F:
            used += held[s]
            if used > p.capacity[r]:
                return False
        elif ops[i, 1] == I:
            used -= held[s] - stash[s]
        else:
            used -= stash[s]
    return used <= p.capacity[r]


@njit(cache=True, nogil=True)
def _anneal(  # type: ignore[no-untyped-def]
    p, routes, cuts, rank, before, after, route, offsets, ops, best_cuts, best_ops, moves, heat, current, best_ms, rng
):
    """`moves` moves of the orders and boundaries in place; returns (the step time now, the best)."""
    stages, total = rank.size, ops.shape[0]
    table = np.zeros((stages, 5))
    forward_ms, gradient_ms = np.zeros((stages, route.size)), np.zeros((stages, route.size))
    held, stash, static = np.zeros(stages), np.zeros(stages), np.zeros(p.num_ranks)
    duration = np.zeros(total)
    row = np.zeros(3, np.int32)
    _price(p, routes, cuts, rank, route, table, forward_ms, gradient_ms, held, stash, static)
    for n in range(-1, moves):
        r, i, to, cut, by = -1, -1, -1, -1, 0
        if n >= 0 and uniform(rng) < BOUNDARIES and cuts.size > 2:
            cut = 1 + below(rng, cuts.size - 2)
            by = 1 if uniform(rng) < 0.5 else -1
            if cuts[cut] + by <= cuts[cut - 1] or cuts[cut] + by >= cuts[cut + 1]:
                continue
            cuts[cut] += by
            _price(p, routes, cuts, rank, route, table, forward_ms, gradient_ms, held, stash, static)
        elif n >= 0:
            r = below(rng, p.num_ranks)
            length = offsets[r + 1] - offsets[r]
            if length < 2:
                continue
            i = offsets[r] + below(rng, length)
            to = i + below(rng, 2 * REACH + 1) - REACH
            to = min(max(to, offsets[r]), offsets[r + 1] - 1)
            step = 1 if to > i else -1
            free = to != i
            for k in range(i + step, to + step, step):
                # F, I and W of one micro-batch stay in this order.
                if ops[k, 0] == ops[i, 0] and ops[k, 2] == ops[i, 2]:
                    free = False
            if not free:
                continue
            row[:] = ops[i]
            for k in range(i, to, step):
                ops[k] = ops[k + step]
            ops[to] = row
        value = np.inf
        fits = True
        for q in range(p.num_ranks):
            if (r < 0 or q == r) and not _fits(p, q, offsets, ops, held, stash, static):
                fits = False
                break
        if fits:
            for k in range(total):
                duration[k] = table[ops[k, 0], ops[k, 1]]
            value = evaluate(
                offsets, ops[:, 0], ops[:, 1], ops[:, 2], duration, before, after, route, rank, forward_ms, gradient_ms
            )
            if value < 0.0:
                value = np.inf
        if n < 0:
            current = value
            if value < best_ms:
                best_ms = value
                best_cuts[:] = cuts
                best_ops[:] = ops
            continue
        if value <= current - heat * best_ms * np.log(max(uniform(rng), 1e-300)):
            current = value
            if value < best_ms:
                best_ms = value
                best_cuts[:] = cuts
                best_ops[:] = ops
        elif cut >= 0:
            cuts[cut] -= by
            _price(p, routes, cuts, rank, route, table, forward_ms, gradient_ms, held, stash, static)
        else:
            step = 1 if i > to else -1
            row[:] = ops[to]
            for k in range(to, i, step):
                ops[k] = ops[k + step]
            ops[i] = row
    return current, best_ms

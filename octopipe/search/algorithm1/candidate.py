"""A candidate of the iterative tuners: partition, placement and orders, and the `Evaluator` that evaluates them.

Knows: how a plan is represented as arrays, what it costs (costs from `price.py`), how its orders are timed and kept
within memory. Does not know: phases or moves.

The schedule O of Algorithm 1 is an order per rank, as in the paper: moves change it op by op, and a change of the
partition leaves it unchanged. Any plan can be represented, including fused backwards, recomputation and several routes;
a given plan is returned unchanged unless a move improves it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from octopipe.costs.table import CostTable
from octopipe.plans.plan import KINDS, F, I, Op, Plan, R, Stage, W, route_neighbours
from octopipe.plans.price import hop_times, stage_memory, stage_times
from octopipe.search.algorithm1.arrange import TOO_SLOW, Rules, arrange
from octopipe.search.algorithm1.prices import Floats, Ints, Prices
from octopipe.search.algorithm1.replay import replay
from octopipe.search.algorithm1.settings import SETTINGS, Settings
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """Stages, routes and orders; `ops` has one row (stage, kind, micro_batch) per op, rank after rank."""

    stages: tuple[Stage, ...]
    routes: tuple[tuple[int, ...], ...]
    route_of: tuple[int, ...]
    ops: Ints
    offsets: Ints
    prices: Prices

    @property
    def chain(self) -> bool:
        """Whether there is a single route that passes all stages in order, which the partition and placement phases
        need."""
        return len(self.routes) == 1 and self.routes[0] == tuple(range(len(self.stages)))

    @property
    def bounds(self) -> list[int]:
        return [s.first for s in self.stages] + [self.stages[-1].stop]

    def order(self, rank: int) -> Ints:
        return self.ops[self.offsets[rank] : self.offsets[rank + 1]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A state that runs without deadlock and fits, with its simulation."""

    state: State
    plan: Plan
    timeline: Timeline

    @cached_property
    def step_ms(self) -> float:
        return self.timeline.step_ms

    @cached_property
    def without_imbalance_ms(self) -> float:
        """The step time minus what balancing the ranks could gain; placement moves are compared by it."""
        return self.step_ms - excess_ms(self.timeline.busy_ms)


class TooSlow(Exception):
    """Raised when orders that are being built cannot end before the cutoff."""


def excess_ms(loads_ms: Floats) -> float:
    """Return how much more work the busiest rank has than the mean rank."""
    return float(loads_ms.max() - loads_ms.mean())


class Evaluator:
    """Prices, times and simulates states for given costs, ranks and micro-batches."""

    def __init__(self, costs: CostTable, num_ranks: int, num_micro_batches: int, settings: Settings = SETTINGS) -> None:
        self.costs, self.num_ranks, self.num_micro_batches = costs, num_ranks, num_micro_batches
        self.settings = settings
        self.max_stages = min(costs.num_layers, max(settings.most_stages * num_ranks, 24))
        # The same tolerance for rounded sums as in the simulator.
        self.capacity = np.array([costs.capacity_bytes(r) for r in range(num_ranks)]) * (1 + 1e-12)
        self.has_limit = bool(np.isfinite(self.capacity).any())
        self.slow = np.array([costs.slowdown(r) for r in range(num_ranks)])
        sizes = 1.0 if costs.micro_batch_factor is None else costs.micro_batch_factor[:num_micro_batches].sum(axis=0)
        count = num_micro_batches if costs.micro_batch_factor is None else 1
        self.layer_ms = np.asarray(costs.layer_ms * sizes * count)
        """[layer]: work in a step, in milliseconds on a rank without slowdown."""
        self.work = _sums(self.layer_ms)
        self.forward_ms = np.asarray(costs.forward_ms * sizes * count)
        self._last = np.zeros(num_ranks)
        size = np.ones((num_micro_batches, costs.num_layers))
        if costs.micro_batch_factor is not None:
            size = costs.micro_batch_factor[:num_micro_batches]
        added = (costs.forward_ms, costs.input_ms, costs.weight_ms, costs.activation_bytes, costs.stash_bytes)
        self.sums = _sums(np.stack([size * values for values in added]))
        """[F, I, W, activation, stash][micro_batch][layers before]"""
        self.per_layer = _sums(np.stack((costs.static_bytes, costs.optimizer_ms)))
        handed = size if costs.handed_factor is None else costs.handed_factor[:num_micro_batches]
        self.boundary, self.workspace = handed * costs.boundary_bytes, np.append(costs.workspace_bytes, 0.0)
        links = [[costs.network.link(a, b) for b in range(num_ranks)] for a in range(num_ranks)]
        self.latency = np.array([[link.latency_ms for link in row] for row in links])
        self.per_byte = np.array([[link.ms_per_byte for link in row] for row in links])

    # -- plans and states ------------------------------------------------------------------------------

    def state(self, plan: Plan) -> State:
        """Return the exact representation of a plan; the plan must have passed its check."""
        t = plan.table()
        ops = np.stack([t.stage, t.kind.astype(np.int32), t.micro_batch], axis=1).astype(np.int32)
        return State(
            stages=plan.stages, routes=plan.routes, route_of=plan.route_of_micro_batch, ops=ops,
            offsets=t.offsets.astype(np.int32), prices=self.price(plan.stages, plan.routes, plan.route_of_micro_batch),
        )  # fmt: skip

    def plan(self, st: State) -> Plan:
        rows = st.ops.tolist()
        orders = (rows[a:b] for a, b in zip(st.offsets[:-1], st.offsets[1:], strict=True))
        written = tuple(tuple(Op(s, KINDS[k], m) for s, k, m in order) for order in orders)
        return self._bare(st.stages, st.routes, st.route_of, written)

    def _bare(
        self, stages: tuple[Stage, ...], routes: tuple[tuple[int, ...], ...], route_of: tuple[int, ...],
        orders: tuple[tuple[Op, ...], ...] = (),
    ) -> Plan:  # fmt: skip
        return Plan(
            model=self.costs.model, num_layers=self.costs.num_layers, num_ranks=self.num_ranks,
            num_micro_batches=self.num_micro_batches, stages=stages, orders=orders, routes=routes,
            route_of_micro_batch=route_of,
        )  # fmt: skip

    def price(
        self, stages: tuple[Stage, ...], routes: tuple[tuple[int, ...], ...], route_of: tuple[int, ...]
    ) -> Prices:
        """Return the costs of all stages, equal to those of the functions in `plans/price.py`."""
        bare = self._bare(stages, routes, route_of)
        first, stop = np.array([s.first for s in stages]), np.array([s.stop for s in stages])
        rank = np.array([s.rank for s in stages], np.int32)
        sums = self.sums[:, :, stop] - self.sums[:, :, first]
        forward, inward, weight, held, stash = np.ascontiguousarray(np.swapaxes(sums, 1, 2))
        again, kept = np.zeros_like(forward), held
        if any(s.recompute for s in stages):
            kept = stage_memory(bare, self.costs).after_forward
            again = stage_times(bare, self.costs)[R] / self.slow[rank][:, None]
        ms = np.stack((forward, again, inward, weight, inward + weight)) * self.slow[rank][:, None]
        before, after = route_neighbours(bare)
        if len(routes) == 1:
            gone, came = self._hops(rank[:-1], rank[1:], stop[:-1] - 1), self._hops(rank[1:], rank[:-1], first[1:] - 1)
            edge = np.zeros((1, forward.shape[1]))
            forward_ms, gradient_ms = np.concatenate((gone, edge)), np.concatenate((edge, came))
            if routes[0] != tuple(range(len(stages))):
                forward_ms, gradient_ms = hop_times(bare, self.costs)
        else:
            forward_ms, gradient_ms = hop_times(bare, self.costs)
        static, update = self.per_layer[:, stop] - self.per_layer[:, first]
        return Prices(
            ms=ms, forward_ms=forward_ms, gradient_ms=gradient_ms, kept=kept, held=held, stash=stash,
            work=np.maximum.reduceat(self.workspace, np.stack((first, stop), axis=1).ravel())[::2].copy(),
            static=np.bincount(rank, static, self.num_ranks).astype(np.float64), rank=rank, before=before, after=after,
            route=np.asarray(route_of, np.int32), update_ms=np.bincount(rank, update, self.num_ranks) * self.slow,
        )  # fmt: skip

    def _hops(self, source: Ints, target: Ints, layer: NDArray[np.int64]) -> Floats:
        """Return the transfer times of these layers' outputs between these ranks, [hop, micro_batch]."""
        apart = (source != target)[:, None]
        latency, per_byte = self.latency[source, target][:, None], self.per_byte[source, target][:, None]
        return np.where(apart, latency + self.boundary[:, layer].T * per_byte, 0.0)

    # -- judging ---------------------------------------------------------------------------------------

    def time(self, st: State) -> tuple[float, int, Floats]:
        """Return the step time (without gradient reductions; infinite on a deadlock), the first op that exceeds memory
        (or -1), and the start times of all ops."""
        p, start = st.prices, np.zeros(st.ops.shape[0])
        makespan, over = replay(p, st.offsets, st.ops, self.capacity, start, self._last)
        return (float((self._last + p.update_ms).max()) if makespan >= 0 else np.inf), int(over), start

    def judge(self, st: State, cutoff_ms: float = np.inf) -> tuple[float, State]:
        """Return the step time and the state, with W advanced if memory is short. The time is infinite if it reaches
        the cutoff or if the state does not fit or deadlocks."""
        ms, over, _ = self.time(st)
        if ms >= cutoff_ms:
            return np.inf, st
        return (ms, st) if over < 0 else self.advance_weights(st, cutoff_ms)

    def advance_weights(self, st: State, cutoff_ms: float = np.inf) -> tuple[float, State]:
        """Apply the paper's selective advance of W: until no op exceeds memory, move a W before the first op that does.
        A W whose advance costs no time is preferred; otherwise it is the first one that follows. Returns as `judge`
        does."""
        for _ in range(st.ops.shape[0]):
            ms, over, _ = self.time(st)
            if ms >= cutoff_ms:
                return np.inf, st
            if over < 0:
                return ms, st
            chosen: State | None = None
            for x in self._weights_after(st, over)[: self.settings.advanced_weights]:
                moved = shifted(st, x, over)
                then_ms, then_over, _ = self.time(moved)
                if then_ms <= ms and (then_over < 0 or then_over > over):
                    chosen = moved
                    break
                chosen = chosen or moved
            if chosen is None:
                return np.inf, st
            st = chosen
        return np.inf, st

    def _weights_after(self, st: State, at: int) -> list[int]:
        """Return the W that run after op `at` on its rank and whose I runs before it."""
        end = int(st.offsets[np.searchsorted(st.offsets, at, side="right")])
        begin = int(st.offsets[np.searchsorted(st.offsets, at, side="right") - 1])
        ran = {(s, m) for s, k, m in st.ops[begin:at].tolist() if k == I}
        return [at + 1 + j for j, (s, k, m) in enumerate(st.ops[at + 1 : end].tolist()) if k == W and (s, m) in ran]

    def view(self, st: State) -> Candidate | None:
        """Return the state as a simulated candidate; None if it deadlocks or does not fit.

        The fast evaluation ignores transfer buffers. If these make a rank exceed its memory, W are advanced as if the
        rank had that much less memory.
        """
        capacity = self.capacity
        try:
            for _ in range(self.settings.repairs):
                ms, st = self.judge(st)
                if ms == np.inf:
                    return None
                plan = self.plan(st)
                timeline = simulate(plan, self.costs, check=False)
                if timeline.fits:
                    return Candidate(state=st, plan=plan, timeline=timeline)
                over = timeline.peak_bytes - capacity
                self.capacity = self.capacity - np.where(over > 0, over * 1.01, 0.0)
            return None
        finally:
            self.capacity = capacity

    # -- changing structures ---------------------------------------------------------------------------

    def restaged(self, st: State, stages: tuple[Stage, ...]) -> State:
        """Return the state with other stages, as many as before, and the same orders."""
        return recomputing(replace(st, stages=stages, prices=self.price(stages, st.routes, st.route_of)))

    def arranged(
        self, st: State, keys: Floats, *, flight: int | None = None, wait_ms: float = 0.0, overrun: float = 1.0,
        cutoff_ms: float = np.inf,
    ) -> State | None:  # fmt: skip
        """Return the chain with orders from list scheduling by these keys [F or I, stage, micro_batch]; None if the
        scheduler gets stuck. Raises TooSlow if the step would take longer than the cutoff."""
        p, most = st.prices, self.num_micro_batches
        again = np.array([bool(s.recompute) for s in st.stages])
        # F, R, I and W of the rank with the most stages.
        size = 4 * int(np.bincount(p.rank).max()) * most
        out = np.zeros((self.num_ranks, size, 3), np.int32)
        rules = Rules(np.ascontiguousarray(keys), most if flight is None else flight, wait_ms, overrun, again)
        lengths = arrange(p, rules, size, self.capacity, cutoff_ms, out)
        if lengths[0] == TOO_SLOW:
            raise TooSlow
        if lengths[0] < 0:
            return None
        ops = np.concatenate([out[r, : lengths[r]] for r in range(self.num_ranks)])
        return replace(st, ops=ops, offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))

    def loads(self, stages: tuple[Stage, ...]) -> Floats:
        """The work of every rank in a step."""
        out = np.zeros(self.num_ranks)
        for s in stages:
            out[s.rank] += self.work[s.stop] - self.work[s.first]
            if s.recompute:
                out[s.rank] += self.forward_ms[list(s.recomputed_layers)].sum()
        return out * self.slow


def _sums(values: Floats) -> Floats:
    """Prefix sums over the layers, along the last axis."""
    return np.concatenate((np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)), axis=-1)


def shifted(st: State, x: int, to: int) -> State:
    """Return the state with op number x moved to position `to`, which belongs to the same rank."""
    ops = st.ops.copy()
    row = ops[x].copy()
    if to < x:
        ops[to + 1 : x + 1] = st.ops[to:x]
    else:
        ops[x:to] = st.ops[x + 1 : to + 1]
    ops[to] = row
    return replace(st, ops=ops)


def recomputing(st: State) -> State:
    """Add a missing R of a recomputing stage directly before its backward, unless that directly follows its F, and
    remove the R of other stages."""
    again = [bool(s.recompute) for s in st.stages]
    if not any(again) and not (st.ops[:, 1] == R).any():
        return st
    rows, offsets, changed = [], [0], False
    for r in range(st.offsets.size - 1):
        order = st.order(r).tolist()
        has = {(s, m) for s, k, m in order if k == R}
        for j, (s, k, m) in enumerate(order):
            if k == R and not again[s]:
                changed = True
                continue
            if k not in (F, R, W) and again[s] and (s, m) not in has and order[j - 1] != [s, F, m]:
                rows.append([s, R, m])
                changed = True
            rows.append([s, k, m])
        offsets.append(len(rows))
    if not changed:
        return st
    return replace(st, ops=np.array(rows, np.int32).reshape(-1, 3), offsets=np.array(offsets, np.int32))

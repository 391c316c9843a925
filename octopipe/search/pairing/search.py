"""The search for plans with pairs: varies structures and keys together and evaluates them by list scheduling.

Knows: initial structures (loops and waves over balanced stages, and a given plan), moves, annealing, and that only
plans that fit are returned. Does not know: how a schedule is built (`schedule`), recomputation, copies of layers.

All random numbers come from one seed; with a number of moves instead of a time budget, the plan depends only on that.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import KINDS, Op, Plan, Stage
from octopipe.search.pairing.balance import Weights, balance
from octopipe.search.pairing.order_state import Slots, Structure
from octopipe.search.pairing.prices import ACTIVATION, ALONE_F, ALONE_I, ALONE_W, FB, Layers, layers_of, price
from octopipe.search.pairing.rhythm import APART_W, Beat, rhythm
from octopipe.search.pairing.schedule import Keys, schedule
from octopipe.search.pairing.states import Drawing, State, full_rotation
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline

Floats = NDArray[np.float64]
MOST_CHUNKS = 6
HOT, COLD = 8e-3, 2e-4
"""Temperature of the annealing, as a share of the best time: at the start and at the end."""
FITTED = 6
"""How often a state is scheduled, each time with less memory or a smaller rotation, until its plan fits."""
OVER = 2.0
"""A steady schedule counts as longer by OVER times the largest excess over a rank's memory, as a share of it."""
APART, ALL_APART = (0.0, 1.0, 2.0), (0.5, 1.0)
"""Steady starts are tried with different numbers of last micro-batches whose W is kept out of pairs: these shares of a
full rotation, and of all micro-batches. If pairs leave little of the exchange exposed, a W only makes them longer."""
BALANCED = 300
"""Before a steady start is scheduled, this many partitions per stage are judged to balance it."""
ROTATIONS = (1.0, 0.94, 0.87, 0.75, 0.6, 0.45, 0.3)
"""Steady starts are tried with these shares of a full rotation, one after the other until one fits."""
START_SHARE, TRIAL_SHARE = 0.2, 0.15
"""Share of the time in which starts are tried, and share in which each of the TRIALS best of them is annealed. In the
rest of the time, the best result is annealed further."""
TRIALS = 3
MOST_KNOWN = 256
"""Structures whose prices are kept."""


class Judged(NamedTuple):
    ms: float
    state: State


@dataclass(slots=True, kw_only=True)
class PairSearch:
    """One search. `run` returns the best plan that fits, or None if none was found."""

    costs: CostTable
    num_ranks: int
    num_micro_batches: int
    budget_s: float
    seed: int = 0
    moves: int | None = None
    """If given, this many schedules are judged, however long that takes."""
    starts: Sequence[Plan] = ()
    judged: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._dice = random.Random(self.seed)
        self._layers = layers_of(self.costs, self.num_ranks)
        handed = self.costs.handed_factor
        self._handed_bytes = self.costs.boundary_bytes * (1.0 if handed is None else handed.mean(axis=0))
        most = 3 * self.costs.num_layers * self.num_micro_batches
        self._out = np.zeros((self.num_ranks, most, 2), np.int64)
        self._lengths = np.zeros(self.num_ranks, np.int64)
        self._over_by = np.zeros(self.num_ranks)
        self._less = np.zeros(self.num_ranks)
        proxy = self._layer_proxy()
        self._drawing = Drawing(proxy, self.num_ranks, self.num_micro_batches, self._dice)

    _began: float = field(default=0.0, init=False)
    _dice: random.Random = field(default_factory=random.Random, init=False)
    _layers: Layers = field(init=False)
    _out: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64), init=False)
    _lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64), init=False)
    _over_by: Floats = field(default_factory=lambda: np.zeros(0), init=False)
    _handed_bytes: Floats = field(default_factory=lambda: np.zeros(0), init=False)
    """The bytes that each layer hands over; micro-batches of different sizes are replaced by their mean."""
    _known: dict[Any, Any] = field(default_factory=dict, init=False)
    _less: Floats = field(default_factory=lambda: np.zeros(0), init=False)
    """Per rank, the bytes by which plans so far took more than their schedules had counted. Schedules get less memory
    by as much."""
    _drawing: Drawing = field(init=False)

    # -- the search ----------------------------------------------------------------------------------------

    def run(self) -> tuple[Plan, Timeline] | None:
        """The best plan found that fits, with its timeline."""
        starts = self._started()
        found: list[Judged] = []
        for number, state in enumerate(starts):
            found.append(self._annealed(state, START_SHARE + (number + 1) * TRIAL_SHARE))
        found.sort(key=lambda judged: judged.ms)
        if found:
            found.insert(0, self._annealed(found[0].state, 1.0))
        best: tuple[Plan, Timeline] | None = None
        for judged in found:
            made = self._made(judged.state)
            if made is not None and (best is None or made[1].step_ms < best[1].step_ms):
                best = made
        return best

    def _share(self) -> float:
        """The share of the budget that is used."""
        if self.moves is not None:
            return self.judged / max(self.moves, 1)
        return (time.monotonic() - self._began) / self.budget_s

    def _started(self) -> list[State]:
        """The best TRIALS of the initial states, at most one free and one steady state per placement."""
        found: list[Judged] = []
        for plan in self.starts:
            state = self._drawing.of_plan(plan)
            if state is not None:
                found += [Judged(self._ms(each), each) for each in (state, *self._steady(state))]
        tried = 0
        while self._share() < START_SHARE or tried < 4:
            chunks = 1 + tried % MOST_CHUNKS
            waves = (tried // MOST_CHUNKS) % 2 == 0
            tried += 1
            if chunks * self.num_ranks > self.costs.num_layers:
                if tried > 8 * MOST_CHUNKS:
                    break
                continue
            varied = tried > 2 * MOST_CHUNKS
            state = self._drawing.drawn(chunks, waves, varied=varied)
            found.append(Judged(self._ms(state), state))
            if not varied or tried % 2:
                found += [Judged(self._ms(each), each) for each in self._steady(state)]
            if tried > 40 * MOST_CHUNKS:
                break
        kinds: dict[tuple[object, ...], Judged] = {}
        for judged in sorted(found, key=lambda j: j.ms):
            kinds.setdefault((judged.state.rotation > 0, *judged.state.rank), judged)
        return [judged.state for judged in kinds.values() if judged.ms < math.inf][:TRIALS]

    def _steady(self, state: State) -> list[State]:
        """The state's structure in a steady rhythm, with falling rotations up to the first that fits in memory."""
        turn = full_rotation(state.rank)
        out: list[State] = []
        tried: set[int] = set()
        for share in ROTATIONS:
            rotation = max(1, round(share * turn))
            steady = self._balanced(self._drawing.steady(state, rotation))
            if rotation in tried:
                continue
            tried.add(rotation)
            # The numbers of last micro-batches whose W is kept out of pairs.
            apart = [round(part * turn) for part in APART] + [
                round(part * self.num_micro_batches) for part in ALL_APART
            ]
            variants = [steady.copy() for _ in apart]
            for variant, number in zip(variants, apart, strict=True):
                variant.numbers[APART_W] = float(number)
            ms, best = min(((self._ms(each), k) for k, each in enumerate(variants)))
            if ms < math.inf:
                out.append(variants[best])
                self._ms(variants[best])
                if not self._over_by.any():
                    break
        return out

    def _balanced(self, state: State) -> State:
        """The state with its layers redistributed, given how many micro-batches of each stage its rhythm keeps."""
        costs, size = self.costs, len(state.rank)
        if size < 2:
            return state
        sums = Weights(
            *(
                np.concatenate(([0.0], np.cumsum(values)))
                for values in (self._drawing.proxy, self._layers.own[ACTIVATION], costs.static_bytes)
            )
        )
        room = np.full(self.num_ranks, np.inf)
        if costs.rank_memory_bytes:
            room = np.array([costs.capacity_bytes(r) for r in range(self.num_ranks)]) - self._less
            room -= 2 * float(np.median(costs.workspace_bytes))
        share = min(1.0, state.rotation / full_rotation(state.rank)) / state.period
        flight = np.array([(i - f) * share for f, i in zip(state.key_f, state.key_i, strict=True)])
        draws = np.random.default_rng(self._dice.getrandbits(32)).random((BALANCED * size, 4))
        slow = np.array([costs.slowdown(r) for r in range(self.num_ranks)])
        rank = np.array(state.rank, np.int64)
        state.bounds = balance(sums, np.array(state.bounds, np.int64), rank, flight, slow, room, draws).tolist()
        return state

    def _annealed(self, state: State, until: float) -> Judged:
        now = best = Judged(self._ms(state), state)
        begin = self._share()
        while (share := self._share()) < until:
            heat = HOT * (COLD / HOT) ** ((share - begin) / max(until - begin, 1e-9))
            other = now.state.copy()
            for _ in range(self._dice.choice((1, 1, 1, 2, 3))):
                self._drawing.move(other)
            ms = self._ms(other)
            worse = (ms - now.ms) / best.ms if best.ms < math.inf else 0.0
            if ms < math.inf and (worse <= 0 or self._dice.random() < math.exp(-worse / heat)):
                now = Judged(ms, other)
                if ms < best.ms:
                    best = now
        return best

    def _layer_proxy(self) -> Floats:
        """What each layer adds to its rank's time if F and B run as a pair."""
        layers = self.costs.num_layers
        one = np.arange(layers + 1, dtype=np.int64)
        own, together = price(self._layers, one, np.zeros(layers, np.int64), layers)
        alone = own[ALONE_F] + own[ALONE_I] + own[ALONE_W]
        return np.minimum(np.diagonal(together[FB]), alone)

    # -- judging -------------------------------------------------------------------------------------------

    def _ms(self, state: State) -> float:
        """The makespan of the schedule of a state, with a penalty for a steady one that exceeds memory (OVER); infinite
        if it deadlocks or the structure has too little memory."""
        self.judged += 1
        structure = self._structure(state)
        if structure is None:
            return math.inf
        keys = np.array(state.key_f), np.array(state.key_i)
        numbers, slots = np.array(state.numbers), Slots(self._out, self._lengths)
        if state.rotation:
            starts = state.starts(self.num_micro_batches)
            ms = float(rhythm(structure, Beat(*keys, starts, numbers), self.num_micro_batches, slots, self._over_by))
            return ms * (1.0 + OVER * float(np.max(self._over_by / structure.room)))
        flight = np.array(state.flight, np.int64)
        return float(schedule(structure, Keys(*keys, flight, numbers), self.num_micro_batches, slots))

    def _structure(self, state: State) -> Structure | None:
        """The costs of a state's structure, cached while only keys change; None if its weights leave no
        memory for one micro-batch."""
        key = (tuple(state.bounds), tuple(state.rank), self._less.tobytes())
        if key not in self._known:
            if len(self._known) > MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._priced(state)
        return self._known[key]

    def _priced(self, state: State) -> Structure | None:
        size, costs = len(state.rank), self.costs
        rank = np.array(state.rank, np.int64)
        bounds = np.array(state.bounds, np.int64)
        own, together = price(self._layers, bounds, rank, size)
        room = np.full(self.num_ranks, np.inf)
        if costs.rank_memory_bytes:
            static, space = np.zeros(self.num_ranks), np.zeros(self.num_ranks)
            for s in range(size):
                lo, hi = bounds[s], bounds[s + 1]
                static[rank[s]] += costs.static_bytes[lo:hi].sum()
                space[rank[s]] = max(space[rank[s]], costs.workspace_bytes[lo:hi].max())
            capacity = np.array([costs.capacity_bytes(r) for r in range(self.num_ranks)])
            room = capacity - static - 2 * space - self._less
            if np.any(room < [own[ACTIVATION][rank == r].sum() for r in range(self.num_ranks)]):
                return None
        hop_f, hop_i = np.zeros(size), np.zeros(size)
        for s in range(size - 1):
            nbytes = float(self._handed_bytes[bounds[s + 1] - 1])
            if rank[s] != rank[s + 1]:
                hop_f[s] = costs.network.transfer_ms(int(rank[s]), int(rank[s + 1]), nbytes)
                hop_i[s + 1] = costs.network.transfer_ms(int(rank[s + 1]), int(rank[s]), nbytes)
        return Structure(own, together, hop_f, hop_i, rank, room)

    def _made(self, state: State) -> tuple[Plan, Timeline] | None:
        """The plan of the state and its timeline. If it does not fit, it is scheduled again with less memory, by the
        amount that was exceeded, or with fewer micro-batches in flight; None if that does not help."""
        state = state.copy()
        for _ in range(FITTED):
            if self._ms(state) == math.inf:
                break
            plan = self._plan(state)
            timeline = simulate(plan, self.costs)
            if timeline.fits:
                return plan, timeline
            over = np.asarray(timeline.peak_bytes) - np.asarray(timeline.capacity_bytes)
            if self._over_by.any() and state.rotation > 1:
                state.rotation -= 1
            else:
                self._less = self._less + np.maximum(over, 0.0)
        return None

    def _plan(self, state: State) -> Plan:
        size, count = len(state.rank), self.num_micro_batches
        orders, pairs = [], set()
        for r in range(self.num_ranks):
            order: list[Op] = []
            for slot in self._out[r, : self._lengths[r]]:
                ops = []
                for code in slot:
                    if code >= 0:
                        rest, m = divmod(int(code), count)
                        kind, s = divmod(rest, size)
                        ops.append(Op(s, KINDS[kind], m))
                order += ops
                if len(ops) == 2:
                    pairs.add((ops[0], ops[1]))
            orders.append(tuple(order))
        stages = tuple(
            Stage(first=a, stop=b, rank=r) for a, b, r in zip(state.bounds, state.bounds[1:], state.rank, strict=False)
        )
        plan = Plan(
            model=self.costs.model,
            num_layers=self.costs.num_layers,
            num_ranks=self.num_ranks,
            num_micro_batches=count,
            stages=stages,
            orders=tuple(orders),
            pairs=frozenset(pairs),
        )
        return _worthwhile(plan, self.costs)


def _worthwhile(plan: Plan, costs: CostTable) -> Plan:
    """The plan without the pairs that save no time: as single ops, they pass on their results sooner."""
    from octopipe.plans.pair_price import PairPrices

    prices = PairPrices(plan, costs)
    kept = frozenset(p for p in plan.pairs if not prices.together(*p).one_by_one)
    out = replace(plan, pairs=kept)
    problems = out.problems()
    if problems:
        raise OctoPipeError(f"the search produced an invalid schedule: {problems[0]}")
    return out

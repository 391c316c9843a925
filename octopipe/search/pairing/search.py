"""The search for plans with pairs: structures and keys varied together, judged by list scheduling with pairs.

Knows: where structures start (loops and waves over balanced stages, and whatever plan is handed in), moves, annealing,
and that only plans which fit are handed back. Does not know: how a schedule is made (`schedule`), recomputation, copies
of layers.

Everything random comes from one seed; with a number of moves instead of a time, the plan depends on that alone.
"""

from __future__ import annotations

import itertools
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
from octopipe.search.pairing.prices import ACTIVATION, ALONE_F, ALONE_I, ALONE_W, FB, layers_of, price
from octopipe.search.pairing.schedule import schedule
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline

Floats = NDArray[np.float64]
MOST_CHUNKS = 6
HOT, COLD = 8e-3, 2e-4
"""Temperature of the annealing, as a share of the best time: at the start and at the end."""
TIGHTER = 0.9
"""By how much the memory that schedules may use is lowered when the plan made of one does not fit."""
START_SHARE, TRIAL_SHARE = 0.2, 0.15
"""Share of the time in which starts are tried, and in which each of the best of them is annealed; the rest of the time
goes to the best of these."""
TRIALS = 3
MOST_KNOWN = 256
"""Structures whose prices are kept."""


@dataclass(slots=True, kw_only=True)
class State:
    """A structure with keys."""

    bounds: list[int]
    rank: list[int]
    key_f: list[float]
    key_i: list[float]
    flight: list[int]
    numbers: list[float]

    def copy(self) -> State:
        return State(
            bounds=self.bounds[:],
            rank=self.rank[:],
            key_f=self.key_f[:],
            key_i=self.key_i[:],
            flight=self.flight[:],
            numbers=self.numbers[:],
        )


class Judged(NamedTuple):
    ms: float
    state: State


@dataclass(slots=True, kw_only=True)
class PairSearch:
    """One search; `run` gives the best plan that fits, or None where none was found."""

    costs: CostTable
    num_ranks: int
    num_micro_batches: int
    budget_s: float
    seed: int = 0
    moves: int | None = None
    """Schedules to judge instead of a time."""
    starts: Sequence[Plan] = ()
    judged: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._dice = random.Random(self.seed)
        self._layers = layers_of(self.costs, self.num_ranks)
        most = 3 * self.costs.num_layers * self.num_micro_batches
        self._out = np.zeros((self.num_ranks, most, 2), np.int64)
        self._lengths = np.zeros(self.num_ranks, np.int64)
        self._tight = 1.0
        self._proxy = self._layer_proxy()

    _began: float = field(default=0.0, init=False)
    _dice: random.Random = field(default_factory=random.Random, init=False)
    _layers: object = field(default=None, init=False)
    _out: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64), init=False)
    _lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64), init=False)
    _known: dict[Any, Any] = field(default_factory=dict, init=False)
    _tight: float = field(default=1.0, init=False)
    _proxy: Floats = field(default_factory=lambda: np.zeros(0), init=False)

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
        """How much of the budget is used."""
        if self.moves is not None:
            return self.judged / max(self.moves, 1)
        return (time.monotonic() - self._began) / self.budget_s

    def _started(self) -> list[State]:
        """The best structures of those tried first."""
        found: list[Judged] = []
        for plan in self.starts:
            state = self._of_plan(plan)
            if state is not None:
                found.append(Judged(self._ms(state), state))
        tried = 0
        while self._share() < START_SHARE or tried < 4:
            chunks = 1 + tried % MOST_CHUNKS
            waves = (tried // MOST_CHUNKS) % 2 == 0
            tried += 1
            if chunks * self.num_ranks > self.costs.num_layers:
                if tried > 8 * MOST_CHUNKS:
                    break
                continue
            state = self._drawn(chunks, waves, varied=tried > 2 * MOST_CHUNKS)
            found.append(Judged(self._ms(state), state))
            if tried > 40 * MOST_CHUNKS:
                break
        kinds: dict[tuple[int, ...], Judged] = {}
        for judged in sorted(found, key=lambda j: j.ms):
            kinds.setdefault(tuple(judged.state.rank), judged)
        return [judged.state for judged in kinds.values() if judged.ms < math.inf][:TRIALS]

    def _annealed(self, state: State, until: float) -> Judged:
        now = best = Judged(self._ms(state), state)
        begin = self._share()
        while (share := self._share()) < until:
            heat = HOT * (COLD / HOT) ** ((share - begin) / max(until - begin, 1e-9))
            other = now.state.copy()
            for _ in range(self._dice.choice((1, 1, 1, 2, 3))):
                self._move(other)
            ms = self._ms(other)
            worse = (ms - now.ms) / best.ms if best.ms < math.inf else 0.0
            if ms < math.inf and (worse <= 0 or self._dice.random() < math.exp(-worse / heat)):
                now = Judged(ms, other)
                if ms < best.ms:
                    best = now
        return best

    # -- structures ----------------------------------------------------------------------------------------

    def _layer_proxy(self) -> Floats:
        """What each layer adds to its rank's time when F and B run as a pair."""
        layers = self.costs.num_layers
        one = np.arange(layers + 1, dtype=np.int64)
        own, together = price(self._layers, one, np.zeros(layers, np.int64), layers)
        alone = own[ALONE_F] + own[ALONE_I] + own[ALONE_W]
        return np.minimum(np.diagonal(together[FB]), alone)

    def _drawn(self, chunks: int, wave: bool, *, varied: bool) -> State:
        size, ranks, dice = chunks * self.num_ranks, self.num_ranks, self._dice
        ahead = np.concatenate(([0.0], np.cumsum(self._proxy)))
        shares = np.array([dice.uniform(0.9, 1.1) if varied else 1.0 for _ in range(size)])
        goals = ahead[-1] * np.cumsum(shares)[:-1] / shares.sum()
        bounds = [0]
        for k, goal in enumerate(goals):
            cut = int(np.argmin(np.abs(ahead - goal)))
            bounds.append(max(bounds[-1] + 1, min(cut, self.costs.num_layers - (size - 1 - k))))
        bounds.append(self.costs.num_layers)
        turn = [s % (2 * ranks) for s in range(size)]
        rank = [r if r < ranks else 2 * ranks - 1 - r for r in turn] if wave else [s % ranks for s in range(size)]
        depth = dice.choice((0.0, 0.5, 1.0, 2.0)) if varied else 1.0
        unit = float(self._proxy.sum()) / size
        lead = dice.choice((0.5, 0.7, 0.85, 1.0, 1.2, 2.0, 1e3)) if varied else 1.0
        return State(
            bounds=bounds,
            rank=rank,
            key_f=[-depth * s for s in range(size)],
            key_i=[dice.choice((-1.0, 0.0, 1.0)) * s if varied else 0.0 for s in range(size)],
            flight=self._flights(size, lead),
            numbers=[
                unit * (dice.choice((0.0, 0.1, 0.3, 0.6, 1.0)) if varied else 0.3),
                dice.choice((0.2, 0.5, 1.0)) if varied else 0.5,
                dice.choice((0.0, 0.5, 0.9, 1.1)) if varied else 0.9,
                dice.choice((0.5, 1.0)) if varied else 1.0,
                dice.choice((0.3, 0.7, 1.0)) if varied else 0.7,
                dice.choice((0.0, 0.7, 0.85, 0.95)) if varied else 0.0,
            ],
        )

    def _flights(self, size: int, lead: float) -> list[int]:
        """Micro-batches that pass between a stage's F and its I when every step on the way takes as long as a pair."""
        per_rank = size / self.num_ranks
        most = self.num_micro_batches
        return [min(most, max(1, math.ceil(lead * 2 * (size - s) / per_rank))) for s in range(size)]

    def _of_plan(self, plan: Plan) -> State | None:
        """A plan's structure under plain keys; None where it holds layers twice or its paths fork."""
        if len(plan.routes) != 1 or plan.forks:
            return None
        stages = [plan.stages[s] for s in plan.routes[0]]
        state = self._drawn(1, True, varied=False)
        size = len(stages)
        state.bounds = [0, *(s.stop for s in stages)]
        state.rank = [s.rank for s in stages]
        state.key_f = [-1.0 * s for s in range(size)]
        state.key_i = [0.0] * size
        state.flight = self._flights(size, 1.0)
        return state

    def _move(self, state: State) -> None:
        """One random change, in place."""
        dice, size = self._dice, len(state.rank)
        kind = dice.random()
        if kind < 0.3 and size > 1:  # a border moves
            k = dice.randrange(1, size)
            to = state.bounds[k] + dice.choice((-1, 1))
            if state.bounds[k - 1] < to < state.bounds[k + 1]:
                state.bounds[k] = to
        elif kind < 0.36 and size > 1:  # two stages change ranks
            a, b = dice.randrange(size), dice.randrange(size)
            state.rank[a], state.rank[b] = state.rank[b], state.rank[a]
        elif kind < 0.40 and size > 2:  # a stage moves by one place, layers of its neighbours give way
            a, b = sorted(dice.sample(range(1, size), 2)) if size > 2 else (1, 1)
            step = dice.choice((-1, 1))
            moved = [x + step if a <= k <= b else x for k, x in enumerate(state.bounds)]
            if all(x < y for x, y in itertools.pairwise(moved)) and moved[-1] == self.costs.num_layers:
                state.bounds = moved
        elif kind < 0.55:
            state.key_f[dice.randrange(size)] += dice.gauss(0.0, 1.5)
        elif kind < 0.66:
            state.key_i[dice.randrange(size)] += dice.gauss(0.0, 1.5)
        elif kind < 0.76:
            s = dice.randrange(size)
            state.flight[s] = min(self.num_micro_batches, max(1, state.flight[s] + dice.choice((-3, -2, -1, 1, 2, 3))))
        elif kind < 0.8:
            scale = math.exp(dice.gauss(0.0, 0.2))
            state.flight = [max(1, round(n * scale)) for n in state.flight]
        elif kind < 0.88:
            state.numbers[0] *= math.exp(dice.gauss(0.0, 0.5))
            if dice.random() < 0.1:
                state.numbers[0] = float(self._proxy.sum()) / size * dice.random()
        else:
            k = dice.randrange(1, 6)
            state.numbers[k] = min(1.2, max(0.0, state.numbers[k] + dice.gauss(0.0, 0.2)))

    # -- judging -------------------------------------------------------------------------------------------

    def _ms(self, state: State) -> float:
        """Makespan of the schedule that a state gives; infinite where it blocks."""
        self.judged += 1
        structure = self._structure(state)
        if structure is None:
            return math.inf
        own, together, hop_f, hop_i, rank, room = structure
        return float(
            schedule(
                own,
                together,
                hop_f,
                hop_i,
                rank,
                room,
                np.array(state.key_f),
                np.array(state.key_i),
                np.array(state.flight, np.int64),
                np.array(state.numbers),
                self.num_ranks,
                self.num_micro_batches,
                self._out,
                self._lengths,
            )
        )

    def _structure(self, state: State) -> tuple[Floats, Floats, Floats, Floats, NDArray[np.int64], Floats] | None:
        """Prices of a state's structure, found once while only keys change; None where its weights leave no room."""
        key = (tuple(state.bounds), tuple(state.rank), self._tight)
        if key not in self._known:
            if len(self._known) > MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._priced(state)
        return self._known[key]

    def _priced(self, state: State) -> tuple[Floats, Floats, Floats, Floats, NDArray[np.int64], Floats] | None:
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
            room = (capacity - static - 2 * space) * self._tight
            if np.any(room < [own[ACTIVATION][rank == r].sum() for r in range(self.num_ranks)]):
                return None
        hop_f, hop_i = np.zeros(size), np.zeros(size)
        for s in range(size - 1):
            nbytes = float(costs.boundary_bytes[bounds[s + 1] - 1])
            if rank[s] != rank[s + 1]:
                hop_f[s] = costs.network.transfer_ms(int(rank[s]), int(rank[s + 1]), nbytes)
                hop_i[s + 1] = costs.network.transfer_ms(int(rank[s + 1]), int(rank[s]), nbytes)
        return own, together, hop_f, hop_i, rank, room

    def _made(self, state: State) -> tuple[Plan, Timeline] | None:
        """The state's plan and its timeline; tightened until it fits, None where it never does."""
        before = self._tight
        for _ in range(8):
            if self._ms(state) == math.inf:
                break
            plan = self._plan(state)
            timeline = simulate(plan, self.costs)
            if timeline.fits:
                return plan, timeline
            self._tight *= TIGHTER
        self._tight = min(before, max(self._tight, 0.3))
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
    """The plan without pairs that hide nothing: two single ops hand on their results sooner."""
    from octopipe.plans.pair_price import PairPrices

    prices = PairPrices(plan, costs)
    kept = frozenset(p for p in plan.pairs if not prices.together(*p).one_by_one)
    out = replace(plan, pairs=kept)
    problems = out.problems()
    if problems:
        raise OctoPipeError(f"a schedule that was searched for is wrong: {problems[0]}")
    return out

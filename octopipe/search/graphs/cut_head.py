"""The search for plans whose head is split by vocabulary: number of shards, their ranks, and the order of all ops.

Knows: initial structures, moves on structures and keys, annealing, and that only plans that fit are returned. Does not
know: how a schedule is built (`schedule`), what a layout costs (`layout`), recomputation, copies of layers.

All random numbers come from one seed; with a number of moves instead of a time budget, the plan depends only on that.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import KINDS, Op, Plan
from octopipe.search.graphs.layout import Layout, Priced, Prices
from octopipe.search.graphs.orders import Waits, follow, polish
from octopipe.search.graphs.schedule import A_F, A_I, C_I, LOOK, NUM_NUMBERS, OVER, RESERVE, Priorities, schedule
from octopipe.search.graphs.surrogate import layout_of
from octopipe.search.tuner.core.problem import make_rng
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline

Number = TypeVar("Number", int, float)
MOST_CHUNKS = 6
HOT, COLD = 3e-3, 1e-4
"""Temperature of the annealing, as a share of the best time: at the start and at the end."""
TIGHTER = 0.93
START_SHARE, TRIAL_SHARE, TRIALS, WALK_SHARE = 0.15, 0.07, 3, 0.6
"""Share of the time in which starts are tried, in which each of the best of them is annealed, and up to which the best
of these is annealed further; in the rest of the time orders are polished."""
POLISH_HOT, POLISH_COLD, POLISH_MOVES, POLISHED = 4e-4, 2e-5, 200, 2
"""Temperature of polishing, as a share of the makespan; moves between two looks at the clock; members polished."""
DRAWS = 12
"""Key vectors tried on every start."""
MOST_KNOWN = 512
STALE = 0.25
"""Share of a walk after which, without anything better, it goes on from its best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Priorities of a layout's stages, in their order: see `schedule`."""

    forward: tuple[float, ...]
    inward: tuple[float, ...]
    flight: tuple[int, ...]
    numbers: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """A layout with keys and its makespan."""

    ms: float
    layout: Layout
    keys: Keys


@dataclass(slots=True, kw_only=True)
class CutHeadSearch:
    """One search; `run` gives the best plan that fits, or None where none was found."""

    costs: CostTable
    num_ranks: int
    num_micro_batches: int
    budget_s: float
    seed: int = 0
    moves: int | None = None
    """Schedules to judge instead of a time."""
    starts: Sequence[Plan] = ()
    plans: Sequence[tuple[Layout, Plan]] = ()
    """Plans with a cut head to polish beside those that are found."""
    stop: Callable[[float], bool] | None = None
    """Asked now and then with the best makespan; True ends the search."""
    judged: int = field(default=0, init=False)
    interrupted: bool = field(default=False, init=False)
    _began: float = field(default=0.0, init=False)
    _dice: random.Random = field(default_factory=random.Random, init=False)
    _prices: Prices = field(init=False)
    _out: np.ndarray = field(init=False)
    _lengths: np.ndarray = field(init=False)
    _known: dict[tuple[Layout, float], Priced | None] = field(default_factory=dict, init=False)
    _tight: float = field(default=1.0, init=False)
    _asked: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._dice = random.Random(self.seed)
        self._prices = Prices(self.costs, self.num_ranks, self.num_micro_batches)
        most = 3 * (self.costs.num_layers + 2 * self.num_ranks + 1) * self.num_micro_batches
        self._out = np.zeros((self.num_ranks, most), np.int64)
        self._lengths = np.zeros(self.num_ranks, np.int64)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    # -- the search ----------------------------------------------------------------------------------------

    def run(self) -> tuple[Plan, Timeline] | None:
        """The best plan found that fits, with its timeline."""
        found = [
            self._annealed(member, START_SHARE + (number + 1) * TRIAL_SHARE)
            for number, member in enumerate(self._started())
        ]
        found.sort(key=lambda member: member.ms)
        if found:
            found.insert(0, self._annealed(found[0], WALK_SHARE))
        made = [(member.layout, *one) for member in found if (one := self._made(member)) is not None]
        made += [(layout, plan, simulate(plan, self.costs)) for layout, plan in self.plans if not plan.problems()]
        made = sorted((one for one in made if one[2].fits), key=lambda one: one[2].step_ms)
        best: tuple[Plan, Timeline] | None = None
        for number, (layout, plan, timeline) in enumerate(made):
            if number < POLISHED:
                until = WALK_SHARE + (1.0 - WALK_SHARE) * (number + 1) / min(POLISHED, len(made))
                plan, timeline = self._polished(layout, plan, timeline, until)
            if best is None or timeline.step_ms < best[1].step_ms:
                best = plan, timeline
        return best

    def _polished(self, layout: Layout, plan: Plan, timeline: Timeline, until: float) -> tuple[Plan, Timeline]:
        """The plan with its ops moved about in their ranks' orders; as it was where nothing better fits."""
        priced = self._prices.of(layout, 1.0)
        if priced is None:
            return plan, timeline
        size, count = priced.rank.size, self.num_micro_batches
        needed = np.zeros((2, size, count), np.int64)
        needed[0] = (priced.before[0] >= 0).sum(axis=1)[:, None]
        needed[1] = 1 + (priced.after[0] >= 0).sum(axis=1)[:, None]
        waits = Waits(needed, np.zeros_like(needed), np.zeros(needed.shape))
        seq, lengths = self._sequence(plan)
        best, rng = seq.copy(), make_rng(self.seed, size)
        now = best_ms = float(follow(priced, seq, lengths, waits, math.inf))
        begin = self._share()
        while now < math.inf and (share := self._share(best_ms)) < until:
            heat = POLISH_HOT * (POLISH_COLD / POLISH_HOT) ** ((share - begin) / max(until - begin, 1e-9)) * best_ms
            now, best_ms = polish(priced, seq, best, lengths, waits, rng, POLISH_MOVES, heat, now, best_ms)
            self.judged += POLISH_MOVES
        self._out[:, : best.shape[1]], self._lengths[:] = best, lengths
        better = self.plan(layout)
        after = simulate(better, self.costs)
        return (better, after) if after.fits and after.step_ms < timeline.step_ms else (plan, timeline)

    def _sequence(self, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
        """A plan's orders, packed; the loss's B as I, its W is left out."""
        size, count = len(plan.stages), self.num_micro_batches
        codes = {"F": 0, "I": 2, "B": 2, "W": 3}
        rows = [[(codes[op.kind] * size + op.stage) * count + op.micro_batch for op in order] for order in plan.orders]
        lengths = np.array([len(row) for row in rows], np.int64)
        seq = np.zeros((self.num_ranks, int(lengths.max(initial=1))), np.int64)
        for r, row in enumerate(rows):
            seq[r, : len(row)] = row
        return seq, lengths

    def _share(self, best_ms: float = math.inf) -> float:
        """How much of the budget is used."""
        now = time.monotonic()
        if self.stop is not None and now - self._asked > 0.2:
            self._asked = now
            self.interrupted = self.interrupted or bool(self.stop(best_ms))
        if self.interrupted:
            return 1.0
        if self.moves is not None:
            return self.judged / max(self.moves, 1)
        return (now - self._began) / self.budget_s

    def _started(self) -> list[Member]:
        """The best of the structures tried first, one for each placement."""
        kinds: dict[tuple[int, ...], Member] = {}
        tried = 0
        while self._share() < START_SHARE or tried < 4:
            layout = self._drawn_layout(tried)
            tried += 1
            if layout is not None:
                for draw in range(DRAWS):
                    keys = self._drawn_keys(layout, varied=draw > 0)
                    member = Member(self._ms(layout, keys), layout, keys)
                    known = kinds.get(layout.ranks)
                    if known is None or member.ms < known.ms:
                        kinds[layout.ranks] = member
            if tried > 400:
                break
        best = sorted(kinds.values(), key=lambda member: member.ms)[:TRIALS]
        return [member for member in best if member.ms < math.inf]

    def _annealed(self, member: Member, until: float) -> Member:
        now = best = replace(member, ms=self._ms(member.layout, member.keys))
        begin = renewed = self._share()
        while (share := self._share(best.ms)) < until:
            heat = HOT * (COLD / HOT) ** ((share - begin) / max(until - begin, 1e-9))
            layout, keys = now.layout, now.keys
            for _ in range(self._dice.choice((1, 1, 1, 2, 3))):
                layout, keys = self._moved(layout, keys)
            # The threshold is drawn before the schedule is made, which gives up as soon as it must exceed it.
            most = now.ms - heat * best.ms * math.log(max(self._dice.random(), 1e-12))
            ms = self._ms(layout, keys, most)
            if ms <= most:
                now = Member(ms, layout, keys)
                if ms < best.ms:
                    best, renewed = now, share
            elif share - renewed > STALE * (until - begin):
                now, renewed = best, share
        return best

    # -- starts --------------------------------------------------------------------------------------------

    @property
    def _head(self) -> int:
        return self.costs.num_layers - 1

    def _drawn_layout(self, number: int) -> Layout | None:
        """A start: the plans that were handed in, then loops and waves over balanced stages."""
        dice, ranks = self._dice, self.num_ranks
        tied = self.costs.tied_bytes > 0
        if number < len(self.starts):
            made = layout_of(self.starts[number], ranks)
            if made is None or not tied:
                return made
            return None if made.bounds[1] == 1 else replace(made, bounds=(1, *made.bounds[1:]))
        number -= len(self.starts)
        chunks, wave, plain = 1 + number % MOST_CHUNKS, (number // MOST_CHUNKS) % 2 == 0, number < 2 * MOST_CHUNKS
        first = 1 if tied or (not plain and dice.random() < 0.4) else 0
        size = chunks * ranks
        if size > self._head - first:
            return None
        work = self._prices.layer_ms[first : self._head]
        ahead = np.concatenate(([0.0], np.cumsum(work)))
        parts = np.array([1.0 if plain else dice.uniform(0.85, 1.15) for _ in range(size)])
        goals = ahead[-1] * np.cumsum(parts)[:-1] / parts.sum()
        bounds = [0]
        for k, goal in enumerate(goals):
            cut = int(np.argmin(np.abs(ahead - goal)))
            bounds.append(max(bounds[-1] + 1, min(cut, len(work) - (size - 1 - k))))
        bounds.append(len(work))
        turn = [s % (2 * ranks) for s in range(size)]
        place = [r if r < ranks else 2 * ranks - 1 - r for r in turn] if wave else [s % ranks for s in range(size)]
        shards = list(range(ranks))
        if not plain and dice.random() < 0.4 and ranks > 2:
            shards = sorted(dice.sample(shards, dice.randint(2, ranks - 1)))
        return Layout(bounds=tuple(first + b for b in bounds), ranks=tuple(place), shards=tuple(shards), loss=place[-1])

    def _drawn_keys(self, layout: Layout, *, varied: bool) -> Keys:
        dice, size = self._dice, len(layout.ranks)
        ahead = self._ahead(layout)
        unit = float(self._prices.layer_ms.sum()) / self.num_ranks
        depth = dice.uniform(0.0, 6.0) if varied else 2.0
        back = dice.uniform(-3.0, 4.0) if varied else 0.0
        lead = dice.choice((0.6, 0.8, 1.0, 1.3, 2.0, 9.0)) if varied else 1.5
        chunks = max(1.0, size / self.num_ranks)
        flight = tuple(
            min(self.num_micro_batches, max(1, math.ceil(lead * (1.0 + (1.0 - a) * 2.0 * self.num_ranks / chunks))))
            for a in ahead
        )
        numbers = [0.0] * NUM_NUMBERS
        numbers[A_F] = 1.0
        numbers[A_I] = dice.uniform(0.5, 2.0) if varied else 1.0
        numbers[C_I] = dice.uniform(-8.0, 3.0) if varied else -2.0
        numbers[LOOK] = unit * (dice.choice((0.0, 0.0, 0.01, 0.03, 0.1)) if varied else 0.01)
        numbers[OVER] = unit * (dice.choice((0.0, 0.01, 0.05)) if varied else 0.01)
        numbers[RESERVE] = dice.choice((0.3, 0.7, 1.0)) if varied else 1.0
        return Keys(
            forward=tuple(-depth * a for a in ahead),
            inward=tuple(-back * (1.0 - a) for a in ahead),
            flight=flight,
            numbers=tuple(numbers),
        )

    def _ahead(self, layout: Layout) -> list[float]:
        """Per stage: which share of the work lies before it on the path."""
        work = np.concatenate(([0.0], np.cumsum(self._prices.layer_ms)))
        return [float(work[s.first] / max(work[-1], 1e-12)) for s in layout.stages()]

    # -- moves ---------------------------------------------------------------------------------------------

    def _moved(self, layout: Layout, keys: Keys) -> tuple[Layout, Keys]:
        """One random change."""
        dice = self._dice
        kind = dice.random()
        if kind < 0.42:
            return self._moved_body(layout, keys, kind / 0.42)
        if kind < 0.50:
            return self._moved_shards(layout, keys)
        count = len(keys.forward)
        s = dice.randrange(count)
        if kind < 0.64:
            return layout, replace(keys, forward=_with(keys.forward, s, keys.forward[s] + dice.gauss(0.0, 1.2)))
        if kind < 0.76:
            return layout, replace(keys, inward=_with(keys.inward, s, keys.inward[s] + dice.gauss(0.0, 1.2)))
        if kind < 0.84:
            n = min(self.num_micro_batches, max(1, keys.flight[s] + dice.choice((-2, -1, 1, 2))))
            return layout, replace(keys, flight=_with(keys.flight, s, n))
        k = dice.randrange(NUM_NUMBERS)
        value = keys.numbers[k]
        unit = float(self._prices.layer_ms.sum()) / self.num_ranks
        if k in (LOOK, OVER):
            value = max(0.0, value + unit * dice.gauss(0.0, 0.02))
        elif k == RESERVE:
            value = min(1.2, max(0.0, value + dice.gauss(0.0, 0.2)))
        else:
            value += dice.gauss(0.0, 0.3 if k != C_I else 1.0)
        return layout, replace(keys, numbers=_with(keys.numbers, k, value))

    def _moved_body(self, layout: Layout, keys: Keys, kind: float) -> tuple[Layout, Keys]:
        dice, size = self._dice, len(layout.ranks)
        bounds, ranks = list(layout.bounds), list(layout.ranks)
        offset = len(layout.shards) if layout.cuts_embedding else 0
        if kind < 0.5 and size > 1:  # a border moves, or two opposite borders of a run of stages
            k = dice.randrange(1, size)
            step = dice.choice((-1, 1))
            stop = dice.randrange(k, min(size, k + 4)) if dice.random() < 0.3 else k
            for at in range(k, stop + 1):
                bounds[at] += step
            if any(a >= b for a, b in itertools.pairwise(bounds)):
                return layout, keys
        elif kind < 0.72 and size > 1:
            a, b = dice.sample(range(size), 2)
            ranks[a], ranks[b] = ranks[b], ranks[a]
        elif kind < 0.82:
            ranks[dice.randrange(size)] = dice.randrange(self.num_ranks)
        elif kind < 0.91 and size > self.num_ranks:  # two neighbours become one stage
            k = dice.randrange(size - 1)
            del bounds[k + 1]
            del ranks[k if dice.random() < 0.5 else k + 1]
            keys = _without(keys, offset + k)
        else:  # a stage becomes two
            wide = [k for k in range(size) if bounds[k + 1] - bounds[k] > 1]
            if not wide:
                return layout, keys
            k = dice.choice(wide)
            bounds.insert(k + 1, dice.randrange(bounds[k] + 1, bounds[k + 1]))
            ranks.insert(k + 1, dice.randrange(self.num_ranks))
            keys = _doubled(keys, offset + k)
        return replace(layout, bounds=tuple(bounds), ranks=tuple(ranks)), keys

    def _moved_shards(self, layout: Layout, keys: Keys) -> tuple[Layout, Keys]:
        """A shard more, a shard less, one on another rank, another rank for the loss, the embedding cut or not."""
        dice, shards = self._dice, list(layout.shards)
        others = [r for r in range(self.num_ranks) if r not in shards]
        head = len(keys.forward) - 1 - len(shards)
        kind = dice.random()
        if kind < 0.25:
            return replace(layout, loss=dice.randrange(self.num_ranks)), keys
        if kind < 0.5 and others:
            k = dice.randrange(len(shards))
            shards[k] = dice.choice(others)
            return replace(layout, shards=tuple(shards)), keys
        if kind < 0.7 and others:
            shards.append(dice.choice(others))
            if layout.cuts_embedding:
                keys = _doubled(keys, 0)
                head += 1
            return replace(layout, shards=tuple(shards)), _doubled(keys, head)
        if kind < 0.9 and len(shards) > 2:
            k = dice.randrange(len(shards))
            del shards[k]
            keys = _without(keys, head + k)
            if layout.cuts_embedding:
                keys = _without(keys, k)
            return replace(layout, shards=tuple(shards)), keys
        if self.costs.tied_bytes > 0 or layout.bounds[1] == 1:
            return layout, keys
        if layout.cuts_embedding:
            for _ in shards:
                keys = _without(keys, 0)
            return replace(layout, bounds=(0, *layout.bounds[1:])), keys
        for _ in shards:
            keys = _doubled(keys, 0)
        return replace(layout, bounds=(1, *layout.bounds[1:])), keys

    # -- judging -------------------------------------------------------------------------------------------

    def _ms(self, layout: Layout, keys: Keys, cutoff: float = math.inf) -> float:
        """Makespan of the schedule that the keys give; infinite where it blocks or takes longer than `cutoff`."""
        self.judged += 1
        asked = (layout, self._tight)
        if asked not in self._known:
            if len(self._known) > MOST_KNOWN:
                self._known.clear()
            self._known[asked] = self._prices.of(layout, self._tight)
        priced = self._known[asked]
        if priced is None:
            return math.inf
        order = Priorities(
            np.array(keys.forward), np.array(keys.inward), np.array(keys.flight, np.int64), np.array(keys.numbers)
        )
        return float(schedule(priced, order, cutoff, self._out, self._lengths))

    def _made(self, member: Member) -> tuple[Plan, Timeline] | None:
        """The member's plan and timeline; schedules get less memory until it fits, None where it never does."""
        before = self._tight
        made = None
        for _ in range(10):
            if self._ms(member.layout, member.keys) == math.inf:
                break
            plan = self.plan(member.layout)
            timeline = simulate(plan, self.costs)
            if timeline.fits:
                made = plan, timeline
                break
            self._tight *= TIGHTER
        self._tight = before
        return made

    def plan(self, layout: Layout) -> Plan:
        """The plan of the schedule that was made last, for this layout."""
        stages, count = layout.stages(), self.num_micro_batches
        size, loss = len(stages), len(stages) - 1
        orders = []
        for r in range(self.num_ranks):
            order = []
            for code in self._out[r, : self._lengths[r]].tolist():
                rest, m = divmod(code, count)
                kind, s = divmod(rest, size)
                if s == loss:
                    if KINDS[kind] != "W":
                        order.append(Op(s, "F" if KINDS[kind] == "F" else "B", m))
                else:
                    order.append(Op(s, KINDS[kind], m))
            orders.append(tuple(order))
        plan = Plan(
            model=self.costs.model,
            num_layers=self.costs.num_layers,
            num_ranks=self.num_ranks,
            num_micro_batches=count,
            stages=tuple(stages),
            orders=tuple(orders),
            routes=(tuple(range(size)),),
            edges=(layout.arrows(),),
        )
        if problems := plan.problems():
            raise OctoPipeError(f"a schedule that was searched for is wrong: {problems[0]}")
        return plan


def _with(values: tuple[Number, ...], at: int, value: Number) -> tuple[Number, ...]:
    changed = list(values)
    changed[at] = value
    return tuple(changed)


def _without(keys: Keys, at: int) -> Keys:
    """The keys of one stage less."""
    return replace(
        keys,
        forward=keys.forward[:at] + keys.forward[at + 1 :],
        inward=keys.inward[:at] + keys.inward[at + 1 :],
        flight=keys.flight[:at] + keys.flight[at + 1 :],
    )


def _doubled(keys: Keys, at: int) -> Keys:
    """The keys of one stage more, which has those of its neighbour."""
    return replace(
        keys,
        forward=(*keys.forward[: at + 1], *keys.forward[at:]),
        inward=(*keys.inward[: at + 1], *keys.inward[at:]),
        flight=(*keys.flight[: at + 1], *keys.flight[at:]),
    )

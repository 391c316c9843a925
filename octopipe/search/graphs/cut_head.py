"""The search for plans whose head is split by vocabulary: number of shards, their ranks, and the order of all ops.

Knows: annealing, polishing, and that only plans that fit are returned. Does not know: which layouts and keys are tried
(`proposals`), how a schedule is built (`schedule`), what a layout costs (`layout`), recomputation, copies of layers.

All random numbers come from one seed; with a number of moves instead of a time budget, the plan depends only on that.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import KINDS, Op, Plan
from octopipe.search.graphs.layout import Layout, Priced, Prices
from octopipe.search.graphs.orders import Waits, follow, polish
from octopipe.search.graphs.proposals import Keys, Proposals
from octopipe.search.graphs.schedule import Priorities, schedule
from octopipe.search.tuner.core.problem import make_rng
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline

HOT, COLD = 3e-3, 1e-4
"""Temperature of the annealing, as a share of the best time: at the start and at the end."""
TIGHTER = 0.93
START_SHARE, TRIAL_SHARE, TRIALS, WALK_SHARE = 0.15, 0.07, 3, 0.6
"""Starts are tried until START_SHARE of the time is used. Each of the TRIALS best is then annealed for TRIAL_SHARE of
it, and the best result of these until WALK_SHARE is used. In the rest of the time, orders are polished."""
POLISH_HOT, POLISH_COLD, POLISH_MOVES, POLISHED = 4e-4, 2e-5, 200, 2
"""Temperature of polishing at the start and at the end, as a share of the makespan; moves between two looks at the
clock; number of plans that are polished."""
DRAWS = 12
"""The number of key vectors that are tried on every start."""
MOST_KNOWN = 512
STALE = 0.25
"""A walk returns to its best state after this share of it without an improvement."""


@dataclass(frozen=True, slots=True)
class Member:
    """A layout with keys, and its makespan."""

    ms: float
    layout: Layout
    keys: Keys


@dataclass(slots=True, kw_only=True)
class CutHeadSearch:
    """One search. `run` returns the best plan that fits, or None if none was found."""

    costs: CostTable
    num_ranks: int
    num_micro_batches: int
    budget_s: float
    seed: int = 0
    moves: int | None = None
    """If given, this many schedules are judged, however long that takes."""
    starts: Sequence[Plan] = ()
    plans: Sequence[tuple[Layout, Plan]] = ()
    """Plans with a cut head that are candidates for polishing in addition to those that are found."""
    stop: Callable[[float], bool] | None = None
    """Called every 0.2 seconds or less often with the best makespan so far; if it returns True, the search ends."""
    judged: int = field(default=0, init=False)
    interrupted: bool = field(default=False, init=False)
    _began: float = field(default=0.0, init=False)
    _dice: random.Random = field(default_factory=random.Random, init=False)
    _prices: Prices = field(init=False)
    _proposals: Proposals = field(init=False)
    _out: np.ndarray = field(init=False)
    _lengths: np.ndarray = field(init=False)
    _known: dict[tuple[Layout, float], Priced | None] = field(default_factory=dict, init=False)
    _tight: float = field(default=1.0, init=False)
    _asked: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._dice = random.Random(self.seed)
        self._prices = Prices(self.costs, self.num_ranks, self.num_micro_batches)
        self._proposals = Proposals(
            costs=self.costs,
            num_ranks=self.num_ranks,
            num_micro_batches=self.num_micro_batches,
            layer_ms=self._prices.layer_ms,
            starts=self.starts,
            dice=self._dice,
        )
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
        """The plan after moves of single ops within their ranks' orders; the plan as given if nothing better fits."""
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
        """The orders of a plan, packed. The B of the loss is written as I, and its W is left out."""
        size, count = len(plan.stages), self.num_micro_batches
        codes = {"F": 0, "I": 2, "B": 2, "W": 3}
        rows = [[(codes[op.kind] * size + op.stage) * count + op.micro_batch for op in order] for order in plan.orders]
        lengths = np.array([len(row) for row in rows], np.int64)
        seq = np.zeros((self.num_ranks, int(lengths.max(initial=1))), np.int64)
        for r, row in enumerate(rows):
            seq[r, : len(row)] = row
        return seq, lengths

    def _share(self, best_ms: float = math.inf) -> float:
        """The share of the budget that is used."""
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
        """The best of the initial structures, one for each placement."""
        kinds: dict[tuple[int, ...], Member] = {}
        tried = 0
        while self._share() < START_SHARE or tried < 4:
            layout = self._proposals.drawn_layout(tried)
            tried += 1
            if layout is not None:
                for draw in range(DRAWS):
                    keys = self._proposals.drawn_keys(layout, varied=draw > 0)
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
                layout, keys = self._proposals.moved(layout, keys)
            # Draw the threshold first, so that a schedule can be abandoned as soon as it must exceed it.
            most = now.ms - heat * best.ms * math.log(max(self._dice.random(), 1e-12))
            ms = self._ms(layout, keys, most)
            if ms <= most:
                now = Member(ms, layout, keys)
                if ms < best.ms:
                    best, renewed = now, share
            elif share - renewed > STALE * (until - begin):
                now, renewed = best, share
        return best

    # -- judging -------------------------------------------------------------------------------------------

    def _ms(self, layout: Layout, keys: Keys, cutoff: float = math.inf) -> float:
        """The makespan of the schedule that the keys give; infinite if it deadlocks or exceeds `cutoff`, or if the
        weights of the layout leave too little memory."""
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
        """The plan of a member and its timeline. While the plan does not fit, it is scheduled again with TIGHTER times
        the memory, in at most ten attempts; None if it never fits."""
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
        """The plan of the schedule that was built last, which must be of this layout."""
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
            edges=(layout.edges(),),
        )
        if problems := plan.problems():
            raise OctoPipeError(f"the search produced an invalid schedule: {problems[0]}")
        return plan

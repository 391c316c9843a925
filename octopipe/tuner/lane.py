"""One core's own search: draws starts, roams and walks from them, keeps an elite, polishes the best.

Knows: what a core does with its share of the budget. Does not know: the other cores, plans or the simulator;
best.py lets the lanes meet and judges what they found.

Annealing one start gains most in its first few thousand moves and then rests, and what it comes to depends on the
start; so a lane makes many walks of moderate length instead of a long one. A walk begins at a start not yet used
or at a member of the elite, heated up for a moment, of the size from which most is hoped for. What roaming came to
(roam.py: structures first, under priorities bred along the way) are the first starts of walks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octopipe.tuner.anneal import MOVES, PHASE_OF_MOVE, State, anneal, copy_state, judge, make_state
from octopipe.tuner.follow import ORDER_MOVES, ORDER_PHASES, Polisher
from octopipe.tuner.kernels import Problem, make_scratch
from octopipe.tuner.lottery import Lottery, Start, twin
from octopipe.tuner.roam import Herd

HOT, COLD, KICK = 8e-4, 1e-4, 4e-3
"""Temperatures as shares of the step time: at a walk's begin and end, and to leave an elite's valley."""
KICK_MOVES = 250
FEW_OPS = 192
"""Below so many ops (two stages a rank) walks are hotter, by the square: the fewer there are, the more one move of one
op changes the step time, and a cold walk would only descend."""
POLISH_HOT, POLISH_COLD = 3e-4, 3e-5
TRIALS = 0.6
"""Share of polishing in which all candidates take turns; the rest is the best one's."""
WALK_MOVES, PATIENCE = 500, 0.5
"""Longest walk in moves per stage, and the share of it without improvement that ends it."""
WALK_SHARE = 0.03
"""Most of the budget that one walk takes."""
STRUCTURE = (0.5, 0.3)
"""Share of a walk's moves that change partition or placement, by walk. Few of them are accepted, but which share serves
best differs: of 30 s searches most ended better with the smaller one, and those on jamba-52b with the larger."""
FRESH = 0.6
"""How often a walk begins at an unused start once there is an elite."""
ELITE, ALIKE = 12, 3
"""Most members of the elite, and those of one size. Structures of many stages take more moves to come
into their own; a full elite of coarse ones would never let them."""
HOPE, FINE, FADED = 0.006, 8, 0.0005
"""What a first walk from a size may gain, as a share and per half round: structures of more stages begin further from
what they come to. Halved by every walk in vain; when hope has faded, new starts are drawn."""
REDRAW = 0.01
"""Share of the budget for that."""
CAPS = (float("inf"), float("inf"), 0.03)
"""How far above the best possible load the busiest rank may be, by walk: a rank that is full leaves the others'
orders without pressure, and a walk would rest there. Held too tight too often, walks from good starts end worse."""
HERDS, DRAW_AGAIN = (2, 1), 0.05
"""Herds that roam one after another, by lane, and the share of the budget for new starts between them. A hot herd gains
to the end; a cool one settles early, and another from other starts is worth more than its second half."""
HERD, ROAM_JUDGED = 8, 5_000
"""Most walkers of a herd, and how many schedules each should have at least."""
ROAM_STEPS, ROAM_MOVES = 20, 10
"""Temperatures of a herd, and moves between looks at the clock."""
TIMED = 5
"""Schedules timed to know how many fit into a time: other threads may hold one up."""
ROAM_HOT, ROAM_COOL, ROAM_CELLS = (4e-3, 1.2e-2), 0.1, 256
"""Temperatures at which roaming begins, by lane, as shares of the step time (tight memory wants the hotter one), and
how far they fall. Less in proportion where ranks times micro-batches are more than so many: fewer moves are made."""
CHUNK_S = 0.03
MOVES_PER_DRAW = 25
"""What a drawn start counts where moves are counted."""

Note = Callable[[int, str, str, float, float], None]
"""Told of moves made, phase, move, before and after."""


@dataclass(slots=True)
class Budget:
    """A lane's time or moves; `share` says how much of it is spent. Stopped, or out of time with moves left, it stays
    at 1.0: what runs until a share must not ask for more."""

    seconds: float
    """End of the search, in seconds since `began`."""
    began: float
    moves: int | None = None
    """Instead of time: moves this lane makes."""
    made: int = 0
    stopped: Callable[[], bool] = lambda: False

    def share(self) -> float:
        if self.stopped():
            return 1.0
        spent = (time.monotonic() - self.began) / self.seconds
        if self.moves is None:
            return spent
        return 1.0 if spent >= 1.0 else self.made / self.moves


class Lane:
    """The search of one core."""

    def __init__(
        self,
        problem: Problem,
        max_stages: int,
        margin: np.ndarray,
        work_ms: float,
        may_recompute: bool,
        seed: tuple[int, int],
        budget: Budget,
        note: Note,
    ) -> None:
        self.problem, self.max_stages, self.margin, self.work_ms = problem, max_stages, margin, work_ms
        self.may_recompute, self.budget, self.note, self.number = may_recompute, budget, note, seed[1]
        self.scratch = make_scratch(problem, max_stages)
        self.lottery = Lottery(problem, max_stages, self.scratch, margin, seed)
        self.dice = np.random.default_rng((*seed, 2))
        self.rng = self.dice.integers(1, 1 << 62, 1).astype(np.uint64)
        self.state, self.back = make_state(problem, max_stages), make_state(problem, max_stages)
        self.inbox: list[Start] = []
        """Starts from outside; others may append at any time."""
        self.starts: list[Start] = []
        """Not yet walked from."""
        self.elite: list[Start] = []
        self.roamed: list[Start] = []
        """What herds came to: where walks begin, not other herds."""
        self.herd: Herd | None = None
        self.herds = 1
        self.hope: dict[int, float] = {}
        """By size (half rounds over the ranks): what walks gained of late, in ms."""
        self.redrawn: dict[int, int] = {}
        self.polishers: list[Polisher] = []
        self.log = np.zeros((64, 4))
        self.chunk = 50
        ops = 3 * problem.num_micro_batches * min(problem.num_layers, 2 * problem.num_ranks)
        self.heat = max(FEW_OPS / ops, 1.0) ** 2

    # -- phases ----------------------------------------------------------------------------------------

    def draw(self, until: float, size: int | None = None) -> None:
        """Draw starts, of one size or of all, until this share of the budget is spent."""
        first = self.lottery.draws
        while self.budget.share() < until:
            drawn = self.lottery.draws - first
            recompute = self.may_recompute and not self.lottery.starts and drawn >= 6 and not self.elite
            self.lottery.draw(recompute, size)
            self.budget.made += MOVES_PER_DRAW
        self.starts += self.lottery.take()

    def roam(self, until: float, part: int, parts: int) -> None:
        """Let a herd roam from the best starts until this share of the budget is spent.

        This is one of so many parts, between which lanes trade walkers. Some lanes begin anew halfway, if time allows.
        """
        if part == 0:
            plenty = self.judgeable(until) * parts > 2 * HERD * ROAM_JUDGED
            self.herds = HERDS[self.number % len(HERDS)] if plenty else 1
        per_herd = -(-parts // self.herds)
        if part % per_herd == 0:
            self.settle()
            if part > 0:
                self.draw(min(self.budget.share() + DRAW_AGAIN, until))
            self.herd = self._gather_herd(until, min(per_herd, parts - part))
        assert self.herd is not None
        begin, end = (part % per_herd) / per_herd, (part % per_herd + 1) / per_herd
        herd, first = self.herd, self.budget.share()
        cells = self.problem.num_ranks * self.problem.num_micro_batches
        hot = self.heat * min(1.0, ROAM_CELLS / cells) * ROAM_HOT[self.number % len(ROAM_HOT)]
        steps = max(round(ROAM_STEPS * (end - begin)), 1)
        for step in range(steps if herd.walkers else 0):
            heat = hot * ROAM_COOL ** (begin + (end - begin) * step / steps)
            stop = first + (until - first) * (step + 1) / steps
            for k, walker in enumerate(herd.walkers):
                now = self.budget.share()
                turn = now + (stop - now) / (len(herd.walkers) - k)
                while self.budget.share() < turn:
                    judged, lines = herd.run(walker, ROAM_MOVES, heat)
                    self.budget.made += max(judged, 1)
                    for i, move, before, after in lines:
                        self.note(int(i), PHASE_OF_MOVE[int(move)], MOVES[int(move)], before, after)
                    self.note(ROAM_MOVES, "", "", np.inf, np.inf)
            herd.thin(heat, self.dice)
        for start in herd.results()[:1]:
            self._keep(start._replace(state=twin(self.problem, self.max_stages, start.state), used=True))

    def _gather_herd(self, until: float, parts: int) -> Herd:
        """As many of the best starts as there is time for, in so many parts as long as the one until then."""
        herd = Herd(
            self.problem, self.max_stages, self.scratch, self.margin, self.rng, self.may_recompute, self.work_ms
        )
        enough = parts * self.judgeable(until) / ROAM_JUDGED
        starts = sorted((s for s in self.starts if s.keys is not None), key=lambda s: s.step_ms)
        effort = min(enough, 1.0)
        chosen = starts[: min(max(int(enough), 1), HERD)]
        for start in chosen:
            if self.budget.share() < until:
                self.budget.made += herd.add(start, effort)
        self.starts = [s for s in self.starts if all(s is not c for c in chosen)]
        return herd

    def settle(self) -> None:
        """Dissolve the herd; walks begin at what it came to."""
        if self.herd is not None:
            self.roamed += self.herd.results()
            self.herd = None

    def walk(self, until: float) -> None:
        """Walk until this share of the budget is spent."""
        while self.budget.share() < until:
            size = self._next_size()
            if size is None:
                self.draw(min(until, self.budget.share() + REDRAW))
                continue
            known = self._best_of(size, self.elite)
            if self._hope(size, known) < FADED * known < np.inf and self._best_of(size, self.starts) == np.inf:
                # All that is known of this size leads nowhere any more: new ones.
                self.draw(min(until, self.budget.share() + REDRAW), size)
                self.redrawn[size] = self.redrawn.get(size, 0) + 1
                self.hope[size] = HOPE * min(size, FINE) * known / (1 + 2 * self.redrawn[size])
            best = make_state(self.problem, self.max_stages)
            cap_ms = self.work_ms * (1.0 + CAPS[int(self.dice.integers(len(CAPS)))])
            structure = STRUCTURE[int(self.dice.integers(len(STRUCTURE)))]
            before = self._best_of(size, self.elite)
            start = self._begin(size)
            if start.used:
                value = self._kick(start, best, structure, cap_ms)
            else:
                copy_state(best, start.state)
                value = start.step_ms
            reached = self._anneal(best, value, structure, cap_ms, until)
            self._keep(Start(reached, start.name, best, True))
            gain = max(min(before, start.step_ms) - reached, 0.0) if before < np.inf else start.step_ms - reached
            self.hope[size] = 0.5 * (self._hope(size, reached) + gain)

    def polish(self, starts: list[Start], margin: np.ndarray, factors: np.ndarray | None = None) -> None:
        """Anneal the starts' orders as they are: each for a while, then the best for the rest of the budget."""
        for start in starts:
            seed = (int(self.rng[0] & np.uint64(0xFFFF)), len(self.polishers))
            polisher = Polisher(self.problem, self.max_stages, self.scratch, margin, seed, factors)
            if polisher.begin(start.state):
                self.polishers.append(polisher)
        first = self.budget.share()
        trials = (1.0 - first) * TRIALS / max(len(self.polishers), 1)
        for polisher in self.polishers:
            self._anneal_orders(polisher, min(self.budget.share() + trials, 1.0), self.heat)
        if self.polishers:
            best = min(self.polishers, key=lambda q: q.best_ms)
            self._anneal_orders(best, 1.0, 0.5 * self.heat)

    @property
    def polished(self) -> Polisher | None:
        """What polishing made best."""
        return min(self.polishers, key=lambda q: q.best_ms, default=None)

    def judgeable(self, until: float) -> float:
        """How many schedules like that of the best start can be judged until this share of the budget is spent."""
        left = until - self.budget.share()
        if self.budget.moves is not None:
            return left * self.budget.moves
        best = min(self.starts, key=lambda s: s.step_ms, default=None)
        if best is None:
            return 0.0
        took = []
        for _ in range(TIMED):
            began = time.perf_counter()
            judge(self.problem, best.state, self.margin, np.inf, self.scratch)
            took.append(time.perf_counter() - began)
        return left * self.budget.seconds / min(took)

    def _anneal_orders(self, polisher: Polisher, until: float, heat: float) -> None:
        first, chunk = self.budget.share(), 200
        hot, cold = heat * POLISH_HOT, heat * POLISH_COLD
        while (now := self.budget.share()) < until:
            clock = time.monotonic()
            lines = polisher.run(chunk, hot * (cold / hot) ** ((now - first) / max(until - first, 1e-9)))
            self.budget.made += chunk
            for i, move, before, after in lines:
                self.note(int(i), ORDER_PHASES[int(move)], ORDER_MOVES[int(move)], before, after)
            self.note(chunk, "", "", np.inf, np.inf)
            if self.budget.moves is None:
                chunk = int(min(max(chunk * CHUNK_S / max(time.monotonic() - clock, 1e-6), 10), 20000))

    # -- one walk --------------------------------------------------------------------------------------

    def _next_size(self) -> int | None:
        """The size of structure from which the next walk promises most: the best of it, less what one may hope for."""
        while self.inbox:
            self.starts.append(self.inbox.pop())
        self.starts += self.roamed
        self.roamed = []
        best: dict[int, float] = {}
        for start in (*self.starts, *self.elite):
            size = self.lottery.size(start)
            best[size] = min(best.get(size, np.inf), start.step_ms)
        return min(best, key=lambda k: best[k] - self._hope(k, best[k]), default=None)

    def _hope(self, size: int, step_ms: float) -> float:
        return self.hope.get(size, HOPE * min(size, FINE) * step_ms)

    def _best_of(self, size: int, starts: list[Start]) -> float:
        return min((s.step_ms for s in starts if self.lottery.size(s) == size), default=np.inf)

    def _begin(self, size: int) -> Start:
        """Where a walk begins: at the best unused start of this size, or at a member of the elite."""
        elite = [s for s in self.elite if self.lottery.size(s) == size]
        if elite:
            # A start so far behind that no walk was ever seen to make up for it is not worth one.
            least = elite[0].step_ms / (1.0 - HOPE * min(size, FINE))
            self.starts = [s for s in self.starts if self.lottery.size(s) != size or s.step_ms < least]
        fresh = [s for s in self.starts if self.lottery.size(s) == size]
        if fresh and (not elite or self.dice.random() < FRESH):
            chosen = min(fresh, key=lambda s: s.step_ms)
            self.starts = [s for s in self.starts if s is not chosen]
            return chosen
        return elite[int(self.dice.random() ** 2 * len(elite))]

    def _kick(self, chosen: Start, best: State, structure: float, cap_ms: float) -> float:
        """Leave an elite's valley: a short, hot walk; where it ends is where the next walk begins."""
        st, kick = self.state, self.heat * KICK
        copy_state(st, chosen.state)
        current, _, _ = anneal(
            self.problem, st, best, self.back, self.margin, self.scratch, self.rng, KICK_MOVES, kick, kick,
            chosen.step_ms, chosen.step_ms, self.may_recompute, structure, cap_ms, self.log,
        )  # fmt: skip
        self.budget.made += KICK_MOVES
        copy_state(best, st)
        return float(current)

    def _anneal(self, best: State, value: float, structure: float, cap_ms: float, until: float) -> float:
        """A walk from `best`, which it overwrites by what is better; returns that one's step time."""
        st = self.state
        copy_state(st, best)
        current = best_ms = min(value, 1e18)
        made = improved = 0
        length = max(WALK_MOVES * int(st.size[0]), 4000)
        first = self.budget.share()
        while (
            (done := max(made / length, (self.budget.share() - first) / WALK_SHARE)) < 1.0
            and made - improved < PATIENCE * length
            and self.budget.share() < until
        ):
            temperature = self.heat * HOT * (COLD / HOT) ** done
            clock = time.monotonic()
            chunk = self.chunk if self.budget.moves is None else 200
            current, after, lines = anneal(
                self.problem, st, best, self.back, self.margin, self.scratch, self.rng, chunk, temperature,
                temperature, current, best_ms, self.may_recompute, structure, cap_ms, self.log,
            )  # fmt: skip
            self.budget.made += chunk
            made += chunk
            for i, move, before, then in self.log[:lines]:
                self.note(int(i), PHASE_OF_MOVE[int(move)], MOVES[int(move)], before, then)
            self.note(chunk, "", "", np.inf, np.inf)
            if after < best_ms * (1.0 - 1e-5):
                improved = made
            best_ms = after
            self.chunk = int(min(max(chunk * CHUNK_S / max(time.monotonic() - clock, 1e-6), 10), 5000))
        return float(best_ms) if best_ms < 1e17 else float("inf")

    def _keep(self, start: Start) -> None:
        if start.step_ms == np.inf or any(start.step_ms == e.step_ms for e in self.elite):
            return
        kept: list[Start] = []
        alike: dict[int, int] = {}
        for other in sorted([*self.elite, start], key=lambda e: e.step_ms):
            size = self.lottery.size(other)
            if alike.get(size, 0) < ALIKE and len(kept) < ELITE:
                alike[size] = alike.get(size, 0) + 1
                kept.append(other)
        self.elite = kept

    def adopt(self, starts: list[Start]) -> None:
        """Take other lanes' elite in, by copy."""
        for start in starts:
            self._keep(start._replace(state=twin(self.problem, self.max_stages, start.state)))

    def rejudge(self) -> None:
        """After more memory was reserved: judge the elite and the starts again, drop what does not fit."""

        def again(start: Start) -> Start:
            value = float(judge(self.problem, start.state, self.margin, np.inf, self.scratch))
            return start._replace(step_ms=value)

        self.elite = sorted((s for s in map(again, self.elite) if s.step_ms < np.inf), key=lambda s: s.step_ms)
        self.starts = [s for s in map(again, self.starts) if s.step_ms < np.inf]
        self.roamed = [s for s in map(again, self.roamed) if s.step_ms < np.inf]
        if self.herd is not None:
            self.herd.rejudge()

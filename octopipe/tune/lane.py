"""One core's own search: draws starts, walks from them, keeps an elite, polishes the best.

Knows: what a core does with its share of the budget. Does not know: the other cores, plans or the simulator;
best.py lets the lanes meet and judges what they found.

Annealing one start gains most in its first few thousand moves and then rests, and what it comes to depends on the
start; so a lane sifts many starts by short walks first, and then makes many walks of moderate length instead of a long
one. A walk begins at a start not yet used or at a member of the elite, heated up for a moment, of the size from which
most is hoped for. Some structures are worth more than list scheduling makes of them, above all where memory is short:
so every walk ends with a while of annealing its order of F and I (weave.py), and that result is what counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octopipe.tune.anneal import MOVES, PHASE_OF_MOVE, State, anneal, copy_state, judge, make_state
from octopipe.tune.follow import ORDER_MOVES, ORDER_PHASES, Polisher
from octopipe.tune.kernels import Problem, make_scratch
from octopipe.tune.lottery import Lottery, Start, twin
from octopipe.tune.weave import WORD_MOVES, WORD_PHASES, Weaver

HOT, COLD, KICK = 8e-4, 1e-4, 4e-3
"""Temperatures as shares of the step time: at a walk's begin and end, and to leave an elite's valley."""
KICK_MOVES = 250
POLISH_HOT, POLISH_COLD = 3e-4, 3e-5
WEAVE_HOT, WEAVE_COLD = 4e-4, 3e-5
WEAVE_MOVES = 300
"""Moves per stage of the order of F and I after each walk."""
ORDERS = 0.06
"""Share of the budget in which the winner's full orders are annealed."""
WALK_MOVES, PATIENCE = 500, 0.5
"""Longest walk in moves per stage, and the share of it without improvement that ends it."""
SIFTED, WOVEN, COOLER = 8, 0.3, 0.7
"""Starts in a sifting, the share of each one's time for its order of F and I, how much cooler every round begins."""
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
CAPS = (float("inf"), 0.03, 0.01)
"""How far above the best possible load the busiest rank may be, by walk: a rank that is full leaves the others'
orders without pressure, and a walk would rest there."""
CHUNK_S = 0.03
MOVES_PER_DRAW = 25
"""What a drawn start counts where moves are counted."""

Note = Callable[[int, str, str, float, float], None]
"""Told of moves made, phase, move, before and after."""


@dataclass(slots=True)
class Budget:
    """A lane's time or moves; `share` says how much of it is spent."""

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
        self.may_recompute, self.budget, self.note = may_recompute, budget, note
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
        self.hope: dict[int, float] = {}
        """By size (half rounds over the ranks): what walks gained of late, in ms."""
        self.redrawn: dict[int, int] = {}
        self.weaver = Weaver(problem, max_stages, self.scratch, margin, (*seed, 3), may_recompute)
        self.woven: Weaver | None = None
        self.polished: Polisher | None = None
        self.log = np.zeros((64, 4))
        self.chunk = 50

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

    def sift(self, until: float) -> None:
        """Walk a little from many starts, further from the better half of them, and so on, until this share of the
        budget is spent: what becomes of a start shows soon, but not at once."""
        self._take_in()
        field: list[Start] = []
        alike: dict[int, int] = {}
        for start in sorted(self.starts, key=lambda s: s.step_ms - self._hope(self.lottery.size(s), s.step_ms)):
            size = self.lottery.size(start)
            if len(field) < SIFTED and alike.get(size, 0) < ALIKE and start.step_ms < np.inf:
                alike[size] = alike.get(size, 0) + 1
                field.append(start)
        self.starts = [s for s in self.starts if all(s is not f for f in field)]
        rounds = len(field).bit_length()
        began = self.budget.share()
        for n in range(rounds):
            first = self.budget.share()
            each = (began + (until - began) * (n + 1) / rounds - first) / len(field)
            cap_ms = self.work_ms * (1.0 + CAPS[int(self.dice.integers(len(CAPS)))])
            for k, start in enumerate(field):
                best = twin(self.problem, self.max_stages, start.state)
                middle, end = first + each * (k + 1 - WOVEN), first + each * (k + 1)
                reached = self._anneal(best, start.step_ms, HOT * COOLER**n, cap_ms, middle)
                field[k] = self._weave(Start(reached, start.name, best, True, start.woven), end)
                self._keep(field[k])
            field = sorted(field, key=lambda s: s.promise_ms)[: max(len(field) // 2, 1)]

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
            before = self._best_of(size, self.elite)
            start = self._begin(size)
            if start.used:
                value = self._kick(start, best, cap_ms)
            else:
                copy_state(best, start.state)
                value = start.step_ms
            stages = int(best.size[0])
            step_ms = self._anneal(best, value, HOT, cap_ms, until, max(WALK_MOVES * stages, 4000))
            came_to = self._weave(Start(step_ms, start.name, best, True), until, WEAVE_MOVES * stages)
            reached = came_to.promise_ms
            self._keep(came_to)
            gain = max(min(before, start.promise_ms) - reached, 0.0) if before < np.inf else start.step_ms - reached
            self.hope[size] = 0.5 * (self._hope(size, reached) + gain)

    def polish(self, starts: list[Start], margin: np.ndarray) -> None:
        """Race the starts with their order of F and I kept: half of them drop out after every round. The winner's
        orders are then annealed as they are, every W in its place."""
        weavers: list[Weaver] = []
        for start in starts:
            seed = (int(self.rng[0] & np.uint64(0xFFFF)), len(weavers))
            weaver = Weaver(self.problem, self.max_stages, self.scratch, margin, seed, self.may_recompute)
            if (start.woven is not None and weaver.resume(start.woven)) or weaver.begin(start.state):
                weavers.append(weaver)
        if not weavers:
            return
        self.woven = weavers[0]
        rounds = len(weavers).bit_length()
        per_round = (1.0 - ORDERS - self.budget.share()) / rounds
        for _ in range(rounds):
            began = self.budget.share()
            for k, weaver in enumerate(weavers):
                self._anneal_words(weaver, began + per_round * (k + 1) / len(weavers))
            weavers = sorted(weavers, key=lambda w: w.best_ms)[: max(len(weavers) // 2, 1)]
            self.woven = min(self.woven, weavers[0], key=lambda w: w.best_ms)
        seed = (int(self.rng[0] & np.uint64(0xFFFF)), 99)
        polisher = Polisher(self.problem, self.max_stages, self.scratch, margin, seed)
        woven = self.woven.result()
        if polisher.follow(woven.state, woven.orders):
            self.polished = polisher
            self._anneal_orders(polisher, 1.0, POLISH_HOT, POLISH_COLD)

    def _anneal_words(self, weaver: Weaver, until: float) -> None:
        first, chunk = self.budget.share(), 200
        while (now := self.budget.share()) < until:
            clock = time.monotonic()
            self._run_words(weaver, chunk, (now - first) / max(until - first, 1e-9))
            if self.budget.moves is None:
                chunk = int(min(max(chunk * CHUNK_S / max(time.monotonic() - clock, 1e-6), 10), 20000))

    def _run_words(self, weaver: Weaver, moves: int, cooled: float) -> None:
        lines = weaver.run(moves, WEAVE_HOT * (WEAVE_COLD / WEAVE_HOT) ** min(cooled, 1.0))
        self.budget.made += moves
        for i, move, before, after in lines:
            self.note(int(i), WORD_PHASES[int(move)], WORD_MOVES[int(move)], before, after)
        self.note(moves, "", "", np.inf, np.inf)

    def _anneal_orders(self, polisher: Polisher, until: float, hot: float, cold: float) -> None:
        first, chunk = self.budget.share(), 200
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
        self._take_in()
        best: dict[int, float] = {}
        for start in (*self.starts, *self.elite):
            size = self.lottery.size(start)
            best[size] = min(best.get(size, np.inf), start.promise_ms)
        return min(best, key=lambda k: best[k] - self._hope(k, best[k]), default=None)

    def _take_in(self) -> None:
        while self.inbox:
            self.starts.append(self.inbox.pop())

    def _hope(self, size: int, step_ms: float) -> float:
        return self.hope.get(size, HOPE * min(size, FINE) * step_ms)

    def _best_of(self, size: int, starts: list[Start]) -> float:
        return min((s.promise_ms for s in starts if self.lottery.size(s) == size), default=np.inf)

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

    def _kick(self, chosen: Start, best: State, cap_ms: float) -> float:
        """Leave an elite's valley: a short, hot walk; where it ends is where the next walk begins."""
        st = self.state
        copy_state(st, chosen.state)
        current, _, _ = anneal(
            self.problem, st, best, self.back, self.margin, self.scratch, self.rng, KICK_MOVES, KICK, KICK,
            chosen.step_ms, chosen.step_ms, self.may_recompute, 0.5, cap_ms, self.log,
        )  # fmt: skip
        self.budget.made += KICK_MOVES
        copy_state(best, st)
        return float(current)

    def _anneal(
        self, best: State, value: float, hot: float, cap_ms: float, until: float, moves: int | None = None
    ) -> float:
        """A walk from `best`, which it overwrites by what is better; returns that one's step time.

        It cools down over so many moves, or until this share of the budget is spent.
        """
        st = self.state
        copy_state(st, best)
        current = best_ms = min(value, 1e18)
        made = improved = 0
        first = self.budget.share()
        while (now := self.budget.share()) < until:
            if moves is not None and (made >= moves or made - improved >= PATIENCE * moves):
                break
            cooled = (now - first) / max(until - first, 1e-9) if moves is None else made / moves
            temperature = hot * (COLD / hot) ** cooled
            clock = time.monotonic()
            chunk = self.chunk if self.budget.moves is None else 200
            current, after, lines = anneal(
                self.problem, st, best, self.back, self.margin, self.scratch, self.rng, chunk, temperature,
                temperature, current, best_ms, self.may_recompute, 0.5, cap_ms, self.log,
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

    def _weave(self, start: Start, until: float, moves: int | None = None) -> Start:
        """What comes of a walk's end when its order of F and I is kept and annealed for a while: some structures are
        worth more than list scheduling makes of them. From what came of it before, if that was better."""
        weaver, before = self.weaver, start.woven
        resumed = before is not None and before.step_ms <= start.step_ms and weaver.resume(before)
        if not resumed and (start.step_ms == np.inf or not weaver.begin(start.state)):
            return start
        made = 0
        first = self.budget.share()
        while (now := self.budget.share()) < until and (moves is None or made < moves):
            chunk = 200 if self.budget.moves is not None else max(self.chunk, 20)
            self._run_words(weaver, chunk, (now - first) / max(until - first, 1e-9) if moves is None else made / moves)
            made += chunk
        return start._replace(woven=weaver.result())

    def _keep(self, start: Start) -> None:
        if start.step_ms == np.inf or any(start.step_ms == e.step_ms for e in self.elite):
            return
        kept: list[Start] = []
        alike: dict[int, int] = {}
        for other in sorted([*self.elite, start], key=lambda e: e.promise_ms):
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
            return start._replace(step_ms=value, woven=None)

        self.elite = sorted((s for s in map(again, self.elite) if s.step_ms < np.inf), key=lambda s: s.step_ms)
        self.starts = [s for s in map(again, self.starts) if s.step_ms < np.inf]

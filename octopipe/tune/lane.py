"""One core's own search: draws starts, walks from them, keeps an elite, polishes the best.

Knows: what a core does with its share of the budget. Does not know: the other cores, plans or the simulator;
best.py lets the lanes meet and judges what they found.

Annealing one start gains most in its first few thousand moves and then rests, and what it comes to depends on the
start; so a lane makes many walks of moderate length instead of a long one. A walk begins at a start not yet used
(shapes of all sizes take turns) or at a member of the elite, heated up for a moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octopipe.tune.anneal import MOVES, PHASE_OF_MOVE, State, anneal, copy_state, judge, make_state
from octopipe.tune.follow import ORDER_MOVES, ORDER_PHASES, Orders, Polisher
from octopipe.tune.kernels import Problem, make_scratch
from octopipe.tune.lottery import Lottery, Start, twin

HOT, COLD, KICK = 8e-4, 1e-4, 4e-3
"""Temperatures as shares of the step time: at a walk's begin and end, and to leave an elite's valley."""
KICK_MOVES = 250
POLISH_HOT, POLISH_COLD = 3e-4, 3e-5
WALK_SHARE, PATIENCE = 0.07, 0.4
"""Longest walk as a share of the lane's budget, and the share of it without improvement that ends it."""
FRESH = 0.4
"""How often a walk begins at an unused start once there is an elite."""
ELITE, STARTS = 8, 16
TURNS = 0.01
"""How much worse a start may be to come before one of a size that was used once more often."""
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
        self.starts: list[Start] = []
        """Not yet walked from."""
        self.elite: list[Start] = []
        self.used: dict[int, int] = {}
        """How often starts of each size (half rounds over the ranks) were walked from."""
        self.polished: tuple[float, State, Orders] | None = None
        self.log = np.zeros((64, 4))
        self.chunk = 50

    # -- phases ----------------------------------------------------------------------------------------

    def draw(self, until: float) -> None:
        """Draw starts until this share of the budget is spent."""
        first = self.lottery.draws
        while self.budget.share() < until:
            drawn = self.lottery.draws - first
            recompute = self.may_recompute and not self.lottery.starts and drawn >= 6 and not self.elite
            self.lottery.draw(STARTS, recompute)
            self.budget.made += MOVES_PER_DRAW
        self.starts += self.lottery.starts
        self.lottery.starts = []

    def walk(self, until: float) -> None:
        """Walk until this share of the budget is spent."""
        while self.budget.share() < until:
            fresh = self._fresh() if not self.elite or self.dice.random() < FRESH else None
            if fresh is None and not self.elite:
                self.draw(min(until, self.budget.share() + 0.02))
                if not self.starts:
                    continue
                fresh = self._fresh()
            best = make_state(self.problem, self.max_stages)
            cap_ms = self.work_ms * (1.0 + CAPS[int(self.dice.integers(len(CAPS)))])
            if fresh is not None:
                copy_state(best, fresh.state)
                name, value = fresh.name, fresh.step_ms
            else:
                chosen = self.elite[int(self.dice.random() ** 2 * len(self.elite))]
                name, value = chosen.name, self._kick(chosen, best, cap_ms)
            self._keep(Start(self._anneal(best, value, cap_ms, until), name, best))

    def polish(self, start: Start, margin: np.ndarray) -> None:
        """Anneal this start's orders as they are for the rest of the budget."""
        polisher = Polisher(self.problem, self.max_stages, self.scratch, margin, (int(self.rng[0] & 0xFFFF),))
        if not polisher.begin(start.state):
            return
        first, chunk = self.budget.share(), 200
        while self.budget.share() < 1.0:
            now = time.monotonic()
            at = (self.budget.share() - first) / max(1.0 - first, 1e-9)
            lines = polisher.run(chunk, POLISH_HOT * (POLISH_COLD / POLISH_HOT) ** at)
            self.budget.made += chunk
            for i, move, before, after in lines:
                self.note(int(i), ORDER_PHASES[int(move)], ORDER_MOVES[int(move)], before, after)
            self.note(chunk, "", "", np.inf, np.inf)
            if self.budget.moves is None:
                chunk = int(min(max(chunk * CHUNK_S / max(time.monotonic() - now, 1e-6), 10), 20000))
        self.polished = (polisher.best_ms, polisher.best, polisher.best_orders)

    # -- one walk --------------------------------------------------------------------------------------

    def _fresh(self) -> Start | None:
        """An unused start: the best, sizes taking turns."""
        if not self.starts:
            return None

        def size(start: Start) -> int:
            return int(2 * start.state.size[0]) // self.problem.num_ranks

        chosen = min(self.starts, key=lambda s: s.step_ms * (1.0 + TURNS * self.used.get(size(s), 0)))
        self.starts = [s for s in self.starts if s is not chosen]
        self.used[size(chosen)] = self.used.get(size(chosen), 0) + 1
        return chosen

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

    def _anneal(self, best: State, value: float, cap_ms: float, until: float) -> float:
        """A walk from `best`, which it overwrites by what is better; returns that one's step time."""
        st = self.state
        copy_state(st, best)
        current = best_ms = min(value, 1e18)
        begin = improved = self.budget.share()
        end = min(begin + WALK_SHARE, until)
        while (now := self.budget.share()) < end and now - improved < PATIENCE * WALK_SHARE:
            temperature = HOT * (COLD / HOT) ** ((now - begin) / WALK_SHARE)
            clock = time.monotonic()
            chunk = self.chunk if self.budget.moves is None else 200
            current, after, lines = anneal(
                self.problem, st, best, self.back, self.margin, self.scratch, self.rng, chunk, temperature,
                temperature, current, best_ms, self.may_recompute, 0.5, cap_ms, self.log,
            )  # fmt: skip
            self.budget.made += chunk
            for i, move, before, then in self.log[:lines]:
                self.note(int(i), PHASE_OF_MOVE[int(move)], MOVES[int(move)], before, then)
            self.note(chunk, "", "", np.inf, np.inf)
            if after < best_ms * (1.0 - 1e-5):
                improved = self.budget.share()
            best_ms = after
            self.chunk = int(min(max(chunk * CHUNK_S / max(time.monotonic() - clock, 1e-6), 10), 5000))
        return float(best_ms) if best_ms < 1e17 else float("inf")

    def _keep(self, start: Start) -> None:
        if start.step_ms < np.inf and all(start.step_ms != e.step_ms for e in self.elite):
            self.elite = sorted([*self.elite, start], key=lambda e: e.step_ms)[:ELITE]

    def adopt(self, starts: list[Start]) -> None:
        """Take other lanes' elite in, by copy."""
        for start in starts:
            self._keep(Start(start.step_ms, start.name, twin(self.problem, self.max_stages, start.state)))

    def rejudge(self) -> None:
        """After more memory was reserved: judge the elite and the starts again, drop what does not fit."""

        def again(start: Start) -> Start:
            value = float(judge(self.problem, start.state, self.margin, np.inf, self.scratch))
            return Start(value, start.name, start.state)

        self.elite = sorted((s for s in map(again, self.elite) if s.step_ms < np.inf), key=lambda s: s.step_ms)
        self.starts = [s for s in map(again, self.starts) if s.step_ms < np.inf]

"""One lane of the search, which runs on its own thread: draws starts, anneals populations, improves orders.

Knows: what a lane does with its share of the budget. Does not know: the other lanes, plans or the simulator; search.py
exchanges results between lanes and evaluates them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octopipe.search.tuner.core.problem import Problem, make_rng
from octopipe.search.tuner.polish import Polisher
from octopipe.search.tuner.population import Judge, Population, Start
from octopipe.search.tuner.mechanics import (
    CHUNK, FAILED_DRAWS, JUDGED_EACH, MOVES_PER_DRAW, POLISH_CHUNK, POLISH_CHUNK_LEAST, POLISH_CHUNK_MOST,
    POLISH_CHUNK_S, TIMED,
)  # fmt: skip
from octopipe.search.tuner.settings import ORDER_MOVES, SETTINGS, STRUCTURE_MOVES
from octopipe.search.tuner.starts import Starts

Note = Callable[[int, str, str, float, float], None]
"""A lane calls this with the number of moves it made (and an empty phase), or with the number, phase and name of a move
that improved the plan and the step times before and after it."""


@dataclass(slots=True)
class Budget:
    """The time, or the number of moves, that a lane has. `share` says how much of it is used; it stays at 1.0 once the
    lane is stopped."""

    seconds: float
    """The search ends this many seconds after `began`."""
    began: float
    """The search began at this time of the monotonic clock."""
    moves: int | None = None
    """If this is given, the lane makes this many moves, however long they take."""
    made: int = 0
    """The lane has made this many moves."""
    stopped: Callable[[], bool] = lambda: False
    """This says whether the search was stopped."""

    def share(self) -> float:
        if self.stopped():
            return 1.0
        if self.moves is not None:
            return self.made / self.moves
        return (time.monotonic() - self.began) / self.seconds


class Lane:
    """The search of one thread."""

    def __init__(
        self, problem: Problem, max_stages: int, work_ms: float, may_recompute: bool, seed: tuple[int, int],
        budget: Budget, note: Note,
    ) -> None:  # fmt: skip
        self.problem, self.max_stages, self.may_recompute = problem, max_stages, may_recompute
        self.budget, self.note, self.number = budget, note, seed[1]
        self.judge = Judge(problem, max_stages, make_rng(*seed, 1), work_ms, may_recompute)
        self.starts = Starts(self.judge, seed)
        self.dice = np.random.default_rng((*seed, 2))
        self.polish_rng = make_rng(*seed, 3)
        self.inbox: list[tuple[str, np.ndarray]] = []
        """These structures come from elsewhere, each with its name; other threads may append at any time."""
        self.population: Population | None = None
        self.populations = 1
        self.found: list[Start] = []
        """These are the results of earlier populations, the best first."""
        self.polishers: list[Polisher] = []
        ops = 3 * problem.micro_batches * min(problem.layers, 2 * problem.ranks)
        self.heat = max(SETTINGS.few_ops / ops, 1.0) ** 2

    def best(self) -> list[Start]:
        """The best structure with keys found so far, if there is one."""
        candidates = [*self.found[:1], *self.starts.kept[:1]]
        if self.population is not None and self.population.best is not None:
            candidates.append(self.population.best)
        return sorted(candidates, key=lambda s: s.step_ms)[:1]

    # -- phases ----------------------------------------------------------------------------------------

    def begin(self, shapes: list[tuple[float, bool]], until: float) -> None:
        """Evaluate even loops and waves, so that there is a plan that fits at once; with recomputation if nothing fits
        without it."""
        for recompute in (False, True) if self.may_recompute else (False,):
            for rounds, wave in shapes:
                if self.starts.kept and self.budget.share() >= until:
                    return
                self.starts.first(rounds, wave, recompute)
                self.budget.made += MOVES_PER_DRAW
            if self.starts.kept or self.budget.stopped():
                return

    def draw(self, until: float) -> None:
        """Draw initial structures until this share of the budget is used."""
        first = self.starts.draws
        while self.budget.share() < until:
            while self.inbox:
                self.starts.keyed(*self.inbox.pop(0))
            no_fit = not self.starts.kept and not self.found and self.starts.draws - first >= FAILED_DRAWS
            self.starts.draw(self.may_recompute and no_fit)
            self.budget.made += MOVES_PER_DRAW
            self.note(MOVES_PER_DRAW, "", "", np.inf, np.inf)

    def anneal(self, until: float, number: int, rounds: int) -> None:
        """Anneal a population of the best initial structures until this share of the budget is used.

        This is one of several rounds, between which lanes exchange members. Some lanes start a new population halfway,
        if there is time.
        """
        if number == 0:
            plenty = self.judgeable(until) * rounds > 2 * SETTINGS.members * JUDGED_EACH
            self.populations = SETTINGS.populations[self.number % len(SETTINGS.populations)] if plenty else 1
        each = -(-rounds // self.populations)
        if number % each == 0 or self.population is None or not self.population.members:
            self.settle()
            if number > 0:
                self.draw(min(self.budget.share() + SETTINGS.draw, until))
            self.population = self._gather(until, min(each, rounds - number))
        population, first = self.population, self.budget.share()
        if not population.members:  # nothing fits yet: go on looking
            self.draw(until)
            return
        begin, end = (number % each) / each, (number % each + 1) / each
        cells = self.problem.ranks * self.problem.micro_batches
        hot = self.heat * min(1.0, SETTINGS.cells / cells) * SETTINGS.hot[self.number % len(SETTINGS.hot)]
        steps = max(round(SETTINGS.temperatures * (end - begin)), 1)
        for step in range(steps):
            heat = hot * SETTINGS.cool ** (begin + (end - begin) * step / steps)
            stop = first + (until - first) * (step + 1) / steps
            for k, member in enumerate(population.members):
                now = self.budget.share()
                turn = now + (stop - now) / (len(population.members) - k)
                while self.budget.share() < turn:
                    judged, lines = population.run(member, CHUNK, heat)
                    self.budget.made += max(judged, 1)
                    self._tell(lines, STRUCTURE_MOVES, CHUNK)
            population.resample(heat, self.dice)

    def _gather(self, until: float, rounds: int) -> Population:
        """Make a population of the best initial structures, as many as get JUDGED_EACH schedules each in this round and
        the `rounds` - 1 after it. The other initial structures are dropped."""
        population = Population(self.judge)
        enough = rounds * self.judgeable(until) / JUDGED_EACH
        chosen = self.starts.take()[: min(max(int(enough), 1), SETTINGS.members)]
        for start in chosen:
            if self.budget.share() < until:
                self.budget.made += population.add(start, min(enough, 1.0))
        if not population.members:
            self.found += chosen
        return population

    def settle(self) -> None:
        """End the population and keep its results."""
        if self.population is not None:
            self.found = sorted([*self.found, *self.population.results()], key=lambda s: s.step_ms)
            self.population = None

    def polish(self, polishers: list[Polisher]) -> None:
        """Anneal given orders: each for a while, then the best for the rest of the budget."""
        self.polishers += polishers
        first = self.budget.share()
        trials = 0.5 * (1.0 - first) / max(len(polishers), 1)
        for polisher in polishers:
            self._anneal_orders(polisher, min(self.budget.share() + trials, 1.0), self.heat)
        if polishers:
            self._anneal_orders(min(polishers, key=lambda q: q.best_ms), 1.0, 0.5 * self.heat)

    # -- pieces ----------------------------------------------------------------------------------------

    def judgeable(self, until: float) -> float:
        """How many schedules like that of the best start can be evaluated until this share of the budget is used."""
        left = until - self.budget.share()
        if self.budget.moves is not None:
            return left * self.budget.moves
        best = self.best()
        if not best:
            return 0.0
        took = []
        for _ in range(TIMED):
            began = time.perf_counter()
            self.judge.step_ms(best[0])
            took.append(time.perf_counter() - began)
        return left * self.budget.seconds / min(took)

    def _anneal_orders(self, polisher: Polisher, until: float, heat: float) -> None:
        first, chunk = self.budget.share(), POLISH_CHUNK
        hot = heat * SETTINGS.polish_hot
        while (now := self.budget.share()) < until:
            clock = time.monotonic()
            lines = polisher.run(chunk, hot * SETTINGS.cool ** ((now - first) / max(until - first, 1e-9)))
            self.budget.made += chunk
            self._tell(lines, ORDER_MOVES, chunk)
            if self.budget.moves is None:
                took = max(time.monotonic() - clock, 1e-6)
                least, most = POLISH_CHUNK_LEAST, POLISH_CHUNK_MOST
                chunk = int(min(max(chunk * POLISH_CHUNK_S / took, least), most))

    def _tell(self, lines: np.ndarray, moves: tuple[tuple[str, str], ...], made: int) -> None:
        for i, move, before, after in lines:
            name, phase = moves[int(move)]
            self.note(int(i), phase, name, before, after)
        self.note(made, "", "", np.inf, np.inf)

    def rejudge(self) -> None:
        """Evaluate everything again after more memory was reserved, and drop what no longer fits. No thread may be
        running."""
        for group in (self.found, self.starts.kept):
            again = [s._replace(step_ms=self.judge.step_ms(s)) for s in group]
            group[:] = sorted((s for s in again if s.step_ms < np.inf), key=lambda s: s.step_ms)
        if self.population is not None:
            self.population.rejudge()

    def candidates(self) -> list[Start]:
        """The results that are worth polishing: one per step time, the best first."""
        return sorted({s.step_ms: s for s in (*self.found, *self.best())}.values(), key=lambda s: s.step_ms)

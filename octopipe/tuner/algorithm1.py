"""Algorithm 1 of the OctoPipe paper (section VI): iterative, bubble-aware tuning.

Each iteration reads the current plan's bubbles and tunes one phase:
- the gap between the ranks' idle times exceeds the smallest layer's time: partition (partition.py);
- else boundary bubbles exceed residual bubbles: placement (placement.py);
- else: schedule (schedule.py).

An iteration judges a score or two of the phase's moves and takes the best one; migrations repeat until none helps.
What the paper leaves open, and our reading of it:
- idle times are those of a step, so the layer's time is that of all micro-batches (no migration can shift less);
- a phase that finds nothing better hands over to the next one until the plan changes;
- a placement is judged by the step time less the imbalance it leaves: the partition phase comes next and mends that;
- when `RETURN` iterations away from the best plan led to nothing better, the search goes back to it;
- it ends when `PATIENCE` iterations in a row brought no better plan;
- the order is kept as priorities (candidate.py), so it survives the other phases.

Knows: the phase rule, what is accepted and when to stop. Does not know: the moves.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import numpy as np

from octopipe.cost import CostTable
from octopipe.plan import Plan
from octopipe.timeline import Timeline
from octopipe.tuner import partition, placement, schedule
from octopipe.tuner.anneal import State
from octopipe.tuner.best import Found
from octopipe.tuner.candidate import Candidate, Desk, excess_ms
from octopipe.tuner.result import Callback, Progress, Step

PHASES = ("partition", "placement", "schedule")
PATIENCE = 60
RETURN = 4
SLACK = 1.15
"""No placement may slow the plan by more than this, whatever balancing promises."""
MIGRATIONS = 12
"""Most migrations in one iteration of the partition phase."""
BETTER = 1e-9

Moves = Callable[[Desk, Candidate, random.Random], Iterator[tuple[str, State]]]
_MOVES: dict[str, Moves] = {"placement": placement.moves, "schedule": schedule.moves}


def bubble_phase(timeline: Timeline, least_layer_ms: float) -> str:
    """The phase most likely to shrink this timeline's bubbles: Algorithm 1's rule."""
    bubbles = timeline.bubbles
    if float(bubbles.idle_ms.max() - bubbles.idle_ms.min()) > least_layer_ms:
        return "partition"
    # Communication is residual in the paper's sense: idle time that is neither imbalance nor boundary.
    residual = float(bubbles.residual_ms.sum() + bubbles.communication_ms.sum())
    return "placement" if float(bubbles.boundary_ms.sum()) > residual else "schedule"


class IterativeSearch:
    """The framework that Algorithm 1 and random search share; `choose` picks the phase."""

    name = "octopipe"

    def __init__(
        self,
        costs: CostTable,
        num_ranks: int,
        num_micro_batches: int,
        *,
        budget_s: float,
        seed: int,
        iterations: int | None = None,
        start: Plan | None = None,
        recompute: bool = True,
        lower_bound_ms: float = 0.0,
        progress: Callback | None = None,
        patience: int = PATIENCE,
    ) -> None:
        self.began = time.monotonic()
        most = max(8 * num_ranks, 24, len(start.stages) if start else 0)
        self.desk = Desk(costs, num_ranks, num_micro_batches, min(costs.num_layers, most))
        self.budget_s, self.iterations, self.start = budget_s, iterations, start
        self.may_recompute = recompute and self.desk.problem.has_limit
        self.lower_bound_ms, self.progress = lower_bound_ms, progress
        self.patience = patience
        self.lot = random.Random(seed)
        positive = costs.layer_ms[costs.layer_ms > 0]
        self.least_layer_ms = float(positive.min()) * num_micro_batches if positive.size else 0.0
        self.log: list[Step] = []
        self.spent: set[str] = set()
        """Phases that found nothing better for the current plan."""
        self.stopped = False

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def choose(self, now: Candidate) -> str:
        """The rule's phase, or the next one that has not failed on this very plan."""
        wanted = bubble_phase(now.timeline, self.least_layer_ms)
        at = PHASES.index(wanted)
        turn = [PHASES[(at + k) % len(PHASES)] for k in range(len(PHASES))]
        return next((phase for phase in turn if phase not in self.spent), wanted)

    # -- the loop --------------------------------------------------------------------------------------

    def run(self) -> Found:
        interrupted = False
        best = now = self.desk.first(self.start, self.may_recompute)
        self.log.append(Step(0, self.elapsed(), "start", "start", now.step_ms, now.step_ms, now.step_ms))
        iteration, stale, away = 0, 0, 0
        spent_on_best: set[str] = set()
        try:
            while not self._over(iteration, stale):
                iteration += 1
                phase = self.choose(now)
                move, then = self._tune(phase, now, best)
                after = then.step_ms if then is not None else now.step_ms
                if then is None:
                    self.spent.add(phase)
                stale += 1
                if then is not None and then.step_ms < best.step_ms * (1 - BETTER):
                    best, stale = then, 0
                self.log.append(Step(iteration, self.elapsed(), phase, move, now.step_ms, after, best.step_ms))
                if then is not None:
                    now = then
                    # The partition phase went on until nothing was better.
                    self.spent = {phase} if phase == "partition" else set()
                away = 0 if now is best else away + 1
                if now is best:
                    spent_on_best = set(self.spent)
                elif len(self.spent) == len(PHASES) or away >= RETURN:
                    # Only placement leads away from the best plan; this time to nothing.
                    now, away = best, 0
                    spent_on_best.add("placement")
                    self.spent = set(spent_on_best)
                if len(self.spent) == len(PHASES):
                    # Placement and schedule judge drawn moves: another draw may find what this one did not.
                    self.spent.clear()
                self._report(iteration, phase, best)
        except KeyboardInterrupt:
            interrupted = True
        counts = {p: sum(s.phase == p for s in self.log) for p in PHASES}
        return Found(
            plan=best.plan,
            timeline=best.timeline,
            iterations=iteration,
            log=self.log,
            interrupted=interrupted or self.stopped,
            phase_iterations=counts,
        )

    def _over(self, iteration: int, stale: int) -> bool:
        if self.iterations is not None and iteration >= self.iterations:
            return True
        return self.stopped or self.elapsed() >= self.budget_s or stale >= self.patience

    def _tune(self, phase: str, now: Candidate, best: Candidate) -> tuple[str, Candidate | None]:
        """What the phase makes of the current plan, where that is better."""
        if phase == "partition":
            return self._migrate(now)
        desk = self.desk
        # A placement is judged as if its imbalance were mended already.
        placing = phase == "placement"
        limit = now.without_imbalance_ms if placing else now.step_ms
        chosen: tuple[str, State] | None = None
        for move, st in _MOVES[phase](desk, now, self.lot):
            spare = excess_ms(desk.loads(st)) if placing else 0.0
            ms = desk.judge(st, min(limit + spare, best.step_ms * SLACK) if placing else limit)
            if ms - spare < limit * (1 - BETTER):
                limit, chosen = ms - spare, (move, st)
            if self.elapsed() >= self.budget_s:
                break
        if chosen is None:
            return "nothing better", None
        then = desk.view(desk.copy(chosen[1]))
        return chosen[0], then if then is not None and (placing or then.step_ms < now.step_ms) else None

    def _migrate(self, now: Candidate) -> tuple[str, Candidate | None]:
        """Migrations, each the best of its round, until no better partition is found."""
        desk, st, ms = self.desk, now.state, now.step_ms
        names: list[str] = []
        while len(names) < MIGRATIONS and self.elapsed() < self.budget_s:
            chosen: tuple[str, State] | None = None
            for move, moved in partition.migrations(desk, st, self.lot):
                then_ms = desk.judge(moved, ms)
                if then_ms < ms * (1 - BETTER):
                    ms, chosen = then_ms, (move, moved)
            if chosen is None:
                break
            names.append(chosen[0])
            st = chosen[1]
        if not names:
            return "nothing better", None
        then = desk.view(desk.copy(st))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return names[0] + more, then if then is not None and then.step_ms < now.step_ms else None

    def _report(self, iteration: int, phase: str, best: Candidate) -> None:
        if self.progress is None:
            return
        bubbles, timeline = best.timeline.bubbles, best.timeline
        whole = max(timeline.makespan_ms * timeline.num_ranks, 1e-300)
        parts = {n[:-3]: float(np.sum(getattr(bubbles, n))) / whole for n in bubbles._fields if n != "idle_ms"}
        seen = Progress(
            self.elapsed(), self.budget_s, iteration, phase, best.step_ms, self.lower_bound_ms, parts, best.plan
        )
        if self.progress(seen) is True:
            self.stopped = True

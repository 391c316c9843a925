"""Algorithm 1 of the OctoPipe paper (section VI): iterative, bubble-aware tuning.

Each iteration reads the current plan's bubbles and tunes one phase:
- the gap between the ranks' idle times exceeds the smallest layer's time: partition (partition.py);
- else boundary bubbles exceed residual bubbles: placement (placement.py);
- else: schedule (schedule.py).

An iteration evaluates a few moves of its phase and applies the best one; in the partition phase it applies one
migration, as the paper's iteration counts (Table IV) show. The paper leaves some points open; our interpretation:
- idle times are per step, so the layer's time is that of all micro-batches (no migration can shift less);
- if a phase finds no improvement, the next phase takes over until the plan changes;
- a placement is evaluated by the step time less the remaining imbalance, which the partition phase removes next;
- after a few iterations without improvement on the best plan, the search returns to that plan;
- the search starts from 1F1B; when it stagnates there, it restarts from the fastest published plans that fit, so that
  it is no slower than any of them;
- phases can be disabled (the paper's ablation); 1F1B is then the only starting point.

Knows: the phase rule, what is accepted and when to stop. Does not know: the moves.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.search.algorithm1 import partition, placement, schedule
from octopipe.search.algorithm1.candidate import Candidate, Evaluator, State, excess_ms
from octopipe.search.algorithm1.settings import SETTINGS, Settings
from octopipe.search.algorithm1.starts import one_f_one_b, published, something_that_fits
from octopipe.search.algorithm1.structure import derived, keys_of
from octopipe.search.result import Callback, Found, Progress, Step
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline

PHASES = ("partition", "placement", "schedule")


def bubble_phase(timeline: Timeline, least_layer_ms: float) -> str:
    """The phase that is most likely to shrink the bubbles of this timeline, by the rule of Algorithm 1."""
    bubbles = timeline.bubbles
    if float(bubbles.idle_ms.max() - bubbles.idle_ms.min()) > least_layer_ms:
        return "partition"
    # Communication is residual in the paper's sense: idle time that is neither imbalance nor boundary.
    residual = float(bubbles.residual_ms.sum() + bubbles.communication_ms.sum())
    return "placement" if float(bubbles.boundary_ms.sum()) > residual else "schedule"


class IterativeSearch:
    """The framework that Algorithm 1 and random search share; `choose` selects the phase."""

    name = "octopipe"

    def __init__(
        self,
        costs: CostTable,
        num_ranks: int,
        num_micro_batches: int,
        *,
        budget_s: float,
        seed: int = 0,
        iterations: int | None = None,
        start: Plan | None = None,
        recompute: bool = True,
        lower_bound_ms: float = 0.0,
        progress: Callback | None = None,
        phases: Sequence[str] = PHASES,
        systems: bool = True,
        settings: Settings = SETTINGS,
    ) -> None:
        """`systems`: restart from published plans when 1F1B is given up. `start`: the only start, if given."""
        self.began = time.monotonic()
        unknown = [p for p in phases if p not in PHASES]
        if unknown or not phases:
            raise OctoPipeError(f"phases {', '.join(phases) or '(none)'}; give some of {', '.join(PHASES)}")
        self.phases = tuple(p for p in PHASES if p in phases)
        self.settings = settings
        self.evaluator = Evaluator(costs, num_ranks, num_micro_batches, settings)
        self.budget_s, self.most, self.start = budget_s, iterations, start
        self.may_recompute = recompute and self.evaluator.has_limit
        self.systems = systems and start is None and self.phases == PHASES
        self.lower_bound_ms, self.progress = lower_bound_ms, progress
        self.lot = random.Random(seed)
        positive = costs.layer_ms[costs.layer_ms > 0]
        self.least_layer_ms = float(positive.min()) * num_micro_batches if positive.size else 0.0
        self.log: list[Step] = []
        self.built: dict[str, float] = {}
        self.iteration = 0
        self.spent: set[str] = set()
        """Phases that found no improvement of the current plan."""
        self.best: Candidate | None = None
        self.stopped = False
        self.reported = -np.inf

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def share(self) -> float:
        """Return the share of the budget that is used: of the iterations if their number is limited, otherwise of the
        time."""
        if self.most is None:
            return self.elapsed() / self.budget_s if self.budget_s > 0 else 1.0
        return self.iteration / self.most if self.most > 0 else 1.0

    def late(self) -> bool:
        """Whether the time is over; always False if the number of iterations is limited, because the result must then
        not depend on the clock."""
        return self.most is None and self.elapsed() >= self.budget_s

    def choose(self, now: Candidate) -> str:
        """Return the phase that the rule selects or, if it is disabled or found no improvement of this plan, the next
        one."""
        wanted = bubble_phase(now.timeline, self.least_layer_ms)
        at = PHASES.index(wanted)
        turn = [p for k in range(len(PHASES)) if (p := PHASES[(at + k) % len(PHASES)]) in self.phases]
        return next((phase for phase in turn if phase not in self.spent), turn[0])

    # -- the loop --------------------------------------------------------------------------------------

    def run(self) -> Found:
        interrupted = False
        try:
            starts = self._starts()
            for number, (name, start) in enumerate(starts):
                if number and self._over():
                    break
                # Budget that a start does not use is divided among the following ones.
                self._from(name, start, self.share() + (1.0 - self.share()) / (len(starts) - number))
        except KeyboardInterrupt:
            interrupted = True
            if self.best is None:
                raise
        assert self.best is not None
        return Found(
            plan=self.best.plan,
            timeline=self.best.timeline,
            iterations=self.iteration,
            log=self.log,
            interrupted=interrupted or self.stopped,
            phase_iterations={p: sum(s.phase == p for s in self.log) for p in PHASES},
            systems=self.built,
        )

    def _starts(self) -> list[tuple[str, Candidate]]:
        """Return the initial plans with their names, in the order in which they are used; all of them fit."""
        if self.start is not None:
            return [("start", self._given(self.start))]
        first = one_f_one_b(self.evaluator)
        if first is not None:
            self._keep(first)
        others = self._published()[: self.settings.restarts] if self.systems else []
        if first is None and not others:
            return [("something that fits", something_that_fits(self.evaluator, self.may_recompute))]
        return ([("1f1b", first)] if first is not None else []) + others

    def _given(self, plan: Plan) -> Candidate:
        timeline = simulate(plan, self.evaluator.costs)
        if not timeline.fits:
            # Advancing W may make it fit; otherwise the search starts from another plan that fits.
            return self.evaluator.view(self.evaluator.state(plan)) or something_that_fits(
                self.evaluator, self.may_recompute
            )
        return Candidate(state=self.evaluator.state(plan), plan=plan, timeline=timeline)

    def _published(self) -> list[tuple[str, Candidate]]:
        """Plans of published systems that hold each layer once and fit, the fastest first."""
        until = self.began + self.settings.systems_share * self.budget_s
        found = []
        evaluator = self.evaluator
        for name, plan in published(
            evaluator.costs, evaluator.num_ranks, evaluator.num_micro_batches,
            until=until if self.most is None else np.inf, recompute=self.may_recompute or not evaluator.has_limit,
        ):  # fmt: skip
            timeline = simulate(plan, evaluator.costs, check=False)
            seen: Candidate | None = None
            if timeline.fits:
                self.built[name] = timeline.step_ms
                seen = Candidate(state=evaluator.state(plan), plan=plan, timeline=timeline)
            elif not plan.replicas():
                seen = evaluator.view(evaluator.state(plan))
            if seen is not None and not plan.replicas():
                self._keep(seen)
                found.append((name, seen))
        return sorted(found, key=lambda pair: pair[1].step_ms)

    def _keep(self, seen: Candidate) -> bool:
        if self.best is None or seen.step_ms < self.best.step_ms * (1 - self.settings.better):
            self.best = seen
            return True
        return False

    def _from(self, name: str, now: Candidate, until: float) -> None:
        """Run Algorithm 1 from one start until it is given up or this share of the budget is used."""
        self._keep(now)
        assert self.best is not None
        ms = now.step_ms
        self.log.append(Step(self.iteration, self.elapsed(), "start", name, ms, ms, self.best.step_ms))
        here, stale, away = now, 0, 0
        self.spent = set()
        spent_here: set[str] = set()
        while stale < self.settings.patience and self.share() < until and not self._over():
            self.iteration += 1
            phase = self.choose(now)
            move, then = self._tune(phase, now, here)
            before, stale = now.step_ms, stale + 1
            if then is None:
                self.spent.add(phase)
            else:
                now = then
                self.spent = set()
                if then.step_ms < here.step_ms * (1 - self.settings.better):
                    here, stale = then, 0
                    self._keep(then)
            self.log.append(Step(self.iteration, self.elapsed(), phase, move, before, now.step_ms, self.best.step_ms))
            # Iterations that improve the current plan step by step do not count as lost.
            away = 0 if now is here else away + (then is None or phase == "placement")
            if now is here:
                spent_here = set(self.spent)
            elif len(self.spent) == len(self.phases) or away >= self.settings.returns:
                # Only placement leads away from the best plan, and this time it led to no better one.
                now, away = here, 0
                spent_here.add("placement")
                self.spent = set(spent_here)
            if len(self.spent & set(self.phases)) == len(self.phases):
                # Placement and schedule draw their moves at random, so another attempt may succeed.
                self.spent.clear()
                if self.phases == ("partition",):
                    return
            self._report(phase)

    def _over(self) -> bool:
        best = self.best.step_ms if self.best is not None else np.inf
        at_bound = self.lower_bound_ms > 0 and best <= self.lower_bound_ms * (1 + self.settings.better)
        return self.stopped or self.share() >= 1.0 or at_bound

    def _tune(self, phase: str, now: Candidate, here: Candidate) -> tuple[str, Candidate | None]:
        """Return the name and the result of the best move of the phase; the result is None if no move is an
        improvement. `here` is the best plan since the current start."""
        if phase == "partition":
            return self._migrate(now)
        # A placement is evaluated as if its imbalance were removed already.
        placing, evaluator = phase == "placement", self.evaluator
        derive = "schedule" in self.phases
        limit = now.without_imbalance_ms if placing else now.step_ms
        found: list[tuple[float, int, str, State]] = []
        moves = (
            placement.moves(evaluator, now, self.lot, derive)
            if placing
            else schedule.moves(evaluator, now, self.lot, self.may_recompute)
        )
        for number, (move, st) in enumerate(moves):
            spare = excess_ms(evaluator.loads(st.stages)) if placing and "partition" in self.phases else 0.0
            cutoff = min(limit + spare, here.step_ms * self.settings.placement_slack) if placing else limit
            ms, st = evaluator.judge(st, cutoff)
            if ms - spare < limit * (1 - self.settings.better):
                limit = ms - spare
                found.append((limit, number, move, st))
            if self.late():
                break
        for _, _, move, st in reversed(found):
            then = evaluator.view(st)
            if then is not None and (placing or then.step_ms < now.step_ms * (1 - self.settings.better)):
                return move, then
        return "nothing better", None

    def _migrate(self, now: Candidate) -> tuple[str, Candidate | None]:
        """Return the name and the result of the best of a few migrations; the result is None if none is an
        improvement."""
        evaluator, st, ms = self.evaluator, now.state, now.step_ms
        if not st.chain:
            return "nothing better", None
        chosen: tuple[str, State] | None = None
        # Orders are kept; if the schedule phase is enabled, orders derived from their start times are tried too.
        keys = keys_of(st, now.timeline.spans.start_ms) if "schedule" in self.phases else None
        for move, moved in partition.migrations(evaluator, st, self.lot):
            for order in (moved, *(derived(evaluator, moved, keys, cutoff_ms=ms) if keys is not None else ())):
                then_ms, fitting = evaluator.judge(order, ms)
                if then_ms < ms * (1 - self.settings.better):
                    ms, chosen = then_ms, (move, fitting)
            if self.late():
                break
        then = None if chosen is None else evaluator.view(chosen[1])
        if chosen is None or then is None or then.step_ms >= now.step_ms * (1 - self.settings.better):
            return "nothing better", None
        return chosen[0], then

    def _report(self, phase: str) -> None:
        best = self.best
        if self.progress is None or best is None or self.elapsed() < self.reported + self.settings.report_every_s:
            return
        self.reported = self.elapsed()
        bubbles, timeline = best.timeline.bubbles, best.timeline
        whole = max(timeline.makespan_ms * timeline.num_ranks, 1e-300)
        parts = {n[:-3]: float(np.sum(getattr(bubbles, n))) / whole for n in bubbles._fields if n != "idle_ms"}
        seen = Progress(
            self.elapsed(), self.budget_s, self.iteration, phase, best.step_ms, self.lower_bound_ms, parts, best.plan
        )
        if self.progress(seen) is True:
            self.stopped = True


class RandomSearch(IterativeSearch):
    """Random search: the same framework and moves, with phases chosen at random instead of by the bubbles.

    This is the comparison in the paper's "Pipeline Search Cost".
    """

    name = "random"

    def choose(self, now: Candidate) -> str:
        return self.lot.choice(self.phases)

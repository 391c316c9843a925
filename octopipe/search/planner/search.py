"""The search: bounds every split, estimates the promising ones, and simulates and tunes the best few.

Knows: how one budget is spent. Does not know: how splits are estimated (`judging.py`), tuned (`tuning.py`) or selected
(`choice.py`), or how results are shown (cli/verbs/plan.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from octopipe.base.errors import DoesNotFitError, OctoPipeError, StoppedError
from octopipe.base.limits import MAX_SEED
from octopipe.costs.cluster.setup import Setup
from octopipe.models.spec import ModelSpec
from octopipe.search.planner.budget import Budget, Stop, never
from octopipe.search.planner.choice import MARGIN, fastest_if_tuned, simplest, varied
from octopipe.search.planner.commands import runs_on
from octopipe.search.planner.judging import Say, climbed, judge, modes_of, published_splits, refined
from octopipe.search.planner.pricing import Candidate, Pricer
from octopipe.search.planner.runtimes import RUNTIMES, Runtime
from octopipe.search.planner.splits import Split, splits, why_no_split
from octopipe.search.planner.today import refuses_today, split_of_today
from octopipe.search.planner.tuning import ops_of, place_branches, schedules, tune_candidate, without_kernels
from octopipe.search.planner.unfit import nothing_fits, unfit, unrun

SIMULATED, TUNED = 8, 2
"""Number of splits that are at least simulated, and number of splits that are tuned with a budget of 20 s."""
JUDGING, SIMULATING = 0.3, 0.2
"""Shares of the budget for judging and for the first simulations; tuning gains more than either."""
BY_BOUND = 0.7
"""The part of the time for judging in which splits are estimated in the order of their bounds; the rest is for the
    neighbours of the best ones."""
JUDGING_S = 8.0
"""Judging gets at least this many seconds, but at most twice its share of the budget."""
PUBLISHED = 2
"""Number of splits of published runs of the model, the best by estimate, that are simulated before all others."""
ROUNDS = 3
"""How often a search with time left tunes its best split again."""
AGAIN = 0.9
"""A search that had to stop judging continues with it, unless this share of the budget has been spent."""
PLACED, PLACING = 3, 0.15
"""For a model whose layers fork: the number of splits for which the ranks of the branches are optimised, and the share
of the remaining time that each of them gets."""
TUNING_S = 20.0
"""One more split is tuned for each further period of this many seconds in the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The ranked splits, and how many of all splits were evaluated."""

    best: Candidate
    ranked: tuple[Candidate, ...]
    today: Candidate | None
    splits: int
    judged: int
    cut_short: bool
    """Whether time ran out before every split that may be among the best was evaluated."""
    seconds: float
    skipped: tuple[str, ...] = ()
    """Sentences about what was left out for lack of time or due to its size, and what more time may gain."""
    margin: float = 0.0
    """Splits within this share of the fastest count as equally fast; the simplest of them was chosen."""
    fastest: Candidate | None = None
    """The fastest split, if `best` is a simpler one."""
    unrun_today: str = ""
    """The reason why the runtime that was asked for cannot run today's split, which is then no answer."""
    interrupted: bool = False
    """Whether the search was interrupted; this is then its best result so far."""


def search(
    spec: ModelSpec,
    base: Setup,
    *,
    gpus: int,
    global_batch: int,
    fixed: Mapping[str, int] | None = None,
    today: Mapping[str, int] | None = None,
    runtime: Runtime = RUNTIMES["any"],
    recompute: str = "auto",
    budget_s: float = 30.0,
    began: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    margin: float = MARGIN,
    seed: int = 0,
    say: Say | None = None,
    stop: Stop = never,
    published: bool = True,
) -> Found:
    """The best split of `gpus` GPUs for steps of `global_batch` sequences.

    `budget_s` is wall-clock time from `began` (default: now) and covers everything, including a little for the output.
    `clock` measures it: `time.process_time` makes results on busy machines comparable. `published=False` ignores the
    splits of published runs of the model, so that benchmarks measure the search alone.
    """
    budget = Budget(seconds=budget_s, clock=clock, began=began, stop=stop)
    run = _Run(spec, base, gpus, global_batch, dict(fixed or {}), runtime, recompute, seed, budget, say, published)
    present = run.today(today) if today else None
    # A short budget is better spent on finding the split than on tuning a poor one.
    judging = max(JUDGING, min(2 * JUDGING, JUDGING_S / budget_s))
    run.judge(judging)
    run.simulate(judging + SIMULATING)
    run.schedule(judging + 1.5 * SIMULATING)
    run.place()
    run.improve()
    # If time is left after tuning, it is spent on the splits that have not been judged yet.
    while run.left_ms is not None and not budget.over(AGAIN):
        before = run.judged
        run.judge(min(1.0, budget.used() / budget_s + 0.5 * (1.0 - budget.used() / budget_s)))
        run.simulate(1.0)
        run.schedule(1.0)
        run.place()
        run.improve()
        if run.judged == before:
            break
    run.deepen(ROUNDS)
    return run.result(present, margin)


class _Run:
    """The state of one search."""

    def __init__(
        self,
        spec: ModelSpec,
        base: Setup,
        gpus: int,
        global_batch: int,
        fixed: dict[str, int],
        runtime: Runtime,
        recompute: str,
        seed: int,
        budget: Budget,
        say: Say | None,
        published: bool,
    ):
        base, runtime = runtime.settled(base), runtime.of_model(spec)
        if reason := runtime.refuses(base):
            raise OctoPipeError(f"{reason}; leave --for out, or name another runtime")
        if reason := runtime.refuses_sizes(fixed):
            raise OctoPipeError(f"{reason}; leave --for out, or give other sizes")
        self.spec, self.base, self.gpus, self.fixed = spec, base, gpus, fixed
        self.runtime, self.seed, self.budget = runtime, seed, budget
        self.recompute = recompute if base.offload_layers is None else "none"
        self.tell: Say = say or (lambda words: None)
        pairs = runtime.target == "octopipe" and not runtime.recomputes_by_ops
        self.pricer = Pricer(
            spec,
            base,
            global_batch,
            recompute_ops=runtime.recomputes_by_ops,
            pairs=pairs,
            overlaps=runtime.overlaps,
            layouts=runtime.target is not None,
            checkpoints=runtime.checkpoints,
        )
        self.modes = modes_of(recompute, runtime, base)
        self.every = list(splits(spec, base, gpus=gpus, global_batch=global_batch, fixed=fixed, runtime=runtime))
        if not self.every:
            raise OctoPipeError(why_no_split(spec, base, gpus, global_batch, fixed, runtime))
        self.kept: list[Candidate] = []
        self.judged = 0
        self.left_ms: float | None = None
        self.simulated: list[Candidate] = []
        self.tuned: list[Candidate] = []
        self.skipped: list[str] = []
        self.improved: set[Split] = set()
        self.scheduled: set[Split] = set()
        self.placed: list[Candidate] = []
        known = published_splits(self.pricer, self.every, gpus, runtime) if published else []
        self.published = {s for s in known if all(getattr(s, k) == v for k, v in fixed.items())}

    def judge(self, until: float) -> None:
        """Estimate splits until this share of the budget is spent, and keep the best; splits of published runs are
        always estimated. Raises DoesNotFitError if none fits."""
        self.kept, self.judged, self.left_ms = judge(
            self.pricer,
            self.every,
            self.modes,
            self.tell,
            over=lambda: self.budget.over(BY_BOUND * until),
            bounding=lambda: self.budget.over(0.5 * BY_BOUND * until),
            tuned=self.runtime.tuned,
            always=sorted(self.published),
        )
        self.kept, more = climbed(self.pricer, self.kept, self.every, self.modes, lambda: self.budget.over(until))
        self.judged += more
        if "vp" not in self.fixed:
            later = min(until + 0.1, 1.0)
            self.kept = refined(self.pricer, self.kept, self.modes, self.runtime, lambda: self.budget.over(later))
        if not self.kept and self.budget.stop():
            raise StoppedError("the search was stopped before it found a first split; give it more time")
        if not self.kept:
            raise DoesNotFitError(nothing_fits(self.pricer, self.every, self.modes, self.runtime))
        self.skipped = []

    def simulate(self, until: float) -> None:
        """Simulate splits in the order of their estimates, until `SIMULATED` are done and the next one's estimate is
        not below the best simulated time, or until this share of the budget is spent; but never before one fits."""
        self.tell("simulating the best few")
        # Splits of published runs come first, so that the answer is not slower than them even if time is short.
        used = [c for c in self.kept if c.split in self.published][:PUBLISHED]
        for candidate in [*used, *varied(self.kept, each=2)]:
            best_ms = self.best_ms
            settled = len(self.simulated) >= SIMULATED and candidate.step_ms >= best_ms
            if best_ms < math.inf and (settled or self.budget.over(until) or not self._affords(candidate)):
                break
            if self._known(candidate.split) is None:
                found = self._simulated(candidate.split)
                if candidate in used and found.split.pp > 1 and self.runtime.any_order:
                    self._scheduled(found)

    @property
    def promising(self) -> list[Candidate]:
        """The splits with a pipeline, sorted by the estimated step time after tuning."""
        return varied([c for c in sorted(self.kept, key=fastest_if_tuned) if c.split.pp > 1], each=1)

    def schedule(self, until: float) -> None:
        """Simulate splits of published runs and the most promising ones under zero-bubble and similar schedules, until
        this share of the budget is spent. For a few simulations each, this gains most of what tuning would gain."""
        if not self.runtime.any_order:
            return
        used = [c for c in sorted(self.kept, key=fastest_if_tuned) if c.split in self.published and c.split.pp > 1]
        for candidate in [*used, *self.promising[:SIMULATED]]:
            if self.budget.over(until) or not self._affords(candidate):
                return
            if candidate.split not in self.scheduled and candidate.tuned_ms < self.best_ms:
                self._scheduled(self._known(candidate.split) or self._simulated(candidate.split))

    def _scheduled(self, begun: Candidate) -> None:
        self.scheduled.add(begun.split)
        self.simulated += schedules(
            self.pricer, begun, self.budget, recompute=self.recompute, pairs=self.runtime.runs_pairs
        )

    def improve(self) -> None:
        """Tune the most promising splits, then simulate others that may be nearly as fast as the best, as long as there
        is time."""
        if self.runtime.tuned:
            number = TUNED + int(self.budget.seconds // TUNING_S) - 1
            for candidate in self.promising[: 2 * number]:
                if self.budget.over():
                    return
                if candidate.split in self.improved or candidate.tuned_ms >= self.best_ms:
                    continue  # even when tuned, this split would not be the answer
                self.improved.add(candidate.split)
                self._improve(candidate, self.budget.left() / max(number, 1))
                number -= 1
        for candidate in varied(self.kept, each=2):
            if self.budget.over() or not self._affords(candidate):
                return
            if candidate.step_ms < 1.02 * self.best_ms and self._known(candidate.split) is None:
                self._simulated(candidate.split)

    def deepen(self, rounds: int) -> None:
        """Tune the best candidate again, up to `rounds` times while there is time, starting from its plan and with
        other random seeds."""
        for number in range(1, rounds + 1):
            found = [c for c in (*self.simulated, *self.tuned) if c.fits and c.plan is not None]
            best = min(found, key=lambda c: c.step_ms, default=None)
            if best is None or best.split.pp == 1 or not self.runtime.tuned or self.budget.over(AGAIN):
                return
            if without_kernels(self.budget):
                return
            self.tell(f"tuning {best.split.words()} again")
            left = self.budget.left(ops_of(best))
            better, why_not, _ = tune_candidate(
                self.pricer,
                best,
                left,
                (self.seed + number) % (MAX_SEED + 1),
                self.runtime,
                self.recompute,
                self.budget,
            )
            self.tuned += [] if better is None else [better]
            if why_not:
                return

    def place(self) -> None:
        """For a model whose layers fork, place the stages of the branches of the best few splits on better ranks."""
        if not self.spec.takes or not self.runtime.tuned:
            return
        fitting = sorted((c for c in self.simulated if c.fits and c.split.pp > 1), key=lambda c: c.step_ms)
        for candidate in fitting[:PLACED]:
            if candidate in self.placed:
                continue
            self.placed.append(candidate)
            self.tell(f"placing the branches of {candidate.split.words()}")
            over = self.budget.after(PLACING * self.budget.left())
            better = place_branches(self.pricer, candidate, over)
            self.tuned += [] if better is None else [better]

    def _improve(self, candidate: Candidate, seconds: float) -> None:
        """Try published schedules on one split and tune it, within about this many seconds."""
        began = self.budget.used()
        begun = self._known(candidate.split)
        if begun is None and not self._affords(candidate):
            self._skip(candidate, candidate.step_ms, "the time left is too short to simulate it")
            return
        begun = begun or self._simulated(candidate.split)
        if self.runtime.any_order and begun.split not in self.scheduled:
            self._scheduled(begun)
        if reason := without_kernels(self.budget):
            self._skip(candidate, begun.step_ms, reason)
            return
        self.tell(f"tuning {candidate.split.words()}")
        left = min(seconds - (self.budget.used() - began), self.budget.left(ops_of(begun)))
        better, why_not, _ = tune_candidate(
            self.pricer, begun, left, self.seed, self.runtime, self.recompute, self.budget
        )
        if better is not None:
            self.tuned.append(better)
        elif why_not:
            self._skip(candidate, begun.step_ms, why_not)

    def _skip(self, candidate: Candidate, now_ms: float, why: str) -> None:
        gain = 100 * (min(now_ms, self.best_ms) / candidate.tuned_ms - 1.0)
        may = f" More time could gain up to {gain:.0f} % (estimate)." if gain >= 1.0 else ""
        self.skipped.append(f"{candidate.split.words()} was not tuned: {why}.{may}")

    def _unjudged(self, best: Candidate) -> list[str]:
        """Return a sentence about the splits that were not evaluated for lack of time, and how much faster one of them
        could be according to their bounds, which hold for every order of the ops; empty if all were evaluated."""
        if self.left_ms is None:
            return []
        if not self.left_ms:
            words = (
                f"Only {self.judged} of {len(self.every)} splits were evaluated in time, and some of the others have"
            )
            return [f"{words} not even a bound. A longer --budget evaluates more of them."]
        most = best.step_ms / self.left_ms - 1.0
        gain = f"is more than {100 * most:.0f} % faster than this answer" if most > 0 else "is faster than this answer"
        return [
            f"Only {self.judged} of {len(self.every)} splits were evaluated in time; according to their bounds, none "
            f"of the others {gain}. A longer --budget evaluates more of them."
        ]

    @property
    def best_ms(self) -> float:
        return min((c.step_ms for c in (*self.simulated, *self.tuned) if c.fits), default=math.inf)

    def _known(self, split: Split) -> Candidate | None:
        return next((c for c in self.simulated if c.split == split), None)

    def _affords(self, candidate: Candidate) -> bool:
        """Whether there is enough time left to simulate the split."""
        s = candidate.split
        ops = 2 * s.pp * s.vp * (self.pricer.global_batch // (s.dp * s.micro_batch_size))
        return self.budget.simulating_s(2 * ops) < self.budget.left()

    def _simulated(self, split: Split) -> Candidate:
        began = self.budget.used()
        found = self.pricer.simulated(split, self.recompute)
        self.budget.simulated(ops_of(found), self.budget.used() - began)
        self.simulated.append(found)
        return found

    def today(self, sizes: Mapping[str, int]) -> Candidate:
        return split_of_today(self.pricer, self.gpus, sizes, self.recompute, self.runtime)

    def result(self, present: Candidate | None, margin: float) -> Found:
        interrupted = self.budget.stop()
        fitting = sorted((c for c in self.simulated if c.fits), key=lambda c: c.step_ms)
        if self.runtime.name == "any":
            # Drop splits that no runtime can run.
            fitting = [c for c in fitting if runs_on(c, self.spec)]
            self.tuned = [c for c in self.tuned if runs_on(c, self.spec)]
        # Today's split may be the answer only if it has the fixed sizes and the runtime runs it.
        unrun_today = "" if present is None else refuses_today(present, self.runtime)
        asked = present is not None and all(getattr(present.split, k) == v for k, v in self.fixed.items())
        asked = asked and not unrun_today
        rivals = [*fitting, *self.tuned, *([present] if asked and present is not None and present.fits else [])]
        if not rivals and interrupted:
            raise StoppedError("the search was stopped before it found a split that fits; give it more time")
        if not rivals and (fit := [c for c in self.simulated if c.fits]):
            raise OctoPipeError(unrun(min(fit, key=lambda c: c.step_ms), self.spec))
        if not rivals:
            least = min(self.simulated, key=lambda c: c.peak_gib - c.limit_gib)
            raise DoesNotFitError(unfit(self.pricer, least, self.modes))
        fastest = min(rivals, key=lambda c: c.step_ms)
        best = simplest(rivals, margin, present if asked else None)
        done = {c.split for c in self.simulated}
        rest = [c for c in self.kept if c.split not in done]
        # Splits that were only estimated come after the simulated ones.
        ranked = sorted(
            [*self.tuned, *self.simulated, *rest],
            key=lambda c: (c is not best, not c.fits, c.how == "estimated", c.step_ms),
        )
        return Found(
            best=best,
            ranked=tuple(ranked),
            today=present,
            unrun_today=unrun_today,
            splits=len(self.every),
            judged=self.judged,
            cut_short=self.left_ms is not None,
            seconds=self.budget.used(),
            skipped=(*self._unjudged(best), *self.skipped),
            margin=margin,
            fastest=fastest if fastest is not best else None,
            interrupted=interrupted,
        )

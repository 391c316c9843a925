"""What every part of the reproduction uses: options, costs under a reading of the paper, baselines, stored searches.

Knows: how a search is limited to a number of moves and of lanes, so that its result is the same on every machine, and
that a plan found once for the same costs, options and code need not be searched again. Does not know: any table of the
paper.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

import octopipe
from octopipe.base.errors import OctoPipeError
from octopipe.base.files import write_whole
from octopipe.costs.measured import AUTHORS
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.search.algorithm1 import PHASES, IterativeSearch, RandomSearch
from octopipe.search.algorithm1.settings import Settings
from octopipe.search.result import Found
from octopipe.search.tuner import tune
from octopipe.search.tuner.search import Search
from octopipe.simulation.bounds.bounds import lower_bound
from octopipe.simulation.lowering import Channel
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline
from octopipe.views.reproduce.models import GPU, costs_in_words, model_costs, spec_of
from octopipe.views.reproduce.overlap import overlapping_more
from octopipe.views.reproduce.reading import (
    BASELINES,
    LINK_GB_PER_S,
    Head,
    Reading,
    baseline,
    read,
    reading_of,
    whole_plan,
    with_backward,
)
from octopipe.views.reproduce.store import ResultStore

PROFILES_VARIABLE = "OCTOPIPE_PROFILES"
ROOT = Path(octopipe.__file__).resolve().parents[1]
MEASURED = ROOT / "benchmarks" / "results" / "h200-copy-engine-2026-11-15.jsonl"
WITHOUT_END = Settings(patience=1 << 30)
"""Settings with which Algorithm 1 makes all its iterations, as the paper's does until its time is over."""
FOREVER_S = 86400.0


def _never(_: CostTable, __: str) -> bool:
    return False


def _nowhere(_: str) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options that may change a number of the reproduction."""

    profiles: Path | None = None
    """The folder of the authors' layer times; None: analytic costs."""
    measured: Path | None = None
    """A file of runs measured on a device, one JSON object per line; None if there is none."""
    iterations: int = 6000
    """Moves per lane of our search."""
    rounds: int = 100
    """Iterations of Algorithm 1; the figure of the search process takes three times as many, the paper's 300."""
    seed: int = 0

    def digest(self) -> str:
        """Return a digest of the options and of the contents of the files they name."""
        h = hashlib.sha256(f"{self.iterations} {self.rounds} {self.seed} {GPU}".encode())
        for path in (self.profiles, self.measured):
            for file in _files(path):
                h.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
            h.update(b"|")
        return h.hexdigest()[:16]


def _files(path: Path | None) -> list[Path]:
    if path is None:
        return []
    return sorted(path.glob("*.json")) if path.is_dir() else [path]


ELSEWHERE = (
    *("runtime", "cli", "views/report", "search/planner"),
    *("huggingface", "torch_engine", "torchtitan.py", "megatron"),
)
"""Packages and modules whose code affects no number of the reproduction."""


SEARCHING = ("costs", "models", "plans", "simulation", "search/systems", "search/result.py", "search/restricted.py")
"""Packages and modules that determine the result of any search, besides those of the search method itself."""
ROOM_OF = {
    "algorithm1": "search/algorithm1",
    "random": "search/algorithm1",
    "exact": "search/exact",
    "overlap": "views/reproduce/overlap.py",
}


@cache
def code_digest(method: str | None = None) -> str:
    """Return a digest of the package's sources, because other code may give other numbers. With a method: of the
    sources that determine what that search method finds."""
    h = hashlib.sha256()
    folder = Path(octopipe.__file__).resolve().parent
    inside = None if method is None else (*SEARCHING, ROOM_OF.get(method, "search/tuner"))
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(folder).as_posix()
        rooms = ELSEWHERE if inside is None else inside
        if any(name == room or name.startswith(f"{room}/") for room in rooms) == (inside is not None):
            h.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return h.hexdigest()[:16]


def find_profiles(given: str | None) -> Path | None:
    """Return the folder of layer times: the given one ("none": no folder), the environment's, or the package's own."""
    named = given if given is not None else os.environ.get(PROFILES_VARIABLE) or None
    if named == "none":
        return None
    if named is None:
        return AUTHORS
    folder = Path(named)
    if not folder.is_dir() or not any(folder.glob("*.json")):
        raise OctoPipeError(f"{named}: no folder of layer-times files; give one, or --profiles none")
    return folder


def find_measured(given: str | None) -> Path | None:
    """Return the file of measured runs: the given one, else the one in the source repository if it exists."""
    if given is None:
        return MEASURED if MEASURED.is_file() else None
    if not Path(given).is_file():
        raise OctoPipeError(f"{given}: no such file of measured runs; give what benchmarks/bench_gpu.py wrote")
    return Path(given)


Tuner = Literal["algorithm1", "search"]
TUNERS: tuple[Tuner, Tuner] = ("algorithm1", "search")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Step times of every system on one model and setting, under one reading of the head."""

    steps: dict[str, float]
    """Step times in ms of the four baselines, "algorithm1" and "search"."""
    bound_ms: float
    """A lower bound on the step time of plans without copies and without recomputation beyond that in the costs."""

    def over(self, name: str, tuner: str = "algorithm1") -> float:
        """Return the speed-up of a tuner's plan over a system."""
        return self.steps[name] / self.steps[tuner]

    def gap(self, name: str) -> float:
        """Return the distance from the bound, as a share of the step time."""
        return 1.0 - self.bound_ms / self.steps[name]


@dataclass(slots=True, kw_only=True)
class Bench:
    """Costs, baselines and searches of one reproduction, each computed once."""

    options: Options
    store: ResultStore = field(default_factory=ResultStore)
    fresh: bool = False
    """Whether to run every search again, even if its plan is stored, and to store the new plan."""
    searches: bool = True
    """Whether a plan that is not stored may be searched."""
    say: Callable[[str], None] = _nowhere
    """Called with a text about the current work."""
    steps: dict[str, Timeline] = field(default_factory=dict)
    cells: dict[str, Cell] = field(default_factory=dict)
    noisy: dict[str, dict[str, float]] = field(default_factory=dict)
    """Step times under noise (noise.py), by setting."""
    search_again: Callable[[CostTable, str], bool] = _never
    """(costs, method) -> whether a search must run and find the stored plan again."""
    asked: set[str] = field(default_factory=set)
    """Keys of all plans that rows were made from."""
    made: set[str] = field(default_factory=set)
    """Keys of the plans that this bench has searched."""

    @property
    def reading(self) -> Reading:
        return reading_of("published" if self.options.profiles is not None else None)

    @property
    def heads(self) -> tuple[Head, ...]:
        """The readings of the head's time; analytic costs already include the loss, so they have only one."""
        return ("published", "fitted") if self.options.profiles is not None else ("published",)

    @property
    def costs_in_words(self) -> str:
        return costs_in_words(self.options.profiles)

    def is_measured(self, model: str) -> bool:
        return self.options.profiles is not None and (self.options.profiles / f"{model}.json").exists()

    def costs(
        self,
        model: str,
        pp: int,
        micro_batches: int,
        *,
        tp: int = 8,
        dp: int = 1,
        recompute: bool = False,
        head: Head = "published",
        reading: Reading | None = None,
        authors: bool | None = None,
        gb_per_s: float = LINK_GB_PER_S,
    ) -> CostTable:
        """Return a model's costs under a reading of the head, or any other reading."""
        table = model_costs(
            model,
            self.options.profiles,
            pp=pp,
            micro_batches=micro_batches,
            tp=tp,
            dp=dp,
            recompute=recompute,
            authors=authors,
        )
        if authors is False or not self.is_measured(model):
            return table
        hidden = spec_of(model, authors=True).hidden
        return read(table, reading or reading_of(head, model), hidden=hidden, tp=tp, gb_per_s=gb_per_s)

    def baseline(
        self, name: str, costs: CostTable, ranks: int, micro_batches: int, *, reading: Reading | None = None
    ) -> Timeline:
        """Return the timeline of a baseline; each is simulated only once."""
        used = reading or self.reading
        key = f"{name} {costs.digest()} {ranks} {micro_batches} {used.without_head}"
        if key not in self.steps:
            self.steps[key] = baseline(name, costs, ranks, micro_batches, used)
        return self.steps[key]

    def one_f_one_b(self, costs: CostTable, ranks: int, micro_batches: int) -> Plan:
        """Return the plan that Algorithm 1 starts from, as in the paper."""
        return with_backward(whole_plan("1f1b", costs, ranks, micro_batches), costs, self.reading.backward)

    def plan(self, tuner: Tuner, costs: CostTable, ranks: int, micro_batches: int) -> Plan:
        """Return a tuner's plan: each layer on one rank, nothing recomputed, as in the paper."""
        if tuner == "algorithm1":
            return self.iterated(costs, ranks, micro_batches, iterations=self.options.rounds)
        return self.searched(costs, ranks, micro_batches)

    def cell(
        self,
        model: str,
        ranks: int,
        micro_batches: int,
        head: Head,
        *,
        dp: int = 1,
        recompute: bool = False,
    ) -> Cell:
        """Return step times of the six systems. Plans are tuned for one replica and timed with `dp` replicas."""
        key = f"{model} {ranks} {micro_batches} {head} {dp} {recompute}"
        if key not in self.cells:
            tuned_on = self.costs(model, ranks, micro_batches, head=head, recompute=recompute)
            costs = tuned_on if dp == 1 else self.costs(model, ranks, micro_batches, head=head, dp=dp)
            steps = {name: self.baseline(name, costs, ranks, micro_batches).step_ms for name in BASELINES}
            for tuner in TUNERS:
                steps[tuner] = self.step(self.plan(tuner, tuned_on, ranks, micro_batches), costs).step_ms
            bound = lower_bound(costs, ranks, micro_batches, False, False).ms
            self.cells[key] = Cell(steps=steps, bound_ms=bound)
        return self.cells[key]

    # -- searches --------------------------------------------------------------------------------------

    def searched(
        self, costs: CostTable, ranks: int, micro_batches: int, *, exact: bool = False, robust: bool = False
    ) -> Plan:
        """Run our default search with a fixed number of moves per lane; `exact`: CP-SAT until it proves the optimum."""
        method = "exact" if exact else "robust" if robust else "best"
        moves = EXACT_CONFLICTS if exact else self.options.iterations

        def search() -> tuple[Plan, dict[str, object]]:
            if not exact and not robust:
                # Skips the last step of `tune`, which hides transfers behind computation if that costs nothing.
                plain = Search(
                    costs,
                    ranks,
                    micro_batches,
                    budget_s=FOREVER_S,
                    seed=self.options.seed,
                    iterations=moves,
                    recompute=False,
                    copies=False,
                ).run()
                if plain.interrupted:
                    raise KeyboardInterrupt  # an interrupted search has made fewer moves
                return plain.plan, {}
            result = tune(
                costs,
                ranks,
                micro_batches,
                budget_s=FOREVER_S,
                seed=self.options.seed,
                method="exact" if exact else "best",
                iterations=moves,
                recompute=False,
                copies=False,
                robust=robust,
            )
            if result.interrupted:
                raise KeyboardInterrupt
            return result.plan, {"optimal": result.optimal}

        return self._kept((method, moves, self.options.seed), costs, ranks, micro_batches, search)

    def iterated(
        self,
        costs: CostTable,
        ranks: int,
        micro_batches: int,
        *,
        iterations: int,
        phases: Sequence[str] = PHASES,
        start: Plan | None = None,
        seed: int | None = None,
        by_lot: bool = False,
        kind: type[IterativeSearch] | None = None,
    ) -> Plan:
        """Run Algorithm 1 from 1F1B, random search over the same moves, or another rule; `plan.extra` has the log."""
        seed = self.options.seed if seed is None else seed
        begin = start or self.one_f_one_b(costs, ranks, micro_batches)
        method = "random" if by_lot else "algorithm1"
        question: tuple[object, ...] = (method, iterations, tuple(phases), seed, _digest(begin))
        if kind is not None:
            question = (*question, kind.__name__)

        def search() -> tuple[Plan, dict[str, object]]:
            rule = kind or (RandomSearch if by_lot else IterativeSearch)
            found: Found = rule(
                costs,
                ranks,
                micro_batches,
                budget_s=FOREVER_S,
                seed=seed,
                iterations=iterations,
                start=begin,
                recompute=False,
                phases=phases,
                settings=WITHOUT_END,
            ).run()
            if found.interrupted:
                raise KeyboardInterrupt
            log = [[s.phase, round(s.best_ms, 6)] for s in found.log]
            return found.plan, {"search_log": log, "phase_iterations": dict(found.phase_iterations)}

        return self._kept(question, costs, ranks, micro_batches, search)

    def overlapping(self, plan: Plan, costs: CostTable, *, moves: int, slack: float) -> Plan:
        """Return the plan after a walk to more overlap of transfers, at a step longer by at most `slack`."""

        def search() -> tuple[Plan, dict[str, object]]:
            return overlapping_more(plan, costs, moves=moves, slack=slack, seed=self.options.seed), {}

        question = ("overlap", moves, slack, self.options.seed, _digest(plan))
        return self._kept(question, costs, plan.num_ranks, plan.num_micro_batches, search)

    def _kept(
        self,
        question: tuple[object, ...],
        costs: CostTable,
        ranks: int,
        micro_batches: int,
        search: Callable[[], tuple[Plan, dict[str, object]]],
    ) -> Plan:
        key = hashlib.sha256(repr((costs_key(costs), ranks, micro_batches, *question)).encode()).hexdigest()[:24]
        self.asked.add(key)
        code = code_digest(str(question[0]))
        kept = self.store.get(key, code)
        again = (self.fresh or self.search_again(costs, str(question[0]))) and key not in self.made
        if kept is not None and not again:
            return kept
        self.made.add(key)
        if again and kept is not None and not self.fresh:
            plan, log = search()
            if (plan.stages, plan.orders) != (kept.stages, kept.orders):
                raise OctoPipeError(
                    f"{costs.model}, pp {ranks}, {question[0]}: today's search finds another plan than the page's; run "
                    "make reproduce"
                )
            return kept
        if not self.searches:
            raise OctoPipeError(
                f"{costs.model}, pp {ranks}, {micro_batches} micro-batches, {question[0]}: no plan is kept: the page "
                "is not of this code; run make reproduce"
            )
        self.say(f"{question[0]}: {costs.model}, pp {ranks}, {micro_batches} micro-batches")
        plan, log = search()
        return self.store.put(key, code, plan, log)

    def step(self, plan: Plan, costs: CostTable, *, channel: Channel = "directed", label: str = "OctoPipe") -> Timeline:
        return simulate(plan, costs, channel=channel, label=label, check=False)


EXACT_CONFLICTS = 4000
"""Limit of CP-SAT's conflicts on the two-stage example; about 50 are enough for the proof."""


def costs_key(costs: CostTable) -> str:
    """Return a digest of everything in the costs that determines a search, with numbers to nine digits.

    The last bits of a sum depend on the order of its terms and on the machine's libraries, and must not change the key.
    """
    h = hashlib.sha256()
    for f in fields(costs):
        value = getattr(costs, f.name)
        if f.name in ("setup", "model_flops", "mode", "host_link") or value is None or np.size(value) == 0:
            continue
        shown = " ".join(f"{x:.8e}" for x in value.ravel()) if isinstance(value, np.ndarray) else repr(value)
        h.update(f"{f.name} {shown};".encode())
    return h.hexdigest()[:16]


def _digest(plan: Plan) -> str:
    """Return a digest of a plan's decisions. Default values of stages are left out, so that a field that is added to
    stages later does not change it."""
    stages = [{f.name: v for f in fields(s) if (v := getattr(s, f.name)) != f.default} for s in plan.stages]
    orders = [[(op.stage, op.kind, op.micro_batch) for op in order] for order in plan.orders]
    return hashlib.sha256(repr((stages, orders)).encode()).hexdigest()[:24]


def write_json(path: Path, value: object) -> None:
    write_whole(path, (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode())

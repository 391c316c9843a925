"""What every part of the reproduction works with: options, costs under the reading, baselines, searches kept on disk.

Knows: how a search is counted in moves and given a fixed number of lanes, so that its result is the same on every
machine, and that a plan found once for the same costs, options and code need not be searched again. Does not know: any
table of the paper.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import octopipe
from octopipe.base.errors import OctoPipeError
from octopipe.base.files import write_whole
from octopipe.costs.measured import AUTHORS
from octopipe.costs.table import CostTable
from octopipe.plans.file import load_plan, save_plan
from octopipe.plans.plan import Plan
from octopipe.search.tuner import PHASES, Method, tune
from octopipe.simulation.bounds.bounds import lower_bound
from octopipe.simulation.lowering import Channel
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline
from octopipe.views.reproduce.models import GPU, costs_in_words, model_costs, spec_of
from octopipe.views.reproduce.reading import LINK_GB_PER_S, Reading, baseline, read, reading_of

PROFILES_VARIABLE = "OCTOPIPE_PROFILES"
ROOT = Path(octopipe.__file__).resolve().parents[1]
MEASURED = ROOT / "benchmarks" / "results" / "h200-copy-engine-2026-11-15.jsonl"
LANES = 2
"""Threads of a search. Fixed: what lanes tell each other is part of the result."""
FOREVER_S = 86400.0


def _nowhere(_: str) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything that may change a number of the reproduction."""

    profiles: Path | None = None
    """Folder of the authors' layer times; None: analytic costs."""
    measured: Path | None = None
    """Runs measured on a device, one JSON object a line; None: there are none."""
    iterations: int = 12000
    """Moves per lane of a search."""
    rounds: int = 100
    """Iterations of Algorithm 1 in the ablation; the search process takes three times as many."""
    seed: int = 0

    def digest(self) -> str:
        """Of the options and of the contents of the files they name."""
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
"""Rooms whose code makes no number of the reproduction."""


@cache
def code_digest(*, without: str = "") -> str:
    """Of the package's sources: a number made by other code is another number. `without`: a room left out."""
    h = hashlib.sha256()
    folder = Path(octopipe.__file__).resolve().parent
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(folder).as_posix()
        if not any(name == room or name.startswith(f"{room}/") for room in (*ELSEWHERE, without) if room):
            h.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return h.hexdigest()[:16]


def find_profiles(given: str | None) -> Path | None:
    """The folder of layer times: what was given ("none": none at all), the environment's, or the package's own."""
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
    """The file of measured runs: what was given, else the one kept beside the package's sources, if it is there."""
    if given is None:
        return MEASURED if MEASURED.is_file() else None
    if not Path(given).is_file():
        raise OctoPipeError(f"{given}: no such file of measured runs; give what benchmarks/bench_gpu.py wrote")
    return Path(given)


@dataclass(slots=True, kw_only=True)
class Bench:
    """Costs, baselines and searches of one reproduction, each made once."""

    options: Options
    shelf: Path | None = None
    """Folder of plans that were found already; None: nothing is kept."""
    fresh: bool = False
    """Search again what stands on the shelf, and put it there."""
    say: Callable[[str], None] = _nowhere
    """Told what is being worked on."""
    steps: dict[str, Timeline] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)

    @property
    def reading(self) -> Reading:
        return reading_of(self.options.profiles is not None)

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
        reading: Reading | None = None,
        authors: bool | None = None,
        gb_per_s: float = LINK_GB_PER_S,
    ) -> CostTable:
        """A model's costs under the reading (of the paper's runs, or of analytic costs)."""
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
        return read(table, reading or reading_of(True, model), hidden=hidden, tp=tp, gb_per_s=gb_per_s)

    def baseline(
        self, name: str, costs: CostTable, ranks: int, micro_batches: int, *, reading: Reading | None = None
    ) -> Timeline:
        """A baseline's step; the same one is predicted once."""
        used = reading or self.reading
        key = f"{name} {costs.digest()} {ranks} {micro_batches} {used}"
        if key not in self.steps:
            self.steps[key] = baseline(name, costs, ranks, micro_batches, used)
        return self.steps[key]

    def tuned(self, costs: CostTable, ranks: int, micro_batches: int) -> Plan:
        """The plan the default search finds: each layer on one rank, nothing recomputed, as in the paper."""
        return self.searched(costs, ranks, micro_batches, iterations=self.options.iterations)

    def searched(
        self,
        costs: CostTable,
        ranks: int,
        micro_batches: int,
        *,
        iterations: int,
        method: Method = "best",
        phases: Sequence[str] = PHASES,
        start: Plan | None = None,
        seed: int | None = None,
    ) -> Plan:
        """A search of so many moves; found once it is read from disk. `plan.extra` has its log."""
        seed = self.options.seed if seed is None else seed
        begin = "" if start is None else hashlib.sha256(repr((start.stages, start.orders)).encode()).hexdigest()
        parts = (
            costs.digest(),
            ranks,
            micro_batches,
            iterations,
            method,
            tuple(phases),
            begin,
            seed,
            LANES,
            code_digest(without="views/reproduce"),
        )
        key = hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
        if key in self.plans:
            return self.plans[key]
        path = None if self.shelf is None else self.shelf / f"{key}.json"
        if path is not None and path.exists() and not self.fresh:
            self.plans[key] = load_plan(path)
            return self.plans[key]
        self.say(f"searching {costs.model}, pp {ranks}, {micro_batches} micro-batches")
        found = tune(
            costs,
            ranks,
            micro_batches,
            budget_s=FOREVER_S,
            seed=seed,
            method=method,
            start=start,
            workers=LANES,
            iterations=iterations,
            recompute=False,
            copies=False,
            phases=phases,
        )
        if found.interrupted:
            # A search that somebody cut short is not the search of so many moves: nothing of it is kept.
            raise KeyboardInterrupt
        log = [[s.phase, s.best_ms] for s in found.log]
        extra = {"system": "octopipe", "search_log": log, "phase_iterations": dict(found.phase_iterations)}
        plan = replace(found.plan, extra=extra)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_plan(plan, path)
        self.plans[key] = plan
        return plan

    def most(self, costs: CostTable, ranks: int, micro_batches: int) -> float:
        """The largest speed-up over 1F1B that any plan can have which holds each layer once and recomputes nothing."""
        bound = lower_bound(costs, ranks, micro_batches, False, False)
        return self.baseline("1f1b", costs, ranks, micro_batches).step_ms / bound.ms

    def step(self, plan: Plan, costs: CostTable, *, channel: Channel = "directed", label: str = "OctoPipe") -> Timeline:
        return simulate(plan, costs, channel=channel, label=label)


def write_json(path: Path, value: object) -> None:
    write_whole(path, (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode())

"""What every setting of the default search is worth: cases again with one setting changed at a time.

    python benchmarks/bench_settings.py --moves 10000 --seeds 0,1 --json settings.jsonl            # every setting
    python benchmarks/bench_settings.py --variants members=1,near=1.08 --cases random --json settings.jsonl
    python benchmarks/bench_settings.py --read settings.jsonl                                      # the table again
    python benchmarks/bench_settings.py --read after.jsonl --before before.jsonl                   # two versions
    python benchmarks/bench_settings.py --read settings.jsonl --page > docs/settings.md            # the page

A search with a fixed number of moves depends on its seed alone, so the same cases and seeds are compared pair by pair,
and the machine's load does not matter. Published systems are left out: their plans would hide what the search finds.
The tables say by how many points of the gap to the bound the changed search is worse (positive) or better (negative),
with the standard error over the pairs, and in how many of the pairs it was worse and better.

`--cases`: `gaps` (the 14 cases of bench_tune.py), `random` (40 random models, clusters and memory limits), `all`, or
names. Every variant runs in a process of its own, because kernels take their settings as constants when they are
compiled. Runs that are in the file already are not repeated.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import subprocess
import sys
import time
from dataclasses import fields, replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from one_line import known, place_for, start

if TYPE_CHECKING:
    from octopipe.costs.table import CostTable

AS_IT_IS = "as it is"
NUM_RANDOM = 40
GIB = float(1 << 30)
SPECIAL = ("special", "copies_hot", "jitter")
"""Settings of searches that are not measured here: pairs, a cut head, host memory, copies of layers, jitter."""
OFF: dict[str, Any] = {
    "keys.rarely": 0.0, "keys.look": 0.0, "keys.w_over": 0.0, "sometimes": 0.0, "polish": 0.0, "meetings": 1,
    "kinds": ("loop",), "small": (0.0,), "again": 0.0, "kept": 1, "keys_near": 0, "even": (0.0,), "fresh": 0.0,
    "most_varied": 1, "populations": (1, 1), "members": 1, "temperatures": 1, "cool": 1.0, "few_ops": 1,
    "key_population": 4, "tries": 1, "rejudged": 1, "near": 1.0, "mean_weight": 0.0, "any_pace": 0.0, "room": 1.0,
    "other_moves": 0.0, "longest_run": 1, "relief": 0.0, "repair_moves": 0, "balance_moves": 0, "little": 0.0,
    "migrating": 0.0, "reordering": 0.0, "first_rounds": (1,), "rounds": (2.0,),
}  # fmt: skip
"""The value with which a setting has no effect. Settings without such a value are halved instead."""
DOUBLED: dict[str, Any] = {
    "rounds": (2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0), "kinds": ("turn",), "small": (0.6,), "again": 1.0,
    "near": 1.08, "room": 0.4, "populations": (2, 2), "first_rounds": (2, 4, 6), "reordering": 1.0,
}  # fmt: skip
"""The value that stands for twice as much, where that is not the product by two."""


# -- cases -------------------------------------------------------------------------------------------------


def random_case(number: int) -> tuple[CostTable, int, int]:
    """A model of two to four kinds of layers in a random pattern with a heavy head, on 2 to 16 ranks, with 1 to 3
    micro-batches per rank and a memory limit between tight and loose."""
    from octopipe.costs.cluster.hardware import Link, Network
    from octopipe.costs.table import CostTable

    lot = np.random.default_rng((27, number))
    ranks = int(lot.choice((2, 3, 4, 6, 8, 8, 12, 16)))
    micro_batches = max(int(ranks * lot.choice((1.0, 1.5, 2.0, 3.0))), 4)
    layers, kinds = int(ranks * lot.uniform(3.0, 8.0)) + 2, int(lot.integers(2, 5))
    pattern = lot.integers(0, kinds, int(lot.integers(2, 9)))
    kind = np.resize(pattern, layers) if lot.random() < 0.7 else lot.integers(0, kinds, layers)
    # Powers of single numbers: where a processor has AVX-512, numpy's powers of arrays differ in the last digit.
    forward, back, weight, held = (
        np.array([low * (high / low) ** float(share) for share in lot.random(kinds)])
        for low, high in ((0.5, 6.0), (0.8, 1.6), (0.3, 1.1), (0.3, 2.0))
    )  # fmt: skip
    forward_ms = forward[kind]
    forward_ms[0], forward_ms[-1] = 0.1 * forward_ms.mean(), lot.uniform(1.0, 6.0) * forward_ms.mean()
    activation = held[kind] * GIB
    link = Link(latency_ms=float(lot.choice((0.0, 0.1, 0.4))), ms_per_byte=0.0)
    costs = CostTable(
        model=f"random-{number}",
        symbols="T" * layers,
        forward_ms=forward_ms,
        input_ms=forward_ms * back[kind],
        weight_ms=forward_ms * weight[kind],
        activation_bytes=activation,
        stash_bytes=activation * lot.uniform(0.2, 0.8),
        network=Network(intra=link, inter=link),
        rank_memory_bytes=(float(lot.choice((0.9, 1.0, 1.2, 1.5, 2.0))) * float(activation.sum()),),
    )
    return costs, ranks, micro_batches


def made_case(case: str) -> tuple[CostTable, int, int]:
    """Costs, ranks and micro-batches of a case."""
    from bench_tune import gap_cases, units

    if case.startswith("random-"):
        return random_case(int(case.removeprefix("random-")))
    name, ranks, micro_batches, p2p_ms, k, _ = gap_cases()[case]
    costs = units(name, ranks, p2p_ms)
    return costs.replace(rank_memory_bytes=(k * costs.num_layers * GIB,)), ranks, micro_batches


def named_cases(words: str) -> list[str]:
    from bench_tune import gap_cases

    groups = {"gaps": list(gap_cases()), "random": [f"random-{k}" for k in range(NUM_RANDOM)]}
    groups["all"] = groups["gaps"] + groups["random"]
    named = [word for word in words.split(",") if not re.fullmatch(r"random-[0-9]+", word)]  # there are more than 40
    known(named, [*groups, *groups["gaps"]], "case")
    return [case for word in words.split(",") for case in groups.get(word, [word])]


# -- variants ----------------------------------------------------------------------------------------------


def settings_module() -> ModuleType:
    """The module of settings without the package around it, which would read it before it is changed."""
    name = "octopipe.search.tuner.settings"
    path = Path(find_spec("octopipe").origin).parent / "search" / "tuner" / "settings.py"  # type: ignore
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def every_value(settings: Any) -> dict[str, Any]:
    """Every setting and its value; those of keys with the prefix `keys.`."""
    of_keys = {f"keys.{f.name}": getattr(settings.keys, f.name) for f in fields(settings.keys)}
    return of_keys | {f.name: getattr(settings, f.name) for f in fields(settings) if f.name != "keys"}


def scaled(value: Any, by: float) -> Any:
    if isinstance(value, tuple):
        return tuple(scaled(v, by) for v in value)
    return max(round(value * by), 1) if isinstance(value, int) else value * by


def every_variant(module: ModuleType, ways: str = "off,doubled") -> list[str]:
    """Every setting turned off (or halved where that means nothing), and doubled."""
    changed = []
    for name, value in every_value(module.SETTINGS).items():
        if name in SPECIAL:
            continue
        for way in ways.split(","):
            known, by = (OFF, 0.5) if way == "off" else (DOUBLED, 2.0)
            other = known[name] if name in known else scaled(value, by)
            if other != value:
                changed.append(f"{name}={json.dumps(other, separators=(';', ':'))}")
    return changed


def changes_of(variant: str) -> dict[str, Any]:
    """The settings that a variant changes: `name=value`, several of them joined by `+`, lists as [1;2]."""
    found: dict[str, Any] = {}
    for part in variant.split("+") if variant != AS_IT_IS else []:
        name, value = part.split("=")
        read = json.loads(value.replace(";", ","))
        found[name] = tuple(read) if isinstance(read, list) else read
    return found


def change_settings(module: ModuleType, changes: dict[str, Any]) -> None:
    of_keys = {name.removeprefix("keys."): value for name, value in changes.items() if name.startswith("keys.")}
    others = {name: value for name, value in changes.items() if not name.startswith("keys.")}
    module.SETTINGS = replace(module.SETTINGS, keys=replace(module.SETTINGS.keys, **of_keys), **others)  # type: ignore


def run_variant(variant: str, runs: list[tuple[str, int]], moves: int) -> None:
    """Print a line of JSON for every case and seed; settings are changed before the search is imported."""
    from octopipe.base import compile as kernels

    assert "octopipe.search.tuner" not in sys.modules, "the search was imported before its settings were changed"
    change_settings(settings_module(), changes_of(variant))
    # Notes of compiled kernels are found by the package's text, which does not say that settings were changed.
    kernels._Made._from_note = lambda self, note: False  # type: ignore[method-assign]
    kernels.keep = lambda name, content: None
    from octopipe.search.tuner import tune
    from octopipe.search.tuner.systems import Systems

    Systems.run = lambda self, inboxes: None  # type: ignore[method-assign]
    for case, seed in runs:
        began = time.process_time()
        costs, ranks, micro_batches = made_case(case)
        result = tune(
            costs, ranks, micro_batches, iterations=moves, seed=seed, workers=1, recompute=False, copies=False
        )
        row = {"group": variant, "case": case, "seed": seed, "moves": moves, "gap": round(100.0 * result.gap, 6)}
        print(json.dumps({**row, "cpu_s": round(time.process_time() - began, 2)}), flush=True)


def run_all(variants: list[str], cases: list[str], seeds: list[int], moves: int, path: Path) -> None:
    """Make the runs that are not in the file yet; all cases of a seed before the next seed."""
    for variant in variants:
        made = {(r["case"], r["seed"]) for r in read(path) if (r["group"], r["moves"]) == (variant, moves)}
        runs = [(case, seed) for seed in seeds for case in cases if (case, seed) not in made]
        if not runs:
            continue
        command = [sys.executable, __file__, "--one", variant, "--moves", str(moves), "--runs", json.dumps(runs)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, path.open("a") as file:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                file.flush()
        if process.returncode:
            sys.exit(f"{variant}: exit code {process.returncode}")


# -- tables ------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def differences(rows: list[dict[str, Any]], base: list[dict[str, Any]]) -> list[float]:
    """By how many points of gap runs are worse than those of the same case, seed and moves."""
    known = {(r["case"], r["seed"], r["moves"]): r["gap"] for r in base}
    latest = {(r["case"], r["seed"], r["moves"]): r["gap"] for r in rows}
    return [gap - known[key] for key, gap in latest.items() if key in known]


def error_of(pairs: list[float]) -> float:
    """The standard error of the mean."""
    return statistics.stdev(pairs) / len(pairs) ** 0.5


def worth(pairs: list[float]) -> str:
    """Mean difference and its standard error."""
    return f"{statistics.mean(pairs):+.2f} ± {error_of(pairs):.2f}" if len(pairs) > 1 else ""


def line_of(name: str, pairs: list[float]) -> str:
    worse, better = sum(d > 1e-6 for d in pairs), sum(d < -1e-6 for d in pairs)
    return f"| {name} | {len(pairs)} | {worth(pairs)} | {worse} : {better} |"


def table(rows: list[dict[str, Any]]) -> str:
    """Every variant against the search as it is, pair by pair."""
    base = [r for r in rows if r["group"] == AS_IT_IS]
    lines = ["| changed | pairs | worse by, points | worse : better |", "|---|--:|--:|--:|"]
    for group in dict.fromkeys(r["group"] for r in rows if r["group"] != AS_IT_IS):
        lines.append(line_of(group, differences([r for r in rows if r["group"] == group], base)))
    return "\n".join(lines)


def before_and_after(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """Two versions of the search on the same cases and seeds: a line for every case, and one for every budget."""
    before, after = ([r for r in rows if r["group"] == AS_IT_IS] for rows in (before, after))
    cases = {r["case"] for r in before} & {r["case"] for r in after}
    lines = ["| case | pairs | worse by, points | worse : better |", "|---|--:|--:|--:|"]
    for case in [case for case in dict.fromkeys(r["case"] for r in before) if case in cases]:
        lines.append(line_of(case, differences([r for r in after if r["case"] == case], before)))
    for moves in sorted({r["moves"] for r in after}):
        lines.append(line_of(f"all, {moves:,} moves", differences([r for r in after if r["moves"] == moves], before)))
    return "\n".join(lines)


# -- the page ----------------------------------------------------------------------------------------------

HEAD = """# The settings of the search

`octopipe tune` finds its plans with the {number} settings below (`octopipe/search/tuner/settings.py`). You do not have
to change any of them; they are listed so that you can see what each one does and what it is worth.

Every setting was changed alone, to a value with which it has no effect or, if there is none, to about half of it. Then
the search was run again on the same cases with the same seeds and number of moves, without the plans of published
systems. A positive number says by how many points of the gap to the proven bound the changed search is *worse*: +0.50
turns a gap of 3.0 % into 3.5 %. Each entry is the mean over pairs of runs, its standard error, and the number of pairs.
Searches have {moves} moves per lane unless the entry says otherwise.

**How far to trust these numbers.** The outcome of a single search depends on chance, and there are few pairs. A
difference smaller than two standard errors may be chance, and a standard error over three pairs is itself uncertain:
{clear} of the {measured} measured changes are worse by more than two standard errors. More pairs can be added to the
file at any time, since runs that are in it are not repeated. An entry of exactly 0.00 means that the setting played no
part in these runs: for example, a short search has only one member in its population. Settings of special searches
(pairs, a cut head, host memory, copies of layers, jitter) were not measured. A second population (`populations`) needs
more than 80,000 moves.

Made by `python benchmarks/bench_settings.py --read FILE --page`, where FILE is `{file}`.
"""


def sentences(path: Path) -> dict[str, str]:
    """The text behind every field of the records in a module; the fields of keys with their prefix."""
    found: dict[str, str] = {}
    tree = ast.parse(path.read_text())
    bodies = [("", tree.body)] + [
        ("keys." if node.name == "KeyRanges" else "", node.body) for node in tree.body if isinstance(node, ast.ClassDef)
    ]
    for prefix, body in bodies:
        for node, after in pairwise(body):
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(target, ast.Name) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found[prefix + target.id] = " ".join(str(after.value.value).split())
    return found


def shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return ", ".join(map(shown, value))
    return value if isinstance(value, str) else f"{value:g}"


def page(module: ModuleType, rows: list[dict[str, Any]], file: str) -> str:
    """The page about the settings: their values, what they do and what they are worth."""
    base = [r for r in rows if r["group"] == AS_IT_IS]
    usual = statistics.mode(r["moves"] for r in rows)
    texts, values = sentences(Path(str(module.__file__))), every_value(module.SETTINGS)
    worths: dict[str, list[str]] = {}
    measured = clear = 0
    for group, moves in dict.fromkeys((r["group"], r["moves"]) for r in rows if r["group"] != AS_IT_IS):
        name = group.split("=")[0]
        pairs = differences([r for r in rows if (r["group"], r["moves"]) == (group, moves)], base)
        measured += 1
        clear += statistics.mean(pairs) > 2.0 * error_of(pairs) > 0.0
        budget = "" if moves == usual else f" with {moves:,} moves"
        worths.setdefault(name, []).append(f"{shown(changes_of(group)[name])}{budget}: {worth(pairs)} ({len(pairs)})")
    lines = ["| setting | value | what it does | changed to: worse by, points (pairs) |", "|---|---|---|---|"]
    for name, value in values.items():
        lines.append(f"| `{name}` | {shown(value)} | {texts[name]} | {'; '.join(worths.get(name, ['not measured']))} |")
    head = HEAD.format(number=len(values), moves=f"{usual:,}", file=file, clear=clear, measured=measured)
    return head + "\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", help="settings as name=value (default: every setting; empty: none)")
    parser.add_argument("--ways", default="off,doubled", help="of changing every setting (default: off,doubled)")
    parser.add_argument("--cases", default="gaps")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--moves", type=int, default=10_000, help="per lane (default: 10000)")
    parser.add_argument("--json", default="settings.jsonl", help="runs are added to this file")
    parser.add_argument("--read", metavar="FILE", help="print the table of runs that were made")
    parser.add_argument("--before", metavar="FILE", help="compare with the runs of another version")
    parser.add_argument("--page", action="store_true", help="print docs/settings.md instead of the table")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--runs", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        run_variant(args.one, [(case, seed) for case, seed in json.loads(args.runs)], args.moves)
        return
    path = Path(args.read or args.json)
    if args.read is None:
        variants = every_variant(settings_module(), args.ways) if args.variants is None else args.variants.split(",")
        seeds = [int(s) for s in args.seeds.split(",")]
        place_for(path)
        run_all([AS_IT_IS, *filter(None, variants)], named_cases(args.cases), seeds, args.moves, path)
    rows = read(path)
    if args.page:
        print(page(settings_module(), rows, str(path)))
    else:
        print(before_and_after(read(Path(args.before)), rows) if args.before else table(rows))


if __name__ == "__main__":
    start(main)

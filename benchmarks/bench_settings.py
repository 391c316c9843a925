"""What every setting of the default search is worth: the gap cases again with one group of settings changed at a time.

    python benchmarks/bench_settings.py --moves 20000 --seeds 0,1 --groups focus,near --json settings.jsonl
    python benchmarks/bench_settings.py --read settings.jsonl

A search of a fixed number of moves depends on its seed alone, so the same cases and seeds are compared pair by pair,
and the machine's load does not matter. Published systems are left out: their plans would hide what the search finds.
The table says by how many points of the gap to the bound the changed search is worse (positive) or better, with the
standard error over cases and seeds, and how many of the pairs were worse and better. Groups are written as
`name=value` (one setting), or named in GROUPS.

Every variant runs in a process of its own, because kernels take their settings as constants when they are compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

AS_IT_IS = "as it is"
STRUCTURE_ALIKE = (
    *(
        (name, phase, 0.125)
        for name, phase in (
            ("migrate layers", "partition"), ("shift stages", "partition"), ("move stage", "placement"),
            ("exchange stages", "placement"), ("rotate stages", "placement"), ("exchange ranks", "placement"),
            ("split stage", "placement"), ("merge stages", "placement"),
        )
    ),
    ("recompute", "recompute", 0.0),
    ("micro-batch order", "schedule", 0.0),
)  # fmt: skip
ORDER_ALIKE = tuple(
    (name, phase, 1 / 7)
    for name, phase in (
        ("migrate layers", "partition"), ("shift stages", "partition"), ("move stage", "placement"),
        ("exchange stages", "placement"), ("swap ops", "schedule"), ("advance op", "schedule"),
        ("move op", "schedule"),
    )
)  # fmt: skip
"""All moves as often as each other."""
GROUPS: dict[str, dict[str, Any]] = {
    "keys-one-step": {
        "keys.slope_step": 0.2, "keys.reserve_step": 0.2, "keys.share_step": 0.2, "keys.little_step": 0.2,
        "keys.more_step": 0.2, "keys.look_step": 0.01,
    },
    "keys-rarely": {"keys.short_look": 1.0, "keys.look_off": 0.25, "keys.w_last_again": 0.25, "keys.no_bank": 0.75},
    "keys-flight": {
        "keys.free_rule": 0.5, "keys.same_rule": 1 / 3, "keys.share_rule": 2 / 3, "keys.more_from": 0.0,
        "keys.more_width": 3.0, "keys.same_from": -3.0,
    },
    "shapes-even": {
        "near_divide": 0.5, "near_way": 0.5, "near_size_step": 0.2, "small_most": 0.85, "back_skip": 0.5,
        "shapes_kept": 4, "keys_near": 4,
    },
    "balance-one": {
        "evenness": (4.0,), "tilts": (1.0,), "rising": 1.0, "balance_migrate": 0.5, "memory_weight": 1.0,
    },
    "moves-even": {"by_two": 0.5, "stay": 0.5, "stay_width": 2, "repair_run": 3},
    "moves-compound": {"compound": 0.25, "varied": 1.0},
    "structure-weights": {"STRUCTURE_MOVES": STRUCTURE_ALIKE},
    "order-weights": {"ORDER_MOVES": ORDER_ALIKE, "on_critical": 0.5, "trials": 0.5},
    "pace": {"slack": 0.01, "full_race": 0.0},
    "relief": {"relief_often": 0.0},
    "bred": {"bred_drawn": 200, "bred": 200, "polish_cells": 256, "draw_again": 0.08},
    "no-mean": {"mean_weight": 0.0},
    "no-room": {"room": 1.0},
        "no-repair": {"repair_moves": 0},
    "no-breeding": {"rejudged": 1, "tries": 1},
    "one-member": {"members": 1},
}  # fmt: skip
"""Groups of settings that are changed together; of `Settings`, or of `KeyRanges` with the prefix `keys.`."""
MERGED = (
    "keys-one-step", "keys-rarely", "keys-flight", "shapes-even", "balance-one", "moves-even", "moves-compound",
    "pace", "relief", "bred",
)  # fmt: skip
GROUPS = {"all-merged": {name: value for group in MERGED for name, value in GROUPS[group].items()}, **GROUPS}


def changes_of(group: str) -> dict[str, Any]:
    if group == AS_IT_IS:
        return {}
    if group in GROUPS:
        return GROUPS[group]
    return {name: json.loads(value) for name, value in (part.split("=") for part in group.split("+"))}


def loaded_alone(name: str) -> ModuleType:
    """A module without the package around it, which would read it before it is changed."""
    path = Path(find_spec("octopipe").origin).parent.joinpath(*name.split(".")[1:]).with_suffix(".py")  # type: ignore
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run_variant(group: str, cases: list[str], seeds: list[int], moves: int) -> None:
    """Print a line of JSON for every case and seed; settings are changed before the search is imported."""
    from octopipe.base import compile as kernels

    settings, changes = loaded_alone("octopipe.search.tuner.settings"), changes_of(group)
    of_keys = {name.removeprefix("keys."): value for name, value in changes.items() if name.startswith("keys.")}
    others = {name: value for name, value in changes.items() if not name.startswith("keys.") and name.islower()}
    assert "octopipe.search.tuner" not in sys.modules, "the search was imported before its settings were changed"
    keys = replace(settings.SETTINGS.keys, **of_keys)
    settings.SETTINGS = replace(settings.SETTINGS, keys=keys, **others)
    for name in changes.keys() - others.keys():
        if name.isupper():  # a table of moves
            setattr(settings, name, changes[name])
    # Notes of compiled kernels are found by the package's text, which does not say that settings were changed.
    kernels._Made._from_note = lambda self, note: False  # type: ignore[method-assign]
    kernels.keep = lambda name, code: None
    from bench_tune import GIB, gap_cases, units

    from octopipe.search.tuner import tune
    from octopipe.search.tuner.systems import Systems

    Systems.run = lambda self, inboxes: None  # type: ignore[method-assign]
    for case in cases:
        name, ranks, micro_batches, p2p_ms, k, _ = gap_cases()[case]
        costs = units(name, ranks, p2p_ms)
        costs = costs.replace(rank_memory_bytes=(k * costs.num_layers * GIB,))
        for seed in seeds:
            began = time.process_time()
            result = tune(
                costs, ranks, micro_batches, iterations=moves, seed=seed, workers=1, recompute=False, copies=False
            )
            row = {"group": group, "case": case, "seed": seed, "moves": moves, "gap": 100.0 * result.gap}
            print(json.dumps({**row, "cpu_s": round(time.process_time() - began, 2)}), flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Every group against the search as it is, pair by pair."""
    known = {(r["case"], r["seed"], r["moves"]): r["gap"] for r in rows if r["group"] == AS_IT_IS}
    lines = ["| group | pairs | worse by, points | standard error | worse : better |", "|---|--:|--:|--:|--:|"]
    for group in dict.fromkeys(r["group"] for r in rows if r["group"] != AS_IT_IS):
        pairs = [
            r["gap"] - known[key]
            for r in rows
            if r["group"] == group and (key := (r["case"], r["seed"], r["moves"])) in known
        ]
        if len(pairs) > 1:
            error = statistics.stdev(pairs) / len(pairs) ** 0.5
            worse, better = sum(d > 1e-6 for d in pairs), sum(d < -1e-6 for d in pairs)
            lines.append(
                f"| {group} | {len(pairs)} | {statistics.mean(pairs):+.3f} | {error:.3f} | {worse} : {better} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default=",".join(GROUPS), help="names, or settings as name=value (default: all)")
    parser.add_argument("--cases", help="(default: all gap cases)")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--moves", type=int, default=20_000, help="per lane (default: 20000)")
    parser.add_argument(
        "--json", default="settings.jsonl", help="runs are added to this file; those in it are not made"
    )
    parser.add_argument("--read", metavar="FILE", help="print the table of runs that were made")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant is not None:
        run_variant(args.variant, args.cases.split(","), [int(s) for s in args.seeds.split(",")], args.moves)
        return
    from bench_tune import gap_cases  # not before: it imports the search, and with it the settings

    args.cases = args.cases or ",".join(gap_cases())
    path = Path(args.read or args.json)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if args.read is None:
        for group in [AS_IT_IS, *(g for g in args.groups.split(",") if g)]:
            made = {(r["case"], r["seed"], r["moves"]) for r in rows if r["group"] == group}
            wanted = [(c, int(s), args.moves) for c in args.cases.split(",") for s in args.seeds.split(",")]
            cases = dict.fromkeys(case for case, seed, moves in wanted if (case, seed, moves) not in made)
            if not cases:
                continue
            same = ["--cases", ",".join(cases), "--seeds", args.seeds, "--moves", str(args.moves)]
            command = [sys.executable, __file__, "--variant", group, *same]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, path.open("a") as file:
                assert process.stdout is not None
                for line in process.stdout:
                    file.write(line)
                    file.flush()
                    rows.append(json.loads(line))
            if process.returncode:
                sys.exit(f"{group}: exit code {process.returncode}")
    print(table(rows))


if __name__ == "__main__":
    main()

"""Predicted against measured on CPU ranks: `python benchmarks/bench_cpu_validate.py [--nproc 2]`.

Profiles a small hybrid and a small LLaMA with all ranks at work, makes a plan per system and a tuned one, runs each
for real over gloo and compares. One thread per rank, each on a core of its own. The machine's speed drifts, so layers,
the rehearsal (GPipe, which is not among the plans) and one step of every plan are timed in turns, round after round;
medians over rounds are compared. Needs free cores, one per rank.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_gpu import SYSTEMS, models, tables
from one_line import place_for, start

from octopipe.runtime.measure.trial import STEADY_MEMORY
from octopipe.runtime.ranks.launch import by_rank, run_ranks

if TYPE_CHECKING:
    from octopipe.costs.profile import Profile
    from octopipe.plans.plan import Plan


def task(rank: int, nproc: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All models, on every rank."""
    import torch.distributed as dist

    from octopipe.runtime.measure.trial import Workload, fidelity, profile_workload, side_by_side
    from octopipe.runtime.ranks.world import World

    os.sched_setaffinity(0, {args.cores[rank % len(args.cores)]})
    world = World.make(None, None, None)
    rows = []
    for model, spec in models(small=True).items():
        work = Workload(spec=spec, tokens=args.tokens)
        profile = profile_workload(work, world, repeats=5, state_factor=0.0)
        for m in args.micro_batches:
            box: list[Any] = [plans(profile, nproc, m, args) if rank == 0 else None]
            dist.broadcast_object_list(box, src=0)
            fresh, trials = side_by_side(work, box[0], world, profile, rounds=args.rounds, warm_up=3)
            for name, trial in trials.items():
                found = fidelity(box[0][name], fresh, trial)
                row = {"model": model, "name": name, "micro_batches": m, "spread": trial.spread, **found.summary()}
                rows.append({**row, "steps_ms": trial.steps_ms, "gap_ms": fresh.op_overhead_ms})
                if rank == 0:
                    print(
                        f"{model} {m} {name}: measured {found.measured_ms:.1f} predicted {found.predicted_ms:.1f} "
                        f"({100 * found.step_error:+.1f} %; spread of steps {100 * trial.spread:.0f} %) "
                        f"kinds { ({k: round(100 * v, 1) for k, v in found.kind_error.items()}) }",
                        flush=True,
                    )
            if rank == 0:
                about = fresh.about
                print(f"{model}: rehearsal {about['rehearsal']}, gap {fresh.op_overhead_ms:.3f} ms", flush=True)
    return rows


def plans(profile: Profile, nproc: int, micro_batches: int, args: argparse.Namespace) -> dict[str, Plan]:
    from octopipe.base.errors import OctoPipeError
    from octopipe.search.systems import build_plan
    from octopipe.search.tuner import tune

    out = {}
    for name in SYSTEMS:
        try:
            out[name] = build_plan(name, profile.costs, nproc, micro_batches)
        except OctoPipeError as error:
            print(f"{micro_batches} {name}: {error}")
    tuned = tune(profile.costs, nproc, micro_batches, budget_s=args.tune_s, recompute=False, workers=1)
    return {**out, "tuned": tuned.plan}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--cores", default="", help="cores of the ranks, separated by commas (default: the first free)")
    parser.add_argument("--micro-batches", default="8")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tune-s", type=float, default=10.0)
    parser.add_argument("--out", default="out")
    args = parser.parse_args()
    args.micro_batches = [int(m) for m in args.micro_batches.split(",")]
    args.cores = [int(c) for c in args.cores.split(",") if c] or sorted(os.sched_getaffinity(0))
    told = place_for(Path(args.out, "cpu.json"))
    before = os.getloadavg()
    rows = run_ranks(by_rank(task), args.nproc, args, threads=1, environment=STEADY_MEMORY)[0]
    text = tables(rows)
    about = {"cores": os.cpu_count(), "used": args.cores, "load_before": before, "load_after": os.getloadavg()}
    told.write_text(json.dumps({**about, "rows": rows}, indent=1))
    told.with_suffix(".md").write_text(text)
    print(text, about)


if __name__ == "__main__":
    start(main)

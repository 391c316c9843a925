"""Predicted against measured on CPU ranks: `python benchmarks/bench_cpu_validate.py [--nproc 2]`.

Profiles a small hybrid with all ranks at work, makes a plan per system and a tuned one, runs each for real over
gloo and compares. Needs a machine whose cores are free: one core per rank at least, and nothing else running.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from bench_gpu import SYSTEMS, models, tables

from octopipe.runtime.ranks import run_ranks


def task(rank: int, nproc: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    import torch.distributed as dist

    from octopipe.errors import OctoPipeError
    from octopipe.runtime.trial import Workload, fidelity, profile_workload, run_plan
    from octopipe.runtime.world import World
    from octopipe.systems import build_plan
    from octopipe.tune import tune

    world = World.make(None, None, None)
    rows = []
    for model, spec in models(small=True).items():
        work = Workload(spec=spec, tokens=args.tokens)
        profile = profile_workload(work, world, repeats=args.repeats, state_factor=0.0)
        for m in args.micro_batches:
            for name in (*SYSTEMS, "tuned"):
                box: list[Any] = [None]
                if rank == 0:
                    try:
                        if name == "tuned":
                            box = [tune(profile.costs, nproc, m, budget_s=args.tune_s, recompute=False).plan]
                        else:
                            box = [build_plan(name, profile.costs, nproc, m)]
                    except OctoPipeError as error:
                        print(f"{model} {m} {name}: {error}")
                dist.broadcast_object_list(box, src=0)
                if box[0] is None:
                    continue
                trial = run_plan(work, box[0], world, profile, steps=args.steps)
                found = fidelity(box[0], profile, trial)
                row = {"model": model, "name": name, "micro_batches": m, "spread": trial.spread}
                rows.append({**row, **found.summary()})
                if rank == 0:
                    print(
                        f"{model} {m} {name}: measured {found.measured_ms:.1f} predicted {found.predicted_ms:.1f} "
                        f"({100 * found.step_error:+.1f} %), spread {100 * trial.spread:.1f} %",
                        flush=True,
                    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a rank")
    parser.add_argument("--micro-batches", default="8")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--tune-s", type=float, default=10.0)
    parser.add_argument("--out", default="out")
    args = parser.parse_args()
    args.micro_batches = [int(m) for m in args.micro_batches.split(",")]
    rows = run_ranks(task, args.nproc, args, threads=args.threads)[0]
    Path(args.out).mkdir(parents=True, exist_ok=True)
    text = tables(rows)
    Path(args.out, "cpu.json").write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=1))
    Path(args.out, "cpu.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

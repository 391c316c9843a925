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
    """Per plan, some rounds of: profile, run, profile; a machine's speed drifts, so the two profiles are averaged."""
    import torch.distributed as dist

    from octopipe.errors import OctoPipeError
    from octopipe.profile_file import Profile
    from octopipe.runtime.trial import Trial, Workload, fidelity, profile_workload, run_plan
    from octopipe.runtime.world import World
    from octopipe.systems import build_plan
    from octopipe.tune import tune

    world = World.make(None, None, None)
    rows = []

    def measured(work: Workload) -> Profile:
        return profile_workload(work, world, repeats=args.repeats, warm_up=1, state_factor=0.0)

    for model, spec in models(small=True).items():
        work = Workload(spec=spec, tokens=args.tokens)
        profile = measured(work)
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
                plan = box[0]
                if plan is None:
                    continue
                rounds: list[tuple[Profile, Trial]] = []
                for _ in range(args.rounds):
                    before = measured(work)
                    trial = run_plan(work, plan, world, before, steps=args.steps, warm_up=1)
                    profile = measured(work)
                    rounds.append((_mean(before, profile), trial))
                found = sorted((fidelity(plan, p, t) for p, t in rounds), key=lambda f: f.step_error)
                middle = found[len(found) // 2]
                spread = max(f.step_error for f in found) - min(f.step_error for f in found)
                rows.append({"model": model, "name": name, "micro_batches": m, "spread": spread, **middle.summary()})
                if rank == 0:
                    each = ", ".join(f"{100 * f.step_error:+.1f} %" for f in found)
                    print(
                        f"{model} {m} {name}: measured {middle.measured_ms:.1f} predicted {middle.predicted_ms:.1f} "
                        f"({100 * middle.step_error:+.1f} %; rounds {each})",
                        flush=True,
                    )
    return rows


def _mean(a: Any, b: Any) -> Any:
    """A profile with the mean times of two."""
    from octopipe.profile_file import Profile

    def mean(x: Any, y: Any) -> Any:
        names = ("forward_ms", "input_ms", "weight_ms")
        return x.replace(**{n: (getattr(x, n) + getattr(y, n)) / 2 for n in names})

    partial = {k: mean(table, b.partial[k]) for k, table in a.partial.items() if k in b.partial}
    return Profile(costs=mean(a.costs, b.costs), partial=partial, about=a.about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a rank")
    parser.add_argument("--micro-batches", default="8")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
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

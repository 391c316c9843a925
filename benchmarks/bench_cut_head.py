"""How much faster a model with a large vocabulary trains when its head is cut over the ranks.

    python benchmarks/bench_cut_head.py                       # the four models of the table in docs/benchmarks.md
    python benchmarks/bench_cut_head.py --models llama3-8b --budget 60 --seed 1

The layer times are the ones that the OctoPipe paper's authors measured on H800 GPUs; every transfer takes 0.3 ms, the
partial sums that shards exchange included; memory is 1.5 times what 1F1B needs; every layer is held once. Both plans
are tuned for the same time.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench_tune import units
from one_line import place_for, start

from octopipe.plans.file import save_plan
from octopipe.search.systems import build_plan
from octopipe.search.tuner import tune
from octopipe.simulation.simulator import simulate

MODELS = "nemotron-h-4b,nemotron-h-8b,nemotron-nano-v2-9b,llama3-8b"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for each of the two plans")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pp", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--memory", type=float, default=1.5, help="times what 1F1B needs")
    parser.add_argument("--p2p-ms", type=float, default=0.3)
    parser.add_argument("--keep", metavar="FOLDER", help="write the plans here")
    args = parser.parse_args()
    kept = place_for(Path(args.keep, "plan.json")).parent if args.keep else None
    sizes = args.pp, args.micro_batches
    print("| model | whole head ms | bound of those ms | cut head ms | shards | bound of those ms | faster |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name in args.models.split(","):
        free = units(name, args.pp, args.p2p_ms)
        need = simulate(build_plan("1f1b", free, *sizes), free).peak_bytes.max()
        costs = free.replace(rank_memory_bytes=(args.memory * need,))
        common = {"budget_s": args.budget, "seed": args.seed, "copies": False}
        whole = tune(costs, *sizes, **common)
        cut = tune(costs, *sizes, cut_head=True, **common)
        for result in (whole, cut):
            timeline = simulate(result.plan, costs)
            assert timeline.fits and abs(timeline.step_ms - result.step_ms) < 1e-6
        shards = len(cut.plan.shards().get(costs.num_layers - 1, ()))
        print(
            f"| {name} | {whole.step_ms:.1f} | {whole.lower_bound_ms:.1f} | {cut.step_ms:.1f} | {shards} | "
            f"{cut.lower_bound_ms:.1f} | {whole.step_ms / cut.step_ms:.3f}x |",
            flush=True,
        )
        if kept:
            for word, result in (("whole", whole), ("cut", cut)):
                save_plan(result.plan, kept / f"{name}-{word}.json")
                print(json.dumps({"plan": f"{name}-{word}.json", "step_ms": result.step_ms}), file=sys.stderr)


if __name__ == "__main__":
    start(main)

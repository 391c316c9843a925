"""How much of the experts' exchange plans hide, and what that is worth: large models, and random settings.

    python benchmarks/bench_pairs.py models [--budget 60] [--only deepseek-v3]
    python benchmarks/bench_pairs.py random [--budget 10] [--settings 20]

`models`: step time, tokens per GPU and second, share of the exchange behind computation and whether the plan fits, for
1F1B, ZB-V, Megatron's combined interleaved 1F1B, DualPipe, DualPipeV and the tuned plan. Costs are analytic; how tokens
are exchanged is what DeepSeek published for its own run: fp8 to the experts and bf16 back, a token on at most 4 nodes,
20 of 132 multiprocessors, and links at 0.9 of 50 GB/s (our choice).
DeepSeek-V3's published throughput is 14.8 T tokens in 2.664 M GPU hours: 1,543 tokens per GPU and second.

`random`: random models of which 10 to 60 % is exchange, tuned plan against every system, with the gap to the bound.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from octopipe.base.errors import OctoPipeError
from octopipe.costs.analytic.table import setup_costs
from octopipe.costs.analytic.traffic import Exchange
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.table import CostTable
from octopipe.models.zoo import preset
from octopipe.search.comparison import compare
from octopipe.search.systems import build_plan
from octopipe.search.tuner import tune
from octopipe.simulation.simulator import simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from moe_settings import moe_setting

SYSTEMS = ("1f1b", "zb-v", "interleaved-overlap", "dualpipe", "dualpipev")
EXCHANGE = Exchange(link_share=0.9, dispatch_bytes=1.03, most_nodes=4)
CASES = {
    # model: (pp, ep, dp, micro-batches, precision)
    "deepseek-v3": (16, 64, 128, 128, "fp8"),
    "kimi-k2": (16, 64, 64, 128, "fp8"),
    "glm-4.5": (8, 32, 32, 64, "bf16"),
    "qwen3-235b-a22b": (8, 32, 32, 64, "bf16"),
}


def model_costs(name: str) -> tuple[CostTable, int, int]:
    pp, ep, dp, count, precision = CASES[name]
    setup = Setup(
        gpu=gpu("h800"), tp=1, pp=pp, ep=ep, dp=dp, seq=4096, zero=1, precision=precision, recompute="selective"
    )
    return setup_costs(preset(name), setup, exchange=EXCHANGE), pp, count


def models(budget_s: float, only: str) -> None:
    print(
        "| model | pp x micro-batches | plan | step, ms | tokens/GPU/s | exchange hidden | peak, GiB | fits | over it |"
    )
    print("|---|---|---|--:|--:|--:|--:|---|--:|")
    for name in CASES if not only else [only]:
        costs, pp, count = model_costs(name)
        rows = []
        for system in SYSTEMS:
            try:
                rows.append((system, simulate(build_plan(system, costs, pp, count), costs)))
            except OctoPipeError as error:
                print(f"| {name} | {pp} x {count} | {system} | {error} |")
        found = tune(costs, pp, count, budget_s=budget_s)
        rows.append(("tuned", simulate(found.plan, costs)))
        for system, timeline in rows:
            rate = costs.throughput(pp, count, timeline.step_ms)["tokens_per_gpu_per_second"] or 0.0
            print(
                f"| {name} | {pp} x {count} | {system} | {timeline.step_ms:.0f} | {rate:.0f} "
                f"| {timeline.exchange.share:.3f} | {max(timeline.peak_gib):.0f} | {'yes' if timeline.fits else 'no'} "
                f"| {timeline.step_ms / rows[-1][1].step_ms:.3f} |",
                flush=True,
            )
        print(
            f"| {name} | {pp} x {count} | bound ({found.bound_name}) | {found.lower_bound_ms:.0f} | | | | | |",
            flush=True,
        )


def settings(budget_s: float, number: int) -> None:
    print(
        "| exchange | ranks x micro-batches, layers | best system | ms | tuned, ms | over it | gap to bound | hidden |"
    )
    print("|--:|---|---|--:|--:|--:|--:|--:|")
    ahead = 0
    for k in range(number):
        share = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)[k % 6]
        costs, ranks, count = moe_setting(random.Random(k), share, ranks=(2, 4, 8))
        names = list(compare(costs, ranks, count, processes=1, options={"tessel": {"time_limit_s": 2}}).results)
        best = min((r for r in names if not r.reason), key=lambda r: r.step_ms)
        found = tune(costs, ranks, count, budget_s=budget_s)
        ahead += found.step_ms < best.step_ms
        print(
            f"| {share:.0%} | {ranks} x {count}, {costs.num_layers} | {best.system} | {best.step_ms:.1f} "
            f"| {found.step_ms:.1f} | {best.step_ms / found.step_ms:.3f} | {found.gap:.1%} "
            f"| {simulate(found.plan, costs).exchange.share:.2f} |",
            flush=True,
        )
    print(f"\ntuned ahead of every system in {ahead} of {number}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("models", "random"))
    parser.add_argument("--budget", type=float, default=None, help="seconds of every search")
    parser.add_argument("--settings", type=int, default=20)
    parser.add_argument("--only", default="", help="one model")
    args = parser.parse_args()
    began = time.monotonic()
    if args.what == "models":
        models(args.budget or 60.0, args.only)
    else:
        settings(args.budget or 10.0, args.settings)
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()

"""How much of the experts' exchange plans hide, and what that is worth: large models, and random settings.

    python benchmarks/bench_pairs.py models [--budget 60 | --iterations 500] [--only deepseek-v3] [--again]
    python benchmarks/bench_pairs.py moves [--iterations 200] [--only deepseek-v3]
    python benchmarks/bench_pairs.py random [--budget 10] [--first 0] [--settings 20]
    python benchmarks/bench_pairs.py dense --against CHECKOUT [--budget 5]

`models`: step time, tokens per GPU and second, share of the exchange behind computation and whether the plan fits, for
1F1B, ZB-V, Megatron's combined interleaved 1F1B, DualPipe, DualPipeV and the tuned plan. A system that does not fit is
shown as it is and with as many layers recomputed as let it fit, if need be without the W that it defers; only what fits
is compared with the tuned plan. Every
model's rows are written to benchmarks/results/pairs.jsonl when they are there, and a model that has its rows for these
sizes and this budget is not run again (`--again`: it is). With `--iterations` the tuned plan does not depend on how
busy the machine is: so many moves of the search without pairs, and at least 400 schedules with pairs.

Costs are analytic; how tokens are exchanged is what DeepSeek published for its own run: fp8 to the experts and bf16
back, a token on at most 4 nodes, 20 of 132 multiprocessors, and links at 0.9 of 50 GB/s (our choice).
Kimi-K2: the batch of its own run, 67 M tokens (arXiv 2507.20534, section 2.5), on GPUs of our choice.
DeepSeek-V3: its own set-up (2,048 H800; 128 micro-batches where its 15,360 sequences a step made 120, because the
interleaved schedule wants a multiple of pp), whose
published throughput is 14.8 T tokens in 2.664 M GPU hours: 1,543 tokens per GPU and second. The other models' sizes are
our choice; on 80 GB GLM-4.5 and Qwen3-235B would have to recompute most of their layers under every plan, so they are
given H200.

`moves`: the search for pairs alone, so many schedules of it, three seeds, and partners for what it leaves exposed: the
same on every machine, busy or not.

`random`: random models of which 10 to 60 % is exchange, tuned plan against every system, with the gap to the bound.

`dense`: models without experts, searched by this checkout and by another one (the commit before pairs) in turns, so
that both meet the same machine: moves per second and step times.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from one_line import start

from octopipe.base.errors import OctoPipeError
from octopipe.costs.analytic.table import setup_costs
from octopipe.costs.analytic.traffic import Exchange
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Precision, Recompute, Setup
from octopipe.costs.table import CostTable
from octopipe.models.zoo import preset
from octopipe.plans.plan import Plan
from octopipe.search.comparison import compare
from octopipe.search.pairing.partners import with_partners
from octopipe.search.pairing.search import PairSearch
from octopipe.search.systems import build_plan
from octopipe.search.tuner import tune
from octopipe.simulation.simulator import simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from moe_settings import moe_setting

HERE = Path(__file__).resolve().parent

SYSTEMS = ("1f1b", "zb-v", "interleaved-overlap", "dualpipe", "dualpipev")
EXCHANGE = Exchange(link_share=0.9, dispatch_bytes=1.03, most_nodes=4)
CASES: dict[str, tuple[str, int, int, int, int, Precision]] = {
    # model: (gpu, pp, ep, dp, micro-batches, precision)
    "deepseek-v3": ("h800", 16, 64, 128, 128, "fp8"),
    "kimi-k2": ("h800", 16, 64, 64, 256, "fp8"),
    "glm-4.5": ("h200", 8, 32, 32, 64, "bf16"),
    "qwen3-235b-a22b": ("h200", 8, 32, 32, 64, "bf16"),
}
LAYERS_AT_ONCE = 3
RESULTS = HERE / "results" / "pairs.jsonl"
DENSE = (("nemotron-h-8b", 4, 16), ("jamba-52b", 8, 16), ("llama3-70b", 8, 16))


def model_costs(name: str, recompute: Recompute = "selective", layers: int | None = None) -> tuple[CostTable, int, int]:
    device, pp, ep, dp, count, precision = CASES[name]
    setup = Setup(
        gpu=gpu(device), tp=1, pp=pp, ep=ep, dp=dp, seq=4096, zero=1, precision=precision, recompute=recompute,
        recompute_layers=layers,
    )  # fmt: skip
    return setup_costs(preset(name), setup, exchange=EXCHANGE), pp, count


def row_of(plan: Plan, costs: CostTable, recomputed: str = "") -> dict[str, Any]:
    timeline = simulate(plan, costs)
    rates = costs.throughput(plan.num_ranks, plan.num_micro_batches, timeline.step_ms)
    return {
        "step_ms": timeline.step_ms,
        "tokens_per_gpu_per_second": rates["tokens_per_gpu_per_second"],
        "hidden": timeline.exchange.share,
        "peak_gib": max(timeline.peak_gib),
        "fits": bool(timeline.fits),
        "recomputed": recomputed,
    }


def weights_at_once(plan: Plan) -> Plan:
    """The plan with every W fused into its I: a W that waits holds all that its recomputed layers computed again."""
    rows = ([op._replace(kind="B") if op.kind == "I" else op for op in row if op.kind != "W"] for row in plan.orders)
    return replace(plan, orders=tuple(tuple(row) for row in rows))


def recomputed_to_fit(system: str, name: str) -> dict[str, dict[str, Any]]:
    """The fastest of the system's plans that fit with some whole layers recomputed, by name. If none does, the one that
    needs least memory is shown, and those with every W at once are tried.

    Numbers of layers are tried one after the other, LAYERS_AT_ONCE apart: more recomputation does not always need less
    memory, because layers that run again take their workspace beside all that is kept.
    """
    out: dict[str, dict[str, Any]] = {}
    for changed, words in ((lambda plan: plan, ""), (weights_at_once, "every W at once, ")):
        rows = []
        for layers in range(LAYERS_AT_ONCE, model_costs(name)[0].num_layers, LAYERS_AT_ONCE):
            costs, pp, count = model_costs(name, "full", layers)
            plan = changed(build_plan(system, costs, pp, count))
            rows.append(row_of(plan, costs, f"{words}{layers} layers recomputed"))
        fitting = [row for row in rows if row["fits"]]
        shown = min(fitting, key=lambda row: row["step_ms"]) if fitting else min(rows, key=lambda row: row["peak_gib"])
        out[f"{system}, {shown['recomputed']}"] = shown
        if fitting:
            break
    return out


def model_rows(name: str, budget_s: float, iterations: int | None) -> dict[str, Any]:
    costs, pp, count = model_costs(name)
    rows: dict[str, dict[str, Any]] = {}
    for system in SYSTEMS:
        try:
            rows[system] = row_of(build_plan(system, costs, pp, count), costs)
            if not rows[system]["fits"]:
                rows |= recomputed_to_fit(system, name)
        except OctoPipeError as error:
            rows[system] = {"refused": str(error)}
    began = time.monotonic()
    found = tune(costs, pp, count, budget_s=budget_s, iterations=iterations)
    rows["tuned"] = row_of(found.plan, costs)
    others = {key: row["step_ms"] for key, row in rows.items() if key != "tuned" and row.get("fits")}
    best = min(others, key=lambda key: others[key]) if others else None
    return {
        "model": name,
        "sizes": list(CASES[name]),
        "budget_s": None if iterations else budget_s,
        "iterations": iterations,
        "seconds": round(time.monotonic() - began, 1),
        "rows": rows,
        "bound_ms": found.lower_bound_ms,
        "bound": found.bound_name,
        "best_other": best,
        "over_best_other": others[best] / rows["tuned"]["step_ms"] if best else None,
    }


def models(budget_s: float, only: str, again: bool, iterations: int | None) -> None:
    known = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    for name in [only] if only else list(CASES):
        asked = (name, list(CASES[name]), None if iterations else budget_s, iterations)
        kept = [r for r in known if (r["model"], r["sizes"], r["budget_s"], r.get("iterations")) == asked]
        if kept and not again:
            result = kept[-1]
        else:
            result = model_rows(name, budget_s, iterations)
            known = [r for r in known if r not in kept] + [result]
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text("".join(json.dumps(r) + "\n" for r in known))
        show(result)


def show(result: dict[str, Any]) -> None:
    device, pp, ep, dp, count, precision = result["sizes"]
    print(f"\n{result['model']}: {pp * dp} {device}, pp {pp}, ep {ep}, {count} micro-batches, {precision}\n")
    print("| plan | step, ms | tokens/GPU/s | exchange hidden | peak, GiB | fits | over tuned |")
    print("|---|--:|--:|--:|--:|---|--:|")
    tuned = result["rows"]["tuned"]
    for key, row in result["rows"].items():
        if "refused" in row:
            print(f"| {key} | {row['refused']} | | | | | |")
            continue
        print(
            f"| {key} | {row['step_ms']:.0f} | {row['tokens_per_gpu_per_second']:.0f} | {row['hidden']:.3f} "
            f"| {row['peak_gib']:.0f} | {'yes' if row['fits'] else 'no'} | {row['step_ms'] / tuned['step_ms']:.3f} |"
        )
    print(f"| bound ({result['bound']}) | {result['bound_ms']:.0f} | | | | | |")
    if result["best_other"]:
        print(f"\ntuned is {result['over_best_other']:.3f} x {result['best_other']}, the best of the others that fit")
    sys.stdout.flush()


def searches(only: str, judged: int) -> None:
    """The search for pairs alone: its plans depend on the seed and the number of schedules, not on the machine."""
    known = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    print(
        "| model | schedules | seed | processor time, s | step, ms | hidden | hidden with partners "
        "| best other that fits, over it |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name in [only] if only else list(CASES):
        costs, pp, count = model_costs(name)
        other = [r for r in known if (r["model"], r["sizes"]) == (name, list(CASES[name])) and r["best_other"]]
        for seed in range(3):
            began = time.process_time()
            search = PairSearch(
                costs=costs, num_ranks=pp, num_micro_batches=count, budget_s=math.inf, seed=seed, moves=judged
            )
            made = search.run()
            assert made is not None
            (_, after), _ = with_partners(made, costs, budget_s=None)
            step = after.step_ms
            over = f"{other[-1]['rows'][other[-1]['best_other']]['step_ms'] / step:.3f}" if other else ""
            print(
                f"| {name} | {search.judged} | {seed} | {time.process_time() - began:.1f} | {step:.0f} "
                f"| {made[1].exchange.share:.3f} | {after.exchange.share:.3f} | {over} |",
                flush=True,
            )


def settings(budget_s: float, first: int, number: int, iterations: int | None) -> None:
    print(
        "| exchange | ranks x micro-batches, layers | best system | ms | tuned, ms | over it | gap to bound | hidden |"
    )
    print("|--:|---|---|--:|--:|--:|--:|--:|")
    ahead = 0
    for k in range(first, first + number):
        share = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)[k % 6]
        costs, ranks, count = moe_setting(random.Random(k), share, ranks=(2, 4, 8))
        names = list(compare(costs, ranks, count, processes=1, options={"tessel": {"time_limit_s": 2}}).results)
        best = min((r for r in names if not r.reason), key=lambda r: r.step_ms)
        found = tune(costs, ranks, count, budget_s=budget_s, iterations=iterations)
        ahead += found.step_ms < best.step_ms
        print(
            f"| {share:.0%} | {ranks} x {count}, {costs.num_layers} | {best.system} | {best.step_ms:.1f} "
            f"| {found.step_ms:.1f} | {best.step_ms / found.step_ms:.3f} | {found.gap:.1%} "
            f"| {simulate(found.plan, costs).exchange.share:.2f} |",
            flush=True,
        )
    print(f"\ntuned ahead of every system in {ahead} of {number}")


ONE_SEARCH = """
import json, sys, time
import octopipe
from octopipe.costs.analytic.table import setup_costs
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.models.zoo import preset
from octopipe.search.tuner import tune
name, pp, count, budget, seed = json.loads(sys.argv[1])
costs = setup_costs(preset(name), Setup(gpu=gpu("h800"), tp=8, pp=pp, seq=4096))
tune(costs, pp, count, iterations=2)
found = tune(costs, pp, count, budget_s=budget, seed=seed)
print(json.dumps([found.step_ms, found.iterations, found.seconds]))
"""


def dense(against: Path, budget_s: float, repeats: int = 3) -> None:
    """Both checkouts in turns, each in a process of its own."""
    print("| model | pp x micro-batches | step, ms: before | now | now / before | moves per second, now / before |")
    print("|---|---|--:|--:|--:|--:|")
    for name, pp, count in DENSE:
        took: dict[str, list[list[float]]] = {"before": [], "now": []}
        for seed in range(repeats):
            for which, root in (("before", against), ("now", HERE.parent)):
                done = subprocess.run(
                    [sys.executable, "-c", ONE_SEARCH, json.dumps([name, pp, count, budget_s, seed])],
                    env={**os.environ, "PYTHONPATH": str(root)}, cwd=root, capture_output=True, text=True,
                )  # fmt: skip
                if done.returncode:
                    raise OctoPipeError(
                        f"{root}: the search failed: {(done.stderr.splitlines() or ['no message'])[-1]}"
                    )
                took[which].append(json.loads(done.stdout.splitlines()[-1]))
        ms = {which: statistics.median(row[0] for row in rows) for which, rows in took.items()}
        rate = {which: statistics.median(row[1] / row[2] for row in rows) for which, rows in took.items()}
        print(
            f"| {name} | {pp} x {count} | {ms['before']:.1f} | {ms['now']:.1f} | {ms['now'] / ms['before']:.4f} "
            f"| {rate['now'] / rate['before']:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("models", "moves", "random", "dense"))
    parser.add_argument("--budget", type=float, default=None, help="seconds of every search")
    parser.add_argument("--iterations", type=int, default=None, help="moves instead of seconds, for models and random")
    parser.add_argument("--settings", type=int, default=20, help="number of random settings")
    parser.add_argument("--first", type=int, default=0, help="number of the first random setting")
    parser.add_argument("--only", default="", choices=("", *CASES), help="one model")
    parser.add_argument("--again", action="store_true", help="also models whose rows are kept")
    parser.add_argument("--against", type=Path, help="another checkout, for dense")
    args = parser.parse_args()
    began = time.monotonic()
    if args.what == "models":
        models(args.budget or 60.0, args.only, args.again, args.iterations)
    elif args.what == "moves":
        searches(args.only, args.iterations or 200)
    elif args.what == "dense":
        if args.against is None:
            parser.error("dense: give the checkout to compare with, --against PATH")
        if not (args.against / "octopipe").is_dir():
            raise OctoPipeError(f"{args.against}: no checkout of this repository; --against wants the folder of one")
        dense(args.against.resolve(), args.budget or 5.0)
    else:
        settings(args.budget or 10.0, args.first, args.settings, args.iterations)
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    start(main)

"""Published training runs, predicted: tokens per GPU and second of every run's own split, stack by stack.

python benchmarks/bench_published.py                     every run under its stack's rates, and the errors
python benchmarks/bench_published.py --stack torchtitan  the runs of one stack
python benchmarks/bench_published.py --csv FILE          runs of your own, in the same columns
python benchmarks/bench_published.py --fit               fit every stack again, each run left out in turn, and write
                                                         octopipe/costs/measured/stacks.json
python benchmarks/bench_published.py --held-out          errors on models that a stack was not fitted on
python benchmarks/bench_published.py --paired            runs that overlapped the experts' exchange, priced without the
                                                         overlap (as in the fit) and with it
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from one_line import known, start

from octopipe.costs.analytic.calibration import DEFAULT_STACK, FORMAT_OF_ALL, Stack, stack_named, stack_names
from octopipe.costs.analytic.table import setup_costs
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.measured import PUBLISHED_RUNS as CSV
from octopipe.costs.measured import STACKS_FILE
from octopipe.costs.runs import Run, read_runs, under
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan
from octopipe.search.planner.fitting import Fit, Fitted, SeenRun, errors_of, fit_stack
from octopipe.search.recompute import Price, plan_under
from octopipe.search.systems import build_plan
from octopipe.search.systems.shapes import stages_from_sizes
from octopipe.simulation.simulator import simulate

RESULTS = Path(__file__).resolve().parent / "results" / "published.json"
ABOUT = {
    "megatron-2021": "Megatron-LM before flash attention, A100: the papers of SC 2021 and MLSys 2023, BLOOM",
    "megatron-2024": "NeMo 24.03 and 24.07 with Transformer Engine, H100",
    "megatron-2025-09": "Megatron-Bridge 25.09: experts with a capacity, tokens beyond it dropped",
    "megatron-2025": "Megatron-Bridge 25.11 and 26.02: dropless experts",
    "megatron-2026": "Megatron-Bridge 26.02.01 and 26.04",
    "megatron-2026-06": "Megatron-Bridge 26.06 to 26.08",
    "llm-foundry": "MosaicML llm-foundry: FSDP and flash attention without torch.compile, A100 and H100",
    "torchtitan": "torchtitan with torch.compile, FSDP2, tensor, pipeline and context parallelism, H100 and H200",
    "plain-torch": "FSDP2 without torch.compile, A100 and H100",
    "automodel": "NeMo AutoModel: FSDP2 with Transformer Engine and DeepEP, H100",
    "meta-2024": "the stack that trained Llama 3 405B, H100",
    "deepseek-2024": "the stack that trained DeepSeek-V3, H800: one run",
}


def read_rows(path: Path = CSV) -> list[Run]:
    return read_runs(path)


def stack_of(run: Run) -> Stack:
    """The run's own stack where it is fitted, else the default."""
    return stack_named(run.stack if run.stack in stack_names() else DEFAULT_STACK)


def price_of(run: Run) -> Price:
    known: dict[Setup, CostTable] = {}
    stack = stack_of(run)
    if run.exchange == "hidden":
        stack = replace(stack, rates=tuple((g, p, replace(r, exchange=0.0)) for g, p, r in stack.rates))

    def price(mode: str, layers: int | None = None) -> CostTable:
        setup = replace(under(run, mode, layers), stack=stack)
        if setup not in known:
            known[setup] = setup_costs(run.spec, setup)
        return known[setup]

    return price


def balanced_sizes(layer_ms: list[float], stages: int) -> list[int]:
    """Layers per stage such that the longest stage is as short as can be."""

    def dealt(most_ms: float) -> list[int]:
        sizes, load = [0], 0.0
        for i, ms in enumerate(layer_ms):
            left = len(layer_ms) - i
            if sizes[-1] and (load + ms > most_ms or left == stages - len(sizes)):
                sizes, load = [*sizes, 0], 0.0
            sizes[-1] += 1
            load += ms
        return sizes

    low, high = max(layer_ms), sum(layer_ms)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if len(dealt(middle)) <= stages else (middle, high)
    return dealt(high)


def with_pairs(plan: Plan) -> Plan:
    """One rank alone: the forward of every micro-batch runs together with the backward of the one before."""
    count = plan.num_micro_batches
    pairs = [(Op(0, "F", m), Op(0, "B", m - 1)) for m in range(1, count)]
    order = [Op(0, "F", 0), *(op for pair in pairs for op in pair), Op(0, "B", count - 1)]
    return replace(plan, orders=(tuple(order),), pairs=frozenset(pairs))


def simulated(run: Run, *, pairs: bool = False) -> dict[str, Any]:
    """The run's split simulated op by op, with the recomputation it used or the least that fits. `pairs`: with
    Megatron's combined forward and backward."""
    setup = run.setup
    assert setup.micro_batches is not None
    interleaved = run.chunks > 1 and setup.micro_batches % setup.pp == 0
    name = "interleaved-overlap" if pairs else "interleaved"
    system = name if interleaved else "1f1b"
    options: dict[str, Any] = {"chunks": run.chunks} if interleaved else {}

    def build(costs: CostTable) -> Plan:
        plan = build_plan(system, costs, setup.pp, setup.micro_batches or 1, **options)
        if pairs and setup.pp == 1 and costs.exchanges:
            return with_pairs(plan)
        if not run.balanced or setup.pp == 1:
            return plan
        sizes = balanced_sizes(costs.layer_ms.tolist(), len(plan.stages))
        return replace(plan, stages=stages_from_sizes(sizes, [stage.rank for stage in plan.stages]))

    plan, costs = plan_under(run.recompute, build, price_of(run))
    timeline = simulate(plan, costs)
    rate = costs.throughput(setup.pp, setup.micro_batches, timeline.step_ms)
    predicted = float(rate["tokens_per_gpu_per_second"] or 0.0)
    return {
        "stack": run.stack,
        "row": run.name,
        "setup": setup.words(),
        "published": run.tokens_per_s_per_gpu,
        "predicted": predicted,
        "error": predicted / run.tokens_per_s_per_gpu - 1.0,
        "mfu": rate["mfu"],
        "bubble": timeline.bubble_ratio,
        "fits": timeline.fits,
        "peak_gib": max(timeline.peak_gib),
        "limit_gib": timeline.capacity_bytes[0] / 2**30,
        "recompute": costs.setup.recompute_words() if costs.setup else "",
        "exchange": run.exchange,
        **({"hidden": timeline.exchange.share} if pairs else {}),
        "source": run.source,
    }


def spread(errors: list[float]) -> dict[str, float]:
    found = errors_of([math.log1p(e) for e in errors])
    return {"runs": found.runs, "median": found.median, "p90": found.p90, "worst": found.worst}


def run(path: Path = CSV, stack: str | None = None) -> dict[str, Any]:
    """Every run under its stack's rates, and the errors."""
    results = [simulated(row) for row in read_rows(path) if stack in (None, row.stack)]
    errors = [abs(r["error"]) for r in results]
    return {
        "rows": results,
        "stacks": {name: spread([r["error"] for r in results if r["stack"] == name]) for name in _stacks(results)},
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "all_fit": all(r["fits"] for r in results),
    }


def _stacks(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(r["stack"] for r in rows))


def show(result: dict[str, Any]) -> None:
    print(f"{'run':42} {'published':>9} {'predicted':>9} {'error':>7} {'MFU':>6} {'GiB':>6} of {'limit':>5}  recompute")
    for name in _stacks(result["rows"]):
        print(f"-- {name}")
        for r in (r for r in result["rows"] if r["stack"] == name):
            fits = "" if r["fits"] else "  DOES NOT FIT"
            print(
                f"{r['row']:42} {r['published']:9.0f} {r['predicted']:9.0f} {100 * r['error']:+6.1f}% "
                f"{100 * r['mfu']:5.1f}% {r['peak_gib']:6.1f} of {r['limit_gib']:5.1f}  {r['recompute']}{fits}"
            )
    print("by stack, fitted:")
    for name, e in result["stacks"].items():
        print(f"  {name:18} {e['runs']:4} runs: median {e['median']:.1%}, 90 % {e['p90']:.1%}, worst {e['worst']:.1%}")
    print(f"median {result['median_error']:.1%}, worst {result['worst_error']:.1%}, all fit: {result['all_fit']}")


def show_left_out(left_out: dict[str, list[float]]) -> dict[str, Any]:
    """Leave-one-out errors by stack and over all runs."""
    print("by stack, every run left out in turn:")
    out = {}
    for name, errors in left_out.items():
        e = out[name] = spread(errors)
        print(f"  {name:18} {e['runs']:4} runs: median {e['median']:.1%}, 90 % {e['p90']:.1%}, worst {e['worst']:.1%}")
    e = out["all"] = spread([error for errors in left_out.values() for error in errors])
    print(f"  {'all':18} {e['runs']:4} runs: median {e['median']:.1%}, 90 % {e['p90']:.1%}, worst {e['worst']:.1%}")
    return out


def _fitted(name: str, runs: list[Run]) -> tuple[str, Fitted, float]:
    began = time.monotonic()
    return name, fit_stack([SeenRun(run) for run in runs], name, ABOUT.get(name, "")), time.monotonic() - began


def fit(path: Path = CSV, only: str | None = None) -> dict[str, Any]:
    """Every stack fitted to its own runs; stacks.json is written anew, stacks that no run names stay."""
    rows = read_rows(path)
    mine = {name: [r for r in rows if r.stack == name] for name in ABOUT if only in (None, name)}
    mine = dict(sorted(((n, r) for n, r in mine.items() if r), key=lambda item: -len(item[1])))
    written = {entry["name"]: entry for entry in json.loads(STACKS_FILE.read_text())["stacks"]}
    before = json.loads(RESULTS.read_text()).get("left_out_rows", {}) if RESULTS.exists() else {}
    by_row: dict[str, Any] = {} if only is None else dict(before)
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for name, found, seconds in pool.map(_fitted, mine, mine.values()):
            entry = found.stack.as_dict()
            del entry["format"]
            written[name] = entry
            if found.left_out:
                by_row[name] = [[r.name, r.setup.words(), e] for r, e in zip(mine[name], found.left_out, strict=True)]
            print(f"{name}: {len(mine[name])} runs fitted in {seconds:.0f} s", flush=True)
    order = [DEFAULT_STACK, *ABOUT, *written]
    stacks = [written[name] for name in dict.fromkeys(order) if name in written]
    STACKS_FILE.write_text(json.dumps({"format": FORMAT_OF_ALL, "stacks": stacks}, indent=1) + "\n")
    left_out = {name: [error for *_, error in by_row[name]] for name in ABOUT if name in by_row}
    return {"left_out": show_left_out(left_out), "left_out_rows": by_row}


def held_out(path: Path = CSV) -> dict[str, Any]:
    """Errors on models that a stack was not fitted on: harder than single runs, whose twins on other GPUs are seen."""
    rows, errors = read_rows(path), {}
    for name in dict.fromkeys(row.stack for row in rows):
        mine = [row for row in rows if row.stack == name]
        models = sorted({row.spec.name for row in mine})
        if len(models) < 3:
            continue
        whole, found = Fit([SeenRun(row) for row in mine]), []
        for model in models:
            kept = [i for i, row in enumerate(mine) if row.spec.name != model]
            x = whole.solve(kept, rounds=6)
            out = [i for i, row in enumerate(mine) if row.spec.name == model]
            found += [math.expm1(r) for r in whole.residuals(x, out)]
        errors[name] = found
    print("every model left out in turn:")
    return show_left_out(errors)


def paired(path: Path) -> None:
    """Runs that overlapped the exchange, priced without the overlap and with it."""
    print("| stack | run | pp x chunks | error without pairs | with pairs | exchange hidden |")
    print("|:--|:--|--:|--:|--:|--:|")
    errors: tuple[list[float], list[float]] = ([], [])
    for row in (row for row in read_rows(path) if row.exchange == "paired"):
        without, within = simulated(row), simulated(row, pairs=True)
        for found, result in zip(errors, (without, within), strict=True):
            found.append(result["error"])
        print(
            f"| {row.stack} | {row.name} | {row.setup.pp} x {row.chunks} | {without['error']:+.1%} "
            f"| {within['error']:+.1%} | {within['hidden']:.2f} |",
            flush=True,
        )
    for words, found in zip(("without pairs", "with pairs"), errors, strict=True):
        size = statistics.median(map(abs, found))
        print(f"\n{words}: {len(found)} runs, median error {statistics.median(found):+.1%}, median size {size:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=CSV)
    parser.add_argument("--stack", help="the runs of one stack alone")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--paired", action="store_true")
    args = parser.parse_args()
    if args.stack:
        known([args.stack], list(dict.fromkeys(row.stack for row in read_rows(args.csv))), "stack")
    if args.paired:
        paired(args.csv)
        return
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept = {name: before[name] for name in ("held_out", "left_out", "left_out_rows") if name in before}
    if args.fit:
        found = fit(args.csv, args.stack)
        if args.csv == CSV:
            RESULTS.write_text(json.dumps({**before, **found}, indent=1) + "\n")
        return
    result = run(args.csv, args.stack)
    show(result)
    if args.held_out:
        result["held_out"] = held_out(args.csv)
    if args.csv == CSV and args.stack is None:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({**kept, **result}, indent=1) + "\n")


if __name__ == "__main__":
    start(main)

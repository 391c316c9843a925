"""Published training runs, predicted: tokens per GPU and second of every row's own split.

python benchmarks/bench_published.py                     the table, and the errors
python benchmarks/bench_published.py --csv FILE          rows of your own, in the same columns
python benchmarks/bench_published.py --fit               fit the rates again and print them
python benchmarks/bench_published.py --held-out          errors on rows that were not fitted: halves, single models
python benchmarks/bench_published.py --plan 10           beside it: what `octopipe plan` finds for ten of them
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octopipe.costs.analytic.calibration import RATES, Rates
from octopipe.costs.analytic.table import setup_costs
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.measured import PUBLISHED_RUNS as CSV
from octopipe.costs.table import CostTable
from octopipe.models.spec import ModelSpec
from octopipe.models.zoo import preset
from octopipe.search.planner.estimate import estimate
from octopipe.search.recompute import plan_under
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import simulate

RESULTS = Path(__file__).resolve().parent / "results" / "published.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published run: its split and what it reached."""

    name: str
    spec: ModelSpec
    setup: Setup
    chunks: int
    tokens_per_s_per_gpu: float


def read_rows(path: Path) -> list[Row]:
    """The rows of a table; empty cells count as 1, the rest of the GPUs is data parallelism."""
    rows = []
    with path.open() as file:
        for raw in csv.DictReader(file):
            n = {k: int(raw[k] or 1) for k in ("gpus", "gbs", "mbs", "seq", "tp", "pp", "cp", "vp", "ep")}
            dp = n["gpus"] // (n["tp"] * n["pp"] * n["cp"])
            setup = Setup(
                gpu=gpu(raw["system"]),
                tp=n["tp"],
                cp=n["cp"],
                ep=n["ep"],
                pp=n["pp"],
                dp=dp,
                micro_batch_size=n["mbs"],
                micro_batches=n["gbs"] // (n["mbs"] * dp),
                seq=n["seq"],
                zero=3 if raw["fsdp"] == "1" else 1,
                precision="bf16" if raw["precision"] == "bf16" else "fp8",
                # NVIDIA's recipes reduce gradients in bf16.
                gradients="bf16",
            )
            # The published FLOPs per token leave DeepSeek-V3's token prediction out.
            spec = preset(raw["model"]).without_mtp()
            name = f"{raw['system']} {raw['model']} {raw['precision']} x{n['gpus']}"
            rows.append(
                Row(
                    name=name,
                    spec=spec,
                    setup=setup,
                    chunks=n["vp"] if n["pp"] > 1 else 1,
                    tokens_per_s_per_gpu=float(raw["tokens_per_s_per_gpu"]),
                )
            )
    return rows


def price_of(row: Row, rates: dict[str, Rates] | None = None) -> Any:
    known: dict[Setup, CostTable] = {}

    def price(mode: str, layers: int | None = None) -> CostTable:
        setup = replace(row.setup, recompute=mode, recompute_layers=layers)  # type: ignore[arg-type]
        if setup not in known:
            known[setup] = setup_costs(row.spec, setup, rates=rates)
        return known[setup]

    return price


def quick(row: Row, rates: dict[str, Rates]) -> tuple[float, str]:
    """Tokens per GPU and second by the closed form, and what was recomputed."""
    setup = row.setup
    assert setup.micro_batches is not None
    found = estimate(price_of(row, rates), setup.pp, row.chunks, setup.micro_batches)
    tokens = setup.seq * setup.micro_batch_size * setup.micro_batches / setup.gpus_per_rank / setup.pp  # type: ignore[operator]
    return tokens / found.step_ms * 1e3, found.recompute


def simulated(row: Row) -> dict[str, Any]:
    """The row's split simulated op by op, with the least recomputation that fits."""
    setup = row.setup
    assert setup.micro_batches is not None
    system, options = ("interleaved", {"chunks": row.chunks}) if row.chunks > 1 else ("1f1b", {})

    def build(costs: CostTable) -> Any:
        return build_plan(system, costs, setup.pp, setup.micro_batches or 1, **options)

    plan, costs = plan_under("auto", build, price_of(row))
    timeline = simulate(plan, costs)
    rate = costs.throughput(setup.pp, setup.micro_batches, timeline.step_ms)
    predicted = float(rate["tokens_per_gpu_per_second"] or 0.0)
    return {
        "row": row.name,
        "setup": setup.words(),
        "published": row.tokens_per_s_per_gpu,
        "predicted": predicted,
        "error": predicted / row.tokens_per_s_per_gpu - 1.0,
        "mfu": rate["mfu"],
        "bubble": timeline.bubble_ratio,
        "fits": timeline.fits,
        "peak_gib": max(timeline.peak_gib),
        "limit_gib": timeline.capacity_bytes[0] / 2**30,
        "recompute": costs.setup.recompute_words() if costs.setup else "",
    }


def run(path: Path) -> dict[str, Any]:
    """Every row, and the errors."""
    results = [simulated(row) for row in read_rows(path)]
    errors = [abs(r["error"]) for r in results]
    return {
        "rows": results,
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "all_fit": all(r["fits"] for r in results),
    }


def show(result: dict[str, Any]) -> None:
    print(f"{'run':42} {'published':>9} {'predicted':>9} {'error':>7} {'MFU':>6} {'GiB':>6} of {'limit':>5}  recompute")
    for r in result["rows"]:
        fits = "" if r["fits"] else "  DOES NOT FIT"
        print(
            f"{r['row']:42} {r['published']:9.0f} {r['predicted']:9.0f} {100 * r['error']:+6.1f}% "
            f"{100 * r['mfu']:5.1f}% {r['peak_gib']:6.1f} of {r['limit_gib']:5.1f}  {r['recompute']}{fits}"
        )
    print(f"median {result['median_error']:.1%}, worst {result['worst_error']:.1%}, all fit: {result['all_fit']}")


PLANNED = (
    *("gb300 llama3-70b", "gb300 qwen3-235b-a22b", "gb300 gpt-oss-120b", "gb200 llama3.1-405b", "gb200 deepseek-v3"),
    *("b200 qwen3-30b-a3b", "h100 llama3-70b", "h100 gpt3-175b", "h100 nemotron-340b", "h100 kimi-k2"),
)
"""Ten of the (model, GPUs, batch) for which a split is searched, the published one unseen."""


def planned(path: Path, number: int, budget_s: float = 30.0) -> list[dict[str, Any]]:
    """What the planner finds beside what was published, under the same model."""
    import time

    from octopipe.cli.verbs.plan_answer import changes
    from octopipe.search.planner.search import search

    out = []
    for wanted in PLANNED[:number]:
        row = next(r for r in read_rows(path) if r.name.startswith(wanted + " "))
        setup = row.setup
        base = replace(setup, tp=1, cp=1, ep=1, pp=1, dp=1, micro_batch_size=1, micro_batches=None, zero=1)
        split = {"tp": setup.tp, "cp": setup.cp, "ep": setup.ep, "pp": setup.pp, "vp": row.chunks, "zero": setup.zero}
        began = time.monotonic(), time.process_time()
        found = search(
            row.spec,
            base,
            gpus=setup.num_gpus,
            global_batch=setup.global_batch or 1,
            today={**split, "micro_batch_size": setup.micro_batch_size},
            budget_s=budget_s,
        )
        assert found.today is not None
        took = time.monotonic() - began[0], time.process_time() - began[1]
        result = {
            "row": row.name,
            "published_split": found.today.split.words(),
            "published_ms": found.today.step_ms,
            "found_split": found.best.split.words(),
            "found_ms": found.best.step_ms,
            "speedup": found.today.step_ms / found.best.step_ms,
            "seconds": took[0],
            "cpu_seconds": took[1],
            "what_changed": changes(found)[-1],
        }
        spent = f"{took[0]:.1f} s ({took[1]:.1f} s of CPU)"
        print(f"{row.name}: {result['speedup']:.3f}x in {spent}; {result['what_changed']}", flush=True)
        out.append(result)
    return out


OWN = {"gemm": (0.2, 0.9, 0.1), "half": (50.0, 2000.0, 0.15)}
GENERATION = {"core": (0.1, 0.9, 0.1)}
SHARED = {
    "launch_ms": (0.001, 0.03, 0.1),
    "passes": (1.0, 5.0, 0.1),
    "moe_passes": (2.0, 30.0, 0.1),
    "cast_bytes": (1.0, 12.0, 0.1),
    "link": (0.4, 1.0, 0.2),
}
"""Bounds and the weight of the prior (in log units) of everything fitted: two numbers per generation and precision,
one per generation, five for all."""


ROUNDS = 8
NEUTRAL = {
    "gemm": 0.7,
    "half": 250.0,
    "core": 0.45,
    "launch_ms": 0.01,
    "passes": 2.5,
    "moe_passes": 6.0,
    "cast_bytes": 4.0,
    "link": 0.8,
}
"""Where a fit begins that must know nothing of the rows it leaves out: round numbers, the same for every GPU."""


class Fit:
    """Least squares on log ratios over some of the rows, near a starting point."""

    def __init__(self, rows: list[Row], *, neutral: bool = False):
        import numpy as np

        self.rows = rows
        self.keys = sorted(RATES)
        keys = self.keys
        self.names: list[tuple[str, str, str]] = [(*key, name) for key in keys for name in OWN]
        self.names += [(g, "", name) for g in sorted({g for g, _ in keys}) for name in GENERATION]
        self.names += [("", "", name) for name in SHARED]
        limits = OWN | GENERATION | SHARED

        def present(generation: str, precision: str, name: str) -> float:
            if neutral:
                return NEUTRAL[name]
            key = next(k for k in keys if k[0].startswith(generation) and k[1] == (precision or "fp8"))
            return max(float(getattr(RATES[key], name)), 1e-6)

        self.low, self.high, self.weight = (np.array([limits[n[2]][i] for n in self.names]) for i in range(3))
        start = [math.log(present(*n)) for n in self.names]
        self.start = np.clip(start, np.log(self.low) + 1e-6, np.log(self.high) - 1e-6)

    def rates_from(self, x: Any) -> dict[tuple[str, str], Rates]:
        out = {}
        for generation, precision in self.keys:
            own = {
                name: math.exp(v)
                for (g, p, name), v in zip(self.names, x, strict=True)
                if g in ("", generation) and p in ("", precision)
            }
            if precision == "bf16":
                own["cast_bytes"] = 0.0
            out[generation, precision] = Rates(**own)
        return out

    def errors(self, x: Any, numbers: list[int]) -> Any:
        """Log of predicted over published."""
        import numpy as np

        rates = self.rates_from(x)
        out = []
        for row in (self.rows[i] for i in numbers):
            assert row.setup.gpu is not None
            own = {p: rates[row.setup.gpu.generation, p] for p in ("bf16", "fp8")}
            out.append(math.log(quick(row, own)[0] / row.tokens_per_s_per_gpu))
        return np.array(out)

    def solve(self, kept: list[int], rounds: int = ROUNDS) -> Any:
        """Levenberg-Marquardt within the bounds."""
        import numpy as np

        def residuals(x: Any) -> Any:
            # Beyond 15 % an error counts by its size, not by its square: one odd run must not bend the rest.
            raw = self.errors(x, kept)
            soft = np.where(abs(raw) < 0.15, abs(raw), np.sqrt(np.maximum(0.3 * abs(raw) - 0.0225, 0.0)))
            return np.concatenate((np.sign(raw) * soft, self.weight * (x - self.start)))

        x, damping, at = self.start.copy(), 1e-2, residuals(self.start)
        for _ in range(rounds):
            slope = np.stack([(residuals(x + 0.01 * e) - at) / 0.01 for e in np.eye(x.size)], axis=1)
            for _ in range(4):
                normal = slope.T @ slope
                move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slope.T @ at)
                trial = np.clip(x + np.clip(move, -0.5, 0.5), np.log(self.low), np.log(self.high))
                there = residuals(trial)
                if there @ there < at @ at:
                    x, at, damping = trial, there, damping / 3
                    break
                damping *= 5
            else:
                break
        return x


def fit(path: Path) -> None:
    """The rates fitted to all rows, near the present ones."""
    import numpy as np

    rows = read_rows(path)
    every = list(range(len(rows)))
    found = Fit(rows)
    x = found.solve(every)
    ratio = np.exp(found.errors(x, every)) - 1
    for key, rates in found.rates_from(x).items():
        print(key, rates)
    for row, r in zip(rows, ratio, strict=True):
        print(f"{row.name:42} {100 * r:+6.1f}%")
    print(f"median {np.median(abs(ratio)):.1%}, worst {abs(ratio).max():.1%}")


def held_out(path: Path, rounds: int = 4) -> dict[str, Any]:
    """Errors on rows that a fit from round numbers has not seen: every second row, and every model in turn."""
    import numpy as np

    rows = read_rows(path)
    every = list(range(len(rows)))
    found = Fit(rows, neutral=True)
    sets = {"halves": [every[0::2], every[1::2]]}
    models = sorted({row.spec.name for row in rows})
    sets["models"] = [[i for i in every if rows[i].spec.name == name] for name in models]
    start = np.exp(found.errors(found.start, every)) - 1
    out: dict[str, Any] = {
        "unfitted": {"median": float(np.median(abs(start))), "worst": float(abs(start).max())},
    }
    print(f"round numbers, nothing fitted: median {np.median(abs(start)):.1%}, worst {abs(start).max():.1%}")
    for name, left_out in sets.items():
        errors: dict[int, float] = {}
        for group in left_out:
            x = found.solve([i for i in every if i not in group], rounds)
            for i, e in zip(group, np.exp(found.errors(x, group)) - 1, strict=True):
                errors[i] = float(e)
        sizes = np.array([abs(errors[i]) for i in every])
        worst = int(sizes.argmax())
        out[name] = {
            "median": float(np.median(sizes)),
            "worst": float(sizes.max()),
            "worst_row": rows[worst].name,
            "errors": {rows[i].name: errors[i] for i in every},
        }
        where = f"worst {sizes.max():.1%} ({rows[worst].name})"
        print(f"held out by {name}: median {np.median(sizes):.1%}, {where}", flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=CSV)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--plan", type=int, default=0, metavar="N")
    parser.add_argument("--budget", type=float, default=30.0, metavar="S", help="of every search (default: 30)")
    args = parser.parse_args()
    if args.fit:
        fit(args.csv)
        return
    result = run(args.csv)
    show(result)
    if args.held_out:
        result["held_out"] = held_out(args.csv)
    if args.plan:
        result["plans"] = planned(args.csv, args.plan, args.budget)
    if args.csv == CSV:
        RESULTS.parent.mkdir(exist_ok=True)
        before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        result = {**{name: before[name] for name in ("plans", "held_out") if name in before}, **result}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

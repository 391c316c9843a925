"""Plans that may use host memory, at the same limits: OptPipe, PipeOffload and the tuned plan, as simulated.

    python benchmarks/bench_offload.py                    # the table in docs/offload.md
    python benchmarks/bench_offload.py --models llama3-8b --pp 4 --micro-batches 8 --memory 0.7 --budget 20

Analytic costs on an H100. The limit is a multiple of what 1F1B needs on its fullest rank. Published systems split their
backward where they do not do so themselves; the tuned plan is searched with --offload.
"""

from __future__ import annotations

import argparse

from one_line import start

from octopipe.base.errors import OctoPipeError
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.search.systems import build_plan
from octopipe.search.tuner import tune
from octopipe.simulation.simulator import simulate

COLUMNS = ("1f1b", "zb-2p", "pipe-offload", "optpipe")


def published(name: str, costs: CostTable, ranks: int, micro_batches: int) -> float | None:
    """The step of a published system in ms; None where it does not apply or does not fit."""
    try:
        plan = build_plan(name, costs, ranks, micro_batches, split_backward=True)
    except OctoPipeError:
        return None
    timeline = simulate(plan, costs)
    return timeline.step_ms if timeline.fits else None


def tuned(costs: CostTable, ranks: int, micro_batches: int, budget_s: float) -> float | None:
    """The step of the plan that `tune --offload` finds."""
    try:
        result = tune(costs, ranks, micro_batches, budget_s=budget_s, offload=True, seed=0)
    except OctoPipeError:
        return None
    return simulate(result.plan, costs).step_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama3-8b")
    parser.add_argument("--pp", type=int, nargs="+", default=[4])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8])
    parser.add_argument("--memory", type=float, nargs="+", default=[0.8, 0.9, 1.1], help="times what 1F1B needs")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of search for the tuned plan")
    args = parser.parse_args()
    print(f"| model, pp, micro-batches | limit, GiB (x 1F1B) | {' | '.join(COLUMNS)} | tune --offload |")
    print(f"|---|--:{'|--:' * (len(COLUMNS) + 1)}|")
    for model in args.models.split(","):
        for ranks in args.pp:
            for count in args.micro_batches:
                roomy = resolve_costs(model, pp=ranks, gpu="h100", tp=1).replace(rank_memory_bytes=())
                needs = float(simulate(build_plan("1f1b", roomy, ranks, count), roomy).peak_bytes.max())
                for share in args.memory:
                    costs = roomy.replace(rank_memory_bytes=(share * needs,) * ranks)
                    steps = [published(name, costs, ranks, count) for name in COLUMNS]
                    steps.append(tuned(costs, ranks, count, args.budget))
                    cells = " | ".join("does not fit" if ms is None else f"{ms:.1f}" for ms in steps)
                    limit = f"{share * needs / 2**30:.1f} ({share:g})"
                    print(f"| {model}, {ranks}, {count} | {limit} | {cells} |", flush=True)


if __name__ == "__main__":
    start(main)

"""How fast the simulator is: evaluations and ops per second, lowering, start-up, very large clusters.

Prints a Markdown table; ratios are taken in one run. Run: python benchmarks/bench_simulate.py
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
import twin
from one_line import start

from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.plans.pair_price import op_durations
from octopipe.plans.plan import Plan, route_neighbours
from octopipe.plans.price import hop_times
from octopipe.search.systems import build_plan
from octopipe.search.systems.split import split_backward
from octopipe.simulation import engine as _engine
from octopipe.simulation.lowering import lower
from octopipe.simulation.simulator import jitter_ms, makespan_ms, simulate


def median_s(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and spread (max - min) in seconds, after one warm-up call."""
    work()
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        took.append(time.perf_counter() - begin)
    return statistics.median(took), max(took) - min(took)


def large_plan() -> tuple[Plan, CostTable]:
    """56 stages of uneven layers x 32 micro-batches, F/I/W, 16 ranks (56 is no multiple of 16: dealt in turn)."""
    from octopipe.plans.plan import Op, Stage

    rng = np.random.default_rng(0)
    stages, ranks, micro_batches = 56, 16, 32
    costs = CostTable.uniform(num_layers=stages, p2p_ms=0.3).replace(
        forward_ms=rng.uniform(1, 4, stages), input_ms=rng.uniform(1, 4, stages), weight_ms=rng.uniform(1, 4, stages),
        activation_bytes=np.ones(stages), stash_bytes=np.full(stages, 0.5),
    )  # fmt: skip
    orders: list[list[Op]] = [[] for _ in range(ranks)]
    for r in range(ranks):
        mine = range(r, stages, ranks)
        orders[r] += [Op(s, "F", m) for s in mine for m in range(micro_batches)]
        orders[r] += [Op(s, k, m) for s in reversed(mine) for m in range(micro_batches) for k in "IW"]
    plan = Plan(
        num_layers=stages,
        num_ranks=ranks,
        num_micro_batches=micro_batches,
        stages=tuple(Stage(first=s, stop=s + 1, rank=s % ranks) for s in range(stages)),
        orders=tuple(map(tuple, orders)),
    )
    return plan.check(), costs


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    plan, costs = large_plan()
    program = lower(plan, costs)
    operations = plan.table().stage.size + 2 * program.num_transfers
    t = plan.table()
    before, after = route_neighbours(plan)
    forward, gradient = hop_times(plan, costs)
    arrays = (
        t.offsets, t.stage, t.kind, t.micro_batch, op_durations(plan, costs), before, after,
        np.asarray(plan.route_of_micro_batch, np.int32), np.array([s.rank for s in plan.stages], np.int32),
        forward, gradient,
    )  # fmt: skip
    fast, fast_spread = median_s(lambda: _engine.evaluate(*arrays), 200)
    assert abs(_engine.evaluate(*arrays) - simulate(plan, costs).makespan_ms) < 1e-9
    slow, _ = median_s(lambda: twin.timing(plan, costs), 3)
    full, full_spread = median_s(lambda: simulate(program, costs, check=False), 20)
    lowering, lowering_spread = median_s(lambda: lower(plan, costs), 10)

    def cluster_of_8192() -> float:
        big = resolve_costs("llama3-70b", pp=8, tp=1, dp=1024, memory_gib=1e6)
        pipeline = split_backward(build_plan("1f1b", big, 8, 32), big)
        prog = lower(pipeline, big)
        return simulate(prog, big).step_ms + float(jitter_ms(prog, big, sigma=0.05, runs=1024).max())

    scale, scale_spread = median_s(cluster_of_8192, 3)
    command = [sys.executable, "-m", "octopipe", "--help"]
    start, start_spread = median_s(lambda: subprocess.run(command, capture_output=True, check=True), 10)
    rows = [
        (f"evaluate {operations:,} ops (sends and receives counted)", fast, fast_spread,
         f"{1 / fast:,.0f} evaluations/s, {operations / fast / 1e6:.0f} M ops/s"),
        ("the same in plain Python (the test twin)", slow, 0.0, f"{slow / fast:,.0f}x slower"),
        ("full Timeline with memory curves", full, full_spread, ""),
        ("lowering, with the deadlock proof", lowering, lowering_spread, f"{program.num_transfers:,} transfers"),
        ("8192 GPUs: PP 8 x DP 1024, 1024 jittered pipelines", scale, scale_spread, ""),
        ("`octopipe --help`", start, start_spread, ""),
    ]  # fmt: skip
    print("| what | median | spread | |")
    print("|---|---|---|---|")
    for what, seconds, spread, note in rows:
        print(f"| {what} | {1e3 * seconds:,.3f} ms | {1e3 * spread:,.3f} ms | {note} |")
    assert makespan_ms(plan, costs) > 0


if __name__ == "__main__":
    start(main)

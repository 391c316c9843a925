"""Search cost: Algorithm 1 against random search and the exact method; the default method against the optimum.

Prints Markdown. The case is the paper's ("Pipeline Search Cost"): Nemotron-H 8B with its layer pattern repeated up to
224 layers, 8 ranks, 16 micro-batches. Layer times are the paper authors'.

    python benchmarks/bench_search.py              the table of phases, convergence over several seeds, exact
    python benchmarks/bench_search.py --optimum    the default method against CP-SAT on 50 random small instances
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from one_line import start

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import Link, Network
from octopipe.costs.table import CostTable
from octopipe.search.algorithm1 import PHASES, IterativeSearch, RandomSearch
from octopipe.search.algorithm1.settings import Settings
from octopipe.search.exact import solve
from octopipe.search.result import Step
from octopipe.search.tuner import tune
from octopipe.simulation.bounds.bounds import lower_bound
from octopipe.views.reproduce.bench import Bench, Options, find_profiles
from octopipe.views.reproduce.parts.search import MICRO_BATCHES, RANKS, case

FOREVER = 1 << 30
ALONE: dict[str, Any] = {"systems": False, "settings": Settings(patience=FOREVER)}
"""From 1F1B alone, as the paper compares them, and without giving up."""


def scaled() -> tuple[CostTable, str]:
    """The 224-layer variant, the same as docs/reproduction.md's, and where its layer times come from."""
    return case(Bench(options=Options(profiles=find_profiles(None)))), "the authors' layer times"


def at_iteration(log: list[Step], iteration: int) -> float:
    return log[min(iteration, len(log) - 1)].best_ms


def at_second(log: list[Step], second: float) -> float:
    return next((s.best_ms for s in reversed(log) if s.seconds <= second), log[0].best_ms)


def mean_and_range(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def search_cost(seeds: int, first: int, iterations: int, budget_s: float) -> None:
    costs, source = scaled()
    bound = lower_bound(costs, RANKS, MICRO_BATCHES)
    print(f"## Search cost: {costs.model}, pp {RANKS}, {MICRO_BATCHES} micro-batches, {source}\n")
    print(f"Lower bound {bound.ms:.1f} ms ({bound.name}). Seeds {first} to {first + seeds - 1}; ", end="")
    print("step times in ms as mean (range).\n")
    # Compile before the clock runs.
    IterativeSearch(costs, RANKS, MICRO_BATCHES, budget_s=60, iterations=8, systems=False).run()
    kinds = {"Algorithm 1": IterativeSearch, "random": RandomSearch}
    by_count: dict[str, list[list[Step]]] = {}
    by_time: dict[str, list[list[Step]]] = {}
    for name, kind in kinds.items():
        for kept, limit, most in ((by_count, 1e6, iterations), (by_time, budget_s, None)):
            kept[name] = [
                kind(costs, RANKS, MICRO_BATCHES, budget_s=limit, seed=s, iterations=most, **ALONE).run().log
                for s in range(first, first + seeds)
            ]
    print(f"| {iterations} iterations | partition | placement | schedule | seconds a run |")
    print("|---|---|---|---|---|")
    for name, logs in by_count.items():
        every = [s.phase for log in logs for s in log[1:]]
        shares = " | ".join(f"{100 * every.count(p) / len(every):.1f} %" for p in PHASES)
        print(f"| {name} | {shares} | {statistics.mean(log[-1].seconds for log in logs):.1f} |")
    print("| paper, OctoPipe | 51.7 % | 34.8 % | 13.5 % | |\n| paper, random | 35.6 % | 31.6 % | 32.8 % | |\n")
    marks = [k for k in (0, 10, 30, 100, 200, 300, 500) if k < iterations] + [iterations]
    print("| best after iteration | " + " | ".join(map(str, marks)) + " |")
    print("|---|" + "---|" * len(marks))
    for name, logs in by_count.items():
        print(f"| {name} | " + " | ".join(mean_and_range([at_iteration(log, k) for log in logs]) for k in marks) + " |")
    times = [budget_s * f for f in (0.1, 0.25, 0.5, 1.0)]
    print("\n| best after second | " + " | ".join(f"{t:g}" for t in times) + " |")
    print("|---|" + "---|" * len(times))
    for name, logs in by_time.items():
        print(f"| {name} | " + " | ".join(mean_and_range([at_second(log, t) for log in logs]) for t in times) + " |")
    for what, logs_of in ((f"{iterations} iterations", by_count), (f"{budget_s:g} s", by_time)):
        ours, theirs = ([log[-1].best_ms for log in logs_of[n]] for n in kinds)
        wins = sum(a < b for a, b in zip(ours, theirs, strict=True))
        better = 100 * (statistics.mean(theirs) / statistics.mean(ours) - 1)
        print(f"\nAt {what} Algorithm 1 is {better:+.2f} % faster than random on average, in {wins} of {seeds} seeds.")
    began = time.monotonic()
    try:
        found = solve(costs, RANKS, MICRO_BATCHES, budget_s=budget_s)
        print(f"\nExact: {found.found.timeline.step_ms:.1f} ms in {time.monotonic() - began:.1f} s.")
    except OctoPipeError as error:
        print(f"\nExact, after {time.monotonic() - began:.1f} s: {error}")


def random_instance(lot: np.random.Generator) -> tuple[CostTable, int, int]:
    """A small heterogeneous model: 2 to 4 ranks, 2 to 6 micro-batches, a heavy last layer, transfers."""
    ranks, layers = int(lot.integers(2, 5)), int(lot.integers(4, 7))
    layers = max(layers, ranks)
    micro_batches = int(lot.integers(2, 7)) if ranks < 4 else int(lot.integers(2, 5))
    forward, back, weight = (lot.uniform(low, high, layers) for low, high in ((0.5, 2.0), (0.5, 3.0), (0.1, 1.5)))
    forward[-1] *= lot.uniform(1.0, 3.0)
    # Gradients far too large to reduce in the step: bidirectional pipelines, which hold layers twice, are no rivals
    # here, as the exact method knows only plans that hold each layer once.
    link = Link(latency_ms=float(lot.uniform(0.0, 0.3)), ms_per_byte=1e-9)
    costs = CostTable(
        model="random",
        symbols="T" * layers,
        forward_ms=forward,
        input_ms=back,
        weight_ms=weight,
        gradient_bytes=np.full(layers, 1e12),
        network=Network(intra=link, inter=link),
        rank_slowdown=tuple(lot.uniform(1.0, 1.5, ranks)) if lot.random() < 0.3 else (),
    )
    return costs, ranks, micro_batches


def optimum(instances: int, exact_s: float, best_s: float, seed: int) -> None:
    print(f"## `best` ({best_s:g} s) against CP-SAT ({exact_s:g} s) on {instances} random heterogeneous instances\n")
    print("| # | layers | ranks | micro-batches | CP-SAT, ms | its bound, ms | proven | best, ms | above CP-SAT |")
    print("|---|---|---|---|---|---|---|---|---|")
    lot, gaps, proven = np.random.default_rng(seed), [], 0
    for k in range(instances):
        costs, ranks, micro_batches = random_instance(lot)
        exact = tune(costs, ranks, micro_batches, method="exact", budget_s=exact_s)
        found = tune(costs, ranks, micro_batches, budget_s=best_s, copies=False)
        gaps.append(100 * (found.step_ms / exact.step_ms - 1))
        proven += exact.optimal
        print(
            f"| {k} | {costs.num_layers} | {ranks} | {micro_batches} | {exact.step_ms:.3f} "
            f"| {exact.lower_bound_ms:.3f} | {'yes' if exact.optimal else 'no'} | {found.step_ms:.3f} "
            f"| {gaps[-1]:+.2f} % |",
            flush=True,
        )
    within = sum(g <= 2.0 for g in gaps)
    print(f"\nWithin 2 % on {within} of {instances}; worst {max(gaps):+.2f} %, mean {statistics.mean(gaps):+.2f} %.")
    print(f"CP-SAT proved {proven} optima; of the others its best plan counts.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--budget", type=float, default=10.0, metavar="S", help="seconds for the comparison by time")
    parser.add_argument("--optimum", action="store_true")
    parser.add_argument("--instances", type=int, default=50)
    parser.add_argument("--exact-s", type=float, default=15.0)
    parser.add_argument("--best-s", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    args = parser.parse_args()
    if args.optimum:
        optimum(args.instances, args.exact_s, args.best_s, args.seed)
    else:
        search_cost(args.seeds, args.seed, args.iterations, args.budget)


if __name__ == "__main__":
    start(main)

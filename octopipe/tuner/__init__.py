"""The tuner: partition, placement and order decided together, under a memory limit and a time budget.

    result = octopipe.tune(costs, num_ranks=8, num_micro_batches=16, budget_s=30)
    result.plan, result.step_ms, result.gap, result.explanation

Methods: `best` (the default), `octopipe` (Algorithm 1 of the paper), `random` (the same moves, phases drawn by
lot) and `exact` (CP-SAT, small cases).
"""

from __future__ import annotations

import time
from functools import cache
from typing import Literal

from octopipe.bounds import lower_bound, work_bound_ms
from octopipe.cost import CostTable
from octopipe.errors import OctoPipeError
from octopipe.plan import Plan
from octopipe.simulator import simulate
from octopipe.tuner.algorithm1 import IterativeSearch
from octopipe.tuner.best import BestSearch
from octopipe.tuner.exact import solve
from octopipe.tuner.explain import explain
from octopipe.tuner.random_search import RandomSearch
from octopipe.tuner.result import Callback, Progress, Step, TuneResult
from octopipe.tuner.robust import SIGMA, most_robust

Method = Literal["best", "octopipe", "random", "exact"]
METHODS: tuple[Method, ...] = ("best", "octopipe", "random", "exact")

__all__ = ["METHODS", "Method", "Progress", "Step", "TuneResult", "tune"]


def tune(
    costs: CostTable,
    num_ranks: int,
    num_micro_batches: int,
    *,
    budget_s: float = 30.0,
    seed: int = 0,
    method: Method = "best",
    start: Plan | None = None,
    robust: bool = False,
    workers: int | None = None,
    iterations: int | None = None,
    progress: Callback | None = None,
    recompute: bool = True,
    copies: bool = True,
) -> TuneResult:
    """The fastest plan found within the budget; it always fits in memory.

    `recompute`: may activations be recomputed? `copies`: may layers be held by more than one rank (method "best")?
    `iterations` (moves per worker) instead of time makes the result depend on seed and workers alone.
    """
    _check(costs, num_ranks, num_micro_batches, budget_s, method, start)
    if method == "best":
        _compile()
    began = time.monotonic()
    recomputes = recompute or (start is not None and any(s.recompute for s in start.stages))
    bound_name, bound = lower_bound(costs, num_ranks, num_micro_batches, recomputes)
    optimal = False
    setting = (costs, num_ranks, num_micro_batches)
    if method == "exact":
        solved = solve(*setting, budget_s=budget_s, seed=seed, workers=workers, start=start)
        found, optimal = solved.found, solved.optimal
        if solved.lower_bound_ms > bound:
            bound_name, bound = "CP-SAT", solved.lower_bound_ms
    elif method == "best":
        found = BestSearch(
            *setting,
            budget_s=budget_s,
            seed=seed,
            workers=workers,
            iterations=iterations,
            start=start,
            recompute=recompute,
            copies=copies,
            lower_bound_ms=bound,
            progress=progress,
            jitter=SIGMA if robust else 0.0,
        ).run()
    else:
        search = IterativeSearch if method == "octopipe" else RandomSearch
        found = search(
            *setting,
            budget_s=budget_s,
            seed=seed,
            iterations=iterations,
            start=start,
            recompute=recompute,
            lower_bound_ms=bound,
            progress=progress,
        ).run()
    chosen, timeline, mean_ms = found.plan, found.timeline, None
    if robust:
        chosen, mean_ms = most_robust(getattr(found, "finalists", []) or [chosen], costs, seed=seed)
        timeline = simulate(chosen, costs)
    step_ms = timeline.step_ms
    if chosen.replicas():
        # The other arguments speak of the one rank of a layer.
        bound_name, bound = "work", work_bound_ms(costs, num_ranks, num_micro_batches)
    plan = chosen.with_extra(
        system="octopipe",
        step_ms=step_ms,
        lower_bound_ms=bound,
        method=method,
        seed=seed,
        costs=costs.digest(),
        search=[s.as_dict() for s in found.log],
    )
    return TuneResult(
        plan=plan,
        step_ms=step_ms,
        lower_bound_ms=bound,
        bound_name=bound_name,
        method=method,
        seconds=time.monotonic() - began,
        iterations=found.iterations,
        log=tuple(found.log),
        explanation=explain(chosen, costs, timeline, bound, bound_name),
        interrupted=found.interrupted,
        optimal=optimal,
        mean_jittered_ms=mean_ms,
        phase_iterations=found.phase_iterations,
    )


@cache
def _compile() -> None:
    """Make numba compile (or load) the search before the clock starts: a budget is for searching."""
    tiny = CostTable.uniform(num_layers=4, activation_bytes=1.0).replace(rank_memory_bytes=(1e3,))
    BestSearch(
        tiny,
        2,
        2,
        budget_s=600.0,
        seed=0,
        workers=1,
        iterations=8,
        start=None,
        recompute=True,
        copies=True,
        lower_bound_ms=0.0,
        progress=None,
    ).run()


def _check(
    costs: CostTable, num_ranks: int, num_micro_batches: int, budget_s: float, method: str, start: Plan | None
) -> None:
    if method not in METHODS:
        raise OctoPipeError(f"unknown method {str(method)[:40]!r}; one of {', '.join(METHODS)}")
    if num_ranks < 1 or num_micro_batches < 1:
        raise OctoPipeError(f"pp {num_ranks} and {num_micro_batches} micro-batches; both must be at least 1")
    if num_ranks > costs.num_layers:
        raise OctoPipeError(
            f"pp {num_ranks} is larger than the {costs.num_layers} layers of {costs.model}; use a smaller --pp"
        )
    if not budget_s > 0:
        raise OctoPipeError(f"budget {budget_s} s; give more than 0 seconds")
    for name, given in (("rank speeds", costs.rank_slowdown), ("memory sizes", costs.rank_memory_bytes)):
        if len(given) > (1 if name == "memory sizes" else 0) and len(given) < num_ranks:
            raise OctoPipeError(f"{len(given)} {name} for {num_ranks} ranks; give one per rank")
    factor = costs.micro_batch_factor
    if factor is not None and factor.shape[0] < num_micro_batches:
        raise OctoPipeError(f"sizes of {factor.shape[0]} micro-batches for {num_micro_batches}; give one each")
    if start is not None and (start.num_ranks, start.num_micro_batches, start.num_layers) != (
        num_ranks,
        num_micro_batches,
        costs.num_layers,
    ):
        raise OctoPipeError(
            f"the start has {start.num_layers} layers, {start.num_ranks} ranks, "
            f"{start.num_micro_batches} micro-batches; "
            f"this setting has {costs.num_layers}, {num_ranks}, {num_micro_batches}: give a plan for it"
        )

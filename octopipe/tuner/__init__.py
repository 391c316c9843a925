"""The tuner: partition, placement and order decided together, under a memory limit and a time budget.

    result = octopipe.tune(costs, num_ranks=8, num_micro_batches=16, budget_s=30)
    result.plan, result.step_ms, result.gap, result.explanation

Methods: `best` (the default), `octopipe` (Algorithm 1 of the paper), `random` (the same moves, phases drawn by
lot) and `exact` (CP-SAT, small cases).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Literal

from octopipe.bounds import PlanClass, lower_bound
from octopipe.cost import CostTable
from octopipe.errors import OctoPipeError
from octopipe.limits import checked_seed, refuse_too_large
from octopipe.plan import Plan
from octopipe.simulator import simulate
from octopipe.tuner.best import BestSearch
from octopipe.tuner.exact import solve
from octopipe.tuner.explain import explain
from octopipe.tuner.paper import PHASES, IterativeSearch, RandomSearch
from octopipe.tuner.result import Callback, Progress, Step, TuneResult
from octopipe.tuner.robust import SIGMA, most_robust

Method = Literal["best", "octopipe", "random", "exact"]
METHODS: tuple[Method, ...] = ("best", "octopipe", "random", "exact")

__all__ = ["METHODS", "PHASES", "Method", "PlanClass", "Progress", "Step", "TuneResult", "tune"]


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
    copies: bool | None = None,
    phases: Sequence[str] = PHASES,
) -> TuneResult:
    """The fastest plan found within the budget; it always fits in memory.

    `recompute`: may activations be recomputed? `copies`: may layers be held by more than one rank (method "best")? Left
    open they may where the costs know weights; without, copies would cost nothing. `phases`: those of Algorithm 1 that
    are on (methods "octopipe" and "random"). `TuneResult.plans` says which plans the bound and `optimal` speak of.
    `iterations` (moves per worker) instead of time makes the result depend on seed and workers alone.
    """
    _check(costs, num_ranks, num_micro_batches, budget_s, method, start)
    checked_seed(seed)
    if tuple(phases) != PHASES and method not in ("octopipe", "random"):
        raise OctoPipeError(f"method {method} has no phases to switch; use --method octopipe with --phases")
    notes = []
    if copies is None:
        copies = bool(costs.static_bytes.any())
        if not copies and method == "best":
            notes.append("no weights are known, so no layer is held twice: it would cost nothing; --copies allows it")
    _compile(method)
    began = time.monotonic()
    setting = (costs, num_ranks, num_micro_batches)
    plans = _class_of(start, PlanClass(recompute=recompute, copies=copies and method == "best"))
    bound_name, bound = lower_bound(*setting, *plans)
    optimal = False
    if method == "exact":
        solved = solve(
            *setting, budget_s=budget_s, seed=seed, workers=workers, start=start, recompute=recompute, progress=progress
        )
        found, optimal = solved.found, solved.optimal
        if solved.lower_bound_ms > bound and not plans.copies:
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
            phases=phases,
        ).run()
    chosen, timeline, mean_ms = found.plan, found.timeline, None
    if robust:
        chosen, mean_ms = most_robust(getattr(found, "finalists", []) or [chosen], costs, seed=seed)
        timeline = simulate(chosen, costs)
    step_ms = timeline.step_ms
    if (reached := _class_of(chosen, plans)) != plans:
        plans = reached
        bound_name, bound = lower_bound(*setting, *plans)
    plan = chosen.with_extra(
        system="octopipe",
        step_ms=step_ms,
        lower_bound_ms=bound,
        bound_of=plans.words,
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
        explanation=explain(chosen, costs, timeline, bound, bound_name, plans),
        plans=plans,
        systems=dict(found.systems),
        notes=tuple(notes),
        interrupted=found.interrupted,
        optimal=optimal,
        mean_jittered_ms=mean_ms,
        phase_iterations=found.phase_iterations,
    )


def _class_of(plan: Plan | None, plans: PlanClass) -> PlanClass:
    """The class, widened to hold this plan."""
    if plan is None:
        return plans
    recomputes = any(s.recompute for s in plan.stages)
    return PlanClass(recompute=plans.recompute or recomputes, copies=plans.copies or bool(plan.replicas()))


@cache
def _compile(method: Method) -> None:
    """Make numba compile (or load) the search before the clock starts: a budget is for searching."""
    tiny = CostTable.uniform(num_layers=4, activation_bytes=1.0).replace(rank_memory_bytes=(1e3,))
    lower_bound(tiny, 2, 2)
    if method != "best":
        IterativeSearch(tiny, 2, 2, budget_s=600.0, iterations=6).run()
        return
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
    refuse_too_large(num_ranks, num_micro_batches)
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

"""The tuner: partition, placement and order decided together, under a memory limit and a time budget.

    result = octopipe.tune(costs, num_ranks=8, num_micro_batches=16, budget_s=30)
    result.plan, result.step_ms, result.gap, result.explanation

Methods: `best` (the default), `octopipe` (Algorithm 1 of the paper), `random` (the same moves, phases drawn by
lot) and `exact` (CP-SAT, small cases).
"""

from __future__ import annotations

import time
from typing import Any, Literal

from octopipe.bounds import lower_bound, work_bound_ms
from octopipe.cost import CostTable
from octopipe.errors import OctoPipeError
from octopipe.hide import hide_transfers
from octopipe.plan import Plan
from octopipe.simulator import simulate
from octopipe.timeline import Timeline
from octopipe.tuner.explain import explain
from octopipe.tuner.result import Callback, Found, Progress, Step, TuneResult
from octopipe.tuner.robust import most_robust
from octopipe.tuner.search import Search
from octopipe.tuner.settings import SETTINGS
from octopipe.tuner.warm import compile_search

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
    `iterations` (moves per lane) instead of time makes the result depend on the seed alone, on any machine.
    """
    _check(costs, num_ranks, num_micro_batches, budget_s, method, start)
    if method == "best":
        compile_search()
    began = time.monotonic()
    found, optimal, proven_ms = _search(
        costs, num_ranks, num_micro_batches, budget_s=budget_s, seed=seed, method=method, start=start, robust=robust,
        workers=workers, iterations=iterations, progress=progress, recompute=recompute, copies=copies,
    )  # fmt: skip
    chosen, mean_ms = found.plan, None
    if robust:
        chosen, mean_ms = most_robust(found.finalists or [chosen], costs, seed=seed)
    chosen, timeline = _hide(chosen, costs, budget_s, iterations, seed)
    step_ms = timeline.step_ms
    bound_name, bound = lower_bound(costs, num_ranks, num_micro_batches, any(s.recompute for s in chosen.stages))
    if proven_ms > bound:
        bound_name, bound = "CP-SAT", proven_ms
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
    overlap = timeline.overlap
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
        hidden_share=overlap.rate,
        overlappable_share=overlap.overlappable_rate,
    )


def _search(
    costs: CostTable, num_ranks: int, num_micro_batches: int, *, method: Method, robust: bool, copies: bool,
    workers: int | None, **given: Any,
) -> tuple[Found, bool, float]:  # fmt: skip
    """What a method finds, whether it proved that nothing is faster, and the bound it proved itself."""
    setting, bound_ms = (costs, num_ranks, num_micro_batches), 0.0
    recompute = bool(given["recompute"])
    if method == "exact":
        from octopipe.tuner.exact import solve

        solved = solve(*setting, budget_s=given["budget_s"], seed=given["seed"], workers=workers, start=given["start"])
        return solved.found, solved.optimal, solved.lower_bound_ms
    if method == "best":
        # Only a bound of all plans that are searched may end the search.
        if copies:
            bound_ms = work_bound_ms(*setting)
        else:
            bound_ms = lower_bound(*setting, recompute).ms
        jitter = SETTINGS.jitter if robust else 0.0
        return Search(
            *setting, workers=workers, copies=copies, lower_bound_ms=bound_ms, jitter=jitter, **given
        ).run(), False, 0.0  # fmt: skip
    from octopipe.tuner.paper import IterativeSearch, RandomSearch

    search = IterativeSearch if method == "octopipe" else RandomSearch
    return search(*setting, lower_bound_ms=lower_bound(*setting, recompute).ms, **given).run(), False, 0.0


def _hide(
    plan: Plan, costs: CostTable, budget_s: float, iterations: int | None, seed: int
) -> tuple[Plan, Timeline]:
    """The plan with transfers behind computation where that costs nothing, and its timeline."""
    before = simulate(plan, costs)
    if iterations is not None:
        moves, seconds = SETTINGS.hide_moves, None
    else:
        moves, seconds = None, min(SETTINGS.hide_s, SETTINGS.hide * budget_s)
    better = hide_transfers(plan, costs, moves=moves, budget_s=seconds, seed=seed)
    after = simulate(better, costs)
    return (better, after) if after.fits >= before.fits and after.step_ms <= before.step_ms else (plan, before)


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

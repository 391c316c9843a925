"""Improvement of a split beyond 1F1B: zero-bubble schedules, layouts, tuned orders.

Knows: which published schedules are tried and how the tuner is called for a runtime. Does not know: which splits are
worth it, or how the budget is shared (`search.py`).
"""

from __future__ import annotations

from dataclasses import replace

from octopipe.base.errors import OctoPipeError
from octopipe.plans.plan import Plan
from octopipe.search.graphs.branches import placed
from octopipe.search.planner.budget import Budget, Stop
from octopipe.search.planner.pricing import Candidate, Pricer
from octopipe.search.planner.runtimes import Runtime, Target
from octopipe.search.planner.splits import Split

TUNABLE_OPS = 400_000
"""Plans with more ops are not tuned, because a search of a few seconds would make only a few moves."""
KEPT_KERNELS = 20
"""With at least this many files in the kernel cache, a search has little left to compile."""
COMPILING_S = 8.0
"""Seconds that compiling the kernels of a search may take."""
LEAST_S = 0.5
"""A search is not started if less time than this is left."""


def schedules(
    pricer: Pricer, begun: Candidate, budget: Budget, *, recompute: str = "auto", pairs: bool = True
) -> list[Candidate]:
    """Return the split under zero-bubble schedules and, if experts exchange tokens and pairs are allowed, under
    DualPipeV, which hides the exchange. These are what a tuned order has to beat, and the fallback if tuning finds
    nothing."""
    exchanges = pairs and begun.costs is not None and begun.costs.exchanges
    out, ops = [], ops_of(begun)
    for system in ("zb-v", "zb-h1", *(["dualpipev"] if exchanges else [])):
        # Split backwards have twice as many ops, and up to two recomputation modes are simulated.
        if budget.left(ops) > budget.simulating_s(4 * ops) and not budget.stop():
            found = pricer.scheduled(begun.split, system, recompute=recompute)
            out += [found] if found is not None else []
    return out


def place_branches(pricer: Pricer, candidate: Candidate, over: Stop) -> Candidate | None:
    """Return the split with the stages of its branches moved to better ranks, as far as time allows; None if that does
    not fit or is not faster."""
    plan, costs = candidate.plan, candidate.costs
    assert plan is not None and costs is not None
    found = pricer.of_plan(candidate.split, placed(plan, costs, over), costs, "placed")
    return found if found.fits and found.step_ms < candidate.step_ms else None


def ops_of(candidate: Candidate) -> int:
    return 0 if candidate.plan is None else sum(map(len, candidate.plan.orders))


def target_of(split: Split, runtime: Runtime, *, forks: bool = False) -> Target:
    """Return the class of plans that a search may return. Only `octopipe train` runs copies of layers and recomputation
    by R ops; it is assumed for runtime `any` if it can run the split, or if layers fork (`octopipe.Pipeline`)."""
    assert runtime.target is not None
    return "torch" if runtime.name == "any" and not forks and not split.whole_layers else runtime.target


def without_kernels(budget: Budget) -> str:
    """Load the search's kernels from the cache or compile them; return the reason if there is not enough time for that,
    otherwise an empty string."""
    from octopipe.base.compile.store import private_folder
    from octopipe.search.tuner.warm import compile_kernels

    folder = private_folder()
    kept = folder is not None and sum(1 for _ in folder.iterdir()) >= KEPT_KERNELS
    if kept and budget.left() < LEAST_S:
        return "the time left is too short for it"
    if not kept and budget.left() < COMPILING_S:
        return "the search's kernels are not compiled yet, and time is too short for it"
    compile_kernels("best")
    return ""


def tune_candidate(
    pricer: Pricer,
    candidate: Candidate,
    seconds: float,
    seed: int,
    runtime: Runtime,
    recompute: str,
    budget: Budget,
) -> tuple[Candidate | None, str, bool]:
    """Tune the candidate's split among the plans that the runtime can run, within about `seconds`. Return the tuned
    candidate (None if nothing faster was found), the reason if no search ran, and whether a stop was requested."""
    from octopipe.search.tuner import tune

    plan, costs = candidate.plan, candidate.costs
    assert plan is not None and costs is not None
    ops = ops_of(candidate)
    if ops > TUNABLE_OPS:
        return None, f"its {ops:,} ops a step are more than a search of seconds improves", budget.stop()
    searching = seconds - budget.tuning_s(ops)
    if searching < LEAST_S:
        return None, "the time left is too short for it", budget.stop()
    start: Plan | None = None
    forks = costs.graph is not None  # the search for such plans begins with chains
    if candidate.fits and not forks and not any(s.recompute for s in plan.stages):
        start = replace(plan, pairs=frozenset())
    target = target_of(candidate.split, runtime, forks=forks)
    ours = target == "octopipe" and (runtime.name != "any" or candidate.split.whole_layers)
    whole = costs.setup is not None and costs.setup.recompute == "full"
    if whole and recompute == "auto" and runtime.name == "any" and ours:
        # The search chooses the recomputed layers itself, better than a number of layers that holds for all ranks.
        costs, start = pricer.costs(candidate.split, "selective"), None
    began = budget.used()
    until = began + searching + 0.5 * (seconds - searching)
    try:
        result = tune(
            costs,
            plan.num_ranks,
            plan.num_micro_batches,
            budget_s=searching,
            seed=seed,
            recompute=recompute == "auto" and ours,
            copies=None if ours else False,
            start=start,
            target=target,
            progress=lambda seen: budget.stop() or budget.used() > until,
        )
    except OctoPipeError:
        return None, "", budget.stop()
    budget.tuned(ops, budget.used() - began - searching)
    if candidate.fits and result.step_ms >= candidate.step_ms:
        return None, "", budget.stop()
    how = "layout" if target == "megatron" else "tuned"
    return pricer.of_plan(candidate.split, result.plan, costs, how), "", budget.stop()

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
"""With more ops than this, a search of a few seconds makes only a few moves."""
KEPT_KERNELS = 20
"""Number of files in the kernel cache from which on a search has little left to compile."""
COMPILING_S = 8.0
"""Seconds that compiling the kernels of a search may take."""
LEAST_S = 0.5
"""Seconds below which a search is not worth beginning."""


def schedules(pricer: Pricer, begun: Candidate, budget: Budget, *, pairs: bool = True) -> list[Candidate]:
    """The split under zero-bubble schedules, and where experts exchange tokens under DualPipeV, which hides that
    exchange: what a tuned order has to beat, and what is left where it finds none."""
    exchanges = pairs and begun.costs is not None and begun.costs.exchanges
    out, ops = [], ops_of(begun)
    for system in ("zb-v", "zb-h1", *(["dualpipev"] if exchanges else [])):
        # Twice as many ops, under two ways of recomputing.
        if budget.left(ops) > budget.simulating_s(4 * ops) and not budget.stop():
            found = pricer.scheduled(begun.split, system)
            out += [found] if found is not None else []
    return out


def place_branches(pricer: Pricer, candidate: Candidate, over: Stop) -> Candidate | None:
    """The split with every stage of its branches on the rank where it is best, as far as time allows; None where that
    is no faster."""
    plan, costs = candidate.plan, candidate.costs
    assert plan is not None and costs is not None
    found = pricer.of_plan(candidate.split, placed(plan, costs, over), costs, "placed")
    return found if found.fits and found.step_ms < candidate.step_ms else None


def ops_of(candidate: Candidate) -> int:
    return 0 if candidate.plan is None else sum(map(len, candidate.plan.orders))


def target_of(split: Split, runtime: Runtime, *, forks: bool = False) -> Target:
    """Which plans a search may return: layers on several ranks and recomputation by ops run in `octopipe train` alone.
    Where layers fork, `octopipe.Pipeline` runs every plan."""
    assert runtime.target is not None
    return "torch" if runtime.name == "any" and not forks and not split.whole_layers else runtime.target


def without_kernels(budget: Budget) -> str:
    """Make the search's kernels ready, from what was kept or by compiling them; the reason where that would end too
    late."""
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
    """The candidate's split tuned as far as the runtime can run it, None where that found nothing faster; the reason
    where no search ran; and whether somebody ended it. All of it takes about `seconds`."""
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
        # The search knows better than a number of layers for all which ones to recompute.
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

"""The last step of a search that may split the head: compares the best plan with a split head and the best without.

Knows: what is compared, and what a search reports about it. Does not know: how either plan is found.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from octopipe.base.compile import usable_cores
from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.search.graphs.cut_head import CutHeadSearch
from octopipe.search.graphs.layout import Layout
from octopipe.search.graphs.surrogate import chain_for, layout_of, with_shards
from octopipe.search.result import Callback, Found, Progress, Step

SearchChain = Callable[[CostTable, float], Found]
CHAIN_SHARE = 0.5
"""Share of the time for the search for the chain that approximates the model with a cut head (`surrogate`)."""
CUT_MOVES = 400
"""If moves are counted instead of time: the number of schedules to judge per thousand moves of the search with a whole
head, and their least number."""


def with_cut_head(
    found: Found,
    costs: CostTable,
    num_ranks: int,
    num_micro_batches: int,
    *,
    budget_s: float,
    seed: int,
    iterations: int | None,
    lower_bound_ms: float,
    progress: Callback | None,
    search_chain: SearchChain,
    workers: int | None = None,
) -> tuple[Found, float]:
    """The result of the search with a whole head, or the best plan that splits the head if that is faster; and the
    step time of the best plan with a whole head.

    `search_chain(costs, seconds)` is the search for chains of stages.
    """
    whole_ms = found.timeline.step_ms
    if num_ranks < 2 or costs.num_layers < 3:
        return found, whole_ms
    seconds = found.log[-1].seconds if found.log else 0.0
    found, starts, plans = _with_chain(
        found, costs, num_ranks, lambda chain: search_chain(chain, budget_s * CHAIN_SHARE)
    )
    if found.interrupted:
        return found, whole_ms
    budget_s *= 1.0 - CHAIN_SHARE

    def ask(best_ms: float) -> bool:
        if progress is None:
            return False
        told = Progress(
            seconds=seconds + searched.seconds,
            budget_s=seconds + budget_s,
            iterations=found.iterations + searched.judged,
            phase="cut head",
            best_ms=min(best_ms, whole_ms),
            lower_bound_ms=lower_bound_ms,
            bubbles={},
        )
        return bool(progress(told))

    # If moves are counted, use one lane on any machine, so that the plan depends on the seed alone.
    lanes = [
        CutHeadSearch(
            costs=costs,
            num_ranks=num_ranks,
            num_micro_batches=num_micro_batches,
            budget_s=budget_s,
            seed=seed + lane,
            moves=None if iterations is None else max(CUT_MOVES, CUT_MOVES * iterations // 1000),
            starts=starts,
            plans=plans,
            stop=ask,
        )
        for lane in range(1 if iterations is not None else max(1, workers or usable_cores()))
    ]
    searched = lanes[0]
    with ThreadPoolExecutor(len(lanes)) as threads:
        made = [one for one in threads.map(CutHeadSearch.run, lanes) if one is not None]
    found = replace(
        found,
        iterations=found.iterations + sum(lane.judged for lane in lanes),
        interrupted=found.interrupted or any(lane.interrupted for lane in lanes),
    )
    plan, timeline = min(made, key=lambda one: one[1].step_ms, default=(found.plan, found.timeline))
    after = timeline.step_ms
    if after >= whole_ms:
        return found, whole_ms
    step = Step(found.iterations, seconds + searched.seconds, "schedule", "cut head", whole_ms, after, after)
    return replace(found, plan=plan, timeline=timeline, log=[*found.log, step], finalists=[plan]), whole_ms


def _with_chain(
    found: Found, costs: CostTable, num_ranks: int, search_chain: Callable[[CostTable], Found]
) -> tuple[Found, list[Plan], list[tuple[Layout, Plan]]]:
    """Search for the chain that approximates the model with a split head (`surrogate`). Returns `found` with the effort
    of this search added, the plans whose structures the search for split heads starts from, and plans with a split head
    for it to polish."""
    try:
        body = search_chain(chain_for(costs, num_ranks))
    except OctoPipeError:  # no chain fits, but a plan with shards may
        return found, [found.plan], []
    effort = found.iterations + body.iterations
    found = replace(found, iterations=effort, interrupted=found.interrupted or body.interrupted)
    layout = layout_of(body.plan, num_ranks)
    plans = []
    if layout is not None and costs.tied_bytes == 0:
        plans.append((layout, with_shards(body.plan, chain_for(costs, num_ranks), layout)))
    return found, [body.plan, found.plan], plans

"""The last step of a search in which ops have an exchange: compares the best plans with and without pairs.

Knows: which plans are compared (published systems with their pairs, the plan of the search without pairs after pairing
its adjacent ops, and the result of `PairSearch`). Does not know: how any of them is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.pair_price import PairPrices
from octopipe.plans.plan import Op, Plan
from octopipe.search.pairing.polish import Polisher
from octopipe.search.pairing.search import PairSearch
from octopipe.search.result import Found, Step
from octopipe.search.systems.registry import build_plan
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline

OVERLAPPED_SYSTEMS = ("dualpipe", "dualpipev", "interleaved-overlap")
PAIR_MOVES = 400
"""Schedules judged where moves are counted, for each thousand moves of the search without pairs, and at least."""

POLISHED = 0.4
"""Share of the time in which the orders of the best plans are polished."""
RIVALS, WITHIN = 2, 0.03
"""So many plans are polished, those that take at most so much longer than the best: which of them ends ahead is not
known before."""
MOST_CHECKS = 48
"""How often neighbours of a plan are tried as pairs: of the ones that wait for each other, some are given up unseen."""
MOST_POLISHED = 60_000
"""Plans of more ops are not polished: few changes could be tried."""


def with_pairs(
    found: Found,
    costs: CostTable,
    num_ranks: int,
    num_micro_batches: int,
    *,
    budget_s: float,
    seed: int,
    iterations: int | None,
    copies: bool,
) -> Found:
    """What was found without pairs, or the best plan with pairs where that is faster."""
    setting = costs, num_ranks, num_micro_batches
    # The search without pairs was told nothing of exchanges; its plan is the same, its lanes are drawn.
    best: tuple[Plan, Timeline] = found.plan, simulate(found.plan, costs)
    log, systems = list(found.log), dict(found.systems)
    moves = None if iterations is None else max(PAIR_MOVES, PAIR_MOVES * iterations // 1000)
    searched = PairSearch(
        costs=costs,
        num_ranks=num_ranks,
        num_micro_batches=num_micro_batches,
        budget_s=budget_s * (1 - POLISHED),
        seed=seed,
        moves=moves,
        starts=(found.plan,),
    )
    polished = 0
    fitting: list[tuple[Plan, Timeline]] = [best] if best[1].fits else []
    for name, plan, timeline in _candidates(found, setting, searched, copies):
        if name in OVERLAPPED_SYSTEMS:
            systems[name] = timeline.step_ms if timeline.fits else float("inf")
        if timeline.fits and timeline.step_ms < best[1].step_ms:
            seconds = log[-1].seconds if log else 0.0
            step = Step(
                found.iterations,
                seconds,
                "schedule",
                f"pairs: {name}",
                best[1].step_ms,
                timeline.step_ms,
                timeline.step_ms,
            )
            log.append(step)
            best = plan, timeline
        if timeline.fits:
            fitting.append((plan, timeline))
    fitting.sort(key=lambda made: made[1].step_ms)
    rivals = [
        made for made in fitting[:RIVALS] if made[1].step_ms <= (1 + WITHIN) * best[1].step_ms and _polishable(made[0])
    ]
    for rival in rivals:
        polisher = Polisher(rival[0], costs, seed)
        share = 1 / len(rivals)
        better = polisher.run(
            budget_s=None if moves else budget_s * POLISHED * share, moves=moves and round(4 * moves * share)
        )
        polished += polisher.judged
        if better[1].fits and better[1].step_ms < best[1].step_ms:
            before, after = best[1].step_ms, better[1].step_ms
            seconds = log[-1].seconds if log else 0.0
            log.append(Step(found.iterations, seconds, "schedule", "pairs: polish", before, after, after))
            best = better
    return replace(
        found,
        plan=best[0],
        timeline=best[1],
        log=log,
        systems=systems,
        iterations=found.iterations + searched.judged + polished,
        finalists=[*found.finalists, best[0]],
    )


def _polishable(plan: Plan) -> bool:
    return not plan.forks and sum(map(len, plan.orders)) <= MOST_POLISHED


def _candidates(
    found: Found, setting: tuple[CostTable, int, int], searched: PairSearch, copies: bool
) -> Iterator[tuple[str, Plan, Timeline]]:
    for name in OVERLAPPED_SYSTEMS:
        try:
            plan = build_plan(name, *setting)
        except OctoPipeError:
            continue
        if copies or not plan.replicas():
            yield name, plan, simulate(plan, setting[0])
    paired = neighbours_paired(found.plan, setting[0])
    yield "neighbours", paired, simulate(paired, setting[0])
    made = searched.run()
    if made is not None:
        yield "search", *made


def neighbours_paired(plan: Plan, costs: CostTable) -> Plan:
    """The plan with neighbours in its orders paired where that takes less time and is allowed, from the first on."""
    prices = PairPrices(plan, costs)
    wanted: list[tuple[Op, Op]] = []
    for order in plan.orders:
        k = 0
        while k + 1 < len(order):
            first, second = order[k], order[k + 1]
            if {first.kind, second.kind} in ({"F", "I"}, {"F", "B"}, {"F", "W"}, {"I", "W"}, {"B", "W"}):
                pair = (first, second)
                apart = prices.alone_ms(first) + prices.alone_ms(second)
                related = first[::2] == second[::2] or first in plan.predecessors(second)
                if not related and prices.together(*pair).ms < apart * (1 - 1e-9):
                    wanted.append(pair)
                    k += 1
            k += 1
    # Pairs of different ranks may wait for each other; those that do are given up, the larger half first.
    kept: list[tuple[Op, Op]] = []
    step = max(1, len(wanted))
    at = checks = 0
    while at < len(wanted) and checks < MOST_CHECKS:
        checks += 1
        tried = kept + wanted[at : at + step]
        if replace(plan, pairs=frozenset(tried)).problems():
            if step == 1:
                at += 1
            step = max(1, step // 2)
        else:
            kept, at = tried, at + step
            step = min(2 * step, max(1, len(wanted)))
    return replace(plan, pairs=frozenset(kept))

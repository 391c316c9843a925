"""The last step of a search in which ops have an exchange: compares the best plans with and without pairs.

Knows: which plans are compared (published systems with their pairs, the plan of the search without pairs after pairing
its adjacent ops, and the result of `PairSearch`), and that the fastest are polished and given partners for what they
leave exposed. Does not know: how any of them is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.pair_price import PairPrices
from octopipe.plans.plan import Op, Plan
from octopipe.search.pairing.partners import with_partners
from octopipe.search.pairing.polish import Polisher
from octopipe.search.pairing.search import PairSearch
from octopipe.search.pairing.slot_orders import better
from octopipe.search.result import Found, Step
from octopipe.search.systems.registry import build_plan
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline

OVERLAPPED_SYSTEMS = ("dualpipe", "dualpipev", "interleaved-overlap")
PAIR_MOVES = 400
"""If moves are counted instead of time: the number of schedules to judge per thousand moves of the search without
pairs, and their least number."""

POLISHED_SMALL, POLISHED_LARGE, HIDING = 0.5, 0.15, 0.2
"""Shares of the time in which the orders of the best plans are polished (for small plans, where the time is enough for
CHANGES_PER_OP, and for large ones), and in which ops with an exposed exchange get partners."""
CHANGES_PER_OP, MOST_CHANGES = 12, 6000
"""Polishing gains something from about CHANGES_PER_OP changes on. If moves are counted, no more than MOST_CHANGES are
made for the sake of CHANGES_PER_OP."""
CHANGE_S, CHANGE_S_PER_OP = 1e-4, 2.5e-7
"""About how many seconds one change takes: CHANGE_S, and CHANGE_S_PER_OP for every op of the plan."""
RIVALS, WITHIN = 2, 0.03
"""At most RIVALS plans are polished, and only those that take at most the share WITHIN longer than the best. Which of
them becomes the fastest is not known in advance."""
MOST_CHECKS = 48
"""How many sets of pairs of adjacent ops are checked; pairs that have not been checked by then are dropped."""
MOST_POLISHED = 60_000
"""Plans with more ops are not polished, because only few changes could be tried."""


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
    """The result of the search without pairs, or the best plan with pairs if that is faster."""
    setting = costs, num_ranks, num_micro_batches
    # The search without pairs ran without segments. Simulating its plan with them adds the exchange to the timeline.
    best: tuple[Plan, Timeline] = found.plan, simulate(found.plan, costs)
    log, systems = list(found.log), dict(found.systems)
    moves = None if iterations is None else max(PAIR_MOVES, PAIR_MOVES * iterations // 1000)
    ops = sum(map(len, found.plan.orders))
    polishing = _polished(ops, budget_s)
    searched = PairSearch(
        costs=costs,
        num_ranks=num_ranks,
        num_micro_batches=num_micro_batches,
        budget_s=budget_s * (1 - polishing - HIDING),
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
            log.append(_step(found, log, name, best[1].step_ms, timeline.step_ms))
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
        changes = moves and max(4 * moves, min(CHANGES_PER_OP * ops, MOST_CHANGES))
        made = polisher.run(
            budget_s=None if moves else budget_s * polishing * share, moves=changes and round(changes * share)
        )
        polished += polisher.judged
        if made[1].fits and better(made, best):
            log.append(_step(found, log, "polish", best[1].step_ms, made[1].step_ms))
            best = made
    if best[1].fits and _polishable(best[0]):
        best, timed = with_partners(best, costs, budget_s=None if moves else budget_s * HIDING)
        polished += timed
    return replace(
        found,
        plan=best[0],
        timeline=best[1],
        log=log,
        systems=systems,
        iterations=found.iterations + searched.judged + polished,
        finalists=[*found.finalists, best[0]],
    )


def _step(found: Found, log: list[Step], name: str, before: float, after: float) -> Step:
    seconds = log[-1].seconds if log else 0.0
    return Step(found.iterations, seconds, "schedule", f"pairs: {name}", before, after, after)


def _polished(ops: int, budget_s: float) -> float:
    """The share of the time for polishing, which depends on whether the time is enough for CHANGES_PER_OP."""
    enough_s = CHANGES_PER_OP * ops * (CHANGE_S + CHANGE_S_PER_OP * ops)
    return POLISHED_SMALL if enough_s <= budget_s else POLISHED_LARGE


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
    """The plan with pairs of adjacent ops, where a pair is allowed and takes less time than its two ops one by one. The
    orders stay as they are."""
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
    # Pairs of different ranks may wait for each other. Pairs are added in portions; a portion with which the plan is
    # not valid is halved, and a single pair with which it is not valid is dropped.
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

"""Hiding transfers: among plans with equal step time, prefers those whose ranks compute during transfers.

Knows: small changes of a rank's order, none of which may exceed the memory or the allowed time. Does not know: how
plans are searched (`tuner/`). A search that minimises the step time leaves the order arbitrary wherever there is slack.
A transfer in an idle gap costs nothing according to the prediction, but would be the first to cost time if the link
were slower.

>>> from octopipe.search.systems import build_plan
>>> costs = CostTable.uniform(num_layers=8, p2p_ms=0.2)
>>> plan = build_plan("zb-v", costs, 4, 8)
>>> better = hide_transfers(plan, costs, moves=300)
>>> simulate(better, costs).makespan_ms <= simulate(plan, costs).makespan_ms
True
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.plans.price import prices_cached
from octopipe.plans.rules import missing_recompute
from octopipe.simulation.simulator import makespan_ms, ops_and_transfers, simulate, with_memory
from octopipe.simulation.timeline import Timeline

ROUNDING = 1e-9
REACH = (1, 1, 1, 2, 3)
"""By how many positions an op is moved, chosen at random; mostly by one."""


def hide_transfers(
    plan: Plan,
    costs: CostTable,
    *,
    budget_s: float | None = None,
    moves: int | None = None,
    slack: float = 0.0,
    seed: int = 0,
) -> Plan:
    """Return the plan with as many sends and receives behind computation as a random walk finds within a time or a
    number of moves. The walk passes only through orders whose step time is at most the share `slack` longer than the
    plan's. Plans with pairs are returned as they are."""
    if plan.pairs:
        return plan  # a rank that runs pairs has no place in its order to move an op to without taking one apart
    if (budget_s is None) == (moves is None):
        raise OctoPipeError("hide_transfers takes a budget in seconds or a number of moves; give one of the two")
    end = None if budget_s is None else time.monotonic() + budget_s
    with prices_cached():
        return _walked(plan, costs, end, moves, slack, random.Random(seed))


def _walked(
    plan: Plan, costs: CostTable, end: float | None, moves: int | None, slack: float, dice: random.Random
) -> Plan:
    best, now = plan, _value(simulate(plan, costs))
    limit_ms = -now[1] * (1.0 + slack)
    # Timing an order alone takes a tenth of the time of a whole timeline, and most moves are rejected by their times.
    quick = not (plan.edges or plan.offloads or costs.exchanges)
    any_memory = all(np.isinf(costs.capacity_bytes(rank)) for rank in range(plan.num_ranks))
    again = any(stage.recompute for stage in plan.stages)
    tried = 0
    while (end is None or time.monotonic() < end) and (moves is None or tried < moves):
        tried += 1
        other = with_op_moved(best, dice)
        if other is None:
            continue
        try:
            if not quick and makespan_ms(other, costs) > limit_ms * (1.0 + ROUNDING):
                continue
            timeline = ops_and_transfers(other, costs) if quick else simulate(other, costs)
            # Equal values are accepted too, so that the walk crosses plateaus.
            if timeline is None or timeline.makespan_ms > limit_ms or (value := _value(timeline)) < now:
                continue
            if quick and again and missing_recompute(other):
                continue
            if quick and not any_memory:
                timeline = with_memory(timeline, other, costs)
        except OctoPipeError:  # an op is before one that it needs, or ranks wait for each other
            continue
        if timeline.fits:
            best, now = other, value
    return best


def _value(timeline: Timeline) -> tuple[float, float]:
    return timeline.overlap.rate, -timeline.makespan_ms


def with_op_moved(plan: Plan, dice: random.Random, reach: Sequence[int] = REACH) -> Plan | None:
    """Return the plan with one random op moved a few positions within its rank; None if there is no such position."""
    rank = dice.randrange(plan.num_ranks)
    order = plan.orders[rank]
    if len(order) < 2:
        return None
    here = dice.randrange(len(order))
    there = here + dice.choice(reach) * dice.choice((-1, 1))
    if not 0 <= there < len(order):
        return None
    return plan.with_op_at(rank, here, there)

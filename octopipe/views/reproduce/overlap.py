"""Which sends and receives can run beside computation, counted as section V of the paper defines it.

Knows: the paper's sentence ("whether send or receive operations can overlap with subsequent computation") and how early
a receive may be posted, which the sentence leaves open; a random walk over orders that lets more of them overlap. Does
not know: how long a transfer takes (the simulator times it), or Table III.
"""

from __future__ import annotations

import random
from typing import Literal

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.plans.price import prices_cached
from octopipe.simulation.hide_transfers import with_op_moved
from octopipe.simulation.lowering import Channel, Program, lower
from octopipe.simulation.simulator import makespan_ms, simulate
from octopipe.simulation.timeline import Timeline

Receives = Literal["early", "one ahead", "when needed"]
"""When a receive is posted: as soon as its tensor is sent; one computation before the one that needs it; or immediately
before that one, as in Megatron's 1F1B."""
ROUNDING = 1e-9
REACH = (1, 1, 1, 2, 3, 5)
"""Numbers of places by which the walk moves an op; mostly one."""


def overlap_share(program: Program, timeline: Timeline, receives: Receives = "early") -> float:
    """Return the share of sends and receives that can overlap with a computation of their own rank.

    A send can if a computation follows it on its rank. A receive can if its tensor has left the sender while the
    receiver still has a computation to run, or to finish, before the one that needs the tensor.
    """
    offsets = program.plan.table().offsets
    first, stop = offsets[:-1], offsets[1:]
    rank = np.repeat(np.arange(program.plan.num_ranks), stop - first)
    start_ms, end_ms = timeline.spans.start_ms, timeline.spans.end_ms
    source, target = np.asarray(program.source), np.asarray(program.target)
    if not source.size:
        return 1.0
    sends = np.count_nonzero(source + 1 < stop[rank[source]])
    if receives == "when needed":
        return float(sends) / (2 * source.size)
    before = np.maximum(target - 1, 0)
    ready = (
        end_ms[source] < end_ms[before] - ROUNDING
        if receives == "early"
        else end_ms[source] <= start_ms[before] + ROUNDING
    )
    received = np.count_nonzero(ready & (target > first[rank[target]]))
    return float(sends + received) / (2 * source.size)


def share_of(plan: Plan, costs: CostTable, *, channel: Channel = "directed", receives: Receives = "early") -> float:
    """Return the share of a plan's sends and receives that can overlap."""
    program = lower(plan, costs, channel=channel)
    return overlap_share(program, simulate(program, costs, check=False), receives)


def overlapping_more(plan: Plan, costs: CostTable, *, moves: int, slack: float, seed: int) -> Plan:
    """Return a plan with the same stages, more overlap of transfers, and a step longer by at most `slack` (a share).

    A random walk moves one op of one rank at a time and keeps every order in which no less overlaps.
    """
    dice = random.Random(seed)
    with prices_cached():
        limit_ms = makespan_ms(plan, costs) * (1.0 + slack) * (1.0 + ROUNDING)
        best, share = plan, share_of(plan, costs)
        for _ in range(moves):
            other = with_op_moved(best, dice, REACH)
            if other is None:
                continue
            try:
                if makespan_ms(other, costs) > limit_ms:
                    continue
                program = lower(other, costs)
                timeline = simulate(program, costs)
            except OctoPipeError:  # an op before its inputs, or a deadlock
                continue
            found = overlap_share(program, timeline)
            if found >= share and timeline.fits:
                best, share = other, found
    return best

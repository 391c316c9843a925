"""Pairs as they run in a plan: corrects how much computation and exchanges slow each other down.

Knows: a plan of pairs that is run to learn from, and which slowing makes the prediction of its pairs come true. Does
not know: how pairs of single layers are measured (`exchanges.py`), or how plans run (`timed_run.py`).

Pairs of single layers are measured while every rank runs pairs of the same layer. In a plan, ranks run pairs of
different lengths beside each other and their transfers, all of which share the way of the exchanges. One number k
corrects this: in a pair, computation takes k * (1 + slows_compute) and an exchange k * (1 + slows_exchange) times as
long as alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.costs.profile_file import Profile
from octopipe.costs.segments import Segments
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.runtime.ranks.world import World
from octopipe.search.pairing.choose import neighbours_paired
from octopipe.search.systems import build_plan
from octopipe.simulation.contention import predict
from octopipe.simulation.timeline import Timeline

LEAST, MOST, HALVINGS = 0.5, 3.0, 24
"""The range of k, and how often it is halved."""
ENOUGH = 1e-4
"""By what share the prediction of the pairs may stay below the measurement."""


def pairs_rehearsal_plan(costs: CostTable, ranks: int) -> Plan | None:
    """ZB-V with neighbouring ops paired; None where nothing is exchanged. Its ranks hardly ever wait, as those of tuned
    plans: how much pairs slow each other down depends on how many of them run at once.

    Pipelines that share experts must run the same plan, and each has measured times of its own: the plan is made for
    equal layers, whatever the measured ones are.
    """
    if not costs.exchanges:
        return None
    parts = (("compute", 0.4), ("exchange", 0.3), ("compute", 0.3))
    equal = CostTable.uniform(num_layers=costs.num_layers)
    equal = equal.replace(segments=Segments(forward=(parts,) * costs.num_layers, input=(parts,) * costs.num_layers))
    try:
        plan = neighbours_paired(build_plan("zb-v", equal, ranks, max(4, 2 * ranks)), equal)
    except OctoPipeError:
        return None
    return plan if plan.pairs else None


def pairs_rehearsed(profile: Profile, plan: Plan, seen: Sequence[Timeline], world: World) -> Profile:
    """The profile corrected by measured steps of `pairs_rehearsal_plan` (collective; rank 0's correction counts)."""
    measured = float(np.median([_pairs_ms(timeline, plan) for timeline in seen]))

    def error(k: float) -> float:
        # Where ops one by one are as long, a larger k changes nothing: the smallest that reaches the measurement.
        return _pairs_ms(predict(plan, slowed(profile, k)), plan) - measured * (1.0 - ENOUGH)

    low, high = LEAST, MOST
    if error(low) > 0:
        high = low
    elif error(high) < 0:
        low = high
    for _ in range(HALVINGS if high > low else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if error(middle) > 0 else (middle, high)
    k = world.gather((low + high) / 2)[0]
    return replace(slowed(profile, k), about={**profile.about, "pairs_slowed": round(k, 4)})


def slowed(profile: Profile, k: float) -> Profile:
    """The profile in which computation and exchanges beside each other take k times as long as it said; never less
    than alone."""
    segments = profile.costs.segments
    assert segments is not None
    changed = replace(
        segments,
        slows_compute=max(0.0, k * (1.0 + segments.slows_compute) - 1.0),
        slows_exchange=max(0.0, k * (1.0 + segments.slows_exchange) - 1.0),
    )
    return profile.with_costs(profile.costs.replace(segments=changed))


def _pairs_ms(timeline: Timeline, plan: Plan) -> float:
    """The time of all pairs, each from the start of its first op to the end of its last."""
    lead = plan.table().lead
    assert lead is not None
    second = np.flatnonzero(lead != np.arange(lead.size))
    first = lead[second]
    start, end = timeline.spans.start_ms, timeline.spans.end_ms
    took = np.maximum(end[first], end[second]) - np.minimum(start[first], start[second])
    return float(took.sum())

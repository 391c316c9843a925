"""The rehearsal: a few steps of a plan that correct what the times of single layers do not show.

Knows: the plans that are rehearsed (one of every kind of op, and one of pairs where layers exchange tokens), and how
their measured steps correct a profile. Does not know: how plans run (`timed_run.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from octopipe.costs.cluster.hardware import Link, Network
from octopipe.costs.profile_file import Profile
from octopipe.costs.segments import MAX_SLOWING, Segments
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan
from octopipe.runtime.measure.exchanges import MOST_SLOWING
from octopipe.runtime.ranks.world import World
from octopipe.search.systems import build_plan
from octopipe.simulation.contention import predict
from octopipe.simulation.fidelity import compare
from octopipe.simulation.timeline import Timeline


def rehearsal_plan(profile: Profile, ranks: int) -> Plan:
    """Return the plan that is run to learn what single layers cannot show; no plan is judged by its own rehearsal.

    It is GPipe with every kind of op: of four micro-batches two run B, one I and W, and one I with its W at the very
    end.
    """
    costs = profile.costs
    if costs.exchanges:  # pipelines that share experts must run the same plan, and each has measured its own times
        costs = CostTable.uniform(num_layers=costs.num_layers).replace(graph=costs.graph)
    plan = build_plan("gpipe", costs, ranks, max(4, ranks), split_backward=True)
    orders = []
    for order in plan.orders:
        now, later = [], []
        for op in order:
            fused = op.micro_batch % 2 == 1
            if op.kind == "I" and fused:
                now.append(Op(op.stage, "B", op.micro_batch))
            elif op.kind == "W" and op.micro_batch % 4 == 2:
                later.append(op)
            elif not (op.kind == "W" and fused):
                now.append(op)
        orders.append((*now, *later))
    return replace(plan, orders=tuple(orders)).check("rehearsal")


MOST_CROWDED = 8.0
"""The largest factor by which transfers beside exchanges are assumed to be slower than alone."""


def rehearsed(
    profile: Profile, plan: Plan, seen: Sequence[Timeline], world: World, *, arrivals: bool = False
) -> Profile:
    """Return the profile corrected by measured steps of `rehearsal_plan`: ops of whole stages, fed by transfers.

    Each op kind gets one factor, the measured time at work over the predicted one. The overhead of an op is the gap
    between two ops of a rank when the second does not wait for a transfer. Links were measured alone; if layers
    exchange tokens, transfers share the way with them, and the timelines show how much slower they are (`arrivals`: the
    timelines have the device's own arrival times).
    """
    predicted = predict(plan, replace(profile, op_overhead_ms=0.0, fused_factor=1.0))
    errors = [compare(predicted, timeline).kind_error for timeline in seen]
    factors = {
        kind: float(np.clip(np.median([1.0 / (1.0 + e.get(kind, 0.0)) for e in errors]), 0.8, 1.25)) for kind in "FIWB"
    }
    overhead = float(np.median([g for timeline in seen for g in gaps_ms(timeline)] or [0.0]))
    crowded = _crowding(predicted, seen) if arrivals and profile.costs.segments is not None else 1.0
    factors, overhead, crowded = world.gather((factors, max(0.0, overhead), crowded))[0]
    apart, together = profile.costs.input_ms.sum(), profile.costs.weight_ms.sum()
    split = (factors["I"] * apart + factors["W"] * together) / max(apart + together, 1e-9)

    def scaled(costs: CostTable) -> CostTable:
        return costs.replace(
            forward_ms=factors["F"] * costs.forward_ms,
            input_ms=factors["I"] * costs.input_ms,
            weight_ms=factors["W"] * costs.weight_ms,
            network=_slower(costs.network, crowded),
            copy_sum=None if costs.copy_sum is None else _slower_link(costs.copy_sum, crowded),
        )

    return replace(
        profile,
        costs=scaled(profile.costs),
        partial={level: scaled(table) for level, table in profile.partial.items()},
        op_overhead_ms=overhead,
        fused_factor=float(factors["B"] / split) if split > 0 else 1.0,
        about={**profile.about, "rehearsal": factors, "transfers_crowded": round(crowded, 4)},
    )


def _crowding(predicted: Timeline, seen: Sequence[Timeline]) -> float:
    """Return the measured over the predicted time of a transfer, as the median over all transfers."""
    alone = predicted.transfers.end_ms - predicted.transfers.start_ms
    took = [timeline.transfers.end_ms - timeline.transfers.start_ms for timeline in seen]
    ratios = np.concatenate([t[alone > 0] / alone[alone > 0] for t in took])
    return float(np.clip(np.median(ratios), 1.0, MOST_CROWDED)) if ratios.size else 1.0


def _slower(network: Network, factor: float) -> Network:
    if factor == 1.0:
        return network
    return replace(
        network,
        intra=_slower_link(network.intra, factor),
        inter=_slower_link(network.inter, factor),
        pairs={pair: _slower_link(link, factor) for pair, link in network.pairs.items()},
    )


def _slower_link(link: Link, factor: float) -> Link:
    return Link(latency_ms=factor * link.latency_ms, ms_per_byte=factor * link.ms_per_byte)


def gaps_ms(timeline: Timeline) -> list[float]:
    """Return the times between the end of an op and the start of its rank's next op, if that op takes no transfer."""
    s = timeline.spans
    waits = np.zeros(s.rank.size, bool)
    waits[timeline.transfers.consumer] = True
    mine = np.flatnonzero((s.rank[1:] == s.rank[:-1]) & ~waits[1:])
    return (s.start_ms[mine + 1] - s.end_ms[mine]).tolist()


CHUNKS = 2
"""Stages per rank in the plan of `pairs_plan`."""
HALVINGS = 40
"""How often the interval that contains the slowing is halved."""
ALIKE = (("compute", 0.5), ("exchange", 0.5))
"""The segments of every layer in `pairs_plan`, so that all pipelines that share experts have the same plan."""


def pairs_plan(profile: Profile, ranks: int) -> Plan | None:
    """Return the plan that is run to learn how long pairs take beside other ranks' pairs; None if no layer exchanges
    tokens, or if there are too few layers.

    It is interleaved 1F1B with F and B of its steady state as pairs: all ranks compute and exchange almost all of the
    time, as in any plan whose pairs are worth having.
    """
    costs = profile.costs
    if costs.segments is None or not costs.exchanges or costs.graph is not None:
        return None
    if costs.num_layers < CHUNKS * ranks:
        return None
    rows = (ALIKE,) * costs.num_layers
    alike = CostTable.uniform(num_layers=costs.num_layers).replace(segments=Segments(forward=rows, input=rows))
    return build_plan("interleaved-overlap", alike, ranks, 2 * ranks, chunks=CHUNKS)


def pairs_rehearsed(profile: Profile, plan: Plan, seen: Sequence[Timeline], world: World) -> Profile:
    """Return the profile with its two slowings corrected by measured steps of `pairs_plan`.

    A layer's pairs are measured one at a time: before and after each of them, the rank runs single ops. In a plan of
    pairs, all ranks compute beside each other's exchanges without a pause, and a pair takes longer (on an H200 with six
    ranks by 16 %). The same amount is added to the slowings of computation and of exchange, such that the predicted
    time of all pairs equals the measured one. It may be negative, but no slowing falls below zero.
    """
    segments = profile.costs.segments
    assert segments is not None
    took = float(np.median([_pairs_ms(plan, timeline) for timeline in seen]))

    def slowed(more: float) -> Profile:
        changed = Segments.from_ms(
            [row or (("compute", 1.0),) for row in segments.forward],
            [row or (("compute", 1.0),) for row in segments.input],
            slows_compute=min(max(0.0, segments.slows_compute + more), MAX_SLOWING),
            slows_exchange=min(max(0.0, segments.slows_exchange + more), MAX_SLOWING),
        )
        partial = {level: table.replace(segments=changed) for level, table in profile.partial.items()}
        return replace(profile, costs=profile.costs.replace(segments=changed), partial=partial)

    before = _pairs_ms(plan, predict(plan, profile))
    low, high = -max(segments.slows_compute, segments.slows_exchange), MOST_SLOWING
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _pairs_ms(plan, predict(plan, slowed(middle))) < took else (low, middle)
    more, ratio = world.gather((high, took / before if before > 0 else 1.0))[0]
    found = slowed(more)
    told = {"measured_over_predicted": round(ratio, 4), "slowing_added": round(more, 4)}
    return replace(found, about={**found.about, "rehearsal_of_pairs": told})


def _pairs_ms(plan: Plan, timeline: Timeline) -> float:
    """Return the time of all pairs of a timeline, each from the first start to the last end of its two ops."""
    s, t = timeline.spans, plan.table()
    assert t.lead is not None
    second = np.flatnonzero(t.lead != np.arange(t.lead.size))
    first = t.lead[second]
    start = np.minimum(s.start_ms[first], s.start_ms[second])
    return float((np.maximum(s.end_ms[first], s.end_ms[second]) - start).sum())

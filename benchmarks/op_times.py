"""Where a measured step departs from its prediction: time by rank and kind of op.

Knows: two timelines of one plan. Does not know: how they were made.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octopipe.plans.plan import KINDS, Plan
from octopipe.simulation.timeline import Timeline


def by_kind(plan: Plan, predicted: Timeline, measured: Timeline) -> list[dict[str, Any]]:
    """Per rank: busy and idle time of both, and for every kind of op, alone and in pairs, the number of ops with the
    predicted mean and the measured mean and median. The two ops of a pair are one span from the first start to the last
    end."""
    partner = {second: first for first, second in plan.pairs}
    firsts = set(partner.values())
    rows: list[dict[str, Any]] = []
    for rank in range(predicted.num_ranks):
        found: dict[str, list[tuple[float, float]]] = {}
        mine = np.flatnonzero(predicted.spans.rank == rank)
        number = {predicted.op(int(i)): int(i) for i in mine}
        for op, i in number.items():
            members = [i]
            if op in partner:
                members.append(number[partner[op]])
            elif op in firsts:
                continue
            kinds = "+".join(sorted(KINDS[predicted.spans.kind[k]] for k in members))
            found.setdefault(kinds, []).append((_length(predicted, members), _length(measured, members)))
        kinds_told = {
            kind: {
                "ops": len(times),
                "predicted_ms": round(float(np.mean([a for a, _ in times])), 3),
                "measured_ms": round(float(np.mean([b for _, b in times])), 3),
                "measured_median_ms": round(float(np.median([b for _, b in times])), 3),
            }
            for kind, times in sorted(found.items())
        }
        busy = {name: float(x.busy_ms[rank]) for name, x in (("predicted", predicted), ("measured", measured))}
        idle = {
            "predicted": predicted.makespan_ms - busy["predicted"],
            "measured": measured.makespan_ms - busy["measured"],
        }
        rows.append({"rank": rank, "busy_ms": _rounded(busy), "idle_ms": _rounded(idle), **kinds_told})
    return rows


def _length(timeline: Timeline, spans: list[int]) -> float:
    return float(timeline.spans.end_ms[spans].max() - timeline.spans.start_ms[spans].min())


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in values.items()}

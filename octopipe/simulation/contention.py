"""Prediction for ranks that share a device: an op runs faster while the other ranks are idle.

Knows: how long ops take when all ranks are busy and when only some are, and how to simulate a program with these times.
Does not know: where they were measured (`runtime/measure/profiler.py`).

Ranks that share one GPU (MPS) or one machine's memory slow each other down, so an op is faster in a plan with many
bubbles than in a dense plan. While k ranks are busy, an op advances at the speed measured for k (interpolated between
measured numbers). k changes while the op runs, so time advances from event to event.

Without such measurements the result equals `simulate`.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from octopipe.costs.profile_file import Profile
from octopipe.costs.table import CostTable
from octopipe.plans.pair_price import op_durations
from octopipe.plans.plan import B, Plan
from octopipe.simulation.lowering import Channel, Program, lower
from octopipe.simulation.simulator import timeline_of
from octopipe.simulation.timeline import Timeline

Floats = NDArray[np.float64]


def predict(plan: Plan | Program, profile: Profile, *, channel: Channel = "directed", label: str = "") -> Timeline:
    """Return the Timeline that a profile predicts for a plan on the ranks it was measured on."""
    costs = profile.costs
    program = plan if isinstance(plan, Program) else lower(plan, costs, channel=channel)
    plan = program.plan
    known = {k: op_durations(plan, table) for k, table in profile.partial.items() if k < plan.num_ranks}
    known[plan.num_ranks] = op_durations(plan, costs)
    factor = np.where(plan.table().kind == B, profile.fused_factor, 1.0)
    times = advance(program, _levels(known, plan.num_ranks) * factor + profile.op_overhead_ms)
    return timeline_of(program, costs, *times, overhead_ms=profile.op_overhead_ms, label=label)


def _levels(known: dict[int, Floats], ranks: int) -> Floats:
    """Return the durations [k - 1, op] for every number k of busy ranks, interpolated linearly between the known
    ones."""
    at = sorted(known)
    table = np.stack([known[k] for k in at])
    out = np.empty((ranks, table.shape[1]))
    for k in range(1, ranks + 1):
        right = int(np.searchsorted(at, k))
        if right == 0 or at[right] == k:
            out[k - 1] = table[right]
        else:
            part = (k - at[right - 1]) / (at[right] - at[right - 1])
            out[k - 1] = (1 - part) * table[right - 1] + part * table[right]
    return out


def advance(program: Program, durations: Floats) -> tuple[Floats, Floats, NDArray[np.int32]]:
    """Return start, end and last-ending predecessor of every op and transfer; `durations[k - 1, op]` applies while k
    ranks are busy."""
    preds = program.preds
    ranks, computes = durations.shape
    nodes = preds.shape[0]
    beside = program.node_ms(durations[0])
    followers: list[list[int]] = [[] for _ in range(nodes)]
    missing = np.zeros(nodes, np.int64)
    for node in range(nodes):
        for p in {int(p) for p in preds[node] if p >= 0}:
            followers[p].append(node)
            missing[node] += 1
    start, end = np.zeros(nodes), np.zeros(nodes)
    binding = np.full(nodes, -1, np.int32)
    left: dict[int, float] = {}
    """The ops that are running, and the part of each that is still to do."""
    flying: list[tuple[float, int]] = []
    now = 0.0
    fresh = [n for n in range(nodes) if missing[n] == 0]
    while fresh or left or flying:
        while fresh:
            node = fresh.pop()
            start[node] = now
            if node < computes:
                left[node] = 1.0
            else:
                heapq.heappush(flying, (now + float(beside[node]), node))
        speed = durations[min(max(len(left), 1), ranks) - 1]
        took = {n: float(speed[n]) for n in left}
        step = min((part * took[n] for n, part in left.items()), default=np.inf)
        if flying:
            step = min(step, max(0.0, flying[0][0] - now))
        ended = []
        for n in left:
            rest = left[n] * took[n] - step
            if rest <= 1e-9:
                ended.append(n)
            else:
                left[n] = rest / took[n]
        now += step
        while flying and flying[0][0] <= now + 1e-12:
            ended.append(heapq.heappop(flying)[1])
        for n in ended:
            left.pop(n, None)
            end[n] = now
            for f in followers[n]:
                missing[f] -= 1
                if missing[f] == 0:
                    binding[f] = n
                    fresh.append(f)
    return start, end, binding


def full_load(costs: CostTable) -> Profile:
    """Return a profile of unmeasured costs, whose ranks share nothing."""
    return Profile(costs=costs)

"""One timeline of a report, with its plan and costs if they are known.

Knows: which numbers and arrays the page needs, and what it needs to simulate again (the what-if panel). Does not know:
HTML.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octopipe.costs.table import CostTable
from octopipe.plans.plan import KINDS, Plan
from octopipe.plans.price import hop_times
from octopipe.simulation.timeline import Bubbles, MemoryCurve, Timeline
from octopipe.views.report.facts import facts_of, rates_of
from octopipe.views.report.memory import memory_model, micro_batch_classes
from octopipe.views.report.pack import Packer

TICKS = 1 << 30
"""Times are stored as integer multiples of 1/2**30 of the entry's length, which keeps nine digits."""
MEMORY_POINTS = 60_000
"""The most points in all memory curves of an entry; above it, neighbours are merged into their maximum."""
MAX_WHAT_IF_NUMBERS = 200_000
MAX_LANE_PIECES = 400_000
"""The largest number of segments on compute and exchange lanes of an entry; above it, only whole ops are drawn."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A timeline to show. With its plan the page can show layers; with costs too, it can simulate again."""

    timeline: Timeline
    plan: Plan | None = None
    costs: CostTable | None = None
    label: str = ""
    channel: str = "directed"
    """The what-if panel simulates directed channels; other timelines are shown without it."""

    @property
    def name(self) -> str:
        return self.label or self.timeline.label or ("measured" if self.timeline.measured else "plan")


def entry_data(entry: Entry, pack: Packer) -> dict[str, Any]:
    """Return the entry as JSON-ready values; long arrays go into `pack` and are referred to by column number."""
    t = entry.timeline
    horizon = max(t.step_ms, float(t.transfers.end_ms.max(initial=0.0)), 1e-9)
    tick = horizon / TICKS
    out: dict[str, Any] = {
        "label": entry.name,
        "model": t.model,
        "measured": t.measured,
        "num_ranks": t.num_ranks,
        "tick_ms": tick,
        "ops_of_rank": np.bincount(t.spans.rank, minlength=t.num_ranks).tolist(),
        "capacity": [c if math.isfinite(c) else None for c in t.capacity_bytes],
        "extras": [[e.name, e.rank, float(e.start_ms), float(e.end_ms)] for e in t.extras],
        "numbers": _numbers(t),
        "spans": _spans(t, tick, pack),
        "lanes": _lanes(t, tick, pack),
        "transfers": _transfers(t, tick, pack),
        "binding": pack.integers(_binding(t)) if t.binding.size else None,
        "memory": _memory(t, tick, pack),
        "facts": facts_of(t, entry.plan, entry.costs),
        "rates": rates_of(t, entry.plan, entry.costs),
    }
    if entry.plan is not None:
        out |= _plan(entry.plan, pack)
    if entry.costs is not None and entry.plan is not None:
        out["symbols"] = entry.costs.symbols
        out["layer_ms"] = entry.costs.layer_ms.tolist()
        out["memory_model"] = memory_model(entry.plan, entry.costs, pack) if t.memory else None
        # The page's simulator runs one op at a time; for plans with pairs its result would differ from the timeline.
        if not t.measured and entry.channel == "directed" and not entry.plan.pairs:
            out["what_if"] = what_if(entry.plan, entry.costs, t, pack)
    return out


def _numbers(t: Timeline) -> dict[str, Any]:
    s = t.summary()
    return {
        "step_ms": s["step_ms"],
        "makespan_ms": s["makespan_ms"],
        "span_ms": s["span_ms"],
        "bubble_ratio": s["bubble_ratio"],
        "busy_ms": s["busy_ms"],
        "bubbles_ms": {name[:-3]: getattr(t.bubbles, name).tolist() for name in Bubbles._fields},
        "peak_bytes": t.peak_bytes.tolist(),
        "static_bytes": [c.static_bytes for c in t.memory],
        "fits": s["fits"],
        "overlap_rate": s["overlap_rate"],
        "communications": s["communications"],
        "critical_path_nodes": len(t.critical_path()),
    }


def _whole(times_ms: Floats, tick: float) -> NDArray[np.int64]:
    return np.rint(times_ms / tick).astype(np.int64)


def _spans(t: Timeline, tick: float, pack: Packer) -> dict[str, int]:
    start, end = _whole(t.spans.start_ms, tick), _whole(t.spans.end_ms, tick)
    # Only the gap since the previous op of the rank is stored; the page adds gaps and durations up again.
    before = np.concatenate(([0], end[:-1]))
    new_rank = np.concatenate(([True], t.spans.rank[1:] != t.spans.rank[:-1]))[: start.size]
    gap = start - np.where(new_rank, 0, before[: start.size])
    return {
        "kind": pack.integers(t.spans.kind),
        "stage": pack.integers(t.spans.stage),
        "micro_batch": pack.integers(t.spans.micro_batch),
        "gap": pack.integers(gap),
        "duration": pack.integers(end - start),
    }


def _lanes(t: Timeline, tick: float, pack: Packer) -> dict[str, Any] | None:
    """Return the segments on every rank's compute and exchange lanes, by rank and time; None if there are no lanes, or
    if they have more segments than `MAX_LANE_PIECES`."""
    n = t.lanes
    if n is None or not 0 < n.span.size <= MAX_LANE_PIECES:
        return None
    rank = t.spans.rank[n.span]
    order = np.lexsort((n.lane, n.start_ms, rank))
    start, end = _whole(n.start_ms[order], tick), _whole(n.end_ms[order], tick)
    return {
        "pieces_of_rank": np.bincount(rank, minlength=t.num_ranks).tolist(),
        "span": pack.integers(n.span[order], delta=True),
        "lane": pack.integers(n.lane[order]),
        "start": pack.integers(start, delta=True),
        "duration": pack.integers(end - start),
        "hidden": float(t.exchange.share),
    }


def _transfers(t: Timeline, tick: float, pack: Packer) -> dict[str, int]:
    x = t.transfers
    end_of_producer = _whole(t.spans.end_ms, tick)[x.producer]
    start, end = _whole(x.start_ms, tick), _whole(x.end_ms, tick)
    sizes, which = np.unique(x.nbytes, return_inverse=True)
    return {
        "producer": pack.integers(x.producer, delta=True),
        "consumer": pack.integers(x.consumer, delta=True),
        "wait": pack.integers(start - end_of_producer),
        "duration": pack.integers(end - start),
        "size": pack.integers(which.ravel()),
        "sizes": pack.floats(sizes),
    }


def _binding(t: Timeline) -> NDArray[np.int64]:
    """Return the distance back to each node's binding node; zero if it has none (no node binds itself)."""
    own = np.arange(t.binding.size, dtype=np.int64)
    return np.where(t.binding < 0, 0, own - t.binding)


def _memory(t: Timeline, tick: float, pack: Packer) -> dict[str, Any] | None:
    if not t.memory or float(t.peak_bytes.max(initial=0.0)) <= 0:
        return None
    limit = max(MEMORY_POINTS // max(t.num_ranks, 1), 64)
    curves = [thin_out(c, limit) for c in t.memory]
    unit = max(float(t.peak_bytes.max()) / 65535, 1.0)
    level = np.concatenate([np.rint(c.bytes / unit) for c in curves])
    return {
        "points": [int(c.times_ms.size) for c in curves],
        "unit_bytes": unit,
        "time": pack.integers(np.concatenate([_whole(c.times_ms, tick) for c in curves]), delta=True),
        "level": pack.integers(level, delta=True),
        "exact": all(c.times_ms.size <= limit for c in t.memory),
    }


def thin_out(curve: MemoryCurve, limit: int) -> MemoryCurve:
    """Return the curve with simultaneous changes merged into their maximum, then reduced to about `limit` points at
    most.

    Merging keeps each group's maximum and its last level, so peaks are preserved.
    """
    times, values = curve.times_ms, curve.bytes
    if times.size == 0:
        return curve
    group: NDArray[np.int64] = np.cumsum(np.diff(times, prepend=times[0]) > 0, dtype=np.int64)
    if group[-1] + 1 > limit // 2:
        group = np.arange(times.size) * (limit // 2) // times.size
    first = np.flatnonzero(np.diff(group, prepend=-1))
    highest = np.maximum.reduceat(values, first)
    last = values[np.append(first[1:], times.size) - 1]
    end = times[np.append(first[1:], times.size) - 1]
    # Two points per group: its maximum from its start on, and its last level from its end on.
    both_times, both = np.stack((times[first], end), 1).ravel(), np.stack((highest, last), 1).ravel()
    keep = np.append(True, (np.diff(both) != 0))
    return MemoryCurve(both_times[keep], both[keep], curve.static_bytes)


def _plan(plan: Plan, pack: Packer) -> dict[str, Any]:
    search = plan.extra.get("search")
    return {
        "stages": [[s.first, s.stop, s.rank, list(s.recomputed_layers)] for s in plan.stages],
        "routes": [list(r) for r in plan.routes],
        **_forks(plan),
        "pairs": pack.integers(_seconds(plan), delta=True),
        "route_of_micro_batch": pack.integers(plan.route_of_micro_batch),
        "num_layers": plan.num_layers,
        "num_micro_batches": plan.num_micro_batches,
        "search": search_points(search),
        "search_unit": search_unit(search),
        "lower_bound_ms": _number(plan.extra.get("lower_bound_ms")),
        "bound_of": str(plan.extra.get("bound_of", ""))[:200],
        "system": str(plan.extra.get("system", "")),
    }


def _forks(plan: Plan) -> dict[str, Any]:
    """Return the edges of paths that fork or join, and which stages hold a shard; empty for chains."""
    if not plan.edges:
        return {}
    shards = [None if stage.shard is None else list(stage.shard) for stage in plan.stages]
    return {"edges": [[list(edge) for edge in edges] for edges in plan.edges], "shards": shards}


def _seconds(plan: Plan) -> NDArray[np.int64]:
    """Return the ops that run together with the op before them."""
    lead = plan.table().lead
    return np.zeros(0, np.int64) if lead is None else np.flatnonzero(lead != np.arange(lead.size))


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def search_unit(search: Any) -> str:
    """Return the unit of a tuner's log: seconds, or moves if the search was given a number of them."""
    rows = [row for row in search if isinstance(row, dict)] if isinstance(search, list | tuple) else []
    return "moves" if rows and not any("t" in row or "seconds" in row for row in rows) else "s"


def search_points(search: Any, limit: int = 2000) -> list[list[Any]]:
    """Return [seconds or moves, phase, best_ms] for each row of a tuner's log; rows of any other form are left out."""
    when = ("t", "seconds") if search_unit(search) == "s" else ("iteration",)
    points: list[list[Any]] = []
    for row in search if isinstance(search, list | tuple) else ():
        if isinstance(row, dict):
            t = next((_number(row[name]) for name in when if name in row), None)
            best = _number(row.get("best_ms"))
            if t is not None and best is not None:
                points.append([t, str(row.get("phase", "")), best])
    step = max(1, math.ceil(len(points) / limit))
    return points[::step] + (points[-1:] if len(points) % step != 1 and step > 1 else [])


def what_if(plan: Plan, costs: CostTable, timeline: Timeline, pack: Packer) -> dict[str, Any] | None:
    """Return all that the page's simulator needs: op times split by layer kind, transfer times, what follows.

    Micro-batches of one size and route share a class, and times are stored per class. Returns None for paths that fork
    or join, for split layers and for activations in host memory, because the page's simulator supports only chains;
    also None if there are too many numbers.
    """
    if plan.forks or plan.offloads:
        return None
    kinds = list(dict.fromkeys(costs.symbols))
    factor = costs.micro_batch_factor
    member, class_of = micro_batch_classes(plan, costs)
    count = len(member) * len(KINDS) * len(plan.stages) * len(kinds)
    if count > MAX_WHAT_IF_NUMBERS:
        return None
    times = np.zeros((len(member), len(KINDS), len(plan.stages), len(kinds)))
    of_kind = np.array([kinds.index(c) for c in costs.symbols])
    for c, m in enumerate(member):
        for k, kind in enumerate(KINDS):
            layer = costs.layer_times(kind) * (1.0 if factor is None else factor[m])
            for s, stage in enumerate(plan.stages):
                layers = np.array(stage.recomputed_layers if kind == "R" else range(stage.first, stage.stop), int)
                slow = costs.slowdown(stage.rank)
                np.add.at(times[c, k, s], of_kind[layers], slow * layer[layers])
    forward, gradient = hop_times(plan, costs)
    return {
        "kinds": kinds,
        "class_of_micro_batch": pack.integers(class_of),
        "times": pack.floats(times),
        "forward": pack.floats(forward[:, member].T),
        "gradient": pack.floats(gradient[:, member].T),
        "twins": _twins(plan),
    }


def _twins(plan: Plan) -> list[list[int]]:
    """Return, for every stage, the stages whose weight gradients its reduction waits for: all that share layers with
    it, itself included."""
    out = [[s] for s in range(len(plan.stages))]
    for s, stage in enumerate(plan.stages if len(plan.routes) > 1 else ()):
        if stage.shard is None and stage.first < stage.stop:
            out[s] = [k for k, o in enumerate(plan.stages) if o.first < stage.stop and stage.first < o.stop]
    return out

"""Numbers of a timeline, against sums over its intervals done one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from plans import random_costs, random_plan

from octopipe.costs.table import CostTable
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Extra, MemoryCurve, Overlap, Spans, Timeline, Transfers, timeline_from_json


def drawn(seed: int) -> Timeline:
    rng = random.Random(seed)
    plan = random_plan(rng)
    return simulate(plan, random_costs(rng, plan))


TIMELINES = [drawn(seed) for seed in range(40)]


def hidden(t: Timeline, rank: int, start: float, end: float) -> float:
    """Time within an interval in which the rank computed."""
    s = t.spans
    return sum(
        max(0.0, min(end, float(s.end_ms[k])) - max(start, float(s.start_ms[k])))
        for k in range(s.rank.size)
        if s.rank[k] == rank
    )


@pytest.mark.parametrize("t", TIMELINES)
def test_overlap_counts_what_lies_behind_computation(t: Timeline) -> None:
    x = t.transfers
    total = whole = part = 0
    behind = lasted = 0.0
    for k in range(x.source.size):
        start, end = float(x.start_ms[k]), float(x.end_ms[k])
        for rank in (int(x.source[k]), int(x.destination[k])):
            took = hidden(t, rank, start, end)
            total, behind, lasted = total + 1, behind + took, lasted + end - start
            whole += took >= end - start - 1e-9 * (1 + end - start)
            part += took > 1e-9 * (1 + end - start) or end - start <= 1e-9 * (1 + end - start)
    o = t.overlap
    assert (o.communications, o.overlapped, o.overlappable) == (total, whole, part)
    assert o.hidden_ms == pytest.approx(behind, abs=1e-9) and o.total_ms == pytest.approx(lasted, abs=1e-9)
    assert o.rate == (whole / total if total else 1.0) and o.overlappable_rate == (part / total if total else 1.0)


@pytest.mark.parametrize("t", TIMELINES)
def test_idle_time_is_split_without_remainder(t: Timeline) -> None:
    s, b = t.spans, t.bubbles
    busiest = max(t.busy_ms)
    for rank in range(t.num_ranks):
        mine = [k for k in range(s.rank.size) if s.rank[k] == rank]
        busy = sum(float(s.end_ms[k] - s.start_ms[k]) for k in mine)
        assert t.busy_ms[rank] == pytest.approx(busy)
        idle = max(0.0, t.makespan_ms - busy)
        first = min((float(s.start_ms[k]) for k in mine), default=0.0)
        last = max((float(s.end_ms[k]) for k in mine), default=t.makespan_ms)
        boundary = min(idle, first + t.makespan_ms - last) if mine else idle
        waited = 0.0
        for before, k in pairwise(mine):
            needed = [j for j in range(t.transfers.source.size) if t.transfers.consumer[j] == k]
            if needed:
                latest = max(needed, key=lambda j: (float(t.transfers.end_ms[j]), j))
                begin = max(float(s.end_ms[before]), float(t.transfers.start_ms[latest]))
                waited += max(0.0, min(float(s.start_ms[k]), float(t.transfers.end_ms[latest])) - begin)
        communication = min(waited, idle - boundary)
        imbalance = min(busiest - busy, idle - boundary - communication)
        want = (idle, boundary, communication, imbalance, idle - boundary - communication - imbalance)
        assert [float(column[rank]) for column in b] == pytest.approx(want, abs=1e-9)
    assert t.bubble_ratio == pytest.approx(1 - np.mean(t.busy_ms) / t.step_ms if t.step_ms else 0.0)
    spans = [
        max((float(s.end_ms[k]) for k in range(s.rank.size) if s.rank[k] == r), default=0.0)
        - min((float(s.start_ms[k]) for k in range(s.rank.size) if s.rank[k] == r), default=0.0)
        for r in range(t.num_ranks)
    ]
    assert t.span_ms == pytest.approx(max(spans))
    assert t.span_bubble_ratio == pytest.approx((max(spans) - busiest) / max(spans) if max(spans) else 0.0)


@pytest.mark.parametrize("t", TIMELINES[:15])
def test_the_critical_path_is_a_chain_of_what_ended_last(t: Timeline) -> None:
    count = t.spans.rank.size
    start = np.concatenate([t.spans.start_ms, t.transfers.start_ms])
    end = np.concatenate([t.spans.end_ms, t.transfers.end_ms])
    path = t.critical_path()
    assert path[-1] < count and end[path[-1]] == t.makespan_ms
    assert start[path[0]] == pytest.approx(0.0, abs=1e-12)
    for a, b in pairwise(path):
        assert end[a] == pytest.approx(start[b], abs=1e-9)


@pytest.mark.parametrize("t", TIMELINES[:10])
def test_a_written_timeline_reads_back_the_same(t: Timeline) -> None:
    again = timeline_from_json(t.to_json())
    assert again.summary() == t.summary() and again.critical_path() == t.critical_path()


def two_ops(**more: object) -> Timeline:
    spans = Spans(*(np.array(x) for x in ([0, 1], [0, 1], [0, 0], [0, 0])), np.array([0.0, 2.0]), np.array([1.0, 4.0]))
    moved = Transfers(
        *(np.array(x, np.int32) for x in ([0], [1], [0], [1])), np.array([1.0]), np.array([2.0]), np.array([8.0])
    )
    return Timeline(num_ranks=2, spans=spans, transfers=moved, **more)  # type: ignore[arg-type]


def test_a_step_lasts_until_its_last_extra() -> None:
    assert two_ops().step_ms == 4.0
    late = two_ops(extras=(Extra("optimizer", 0, 4.0, 5.5), Extra("optimizer", 1, 4.0, 5.0)))
    assert late.step_ms == 5.5 and late.makespan_ms == 4.0
    assert late.bubble_ratio == pytest.approx(1 - 1.5 / 5.5)


@pytest.mark.parametrize(("capacity", "fits"), [((10.0, 9.0), True), ((9.9, 9.0), False), ((10.0, 8.0), False)])
def test_memory_fits_where_no_rank_holds_more_than_it_may(capacity: tuple[float, float], fits: bool) -> None:
    curves = (
        MemoryCurve(np.array([0.0, 1.0]), np.array([4.0, 10.0]), 3.0),
        MemoryCurve(np.array([0.0]), np.array([2.0]), 9.0),
    )
    t = two_ops(memory=curves, capacity_bytes=capacity)
    assert t.peak_bytes.tolist() == [10.0, 9.0] and t.fits is fits
    assert t.peak_gib == (10 / 2**30, 9 / 2**30)


def test_nothing_that_ran_is_no_division_by_zero() -> None:
    costs = CostTable.uniform(num_layers=2).replace(forward_ms=np.zeros(2), input_ms=np.zeros(2), weight_ms=np.zeros(2))
    t = simulate(build_plan("1f1b", costs, 2, 2), costs)
    assert t.step_ms == t.bubble_ratio == t.span_bubble_ratio == 0.0


# -- by hand -------------------------------------------------------------------------------------------------


def made(
    rows: list[tuple[int, float, float]], moved: Sequence[tuple[int, int, float, float]] = (), **more: object
) -> Timeline:
    """Spans (rank, start, end), transfers (from span, to span, start, end)."""
    ranks = [r for r, _, _ in rows]
    spans = Spans(
        *(np.array(x, np.int32) for x in (ranks, ranks, [0] * len(rows), range(len(rows)))),
        np.array([a for _, a, _ in rows], float), np.array([b for _, _, b in rows], float),
    )  # fmt: skip
    transfers = Transfers(
        *(
            np.array(x, np.int32)
            for x in ([a for a, *_ in moved], [b for _, b, *_ in moved], [ranks[a] for a, *_ in moved],
                      [ranks[b] for _, b, *_ in moved])
        ),
        np.array([x[2] for x in moved], float), np.array([x[3] for x in moved], float), np.ones(len(moved)),
    )  # fmt: skip
    return Timeline(num_ranks=max(ranks, default=0) + 1, spans=spans, transfers=transfers, **more)  # type: ignore[arg-type]


def test_a_transfer_is_hidden_for_as_long_as_its_ranks_compute() -> None:
    """Rank 0 computes in [0, 4] and [6, 8], rank 1 in [5, 9]; a transfer takes [3, 7]: one and one ms, and two."""
    t = made([(0, 0, 4), (0, 6, 8), (1, 5, 9)], [(0, 2, 3, 7)])
    assert t.overlap == Overlap(2, 0, 0.0, 4.0, 8.0, 2)
    # Inside one op on either side; before anything ran; in the gap; as long as nothing.
    assert made([(0, 0, 4), (1, 0, 4)], [(0, 1, 1, 3)]).overlap == Overlap(2, 2, 1.0, 4.0, 4.0, 2)
    assert made([(0, 2, 4), (1, 8, 9)], [(0, 1, 0, 1)]).overlap == Overlap(2, 0, 0.0, 0.0, 2.0, 0)
    assert made([(0, 0, 1), (0, 3, 4), (1, 8, 9)], [(0, 2, 1, 3)]).overlap == Overlap(2, 0, 0.0, 0.0, 4.0, 0)
    assert made([(0, 0, 1), (1, 3, 4)], [(0, 1, 2, 2)]).overlap == Overlap(2, 2, 1.0, 0.0, 0.0, 2)
    none = made([(0, 0, 1)]).overlap
    assert none == Overlap(0, 0, 1.0, 0.0, 0.0, 0) and none.overlappable_rate == 1.0
    assert (
        Overlap(4, 1, 0.25, 1.0, 8.0, 3).overlappable_rate == 0.75 and Overlap(4, 1, 0.25, 1.0, 8.0).overlappable == 0
    )
    nearly = made([(0, 0, 4), (1, 0, 4)], [(0, 1, 2, 4 + 1e-9)]).overlap  # a rounding longer than its op
    assert nearly.overlapped == 2 and made([(0, 0, 4), (1, 0, 4)], [(0, 1, 2, 4.001)]).overlap.overlapped == 0
    assert made([(0, 0, 4), (1, 8, 9)], [(0, 1, 4 - 1e-10, 6)]).overlap.overlappable == 0  # and one inside it


def test_idle_time_by_hand() -> None:
    """Rank 0: [1, 3], [5, 6]; rank 1: [4, 5], waited from 3.5 to 4 for a transfer of [3, 4]; the step ends at 10."""
    t = made([(0, 1, 3), (0, 5, 6), (1, 0, 3.5), (1, 4, 5), (2, 9, 10)], [(0, 3, 3, 4)])
    b = t.bubbles
    assert t.busy_ms.tolist() == [3, 4.5, 1] and b.idle_ms.tolist() == [7, 5.5, 9]
    assert b.boundary_ms.tolist() == [5, 5, 9] and b.communication_ms.tolist() == [0, 0.5, 0]
    assert b.imbalance_ms.tolist() == [1.5, 0, 0] and [float(x) for x in b[4]] == [0.5, 0, 0]
    assert t.span_ms == 5 and t.span_bubble_ratio == pytest.approx(0.5 / 5)
    short = made([(0, 0, 0.25), (1, 0.25, 0.5), (1, 0.625, 0.75)])
    assert short.bubbles.imbalance_ms.tolist() == [0.0, 0.0] and short.makespan_ms == 0.75
    assert set(short.summary()["bubbles_ms"]) == {"idle", "boundary", "communication", "imbalance", b._fields[4][:-3]}


def test_a_rank_that_ran_nothing_is_idle_at_its_boundary() -> None:
    t = made([(0, 0, 2), (2, 2, 3)])
    assert t.bubbles.boundary_ms.tolist() == [1, 3, 2] and t.span_ms == 2
    empty = made([])
    assert empty.makespan_ms == empty.step_ms == empty.span_ms == 0.0 and empty.critical_path() == ()
    assert made([], binding=np.array([-1], np.int32)).critical_path() == ()


def test_the_critical_path_follows_what_bound_and_ends_even_in_a_circle() -> None:
    rows = [(0, 0, 1), (0, 1, 2), (1, 3, 4)]
    assert made(rows).critical_path() == ()
    assert made(rows, [(1, 2, 2, 3)], binding=np.array([-1, 0, 3, 1], np.int32)).critical_path() == (0, 1, 3, 2)
    assert made(rows[:1], binding=np.array([-1], np.int32)).critical_path() == (0,)
    assert len(made(rows[:2], binding=np.array([1, 0], np.int32)).critical_path()) == 3


def test_a_timeline_is_predicted_unless_it_was_measured() -> None:
    assert "predicted" in repr(two_ops()) and "measured" in repr(two_ops(measured=True))
    again = timeline_from_json(two_ops(capacity_bytes=(float("inf"), 5.0), setting={"seed": 3}).to_json())
    assert again.capacity_bytes == (float("inf"), 5.0) and again.setting == {"seed": 3} and not again.measured
    assert again.transfers.nbytes.dtype == again.spans.start_ms.dtype == np.float64
    assert again.spans.rank.dtype == again.transfers.source.dtype == np.int32
    assert timeline_from_json(two_ops().to_json()).setting == {}


@pytest.mark.parametrize(
    ("peak", "capacity", "fits"), [(0.0, 0.0, True), (1.0, 1 - 5e-13, True), (1.0, 1 - 5e-12, False)]
)
def test_memory_fits_to_the_rounding_of_sums(peak: float, capacity: float, fits: bool) -> None:
    curve = MemoryCurve(np.array([0.0]), np.array([peak]), 0.0)
    assert two_ops(memory=(curve, curve), capacity_bytes=(capacity, 9.0)).fits is fits

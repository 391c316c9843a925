"""Numbers of a timeline, against sums over its intervals done one by one."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from plans import random_costs, random_plan

from octopipe.cost import CostTable
from octopipe.simulator import simulate
from octopipe.systems import build_plan
from octopipe.timeline import Extra, MemoryCurve, Spans, Timeline, Transfers, timeline_from_json


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
    costs = CostTable.uniform(num_layers=2).replace(
        forward_ms=np.zeros(2), input_ms=np.zeros(2), weight_ms=np.zeros(2)
    )
    t = simulate(build_plan("1f1b", costs, 2, 2), costs)
    assert t.step_ms == t.bubble_ratio == t.span_bubble_ratio == 0.0

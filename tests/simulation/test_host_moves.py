"""Activations in host memory: nothing waits for them, memory falls, and the graph says what the text says."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from effort import draws, some

from octopipe.base.errors import OctoPipeError, PlanError
from octopipe.costs.cluster.hardware import Link
from octopipe.costs.profile_file import Profile
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.plans.plan_json import plan_to_json
from octopipe.search.offload import fitting, offloading, without_recomputing
from octopipe.search.recompute import recomputing
from octopipe.search.systems import build_plan
from octopipe.simulation.contention import predict
from octopipe.simulation.host_moves import choose_moves
from octopipe.simulation.lowering import CHANNELS, lower
from octopipe.simulation.simulator import makespan_ms, simulate
from octopipe.simulation.timeline import timeline_from_json
from octopipe.views.export.megatron import megatron_layout
from octopipe.views.export.perfetto import trace_events
from octopipe.views.export.pytorch import torch_order

SYSTEMS = ("gpipe", "1f1b", "interleaved", "zb-v", "zb-h1")


def drawn_costs(seed: int, layers: int = 16) -> CostTable:
    rng = np.random.default_rng(seed)
    held = rng.uniform(50, 200, layers)
    return CostTable(
        model="drawn",
        symbols="T" * layers,
        forward_ms=rng.uniform(0.5, 2, layers),
        input_ms=rng.uniform(0.5, 2, layers),
        weight_ms=rng.uniform(0.5, 2, layers),
        activation_bytes=held,
        stash_bytes=held * rng.uniform(0, 1, layers),
        boundary_bytes=rng.uniform(1, 20, layers),
        static_bytes=rng.uniform(0, 300, layers),
        host_link=Link(latency_ms=0.01, ms_per_byte=1.0 / rng.choice([30.0, 60.0, 120.0, 500.0])),
    )


def marked(plan: Plan, seed: int) -> Plan:
    dice = random.Random(seed)
    chosen = [k for k in range(len(plan.stages)) if dice.random() < 0.8] or [0]
    return offloading(plan, chosen).check()


@pytest.mark.parametrize("seed", some(range(12), 5))
@pytest.mark.parametrize("channel", CHANNELS)
def test_nothing_waits_for_host_memory_and_no_rank_holds_more(seed, channel):
    costs = drawn_costs(seed)
    plan = build_plan(SYSTEMS[seed % len(SYSTEMS)], costs, 4, 8)
    before = simulate(plan, costs, channel=channel)
    after = simulate(marked(plan, seed), costs, channel=channel)
    assert after.makespan_ms == pytest.approx(before.makespan_ms, rel=1e-12)
    assert np.array_equal(after.spans.start_ms, before.spans.start_ms)
    assert (after.peak_bytes <= before.peak_bytes * (1 + 1e-12)).all()


@pytest.mark.parametrize("seed", range(12))
def test_every_move_keeps_the_order_of_its_lane_and_of_its_op(seed):
    costs = drawn_costs(seed)
    plan = marked(build_plan(SYSTEMS[seed % len(SYSTEMS)], costs, 4, 8), seed)
    program = lower(plan, costs)
    moves, host, t = program.moves, simulate(program, costs).host, plan.table()
    assert moves is not None and host is not None
    spans = simulate(program, costs).spans
    slack = 1e-6
    assert (host.down_start_ms >= spans.end_ms[moves.forward] - slack).all()
    assert (host.down_end_ms <= spans.start_ms[moves.release] + slack).all()
    assert (host.up_start_ms >= host.down_end_ms - slack).all()
    assert (host.up_start_ms >= spans.end_ms[moves.fetch - 1] - slack).all()
    assert (host.up_end_ms <= spans.start_ms[moves.back] + slack).all()
    assert (moves.forward < moves.release).all() and (moves.release < moves.fetch).all()
    assert (moves.fetch <= moves.back).all()
    assert host.nbytes == pytest.approx(moves.nbytes)
    for starts, ends in ((host.down_start_ms, host.down_end_ms), (host.up_start_ms, host.up_end_ms)):
        for rank in range(4):
            mine = np.flatnonzero(t.rank[moves.forward] == rank)
            order = mine[np.argsort(starts[mine], kind="stable")]
            assert (starts[order][1:] >= ends[order][:-1] - slack).all()


def test_memory_is_what_a_walk_over_the_events_adds_up():
    """A second way to count: for every rank, at the end of every op, the activations that are on the device."""
    costs = drawn_costs(3).replace(boundary_bytes=np.zeros(16), stash_bytes=np.zeros(16), static_bytes=np.zeros(16))
    plan = marked(build_plan("1f1b", costs, 4, 8), 1)
    program = lower(plan, costs)
    timeline = simulate(program, costs)
    moves, t, s = program.moves, plan.table(), timeline.spans
    assert moves is not None and moves.number > 0
    held = {k: costs.activation_bytes[st.first : st.stop].sum() for k, st in enumerate(plan.stages)}
    away = {(int(t.stage[f]), int(t.micro_batch[f])): k for k, f in enumerate(moves.forward)}
    for rank in range(4):
        lo, hi = t.offsets[rank], t.offsets[rank + 1]
        for op in range(lo, hi):
            expected = 0.0
            for first in range(lo, op + 1):
                if t.kind[first] != 0:
                    continue
                cell = int(t.stage[first]), int(t.micro_batch[first])
                back = max(t.index[2][cell], t.index[4][cell])
                k = away.get(cell)
                gone = k is not None and moves.release[k] <= op < moves.fetch[k]
                expected += held[cell[0]] if back >= op and not gone else 0.0
            middle = (s.start_ms[op] + s.end_ms[op]) / 2
            curve = timeline.memory[rank]
            found = curve.bytes[np.searchsorted(curve.times_ms, middle, side="right") - 1]
            assert found == pytest.approx(expected, abs=1e-6), plan.op(op)


def test_a_slow_link_moves_what_lies_longest():
    costs = drawn_costs(0).replace(activation_bytes=np.full(16, 100.0), stash_bytes=np.zeros(16))
    plan = build_plan("interleaved", costs, 4, 8, chunks=2)
    plan = offloading(plan, range(len(plan.stages)))
    counts = []
    for rate in (1000.0, 40.0, 20.0, 0.01):
        program = lower(plan, costs.replace(host_link=Link(ms_per_byte=1 / rate)))
        assert program.moves is not None
        counts.append(program.moves.number)
        if rate == 20.0:
            stages = np.bincount(plan.table().stage[program.moves.forward], minlength=8)
            assert stages[:4].sum() > stages[4:].sum()  # the first chunk's wait for the second one's to pass
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] == 0


def test_the_file_says_it_and_reads_it():
    costs = drawn_costs(1)
    plan = marked(build_plan("1f1b", costs, 4, 8), 2)
    text = plan_to_json(plan)
    assert b'"octopipe.plan/2"' in text and b'"offload":true' in text
    assert Plan.from_json(text) == plan
    timeline = simulate(plan, costs)
    assert timeline_from_json(timeline.to_json()).host_peak_bytes.tolist() == timeline.host_peak_bytes.tolist()
    names = {e["args"].get("name") for e in trace_events(timeline, plan)["traceEvents"] if e["ph"] == "M"}
    assert {"to host memory", "from host memory"} <= names


def test_other_runtimes_refuse_it_and_unknown_links_are_named():
    costs = drawn_costs(1)
    plan = marked(build_plan("1f1b", costs, 4, 8), 2)
    for other in (torch_order, lambda p: megatron_layout(p, "T" * 16)):
        with pytest.raises(OctoPipeError, match="host memory"):
            other(plan)
    with pytest.raises(OctoPipeError, match="host-gb-per-s"):
        simulate(plan, costs.replace(host_link=None))
    both = tuple(replace(s, offload=True, recompute=True) for s in plan.stages)
    with pytest.raises(PlanError, match="recomputes as well"):
        replace(plan, stages=both).check()


def test_predictions_with_ranks_that_share_a_device_agree_where_they_share_nothing():
    costs = drawn_costs(5)
    plan = marked(build_plan("zb-v", costs, 4, 8), 3)
    assert predict(plan, Profile(costs=costs)).makespan_ms == pytest.approx(simulate(plan, costs).makespan_ms)
    assert makespan_ms(plan, costs) == pytest.approx(simulate(plan, costs).makespan_ms)


def test_a_plan_that_does_not_fit_is_made_to_fit():
    costs = drawn_costs(2).replace(static_bytes=np.zeros(16), host_link=Link(ms_per_byte=1 / 500))
    plan = build_plan("interleaved", costs, 4, 8)
    peak = simulate(plan, costs).peak_bytes.max()
    tight = costs.replace(rank_memory_bytes=(0.6 * peak,))
    made = fitting(plan, tight)
    assert made is not None and made[1].fits and made[0].offloads
    assert made[1].step_ms == pytest.approx(simulate(plan, costs).step_ms)
    assert fitting(plan, costs.replace(rank_memory_bytes=(0.05 * peak,))) is None


def test_host_memory_takes_the_place_of_recomputation():
    costs = drawn_costs(2).replace(static_bytes=np.zeros(16), host_link=Link(ms_per_byte=1 / 500))
    plan = build_plan("interleaved", costs, 4, 8)
    tight = costs.replace(rank_memory_bytes=(0.6 * simulate(plan, costs).peak_bytes.max(),))
    again = recomputing(plan)
    better, timeline = without_recomputing(again, tight)
    assert timeline.fits and timeline.step_ms < simulate(again, tight).step_ms
    assert better.check() and better.offloads
    assert not any(op.kind == "R" and better.stages[op.stage].offload for order in better.orders for op in order)


def test_pipe_offload_leaves_less_on_the_device_than_the_schedule_it_is_made_of():
    costs = drawn_costs(4).replace(host_link=Link(ms_per_byte=1 / 400))
    base = simulate(build_plan("interleaved", costs, 4, 8, chunks=4), costs)
    for rate, least in ((4000.0, 0.5), (110.0, 0.85)):
        slower = costs.replace(host_link=Link(ms_per_byte=1 / rate))
        plan = build_plan("pipe-offload", slower, 4, 8, chunks=4)
        timeline = simulate(plan, slower)
        assert timeline.makespan_ms == pytest.approx(base.makespan_ms)
        assert (timeline.peak_bytes - timeline.memory[0].static_bytes).max() < least * base.peak_bytes.max()
    with pytest.raises(OctoPipeError, match="link to host memory"):
        build_plan("pipe-offload", costs.replace(host_link=None), 4, 8)


def lane_of(seed: int) -> tuple[Any, ...]:
    """One rank's ops with gaps between them, of which some forwards and backwards may move their activations."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 9))
    took = rng.choice([0.0, 0.0, 0.5, 1.0], 3 * count)
    start = np.cumsum(rng.choice([0.0, 0.0, 0.2, 3.0], 3 * count) + np.concatenate(([0.0], took[:-1])))
    order = rng.permutation(3 * count)
    pairs = np.sort(order[: 2 * count].reshape(count, 2), axis=1).astype(np.int32)
    pairs = pairs[np.argsort(pairs[:, 0])]
    offsets = np.array([0, 3 * count], np.int32)
    ms = np.full(count, rng.choice([0.1, 0.5]))
    return offsets, pairs[:, 0], pairs[:, 1], rng.uniform(1, 9, count), ms, start, start + took


@pytest.mark.parametrize("seed", range(draws(200, least=40)))
def test_a_copy_back_that_waits_with_an_op_makes_no_later_copy_late(seed: int) -> None:
    offsets, forward, back, nbytes, ms, start, end = lane_of(seed)
    moves = choose_moves(offsets, forward, back, nbytes, ms, start, end)
    at = -np.inf
    for k in np.argsort(moves.back):
        ready = start[moves.fetch[k]] if moves.with_op[k] else np.concatenate(([0.0], end))[moves.fetch[k]]
        at = max(at, ready) + moves.ms[k]
        assert at <= start[moves.back[k]] + 1e-9

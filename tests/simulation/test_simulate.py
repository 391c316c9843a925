"""The simulator against its plain-Python twin, against closed forms and against hand-made cases."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import twin
from effort import draws
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import random_costs, random_plan

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import Link, Network
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan, Stage
from octopipe.search.systems import build_plan
from octopipe.simulation.lowering import CHANNELS, lower
from octopipe.simulation.simulator import jitter_ms, makespan_ms, simulate

seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=draws(600), deadline=None)
@given(seeds, st.integers(1, 2), st.booleans())
def test_times_and_memory_equal_the_plain_python_twin(seed: int, routes: int, zeros: bool) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng, routes=routes)
    costs = random_costs(rng, plan, zeros=zeros)
    timeline = simulate(plan, costs)
    times, peaks = twin.run(plan, costs)
    for number in range(timeline.spans.stage.size):
        begin, end = times[timeline.op(number)]
        assert timeline.spans.start_ms[number] == pytest.approx(begin, abs=1e-9)
        assert timeline.spans.end_ms[number] == pytest.approx(end, abs=1e-9)
    for rank, peak in peaks.items():
        assert timeline.peak_bytes[rank] == pytest.approx(peak, abs=1e-9)


@settings(max_examples=draws(400), deadline=None)
@given(seeds, st.integers(1, 2))
def test_fast_evaluation_equals_the_simulated_timeline(seed: int, routes: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng, routes=routes)
    costs = random_costs(rng, plan)
    assert makespan_ms(plan, costs) == simulate(plan, costs).makespan_ms


@settings(max_examples=draws(300), deadline=None)
@given(seeds)
def test_bubble_parts_add_up_to_the_idle_time(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng, routes=rng.randint(1, 2))
    costs = random_costs(rng, plan)
    for channel in CHANNELS:
        timeline = simulate(plan, costs, channel=channel)
        b = timeline.bubbles
        parts = np.array([b.boundary_ms, b.communication_ms, b.imbalance_ms, b.residual_ms])
        assert np.all(parts >= 0)
        np.testing.assert_allclose(parts.sum(axis=0), b.idle_ms, atol=1e-9)
        np.testing.assert_allclose(b.idle_ms + timeline.busy_ms, timeline.makespan_ms, atol=1e-9)
        assert 0 <= timeline.overlap.overlapped <= timeline.overlap.communications


@settings(max_examples=draws(300), deadline=None)
@given(seeds)
def test_tighter_channels_are_never_faster_and_blocking_is_never_fastest(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng)
    costs = random_costs(rng, plan)
    free = simulate(plan, costs, channel="directed").makespan_ms
    for channel in ("pair", "single", "blocking"):
        assert simulate(plan, costs, channel=channel).makespan_ms >= free - 1e-9


@settings(max_examples=draws(200), deadline=None)
@given(seeds)
def test_critical_path_is_a_gapless_chain_to_the_end(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng)
    timeline = simulate(plan, random_costs(rng, plan))
    starts = np.concatenate((timeline.spans.start_ms, timeline.transfers.start_ms))
    ends = np.concatenate((timeline.spans.end_ms, timeline.transfers.end_ms))
    path = timeline.critical_path()
    assert starts[path[0]] == 0
    assert ends[path[-1]] == timeline.makespan_ms
    for a, b in itertools.pairwise(path):
        assert ends[a] == starts[b]


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (4, 4), (4, 8), (8, 16), (5, 7)])
@pytest.mark.parametrize("system", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_closed_forms(system: str, p: int, m: int) -> None:
    f, i, w = 1.25, 1.5, 0.75
    costs = CostTable.uniform(
        num_layers=p, forward_ms=f, input_ms=i, weight_ms=w, activation_bytes=1.0, stash_bytes=0.5
    )
    timeline = simulate(build_plan(system, costs, p, m), costs)
    assert timeline.step_ms == pytest.approx((m + p - 1) * (f + i + w))
    expected = [m] * p if system == "gpipe" else [min(p - rank, m) for rank in range(p)]
    assert timeline.peak_bytes.tolist() == expected


@pytest.mark.parametrize(("p", "groups", "v"), [(2, 1, 2), (4, 2, 2), (4, 2, 3), (8, 2, 2), (3, 4, 5)])
def test_interleaved_closed_forms(p: int, groups: int, v: int) -> None:
    m = p * groups
    costs = CostTable.uniform(num_layers=p * v, activation_bytes=1.0)
    timeline = simulate(build_plan("interleaved", costs, p, m, chunks=v), costs)
    assert timeline.step_ms == pytest.approx(m * v * 3 + (p - 1) * 3)
    assert timeline.peak_bytes[0] == min(2 * (p - 1) + (v - 1) * p + 1, m * v)


def test_recompute_drops_activations_and_pays_a_second_forward() -> None:
    costs = CostTable.uniform(num_layers=1, activation_bytes=8.0).replace(boundary_bytes=np.array([1.0]))
    kept = Plan(
        num_layers=1,
        num_ranks=1,
        num_micro_batches=2,
        stages=(Stage(first=0, stop=1, rank=0),),
        orders=(tuple(map(Op.parse, ("0F0", "0F1", "0B0", "0B1"))),),
    )
    again = Plan(
        num_layers=1,
        num_ranks=1,
        num_micro_batches=2,
        stages=(Stage(first=0, stop=1, rank=0, recompute=True),),
        orders=(tuple(map(Op.parse, ("0F0", "0F1", "0R0", "0B0", "0R1", "0B1"))),),
    )
    slow, fast = simulate(again, costs), simulate(kept, costs)
    assert (fast.step_ms, slow.step_ms) == (6.0, 8.0)
    assert (fast.peak_bytes[0], slow.peak_bytes[0]) == (16.0, 8.0)


def test_data_parallel_reduction_and_optimizer_follow_the_last_weight_gradient() -> None:
    from octopipe.costs.cluster.hardware import Link

    costs = CostTable.uniform(num_layers=2).replace(
        gradient_bytes=np.array([10.0, 10.0]),
        optimizer_ms=np.array([0.5, 0.5]),
        data_parallel=2,
        reduction=Link(ms_per_byte=0.1),
    )
    timeline = simulate(build_plan("1f1b", costs, 2, 2), costs)
    assert timeline.makespan_ms == pytest.approx(9.0)
    # Ring of two: 2(n-1)/n = 1 times the bytes, then the update.
    assert timeline.step_ms == pytest.approx(9.0 + 1.0 + 0.5)
    assert [e.name for e in timeline.extras if e.rank == 0] == ["reduce stage 0", "optimizer"]


def test_replicated_stages_count_twice_in_memory_and_reduce_their_gradients() -> None:
    costs = CostTable.uniform(num_layers=2, p2p_ms=0.0).replace(
        static_bytes=np.array([1.0, 2.0]), gradient_bytes=np.array([4.0, 4.0])
    )
    from octopipe.costs.cluster.hardware import Link, Network

    link = Link(ms_per_byte=0.25)
    costs = costs.replace(network=Network(intra=link, inter=link))
    orders = (("0F0", "3F1", "3B1", "0B0"), ("2F1", "1F0", "1B0", "2B1"))
    plan = Plan(
        num_layers=2,
        num_ranks=2,
        num_micro_batches=2,
        stages=(
            Stage(first=0, stop=1, rank=0),
            Stage(first=1, stop=2, rank=1),
            Stage(first=0, stop=1, rank=1),
            Stage(first=1, stop=2, rank=0),
        ),
        routes=((0, 1), (2, 3)),
        route_of_micro_batch=(0, 1),
        orders=tuple(tuple(map(Op.parse, row)) for row in orders),
    ).check()
    timeline = simulate(plan, costs)
    assert [c.static_bytes for c in timeline.memory] == [3.0, 3.0]
    # Two stages per rank, each reduced between two holders: 4 bytes * 0.25, one after the other.
    assert timeline.step_ms == pytest.approx(timeline.makespan_ms + 1.0)


def test_jitter_without_width_is_the_nominal_time_and_more_width_is_slower() -> None:
    costs = CostTable.uniform(num_layers=4, p2p_ms=0.1)
    program = lower(build_plan("1f1b", costs, 4, 8), costs)
    nominal = simulate(program, costs).makespan_ms
    assert jitter_ms(program, costs, sigma=0.0, runs=3).tolist() == pytest.approx([nominal] * 3)
    noisy = jitter_ms(program, costs, sigma=0.2, runs=500, seed=1)
    assert noisy.mean() > nominal
    assert np.array_equal(noisy, jitter_ms(program, costs, sigma=0.2, runs=500, seed=1))


def test_costs_of_another_model_are_refused() -> None:
    costs = CostTable.uniform(num_layers=4)
    with pytest.raises(OctoPipeError, match="4 layers"):
        simulate(build_plan("1f1b", costs, 2, 2), CostTable.uniform(num_layers=5))


def test_tied_weights_count_once_where_one_rank_holds_both() -> None:
    costs = CostTable.uniform(num_layers=4).replace(static_bytes=np.array([5.0, 1.0, 1.0, 6.0]), tied_bytes=4.0)
    apart = build_plan("1f1b", costs, 2, 2)
    assert [m.static_bytes for m in simulate(apart, costs).memory] == [6.0, 7.0]
    around = build_plan("zb-v", costs, 2, 2)  # first and last stage on rank 0
    assert [m.static_bytes for m in simulate(around, costs).memory] == [7.0, 2.0]


@pytest.mark.parametrize(("system", "summed"), [("1f1b", True), ("zb-v", False)])
def test_tied_weights_on_two_ranks_are_summed_after_the_pipeline(system: str, summed: bool) -> None:
    """ZB-V holds the embedding and the head on one rank, 1F1B on the first and on the last."""
    link = Link(latency_ms=0.1, ms_per_byte=1e-3)
    costs = CostTable.uniform(num_layers=8).replace(
        static_bytes=np.full(8, 100.0),
        gradient_bytes=np.full(8, 50.0),
        tied_bytes=100.0,
        network=Network(intra=link, inter=link),
    )
    timeline = simulate(build_plan(system, costs, 4, 4), costs)
    reductions = [extra for extra in timeline.extras if extra.name.startswith("reduce")]
    assert [extra.rank for extra in reductions] == ([0, 3] if summed else [])
    took = 2 * 0.1 + 50.0 * 1e-3 if summed else 0.0
    assert timeline.step_ms == pytest.approx(timeline.makespan_ms + took)
    apart = simulate(build_plan(system, costs, 4, 4), costs.replace(tied_bytes=0.0))
    assert apart.step_ms == apart.makespan_ms == timeline.makespan_ms

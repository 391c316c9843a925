"""Tessel, DynaPipe, Mario: closed forms, brute force on small cases, memory limits."""

from __future__ import annotations

import sys
from itertools import combinations, pairwise

import numpy as np
import pytest
from effort import some
from ranks import PATIENCE_S

from octopipe.base.errors import DoesNotFitError, NotApplicableError, OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op
from octopipe.search.systems import build_plan
from octopipe.search.systems.dynapipe import cluster, cyclic_orders, micro_batch_samples, sequences
from octopipe.search.systems.mario import (
    checkpoint,
    drop_recompute,
    naive_makespan_ms,
    overlap_recompute,
    prepose_forwards,
)
from octopipe.search.systems.repetend import Blocks, Repetend, packed, packed_tightly, serial
from octopipe.search.systems.repetend_solver import complete, find_repetend
from octopipe.search.systems.shapes import even_sizes, loop, stages_from_sizes, wave
from octopipe.simulation.simulator import makespan_ms, simulate

MIB = float(1 << 20)


def uneven(layers: int, seed: int, **more: object) -> CostTable:
    draw = np.random.default_rng(seed)
    return CostTable.uniform(num_layers=layers, p2p_ms=0.1).replace(
        forward_ms=draw.uniform(0.5, 2.0, layers),
        input_ms=draw.uniform(0.5, 2.0, layers),
        weight_ms=draw.uniform(0.2, 1.5, layers),
        activation_bytes=draw.uniform(1.0, 4.0, layers) * MIB,
        **more,
    )


# -- Mario ------------------------------------------------------------------------------------------------


def test_mario_passes_reach_the_published_makespans() -> None:
    costs = CostTable.uniform(num_layers=4)  # F = R = 1, b = 2
    first = checkpoint(build_plan("1f1b", costs, 4, 8)).check()
    second = overlap_recompute(first, costs).check()
    third = drop_recompute(second).check()
    fourth = prepose_forwards(third, costs).check()
    times = [naive_makespan_ms(first, costs), *(makespan_ms(plan, costs) for plan in (second, third))]
    assert times == [44.0, 41.0, 39.0]
    assert makespan_ms(fourth, costs) < 39.0


@pytest.mark.parametrize("seed", range(6))
def test_mario_closed_forms_hold_for_any_even_costs(seed: int) -> None:
    draw = np.random.default_rng(seed)
    p, m = int(draw.integers(2, 7)), int(draw.integers(7, 15))
    f, i, w = draw.uniform(0.5, 2.0, 3)
    b = i + w
    costs = CostTable.uniform(num_layers=p, forward_ms=f, input_ms=i, weight_ms=w)
    plan = checkpoint(build_plan("1f1b", costs, p, m))
    assert naive_makespan_ms(plan, costs) == pytest.approx((m + p - 1) * (2 * f + b))
    overlapped = makespan_ms(overlap_recompute(plan, costs), costs)
    assert overlapped == pytest.approx(m * (2 * f + b) + (p - 1) * (f + b))


def test_mario_drops_recomputation_only_where_the_backward_follows_at_once() -> None:
    costs = CostTable.uniform(num_layers=4)
    plan = drop_recompute(checkpoint(build_plan("1f1b", costs, 4, 8)))
    counts = [sum(op.kind == "R" for op in order) for order in plan.orders]
    assert counts == [8, 8, 8, 0]


def test_mario_keeps_checkpoints_and_one_micro_batch() -> None:
    costs = CostTable.uniform(num_layers=8, activation_bytes=100 * MIB).replace(boundary_bytes=np.full(8, MIB))
    plan = drop_recompute(checkpoint(build_plan("1f1b", costs, 4, 16)))
    timeline = simulate(plan, costs)
    stage = 2 * 100 * MIB
    for rank in range(1, 3):  # the first stage has no input to keep, the last keeps its activations
        in_flight = 4 - rank
        assert timeline.peak_bytes[rank] == pytest.approx(in_flight * MIB + stage, abs=4 * MIB)
    whole = simulate(build_plan("1f1b", costs, 4, 16), costs)
    assert timeline.peak_bytes.max() < 0.4 * whole.peak_bytes.max()


def test_mario_preposes_no_forward_that_does_not_fit() -> None:
    free = CostTable.uniform(num_layers=8, activation_bytes=8 * MIB).replace(boundary_bytes=np.full(8, 4 * MIB))
    base = drop_recompute(overlap_recompute(checkpoint(build_plan("1f1b", free, 4, 8)), free))
    peak = float(simulate(base, free).peak_bytes.max())
    tight = free.replace(rank_memory_bytes=(peak,))
    assert simulate(prepose_forwards(base, tight), tight).fits
    fast = makespan_ms(prepose_forwards(base, free), free)
    assert fast <= makespan_ms(prepose_forwards(base, tight), tight) <= makespan_ms(base, free)


@pytest.mark.parametrize("base", ["1f1b", "gpipe", "interleaved", "chimera", "zb-h1"])
def test_mario_reworks_any_base(base: str) -> None:
    costs = uneven(16, 3)
    plan = build_plan("mario", costs, 4, 8, base=base)
    assert all(stage.recompute for stage in plan.stages)
    naive = naive_makespan_ms(checkpoint(build_plan(base, costs, 4, 8)), costs)
    assert makespan_ms(plan, costs) <= naive + 1e-9
    with pytest.raises(OctoPipeError, match="base mario"):
        build_plan("mario", costs, 4, 8, base="mario")


# -- DynaPipe ---------------------------------------------------------------------------------------------


def test_dynapipe_on_equal_micro_batches_has_the_bubble_of_1f1b() -> None:
    costs = CostTable.uniform(num_layers=8, activation_bytes=MIB)
    plan = build_plan("dynapipe", costs, 4, 16)
    assert makespan_ms(plan, costs) == makespan_ms(build_plan("1f1b", costs, 4, 16), costs)


def test_dynapipe_cycle_runs_the_head_of_each_queue_once() -> None:
    orders = cyclic_orders([0, 1, 2], np.ones((2, 3)), np.full(2, np.inf), 3)
    assert ["".join(map(str, order)) for order in orders] == ["0F00F10F20B00B10B2", "1F01B01F11B11F21B2"]


def test_dynapipe_finds_an_order_for_uneven_lengths_that_beats_the_given_one() -> None:
    draw = np.random.default_rng(1)
    for m in (8, 24):
        costs = uneven(16, 5, micro_batch_factor=draw.uniform(0.2, 2.0, m))
        plan = build_plan("dynapipe", costs, 4, m)
        assert makespan_ms(plan, costs) < makespan_ms(build_plan("1f1b", costs, 4, m), costs)
        assert sorted(op.micro_batch for op in plan.orders[0] if op.kind == "F") == list(range(m))


@pytest.mark.parametrize("cap", [1, 2, 3, 5])
def test_dynapipe_injects_only_what_fits(cap: int) -> None:
    costs = CostTable.uniform(num_layers=4, activation_bytes=MIB).replace(rank_memory_bytes=(cap * MIB,))
    timeline = simulate(build_plan("dynapipe", costs, 4, 12), costs)
    assert timeline.fits and timeline.peak_bytes.max() == pytest.approx(cap * MIB)


def test_dynapipe_reserves_on_later_ranks_where_they_are_the_tight_ones() -> None:
    costs = CostTable.uniform(num_layers=4, activation_bytes=MIB).replace(
        rank_memory_bytes=(20 * MIB, 3 * MIB, 20 * MIB, 20 * MIB)
    )
    assert simulate(build_plan("dynapipe", costs, 4, 12), costs).fits


def test_dynapipe_limits_micro_batches_in_flight() -> None:
    costs = CostTable.uniform(num_layers=4, activation_bytes=MIB)
    timeline = simulate(build_plan("dynapipe", costs, 4, 12, max_in_flight=2), costs)
    assert timeline.peak_bytes.max() == pytest.approx(2 * MIB)
    with pytest.raises(OctoPipeError, match="max_in_flight is 0"):
        build_plan("dynapipe", costs, 4, 12, max_in_flight=0)


def test_groups_are_near_values_and_all_their_orders_are_tried() -> None:
    values = np.array([1.0, 9.0, 1.1, 5.0, 9.2, 5.1])
    assert sorted(map(sorted, cluster(values, 3))) == [[0, 2], [1, 4], [3, 5]]
    assert len(sequences(np.repeat(values, 6))) == 3 * 2 + 1  # 36 micro-batches: 3 groups
    assert len(sequences(values)) <= 4 * 3 * 2 + 1
    assert sequences(np.ones(10)) == [list(range(10))]


@pytest.mark.parametrize("seed", range(8))
def test_micro_batching_equals_brute_force(seed: int) -> None:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 50, 8).tolist()
    stages = int(draw.integers(1, 6))
    fixed, limit = draw.uniform(0.0, 60.0), 150

    def time_ms(count: int, length: int) -> float:
        return fixed + count * length + 0.01 * count * length**2

    def objective(groups: list[list[int]]) -> float:
        times = [time_ms(len(g), max(lengths[k] for k in g)) for g in groups]
        return (stages - 1) * max(times) + sum(times)

    def fits(count: int, length: int) -> bool:
        return count * length <= limit

    order = sorted(range(8), key=lambda k: lengths[k])
    best = np.inf
    for r in range(8):
        for inner in combinations(range(1, 8), r):
            cuts = [0, *inner, 8]
            groups = [order[a:b] for a, b in pairwise(cuts)]
            if all(fits(len(g), lengths[g[-1]]) for g in groups):
                best = min(best, objective(groups))
    found = micro_batch_samples(lengths, stages, time_ms, fits=fits)
    assert sorted(k for group in found for k in group) == list(range(8))
    assert objective(found) == pytest.approx(best)


def test_micro_batching_names_a_sample_that_is_too_long() -> None:
    with pytest.raises(DoesNotFitError, match="a sample of 70 tokens does not fit"):
        micro_batch_samples([10, 70], 4, lambda count, length: 1.0, fits=lambda count, length: length < 60)


# -- Tessel -----------------------------------------------------------------------------------------------

UNLIMITED = np.full(8, np.inf)


def blocks_of(costs: CostTable, p: int, ranks: list[int], *, split: bool = False) -> Blocks:
    return Blocks.of(costs, p, stages_from_sizes(even_sizes(costs, len(ranks)), ranks), split=split)


def problems(repetend: Repetend) -> list[str]:
    """What is wrong with a repetend, from its definition: one period of every rank, unrolled far enough."""
    blocks, out = repetend.of, []
    for a, b, transfer in blocks.edges:
        if repetend.flat[b] < repetend.flat[a] + blocks.blocks[a].span + transfer:
            out.append(f"block {b} runs before {a}")
    for rank in range(blocks.num_ranks):
        busy = [0] * repetend.period
        for i in blocks.on_rank(rank):
            for unit in range(blocks.blocks[i].span):
                busy[(repetend.flat[i] + unit) % repetend.period] += 1
        if max(busy) > 1:
            out.append(f"rank {rank} runs two blocks at once")
    return out


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_repetends_have_no_overlap_and_keep_dependencies(split: bool, seed: int) -> None:
    for ranks in (loop(4, 4), wave(8, 4), loop(8, 4)):
        blocks = blocks_of(uneven(16, seed), 4, ranks, split=split)
        period = max(blocks.work)
        for repetend in (packed(blocks, [1, 3]), packed_tightly(blocks, period), serial(blocks)):
            assert problems(repetend) == []
            repetend.plan(5).check()
        assert packed(blocks, [1, 3]).period == period


@pytest.mark.parametrize("seed", range(5))
def test_the_solver_finds_the_shortest_way_through_on_straight_pipelines(seed: int) -> None:
    pytest.importorskip("ortools")
    blocks = blocks_of(uneven(8, seed), 4, loop(4, 4))
    period = max(blocks.work)
    found = find_repetend(blocks, period, UNLIMITED, PATIENCE_S)
    assert found is not None and problems(found) == []
    assert found.flat[-1] == _earliest_way(blocks, period)[-1]


def _earliest_way(blocks: Blocks, period: int) -> list[int]:
    """The optimum with one stage per rank: no forward waits, and a backward waits only while its rank would run
    the forward of another period. Waiting earlier never helps, since every start is monotone in the one before.
    """
    flat = [0]
    for a, b, transfer in blocks.edges:
        ready = flat[a] + blocks.blocks[a].span + transfer
        block = blocks.blocks[b]
        if block.kind == "B":
            after_forward = (ready - flat[block.stage]) % period
            own = blocks.blocks[block.stage].span
            if after_forward < own:
                ready += own - after_forward
            elif after_forward > period - block.span:
                ready += period - after_forward + own
        flat.append(ready)
    return flat


def test_tessel_reaches_the_bound_of_1f1b_on_equal_stages_within_its_memory() -> None:
    pytest.importorskip("ortools")
    costs = CostTable.uniform(num_layers=4, activation_bytes=MIB).replace(rank_memory_bytes=(4 * MIB,))
    plan = build_plan("tessel", costs, 4, 16, time_limit_s=PATIENCE_S)
    timeline = simulate(plan, costs)
    assert timeline.fits and timeline.makespan_ms == pytest.approx((16 + 3) * 3.0)


@pytest.mark.parametrize("cap", some([2.5, 1.5, 4.0]))
def test_tessel_stays_within_the_cap(cap: float) -> None:
    pytest.importorskip("ortools")
    costs = CostTable.uniform(num_layers=8, activation_bytes=MIB / 2).replace(
        rank_memory_bytes=(cap * MIB,), boundary_bytes=np.full(8, 0.02 * MIB)
    )
    for name, options in (("tessel", {"time_limit_s": 3}), ("tessel-fast", {})):
        assert simulate(build_plan(name, costs, 4, 8, **options), costs).fits


def test_completion_repeats_the_repetend_for_many_micro_batches() -> None:
    pytest.importorskip("ortools")
    blocks = blocks_of(uneven(8, 2), 4, loop(8, 4))
    repetend = find_repetend(blocks, max(blocks.work), UNLIMITED, PATIENCE_S)
    assert repetend is not None
    many = repetend.micro_batches + 6
    order = complete(repetend, many, UNLIMITED, PATIENCE_S)
    assert order is not None
    depth, last_warm = repetend.depth, repetend.micro_batches - 1
    for row in order:
        steady = [i for i, n in row if last_warm <= n + depth[i] < many]
        once = len({i for i, _ in row})
        assert len(row) == once * many
        assert steady == steady[:once] * (many - last_warm)


def test_tessel_is_not_worse_than_its_fast_mode_or_1f1b() -> None:
    pytest.importorskip("ortools")
    costs = uneven(20, 7)
    times = {
        name: makespan_ms(build_plan(name, costs, 4, 8, **options), costs)
        for name, options in (("tessel", {"time_limit_s": 3}), ("tessel-fast", {}), ("1f1b", {}))
    }
    assert times["tessel"] <= times["tessel-fast"] + 1e-9
    assert times["tessel"] <= times["1f1b"] + 1e-9


def test_tessel_names_the_extra_where_ortools_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    costs = CostTable.uniform(num_layers=8)
    with pytest.raises(NotApplicableError, match=r"octopipe\[exact\]"):
        build_plan("tessel", costs, 4, 8)
    build_plan("tessel-fast", costs, 4, 8)


def test_tessel_splits_the_backward_only_when_asked() -> None:
    pytest.importorskip("ortools")
    costs = CostTable.uniform(num_layers=8)
    assert not build_plan("tessel-fast", costs, 4, 8).splits_backward
    assert build_plan("tessel-fast", costs, 4, 8, split=True).splits_backward
    with pytest.raises(OctoPipeError, match="time_limit_s is 0"):
        build_plan("tessel", costs, 4, 8, time_limit_s=0)


@pytest.mark.parametrize("name", ["dynapipe", "mario", "tessel-fast"])
def test_plans_take_single_ranks_and_single_micro_batches(name: str) -> None:
    for p, m in ((1, 1), (1, 3), (3, 1), (2, 2)):
        plan = build_plan(name, uneven(6, 0), p, m)
        assert Op(0, "F", 0) in plan.orders[0]

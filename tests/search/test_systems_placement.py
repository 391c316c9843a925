"""Chimera, Hanayo, DualPipe, DualPipeV: slots, orders and bubbles against the papers' closed forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octopipe.base.errors import NotApplicableError, OctoPipeError
from octopipe.costs.cluster.hardware import Link, Network
from octopipe.costs.segments import Segments
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.search.systems import build_plan
from octopipe.search.systems.bidirectional import bidirectional_plan
from octopipe.search.systems.chimera import slots
from octopipe.search.systems.dualpipe import Block, dualpipe_blocks, paired_idle_ms
from octopipe.search.systems.dualpipe_v import dualpipe_v_blocks
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline

MIB = float(1 << 20)


def uniform(layers: int, forward: float, backward: float) -> CostTable:
    return CostTable.uniform(
        num_layers=layers,
        forward_ms=forward,
        input_ms=backward / 2,
        weight_ms=backward / 2,
        activation_bytes=MIB,
    )


def run(name: str, costs: CostTable, p: int, m: int, **options: object) -> tuple[Plan, Timeline]:
    plan = build_plan(name, costs, p, m, **options)
    return plan, simulate(plan, costs)


# -- Chimera ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("m", [1, 3, 4, 8, 16, 37])
def test_chimera_slots_never_collide(p: int, m: int) -> None:
    for rank in range(p):
        taken = [slot for slot, _ in slots(rank, p, m)]
        assert len(taken) == len(set(taken)) == 2 * m


@pytest.mark.parametrize("p", [4, 8, 16])
@pytest.mark.parametrize("units", [1, 2, 4])
def test_chimera_bubble_is_the_papers(p: int, units: int) -> None:
    m = p * units
    _, even = run("chimera", uniform(p, 1.0, 1.0), p, m)
    assert even.makespan_ms - 2 * m == pytest.approx(p - 2)
    assert even.bubble_ratio == pytest.approx((p - 2) / (2 * m + p - 2))
    _, double = run("chimera", uniform(p, 1.0, 2.0), p, m)
    assert double.makespan_ms - 3 * m == pytest.approx((p - 2) * (1 + m / p))
    if units == 1:
        assert double.bubble_ratio == pytest.approx((p - 2) / (1.5 * m + p - 2))


@pytest.mark.parametrize("p", [4, 8, 16])
def test_chimera_peaks_lie_between_half_and_all(p: int) -> None:
    for m in (p, 3 * p):
        _, timeline = run("chimera", uniform(p, 1.0, 2.0), p, m)
        assert timeline.peak_bytes.min() == pytest.approx((p // 2 + 1) * MIB)
        assert timeline.peak_bytes.max() == pytest.approx(p * MIB)


def test_chimera_takes_any_number_of_micro_batches_but_no_odd_pp() -> None:
    for m in (1, 2, 5, 11):
        run("chimera", uniform(8, 1.0, 2.0), 4, m)
    with pytest.raises(NotApplicableError, match=r"chimera: pp 3 is odd"):
        build_plan("chimera", uniform(8, 1.0, 2.0), 3, 8)


# -- weights held twice -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_two_directions_hold_weights_twice_and_reduce_their_gradients(name: str) -> None:
    p, m, layers = 4, 8, 12
    link = Link(latency_ms=0.5, ms_per_byte=2e-6)
    costs = CostTable.uniform(num_layers=layers).replace(
        static_bytes=np.arange(1.0, layers + 1) * MIB,
        gradient_bytes=np.full(layers, MIB),
        network=Network(intra=link, inter=link),
    )
    plan, timeline = run(name, costs, p, m)
    assert set(plan.replicas()) == set(range(layers))
    for rank in range(p):
        both = sum(costs.static_bytes[s.first : s.stop].sum() for s in plan.stages if s.rank == rank)
        assert timeline.memory[rank].static_bytes == pytest.approx(both)
    total = sum(curve.static_bytes for curve in timeline.memory)
    assert total == pytest.approx(2 * costs.static_bytes.sum())
    # A ring of two moves every byte once each way: 2 (n-1)/n = 1, and two latencies.
    reduction = 2 * 0.5 + (layers // p) * MIB * 2e-6
    assert len(timeline.extras) == 2 * p
    for extra in timeline.extras:
        assert extra.end_ms - extra.start_ms == pytest.approx(reduction)
    # The two copies of a stage reduce at one and the same time.
    at = {int(extra.name.split()[-1]): extra.start_ms for extra in timeline.extras}
    for s in range(p):
        assert at[s] == pytest.approx(at[p + s])
    assert timeline.step_ms > timeline.makespan_ms


def test_both_directions_have_the_same_layers_on_mirrored_ranks() -> None:
    costs = CostTable.uniform(num_layers=11)
    plan = build_plan("chimera", costs, 4, 8)
    again = bidirectional_plan(costs, 4, 8, plan.orders)
    assert again.stages == plan.stages and plan.routes == ((0, 1, 2, 3), (4, 5, 6, 7))
    for s in range(4):
        down, up = plan.stages[s], plan.stages[4 + s]
        assert (down.first, down.stop, down.rank) == (up.first, up.stop, 3 - up.rank)


# -- Hanayo -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("waves", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_hanayo_bubble_and_peak_are_the_closed_forms(p: int, waves: int, groups: int) -> None:
    m, stages = p * groups, 2 * p * waves
    _, even = run("hanayo", uniform(stages, 1.0, 1.0), p, m, waves=waves)
    assert even.makespan_ms - 2 * m * 2 * waves == pytest.approx(2 * (p - 1))
    _, double = run("hanayo", uniform(stages, 1.0, 2.0), p, m, waves=waves)
    assert double.makespan_ms - 3 * m * 2 * waves == pytest.approx(2 * (p - 1) * (1 + m / p))
    assert even.peak_bytes.max() == pytest.approx(2 * waves * p * MIB)


def test_hanayo_zig_zags_and_chooses_its_waves() -> None:
    costs = uniform(24, 1.0, 2.0)
    plan, timeline = run("hanayo", costs, 3, 6, waves=2)
    assert [s.rank for s in plan.stages] == [0, 1, 2, 2, 1, 0] * 2
    _, chosen = run("hanayo", costs, 3, 6)
    assert chosen.step_ms <= timeline.step_ms
    with pytest.raises(OctoPipeError, match="waves is 9; give a whole number from 1 to 4"):
        build_plan("hanayo", costs, 3, 6, waves=9)
    with pytest.raises(NotApplicableError, match="hanayo: 5 layers"):
        build_plan("hanayo", uniform(5, 1.0, 2.0), 3, 6)


# -- DualPipe and DualPipeV -------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [4, 8])
@pytest.mark.parametrize("m_over_p", [2, 4])
@pytest.mark.parametrize(("weight", "pace"), [(1.0, 1.0), (0.5, 0.9)])
def test_dualpipe_idles_as_published_with_pairs_as_blocks(p: int, m_over_p: int, weight: float, pace: float) -> None:
    m = m_over_p * p
    spans = {"F": 1.0, "I": 1.0, "W": weight, "B": 1.0 + weight}

    def block_ms(block: Block) -> float:
        return sum(spans[op.kind] for op in block) * (pace if len(block) == 2 else 1.0)

    pair, backward = pace * (2.0 + weight), 1.0 + weight
    expected = (p / 2 - 1) * (pair + backward - 3 * weight)
    costs = CostTable.uniform(num_layers=p, weight_ms=weight, activation_bytes=MIB)
    plan, timeline = run("dualpipe", costs, p, m)
    assert paired_idle_ms(plan, dualpipe_blocks(p, m), block_ms) == pytest.approx(expected)
    folded, folded_timeline = run("dualpipev", costs, p // 2, m)
    assert paired_idle_ms(folded, dualpipe_v_blocks(p // 2, m), block_ms) == pytest.approx(expected)
    # The simulator hands a pair's forward on before the pair ends, so it idles at most as long.
    published = (p / 2 - 1) * (2.0 + weight + backward - 3 * weight)
    assert timeline.bubbles.idle_ms.max() <= published + 1e-9
    assert folded_timeline.bubbles.idle_ms.max() <= published + 1e-9
    assert timeline.peak_bytes.max() == folded_timeline.peak_bytes.max() == pytest.approx((p + 1) * MIB)


def test_dualpipe_orders_hold_every_op_once_and_defer_some_weights() -> None:
    plan = build_plan("dualpipe", CostTable.uniform(num_layers=8), 8, 20)
    kinds = [op.kind for order in plan.orders for op in order]
    assert kinds.count("F") == kinds.count("B") + kinds.count("I") == 8 * 20
    assert 0 < kinds.count("I") == kinds.count("W") < kinds.count("B")


@pytest.mark.parametrize(
    ("name", "p", "m", "reason"),
    [
        ("dualpipe", 3, 8, "pp 3 is odd"),
        ("dualpipe", 4, 9, "9 micro-batches cannot be shared"),
        ("dualpipe", 4, 6, "6 micro-batches are fewer than 2 pp = 8"),
        ("dualpipev", 4, 7, "7 micro-batches are fewer than 2 pp = 8"),
        ("dualpipev", 7, 14, "12 layers do not fill 2 stages on each of pp 7"),
    ],
)
def test_constraints_are_named(name: str, p: int, m: int, reason: str) -> None:
    with pytest.raises(NotApplicableError, match=f"{name}: {reason}"):
        build_plan(name, CostTable.uniform(num_layers=12), p, m)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev", "interleaved-overlap"])
def test_overlapped_systems_pair_only_where_there_is_an_exchange(name: str) -> None:
    plain = CostTable.uniform(num_layers=16, activation_bytes=1.0)
    moe = plain.replace(
        segments=Segments.from_ms(
            [[("compute", 0.6), ("exchange", 0.4)]] * 16, [[("exchange", 0.4), ("compute", 0.6)]] * 16
        )
    )
    without, paired = build_plan(name, plain, 4, 16), build_plan(name, moe, 4, 16)
    assert not without.pairs and paired.pairs
    assert all(a.kind == "F" and b.kind == "B" for a, b in paired.pairs)
    apart = simulate(replace(paired, pairs=frozenset()), moe)
    together = simulate(paired, moe)
    assert together.makespan_ms < apart.makespan_ms
    assert together.exchange.share > 0.4 and apart.exchange.share == 0.0
    if name != "interleaved-overlap":
        assert replace(paired, pairs=frozenset(), extra={}) == replace(without, extra={})

"""The zero-bubble systems against their papers' formulas and tables, and on pipelines that are not uniform."""

from __future__ import annotations

import random

import numpy as np
import pytest
from effort import some

from octopipe.base.errors import NotApplicableError
from octopipe.costs.cluster.hardware import Network
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.plans.price import stage_memory
from octopipe.search.systems import build_plan, v_half, v_min, zb_h1, zb_h2, zb_v
from octopipe.search.systems.zb_heuristic import Choices, _prices, _Schedule
from octopipe.search.systems.zero_bubble import handcrafted_forms, straight_plan
from octopipe.simulation.lowering import CHANNELS, lower, prove_deadlock_free
from octopipe.simulation.simulator import simulate

STRAIGHT = ("zb-h1", "zb-h2", "zb-1p", "zb-2p")
V_SHAPED = ("zb-v", "v-half", "v-min")
FAMILY = STRAIGHT + V_SHAPED

# p, m | F, I, W, transfer (ms) | 1F1B | ZB-H1 = ZB-1p | ZB-H2 | ZB-2p | hidden size, heads; 1024 tokens
PUBLISHED = """
 8  24  18.522 18.086  9.337 .601  .2431 .1585 .1083 .0433  2304 24
 8  32  18.513 18.086  9.331 .626  .1985 .1242 .0837 .0039  2304 24
 8  64  18.546 18.097  9.321 .762  .1240 .0674 .0444 .0026  2304 24
 8  24  29.718 29.444 19.927 .527  .2347 .1323 .0698 .0029  4096 32
 8  32  29.802 29.428 19.530 .577  .1898 .1045 .0559 .0022  4096 32
 8  64  29.935 29.621 19.388 .535  .1091 .0554 .0294 .0010  4096 32
16  48  11.347 11.248  8.132 .377  .2552 .1397 .0672 .0066  5120 40
16  64  11.307 11.254  8.101 .379  .2082 .1088 .0516 .0054  5120 40
16 128  11.325 11.308  8.109 .378  .1251 .0576 .0266 .0028  5120 40
32  96  10.419 10.207  7.715 .408  .2646 .1421 .0641 .0038  6144 48
32 128  10.408 10.204  7.703 .408  .2168 .1106 .0490 .0029  6144 48
32 256  10.402 10.248  7.698 .460  .1352 .0594 .0257 .0018  6144 48
"""


def uneven_costs(seed: int, layers: int, *, ranks: int = 0, micro_batches: int = 0) -> CostTable:
    """Layers of unlike times and bytes; ranks of unlike speed and micro-batches of unlike size where asked."""
    rng = np.random.default_rng(seed)
    held = rng.uniform(1, 10, layers)
    return CostTable(
        model="uneven",
        symbols="E" + "T" * (layers - 2) + "L",
        forward_ms=rng.uniform(0.2, 2, layers),
        input_ms=rng.uniform(0.2, 3, layers),
        weight_ms=rng.uniform(0, 2, layers),
        activation_bytes=held,
        stash_bytes=held * rng.uniform(0, 1, layers),
        network=Network.constant(float(rng.choice([0.0, 0.1, 1.0]))),
        rank_slowdown=tuple(rng.uniform(0.5, 2, ranks)),
        micro_batch_factor=rng.uniform(0.5, 2, micro_batches) if micro_batches else None,
    )


def peaks_of_orders(plan: Plan, costs: CostTable) -> list[float]:
    """Activation peak of every rank, by walking its order."""
    memory = stage_memory(plan, costs)
    peaks = []
    for order in plan.orders:
        held = most = 0.0
        for stage, kind, b in order:
            cell = (stage, b)
            change = {
                "F": memory.activation[cell],
                "I": memory.stash[cell] - memory.activation[cell],
                "W": -memory.stash[cell],
            }
            held += float(change[kind])
            most = max(most, held)
        assert held == pytest.approx(0, abs=1e-6)
        peaks.append(most)
    return peaks


# -- published numbers ------------------------------------------------------------------------------------


ROWS = PUBLISHED.strip().splitlines()


@pytest.mark.parametrize(
    "line",
    # 32 ranks with 256 micro-batches take as long as all other rows together.
    some(ROWS, quick=[x for x in ROWS if x.split()[:2] != ["32", "256"]][::3]),
)
def test_bubble_rates_equal_the_papers_table_to_four_digits(line: str) -> None:
    p, m, f, i, w, hop, plain, h1, h2, two, hidden, heads = (float(x) for x in line.split())
    p, m, held, stashed = int(p), int(m), 1024 * (34 * hidden + 5 * heads * 1024), 32 * 1024 * hidden
    costs = CostTable.uniform(
        num_layers=p,
        forward_ms=f,
        input_ms=i,
        weight_ms=w,
        p2p_ms=hop,
        activation_bytes=held,
        stash_bytes=stashed,
    )
    for name, rate in (("1f1b", plain), ("zb-h1", h1), ("zb-1p", h1), ("zb-h2", h2), ("zb-2p", two)):
        timeline = simulate(build_plan(name, costs, p, m), costs)
        assert round((timeline.span_ms - m * (f + i + w)) / timeline.span_ms, 4) == rate, name
        if name in ("zb-1p", "zb-2p"):
            assert timeline.peak_bytes.max() <= (1 + 1e-9) * p * held * (1 if name == "zb-1p" else 2)


@pytest.mark.parametrize(("name", "k"), [("zb-h1", 1), ("zb-h2", 2)])
def test_handcrafted_schedules_have_the_published_bubble_and_memory(name: str, k: int) -> None:
    rng = random.Random(k)
    for _ in range(40):
        p = rng.randint(1, 9)
        m = rng.randint(2 * p - 1, 4 * p)
        f, i = rng.randint(1, 9), rng.randint(1, 9)
        w = rng.randint(0, min(f, (f + i) // k))
        held, stashed = 100.0, float(rng.randint(0, 100))
        costs = CostTable.uniform(
            num_layers=p, forward_ms=f, input_ms=i, weight_ms=w, activation_bytes=held, stash_bytes=stashed
        )
        timeline = simulate(build_plan(name, costs, p, m), costs)
        assert timeline.span_ms - m * (f + i + w) == pytest.approx((p - 1) * (f + i - k * w)), (p, m, f, i, w)
        for rank in range(p):
            in_flight = p - rank if k == 1 else 2 * p - 2 * rank - 1
            assert timeline.peak_bytes[rank] == pytest.approx(in_flight * held + k * rank * stashed)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8, 13, 16])
def test_zb_v_has_no_span_bubble_in_the_memory_of_1f1b(p: int) -> None:
    costs = CostTable.uniform(num_layers=2 * p, activation_bytes=1.0, stash_bytes=1.0)
    for m in (2 * p - 1, 2 * p, 2 * p + 1, 5 * p):
        timeline = simulate(build_plan("zb-v", costs, p, m), costs)
        assert timeline.span_ms == 6 * m
        assert timeline.makespan_ms == 6 * m + p - 1
        assert timeline.peak_bytes.max() == min(2 * p, 2 * m)


@pytest.mark.parametrize("p", [3, 4, 5, 6, 7, 8, 9, 11, 12, 16])
def test_v_half_has_the_published_bubble_and_peak(p: int) -> None:
    costs = CostTable.uniform(num_layers=2 * p, activation_bytes=1.0, stash_bytes=1.0)
    bubble, peak = (3 * p - 7, p + 2) if p % 2 == 0 else (3 * p - 4, p + 1)
    for m in (2 * p, 3 * p + 1):
        timeline = simulate(build_plan("v-half", costs, p, m), costs)
        assert (timeline.span_ms - 6 * m, timeline.peak_bytes.max()) == (bubble, peak)


@pytest.mark.parametrize(("p", "bubble", "peak"), [(4, 11, 4), (6, 17, 6), (8, 27, 8), (12, 41, 10), (16, 59, 12)])
def test_v_min_has_the_published_bubble_and_peak(p: int, bubble: int, peak: int) -> None:
    costs = CostTable.uniform(num_layers=2 * p, activation_bytes=1.0, stash_bytes=1.0)
    for m in (2 * p, 3 * p + 1):
        timeline = simulate(build_plan("v-min", costs, p, m), costs)
        assert (timeline.span_ms - 6 * m, timeline.peak_bytes.max()) == (bubble, peak)


def test_declared_closed_forms_hold() -> None:
    forms = handcrafted_forms("zb-h1", 1) + handcrafted_forms("zb-h2", 2)
    forms += zb_v.closed_forms() + v_half.closed_forms() + v_min.closed_forms()
    assert [form for form in forms if not form.checked().matches] == []
    # The rates are declared as well; their values are tested above, from a table of its own.
    assert len(zb_h1.closed_forms()) > 24 and len(zb_h2.closed_forms()) > 12


# -- every size, uneven pipelines -------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY)
def test_every_size_gives_a_plan_that_checks(name: str) -> None:
    for p in range(1, 8):
        costs = CostTable.uniform(num_layers=2 * p)
        for m in sorted({1, 2, p - 1, p, p + 1, 2 * p - 1, 2 * p + 3} - {0}):
            plan = build_plan(name, costs, p, m)  # build_plan checks it
            assert sum(map(len, plan.orders)) == 3 * m * len(plan.stages)
            assert plan.splits_backward


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("seed", range(4))
def test_uneven_pipelines_lower_without_deadlock_under_every_channel(name: str, seed: int) -> None:
    rng = random.Random(seed)
    p, m = rng.randint(2, 5), rng.randint(1, 12)
    costs = uneven_costs(seed, 2 * p + rng.randint(0, 9), ranks=p, micro_batches=m)
    plan = build_plan(name, costs, p, m)
    for channel in CHANNELS:
        prove_deadlock_free(lower(plan, costs, channel=channel))


@pytest.mark.parametrize("name", FAMILY)
def test_hybrid_model_lowers_without_deadlock_under_every_channel(name: str) -> None:
    costs = resolve_costs("jamba-52b", pp=4)
    for m in (4, 16):
        plan = build_plan(name, costs, 4, m)
        for channel in CHANNELS:
            prove_deadlock_free(lower(plan, costs, channel=channel))
        assert simulate(plan, costs).step_ms > 0


@pytest.mark.parametrize("name", V_SHAPED)
def test_v_orders_are_frozen_and_do_not_depend_on_the_costs(name: str) -> None:
    even, uneven = CostTable.uniform(num_layers=17), uneven_costs(3, 17)
    assert build_plan(name, even, 4, 9).orders == build_plan(name, uneven, 4, 9).orders


@pytest.mark.parametrize("name", V_SHAPED)
def test_v_peak_holds_for_few_micro_batches_too(name: str) -> None:
    for p in (2, 5, 6):
        costs = CostTable.uniform(num_layers=2 * p, activation_bytes=1.0, stash_bytes=1.0)
        most = max(peaks_of_orders(build_plan(name, costs, p, 6 * p), costs))
        for m in range(1, 2 * p):
            assert max(peaks_of_orders(build_plan(name, costs, p, m), costs)) <= min(most, 2 * m)


@pytest.mark.parametrize("name", V_SHAPED)
def test_v_needs_two_layers_a_rank_and_says_so(name: str) -> None:
    with pytest.raises(NotApplicableError, match=r"pp 4 needs 8 stages but uniform has 7 layers"):
        build_plan(name, CostTable.uniform(num_layers=7), 4, 8)


# -- the heuristic ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("name", "factor"), [("zb-1p", 1), ("zb-2p", 2)])
def test_heuristic_keeps_every_rank_within_its_limit(name: str, factor: int, seed: int) -> None:
    rng = random.Random(seed)
    p, m = rng.randint(1, 6), rng.randint(1, 20)
    costs = uneven_costs(seed, p + rng.randint(2, 9), ranks=p * (seed % 2), micro_batches=m * (seed % 3 == 0))
    plan = build_plan(name, costs, p, m)
    largest = stage_memory(plan, costs).activation.max(axis=1)
    for rank, peak in enumerate(peaks_of_orders(plan, costs)):
        assert peak <= factor * p * largest[rank] * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_heuristic_clock_equals_the_simulator(seed: int) -> None:
    rng = random.Random(seed)
    p, m = rng.randint(2, 6), rng.randint(1, 16)
    # Free transfers: the heuristic knows no queues, so any transfer that waits for another would differ.
    costs = uneven_costs(seed, p + 5, ranks=p, micro_batches=m).replace(network=Network.constant(0.0))
    prices = _prices(build_plan("zb-h1", costs, p, m), costs, 2 * p)
    for number in range(8):
        schedule = _Schedule(prices, Choices(bool(number & 1), bool(number & 2), bool(number & 4)))
        timeline = simulate(straight_plan(costs, p, m, schedule.orders), costs)
        assert schedule.makespan_ms == pytest.approx(timeline.makespan_ms)
        assert schedule.span_ms == pytest.approx(timeline.span_ms)


def test_heuristic_takes_the_smallest_span_of_all_choices() -> None:
    costs = uneven_costs(5, 14).replace(network=Network.constant(0.0))
    prices = _prices(build_plan("zb-h1", costs, 5, 12), costs, 10)
    spans = [
        simulate(straight_plan(costs, 5, 12, _Schedule(prices, Choices(a, b, c)).orders), costs).span_ms
        for a in (False, True)
        for b in (False, True)
        for c in (False, True)
    ]
    assert simulate(build_plan("zb-2p", costs, 5, 12), costs).span_ms == pytest.approx(min(spans))


@pytest.mark.parametrize(("name", "factor"), [("zb-1p", 1), ("zb-2p", 2)])
def test_without_bytes_the_heuristic_counts_micro_batches(name: str, factor: int) -> None:
    costs = uneven_costs(2, 20).replace(activation_bytes=np.zeros(20), stash_bytes=np.zeros(20))
    p = 4
    for order in build_plan(name, costs, p, 16).orders:
        held = 0.0
        for op in order:
            held += {"F": 1.0, "I": 32 / 34 - 1, "W": -32 / 34}[op.kind]
            assert held <= factor * p + 1e-9


def test_heuristic_stays_within_a_smaller_capacity() -> None:
    costs = CostTable.uniform(num_layers=4, activation_bytes=8.0, stash_bytes=6.0)
    roomy = simulate(build_plan("zb-2p", costs, 4, 12), costs)
    tight = costs.replace(rank_memory_bytes=(36.0,))
    timeline = simulate(build_plan("zb-2p", tight, 4, 12), tight)
    assert roomy.peak_bytes.max() > 37 and timeline.fits
    assert roomy.span_ms <= timeline.span_ms


def test_heuristic_gives_a_plan_even_where_nothing_fits() -> None:
    costs = CostTable.uniform(num_layers=4, activation_bytes=8.0, stash_bytes=6.0)
    costs = costs.replace(rank_memory_bytes=(4.0,))
    assert not simulate(build_plan("zb-1p", costs, 4, 8), costs).fits


def test_a_single_rank_runs_without_idle_time() -> None:
    for name in FAMILY:
        costs = CostTable.uniform(num_layers=3, activation_bytes=1.0, stash_bytes=1.0)
        assert simulate(build_plan(name, costs, 1, 5), costs).step_ms == 5 * 9


def test_splitting_option_leaves_these_plans_as_they_are() -> None:
    costs = CostTable.uniform(num_layers=8)
    for name in FAMILY:
        assert build_plan(name, costs, 4, 8, split_backward=True) == build_plan(name, costs, 4, 8)

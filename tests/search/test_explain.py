"""What bounds a result, in words: every figure is that of the timeline."""

from __future__ import annotations

import re

import numpy as np
import pytest

from octopipe.costs.cluster.hardware import GIB, Network
from octopipe.costs.table import CostTable
from octopipe.search.explain import explain
from octopipe.search.systems import build_plan
from octopipe.simulation.bounds.bounds import PlanClass
from octopipe.simulation.simulator import simulate


def costs_with_head(head: float = 7.0, **more: object) -> CostTable:
    times = np.array([1.0] * 7 + [head])
    return CostTable(
        model="m", symbols="M" * 7 + "L", forward_ms=times, input_ms=times, weight_ms=times,
        network=Network.constant(0.2), **more,  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_busiest_rank_and_the_head_are_named_with_their_shares() -> None:
    costs = costs_with_head()
    plan = build_plan("1f1b", costs, 4, 8)
    timeline = simulate(plan, costs)
    words = explain(plan, costs, timeline)
    busy = 100 * timeline.busy_ms / timeline.step_ms
    assert f"rank 3 is busiest ({busy[3]:.1f} %)" in words
    assert "the head layer is 50 % of all work and cannot be split (more than rank 3's fair share)" in words


def test_the_shares_of_idle_time_add_up_to_the_bubble_ratio() -> None:
    costs = costs_with_head()
    plan = build_plan("1f1b", costs, 4, 8)
    timeline = simulate(plan, costs)
    kinds = "boundary|communication|imbalance|residual"
    named = re.findall(rf"([\d.]+) % (?:{kinds})", explain(plan, costs, timeline))
    assert sum(map(float, named)) == pytest.approx(100 * timeline.bubble_ratio, abs=2.0)


def test_even_layers_are_not_blamed() -> None:
    costs = CostTable.uniform(num_layers=8)
    plan = build_plan("1f1b", costs, 4, 8)
    assert "cannot be split" not in explain(plan, costs, simulate(plan, costs))


def test_the_gap_and_its_argument_are_told() -> None:
    costs = costs_with_head()
    plan = build_plan("1f1b", costs, 4, 8)
    timeline = simulate(plan, costs)
    once = PlanClass(recompute=False)
    assert "at most 25.00 % above the best of plans that hold each layer once and recompute nothing (chain)" in explain(
        plan, costs, timeline, timeline.step_ms / 1.25, "chain", once
    )
    wide = explain(plan, costs, timeline, timeline.step_ms, "work", PlanClass(copies=True))
    assert "of plans that may hold layers on several ranks and may recompute none can be faster" in wide


def test_memory_near_its_limit_and_the_optimizer_are_told() -> None:
    costs = costs_with_head(activation_bytes=np.full(8, GIB), optimizer_ms=np.full(8, 20.0))
    plan = build_plan("1f1b", costs, 4, 8)
    peak = simulate(plan, costs).peak_bytes
    costs = costs.replace(rank_memory_bytes=(float(peak.max()) / 0.95,))
    words = explain(plan, costs, simulate(plan, costs))
    assert f"memory of rank {int(peak.argmax())} is 95 % full" in words and "after the last op" in words


def test_a_model_without_work_is_no_error() -> None:
    costs = CostTable.uniform(num_layers=2, forward_ms=0, input_ms=0, weight_ms=0)
    plan = build_plan("1f1b", costs, 2, 2)
    assert explain(plan, costs, simulate(plan, costs)) == "no op takes any time"

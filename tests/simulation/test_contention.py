"""Prediction for ranks that share a device: without slower neighbours it is the simulator, to the last event."""

from __future__ import annotations

import numpy as np
import pytest

from octopipe.costs.table import CostTable
from octopipe.search.systems import build_plan
from octopipe.simulation.contention import full_load, predict
from octopipe.simulation.simulator import simulate


@pytest.mark.parametrize("extras", [{}, {"optimizer_ms": np.full(8, 2.0)}])
def test_ranks_that_share_nothing_are_predicted_as_simulated(extras: dict[str, object]) -> None:
    costs = CostTable.uniform(num_layers=8, p2p_ms=0.3).replace(**extras)
    plan = build_plan("zb-h1", costs, 4, 6, split_backward=True)
    promised, simulated = predict(plan, full_load(costs)), simulate(plan, costs)
    assert promised.makespan_ms == pytest.approx(simulated.makespan_ms)
    assert promised.step_ms == pytest.approx(simulated.step_ms)
    assert promised.step_ms > promised.makespan_ms if extras else promised.step_ms == promised.makespan_ms

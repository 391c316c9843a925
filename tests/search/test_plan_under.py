"""How many layers are recomputed so that a system's plan fits: against trying every number."""

from __future__ import annotations

import numpy as np
import pytest

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.search.recompute import plan_under
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import simulate

LAYERS, RANKS, COUNT = 26, 2, 4


class Prices:
    """Layers of 10 bytes of activations each, 2 where they are recomputed; workspace grows with every recomputed
    layer, so that recomputing all of them needs more memory than recomputing some."""

    def __init__(self, limit: float, space_per_layer: float):
        self.limit, self.space_per_layer = limit, space_per_layer
        self.asked = 0

    def __call__(self, mode: str, layers: int | None = None, /) -> CostTable:
        self.asked += 1
        number = 0 if mode != "full" else LAYERS if layers is None else layers
        again = np.arange(LAYERS) < number
        return CostTable.uniform(num_layers=LAYERS).replace(
            activation_bytes=np.where(again, 2.0, 10.0),
            stash_bytes=np.zeros(LAYERS),
            workspace_bytes=np.full(LAYERS, self.space_per_layer * number),
            rank_memory_bytes=(self.limit,) * RANKS,
        )

    def fits(self, layers: int) -> bool:
        costs = self("full", layers)
        return bool(simulate(build(costs), costs).fits)


def build(costs: CostTable) -> Plan:
    return build_plan("1f1b", costs, RANKS, COUNT)


CASES = [(190.0, 0.0), (190.0, 6.0), (220.0, 7.0), (245.0, 8.0), (245.0, 12.0), (150.0, 9.0)]
"""Limits and workspaces per layer: all layers fit, all nearly fit (three times), all are far over it (twice)."""


@pytest.mark.parametrize(("limit", "space_per_layer"), CASES)
def test_some_layers_are_recomputed_where_all_of_them_nearly_fit(limit: float, space_per_layer: float) -> None:
    prices = Prices(limit, space_per_layer)
    every = [number for number in range(1, LAYERS + 1) if prices.fits(number)]
    whole = prices("full")
    near = max(simulate(build(whole), whole).peak_bytes) <= 1.1 * limit
    prices.asked = 0
    plan, costs = plan_under("auto", build, prices)
    assert prices.asked <= 2 + 1 + 6 + 6
    if near:
        assert simulate(plan, costs).fits and costs.workspace_bytes[0] == every[0] * space_per_layer
    else:
        assert not simulate(plan, costs).fits
        assert costs.workspace_bytes[0] == LAYERS * space_per_layer, "all layers: the most that can be said"


def test_the_cases_hold_some_where_some_layers_fit_and_all_do_not() -> None:
    found = [Prices(*case) for case in CASES[1:4]]
    assert all(not p.fits(LAYERS) and any(p.fits(n) for n in range(1, LAYERS)) for p in found)

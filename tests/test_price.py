"""Prices of a plan's parts: which costs fit a plan, and sums over stages done by hand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from plans import random_costs, random_plan
from twin import op_ms

from octopipe.cluster import Link
from octopipe.cost import CostTable
from octopipe.errors import OctoPipeError
from octopipe.plan import KINDS, Op
from octopipe.price import match, stage_times
from octopipe.simulator import _all_reduce_ms
from octopipe.systems import build_plan


@pytest.mark.parametrize(
    ("change", "good"),
    [
        ({}, True),
        ({"rank_memory_bytes": (1e9,)}, True),
        ({"rank_memory_bytes": (1e9, 1e9)}, False),
        ({"rank_memory_bytes": (1e9,) * 3}, True),
        ({"rank_memory_bytes": (1e9,) * 4}, True),
        ({"rank_slowdown": (1.0, 1.0)}, False),
        ({"rank_slowdown": (1.0,) * 3}, True),
        ({"micro_batch_factor": np.ones((3, 6))}, False),
        ({"micro_batch_factor": np.ones((4, 6))}, True),
        ({"micro_batch_factor": np.ones((5, 6))}, True),
    ],
)
def test_costs_of_a_plan_name_every_rank_and_micro_batch(change: dict[str, Any], good: bool) -> None:
    costs = CostTable.uniform(num_layers=6)
    plan = build_plan("1f1b", costs, 3, 4)
    if good:
        match(plan, costs.replace(**change))
    else:
        with pytest.raises(OctoPipeError, match="give one"):
            match(plan, costs.replace(**change))


@pytest.mark.parametrize("seed", range(20))
def test_a_stage_takes_what_its_layers_take(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng)
    costs = random_costs(rng, plan)
    times = stage_times(plan, costs)
    for s in range(len(plan.stages)):
        for m in range(plan.num_micro_batches):
            for code, kind in enumerate(KINDS):
                assert times[code, s, m] == pytest.approx(op_ms(plan, costs, Op(s, kind, m)), abs=1e-12)


@pytest.mark.parametrize(("nbytes", "members"), [(0.0, 4), (1e6, 1), (1e6, 2), (3e6, 4)])
def test_an_all_reduce_crosses_the_link_twice_less_one_share(nbytes: float, members: int) -> None:
    """Latency 2 ms up and down a tree of log2(n) levels, 3 ms per MB: 2 (n - 1) / n of the bytes."""
    link = Link(latency_ms=2.0, ms_per_byte=3e-6)
    levels = {1: 0, 2: 1, 4: 2}[members]
    want = 0.0 if members == 1 or nbytes == 0 else 2 * levels * 2.0 + 2 * (members - 1) / members * nbytes * 3e-6
    assert _all_reduce_ms(nbytes, members, link) == pytest.approx(want)

"""The plan of the rehearsal is the same for all pipelines that share experts, whatever each of them has measured."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
from octopipe.costs.profile_file import Profile
from octopipe.costs.segments import Segments
from octopipe.costs.table import CostTable
from octopipe.runtime.measure.rehearsal import rehearsal_plan

PARTS = (("compute", 0.5), ("exchange", 0.3), ("compute", 0.2))
WHOLE = (("compute", 1.0),)


def profile(seed: int, layers: int = 11) -> Profile:
    rows = (WHOLE, *[PARTS] * (layers - 2), WHOLE)
    forward_ms = np.random.default_rng(seed).uniform(0.2, 5.0, layers)
    costs = CostTable.uniform(num_layers=layers).replace(forward_ms=forward_ms)
    return Profile(costs=costs.replace(segments=Segments(forward=rows, input=rows)))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pipelines_with_other_times_rehearse_the_same_plan(ranks: int) -> None:
    """Twins exchange tokens op by op: with other orders they would wait for each other for ever."""
    plans = [rehearsal_plan(profile(seed), ranks) for seed in range(4)]
    assert all(plan == plans[0] for plan in plans[1:])
    assert not plans[0].problems()

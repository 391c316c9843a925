"""The rehearsal of pairs: its plan is the same for all pipelines, and its correction is found again."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
from octopipe.costs.profile_file import Profile
from octopipe.costs.segments import Segments
from octopipe.costs.table import CostTable
from octopipe.runtime.measure.pair_rehearsal import pairs_rehearsal_plan, pairs_rehearsed, slowed
from octopipe.runtime.measure.rehearsal import rehearsal_plan
from octopipe.simulation.contention import predict

PARTS = (("compute", 0.5), ("exchange", 0.3), ("compute", 0.2))
WHOLE = (("compute", 1.0),)
ALONE = SimpleNamespace(gather=lambda value: [value])


def profile(layers: int = 11, *, seed: int = 0, exchanges: bool = True) -> Profile:
    rng = np.random.default_rng(seed)
    rows = (WHOLE, *[PARTS] * (layers - 2), WHOLE)
    costs = CostTable.uniform(num_layers=layers).replace(forward_ms=rng.uniform(0.5, 2.0, layers))
    segments = Segments(forward=rows, input=rows, slows_compute=0.2, slows_exchange=0.2)
    return Profile(costs=costs.replace(segments=segments if exchanges else None))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pipelines_with_other_times_rehearse_the_same_plans(ranks: int) -> None:
    one, other = profile(seed=1), profile(seed=2)
    assert pairs_rehearsal_plan(one.costs, ranks) == pairs_rehearsal_plan(other.costs, ranks)
    assert rehearsal_plan(one, ranks) == rehearsal_plan(other, ranks)
    plan = pairs_rehearsal_plan(one.costs, ranks)
    assert plan is not None and plan.pairs and not plan.problems()


def test_layers_without_an_exchange_rehearse_no_pairs() -> None:
    assert pairs_rehearsal_plan(profile(exchanges=False).costs, 2) is None


@pytest.mark.parametrize("true", [0.9, 1.0, 1.15, 1.3])
def test_the_slowing_of_a_run_is_found_again(true: float) -> None:
    promised = profile()
    plan = pairs_rehearsal_plan(promised.costs, 3)
    assert plan is not None
    seen = [predict(plan, slowed(promised, true)) for _ in range(3)]
    found = pairs_rehearsed(promised, plan, seen, ALONE)  # type: ignore[arg-type]
    assert found.about["pairs_slowed"] == pytest.approx(true, abs=0.01)
    assert predict(plan, found).makespan_ms == pytest.approx(seen[0].makespan_ms, rel=1e-3)


def test_pairs_that_took_as_long_as_their_ops_are_priced_so() -> None:
    promised = profile()
    plan = pairs_rehearsal_plan(promised.costs, 2)
    assert plan is not None
    found = pairs_rehearsed(promised, plan, [predict(plan, slowed(promised, 2.9))], ALONE)  # type: ignore[arg-type]
    assert found.about["pairs_slowed"] < 2.9
    apart = predict(plan, slowed(promised, 3.0)).makespan_ms
    assert predict(plan, found).makespan_ms == pytest.approx(apart, rel=1e-3)

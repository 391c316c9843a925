"""The plans of the rehearsals are the same for all pipelines that share experts, whatever each of them has measured;
and what rehearsed pairs correct."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from effort import some

pytest.importorskip("torch")
from octopipe.costs.profile_file import Profile
from octopipe.costs.segments import Segments
from octopipe.costs.table import CostTable
from octopipe.runtime.measure.rehearsal import pairs_plan, pairs_rehearsed, rehearsal_plan
from octopipe.runtime.ranks.world import World
from octopipe.simulation.contention import predict

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


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pipelines_with_other_times_rehearse_the_same_pairs(ranks: int) -> None:
    plans = [pairs_plan(profile(seed), ranks) for seed in range(4)]
    assert plans[0] is not None
    assert all(plan == plans[0] for plan in plans[1:])
    assert not plans[0].problems()
    paired = {op.stage for pair in plans[0].pairs for op in pair}
    assert all(paired & set(plans[0].stages_of_rank(rank)) for rank in range(ranks))


def test_pairs_are_rehearsed_only_where_there_is_an_exchange_and_layers_enough() -> None:
    assert pairs_plan(Profile(costs=CostTable.uniform(num_layers=11)), 2) is None
    assert pairs_plan(profile(0, layers=5), 3) is None
    assert pairs_plan(profile(0, layers=6), 3) is not None


SLOWINGS = {"more": ((0.05, 0.1), 0.35), "less": ((0.3, 0.3), -0.2), "none": ((0.0, 0.0), 0.0)}


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("kind", some(SLOWINGS, quick=["more", "none"]))
def test_measured_pairs_give_the_slowing_that_they_ran_with(kind: str, partial: bool) -> None:
    """The measured steps are predictions with the slowing that is to be found."""
    before, added = SLOWINGS[kind]
    base = profile(1)
    if partial:
        base = replace(base, partial={1: base.costs.replace(forward_ms=0.8 * base.costs.forward_ms)})
    plan = pairs_plan(base, 2)
    assert plan is not None
    truth = slowed(base, before[0] + added, before[1] + added)
    found = pairs_rehearsed(slowed(base, *before), plan, [predict(plan, truth)] * 3, World.make(None, None, None))
    assert found.costs.segments is not None
    got = found.costs.segments.slows_compute, found.costs.segments.slows_exchange
    assert got == pytest.approx((before[0] + added, before[1] + added), abs=1e-6)
    assert predict(plan, found).makespan_ms == pytest.approx(predict(plan, truth).makespan_ms, rel=1e-6)
    assert found.about["rehearsal_of_pairs"]["slowing_added"] == pytest.approx(added, abs=1e-4)
    assert all(table.segments == found.costs.segments for table in found.partial.values())


def slowed(given: Profile, slows_compute: float, slows_exchange: float) -> Profile:
    segments = given.costs.segments
    assert segments is not None
    changed = replace(segments, slows_compute=slows_compute, slows_exchange=slows_exchange)
    partial = {level: table.replace(segments=changed) for level, table in given.partial.items()}
    return replace(given, costs=given.costs.replace(segments=changed), partial=partial)

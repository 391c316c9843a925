"""The search with host memory: fits where nothing else does, is never slower, and says what it has brought."""

from __future__ import annotations

import numpy as np
import pytest

from octopipe.base.errors import DoesNotFitError, OctoPipeError
from octopipe.costs.cluster.hardware import Link
from octopipe.costs.table import CostTable
from octopipe.search.offload import finer
from octopipe.search.systems import build_plan
from octopipe.search.tuner import tune
from octopipe.simulation.simulator import simulate

LAYERS = 24


def setting(*, repeatable: bool = True) -> CostTable:
    """Layers whose activations are large beside everything else, and a link that keeps up with their forwards."""
    times = {"forward_ms": 0.5, "input_ms": 0.5, "weight_ms": 0.5}
    costs = CostTable.uniform(num_layers=LAYERS, activation_bytes=50.0, stash_bytes=35.0, p2p_ms=0.01, **times)
    return costs.replace(
        boundary_bytes=np.full(LAYERS, 1.0),
        static_bytes=np.full(LAYERS, 10.0),
        host_link=Link(latency_ms=0.001, ms_per_byte=1 / 300),
        repeatable=() if repeatable else (False,) * LAYERS,
    )


def limited(costs: CostTable, share: float) -> CostTable:
    free = simulate(build_plan("zb-v", costs, 4, 8), costs)
    return costs.replace(rank_memory_bytes=(share * float(free.peak_bytes.max()),))


@pytest.mark.slow
def test_host_memory_beats_recomputation_at_the_same_limit():
    costs = limited(setting(), 0.3)
    common = {"iterations": 60, "copies": False, "workers": 1}
    without = tune(costs, 4, 8, **common)
    with_host = tune(costs, 4, 8, offload=True, **common)
    timeline = simulate(with_host.plan, costs)
    assert timeline.fits and with_host.plan.offloads
    assert with_host.step_ms == pytest.approx(timeline.step_ms)
    assert with_host.step_ms < 0.95 * without.step_ms
    assert with_host.lower_bound_ms <= with_host.step_ms and "host memory" in with_host.plans.words
    assert any("go to host memory" in note and "x the speed" in note for note in with_host.notes)


@pytest.mark.slow
def test_it_fits_where_nothing_else_does():
    costs = limited(setting(repeatable=False), 0.25)
    common = {"iterations": 60, "copies": False, "workers": 1}
    with pytest.raises(DoesNotFitError, match="--offload"):
        tune(costs, 4, 8, **common)
    found = tune(costs, 4, 8, offload=True, **common)
    assert simulate(found.plan, costs).fits
    assert any("no plan was found that fits without it" in note for note in found.notes)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_plan():
    costs = limited(setting(), 0.5)
    plans = [tune(costs, 4, 8, offload=True, iterations=40, copies=False, workers=w).plan for w in (1, 2)]
    assert plans[0].orders == plans[1].orders and plans[0].stages == plans[1].stages


def test_without_a_limit_or_a_link_there_is_nothing_to_decide():
    free = tune(setting(), 4, 8, offload=True, iterations=40, copies=False, workers=1)
    assert not free.plan.offloads
    with pytest.raises(OctoPipeError, match="host-gb-per-s"):
        tune(setting().replace(host_link=None), 4, 8, offload=True, iterations=10)
    for other in ({"cut_head": True}, {"robust": True}, {"method": "octopipe"}, {"target": "torch"}):
        with pytest.raises(OctoPipeError, match="offload"):
            tune(setting(), 4, 8, offload=True, iterations=10, **other)


def test_finer_stages_do_the_same_work_in_the_same_time():
    costs = setting().replace(boundary_bytes=np.zeros(LAYERS))
    for name in ("1f1b", "zb-v", "interleaved"):
        plan = build_plan(name, costs, 4, 8)
        for layers in (1, 2):
            cut = finer(plan, layers).check()
            assert max(s.num_layers for s in cut.stages) <= layers
            assert simulate(cut, costs).makespan_ms == pytest.approx(simulate(plan, costs).makespan_ms)
            held = simulate(cut, costs).peak_bytes
            assert (held <= simulate(plan, costs).peak_bytes + 1e-6).all()

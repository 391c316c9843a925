"""OptPipe: closed forms of its class, memory limits with and without host memory, and its own words."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from octopipe.base.errors import DoesNotFitError, OctoPipeError
from octopipe.costs.cluster.hardware import Link
from octopipe.costs.table import CostTable
from octopipe.search.offload import fitting
from octopipe.search.systems import build_plan
from octopipe.search.systems.optpipe import heuristics, solved
from octopipe.search.systems.optpipe_program import priced
from octopipe.simulation.simulator import simulate

pytest.importorskip("ortools")


def uniform(p: int, memory: float | None = None, **more: float) -> CostTable:
    times = {"forward_ms": 1.0, "input_ms": 1.0, "weight_ms": 1.0, **more}
    costs = CostTable.uniform(num_layers=p, activation_bytes=1.0, stash_bytes=0.5, **times)
    return costs if memory is None else costs.replace(rank_memory_bytes=(memory,) * p)


@pytest.mark.parametrize(("p", "m", "times"), [(2, 4, (1.0, 1.0, 1.0)), (4, 8, (3.0, 4.0, 2.0))])
def test_with_enough_memory_only_the_warm_up_is_left(p: int, m: int, times: tuple[float, float, float]) -> None:
    """m(F+I+W) of the last rank after (p-1)F, or of the first rank, whose last I and W nothing follows."""
    costs = uniform(p, **dict(zip(("forward_ms", "input_ms", "weight_ms"), times, strict=True)))
    plan = build_plan("optpipe", costs, p, m)
    assert simulate(plan, costs).step_ms == pytest.approx((p - 1) * times[0] + m * sum(times), rel=1e-9)


def test_one_activation_a_rank_runs_one_micro_batch_after_the_other() -> None:
    """Each rank holds one activation until its W: an F follows the W before, and I follows the way to the end."""
    p, m = 3, 4
    costs = uniform(p, memory=1.0)
    plan = build_plan("optpipe", costs, p, m)
    timeline = simulate(plan, costs)
    assert timeline.fits and timeline.step_ms == pytest.approx(m * (2 * p + 1), rel=1e-9)


@pytest.mark.parametrize("memory", [2.0, 3.0])
def test_the_simulator_says_what_the_program_says_and_the_order_fits(memory: float) -> None:
    costs = uniform(3, memory)
    base = next(iter(heuristics(costs.replace(rank_memory_bytes=()), 3, 6)))
    found = solved(priced(base, costs), costs, base, np.full(3, memory), 60.0, 2.0)
    assert found is not None and not found.moving
    timeline = simulate(build_plan("optpipe", costs, 3, 6), costs)
    assert timeline.fits and timeline.step_ms == pytest.approx(found.step_ms, rel=1e-9)
    starts = [simulate(plan, costs, check=False) for plan in heuristics(costs, 3, 6)]
    assert timeline.step_ms <= min(t.step_ms for t in starts if t.fits) + 1e-9


def test_host_memory_lets_the_fast_order_fit_where_1f1b_does_not() -> None:
    costs = uniform(4, memory=3.0)
    with_host = costs.replace(host_link=Link(ms_per_byte=0.1))
    assert not simulate(build_plan("1f1b", costs, 4, 8), costs).fits
    without = simulate(build_plan("optpipe", costs, 4, 8), costs)
    plan = build_plan("optpipe", with_host, 4, 8)
    timeline = simulate(plan, with_host)
    assert plan.offloads and timeline.fits and without.fits
    assert timeline.step_ms < without.step_ms - 1e-9
    starts = [made[1].step_ms for x in heuristics(with_host, 4, 8) if (made := fitting(x, with_host)) is not None]
    assert timeline.step_ms <= min(starts) + 1e-9


def test_the_result_depends_on_the_costs_alone() -> None:
    costs = uniform(3, memory=2.0).replace(host_link=Link(ms_per_byte=0.5))
    plans = [build_plan("optpipe", costs, 3, 5, effort=0.02) for _ in range(2)]
    assert plans[0].orders == plans[1].orders and plans[0].stages == plans[1].stages


def test_what_cannot_be_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DoesNotFitError, match=r"^optpipe: .*no plan fits: rank"):
        build_plan("optpipe", uniform(2, memory=0.5), 2, 4)
    with pytest.raises(OctoPipeError, match="effort is 0; give"):
        build_plan("optpipe", uniform(2), 2, 4, effort=0)
    with pytest.raises(OctoPipeError, match="at most 6000 are solved"):
        build_plan("optpipe", uniform(4), 4, 501)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(OctoPipeError, match=r"^optpipe: .*octopipe\[exact\]"):
        build_plan("optpipe", uniform(2), 2, 4)

"""Algorithm 1 and its random twin: the phase rule, plans that run and fit, logs, determinism."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from octopipe.tuner.algorithm1 import PHASES, IterativeSearch, bubble_phase
from octopipe.tuner.candidate import Desk
from octopipe.tuner.partition import migrations, slide
from octopipe.tuner.placement import disperse
from octopipe.tuner.random_search import RandomSearch

from octopipe.cluster import GIB, Network
from octopipe.cost import CostTable
from octopipe.errors import DoesNotFitError
from octopipe.simulator import simulate
from octopipe.systems import build_plan
from octopipe.timeline import Bubbles, Timeline
from octopipe.tuner import tune

RANKS, MICRO_BATCHES = 4, 8


def hybrid(layers: int = 24, *, memory: float = 0.0, **more: object) -> CostTable:
    """Alternating cheap and dear layers, a heavy head; bytes only where asked for."""
    kinds = np.array([(1.0, 1.8, 0.6) if k % 2 else (0.8, 0.9, 0.7) for k in range(layers - 1)] + [(4.0, 3.0, 0.5)])
    bytes_ = np.full(layers, GIB if memory else 0.0)
    return CostTable(
        model="hybrid",
        symbols="".join("M" if k % 2 else "-" for k in range(layers - 1)) + "L",
        forward_ms=kinds[:, 0],
        input_ms=kinds[:, 1],
        weight_ms=kinds[:, 2],
        activation_bytes=bytes_,
        stash_bytes=0.6 * bytes_,
        network=Network.constant(0.1),
        rank_memory_bytes=(memory * GIB,) if memory else (),
        **more,  # type: ignore[arg-type]
    )


def timeline_with(idle: list[float], boundary: list[float], residual: list[float]) -> Timeline:
    """Any timeline whose bubbles are these."""
    some = simulate(build_plan("1f1b", hybrid(), len(idle), MICRO_BATCHES), hybrid())
    zero = np.zeros(len(idle))
    some.__dict__["bubbles"] = Bubbles(np.array(idle), np.array(boundary), zero, zero, np.array(residual))
    return some


@pytest.mark.parametrize(
    ("idle", "boundary", "residual", "phase"),
    [
        ([9.0, 1.0], [1.0, 1.0], [0.0, 0.0], "partition"),
        ([3.0, 2.0], [2.0, 2.0], [1.0, 0.0], "placement"),
        ([3.0, 2.0], [1.0, 1.0], [2.0, 1.0], "schedule"),
    ],
)
def test_the_bubbles_choose_the_phase(
    idle: list[float], boundary: list[float], residual: list[float], phase: str
) -> None:
    assert bubble_phase(timeline_with(idle, boundary, residual), least_layer_ms=2.0) == phase


@pytest.mark.parametrize("method", ["octopipe", "random"])
def test_the_result_beats_its_start_and_is_what_the_simulator_says(method: str) -> None:
    costs = hybrid()
    result = tune(costs, RANKS, MICRO_BATCHES, method=method, iterations=60, budget_s=60)  # type: ignore[arg-type]
    result.plan.check()
    assert simulate(result.plan, costs).step_ms == pytest.approx(result.step_ms)
    baseline = simulate(build_plan("1f1b", costs, RANKS, MICRO_BATCHES, split_backward=True), costs).step_ms
    assert result.lower_bound_ms <= result.step_ms < 0.9 * baseline
    assert result.bound_name and "busiest" in result.explanation


def test_every_iteration_is_logged_and_the_best_never_worsens() -> None:
    result = tune(hybrid(), RANKS, MICRO_BATCHES, method="octopipe", iterations=40, budget_s=60)
    assert [s.iteration for s in result.log] == list(range(len(result.log)))
    assert result.log[0].phase == "start" and {s.phase for s in result.log[1:]} <= set(PHASES)
    best = [s.best_ms for s in result.log]
    assert best == sorted(best, reverse=True) and best[-1] == pytest.approx(result.step_ms)
    assert sum(result.phase_iterations.values()) == result.iterations == len(result.log) - 1


def test_the_same_seed_gives_the_same_plan() -> None:
    runs = [
        IterativeSearch(hybrid(), RANKS, MICRO_BATCHES, budget_s=60, seed=3, iterations=25).run() for _ in range(2)
    ]
    assert runs[0].plan == runs[1].plan
    assert [s._replace(seconds=0) for s in runs[0].log] == [s._replace(seconds=0) for s in runs[1].log]


def test_random_search_draws_phases_evenly() -> None:
    search = RandomSearch(hybrid(), RANKS, MICRO_BATCHES, budget_s=60, seed=0, iterations=90, patience=1000)
    counts = search.run().phase_iterations
    assert all(15 <= counts[p] <= 45 for p in PHASES)


def test_an_uneven_start_is_balanced_first() -> None:
    costs = hybrid().replace(network=Network.constant(0.0))
    result = IterativeSearch(costs, RANKS, MICRO_BATCHES, budget_s=60, seed=0, iterations=1).run()
    step = result.log[1]
    assert step.phase == "partition" and step.after_ms < step.before_ms


@pytest.mark.parametrize("memory", [60.0, 30.0])
def test_plans_fit_in_memory(memory: float) -> None:
    costs = hybrid(memory=memory)
    result = tune(costs, RANKS, MICRO_BATCHES, method="octopipe", iterations=30, budget_s=60)
    timeline = simulate(result.plan, costs)
    assert timeline.fits and max(timeline.peak_gib) <= memory * (1 + 1e-9)


def test_when_nothing_fits_the_error_names_rank_and_mend() -> None:
    costs = hybrid(memory=2.0)
    with pytest.raises(DoesNotFitError, match=r"rank \d.*GiB.*what would help"):
        tune(costs, RANKS, MICRO_BATCHES, method="octopipe", recompute=False, budget_s=10)


def test_a_given_plan_is_where_the_search_begins() -> None:
    costs = hybrid()
    given = tune(costs, RANKS, MICRO_BATCHES, method="octopipe", iterations=20, budget_s=60)
    again = tune(costs, RANKS, MICRO_BATCHES, method="octopipe", iterations=3, budget_s=60, start=given.plan)
    assert again.step_ms <= given.step_ms * 1.02
    assert again.log[0].before_ms <= given.step_ms * 1.05


def test_ranks_of_other_speed_get_other_work() -> None:
    costs = hybrid(rank_slowdown=(1.0, 2.0, 1.0, 1.0))
    result = tune(costs, RANKS, MICRO_BATCHES, method="octopipe", iterations=60, budget_s=60)
    layers = [0.0] * RANKS
    for stage in result.plan.stages:
        layers[stage.rank] += float(costs.layer_ms[stage.first : stage.stop].sum())
    assert layers[1] == min(layers)


def test_a_callback_ends_the_search() -> None:
    seen = []
    result = tune(hybrid(), RANKS, MICRO_BATCHES, method="octopipe", progress=lambda p: seen.append(p) or len(seen) > 4)
    assert result.interrupted and len(seen) == 5 == result.iterations
    assert dataclasses.is_dataclass(result) and seen[-1].best_ms == pytest.approx(result.step_ms)


def test_slides_change_only_what_they_say() -> None:
    import random

    costs = hybrid()
    desk = Desk(costs, RANKS, MICRO_BATCHES, 24)
    st = desk.first(None, False).state
    moved = slide(st, 0, 2, 1)
    assert moved is not None
    widths, before = np.diff(moved.bounds[:5]), np.diff(st.bounds[:5])
    assert (widths - before).tolist() == [-1, 0, 1, 0]
    for _, candidate in migrations(desk, st, random.Random(0)):
        assert (np.diff(candidate.bounds[:5]) > 0).all() and candidate.bounds[4] == costs.num_layers
        assert desk.loads(candidate).sum() == pytest.approx(costs.layer_ms.sum() * MICRO_BATCHES)


def test_dispersion_keeps_layers_and_their_order() -> None:
    desk = Desk(hybrid(), RANKS, MICRO_BATCHES, 24)
    st = desk.first(None, False).state
    finer = disperse(desk, st, 1, [2, 3, 0])
    assert int(finer.size[0]) == 6 and finer.rank[1:4].tolist() == [2, 3, 0]
    assert (np.diff(finer.bounds[:7]) > 0).all()
    assert set(st.bounds[:5].tolist()) <= set(finer.bounds[:7].tolist())


def test_partition_iterations_dominate_on_many_layers() -> None:
    search = IterativeSearch(hybrid(200), 8, 16, budget_s=60, seed=0, iterations=60, patience=1000)
    counts = search.run().phase_iterations
    assert counts["partition"] == max(counts.values())

"""Algorithm 1 and its random twin: the phase rule, plans that run and fit, logs, determinism."""

from __future__ import annotations

import ast
import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
from effort import some

from octopipe.base.errors import DoesNotFitError, OctoPipeError
from octopipe.costs.cluster.hardware import GIB, Network
from octopipe.costs.table import CostTable
from octopipe.plans.plan import I, Plan
from octopipe.plans.price import hop_times, stage_memory, stage_times, static_bytes, workspace_bytes
from octopipe.search import algorithm1
from octopipe.search.algorithm1 import PHASES, IterativeSearch, RandomSearch, bubble_phase
from octopipe.search.algorithm1.candidate import Evaluator, State, shifted
from octopipe.search.algorithm1.partition import migrations, slide
from octopipe.search.algorithm1.placement import disperse
from octopipe.search.algorithm1.settings import Settings
from octopipe.search.algorithm1.structure import derived, keys_of, layer_times, recomputed, retimed, stages_of
from octopipe.search.systems import build_plan, systems
from octopipe.search.tuner import tune
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Bubbles, Timeline

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


@pytest.mark.parametrize("method", some(["octopipe", "random"]))
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
    tuned = [s for s in result.log if s.phase != "start"]
    assert [s.iteration for s in tuned] == list(range(1, len(tuned) + 1))
    assert result.log[0].phase == "start" and {s.phase for s in result.log} <= {"start", *PHASES}
    best = [s.best_ms for s in result.log]
    assert best == sorted(best, reverse=True) and best[-1] == pytest.approx(result.step_ms)
    assert sum(result.phase_iterations.values()) == result.iterations == len(tuned)


def test_the_same_seed_gives_the_same_plan() -> None:
    runs = [IterativeSearch(hybrid(), RANKS, MICRO_BATCHES, budget_s=60, seed=3, iterations=25).run() for _ in range(2)]
    assert runs[0].plan == runs[1].plan
    assert [s._replace(seconds=0) for s in runs[0].log] == [s._replace(seconds=0) for s in runs[1].log]


def test_random_search_draws_phases_evenly() -> None:
    search = RandomSearch(
        hybrid(), RANKS, MICRO_BATCHES, budget_s=60, iterations=90, systems=False, settings=Settings(patience=1000)
    )
    counts = search.run().phase_iterations
    assert all(15 <= counts[p] <= 45 for p in PHASES)


def test_an_uneven_start_is_balanced_first() -> None:
    costs = hybrid().replace(network=Network.constant(0.0))
    result = IterativeSearch(costs, RANKS, MICRO_BATCHES, budget_s=60, iterations=1, systems=False).run()
    step = result.log[1]
    assert step.phase == "partition" and step.after_ms < step.before_ms


@pytest.mark.parametrize("memory", some([30.0, 60.0]))
def test_plans_fit_in_memory(memory: float) -> None:
    costs = hybrid(memory=memory)
    result = tune(costs, RANKS, MICRO_BATCHES, method="octopipe", iterations=30, budget_s=60)
    timeline = simulate(result.plan, costs)
    assert timeline.fits and max(timeline.peak_gib) <= memory * (1 + 1e-9)


def test_when_nothing_fits_the_error_names_rank_and_remedy() -> None:
    costs = hybrid(memory=2.0)
    with pytest.raises(DoesNotFitError, match=r"rank \d.*GiB.*what would help"):
        tune(costs, RANKS, MICRO_BATCHES, method="octopipe", recompute=False, budget_s=10)


@pytest.mark.parametrize("system", some(["chimera", "interleaved", "mario"]))
def test_a_given_plan_is_kept_exactly_until_something_is_faster(system: str) -> None:
    """Orders, copies and recomputation of a start are its own: none is rebuilt on the way in."""
    costs = hybrid(memory=400.0)
    given = build_plan(system, costs, RANKS, MICRO_BATCHES)
    own = simulate(given, costs).step_ms
    again = tune(costs, RANKS, MICRO_BATCHES, method="octopipe", iterations=4, budget_s=60, start=given)
    assert again.log[0].before_ms == pytest.approx(own, rel=1e-12)
    assert again.step_ms <= own
    unchanged = IterativeSearch(costs, RANKS, MICRO_BATCHES, budget_s=60, iterations=0, start=given).run()
    assert unchanged.plan.orders == given.orders and unchanged.plan.stages == given.stages


@pytest.mark.parametrize("seed", some(range(3)))
def test_it_is_behind_no_published_system_that_fits_and_holds_layers_once(seed: int) -> None:
    lot = np.random.default_rng(seed)
    costs = hybrid(20, memory=float(lot.integers(30, 60)))
    result = tune(costs, RANKS, MICRO_BATCHES, method="octopipe", iterations=3, budget_s=60, seed=seed)
    for name in systems():
        if name in ("tessel", "optpipe"):
            continue
        try:
            plan = build_plan(name, costs, RANKS, MICRO_BATCHES, split_backward=True)
        except OctoPipeError:
            continue
        timeline = simulate(plan, costs)
        if timeline.fits and not plan.replicas():
            assert result.step_ms <= timeline.step_ms * (1 + 1e-9), name


def test_recomputation_makes_fit_what_does_not_fit_without() -> None:
    costs = hybrid(memory=5.0).replace(boundary_bytes=np.full(24, 0.05 * GIB))
    with pytest.raises(DoesNotFitError):
        tune(costs, RANKS, MICRO_BATCHES, method="octopipe", iterations=4, budget_s=60, recompute=False)
    result = tune(costs, RANKS, MICRO_BATCHES, method="octopipe", iterations=4, budget_s=60)
    assert any(s.recompute for s in result.plan.stages) and simulate(result.plan, costs).fits


@pytest.mark.parametrize(
    "phases", [("partition",), ("placement",), ("schedule",), ("partition", "schedule"), ("placement", "schedule")]
)
def test_only_the_phases_that_are_on_change_the_plan(phases: tuple[str, ...]) -> None:
    costs = hybrid()
    start = build_plan("1f1b", costs, RANKS, MICRO_BATCHES, split_backward=True)
    found = IterativeSearch(costs, RANKS, MICRO_BATCHES, budget_s=60, iterations=12, phases=phases).run()
    assert {s.phase for s in found.log} <= {"start", *phases} and found.log[0].move == "1f1b"
    assert found.timeline.step_ms <= simulate(start, costs).step_ms
    if "partition" not in phases and "placement" not in phases:
        assert found.plan.stages == start.stages
    if "placement" not in phases:
        assert [s.rank for s in found.plan.stages] == [s.rank for s in start.stages]
    if phases == ("partition",):
        assert found.plan.orders == start.orders and found.plan.stages != start.stages


def test_phases_that_do_not_exist_are_refused() -> None:
    with pytest.raises(OctoPipeError, match="partition, placement, schedule"):
        tune(hybrid(), RANKS, MICRO_BATCHES, method="octopipe", phases=("partitions",))
    with pytest.raises(OctoPipeError, match="no phases"):
        tune(hybrid(), RANKS, MICRO_BATCHES, phases=("partition",))


def test_ranks_of_other_speed_get_other_work() -> None:
    costs = hybrid(rank_slowdown=(1.0, 2.0, 1.0, 1.0))
    result = tune(costs, RANKS, MICRO_BATCHES, method="octopipe", iterations=60, budget_s=60)
    layers = [0.0] * RANKS
    for stage in result.plan.stages:
        layers[stage.rank] += float(costs.layer_ms[stage.first : stage.stop].sum())
    assert layers[1] == min(layers)


def test_a_callback_ends_the_search() -> None:
    seen = []
    result = tune(hybrid(), RANKS, MICRO_BATCHES, method="octopipe", progress=lambda p: seen.append(p) or len(seen) > 2)
    assert result.interrupted and len(seen) == 3
    assert dataclasses.is_dataclass(result) and seen[-1].best_ms == pytest.approx(result.step_ms)


def first_state(costs: CostTable) -> tuple[Evaluator, State, Plan]:
    evaluator = Evaluator(costs, RANKS, MICRO_BATCHES)
    plan = build_plan("1f1b", costs, RANKS, MICRO_BATCHES, split_backward=True)
    return evaluator, evaluator.state(plan), plan


@pytest.mark.parametrize("system", ["1f1b", "interleaved", "hanayo", "chimera", "mario", "zb-v", "mist"])
@pytest.mark.parametrize("split", [True, None])
def test_orders_are_timed_and_priced_as_the_simulator_does(system: str, split: bool | None) -> None:
    costs = hybrid(memory=400.0, rank_slowdown=(1.0, 1.5, 1.0, 1.2))
    plan = build_plan(system, costs, RANKS, MICRO_BATCHES, split_backward=split)
    evaluator = Evaluator(costs, RANKS, MICRO_BATCHES)
    state, timeline = evaluator.state(plan), simulate(plan, costs)
    ms, over, starts = evaluator.time(state)
    assert ms == pytest.approx(timeline.makespan_ms) and over < 0
    assert starts == pytest.approx(timeline.spans.start_ms)
    prices = state.prices
    memory, (forward, gradient) = stage_memory(plan, costs), hop_times(plan, costs)
    for ours, theirs in (
        (prices.ms, stage_times(plan, costs)), (prices.forward_ms, forward), (prices.gradient_ms, gradient),
        (prices.kept, memory.after_forward), (prices.held, memory.activation), (prices.stash, memory.stash),
        (prices.static, static_bytes(plan, costs)), (prices.work, workspace_bytes(plan, costs)),
    ):  # fmt: skip
        assert ours == pytest.approx(theirs)


def test_an_order_that_cannot_run_is_seen() -> None:
    evaluator, state, _ = first_state(hybrid())
    kinds = state.ops[:, 1]
    first_input = int(np.flatnonzero(kinds == I)[0])
    assert evaluator.time(shifted(state, first_input, 0))[0] == np.inf


def test_weight_gradients_are_advanced_until_the_peak_fits() -> None:
    """As in the paper's figure: the orders of F and I stay, some W go forward, and memory falls below the limit."""
    costs = hybrid(memory=400.0)
    _, _, plan = first_state(costs)
    late = []
    for order in plan.orders:
        late.append(tuple(op for op in order if op.kind != "W") + tuple(op for op in order if op.kind == "W"))
    lazy = dataclasses.replace(plan, orders=tuple(late))
    eager, peak = simulate(plan, costs).peak_bytes.max(), simulate(lazy, costs).peak_bytes.max()
    assert peak > 1.1 * eager
    tight = costs.replace(rank_memory_bytes=(0.5 * float(eager + peak),))
    seen = Evaluator(tight, RANKS, MICRO_BATCHES).view(Evaluator(tight, RANKS, MICRO_BATCHES).state(lazy))
    assert seen is not None and seen.timeline.fits
    for before, after in zip(lazy.orders, seen.plan.orders, strict=True):
        assert [op for op in before if op.kind != "W"] == [op for op in after if op.kind != "W"]


@pytest.mark.parametrize("memory", [0.0, 60.0])
def test_derived_orders_run_and_fit(memory: float) -> None:
    evaluator, state, plan = first_state(hybrid(memory=memory))
    starts = simulate(plan, evaluator.costs).spans.start_ms
    found = list(derived(evaluator, state, keys_of(state, starts)))
    assert found
    for order in found:
        new = evaluator.plan(order)
        new.check()
        assert not memory or evaluator.time(order)[1] < 0


def test_an_order_follows_its_layers_to_other_stages() -> None:
    evaluator, state, plan = first_state(hybrid())
    at = layer_times(evaluator, state, simulate(plan, evaluator.costs).spans.start_ms)
    stages = disperse(evaluator, state.stages, 1, [2, 3, 0])
    moved, _ = retimed(evaluator, state, at, stages)
    new = evaluator.plan(moved)
    new.check()
    assert sorted(map(str, (op for o in new.orders for op in o))) == sorted(
        f"{s}{k}{m}" for s in range(len(stages)) for k in "FIW" for m in range(MICRO_BATCHES)
    )
    same, _ = retimed(evaluator, state, at, state.stages)
    assert evaluator.plan(same).orders == plan.orders


def test_slides_change_only_what_they_say() -> None:
    evaluator, state, plan = first_state(hybrid())
    moved = slide(evaluator, state, 0, 2, 1)
    assert moved is not None
    assert [b.num_layers - a.num_layers for a, b in zip(state.stages, moved.stages, strict=True)] == [-1, 0, 1, 0]
    for _, candidate in migrations(evaluator, state, random.Random(0)):
        assert all(s.num_layers > 0 for s in candidate.stages)
        assert evaluator.plan(candidate).orders == plan.orders
        assert evaluator.loads(candidate.stages).sum() == pytest.approx(evaluator.costs.layer_ms.sum() * MICRO_BATCHES)


def test_dispersion_keeps_layers_and_their_order() -> None:
    evaluator, state, _ = first_state(hybrid())
    finer = disperse(evaluator, state.stages, 1, [2, 3, 1])
    assert [s.rank for s in finer] == [0, 2, 3, 1, 2, 3]
    assert [s.first for s in finer[1:]] == [s.stop for s in finer[:-1]]
    assert {s.first for s in state.stages} <= {s.first for s in finer}


def test_a_layer_that_recomputes_does_so_wherever_it_moves() -> None:
    evaluator, state, _ = first_state(hybrid(memory=400.0))
    again = stages_of(state.bounds, [0, 1, 2, 3], {4, 5, 6})
    moved = slide(evaluator, evaluator.restaged(state, again), 1, 0, 1) or slide(
        evaluator, evaluator.restaged(state, again), 0, 1, 1
    )
    assert moved is not None and recomputed(moved.stages) == {4, 5, 6}
    evaluator.plan(moved).check()


def test_partition_iterations_dominate_on_many_layers() -> None:
    search = IterativeSearch(
        hybrid(200), 8, 16, budget_s=60, iterations=24, systems=False, settings=Settings(patience=1000)
    )
    counts = search.run().phase_iterations
    assert counts["partition"] == max(counts.values())


def test_the_papers_tuner_imports_nothing_of_the_default_search() -> None:
    folder = Path(algorithm1.__file__).parent
    allowed = ("octopipe.search.algorithm1", "octopipe.search.result")
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("octopipe.search.tuner"):
                assert node.module.startswith(allowed), (path.name, node.module)

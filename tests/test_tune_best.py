"""The default search: plans that run and fit, equal to what the simulator says, never behind the published systems."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import numpy as np
import pytest

from octopipe.bounds import bounds
from octopipe.cli import main
from octopipe.cost import CostTable
from octopipe.errors import DoesNotFitError, NotApplicableError, OctoPipeError
from octopipe.lowering import CHANNELS, lower
from octopipe.plan_file import load_plan
from octopipe.simulator import simulate
from octopipe.systems import build_plan, systems
from octopipe.tuner import tune
from octopipe.tuner.anneal import State, copy_state
from octopipe.tuner.follow import Orders, Polisher, alter, copy_orders, follow, read_times
from octopipe.tuner.kernels import KIND_BITS, STAGE_BITS, make_problem, make_scratch
from octopipe.tuner.lane import Budget, Lane


def uneven(seed: int, layers: int, p2p_ms: float = 0.2, **changes: object) -> CostTable:
    """A hybrid of cheap and dear layers under a heavy head."""
    rng = np.random.default_rng(seed)
    times = {name: rng.uniform(0.5, 4, layers) for name in ("forward_ms", "input_ms", "weight_ms")}
    times["forward_ms"][-1] *= 4
    times["input_ms"][-1] *= 4
    activation = rng.uniform(0.5, 2, layers)
    costs = CostTable.uniform(num_layers=layers, p2p_ms=p2p_ms).replace(
        **times, activation_bytes=activation, stash_bytes=0.6 * activation, static_bytes=rng.uniform(0, 2, layers)
    )
    return costs.replace(**changes)


def rivals(costs: CostTable, ranks: int, micro_batches: int) -> dict[str, float]:
    """Step times of the systems that apply, fit, and hold every layer once."""
    steps = {}
    for name in systems():
        if name == "tessel":  # seconds of solver for what tessel-fast shows as well here
            continue
        try:
            plan = build_plan(name, costs, ranks, micro_batches, split_backward=True)
        except (NotApplicableError, DoesNotFitError):
            continue
        timeline = simulate(plan, costs)
        if timeline.fits and not plan.replicas():
            steps[name] = timeline.step_ms
    return steps


@pytest.mark.parametrize("seed", range(3))
def test_the_plan_runs_everywhere_and_is_as_fast_as_promised(seed: int) -> None:
    costs = uneven(seed, 12)
    result = tune(costs, 4, 6, iterations=400, workers=1)
    assert simulate(result.plan.check(), costs).step_ms == result.step_ms
    for channel in CHANNELS:
        lower(result.plan, costs, channel=channel)
    assert result.lower_bound_ms <= result.step_ms
    assert result.gap == pytest.approx(result.step_ms / result.lower_bound_ms - 1)


@pytest.mark.parametrize("seed", range(3))
def test_no_published_system_is_faster(seed: int) -> None:
    costs = uneven(seed, 14)
    steps = rivals(costs, 4, 8)
    result = tune(costs, 4, 8, iterations=2000, workers=1)
    assert result.step_ms <= min(steps.values()) + 1e-9


@pytest.mark.parametrize("share", [1.0, 0.75])
def test_plans_stay_within_a_tight_memory_limit(share: float) -> None:
    costs = uneven(1, 12)
    need = float(simulate(build_plan("1f1b", costs, 4, 8), costs).peak_bytes.max())
    tight = costs.replace(rank_memory_bytes=(share * need,))
    timeline = simulate(tune(tight, 4, 8, iterations=800, workers=1).plan, tight)
    assert timeline.fits
    assert timeline.peak_bytes.max() <= share * need + 1


def test_when_nothing_fits_the_error_names_rank_amount_and_mend() -> None:
    costs = uneven(0, 8, rank_memory_bytes=(1.0,))
    with pytest.raises(DoesNotFitError, match=r"rank \d"):
        tune(costs, 2, 4, iterations=50, workers=1)


def test_the_same_seed_and_iterations_give_the_same_plan() -> None:
    costs = uneven(4, 10)
    first, again = (tune(costs, 3, 5, iterations=200, workers=1, seed=7) for _ in range(2))
    assert first.plan.orders == again.plan.orders and first.plan.stages == again.plan.stages


def test_a_slow_rank_gets_less_work() -> None:
    costs = uneven(2, 16, rank_slowdown=(1.0, 3.0, 1.0))
    result = tune(costs, 3, 6, iterations=600, workers=1)
    work = [0.0] * 3
    for stage in result.plan.stages:
        work[stage.rank] += float(costs.layer_ms[stage.first : stage.stop].sum())
    assert work[1] < min(work[0], work[2])


def test_micro_batches_of_different_sizes_are_priced() -> None:
    factor = np.array([1.0, 0.25, 2.0, 0.5])
    costs = uneven(3, 8, micro_batch_factor=factor)
    result = tune(costs, 2, 4, iterations=300, workers=1)
    assert simulate(result.plan, costs).step_ms == result.step_ms
    assert result.step_ms <= min(rivals(costs, 2, 4).values()) + 1e-9


def test_a_start_is_never_made_worse() -> None:
    costs = uneven(5, 12)
    start = tune(costs, 4, 6, iterations=1500, workers=1).plan
    again = tune(costs, 4, 6, iterations=10, workers=1, start=start)
    assert again.step_ms <= simulate(start, costs).step_ms + 1e-9


def test_every_bound_holds_for_every_plan_that_holds_a_layer_once() -> None:
    lot = random.Random(0)
    for seed in range(6):
        costs = uneven(seed, lot.randint(3, 9), p2p_ms=lot.choice([0.0, 0.5]))
        ranks, micro_batches = lot.randint(2, 3), lot.randint(1, 5)
        slow = tuple(lot.uniform(0.5, 2) for _ in range(ranks)) if seed % 2 else ()
        costs = costs.replace(rank_slowdown=slow)
        fastest = min(
            [*rivals(costs, ranks, micro_batches).values(), tune(costs, ranks, micro_batches, iterations=300).step_ms]
        )
        for bound in bounds(costs, ranks, micro_batches):
            assert bound.ms <= fastest * (1 + 1e-9), bound


def test_the_command_writes_a_plan_with_its_search_and_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "plan.json")
    words = ["tune", "nemotron-h-4b", "--pp", "4", "--micro-batches", "4", "--iterations", "50", "-o", path, "--json"]
    assert main(words) == 0
    numbers = json.loads(capsys.readouterr().out)
    plan = load_plan(path)
    assert plan.extra["step_ms"] == numbers["step_ms"] and plan.extra["setting"]["model"] == "nemotron-h-4b"
    assert plan.extra["search"] and numbers["gap"] >= 0 and "busiest" in numbers["explanation"]


@pytest.mark.parametrize("changes", [{"method": "luck"}, {"budget_s": 0}, {"budget_s": float("nan")}])
def test_mistakes_are_named(changes: dict[str, object]) -> None:
    with pytest.raises(OctoPipeError):
        tune(uneven(0, 6), 2, 2, **changes)  # type: ignore[arg-type]


def test_polishing_ends_when_the_search_is_stopped_in_its_middle() -> None:
    """Stopped, a budget's share stays at 1.0: asking for a share beyond that would never end."""

    def note(*_: object) -> None:
        assert budget.made < 20_000, "it goes on"

    budget = Budget(1e9, time.monotonic(), moves=20_000, stopped=lambda: budget.made > 2_000)
    lane = Lane(make_problem(uneven(0, 12), 4, 6), 12, np.zeros(4), 0.0, False, (0, 0), budget, note)
    lane.draw(0.02)
    lane.walk(0.05)
    lane.polish(lane.elite[:1] * 3, np.zeros(4))
    assert lane.polished is not None and 2_000 < budget.made < 2_500


def each_op_once(state: State, orders: Orders, micro_batches: int) -> bool:
    """Whether every rank runs F, I and W of its own stages' micro-batches, each once."""
    stages = int(state.size[0])
    for rank in range(orders.length.size):
        ops = orders.seq[rank, : orders.length[rank]].tolist()
        own = [s for s in range(stages) if state.rank[s] == rank]
        wanted = [k << KIND_BITS | s << STAGE_BITS | m for k in (0, 2, 3) for s in own for m in range(micro_batches)]
        if sorted(ops) != wanted:
            return False
    return True


@pytest.mark.parametrize("seed", range(8))
def test_polishing_keeps_every_op_on_its_stage_s_rank(seed: int) -> None:
    """Few ops and many moves: stages often leave a rank in the same move in which an op of it is advanced."""
    lot = np.random.default_rng(seed)
    layers, ranks, micro_batches = int(lot.integers(4, 8)), int(lot.integers(2, 5)), int(lot.integers(2, 5))
    problem = make_problem(uneven(seed, layers), ranks, micro_batches)
    scratch, margin = make_scratch(problem, layers), np.zeros(ranks)
    budget = Budget(1e9, time.monotonic(), moves=400)
    lane = Lane(problem, layers, margin, 0.0, False, (seed, 0), budget, lambda *_: None)
    lane.draw(1.0)
    polisher = Polisher(problem, layers, scratch, margin, (seed,))
    assert polisher.begin(min(lane.starts, key=lambda s: s.step_ms).state)
    state, orders = polisher.state, polisher.orders
    for _ in range(100):
        copy_state(state, polisher.best)
        copy_orders(orders, polisher.best_orders)
        follow(problem, state, orders, margin, np.inf, scratch)
        path = read_times(problem, state, orders, scratch, polisher.times)
        for _ in range(6):
            alter(problem, state, orders, polisher.times, path, polisher.rng, -1)
            assert each_op_once(state, orders, micro_batches)

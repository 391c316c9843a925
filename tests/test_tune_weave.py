"""Words: their timing is the simulator's, taking it up again changes nothing, and every move leaves a complete plan."""

from __future__ import annotations

import numpy as np
import pytest

from octopipe.cost import CostTable
from octopipe.simulate import simulate
from octopipe.tune.anneal import State
from octopipe.tune.encode import plan_of
from octopipe.tune.kernels import Problem, make_problem, make_scratch
from octopipe.tune.starts import key_presets, shaped_state
from octopipe.tune.weave import Weaver, Words


def random_setting(seed: int) -> tuple[CostTable, Problem, int, State]:
    """Uneven layers, ranks and micro-batches, a limit that binds or none; a shape, perhaps recomputing."""
    lot = np.random.default_rng(seed)
    ranks, micro_batches, layers = int(lot.integers(2, 6)), int(lot.integers(2, 9)), int(lot.integers(8, 20))
    activation = lot.uniform(0.5, 2.0, layers)
    costs = CostTable.uniform(num_layers=layers, p2p_ms=float(lot.uniform(0.0, 0.5))).replace(
        forward_ms=lot.uniform(0.5, 4.0, layers),
        input_ms=lot.uniform(0.5, 4.0, layers),
        weight_ms=lot.uniform(0.1, 4.0, layers),
        activation_bytes=activation,
        stash_bytes=0.6 * activation,
        boundary_bytes=np.zeros(layers),
        rank_slowdown=tuple(lot.uniform(1.0, 1.5, ranks)) if lot.random() < 0.5 else (),
        micro_batch_factor=lot.uniform(0.5, 2.0, (micro_batches, layers)) if lot.random() < 0.3 else None,
    )
    if lot.random() < 0.6:
        costs = costs.replace(rank_memory_bytes=(float(activation.sum()) * lot.uniform(0.8, 1.6),))
    stages = int(lot.integers(ranks, layers + 1))
    problem = make_problem(costs, ranks, micro_batches)
    state = shaped_state(problem, layers, stages, bool(lot.random() < 0.5), seed)
    state.glob[:5] = next(key_presets(problem))
    state.recompute[:stages] = lot.random(stages) < (0.4 if seed % 2 else 0.0)
    return costs, problem, layers, state


def begun(seed: int) -> tuple[CostTable, Problem, Weaver] | None:
    costs, problem, most, state = random_setting(seed)
    weaver = Weaver(problem, most, make_scratch(problem, most), np.zeros(problem.num_ranks), (seed,), bool(seed % 2))
    return (costs, problem, weaver) if weaver.begin(state) else None


def letters_are_complete(problem: Problem, state: State, words: Words) -> bool:
    """Every stage's F and I, once per micro-batch, on its own rank."""
    for r in range(problem.num_ranks):
        stages = [s for s in range(int(state.size[0])) if state.rank[s] == r]
        wanted = sorted([2 * s + k for s in stages for k in (0, 1)] * problem.num_micro_batches)
        if sorted(words.letter[r, : words.length[r]].tolist()) != wanted:
            return False
    return True


@pytest.mark.parametrize("seed", range(60))
def test_words_take_as_long_as_the_simulator_says_and_fit_where_it_says(seed: int) -> None:
    found = begun(seed)
    if found is None:
        pytest.skip("this shape does not fit this limit")
    costs, problem, weaver = found
    for _ in range(4):
        woven = weaver.result()
        plan = plan_of(problem, costs, woven.state, woven.orders).check()
        timeline = simulate(plan, costs)
        assert timeline.step_ms == pytest.approx(woven.step_ms, rel=1e-12)
        assert timeline.fits
        weaver.run(150, 2e-3)


@pytest.mark.parametrize("seed", range(60))
def test_taking_a_timing_up_again_gives_what_timing_from_the_beginning_gives(seed: int) -> None:
    found = begun(seed)
    if found is None:
        pytest.skip("this shape does not fit this limit")
    _, problem, weaver = found
    first = weaver.best_ms
    for structure in (0.0, 0.0, 0.4, 1.0, 0.0):
        weaver.run(60, 5e-3, structure)
        assert letters_are_complete(problem, weaver.state, weaver.words)
        assert weaver.judge(weaver.state, weaver.words) == weaver.current_ms
        assert weaver.judge(weaver.best, weaver.best_words) == weaver.best_ms <= first


def test_enough_of_these_settings_fit() -> None:
    assert sum(begun(seed) is not None for seed in range(60)) >= 25

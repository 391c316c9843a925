"""Structures annealed under bred priorities: what keys, populations, herds and shapes promise whatever is drawn."""

from __future__ import annotations

import numpy as np
import pytest
from test_tune_best import uneven

from octopipe.cost import CostTable
from octopipe.simulator import simulate
from octopipe.tuner.anneal import below, change_places, fetch, judge, send
from octopipe.tuner.encode import plan_of
from octopipe.tuner.kernels import LAPS, Problem, Scratch, make_problem, make_scratch
from octopipe.tuner.keys import NUM_KEYS, breed, count_of, draw_keys, judge_keys, keep_keys, make_child, use_keys
from octopipe.tuner.lottery import Lottery, Shape, Start, divide, draw_shape, near_shape
from octopipe.tuner.roam import POPULATION, Herd, Walker, change, rate

RANKS, MICRO_BATCHES, MAX_STAGES = 4, 6, 12


def setting(seed: int, limit: float | None = 30.0) -> tuple[CostTable, Problem, Scratch]:
    costs = uneven(seed, 17, **({} if limit is None else {"rank_memory_bytes": (limit,)}))
    problem = make_problem(costs, RANKS, MICRO_BATCHES)
    return costs, problem, make_scratch(problem, MAX_STAGES)


def dice(seed: int) -> np.ndarray:
    return np.array([seed * 7919 + 88172645463325252], np.uint64)


def drawn(problem: Problem, scratch: Scratch, seed: int, count: int = 8) -> list[Start]:
    lottery = Lottery(problem, MAX_STAGES, scratch, np.zeros(RANKS), (seed,))
    for _ in range(count):
        lottery.draw(False)
    return lottery.take()


def herd_of(problem: Problem, scratch: Scratch, seed: int, walkers: int = 3) -> Herd:
    herd = Herd(problem, MAX_STAGES, scratch, np.zeros(RANKS), dice(seed), False, 0.0)
    for start in drawn(problem, scratch, seed)[:walkers]:
        herd.add(start, 0.1)
    assert herd.walkers, "some start fits"
    return herd


@pytest.mark.parametrize("limit", [None, 30.0])
@pytest.mark.parametrize("seed", range(3))
def test_every_drawn_and_bred_key_gives_limits_that_a_schedule_can_keep(seed: int, limit: float | None) -> None:
    _, problem, scratch = setting(seed, limit)
    state, rng = drawn(problem, scratch, seed)[0].state, dice(seed)
    population = np.zeros((4, NUM_KEYS))
    for keys in population:
        draw_keys(problem, keys, rng)
    child = np.zeros(NUM_KEYS)
    for _ in range(300):
        make_child(problem, population, 4, child, rng)
        assert np.isfinite(child).all()
        use_keys(problem, state, child)
        flight = state.flight[: int(state.size[0])]
        assert (flight >= 1).all() and (flight <= MICRO_BATCHES).all()
        assert not state.offset[:, : int(state.size[0])].any()
        population[:-1] = population[1:]
        population[-1] = child


def test_a_population_is_sorted_without_doubles_and_keeps_the_best() -> None:
    rng = np.random.default_rng(0)
    population, values = np.zeros((5, NUM_KEYS)), np.full(5, np.inf)
    offered = rng.integers(10, 40, 200).astype(float)
    for value in [np.inf, np.nan, *offered]:
        keep_keys(population, values, np.full(NUM_KEYS, value), value)
    assert list(values) == sorted(set(offered))[:5]
    assert (population[:, 0] == values).all() and count_of(values) == 5


def test_breeding_never_loses_what_was_there() -> None:
    _, problem, scratch = setting(1)
    start, margin = drawn(problem, scratch, 1)[0], np.zeros(RANKS)
    assert start.keys is not None
    population, values = np.zeros((POPULATION, NUM_KEYS)), np.full(POPULATION, np.inf)
    population[0], values[0] = start.keys, start.step_ms
    breed(problem, start.state, population, values, 20, 60, margin, scratch, dice(1))
    assert values[0] <= start.step_ms
    for keys, value in zip(population[:3], values[:3]):
        assert judge_keys(problem, start.state, keys, margin, np.inf, scratch) == value


@pytest.mark.parametrize("seed", range(4))
def test_what_a_herd_comes_to_fits_and_is_as_fast_as_it_says(seed: int) -> None:
    costs, problem, scratch = setting(seed)
    herd = herd_of(problem, scratch, seed)
    before = herd.best_ms
    for walker in herd.walkers:
        herd.run(walker, 150, 5e-3)
    assert herd.best_ms <= before
    for result in herd.results():
        assert judge(problem, result.state, np.zeros(RANKS), np.inf, scratch) == pytest.approx(result.step_ms)
        timeline = simulate(plan_of(problem, costs, result.state, scratch), costs)
        # An order never takes longer than its schedule; shorter, where a rank waited for an op that then came later.
        assert 0.99 * result.step_ms <= timeline.step_ms <= result.step_ms + 1e-6 and timeline.fits


@pytest.mark.parametrize("seed", range(4))
def test_changes_keep_every_layer_on_one_rank_and_stages_in_order(seed: int) -> None:
    _, problem, scratch = setting(seed)
    state, rng = drawn(problem, scratch, seed)[0].state, dice(seed)
    hints = np.zeros((1, 6), np.int32)
    sizes = set()
    for _ in range(3000):
        change(problem, state, rng, True, 0, hints)
        n = int(state.size[0])
        sizes.add(n)
        assert state.bounds[0] == 0 and state.bounds[n] == 17 and (np.diff(state.bounds[: n + 1]) > 0).all()
        assert ((state.rank[:n] >= 0) & (state.rank[:n] < RANKS)).all()
    assert len(sizes) > 3, "stages are split and merged"


@pytest.mark.parametrize("seed", range(3))
def test_stages_sent_and_fetched_and_visits_exchanged_leave_every_rank_as_many_layers(seed: int) -> None:
    _, problem, scratch = setting(seed)
    state, rng = drawn(problem, scratch, seed)[0].state, dice(seed)

    def layers() -> list[int]:
        n = int(state.size[0])
        widths = np.diff(state.bounds[: n + 1])
        assert state.bounds[0] == 0 and state.bounds[n] == 17 and (widths > 0).all()
        return [int(widths[state.rank[:n] == r].sum()) for r in range(RANKS)]

    before, done = layers(), {"send": 0, "fetch": 0, "change": 0}
    for _ in range(2000):
        n = int(state.size[0])
        s, e = sorted((below(rng, n), below(rng, n)))
        width = int(state.bounds[s + 1] - state.bounds[s])
        if width > 1 and n < MAX_STAGES:
            done["send"] += bool(send(state, rng, s, width))
            assert layers() == before
        done["fetch"] += bool(fetch(state, rng))
        assert layers() == before
        s, e = sorted((below(rng, int(state.size[0])), below(rng, int(state.size[0]))))
        if state.rank[s] != state.rank[e]:
            change_places(state, s, e)
            done["change"] += 1
        assert layers() == before
    assert min(done.values()) > 50, done


def test_a_score_counts_a_rank_that_is_nearly_full_against_a_walker() -> None:
    pace = np.full(LAPS, 4 * 95.0)
    roomy, tight = rate(100.0, pace, 4, 85.0, 80.0), rate(100.0, pace, 4, 99.0, 80.0)
    assert roomy < 100.0, "the ranks' mean finish counts"
    assert tight == pytest.approx(roomy + 99.0 - 96.0)
    assert rate(np.inf, np.full(LAPS, np.inf), 4, 85.0, 80.0) == np.inf
    assert rate(100.0, np.full(LAPS, np.inf), 4, 85.0, 80.0) == pytest.approx(100.0), "too few ops for laps"


def test_a_walkers_score_and_pace_are_those_of_its_schedule() -> None:
    _, problem, scratch = setting(2)
    herd = herd_of(problem, scratch, 2)
    for walker in herd.walkers:
        herd.run(walker, 100, 5e-3)
        score, pace = walker.score, walker.pace.copy()
        assert herd._judge(walker)
        assert walker.score == pytest.approx(score) and walker.pace == pytest.approx(pace)


def test_thinning_keeps_the_number_and_favours_those_ahead() -> None:
    _, problem, scratch = setting(0)
    herd = herd_of(problem, scratch, 0)
    start = Start(100.0, "x", herd.walkers[0].state)
    herd.walkers = [Walker(problem, MAX_STAGES, start) for _ in range(6)]
    for walker, value in zip(herd.walkers, (100.0, 100.1, 140.0, 150.0, 160.0, 170.0)):
        walker.score = value
    herd.thin(1e-3, np.random.default_rng(0))
    assert len(herd.walkers) == 6 and {w.score for w in herd.walkers} == {100.0, 100.1}
    assert len({id(w.state) for w in herd.walkers}) == 6, "copies do not share what they walk on"


def test_others_walkers_take_the_places_of_those_behind() -> None:
    _, problem, scratch = setting(0)
    herd = herd_of(problem, scratch, 0)
    size, other = len(herd.walkers), Walker(problem, MAX_STAGES, Start(1.0, "x", herd.walkers[0].state))
    other.score = 1.0
    herd.admit([other])
    assert len(herd.walkers) == size and herd.walkers[0].score == 1.0 and herd.walkers[0] is not other


def test_more_reserved_memory_drops_what_does_not_fit() -> None:
    _, problem, scratch = setting(0)
    herd = herd_of(problem, scratch, 0)
    herd.margin += 1e9
    herd.rejudge()
    assert not herd.walkers and herd.best is None


def test_a_visit_in_parts_is_that_many_stages_on_its_rank() -> None:
    shape = Shape((0, 1, 2, 0), (1, 3, 1, 2), "loop", 0.5, 0.0)
    assert shape.ranks == (0, 1, 1, 1, 2, 0, 0)
    sizes, whole = shape.sizes(3), shape._replace(parts=(1, 1, 1, 1)).sizes(3)
    assert sizes[1:4].sum() == pytest.approx(whole[1]) and len(sizes) == 7


@pytest.mark.parametrize("seed", range(5))
def test_shapes_never_have_more_stages_than_allowed(seed: int) -> None:
    _, problem, _ = setting(0)
    lot = np.random.default_rng(seed)
    shape = draw_shape(problem, MAX_STAGES, 6, "loop", lot)
    for _ in range(300):
        shape = near_shape(problem, MAX_STAGES, divide(shape, MAX_STAGES, lot), lot)
        assert len(shape.way) == len(shape.parts) and min(shape.parts) >= 1
        assert len(shape.ranks) == len(shape.sizes(RANKS)) <= MAX_STAGES
        assert set(shape.ranks) == set(range(RANKS))

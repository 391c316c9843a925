"""Drawn starts: ways round the ranks, sizes, and what lanes learn from each other."""

from __future__ import annotations

import numpy as np
import pytest

from octopipe.costs.table import CostTable
from octopipe.search.tuner.core.problem import (
    BOUNDS,
    RANK,
    REDO,
    SIZE,
    make_problem,
    make_rng,
    make_structure,
    work_bound,
)  # fmt: skip
from octopipe.search.tuner.population import Judge
from octopipe.search.tuner.settings import SETTINGS
from octopipe.search.tuner.starts import Shape, Starts, divide, draw_shape, go_round, near_shape


@pytest.mark.parametrize("kind", sorted(set(SETTINGS.kinds)))
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_way_round_uses_every_rank(kind: str, ranks: int) -> None:
    lot = np.random.default_rng(ranks)
    for stages in range(1, 6 * ranks):
        way = go_round(ranks, stages, kind, lot)
        assert len(way) == stages
        assert set(way) <= set(range(ranks))
        assert len(set(way)) == min(ranks, stages)


def test_turns_go_the_last_round_back() -> None:
    lot = np.random.default_rng(0)
    assert go_round(4, 12, "turn", lot) == (0, 1, 2, 3, 0, 1, 2, 3, 3, 2, 1, 0)
    assert go_round(4, 10, "turn", lot) == (0, 1, 2, 3, 0, 1, 2, 3, 3, 2)
    assert go_round(4, 10, "loop", lot) == (0, 1, 2, 3, 0, 1, 2, 3, 0, 1)


def test_sizes_grow_from_the_first_stage_and_shrink_to_the_last() -> None:
    sizes = Shape(tuple(s % 4 for s in range(14)), (1,) * 14, "loop", 0.85, 0.5).sizes(4)
    assert sizes[0] == pytest.approx(0.15) and sizes[-1] == pytest.approx(0.5)
    assert (np.diff(sizes[:5]) > 0).all() and (sizes[4:10] == 1.0).all() and (np.diff(sizes[10:]) < 0).all()
    # Both ends of a short way take from the same stages, yet none is asked to be nothing.
    assert (Shape((0, 1, 2, 3), (1,) * 4, "loop", 0.9, 0.9).sizes(4) > 0).all()


def test_a_shape_like_another_still_uses_all_its_ranks() -> None:
    problem = make_problem(CostTable.uniform(num_layers=20), 4, 4)
    lot = np.random.default_rng(1)
    shape = Shape(go_round(4, 9, "skip", lot), (1,) * 9, "skip", 0.6, 0.0)
    lengths = set()
    for _ in range(300):
        shape = near_shape(problem, 16, shape, lot)
        lengths.add(len(shape.ranks))
        assert set(shape.ranks) == {0, 1, 2, 3}
        assert 4 <= len(shape.ranks) <= 16
        assert 0.0 <= shape.small_first <= 0.9 and 0.0 <= shape.small_last <= 0.9
    assert len(lengths) > 5


def drawing(seed: int) -> Starts:
    costs = CostTable.uniform(num_layers=18, p2p_ms=0.1)
    costs = costs.replace(activation_bytes=np.full(18, 1.0), stash_bytes=np.full(18, 0.6), rank_memory_bytes=(18.0,))
    return Starts(Judge(make_problem(costs, 3, 6), 18, make_rng(seed)), (seed,))


def test_draws_are_reproducible_and_worth_what_they_say() -> None:
    one, two = drawing(5), drawing(5)
    for _ in range(60):
        one.draw(False)
        two.draw(False)
    assert [s.step_ms for s in one.kept] == [s.step_ms for s in two.kept]
    assert one.kept and one.kept[0].step_ms == min(s.step_ms for s in one.kept)
    for start in one.kept:
        assert one.judge.step_ms(start) == pytest.approx(start.step_ms)


def test_a_lane_learns_from_another() -> None:
    one, two = drawing(1), drawing(2)
    for _ in range(40):
        one.draw(False)
        two.draw(False)
    best = min(one.shapes[0][0], two.shapes[0][0])
    one.learn(two)
    assert one.shapes[0][0] == best
    count = len(one.shapes)
    one.learn(two)
    assert len(one.shapes) == count  # the same twice is nothing new


def test_a_visit_in_parts_is_that_many_stages_on_its_rank() -> None:
    shape = Shape((0, 1, 2, 0), (1, 3, 1, 2), "loop", 0.5, 0.0)
    assert shape.ranks == (0, 1, 1, 1, 2, 0, 0)
    sizes, whole = shape.sizes(3), shape._replace(stages_in_visit=(1, 1, 1, 1)).sizes(3)
    assert sizes[1:4].sum() == pytest.approx(whole[1]) and len(sizes) == 7


@pytest.mark.parametrize("seed", range(5))
def test_shapes_never_have_more_stages_than_allowed(seed: int) -> None:
    problem = make_problem(CostTable.uniform(num_layers=17), 4, 6)
    lot = np.random.default_rng(seed)
    shape = draw_shape(problem, 12, 6, "loop", lot)
    for _ in range(300):
        shape = near_shape(problem, 12, divide(shape, 12, lot), lot)
        assert len(shape.way) == len(shape.stages_in_visit) and min(shape.stages_in_visit) >= 1
        assert len(shape.ranks) == len(shape.sizes(4)) <= 12
        assert set(shape.ranks) == set(range(4))


def test_the_work_bound_recomputes_no_stage_with_a_layer_that_must_not_be() -> None:
    costs = CostTable.uniform(num_layers=8).replace(repeatable=(True,) * 2 + (False,) + (True,) * 5)
    problem = make_problem(costs, 2, 4)
    structure = make_structure(problem, 8)
    structure[SIZE, 0] = 4
    structure[BOUNDS, :5], structure[RANK, :4] = (0, 2, 4, 6, 8), (0, 1, 0, 1)
    judge = Judge(problem, 8, make_rng(0))
    plain = work_bound(problem, structure, judge.scratch)
    structure[REDO, 1] = 1  # the stage with the layer that did something else in its second run
    assert work_bound(problem, structure, judge.scratch) == plain
    structure[REDO, 0] = 1
    assert work_bound(problem, structure, judge.scratch) > plain

"""Drawn starts: ways round the ranks, sizes, and what lotteries learn from each other."""

from __future__ import annotations

import numpy as np
import pytest

from octopipe.cost import CostTable
from octopipe.tuner.anneal import judge
from octopipe.tuner.kernels import make_problem, make_scratch
from octopipe.tuner.lottery import KINDS, Lottery, Shape, go_round, near_shape


@pytest.mark.parametrize("kind", sorted(set(KINDS)))
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


def lottery(seed: int) -> Lottery:
    costs = CostTable.uniform(num_layers=18, p2p_ms=0.1)
    costs = costs.replace(activation_bytes=np.full(18, 1.0), stash_bytes=np.full(18, 0.6), rank_memory_bytes=(18.0,))
    problem = make_problem(costs, 3, 6)
    return Lottery(problem, 18, make_scratch(problem, 18), np.zeros(3), (seed,))


def test_draws_are_reproducible_and_worth_what_they_say() -> None:
    one, two = lottery(5), lottery(5)
    for _ in range(60):
        one.draw(False)
        two.draw(False)
    assert [s.step_ms for s in one.starts] == [s.step_ms for s in two.starts]
    assert one.starts and one.starts[0].step_ms == min(s.step_ms for s in one.starts)
    for start in one.starts:
        assert judge(one.problem, start.state, one.margin, np.inf, one.scratch) == pytest.approx(start.step_ms)


def test_a_lottery_learns_from_another() -> None:
    one, two = lottery(1), lottery(2)
    for _ in range(40):
        one.draw(False)
        two.draw(False)
    best = min(one.liked[0][0], two.liked[0][0])
    one.learn(list(two.liked), dict(two.keys))
    assert one.liked[0][0] == best
    count = len(one.liked)
    one.learn(list(two.liked), dict(two.keys))
    assert len(one.liked) == count  # the same twice is nothing new

"""Two sequences of segments on two lanes: the walk is the best of all lane orders, and its pieces fit its time."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.costs.segments import Segments, alone_ms, together_ms
from octopipe.plans.two_lanes import Sequence, interleave, pair_table, sequence, trace, with_filler


def fluid(jobs: list[list[tuple[int, float]]], orders: list[list[tuple[int, int]]], slow: tuple[float, float]) -> float:
    """Time when each lane runs its segments in the given order, each as soon as its job and its lane are free."""
    at, head, left, now = [0, 0], [0, 0], {}, 0.0
    while any(at[k] < len(jobs[k]) for k in (0, 1)):
        running = {}
        for lane in (0, 1):
            if head[lane] < len(orders[lane]):
                job, number = orders[lane][head[lane]]
                if at[job] == number:
                    running[lane] = (job, number)
        if not running:
            return np.inf  # the two lane orders wait for each other
        for job, number in running.values():
            left.setdefault((job, number), jobs[job][number][1])
        rate = {lane: 1.0 / (1.0 + slow[lane]) if len(running) == 2 else 1.0 for lane in running}
        step = min(left[running[lane]] / rate[lane] for lane in running)
        now += step
        for lane, segment in running.items():
            left[segment] -= step * rate[lane]
            if left[segment] <= 1e-12:
                head[lane] += 1
                at[segment[0]] += 1
    return now


def best_of_all_orders(first: Sequence, second: Sequence, slow: tuple[float, float]) -> float:
    jobs = [[((s.lane + k) % 2, float(ms)) for k, ms in enumerate(s.ms)] for s in (first, second)]
    merges = []
    for lane in (0, 1):
        mine = [[(job, k) for k, (on, _) in enumerate(jobs[job]) if on == lane] for job in (0, 1)]
        places = itertools.combinations(range(len(mine[0]) + len(mine[1])), len(mine[0]))
        merged = []
        for taken in places:
            rest = [iter(mine[0]), iter(mine[1])]
            merged.append([next(rest[0 if k in taken else 1]) for k in range(len(mine[0]) + len(mine[1]))])
        merges.append(merged)
    return min(fluid(jobs, [a, b], slow) for a in merges[0] for b in merges[1])


def drawn(rng: random.Random, most: int) -> Sequence:
    return Sequence(
        rng.randrange(2), np.array([rng.choice((1.0, 2.0, rng.random() * 4)) for _ in range(rng.randint(0, most))])
    )


@pytest.mark.parametrize("slow", [(0.0, 0.0), (0.3, 0.0), (0.2, 0.5)])
def test_no_order_of_the_lanes_is_shorter(slow: tuple[float, float]) -> None:
    rng = random.Random(1)
    for _ in range(150):
        first, second = drawn(rng, 5), drawn(rng, 5)
        walk = interleave(first, second, *slow)
        brute = best_of_all_orders(first, second, slow)
        # With slowing a walk may also leave a lane idle for once, which no lane order says.
        assert walk.ms <= brute + 1e-9
        if slow == (0.0, 0.0):
            assert walk.ms == pytest.approx(brute)
        work = [
            sum(float(ms) for s in (first, second) for k, ms in enumerate(s.ms) if (s.lane + k) % 2 == n)
            for n in (0, 1)
        ]
        assert walk.ms >= max(*work, float(first.ms.sum()), float(second.ms.sum())) - 1e-9


def test_traced_pieces_are_the_walk() -> None:
    rng = random.Random(2)
    for _ in range(100):
        first, second = drawn(rng, 7), drawn(rng, 7)
        slow = rng.choice(((0.0, 0.0), (0.25, 0.1)))
        walk = interleave(first, second, *slow)
        pieces = trace(first, second, walk.steps, *slow)
        assert len(pieces) == first.ms.size + second.ms.size
        assert max((p[3] for p in pieces), default=0.0) == pytest.approx(walk.ms)
        for lane in (0, 1):  # one segment at a time on a lane
            spans = sorted((a, b) for _, on, a, b in pieces if on == lane)
            assert all(b <= c + 1e-9 for (_, b), (c, _) in itertools.pairwise(spans))
        computing = sorted((a, b) for _, on, a, b in pieces if on == 0)
        covered = sum(max(0.0, min(b, d) - max(a, c)) for _, on, a, b in pieces if on == 1 for c, d in computing)
        exchanging = sum(b - a for _, on, a, b in pieces if on == 1)
        assert exchanging - covered == pytest.approx(walk.exposed_ms, abs=1e-9)


def test_compiled_and_plain_tables_are_equal() -> None:
    rng = random.Random(3)
    for _ in range(20):
        first, second = drawn(rng, 6), drawn(rng, 6)
        a = pair_table(first.lane, first.ms, second.lane, second.ms, 0.2, 0.1)
        b = pair_table.python(first.lane, first.ms, second.lane, second.ms, 0.2, 0.1)
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y)


def test_weight_gradients_fill_what_is_exposed() -> None:
    first = sequence([("compute", 1.0), ("exchange", 4.0), ("compute", 1.0)])
    walk = interleave(first, sequence([]))
    assert (walk.ms, walk.exposed_ms) == (6.0, 4.0)
    assert with_filler(walk, 3.0) == 6.0  # fits
    assert with_filler(walk, 5.0) == 7.0  # one ms is left over
    assert with_filler(walk, 3.0, 1.0) == pytest.approx(7.0)  # 4 ms of exchange carry 2 ms of slowed compute


def test_what_runs_together_never_takes_longer_than_one_by_one() -> None:
    assert together_ms(2.0, 3.0) == 3.0
    assert together_ms(2.0, 3.0, 0.5) == 3.0
    assert together_ms(2.0, 3.0, 1.0) == pytest.approx(3.5)
    assert together_ms(2.0, 3.0, 50.0, 50.0) == 5.0


def test_shared_experts_run_beside_their_exchange_when_alone() -> None:
    parts = [("compute", 2.0), ("exchange", 3.0), ("beside", 1.0), ("compute", 1.0), ("exchange", 2.0)]
    assert alone_ms(parts) == 8.0
    segments = Segments.from_ms([parts], [parts])
    assert sum(share for _, share in segments.forward[0]) == pytest.approx(9.0 / 8.0)
    assert segments.share("F", "exchange")[0] == pytest.approx(5.0 / 8.0)
    assert segments.share("I", "compute")[0] == pytest.approx(4.0 / 8.0)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ((("network", 1.0),), "not a segment"),
        ((("compute", -1.0),), "not an amount"),
        ((("compute", 0.5), ("beside", 0.5)), "directly after"),
        ((("compute", 0.5),), "must take 1"),
        (5, "give at most"),
    ],
)
def test_wrong_segments_are_told(row: object, words: str) -> None:
    with pytest.raises(OctoPipeError, match=words):
        Segments(forward=(row,), input=((),))  # type: ignore[arg-type]

"""DynaPipe: pipelines for micro-batches of different lengths.

Jiang et al., "DynaPipe: Optimizing Multi-task Training through Dynamic Pipelines", EuroSys 2024. Rule:
- micro-batching (`micro_batch_samples`): samples in order of length, f(n) = min_i f(i) + t(i, n) with
  t <= t_max and within memory; the t_max that minimises (S-1) t_max + f(N) wins;
- cyclic order: every rank keeps a queue per stage and direction; a cycle takes the head of each, alternates
  B, F, B, F by (micro-batch, stage), and hands its results to the next cycle. A micro-batch that has not
  started waits where its activations would not fit, or where `max_in_flight` are under way;
- outside: micro-batches are grouped by time with k-means (3 groups, 4 for at most 20 micro-batches), every
  order of the groups and the original order are tried, the fastest that fits wins. B and W are not split.

Micro-batches keep their numbers; only the order in which the ranks take them changes. On costs whose
micro-batches are all equal, there is one group and one order.
Simplified: samples have one length (an encoder-decoder's two would need the paper's tour, which on one length
is sorting); one stage per rank. The injection rule counts activations on the first rank only. If the simulated
memory then exceeds the limit, it counts every rank's future share as well, and then with less and less memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from octopipe.base.errors import DoesNotFitError, OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import B, F, Op, Plan
from octopipe.plans.price import stage_memory, stage_times, static_bytes
from octopipe.search.systems.registry import Setting, system
from octopipe.search.systems.shapes import even_sizes, loop, make_plan, stages_from_sizes
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline

Floats = NDArray[np.float64]
TIGHTENINGS = 4
MOST_BOUNDS = 256
"""Largest number of values of t_max that the micro-batching tries; if there are more, evenly spaced ones."""


@system(
    name="dynapipe",
    title="DynaPipe",
    paper="Jiang et al., EuroSys 2024",
    year=2024,
    tunes=("scheduling",),
)
def dynapipe(setting: Setting) -> Plan:
    """Option `max_in_flight`: the largest number of micro-batches in flight (default: as many as fit)."""
    p, m, costs = setting.num_ranks, setting.num_micro_batches, setting.costs
    most = setting.option("max_in_flight", None)
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise OctoPipeError(f"dynapipe: max_in_flight is {most}; give a whole number >= 1")
    policy = _Cyclic.of(costs, p, m, most or m)
    times = policy.work_ms
    best: tuple[tuple[bool, float], Plan] | None = None
    for sequence in sequences(times):
        plan, timeline = policy.fitted(sequence)
        score = (not timeline.fits, timeline.step_ms)
        if best is None or score < best[0]:
            best = score, plan
    assert best is not None
    return best[1]


def sequences(times_ms: Floats) -> list[list[int]]:
    """Return the orders of the micro-batches to try: the given one, and every order of the groups."""
    m = times_ms.size
    groups = cluster(times_ms, 4 if m <= 20 else 3)
    tried = {tuple(range(m)): None}
    for order in permutations(groups):
        tried[tuple(k for group in order for k in group)] = None
    return [list(order) for order in tried]


def cluster(values: Floats, count: int) -> list[list[int]]:
    """Group indices by similar values into at most `count` groups, by Lloyd's k-means from evenly spaced quantiles."""
    distinct = np.unique(values)
    count = min(count, distinct.size)
    centres = distinct[np.linspace(0, distinct.size - 1, count).round().astype(int)].astype(float)
    nearest = np.zeros(values.size, int)
    for _ in range(100):
        nearest = np.abs(values[:, None] - centres).argmin(axis=1)
        groups = [values[nearest == c] for c in range(count)]
        moved = np.array([group.mean() if group.size else centres[c] for c, group in enumerate(groups)])
        if np.allclose(moved, centres, rtol=1e-12, atol=0.0):
            break
        centres = moved
    return [np.flatnonzero(nearest == c).tolist() for c in range(count) if np.any(nearest == c)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Cyclic:
    """The cyclic scheduler for one model: costs, limits, and how memory is counted when micro-batches are injected."""

    costs: CostTable
    empty: Plan
    """A plan with the stages, whose orders are placeholders."""
    activation: Floats
    """Bytes [stage, micro_batch]."""
    work_ms: Floats
    """F + B of every micro-batch over all stages."""
    room: Floats
    """Bytes per rank beyond its weights."""
    most: int

    @classmethod
    def of(cls, costs: CostTable, p: int, m: int, most: int) -> _Cyclic:
        stages = stages_from_sizes(even_sizes(costs, p), loop(p, p))
        orders = [[Op(s, kind, k) for kind in "FB" for k in range(m)] for s in range(p)]
        empty = make_plan(costs, p, m, stages, orders)
        times = stage_times(empty, costs)
        capacity = np.array([costs.capacity_bytes(r) for r in range(p)])
        return cls(
            costs=costs,
            empty=empty,
            activation=stage_memory(empty, costs).activation,
            work_ms=(times[F] + times[B]).sum(axis=0),
            room=capacity - static_bytes(empty, costs),
            most=most,
        )

    def fitted(self, sequence: Sequence[int]) -> tuple[Plan, Timeline]:
        """Return the plan of this sequence and its timeline. If it does not fit, memory is counted more strictly, up to
        `TIGHTENINGS` times; the last plan is returned even if it does not fit."""
        plan, timeline = self._plan(sequence, self.room, reserve=False)
        if timeline.fits:
            return plan, timeline
        room = self.room.copy()
        for _ in range(TIGHTENINGS):
            plan, timeline = self._plan(sequence, room, reserve=True)
            excess = np.maximum(timeline.peak_bytes - np.array(timeline.capacity_bytes), 0.0)
            if timeline.fits:
                break
            room -= excess
        return plan, timeline

    def _plan(self, sequence: Sequence[int], room: Floats, *, reserve: bool) -> tuple[Plan, Timeline]:
        orders = cyclic_orders(sequence, self.activation, room, self.most, reserve=reserve)
        empty = self.empty
        plan = make_plan(self.costs, empty.num_ranks, empty.num_micro_batches, empty.stages, orders)
        return plan, simulate(plan, self.costs, check=False)


def cyclic_orders(
    sequence: Sequence[int], activation: Floats, room: Floats, most: int, *, reserve: bool = False
) -> list[list[Op]]:
    """Build the orders cycle by cycle. `activation` is [stage, micro_batch], `room` is bytes per rank.

    `reserve` counts a micro-batch on all ranks from its start, so that no rank can exceed its memory later; otherwise
    only the memory of the first rank counts. A single micro-batch always starts.
    """
    p = activation.shape[0]
    forwards: list[deque[int]] = [deque() for _ in range(p)]
    backwards: list[deque[int]] = [deque() for _ in range(p)]
    forwards[0].extend(sequence)
    place = {k: i for i, k in enumerate(sequence)}
    held = np.zeros(p)
    in_flight = 0
    orders: list[list[Op]] = [[] for _ in range(p)]
    left = 2 * p * len(sequence)

    counted = slice(None) if reserve else slice(0, 1)

    def may_start(k: int) -> bool:
        if in_flight == 0:
            return True
        return in_flight < most and bool(np.all(held[counted] + activation[counted, k] <= room[counted]))

    while left:
        results: list[tuple[deque[int], int]] = []
        for rank in range(p):
            # B before F: the backward frees memory that the forward may need.
            if backwards[rank]:
                k = backwards[rank].popleft()
                orders[rank].append(Op(rank, "B", k))
                held[rank] -= activation[rank, k]
                in_flight -= rank == 0
                if rank > 0:
                    results.append((backwards[rank - 1], k))
                left -= 1
            if forwards[rank] and (rank > 0 or may_start(forwards[0][0])):
                k = forwards[rank].popleft()
                orders[rank].append(Op(rank, "F", k))
                if rank == 0:
                    in_flight += 1
                    held[counted] += activation[counted, k]
                elif not reserve:
                    held[rank] += activation[rank, k]
                results.append((forwards[rank + 1], k) if rank + 1 < p else (backwards[rank], k))
                left -= 1
        for queue, k in sorted(results, key=lambda result: place[result[1]]):
            queue.append(k)
    return orders


def micro_batch_samples(
    lengths: Sequence[int],
    num_stages: int,
    time_ms: Callable[[int, int], float],
    *,
    fits: Callable[[int, int], bool] = lambda count, length: True,
) -> list[list[int]]:
    """Group samples into micro-batches so that (S-1) t_max + the sum of their times is smallest.

    `time_ms(count, length)` is the time of one stage on `count` samples padded to `length`; `fits` the same
    for memory. Returns sample numbers, shortest samples first.

    >>> micro_batch_samples([9, 1, 8, 2], 2, lambda count, length: 0.5 + count * length)
    [[1], [3], [2], [0]]
    >>> micro_batch_samples([9, 1, 8, 2], 2, lambda count, length: 9.0 + count * length)
    [[1, 3], [2], [0]]
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    n = len(order)
    cost = np.full((n, n + 1), np.inf)
    for i in range(n):
        for stop in range(i + 1, n + 1):
            longest = lengths[order[stop - 1]]
            if fits(stop - i, longest):
                cost[i, stop] = time_ms(stop - i, longest)
    for i, row in enumerate(cost):
        if not np.isfinite(row[i + 1]):
            raise DoesNotFitError(
                f"a sample of {lengths[order[i]]} tokens does not fit on its own; cut it or give more memory"
            )
    best, cuts = np.inf, [0, n]
    for bound in _bounds(cost):
        if (num_stages - 1) * bound >= best:
            break  # bounds grow, and the sum of times alone is positive
        total, found = _shortest(np.where(cost <= bound, cost, np.inf))
        if (num_stages - 1) * bound + total < best * (1 - 1e-12):
            best, cuts = (num_stages - 1) * bound + total, found
    return [order[a:b] for a, b in pairwise(cuts)]


def _bounds(cost: Floats) -> Iterable[float]:
    """Return the values of t_max to try: all times that can be the largest one, or a selection of them."""
    least = np.zeros(cost.shape[0] + 1)  # the smallest t_max with which samples 0..n-1 can be grouped
    for stop in range(1, least.size):
        least[stop] = np.maximum(least[:stop], cost[:stop, stop]).min()
    values = np.unique(cost[np.isfinite(cost) & (cost >= least[-1])])
    if values.size > MOST_BOUNDS:
        values = values[np.linspace(0, values.size - 1, MOST_BOUNDS).round().astype(int)]
    return values.tolist()


def _shortest(cost: Floats) -> tuple[float, list[int]]:
    """Return the cost of the cheapest path from 0 to n over the arcs cost[i, j], and its nodes."""
    n = cost.shape[0]
    least, came = np.full(n + 1, np.inf), np.zeros(n + 1, int)
    least[0] = 0.0
    for stop in range(1, n + 1):
        totals = least[:stop] + cost[:stop, stop]
        came[stop] = int(totals.argmin())
        least[stop] = totals[came[stop]]
    cuts = [n]
    while cuts[-1] > 0:
        cuts.append(int(came[cuts[-1]]))
    return float(least[n]), cuts[::-1]

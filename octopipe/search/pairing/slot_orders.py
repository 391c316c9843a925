"""Orders with pairs as rows of slots: how long they take, and how much of the exchange they leave exposed.

Knows: any plan whose paths are chains, with one route or several; the time of a slot (one op, or two that run
together). Does not know: how orders are changed (`polish`, `partners`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octopipe.base.compile import njit
from octopipe.costs.table import CostTable
from octopipe.plans.pair_price import PairPrices
from octopipe.plans.plan import CODES, Op, Plan, route_neighbours
from octopipe.plans.price import hop_times
from octopipe.simulation.lanes import exposed_ms
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline
from octopipe.simulation.timing import NEVER, begin_paths, note_run, pass_on, start_of

Slot = tuple[Op, ...]
EXPOSED_WEIGHT = 2e-3
"""Weight of the ranks' mean exposed exchange, relative to the makespan. It decides between orders that take about as
long: an exchange that is hidden may take longer than predicted without lengthening the step."""


class Row(NamedTuple):
    """One rank's slots as arrays."""

    table: NDArray[np.int64]
    """[slot, 6]: stage, kind and micro-batch of the first op, and of the second (stage -1: none)."""
    took_ms: NDArray[np.float64]
    exposed_ms: float


@njit
def slots_ms(  # type: ignore[no-untyped-def]
    offsets, slots, duration, before, after, route, stage_rank, forward_ms, gradient_ms
):
    """The makespan of orders of slots under directed channels; -1 if they wait for each other.

    A slot is a row of six numbers: stage, kind and micro-batch of its first op, and of its second op (stage -1: none).
    """
    ranks = offsets.size - 1
    arrived = np.empty((2, stage_rank.size, route.size))
    begin_paths(arrived, before, route)
    channel = np.zeros((ranks, ranks))
    clock = np.zeros(ranks)
    head = offsets[:-1].copy()
    left = duration.size
    while left > 0:
        moved = False
        for r in range(ranks):
            now = clock[r]
            at = head[r]
            while at < offsets[r + 1]:
                start = now
                for part in range(2):
                    s, k, m = slots[at, 3 * part], slots[at, 3 * part + 1], slots[at, 3 * part + 2]
                    if s >= 0 and start >= 0.0:
                        begins = start_of(arrived, k, s, m, now)
                        start = NEVER if begins == NEVER else max(start, begins)
                if start == NEVER:
                    return -1.0
                if start == np.inf:
                    break
                now = start + duration[at]
                for part in range(2):
                    s, k, m = slots[at, 3 * part], slots[at, 3 * part + 1], slots[at, 3 * part + 2]
                    if s >= 0:
                        note_run(arrived, k, s, m, False)
                        pass_on(
                            arrived, k, s, m, before, after, route, stage_rank, channel, now, forward_ms, gradient_ms
                        )
                at += 1
                moved = True
            left -= at - head[r]
            head[r] = at
            clock[r] = now
        if not moved:
            return -1.0
    return clock.max()


class SlotOrders:
    """The costs of a plan's slots, and the timing of other orders of these slots."""

    def __init__(self, plan: Plan, costs: CostTable):
        self.plan, self.costs = plan, costs
        self.prices = PairPrices(plan, costs)
        before, after = route_neighbours(plan)
        ranks = np.array([s.rank for s in plan.stages], np.int64)
        self._fixed = before, after, np.asarray(plan.route_of_micro_batch, np.int64), ranks, *hop_times(plan, costs)
        self._known: dict[tuple[object, ...], tuple[float, float]] = {}
        self._rows: dict[Slot, tuple[tuple[int, ...], float, float]] = {}
        self.judged = 0
        """The number of orders timed so far."""

    def slot_ms(self, slot: Slot) -> tuple[float, float]:
        """The duration of a slot, and the exchange that it leaves exposed."""
        key = tuple(self.prices.kind_of(op) for op in slot)
        if key not in self._known:
            first = slot[0]
            took = self.prices.alone_ms(first) if len(slot) == 1 else self.prices.together(first, slot[1]).ms
            self._known[key] = took, exposed_ms(self.prices, *slot)
        return self._known[key]

    def row(self, slots: list[Slot]) -> Row:
        known = self._rows
        found = [known[slot] if slot in known else self._noted(slot) for slot in slots]
        table = np.array([entry[0] for entry in found], np.int64).reshape(-1, 6)
        return Row(table, np.array([entry[1] for entry in found]), sum(entry[2] for entry in found))

    def _noted(self, slot: Slot) -> tuple[tuple[int, ...], float, float]:
        """Compute a slot's entries in a row, and keep them for other orders that contain the slot."""
        numbers = [n for op in slot for n in (op.stage, CODES[op.kind], op.micro_batch)]
        entry = self._rows[slot] = (*numbers, -1, -1, -1)[:6], *self.slot_ms(slot)
        return entry

    def makespan_ms(self, rows: list[Row]) -> float:
        """The makespan of the orders of all ranks; -1 if they wait for each other."""
        self.judged += 1
        offsets = np.concatenate(([0], np.cumsum([row.took_ms.size for row in rows]))).astype(np.int64)
        slots, took = np.concatenate([row.table for row in rows]), np.concatenate([row.took_ms for row in rows])
        return float(slots_ms(offsets, slots, took, *self._fixed))

    def cost_ms(self, rows: list[Row]) -> float:
        """The makespan plus the weighted exposed exchange; -1 if the orders wait for each other."""
        ms = self.makespan_ms(rows)
        return ms if ms < 0 else ms + EXPOSED_WEIGHT * sum(row.exposed_ms for row in rows) / len(rows)

    def plan_of(self, ranks: list[list[Slot]]) -> tuple[Plan, Timeline] | None:
        """The plan with these orders, and its timeline; None if it breaks a rule."""
        orders = tuple(tuple(op for slot in slots for op in slot) for slots in ranks)
        pairs = frozenset((slot[0], slot[1]) for slots in ranks for slot in slots if len(slot) == 2)
        plan = replace(self.plan, orders=orders, pairs=pairs)
        return None if plan.problems() else (plan, simulate(plan, self.costs, check=False))


def better(one: tuple[Plan, Timeline], other: tuple[Plan, Timeline]) -> bool:
    """Whether the first of two plans is not slower, fits if the other does, and is faster or exposes less of the
    exchange."""
    (_, a), (_, b) = one, other
    if a.fits < b.fits or a.step_ms > b.step_ms:
        return False
    return a.step_ms < b.step_ms or _exposed(a) < _exposed(b)


def _exposed(timeline: Timeline) -> float:
    return timeline.exchange.total_ms - timeline.exchange.hidden_ms

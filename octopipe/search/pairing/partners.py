"""Partners for ops that run alone with an exposed exchange: a W of the same rank, or the F that follows an F.

Knows: orders of slots and their timing (`slot_orders`). Does not know: structures, or which plan this is the last step
for (`choose`).

List scheduling decides one slot after the other, so it runs some ops alone although their rank could have run a W
beside them. Here such ops are given a partner if the step then takes no longer and the plan still fits. Partners are
tried in portions; a portion that makes the step longer is halved. Nothing is drawn at random.

Partners are tried in this order: a W that runs after the op (which then frees its memory sooner), a W that runs before
it, and for an F before its rank's first backward pass, the next F.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan
from octopipe.search.pairing.slot_orders import Row, Slot, SlotOrders, better
from octopipe.simulation.timeline import Timeline

REACH = 12
"""How many slots away a partner may be."""
MOST_CHECKS = 1500
"""How many orders are timed at most, over all kinds of partners."""
LONGER = 1e-12
"""By what share a step may be longer and still count as equal."""


class Match(NamedTuple):
    """An op that runs alone, and its partner."""

    rank: int
    host: Op
    partner: Op


Finder = Callable[[list[Slot], "Hiding"], list[tuple[Op, Op]]]


def with_partners(
    made: tuple[Plan, Timeline], costs: CostTable, *, budget_s: float | None
) -> tuple[tuple[Plan, Timeline], int]:
    """The plan with partners for its exposed ops, if it is as fast and hides more; and how many orders were timed."""
    if made[0].forks or any(op.kind == "R" for order in made[0].orders for op in order):
        return made, 0
    hiding = Hiding(made, costs, math.inf if budget_s is None else time.monotonic() + budget_s)
    hiding.apply(_later_weights, _earlier_weights)
    hiding.apply(_next_forwards)
    return hiding.best, hiding.orders.judged


class Hiding:
    """A plan whose exposed ops get partners."""

    def __init__(self, made: tuple[Plan, Timeline], costs: CostTable, until: float):
        """`until`: the time of the monotonic clock after which no further partners are tried."""
        self.best, self._until = made, until
        self.orders = SlotOrders(made[0], costs)
        self.ranks: list[list[Slot]] = [list(made[0].slots(r)) for r in range(made[0].num_ranks)]
        self.rows: list[Row] = [self.orders.row(slots) for slots in self.ranks]
        self.now = self.orders.makespan_ms(self.rows)

    def apply(self, *finders: Finder) -> None:
        """Give ops the partners that the finders propose, one finder after the other, unless the step then takes longer
        or the plan does not fit."""
        before = [list(slots) for slots in self.ranks]
        for finder in finders:
            self._give(finder)
        self._fit(before)

    def _give(self, finder: Finder) -> None:
        matches = [Match(r, *match) for r, slots in enumerate(self.ranks) for match in finder(slots, self)]
        at, step = 0, max(1, len(matches))
        while at < len(matches) and self.orders.judged < MOST_CHECKS and time.monotonic() < self._until:
            portion = matches[at : at + step]
            if self._kept(portion):
                at += len(portion)
                step = min(2 * step, len(matches))
            elif len(portion) == 1:
                at += 1
            else:
                step = len(portion) // 2

    def _kept(self, matches: list[Match]) -> bool:
        """Give all these partners if the step then takes no longer; returns whether they were given."""
        ranks, rows = list(self.ranks), list(self.rows)
        for r in {match.rank for match in matches}:
            slots = _together(ranks[r], [(m.host, m.partner) for m in matches if m.rank == r])
            ranks[r], rows[r] = slots, self.orders.row(slots)
        ms = self.orders.makespan_ms(rows)
        if not 0 <= ms <= self.now * (1 + LONGER):
            return False
        self.ranks, self.rows, self.now = ranks, rows, ms
        return True

    def _fit(self, before: list[list[Slot]]) -> None:
        """Undo the last partners on ranks that exceed their memory because of them, and on all ranks if the plan is
        still no better than the best one."""
        for _ in range(2):
            made = self.orders.plan_of(self.ranks)
            if made is not None and better(made, self.best):
                self.best = made
                break
            over = [] if made is None else _over_full(made[1], self.best[1])
            for r, slots in enumerate(before):
                if not over or r in over:
                    self.ranks[r] = slots
            if not over:
                break
        else:
            self.ranks = before
        self.rows = [self.orders.row(slots) for slots in self.ranks]
        self.now = self.orders.makespan_ms(self.rows)

    def gains(self, host: Op, partner: Op) -> bool:
        """Whether two ops together expose less exchange than one after the other."""
        alone = self.orders.slot_ms((host,))[1] + self.orders.slot_ms((partner,))[1]
        return not self.orders.prices.together(host, partner).one_by_one and (
            self.orders.slot_ms((host, partner))[1] < alone
        )


def _over_full(timeline: Timeline, before: Timeline) -> list[int]:
    """The ranks that exceed their memory in the first timeline and did not in the second."""
    capacity = timeline.capacity_bytes
    return [
        r
        for r in range(timeline.num_ranks)
        if capacity and timeline.peak_bytes[r] > capacity[r] >= before.peak_bytes[r]
    ]


def _together(slots: list[Slot], matches: list[tuple[Op, Op]]) -> list[Slot]:
    """The slots of a rank after every partner has moved into the slot of its host."""
    partner_of = dict(matches)
    changed = {op for match in matches for op in match}
    out: list[Slot] = []
    for slot in slots:
        if len(slot) == 2 or slot[0] not in changed:
            out.append(slot)
        elif slot[0] in partner_of:
            out.append((slot[0], partner_of[slot[0]]))
    return out


def _exposed_hosts(slots: list[Slot], hiding: Hiding, kinds: str) -> list[int]:
    """Positions of single ops of these kinds whose exchange is exposed."""
    return [
        k
        for k, slot in enumerate(slots)
        if len(slot) == 1 and slot[0].kind in kinds and hiding.orders.slot_ms(slot)[1] > 0
    ]


def _later_weights(slots: list[Slot], hiding: Hiding) -> list[tuple[Op, Op]]:
    """For every op to be paired, the first W after it whose I runs before it."""
    return _weights(slots, hiding, range(1, REACH + 1))


def _earlier_weights(slots: list[Slot], hiding: Hiding) -> list[tuple[Op, Op]]:
    """For every op to be paired, the last W before it, which then runs later than it did."""
    return _weights(slots, hiding, range(-1, -REACH - 1, -1))


def _weights(slots: list[Slot], hiding: Hiding, reach: range) -> list[tuple[Op, Op]]:
    place = {op: k for k, slot in enumerate(slots) for op in slot}
    taken: set[Op] = set()
    out: list[tuple[Op, Op]] = []
    for k in _exposed_hosts(slots, hiding, "FI"):
        host = slots[k][0]
        for j in (k + step for step in reach):
            if not 0 <= j < len(slots) or len(slots[j]) != 1 or slots[j][0].kind != "W" or slots[j][0] in taken:
                continue
            weight = slots[j][0]
            if place.get(weight._replace(kind="I"), k) < k and hiding.gains(host, weight):
                taken.add(weight)
                out.append((host, weight))
                break
    return out


def _next_forwards(slots: list[Slot], hiding: Hiding) -> list[tuple[Op, Op]]:
    """Pairs of adjacent F before the rank's first backward pass, formed from the last of them backward. If one is left
    over, it is the first, because other ranks wait for its result."""
    first = next((k for k, slot in enumerate(slots) if any(op.kind in "IB" for op in slot)), len(slots))
    out: list[tuple[Op, Op]] = []
    k = first - 1
    while k > 0:
        host, partner = slots[k - 1], slots[k]
        both = len(host) == len(partner) == 1 and host[0].kind == partner[0].kind == "F"
        # Two stages of one micro-batch may depend on each other, so their F are not paired.
        if both and host[0].micro_batch != partner[0].micro_batch and hiding.gains(host[0], partner[0]):
            out.append((host[0], partner[0]))
            k -= 1
        k -= 1
    return out

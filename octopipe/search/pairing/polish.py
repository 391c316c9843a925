"""Local search on orders with pairs: moves a slot, splits a pair, pairs adjacent ops, splits off or merges a W.

Knows: any plan whose paths are chains and that does not recompute, with one route or several. Does not know:
structures; stages and ranks are not changed.

Every change is timed over all ranks. It is accepted if the step does not get longer, or gets only slightly longer early
in the search; of changes that leave the step as it is, those that expose more of the exchange count as longer. A plan
that exceeds memory is never returned.
"""

from __future__ import annotations

import math
import random
import time

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.search.pairing.slot_orders import Slot, SlotOrders, better
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline

HOT, HOT_SLOTS = 1e-3, 0.3
"""Temperature at the start, as a share of the step: HOT, or HOT_SLOTS divided by the number of slots if that is more.
It falls to zero."""
REACH = (1, 1, 1, 2, 2, 3, 5, 8)
CHECKED = 2e-3
"""By what share the lowest cost must have fallen before its plan is simulated again to check its memory."""
TOGETHER = (frozenset("FI"), frozenset("FB"), frozenset("FW"), frozenset("IW"), frozenset("BW"), frozenset("F"))


class Polisher:
    """A plan whose orders are improved by local search."""

    def __init__(self, plan: Plan, costs: CostTable, seed: int):
        self.plan, self.costs, self.dice = plan, costs, random.Random(seed)
        self.orders = SlotOrders(plan, costs)
        self.ranks: list[list[Slot]] = [list(plan.slots(r)) for r in range(plan.num_ranks)]
        self.rows = [self.orders.row(slots) for slots in self.ranks]
        self.skipped = 0
        """If moves are counted: the number of changes that were drawn but were not possible."""

    @property
    def judged(self) -> int:
        return self.orders.judged + self.skipped

    def run(self, *, budget_s: float | None, moves: int | None) -> tuple[Plan, Timeline]:
        """The best plan found that fits, within a time or a number of moves; at worst the plan as it was."""
        began = time.monotonic()
        best = self.plan, simulate(self.plan, self.costs)
        if any(op.kind == "R" for order in self.plan.orders for op in order):
            return best
        now = shown = lowest = self.orders.cost_ms(self.rows)
        ends = self.ranks, self.rows
        hot = max(HOT, HOT_SLOTS / max(1, sum(map(len, self.ranks))))
        while True:
            share = self.judged / moves if moves else (time.monotonic() - began) / (budget_s or 1e-9)
            if share >= 1:
                break
            r = self.dice.randrange(len(self.ranks))
            slots = self._changed(self.ranks[r])
            if slots is None:
                self.skipped += moves is not None
                continue
            rows = [*self.rows[:r], self.orders.row(slots), *self.rows[r + 1 :]]
            ms = self.orders.cost_ms(rows)
            heat = hot * (1 - share) ** 2 * lowest
            if ms < 0 or (ms > now and (heat <= 0 or self.dice.random() >= math.exp((now - ms) / heat))):
                continue
            self.ranks = [*self.ranks[:r], slots, *self.ranks[r + 1 :]]
            self.rows, now = rows, ms
            if ms < lowest:
                lowest, ends = ms, (self.ranks, self.rows)
                if lowest < shown * (1 - CHECKED):
                    shown = lowest
                    made = self._made(ends[0], best)
                    if made is best:  # mostly because of its memory: go on from the best plan
                        self.ranks = [list(best[0].slots(k)) for k in range(self.plan.num_ranks)]
                        self.rows = [self.orders.row(slots) for slots in self.ranks]
                        now = lowest = shown = self.orders.cost_ms(self.rows)
                    best = made
        return self._made(ends[0], best)

    def _made(self, ranks: list[list[Slot]], best: tuple[Plan, Timeline]) -> tuple[Plan, Timeline]:
        made = self.orders.plan_of(ranks)
        return made if made is not None and better(made, best) else best

    def _changed(self, slots: list[Slot]) -> list[Slot] | None:
        """The slots of the rank with one change, or None if the change that was drawn is not possible."""
        if len(slots) < 2:
            return None
        out = list(slots)
        k = self.dice.randrange(len(out))
        kind = self.dice.random()
        slot = out[k]
        if kind < 0.4:
            there = k + self.dice.choice(REACH) * self.dice.choice((-1, 1))
            if not 0 <= there < len(out):
                return None
            out.insert(there, out.pop(k))
        elif kind < 0.65 and len(slot) == 1:
            other = k + self.dice.choice((-2, -1, 1, 2))
            if not 0 <= other < len(out) or len(out[other]) > 1:
                return None
            pair = sorted((slot[0], out[other][0]), key=lambda op: "FIBW".index(op.kind))
            if frozenset(op.kind for op in pair) not in TOGETHER or pair[0][::2] == pair[1][::2]:
                return None
            out[min(k, other)] = (pair[0], pair[1])
            del out[max(k, other)]
        elif kind < 0.75 and len(slot) == 2:
            turned = slot if self.dice.random() < 0.5 else slot[::-1]
            out[k : k + 1] = [(turned[0],), (turned[1],)]
        elif kind < 0.85 and any(op.kind == "B" for op in slot):
            fused = next(op for op in slot if op.kind == "B")
            out[k] = tuple(op._replace(kind="I") if op is fused else op for op in slot)
            out.insert(min(len(out), k + 1 + self.dice.choice(REACH)), (fused._replace(kind="W"),))
        elif kind < 0.95 and any(op.kind == "I" for op in slot):
            half = next(op for op in slot if op.kind == "I")
            weight = half._replace(kind="W")
            place = next((j for j, other in enumerate(out) if weight in other), None)
            if place is None or place == k:
                return None
            rest = tuple(op for op in out[place] if op != weight)
            out[k] = tuple(op._replace(kind="B") if op is half else op for op in slot)
            out[place : place + 1] = [rest] if rest else []
        else:
            return None
        return out

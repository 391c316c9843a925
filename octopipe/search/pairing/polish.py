"""Local search on orders with pairs: moves a slot, splits a pair, pairs adjacent ops, splits off or merges a W.

Knows: any plan whose paths are chains and that does not recompute, with one route or several. Does not know:
structures; stages and ranks are not changed.

Every change is timed over all ranks. It is accepted if the step does not get longer, or gets only slightly longer early
in the search. A plan that exceeds memory is never returned.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import numpy as np

from octopipe.base.compile import njit
from octopipe.costs.table import CostTable
from octopipe.plans.pair_price import PairPrices
from octopipe.plans.plan import CODES, Op, Plan, route_neighbours
from octopipe.plans.price import hop_times
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline
from octopipe.simulation.timing import NEVER, begin_paths, note_run, pass_on, start_of

Slot = tuple[Op, ...]
HOT, HOT_SLOTS = 1e-3, 0.3
"""Temperature at the start, as a share of the step, and of a slot's part of it where slots are few; it falls to
nothing."""
REACH = (1, 1, 1, 2, 2, 3, 5, 8)
CHECKED = 2e-3
"""By what share the best must have improved before its memory is looked at again."""
TOGETHER = (frozenset("FI"), frozenset("FB"), frozenset("FW"), frozenset("IW"), frozenset("BW"), frozenset("F"))


@njit
def slots_ms(  # type: ignore[no-untyped-def]
    offsets, slots, duration, before, after, route, stage_rank, forward_ms, gradient_ms
):
    """Makespan of orders of slots under directed channels; -1 where they wait for each other.

    A slot is a row of six: stage, kind and micro-batch of its first op, and of its second (stage -1: none).
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


class Polisher:
    """A plan being polished."""

    def __init__(self, plan: Plan, costs: CostTable, seed: int):
        self.plan, self.costs, self.dice = plan, costs, random.Random(seed)
        self.prices = PairPrices(plan, costs)
        self.ranks: list[list[Slot]] = [list(plan.slots(r)) for r in range(plan.num_ranks)]
        self.rows = [self._row(slots) for slots in self.ranks]
        before, after = route_neighbours(plan)
        ranks = np.array([s.rank for s in plan.stages], np.int64)
        self.fixed = before, after, np.asarray(plan.route_of_micro_batch, np.int64), ranks, *hop_times(plan, costs)
        self.judged = 0

    def _row(self, slots: list[Slot]) -> tuple[np.ndarray, np.ndarray]:
        table = np.full((len(slots), 6), -1, np.int64)
        took = np.empty(len(slots))
        for k, slot in enumerate(slots):
            for part, op in enumerate(slot):
                table[k, 3 * part : 3 * part + 3] = op.stage, CODES[op.kind], op.micro_batch
            took[k] = self.prices.alone_ms(slot[0]) if len(slot) == 1 else self.prices.together(slot[0], slot[1]).ms
        return table, took

    def _ms(self, rows: list[tuple[np.ndarray, np.ndarray]]) -> float:
        self.judged += 1
        offsets = np.concatenate(([0], np.cumsum([row[1].size for row in rows]))).astype(np.int64)
        slots, took = np.concatenate([row[0] for row in rows]), np.concatenate([row[1] for row in rows])
        return float(slots_ms(offsets, slots, took, *self.fixed))

    def run(self, *, budget_s: float | None, moves: int | None) -> tuple[Plan, Timeline]:
        """The best plan found that fits, within a time or a number of moves; at worst the plan as it was."""
        began = time.monotonic()
        best = self.plan, simulate(self.plan, self.costs)
        if any(op.kind == "R" for order in self.plan.orders for op in order):
            return best
        now = shown = lowest = self._ms(self.rows)
        ends = self.ranks, self.rows
        hot = max(HOT, HOT_SLOTS / max(1, sum(map(len, self.ranks))))
        while True:
            share = self.judged / moves if moves else (time.monotonic() - began) / (budget_s or 1e-9)
            if share >= 1:
                break
            r = self.dice.randrange(len(self.ranks))
            slots = self._changed(self.ranks[r])
            if slots is None:
                self.judged += moves is not None
                continue
            rows = [*self.rows[:r], self._row(slots), *self.rows[r + 1 :]]
            ms = self._ms(rows)
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
                    if made is best:  # too much memory: go on from what fits
                        self.ranks = [list(best[0].slots(k)) for k in range(self.plan.num_ranks)]
                        self.rows = [self._row(slots) for slots in self.ranks]
                        now = lowest = shown = self._ms(self.rows)
                    best = made
        return self._made(ends[0], best)

    def _made(self, ranks: list[list[Slot]], best: tuple[Plan, Timeline]) -> tuple[Plan, Timeline]:
        orders = tuple(tuple(op for slot in slots for op in slot) for slots in ranks)
        pairs = frozenset((slot[0], slot[1]) for slots in ranks for slot in slots if len(slot) == 2)
        plan = replace(self.plan, orders=orders, pairs=pairs)
        if plan.problems():
            return best
        timeline = simulate(plan, self.costs, check=False)
        better = timeline.step_ms < best[1].step_ms and timeline.fits >= best[1].fits
        return (plan, timeline) if better else best

    def _changed(self, slots: list[Slot]) -> list[Slot] | None:
        """The rank's slots with one change, or None where the change drawn is not possible."""
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

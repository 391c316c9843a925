"""What published systems contribute to a search: their plans, structures to start from, and improved plans with copies.

Knows: which systems are worth building, and how long to improve plans that hold layers more than once. Does not know:
the lanes, or which plan is best.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from octopipe.costs.table import CostTable
from octopipe.base.errors import OctoPipeError
from octopipe.plans.plan import Plan
from octopipe.search.tuner.core.problem import CAPACITY, VARIANTS, Problem, make_rng
from octopipe.search.tuner.encode import arrays_of, plan_of, structure_of, writable
from octopipe.search.tuner.polish import Polisher
from octopipe.search.tuner.mechanics import (
    COPIES_AFTER, COPIES_CHUNK, COPIES_CLOSE, COPIES_OPS, COPIES_ROOM, COPIES_TRIAL, COPIES_UNTIL, SYSTEMS_SHARE,
    SYSTEMS_UNTIL,
)  # fmt: skip
from octopipe.search.tuner.settings import SETTINGS

SLOW = frozenset({"tessel", "optpipe", "pipe-offload"})
"""These systems are left out. Tessel and OptPipe run a solver for longer than a start is worth. PipeOffload's order is
the interleaved one, and the use of host memory is decided after the search (`search/offload.py`)."""
COPYING = ("chimera", "dualpipe")
"""These systems hold layers twice. They are built first, since improving their plans takes the time that is left."""
UNLIKE = ("interleaved", "1f1b", "adapipe", "zb-2p", "zb-v", "v-half", "hanayo")
"""These systems are built next, in case time is short: the plans of the others are similar to one of theirs."""
FIRST = (*COPYING, *UNLIKE, "interleaved-overlap", "mist")
"""The order decides which start a lane improves, so it is fixed here; the other systems follow in theirs."""


class Systems:
    """The thread that builds published systems while the lanes search."""

    def __init__(
        self, costs: CostTable, problem: Problem, max_stages: int, *, budget_s: float, seed: int, counted: int | None,
        start: Plan | None, allowed: Callable[[Plan], bool], consider: Callable[[Plan, str], None],
        share: Callable[[], float], seen_ms: Callable[[], float], stop: threading.Event,
    ) -> None:  # fmt: skip
        """`counted`: moves are counted instead of time. `share`: returns the share of the budget used. `seen_ms`:
        returns the best step time so far."""
        self.costs, self.problem, self.max_stages, self.budget_s, self.seed = costs, problem, max_stages, budget_s, seed
        self.counted, self.start, self.allowed, self.consider = counted, start, allowed, consider
        self.share, self.seen_ms, self.stop = share, seen_ms, stop

    def run(self, inboxes: list[list[tuple[str, np.ndarray]]]) -> None:
        """Build the systems that apply, distribute their structures over the lanes, and improve the best plan with
        copies."""
        from octopipe.search.systems import build_plan, systems

        several: list[Plan] = [self.start] if self.start is not None and len(self.start.routes) > 1 else []
        began = time.thread_time()
        names = sorted(systems(), key=lambda n: FIRST.index(n) if n in FIRST else len(FIRST))
        for number, name in enumerate(n for n in names if n not in SLOW):
            spent_s = time.thread_time() - began
            late = spent_s > SYSTEMS_SHARE * self.budget_s or self.share() > SYSTEMS_UNTIL
            if self.stop.is_set() or (late and self.counted is None):
                break
            try:
                plan = build_plan(name, self.costs, self.problem.ranks, self.problem.micro_batches, split_backward=True)
            except (OctoPipeError, ImportError):
                continue
            self.consider(plan, name)
            if not self.allowed(plan):
                continue
            if len(plan.routes) > 1:
                several.append(plan)
            elif len(plan.stages) <= self.max_stages:
                structure = structure_of(self.problem, self.max_stages, plan)
                inboxes[number % len(inboxes)].append((name, structure))
        self._improve([p for p in several if writable(p)])

    def _improve(self, plans: list[Plan]) -> None:
        """Polish the best plan that holds layers more than once, as long as it can compete."""
        if not plans or self.problem.count[VARIANTS] > 1:
            return
        rank = self.problem.rank.copy()
        rank[CAPACITY] *= COPIES_ROOM if self.problem.has_buffers else 1.0
        problem = self.problem._replace(rank=rank)
        rng, walks = make_rng(self.seed, 77), []
        part = min(1.0, COPIES_OPS / max(sum(map(len, plan.orders)) for plan in plans))
        for plan in plans:
            most = max(len(plan.stages), self.max_stages)
            walk = Polisher(problem, most, rng, *arrays_of(problem, most, plan), name=str(plan.extra.get("system", "")))
            if walk.best_ms < np.inf and not self.stop.is_set():
                walk.run(int(part * COPIES_TRIAL), SETTINGS.copies_hot)
                walks.append(walk)
        if not walks:
            return
        walk = min(walks, key=lambda w: w.best_ms)
        first, done, moves, walk_moves = self.share(), 0.0, 0, max(1, int(part * COPIES_CHUNK))
        while done < 1.0 and not self.stop.is_set():
            if done > COPIES_AFTER and walk.best_ms > COPIES_CLOSE * self.seen_ms():
                break
            cooling = (SETTINGS.cool * SETTINGS.polish_hot / SETTINGS.copies_hot) ** done
            moves += walk_moves
            walk.run(walk_moves, SETTINGS.copies_hot * cooling)
            if self.counted is None:
                done = (self.share() - first) / max(COPIES_UNTIL - first, 1e-9)
            else:
                done = moves / max(self.counted, 1)
        better = plan_of(self.problem, self.costs, walk.best, walk.best_orders)
        self.consider(better, f"{walk.name}, improved")

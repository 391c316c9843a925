"""The default search: many starts, population annealing, and a final local search on orders, on all cores.

Knows: how lanes exchange results, how candidates become plans, when to stop. Does not know: what a lane does (lane.py),
how a structure or an order is evaluated (core/), or how starts are drawn (starts.py).

1. A few fixed shapes give a first plan immediately; published systems, the user's plan and random structures are
   further starts.
2. Every lane anneals a population of the best structures together with their keys; lanes exchange members.
3. The last share of the budget anneals the orders of the best plans, including the user's plan.
4. Candidates are checked with the simulator's full memory model; if transfer buffers do not fit in addition to what the
   scheduler reserved, the reserve grows.

The kernels run without Python's lock, so threads use all cores. Under a time budget a faster machine makes more moves,
so plans may differ from run to run. With `iterations` (moves per lane) a search has a fixed number of lanes and no
clock: its result depends on the seed alone, on any machine and any number of threads.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import zip_longest

import numpy as np

from octopipe.base.compile import usable_cores
from octopipe.simulation.bounds.bounds import loads_bound_ms
from octopipe.base.errors import StoppedError
from octopipe.costs.table import CostTable
from octopipe.search.does_not_fit import does_not_fit_error
from octopipe.plans.plan import Plan
from octopipe.search.result import Callback, Found, Progress, Step
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline
from octopipe.search.tuner.core.follow import Orders
from octopipe.search.tuner.core.problem import MARGIN, SIZE, Problem, make_problem, make_rng
from octopipe.search.tuner.encode import arrays_of, orders_in, plan_of, structure_of, writable
from octopipe.search.tuner.lane import Budget, Lane, Note
from octopipe.search.tuner.polish import Polisher, jitter_factors
from octopipe.search.tuner.population import Judge, Start
from octopipe.search.tuner.mechanics import (
    AT_BOUND, BUFFERS, CLOSE, COUNTED_LANES, ENDING, ENDING_MOST, GATHER_PAUSE, HANDED_OVER_CELLS,
    LEAST_MOST, MOST_ROUNDS, POLL_S, RESERVE, RESERVE_TRIES, SWITCH_S,
)  # fmt: skip
from octopipe.search.tuner.settings import SETTINGS
from octopipe.search.tuner.systems import Systems


class Search:
    """One run of the default search."""

    def __init__(
        self,
        costs: CostTable,
        num_ranks: int,
        num_micro_batches: int,
        *,
        budget_s: float,
        seed: int = 0,
        workers: int | None = None,
        iterations: int | None = None,
        start: Plan | None = None,
        recompute: bool = True,
        copies: bool = True,
        lower_bound_ms: float = 0.0,
        progress: Callback | None = None,
        jitter: float = 0.0,
    ) -> None:
        """`lower_bound_ms` holds for all plans searched here, including those with copies if they are allowed. With
        `jitter` (sigma of a log-normal), the mean step time over jittered times is minimised in the end."""
        self.began = time.monotonic()
        self.costs, self.budget_s, self.seed, self.progress = costs, budget_s, seed, progress
        self.recompute, self.copies, self.jitter = recompute, copies, jitter
        self.iterations, self.lower_bound_ms = iterations, lower_bound_ms
        self.problem: Problem = make_problem(costs, num_ranks, num_micro_batches)
        self.start = start if start is not None and self._allowed(start) else None
        self.may_recompute = recompute and self.problem.has_limit
        most = max(MOST_ROUNDS * num_ranks, LEAST_MOST, len(start.stages) if start else 0)
        self.max_stages = min(costs.num_layers, most)
        self.stop = threading.Event()
        """Set when the search must end: a bound was reached, or the progress callback asked for it."""
        self.stopped_by_caller = False
        self.lock = threading.RLock()
        self.log: list[Step] = []
        self.untold: dict[int, list[tuple[int, str, str, float, float]]] = {}
        """In a search that counts its moves, this is what each lane noted since the lanes last met."""
        self.judged = 0
        self.phase_counts: dict[str, int] = {}
        self.systems: dict[str, float] = {}
        self.best_plan: Plan | None = None
        self.best_timeline: Timeline | None = None
        self.steady: list[Plan] = []
        """The plans from polishing that fit: all of them under jitter, otherwise those that were the fastest so far."""
        self.gather_at_s = 0.0
        self.plan_s = 0.0
        """The slowest simulation of a plan so far took this many seconds of a core."""
        self.seen_ms = float("inf")
        """This is the best step time that any lane has seen; the best plan may lag behind it."""
        work_ms = loads_bound_ms(costs, num_ranks, num_micro_batches)
        self.judge = Judge(self.problem, self.max_stages, make_rng(seed, 5), work_ms)
        self.threads = max(1, workers or usable_cores())
        self.lanes = [
            Lane(
                self.problem, self.max_stages, work_ms, self.may_recompute, (seed, k),
                Budget(budget_s, self.began, moves=iterations, stopped=self.stop.is_set), self._note_of(k),
            )
            for k in range(self.threads if iterations is None else COUNTED_LANES)
        ]  # fmt: skip

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def best_ms(self) -> float:
        return self.best_timeline.step_ms if self.best_timeline is not None else float("inf")

    # -- the search ------------------------------------------------------------------------------------

    def run(self) -> Found:
        interrupted = False
        builder = threading.Thread(target=self._from_systems, daemon=True)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            if self.start is not None:
                self._consider_plan(self.start, "start")
            with ThreadPoolExecutor(self.threads) as pool:
                self._begin(pool)
                builder.start()
                if self.iterations is not None:
                    # What a counted search finds must not depend on when the systems' plans are ready.
                    builder.join()
                self._draw(pool)
                self._anneal(pool, 1.0 - self._polish_share())
                self._polish(pool)
        except KeyboardInterrupt:
            interrupted = True
            self._halt()
        finally:
            sys.setswitchinterval(interval)
        if interrupted or self.stopped_by_caller:
            # Whoever asked does not wait for a system that is being built, nor for plans that take long to simulate.
            cells = self.problem.ranks * self.problem.micro_batches
            if self.plan_s < POLL_S and cells <= HANDED_OVER_CELLS:
                self._gather(reserve=False)
                self._take_polished()
        else:
            if builder.ident is not None:
                builder.join()
            self._gather(reserve=True)
            self._take_polished()
        if self.best_plan is None or self.best_timeline is None:
            if interrupted:
                raise KeyboardInterrupt
            if self.stopped_by_caller:
                raise StoppedError("the search was stopped before it found a first plan; give it more time")
            raise does_not_fit_error(self.costs, self.problem.ranks, self.may_recompute)
        return Found(
            plan=self.best_plan,
            timeline=self.best_timeline,
            iterations=self.judged,
            log=self.log,
            interrupted=interrupted or self.stopped_by_caller,
            phase_iterations=self.phase_counts,
            finalists=self._finalists(),
            systems=self.systems,
        )

    def _begin(self, pool: ThreadPoolExecutor) -> None:
        """Evaluate even loops and waves, distributed over the lanes, which give the first plan."""
        shapes = [(r, wave) for r in SETTINGS.first_rounds for wave in (False, True) if r > 1 or not wave]
        turn = {lane.number: shapes[k :: len(self.lanes)] for k, lane in enumerate(self.lanes)}
        self._together(pool, lambda lane: lane.begin(turn[lane.number], SETTINGS.draw))

    def _draw(self, pool: ThreadPoolExecutor) -> None:
        """Let the lanes draw initial structures, and exchange in between which shapes and keys do well."""
        first = max(lane.budget.share() for lane in self.lanes)
        until = min(max(2.0 * SETTINGS.draw, first + SETTINGS.draw), 1.0)
        if self.start is not None and len(self.start.routes) == 1:
            structure = structure_of(self.problem, self.max_stages, self.start)
            for lane in self.lanes:
                lane.inbox.append(("start", structure.copy()))
        for k in range(SETTINGS.meetings):
            share = first + (until - first) * (k + 1) / SETTINGS.meetings
            self._together(pool, partial(Lane.draw, until=share))
            for lane in self.lanes:
                for other in self.lanes:
                    if other is not lane:
                        lane.starts.learn(other.starts)

    def _anneal(self, pool: ThreadPoolExecutor, until: float) -> None:
        """Let every lane anneal its populations until this share of the budget, and exchange the best members in
        between."""
        first = max(lane.budget.share() for lane in self.lanes)
        rounds = SETTINGS.meetings
        for k in range(rounds):
            stop = first + (until - first) * (k + 1) / rounds
            self._together(pool, partial(Lane.anneal, until=stop, number=k, rounds=rounds))
            members = [lane.population.members if lane.population else [] for lane in self.lanes]
            shown = [sorted(m, key=lambda x: x.score)[: -(-len(m) // SETTINGS.shown)] for m in members]
            for i, lane in enumerate(self.lanes):
                if lane.population is not None:
                    lane.population.admit([m for j, some in enumerate(shown) if j != i for m in some])
        for lane in self.lanes:
            lane.settle()

    def _polish_share(self) -> float:
        """The share of the budget for polishing, less for large plans unless a mean under jitter is to be minimised."""
        cells = self.problem.ranks * self.problem.micro_batches
        return SETTINGS.polish if self.jitter else SETTINGS.polish * min(1.0, SETTINGS.cells / cells) ** 2

    def _polish(self, pool: ThreadPoolExecutor) -> None:
        """Polish the orders of the best structures and of plans from elsewhere, distributed over the lanes."""
        if self.best_plan is None or self.stop.is_set():
            return
        # Reserve memory for tensors between stages, which the timing of orders does not count.
        buffers = self._buffers() if self.problem.has_buffers else 0.0
        problem = self.problem.with_margin(self.problem.rank[MARGIN] + buffers)
        found: dict[float, Start] = {s.step_ms: s for lane in self.lanes for s in lane.candidates()}
        best = [found[ms] for ms in sorted(found)]
        # The best structure comes first, then the best of every size, then the second of every size, and so on.
        sizes: dict[int, list[Start]] = {}
        for start in best:
            sizes.setdefault(self.lanes[0].starts.size(start), []).append(start)
        queue = best[:1] + [s for group in zip_longest(*sizes.values()) for s in group if s and s is not best[0]]
        queue = queue[: SETTINGS.kept * len(self.lanes)]
        factors = None
        if self.jitter:
            stages = int(best[0].structure[SIZE, 0]) if best else len(self.best_plan.stages)
            factors = jitter_factors(self.problem, self.max_stages, stages, self.jitter, self.seed)
        outside = [self.best_plan] if self.best_plan.extra.get("system") else []
        if self.start is not None and self.start not in outside:
            outside.insert(0, self.start)
        turns: dict[int, list[Polisher]] = {lane.number: [] for lane in self.lanes}
        make = partial(self._polisher, problem, factors)
        for k, plan in enumerate(p for p in outside if writable(p) and len(p.stages) <= self.max_stages):
            lane = self.lanes[-1 - k % len(self.lanes)]
            turns[lane.number] += make(lane, "outside", *arrays_of(self.problem, self.max_stages, plan))
        for k, start in enumerate(queue):
            lane = self.lanes[k % len(self.lanes)]
            if self.judge.step_ms(start) < np.inf:
                turns[lane.number] += make(lane, start.name, start.structure, orders_in(self.judge.scratch))
        self._together(pool, lambda lane: lane.polish(turns[lane.number]))

    def _polisher(
        self, problem: Problem, factors: np.ndarray | None, lane: Lane, name: str, structure: np.ndarray, orders: Orders
    ) -> list[Polisher]:
        """A list of one polisher for these arrays; empty if the orders cannot run or do not fit."""
        scratch = lane.judge.scratch
        polisher = Polisher(
            problem, self.max_stages, lane.polish_rng, structure, orders, factors=factors, scratch=scratch, name=name
        )
        return [polisher] if polisher.best_ms < np.inf else []

    def _take_polished(self) -> None:
        """Turn the results of polishing into plans, also if polishing was interrupted."""
        for lane in self.lanes:
            for polisher in lane.polishers:
                if self.jitter or polisher.best_ms < self.best_ms:
                    plan = plan_of(self.problem, self.costs, polisher.best, polisher.best_orders)
                    timeline = self._simulated(plan)
                    if timeline.fits:
                        self.steady.append(plan)
                        self._take(plan, timeline, "polished orders")

    def _buffers(self) -> np.ndarray:
        """Per rank, BUFFERS times (the peak memory of the best plan minus its peak without tensors between stages)."""
        assert self.best_plan is not None and self.best_timeline is not None
        bare = simulate(self.best_plan, self.costs.replace(boundary_bytes=np.zeros(self.costs.num_layers)))
        return np.maximum(self.best_timeline.peak_bytes - bare.peak_bytes, 0.0) * BUFFERS

    def _together(self, pool: ThreadPoolExecutor, work: Callable[[Lane], None]) -> None:
        """Let every lane do its work; meanwhile report progress and turn what the lanes find into plans."""
        tasks = [pool.submit(work, lane) for lane in self.lanes]
        try:
            while wait(tasks, timeout=POLL_S).not_done:
                if self.iterations is None and self.elapsed() >= self.gather_at_s:
                    began = self.elapsed()
                    self._gather(reserve=False)
                    # Building and simulating plans holds up the lanes, so it may take only a small share of the time.
                    self.gather_at_s = self.elapsed() + GATHER_PAUSE * (self.elapsed() - began)
                self._report()
        except KeyboardInterrupt:
            self._halt()
            wait(tasks)
            self._tell_in_turn()
            raise
        for task in tasks:
            task.result()
        self._tell_in_turn()
        if not self.stopped_by_caller:
            self._gather(reserve=True)
            self._report()

    def _from_systems(self) -> None:
        """Take the plans of published systems: as candidates, and as starting points for the lanes. Plans with copies
        are improved."""
        Systems(
            self.costs, self.problem, self.max_stages, budget_s=self.budget_s, seed=self.seed, counted=self.iterations,
            start=self.start, allowed=self._allowed, consider=self._consider_plan, share=self._share,
            seen_ms=lambda: self.seen_ms, stop=self.stop,
        ).run([lane.inbox for lane in self.lanes])  # fmt: skip

    def _share(self) -> float:
        return self.elapsed() / self.budget_s

    def _simulated(self, plan: Plan) -> Timeline:
        """The timeline of a plan. If simulation takes long, the lanes get less of the budget, because more plans
        follow."""
        began = time.thread_time()
        timeline = simulate(plan, self.costs)
        took_s = time.thread_time() - began
        if took_s > self.plan_s:
            self.plan_s = took_s
            kept = min(ENDING * took_s, ENDING_MOST * self.budget_s)
            for lane in self.lanes:
                lane.budget.seconds = self.budget_s - kept
        return timeline

    # -- candidates ------------------------------------------------------------------------------------

    def _allowed(self, plan: Plan) -> bool:
        """Whether this plan belongs to the class that is searched."""
        if plan.offloads or (not self.copies and plan.replicas()):
            return False
        return self.recompute or not any(stage.recompute for stage in plan.stages)

    def _gather(self, reserve: bool) -> None:
        """Turn the lanes' best results into plans; with `reserve` (while no lane runs), memory may be reserved."""
        for lane in self.lanes:
            for start in lane.best():
                if self._consider(start, reserve):
                    for other in self.lanes:
                        other.rejudge()

    def _consider(self, start: Start, reserve: bool) -> bool:
        """Simulate a start. Returns True if it did not fit after all and more memory was reserved."""
        reserved = False
        for _ in range(RESERVE_TRIES):
            if start.step_ms >= self.best_ms or self.judge.step_ms(start) == np.inf:
                break
            plan = plan_of(self.problem, self.costs, start.structure, orders_in(self.judge.scratch))
            timeline = self._simulated(plan)
            if timeline.fits:
                self._take(plan, timeline, start.name)
                break
            if not reserve:
                break
            over = timeline.peak_bytes - np.array(timeline.capacity_bytes)
            self.problem.rank[MARGIN] += np.where(over > 0, over * RESERVE, 0.0)
            reserved = True
        return reserved

    def _consider_plan(self, plan: Plan, name: str) -> None:
        """Consider a plan from elsewhere. A published system's step time is reported in the end, whether its plan is
        allowed or not."""
        timeline = self._simulated(plan)
        if plan.extra.get("system") == name:
            self.systems[name] = timeline.step_ms if timeline.fits else float("inf")
        if timeline.fits and self._allowed(plan):
            self._take(plan, timeline, name)

    def _take(self, plan: Plan, timeline: Timeline, name: str) -> None:
        with self.lock:
            if timeline.step_ms >= self.best_ms:
                return
            if timeline.step_ms < self.seen_ms:
                self._note(0, "start", name, self.seen_ms, timeline.step_ms)
            first = self.best_plan is None
            self.best_plan, self.best_timeline = plan, timeline
        if timeline.step_ms <= self.lower_bound_ms * (1.0 + AT_BOUND) and not self.jitter:
            self.stop.set()
        if first:
            self._report()  # report the first plan at once

    def _finalists(self) -> list[Plan]:
        """The best plan, those in `steady` and, under jitter, plans of the lanes that fit and are nearly as fast."""
        assert self.best_plan is not None
        plans = [self.best_plan, *(p for p in self.steady if p != self.best_plan)]
        if not self.jitter:
            return plans
        for start in (s for lane in self.lanes for s in lane.candidates()):
            if start.step_ms <= (1 + CLOSE) * self.best_ms and self.judge.step_ms(start) < np.inf:
                plan = plan_of(self.problem, self.costs, start.structure, orders_in(self.judge.scratch))
                if plan not in plans and simulate(plan, self.costs).fits:
                    plans.append(plan)
        return plans

    # -- reporting -------------------------------------------------------------------------------------

    def _note_of(self, number: int) -> Note:
        """The function with which a lane reports improvements. It writes to the log or, if moves are counted, to a list
        of the lane, so that the log does not depend on which thread was faster."""
        if self.iterations is None:
            return self._note
        told = self.untold.setdefault(number, [])
        return lambda *what: told.append(what)

    def _tell_in_turn(self) -> None:
        """Write what the lanes noted to the log, lane by lane."""
        for told in self.untold.values():
            for what in told:
                self._note(*what)
            told.clear()

    def _note(self, moves: int, phase: str, move: str, before: float, after: float) -> None:
        """A lane made moves (no phase), or one of its moves was an improvement."""
        with self.lock:
            if not phase:
                self.judged += moves
            elif after < self.seen_ms:
                self.phase_counts[phase] = self.phase_counts.get(phase, 0) + 1
                before = float(min(before, self.seen_ms))
                made = self.judged + moves
                self.log.append(Step(made, self.elapsed(), phase, move, before, float(after), float(after)))
                self.seen_ms = float(after)

    def _report(self) -> None:
        """Report progress, also before there is a plan: the listener may end the search at any time."""
        if self.progress is None:
            return
        parts = {}
        if self.best_timeline is not None:
            bubbles = self.best_timeline.bubbles
            whole = self.best_timeline.makespan_ms * self.problem.ranks
            parts = {n[:-3]: float(getattr(bubbles, n).sum()) / whole for n in bubbles._fields if n != "idle_ms"}
        phase = self.log[-1].phase if self.log else "start"
        best = min(self.best_ms, self.seen_ms)
        seen = Progress(
            self.elapsed(), self.budget_s, self.judged, phase, best, self.lower_bound_ms, parts, self.best_plan
        )
        if self.progress(seen) is True:
            self.stopped_by_caller = True
            self._halt()

    def _halt(self) -> None:
        """Stop the lanes at once, in the middle of an evaluation."""
        self.stop.set()
        for lane in self.lanes:
            lane.judge.halt()

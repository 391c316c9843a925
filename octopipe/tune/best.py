"""The default search: many starts, successive halving, annealing through the list scheduler, on all cores.

Knows: how to share a budget between starts and threads. Does not know: how a move is judged (anneal.py,
kernels.py) or what a start looks like (starts.py).

1. Every shape (stages a rank, loop or wave), every published system and the user's own plan is a start.
2. Starts are annealed for a short while, the better half goes on for longer, until one walker per core is left.
3. The survivors anneal until the budget is spent; the kernels run without Python's lock, so threads suffice.
4. Candidates are judged by the simulator's full memory model; where transfers' buffers do not fit beside what
   the scheduler reserved, the reserve grows.

Reproducible: with `iterations` (moves per worker) the result depends on the seed and the number of workers
alone. Under a time budget a faster machine makes more moves, so plans may differ, and only get better.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np

from octopipe.bounds import loads_bound_ms
from octopipe.cost import CostTable
from octopipe.errors import OctoPipeError
from octopipe.plan import Plan
from octopipe.simulate import simulate
from octopipe.timeline import Timeline
from octopipe.tune.anneal import MOVES, PHASE_OF_MOVE, State, anneal, copy_state, judge, make_state
from octopipe.tune.encode import plan_of
from octopipe.tune.follow import ORDER_MOVES, ORDER_PHASES, Polisher
from octopipe.tune.kernels import Problem, Scratch, make_problem, make_scratch
from octopipe.tune.lottery import Lottery
from octopipe.tune.memory import explain_misfit
from octopipe.tune.result import Callback, Progress, Step
from octopipe.tune.robust import CLOSE
from octopipe.tune.starts import key_presets, limit_flight, shaped_state, shapes, state_from_plan, usable

HOT, COLD = 8e-4, 1e-4
"""Temperatures, as shares of the step time."""
CHUNK_S = 0.03
"""Seconds between looks at the clock."""
LOTTERY_SHARE, MOVES_PER_DRAW = 0.12, 25
"""Share of the budget for drawn starts; where moves are counted, how many a drawn structure is worth."""
SLOW_SYSTEMS = frozenset({"tessel"})
"""Systems that run a solver for longer than a start is worth."""
ROUNDS = ((8, 0.14), (4, 0.16), (2, 0.20), (1, 0.50))
"""Walkers per core and share of the annealing time of each round."""
POLISH_SHARE, POLISH_HOT, POLISH_COLD = 0.15, 3e-4, 3e-5
"""Share of the budget for annealing the survivors' fixed orders, and its temperatures."""
CAPS = (float("inf"), 0.03, 0.01)
"""How far above the best possible a walker's busiest rank may be loaded, by walker: a rank that is full leaves
the others' orders without pressure, and a walk would rest there."""


@dataclass(slots=True, kw_only=True)
class Walker:
    """One annealing walk and the best it has seen."""

    name: str
    state: State
    best: State
    back: State
    current_ms: float
    best_ms: float
    rng: np.ndarray
    cap_ms: float = float("inf")
    iterations: int = 0


@dataclass(slots=True, kw_only=True)
class Found:
    """What a search hands back."""

    plan: Plan
    timeline: Timeline
    iterations: int
    log: list[Step]
    interrupted: bool
    phase_iterations: dict[str, int] = field(default_factory=dict)
    finalists: list[Plan] = field(default_factory=list)
    """Plans that fit and are close to the best; what a robust choice is made from."""


class BestSearch:
    """One run of the default search."""

    def __init__(
        self,
        costs: CostTable,
        num_ranks: int,
        num_micro_batches: int,
        *,
        budget_s: float,
        seed: int,
        workers: int | None,
        iterations: int | None,
        start: Plan | None,
        recompute: bool,
        lower_bound_ms: float,
        progress: Callback | None,
    ) -> None:
        self.began = time.monotonic()
        self.costs, self.budget_s, self.seed, self.progress = costs, budget_s, seed, progress
        self.problem: Problem = make_problem(costs, num_ranks, num_micro_batches)
        self.workers = max(1, workers or os.cpu_count() or 1)
        self.iterations = iterations
        self.start = start
        self.may_recompute = recompute and self.problem.has_limit
        self.lower_bound_ms = lower_bound_ms
        layers = self.problem.num_layers
        self.max_stages = min(layers, max(10 * num_ranks, 24, len(start.stages) if start else 0))
        self.work_ms = loads_bound_ms(costs, num_ranks, num_micro_batches)
        self.margin = np.zeros(num_ranks)
        self.scratches: list[Scratch] = [make_scratch(self.problem, self.max_stages) for _ in range(self.workers)]
        self.log: list[Step] = []
        self.judged = 0
        self.stop = threading.Event()
        self.builder: threading.Thread | None = None
        self.published: queue.Queue[tuple[str, Plan]] = queue.Queue()
        self.lock = threading.Lock()
        self.best_plan: Plan | None = None
        self.best_timeline: Timeline | None = None
        self.phase_counts: dict[str, int] = {}

    # -- time ------------------------------------------------------------------------------------------

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def best_ms(self) -> float:
        return self.best_timeline.step_ms if self.best_timeline is not None else float("inf")

    def over(self) -> bool:
        return self.stop.is_set() or self.elapsed() >= self.budget_s

    # -- the search ------------------------------------------------------------------------------------

    def run(self) -> Found:
        interrupted = False
        walkers: list[Walker] = []
        try:
            walkers = self._starts()
            self._rounds(walkers)
        except KeyboardInterrupt:
            interrupted = True
            self.stop.set()
        if self.builder is not None:
            self.builder.join()
        self._published()
        if self.best_plan is None or self.best_timeline is None:
            raise explain_misfit(self.costs, self.problem, self.may_recompute)
        return Found(
            plan=self.best_plan,
            timeline=self.best_timeline,
            iterations=self.judged,
            log=self.log,
            interrupted=interrupted or self.stop.is_set(),
            phase_iterations=self.phase_counts,
            finalists=self._finalists(walkers),
        )

    def _starts(self) -> list[Walker]:
        """Every start: a first plan at once, then drawn ones beside the published systems."""
        walkers: list[Walker] = []
        if self.start is not None:
            self._consider_plan(self.start)
            if usable(self.start):
                walkers.append(self._walker("start", state_from_plan(self.problem, self.max_stages, self.start)))
        shaped: list[Walker] = []
        for stages, wave in shapes(self.problem, self.max_stages):
            name = f"{stages} stages, {'wave' if wave else 'loop'}"
            shaped.append(self._keyed(name, shaped_state(self.problem, self.max_stages, stages, wave, self.seed)))
            if shaped[-1].best_ms < self.best_ms:
                self._consider(shaped[-1])
            if self.iterations is None and self.elapsed() > 0.3 * self.budget_s and self.best_plan is not None:
                break
        self.builder = threading.Thread(target=self._build_systems)
        self.builder.start()
        shaped += self._lottery()
        self.builder.join(None if self.iterations is not None else max(0.15 * self.budget_s - self.elapsed(), 0.0))
        return walkers + shaped + self._published()

    def _lottery(self) -> list[Walker]:
        """Draw starts on every core for a while; each core's best become walkers."""
        stop_s = self.elapsed() + LOTTERY_SHARE * self.budget_s
        draws = None if self.iterations is None else max(4, int(self.iterations * LOTTERY_SHARE) // MOVES_PER_DRAW)
        recompute = self.may_recompute and self.best_plan is None
        keep = 2 * ROUNDS[0][0]
        lotteries = [
            Lottery(self.problem, self.max_stages, self.scratches[k], self.margin, (self.seed, k))
            for k in range(self.workers)
        ]

        def lane(lottery: Lottery) -> None:
            while lottery.draws < draws if draws is not None else self.elapsed() < stop_s:
                if self.over():
                    return
                lottery.draw(keep, recompute)

        with ThreadPoolExecutor(self.workers) as pool:
            list(pool.map(lane, lotteries))
        walkers = []
        for k, lottery in enumerate(lotteries):
            for i, start in enumerate(lottery.starts):
                walkers.append(self._walker(f"{start.name} #{k}.{i}", start.state))
                self._consider(walkers[-1])
        self.judged += sum(lottery.draws for lottery in lotteries)
        return walkers

    def _build_systems(self) -> None:
        """Plans of the published systems that apply here; runs beside the lottery."""
        from octopipe.systems import build_plan, systems

        for name in systems():
            if self.over():
                return
            if name in SLOW_SYSTEMS:
                continue
            try:
                plan = build_plan(
                    name, self.costs, self.problem.num_ranks, self.problem.num_micro_batches, split_backward=True
                )
            except (OctoPipeError, ImportError):
                continue
            self.published.put((name, plan))

    def _published(self) -> list[Walker]:
        """Walkers for the systems built since the last look."""
        found = []
        while not self.published.empty():
            name, plan = self.published.get()
            if plan.replicas():
                # The bounds speak of plans that hold every layer once; weights held twice are another problem.
                continue
            self._consider_plan(plan)
            if usable(plan) and len(plan.stages) <= self.max_stages:
                found.append(self._walker(name, state_from_plan(self.problem, self.max_stages, plan)))
        return found

    def _walker(self, name: str, state: State) -> Walker:
        best, back = make_state(self.problem, self.max_stages), make_state(self.problem, self.max_stages)
        value = judge(self.problem, state, self.margin, np.inf, self.scratches[0])
        copy_state(best, state)
        number = len(name) * 131 + sum(map(ord, name))
        rng = np.random.default_rng((self.seed, number)).integers(1, 1 << 62, 1).astype(np.uint64)
        return Walker(name=name, state=state, best=best, back=back, current_ms=value, best_ms=value, rng=rng)

    def _keyed(self, name: str, state: State) -> Walker:
        """A walker on the best of the preset priorities; with recomputation where nothing fits without."""
        for recompute in (False, True) if self.may_recompute else (False,):
            state.recompute[:] = recompute
            if self.problem.has_limit:
                limit_flight(self.problem, state, 1.5, 2.0)
            best_value, best_keys = np.inf, None
            for keys in key_presets(self.problem):
                state.glob[:5] = keys
                value = judge(self.problem, state, self.margin, best_value, self.scratches[0])
                if best_keys is None or value < best_value:
                    best_value, best_keys = value, keys
            assert best_keys is not None
            state.glob[:5] = best_keys
            if best_value < np.inf:
                break
        return self._walker(name, state)

    def _rounds(self, walkers: list[Walker]) -> None:
        begin = self.elapsed()
        left = max(self.budget_s - begin, 0.0) * (1.0 - POLISH_SHARE)
        done = 0.0
        with ThreadPoolExecutor(self.workers) as pool:
            for per_core, share in ROUNDS:
                walkers += self._published()
                walkers.sort(key=lambda w: w.best_ms)
                keep = per_core * self.workers
                self._diversify(walkers, keep)
                del walkers[keep:]
                for i, walker in enumerate(walkers):
                    walker.cap_ms = self.work_ms * (1.0 + CAPS[i // self.workers % len(CAPS)])
                hot = HOT * (COLD / HOT) ** done
                cold = HOT * (COLD / HOT) ** (done + share)
                stop_s = begin + left * (done + share)
                self._round(pool, walkers, stop_s, share, hot, cold)
                done += share
                if self.over():
                    return
            walkers.sort(key=lambda w: w.best_ms)
            self._polish(pool, walkers)

    def _diversify(self, walkers: list[Walker], keep: int) -> None:
        """Fill up with copies of the best walkers on other random numbers."""
        originals = list(walkers)
        while len(walkers) < keep and originals:
            source = originals[len(walkers) % len(originals)]
            twin = make_state(self.problem, self.max_stages)
            copy_state(twin, source.best)
            walkers.append(self._walker(f"{source.name} #{len(walkers)}", twin))

    def _round(
        self, pool: ThreadPoolExecutor, walkers: list[Walker], stop_s: float, share: float, hot: float, cold: float
    ) -> None:
        """Walkers are dealt to the cores; each core shares its time between its walkers."""
        lanes = [walkers[k :: self.workers] for k in range(self.workers)]
        begin = self.elapsed()
        quota = None if self.iterations is None else int(self.iterations * share)

        def lane(k: int) -> None:
            mine = lanes[k]
            for i, walker in enumerate(mine):
                until = begin + (stop_s - begin) * (i + 1) / len(mine)
                self._walk(walker, self.scratches[k], until, None if quota is None else quota // len(mine), hot, cold)

        tasks = [pool.submit(lane, k) for k in range(self.workers) if lanes[k]]
        try:
            while True:
                _, pending = wait(tasks, timeout=0.2)
                self._report(walkers)
                if not pending:
                    break
        except KeyboardInterrupt:
            self.stop.set()
            wait(tasks)
            for walker in walkers:
                self._consider(walker)
            raise
        for task in tasks:
            task.result()
        for walker in walkers:
            self._consider(walker)

    def _walk(self, walker: Walker, sc: Scratch, until_s: float, quota: int | None, hot: float, cold: float) -> None:
        """Anneal one walker until the time or its quota of moves is spent."""
        begin = self.elapsed()
        made, chunk = 0, 50 if quota is None else 500
        log = np.zeros((64, 4))
        if walker.best_ms < walker.current_ms * (1 - 4e-3):
            copy_state(walker.state, walker.best)
            walker.current_ms = walker.best_ms
        while not self.over():
            now = self.elapsed()
            if quota is None:
                if now >= until_s:
                    break
                at = (now - begin) / max(until_s - begin, 1e-9)
            else:
                if made >= quota:
                    break
                chunk = min(chunk, quota - made)
                at = made / quota
            temperature = hot * (cold / hot) ** at
            if walker.best_ms == np.inf:
                walker.best_ms = walker.current_ms = 1e18
            current, best, lines = anneal(
                self.problem, walker.state, walker.best, walker.back, self.margin, sc, walker.rng, chunk,
                temperature, temperature, walker.current_ms, walker.best_ms, self.may_recompute, 0.5,
                walker.cap_ms, log,
            )  # fmt: skip
            took = self.elapsed() - now
            with self.lock:
                for i, move, before, after in log[:lines]:
                    if after < self.log_best:
                        self._note(int(i), PHASE_OF_MOVE[int(move)], MOVES[int(move)], before, after)
                self.judged += chunk
            walker.current_ms, walker.best_ms = current, best
            made += chunk
            walker.iterations += chunk
            if quota is None and took > 0:
                chunk = int(min(max(chunk * CHUNK_S / took, 10), 5000))
        if walker.best_ms >= 1e17:
            walker.best_ms = walker.current_ms = float("inf")

    def _polish(self, pool: ThreadPoolExecutor, walkers: list[Walker]) -> None:
        """Anneal the survivors with their orders fixed, one per core."""
        # What transfers' buffers take beside what the orders alone say.
        margin = self.margin + (self._buffers() if self.problem.has_buffers else 0.0)
        quota = None if self.iterations is None else int(self.iterations * POLISH_SHARE)

        def lane(k: int) -> Polisher | None:
            walker = walkers[k % len(walkers)]
            polisher = Polisher(self.problem, self.max_stages, self.scratches[k], margin, (self.seed, k))
            if not polisher.begin(walker.best):
                return None
            begin, made, chunk = self.elapsed(), 0, 200
            while not self.over() and (quota is None or made < quota):
                now = self.elapsed()
                share = made / quota if quota is not None else (now - begin) / max(self.budget_s - begin, 1e-9)
                lines = polisher.run(chunk, POLISH_HOT * (POLISH_COLD / POLISH_HOT) ** min(share, 1.0))
                with self.lock:
                    self.judged += chunk
                    for i, move, before, after in lines:
                        if after < self.log_best:
                            self._note(int(i), ORDER_PHASES[int(move)], ORDER_MOVES[int(move)], before, after)
                made += chunk
                if quota is None:
                    chunk = int(min(max(chunk * CHUNK_S / max(self.elapsed() - now, 1e-6), 10), 20000))
            return polisher

        tasks = [pool.submit(lane, k) for k in range(self.workers)] if walkers else []
        interrupted = False
        while True:
            try:
                _, pending = wait(tasks, timeout=0.2)
                self._report(walkers)
                if not pending:
                    break
            except KeyboardInterrupt:
                interrupted = True
                self.stop.set()
        for task in tasks:
            polisher = task.result()
            if polisher is not None and polisher.best_ms < self.best_ms:
                plan = plan_of(self.problem, self.costs, polisher.best, polisher.best_orders)
                timeline = simulate(plan, self.costs)
                if timeline.fits:
                    self._take(plan, timeline, "fixed orders")
        if interrupted:
            raise KeyboardInterrupt

    def _buffers(self) -> np.ndarray:
        """Peak memory of the best plan less its peak without any tensor between stages, per rank."""
        assert self.best_plan is not None and self.best_timeline is not None
        bare = simulate(self.best_plan, self.costs.replace(boundary_bytes=np.zeros(self.costs.num_layers)))
        return np.maximum(self.best_timeline.peak_bytes - bare.peak_bytes, 0.0) * 1.1

    @property
    def log_best(self) -> float:
        return self.log[-1].best_ms if self.log else float("inf")

    def _note(self, offset: int, phase: str, move: str, before: float, after: float) -> None:
        self.phase_counts[phase] = self.phase_counts.get(phase, 0) + 1
        before, after = float(min(before, self.log_best)), float(after)
        self.log.append(Step(self.judged + offset, self.elapsed(), phase, move, before, after, after))

    # -- candidates ------------------------------------------------------------------------------------

    def _consider(self, walker: Walker) -> None:
        """Judge a walker's best by the simulator; where it does not fit after all, reserve more memory."""
        for _ in range(4):
            if walker.best_ms >= self.best_ms:
                return
            sc = self.scratches[0]
            value = judge(self.problem, walker.best, self.margin, np.inf, sc)
            walker.best_ms = value
            if value == np.inf:
                walker.current_ms = value
                return
            plan = plan_of(self.problem, self.costs, walker.best, sc)
            timeline = simulate(plan, self.costs)
            if timeline.fits:
                self._take(plan, timeline, walker.name)
                return
            over = timeline.peak_bytes - np.array(timeline.capacity_bytes)
            self.margin += np.where(over > 0, over * 1.01 + 1.0, 0.0)
            walker.current_ms = judge(self.problem, walker.state, self.margin, np.inf, sc)

    def _finalists(self, walkers: list[Walker]) -> list[Plan]:
        """The best plan and every walker's best that fits and is nearly as fast."""
        assert self.best_plan is not None
        plans = [self.best_plan]
        for walker in walkers:
            if walker.best_ms <= (1 + CLOSE) * self.best_ms:
                sc = self.scratches[0]
                if judge(self.problem, walker.best, self.margin, np.inf, sc) < np.inf:
                    plan = plan_of(self.problem, self.costs, walker.best, sc)
                    if plan not in plans and simulate(plan, self.costs).fits:
                        plans.append(plan)
        return plans

    def _consider_plan(self, plan: Plan) -> None:
        timeline = simulate(plan, self.costs)
        if timeline.fits and timeline.step_ms < self.best_ms:
            self._take(plan, timeline, str(plan.extra.get("system", "start")))

    def _take(self, plan: Plan, timeline: Timeline, name: str) -> None:
        if timeline.step_ms >= self.best_ms:
            return
        if timeline.step_ms < self.log_best:
            self._note(0, "start", name, self.log_best, timeline.step_ms)
        first = self.best_plan is None
        self.best_plan, self.best_timeline = plan, timeline
        if first:
            self._report([])  # a first plan is there within a second or two: say so at once

    def _report(self, walkers: list[Walker]) -> None:
        if self.progress is None or self.best_timeline is None:
            return
        bubbles = self.best_timeline.bubbles
        whole = self.best_timeline.makespan_ms * self.problem.num_ranks
        parts = {n[:-3]: float(getattr(bubbles, n).sum()) / whole for n in bubbles._fields if n != "idle_ms"}
        best = min([self.best_ms, *(w.best_ms for w in walkers)])
        phase = self.log[-1].phase if self.log else "start"
        seen = Progress(
            self.elapsed(), self.budget_s, self.judged, phase, best, self.lower_bound_ms, parts, self.best_plan
        )
        if self.progress(seen) is True:
            self.stop.set()

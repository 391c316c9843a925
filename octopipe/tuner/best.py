"""The default search: many starts, many annealing walks, fixed orders polished at the end, on all cores.

Knows: how the cores' lanes meet, how candidates become plans, when to stop. Does not know: what a lane does
(lane.py), how a move is judged (anneal.py, kernels.py, follow.py) or what a start looks like (starts.py, lottery.py).

1. A few shapes give a first plan at once; published systems, the user's own plan and structures drawn at random with
   random priorities are further starts.
2. Every core anneals the structures of the best under priorities bred along the way, then everything together through
   the list scheduler, and keeps an elite; the cores exchange theirs at times.
3. The last share of the budget anneals the best plans' partition, placement and orders with the orders fixed.
4. Candidates are judged by the simulator's full memory model; where transfers' buffers do not fit beside what the
   scheduler reserved, the reserve grows.

The kernels run without Python's lock, so threads use all cores. Reproducible: with `iterations` (moves per worker) the
result depends on the seed and the number of workers alone. Under a time budget a faster machine makes more moves, so
plans may differ from run to run.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import zip_longest

import numpy as np

from octopipe.bounds import loads_bound_ms
from octopipe.cost import CostTable
from octopipe.errors import OctoPipeError
from octopipe.plan import Plan
from octopipe.simulator import simulate
from octopipe.timeline import Timeline
from octopipe.tuner.anneal import State, judge
from octopipe.tuner.copies import Copies, improvable
from octopipe.tuner.encode import plan_of
from octopipe.tuner.kernels import Problem, make_problem, make_scratch
from octopipe.tuner.lane import Budget, Lane
from octopipe.tuner.lottery import Start, twin
from octopipe.tuner.memory import explain_misfit
from octopipe.tuner.result import Callback, Found, Progress, Step
from octopipe.tuner.starts import key_presets, limit_flight, shaped_state, shapes, state_from_plan, usable

SLOW_SYSTEMS = frozenset({"tessel"})
"""Systems that run a solver for longer than a start is worth."""
COPYING_SYSTEMS = frozenset({"chimera", "dualpipe"})
"""Systems that hold layers twice; built first, since improving their plans takes the time that is left."""
DRAW_UNTIL, WALK = 0.15, 0.08
"""Shares of the budget: the end of drawing, and the walks between roaming and polishing."""
ROAM_ROUNDS, WALK_ROUNDS = 4, 2
"""Into how many parts roaming and walking fall: after each, lanes exchange the best they have."""
POLISH, POLISH_CELLS = 0.2, 150
"""Share of the budget for polishing orders, where ranks times micro-batches are no more than this; less in proportion
where they are more: with 16 ranks and 32 micro-batches it gains nothing, and walking on does."""
DRAW_ROUNDS = 4
"""How often lanes tell each other what they drew."""
POLISHED = 3
"""Members of the elites whose orders a lane polishes in turn."""
SHOWN = 4
"""One of so many walkers of a herd is shown to the others, the best first."""
EXCHANGED = 2
"""Members of the elite that a lane shows the others."""
COPIES_HOT, COPIES_COLD = 2e-3, 5e-5
COPIES_TRIAL, COPIES_CHUNK = 5000, 2000
COPIES_UNTIL, COPIES_CLOSE, COPIES_ROOM = 0.95, 1.03, 0.96
"""Until when a plan with copies of layers is improved, how much slower than the lanes' best it may be to go on, and the
share of memory it may fill where tensors between stages take some."""
FIRST_UNTIL, DRAW_AT_LEAST = 0.1, 0.08
"""Shares of the budget: the end of preset starts, the least for drawing others."""
SYSTEMS_SHARE = 0.1
"""Share of the budget that building published systems may take of one core: drawn starts are nearly always better."""
UNLIKE_FIRST = ("interleaved", "zb-v", "adapipe", "hanayo", "zb-2p", "v-half", "1f1b")
"""Systems built first where time is short: the others' plans are much like one of theirs."""
SWITCH_S = 3e-5
"""How soon a thread gives the interpreter to another: lanes need it for a moment between long calls without it."""
JITTER_DRAWS, JITTER_OPS = 12, 24000
"""Where the mean under jitter counts, of how many draws it is the mean while orders are polished, the only part of the
search that knows of it: so many, or more until they jitter so many ops. All moves are judged by the same ones; with few
ops and few draws orders would suit the draws."""
POLL_S = 0.2
GATHER_PAUSE = 20.0
"""How much longer than making plans of what the lanes found is the pause before it is done again."""
CLOSE = 0.01
"""How much slower than the best a finalist may be."""
AT_BOUND = 1.0 + 2e-5
"""A plan this close to the proven bound ends the search."""


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
        copies: bool,
        lower_bound_ms: float,
        progress: Callback | None,
        jitter: float = 0.0,
    ) -> None:
        """`jitter`: what counts in the end is the mean over times jittered by so much (sigma of a log-normal)."""
        self.copies, self.jitter = copies, jitter
        self.steady: list[Plan] = []
        """Plans made for the least mean."""
        self.began = time.monotonic()
        self.costs, self.budget_s, self.seed, self.progress = costs, budget_s, seed, progress
        self.problem: Problem = make_problem(costs, num_ranks, num_micro_batches)
        self.iterations, self.start, self.lower_bound_ms = iterations, start, lower_bound_ms
        self.recompute = recompute
        self.may_recompute = recompute and self.problem.has_limit
        layers = self.problem.num_layers
        self.max_stages = min(layers, max(10 * num_ranks, 24, len(start.stages) if start else 0))
        self.margin = np.zeros(num_ranks)
        self.scratch = make_scratch(self.problem, self.max_stages)
        self.stop = threading.Event()
        """Ends the search: the bound is reached, or somebody asked."""
        self.asked = False
        self.lock = threading.RLock()
        self.log: list[Step] = []
        self.judged = 0
        self.phase_counts: dict[str, int] = {}
        self.best_plan: Plan | None = None
        self.best_timeline: Timeline | None = None
        self.gather_at_s = 0.0
        self.seen_ms = float("inf")
        """The best any lane has seen; the best plan may lag behind it."""
        work_ms = loads_bound_ms(costs, num_ranks, num_micro_batches)
        self.lanes = [
            Lane(
                self.problem,
                self.max_stages,
                self.margin,
                work_ms,
                self.may_recompute,
                (seed, k),
                Budget(budget_s, self.began, moves=iterations, stopped=self.stop.is_set),
                self._note,
            )
            for k in range(max(1, workers or os.cpu_count() or 1))
        ]

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def best_ms(self) -> float:
        return self.best_timeline.step_ms if self.best_timeline is not None else float("inf")

    # -- the search ------------------------------------------------------------------------------------

    def run(self) -> Found:
        interrupted = False
        builder = threading.Thread(target=self._build_systems)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            self._first_plans()
            builder.start()
            if self.iterations is not None:
                # What a counted search finds must not depend on when the systems' plans are ready.
                builder.join()
            with ThreadPoolExecutor(len(self.lanes)) as pool:
                self._draw(pool)
                end = 1.0 - self._polish_share()
                self._roam(pool, end - WALK)
                for k in range(1, WALK_ROUNDS + 1):
                    until = end - WALK * (1.0 - k / WALK_ROUNDS)
                    self._together(pool, partial(Lane.walk, until=until))
                    self._exchange()
                self._polish(pool)
        except KeyboardInterrupt:
            interrupted = True
            self.stop.set()
            self._gather()
        finally:
            sys.setswitchinterval(interval)
        if builder.ident is not None:
            builder.join()
        if self.best_plan is None or self.best_timeline is None:
            raise explain_misfit(self.costs, self.problem, self.may_recompute)
        return Found(
            plan=self.best_plan,
            timeline=self.best_timeline,
            iterations=self.judged,
            log=self.log,
            interrupted=interrupted or self.asked,
            phase_iterations=self.phase_counts,
            finalists=self._finalists(),
        )

    def _draw(self, pool: ThreadPoolExecutor) -> None:
        """Let the lanes draw starts, and tell each other in between which shapes and priorities do well."""
        first = max(lane.budget.share() for lane in self.lanes)
        until = min(max(DRAW_UNTIL, first + DRAW_AT_LEAST), 1.0)
        for k in range(DRAW_ROUNDS):
            self._together(pool, partial(Lane.draw, until=first + (until - first) * (k + 1) / DRAW_ROUNDS))
            known = [(list(lane.lottery.liked), dict(lane.lottery.keys)) for lane in self.lanes]
            for i, lane in enumerate(self.lanes):
                for j, (liked, keys) in enumerate(known):
                    if i != j:
                        lane.lottery.learn(liked, keys)

    def _roam(self, pool: ThreadPoolExecutor, until: float) -> None:
        """Let every lane's herds roam until then, and show the best walkers to the others in between."""
        first = max(lane.budget.share() for lane in self.lanes)
        for k in range(ROAM_ROUNDS):
            stop = first + (until - first) * (k + 1) / ROAM_ROUNDS
            self._together(pool, partial(Lane.roam, until=stop, part=k, parts=ROAM_ROUNDS))
            self._show_walkers()
            self._exchange()
        for lane in self.lanes:
            lane.settle()

    def _show_walkers(self) -> None:
        shown = [sorted(lane.herd.walkers, key=lambda w: w.score) if lane.herd else [] for lane in self.lanes]
        for i, lane in enumerate(self.lanes):
            if lane.herd is not None:
                others = [some[: -(-len(some) // SHOWN)] for j, some in enumerate(shown) if i != j]
                lane.herd.admit([walker for some in others for walker in some])

    def _together(self, pool: ThreadPoolExecutor, work: Callable[[Lane], None]) -> None:
        """Let every lane do its work; meanwhile report, and turn what they find into plans."""
        tasks = [pool.submit(work, lane) for lane in self.lanes]
        try:
            while wait(tasks, timeout=POLL_S).not_done:
                if self.iterations is None and not self.problem.has_buffers and self.elapsed() >= self.gather_at_s:
                    # Reserving more memory in the middle would make a counted search depend on timing.
                    began = self.elapsed()
                    self._gather()
                    # Building and simulating a plan holds up the lanes: a small share of the time at most.
                    self.gather_at_s = self.elapsed() + GATHER_PAUSE * (self.elapsed() - began)
                self._report()
        except KeyboardInterrupt:
            self.stop.set()
            wait(tasks)
            raise
        for task in tasks:
            task.result()
        self._gather()
        self._report()

    def _first_plans(self) -> None:
        """The user's plan and balanced shapes under preset priorities: something that fits, at once."""
        found: list[Start] = []
        if self.start is not None:
            self._consider_plan(self.start)
            if usable(self.start):
                found.append(self._judged("start", state_from_plan(self.problem, self.max_stages, self.start)))
        for stages, wave in shapes(self.problem, self.max_stages):
            name = f"{stages} stages, {'wave' if wave else 'loop'}"
            found.append(self._keyed(name, shaped_state(self.problem, self.max_stages, stages, wave, self.seed)))
            if self.best_plan is None:
                self._consider(found[-1])
            if self.iterations is None and self.elapsed() > FIRST_UNTIL * self.budget_s and self.best_plan is not None:
                break
        self._consider(min(found, key=lambda s: s.step_ms))
        self._hand_out(found)

    def _keyed(self, name: str, state: State) -> Start:
        """A shape under the best of the preset priorities; with recomputation where nothing fits without."""
        best_value = np.inf
        for recompute in (False, True) if self.may_recompute else (False,):
            state.recompute[:] = recompute
            if self.problem.has_limit:
                limit_flight(self.problem, state, 1.5, 2.0)
            chosen = None
            for keys in key_presets(self.problem):
                state.glob[:5] = keys
                value = judge(self.problem, state, self.margin, best_value, self.scratch)
                if chosen is None or value < best_value:
                    best_value, chosen = value, keys
            assert chosen is not None
            state.glob[:5] = chosen
            if best_value < np.inf:
                break
        return Start(float(best_value), name, state)

    def _build_systems(self) -> None:
        """Plans of the published systems that apply here: candidates themselves, and starts for the lanes."""
        from octopipe.systems import build_plan, systems

        scratch = make_scratch(self.problem, self.max_stages)
        with_copies: list[tuple[str, Plan]] = []
        if self.start is not None and self.copies and improvable(self.start):
            with_copies.append(("start", self.start))
        began = time.thread_time()
        for number, name in enumerate(
            sorted(systems(), key=lambda n: (n not in COPYING_SYSTEMS, n not in UNLIKE_FIRST))
        ):
            late = self.iterations is None and time.thread_time() - began > SYSTEMS_SHARE * self.budget_s
            if self.stop.is_set() or late:
                break
            if name in SLOW_SYSTEMS:
                continue
            try:
                plan = build_plan(
                    name, self.costs, self.problem.num_ranks, self.problem.num_micro_batches, split_backward=True
                )
            except (OctoPipeError, ImportError):
                continue
            self._consider_plan(plan)
            if self.copies and improvable(plan):
                with_copies.append((name, plan))
            if usable(plan) and len(plan.stages) <= self.max_stages:
                state = state_from_plan(self.problem, self.max_stages, plan)
                value = float(judge(self.problem, state, self.margin, np.inf, scratch))
                if value < np.inf:
                    self.lanes[number % len(self.lanes)].inbox.append(Start(value, name, state))
        self._improve_copies(with_copies)

    def _improve_copies(self, plans: list[tuple[str, Plan]]) -> None:
        """Anneal the best plan that holds layers twice, as long as it can compete."""
        if self.problem.variants > 1:
            return
        room = COPIES_ROOM if self.problem.has_buffers else 1.0
        problem = self.problem._replace(capacity=self.problem.capacity * room)
        walks = [(name, Copies(plan, problem, self.seed)) for name, plan in plans]
        walks = [(name, walk) for name, walk in walks if walk.best_ms < np.inf]
        for _, walk in walks:
            walk.run(COPIES_TRIAL, COPIES_HOT)
        if not walks:
            return
        name, walk = min(walks, key=lambda w: w[1].best_ms)
        first, done = self.elapsed() / self.budget_s, 0.0
        moves = 0
        while done < 1.0 and not self.stop.is_set():
            if done > 0.3 and walk.best_ms > COPIES_CLOSE * self.seen_ms:
                break
            walk.run(COPIES_CHUNK, COPIES_HOT * (COPIES_COLD / COPIES_HOT) ** done)
            moves += COPIES_CHUNK
            if self.iterations is None:
                done = (self.elapsed() / self.budget_s - first) / max(COPIES_UNTIL - first, 1e-9)
            else:
                done = moves / max(self.iterations, 1)
        if walk.best_ms < self.best_ms:
            plan = walk.best_plan()
            timeline = simulate(plan, self.costs)
            if timeline.fits:
                self._take(plan, timeline, f"{name}, improved")

    def _judged(self, name: str, state: State) -> Start:
        return Start(float(judge(self.problem, state, self.margin, np.inf, self.scratch)), name, state)

    def _hand_out(self, starts: list[Start]) -> None:
        """Give every lane its own copy of the starts that run; what each makes of them differs."""
        for start in starts:
            if start.step_ms < np.inf:
                for lane in self.lanes:
                    lane.inbox.append(start._replace(state=twin(self.problem, self.max_stages, start.state)))

    def _exchange(self) -> None:
        best = [lane.elite[:EXCHANGED] for lane in self.lanes]
        for k, lane in enumerate(self.lanes):
            for j, shown in enumerate(best):
                if j != k:
                    lane.adopt(shown)

    def _polish_share(self) -> float:
        """The last part of the budget, for orders; all of it where only polishing knows what counts."""
        cells = self.problem.num_ranks * self.problem.num_micro_batches
        return POLISH if self.jitter else POLISH * min(1.0, POLISH_CELLS / cells)

    def _polish(self, pool: ThreadPoolExecutor) -> None:
        """The best of all elites, one per lane, with their orders fixed."""
        elite: dict[float, Start] = {s.step_ms: s for lane in self.lanes for s in lane.elite}
        best = [elite[ms] for ms in sorted(elite)]
        if not best or self.best_plan is None:
            return
        # What transfers' buffers take beside what the orders alone say.
        margin = self.margin + (self._buffers() if self.problem.has_buffers else 0.0)
        # Every lane takes others: the best first, then the best of each size, the sizes in order of their best.
        sizes: dict[int, list[Start]] = {}
        for start in best:
            sizes.setdefault(self.lanes[0].lottery.size(start), []).append(start)
        queue = best[:1] + [s for group in zip_longest(*sizes.values()) for s in group if s and s is not best[0]]
        turn = {id(lane): queue[k :: len(self.lanes)][:POLISHED] for k, lane in enumerate(self.lanes)}
        factors = None
        if self.jitter:
            ops = 3 * int(best[0].state.size[0]) * self.problem.num_micro_batches
            draws = max(JITTER_DRAWS, JITTER_OPS // ops)
            shape = (draws, 2, 4, self.max_stages, self.problem.num_micro_batches)
            drawn = np.random.default_rng((self.seed, 4)).normal(-(self.jitter**2) / 2, self.jitter, shape)
            factors = np.exp(drawn)
        self._together(pool, lambda lane: lane.polish(turn[id(lane)], margin, factors))
        for lane in self.lanes:
            polished = lane.polished
            if polished is not None and (self.jitter or polished.best_ms < self.best_ms):
                plan = plan_of(self.problem, self.costs, polished.best, polished.best_orders)
                timeline = simulate(plan, self.costs)
                if timeline.fits:
                    self.steady.append(plan)
                    if timeline.step_ms < self.best_ms:
                        self._take(plan, timeline, "fixed orders")

    def _buffers(self) -> np.ndarray:
        """Peak memory of the best plan less its peak without any tensor between stages, per rank."""
        assert self.best_plan is not None and self.best_timeline is not None
        bare = simulate(self.best_plan, self.costs.replace(boundary_bytes=np.zeros(self.costs.num_layers)))
        return np.maximum(self.best_timeline.peak_bytes - bare.peak_bytes, 0.0) * 1.1

    # -- candidates ------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Turn the lanes' best into plans."""
        for lane in self.lanes:
            for start in lane.elite[:1] or lane.lottery.starts[:1]:
                if self._consider(start):
                    for other in self.lanes:
                        other.rejudge()

    def _consider(self, start: Start) -> bool:
        """Judge a start by the simulator; True where it did not fit after all and more memory was reserved."""
        reserved = False
        for _ in range(4):
            if start.step_ms >= self.best_ms:
                break
            value = judge(self.problem, start.state, self.margin, np.inf, self.scratch)
            if value == np.inf:
                break
            plan = plan_of(self.problem, self.costs, start.state, self.scratch)
            timeline = simulate(plan, self.costs)
            if timeline.fits:
                self._take(plan, timeline, start.name)
                break
            over = timeline.peak_bytes - np.array(timeline.capacity_bytes)
            self.margin += np.where(over > 0, over * 1.01, 0.0)
            reserved = True
        return reserved

    def _consider_plan(self, plan: Plan) -> None:
        """A plan from elsewhere."""
        if not self.copies and plan.replicas():
            return
        if not self.recompute and plan is not self.start and any(stage.recompute for stage in plan.stages):
            return
        timeline = simulate(plan, self.costs)
        if timeline.fits and timeline.step_ms < self.best_ms:
            self._take(plan, timeline, str(plan.extra.get("system", "start")))

    def _take(self, plan: Plan, timeline: Timeline, name: str) -> None:
        with self.lock:
            if timeline.step_ms >= self.best_ms:
                return
            if timeline.step_ms < self.seen_ms:
                self._note(0, "start", name, self.seen_ms, timeline.step_ms)
            first = self.best_plan is None
            self.best_plan, self.best_timeline = plan, timeline
        if timeline.step_ms <= self.lower_bound_ms * AT_BOUND and not plan.replicas() and not self.jitter:
            self.stop.set()
        if first:
            self._report()  # a first plan is there within a second or two: say so at once

    def _finalists(self) -> list[Plan]:
        """The best plan and every elite's that fits and is nearly as fast."""
        assert self.best_plan is not None
        plans = [self.best_plan, *(p for p in self.steady if p != self.best_plan)]
        for start in (s for lane in self.lanes for s in lane.elite):
            if start.step_ms > (1 + CLOSE) * self.best_ms:
                continue
            if judge(self.problem, start.state, self.margin, np.inf, self.scratch) < np.inf:
                plan = plan_of(self.problem, self.costs, start.state, self.scratch)
                if plan not in plans and simulate(plan, self.costs).fits:
                    plans.append(plan)
        return plans

    # -- telling ---------------------------------------------------------------------------------------

    def _note(self, moves: int, phase: str, move: str, before: float, after: float) -> None:
        """A lane made moves (no phase), or one of its moves improved what it walks on."""
        with self.lock:
            if not phase:
                self.judged += moves
            elif after < self.seen_ms:
                self.phase_counts[phase] = self.phase_counts.get(phase, 0) + 1
                step = Step(
                    self.judged + moves, self.elapsed(), phase, move, float(min(before, self.seen_ms)), float(after),
                    float(after),
                )  # fmt: skip
                self.log.append(step)
                self.seen_ms = float(after)

    def _report(self) -> None:
        if self.progress is None or self.best_timeline is None:
            return
        bubbles = self.best_timeline.bubbles
        whole = self.best_timeline.makespan_ms * self.problem.num_ranks
        parts = {n[:-3]: float(getattr(bubbles, n).sum()) / whole for n in bubbles._fields if n != "idle_ms"}
        phase = self.log[-1].phase if self.log else "start"
        best = min(self.best_ms, self.seen_ms)
        seen = Progress(
            self.elapsed(), self.budget_s, self.judged, phase, best, self.lower_bound_ms, parts, self.best_plan
        )
        if self.progress(seen) is True:
            self.asked = True
            self.stop.set()

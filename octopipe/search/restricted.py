"""Searches restricted to what another runtime can run.

Knows: what each value of `--for` allows. Does not know: how the runtimes' files are written (`export/`).

- `octopipe`: all plans.
- `torch`: any partition, placement and order, but each layer on one rank only, and no recomputation per stage.
- `megatron`: stage i on rank i mod pp, a multiple of pp stages, 1F1B or interleaved 1F1B with a fused backward. There
  the order is determined by the number of stages, so only the partition is searched, by annealing stage boundaries.
  Stages between the first and the last may be empty, as long as every rank holds layers. A plan omits empty stages;
  the additional transfer in each direction that Megatron needs for such a stage is not counted.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from octopipe.base.errors import DoesNotFitError, NotApplicableError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.search.foreign_plan import megatron_order
from octopipe.search.result import Callback, Found, Progress, Step
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import makespan_ms, simulate
from octopipe.simulation.timeline import Timeline

Target = Literal["octopipe", "torch", "megatron"]
TARGETS: tuple[Target, ...] = ("octopipe", "torch", "megatron")
MOST_CHUNKS = 10
"""Maximum number of stages per rank."""
HOT = 0.005
"""Initial temperature of the annealing, as a share of the step time."""
REPORT_S = 0.2
"""Seconds between reports."""


class FixedSchedules:
    """Search for the best partition of 1F1B and interleaved 1F1B, including the number of stages per rank."""

    def __init__(
        self, costs: CostTable, num_ranks: int, num_micro_batches: int, *, budget_s: float, seed: int = 0,
        iterations: int | None = None, start: Plan | None = None, lower_bound_ms: float = 0.0,
        progress: Callback | None = None,
    ) -> None:  # fmt: skip
        self.costs, self.ranks, self.micro_batches = costs, num_ranks, num_micro_batches
        self.budget_s, self.iterations = budget_s, iterations
        self.lower_bound_ms, self.progress = lower_bound_ms, progress
        self.dice, self.began = random.Random(seed), time.monotonic()
        self.log: list[Step] = []
        self.made = 0
        self.best: tuple[Plan, Timeline] | None = None
        self.shape: tuple[Plan, list[int]] | None = None
        """The schedule with all of its stages, empty ones included, and the cuts from which the best plan was made."""
        self.told_s = 0.0
        self.start = start

    def run(self) -> Found:
        interrupted = False
        plans = self._schedules()
        try:
            for plan in plans:
                self._consider(plan, _cuts(plan), "start")
            # Half of the budget goes to the numbers of stages in turn, the other half to the best of them.
            for k, plan in enumerate(plans):
                self._anneal(plan, _cuts(plan), (k + 1) / (2 * len(plans)))
            if self.shape is not None:
                self._anneal(*self.shape, 1.0)
        except KeyboardInterrupt:
            interrupted = True
        if self.best is None and interrupted:
            raise KeyboardInterrupt
        if self.best is None:
            raise DoesNotFitError(
                f"{self.costs.model}: no 1F1B or interleaved plan fits on {self.ranks} ranks; "
                "what would help: more ranks (--pp), a larger --memory-gib, recomputation of the whole model"
            )
        plan, timeline = self.best
        return Found(
            plan=plan, timeline=timeline, iterations=self.made, log=self.log, interrupted=interrupted,
            phase_iterations={"partition": self.made}, finalists=[plan],
        )  # fmt: skip

    def _schedules(self) -> list[Plan]:
        """Return one plan for each number of stages per rank, after the user's own plan if Megatron can run it."""
        found: list[Plan] = []
        if self.start is not None and runs_on_megatron(self.start):
            found.append(self.start)
        most = min(MOST_CHUNKS, self.costs.num_layers // self.ranks)
        for chunks in range(1, most + 1):
            options = {} if chunks == 1 else {"chunks": chunks}
            try:
                plan = build_plan(
                    "interleaved" if options else "1f1b", self.costs, self.ranks, self.micro_batches,
                    split_backward=False, **options,
                )  # fmt: skip
            except (NotApplicableError, DoesNotFitError):
                continue
            if runs_on_megatron(plan):
                found.append(plan)
        return found

    def _share(self) -> float:
        if self.iterations is not None:
            return self.made / self.iterations
        return (time.monotonic() - self.began) / self.budget_s

    def _anneal(self, plan: Plan, cuts: list[int], until: float) -> None:
        """Anneal the partition: move one or several neighbouring boundaries by one layer, at falling temperature."""
        cuts = list(cuts)
        last = len(plan.stages)
        current = makespan_ms(with_cuts(plan, cuts), self.costs)
        first = self._share()
        while (now := self._share()) < until and len(plan.stages) > 1:
            self.made += 1
            k = self.dice.randrange(1, len(plan.stages))
            e = min(k + self.dice.choice((0, 0, 1, 2, self.ranks)), len(plan.stages) - 1)
            by = self.dice.choice((-1, 1))
            # The first and the last stage hold embedding and head; the stages in between may become empty.
            if cuts[k] + by < cuts[k - 1] + (k == 1) or cuts[e] + by > cuts[e + 1] - (e + 1 == last):
                continue
            for j in range(k, e + 1):
                cuts[j] += by
            if _idle_rank(plan, cuts):
                for j in range(k, e + 1):
                    cuts[j] -= by
                continue
            other = with_cuts(plan, cuts)
            value = makespan_ms(other, self.costs)
            heat = HOT * current * (1.0 - (now - first) / max(until - first, 1e-9)) ** 2
            if value <= current - heat * math.log(max(self.dice.random(), 1e-300)):
                current = value
                if self.best is None or value < self.best[1].makespan_ms:
                    self._consider(plan, cuts, "migrate layers")
            else:
                for j in range(k, e + 1):
                    cuts[j] -= by
            if self._tell() is True:
                raise KeyboardInterrupt

    def _consider(self, schedule: Plan, cuts: list[int], move: str) -> None:
        plan = with_cuts(schedule, cuts)
        timeline = simulate(plan, self.costs)
        before = self.best[1].step_ms if self.best is not None else math.inf
        if timeline.fits and timeline.step_ms < before:
            self.best, self.shape = (plan, timeline), (schedule, list(cuts))
            phase = "start" if move == "start" else "partition"
            seconds = time.monotonic() - self.began
            self.log.append(Step(self.made, seconds, phase, move, before, timeline.step_ms, timeline.step_ms))

    def _tell(self) -> object:
        seconds = time.monotonic() - self.began
        if self.progress is None or self.best is None or seconds < self.told_s:
            return None
        self.told_s = seconds + REPORT_S
        plan, timeline = self.best
        return self.progress(
            Progress(seconds, self.budget_s, self.made, "partition", timeline.step_ms, self.lower_bound_ms, {}, plan)
        )


def _cuts(plan: Plan) -> list[int]:
    return [s.first for s in plan.stages] + [plan.num_layers]


def _idle_rank(plan: Plan, cuts: list[int]) -> bool:
    """Whether some rank would hold no layer."""
    held = {stage.rank for k, stage in enumerate(plan.stages) if cuts[k] < cuts[k + 1]}
    return len(held) < plan.num_ranks


def with_cuts(plan: Plan, cuts: list[int]) -> Plan:
    """Return the plan with stage boundaries at these layers; stages that become empty are removed."""
    full = [k for k in range(len(plan.stages)) if cuts[k] < cuts[k + 1]]
    stages = tuple(replace(plan.stages[k], first=cuts[k], stop=cuts[k + 1]) for k in full)
    if len(full) == len(plan.stages):
        return replace(plan, stages=stages)
    number = {k: i for i, k in enumerate(full)}
    orders = tuple(
        tuple(op._replace(stage=number[op.stage]) for op in order if op.stage in number) for order in plan.orders
    )
    return replace(plan, stages=stages, orders=orders, routes=(tuple(range(len(full))),))


def runs_on_megatron(plan: Plan) -> bool:
    """Whether stage i is on rank i mod pp, every rank has the same number of stages once empty stages are added, and
    the order is that of Megatron's (interleaved) 1F1B."""
    pp = plan.num_ranks
    if len(plan.routes) != 1 or any(s.recompute for s in plan.stages):
        return False
    if any(op.kind not in "FB" for order in plan.orders for op in order):
        return False
    places: list[int] = []
    for stage in plan.stages:
        after = places[-1] + 1 if places else 0
        places.append(after + (stage.rank - after) % pp)
    if places[0] != 0 or (places[-1] + 1) % pp:
        return False  # embedding and head lie elsewhere than in the first and the last stage
    # Whole rounds of stages may be empty, anywhere behind the first stage.
    empty = [(0, 0), *((k, rounds) for rounds in range(1, MOST_CHUNKS) for k in range(1, len(places)))]
    return any(
        _in_megatrons_order(plan, [place + rounds * pp * (i >= k) for i, place in enumerate(places)])
        for k, rounds in empty
        if rounds == 0 or places[-1] + rounds * pp < MOST_CHUNKS * pp
    )


def _in_megatrons_order(plan: Plan, places: Sequence[int]) -> bool:
    """Whether Megatron runs the plan's orders if its stages have these numbers and all others are empty."""
    number, pp = {place: k for k, place in enumerate(places)}, plan.num_ranks
    own = (megatron_order(rank, pp, (places[-1] + 1) // pp, plan.num_micro_batches, pp) for rank in range(pp))
    return all(
        mine == tuple(op._replace(stage=number[op.stage]) for op in order if op.stage in number)
        for mine, order in zip(plan.orders, own)
    )

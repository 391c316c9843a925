"""Tuning with measurements: runs the loop of `search/measured_tuning.py` on real ranks.

Knows: how rank 0 controls the loop while all ranks run its plans, and which results of a timed run the loop needs. Does
not know: how costs are corrected or plans are searched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np

from octopipe.costs.profile_file import Profile
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.runtime.measure.rehearsal import gaps_ms
from octopipe.runtime.measure.timed_run import TimedRun
from octopipe.runtime.measure.workload import Workload
from octopipe.runtime.ranks.rank_process import Seat
from octopipe.runtime.ranks.world import World
from octopipe.search.measured_tuning import PUBLISHED, Outcome, Ran, Run, tune_measured
from octopipe.search.tuner import tune
from octopipe.simulation.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTuneJob:
    """The parameters of `measured_tune_task`."""

    work: Workload
    profile: Profile
    num_micro_batches: int
    tune_s: float
    """Seconds for each search."""
    budget_s: float
    """Seconds for the whole loop."""
    steps: int = 5
    rounds: int = 3
    systems: tuple[str, ...] = PUBLISHED
    copies: tuple[bool, ...] = (False, True)
    recompute: bool = True
    cut_head: bool = False
    """Also search, in every round, for a plan whose head is cut by its vocabulary."""
    seed: int = 0
    workers: int | None = None
    iterations: int | None = None
    """Number of moves of each search, which replaces its time limit."""
    optimizer: str = "none"
    """The optimizer whose state the profile counts in memory; the runs allocate it as well."""
    timeout_s: float = 120.0
    """Seconds that a rank waits for another one at most."""


def measured_tune_task(seat: Seat, job: MeasuredTuneJob) -> Outcome:
    """Run `octopipe tune --measure` on one rank; rank 0 reports progress line by line."""
    return tune_on_ranks(World.make(None, None, None), job, tell=seat.tell)


def tune_on_ranks(world: World, job: MeasuredTuneJob, *, tell: Callable[[str], None]) -> Outcome:
    """Tune with measurements; returns the outcome on every rank (collective)."""

    def search(costs: CostTable, copies: bool, *, cut_head: bool = False) -> Plan:
        return tune(
            costs,
            world.size,
            job.num_micro_batches,
            budget_s=job.tune_s,
            seed=job.seed,
            copies=copies,
            recompute=job.recompute,
            cut_head=cut_head,
            workers=job.workers,
            iterations=job.iterations,
        ).plan

    def cut(costs: CostTable) -> Plan:
        return search(costs, False, cut_head=True)

    def loop(run: Run) -> Outcome:
        return tune_measured(
            job.profile,
            world.size,
            job.num_micro_batches,
            run=run,
            search=search,
            kinds=job.work.kinds,
            systems=job.systems,
            copies=job.copies,
            also={"with a cut head": cut} if job.cut_head else {},
            rounds=job.rounds,
            budget_s=job.budget_s,
            tell=tell,
        )

    return led(world, partial(_run, job, world), loop)


def led(world: World, run_here: Callable[[Plan, Profile], Ran], loop: Callable[[Run], Outcome]) -> Outcome:
    """Run `loop` on rank 0 and return its result on every rank (collective).

    Rank 0 decides what is run next: its loop gets a function that runs a plan on all ranks. The other ranks follow
    until the loop ends. `run_here` is a rank's own part of a run.
    """
    if world.rank != 0:
        while True:
            order = world.gather(None)[0]
            if isinstance(order, Outcome):
                return order
            run_here(*order)

    def run(name: str, plan: Plan, profile: Profile) -> Ran:
        world.gather((plan, profile))
        return run_here(plan, profile)

    outcome = loop(run)
    world.gather(outcome)
    return outcome


def ran(timelines: Sequence[Timeline], host_us: Sequence[float] = (), peak_bytes: Sequence[float] = ()) -> Ran:
    """Return the measurements of the timed steps of a plan, from their timelines."""
    gaps = [gap for timeline in timelines for gap in gaps_ms(timeline)]
    steps = [t.reduced_ms for t in timelines]
    middle = timelines[int(np.argsort(steps)[len(steps) // 2])]
    return Ran(
        steps_ms=tuple(steps),
        op_ms=np.median([t.spans.end_ms - t.spans.start_ms for t in timelines], axis=0),
        start_ms=middle.spans.start_ms,
        gap_ms=max(0.0, float(np.median(gaps or [0.0]))),
        host_us=tuple(float(x) for x in np.percentile(host_us, (10, 50, 90))) if len(host_us) else (),
        peak_gib=tuple(b / (1 << 30) for b in peak_bytes),
    )


def _run(job: MeasuredTuneJob, world: World, plan: Plan, profile: Profile) -> Ran:
    """Run a few timed steps of a plan on all ranks (collective)."""
    with closing(TimedRun(job.work, plan, world, profile, optimizer=job.optimizer, timeout_s=job.timeout_s)) as run:
        warm_up = max(2, run.pipe.executor.ops.warm_up_steps)
        for k in range(warm_up + job.steps):
            run.step(timed=k >= warm_up)
        peak = run.trial().peak_bytes
        return ran(run.timelines, run.host_us, peak)

"""The trainer: a model, a plan (given, a system's, or tuned on the spot), data, an optimizer, checkpoints.

Knows: the order of things in a training run and what is told about each step. Does not know: flags and screens
(verbs/train.py), processes (`launch.py`), how a step runs (`pipeline.py`).

    result = train(TrainJob(spec=preset("nemotron-h-8b").scaled(0.05), nproc=2, steps=20, tune_s=10.0))
    result.losses, result.step_ms, result.predicted_ms

Equal jobs have equal losses under every plan: the same parameters to start with, the same tokens, and gradients that
add up in micro-batch order wherever the plan runs W in that order (otherwise they differ by rounding).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import shown
from octopipe.costs.profile_file import Profile
from octopipe.models.lengths import sequence_numbers
from octopipe.plans.plan import Plan
from octopipe.runtime.batches import to_device
from octopipe.runtime.measure.trial import Workload, profile_workload
from octopipe.runtime.pipeline import Pipeline
from octopipe.runtime.ranks import launch
from octopipe.runtime.ranks.reduce import wait_for
from octopipe.runtime.ranks.world import World
from octopipe.runtime.training.adapt import Adapter, switch
from octopipe.runtime.training.checkpoint import Saving, load_checkpoint, read_record
from octopipe.runtime.training.data import length_micro_batches, micro_batches, open_tokens, weighted
from octopipe.runtime.training.guard import Diverged, FiniteWatch, StopRequest
from octopipe.runtime.training.job import Phase, StepReport, TrainJob, TrainResult
from octopipe.runtime.training.run_parts import (
    Everyone,
    autocast,
    backend,
    folder,
    identity,
    length_factor,
    measured_plan,
    memory_bytes,
    optimizer_of,
    plan_of,
    shared_gpu,
    worlds,
)
from octopipe.runtime.training.shelf import choose, latest
from octopipe.runtime.wire.telling import moment, told
from octopipe.simulation.contention import predict

Listener = Callable[[Phase | StepReport], None]


LOADING_S = 30.0
"""Ranks may take so long to load their libraries before the timeout counts."""


def train(job: TrainJob, listen: Listener | None = None) -> TrainResult | None:
    """Run a job in processes of its own, or as one rank of torchrun's (then None on all ranks but the first)."""
    with folder(job):
        try:
            result: TrainResult | None = _start(train_rank, job, job, listen)
            return result
        except launch.RankError as error:
            raise launch.RankError(error.rank, f"{error}{_way_on(job)}") from None
        except Diverged as error:
            raise Diverged(f"{error}{_way_on(job)}") from None


def train_in_turns(jobs: Sequence[TrainJob], listen: Listener | None = None) -> list[TrainResult] | None:
    """Several runs in the same processes, a step of each in turn: whatever else the machine does, it does to all.

    Jobs share ranks and device, and the first one's measurements. Meant for comparing plans.
    """
    result: list[TrainResult] | None = _start(train_ranks_in_turns, jobs[0], list(jobs), listen)
    return result


def _start(work: launch.Work, job: TrainJob, payload: Any, listen: Listener | None) -> Any:
    if launch.under_torchrun():
        return launch.join_ranks(work, payload, backend=backend(job), listen=listen, group_timeout_s=_patience_s(job))
    with shared_gpu(job) as environment:
        return launch.run_ranks(
            work,
            job.nproc,
            payload,
            backend=backend(job),
            environment=environment,
            threads=job.threads,
            grace_s=min(job.timeout_s, 5.0) + 3.0,
            group_timeout_s=_patience_s(job),
            start_s=job.timeout_s + LOADING_S,
            hang_s=job.timeout_s,
            gentle_s=job.timeout_s,
            listen=listen,
        )[0]


def _patience_s(job: TrainJob) -> float:
    """For waits that name no time of their own: while one rank tunes, the others wait for it."""
    return job.timeout_s + 2.0 * (job.tune_s or 0.0)


def _way_on(job: TrainJob) -> str:
    """What a run that failed can be resumed from."""
    if job.checkpoint is None:
        return ""
    try:
        path, _ = choose(job.checkpoint)
    except OctoPipeError:
        return ""
    return f"; {shown(path)} is good: --resume goes on from it"


def train_rank(seat: launch.Seat, job: TrainJob) -> TrainResult | None:
    """One rank's whole run; the first rank of all has the result."""
    with StopRequest() as stop, contextlib.closing(_prepare(seat, job, *worlds(seat, job))) as run:
        for _ in run.steps(stop):
            pass
        return run.result()


def train_ranks_in_turns(seat: launch.Seat, jobs: Sequence[TrainJob]) -> list[TrainResult] | None:
    """One rank's part of all runs."""
    shared = worlds(seat, jobs[0])
    with contextlib.ExitStack() as stack:
        runs: list[_Run] = []
        for job in jobs:
            if runs and job.profile is None:
                job = replace(job, profile=runs[0].profile)
            runs.append(stack.enter_context(contextlib.closing(_prepare(seat, job, *shared))))
        for _ in itertools.zip_longest(*(run.steps() for run in runs)):
            pass
        results = [run.result() for run in runs]
    return [r for r in results if r is not None] or None


def _prepare(seat: launch.Seat, job: TrainJob, world: World, everyone: Everyone) -> _Run:
    """Measure, find the plan, build this rank's layers, load what was saved."""
    work = Workload(
        spec=job.spec,
        tokens=job.seq,
        micro_batch_size=job.micro_batch_size,
        device=job.device,
        dtype="float32" if job.dtype == "bfloat16" else job.dtype,
        compile_scans=job.compile_scans,
        asked_kernels=job.kernels,
        seed=job.seed,
        graphs=job.replays,
    )
    device = work.place(seat.local_rank)
    profile = job.profile
    if profile is None and job.measure:
        seat.tell(Phase(text="measuring layers and links"))
        with autocast(job, device), moment("while layers and links were measured"), told(_patience_s(job)):
            profile = profile_workload(work, world, repeats=8, warm_up=2)
        # So short a measurement cannot tell a slow rank from a busy moment: ranks count as equal.
        profile = profile.with_costs(profile.costs.replace(rank_slowdown=()))
    if profile is not None and job.groups:
        profile = profile.with_costs(profile.costs.replace(micro_batch_factor=length_factor(job)))
    if job.tune_measured and profile is not None:
        with moment("while plans were tuned and run"):
            job, profile = measured_plan(job, work, world, profile, seat.tell)
    with moment("while rank 0 made the plan"):
        plan, profile = everyone.first((plan_of(job, profile, seat.tell), profile) if seat.rank == 0 else None)
    seat.tell(Phase(text="building the model"))

    def make_pipe(plan: Plan) -> Pipeline:
        layers = work.layers(device)
        return Pipeline(
            layers,
            plan,
            weighted(work.loss(layers)) if job.lengths else work.loss(layers),
            costs=None if profile is None else profile.costs,
            device=device,
            group=world,
            autocast=torch.bfloat16 if job.dtype == "bfloat16" else None,
            seed=job.seed,
            transport=work.transport(world),
            timeout_s=job.timeout_s,
            verify=True,
            cuda_graphs=job.replays,
        )

    with moment("while the model was built"), told(_patience_s(job)):
        return _Run(job, seat, everyone, make_pipe, plan, profile)


class _Run:
    """The loop of one rank."""

    def __init__(
        self,
        job: TrainJob,
        seat: launch.Seat,
        everyone: Everyone,
        make_pipe: Callable[[Plan], Pipeline],
        plan: Plan,
        profile: Profile | None,
    ):
        self.pipe = pipe = make_pipe(plan)
        self.job, self.seat, self.profile, self._make_pipe = job, seat, profile, make_pipe
        self._everyone = everyone
        self._watch = FiniteWatch(pipe.device)
        self.stopped_by = 0
        """The signal that ended the run before its last step, or 0."""
        self._adapter: Adapter | None = None
        if job.adapt_every is not None and profile is not None:
            self._adapter = Adapter(profile, threshold=job.adapt_gain, budget_s=job.adapt_s, seed=job.seed)
        self.optimizer = optimizer_of(job, pipe)
        self.seen = 0
        """Samples trained on, by all pipelines."""
        self.saved: str | None = None
        self.notices: list[str] = []
        """What the user must hear, as far as this rank knows."""
        self._saving: Saving | None = None
        self.reports: list[StepReport] = []
        self._numbers = sequence_numbers(job.lengths, job.groups)
        self._source = open_tokens(job.data, vocab=job.spec.vocab, seq=job.seq, seed=job.seed)
        self._one_host = len({*pipe.world.gather(socket.gethostname())}) == 1
        # A GPU would wait for the host at every report.
        self._every = 1 if job.device == "cpu" else max(1, job.steps // 100)
        self.first = self.resume() if job.resume or self._has_begun() else 1

    def close(self) -> None:
        if self._saving is not None:  # the run broke off: what is written stays incomplete, and is named so
            self._saving.wait()
        self.pipe.close()

    def result(self) -> TrainResult | None:
        """On the first rank; the others help with its timeline."""
        job, plan, profile = self.job, self.pipe.plan, self.profile
        measured = self.pipe.timeline() if job.timeline and self.reports else None
        if self.seat.rank:
            return None
        return TrainResult(
            plan=plan,
            reports=tuple(self.reports),
            first_step=self.first,
            parameters=job.spec.training_parameters,
            profile=profile,
            predicted=None if profile is None else predict(plan, profile),
            measured=measured,
            checkpoint=self.saved,
            notices=tuple(self.notices),
            stopped_by=self.stopped_by,
        )

    def _has_begun(self) -> bool:
        """Whether an elastic run finds its own checkpoints, as its first rank sees it."""
        job = self.job
        if not job.elastic or job.checkpoint is None:
            return False
        return bool(self._everyone.first(latest(job.checkpoint) is not None if self.seat.rank == 0 else None))

    def resume(self) -> int:
        """Load the newest good checkpoint, or the one asked for; the step to go on with."""
        with moment("while the checkpoint to go on from was chosen"):
            path = self._everyone.first_or_fail(self._choose)
        seen = read_record(path)
        model, seed = seen.get("model"), seen.get("seed", self.job.seed)
        if model != identity(self.job.spec):
            raise OctoPipeError(
                f"{shown(path)} is of {str(model)[:200]}, this run is of {identity(self.job.spec)}; "
                "use the same MODEL, --scale and --layers"
            )
        if seed != self.job.seed:
            raise OctoPipeError(
                f"{shown(path)} was trained with --seed {seed}, this run has {self.job.seed}: its data and dropout "
                f"would be others; use --seed {seed}"
            )
        record = load_checkpoint(path, self.pipe, self.optimizer)
        self.seen = int(record.get("samples", 0))
        self.pipe.step_number = record["step"]
        self.saved = str(path)
        return int(record["step"]) + 1

    def _choose(self) -> Path:
        assert self.job.checkpoint is not None
        path, problems = choose(self.job.checkpoint, self.job.resume_step)
        for why in problems:
            self._notice(f"damaged checkpoint: {why}")
        if problems:
            self._notice(f"going on from {path.name}, the newest good checkpoint")
        return path

    def _notice(self, text: str) -> None:
        """What a user must hear wherever the output goes."""
        self.notices.append(text)
        self.seat.tell(Phase(text=text, notice=True))

    def steps(self, stop: StopRequest | None = None) -> Iterator[None]:
        """Train; comes back after every step. A signal that was noted ends the run after the step, saved."""
        job = self.job
        took_s, counted = 0.0, 0
        for step in range(self.first, job.steps + 1):
            began = time.perf_counter()
            loss = self._step(step)
            counted += 1
            if stop is not None:
                self.stopped_by = self._everyone.most(stop.number, job.timeout_s)
            last = step == job.steps or bool(self.stopped_by)
            reports = counted == self._every or last
            # The exchange of the step's numbers waits for all ranks, so the clock stops when the step is over.
            rows = self._exchange() if reports else []
            took_s += time.perf_counter() - began
            if reports:
                report = self._report(step, float(loss), 1e3 * took_s / counted, rows)
                took_s, counted = 0.0, 0
                self.reports.append(report)
                self.seat.tell(report)
            saves = job.checkpoint is not None and (last or (job.save_every and step % job.save_every == 0))
            if saves or last:
                self._watch.settle()
            with moment("while a checkpoint was finished"), told(_patience_s(job)):
                self._finish_saving(at_once=bool(saves) or last)
            if saves:
                with moment(f"while step {step} was saved"), told(_patience_s(job)):
                    self._save(step)
                    self._finish_saving(at_once=not job.async_save or last)
            if job.adapt_every and step % job.adapt_every == 0 and not last:
                self._adapt(step)
            yield
            if self.stopped_by:
                return

    def _save(self, step: int) -> None:
        job = self.job
        assert job.checkpoint is not None
        self._saving = Saving(
            job.checkpoint,
            self.pipe,
            self.optimizer,
            step=step,
            about={"model": identity(job.spec), "samples": self.seen, "seed": job.seed},
            keep=job.keep,
            background=job.async_save,
        )

    def _finish_saving(self, *, at_once: bool) -> None:
        """Make a checkpoint appear once all ranks have written it; say what went wrong with it."""
        saving = self._saving
        if saving is None:
            return
        # One that failed on a rank is finished, too: its error is every rank's.
        if not at_once and self._everyone.most(saving.state(), self.job.timeout_s) == Saving.WRITING:
            return
        self._saving = None
        self.saved = str(saving.finish())
        if saving.set_aside is not None:
            self._notice(
                f"checkpoints of the branch that was left are in {shown(saving.set_aside)}; --checkpoint with that "
                "folder and --resume go on with it"
            )

    def _adapt(self, step: int) -> None:
        """Correct the costs by the step just made; switch plans where that pays."""
        adapter = self._adapter
        if adapter is None:
            return
        adapter.observe(self.pipe.plan, self.pipe.timeline())
        plan = adapter.propose(self.pipe.plan, self.pipe.world)
        self.profile = adapter.profile
        if plan is None:
            return
        self._finish_saving(at_once=True)
        self.seat.tell(Phase(text=f"step {step}: switching plans for {100 * adapter.last_gain:.0f} % more speed"))
        self.pipe, optimizer = switch(
            self.pipe,
            self.optimizer,
            plan,
            make_pipe=self._make_pipe,
            make_optimizer=partial(optimizer_of, self.job),
        )
        assert optimizer is not None
        self.optimizer = optimizer

    def _step(self, step: int) -> Tensor:
        job, pipe, program = self.job, self.pipe, self.pipe.executor.program
        count = len(job.lengths) // job.dp if job.lengths else job.num_micro_batches * job.micro_batch_size
        inputs: Any = None
        targets: Any = None
        if job.lengths and (program.needs_batch or program.needs_target):
            inputs, targets = length_micro_batches(
                self._source, self.seen, self._numbers[pipe.world.replica], job.lengths, job.dp
            )
            inputs, targets = (to_device(part, pipe.device) for part in (inputs, targets))
        elif program.needs_batch or program.needs_target:
            mine = self.seen + pipe.world.replica * count
            inputs, targets = micro_batches(self._source, mine, job.num_micro_batches, job.micro_batch_size)
            inputs, targets = ([t.to(pipe.device, non_blocking=True) for t in part] for part in (inputs, targets))
        loss = pipe.step(inputs, targets)
        assert loss is not None
        norm = pipe.grad_norm() if job.clip is None else pipe.clip_grad_norm_(job.clip)
        self._watch.look(step, loss, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = job.lr * min(1.0, step / job.warmup) if job.warmup else job.lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen += len(job.lengths) or job.dp * count
        return loss

    def _exchange(self) -> list[list[float]]:
        """Per rank of the pipeline: first start, last end, time at work (s), memory (bytes)."""
        pipe = self.pipe
        started, ended = pipe.recorder.times()
        busy = sum(ended) - sum(started)
        row = [min(started, default=math.inf), max(ended, default=-math.inf), busy, memory_bytes(pipe.device)]
        table = torch.zeros(pipe.world.size, 4, dtype=torch.float64)
        table[pipe.rank] = torch.tensor(row, dtype=torch.float64)
        if pipe.world.control is not None:
            work = dist.all_reduce(table, group=pipe.world.control, async_op=True)
            wait_for(work, self.job.timeout_s, "the exchange of step times")
        rows: list[list[float]] = table.tolist()
        return rows

    def _report(self, step: int, loss: float, step_ms: float, rows: list[list[float]]) -> StepReport:
        active = [row for row in rows if math.isfinite(row[0])]
        if self._one_host:
            span_s = max(row[1] for row in active) - min(row[0] for row in active)
        else:  # clocks differ: the longest rank's own view
            span_s = max(row[1] - row[0] for row in active)
        return StepReport(
            step=step,
            loss=loss,
            step_ms=step_ms,
            pipeline_ms=1e3 * span_s,
            bubble_ratio=1.0 - sum(row[2] for row in active) / (len(rows) * span_s) if span_s > 0 else 0.0,
            memory_bytes=tuple(row[3] for row in rows),
            tokens_per_s=1e3 * self.job.tokens_per_step / step_ms,
        )

"""The trainer: a model, a plan (given, a system's, or tuned before training), data, an optimizer, checkpoints.

Knows: the sequence of a training run and what is reported about each step. Does not know: flags and terminal output
(verbs/train.py), processes (`launch.py`), how a step runs (`pipeline.py`).

    result = train(TrainJob(spec=preset("nemotron-h-8b").scaled(0.05), nproc=2, steps=20, tune_s=10.0))
    result.losses, result.step_ms, result.predicted_ms

Equal jobs have equal losses under every plan: the same initial parameters, the same tokens, and gradients that are
accumulated in micro-batch order if the plan runs W in that order (otherwise they differ by rounding).
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

from torch import Tensor

from octopipe.base.errors import DoesNotFitError
from octopipe.base.files import shown
from octopipe.costs.profile_file import Profile
from octopipe.huggingface.cut import LayerList
from octopipe.models.lengths import sequence_numbers
from octopipe.plans.plan import Plan
from octopipe.runtime.batches import to_device
from octopipe.runtime.measure.forecast import UNFIT
from octopipe.runtime.measure.trial import profile_workload
from octopipe.runtime.pipeline import Pipeline
from octopipe.runtime.precision import autocast_dtype, has_main_gradients
from octopipe.runtime.ranks import launch
from octopipe.runtime.ranks.world import World
from octopipe.runtime.training.adapt import Adapter, switch
from octopipe.runtime.training.checkpoint import Saving, load_checkpoint, read_record
from octopipe.runtime.training.checkpoint_folder import choose, latest
from octopipe.runtime.training.data.batches import step_loss
from octopipe.runtime.training.data.corpus import Windows
from octopipe.runtime.training.data.opening import open_source
from octopipe.runtime.training.evaluate import evaluate
from octopipe.runtime.training.guard import Diverged, FiniteWatch, StopRequest
from octopipe.runtime.training.job import WARM_UP_STEPS, EvalReport, Phase, StepReport, TrainJob, TrainResult
from octopipe.runtime.training.progress import Progress, exchange
from octopipe.runtime.training.ready import with_data
from octopipe.runtime.training.resuming import check_resumable, other_precision, resumable_words, schedule_words
from octopipe.runtime.training.run_parts import (
    Everyone,
    backend,
    check_memory,
    folder,
    handed_factor,
    identity,
    item_factor,
    length_factor,
    measured_plan,
    optimizer_of,
    plan_of,
    shared_gpu,
    sized,
    workload_of,
    worlds,
)
from octopipe.runtime.training.step_batches import step_batches
from octopipe.runtime.wire.telling import moment, naming_lost_peers
from octopipe.simulation.contention import predict

Listener = Callable[[Phase | StepReport | EvalReport], None]


LOADING_S = 30.0
"""Seconds that ranks may take to load their libraries before the timeout counts."""


def train(job: TrainJob, listen: Listener | None = None) -> TrainResult | None:
    """Run a job in processes of its own, or as one rank of torchrun (then the result is None on all ranks except the
    first)."""
    with folder(job):
        job = with_data(job, listen or launch.no_report)
        try:
            result: TrainResult | None = _start(train_rank, job, job, listen)
            return result
        except launch.RankError as error:
            if UNFIT in str(error):
                raise DoesNotFitError(str(error)) from None
            raise launch.RankError(error.rank, f"{error}{resumable_words(job)}") from None
        except Diverged as error:
            raise Diverged(f"{error}{resumable_words(job)}") from None


def train_in_turns(jobs: Sequence[TrainJob], listen: Listener | None = None) -> list[TrainResult] | None:
    """Run several jobs in the same processes, one step each in turn, so that disturbances by other programs affect all
    of them.

    The jobs share ranks, device and the first one's measurements. This is meant for comparing plans.
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
            grace_s=min(job.timeout_s, 12.0) + 3.0,
            group_timeout_s=_patience_s(job),
            start_s=job.timeout_s + LOADING_S,
            hang_s=job.timeout_s,
            gentle_s=job.timeout_s,
            listen=listen,
        )[0]


def _patience_s(job: TrainJob) -> float:
    """Return the timeout of waits that have none of their own: while one rank tunes, the others wait for it."""
    return job.timeout_s + 2.0 * (job.tune_s or 0.0)


def train_rank(seat: launch.Seat, job: TrainJob) -> TrainResult | None:
    """Run one rank's part of a job; only the first rank of all returns the result."""
    with StopRequest() as stop, contextlib.closing(_prepare(seat, job, *worlds(seat, job))) as run:
        for _ in run.steps(stop):
            pass
        return run.result()


def train_ranks_in_turns(seat: launch.Seat, jobs: Sequence[TrainJob]) -> list[TrainResult] | None:
    """Run one rank's part of all jobs; only the first rank of all returns the results."""
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
    """Measure, make the plan, build this rank's layers, and load the checkpoint to resume from."""
    work = workload_of(job)
    device = work.place(seat.local_rank)
    profile = None if job.profile is None else job.profile.checkpointing(work.checkpointed)
    if profile is None and job.measure:
        seat.tell(Phase(text="measuring layers and links"))
        with moment("while layers and links were measured"), naming_lost_peers(_patience_s(job)):
            heard = lambda doing, _: seat.tell(Phase(text=f"measuring layers and links: {doing}"))  # noqa: E731
            profile = profile_workload(work, world, repeats=8, warm_up=2, tell=heard)
        # Such a short measurement cannot tell a slow rank from a busy moment, so ranks count as equal.
        profile = profile.with_costs(profile.costs.replace(rank_slowdown=()))
    if profile is not None and job.groups:
        factor = length_factor(job, profile.costs.tokens_per_micro_batch)
        profile = profile.with_costs(profile.costs.replace(micro_batch_factor=factor))
    if profile is not None and (items := item_factor(job, job.profile)) is not None:
        costs = profile.costs.replace(micro_batch_factor=items, boundary_factor=handed_factor(job, items))
        profile = profile.with_costs(costs)
    profile = None if profile is None else sized(job, profile)
    job, profile = measured_plan(job, work, world, profile, seat.tell)
    with moment("while rank 0 made the plan"):
        plan, profile = everyone.first((plan_of(job, profile, seat.tell), profile) if seat.rank == 0 else None)
    check_memory(job, plan, profile, device, seat, everyone)
    seat.tell(Phase(text="building the model"))

    def make_pipe(plan: Plan) -> Pipeline:
        layers = work.layers(device)
        return Pipeline(
            layers,
            plan,
            step_loss(work.loss(layers), shifted=isinstance(layers, LayerList)),
            costs=None if profile is None else profile.costs,
            device=device,
            group=world,
            autocast=autocast_dtype(work.precision),
            main_grads=has_main_gradients(work.precision),
            seed=job.seed,
            transport=work.transport(world),
            timeout_s=job.timeout_s,
            verify="first-step",
            cuda_graphs=job.replays,
        )

    with moment("while the model was built"), naming_lost_peers(_patience_s(job)):
        return _Run(job, seat, everyone, make_pipe, plan, profile)


class _Run:
    """The training loop of one rank."""

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
        """The number of samples trained on, by all pipelines."""
        self.saved: str | None = None
        self.notices: list[str] = []
        """The notices that this rank has sent to the user."""
        self._saving: Saving | None = None
        self.reports: list[StepReport] = []
        self._numbers = sequence_numbers(job.lengths, job.groups)
        self.evaluations: list[EvalReport] = []
        sizes: dict[str, Any] = {"vocab": job.spec.vocab, "seq": job.seq, "seed": job.seed}
        sizes |= {"apart": bool(job.reading.apart), "form": job.inputs}
        self._source = open_source(job.data, job.reading, **sizes)
        self._about_data = self._source.about()
        self._kept_aside = (
            None if job.eval_data is None else open_source(job.eval_data, job.reading, **sizes, shuffle=False)
        )
        self._data_begins = 0
        """The number of samples that had been seen when this data began."""
        self._rate = job.learning_rate
        self._norm: Tensor | None = None
        self._progress = Progress(job, one_clock=len({*pipe.world.gather(socket.gethostname())}) == 1)
        # On a GPU, every report makes the device wait for the host.
        self._every = job.log_every or (1 if job.device == "cpu" else max(1, job.steps // 100))
        self.first = self.resume() if job.resume or self._has_begun() else 1

    def close(self) -> None:
        if self._saving is not None:  # the run was interrupted: the partial checkpoint remains under its partial name
            self._saving.wait()
        self.pipe.close()

    def result(self) -> TrainResult | None:
        """Return the result, on the first rank; the other ranks take part in gathering its timeline."""
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
            evaluations=tuple(self.evaluations),
            warm_up=max(WARM_UP_STEPS, self.pipe.executor.ops.warm_up_steps),
        )

    def _has_begun(self) -> bool:
        """Return whether an elastic run finds checkpoints of its own, as seen by its first rank."""
        job = self.job
        if not job.elastic or job.checkpoint is None:
            return False
        return bool(self._everyone.first(latest(job.checkpoint) is not None if self.seat.rank == 0 else None))

    def resume(self) -> int:
        """Load the newest valid checkpoint, or the requested one; returns the step to continue with."""
        with moment("while the checkpoint to resume from was chosen"):
            path = self._everyone.first_or_fail(self._choose)
        self._data_begins = check_resumable(self.job, path, read_record(path), self._about_data)
        for note in other_precision(self.job, read_record(path), path):
            self._notice(note)
        record = load_checkpoint(path, self.pipe, self.optimizer)
        if changed := schedule_words(record.get("schedule"), self._rate.about()):
            self._notice(f"the learning rate continues with a different schedule: {changed}")
        self.seen = int(record.get("samples", 0))
        self.saved = str(path)
        return int(record["step"]) + 1

    def _choose(self) -> Path:
        assert self.job.checkpoint is not None
        path, problems = choose(self.job.checkpoint, self.job.resume_step)
        for why in problems:
            self._notice(f"damaged checkpoint: {why}")
        if problems:
            self._notice(f"resuming from {path.name}, the newest valid checkpoint")
        return path

    def _notice(self, text: str) -> None:
        """Report something that users must see wherever the output goes."""
        self.notices.append(text)
        self.seat.tell(Phase(text=text, notice=True))

    def steps(self, stop: StopRequest | None = None) -> Iterator[None]:
        """Train; yields after every step. After a signal, the run ends with the current step, which is saved."""
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
            rows = exchange(self.pipe, job.timeout_s) if reports else []
            took_s += time.perf_counter() - began
            if reports:
                report = self._report(step, float(loss), 1e3 * took_s / counted, rows)
                took_s, counted = 0.0, 0
                self.reports.append(report)
                self.seat.tell(report)
            saves = job.checkpoint is not None and (last or (job.save_every and step % job.save_every == 0))
            if saves or last:
                self._watch.settle()
            with moment("while a checkpoint was finished"), naming_lost_peers(_patience_s(job)):
                self._finish_saving(at_once=bool(saves) or last)
            if saves:
                with moment(f"while step {step} was saved"), naming_lost_peers(_patience_s(job)):
                    self._save(step)
                    self._finish_saving(at_once=not job.async_save or last)
            if self._kept_aside is not None and (last or (job.eval_every and step % job.eval_every == 0)):
                self._evaluate(step)
            if job.adapt_every and step % job.adapt_every == 0 and not last:
                self._adapt(step)
            yield
            if self.stopped_by:
                return

    def _evaluate(self, step: int) -> None:
        assert self._kept_aside is not None
        report = evaluate(self.pipe, self._kept_aside, self.job, step)
        self.evaluations.append(report)
        self.seat.tell(report)

    def _save(self, step: int) -> None:
        job = self.job
        assert job.checkpoint is not None
        self._saving = Saving(
            job.checkpoint,
            self.pipe,
            self.optimizer,
            step=step,
            about={
                "model": identity(job.spec),
                "samples": self.seen,
                "seed": job.seed,
                "precision": job.mode.precision,
                "data": {**self._about_data, **self._position()},
                "schedule": self._rate.about(),
            },
            keep=job.keep,
            background=job.async_save,
        )

    def _position(self) -> dict[str, int]:
        """Return the position of the run in its data: completed passes, samples of the present pass, and where the data
        began."""
        number = self.seen - self._data_begins
        laps, at = divmod(number, self._source.windows) if isinstance(self._source, Windows) else (0, number)
        return {"epoch": laps, "position": at, "begins": self._data_begins}

    def _finish_saving(self, *, at_once: bool) -> None:
        """Make a checkpoint visible once all ranks have written it, and report its errors."""
        saving = self._saving
        if saving is None:
            return
        # A checkpoint that failed on a rank is finished as well, which raises its error on every rank.
        if not at_once and self._everyone.most(saving.state(), self.job.timeout_s) == Saving.WRITING:
            return
        self._saving = None
        self.saved = str(saving.finish())
        if saving.set_aside is not None:
            self._notice(
                f"checkpoints of the previous branch are in {shown(saving.set_aside)}; --checkpoint with that "
                "folder and --resume continues it"
            )

    def _adapt(self, step: int) -> None:
        """Correct the costs by the latest step, and switch plans if that is worthwhile."""
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
        first = self.seen - self._data_begins
        inputs: Any = None
        targets: Any = None
        if program.needs_batch or program.needs_target:
            inputs, targets = step_batches(job, self._source, first, pipe.world.replica, self._numbers)
            inputs, targets = (to_device(part, pipe.device) for part in (inputs, targets))
        loss = pipe.step(inputs, targets)
        assert loss is not None
        self._norm = norm = pipe.grad_norm() if job.clip is None else pipe.clip_grad_norm_(job.clip)
        self._watch.look(step, loss, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate.at(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen += len(job.lengths) or job.dp * count
        return loss

    def _report(self, step: int, loss: float, step_ms: float, rows: list[list[float]]) -> StepReport:
        source, seen = self._source, self.seen - self._data_begins
        return self._progress.report(
            rows,
            step=step,
            loss=loss,
            step_ms=step_ms,
            lr=self._rate.at(step),
            grad_norm=math.nan if self._norm is None else float(self._norm),
            epoch=seen / source.windows if isinstance(source, Windows) else None,
            samples=self.seen,
        )

"""The components of a training run: process groups, plan, optimizer, folder and devices.

Knows: how each is created from a `TrainJob`. Does not know: the sequence of a run (`train.py`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from octopipe.base.errors import DoesNotFitError, OctoPipeError
from octopipe.base.files import shown
from octopipe.costs.analytic.items import NEARLY_NONE
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.profile_file import Profile
from octopipe.huggingface.described import HfModel
from octopipe.huggingface.inputs import InputForm
from octopipe.models.lengths import Batch
from octopipe.models.spec import ModelSpec
from octopipe.plans.plan import Plan
from octopipe.plans.setting import carried
from octopipe.runtime.measure.host_memory import free_host_bytes
from octopipe.runtime.measure.layer_sizes import equal_costs
from octopipe.runtime.measure.tuned_run import MeasuredTuneJob, tune_on_ranks
from octopipe.runtime.measure.workload import Workload
from octopipe.runtime.pipeline import Pipeline
from octopipe.runtime.precision import MixedPrecisionOptimizer, has_main_gradients
from octopipe.runtime.ranks import launch
from octopipe.runtime.ranks.reduce import wait_for
from octopipe.runtime.ranks.world import World
from octopipe.runtime.training.checkpoint_folder import latest, locked, nothing_to_resume, refuse_dcp
from octopipe.runtime.training.job import Phase, TrainJob
from octopipe.runtime.training.memory_check import check_places
from octopipe.runtime.wire.telling import broadcast_value, gather_values, moment
from octopipe.search.systems import build_plan
from octopipe.search.tuner import tune
from octopipe.simulation.contention import predict


class Everyone:
    """The exchange of values between all ranks of all pipelines (all methods are collective)."""

    def __init__(self, seat: launch.Seat, group: dist.ProcessGroup | None):
        self._seat, self._group = seat, group

    def first(self, value: Any) -> Any:
        """Return the value of the first rank, on every rank."""
        return value if self._group is None else broadcast_value(self._group, value, 0)

    def first_or_fail(self, make: Callable[[], Any]) -> Any:
        """Return the result of a function that runs on the first rank, or raise its error, on every rank."""
        made: tuple[Any, str] = None, ""
        if self._seat.rank == 0:
            try:
                made = make(), ""
            except OctoPipeError as error:
                made = None, str(error)
        value, problem = self.first(made)
        if problem:
            raise OctoPipeError(problem)
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on every rank."""
        return [value] if self._group is None else gather_values(self._group, value)

    def most(self, number: int, timeout_s: float) -> int:
        """Return the largest of all ranks' numbers."""
        if self._group is None:
            return number
        box = torch.tensor([number])
        work = dist.all_reduce(box, dist.ReduceOp.MAX, group=self._group, async_op=True)
        wait_for(work, timeout_s, "the agreement to continue")
        return int(box)


def worlds(seat: launch.Seat, job: TrainJob) -> tuple[World, Everyone]:
    if seat.size != job.nproc:
        raise OctoPipeError(f"{seat.size} ranks were started for a run of {job.nproc}; leave --nproc out")
    if seat.size == 1:
        return World(None), Everyone(seat, None)
    backend = str(dist.get_backend())
    group = dist.group.WORLD if "gloo" in backend else dist.new_group(backend="gloo")
    if job.dp == 1:
        return World(dist.group.WORLD), Everyone(seat, group)
    kind = "cuda" if "nccl" in backend else "cpu"
    mesh = init_device_mesh(kind, (job.dp, job.pp), mesh_dim_names=("dp", "pp"))
    return World.make(None, None, mesh), Everyone(seat, group)


def check_memory(
    job: TrainJob, plan: Plan, profile: Profile | None, device: torch.device, seat: launch.Seat, everyone: Everyone
) -> None:
    """Compare every rank's share with the free memory of its GPU or host, before the model is built (collective)."""
    if not job.memory_check:
        return
    host = socket.gethostname()
    free: float | None
    if device.type == "cuda":
        torch.cuda.empty_cache()
        place, free = f"{host}'s GPU {device.index}", float(torch.cuda.mem_get_info(device)[0])
    else:
        place, free = f"{host}", free_host_bytes()
    mine = {"pp_rank": seat.rank % job.pp, "place": place, "free": free, "host": host, "host_free": free_host_bytes()}
    seats = everyone.gather(mine)
    if text := check_places(job, plan, profile, seats):
        raise DoesNotFitError(text)


def length_factor(job: TrainJob, tokens: int | None = None) -> Any:
    """Return the times of the first pipeline's micro-batches relative to that of a micro-batch of `tokens` tokens
    (default: one sequence of `seq`), in proportion to their padded tokens."""
    batch = Batch(groups=job.groups[0])
    return np.array([batch.tokens_of(group) / (tokens or job.seq) for group in batch.groups])


def item_factor(job: TrainJob, measured: Profile | None = None) -> Any:
    """Return [micro-batch, layer]: the times of an encoder's layers relative to those with as many images as were
    measured, in this run or in a profile of its own; None if every micro-batch has that many."""
    form = job.inputs
    if form is None or form.decodes or not form.num_tower_layers:
        return None
    size, stated = job.micro_batch_size, None
    if measured is not None and isinstance(measured.about.get("recipe"), dict):
        stated = measured.costs.setup or Setup(gpu=None)
    factor = np.ones((job.num_micro_batches, job.spec.num_layers))
    for kind in form.kinds:
        items, (first, stop) = kind.items(job.num_micro_batches * size), kind.tower_range
        mine = np.array([sum(items[m * size : (m + 1) * size]) for m in range(job.num_micro_batches)])
        profiled = kind if stated is None else replace(kind, images=_stated_counts(stated, form, kind))
        typical = sum(profiled.typical(size))
        if typical:
            factor[:, first:stop] = np.maximum(mine / typical, NEARLY_NONE)[:, None]
    return None if (factor == 1).all() else factor


def _stated_counts(stated: Setup, form: InputForm, kind: InputForm) -> tuple[float, ...]:
    """Return the items per sequence that a set-up states for one kind; with one tower, both names mean its items."""
    if form.beside is None:
        return stated.images or stated.recordings
    return stated.recordings if kind is form.beside else stated.images


def handed_factor(job: TrainJob, factor: Any) -> Any:
    """Return the factors of what layers hand over, for times by `item_factor`; None if they are the same.

    Layers of one of two towers also hand on what belongs to the other. A measured size does not say how much of it
    does, so the larger factor counts.
    """
    form = job.inputs
    if form is None or form.beside is None:
        return None
    out = factor.copy()
    towers = slice(0, form.num_tower_layers)
    out[:, towers] = factor[:, [kind.tower_range[0] for kind in form.kinds]].max(axis=1)[:, None]
    return out


def sized(job: TrainJob, profile: Profile) -> Profile:
    """Return the profile with the run's sizes, which a plan made from it states, so that another run with that plan has
    the same; unchanged if its times are not those of the run's micro-batches."""
    form = job.inputs
    setup = Setup(
        gpu=None,
        seq=job.seq,
        micro_batch_size=job.micro_batch_size,
        pp=job.pp,
        micro_batches=job.num_micro_batches,
        images=() if form is None else form.images,
        recordings=() if form is None or form.beside is None else form.beside.images,
        encoder_seq=None if form is None else form.positions or None,
        frozen=tuple((k, k) for k in job.frozen),
    )
    if job.groups or profile.costs.tokens_per_micro_batch != setup.tokens_per_micro_batch:
        return profile
    return profile.with_costs(profile.costs.replace(setup=setup))


def plan_of(job: TrainJob, profile: Profile | None, tell: Callable[[Phase], None]) -> Plan:
    if job.plan is not None:
        return job.plan
    costs = equal_costs(job.spec) if profile is None else profile.costs
    if profile is None and job.groups:
        costs = costs.replace(micro_batch_factor=length_factor(job))
    beside = {} if profile is None else carried(costs)
    if job.tune_s is None:
        return build_plan(job.system, costs, job.pp, job.num_micro_batches).with_extra(**beside)
    if profile is None:
        raise OctoPipeError("tuning needs costs; give --profile or leave --no-measure out")
    tell(Phase(text=f"tuning for {job.tune_s:g} s"))
    # Our own layers are known to be repeatable; others are recomputed only if a profile has checked it.
    shown = isinstance(job.spec, ModelSpec) or bool(costs.repeatable)
    found = tune(costs, job.pp, job.num_micro_batches, budget_s=job.tune_s, seed=job.seed, recompute=shown).plan
    return _faster(found, job, profile, tell).with_extra(**beside)


def _faster(found: Plan, job: TrainJob, profile: Profile, tell: Callable[[Phase], None]) -> Plan:
    """Return the tuned plan, or that of the published system if it is predicted to be faster with contention. The
    search does not consider contention, because its times are those with all ranks busy."""
    try:
        usual = build_plan(job.system, profile.costs, job.pp, job.num_micro_batches)
    except OctoPipeError:
        return found
    mine, theirs = predict(found, profile), predict(usual, profile)
    if not theirs.fits or theirs.makespan_ms >= mine.makespan_ms:
        return found
    tell(Phase(text=f"{job.system} is predicted to be faster than the tuned plan; using {job.system}"))
    return usual


def workload_of(job: TrainJob) -> Workload:
    """Return the job's layers and micro-batches, as they are measured and trained."""
    return Workload(
        spec=job.spec,
        tokens=job.seq,
        micro_batch_size=job.micro_batch_size,
        device=job.device,
        precision=job.mode.precision,
        compile_scans=job.compile_scans,
        asked_kernels=job.kernels,
        seed=job.seed,
        graphs=job.replays,
        checkpointed=job.checkpointed,
        frozen=job.frozen,
    )


def measured_plan(
    job: TrainJob, work: Workload, world: World, profile: Profile | None, tell: Callable[[Phase], None]
) -> tuple[TrainJob, Profile | None]:
    """Return the job with the plan that was measured as fastest, and the profile as corrected by the runs, if plans are
    to be run while tuning (collective); otherwise both unchanged."""
    if not job.tune_measured or profile is None or job.tune_s is None:
        return job, profile
    wanted = MeasuredTuneJob(
        work=work,
        profile=profile,
        num_micro_batches=job.num_micro_batches,
        tune_s=job.tune_s,
        budget_s=10.0 * job.tune_s,
        seed=job.seed,
    )
    with moment("while plans were tuned and run"):
        outcome = tune_on_ranks(world, wanted, tell=lambda line: tell(Phase(text=line)))
    plan = outcome.best.plan.with_extra(measured=outcome.as_dict(), **carried(outcome.profile.costs))
    return replace(job, plan=plan, micro_batches=None), outcome.profile


def optimizer_of(job: TrainJob, pipe: Pipeline) -> torch.optim.Optimizer:
    """Return the optimizer that the job names, with float32 master weights if its precision has them."""
    owners = {f"{k}.{name}": module for k, layer in pipe.modules().items() for name, module in layer.named_modules()}
    trained = {name: p for name, p in pipe.named_parameters() if p.requires_grad}
    flags = {name: decays(name, p, owners.get(name.rpartition(".")[0])) for name, p in trained.items()}
    if has_main_gradients(job.mode.precision) or job.shard_optimizer or job.offload_optimizer:

        def make(updated: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
            return _plain_optimizer(job, updated, [flags.get(p.layer_name, False) for p in updated])  # type: ignore[attr-defined]

        return MixedPrecisionOptimizer(make, pipe, shard=job.shard_optimizer, host=job.offload_optimizer)
    return _plain_optimizer(job, list(trained.values()), list(flags.values()))


def _plain_optimizer(
    job: TrainJob, parameters: list[torch.nn.Parameter], decay: Sequence[bool]
) -> torch.optim.Optimizer:
    """Return the optimizer itself. `decay`: which of the parameters have weight decay, in the order of the
    parameters."""
    listed = [
        {"params": [p for p, flag in zip(parameters, decay) if flag], "weight_decay": job.weight_decay},
        {"params": [p for p, flag in zip(parameters, decay) if not flag], "weight_decay": 0.0},
    ]
    if job.optimizer == "sgd":
        return torch.optim.SGD(listed, lr=job.lr, momentum=0.9)
    kind = torch.optim.AdamW if job.optimizer == "adamw" else torch.optim.Adam
    return kind(listed, lr=job.lr, betas=job.betas, eps=job.eps, fused=job.device == "cuda" or None)


def decays(name: str, parameter: torch.Tensor, owner: torch.nn.Module | None = None) -> bool:
    """Return whether weight decay applies to a parameter: it has at least two dimensions, and is neither a bias nor
    part of a norm.

    Matrices, embeddings, convolutions and experts decay; norms, biases (also those of all experts in one tensor) and
    vectors such as Mamba's A_log, D and dt_bias do not.
    """
    norm = owner is not None and "norm" in type(owner).__name__.lower()
    return parameter.ndim >= 2 and not name.endswith("bias") and not norm


def identity(spec: ModelSpec | HfModel) -> str:
    whose = "" if isinstance(spec, ModelSpec) else f" {spec.class_name}"
    return f"{spec.name} {spec.pattern} hidden {spec.hidden} vocab {spec.vocab}{whose}"


@contextlib.contextmanager
def folder(job: TrainJob) -> Iterator[None]:
    """A context in which the folder of the checkpoints is locked for this run. Raises an error for a folder that the
    run could not use."""
    if job.checkpoint is None or os.environ.get("RANK", "0") != "0":
        yield
        return
    found = latest(job.checkpoint)
    if found is None and (job.resume or job.elastic):
        refuse_dcp(job.checkpoint)
    if job.resume and found is None:
        raise nothing_to_resume(job.checkpoint)
    if found is not None and not job.resume and not job.elastic:
        raise OctoPipeError(
            f"{shown(job.checkpoint)} contains a run up to {found.name}; add --resume to continue it, "
            "or name another folder"
        )
    with locked(job.checkpoint):
        yield


def backend(job: TrainJob) -> str:
    if job.device == "cpu":
        return "gloo"
    if not torch.cuda.is_available():
        raise OctoPipeError("no CUDA device here; use --device cpu")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", job.nproc))
    return "nccl" if torch.cuda.device_count() >= here else "gloo"


@contextlib.contextmanager
def shared_gpu(job: TrainJob) -> Iterator[dict[str, str]]:
    """A context with the environment of the ranks. If several ranks share a GPU, it runs MPS, so that they compute at
    the same time."""
    gpus = 0 if job.device == "cpu" else torch.cuda.device_count()
    if job.device != "cpu" and gpus == 0:
        raise OctoPipeError("no CUDA device here; use --device cpu")
    if job.device == "cpu" or gpus >= job.nproc:
        yield {}
        return
    from octopipe.runtime.measure.mps import Mps

    with Mps.start(num_ranks=-(-job.nproc // gpus)) as mps:
        yield dict(mps.environment)


def memory_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        with open("/proc/self/statm") as file:
            return float(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(peak if sys.platform == "darwin" else peak * 1024)

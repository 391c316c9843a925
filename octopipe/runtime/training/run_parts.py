"""What a training run is made of: its groups of ranks, plan, optimizer, folder and devices.

Knows: how each is made from a `TrainJob`. Does not know: the order of things in a run (`train.py`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import shown
from octopipe.costs.profile_file import Profile
from octopipe.costs.table import CostTable
from octopipe.huggingface.described import HfModel
from octopipe.models.lengths import Batch
from octopipe.models.spec import ModelSpec
from octopipe.plans.plan import Plan
from octopipe.plans.setting import carried
from octopipe.runtime.measure.tuned_run import MeasuredTuneJob, tune_on_ranks
from octopipe.runtime.measure.workload import Workload
from octopipe.runtime.pipeline import Pipeline
from octopipe.runtime.ranks import launch
from octopipe.runtime.ranks.reduce import wait_for
from octopipe.runtime.ranks.world import World
from octopipe.runtime.training.job import Phase, TrainJob
from octopipe.runtime.training.shelf import latest, locked, refuse_dcp
from octopipe.runtime.wire.telling import broadcast_value
from octopipe.search.systems import build_plan
from octopipe.search.tuner import tune


class Everyone:
    """All ranks of all pipelines."""

    def __init__(self, seat: launch.Seat, group: dist.ProcessGroup | None):
        self._seat, self._group = seat, group

    def first(self, value: Any) -> Any:
        """The first rank's value, on every rank."""
        return value if self._group is None else broadcast_value(self._group, value, 0)

    def first_or_fail(self, make: Callable[[], Any]) -> Any:
        """What the first rank makes, on every rank; its error, too."""
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

    def most(self, number: int, timeout_s: float) -> int:
        """The largest of all ranks' numbers."""
        if self._group is None:
            return number
        box = torch.tensor([number])
        work = dist.all_reduce(box, dist.ReduceOp.MAX, group=self._group, async_op=True)
        wait_for(work, timeout_s, "the agreement to go on")
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


def length_factor(job: TrainJob) -> Any:
    """Times of the first pipeline's micro-batches over that of one sequence of `seq` tokens, taken as their padded
    tokens."""
    batch = Batch(groups=job.groups[0])
    return np.array([batch.tokens_of(group) / job.seq for group in batch.groups])


def plan_of(job: TrainJob, profile: Profile | None, tell: Callable[[Phase], None]) -> Plan:
    if job.plan is not None:
        return job.plan
    costs = CostTable.uniform(num_layers=job.spec.num_layers, model=job.spec.name) if profile is None else profile.costs
    if profile is None and job.groups:
        costs = costs.replace(micro_batch_factor=length_factor(job))
    beside = {} if profile is None else carried(costs)
    if job.tune_s is None:
        return build_plan(job.system, costs, job.pp, job.num_micro_batches).with_extra(**beside)
    if profile is None:
        raise OctoPipeError("tuning needs costs; give --profile or leave --no-measure out")
    tell(Phase(text=f"tuning for {job.tune_s:g} s"))
    found = tune(costs, job.pp, job.num_micro_batches, budget_s=job.tune_s, seed=job.seed).plan
    return found.with_extra(**beside)


def measured_plan(
    job: TrainJob, work: Workload, world: World, profile: Profile, tell: Callable[[Phase], None]
) -> tuple[TrainJob, Profile]:
    """The job with the plan that was measured fastest, and the profile as the runs corrected it (collective)."""
    assert job.tune_s is not None
    outcome = tune_on_ranks(
        world,
        MeasuredTuneJob(
            work=work,
            profile=profile,
            num_micro_batches=job.num_micro_batches,
            tune_s=job.tune_s,
            budget_s=10.0 * job.tune_s,
            seed=job.seed,
        ),
        tell=lambda line: tell(Phase(text=line)),
    )
    plan = outcome.best.plan.with_extra(measured=outcome.as_dict(), **carried(outcome.profile.costs))
    return replace(job, plan=plan, micro_batches=None), outcome.profile


def optimizer_of(job: TrainJob, pipe: Pipeline) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not."""
    parameters = [p for p in pipe.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": job.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if job.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=job.lr, momentum=0.9)
    kind = torch.optim.AdamW if job.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=job.lr, betas=(0.9, 0.95), fused=job.device == "cuda" or None)


def identity(spec: ModelSpec | HfModel) -> str:
    whose = "" if isinstance(spec, ModelSpec) else f" {spec.class_name}"
    return f"{spec.name} {spec.pattern} hidden {spec.hidden} vocab {spec.vocab}{whose}"


def autocast(job: TrainJob, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if job.dtype == "bfloat16" else contextlib.nullcontext()


@contextlib.contextmanager
def folder(job: TrainJob) -> Iterator[None]:
    """The folder of the checkpoints, held for this run; says before anything starts what would go wrong with it."""
    if job.checkpoint is None or os.environ.get("RANK", "0") != "0":
        yield
        return
    found = latest(job.checkpoint)
    if found is None and (job.resume or job.elastic):
        refuse_dcp(job.checkpoint)
    if job.resume and found is None:
        raise OctoPipeError(f"{shown(job.checkpoint)}: no checkpoint to resume from; leave --resume out")
    if found is not None and not job.resume and not job.elastic:
        raise OctoPipeError(
            f"{shown(job.checkpoint)} holds a run up to {found.name}; add --resume to go on with it, "
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
    """MPS where several ranks share a GPU, so that they compute at the same time."""
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

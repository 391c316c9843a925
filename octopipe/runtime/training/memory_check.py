"""Whether a run fits: compares the memory that its ranks need with the free memory of their GPUs or this host.

Knows: the size of weights, gradients, optimizer state and activations of every rank, and how to query free memory. Does
not know: how a run proceeds (`train.py`).

The prediction uses measured costs if there is a profile, otherwise the sizes of `measure/layer_sizes.py`. A rejected
run therefore cannot work, but an accepted run may still lack a few percent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from octopipe.base.errors import DoesNotFitError, OctoPipeError
from octopipe.costs.profile_file import Profile
from octopipe.models.spec import ModelSpec
from octopipe.plans.plan import Plan
from octopipe.runtime.measure.forecast import GIB, PROCESS_BYTES, UNFIT
from octopipe.runtime.measure.host_memory import free_host_bytes
from octopipe.runtime.measure.layer_sizes import equal_costs, layer_activations, layer_parameters
from octopipe.runtime.precision import has_main_gradients
from octopipe.runtime.training.job import TrainJob
from octopipe.search.systems import build_plan

STATES = {"adamw": 2, "adam": 2, "sgd": 1}
"""The number of values that an optimizer keeps per parameter."""


def state_bytes_per_parameter(job: TrainJob) -> float:
    """Return the bytes of moments and master weight of one parameter, wherever they are."""
    shards = job.dp if job.shard_optimizer else 1
    bare = job.mode.bytes_per_parameter(state_factor=0)
    return job.mode.bytes_per_parameter(state_factor=STATES[job.optimizer], shards=shards) - bare


def bytes_per_parameter(job: TrainJob) -> float:
    """Return the bytes of weight, gradient and optimizer state that the run's precision keeps for a parameter on its
    device."""
    here = (1.0 - job.offload_optimizer) * state_bytes_per_parameter(job)
    return job.mode.bytes_per_parameter(state_factor=0) + here


def host_bytes_per_parameter(job: TrainJob) -> float:
    """Return the bytes that a run with optimizer state in host memory keeps there for a parameter: the state, the
    tensor that is updated, and the buffer in which gradients arrive."""
    width = 8.0 if job.mode.precision == "fp64" else 4.0
    copies = width if has_main_gradients(job.mode.precision) else 2 * width  # there, the state includes the master
    shards = job.dp if job.shard_optimizer else 1
    return job.offload_optimizer * (state_bytes_per_parameter(job) + copies / shards)


def host_bytes(job: TrainJob, plan: Plan) -> list[float]:
    """Return the bytes that the optimizer state of every rank of one pipeline takes in its host's memory."""
    counts = layer_parameters(job.spec)
    out = []
    for rank in range(plan.num_ranks):
        layers = {k for s in plan.stages if s.rank == rank for k in range(s.first, s.stop)} - set(job.frozen)
        out.append(host_bytes_per_parameter(job) * sum(counts[k] for k in layers))
    return out


def predicted_bytes(job: TrainJob, plan: Plan, profile: Profile | None = None) -> list[float]:
    """Return the peak memory of every rank of one pipeline on its device; on a CPU, all of its memory."""
    if profile is None:
        static = [n * bytes_per_parameter(job) for n in layer_parameters(job.spec)]
        held = layer_activations(
            job.spec, seq=job.seq, micro_batch_size=job.micro_batch_size, precision=job.mode.precision
        )
    else:
        static, held = profile.costs.static_bytes.tolist(), profile.costs.activation_bytes.tolist()
        if job.offload_optimizer:  # measured as if all state were on the device
            gone = job.offload_optimizer * state_bytes_per_parameter(job)
            counts = [0 if k in job.frozen else n for k, n in enumerate(layer_parameters(job.spec))]
            static = [max(0.0, size - gone * count) for size, count in zip(static, counts, strict=True)]
    beside = host_bytes(job, plan) if job.offload_optimizer and job.device == "cpu" else [0.0] * plan.num_ranks
    out = []
    for rank, order in enumerate(plan.orders):
        mine = {s: stage for s, stage in enumerate(plan.stages) if stage.rank == rank}
        layers = {k for stage in mine.values() for k in range(stage.first, stage.stop)}
        size = {s: sum(held[stage.first : stage.stop]) for s, stage in mine.items()}
        now = most = 0.0
        for op in order:
            if op.kind == "F":
                now += size[op.stage]
                most = max(most, now)
            elif op.kind in ("I", "B"):
                now -= size[op.stage]
        out.append(PROCESS_BYTES + sum(static[k] for k in layers) + most + beside[rank])
    return out


def stand_in_plan(job: TrainJob) -> Plan:
    """Return the plan with which a run is checked before it has its own: the given plan, or its system's plan for equal
    layers."""
    if job.plan is not None:
        return job.plan
    costs = equal_costs(job.spec)
    try:
        return build_plan(job.system if job.tune_s is None else "1f1b", costs, job.pp, job.num_micro_batches)
    except OctoPipeError:  # the error is reported when the real plan is made
        return build_plan("1f1b", costs, job.pp, job.num_micro_batches)


def check_host(job: TrainJob) -> None:
    """Raise an error if ranks on this host's CPUs need more memory than is free. Called before any rank starts."""
    if not job.memory_check or job.device != "cpu":
        return
    here = int(os.environ.get("LOCAL_WORLD_SIZE", job.nproc))
    each = predicted_bytes(job, stand_in_plan(job), job.profile)
    needed = sum(each) * job.dp * here / job.nproc
    free = free_host_bytes()
    if free is not None and needed > free:
        raise DoesNotFitError(_line(job, "this host", needed, free, each))


def check_places(job: TrainJob, plan: Plan, profile: Profile | None, seats: Sequence[Mapping[str, Any]]) -> str:
    """Return one line about the first device or host whose memory is too small for the plan that runs, or "".

    `seats`: for every rank of the run its `pp_rank`, the `place` whose memory it uses, and how much is `free` there;
    also its `host` and how much is `host_free`, for optimizer state that is kept there.
    """
    if not job.memory_check:
        return ""
    each = predicted_bytes(job, plan, profile)
    needed: dict[str, float] = {}
    for seat in seats:
        needed[seat["place"]] = needed.get(seat["place"], 0.0) + each[seat["pp_rank"]]
    for seat in seats:
        if seat["free"] is not None and needed[seat["place"]] > seat["free"]:
            return _line(job, seat["place"], needed[seat["place"]], seat["free"], each)
    return _host_line(job, plan, seats) if job.offload_optimizer and job.device != "cpu" else ""


def _host_line(job: TrainJob, plan: Plan, seats: Sequence[Mapping[str, Any]]) -> str:
    """Return one line about the first host that cannot hold the optimizer state of its ranks' GPUs, or ""."""
    each = host_bytes(job, plan)
    for host, free in {seat["host"]: seat["host_free"] for seat in seats}.items():
        needed = sum(each[seat["pp_rank"]] for seat in seats if seat["host"] == host)
        if free is not None and needed > free:
            return (
                f"{job.spec.name} {UNFIT}: --offload-optimizer {job.offload_optimizer:g} needs {needed / GIB:.1f} GiB "
                f"of the memory of {host}, {free / GIB:.1f} GiB are free; keep a smaller share there, use more ranks "
                "on other machines, or --no-memory-check"
            )
    return ""


def _line(job: TrainJob, place: str, needed: float, free: float, each: Sequence[float]) -> str:
    ranks = ", ".join(f"{b / GIB:.1f}" for b in each)
    remedy = "--layers or --scale" if isinstance(job.spec, ModelSpec) else "--layers"
    return (
        f"{job.spec.name} {UNFIT}: the run needs about {needed / GIB:.1f} GiB of {place}, {free / GIB:.1f} GiB are "
        f"free (per rank {ranks} GiB: weights, gradients, {job.optimizer} state, activations); use more ranks on other "
        f"machines, a shorter --seq, fewer {remedy}, or --no-memory-check"
    )

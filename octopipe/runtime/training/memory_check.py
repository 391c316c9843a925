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
from octopipe.costs.table import CostTable
from octopipe.models.spec import ModelSpec
from octopipe.plans.plan import Plan
from octopipe.runtime.measure.forecast import GIB, PROCESS_BYTES, UNFIT
from octopipe.runtime.measure.host_memory import free_host_bytes
from octopipe.runtime.measure.layer_sizes import layer_activations, layer_parameters
from octopipe.runtime.training.job import TrainJob
from octopipe.search.systems import build_plan

STATES = {"adamw": 2, "adam": 2, "sgd": 1}
"""Values an optimizer keeps per parameter."""


def bytes_per_parameter(job: TrainJob) -> float:
    """Weight, gradient and optimizer state, as the run's precision keeps them."""
    shards = job.dp if job.shard_optimizer else 1
    return job.mode.bytes_per_parameter(state_factor=STATES[job.optimizer], shards=shards)


def predicted_bytes(job: TrainJob, plan: Plan, profile: Profile | None = None) -> list[float]:
    """What every rank of one pipeline holds at its fullest."""
    if profile is None:
        static = [n * bytes_per_parameter(job) for n in layer_parameters(job.spec)]
        held = layer_activations(
            job.spec, seq=job.seq, micro_batch_size=job.micro_batch_size, precision=job.mode.precision
        )
    else:
        static, held = profile.costs.static_bytes.tolist(), profile.costs.activation_bytes.tolist()
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
        out.append(PROCESS_BYTES + sum(static[k] for k in layers) + most)
    return out


def stand_in_plan(job: TrainJob) -> Plan:
    """The plan a run is checked with before it has one: given, or its system's for equal layers."""
    if job.plan is not None:
        return job.plan
    costs = CostTable.uniform(num_layers=job.spec.num_layers)
    try:
        return build_plan(job.system if job.tune_s is None else "1f1b", costs, job.pp, job.num_micro_batches)
    except OctoPipeError:  # whoever makes the plan for good says what is wrong
        return build_plan("1f1b", costs, job.pp, job.num_micro_batches)


def check_host(job: TrainJob) -> None:
    """Before any rank starts: the memory of this host, for ranks on its CPUs."""
    if not job.memory_check or job.device != "cpu":
        return
    here = int(os.environ.get("LOCAL_WORLD_SIZE", job.nproc))
    each = predicted_bytes(job, stand_in_plan(job), job.profile)
    needed = sum(each) * job.dp * here / job.nproc
    free = free_host_bytes()
    if free is not None and needed > free:
        raise DoesNotFitError(_line(job, "this host", needed, free, each))


def check_places(job: TrainJob, plan: Plan, profile: Profile | None, seats: Sequence[Mapping[str, Any]]) -> str:
    """With the plan that runs: one line about the first place that is too small, or "".

    `seats`: of every rank of the run its `pp_rank`, the `place` whose memory it uses, and what is `free` there.
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
    return ""


def _line(job: TrainJob, place: str, needed: float, free: float, each: Sequence[float]) -> str:
    ranks = ", ".join(f"{b / GIB:.1f}" for b in each)
    mend = "--layers or --scale" if isinstance(job.spec, ModelSpec) else "--layers"
    return (
        f"{job.spec.name} {UNFIT}: the run needs about {needed / GIB:.1f} GiB of {place}, {free / GIB:.1f} GiB are "
        f"free (per rank {ranks} GiB: weights, gradients, {job.optimizer} state, activations); use more ranks on other "
        f"machines, a shorter --seq, fewer {mend}, or --no-memory-check"
    )

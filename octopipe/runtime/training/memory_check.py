"""Whether a run fits: compares the memory that its ranks need with the free memory of their GPUs or this host.

Knows: the size of weights, gradients, optimizer state and activations of every rank, and how to query free memory. Does
not know: how a run proceeds (`train.py`).

The prediction uses measured costs if there is a profile. Otherwise parameters are exact, and activations assume flash
attention and fused losses (analytic sizes if the model's layers are known, otherwise 34 bytes per token and hidden
unit). A rejected run therefore cannot work, but an accepted run may still lack a few percent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octopipe.base.errors import DoesNotFitError, OctoPipeError
from octopipe.costs.analytic.table import setup_costs
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import DEFAULT_GPU, Setup
from octopipe.costs.profile_file import Profile
from octopipe.costs.table import CostTable
from octopipe.models.readers.hf_config import from_config
from octopipe.models.spec import ModelSpec
from octopipe.plans.plan import Plan
from octopipe.runtime.training.host_memory import free_host_bytes
from octopipe.runtime.training.job import TrainJob
from octopipe.search.systems import build_plan

if TYPE_CHECKING:
    from octopipe.huggingface.described import HfModel

GIB = float(1 << 30)
UNFIT = "does not fit in memory"
"""In every line about it, and by this found again in what a rank says."""
PROCESS_BYTES = 0.25 * GIB
"""Of a rank's own, beside what it trains: libraries and their workspaces."""
STATES = {"adamw": 2, "adam": 2, "sgd": 1}
"""Values an optimizer keeps per parameter."""


def bytes_per_parameter(job: TrainJob) -> float:
    """Weight, gradient and optimizer state, as the run's precision keeps them."""
    shards = job.dp if job.shard_optimizer else 1
    return job.mode.bytes_per_parameter(state_factor=STATES[job.optimizer], shards=shards)


def layer_parameters(spec: ModelSpec | HfModel) -> list[int]:
    """Parameters of every layer; a tied head counts them too, for the rank that holds it alone."""
    if isinstance(spec, ModelSpec):
        tied = getattr(spec.layers[-1], "tied", False)
        counts = [layer.parameters for layer in spec]
        return [*counts[:-1], counts[-1] + (spec.vocab * spec.hidden if tied else 0)]
    if spec.layer_parameters:
        return list(spec.layer_parameters)
    return [spec.training_parameters // spec.num_layers] * spec.num_layers


def layer_activations(job: TrainJob) -> list[float]:
    """Bytes every layer holds for one micro-batch until its backward."""
    spec, count = job.spec, job.spec.num_layers
    width = {"fp64": 8.0, "fp32": 4.0}.get(job.mode.precision, 2.0)
    known = spec if isinstance(spec, ModelSpec) else _planned(spec.source, count)
    if known is not None:
        setup = Setup(gpu=gpu(DEFAULT_GPU), seq=job.seq, micro_batch_size=job.micro_batch_size)
        costs = setup_costs(known, setup)
        held = (costs.activation_bytes * width / 2.0).tolist()
        return [*held[:-1], held[-1] + float(costs.workspace_bytes[-1])]
    tokens = job.seq * job.micro_batch_size
    inside = 17.0 * width * tokens * spec.hidden
    return [width * tokens * spec.hidden, *[inside] * (count - 2), (width + 4.0) * tokens * spec.vocab]


def _planned(source: str, layers: int) -> ModelSpec | None:
    """The planner's own view of a transformers model, where it has one layer for each of its layers."""
    try:
        spec = from_config(source)
        spec = spec.without_mtp() if any(layer.symbol == "P" for layer in spec) else spec
    except OctoPipeError:
        return None
    return spec if spec.num_layers == layers else None


def predicted_bytes(job: TrainJob, plan: Plan, profile: Profile | None = None) -> list[float]:
    """What every rank of one pipeline holds at its fullest."""
    if profile is None:
        static = [n * bytes_per_parameter(job) for n in layer_parameters(job.spec)]
        held = layer_activations(job)
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


def check_layers(spec: ModelSpec | HfModel, ranks: int, device: str) -> None:
    """Before layers are measured one at a time: each rank on this host holds the largest one with its gradients."""
    free = free_host_bytes()
    needed = ranks * (PROCESS_BYTES + 8.0 * max(layer_parameters(spec)))
    if device == "cpu" and free is not None and needed > free:
        raise DoesNotFitError(
            f"{spec.name} {UNFIT}: its largest layer with gradients on {ranks} ranks needs about {needed / GIB:.1f} "
            f"GiB of this host, {free / GIB:.1f} GiB are free; use fewer --nproc"
            + (", or --scale" if isinstance(spec, ModelSpec) else "")
        )


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

"""Stages on unequal meshes as a plan with costs: the decisions of a whole-cluster system, simulated op by op.

Knows: how the costs of layers on different meshes are combined into one cost table, and the results that are shown.
Does not know: how stages were chosen (`alpa.py`, `dapple.py`, `metis.py`, `mist.py`).

In the table, every layer has its costs on the mesh of its own stage. The table is therefore exact for this partition
and not valid for any other. One micro-batch comprises the samples of all replicas of a stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from octopipe.costs.analytic.flops import model_flops
from octopipe.costs.analytic.layer_pricing import HIDDEN_COST
from octopipe.costs.cluster.hardware import INTER_LATENCY_MS, INTRA_LATENCY_MS, Link, Network, gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.table import PER_LAYER, CostTable
from octopipe.plans.plan import Plan
from octopipe.search.planner.published.meshes import Devices, Floats, LayerPrices, Mesh, MeshPricer
from octopipe.search.systems.layer_ranges import one_f_one_b_plan
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import GIB, Timeline

COLUMNS = tuple(name for name in PER_LAYER if name != "gradient_bytes")
"""Columns of the cost table that are filled. Gradients are reduced inside a stage's mesh, and the exposed time of that
is added to the optimizer's, so `gradient_bytes` stays zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """The shares of a stage's data that are kept in host memory."""

    optimizer: float = 0.0
    gradients: float = 0.0
    weights: float = 0.0
    activations: float = 0.0

    def words(self) -> str:
        parts = [f"{100 * getattr(self, n):.0f} % of {n}" for n in self.__dataclass_fields__ if getattr(self, n)]
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """One stage: its layers, its GPUs and how they use memory."""

    first: int
    stop: int
    mesh: Mesh
    start: int
    """Number of its first GPU."""
    again: int = 0
    """Number of layers, counted from its first, that keep only their input and are recomputed."""
    offload: Offload = Offload()

    @property
    def gpus(self) -> int:
        return self.mesh.gpus

    def words(self) -> str:
        more = [f"ZeRO-{self.mesh.zero}"] if self.mesh.dp > 1 else []
        if self.again:
            more.append(f"{self.again} layers recomputed")
        elif self.mesh.recompute != "none":
            more.append(f"{self.mesh.recompute} recomputation")
        if self.offload != Offload():
            more.append(f"offloads {self.offload.words()}")
        return f"layers {self.first}-{self.stop - 1} on {self.mesh.words()}" + "".join(f", {m}" for m in more)

    def as_dict(self) -> dict[str, Any]:
        names = ("optimizer", "gradients", "weights", "activations")
        return {
            "layers": [self.first, self.stop],
            "gpus": self.gpus,
            "kinds": list(self.mesh.kinds),
            "shares": list(self.mesh.shares),
            "tp": self.mesh.tp,
            "dp": self.mesh.dp,
            "ep": self.mesh.ep,
            "zero": self.mesh.zero,
            "recompute": self.mesh.recompute if not self.again else f"{self.again} layers",
            "offload": {n: getattr(self.offload, n) for n in names},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """The decisions of a system for the whole cluster, with the value of its own formula."""

    system: str
    stages: tuple[StageChoice, ...]
    samples: int
    """Samples of one micro-batch over all replicas of a stage."""
    micro_batches: int
    objective_ms: float
    devices: Devices
    in_flight: tuple[int, ...] = ()
    """The largest number of micro-batches that each stage holds; empty if it is that of 1F1B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemPlan:
    """An arrangement with the results of its simulation."""

    arrangement: Arrangement
    plan: Plan
    costs: CostTable
    timeline: Timeline
    step_ms: float
    tokens_per_gpu_per_second: float
    mfu: float | None
    bubble: float
    peak_gib: float
    limit_gib: float
    fits: bool

    def as_dict(self) -> dict[str, Any]:
        names = ("step_ms", "tokens_per_gpu_per_second", "mfu", "bubble", "peak_gib", "limit_gib", "fits")
        a = self.arrangement
        return {
            "system": a.system,
            **{n: getattr(self, n) for n in names},
            "objective_ms": a.objective_ms,
            "micro_batches": a.micro_batches,
            "samples_per_micro_batch": a.samples,
            "stages": [stage.as_dict() for stage in a.stages],
        }


def judged(pricer: MeshPricer, arrangement: Arrangement) -> SystemPlan:
    """The arrangement under 1F1B, simulated op by op."""
    costs = stitched(pricer, arrangement)
    sizes = [s.stop - s.first for s in arrangement.stages]
    held = arrangement.in_flight or None
    m = arrangement.micro_batches
    plan = one_f_one_b_plan(costs, len(sizes), m, sizes, in_flight=held).with_extra(
        system=arrangement.system, stages_of_cluster=[s.as_dict() for s in arrangement.stages]
    )
    timeline = simulate(plan, costs, check=False)
    fullest = int(np.argmax(timeline.peak_bytes / np.array(timeline.capacity_bytes)))
    rate = costs.throughput(plan.num_ranks, m, timeline.step_ms)
    return SystemPlan(
        arrangement=arrangement,
        plan=plan,
        costs=costs,
        timeline=timeline,
        step_ms=timeline.step_ms,
        tokens_per_gpu_per_second=float(rate["tokens_per_gpu_per_second"] or 0.0),
        mfu=_mfu(arrangement, pricer.base, rate["model_tflops_per_gpu"]),
        bubble=timeline.bubble_ratio,
        peak_gib=float(timeline.peak_bytes[fullest]) / GIB,
        limit_gib=timeline.capacity_bytes[fullest] / GIB,
        fits=timeline.fits,
    )


def _mfu(arrangement: Arrangement, base: Setup, tflops: float | None) -> float | None:
    if tflops is None:
        return None
    kinds = arrangement.devices.kinds
    peak = sum(gpu(kind).peak_flops_per_ms(base.precision) for kind in kinds) / len(kinds)
    return tflops * 1e12 / (1e3 * peak)


def stitched(pricer: MeshPricer, arrangement: Arrangement) -> CostTable:
    """One cost table for the whole pipeline; gradients are reduced within each stage's own mesh."""
    base, spec, stages = pricer.base, pricer.spec, arrangement.stages
    columns = {name: np.zeros(spec.num_layers) for name in COLUMNS}
    for stage in stages:
        here = slice(stage.first, stage.stop)
        for name, values in stage_columns(pricer.price(stage.mesh), stage).items():
            columns[name][here] = values
    # A tensor between two stages counts with the larger of its sizes on the two meshes.
    pairs = {}
    for s, (a, b) in enumerate(pairwise(stages)):
        entering = pricer.price(b.mesh).boundary_bytes[a.stop - 1]
        columns["boundary_bytes"][a.stop - 1] = max(columns["boundary_bytes"][a.stop - 1], entering)
        pairs[s, s + 1] = pairs[s + 1, s] = link_between(arrangement.devices, a, b)
    assert base.seq is not None
    gpus = sum(s.gpus for s in stages)
    worst = max(pairs.values(), key=lambda link: link.transfer_ms(1 << 20), default=Link())
    return CostTable(
        model=spec.name,
        symbols=spec.pattern,
        network=Network(intra=worst, inter=worst, pairs=pairs),
        rank_memory_bytes=tuple(pricer.price(s.mesh).capacity_bytes for s in stages),
        tokens_per_micro_batch=base.seq * arrangement.samples,
        gpus_per_rank=gpus // len(stages) if gpus % len(stages) == 0 else gpus / len(stages),
        model_flops=model_flops(spec.layers, seq=base.seq) * arrangement.samples,
        setup=common_setup(pricer, arrangement),
        **columns,  # type: ignore[arg-type]
    )


def common_setup(pricer: MeshPricer, arrangement: Arrangement) -> Setup | None:
    """The set-up as all other commands describe it, if every stage has the same mesh and uses memory in the same
    way."""
    meshes = {s.mesh for s in arrangement.stages}
    unlike = any(s.again or s.offload != Offload() for s in arrangement.stages)
    if len(meshes) > 1 or unlike or len(set(arrangement.devices.kinds)) > 1:
        return None
    mesh = arrangement.stages[0].mesh
    setup = pricer.setup(mesh)
    whole = replace(setup, pp=len(arrangement.stages), micro_batches=arrangement.micro_batches)
    return replace(whole, recompute=mesh.recompute)  # type: ignore[arg-type]


def link_between(devices: Devices, a: StageChoice, b: StageChoice) -> Link:
    near = devices.in_one_node(a.start, b.start + b.gpus)
    kinds = [gpu(name) for name in {*a.mesh.kinds, *b.mesh.kinds}]
    speed = min(kind.intra_gb_per_s if near else kind.inter_gb_per_s for kind in kinds)
    return Link.of_bandwidth(speed, INTRA_LATENCY_MS if near else INTER_LATENCY_MS)


def stage_columns(prices: LayerPrices, stage: StageChoice) -> dict[str, Floats]:
    """Return the cost columns of a stage's layers, including its recomputation, its offloading and the exposed part of
    its gradient reduction."""
    here = slice(stage.first, stage.stop)
    out = {name: getattr(prices, name)[here].copy() for name in COLUMNS}
    for i in range(min(stage.again, stage.stop - stage.first)):
        layer = stage.first + i
        kept = float(prices.boundary_bytes[layer - 1]) if layer else 0.0
        out["input_ms"][i] += out["forward_ms"][i]
        out["workspace_bytes"][i] += max(out["activation_bytes"][i] - kept, 0.0)
        out["activation_bytes"][i] = min(kept, out["activation_bytes"][i])
        out["stash_bytes"][i] = min(kept, out["stash_bytes"][i])
    work = float(out["forward_ms"].sum() + out["input_ms"].sum() + out["weight_ms"].sum())
    moved = host_traffic(prices, here, out["activation_bytes"], stage.offload)
    slower = overlapped(work, moved.each_ms) / work if work > 0 else 1.0
    for name in ("forward_ms", "input_ms", "weight_ms"):
        out[name] *= slower
    layers = stage.stop - stage.first
    whole = prices.reduction_ms[here]
    behind = out["forward_ms"] + out["input_ms"] + out["weight_ms"]
    shown = np.maximum(whole - behind, whole / max(layers, 1))
    late = max(0.0, moved.once_ms - work) + HIDDEN_COST * min(moved.once_ms, work)
    out["optimizer_ms"] = out["optimizer_ms"] + shown + late / max(layers, 1)
    out["static_bytes"] = np.maximum(out["static_bytes"] - moved.static_bytes, 0.0)
    kept_share = 1.0 - stage.offload.activations
    # While a layer runs, everything that it has offloaded is on the device.
    back = moved.static_bytes + stage.offload.activations * out["activation_bytes"]
    out["workspace_bytes"] = out["workspace_bytes"] + back
    out["activation_bytes"] *= kept_share
    out["stash_bytes"] = np.minimum(out["stash_bytes"], out["activation_bytes"])
    return out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostTraffic:
    """The traffic of offloading on the busier direction of the link to the host, and the memory that it frees."""

    each_ms: float
    """Milliseconds per micro-batch."""
    once_ms: float
    """Milliseconds per step, which overlap with the first micro-batch."""
    static_bytes: Floats
    """[layer]: static bytes that are no longer on the GPU."""


def host_traffic(prices: LayerPrices, here: slice, activation: Floats, offload: Offload) -> HostTraffic:
    """Return the host traffic of a stage. Optimizer state is moved in both directions once per step, gradients and
    activations in both directions with every micro-batch, and weights to the device twice per micro-batch, for F and
    for the backward."""
    state = offload.optimizer * prices.held_state_bytes[here]
    gradient = offload.gradients * prices.held_gradient_bytes[here]
    weight = offload.weights * prices.held_weight_bytes[here]
    stored = offload.activations * float(activation.sum())
    to_host = stored + float(gradient.sum())
    from_host = stored + float(gradient.sum()) + 2 * float(weight.sum())
    return HostTraffic(
        each_ms=max(to_host, from_host) * prices.host_ms_per_byte,
        once_ms=float(state.sum()) * prices.host_ms_per_byte,
        static_bytes=state + gradient + weight,
    )


def overlapped(compute_ms: float, moved_ms: float) -> float:
    """Return the time of concurrent computation and host traffic: the longer one, plus a share of the shorter one
    because they slow each other down."""
    return max(compute_ms, moved_ms) + HIDDEN_COST * min(compute_ms, moved_ms)


def hop_ms(pricer: MeshPricer, devices: Devices, a: StageChoice, b: StageChoice) -> float:
    """Return the time to transfer an activation from a to b and its gradient back."""
    nbytes = max(float(pricer.price(x.mesh).boundary_bytes[a.stop - 1]) for x in (a, b))
    return 2 * link_between(devices, a, b).transfer_ms(nbytes)


def limit_excess(found: SystemPlan) -> float:
    """Return the largest share by which a stage exceeds its memory limit."""
    return float(np.max(found.timeline.peak_bytes / np.array(found.timeline.capacity_bytes))) - 1.0


def on_real_devices(arrangement: Arrangement) -> Arrangement:
    """Return the arrangement with the real GPU kinds, because systems designed for equal GPUs assume the slowest kind
    everywhere. A tensor-parallel group of several kinds counts as its slowest GPU."""
    devices = arrangement.devices
    stages = []
    for stage in arrangement.stages:
        mine = devices.kinds[stage.start : stage.start + stage.gpus]
        groups = [mine[i : i + stage.mesh.tp] for i in range(0, len(mine), stage.mesh.tp)]
        kinds = tuple(min(group, key=lambda k: gpu(k).bf16_tflops * gpu(k).clock) for group in groups)
        stages.append(replace(stage, mesh=replace(stage.mesh, kinds=kinds)))
    return replace(arrangement, stages=tuple(stages))

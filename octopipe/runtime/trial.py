"""Trials: a model on this machine's ranks, profiled, or run under a plan and timed.

Knows: how to make a model's layers and random data on a device, how many steps make a measurement. Does not know:
processes (`ranks.py`) or what is done with the numbers (`validate.py`, `adapt.py`). All functions here are called by
every rank together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from octopipe.contention import predict
from octopipe.cost import CostTable
from octopipe.errors import OctoPipeError
from octopipe.lower import Channel, lower
from octopipe.model import ModelSpec
from octopipe.nn import build_layers, cross_entropy
from octopipe.plan import Plan
from octopipe.profile_file import Profile
from octopipe.runtime.links import measure_links, measure_overlap
from octopipe.runtime.messages import Leaf
from octopipe.runtime.pipeline import Pipeline
from octopipe.runtime.profiler import Layer, assemble, gather, groups_of_spec, profile_layers
from octopipe.runtime.slots import Slot
from octopipe.runtime.transports.cuda_ipc import IpcTransport
from octopipe.runtime.transports.lanes import CudaLane
from octopipe.runtime.validate import Fidelity, compare
from octopipe.runtime.world import World
from octopipe.systems import build_plan
from octopipe.timeline import Timeline

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model with the size of its micro-batches and the device of its ranks."""

    spec: ModelSpec
    tokens: int
    """Per sequence."""
    micro_batch_size: int = 1
    device: str = "cpu"
    """"cpu", "cuda" (one GPU per rank), or "cuda" on fewer GPUs than ranks (shared)."""
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise OctoPipeError(f"dtype {self.dtype!r}; one of {', '.join(DTYPES)}")
        if self.tokens < 1 or self.micro_batch_size < 1:
            raise OctoPipeError(f"{self.micro_batch_size} x {self.tokens} tokens; give at least one of each")

    def place(self, rank: int) -> torch.device:
        """This rank's device, made current."""
        if self.device == "cpu":
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise OctoPipeError("no CUDA device here; use --device cpu")
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def transport(self, world: World) -> str | None:
        """CUDA IPC where ranks share a GPU; otherwise what fits the device."""
        if self.device == "cpu":
            return None
        return "cuda_ipc" if torch.cuda.device_count() < world.size else None

    def layers(self, device: torch.device) -> list[Callable[[], nn.Module]]:
        return build_layers(self.spec, dtype=DTYPES[self.dtype], device=device, seed=self.seed)

    def batch(self, device: torch.device, count: int, step: int = 0) -> list[Tensor]:
        """Random tokens of `count` micro-batches, the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed + 7919 * step)
        shape = (self.micro_batch_size, self.tokens)
        return [torch.randint(self.spec.vocab, shape, generator=generator).to(device) for _ in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileJob:
    """What `profile_task` does."""

    work: Workload
    repeats: int
    warm_up: int
    state_factor: float
    about: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateJob:
    """What `validate_task` does."""

    work: Workload
    plan: Plan
    profile: Profile
    steps: int
    warm_up: int
    channel: Channel
    profile_again: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A plan's measured steps."""

    timeline: Timeline
    """Of the step with the median makespan."""
    steps_ms: tuple[float, ...]
    """Makespans."""
    wall_ms: tuple[float, ...]
    """The same on the host's clock, barrier to barrier."""
    peak_bytes: tuple[float, ...]
    """Allocator's peak per rank; empty on a CPU."""
    loss: float

    @property
    def step_ms(self) -> float:
        return float(np.median(self.steps_ms))

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        low, high = np.percentile(self.steps_ms, [25, 75])
        return float((high - low) / self.step_ms)


def profile_workload(
    work: Workload,
    world: World,
    *,
    repeats: int = 10,
    warm_up: int = 3,
    state_factor: float = 2.0,
    levels: Sequence[int] = (1,),
    links: bool = True,
    rehearsal: bool = True,
    about: dict[str, Any] | None = None,
) -> Profile:
    """Measure layers and links with all ranks at work. `rehearsal`: also run a few steps of a GPipe plan, see
    `rehearsed`."""
    device = work.place(world.rank)
    began = time.perf_counter()
    mine = profile_layers(
        work.layers(device),
        work.batch(device, 1)[0],
        cross_entropy,
        work.batch(device, 1, step=1)[0],
        groups=groups_of_spec(work.spec),
        repeats=repeats,
        warm_up=warm_up,
        levels=levels,
        group=world.control,
    )
    _free(device)
    boundary = int(max(m.boundary_bytes for m in mine.memory))
    found = {}
    if world.size > 1 and links:
        sizes = sorted({1 << 12, max(1 << 13, boundary // 4), max(1 << 14, boundary)})
        found = measure_links(world, device, sizes=sizes, transport=work.transport(world))
        slowdown = _overlap_slowdown(work, world, device, boundary)
        about = {**(about or {}), "overlap_slowdown": round(slowdown, 4)}
    memory = None
    if device.type == "cuda":
        shared = max(1, -(-world.size // torch.cuda.device_count()))
        memory = 0.92 * torch.cuda.get_device_properties(device).total_memory / shared
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    profile = assemble(
        gather(mine, world.control),
        model=work.spec.name,
        symbols=work.spec.pattern,
        tokens=work.tokens * work.micro_batch_size,
        links=found,
        state_factor=state_factor,
        memory_bytes=memory,
        about={
            "device": name,
            "dtype": work.dtype,
            "torch": str(torch.__version__),
            "date": time.strftime("%Y-%m-%d"),
            **(about or {}),
        },
    )
    if rehearsal and links and world.size > 1 and work.spec.num_layers >= world.size:
        profile = rehearsed(work, profile, world)
    seconds = round(time.perf_counter() - began, 2)
    return replace(profile, about={**profile.about, "total_seconds": seconds})


def _overlap_slowdown(work: Workload, world: World, device: torch.device, nbytes: int) -> float:
    """What transfers cost the computation beside them, on the model's second layer."""
    layers = work.layers(device)
    first = layers[0]()(work.batch(device, 1)[0]).detach()
    layer = Layer(layers[min(1, len(layers) - 2)](), first, None, False) if len(layers) > 2 else None

    def once() -> None:
        if layer is not None:
            layer.once(lambda: None)

    found = measure_overlap(world, device, once, nbytes=nbytes, transport=work.transport(world))
    _free(device)
    return found if layer is not None else 1.0


def rehearsed(work: Workload, profile: Profile, world: World) -> Profile:
    """The profile corrected by what single layers cannot show: ops of whole stages, fed by transfers.

    A short GPipe run gives one factor per op kind: measured over predicted time at work.
    """
    plan = build_plan("gpipe", profile.costs, world.size, world.size, split_backward=True)
    trial = run_plan(work, plan, world, profile, steps=3, warm_up=2)
    seen = compare(predict(plan, profile), trial.timeline).kind_error
    factors = {kind: float(np.clip(1.0 / (1.0 + seen.get(kind, 0.0)), 0.8, 1.25)) for kind in "FIW"}
    factors = world.gather(factors)[0]

    def scaled(costs: CostTable) -> CostTable:
        return costs.replace(
            forward_ms=factors["F"] * costs.forward_ms,
            input_ms=factors["I"] * costs.input_ms,
            weight_ms=factors["W"] * costs.weight_ms,
        )

    return replace(
        profile,
        costs=scaled(profile.costs),
        partial={level: scaled(table) for level, table in profile.partial.items()},
        about={**profile.about, "rehearsal": factors},
    )


def run_plan(
    work: Workload,
    plan: Plan,
    world: World,
    profile: Profile,
    *,
    steps: int = 5,
    warm_up: int = 2,
    channel: Channel = "directed",
    timeout_s: float = 120.0,
) -> Trial:
    """Run a plan and time its steps; gradients exist throughout, as between optimizer updates.

    `channel="blocking"` on a shared GPU really blocks: a rank's computation waits for each of its transfers.
    """
    device = work.place(world.rank)
    cuda = device.type == "cuda"
    program = lower(plan, profile.costs, channel=channel)
    pipe = Pipeline(
        work.layers(device),
        program,
        cross_entropy,
        costs=profile.costs,
        device=device,
        group=world,
        transport=_transport(work, world, device, timeout_s, blocking=channel == "blocking"),
        timeout_s=timeout_s,
        seed=None,
    )
    timelines: list[Timeline] = []
    wall: list[float] = []
    loss = float("nan")
    with closing(pipe):
        batch = work.batch(device, plan.num_micro_batches)
        target = work.batch(device, plan.num_micro_batches, step=1)
        for p in pipe.parameters():
            p.grad = torch.zeros_like(p)
        for k in range(warm_up + steps):
            if cuda:
                torch.cuda.synchronize(device)
                if k == warm_up:
                    torch.cuda.reset_peak_memory_stats(device)
            _barrier(world)
            began = time.perf_counter()
            value = pipe.step(batch, target, reduce_loss=k == 0)
            if value is not None:
                loss = float(value)
            if cuda:
                torch.cuda.synchronize(device)
            _barrier(world)
            if k >= warm_up:
                wall.append(1e3 * (time.perf_counter() - began))
                timelines.append(_with_arrivals(pipe, pipe.timeline()))
        peak = torch.cuda.max_memory_allocated(device) if cuda else 0
    del pipe
    _free(device)
    spans = [t.makespan_ms for t in timelines]
    middle = int(np.argsort(spans)[len(spans) // 2])
    peaks = tuple(float(p) for p in world.gather(peak)) if cuda else ()
    return Trial(
        timeline=timelines[middle],
        steps_ms=tuple(spans),
        wall_ms=tuple(wall),
        peak_bytes=peaks,
        loss=loss,
    )


def fidelity(plan: Plan, profile: Profile, trial: Trial, *, channel: Channel = "directed") -> Fidelity:
    """A trial against its prediction."""
    predicted = predict(plan, profile, channel=channel)
    return compare(predicted, trial.timeline, measured_bytes=trial.peak_bytes, step_ms=trial.step_ms)


class TimedIpc(IpcTransport):
    """Also knows when each transfer arrived, by the device's clock."""

    def __init__(self, world: World, device: torch.device, *, timeout_s: float):
        super().__init__(world, device, timeout_s=timeout_s)
        self.arrivals: dict[int, torch.cuda.Event] = {}

    def _post_body(self, slot: Slot, leaf: Leaf) -> tuple[Tensor, Any]:
        result = super()._post_body(slot, leaf)
        lane = self._receivers[slot.peer].lane
        if isinstance(lane, CudaLane):
            event = self.arrivals[slot.number] = torch.cuda.Event(enable_timing=True)
            event.record(lane.stream)
        return result


class BlockingIpc(TimedIpc):
    """What a naive executor does: computation stands still until a tensor is through, on both ends."""

    def _send_body(self, slot: Slot, tensor: Tensor) -> Any:
        super()._send_body(slot, tensor)
        ring = self._senders[slot.peer]
        ring.lane.wait(ring.freed, ring.number)
        work = ring.lane.done()
        work.wait(self._timeout)
        return work

    def _post_body(self, slot: Slot, leaf: Leaf) -> tuple[Tensor, Any]:
        buffer, work = super()._post_body(slot, leaf)
        work.wait(self._timeout)
        return buffer, work


def _transport(
    work: Workload, world: World, device: torch.device, timeout_s: float, *, blocking: bool
) -> str | TimedIpc | None:
    name = work.transport(world)
    if name != "cuda_ipc":
        return name
    return (BlockingIpc if blocking else TimedIpc)(world, device, timeout_s=timeout_s)


def _with_arrivals(pipe: Pipeline, timeline: Timeline) -> Timeline:
    """The timeline with the device's own arrival times, where the transport has them (collective)."""
    if not isinstance(pipe.transport, TimedIpc) or pipe.device.type != "cuda":
        return timeline
    first = pipe.recorder.events[0]  # the start of this rank's first op
    mine = np.flatnonzero(timeline.spans.rank == pipe.rank)
    base = float(timeline.spans.start_ms[mine[0]]) if mine.size else 0.0
    own = {k: base + first.elapsed_time(event) for k, event in pipe.transport.arrivals.items()} if mine.size else {}
    t = timeline.transfers
    start, end = timeline.spans.end_ms[t.producer].copy(), t.end_ms.copy()
    for theirs in pipe.world.gather(own):
        for number, when in theirs.items():
            end[number] = when
    return replace(timeline, transfers=t._replace(start_ms=start, end_ms=np.maximum(end, start)))


def profile_task(rank: int, nproc: int, job: ProfileJob) -> Profile:
    """`octopipe profile`, on every rank."""
    return profile_workload(
        job.work,
        World.make(None, None, None),
        repeats=job.repeats,
        warm_up=job.warm_up,
        state_factor=job.state_factor,
        about=job.about,
    )


def validate_task(rank: int, nproc: int, job: ValidateJob) -> tuple[Trial, Profile]:
    """`octopipe validate`, on every rank."""
    world, profile = World.make(None, None, None), job.profile
    if job.profile_again:
        profile = profile_workload(job.work, world, state_factor=0.0, about=dict(profile.about))
    trial = run_plan(
        job.work, job.plan, world, profile, steps=job.steps, warm_up=job.warm_up, channel=job.channel
    )
    return trial, profile


def on_ranks(task: Any, nproc: int, job: Any, *, device: str, timeout_s: float = 900.0) -> list[Any]:
    """Run a task of this module on ranks of this machine; ranks that must share a GPU do so under MPS."""
    from octopipe.runtime.mps import Mps
    from octopipe.runtime.ranks import run_ranks

    if device == "cpu":
        return run_ranks(task, nproc, job, timeout_s=timeout_s)
    # Counted without initialising CUDA here: a process that has done so before MPS started stays outside it.
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise OctoPipeError("no CUDA device here; use --device cpu")
    if gpus >= nproc:
        return run_ranks(task, nproc, job, timeout_s=timeout_s)
    with Mps.start(num_ranks=-(-nproc // gpus)) as mps:
        return run_ranks(task, nproc, job, environment=mps.environment, timeout_s=timeout_s)


def _barrier(world: World) -> None:
    if world.control is not None:
        dist.barrier(world.control)


def _free(device: torch.device) -> None:
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()

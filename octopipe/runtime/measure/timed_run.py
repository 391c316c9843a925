"""Timed runs: executes a plan step after step and records a Timeline of each step.

Knows: how many steps make a measurement, and when transfers arrive on a shared GPU. Does not know: processes
(`launch.py`) or how the numbers are used (`validate.py`, `adapt.py`). All functions here are collective.
"""

from __future__ import annotations

import gc
import time
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.costs.profile_file import Profile
from octopipe.plans.plan import Plan
from octopipe.runtime.measure.workload import Workload
from octopipe.runtime.pipeline import Pipeline
from octopipe.runtime.precision import (
    MixedPrecisionOptimizer,
    autocast_dtype,
    gradient_dtype,
    has_main_gradients,
)
from octopipe.runtime.ranks.world import World
from octopipe.runtime.slots import Slot
from octopipe.runtime.wire.messages import Leaf
from octopipe.runtime.wire.telling import naming_lost_peers
from octopipe.runtime.wire.transports.cuda_ipc import IpcTransport
from octopipe.runtime.wire.transports.lanes import CudaLane, Lane
from octopipe.simulation.lowering import Channel, lower
from octopipe.simulation.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """The measured steps of a plan."""

    timeline: Timeline
    """The timeline of the step with the median makespan."""
    steps_ms: tuple[float, ...]
    """The makespan of every step."""
    wall_ms: tuple[float, ...]
    """The time of every step on the host's clock, from barrier to barrier."""
    peak_bytes: tuple[float, ...]
    """Peak memory of the allocator per rank; empty on a CPU."""
    loss: float

    @property
    def step_ms(self) -> float:
        return float(np.median(self.steps_ms))

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        low, high = np.percentile(self.steps_ms, [25, 75])
        return float((high - low) / self.step_ms)


class TimedRun:
    """A plan that is ready to run; gradients exist throughout, as between optimizer updates.

    `optimizer`: "adamw" has its state in memory and updates (with a learning rate of 0) after every step, outside the
    pipeline's time. `channel="blocking"` on a shared GPU really blocks: a rank's computation waits for each of its
    transfers.
    """

    def __init__(
        self,
        work: Workload,
        plan: Plan,
        world: World,
        profile: Profile,
        *,
        channel: Channel = "directed",
        optimizer: str = "none",
        timeout_s: float = 120.0,
    ):
        self.plan, self.world, self.device = plan, world, work.place(world.rank)
        layers = work.layers(self.device)
        self.pipe = Pipeline(
            layers,
            lower(plan, profile.costs, channel=channel),
            work.loss(layers),
            costs=profile.costs,
            device=self.device,
            group=world,
            transport=_transport(work, world, self.device, timeout_s, blocking=channel == "blocking"),
            timeout_s=timeout_s,
            seed=None,
            autocast=autocast_dtype(work.precision),
            main_grads=has_main_gradients(work.precision),
            cuda_graphs=work.graphs,
        )
        self._cuda = self.device.type == "cuda"
        self._batch = work.batch(self.device, plan.num_micro_batches)
        self._target = work.targets(self.device, plan.num_micro_batches)
        for p in self.pipe.parameters():
            p.grad = torch.zeros_like(p, dtype=gradient_dtype(p))
        # A prediction that counts optimizer state can only be compared with a run that has it.
        self._optimizer: torch.optim.Optimizer | None = None
        if optimizer == "adamw":

            def adamw(trained: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
                return torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0, fused=self._cuda or None)

            if has_main_gradients(work.precision):
                self._optimizer = MixedPrecisionOptimizer(adamw, self.pipe)
            else:
                self._optimizer = adamw([p for p in self.pipe.parameters() if p.requires_grad])
        self.timelines: list[Timeline] = []
        self.host_us: list[float] = []
        """The time in microseconds that this rank's host took to issue each op of the timed steps."""
        self._wall_ms: list[float] = []
        self._loss = float("nan")
        self._peak = 0

    def step(self, *, timed: bool = True) -> None:
        """Run one step on all ranks. Its timeline is kept if it is `timed`."""
        if self._cuda:
            torch.cuda.synchronize(self.device)
            if timed:
                torch.cuda.reset_peak_memory_stats(self.device)
        for bucket in self.pipe.reducer.buckets:
            for p in bucket.parameters:
                p.grad = None  # as after an optimizer's update; otherwise reduced gradients would be held twice
        barrier(self.world)
        began = time.perf_counter()
        value = self.pipe.step(self._batch, self._target, reduce_loss=np.isnan(self._loss))
        if self._optimizer is not None:
            self._optimizer.step()
        if value is not None:
            self._loss = float(value)
        if self._cuda:
            torch.cuda.synchronize(self.device)
        barrier(self.world)
        if timed:
            self._wall_ms.append(1e3 * (time.perf_counter() - began))
            recorder = self.pipe.recorder
            self.host_us += [1e6 * (b - a) for a, b in zip(recorder.started, recorder.ended)]
            self.timelines.append(_with_arrivals(self.pipe, self.pipe.timeline()))
            if self._cuda:
                replayed = self.pipe.executor.ops.peak_bytes
                self._peak = max(self._peak, torch.cuda.max_memory_allocated(self.device), replayed)

    @property
    def knows_arrivals(self) -> bool:
        """Whether timelines contain the device's own times of transfers."""
        return self._cuda and isinstance(self.pipe.transport, TimedIpc)

    def trial(self) -> MeasuredSteps:
        """Return the results of the timed steps (collective)."""
        self._require_finite()
        spans = [t.makespan_ms for t in self.timelines]
        return MeasuredSteps(
            timeline=self.timelines[int(np.argsort(spans)[len(spans) // 2])],
            steps_ms=tuple(spans),
            wall_ms=tuple(self._wall_ms),
            peak_bytes=tuple(float(p) for p in self.world.gather(self._peak)) if self._cuda else (),
            loss=self._loss,
        )

    def _require_finite(self) -> None:
        """Raise an error if a gradient is not finite: ops then take other times than in training (NaN sends all tokens
        to the same experts), and the weights that the optimizer has updated are lost (collective)."""
        bad = ""
        for name, p in self.pipe.named_parameters():
            if p.grad is not None and not bool(torch.linalg.vector_norm(p.grad.detach(), float("inf")).isfinite()):
                bad = name
                break
        if found := [(rank, name) for rank, name in enumerate(self.world.gather(bad)) if name]:
            rank, name = found[0]
            raise OctoPipeError(
                f"the gradient of {name} (rank {rank}) is not finite in a timed step, so its times are not those of "
                "training; check the layer's initial values, or use another --precision"
            )

    def close(self) -> None:
        self.pipe.close()
        del self.pipe
        free(self.device)


def run_plan(
    work: Workload,
    plan: Plan,
    world: World,
    profile: Profile,
    *,
    steps: int = 5,
    warm_up: int = 2,
    channel: Channel = "directed",
    optimizer: str = "none",
    timeout_s: float = 120.0,
) -> MeasuredSteps:
    """Run a plan and time its steps (see `TimedRun`)."""
    made = TimedRun(work, plan, world, profile, channel=channel, optimizer=optimizer, timeout_s=timeout_s)
    with closing(made) as run:
        warm_up = max(warm_up, run.pipe.executor.ops.warm_up_steps)
        for k in range(warm_up + steps):
            run.step(timed=k >= warm_up)
        return run.trial()


class TimedIpc(IpcTransport):
    """A CUDA IPC transport that also records when each transfer arrived, on the device's clock."""

    def __init__(self, world: World, device: torch.device, *, timeout_s: float):
        super().__init__(world, device, timeout_s=timeout_s)
        self.arrivals: dict[int, torch.cuda.Event] = {}

    def _arriving(self, slot: Slot, lane: Lane) -> None:
        if isinstance(lane, CudaLane):
            event = self.arrivals[slot.number] = torch.cuda.Event(enable_timing=True)
            event.record(lane.stream)


class BlockingIpc(TimedIpc):
    """A transport like that of a naive executor: on both ends, computation stops until a tensor has been
    transferred."""

    def _send_body(self, slot: Slot, tensor: Tensor) -> Any:
        super()._send_body(slot, tensor)
        work = self._rings.senders[slot.peer].after_receipt()
        work.wait(timedelta(seconds=self.timeout_s))
        return work

    def _post_body(self, slot: Slot, leaf: Leaf) -> tuple[Tensor, Any]:
        buffer, work = super()._post_body(slot, leaf)
        work.wait(timedelta(seconds=self.timeout_s))
        return buffer, work


def _transport(
    work: Workload, world: World, device: torch.device, timeout_s: float, *, blocking: bool
) -> str | TimedIpc | None:
    name = work.transport(world)
    if name != "cuda_ipc":
        return name
    return (BlockingIpc if blocking else TimedIpc)(world, device, timeout_s=timeout_s)


def _with_arrivals(pipe: Pipeline, timeline: Timeline) -> Timeline:
    """Return the timeline with the device's own arrival times, if the transport has them (collective)."""
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


def barrier(world: World) -> None:
    if world.control is not None:
        with naming_lost_peers():
            dist.barrier(world.control)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()

"""Layers to run in two executors, ours and torch.distributed.pipelining's, and how both take a step and are timed.

Knows: the layers, their schedules, and that both take their turns round by round. Does not know: what is measured.
"""

from __future__ import annotations

import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octopipe.runtime.pipeline import Pipeline

WIDTH = 256
THEIR_SCHEDULES = {
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
}
"""With stages per rank."""


class Block(nn.Module):
    """A residual MLP; `factor` makes layers of different cost."""

    def __init__(self, factor: int = 4, width: int = WIDTH, again: bool = False):
        super().__init__()
        self.up, self.down = nn.Linear(width, factor * width), nn.Linear(factor * width, width)
        self.again = again

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)


class Nothing(nn.Module):
    """As little as a layer can do and still take part in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Clock:
    """CPU time of this thread inside some calls, less what reading the clock takes."""

    def __init__(self) -> None:
        self.spent = 0.0
        begin = time.thread_time()
        for _ in range(1000):
            time.thread_time()
        self._reading = (time.thread_time() - begin) / 1000

    def around(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def timed_act(*args: Any) -> Any:
            with torch._C.DisableTorchFunction():  # what the weight-gradient split adds to a call is the executor's
                begin = time.thread_time()
                out = act(*args)
                self.spent += time.thread_time() - begin - self._reading
            return out

        return timed_act


class Clocked(Nothing):
    """The same layer with a clock around its calls."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._timed = clock.around(super().__call__)

    def __call__(self, x: Tensor) -> Tensor:
        return self._timed(x)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


# -- running both ---------------------------------------------------------------------------------------


def theirs(
    name: str, layers: list[nn.Module], micro_batches: int, chunks: int, loss: Callable[..., Tensor] = loss_fn
) -> tuple[Any, list[nn.Module]]:
    """Their schedule over an even split, and this rank's modules."""
    from torch.distributed import pipelining as pp

    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * chunks
    cuts = [round(k * len(layers) / total) for k in range(total + 1)]
    if name == "ScheduleZBVZeroBubble":
        mine = [rank, total - 1 - rank]
    else:
        mine = list(range(rank, total, size))
    modules: list[nn.Module] = [nn.Sequential(*layers[cuts[s] : cuts[s + 1]]) for s in mine]
    stages = [pp.PipelineStage(m, s, total, torch.device("cpu")) for m, s in zip(modules, mine)]
    schedule = getattr(pp, name)(stages if chunks > 1 or "Interleaved" in name else stages[0], micro_batches, loss)
    return schedule, modules


def step_theirs(schedule: Any, name: str, x: Tensor, y: Tensor, modules: list[nn.Module]) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    losses: list[Tensor] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        holds_last = rank == (0 if name == "ScheduleZBVZeroBubble" else last)
        args = (x,) if rank == 0 else ()
        if holds_last:
            schedule.step(*args, target=y, losses=losses)
        else:
            schedule.step(*args)
    for module in modules:
        module.zero_grad(set_to_none=True)


def timed(act: Callable[[], Any]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    act()
    dist.barrier()
    return (time.perf_counter() - begin) * 1e3


def rounds(acts: dict[str, Callable[[], Any]], count: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Milliseconds of every act in every round, in an order drawn anew (who comes after whom matters: caches, memory);
    the first rounds do not count."""
    times: dict[str, list[float]] = {name: [] for name in acts}
    for k in range(count + warm_up):
        for name in random.Random(k).sample(list(acts), len(acts)):  # the same order on all ranks
            ms = timed(acts[name])
            if k >= warm_up:
                times[name].append(ms)
    return times


def ratio(times: dict[str, list[float]], a: str, b: str) -> float:
    return statistics.median(x / y for x, y in zip(times[a], times[b]))


def our_step(pipe: Pipeline, x: Tensor, y: Tensor) -> Callable[[], None]:
    def act() -> None:
        pipe.step(x, y, reduce_loss=False)  # theirs tell the losses to one rank only, too
        pipe.zero_grad()

    return act

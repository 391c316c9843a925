"""Times layers round after round, by events on a GPU and by the clock on a CPU.

Knows: how moments between F, I and W are recorded without waiting for the device, and how ranks begin together. Does
not know: what runs (`one_layer.py`), or what becomes of the times (`profiler.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.measure.rounds import Rounds
from octopipe.runtime.values import flatten
from octopipe.runtime.wire.telling import naming_lost_peers

Floats = NDArray[np.float64]


class Timed(Protocol):
    """An object whose F, I and W can be run one after the other, with a call of `mark` before, between and after
    them."""

    def once(self, mark: Callable[[], None]) -> None: ...


def timed_rounds(
    ready: Sequence[Timed],
    rounds: int,
    ring: Sequence[int],
    device: torch.device,
    issued_s: list[float] | None = None,
    progress: Rounds | None = None,
) -> Floats:
    """Return milliseconds [rounds, layers, 3], each the mean of a layer's runs in the round. The device is never waited
    for within the rounds. The moment at which the host has issued everything is appended to `issued_s`. `progress` is
    told of every layer that has run (only on a CPU: what a GPU has done is not known before the end)."""
    marks: list[Any] = []
    if device.type == "cuda":

        def mark() -> None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append(event)

    else:

        def mark() -> None:
            marks.append(time.perf_counter())

    heard = progress if device.type == "cpu" else None
    if heard is not None:
        heard.begin()
    for _ in range(rounds):
        for i in ring:
            ready[i].once(mark)
            if heard is not None:
                heard.done(i)
    if issued_s is not None:
        issued_s.append(time.perf_counter())
    out = np.empty((rounds, len(ready), 3))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    at = 0
    for r in range(rounds):
        seen: list[list[list[float]]] = [[[], [], []] for _ in ready]
        for i in ring:
            for k in range(3):
                a, b = marks[at + k], marks[at + k + 1]
                seen[i][k].append(a.elapsed_time(b) if device.type == "cuda" else 1e3 * (b - a))
            at += 4
        out[r] = [[float(np.mean(times)) for times in layer] for layer in seen]
    return out


def device_of(value: Any) -> torch.device:
    leaves: list[Any] = []
    flatten(value, leaves)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            return leaf.device
    raise OctoPipeError("the sample holds no tensor; give one micro-batch of the first layer's input")


def wait_all(group: dist.ProcessGroup | None) -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if group is not None:
        with naming_lost_peers():
            dist.barrier(group)

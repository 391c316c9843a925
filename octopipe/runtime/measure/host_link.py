"""The link between a rank and its host's memory, measured with all ranks copying both ways while they compute.

Knows: how long pinned copies of several sizes take beside kernels that multiply matrices and stream memory. Does not
know: what is moved over it (`stages/offload.py`).
"""

from __future__ import annotations

import math
import time

import numpy as np
import torch

from octopipe.costs.cluster.hardware import Link
from octopipe.runtime.measure.links import fit
from octopipe.runtime.ranks.world import World

SIZES = (1 << 16, 1 << 24, 1 << 27)
COPIES = 6
EXPECTED_BYTES_PER_MS = 8e6
"""The bandwidth of a slow link. The computation beside the copies is made as long as the copies would take over it."""
MOST_KERNELS = 2048


def measure_host_link(world: World, device: torch.device, *, sizes: tuple[int, ...] = SIZES) -> Link:
    """Return the link to host memory of the slowest rank (collective), measured while all ranks compute and copy in
    both directions."""
    load = _Load(device) if device.type == "cuda" else None
    times = [_both_ways_ms(world, device, size, load) for size in sizes]
    every = np.array(world.gather(times))
    return fit(sizes, [float(t) for t in every.max(axis=0)])


def _both_ways_ms(world: World, device: torch.device, nbytes: int, load: _Load | None) -> float:
    """Return the time of one copy between device and host while another copy runs in the opposite direction: that of
    the slower direction. On a CPU, copies run in one direction only."""
    cuda = device.type == "cuda"
    here = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    there = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
    if not cuda:
        there[0].copy_(here[0])
        world.gather(None)  # all ranks at the same time
        began = time.perf_counter()
        for _ in range(COPIES):
            there[0].copy_(here[0])
        return 1e3 * (time.perf_counter() - began) / COPIES
    assert load is not None
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(2)]
    torch.cuda.synchronize(device)
    world.gather(None)
    load.run(COPIES * nbytes / EXPECTED_BYTES_PER_MS)
    for k in range(COPIES + 1):
        for stream, mark, (target, source) in zip(streams, marks, ((there[0], here[0]), (here[1], there[1]))):
            with torch.cuda.stream(stream):
                if k == 1:  # the first copy of each direction is not timed
                    mark[0].record(stream)
                target.copy_(source, non_blocking=True)
    for stream, mark in zip(streams, marks):
        mark[1].record(stream)
    torch.cuda.synchronize(device)
    return max(float(mark[0].elapsed_time(mark[1])) for mark in marks) / COPIES


class _Load:
    """Kernels that keep a rank's multiprocessors and its device's memory busy."""

    WIDTH = 2048

    def __init__(self, device: torch.device):
        self._a = torch.ones(self.WIDTH, self.WIDTH, dtype=torch.bfloat16, device=device)
        self._b, self._out = torch.ones_like(self._a), torch.empty_like(self._a)
        self._wide = torch.zeros(1 << 24, dtype=torch.float32, device=device)
        self._once()
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(4):
            self._once()
        torch.cuda.synchronize(device)
        self._ms = max(1e3 * (time.perf_counter() - began) / 4, 1e-3)

    def _once(self) -> None:
        torch.mm(self._a, self._b, out=self._out)
        self._wide.add_(1.0)

    def run(self, ms: float) -> None:
        """Enqueue about this many milliseconds of work on the current stream."""
        for _ in range(min(MOST_KERNELS, math.ceil(ms / self._ms))):
            self._once()

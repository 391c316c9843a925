"""The link between a rank and its host's memory, measured with all ranks copying both ways at once.

Knows: how long pinned copies of two sizes take. Does not know: what is moved over it (`stages/offload.py`).
"""

from __future__ import annotations

import time

import numpy as np
import torch

from octopipe.costs.cluster.hardware import Link
from octopipe.runtime.measure.links import fit
from octopipe.runtime.ranks.world import World

SIZES = (1 << 16, 1 << 24, 1 << 27)
COPIES = 6


def measure_host_link(world: World, device: torch.device, *, sizes: tuple[int, ...] = SIZES) -> Link:
    """The slowest rank's link, each way (collective): as it is while everybody offloads and fetches."""
    times = [_both_ways_ms(world, device, size) for size in sizes]
    every = np.array(world.gather(times))
    return fit(sizes, [float(t) for t in every.max(axis=0)])


def _both_ways_ms(world: World, device: torch.device, nbytes: int) -> float:
    """Of a copy down while another goes up."""
    cuda = device.type == "cuda"
    here = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    there = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)] if cuda else []
    world.gather(None)  # all at once

    def once() -> None:
        if not cuda:
            there[0].copy_(here[0])
            return
        with torch.cuda.stream(streams[0]):
            there[0].copy_(here[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            here[1].copy_(there[1], non_blocking=True)

    once()
    if cuda:
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(COPIES):
        once()
    if cuda:
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - began) / COPIES

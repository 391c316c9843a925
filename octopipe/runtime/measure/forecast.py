"""What a profile will need of this machine, before it starts: memory and time.

Knows: which layers a profile holds at once, how often it runs them, and how fast this machine multiplies matrices. Does
not know: how layers are measured (`profiler.py`), or how far a profile has come (`rounds.py`).

Both figures are low rather than high: a profile that is refused cannot work, and one that is announced as long is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from octopipe.base.errors import DoesNotFitError
from octopipe.models.spec import ModelSpec
from octopipe.runtime.measure.host_memory import free_host_bytes
from octopipe.runtime.measure.layer_sizes import VALUE_BYTES, layer_activations, layer_parameters, step_flops
from octopipe.runtime.measure.rounds import rounds_of
from octopipe.runtime.measure.workload import Workload
from octopipe.runtime.precision import PARAMETER_DTYPES

GIB = float(1 << 30)
UNFIT = "does not fit in memory"
"""The part of every message about memory by which such a message is recognized in the reports of ranks."""
PROCESS_BYTES = 0.25 * GIB
"""Bytes that a rank needs besides its layers, for libraries and their workspaces."""
REHEARSED = 4
"""Micro-batches of the plan that a profile of several ranks runs at its end; with more ranks, one per rank."""
MATRIX = 768
"""Side of the matrices whose product measures this machine's speed: it takes some milliseconds on one core."""


def profile_bytes(work: Workload, ranks: int) -> float:
    """Return the peak memory of all ranks of a profile together.

    First every rank holds one layer of each kind, with gradients, inputs and outputs. Then, if there are several ranks,
    they hold the whole model together and run a few micro-batches.
    """
    spec = work.spec
    of_parameter = work.mode.bytes_per_parameter(state_factor=0)
    static = [of_parameter * count for count in layer_parameters(spec)]
    held = layer_activations(spec, seq=work.tokens, micro_batch_size=work.micro_batch_size, precision=work.precision)
    kinds = {group: i for i, group in enumerate(work.groups)}.values()
    boundary = VALUE_BYTES.get(work.precision, 2.0) * work.tokens * work.micro_batch_size * spec.hidden
    alone = PROCESS_BYTES + sum(static[i] + 3 * boundary for i in kinds) + max(held[i] for i in kinds)
    together = 0.0
    if ranks > 1 and spec.num_layers >= ranks:
        together = ranks * PROCESS_BYTES + sum(static) + max(REHEARSED, ranks) * sum(held)
    return max(ranks * alone, together)


def check_host_memory(work: Workload, ranks: int) -> None:
    """Raise an error if ranks on this host's CPUs need more memory than is free. Called before any rank starts."""
    free = free_host_bytes()
    if work.device != "cpu" or free is None:
        return
    needed = profile_bytes(work, ranks)
    if needed > free:
        raise DoesNotFitError(_line(work, ranks, "this host", needed, free))


def check_device_memory(work: Workload, ranks: int, device: torch.device) -> None:
    """Raise an error if a rank's GPU, which several ranks may share, has too little memory. Called before layers are
    built."""
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    sharing = -(-ranks // torch.cuda.device_count())
    needed = profile_bytes(work, ranks) * sharing / ranks
    if needed > free:
        raise DoesNotFitError(_line(work, sharing, f"GPU {device.index}", needed, float(free)))


def check_plan_memory(ranks_bytes: Sequence[float], what: str) -> None:
    """Raise an error if a plan's ranks on this host's CPUs need more memory than is free. `ranks_bytes`: the peak of
    each rank, by the plan's timeline. Called before ranks run the plan."""
    free = free_host_bytes()
    needed = sum(ranks_bytes) + len(ranks_bytes) * PROCESS_BYTES
    if free is not None and needed > free:
        raise DoesNotFitError(
            f"{what} {UNFIT}: its {len(ranks_bytes)} ranks need about {needed / GIB:.1f} GiB of this host together, "
            f"{free / GIB:.1f} GiB are free; validate a plan and profile of a smaller model, or use a machine with more"
        )


def _line(work: Workload, ranks: int, place: str, needed: float, free: float) -> str:
    smaller = "--layers or --scale" if isinstance(work.spec, ModelSpec) else "--layers"
    fewer = "fewer --nproc, " if ranks > 1 else ""
    return (
        f"{work.spec.name} {UNFIT}: measuring its layers on {ranks} rank{'s' * (ranks > 1)} needs about "
        f"{needed / GIB:.1f} GiB of {place}, {free / GIB:.1f} GiB are free; use {fewer}a shorter --seq, a smaller "
        f"model with {smaller}, or --no-memory-check; analytic costs (simulate, tune, compare) need no memory"
    )


def expected_seconds(work: Workload, ranks: int, *, repeats: int, warm_up: int) -> float | None:
    """Return the least time that a profile takes on this machine's CPUs, computed from its FLOPs; None on a GPU."""
    if work.device != "cpu":
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    speed = matrix_speed(PARAMETER_DTYPES[work.precision], max(1, cores // ranks))
    flops = step_flops(work.spec, seq=work.tokens, micro_batch_size=work.micro_batch_size)
    return rounds_of(repeats, warm_up, (1,), ranks) * sum(flops) * max(1.0, ranks / cores) / speed


def matrix_speed(dtype: torch.dtype, threads: int) -> float:
    """Return the FLOPs per second of a matrix product on this host with this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a = torch.ones(MATRIX, MATRIX, dtype=dtype)
        taken = []
        for _ in range(8):  # the shortest counts: other programs may run at the same time
            began = time.perf_counter()
            a @ a
            taken.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return 2.0 * MATRIX**3 / max(min(taken), 1e-9)

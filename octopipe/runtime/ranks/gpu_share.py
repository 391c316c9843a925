"""Whether a process that may use only a part of a GPU's multiprocessors computes matrix products correctly.

Knows: products that show the defect, and how to recognise it. Does not know: MPS's daemon or how shares are chosen
(`measure/mps.py`).

With MPS, a process sees only its share of the multiprocessors. For many numbers of multiprocessors, cuBLAS selects
kernels that leave parts of the result unwritten, without any error: what was in that memory before remains, so
gradients contain old activations or NaN. On an H200 with CUDA 13.0 (torch 2.11), 1 to 66 % of the products were wrong
with 18 to 28, 36 to 60, 72, 74, 88, 90 and 100 multiprocessors, and none with 8 to 16, 30 to 34, 62 to 66, 118, 130 and
all 132: three ranks with a third each computed wrong gradients, while two, four or eight equal shares were right
(`benchmarks/bench_gpu_shares.py`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.torch_private import clear_blas_workspaces

SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""MPS's own variable: the part of the multiprocessors that a process may use, in percent."""
KNOWN = ((4096, 2560, 1440), (1024, 8192, 1024), (512, 1440, 1440), (104, 3152, 1800), (4096, 2048, 1440),
         (208, 240, 4464), (1440, 4096, 2048))  # fmt: skip
"""Rows, inner size and columns. For every number of multiprocessors with wrong products, one of the first four was
wrong."""
DRAWN = 32
"""The number of other sizes."""
_checked: set[torch.device] = set()


def has_share() -> bool:
    """Whether the environment gives this process a part of a GPU."""
    return SHARE in os.environ


def check_products(device: torch.device) -> None:
    """Raise an error if matrix products of this process are wrong on a GPU; tried once per process and device.

    Call it before anything computes. If the process had nothing on the GPU, it has nothing there afterwards.
    """
    if device.type != "cuda" or device in _checked:
        return
    fresh = torch.cuda.memory_allocated(device) == 0
    wrong, tried = wrong_products(device)
    if fresh:  # what a later measurement of memory would attribute to something else
        clear_blas_workspaces()
        torch.cuda.empty_cache()
    if wrong:
        raise OctoPipeError(wrong_words(device, wrong, tried))
    _checked.add(device)


def sizes() -> Iterator[tuple[int, int, int]]:
    """Rows, inner size and columns of every product that is tried."""
    yield from KNOWN
    draw = random.Random(0)
    for _ in range(DRAWN):
        yield 8 * draw.randint(4, 320), 8 * draw.randint(4, 320), 8 * draw.randint(4, 320)


def operands(m: int, k: int, n: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Ones to multiply, in every layout, as one product and as four smaller ones."""
    ones = partial(torch.ones, dtype=_dtype(device), device=device)
    for left in (ones(m, k), ones(k, m).t()):
        for right in (ones(k, n), ones(n, k).t()):
            yield left, right
    yield ones(4, m // 4, k), ones(4, k, n // 4)


def _dtype(device: torch.device) -> torch.dtype:
    """bfloat16, or float16 on GPUs whose tensor cores do not have it."""
    old = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.float16 if old else torch.bfloat16


def wrong_products(device: torch.device) -> tuple[int, int]:
    """How many products of ones differ from the exact ones, and how many were tried. Every result is computed in memory
    that contains NaN, so what is not written is recognised."""
    wrong, tried = torch.zeros((), dtype=torch.int64, device=device), 0
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for m, k, n in sizes():
            exact = torch.tensor(float(k), dtype=_dtype(device), device=device)
            for left, right in operands(m, k, n, device):
                result = left.new_full((*left.shape[:-1], right.shape[-1]), torch.nan)
                torch.matmul(left, right, out=result)
                wrong += (result != exact).any()
                tried += 1
    return int(wrong), tried


def wrong_words(device: torch.device, wrong: int, tried: int) -> str:
    """The error for a share with which products are wrong."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    share = os.environ.get(SHARE, "")
    return (
        f"{wrong} of {tried} matrix products are wrong in a process with {count} of this GPU's multiprocessors "
        f"({SHARE}={share or 'unset'}): cuBLAS leaves parts of the results unwritten; set {SHARE}={better_share(share)}"
    )


def better_share(share: str) -> str:
    """The next smaller share of a half, a quarter, an eighth and so on, in percent; the whole GPU if it was already one
    of those.

    >>> better_share("33.33"), better_share("60"), better_share("25"), better_share("")
    ('25', '50', '100', '100')
    """
    try:
        given = float(share)
    except ValueError:
        given = 100.0
    better = 100.0
    while better > given > 0:
        better /= 2
    return "100" if better == given else f"{better:g}"

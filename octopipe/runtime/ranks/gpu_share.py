"""Whether a process that may use only a part of a GPU's multiprocessors computes matrix products correctly.

Knows: products that show the defect, and how to recognise it. Does not know: MPS's daemon or how shares are chosen
(`measure/mps.py`).

With MPS, a process sees only its share of the multiprocessors. For many numbers of multiprocessors, cuBLAS selects
kernels that leave parts of the result unwritten, without any error: what was in that memory before remains, so
gradients contain old activations or NaN. On an H200 with CUDA 13.0 (torch 2.11), 10 to 66 % of 482 products were wrong
with 24 to 28, 38 to 60, 72, 74, 90 and 100 multiprocessors, and none with 8, 16, 30 to 34, 62 to 66, 118, 130 and all
132: three ranks with a third each computed wrong gradients, while two, four or eight equal shares were right.
"""

from __future__ import annotations

import os

import torch

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.torch_private import clear_blas_workspaces

SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""MPS's own variable: the part of the multiprocessors that a process may use, in percent."""
SIZES = ((4096, 2560, 1440), (1024, 8192, 1024), (512, 1440, 1440), (4096, 2048, 1440), (208, 240, 4464),
         (1440, 4096, 2048), (2048, 4096, 2048), (256, 2048, 8192))  # fmt: skip
"""Rows, inner size and columns. For every number of multiprocessors with wrong products, one of the first three was
among them."""
_checked: set[torch.device] = set()


def check_products(device: torch.device) -> None:
    """Raise an error if matrix products of this process are wrong on a GPU; tried once per process and device.

    Call it before anything computes. If the process had nothing on the GPU, it has nothing there afterwards.
    """
    if device.type != "cuda" or device in _checked:
        return
    fresh = torch.cuda.memory_allocated(device) == 0
    wrong = wrong_products(device)
    if fresh:  # what a later measurement of memory would attribute to something else
        clear_blas_workspaces()
        torch.cuda.empty_cache()
    if wrong:
        raise OctoPipeError(wrong_words(device, wrong))
    _checked.add(device)


def wrong_products(device: torch.device) -> int:
    """The number of products of ones, of those tried, whose result differs from the exact one. Every result is computed
    in memory that contains NaN, so what is not written is recognised."""
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    low = {"dtype": torch.bfloat16, "device": device}
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for m, k, n in SIZES:
            for left in (torch.ones(m, k, **low), torch.ones(k, m, **low).t()):
                for right in (torch.ones(k, n, **low), torch.ones(n, k, **low).t()):
                    result = torch.full((m, n), torch.nan, **low)
                    torch.mm(left, right, out=result)
                    wrong += (result != float(k)).any()
    return int(wrong)


def wrong_words(device: torch.device, wrong: int) -> str:
    """The error for a share with which products are wrong."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    share = os.environ.get(SHARE, "")
    return (
        f"{wrong} of {4 * len(SIZES)} matrix products are wrong in a process with {count} of this GPU's multiprocessors "
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

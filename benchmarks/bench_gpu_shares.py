"""With which parts of a GPU's multiprocessors are matrix products right?

    python benchmarks/bench_gpu_shares.py --percent 100,50,33.33,25,12.5 --out out/shares.jsonl
    python benchmarks/bench_gpu_shares.py --device cpu --small           # the same products, without shares

One process per share, several at a time, under MPS. Each multiplies random matrices of many sizes and layouts
(bfloat16, float16, float32, float8, batches, experts' groups) and runs attention backward, every time in memory that
contains NaN, and compares with the same in higher precision. A line of JSON says how many results are wrong, and how
many of the products that every rank on a shared GPU tries before it computes (`octopipe/runtime/ranks/gpu_share.py`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from one_line import end, needs_device, place_for, start
from torch import Tensor

from octopipe.runtime.measure.mps import Mps
from octopipe.runtime.ranks.gpu_share import KNOWN, SHARE, wrong_products
from octopipe.runtime.torch_private import grouped_mm, scaled_mm

POOL_MIB = {1: 20, 5: 10, 12: 10, 33: 6, 60: 4}
"""Sizes and numbers of the blocks of free memory that are filled with NaN before every product."""
Case = tuple[str, Callable[[], Tensor], Tensor]
"""What is computed, how, and the right result."""


def forget(device: str) -> None:
    """Leave NaN in the allocator's free memory, where the next result will be."""
    if device == "cuda":
        blocks = [
            torch.full((mib << 20,), 255, dtype=torch.uint8, device=device)
            for mib, n in POOL_MIB.items()
            for _ in range(n)
        ]
        del blocks


def sizes(count: int) -> list[tuple[int, int, int]]:
    draw = random.Random(1)
    return [
        *KNOWN,
        *((8 * draw.randint(4, 640), 8 * draw.randint(4, 640), 8 * draw.randint(4, 640)) for _ in range(count)),
    ]


def products(m: int, k: int, n: int, device: str) -> Iterator[Case]:
    for layout in ("nn", "nt", "tn"):
        for dtype in (torch.bfloat16, torch.float16) if layout == "nn" else (torch.bfloat16,):
            a = torch.randn(m, k, device=device).to(dtype)
            b = torch.randn(k, n, device=device).to(dtype)
            a = a.t().contiguous().t() if layout[0] == "t" else a
            b = b.t().contiguous().t() if layout[1] == "t" else b
            yield f"{m}x{k}x{n} {layout} {str(dtype)[6:]}", partial(torch.matmul, a, b), a.float() @ b.float()
    a, b = torch.randn(m, k, device=device), torch.randn(k, n, device=device)
    yield f"{m}x{k}x{n} float32", lambda: a @ b, (a.double() @ b.double()).float()
    left, right = torch.randn(4, m // 4, k, device=device), torch.randn(4, k, n // 4, device=device)
    left, right = left.bfloat16(), right.bfloat16()
    yield f"4 x {m // 4}x{k}x{n // 4}", lambda: left @ right, left.float() @ right.float()


def products_on_device(m: int, k: int, n: int) -> Iterator[Case]:
    """Those that only a GPU has."""
    device, groups = "cuda", 8
    a, b = torch.randn(m, k, device=device).bfloat16(), torch.randn(k, n, device=device).bfloat16()
    yield f"{m}x{k}x{n} into float32", lambda: torch.mm(a, b, out_dtype=torch.float32), a.float() @ b.float()
    x = torch.randn(m, k // 16 * 16, device=device).to(torch.float8_e4m3fn)
    w = torch.randn(n // 16 * 16, k // 16 * 16, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    yield (
        f"{m}x{k}x{n} float8",
        lambda: scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16),
        x.float() @ w.float().t(),
    )
    bounds = [m * e // groups for e in range(groups + 1)]
    ends = torch.tensor(bounds[1:], dtype=torch.int32, device=device)
    experts = torch.randn(groups, k, n, device=device).bfloat16()
    parts = [a[low:high].float() @ experts[e].float() for e, (low, high) in enumerate(itertools.pairwise(bounds))]
    yield f"{m}x{k}x{n} in groups", lambda: grouped_mm(a, experts, offs=ends), torch.cat(parts)


def attentions(device: str, small: bool) -> Iterator[Case]:
    for tokens, heads, width in ((64, 2, 16),) if small else ((2048, 16, 64), (1000, 8, 128), (4096, 32, 64)):
        shape = 1, heads, tokens, width
        inputs = [torch.randn(shape, device=device).bfloat16().requires_grad_() for _ in range(3)]
        wide = [x.detach().float().requires_grad_() for x in inputs]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            right = attention_gradients(wide)
        yield f"attention {tokens} {heads} {width}", partial(attention_gradients, inputs), right


def attention_gradients(inputs: list[Tensor]) -> Tensor:
    q, k, v = inputs
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.cat([g.flatten() for g in torch.autograd.grad(out.sum(), inputs)])


def cases(device: str, small: bool, count: int) -> Iterator[Case]:
    for m, k, n in [(64, 48, 80)] if small else sizes(count):
        yield from products(m, k, n, device)
        if device == "cuda":
            yield from products_on_device(m, k, n)
    yield from attentions(device, small)


def child(percent: str, args: argparse.Namespace) -> dict[str, Any]:
    """Everything in one process with one share."""
    torch.manual_seed(0)
    wrong, total = [], 0
    for name, compute, right in cases(args.device, args.small, args.sizes):
        total += 1
        forget(args.device)
        found = compute()
        least = 0.02 * float(right.abs().max()) + 1e-3
        if not bool(found.isfinite().all()) or float((found.float() - right).abs().max()) > least:
            wrong.append(name)
    on_gpu = args.device == "cuda"
    count = torch.cuda.get_device_properties(0).multi_processor_count if on_gpu else 0
    probed = (0, 0) if args.small else wrong_products(torch.device(args.device))
    return {
        "percent": percent, "multiprocessors": count, "wrong": len(wrong), "of": total, "some": wrong[:6],
        "probe_wrong": probed[0], "probe_of": probed[1],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--percent", default="100,50,33.33,25,16.67,12.5", help="shares of the multiprocessors")
    parser.add_argument("--at-a-time", type=int, default=5, help="processes; more need more memory")
    parser.add_argument("--sizes", type=int, default=40, help="number of random sizes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", default="")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child, args)), flush=True)
        return
    needs_device(args.device)
    target = place_for(args.out) if args.out else None
    todo = args.percent.split(",") if args.device == "cuda" else ["100"]
    running: list[tuple[str, subprocess.Popen[str]]] = []
    failed = []
    with Mps.start(num_ranks=4, share_percent=100) if args.device == "cuda" else nullcontext() as mps:
        given = dict(mps.environment) if mps is not None else {}
        while todo or running:
            while todo and len(running) < args.at_a_time:
                percent = todo.pop(0)
                command = [sys.executable, __file__, *sys.argv[1:], "--child", percent]
                environment = {**os.environ, **given, SHARE: percent}
                running.append((percent, subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)))
            for percent, process in list(running):
                if process.poll() is None:
                    continue
                running.remove((percent, process))
                line = process.communicate()[0]
                print(line, end="", flush=True)
                if process.returncode:
                    failed.append(f"{percent} %")
                elif target is not None:
                    with target.open("a") as file:
                        file.write(line)
            time.sleep(0.05)
    end(failed)


if __name__ == "__main__":
    start(main)

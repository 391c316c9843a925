"""The kernels of a layer of experts, one by one, beside their analytic price.

    python benchmarks/bench_expert_ops.py [--models gpt-oss-20b,qwen3-next-80b] [--tokens 4096]     # one GPU
    python benchmarks/bench_expert_ops.py --device cpu --scale 0.05 --tokens 64                     # a rehearsal

Per model: the grouped products of F, I and W, the pass that adds a product into a float32 gradient, the sort of tokens
by expert and back, the activation function, biases and the weighted sum, forward and backward where they differ. The
whole layer is timed as well, so that what the list leaves out is seen. A line of JSON per kernel: median milliseconds
of several runs, and for products the share of the GPU's peak that is reached and that the price assumes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from one_line import needs_device, start

if TYPE_CHECKING:
    from torch import Tensor

    from octopipe.models.layers import Moe


def median_ms(run: Callable[[], object], device: str, repeats: int) -> float:
    """Of single runs after two that are not timed."""
    import torch

    times = []
    for k in range(repeats + 2):
        if device == "cuda":
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            run()
            b.record()
            torch.cuda.synchronize()
            took = a.elapsed_time(b)
        else:
            began = time.perf_counter()
            run()
            took = 1e3 * (time.perf_counter() - began)
        if k >= 2:
            times.append(took)
    return float(np.median(times))


def pieces_of(part: Moe, tokens: int, device: str) -> dict[str, Callable[[], object]]:
    """Every kernel of the layer by name, on tensors of its sizes. Tokens go to experts at random."""
    import torch

    from octopipe.runtime.nn.basic import activate
    from octopipe.runtime.nn.moe import AddRows, Dispatch, Permute, grouped_product
    from octopipe.runtime.torch_private import grouped_mm

    made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    w, f, e, k = part.expert_width, part.ffn, part.experts, part.top_k
    wide, rows = (part.matrices - 1) * f, tokens * k
    chosen = torch.rand(tokens, e, device=device).topk(k, dim=-1)[1].flatten()
    order = chosen.argsort(stable=True)
    inverse = order.argsort()
    ends = torch.bincount(chosen, minlength=e).cumsum(0).to(torch.int32)
    x, mid, out = (torch.randn(rows, n, **made) for n in (w, wide, w))
    inner = torch.randn(rows, f, **made)
    stream, weights = torch.randn(tokens, w, **made), torch.rand(tokens, k, **made)
    up, down = torch.randn(e, w, wide, **made) * 0.02, torch.randn(e, f, w, **made) * 0.02
    sums = torch.zeros(e, w, wide, device=device)
    product = torch.randn(e, w, wide, **made)
    bias = torch.randn(e, wide, **made)

    def backward(forward: Callable[..., Tensor], *given: Tensor) -> Callable[[], object]:
        leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in given]
        result = forward(*leaves)
        wanted = [t for t in leaves if t.requires_grad]
        g = torch.randn_like(result)
        return lambda: torch.autograd.grad(result, wanted, g, retain_graph=True)

    def weighted(weights: Tensor, out: Tensor) -> Tensor:
        return (weights[:, None] @ out.unflatten(0, (-1, k)))[:, 0]

    both: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "sort": (lambda x: Dispatch.apply(x, order, inverse, k), (stream,)),
        "activation": (lambda m: activate(part.activation, m), (mid,)),
        "bias": (lambda m, b: AddRows.apply(m, b, chosen[order]), (mid, bias)),
        "sort back": (lambda o: Permute.apply(o, inverse, order), (out,)),
        "weighted sum": (weighted, (weights, out)),
    }
    found: dict[str, Callable[[], object]] = {
        "product up F": lambda: grouped_product(x, up, ends),
        "product down F": lambda: grouped_product(inner, down, ends),
        "product up I": lambda: grouped_product(mid, up.mT, ends),
        "product down I": lambda: grouped_product(out, down.mT, ends),
        "added into float32 (up)": lambda: sums.add_(product),
    }
    if device == "cuda":
        found["product up W"] = lambda: grouped_mm(x.mT, mid, offs=ends)
        found["product down W"] = lambda: grouped_mm(inner.mT, out, offs=ends)
    for name, (forward, given) in both.items():
        if name != "bias" or part.bias:
            found[f"{name} F"] = partial(forward, *given)
            found[f"{name} I"] = backward(forward, *given)
    return found


def measure(model: str, args: argparse.Namespace) -> None:
    import torch

    from octopipe.costs.analytic.pricing import Pricing
    from octopipe.costs.cluster.hardware import gpu
    from octopipe.costs.cluster.setup import Setup
    from octopipe.models.layers import Moe
    from octopipe.models.zoo import preset
    from octopipe.runtime.measure.one_layer import Layer
    from octopipe.runtime.measure.timing import timed_rounds
    from octopipe.runtime.nn.moe import Moe as MoeLayer

    spec = preset(model) if args.scale == 1.0 else preset(model).scaled(args.scale)
    part = next(p for layer in spec.layers for p in layer.parts if isinstance(p, Moe))
    how = Pricing.of(Setup(gpu=gpu(args.gpu), seq=args.tokens))
    sides = {"up": (part.expert_width, (part.matrices - 1) * part.ffn), "down": (part.ffn, part.expert_width)}
    rows = args.tokens * part.top_k
    for name, run in pieces_of(part, args.tokens, args.device).items():
        row: dict[str, Any] = {"model": model, "kernel": name, "ms": median_ms(run, args.device, args.repeats)}
        if name.startswith("product"):
            inner, outer = sides[name.split()[1]]
            peak = 2.0 * rows * inner * outer / how.flops_per_ms("bf16")
            priced = how.plain.product_share(rows / part.experts, inner, outer)
            row |= {"share_of_peak": peak / row["ms"], "priced_share": priced, "priced_ms": peak / priced}
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    module = MoeLayer(part, 1e-5, {"device": torch.device(args.device), "dtype": dtype})
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.02)
    x = torch.randn(1, args.tokens, part.hidden, device=args.device, dtype=dtype)
    whole = Layer(module, x, None, False, "bf16-main-fp32" if args.device == "cuda" else "fp32")
    times = np.median(timed_rounds([whole], args.repeats + 2, [0], torch.device(args.device))[2:, 0], axis=0)
    print(json.dumps({"model": model, "kernel": "the whole layer", "F, I, W": times.round(4).tolist()}), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt-oss-20b,qwen3-next-80b")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpu", default="h200", help="whose prices to compare with")
    parser.add_argument("--scale", type=float, default=1.0, help="of the model's widths")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args(argv)
    needs_device(args.device)
    for model in args.models.split(","):
        measure(model, args)


if __name__ == "__main__":
    start(main)

"""Time and memory of the layers, fused against split backward: `python benchmarks/layers.py [--tokens 4096]`.

One line per layer: forward, plain autograd's backward, our fused backward (B), our input and weight parts
(I, W), all in milliseconds, then the bytes held until I and until W. On CUDA everything runs in bfloat16, and
torch's synchronisation check says whether the host ever waits inside a layer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from one_line import start
from torch import Tensor, nn

from octopipe.models import layers as L
from octopipe.models import mixers as X
from octopipe.models.spec import ModelSpec
from octopipe.runtime.nn import build_layers, cross_entropy
from octopipe.runtime.nn.head import LazyLogits
from octopipe.runtime.stages.activation_bytes import held_bytes
from octopipe.runtime.stages.run import StageRun
from octopipe.runtime.stages.stage import Stage
from octopipe.runtime.values import flatten

T = TypeVar("T")


def _layers(hidden: int) -> dict[str, L.Layer]:
    heads = hidden // 64
    return {
        "mlp relu2": L.Mlp(hidden=hidden, ffn=4 * hidden, activation="relu2"),
        "mlp swiglu": L.Mlp(hidden=hidden, ffn=4 * hidden),
        "attention": X.Attention(hidden=hidden, heads=heads // 2, kv_heads=max(1, heads // 8), head_dim=128),
        "window 512": X.Attention(
            hidden=hidden, heads=heads // 2, kv_heads=max(1, heads // 8), head_dim=128, window=512
        ),
        "mamba2": X.Mamba2(hidden=hidden, heads=2 * heads, head_dim=64, state=128, groups=8, chunk=128),
        "mamba1": X.Mamba1(hidden=hidden, inner=2 * hidden, state=16, dt_rank=hidden // 16),
        "delta net": X.GatedDeltaNet(
            hidden=hidden, key_heads=heads // 4, value_heads=heads // 2, key_dim=128, value_dim=128
        ),
        "moe 16 top 2": L.Moe(hidden=hidden, experts=16, top_k=2, ffn=2 * hidden),
    }


def _time_ms(device: torch.device, repeats: int, before: Callable[[], T], op: Callable[[T], object]) -> float:
    """Of the op, which takes what was made before it, outside the time."""
    times = []
    for i in range(repeats + 3):
        value = before()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            op(value)
            end.record()
            torch.cuda.synchronize()
            elapsed = start.elapsed_time(end)
        else:
            began = time.perf_counter()
            op(value)
            elapsed = 1e3 * (time.perf_counter() - began)
        if i >= 3:
            times.append(elapsed)
    return statistics.median(times)


def measure(name: str, module: nn.Module, x: Tensor, then: Callable[[LazyLogits], Tensor] | None, repeats: int) -> str:
    """One line of the table."""
    stage = Stage([module], input_grad=x.is_floating_point())
    device = x.device

    def forward() -> StageRun:
        return stage.forward(x, then=then)

    run = forward()
    leaves: list[Tensor] = []
    flatten(run.outputs, leaves)
    grad = torch.ones_like(leaves[0])
    del run, leaves
    f = _time_ms(device, repeats, lambda: None, lambda _: forward())

    def plain_forward() -> Tensor:
        y = module(x.detach().requires_grad_(x.is_floating_point()))
        return y if then is None else then(y)

    plain = _time_ms(device, repeats, plain_forward, lambda y: torch.autograd.backward(y, grad))
    b = _time_ms(device, repeats, forward, lambda r: r.backward_full(grad))
    i = _time_ms(device, repeats, forward, lambda r: r.backward_input(grad))

    def after_input() -> StageRun:
        r = forward()
        r.backward_input(grad)
        return r

    w = _time_ms(device, repeats, after_input, lambda r: r.backward_weight())

    def one_by_one(r: StageRun) -> None:
        r.backward_input(grad)
        r.backward_weight()

    both = _time_ms(device, repeats, forward, one_by_one)
    held = held_bytes(stage, x, then=then)
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            r = forward()
            r.backward_input(grad)
            r.backward_weight()
            waits = "no waits"
        except RuntimeError as problem:
            waits = str(problem)[:60]
        torch.cuda.set_sync_debug_mode("default")
    else:
        waits = ""
    mib = 2**20
    return (
        f"{name:14} {f:8.3f} {plain:8.3f} {b:8.3f} {i:8.3f} {w:8.3f} {both / b:6.3f} "
        f"{held.until_input / mib:9.1f} {held.until_weight / mib:9.1f}  {waits}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", default="", help="part of a layer's name")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inner = _layers(args.hidden)
    spec = ModelSpec(
        name="layers",
        layers=(
            L.Embedding(hidden=args.hidden, vocab=args.vocab),
            *inner.values(),
            L.Head(hidden=args.hidden, vocab=args.vocab),
        ),
    )
    names = ["embedding", *inner, "head"]
    factories = build_layers(spec, dtype=dtype, device=device)
    tokens = torch.randint(args.vocab, (1, args.tokens), device=device)
    hidden = torch.randn(1, args.tokens, args.hidden, device=device, dtype=dtype)
    print(f"torch {torch.__version__}, {device}, {dtype}, {args.tokens} tokens, hidden {args.hidden}")
    print("layer             F ms  plain ms     B ms     I ms     W ms (I+W)/B   MiB to I  MiB to W")
    for name, factory in zip(names, factories):
        if args.only not in name:
            continue
        then = (lambda out: cross_entropy(out, tokens)) if name == "head" else None
        module = factory()
        x = tokens if name == "embedding" else hidden
        print(measure(name, module, x, then, args.repeats), flush=True)
        del module
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    start(main)

"""Mixed precision and our layers' kernels on one GPU, in one process:

    python benchmarks/bench_precision.py --device cuda --out results.jsonl
    python benchmarks/bench_precision.py --phases losses --precisions bf16-main-fp32,fp8 --scale 0.5

Phases (`--phases check,layers,losses`):
  check    flash attention with windows and sinks, float32 weight products, the delta rule and the fused loss on the
           device, each against the same thing in float64
  layers   every kind of layer of several models, measured against its analytic price
  losses   200 steps of one model from the same weights and tokens under every precision

Prints one JSON object a line. `--small --device cpu` tries everything out without a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from one_line import known, needs_device, place_for, start
from torch import Tensor

MODELS = {"gpt-oss-20b": 4, "gemma-3-27b": 9, "qwen3-next-80b": 6, "nemotron-h-8b": 12, "llama3-8b": 4}
"""Presets with the number of layers that holds every kind of them."""
PRECISIONS = ("fp32", "bf16-main-fp32", "fp8", "autocast-bf16", "bf16")


def apart(got: Tensor, want: Tensor) -> float:
    """The distance in parts of the wanted norm."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def randn(*shape: int, seed: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def gradients(function: Callable[..., Tensor], inputs: list[Tensor], wide: bool) -> list[Tensor]:
    leaves = [(x.double() if wide else x).detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    slope = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, slope.to(out.dtype))]


def exact_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
    """The definition."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    i = torch.arange(q.shape[2], device=q.device)[:, None]
    j = i.mT
    seen = (j <= i) & (j > i - (window or q.shape[2]))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:-1], 1)), -1)
    return scores.softmax(-1)[..., : q.shape[2]] @ v


def check(device: str, tell: Callable[[dict[str, Any]], None]) -> None:
    from octopipe.runtime.nn import flash
    from octopipe.runtime.nn.attention import attend
    from octopipe.runtime.nn.delta import delta_scan
    from octopipe.runtime.nn.head import LazyLogits, cross_entropy
    from octopipe.runtime.precision import keep_main_gradients
    from octopipe.runtime.stages.wgrad_ops import _has_wide_products, add_product

    for window, sink, dim in ((None, True, 64), (32, True, 64), (50, False, 128), (128, True, 64), (512, False, 256)):
        q = randn(2, 8, 300, dim, seed=0, device=device)
        k, v = (randn(2, 2, 300, dim, seed=s, device=device) for s in (1, 2))
        inputs = [q, k, v] + ([randn(8, seed=3, device=device)] if sink else [])

        def ours(q: Tensor, k: Tensor, v: Tensor, s: Tensor | None = None, w: int | None = window) -> Tensor:
            return attend(q, k, v, window=w, sinks=s)

        def exact(q: Tensor, k: Tensor, v: Tensor, s: Tensor | None = None, w: int | None = window) -> Tensor:
            return exact_attention(q, k, v, w, s)

        off = [apart(a, b) for a, b in zip(gradients(ours, inputs, False), gradients(exact, inputs, True))]
        by_flash = flash.fits(q, v, window=None if window is not None and window >= 300 else window)
        tell({"check": "attention", "window": window, "sinks": sink, "dim": dim, "flash": by_flash, "apart": off})
    a, b = randn(512, 384, seed=0, device=device), randn(512, 256, seed=1, device=device)
    p = torch.nn.Parameter(torch.zeros(384, 256, dtype=torch.bfloat16, device=device))
    keep_main_gradients([p])
    for _ in range(8):
        add_product(p, None, a, b)
    assert p.grad is not None
    wide = device == "cuda" and _has_wide_products(p.device)
    tell({"check": "weight product", "fused": wide, "apart": apart(p.grad, 8 * a.double().mT @ b.double())})
    q, k, v = (F.normalize(randn(1, 4, 500, 64, seed=s, device=device).float(), dim=-1).bfloat16() for s in (0, 1, 2))
    decay = -0.1 * randn(1, 4, 500, seed=3, device=device, dtype=torch.float32).exp()
    beta = randn(1, 4, 500, seed=4, device=device, dtype=torch.float32).sigmoid()

    def scan(q: Tensor, k: Tensor, v: Tensor, d: Tensor, x: Tensor) -> Tensor:
        return delta_scan(q, k, v, d, x, 64)

    found = zip(gradients(scan, [q, k, v, decay, beta], False), gradients(scan, [q, k, v, decay, beta], True))
    tell({"check": "delta rule", "apart": [apart(a, b) for a, b in found]})
    hidden, weight = randn(600, 128, seed=0, device=device), randn(5000, 128, seed=1, device=device)
    target = torch.randint(5000, (600,), generator=torch.Generator().manual_seed(2)).to(device)
    for kind in ("fused", "lean", "chunked") if device == "cuda" else ("lean", "chunked"):
        found = zip(
            gradients(lambda h, w, k=kind: cross_entropy(LazyLogits(h, w, k), target), [hidden, weight], False),
            gradients(lambda h, w: F.cross_entropy(h @ w.mT, target), [hidden, weight], True),
        )
        tell({"check": "loss", "kind": kind, "apart": [apart(a, b) for a, b in found]})


def layers(device: str, small: bool, tokens: int, tell: Callable[[dict[str, Any]], None], models: list[str]) -> None:
    from octopipe.cli.verbs.against_analytic import against_analytic, gpu_of
    from octopipe.costs.mode import default_precision
    from octopipe.models.zoo import preset
    from octopipe.runtime.measure.trial import Workload, profile_workload
    from octopipe.runtime.ranks.world import World

    for name in models:
        spec = preset(name).scaled(0.02 if small else 1.0, num_layers=MODELS[name])
        work = Workload(spec=spec, tokens=tokens, device=device, precision=default_precision(device))
        began = time.perf_counter()
        profile = profile_workload(work, World(None), repeats=1 if small else 6, links=False, rehearsal=False)
        gpu = gpu_of("h200" if device == "cpu" else "", str(profile.about["device"]))
        for row in against_analytic(profile, spec, gpu=gpu, seq=tokens, micro_batch_size=1):
            tell({"model": name, "tokens": tokens, "gpu": gpu, "kernels": work.kernel_names(), **row.record()})
        tell({"model": name, "seconds": round(time.perf_counter() - began, 1)})
        del profile
        if device == "cuda":
            torch.cuda.empty_cache()


def losses(
    device: str, small: bool, steps: int, tell: Callable[[dict[str, Any]], None], scale: float, which: list[str]
) -> None:
    from octopipe.models.zoo import preset
    from octopipe.runtime.ranks import launch
    from octopipe.runtime.training.job import TrainJob
    from octopipe.runtime.training.train import train_rank

    spec = preset("llama3-8b").scaled(0.01 if small else scale, num_layers=6)
    for precision in which:
        if precision == "fp8" and device == "cpu":
            continue
        rate = 1e-3 * min(1.0, 0.125 / scale)
        job = TrainJob(
            spec=spec, nproc=1, steps=steps, seq=32 if small else 512, micro_batches=4,
            micro_batch_size=1 if small else 4, lr=rate, warmup=20, device=device, precision=precision, measure=False,
        )  # fmt: skip
        began = time.perf_counter()
        result = train_rank(launch.Seat(rank=0, size=1, local_rank=0, tell=lambda _: None), job)
        assert result is not None
        tell(
            {
                "precision": precision,
                "parameters": result.parameters,
                "steps": steps,
                "losses": [round(x, 4) for x in result.losses[:: max(1, steps // 10)]],
                "last_20": sum(result.losses[-20:]) / len(result.losses[-20:]),
                "step_ms": result.step_ms,
                "memory_gib": result.reports[-1].memory_bytes[0] / 2**30,
                "seconds": round(time.perf_counter() - began, 1),
            }
        )
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--phases", default="check,layers,losses")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--scale", type=float, default=0.125, help="of the model of the phase losses")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="of the phase losses")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    needs_device(args.device)
    phases = known(args.phases.split(","), ("check", "layers", "losses"), "phase")
    models = known(args.models.split(","), MODELS, "model")
    which = known(args.precisions.split(","), PRECISIONS, "precision")
    if args.out:
        place_for(args.out)

    def tell(fact: dict[str, Any]) -> None:
        line = json.dumps(fact)
        print(line, flush=True)
        if args.out:
            with Path(args.out).open("a") as file:
                file.write(line + "\n")

    tokens = 64 if args.small else args.tokens
    for phase in phases:
        if phase == "check":
            check(args.device, tell)
        elif phase == "layers":
            layers(args.device, args.small, tokens, tell, models)
        else:
            losses(args.device, args.small, 6 if args.small else args.steps, tell, args.scale, which)


if __name__ == "__main__":
    start(main)

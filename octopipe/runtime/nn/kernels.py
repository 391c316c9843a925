"""Which kernels our layers use: those of installed packages, compiled scans on a GPU, otherwise plain torch.

Knows: how mamba_ssm's, causal_conv1d's, flash-linear-attention's and flash-attn's functions are called. Does not know:
layers' weights; how transformers' models choose theirs (by the same packages, on their own; see huggingface/liger.py).
Attention without flash-attn runs on torch's own kernels (`attention.py`, `flash.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.models import mixers as spec
from octopipe.runtime.nn.basic import without_split

PACKAGES = ("mamba_ssm", "causal_conv1d", "fla", "flash_attn", "liger_kernel")


def installed(*names: str) -> bool:
    """Whether all of these packages can be imported."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in names)
    except (ImportError, ValueError):
        return False


NEEDS = {
    "mamba_ssm": ("mamba_ssm", "causal_conv1d"),
    "fla": ("fla",),
    "flash_attn": ("flash_attn",),
    "liger": ("liger_kernel",),
}
"""Values of `--kernels` that need a GPU and these packages."""
PARTS = {
    "scan": ("mamba_ssm", "compiled", "eager"),
    "delta": ("fla", "eager"),
    "attention": ("flash_attn", "sdpa"),
    "loss": ("fused", "lean", "chunked"),
}
"""The possible values of the fields of `Kernels`. "eager" applies to scan and delta; losses are those of `head.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The implementations of Mamba-2's scan, the delta rule, attention and the loss (see `PARTS`)."""

    scan: str = "eager"
    delta: str = "eager"
    attention: str = "sdpa"
    loss: str = "lean"

    def names(self) -> dict[str, str]:
        """A description of the kernels, for a profile."""
        return {"scan": self.scan, "delta": self.delta, "attention": self.attention, "loss": self.loss}


def require(words: Sequence[str], device: torch.device | str, known: Sequence[str]) -> None:
    """Raise an error of one line unless all of these kernels can run."""
    for word in words:
        if word not in known:
            raise OctoPipeError(f"--kernels {word[:40]}: give some of {', '.join(known)}, separated by commas")
        needs = NEEDS.get(word, ())
        if needs and torch.device(device).type != "cuda":
            raise OctoPipeError(f"--kernels {word} runs on a GPU; use --device cuda, or leave it out")
        missing = next((name for name in needs if not installed(name)), None)
        if missing is not None:
            raise OctoPipeError(f"--kernels {word} needs the package {missing}, which is not installed; install it")


def choose(device: torch.device | str, *, compiled: bool | None = None, asked: Sequence[str] = ()) -> Kernels:
    """The fastest kernels available for a device. `compiled`: True or False selects compiled or eager scans and plain
    torch for everything else, whatever is installed. `asked`: kernels selected by name (see `PARTS`)."""
    require(asked, device, tuple(dict.fromkeys(word for words in PARTS.values() for word in words)))
    gpu = torch.device(device).type == "cuda"
    best = Kernels()
    if compiled is not None:
        best = Kernels(scan="compiled" if compiled else "eager")
    elif gpu:
        compiler = "compiled" if installed("triton") else "eager"
        best = Kernels(
            scan="mamba_ssm" if installed(*NEEDS["mamba_ssm"]) else compiler,
            delta="fla" if installed("fla") else "eager",
            attention="flash_attn" if installed("flash_attn") else "sdpa",
            loss="fused" if installed("triton") else "lean",
        )
    for part, words in PARTS.items():
        named = [word for word in asked if word in words]
        if len(named) > 1:
            raise OctoPipeError(f"--kernels {','.join(named)}: one of them runs {part}; give one")
        if named:
            best = replace(best, **{part: named[0]})
    return best


def flash_attend() -> Callable[..., Tensor]:
    """`attention.attend` with the kernel of flash-attn, which supports windows; cases that it does not support use
    torch."""
    from octopipe.runtime.nn.attention import attend

    flash = importlib.import_module("flash_attn").flash_attn_func

    @without_split
    def attended(q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, sinks: Tensor | None = None) -> Tensor:
        half = q.dtype in (torch.float16, torch.bfloat16)
        if not half or sinks is not None or q.shape[-1] != v.shape[-1] or q.shape[-1] > 256:
            return attend(q, k, v, window=window, sinks=sinks)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        seen = (-1, -1) if window is None else (window - 1, 0)
        out: Tensor = flash(q, k, v, softmax_scale=q.shape[-1] ** -0.5, causal=True, window_size=seen)
        return out.transpose(1, 2)

    return attended


def mamba_ssm_mix() -> Callable[..., Tensor]:
    """`mamba.mamba2_mix` with the chunked scan of mamba_ssm and the convolution of causal_conv1d."""
    conv = importlib.import_module("causal_conv1d").causal_conv1d_fn
    scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined

    @without_split
    def mix(
        layer: spec.Mamba2,
        eps: float,
        projected: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor,
        dt_bias: Tensor,
        a_log: Tensor,
        d: Tensor,
        gate_norm: Tensor,
    ) -> Tensor:
        batch, tokens, _ = projected.shape
        gate, mixed, dt = projected.split((layer.inner, layer.conv_width, layer.heads), dim=-1)
        weight, bias = conv_weight.to(mixed.dtype), conv_bias.to(mixed.dtype)
        mixed = conv(mixed.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)
        bc = layer.groups * layer.state
        x, b, c = mixed.split((layer.inner, bc, bc), dim=-1)
        y = scan(
            x.reshape(batch, tokens, layer.heads, layer.head_dim),
            dt,
            -a_log.exp(),
            b.reshape(batch, tokens, layer.groups, layer.state),
            c.reshape(batch, tokens, layer.groups, layer.state),
            chunk_size=layer.chunk,
            D=d,
            dt_bias=dt_bias,
            dt_softplus=True,
        )
        y = (y.reshape(batch, tokens, layer.inner) * F.silu(gate)).view(batch, tokens, layer.groups, -1)
        return F.rms_norm(y, y.shape[-1:], eps=eps).flatten(-2) * gate_norm

    return mix


def fla_delta_scan() -> Callable[..., Tensor]:
    """`delta.delta_scan` with the kernel of flash-linear-attention."""
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    @without_split
    def scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunk: int) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out, _ = rule(q, k, v, g=log_decay.transpose(1, 2), beta=beta.transpose(1, 2), scale=1.0)
        return out.transpose(1, 2)

    return scan

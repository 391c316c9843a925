"""Which kernels our layers run with: installed ones where they are, compiled scans on a GPU, plain torch elsewhere.

Knows: how mamba_ssm's, causal_conv1d's and flash-linear-attention's functions are called. Does not know: layers'
weights; how transformers' models choose theirs (by the same packages, on their own).
Attention needs no choice: `scaled_dot_product_attention` has torch's flash kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octopipe import mixers as spec
from octopipe.nn.basic import without_split

PACKAGES = ("mamba_ssm", "causal_conv1d", "fla", "flash_attn", "liger_kernel")


def installed(*names: str) -> bool:
    """Whether all of these packages can be imported."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in names)
    except (ImportError, ValueError):
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What runs Mamba-2's scan and the delta rule: "mamba_ssm" or "fla", "compiled", or "eager"."""

    scan: str = "eager"
    delta: str = "eager"

    def told(self) -> dict[str, str]:
        """For a profile."""
        return {"scan": self.scan, "delta": self.delta, "attention": "sdpa"}


def choose(device: torch.device | str, *, compiled: bool | None = None) -> Kernels:
    """The fastest kernels there are for a device. `compiled`: True or False asks for compiled or eager scans, whatever
    is installed."""
    gpu = torch.device(device).type == "cuda"
    if compiled is not None:
        return Kernels(scan="compiled" if compiled else "eager")
    if not gpu:
        return Kernels()
    compiler = "compiled" if installed("triton") else "eager"
    return Kernels(
        scan="mamba_ssm" if installed("mamba_ssm", "causal_conv1d") else compiler,
        delta="fla" if installed("fla") else "eager",
    )


def mamba_ssm_mix() -> Callable[..., Tensor]:
    """`mamba.mamba2_mix` on mamba_ssm's chunked scan and causal_conv1d's convolution."""
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
    """`delta.delta_scan` on flash-linear-attention's kernel."""
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    @without_split
    def scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunk: int) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out, _ = rule(q, k, v, g=log_decay.transpose(1, 2), beta=beta.transpose(1, 2), scale=1.0)
        return out.transpose(1, 2)  # type: ignore[no-any-return]

    return scan

"""Softmax attention on torch's fused kernels: grouped keys, rotary positions, windows, sinks, MLA.

Knows: causal attention over [batch, heads, tokens, dim], over everything or a window, without ever building
a tokens × tokens matrix itself. Does not know: key/value caches, padding masks or packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octopipe.models import mixers as spec
from octopipe.runtime.nn import flash
from octopipe.runtime.nn.basic import Made, Residual, empty, without_split


class Rotary:
    """Rotary positions 0, 1, 2, ... for the first `dim` entries of each head; tables are kept per length."""

    def __init__(self, dim: int, theta: float):
        self.dim, self.theta = dim, theta
        self._tables: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        key = (x.shape[-2], x.device, x.dtype)
        if key not in self._tables:
            wide = torch.float64 if x.dtype is torch.float64 else torch.float32
            rates = self.theta ** (-torch.arange(0, self.dim, 2, device=x.device, dtype=wide) / self.dim)
            angles = torch.arange(x.shape[-2], device=x.device, dtype=wide)[:, None] * rates
            angles = torch.cat((angles, angles), dim=-1)
            self._tables[key] = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        cos, sin = self._tables[key]
        turned = x[..., : self.dim]
        a, b = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat((-b, a), dim=-1) * sin
        return turned if self.dim == x.shape[-1] else torch.cat((turned, x[..., self.dim :]), dim=-1)


@without_split
def attend(q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, sinks: Tensor | None = None) -> Tensor:
    """Causal attention; `q` [batch, heads, tokens, dim], `k` and `v` with as many heads or a divisor of that number.

    `window`: each token attends to itself and to the `window - 1` tokens before it. `sinks`: one logit per head that
    takes part in the softmax and carries no value.
    """
    scale = q.shape[-1] ** -0.5
    tokens, dim = q.shape[-2], v.shape[-1]
    if window is not None and tokens <= window:
        window = None
    if (window is not None or sinks is not None) and flash.fits(q, v, window=window):
        return flash.FlashAttention.apply(q, k, v, sinks, window, scale)
    if window is not None:
        return _attend_window(q, k, v, window, sinks, scale)
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    # Add a first key that every query sees. One more entry of each head makes its logit the sink, and its value is
    # zero. This needs no mask, so the fast kernels still apply. (8 entries are added, for their alignment.)
    q, k, v = _with_sink(q, k, v, sinks, scale)
    q = F.pad(q, (0, 0, 1, 0))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[..., 1:, :dim]


def _repeat(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _with_sink(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    k, v = _repeat(k, q.shape[1]), _repeat(v, q.shape[1])
    mark = F.pad(q.new_ones(1), (0, 7)).expand(*q.shape[:-1], 8)
    first = F.pad((sinks / scale).to(k.dtype)[None, :, None, None], (k.shape[-1], 7))
    k = torch.cat((first.expand(k.shape[0], -1, -1, -1), F.pad(k, (0, 8))), dim=-2)
    return torch.cat((q, mark), dim=-1), k, F.pad(v, (0, 8, 1, 0))


def _attend_window(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None, scale: float) -> Tensor:
    """Attention of every block of `window` queries to its own and the previous block of keys: linear in tokens."""
    batch, heads, tokens, _ = q.shape
    k, v = _repeat(k, heads), _repeat(v, heads)
    blocks = -(-tokens // window)
    pad = blocks * window - tokens

    def fold(x: Tensor) -> Tensor:  # [batch * blocks, heads, window, dim]
        x = F.pad(x, (0, 0, 0, pad)).view(batch, heads, blocks, window, -1)
        return x.transpose(1, 2).reshape(batch * blocks, heads, window, -1)

    def with_previous(x: Tensor) -> Tensor:
        x = fold(x).view(batch, blocks, heads, window, -1)
        previous = F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1]
        return torch.cat((previous, x), dim=3).reshape(batch * blocks, heads, 2 * window, -1)

    dim = v.shape[-1]
    q, k, v = fold(q), with_previous(k), with_previous(v)
    i = torch.arange(window, device=q.device)[:, None] + window
    j = torch.arange(2 * window, device=q.device)[None]
    seen = ((j <= i) & (j > i - window)).expand(blocks, -1, -1).clone()
    seen[0, :, :window] = False
    if sinks is not None:
        q, k, v = _with_sink(q, k, v, sinks, scale)
        seen = F.pad(seen, (1, 0), value=True)
    seen = seen[None, :, None].expand(batch, -1, -1, -1, -1).reshape(batch * blocks, 1, window, -1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)[..., :dim]
    out = out.view(batch, blocks, heads, window, dim).transpose(1, 2)
    return out.reshape(batch, heads, blocks * window, dim)[:, :, :tokens]


class Attention(Residual):
    """Multi-head attention with grouped keys; queries, keys, values and gate are one projection."""

    def __init__(self, layer: spec.Attention, eps: float, made: Made):
        super().__init__(layer.hidden, eps, made, layer.norm, layer.post_norm)
        q, kv = layer.query_width, layer.kv_width
        self.widths = [q, kv, kv] + ([q] if layer.gated else [])
        self.qkv = nn.Linear(layer.hidden, sum(self.widths), bias=layer.qkv_bias, **made)
        self.out = nn.Linear(q, layer.hidden, bias=layer.out_bias, **made)
        self.q_norm = nn.RMSNorm(layer.head_dim, eps=eps, **made) if layer.qk_norm else None
        self.k_norm = nn.RMSNorm(layer.head_dim, eps=eps, **made) if layer.qk_norm else None
        self.sinks = empty(layer.heads, made=made) if layer.sinks else None
        self.head_dim, self.window = layer.head_dim, layer.window
        self.attend: Callable[..., Tensor] = attend
        """The attention function; `build_layers` may replace it by a faster kernel (`kernels.flash_attend`)."""
        self.rotary = None if layer.rope_theta is None else Rotary(layer.rotary_dim or layer.head_dim, layer.rope_theta)

    def special_init(self, generator: torch.Generator) -> None:
        if self.sinks is not None:
            self.sinks.zero_()

    def inner(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        parts = self.qkv(x).split(self.widths, dim=-1)
        q, k, v = (p.view(batch, tokens, -1, self.head_dim).transpose(1, 2) for p in parts[:3])
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        mixed = self.attend(q, k, v, window=self.window, sinks=self.sinks)
        mixed = mixed.transpose(1, 2).reshape(batch, tokens, -1)
        return self.out(mixed * parts[3].sigmoid() if len(parts) == 4 else mixed)


class LatentAttention(Residual):
    """Multi-head latent attention (DeepSeek): queries, keys and values come from narrow projections."""

    def __init__(self, layer: spec.LatentAttention, eps: float, made: Made):
        super().__init__(layer.hidden, eps, made)
        h, n = layer.hidden, layer.heads
        self.dims = layer.nope_dim, layer.rope_dim, layer.v_dim
        self.kv_rank = layer.kv_rank
        self.q_down = self.q_norm = None
        if layer.q_rank is not None:
            self.q_down = nn.Linear(h, layer.q_rank, bias=layer.bias, **made)
            self.q_norm = nn.RMSNorm(layer.q_rank, eps=eps, **made)
        self.q_up = nn.Linear(layer.q_rank or h, n * layer.qk_dim, bias=False, **made)
        self.kv_down = nn.Linear(h, layer.kv_rank + layer.rope_dim, bias=layer.bias, **made)
        self.kv_norm = nn.RMSNorm(layer.kv_rank, eps=eps, **made)
        self.kv_up = nn.Linear(layer.kv_rank, n * (layer.nope_dim + layer.v_dim), bias=False, **made)
        self.out = nn.Linear(n * layer.v_dim, h, bias=layer.bias, **made)
        self.rotary = None if layer.rope_theta is None else Rotary(layer.rope_dim, layer.rope_theta)

    def inner(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        nope, rope, v_dim = self.dims
        low = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x))
        q = self.q_up(low).view(batch, tokens, -1, nope + rope).transpose(1, 2)
        q, q_turned = q.split((nope, rope), dim=-1)
        latent, k_turned = self.kv_down(x).split((self.kv_rank, rope), dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).view(batch, tokens, -1, nope + v_dim).transpose(1, 2)
        k, v = kv.split((nope, v_dim), dim=-1)
        k_turned = k_turned[:, None]
        if self.rotary is not None:
            q_turned, k_turned = self.rotary(q_turned), self.rotary(k_turned)
        q = torch.cat((q, q_turned), dim=-1)
        k = torch.cat((k, k_turned.expand(-1, q.shape[1], -1, -1)), dim=-1)
        return self.out(attend(q, k, v).transpose(1, 2).reshape(batch, tokens, -1))

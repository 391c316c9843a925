"""Mamba-2 and Mamba-1 (and lightning attention, a Mamba-2 scan with a fixed decay) in plain torch.

Knows: the chunked scans. Mamba-2 (Dao & Gu 2024, "Transformers are SSMs"): inside a chunk the recurrence is a
masked matrix product, every chunk leaves one state, and the states are joined by a small matrix product over
chunks; nothing loops over tokens. In Mamba-1 every state of a channel has its own decay, so there is no such
product: all chunks advance together one token at a time, twice. Does not know: decoding, or state carried
from one sequence to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octopipe.models import mixers as spec
from octopipe.runtime.nn.basic import (
    Made,
    Residual,
    at_least_float32,
    causal_conv,
    empty,
    time_step_bias,
    without_split,
)
from octopipe.runtime.torch_private import inductor_config
from octopipe.runtime.typed_function import Function, Gradients


class Decay(Function):
    """`exp(sums[i] - sums[j])` for i >= j, else 0, in `dtype`; `sums` [..., chunk] in full precision.

    The backward is written by hand to save memory: only the result is kept, and no full-precision matrix remains after
    the call.
    """

    @staticmethod
    def forward(ctx: Any, sums: Tensor, dtype: torch.dtype) -> Tensor:
        # Above the diagonal the difference is positive and exp may overflow; tril drops these values.
        differences = sums[..., :, None] - sums[..., None, :]
        if torch.compiler.is_compiling():
            # No in-place change: torch.compile of torch 2.11 saves a wrong value of a result that was changed in place.
            out = differences.exp().to(dtype).tril()
        else:  # saves two passes over memory, a fifth of the time
            out = torch.exp(differences, out=differences.new_empty(differences.shape, dtype=dtype)).tril_()
        ctx.save_for_backward(out)
        ctx.sums_dtype = sums.dtype
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        (out,) = ctx.saved_tensors
        g = g * out
        return g.sum(-1, dtype=ctx.sums_dtype) - g.sum(-2, dtype=ctx.sums_dtype), None


def _ssd_scan(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """`y[t] = c[t] @ s[t]` with `s[t] = exp(log_decay[t]) s[t-1] + b[t] x[t]^T`, chunk by chunk.

    `x` [batch, tokens, heads, dim], `log_decay` [batch, tokens, heads] (full precision, <= 0), `b` and `c`
    [batch, tokens, groups, state], a group serving heads / groups heads.
    """
    batch, tokens, heads, dim = x.shape
    groups, state = b.shape[-2:]
    per = heads // groups
    chunk = min(chunk, tokens)
    pad = -tokens % chunk
    if pad:  # no decay and no input: states pass through unchanged
        x, b, c = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (x, b, c))
        log_decay = F.pad(log_decay, (0, 0, 0, pad))
    n = (tokens + pad) // chunk

    def by_head(t: Tensor) -> Tensor:  # [batch, n, groups, per or 1, chunk, dim], one copy
        return t.reshape(batch, n, chunk, groups, -1, t.shape[-1]).permute(0, 1, 3, 4, 2, 5).contiguous()

    sums = log_decay.view(batch, n, chunk, groups, per).permute(0, 1, 3, 4, 2).contiguous().cumsum(-1)
    x, b, c = by_head(x), by_head(b), by_head(c)
    y = ((c @ b.mT) * Decay.apply(sums, x.dtype)) @ x
    if n > 1:
        # Heads of one group share b and c, so they sit side by side in one wide product per (chunk, group).
        left = x * (sums[..., -1:] - sums).exp().to(x.dtype)[..., None]
        states = (left.mT.flatten(3, 4) @ b[:, :, :, 0]).view(batch, n, heads, dim * state)
        # State before chunk i: over all j < i, the decay from the end of j to the start of i times states[j].
        whole = sums[..., -1].flatten(2).transpose(1, 2).cumsum(-1)  # [batch, heads, n]
        carry = F.pad(Decay.apply(whole, x.dtype)[:, :, :-1], (0, 0, 1, 0))
        before = (carry @ states.transpose(1, 2)).transpose(1, 2)
        before = before.reshape(batch, n, groups, per * dim, state)
        carried = (c[:, :, :, 0] @ before.mT).view(batch, n, groups, chunk, per, dim).transpose(3, 4)
        y = torch.addcmul(y, carried, sums.exp().to(x.dtype)[..., None])
    y = y.permute(0, 1, 4, 2, 3, 5).reshape(batch, tokens + pad, heads, dim)
    return y[:, :tokens] if pad else y


ssd_scan = without_split(_ssd_scan)


@without_split
def mamba2_mix(
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
    """Everything of a Mamba-2 layer between its two projections, which contain all weight matrices."""
    batch, tokens, _ = projected.shape
    gate, mixed, dt = projected.split((layer.inner, layer.conv_width, layer.heads), dim=-1)
    mixed = F.silu(causal_conv(mixed, conv_weight, conv_bias))
    bc = layer.groups * layer.state
    x, b, c = mixed.split((layer.inner, bc, bc), dim=-1)
    x = x.view(batch, tokens, layer.heads, layer.head_dim)
    b, c = (t.view(batch, tokens, layer.groups, layer.state) for t in (b, c))
    dt = F.softplus(dt.to(dt_bias.dtype) + dt_bias)
    y = _ssd_scan(x * dt.to(x.dtype)[..., None], dt * -a_log.exp(), b, c, layer.chunk)
    y = torch.addcmul(y, x, d.to(x.dtype)[:, None]).reshape(batch, tokens, layer.inner)
    y = (y * F.silu(gate)).view(batch, tokens, layer.groups, -1)
    return F.rms_norm(y, y.shape[-1:], eps=eps).flatten(-2) * gate_norm


def compiled_mamba2_mix(**options: Any) -> Callable[..., Tensor]:
    """`mamba2_mix` through `torch.compile`, for fixed shapes."""
    config = inductor_config()
    if not options and hasattr(config.triton, "mix_order_reduction"):
        # In torch 2.11 this fusion fails in the convolution's backward ("AssertionError: 2045 v.s. 2046").
        options = {"options": {"triton.mix_order_reduction": False}}
    return torch.compile(mamba2_mix.__wrapped__, dynamic=False, **options)  # type: ignore[attr-defined]


class Mamba2(Residual):
    """State-space duality mixer: projection, short convolution, scan, gated group norm, projection."""

    def __init__(self, layer: spec.Mamba2, eps: float, made: Made):
        super().__init__(layer.hidden, eps, made)
        wide = at_least_float32(made)
        self.layer, self.eps = layer, eps
        self.mix: Callable[..., Tensor] = mamba2_mix
        """May be replaced by `compiled_mamba2_mix()`, which is faster on a GPU."""
        self.proj = nn.Linear(layer.hidden, layer.projection_width, bias=False, **made)
        self.conv_weight = empty(layer.conv_width, layer.conv, made=made)
        self.conv_bias = empty(layer.conv_width, made=made)
        self.dt_bias = empty(layer.heads, made=wide)
        self.a_log = empty(layer.heads, made=wide)
        self.d = empty(layer.heads, made=wide)
        self.gate_norm = empty(layer.inner, made=made)
        self.out = nn.Linear(layer.inner, layer.hidden, bias=False, **made)

    def special_init(self, generator: torch.Generator) -> None:
        self.dt_bias.copy_(time_step_bias(self.dt_bias.shape, generator, self.dt_bias.device))
        self.a_log.uniform_(1, 16, generator=generator).log_()
        self.conv_weight.uniform_(-0.5, 0.5, generator=generator)
        self.conv_bias.zero_()
        self.d.fill_(1)
        self.gate_norm.fill_(1)

    def inner(self, x: Tensor) -> Tensor:
        small = self.conv_weight, self.conv_bias, self.dt_bias, self.a_log, self.d, self.gate_norm
        return self.out(self.mix(self.layer, self.eps, self.proj(x), *small))


class LightningAttention(Residual):
    """Linear attention with a fixed decay per head and an output gate (MiniMax)."""

    def __init__(self, layer: spec.LightningAttention, eps: float, made: Made):
        super().__init__(layer.hidden, eps, made)
        self.layer, self.eps = layer, eps
        self.qkv = nn.Linear(layer.hidden, 3 * layer.inner, bias=False, **made)
        self.gate = nn.Linear(layer.hidden, layer.inner, bias=False, **made)
        self.out_norm = nn.RMSNorm(layer.inner, eps=eps, **made)
        self.out = nn.Linear(layer.inner, layer.hidden, bias=False, **made)

    def inner(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        heads = self.layer.heads
        q, k, v = F.silu(self.qkv(x)).view(batch, tokens, 3, heads, -1).unbind(2)
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        # Slopes as in ALiBi: 2^(-8 i / heads) for head i = 1, 2, ...
        slope = 2 ** (-8 * torch.arange(1, heads + 1, device=x.device, dtype=wide) / heads)
        y = ssd_scan(v, -slope.expand(batch, tokens, -1), k, q, self.layer.chunk)
        return self.out(self.out_norm(y.flatten(-2)) * self.gate(x).sigmoid())


@without_split
def _advance(u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`y[t] = s[t] @ c[t]` with `s[t] = exp(dt[t] a) s[t-1] + u[t] b[t]`.

    `u` and `dt` are [batch, n, chunk, channels], `b` and `c` [batch, n, chunk, state].
    """
    decays = (dt[..., None] * a).exp().unbind(2)
    puts = (u[..., None] * b[..., None, :]).unbind(2)

    def advance(s: Tensor | None, decays: Sequence[Tensor], puts: Sequence[Tensor]) -> list[Tensor]:
        states = []
        for decay, put in zip(decays, puts):
            s = put if s is None else torch.addcmul(put, decay, s)
            states.append(s)
        return states

    first: Tensor | None = None
    if u.shape[1] > 1:  # the state that every chunk adds, then the state from which each chunk starts
        ends = advance(None, decays, puts)[-1].unbind(1)
        whole = (dt.sum(2)[..., None] * a).exp().unbind(1)
        first = torch.stack([torch.zeros_like(ends[0]), *advance(None, whole, ends)[:-1]], dim=1)
    states = torch.stack(advance(first, decays, puts), dim=2)
    return (states @ c[..., None])[..., 0].flatten(1, 2)


@without_split
def selective_scan(u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *, block: int | None = None) -> Tensor:
    """Mamba-1's recurrence over [batch, tokens, channels] with `a` [channels, state] and `b`, `c` per token.

    Chunks of about the square root of the length keep the number of steps small; channels go in blocks that
    are recomputed in backward, so the states of all tokens are never alive at once.
    """
    batch, tokens, channels = u.shape
    if block is None:  # about 1 GiB of states in float32
        block = max(16, (1 << 28) // (batch * tokens * a.shape[1]))
    chunk = 1 << max(0, (tokens - 1).bit_length() + 1) // 2
    pad = -tokens % chunk
    if pad:
        u, dt, b, c = (F.pad(t, (0, 0, 0, pad)) for t in (u, dt, b, c))
    u, dt, b, c = (t.reshape(batch, -1, chunk, t.shape[-1]) for t in (u, dt, b, c))
    out = []
    for start in range(0, channels, block):
        part = slice(start, start + block)
        args = u[..., part], dt[..., part], a[part], b, c
        if torch.is_grad_enabled():
            out.append(checkpoint(_advance, *args, use_reentrant=False, preserve_rng_state=False))
        else:
            out.append(_advance(*args))
    return torch.cat(out, dim=-1)[:, :tokens]


class Mamba1(Residual):
    """Selective scan with a state per channel (Jamba's has norms on dt, B and C)."""

    def __init__(self, layer: spec.Mamba1, eps: float, made: Made):
        super().__init__(layer.hidden, eps, made)
        wide = at_least_float32(made)
        self.layer = layer
        self.proj = nn.Linear(layer.hidden, 2 * layer.inner, bias=False, **made)
        self.conv_weight = empty(layer.inner, layer.conv, made=made)
        self.conv_bias = empty(layer.inner, made=made)
        self.x_proj = nn.Linear(layer.inner, layer.dt_rank + 2 * layer.state, bias=False, **made)
        self.dt_proj = nn.Linear(layer.dt_rank, layer.inner, bias=False, **made)
        self.dt_bias = empty(layer.inner, made=wide)
        self.a_log = empty(layer.inner, layer.state, made=wide)
        self.d = empty(layer.inner, made=wide)
        self.out = nn.Linear(layer.inner, layer.hidden, bias=False, **made)
        widths = (layer.dt_rank, layer.state, layer.state) if layer.inner_norms else ()
        self.inner_norms = nn.ModuleList(nn.RMSNorm(w, eps=eps, **made) for w in widths)

    def special_init(self, generator: torch.Generator) -> None:
        self.dt_bias.copy_(time_step_bias(self.dt_bias.shape, generator, self.dt_bias.device))
        self.a_log.copy_(torch.arange(1, self.layer.state + 1, device=self.a_log.device).log())
        self.conv_weight.uniform_(-0.5, 0.5, generator=generator)
        self.conv_bias.zero_()
        self.d.fill_(1)

    def inner(self, x: Tensor) -> Tensor:
        layer = self.layer
        x, gate = self.proj(x).chunk(2, dim=-1)
        x = F.silu(causal_conv(x, self.conv_weight, self.conv_bias))
        parts = self.x_proj(x).split((layer.dt_rank, layer.state, layer.state), dim=-1)
        if layer.inner_norms:
            parts = tuple(norm(p) for norm, p in zip(self.inner_norms, parts))
        wide = self.dt_bias.dtype
        dt = F.softplus(self.dt_proj(parts[0]).to(wide) + self.dt_bias)
        y = selective_scan(x.to(wide) * dt, dt, -self.a_log.exp(), parts[1].to(wide), parts[2].to(wide))
        return self.out((y + x * self.d).to(x.dtype) * F.silu(gate))

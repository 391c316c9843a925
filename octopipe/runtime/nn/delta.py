"""Gated delta net in chunks, in plain torch.

Knows: the gated delta rule (Yang, Kautz & Hatamizadeh 2024): a state S is decayed, corrected towards the new
value at the new key, and read by the query. Inside a chunk the corrections depend on each other through a
unit triangular matrix; its inverse turns the chunk into matrix products (the WY form), and from chunk to chunk the
state takes one product: everything else runs over all chunks at once. Does not know: a decay per channel (Kimi's),
decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
from octopipe.runtime.nn.mamba import Decay
from octopipe.runtime.precision import LOW
from octopipe.runtime.stages.wgrad_ops import wide_product
from octopipe.runtime.typed_function import Function, Gradients

BLOCK = 16
"""Triangular blocks of this size are inverted by substitution; larger inverses are assembled with matrix products."""


@without_split
def delta_scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """`S = exp(log_decay[t]) S`, then `S += k[t] (beta[t] (v[t] - k[t] S))^T`, `y[t] = q[t] S`.

    All [batch, heads, tokens, dim], `log_decay` and `beta` without the last one and in a wide dtype; `q`, `k` and `v`
    may be narrow: then products read narrow operands, while decays, the triangular inverse and the state stay wide.
    """
    batch, heads, tokens, _ = q.shape
    narrow, wide = q.dtype, log_decay.dtype
    chunk = min(chunk, tokens)
    pad = -tokens % chunk

    def chunked(t: Tensor) -> Tensor:
        """Reshape to [chunks, batch * heads, chunk, ...], padding the tokens."""
        if pad:  # padded tokens have beta 0 and do not change the state
            t = F.pad(t, (*(0, 0) * (t.ndim - 3), 0, pad))
        return t.unflatten(2, (-1, chunk)).movedim(2, 0).flatten(1, 2)

    q, k, v, log_decay, beta = (chunked(t) for t in (q, k, v, log_decay, beta))
    sums = log_decay.cumsum(-1)
    decay, growth = Decay.apply(sums, wide), sums.exp()[..., None]
    # The corrections of a chunk depend on each other: (1 + system) @ corrections = beta * (values - what keys read).
    system = (beta[..., None] * WideProduct.apply(k, k.mT, wide) * decay).tril(-1)
    solve = (UnitLowerInverse.apply(system) * beta[..., None, :]).to(narrow)
    writes, reads = solve @ v, solve @ (k * growth).to(narrow)
    keeps = (k * (sums[..., -1:] - sums).exp()[..., None]).to(narrow)
    passes = growth[..., -1:, :] * torch.eye(k.shape[-1], dtype=wide, device=k.device)
    # The state before each chunk, from that before the previous chunk: the only sequential part, one product per chunk.
    states = StateScan.apply(
        passes - WideProduct.apply(keeps.mT, reads, wide), WideProduct.apply(keeps.mT, writes, wide)
    ).to(narrow)
    new = writes - reads @ states
    scores = (q @ k.mT) * decay.to(narrow)
    y = (q * growth).to(narrow) @ states + scores @ new
    y = y.unflatten(1, (batch, heads)).movedim(0, 2).flatten(2, 3)
    return y[:, :, :tokens]


class WideProduct(Function):
    """`a @ b` with its sums kept in `dtype`; gradients are products of the operands' own dtype."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(a, b)
        if a.dtype == dtype:
            return a @ b
        product = wide_product(a.flatten(0, -3), b.flatten(0, -3), dtype)
        return product.unflatten(0, a.shape[:-2])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        a, b = ctx.saved_tensors
        g = g.to(a.dtype)
        return g @ b.mT, a.mT @ g, None


class UnitLowerInverse(Function):
    """The inverse of `1 + lower`, for `lower` [..., n, n] with nothing on and above its diagonal."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        inverse = _unit_lower_inverse(lower)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ g @ inverse.mT).tril_(-1)


def _unit_lower_inverse(lower: Tensor) -> Tensor:
    """Inverts the blocks on the diagonal first. Then two neighbouring blocks and the block that couples them form one
    of twice the size: [[a, 0], [c, b]] has the inverse [[a', 0], [-b' c a', b']]. This is as stable as substitution and
    consists of matrix products."""
    n = lower.shape[-1]
    size = BLOCK
    while size < n:
        size *= 2
    shape = lower.shape[:-2]
    lower = F.pad(lower, (0, size - n, 0, size - n)).reshape(-1, size, size)
    blocks = _diagonal_blocks(lower, BLOCK)
    one = torch.eye(BLOCK, dtype=lower.dtype, device=lower.device)
    inverse = torch.linalg.solve_triangular(blocks, one.expand_as(blocks), upper=False, unitriangular=True)
    width = BLOCK
    while width < size:
        a, b = inverse[:, 0::2], inverse[:, 1::2]
        couples = _diagonal_blocks(lower, 2 * width)[..., width:, :width]
        upper = F.pad(a, (0, width))
        inverse = torch.cat((upper, torch.cat((-(b @ couples @ a), b), dim=-1)), dim=-2)
        width *= 2
    return inverse[:, 0, :n, :n].reshape(*shape, n, n)


def _diagonal_blocks(x: Tensor, width: int) -> Tensor:
    """[count, size, size] -> [count, size / width, width, width]."""
    count, size, _ = x.shape
    return x.view(count, size // width, width, size // width, width).diagonal(dim1=1, dim2=3).movedim(-1, 1)


class StateScan(Function):
    """`s[0] = 0`, `s[c + 1] = factor[c] @ s[c] + term[c]`; all [chunks, batch, rows, columns]."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor, term: Tensor) -> Tensor:
        states = torch.empty_like(term)
        states[0] = 0
        for c in range(term.shape[0] - 1):
            torch.baddbmm(term[c], factor[c], states[c], out=states[c + 1])
        ctx.save_for_backward(factor, states)
        return states

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        factor, states = ctx.saved_tensors
        # flows[c]: the gradient of the state after chunk c; the state after the last chunk is not used.
        flows = torch.empty_like(states)
        flows[-1] = 0
        for c in range(flows.shape[0] - 1, 0, -1):
            torch.baddbmm(g[c], factor[c].mT, flows[c], out=flows[c - 1])
        return flows @ states.mT, flows


class GatedDeltaNet(Residual):
    """Linear attention with the gated delta rule (Qwen3-Next); key heads are shared by value heads."""

    def __init__(self, layer: spec.GatedDeltaNet, eps: float, made: Made):
        super().__init__(layer.hidden, eps, made)
        wide = at_least_float32(made)
        self.layer, self.eps = layer, eps
        self.narrow_scan: Callable[..., Tensor] | None = None
        """A faster kernel (`kernels.fla_delta_scan`), used for half precision; None: `delta_scan`."""
        self.proj = nn.Linear(layer.hidden, layer.projection_width, bias=False, **made)
        self.conv_weight = empty(2 * layer.key_width + layer.value_width, layer.conv, made=made)
        self.dt_bias = empty(layer.value_heads, made=wide)
        self.a_log = empty(layer.value_heads, made=wide)
        self.out_norm = nn.RMSNorm(layer.value_dim, eps=eps, **made)
        self.out = nn.Linear(layer.value_width, layer.hidden, bias=False, **made)

    def special_init(self, generator: torch.Generator) -> None:
        self.dt_bias.copy_(time_step_bias(self.dt_bias.shape, generator, self.dt_bias.device))
        self.a_log.uniform_(1, 16, generator=generator).log_()
        self.conv_weight.uniform_(-0.5, 0.5, generator=generator)

    def inner(self, x: Tensor) -> Tensor:
        layer, dtype = self.layer, x.dtype
        batch, tokens, _ = x.shape
        heads = layer.value_heads
        widths = (2 * layer.key_width + layer.value_width, layer.value_width, heads, heads)
        mixed, gate, beta, dt = self.proj(x).split(widths, dim=-1)
        narrow = mixed.dtype
        mixed = F.silu(causal_conv(mixed, self.conv_weight, None))
        q, k, v = mixed.split((layer.key_width, layer.key_width, layer.value_width), dim=-1)
        q, k = (
            F.normalize(t.reshape(batch, tokens, -1, layer.key_dim).to(self.dt_bias.dtype), dim=-1)
            .to(narrow)
            .repeat_interleave(heads // layer.key_heads, dim=2)
            .transpose(1, 2)
            for t in (q, k)
        )
        v = v.reshape(batch, tokens, heads, -1).transpose(1, 2)
        decay = -self.a_log.exp() * F.softplus(dt.to(self.dt_bias.dtype) + self.dt_bias)
        beta = beta.to(self.dt_bias.dtype).sigmoid()
        scan = self.narrow_scan if self.narrow_scan is not None and narrow in LOW else delta_scan
        y = scan(q * layer.key_dim**-0.5, k, v, decay.transpose(1, 2), beta.transpose(1, 2), layer.chunk)
        y = self.out_norm(y.transpose(1, 2).to(dtype)).flatten(-2)
        return self.out(y * F.silu(gate))

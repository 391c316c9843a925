"""Gated delta net in chunks, in plain torch.

Knows: the gated delta rule (Yang, Kautz & Hatamizadeh 2024): a state S is decayed, corrected towards the new
value at the new key, and read by the query. Inside a chunk the corrections depend on each other through a
unit triangular matrix; solving with it once turns the chunk into matrix products, and only the state goes
from chunk to chunk in sequence. Does not know: a decay per channel (Kimi's), decoding.
"""

from __future__ import annotations

from collections.abc import Callable

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


@without_split
def delta_scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """`S = exp(log_decay[t]) S`, then `S += k[t] (beta[t] (v[t] - k[t] S))^T`, `y[t] = q[t] S`.

    All [batch, heads, tokens, dim], `log_decay` and `beta` without the last one; in one wide dtype.
    """
    batch, heads, tokens, _ = q.shape
    chunk = min(chunk, tokens)
    pad = -tokens % chunk
    if pad:  # beta 0: nothing is written
        q, k, v = (F.pad(t, (0, 0, 0, pad)) for t in (q, k, v))
        log_decay, beta = F.pad(log_decay, (0, pad)), F.pad(beta, (0, pad))
    q, k, v, beta = (t.unflatten(2, (-1, chunk)) for t in (q, k, v, beta))
    sums = log_decay.unflatten(2, (-1, chunk)).cumsum(-1)
    decay = Decay.apply(sums, q.dtype)
    below = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril(-1)
    system = (beta[..., None] * (k @ k.mT) * decay) * below  # its unit diagonal is implied by the solver
    grown = k * sums.exp()[..., None]
    solved = torch.linalg.solve_triangular(
        system, beta[..., None] * torch.cat((v, grown), dim=-1), upper=False, unitriangular=True
    )
    writes, reads = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    scores = (q @ k.mT) * decay
    asks = q * sums.exp()[..., None]
    keeps = k * (sums[..., -1:] - sums).exp()[..., None]
    ends = sums[..., -1].exp()[..., None, None]
    state = q.new_zeros(batch, heads, k.shape[-1], v.shape[-1])
    out = []
    parts = (t.unbind(2) for t in (asks, scores, writes, reads, keeps, ends))  # one gradient buffer each
    for ask, score, write, read, keep, end in zip(*parts):
        new = write - read @ state
        out.append(ask @ state + score @ new)
        state = end * state + keep.mT @ new
    return torch.cat(out, dim=2)[:, :, :tokens]


class GatedDeltaNet(Residual):
    """Linear attention with the gated delta rule (Qwen3-Next); key heads are shared by value heads."""

    def __init__(self, layer: spec.GatedDeltaNet, eps: float, made: Made):
        super().__init__(layer.hidden, eps, made)
        wide = at_least_float32(made)
        self.layer, self.eps = layer, eps
        self.narrow_scan: Callable[..., Tensor] | None = None
        """A faster kernel (`kernels.fla_delta_scan`) for half precision."""
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
        mixed = F.silu(causal_conv(mixed, self.conv_weight, None)).to(self.dt_bias.dtype)
        q, k, v = mixed.split((layer.key_width, layer.key_width, layer.value_width), dim=-1)
        q, k = (
            F.normalize(t.reshape(batch, tokens, -1, layer.key_dim), dim=-1)
            .repeat_interleave(heads // layer.key_heads, dim=2)
            .transpose(1, 2)
            for t in (q, k)
        )
        v = v.reshape(batch, tokens, heads, -1).transpose(1, 2)
        decay = -self.a_log.exp() * F.softplus(dt.to(self.dt_bias.dtype) + self.dt_bias)
        beta = beta.to(self.dt_bias.dtype).sigmoid()
        scan = delta_scan
        if self.narrow_scan is not None and narrow in (torch.bfloat16, torch.float16):
            scan, q, k, v = self.narrow_scan, q.to(narrow), k.to(narrow), v.to(narrow)
        y = scan(q * layer.key_dim**-0.5, k, v, decay.transpose(1, 2), beta.transpose(1, 2), layer.chunk)
        y = self.out_norm(y.transpose(1, 2).to(dtype)).flatten(-2)
        return self.out(y * F.silu(gate))

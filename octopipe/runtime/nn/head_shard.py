"""The two numbers per token of a shard of the head, without full-precision logits of a whole micro-batch.

Knows: how a shard's projection, its log-sum-exp and the target's logit are computed block by block, and their
gradients. Does not know: how the loss is computed from several shards (`stages/shards.py`), or where the others are.

Forward, I and W are one GEMM each, as for a whole head (`head.py`). Forward keeps the softmax p over the shard's part
of the vocabulary in the activations' dtype. With the gradients g of the log-sum-exp and h of the target's logit, the
gradient of a logit is g * p, and g * p + h at the target. Backward writes p + h / g at the position of the target,
where rounding is relative to the gradient itself, and multiplies whole rows by g after the GEMM, in full precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octopipe.runtime.stages.wgrad import WeightSite, add_product, site_of
from octopipe.runtime.typed_function import Function, Gradients

LEAST_SLOPE = {torch.float64: 1e-200, torch.float32: 1e-30}
"""Smallest divisor of a row, used if the gradient g is smaller. In such a row the shard has no share in the token's
softmax, and only the gradient of the target's logit remains."""


def block_shares(logits: Tensor, index: Tensor, dtype: torch.dtype, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """For a block of rows: log(sum(exp)), the logit at `index`, and the softmax over the shard's part of the
    vocabulary."""
    values = logits.to(wide)
    lse = values.logsumexp(-1, keepdim=True)
    return lse, values.gather(1, index), (values - lse).exp().to(dtype)


@functools.cache
def fused_shares() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """`block_shares` through torch.compile: one kernel that reads the logits twice and writes the softmax once."""
    return torch.compile(block_shares, dynamic=True)


class LeanPartial(Function):
    """log(sum(exp)) of `hidden @ weight.T` and the labels' logits (zero for the tokens of other shards)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, local: Tensor, block: int, site: WeightSite | None, kind: str
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype is torch.float64 else torch.float32
        w = weight.to(hidden.dtype)
        keep = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        shares = hidden.new_empty(hidden.shape[0], w.shape[0]) if keep else None
        mine = (local >= 0) & (local < w.shape[0])
        index = torch.where(mine, local, 0)[:, None]
        sums = hidden.new_empty(hidden.shape[0], dtype=wide)
        picked = torch.empty_like(sums)
        of_block = fused_shares() if kind == "fused" else block_shares
        for start in range(0, hidden.shape[0], block):
            rows = slice(start, start + block)
            lse, at_target, share = of_block(hidden[rows] @ w.t(), index[rows], hidden.dtype, wide)
            sums[rows], picked[rows] = lse[:, 0], at_target[:, 0]
            if shares is not None:
                shares[rows] = share
        if keep:
            ctx.save_for_backward(hidden, weight, shares, index, mine, (picked - sums).exp())
            ctx.site = site
        return sums, torch.where(mine, picked, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_sum: Tensor, g_picked: Tensor) -> Gradients:
        hidden, weight, shares, index, mine, at_target = ctx.saved_tensors
        needs, site, dtype = ctx.needs_input_grad, ctx.site, hidden.dtype
        own = site is None or site.queue.shut  # autograd takes the weight's gradient itself
        least = LEAST_SLOPE[g_sum.dtype]
        slope = torch.where(mine, g_picked, 0.0) + g_sum * at_target
        scale = torch.where(g_sum.abs() > least, g_sum, least)
        written = torch.where(mine, slope / scale, at_target).to(dtype)
        shares.scatter_(1, index, written[:, None])
        scale = torch.where((g_sum == 0) & (slope == 0), 0.0, scale)[:, None]  # ignored tokens have no gradient
        g_hidden = g_weight = None
        if needs[0]:
            g_hidden = ((shares @ weight.to(dtype)) * scale).to(dtype)
        if needs[1]:
            scaled = (hidden * scale).to(dtype)
            if own:
                g_weight = (shares.mT @ scaled).to(weight.dtype)
            else:
                site.queue.add(add_product, site.param, site.layout, shares, scaled)
        return g_hidden, g_weight, None, None, None, None


def partial_of_hidden(
    hidden: Tensor, weight: Tensor, labels: Tensor, start: int, kind: str, block_logits: int
) -> tuple[Tensor, Tensor]:
    """`LeanPartial` for the tokens from `start` on, as the running stage and autocast require it."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype is not torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    rows = hidden.shape[:-1].numel()
    most = max(1, block_logits // weight.shape[0])
    block = -(-rows // max(1, -(-rows // most)))
    local = labels.flatten() - start
    return LeanPartial.apply(hidden.flatten(0, -2), weight, local, block, site_of(weight), kind)


def takes(hidden: Tensor) -> bool:
    """Whether this dtype can represent gradients divided by a small share; the largest float16 is 65,504."""
    return hidden.dtype is not torch.float16

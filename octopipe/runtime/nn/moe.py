"""Mixture of experts: tokens sorted by expert, one grouped matrix product per projection.

Knows: top-k routing with softmax weights, the sort that puts an expert's tokens side by side, its exact
inverse, shared experts. Does not know: expert parallelism, capacity limits (no token is dropped) or balance
losses. On CUDA in bfloat16 the products are `torch._grouped_mm` and the host never waits; elsewhere a loop
over experts, which reads the token counts on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octopipe.models import layers as spec
from octopipe.runtime.nn.basic import Made, Residual, activate, empty
from octopipe.runtime.torch_private import grouped_mm
from octopipe.runtime.typed_function import Function, Gradients


class Dispatch(Function):
    """Row i of the result is token `order[i] // top_k`; the backward gathers as well, so it needs no atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        (inverse,) = ctx.saved_tensors
        return g.index_select(0, inverse).unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class Permute(Function):
    """Permutes rows into the order `to`; `back` is the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, to)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        return g.index_select(0, ctx.saved_tensors[0]), None, None


class AddRows(Function):
    """`x + table[which]`.

    For a plain lookup, torch sums the gradient row by row, which takes as long as the largest expert has tokens: half
    of a backward's time. Here the sum is a product with zeros and ones, whose time does not depend on how the tokens
    are distributed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, which: Tensor) -> Tensor:
        ctx.save_for_backward(which)
        ctx.rows = table.shape[0]
        return x + table.index_select(0, which)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        (which,) = ctx.saved_tensors
        rows = torch.arange(ctx.rows, device=g.device)
        return g, (rows[:, None] == which).to(g.dtype) @ g, None


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`x[rows of e] @ weight[e]` for every expert e, whose rows end at `ends[e]`."""
    fits = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0  # the kernel needs rows of a multiple of 16 bytes
    if x.is_cuda and x.dtype is torch.bfloat16 and weight.dtype is x.dtype and fits:
        return grouped_mm(x, weight, offs=ends)
    out, start = [], 0
    for e, end in enumerate(ends.tolist()):
        if end > start:
            out.append(x[start:end] @ weight[e])
        start = end
    return torch.cat(out)


class Moe(Residual):
    """Router, routed experts and shared experts."""

    def __init__(self, layer: spec.Moe, eps: float, made: Made):
        super().__init__(layer.hidden, eps, made)
        self.layer = layer
        h, w, f, e = layer.hidden, layer.expert_width, layer.ffn, layer.experts
        wide = (layer.matrices - 1) * f
        self.router = nn.Linear(h, e, bias=layer.bias, **made)
        self.up = empty(e, w, wide, made=made)
        self.down = empty(e, f, w, made=made)
        self.up_bias = empty(e, wide, made=made) if layer.bias else None
        self.down_bias = empty(e, w, made=made) if layer.bias else None
        self.into_latent = nn.Linear(h, w, bias=False, **made) if layer.latent else None
        self.from_latent = nn.Linear(w, h, bias=False, **made) if layer.latent else None
        self.shared_up = self.shared_down = self.shared_gate = None
        if layer.shared_ffn:
            self.shared_up = nn.Linear(h, (layer.matrices - 1) * layer.shared_ffn, bias=False, **made)
            self.shared_down = nn.Linear(layer.shared_ffn, h, bias=False, **made)
        if layer.shared_gate:
            self.shared_gate = nn.Linear(h, 1, bias=False, **made)

    def special_init(self, generator: torch.Generator) -> None:
        if self.up_bias is not None and self.down_bias is not None:
            self.up_bias.zero_()
            self.down_bias.zero_()

    def inner(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        y = self._routed(flat)
        if self.shared_up is not None and self.shared_down is not None:
            shared = self.shared_down(activate(self.layer.activation, self.shared_up(flat)))
            y = y + (shared if self.shared_gate is None else shared * self.shared_gate(flat).sigmoid())
        return y.view(x.shape)

    def _routed(self, x: Tensor) -> Tensor:
        top_k = self.layer.top_k
        logits = self.router(x)
        logits = logits if logits.dtype is torch.float64 else logits.float()
        best, experts = logits.topk(top_k, dim=-1)
        weights = best.softmax(dim=-1).to(x.dtype)
        experts = experts.flatten()
        # Not bincount, because it would make the host wait for the device.
        counts = torch.zeros(self.layer.experts, dtype=torch.int32, device=x.device)
        ends = counts.scatter_add_(0, experts, torch.ones_like(experts, dtype=torch.int32)).cumsum(0)
        ends = ends.to(torch.int32)
        order = experts.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=x.device)

        if self.into_latent is not None:
            x = self.into_latent(x)
        rows = Dispatch.apply(x, order, inverse, top_k)
        mid = grouped_product(rows, self.up, ends)
        if self.up_bias is not None:
            mid = AddRows.apply(mid, self.up_bias, experts[order])
        out = grouped_product(activate(self.layer.activation, mid), self.down, ends)
        if self.down_bias is not None:
            out = AddRows.apply(out, self.down_bias, experts[order])
        out = Permute.apply(out, inverse, order).unflatten(0, (-1, top_k))
        y = (weights[:, None] @ out)[:, 0]
        return y if self.from_latent is None else self.from_latent(y)

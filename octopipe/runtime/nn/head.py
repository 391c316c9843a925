"""The head and a cross-entropy that never holds full-precision logits of a whole micro-batch.

Knows: final norm, projection to the vocabulary, the loss over it. Does not know: how the losses of several
micro-batches are averaged (the executor), vocabulary parallelism.

Memory: one pass over blocks of tokens computes the loss and turns each block of logits into its gradient,
kept in the activations' own dtype: 2 bytes per token and word in bfloat16 until W, instead of the 10 or so
that `F.cross_entropy(logits.float(), ...)` holds. Forward, I and W are one GEMM each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octopipe.models import layers as spec
from octopipe.runtime.nn.basic import Made, empty, norm
from octopipe.runtime.stages.wgrad import WeightSite, add_product, site_of


class LazyLogits(NamedTuple):
    """The head's output before the projection: `cross_entropy` takes it as it is, `logits()` projects."""

    hidden: Tensor
    """Behind the final norm."""
    weight: Tensor
    """[vocab, hidden]."""

    def logits(self) -> Tensor:
        return F.linear(self.hidden, self.weight)


class Head(nn.Module):
    """Final norm and projection. `lean`: return `LazyLogits`; otherwise the logits, for any loss."""

    def __init__(self, layer: spec.Head, eps: float, made: Made, lean: bool):
        super().__init__()
        self.norm = norm(layer.norm, layer.hidden, eps, made)
        self.weight = empty(layer.vocab, layer.hidden, made=made)
        self.lean = lean
        self.tied_to: dict[str, str] = {"weight": "embedding"} if layer.tied else {}

    def forward(self, hidden: Tensor) -> LazyLogits | Tensor:
        out = LazyLogits(self.norm(hidden), self.weight)
        return out if self.lean else out.logits()


class LeanCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of `hidden @ weight.T` against `target`; see the module's docstring."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, hidden: Tensor, weight: Tensor, target: Tensor, ignore: int, block: int, site: WeightSite | None
    ) -> Tensor:
        wide = torch.float64 if hidden.dtype is torch.float64 else torch.float32
        w = weight.to(hidden.dtype)
        keep = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        slopes = hidden.new_empty(hidden.shape[0], w.shape[0]) if keep else None
        seen = target != ignore
        index = torch.where(seen, target, 0)[:, None]
        seen = seen.to(wide)[:, None]
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, hidden.shape[0], block):
            rows = slice(start, start + block)
            logits = hidden[rows] @ w.t()
            picked = torch.log_softmax(logits, -1, dtype=wide).gather(1, index[rows])
            total -= (picked * seen[rows]).sum()
            if slopes is not None:
                torch.softmax(logits, -1, out=slopes[rows])
                # p - 1 from the exact log p: the rounded p would leave nothing of it where p is near 1.
                slopes[rows].scatter_(1, index[rows], picked.expm1().to(slopes.dtype))
        count = seen.sum().clamp_(min=1)
        if slopes is not None:
            ctx.save_for_backward(hidden, weight, slopes, seen / count)
            ctx.site = site
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor):  # type: ignore[override]
        hidden, weight, slopes, share = ctx.saved_tensors
        scale, dtype = g * share, hidden.dtype  # zero for the rows of ignored tokens

        def scaled_rows(x: Tensor) -> Tensor:  # in full precision: a rounded scale would bend every gradient
            return (x * scale).to(dtype)

        g_hidden = scaled_rows(slopes @ weight.to(dtype)) if ctx.needs_input_grad[0] else None
        g_weight = None
        if ctx.needs_input_grad[1]:
            scaled, site = scaled_rows(hidden), ctx.site
            if site is None or site.queue.shut:
                g_weight = slopes.mT @ scaled
            else:
                site.queue.add(add_product, site.param, site.layout, slopes, scaled)
        return g_hidden, g_weight, None, None, None, None


def cross_entropy(output: LazyLogits | Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """The mean loss over the tokens of `target` that are not `ignore_index`, for a `Head` lean or not."""
    if isinstance(output, Tensor):
        logits = output.flatten(0, -2)
        logits = logits if logits.dtype is torch.float64 else logits.float()
        return F.cross_entropy(logits, target.flatten(), ignore_index=ignore_index)
    hidden, weight = output
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype is not torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    # Blocks of about 256 MiB of full-precision logits.
    block = max(1, (1 << 26) // weight.shape[0])
    return LeanCrossEntropy.apply(hidden.flatten(0, -2), weight, target.flatten(), ignore_index, block, site_of(weight))

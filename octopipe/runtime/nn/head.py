"""The head and a cross-entropy that never holds full-precision logits of a whole micro-batch.

Knows: final norm, projection to the vocabulary, the loss over it. Does not know: how the losses of several
micro-batches are averaged (the executor), how the loss is made of a cut head's shards (`stages/shards.py`).

Memory: one pass over blocks of tokens computes the loss and turns each block of logits into its gradient, which is
kept in the dtype of the activations until W: 2 bytes per token and vocabulary entry in bfloat16, instead of the 10 or
so of `F.cross_entropy(logits.float(), ...)`. Forward, I and W are one GEMM each ("lean"; "fused" compiles what
lies between the GEMM and the gradient into one kernel). "chunked" keeps nothing of the size of the vocabulary: I and W
compute each block of logits again, so the head costs five GEMMs instead of three, or four where a plan runs B.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octopipe.models import layers as spec
from octopipe.runtime.nn.basic import Made, empty, norm
from octopipe.runtime.nn.head_shard import partial_of_hidden, takes
from octopipe.runtime.stages.shards import MeanCrossEntropy, marked, with_rows
from octopipe.runtime.stages.wgrad import WeightSite, add_product, site_of
from octopipe.runtime.stages.wgrad_ops import Layout
from octopipe.runtime.typed_function import Function, Gradients

BLOCK_LOGITS = {"fused": 1 << 28, "lean": 1 << 26}
"""The number of logits that are computed at a time, by kind of loss."""


class LazyLogits(NamedTuple):
    """The head's output before the projection: `cross_entropy` uses it directly, and `logits()` applies the
    projection."""

    hidden: Tensor
    """The hidden states after the final norm."""
    weight: Tensor
    """[vocab, hidden]."""
    kind: str = "lean"
    """How `cross_entropy` works: "lean", "fused" or "chunked"."""

    def logits(self) -> Tensor:
        return F.linear(self.hidden, self.weight)

    def partial_softmax(self, labels: Tensor, start: int) -> tuple[Tensor, Tensor] | None:
        """The numbers that a shard with the tokens from `start` on passes to the loss (`stages/shards.py`); None: use
        `logits()`."""
        if self.kind == "chunked" or not takes(self.hidden):
            return None
        kind = "fused" if self.kind == "fused" else "lean"
        return partial_of_hidden(self.hidden, self.weight, labels, start, kind, BLOCK_LOGITS[kind])


class Head(nn.Module):
    """Final norm and projection. `lean`: return `LazyLogits`; otherwise the logits, for any loss."""

    loss_kind = "lean"
    """The `kind` of the `LazyLogits` (see `kernels.PARTS`)."""

    def __init__(self, layer: spec.Head, eps: float, made: Made, lean: bool):
        super().__init__()
        self.norm = norm(layer.norm, layer.hidden, eps, made)
        self.weight = empty(layer.vocab, layer.hidden, made=made)
        self.lean = lean
        self.tied_to: dict[str, str] = {"weight": "embedding"} if layer.tied else {}

    def vocabulary_shard(self, number: int, count: int) -> nn.Module:
        """A head for a part of the vocabulary, with a copy of the norm (`stages/shards.py`)."""
        shard, start, whole = with_rows(self, "weight", number, count)
        return marked(shard, start, {"weight": whole})

    def forward(self, hidden: Tensor) -> LazyLogits | Tensor:
        out = LazyLogits(self.norm(hidden), self.weight, self.loss_kind)
        return out if self.lean else out.logits()


def block_slopes(logits: Tensor, index: Tensor, dtype: torch.dtype, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """For a block of rows: log p of every target, and the gradient of the loss with respect to every logit (p, minus 1
    at the target)."""
    picked = torch.log_softmax(logits, -1, dtype=wide).gather(1, index)
    # p - 1 is computed from the exact log p, because subtracting a rounded p near 1 would cancel.
    slopes = torch.softmax(logits, -1).to(dtype).scatter_(1, index, picked.expm1().to(dtype))
    return picked, slopes


def _fusible_slopes(logits: Tensor, index: Tensor, dtype: torch.dtype, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """`block_slopes` for torch.compile: one kernel that reads the logits twice and writes the gradients once."""
    values = logits.to(wide)
    lse = values.logsumexp(-1, keepdim=True)
    picked = values.gather(1, index) - lse
    at_target = torch.arange(logits.shape[1], device=logits.device)[None] == index
    return picked, torch.where(at_target, picked.expm1(), (values - lse).exp()).to(dtype)


@functools.cache
def fused_slopes() -> Callable[..., tuple[Tensor, Tensor]]:
    """`block_slopes` through torch.compile."""
    return torch.compile(_fusible_slopes, dynamic=True)


class LeanCrossEntropy(Function):
    """Mean cross-entropy of `hidden @ weight.T` against `target`; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        ignore: int,
        block: int,
        site: WeightSite | None,
        kind: str,
    ) -> Tensor:
        wide = torch.float64 if hidden.dtype is torch.float64 else torch.float32
        w = weight.to(hidden.dtype)
        keep = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        holds = keep and kind != "chunked"
        slopes = hidden.new_empty(hidden.shape[0], w.shape[0]) if holds else None
        seen = target != ignore
        index = torch.where(seen, target, 0)[:, None]
        seen = seen.to(wide)[:, None]
        total = torch.zeros((), dtype=wide, device=hidden.device)
        of_block = fused_slopes() if kind == "fused" else block_slopes
        for start in range(0, hidden.shape[0], block):
            rows = slice(start, start + block)
            logits = hidden[rows] @ w.t()
            if slopes is None:
                picked = torch.log_softmax(logits, -1, dtype=wide).gather(1, index[rows])
            else:
                picked, slopes[rows] = of_block(logits, index[rows], hidden.dtype, wide)
            total -= (picked * seen[rows]).sum()
        count = seen.sum().clamp_(min=1)
        if keep:
            ctx.save_for_backward(hidden, weight, slopes, index, seen / count)
            ctx.site, ctx.block = site, block
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Gradients:
        hidden, weight, slopes, index, share = ctx.saved_tensors
        scale, dtype = g * share, hidden.dtype  # zero for the rows of ignored tokens
        needs, site = ctx.needs_input_grad, ctx.site
        own = site is None or site.queue.shut  # autograd takes the weight's gradient itself
        g_hidden = torch.empty_like(hidden) if needs[0] else None
        g_weight = torch.zeros_like(weight) if needs[1] and own else None
        rest = None if slopes is not None else ChunkedSlopes(hidden, weight, index, ctx.block)
        # If W follows, only the hidden states' gradient is needed now. Otherwise the same logits give both.
        due = g_hidden is not None or own or not site.queue.defer
        whole: Iterable[tuple[slice, Tensor]] = [(slice(None), slopes)]
        if rest is not None:
            whole = rest if due else ()
        for rows, some in whole:
            # Scaled in full precision: a rounded scale would bias every gradient.
            if g_hidden is not None:
                g_hidden[rows] = ((some @ weight.to(dtype)) * scale[rows]).to(dtype)
            if needs[1] and (rest is None or own or not site.queue.defer):
                scaled = (hidden[rows] * scale[rows]).to(dtype)
                if g_weight is not None:
                    g_weight += (some.mT @ scaled).to(weight.dtype)
                else:
                    site.queue.add(add_product, site.param, site.layout, some, scaled)
        if needs[1] and rest is not None and not own and site.queue.defer:
            site.queue.add(_add_chunked, site.param, site.layout, hidden, weight.detach(), index, scale, ctx.block)
        return g_hidden, g_weight, None, None, None, None, None


class ChunkedSlopes:
    """Yields the gradients of one block of logits at a time; each is recomputed, and freed before the next."""

    def __init__(self, hidden: Tensor, weight: Tensor, index: Tensor, block: int):
        self._hidden, self._weight, self._index, self._block = hidden, weight.to(hidden.dtype), index, block

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        hidden = self._hidden
        wide = torch.float64 if hidden.dtype is torch.float64 else torch.float32
        for start in range(0, hidden.shape[0], self._block):
            rows = slice(start, start + self._block)
            logits = hidden[rows] @ self._weight.t()
            yield rows, block_slopes(logits, self._index[rows], hidden.dtype, wide)[1]


def _add_chunked(
    param: Tensor, layout: Layout, hidden: Tensor, weight: Tensor, index: Tensor, scale: Tensor, block: int
) -> None:
    """W of a chunked loss: adds the weight's gradient block by block."""
    for rows, slopes in ChunkedSlopes(hidden, weight, index, block):
        add_product(param, layout, slopes, (hidden[rows] * scale[rows]).to(hidden.dtype))


def cross_entropy(output: LazyLogits | Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """The mean loss over the tokens of `target` that are not `ignore_index`. Takes the output of any `Head`."""
    if isinstance(output, Tensor):
        logits = output.flatten(0, -2)
        logits = logits if logits.dtype is torch.float64 else logits.float()
        return F.cross_entropy(logits, target.flatten(), ignore_index=ignore_index)
    hidden, weight, kind = output
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype is not torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    rows = hidden.shape[:-1].numel()
    # Each block reads the whole weight. The fused loss keeps no block in full precision, so its blocks may be larger.
    most = max(1, (BLOCK_LOGITS["fused" if kind == "fused" else "lean"]) // weight.shape[0])
    block = -(-rows // max(1, -(-rows // most)))
    return LeanCrossEntropy.apply(
        hidden.flatten(0, -2), weight, target.flatten(), ignore_index, block, site_of(weight), kind
    )


cross_entropy.of_shards = MeanCrossEntropy  # type: ignore[attr-defined]

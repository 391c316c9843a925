"""Layers split by vocabulary: shards of a head and of an embedding, and the loss computed from the shards of a head.

Knows: which rows of a weight a shard holds, how the logits of a shard are reduced to two numbers per token, how these
determine the loss, and which losses support this. Does not know: ranks, plans or transports.

For each token, a shard with logits l passes on log(sum(exp(l))) and the target's logit (zero if the target does not
belong to the shard). The log-sum-exp over the whole vocabulary is the log-sum-exp of the former, and the target's logit
is the sum of the latter. The loss is exact, and autograd's gradients of the two numbers are exactly what a shard needs
to compute the gradients of its logits.

Modules that can be split: those with a method `vocabulary_shard(number, count)` that returns the shard as a module with
`shard_start` (its first token id) and `cut_parameters` (names of the parameters of which it holds a part, all split
along dimension 0, with their full lengths); and `nn.Linear` and `nn.Embedding`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError


def rows_of_shard(rows: int, number: int, count: int) -> tuple[int, int]:
    """First and last (exclusive) of a shard's rows; shards are as equal as they can be.

    >>> [rows_of_shard(10, k, 3) for k in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    return rows * number // count, rows * (number + 1) // count


def with_rows(module: nn.Module, path: str, number: int, count: int) -> tuple[nn.Module, int, int]:
    """The module with only a shard's rows of the parameter `path`, under all names that the parameter has in it; the
    module itself does not change. Also returns the first row and the number of rows of the whole parameter."""
    whole = module.get_parameter(path)
    start, stop = rows_of_shard(whole.shape[0], number, count)
    if start == stop:
        raise OctoPipeError(f"{count} shards of {whole.shape[0]} words leave one empty; split it into fewer")
    part = nn.Parameter(whole.detach()[start:stop].clone(), requires_grad=whole.requires_grad)
    top = _own(module)
    copied: dict[str, nn.Module] = {"": top}
    for name in names_of(module, path):
        inner, at = top, ""
        *owners, attribute = name.split(".")
        for owner in owners:
            at = f"{at}.{owner}"
            if at not in copied:
                copied[at] = inner._modules[owner] = _own(cast(nn.Module, inner._modules[owner]))
            inner = copied[at]
        inner._parameters[attribute] = part
        for size in ("out_features", "num_embeddings"):
            if hasattr(inner, size):
                setattr(inner, size, stop - start)
    return top, start, whole.shape[0]


def names_of(module: nn.Module, path: str) -> list[str]:
    """All names of the parameter `path`."""
    whole = module.get_parameter(path)
    return [name for name, p in module.named_parameters(remove_duplicate=False) if p is whole]


def _own(module: nn.Module) -> nn.Module:
    """A copy that shares everything except the dictionaries of its parameters, buffers and modules."""
    twin = copy.copy(module)
    for held in ("_parameters", "_modules", "_buffers"):
        twin.__dict__[held] = dict(module.__dict__[held])
    return twin


def marked(module: nn.Module, start: int, cut: dict[str, int]) -> nn.Module:
    """A shard with the attributes that its users read: its first row, and how many rows each split parameter has in
    all."""
    module.shard_start = start  # type: ignore[assignment]
    module.cut_parameters = cut  # type: ignore[assignment]
    return module


def cut_module(module: nn.Module, number: int, count: int, layer: int) -> nn.Module:
    """The module of a layer's shard."""
    own = getattr(module, "vocabulary_shard", None)
    if own is not None:
        return cast(nn.Module, own(number, count))
    if isinstance(module, nn.Linear):
        shard, start, whole = with_rows(module, "weight", number, count)
        cut = {"weight": whole}
        if module.bias is not None:
            shard, _, _ = with_rows(shard, "bias", number, count)
            cut["bias"] = whole
        return marked(shard, start, cut)
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse or module.padding_idx is not None:
            raise OctoPipeError(
                f"layer {layer}: an Embedding with max_norm, padding_idx, sparse or scaling cannot be cut; use a plan "
                "with a whole embedding"
            )
        shard, start, whole = with_rows(module, "weight", number, count)
        return marked(EmbeddingRows(shard.weight, start), start, {"weight": whole})  # type: ignore[arg-type]
    raise OctoPipeError(
        f"layer {layer} is a {type(module).__name__}, which the plan cuts by vocabulary; give it a method "
        "`vocabulary_shard(number, count)`, or use a plan with a whole head"
    )


class EmbeddingRows(nn.Module):
    """Some rows of an embedding; zero for all other tokens, so that the sum over the shards is the whole embedding."""

    def __init__(self, weight: nn.Parameter, start: int):
        super().__init__()
        self.weight = weight
        self._start = start

    def forward(self, tokens: Tensor) -> Tensor:
        return rows_at(tokens, self.weight, self._start)


def rows_at(tokens: Tensor, weight: Tensor, start: int) -> Tensor:
    """The rows of the tokens that a shard has, and zeros for all others."""
    local = tokens - start
    mine = (local >= 0) & (local < weight.shape[0])
    return F.embedding(torch.where(mine, local, 0), weight) * mine.unsqueeze(-1).to(weight.dtype)


def masked_embedding(module: nn.Module, start: int, path: str) -> nn.Module:
    """A module whose embedding at `path` has the rows from `start` on; the embedding is zero for other tokens."""
    inner = cast(nn.Embedding, module.get_submodule(path))
    if inner.padding_idx is not None:
        local = inner.padding_idx - start
        inner.padding_idx = local if 0 <= local < inner.weight.shape[0] else None

    def forward(ids: Tensor, *args: Any, **options: Any) -> Tensor:
        local = ids - start
        mine = (local >= 0) & (local < inner.weight.shape[0])
        found = type(inner).forward(inner, torch.where(mine, local, 0), *args, **options)
        return found * mine.unsqueeze(-1).to(found.dtype)

    inner.__dict__["forward"] = forward
    return module


# -- the loss --------------------------------------------------------------------------------------------------


class CutLoss(Protocol):
    """A loss that can be computed from the losses of single tokens."""

    def partial(self, module: nn.Module) -> Callable[[Any, Any], tuple[Tensor, Tensor]]:
        """The function of a shard from its output and the target to its two numbers per token."""

    def of_tokens(self, token_losses: Tensor, target: Any) -> Tensor:
        """The scalar loss; `token_losses` has one number per label that `partial` has used."""


class JoinedShards(nn.Module):
    """The losses of the tokens, computed from the numbers of all shards."""

    def forward(self, *pairs: Any) -> Tensor:
        found = [pairs] if isinstance(pairs[0], Tensor) else list(pairs)
        sums = torch.logsumexp(torch.stack([lse for lse, _ in found]), 0)
        picked = torch.stack([logit for _, logit in found]).sum(0)
        return sums - picked


class MeanCrossEntropy:
    """The mean over all labels that are not `ignore`."""

    def __init__(self, ignore: int = -100):
        self._ignore = ignore

    def labels(self, target: Any) -> Tensor:
        return cast(Tensor, target).flatten()

    def partial(self, module: nn.Module) -> Callable[[Any, Any], tuple[Tensor, Tensor]]:
        start = int(module.shard_start)  # type: ignore[arg-type]

        def numbers(output: Any, target: Any) -> tuple[Tensor, Tensor]:
            # A head that computes the two numbers without whole logits assumes one row per token, as `rows` here.
            lean = getattr(output, "partial_softmax", None) if type(self).rows is MeanCrossEntropy.rows else None
            found = lean(self.labels(target), start) if callable(lean) else None
            if found is not None:
                return cast(tuple[Tensor, Tensor], found)
            lazy = getattr(output, "logits", None)
            logits = lazy() if callable(lazy) else output
            if not isinstance(logits, Tensor):
                raise OctoPipeError(
                    f"the cut head returned a {type(logits).__name__}, and a loss is computed from shards of logits; "
                    "return the logits, or use a plan with a whole head"
                )
            return partial_softmax(self.rows(logits, target), self.labels(target), start)

        return numbers

    def rows(self, logits: Tensor, target: Any) -> Tensor:
        """The logits as one row per label."""
        return logits.flatten(0, -2)

    def of_tokens(self, token_losses: Tensor, target: Any) -> Tensor:
        seen = self.labels(target) != self._ignore
        return (token_losses * seen).sum() / seen.sum().clamp(min=1)


def partial_softmax(logits: Tensor, labels: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Per row: the logarithm of this shard's part of the softmax's sum, and the logit of the label, zero if the label
    is not among the tokens from `start` on."""
    wide = logits if logits.dtype is torch.float64 else logits.float()
    local = labels - start
    mine = (local >= 0) & (local < logits.shape[-1])
    picked = wide.gather(1, torch.where(mine, local, 0)[:, None])[:, 0]
    return torch.logsumexp(wide, -1), torch.where(mine, picked, 0.0)


def cut_loss(loss_fn: Any) -> CutLoss:
    """How a loss function is computed from shards; raises if that is not known."""
    own = getattr(loss_fn, "of_shards", None)
    if own is not None:
        return cast(CutLoss, own())
    if loss_fn is F.cross_entropy:
        return MeanCrossEntropy()
    if type(loss_fn) is nn.CrossEntropyLoss:
        plain = loss_fn.weight is None and loss_fn.reduction == "mean" and loss_fn.label_smoothing == 0.0
        if plain:
            return MeanCrossEntropy(loss_fn.ignore_index)
    raise OctoPipeError(
        "the plan cuts the head by its vocabulary, which works with a mean cross-entropy over logits; use "
        "octopipe's or torch's `cross_entropy` (or give loss_fn a method `of_shards`), or a plan with a whole head"
    )

"""Labels and losses: micro-batches whose mean loss is the loss of the whole batch.

Knows: transformers' conventions (labels as long as the tokens, -100 ignored, `num_items_in_batch`). Does not know:
models' forwards.

>>> ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
>>> labels = torch.tensor([[1, 2, 3], [-100, -100, 6]])
>>> inputs, targets = micro_batches({"input_ids": ids, "labels": labels}, 2)
>>> [float(t["num_items_in_batch"]) for t in targets]           # 3 labels in 2 micro-batches
[1.5, 1.5]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.huggingface.routers import router_weight
from octopipe.runtime.stages.shards import MeanCrossEntropy

IGNORED = -100
ALL_LABELS = "num_labels_in_batch"
"""Key of the number of all labels, which aligned losses divide by. `num_items_in_batch` does not count labels without a
preceding token."""


class CausalLoss:
    """`loss_fn(output, target)` with the model's own loss function.

    `target`: labels as transformers takes them (as long as the tokens; the model shifts them), or a dict with `labels`
    or `shift_labels` (already shifted) and optionally `num_items_in_batch`. A model that trains its routers adds its
    auxiliary loss.
    """

    def __init__(self, model: nn.Module, function: Callable[..., Tensor] | None = None):
        """`function`: the loss that the model's forward computes, if that is not its `loss_function`."""
        self.function: Any = function or model.loss_function
        self._router_weight = router_weight(model)

    def of_shards(self) -> ShardedCausalLoss:
        """The same loss, computed from the shards of a split head."""
        if getattr(self.function, "__name__", "") != "ForCausalLMLoss":
            raise OctoPipeError(
                "the model's own loss cannot be computed from shards of the logits; use a plan with a whole head"
            )
        return ShardedCausalLoss(shifted=isinstance(self, ShiftedLoss))

    def __call__(self, output: Any, target: Any) -> Tensor:
        given = {"labels": target} if isinstance(target, Tensor) else dict(target)
        if given.get("labels") is None and given.get("shift_labels") is None:
            raise OctoPipeError("the target has neither labels nor shift_labels; give one of them")
        logits, extra = (output, None) if isinstance(output, Tensor) else output
        given.setdefault("labels", None)
        if not isinstance(self.function, AlignedLoss):
            given.pop(ALL_LABELS, None)
        loss = self.function(logits=logits, vocab_size=logits.shape[-1], **given)
        if extra is None or not isinstance(extra, Tensor):
            return loss
        return loss + self._router_weight * extra.to(loss.device)


class AlignedLoss:
    """The mean cross-entropy against labels at the positions of their logits, with which encoder-decoders are
    trained."""

    def __call__(
        self,
        *,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **counts: Any,
    ) -> Tensor:
        wanted = labels if labels is not None else shift_labels
        assert wanted is not None  # `CausalLoss` has checked that one is given
        return _mean_loss(logits, wanted, vocab_size, counts.get(ALL_LABELS, num_items_in_batch))


class HandLoss:
    """The mean cross-entropy against the next tokens as some forwards compute it by hand: with smoothed labels, and
    from the last logits if there are more logits than labels (those of image tokens precede those of the text)."""

    def __init__(self, smoothing: float = 0.0):
        self.smoothing = smoothing

    def __call__(
        self,
        *,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        if shift_labels is None:
            assert labels is not None  # `CausalLoss` has checked that one is given
            shift_labels = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        text = logits[:, -shift_labels.shape[1] :]
        return _mean_loss(text, shift_labels, vocab_size, num_items_in_batch, self.smoothing)


def _mean_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, items: Tensor | int | None, smoothing: float = 0.0
) -> Tensor:
    """The cross-entropy in at least float32: the sum over labels divided by `items`, or their mean if that is None."""
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    loss = nn.functional.cross_entropy(
        wide.reshape(-1, vocab_size),
        labels.reshape(-1).to(logits.device),
        ignore_index=IGNORED,
        label_smoothing=smoothing,
        reduction="mean" if items is None else "sum",
    )
    return loss if items is None else loss / items


class ShiftedLoss(CausalLoss):
    """`CausalLoss` for targets that are already the next tokens: a tensor is taken as `shift_labels`."""

    def __call__(self, output: Any, target: Any) -> Tensor:
        return super().__call__(output, {"shift_labels": target} if isinstance(target, Tensor) else target)


class ShardedCausalLoss(MeanCrossEntropy):
    """transformers' causal loss (`ForCausalLMLoss`), computed from the losses of single tokens."""

    def __init__(self, *, shifted: bool):
        super().__init__(IGNORED)
        self._shifted = shifted

    def labels(self, target: Any) -> Tensor:
        return self.next_tokens(target).reshape(-1)

    def next_tokens(self, target: Any) -> Tensor:
        """The label of the token that follows every token."""
        given = {("shift_labels" if self._shifted else "labels"): target} if isinstance(target, Tensor) else target
        found: Tensor | None = given.get("shift_labels")
        return found if found is not None else nn.functional.pad(given["labels"], (0, 1), value=IGNORED)[..., 1:]

    def of_tokens(self, token_losses: Tensor, target: Any) -> Tensor:
        items = None if isinstance(target, Tensor) else target.get("num_items_in_batch")
        if items is None:
            return super().of_tokens(token_losses, target)
        seen = self.labels(target) != IGNORED
        return (token_losses * seen).sum() / items


def micro_batches(
    batch: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    count: int | None = None,
    *,
    num_items: Tensor | int | None = None,
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """A batch as transformers' Trainer makes it, as the inputs and targets of `count` micro-batches of nearly equal
    size. The mean of their losses is the loss of the batch, however the labels are distributed over them.

    A list of batches is taken as the micro-batches themselves, for models whose inputs do not have one row per sequence
    (images, audio). `num_items`: the number of labels that count in the whole step, if the step has more than this
    batch (with data parallelism: the mean over replicas). By default it is `num_items_in_batch` of the batch, otherwise
    the number of labels of this batch that are not -100 and follow another token.
    """
    if num_items is None:
        num_items = _stated_items(batch)
    parts = list(batch) if isinstance(batch, Sequence) else _split(batch, count)
    if count is not None and count != len(parts):
        raise OctoPipeError(f"{len(parts)} batches for {count} micro-batches; give one batch for each")
    for part in parts:
        if not isinstance(part.get("labels"), Tensor):
            raise OctoPipeError("the batch needs the tensor labels; the tokens may serve as both")
    labels = [part["labels"] for part in parts]
    share = torch.stack([(part[..., 1:] != IGNORED).sum() for part in labels]).sum() / len(parts)
    every = torch.stack([(part != IGNORED).sum() for part in labels]).sum() / len(parts)
    if num_items is not None:
        share = torch.as_tensor(num_items) / len(parts)
        every = share
    inputs = [
        {k: v for k, v in part.items() if k not in ("labels", "num_items_in_batch") and v is not None} for part in parts
    ]
    return inputs, [{"labels": part, "num_items_in_batch": share, ALL_LABELS: every} for part in labels]


def _stated_items(batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Tensor | int | None:
    """The `num_items_in_batch` with which the model would be called."""
    stated = [part.get("num_items_in_batch") for part in (batch if isinstance(batch, Sequence) else [batch])]
    first: Tensor | int | None = stated[0] if stated else None
    if not all(one is None if first is None else one is not None and float(one) == float(first) for one in stated):
        raise OctoPipeError(
            "the batches state different num_items_in_batch; give all of them that of the whole step, or leave it out"
        )
    return first


def _split(batch: Mapping[str, Any], count: int | None) -> list[dict[str, Any]]:
    """The rows of a batch as `count` batches."""
    labels = batch.get("labels")
    others = [k for k, v in batch.items() if isinstance(v, Tensor) and k != "labels"]
    if not isinstance(labels, Tensor) or not others:
        raise OctoPipeError("the batch needs the tensors input_ids and labels; the tokens may serve as both")
    if count is None:
        raise OctoPipeError("micro_batches needs the number of micro-batches of one batch; give count")
    rows = labels.shape[0]
    if count > rows:
        raise OctoPipeError(f"{rows} sequences for {count} micro-batches; give at least one to each")
    named = {k: v for k, v in batch.items() if k != "num_items_in_batch" and v is not None}
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.shape[0] != rows:
            raise OctoPipeError(
                f"{name} does not have {rows} rows as the labels have; give one row per sequence, or a list with one "
                "batch for each micro-batch"
            )
    return [dict(zip(named, row)) for row in zip(*(v.tensor_split(count) for v in named.values()))]

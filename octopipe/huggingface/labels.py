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

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.huggingface.shell import text_config
from octopipe.runtime.stages.shards import MeanCrossEntropy

IGNORED = -100


class CausalLoss:
    """`loss_fn(output, target)` in the model's own terms.

    `target`: labels as transformers takes them (as long as the tokens; the model shifts them), or a dict of `labels`
    or `shift_labels` (shifted already) and maybe `num_items_in_batch`. A model that trains its routers adds its
    auxiliary loss.
    """

    def __init__(self, model: nn.Module):
        if "loss_function" not in inspect.getsource(inspect.unwrap(type(model).forward)):
            raise OctoPipeError(
                f"{type(model).__name__} computes its loss by hand in its forward; give Pipeline a loss of your own "
                "(the last layer's output are the logits)"
            )
        self._function = model.loss_function
        text = text_config(model)
        weights = (getattr(text, name, None) for name in ("router_aux_loss_coef", "aux_loss_alpha"))
        self._router_weight = float(next((w for w in weights if w is not None), 0.0))

    def of_shards(self) -> ShardedCausalLoss:
        """The same made of the shards of a cut head."""
        if getattr(self._function, "__name__", "") != "ForCausalLMLoss":
            raise OctoPipeError(
                "the model has a loss of its own, which is not made of shards; use a plan with a whole head"
            )
        return ShardedCausalLoss(shifted=isinstance(self, ShiftedLoss))

    def __call__(self, output: Any, target: Any) -> Tensor:
        given = {"labels": target} if isinstance(target, Tensor) else dict(target)
        if given.get("labels") is None and given.get("shift_labels") is None:
            raise OctoPipeError("the target has neither labels nor shift_labels; give one of them")
        logits, extra = (output, None) if isinstance(output, Tensor) else output
        given.setdefault("labels", None)
        loss = self._function(logits=logits, vocab_size=logits.shape[-1], **given)  # type: ignore[operator]
        if extra is None or not isinstance(extra, Tensor):
            return loss  # type: ignore[no-any-return]
        return loss + self._router_weight * extra.to(loss.device)  # type: ignore[no-any-return]


class ShiftedLoss(CausalLoss):
    """The same for targets that are the next tokens already: a tensor is taken as `shift_labels`."""

    def __call__(self, output: Any, target: Any) -> Tensor:
        return super().__call__(output, {"shift_labels": target} if isinstance(target, Tensor) else target)


class ShardedCausalLoss(MeanCrossEntropy):
    """transformers' causal loss (`ForCausalLMLoss`), made of the losses of single tokens."""

    def __init__(self, *, shifted: bool):
        super().__init__(IGNORED)
        self._shifted = shifted

    def labels(self, target: Any) -> Tensor:
        given = {("shift_labels" if self._shifted else "labels"): target} if isinstance(target, Tensor) else target
        found = given.get("shift_labels")
        if found is None:
            found = nn.functional.pad(given["labels"], (0, 1), value=IGNORED)[..., 1:]
        return found.reshape(-1)

    def of_tokens(self, token_losses: Tensor, target: Any) -> Tensor:
        items = None if isinstance(target, Tensor) else target.get("num_items_in_batch")
        if items is None:
            return super().of_tokens(token_losses, target)
        seen = self.labels(target) != IGNORED
        return (token_losses * seen).sum() / items


def micro_batches(
    batch: Mapping[str, Any], count: int, *, num_items: Tensor | int | None = None
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """A batch as transformers' Trainer makes it, as inputs and targets of `count` micro-batches (as equal as they
    can be). The mean of their losses is the loss of the batch, however labels are spread.

    `num_items`: labels that count in the whole step, where that is more than this batch (data parallelism: the mean
    over replicas); default: those of this batch that are not -100 and have a token before them.
    """
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or not isinstance(batch.get("input_ids"), Tensor):
        raise OctoPipeError("the batch needs the tensors input_ids and labels; the tokens may serve as both")
    rows = labels.shape[0]
    if count > rows:
        raise OctoPipeError(f"{rows} sequences for {count} micro-batches; give at least one to each")
    inputs = {k: v for k, v in batch.items() if k not in ("labels", "num_items_in_batch") and v is not None}
    for name, value in inputs.items():
        if not isinstance(value, Tensor) or value.shape[0] != rows:
            raise OctoPipeError(f"{name} has not {rows} rows as the labels do; give one row per sequence")
    total = (labels[..., 1:] != IGNORED).sum() if num_items is None else torch.as_tensor(num_items)
    share = total / count
    parts = [dict(zip(inputs, row)) for row in zip(*(v.tensor_split(count) for v in inputs.values()))]
    return parts, [{"labels": part, "num_items_in_batch": share} for part in labels.tensor_split(count)]

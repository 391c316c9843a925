"""Samples as micro-batches of tensors, and their loss.

Knows: which samples a training step takes, how ignored targets are excluded, and how micro-batches with different
numbers of targets are weighted. Does not know: where samples come from, plans or devices.

A step takes `replicas x micro-batches x size` consecutive sample numbers, so the data of a run does not depend on how
samples are distributed, and a resumed run continues where the previous one stopped.

The loss of a step is the mean over all its counted targets. If a source marks targets, every micro-batch's loss is
the sum over its own targets, divided by `items`: the step's targets over its micro-batches. The mean over micro-batches
and pipelines is then the mean over the step's targets, as in transformers' Trainer (`num_items_in_batch`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from octopipe.runtime.path_losses import PathLosses
from octopipe.runtime.stages.shards import CutLoss, cut_loss
from octopipe.runtime.training.data.source import IGNORED, Source

__all__ = ["IGNORED", "StepLoss", "counted_targets", "length_micro_batches", "micro_batches", "step_loss"]


def micro_batches(
    source: Source, first: int, count: int, size: int, items: float | None = None
) -> tuple[list[Any], list[Any]]:
    """Return inputs and targets of `count` micro-batches of `size` samples, beginning with sample `first`.

    Without marks, both are tensors. With marks, a target is a dict of `labels` and `items` (see the module), and an
    input is a dict with `position_ids` if documents are masked from each other.
    """
    inputs: list[Any] = []
    targets: list[Any] = []
    for m in range(count):
        numbers = range(first + m * size, first + (m + 1) * size)
        rows = np.stack([source.sample(k) for k in numbers])
        ids, labels = torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())
        marks = [source.marks(k) for k in numbers]
        known = [mark for mark in marks if mark is not None]
        if not known:
            inputs.append(ids)
            targets.append(labels)
            continue
        labels[torch.from_numpy(~np.stack([mark.counted for mark in known]))] = IGNORED
        positions = [mark.positions for mark in known if mark.positions is not None]
        inputs.append({"input_ids": ids, "position_ids": torch.from_numpy(np.stack(positions))} if positions else ids)
        assert items is not None
        targets.append({"labels": labels, "items": torch.tensor(items, dtype=torch.float64)})
    return inputs, targets


def counted_targets(source: Source, first: int, count: int) -> int | None:
    """Return the number of targets that count in `count` samples; None for a source without marks."""
    total = 0
    for number in range(first, first + count):
        marks = source.marks(number)
        if marks is None:
            return None
        total += int(marks.counted.sum())
    return total


def length_micro_batches(
    source: Source, first: int, numbers: Sequence[Sequence[int]], lengths: Sequence[int], dp: int
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Return inputs, and (targets, weight), of micro-batches of sequences of different length.

    Sequence i of the step is sample `first + i`, cut to its length. Shorter sequences are padded at the end, where no
    causal layer sees the padding. With the weights, the mean over micro-batches and pipelines of the micro-batches'
    mean losses is the mean over all tokens of the step.
    """
    inputs: list[Tensor] = []
    targets: list[tuple[Tensor, Tensor]] = []
    total, count = sum(lengths), dp * len(numbers)
    for group in numbers:
        longest = max(lengths[i] for i in group)
        rows = np.zeros((len(group), longest), np.int64)
        wanted = np.full((len(group), longest), IGNORED, np.int64)
        for row, i in enumerate(group):
            tokens = source.sample(first + i)[: lengths[i] + 1]
            rows[row, : lengths[i]] = tokens[:-1]
            wanted[row, : lengths[i]] = tokens[1:]
        inputs.append(torch.from_numpy(rows))
        share = count * sum(lengths[i] for i in group) / total
        targets.append((torch.from_numpy(wanted), torch.tensor(share, dtype=torch.float64)))
    return inputs, targets


class StepLoss:
    """The loss of any target that this module creates: next tokens, (next tokens, weight), or a dict of `labels` and
    `items`.

    `shifted`: the loss of a transformers model, which divides by a number of items itself and adds its routers' loss.
    """

    def __init__(self, loss: Callable[..., Tensor], *, shifted: bool):
        self._loss, self._shifted = loss, shifted

    def of_shards(self) -> StepLossOfShards:
        """Return the same loss, computed from the shards of a split head."""
        return StepLossOfShards(cut_loss(self._loss), shifted=self._shifted)

    def __call__(self, output: Any, target: Any) -> Tensor:
        if isinstance(target, Tensor):
            return self._loss(output, target)
        if isinstance(target, tuple):
            value = self._loss(output, target[0])
            return value * target[1].to(value.dtype)
        labels, items = target["labels"], target["items"]
        if self._shifted:
            # An evaluation is about tokens alone: the loss that balances routers is part of training.
            if target.get("tokens_alone") and getattr(self._loss, "in_training_alone", False):
                return output.new_zeros(())
            output = output[0] if target.get("tokens_alone") and isinstance(output, tuple) else output
            return self._loss(output, {"shift_labels": labels, "num_items_in_batch": items})
        value = self._loss(output, labels)
        return value * ((labels != IGNORED).sum() / items).to(value.dtype)


def step_loss(loss: Callable[..., Tensor] | PathLosses, *, shifted: bool) -> StepLoss | PathLosses:
    """Return the loss of a run: a `StepLoss` for every layer that ends a path."""
    if isinstance(loss, PathLosses):
        return loss.each(lambda one: StepLoss(one, shifted=shifted))
    return StepLoss(loss, shifted=shifted)


class StepLossOfShards:
    """`StepLoss` of a head that is cut by its vocabulary (`stages/shards.py`)."""

    def __init__(self, inner: CutLoss, *, shifted: bool):
        self._inner, self._shifted = inner, shifted

    def partial(self, module: nn.Module) -> Callable[[Any, Any], tuple[Tensor, Tensor]]:
        numbers = self._inner.partial(module)

        def of_labels(output: Any, target: Any) -> tuple[Tensor, Tensor]:
            if isinstance(target, tuple):
                return numbers(output, target[0])
            return numbers(output, target if isinstance(target, Tensor) else target["labels"])

        return of_labels

    def of_tokens(self, token_losses: Tensor, target: Any) -> Tensor:
        if isinstance(target, Tensor):
            return self._inner.of_tokens(token_losses, target)
        if isinstance(target, tuple):
            value = self._inner.of_tokens(token_losses, target[0])
            return value * target[1].to(value.dtype)
        labels, items = target["labels"], target["items"]
        if self._shifted:
            if target.get("tokens_alone") and getattr(self._inner, "in_training_alone", False):
                return token_losses.new_zeros(())  # an evaluation is about the next token
            return self._inner.of_tokens(token_losses, {"shift_labels": labels, "num_items_in_batch": items})
        value = self._inner.of_tokens(token_losses, labels)
        return value * ((labels != IGNORED).sum() / items).to(value.dtype)

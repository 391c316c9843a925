"""The loss that a model's own forward computes, found by running the forward.

Knows: how a forward is run on given logits (around placeholder layers, with a placeholder for the projection to the
vocabulary), and which losses it may have computed. Does not know: pipelines or how models are split.

A forward that calls the model's `loss_function` on its logits uses that function. Others compute a loss by hand, which
is compared, on random logits with some labels ignored, with the usual ones. A loss that equals none is rejected.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.huggingface.labels import IGNORED, AlignedLoss, CausalLoss, HandLoss
from octopipe.huggingface.media import inputs_of, parts_of
from octopipe.huggingface.sections import quiet
from octopipe.huggingface.shell import (
    Unpacked,
    hidden_leaf,
    leaves_of,
    shell_of_zeros,
    text_config,
)


def uses_its_loss_function(model: nn.Module) -> bool:
    """Whether the forward names `self.loss_function`."""
    return "loss_function" in inspect.getsource(inspect.unwrap(type(model).forward))


def own_loss(model: nn.Module, paths: str | Sequence[str], example: Mapping[str, Any], returns: Any) -> CausalLoss:
    """The loss that the model's forward computes; `returns(layer)` is the number of results that a layer returns."""
    if "labels" not in inputs_of(model):
        raise OctoPipeError(
            f"{type(model).__name__} computes no loss: its forward takes no labels; give Pipeline a loss of your own "
            "(the last layer's output are the logits)"
        )
    # Aligned first: it also equals a `loss_function` that does not shift labels, and it divides by their right number.
    candidates = [CausalLoss(model, AlignedLoss())]
    named = getattr(getattr(model, "loss_function", None), "__name__", "")
    if uses_its_loss_function(model) or named == "ForCausalLMLoss":
        candidates.append(CausalLoss(model))
    smoothed = {float(getattr(part, "label_smoothing", None) or 0.0) for part in parts_of(model.config)}
    candidates += [CausalLoss(model, HandLoss(smoothing)) for smoothing in sorted(smoothed)]
    try:
        found, logits, labels = _asked(model, paths, example, returns)
    except Exception as error:  # a forward that cannot be run this way
        said = " ".join(str(error).split())[:100]
        why = "from a tensor that is not one row of logits for every token" + (f" ({said})" if said else "")
        raise _refusal(model, why) from None
    for loss in candidates:
        try:
            mine = loss(logits, labels)
        except Exception:  # this loss function takes other arguments
            continue
        if torch.allclose(mine.double(), found.double(), rtol=1e-4, atol=1e-5):
            return loss
    raise _refusal(model, "which is none of the usual ones")


def refuse_more_than(
    loss: CausalLoss, model: nn.Module, paths: str | Sequence[str], example: Mapping[str, Any], returns: Any
) -> None:
    """Raise an error if the model's forward computes another loss than its `loss_function`: it may add a term (z-loss),
    which would be lost in a pipeline. A router's loss is no such term, because the pieces carry it along."""
    try:
        found, logits, labels = _asked(model, paths, example, returns)
        mine = loss(logits, labels)
    except Exception:  # a forward that cannot be run around placeholders names its loss function
        return
    if not torch.allclose(mine.double(), found.double(), rtol=1e-4, atol=1e-5):
        raise OctoPipeError(
            f"{type(model).__name__} adds to the loss of its loss_function in its forward (z-loss?), which a pipeline "
            "would leave out; set that term's coefficient to zero, or give Pipeline a loss of your own (the last "
            "layer's output are the logits)"
        )


def _refusal(model: nn.Module, why: str) -> OctoPipeError:
    return OctoPipeError(
        f"{type(model).__name__} computes its loss by hand in its forward, {why}; give Pipeline a loss of your own "
        "(the last layer's output are the logits)"
    )


class _Given(nn.Module):
    """Replaces the projection to the vocabulary and returns the same logits for every input."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight, self.bias = weight, None
        self.logits: Tensor | None = None

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.logits is None:
            drawn = torch.Generator().manual_seed(0)
            shape = (*hidden.shape[:-1], self.weight.shape[0])
            self.logits = torch.randn(shape, generator=drawn, dtype=torch.float64).to(self.weight.dtype)
        return self.logits


def _asked(
    model: nn.Module, paths: str | Sequence[str], example: Mapping[str, Any], returns: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss that the forward computes from random logits and labels, with these logits and labels."""
    shell, answers = shell_of_zeros(model, paths)
    shell.eval()
    name = _projection(shell)
    weight: Any = shell.get_submodule(name).weight
    ids = example.get("decoder_input_ids", example.get("input_ids", None))
    assert isinstance(ids, Tensor)
    words, shape = torch.arange(min(int(weight.shape[0]), int(text_config(model).vocab_size))), ids.shape
    owner, _, attribute = name.rpartition(".")
    given = _Given(weight)
    setattr(shell.get_submodule(owner), attribute, given)

    def visit(layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, _ = leaves_of(args, kwargs)
        hidden = leaves[hidden_leaf(leaves)]
        return (hidden, *[None] * (abs(returns(layer)) - 1)) if returns(layer) else hidden

    inputs = {name: value for name, value in example.items() if value is not None}

    def run(labels: Tensor) -> Any:
        with torch.no_grad(), answers.given_by(visit), Unpacked(inputs):
            return shell(**inputs, labels=labels, **quiet(model))

    try:
        out = run(labels := _labels(shape, words))
    except Exception:
        if len(shape) == 2:
            raise
        shape = shape[:2]  # inputs with several codes per position, but one label per position
        out = run(labels := _labels(shape, words))
    if given.logits is None or out.logits.numel() != given.logits.numel():
        raise ValueError("its loss uses more logits than its forward returns, or other ones")
    # Tokens that the forward excludes have an infinite loss under every loss function, so they are no labels.
    allowed = (out.logits.flatten(0, -2) > torch.finfo(out.logits.dtype).min / 2).all(0)
    if not allowed.all():
        out = run(labels := _labels(shape, allowed.nonzero().flatten()))
    if not torch.isfinite(out.loss):
        raise ValueError("it is not finite for random logits")
    return out.loss, out.logits, labels


def _labels(shape: Sequence[int], words: Tensor) -> Tensor:
    """Random labels among these tokens, some of them ignored."""
    labels = words[torch.randint(0, len(words), tuple(shape), generator=torch.Generator().manual_seed(1))]
    labels[0, :2] = labels[-1, -1] = IGNORED
    return labels


def _projection(shell: nn.Module) -> str:
    """The name of the projection to the vocabulary: the one that the model names, otherwise its last matrix with as
    many rows as the vocabulary, or with that many for each of several channels."""
    said = shell.get_output_embeddings() if hasattr(shell, "get_output_embeddings") else None  # type: ignore[operator]
    vocab = text_config(shell).vocab_size
    # An embedding as output embedding is used through its weight, not through its forward, so it cannot be replaced.
    found = [name for name, module in shell.named_modules() if module is said and not isinstance(module, nn.Embedding)]
    rows = {name: module.out_features for name, module in shell.named_modules() if type(module) is nn.Linear}
    found += reversed([name for name, count in rows.items() if count == vocab])
    found += reversed([name for name, count in rows.items() if "." not in name and not count % vocab])
    if not found:
        raise ValueError("it has no projection to its vocabulary")
    return found[0]

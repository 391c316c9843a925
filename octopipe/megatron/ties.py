"""Word embeddings that are on one rank twice: the case that Megatron-Core does not handle.

Knows: which parameters of a rank's chunks are the same word embedding (embedding and tied head of a V, the copy a
prediction stage looks up), and how to add their gradients. Does not know: copies on different ranks; those
Megatron's `finalize_model_grads` reduces over its embedding group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octopipe.plans.plan import Plan


def unwrapped(model: Any) -> Any:
    """Return the language model inside DDP, Float16Module and the like."""
    while not hasattr(model, "pre_process") and hasattr(model, "module"):
        model = model.module
    return model


def local_ties(plan: Plan, rank: int, chunks: Sequence[Any]) -> list[list[Any]]:
    """Return groups of two or more parameters of this rank that are copies of one word embedding, the embedding itself
    first."""
    found: list[Any] = []
    for model in map(unwrapped, chunks):
        shares = getattr(model, "share_embeddings_and_output_weights", False)
        embedding = getattr(getattr(model, "embedding", None), "word_embeddings", None)
        predicts = getattr(model, "mtp_process", False)
        weight = getattr(embedding, "weight", None)
        if weight is not None and (shares or predicts or _predicts(model)):
            found.append(weight)
        head = getattr(getattr(model, "output_layer", None), "weight", None)
        if shares and getattr(model, "post_process", False) and head is not None:
            found.append(head)
    distinct = list({id(p): p for p in found}.values())
    return [distinct] if len(distinct) > 1 else []


def _predicts(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "mtp_num_layers", 0))


def add_up(ties: Sequence[Sequence[Any]]) -> None:
    """Set the gradient of every copy to the sum over all copies."""
    for parameters in ties:
        grads = [g for g in (gradient(p) for p in parameters) if g is not None]
        if not grads:
            continue
        total = grads[0].clone()
        for grad in grads[1:]:
            total.add_(grad)
        for parameter in parameters:
            own = gradient(parameter)
            if own is None:
                parameter.grad = total.clone().to(parameter.dtype)
            else:
                own.copy_(total)


def gradient(parameter: Any) -> Any:
    """Return the tensor in which Megatron accumulates a parameter's gradient: `main_grad` under DDP, otherwise
    `grad`."""
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main

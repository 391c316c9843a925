"""A model without its layers, with memory only for some of its parameters.

Knows: that a piece between layers holds the parameters it uses, that all others are shapes without memory, and that
pieces of a model on `meta` are filled. Does not know: which parameters a piece uses (`sections.py`,
`prediction_cut.py`), or how shells run (`shell.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from octopipe.huggingface.shell import LayerAnswers, outside, shell_of
from octopipe.huggingface.weights import Weights, allocated


class PartialShell(NamedTuple):
    """A model whose layers are placeholders, with the parameters that the piece around them needs."""

    model: nn.Module
    answers: LayerAnswers
    missing: list[tuple[str, Tensor]]
    """Parameters of other pieces, of which this one has only shapes, under each of their names outside the layers."""


def partial_shell(
    model: nn.Module,
    paths: str | Sequence[str],
    *,
    mine: Collection[str],
    names: Mapping[int, list[str]],
    weights: Weights | None,
    device: torch.device | None,
) -> PartialShell:
    """A shell of the model, without the layers at `paths`, that holds the parameters `mine`. `names`: all names of a
    parameter, by its id. `weights`: the source of its values; None: it uses the model's own parameters."""
    missing: list[Tensor] = []

    def tensor(_: str, old: Tensor) -> Tensor:
        if isinstance(old, nn.Parameter) and not any(name in mine for name in names[id(old)]):
            missing.append(old)
            return torch.empty_like(old, device="meta")
        return old if weights is None else allocated(old, device)

    shell, answers = shell_of(model, paths, tensor)
    if weights is not None:
        held = {name for name, _ in shell.named_parameters(remove_duplicate=False)}
        weights.fill(shell, "", [name for name, _ in outside(model, paths) if name in held])
    # Names inside layers are left out: they lead through a placeholder to the model's own layer, which is not changed.
    outer = {name for name, _ in outside(model, paths)}
    return PartialShell(shell, answers, [(name, old) for old in missing for name in names[id(old)] if name in outer])

"""A model with several stacks of layers as pieces: which piece holds which parameters, and which of them are tied.

Knows: the order of passages and visits, the parameters of each, and how pieces of a model on `meta` get memory and
values. Does not know: how pieces run (`passages.py`) or where a model can be split (`sections.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.huggingface.labels import CausalLoss
from octopipe.huggingface.own_loss import own_loss
from octopipe.huggingface.partial_shell import partial_shell
from octopipe.huggingface.passages import Passage, Visit
from octopipe.huggingface.routers import routers_of
from octopipe.huggingface.sections import Sections
from octopipe.huggingface.weights import Weights, allocated, first_names

_KIND_NAMES = ("layer_type", "block_type", "attention_type", "layer_kind")


class SectionCut:
    """One model with its sections and, if it is on `meta`, the source of its values."""

    def __init__(
        self,
        model: nn.Module,
        sections: Sections,
        weights: Weights | None,
        device: torch.device | None,
        example: Mapping[str, Any],
    ):
        self.routers = routers_of(model)
        self.model, self.sections, self.weights, self.device = model, sections, weights, device
        self.example = example
        self._first = first_names(model)
        self._names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self._order: list[tuple[str, int]] = []
        for number, start in enumerate(sections.starts):
            self._order.append(("passage", number))
            self._order += [("visit", g) for g in range(start, sections.stop(number))]

    def pieces(self) -> list[Any]:
        if self.weights is None:
            return [self.make(k) for k in range(len(self._order))]
        return [_Factory(self, k) for k in range(len(self._order))]

    def loss(self) -> CausalLoss:
        return own_loss(self.model, self.sections.paths, self.example, lambda k: self.sections.returns[k])

    def prefix(self, layer: int) -> str:
        kind, number = self._order[layer]
        return f"{self.sections.layers[self.sections.visits[number]]}." if kind == "visit" else ""

    def make(self, layer: int) -> nn.Module:
        kind, number = self._order[layer]
        piece = self._passage(number) if kind == "passage" else self._visit(number)
        piece.tied_to = self._ties(layer, piece)  # type: ignore[assignment]
        return piece

    def _visit(self, number: int) -> Visit:
        path = self.sections.layers[self.sections.visits[number]]
        layer = self.model.get_submodule(path)
        if self.weights is not None:
            names = [f"{path}.{n}" for n, _ in layer.named_parameters(remove_duplicate=False)]
            memo = {id(t): allocated(t, self.device) for t in (*layer.parameters(), *layer.buffers())}
            layer = copy.deepcopy(layer, {**memo, id(self.model.config): self.model.config})
            self.weights.fill(layer, f"{path}.", names)
        return Visit(layer, self.sections, number, self.routers)

    def _passage(self, number: int) -> Passage:
        sections = self.sections
        shell, answers, missing = partial_shell(
            self.model,
            sections.paths,
            mine=sections.parameters[number],
            names=self._names,
            weights=self.weights,
            device=self.device,
        )
        return Passage(shell, answers, sections, number, missing, self.routers)

    def _ties(self, layer: int, piece: nn.Module) -> dict[str, str]:
        """For parameters that other pieces hold, too: the name in this piece -> the name of the tie."""
        out = {}
        for name, _ in piece.named_parameters(remove_duplicate=False):
            whole = self.prefix(layer) + name.split(".", 1)[1]
            if len(self._holders(self.model.get_parameter(whole))) > 1:
                out[name] = self._first[whole]
        return out

    def _holders(self, parameter: Tensor) -> set[int]:
        names = self._names[id(parameter)]
        out = set()
        for k, (kind, number) in enumerate(self._order):
            if kind == "passage":
                if any(n in self.sections.parameters[number] for n in names):
                    out.add(k)
            elif any(n.startswith(self.prefix(k)) for n in names):
                out.add(k)
        return out

    def layer_parameters(self) -> tuple[int, ...]:
        named = dict(self.model.named_parameters(remove_duplicate=False))
        out = []
        for k, (kind, number) in enumerate(self._order):
            if kind == "visit":
                held = {id(p): p.numel() for p in self.model.get_submodule(self.prefix(k)[:-1]).parameters()}
            else:
                held = {id(named[n]): named[n].numel() for n in self.sections.parameters[number]}
            out.append(sum(held.values()))
        return tuple(out)

    def kinds(self) -> tuple[str, ...]:
        """A description of every piece."""
        out = []
        last = len(self.sections.starts) - 1
        for k, (kind, number) in enumerate(self._order):
            if kind == "visit":
                out.append(describe_layer(self.model.get_submodule(self.prefix(k)[:-1])))
            else:
                out.append("embedding" if number == 0 else "norm, head and loss" if number == last else "passage")
        return tuple(out)

    def groups(self) -> tuple[int, ...]:
        """Every piece is a group of its own, because equal layers may take and return different values."""
        return tuple(range(len(self._order)))

    def stacks(self) -> tuple[str, ...]:
        last = len(self.sections.starts) - 1
        named = {0: "embedding", last: "head"}
        return tuple(
            self.prefix(k)[:-1].rpartition(".")[0] if kind == "visit" else named.get(number, "passage")
            for k, (kind, number) in enumerate(self._order)
        )


class _Factory:
    """Builds one piece when a rank calls it."""

    def __init__(self, cut: SectionCut, number: int):
        self._cut, self._number = cut, number

    def __call__(self) -> nn.Module:
        return self._cut.make(self._number)


def describe_layer(layer: nn.Module) -> str:
    """The class of a layer, the type of its block, and the children that do the computation."""
    kind = next((str(v) for v in (getattr(layer, n, None) for n in _KIND_NAMES) if isinstance(v, str)), "")
    parts = "+".join(dict.fromkeys(_working_parts(layer)))
    return " ".join(filter(None, (type(layer).__name__, kind, f"({parts})" if parts else "")))


def _working_parts(layer: nn.Module) -> Sequence[str]:
    return [
        type(child).__name__
        for child in layer.children()
        if any(p.ndim > 1 for p in child.parameters()) and "Norm" not in type(child).__name__
    ]

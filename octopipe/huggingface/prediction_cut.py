"""A model with multi-token prediction as pieces: the main model's, and a path of their own for the predictions.

Knows: which layers' outputs the pieces take, which piece holds which parameters, and which of them are tied. Does not
know: how pieces run (`pieces.py`, `predictions.py`), or how the main model is split (`cut.py`).

    embedding -> block -> ... -> block -> norm, head and loss
        |                          |
        +--------------------------+--> prediction layer -> head and loss
        |                                      |
        +--------------------------------------+--> prediction layer -> head and loss

The embeddings of the tokens ahead come from the embedding itself, along an edge of their own, so that only the rank
with the embedding holds it. The heads share their weight with the main head, and ranks that hold one sum its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from octopipe.huggingface.anatomy import Anatomy
from octopipe.huggingface.labels import CausalLoss, ShiftedLoss
from octopipe.huggingface.partial_shell import partial_shell
from octopipe.huggingface.pieces import Embed
from octopipe.huggingface.predictions import (
    AHEAD,
    EmbedAhead,
    PredictionHead,
    PredictionLayer,
    WithPredictions,
    losses_of,
)
from octopipe.huggingface.section_cut import describe_layer
from octopipe.huggingface.shell import collect, real_buffer, shell_of, zeros_like_all_of
from octopipe.huggingface.weights import Weights, first_names
from octopipe.runtime.path_losses import PathLosses


class MainWeights:
    """Fills pieces of the main model, whose parameters have other names in the whole model."""

    def __init__(self, weights: Weights):
        self._weights = weights

    def fill(self, piece: nn.Module, prefix: str, names: Sequence[str]) -> None:
        self._weights.fill(piece, f"main.{prefix}", [f"main.{name}" for name in names])


class Trunk(Protocol):
    """The interface of the class that splits the main model (`cut.py`)."""

    anatomy: Anatomy

    def make(self, layer: int) -> nn.Module: ...
    def prefix(self, layer: int) -> str: ...
    def loss(self) -> CausalLoss: ...
    def stacks(self) -> tuple[str, ...]: ...
    def kinds(self) -> tuple[str, ...]: ...
    def groups(self) -> tuple[int, ...]: ...


class PredictionCut:
    """One model with its predictions and, if it is on `meta`, the source of its values."""

    def __init__(self, model: WithPredictions, trunk: Trunk, weights: Weights | None, device: torch.device | None):
        self.model, self.trunk, self.weights, self.device = model, trunk, weights, device
        self.blocks = trunk.anatomy.num_layers
        self._count = self.blocks + 2 + 2 * model.depth
        self._first = first_names(model)
        self._names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self._plain = _is_plain_embedding(model.main, trunk.anatomy)
        self._mine = [self._parameters_of(layer) for layer in range(self._count)]

    @property
    def takes(self) -> tuple[tuple[int, ...], ...]:
        """For every layer, the layers whose outputs it takes."""
        chain: list[tuple[int, ...]] = [(), *((k,) for k in range(self.blocks + 1))]
        for k in range(self.model.depth):
            layer = self.blocks + 2 + 2 * k
            chain += [(0, self.blocks if k == 0 else layer - 2), (layer,)]
        return tuple(chain)

    @property
    def shared(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Which layers share parameters, and how many parameters."""
        counts: dict[tuple[int, ...], int] = {}
        for parameter in self.model.parameters():
            held = self._holders(parameter)
            if len(held) > 1:
                counts[held] = counts.get(held, 0) + parameter.numel()
        return tuple(sorted(counts.items()))

    @property
    def fresh(self) -> tuple[str, ...]:
        """Parameters of the predictions that the folder does not contain, and which are initialised at random."""
        return () if self.weights is None else tuple(sorted(self.weights.absent))

    def pieces(self) -> list[Any]:
        if self.weights is None:
            return [self.make(k) for k in range(self._count)]
        return [_Factory(self, k) for k in range(self._count)]

    def make(self, layer: int) -> nn.Module:
        piece = self.trunk.make(layer) if layer < self.blocks + 2 else self._prediction(layer)
        if not self._plain and isinstance(piece, Embed):
            piece = EmbedAhead(piece.model, piece._answers, piece._anatomy)
        elif not self._plain and layer == 1:
            piece._drops = {*piece._drops, AHEAD}  # type: ignore[misc, assignment]
        ties = {}
        for name, _ in piece.named_parameters(remove_duplicate=False):
            whole = self.prefix(layer) + name.split(".", 1)[1]
            if len(self._holders(self.model.get_parameter(whole))) > 1:
                ties[name] = self._first[whole]
        piece.tied_to = ties  # type: ignore[assignment]
        return piece

    def prefix(self, layer: int) -> str:
        return f"main.{self.trunk.prefix(layer)}" if layer < self.blocks + 2 else ""

    def loss(self, *, shifted: bool = False) -> PathLosses:
        own = self.trunk.loss()
        own = ShiftedLoss(self.model.main, own.function) if shifted else own
        ends = tuple(range(self.blocks + 1, self._count, 2))
        return PathLosses(losses_of(self.model, own, ends, shifted=shifted))

    def _place(self, layer: int) -> tuple[int, bool]:
        """For a layer after the main head: the number of the prediction that it belongs to, and whether it is that
        prediction's head."""
        return divmod(layer - self.blocks - 2, 2)[0], bool((layer - self.blocks) % 2)

    def _parameters_of(self, layer: int) -> frozenset[str]:
        anatomy, names = self.trunk.anatomy, [name for found in self._names.values() for name in found]
        if 0 < layer <= self.blocks:
            return frozenset(name for name in names if name.startswith(self.prefix(layer)))
        if layer <= self.blocks + 1:
            used = {f"main.{name}" for name in (anatomy.head_names if layer else anatomy.embed_names)}
            return frozenset(name for name in names if name in used)
        number, is_head = self._place(layer)
        if is_head:
            return frozenset(name for name in names if name.startswith("predictions.shared_head."))
        mine = [f"predictions.layers.{number}.", "predictions.shared_post_norm."]
        found = {name for name in names if name.startswith(tuple(mine))}
        if number == 0:  # the norm before the main head, which the first prediction layer also runs
            head = {id(p) for p in self.model.get_output_embeddings().parameters()}
            found |= {n for n in self._parameters_of(self.blocks + 1) if id(self.model.get_parameter(n)) not in head}
        return frozenset(found)

    def _holders(self, parameter: Tensor) -> tuple[int, ...]:
        names = self._names[id(parameter)]
        return tuple(k for k, mine in enumerate(self._mine) if any(name in mine for name in names))

    def _prediction(self, layer: int) -> nn.Module:
        number, is_head = self._place(layer)
        shell, answers, missing = partial_shell(
            self.model,
            f"main.{self.trunk.anatomy.path}",
            mine=self._mine[layer],
            names=self._names,
            weights=self.weights,
            device=self.device,
        )
        if is_head:
            return PredictionHead(shell)
        return PredictionLayer(shell, answers, self.trunk.anatomy, number, missing)

    def layer_parameters(self) -> tuple[int, ...]:
        out = []
        for mine in self._mine:
            held = {id(p): p.numel() for p in map(self.model.get_parameter, mine)}
            out.append(sum(held.values()))
        return tuple(out)

    def stacks(self) -> tuple[str, ...]:
        return (*self.trunk.stacks(), *("predictions.layers", "head") * self.model.depth)

    def kinds(self) -> tuple[str, ...]:
        named = map(describe_layer, self.model.predictions.layers.children())  # type: ignore[union-attr]
        return (*self.trunk.kinds(), *(word for name in named for word in (name, "prediction's head and loss")))

    def groups(self) -> tuple[int, ...]:
        """The first prediction layer has one norm more than the others; the heads of all predictions are equal."""
        trunk = self.trunk.groups()
        new = max(trunk) + 1
        return (*trunk, *(g for k in range(self.model.depth) for g in (new + (k > 0), new + 2)))


class _Factory:
    """Builds one piece when a rank calls it."""

    def __init__(self, cut: PredictionCut, number: int):
        self._cut, self._number = cut, number

    def __call__(self) -> nn.Module:
        return self._cut.make(self._number)


def _is_plain_embedding(main: nn.Module, anatomy: Anatomy) -> bool:
    """Whether the first layer takes the tokens' embeddings exactly as they are in the table."""

    def tensor(_: str, old: Tensor) -> Tensor:
        return zeros_like_all_of(old, "cpu") if isinstance(old, nn.Parameter) else real_buffer(old, "cpu")

    with torch.no_grad():
        shell, answers = shell_of(main, anatomy.path, tensor)
        table: Any = shell.get_input_embeddings()  # type: ignore[operator]
        found: list[Any] = []
        table.register_forward_hook(lambda _, __, out: found.append(out))
        ids = torch.zeros(1, 2, dtype=torch.long)
        leaves, _, at = collect(shell, answers, 1, anatomy.returns, {"input_ids": ids})[0]
    return type(table) is nn.Embedding and len(found) == 1 and leaves[at] is found[0]

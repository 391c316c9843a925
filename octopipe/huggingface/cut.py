"""`layers`: a language model of transformers as a list of layers for `octopipe.Pipeline`.

Knows: which piece holds which parameters, their names in the model, and which are tied; that models with towers or an
encoder, and those whose layers share tensors, are cut in sections (`section_cut.py`). Does not know: plans, how a piece
runs (`pieces.py`), or where a model can be split (`anatomy.py`, `sections.py`).

    parts = octopipe.huggingface.layers("path/to/model")           # or a config, or a model (with LoRA, frozen, ...)
    pipe = octopipe.Pipeline(parts, plan, parts.loss_fn)
    inputs, targets = octopipe.huggingface.micro_batches(batch, plan.num_micro_batches)
    pipe.step(inputs, targets)
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.huggingface.anatomy import Anatomy, refuse_random_depth, refuse_repeated_layers, trace
from octopipe.huggingface.examples import example_of, takes_more_than_tokens
from octopipe.huggingface.labels import CausalLoss, ShiftedLoss
from octopipe.huggingface.liger import apply as put_liger
from octopipe.huggingface.media import ROWS, TOKENS
from octopipe.huggingface.own_loss import own_loss, refuse_more_than, uses_its_loss_function
from octopipe.huggingface.pieces import Block, Embed, Head, Recorder
from octopipe.huggingface.prediction_cut import MainWeights, PredictionCut
from octopipe.huggingface.prediction_weights import PredictionStore
from octopipe.huggingface.predictions import WithPredictions, with_predictions
from octopipe.huggingface.routers import routers_of
from octopipe.huggingface.section_cut import SectionCut, describe_layer
from octopipe.huggingface.sections import trace_sections
from octopipe.huggingface.shell import outside, shell_of
from octopipe.huggingface.source import (
    build_on_meta,
    inner_model,
    read_config,
    refuse_codes,
    refuse_other_models,
    without_memory,
)
from octopipe.huggingface.weights import Store, Values, Weights, allocated, first_names, has_weights
from octopipe.runtime.path_losses import PathLosses

Factory = Callable[[], nn.Module]


def layers(
    source: Any,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    num_layers: int | None = None,
    attention: str | None = None,
    pretrained: bool | None = None,
    liger: bool = False,
    example: Mapping[str, Any] | None = None,
    predictions: float | None = None,
) -> LayerList:
    """The layers of a language model: embedding, blocks, and norm with head, in the family's own code.

    A model with a vision or audio tower, or with an encoder, has the layers of all its stacks, in the order in which
    its forward runs them, and a piece wherever something else is computed between two of them.

    `source`: a model that has been built (its parameters are used as they are), a config, or the path of a
    `config.json` or of a model's folder. From a path or a config every entry is a factory, so that a rank allocates
    memory, on `device`, only for the layers it holds. A folder's safetensors are read unless `pretrained=False`;
    otherwise weights are initialised from `seed` and the parameters' names, identically under every plan. `num_layers`
    includes embedding and head. `attention`: transformers' name of an attention implementation. `liger`: use Liger's
    norms and gated products. `example`: inputs of a small batch for models that take more than tokens (by default one
    is made up). `predictions`: also train the config's multi-token-prediction layers, with this weight of their mean
    loss.
    """
    if isinstance(source, nn.Module):
        if num_layers is not None or pretrained or attention is not None or liger:
            raise OctoPipeError(
                "num_layers, attention, liger and pretrained apply to a config or a path, not to a model that has been "
                "built; leave them out"
            )
        model = inner_model(source)
        if predictions is not None:
            model = with_predictions(model, predictions)
        return LayerList(_cut(model, None, None, example))
    folder = Path(source) if isinstance(source, str | os.PathLike) and os.path.isdir(source) else None
    if pretrained and (folder is None or not has_weights(folder)):
        raise OctoPipeError(f"{source}: no safetensors to read; give the folder of a model")
    if folder is not None and (pretrained is False or not has_weights(folder)):
        folder = None
    if folder is not None and num_layers is not None:
        raise OctoPipeError("num_layers with a checkpoint would drop layers; give its config.json alone, or all layers")
    config = read_config(source, num_layers=None if num_layers is None else num_layers - 2)
    model = build_on_meta(copy.deepcopy(config), dtype=dtype, attention=attention)
    if liger:
        put_liger(model)
    if predictions is not None:
        main, weight = model, predictions
        model = without_memory(lambda: with_predictions(main, weight))
    weights = Weights(model, seed=seed, device=torch.device(device), store=_store_of(model, folder))
    return LayerList(_cut(model, weights, torch.device(device), example))


def _store_of(model: nn.Module, folder: Path | None) -> Values | None:
    if folder is None:
        return None
    return PredictionStore(model, folder) if isinstance(model, WithPredictions) else Store(model, folder)


def _cut(
    model: nn.Module, weights: Weights | None, device: torch.device | None, example: Mapping[str, Any] | None
) -> _Cut | SectionCut | PredictionCut:
    """Split the model as one stack of layers if that is possible, and in sections otherwise."""
    if isinstance(model, WithPredictions):
        return _cut_with_predictions(model, weights, device)
    refuse_other_models(model)
    refuse_random_depth(model)
    refuse_repeated_layers(model)
    if example is None and not takes_more_than_tokens(model):
        try:
            return _Cut(model, trace(model), weights, device)
        except OctoPipeError:
            pass  # several stacks, or layers that share more than a hidden state
        tokens = {"input_ids": torch.zeros(ROWS, TOKENS, dtype=torch.long)}
        try:
            return SectionCut(model, trace_sections(model, tokens), weights, device, tokens)
        except OctoPipeError:
            refuse_codes(model)
            raise
    example = example_of(model) if example is None else example
    return SectionCut(model, trace_sections(model, example), weights, device, example)


def _cut_with_predictions(
    model: WithPredictions, weights: Weights | None, device: torch.device | None
) -> PredictionCut:
    refuse_random_depth(model.main)
    refuse_repeated_layers(model.main)
    if takes_more_than_tokens(model.main):
        raise OctoPipeError(
            f"{type(model.main).__name__} has a tower or an encoder, beside which predictions are not trained; leave "
            "--mtp out"
        )
    filled: Any = None if weights is None else MainWeights(weights)
    return PredictionCut(model, _Cut(model.main, trace(model.main), filled, device), weights, device)


class LayerList(list[Factory | nn.Module]):
    """The layers for a `Pipeline`, with the model's own loss and the parameters' names in the model."""

    def __init__(self, cut: _Cut | SectionCut | PredictionCut):
        super().__init__(cut.pieces())
        self._cut = cut
        self.config: Any = cut.model.config
        self.class_name = type(cut.model.main if isinstance(cut.model, WithPredictions) else cut.model).__name__

    @cached_property
    def loss_fn(self) -> CausalLoss | PathLosses:
        """The model's own loss of the last layer's output (see `CausalLoss` for its targets). A model with predictions
        has one loss for every layer that ends a path."""
        return self._cut.loss()

    @cached_property
    def shifted_loss(self) -> ShiftedLoss | PathLosses:
        """`loss_fn` for targets that are already the next tokens."""
        if isinstance(self._cut, PredictionCut):
            return self._cut.loss(shifted=True)
        assert isinstance(self.loss_fn, CausalLoss)
        return ShiftedLoss(self._cut.model, self.loss_fn.function)

    @property
    def takes(self) -> tuple[tuple[int, ...], ...]:
        """For every layer, the layers whose outputs it takes; empty if it takes the output of the layer before it."""
        return self._cut.takes if isinstance(self._cut, PredictionCut) else ()

    @property
    def shared(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """If layers take other outputs than that of the layer before them: which layers share parameters, and how many
        parameters."""
        return self._cut.shared if isinstance(self._cut, PredictionCut) else ()

    @property
    def fresh(self) -> tuple[str, ...]:
        """Parameters of prediction layers that the model's folder does not contain, so that they were initialised at
        random."""
        return self._cut.fresh if isinstance(self._cut, PredictionCut) else ()

    @property
    def stacks(self) -> tuple[str, ...]:
        """For every layer, the model's list of layers that it belongs to, or `embedding`, `passage` or `head`."""
        return self._cut.stacks()

    @property
    def example(self) -> Mapping[str, Any] | None:
        """The batch with which the model's forward was traced; None if the model takes only tokens."""
        found = getattr(self._cut, "example", None)
        return None if found is None or set(found) == {"input_ids"} else found

    @property
    def num_tower_layers(self) -> int:
        """The number of layers before the piece at which a tower or an encoder joins the decoder; 0 if there is
        none."""
        named = [k for k, name in enumerate(self.stacks) if name not in ("embedding", "passage", "head")]
        before = [k for k in named if self.stacks[k] != self.stacks[named[-1]]] if named else []
        return before[-1] + 1 if before else 0

    @property
    def tower_stops(self) -> dict[str, int]:
        """For every list of layers of a tower or an encoder, in their order, the layer behind its last one; what comes
        between two lists belongs to the second."""
        last = {name: k + 1 for k, name in enumerate(self.stacks[: self.num_tower_layers])}
        return {name: stop for name, stop in last.items() if name not in ("embedding", "passage")}

    @property
    def kinds(self) -> tuple[str, ...]:
        """For every layer, its class and the type of its block."""
        return self._cut.kinds()

    @property
    def groups(self) -> tuple[int, ...]:
        """For every layer, a number that layers of equal shapes share."""
        return self._cut.groups()

    @property
    def vocab(self) -> int:
        return int(self.config.get_text_config(decoder=True).vocab_size)

    @property
    def parameters(self) -> int:
        """The number of parameters of the whole model; tied parameters count once."""
        return sum(p.numel() for p in self._cut.model.parameters())

    @property
    def layer_parameters(self) -> tuple[int, ...]:
        """The number of parameters of every layer; a parameter that both the embedding and the head use counts in
        both."""
        return self._cut.layer_parameters()

    def name_in_model(self, layer: int, name: str) -> str:
        """The name in the transformers model of a parameter or buffer of one of our layers."""
        return self._cut.prefix(layer) + name.split(".", 1)[1]


class _Cut:
    """One model with its anatomy and, if it is on `meta`, the source of its values."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, weights: Weights | None, device: torch.device | None = None):
        self.model, self.anatomy, self.weights, self.device = model, anatomy, weights, device
        self.recorder = Recorder(model, anatomy)
        self.routers = routers_of(model)
        self._first = first_names(model)

    def prefix(self, layer: int) -> str:
        inside = 0 < layer <= self.anatomy.num_layers
        return f"{self.anatomy.path}.{layer - 1}." if inside else ""

    def pieces(self) -> list[Factory | nn.Module]:
        count = self.anatomy.num_layers + 2
        if self.weights is None:
            return [self.make(k) for k in range(count)]
        return [_Factory(self, k) for k in range(count)]

    def make(self, k: int) -> nn.Module:
        last = self.anatomy.num_layers + 1
        piece = self._end(k, head=k == last) if k in (0, last) else self._block(k)
        piece.tied_to = self._ties(k, piece)  # type: ignore[assignment]
        return piece

    def _block(self, k: int) -> Block:
        path, anatomy, model = self.prefix(k)[:-1], self.anatomy, self.model
        layer = model.get_submodule(path)
        if self.weights is not None:
            names = [f"{path}.{n}" for n, _ in layer.named_parameters(remove_duplicate=False)]
            memo = {id(t): allocated(t, self.device) for t in (*layer.parameters(), *layer.buffers())}
            layer = copy.deepcopy(layer, {**memo, id(model.config): model.config})
            self.weights.fill(layer, f"{path}.", names)
        return Block(layer, k - 1, anatomy, self.recorder, self.routers)

    def _end(self, k: int, *, head: bool) -> Embed | Head:
        model, anatomy = self.model, self.anatomy
        mine = anatomy.head_names if head else anatomy.embed_names
        missing: list[tuple[str, Tensor]] = []

        def tensor(name: str, old: Tensor) -> Tensor:
            if isinstance(old, nn.Parameter):
                # `old` appears here under its first name only; the piece may use it under a tied name.
                if any(n in mine for n in self._names_of(old)):
                    if self.weights is None:
                        return old
                    return allocated(old, self.device)
                missing.append((name, old))
                return torch.empty_like(old, device="meta")
            if self.weights is None:
                return old
            return allocated(old, self.device)

        shell, answers = shell_of(model, anatomy.path, tensor)
        if self.weights is not None:
            held = {n for n, _ in shell.named_parameters(remove_duplicate=False)}
            self.weights.fill(shell, "", [n for n, _ in outside(model, anatomy.path) if n in held])
        missing = [(n, p) for name, p in missing for n in self._names_of(p)]
        return Head(shell, answers, anatomy, missing, self.routers) if head else Embed(shell, answers, anatomy)

    def _names_of(self, parameter: Tensor) -> list[str]:
        if not hasattr(self, "_by_id"):
            self._by_id: dict[int, list[str]] = {}
            for name, p in self.model.named_parameters(remove_duplicate=False):
                self._by_id.setdefault(id(p), []).append(name)
        return self._by_id.get(id(parameter), [])

    def _ties(self, k: int, piece: nn.Module) -> dict[str, str]:
        """For parameters that other layers hold, too: the name in this piece -> the name of the tie."""
        out = {}
        # Under every name, because a tied parameter must be replaced wherever the piece uses it.
        for name, _ in piece.named_parameters(remove_duplicate=False):
            whole = self.prefix(k) + name.split(".", 1)[1]
            names = self._names_of(self.model.get_parameter(whole))
            if len({self._layer_of(n) for n in names}) > 1 or self._at_both_ends(names):
                out[name] = self._first[whole]
        return out

    def _layer_of(self, name: str) -> int:
        path = self.anatomy.path
        return int(name[len(path) + 1 :].split(".", 1)[0]) + 1 if name.startswith(f"{path}.") else 0

    def _at_both_ends(self, names: list[str]) -> bool:
        return any(n in self.anatomy.embed_names for n in names) and any(n in self.anatomy.head_names for n in names)

    def layer_parameters(self) -> tuple[int, ...]:
        named, anatomy = dict(self.model.named_parameters(remove_duplicate=False)), self.anatomy
        blocks = self.model.get_submodule(anatomy.path).children()
        ends = []
        for names in (anatomy.embed_names, anatomy.head_names):
            held = {id(named[name]): named[name].numel() for name in names if name in named}
            ends.append(sum(held.values()))
        return (ends[0], *(sum(p.numel() for p in block.parameters()) for block in blocks), ends[1])

    def loss(self) -> CausalLoss:
        tokens = {"input_ids": torch.zeros(ROWS, TOKENS, dtype=torch.long)}
        if uses_its_loss_function(self.model):
            loss = CausalLoss(self.model)
            refuse_more_than(loss, self.model, self.anatomy.path, tokens, lambda _: self.anatomy.returns)
            return loss
        return own_loss(self.model, self.anatomy.path, tokens, lambda _: self.anatomy.returns)

    def stacks(self) -> tuple[str, ...]:
        return ("embedding", *[self.anatomy.path] * self.anatomy.num_layers, "head")

    def kinds(self) -> tuple[str, ...]:
        named = map(describe_layer, self.model.get_submodule(self.anatomy.path).children())
        return ("embedding", *named, "norm, head and loss")

    def groups(self) -> tuple[int, ...]:
        numbers: dict[Any, int] = {}
        out = [0]
        for kind, layer in zip(self.kinds()[1:-1], self.model.get_submodule(self.anatomy.path).children()):
            shapes = tuple((n, tuple(p.shape), p.requires_grad) for n, p in layer.named_parameters())
            out.append(numbers.setdefault((kind, shapes), 1 + len(numbers)))
        return (*out, 1 + len(numbers))


class _Factory:
    """Builds one piece when a rank calls it."""

    def __init__(self, cut: _Cut, number: int):
        self._cut, self._number = cut, number

    def __call__(self) -> nn.Module:
        return self._cut.make(self._number)


__all__ = ["LayerList", "layers"]

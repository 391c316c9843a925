"""ModelSpec: a model as a list of layers, from embedding to head and loss.

Knows: the layers of a model and their order, the number of parameters, and how to shrink a model for a small
real run. Does not know: the details of layer kinds (`layers.py`, `mixers.py`; both are re-exported here),
time, memory, devices or torch.

>>> block = Block(mixer=Attention(hidden=64, heads=4, kv_heads=2, head_dim=16), ffn=Mlp(hidden=64, ffn=128))
>>> spec = ModelSpec(name="tiny", layers=(Embedding(hidden=64, vocab=256), block, Head(hidden=64, vocab=256)))
>>> spec.pattern, spec.parameters
('ETL', 69824)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from octopipe.base.errors import OctoPipeError
from octopipe.models.layers import GATED, Activation, Block, Embedding, Head, Layer, Mlp, Moe, Mtp, Norm
from octopipe.models.mixers import (
    Attention,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
)
from octopipe.models.towers import CrossBlock, Join, Source, TowerLayer

__all__ = [
    "GATED",
    "Activation",
    "Attention",
    "Block",
    "Embedding",
    "GatedDeltaNet",
    "Head",
    "KimiDeltaAttention",
    "LatentAttention",
    "Layer",
    "LightningAttention",
    "Mamba1",
    "Mamba2",
    "Mlp",
    "ModelSpec",
    "Moe",
    "Mtp",
    "Norm",
    "Source",
    "TowerLayer",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as a sequence of layers: the embedding first (or that of a tower), head and loss last."""

    name: str
    layers: tuple[Layer, ...]
    hidden: int = 0
    """Width of the residual stream; taken from the embedding if it is left out."""
    vocab: int = 0
    """Size of the vocabulary; taken from the embedding if it is left out."""
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        layers = tuple(self.layers)
        object.__setattr__(self, "layers", layers)
        first = layers[0] if len(layers) > 1 and isinstance(layers[-1], Head) else None
        joins = [layer.embedding for layer in layers if isinstance(layer, Join) and layer.embedding is not None]
        tokens = joins[0] if isinstance(first, TowerLayer) and len(joins) == 1 else first
        if not isinstance(tokens, Embedding):
            raise OctoPipeError(f"{self.name}: its layers do not start with an embedding and end with a head; add them")
        object.__setattr__(self, "hidden", self.hidden or tokens.hidden)
        object.__setattr__(self, "vocab", self.vocab or tokens.vocab)
        for i, layer in enumerate(layers):
            if layer.hidden != self.hidden and not isinstance(layer, TowerLayer):
                raise OctoPipeError(
                    f"{self.name}: layer {i} ({layer.symbol}) is {layer.hidden} wide, the model {self.hidden}; make "
                    "them equal"
                )

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    @property
    def num_layers(self) -> int:
        """The number of layers, embedding and head included."""
        return len(self.layers)

    @property
    def pattern(self) -> str:
        """One symbol per layer, embedding and head included."""
        return "".join(layer.symbol for layer in self.layers)

    @property
    def parameters(self) -> int:
        """The parameters as published: tied weights count once, multi-token prediction modules do not count."""
        return sum(layer.parameters for layer in self.layers if not isinstance(layer, Mtp))

    @property
    def training_parameters(self) -> int:
        """All parameters that are trained, including those of multi-token prediction modules."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def sources(self) -> tuple[Source, ...]:
        """What the model's encoder reads, or each of its towers in their order; empty for a plain decoder."""
        return tuple(dict.fromkeys(layer.source for layer in self.layers if isinstance(layer, TowerLayer)))

    @property
    def source(self) -> Source | None:
        """What the model's encoder, or the first of its towers, reads; None for a plain decoder."""
        first = self.layers[0]
        return first.source if isinstance(first, TowerLayer) else None

    @property
    def towers(self) -> tuple[tuple[int, int], ...]:
        """The range (first, last) of the layers of the encoder or of all towers, which are the first ones; empty for a
        plain decoder."""
        count = sum(isinstance(layer, TowerLayer) for layer in self.layers)
        return ((0, count - 1),) if count else ()

    def reading(self, *sources: Source) -> ModelSpec:
        """Return the same model with an encoder or towers that read other items, or another number of them; one source
        for each of `sources`."""
        knows = (TowerLayer, Join, CrossBlock)
        other = dict(zip(self.sources, sources, strict=True))
        known: dict[Layer, Layer] = {}
        for layer in self.layers:
            if layer not in known:
                known[layer] = layer.reading(other) if isinstance(layer, knows) else layer
        return replace(self, layers=tuple(known[layer] for layer in self.layers))

    def split(self) -> ModelSpec:
        """Return the same model with the mixer and the feed-forward of every block as separate layers."""
        parts = [part for layer in self.layers for part in (layer.parts if isinstance(layer, Block) else (layer,))]
        return replace(self, layers=tuple(parts))

    def without_mtp(self) -> ModelSpec:
        """Return the model without its multi-token prediction modules."""
        kept: list[Layer] = [layer for layer in self.layers if not isinstance(layer, Mtp)]
        assert isinstance(kept[-1], Head)
        kept[-1] = replace(kept[-1], predictions=1)
        return replace(self, layers=tuple(kept))

    def with_prediction_paths(self) -> ModelSpec:
        """Return the model with multi-token prediction as `octopipe train --mtp` runs it.

        Behind the last block, the path of a micro-batch forks into the head and into the prediction modules, each of
        which ends with a head that has the same weight.
        """
        modules = [layer for layer in self.layers if isinstance(layer, Mtp)]
        if not modules:
            raise OctoPipeError(f"{self.name} has no multi-token prediction; leave --mtp out")
        main = self.without_mtp()
        head = main.layers[-1]
        assert isinstance(head, Head)
        more: list[Layer] = []
        for module in modules:
            more += [replace(module, own_path=True), replace(head, tied=True)]
        return replace(main, layers=(*main.layers, *more))

    @property
    def takes(self) -> tuple[tuple[int, ...], ...]:
        """Per layer: the layers whose outputs it takes; empty if every layer takes that of the layer before it."""
        apart = [k for k, layer in enumerate(self.layers) if isinstance(layer, Mtp) and layer.own_path]
        if not apart:
            return ()
        rows: list[tuple[int, ...]] = [(), *((k,) for k in range(self.num_layers - 1))]
        for k in apart:
            rows[k] = (0, k - 2)
        return tuple(rows)

    def scaled(self, factor: float, *, num_layers: int | None = None) -> ModelSpec:
        """A narrow copy with the same pattern, for small real runs.

        Widths, head counts, experts and vocabulary shrink by `factor` (head dimensions stay); `num_layers`
        keeps only that many layers, embedding and head included, spread evenly over the original depth.
        """
        if self.source is not None:
            raise OctoPipeError(
                f"{self.name} has a tower or an encoder and cannot be scaled; give a config of smaller sizes"
            )
        if not math.isfinite(factor) or not 0 < factor <= 1:
            raise OctoPipeError(f"{self.name}: scale factor {factor}; give a number above 0 and at most 1")
        inner = self.layers[1:-1]
        if num_layers is not None:
            keep = num_layers - 2
            if not 0 <= keep <= len(inner):
                raise OctoPipeError(f"{self.name}: {num_layers} layers asked for; give 2 to {self.num_layers}")
            inner = tuple(inner[i * len(inner) // keep] for i in range(keep))
        layers = tuple(layer.scaled(factor) for layer in (self.layers[0], *inner, self.layers[-1]))
        first, last = layers[0], layers[-1]
        assert isinstance(first, Embedding) and isinstance(last, Head)
        if not any(isinstance(layer, Mtp) for layer in inner):
            layers = (*layers[:-1], replace(last, predictions=1))
        if first.multiplier != 1.0:
            layers = (replace(first, multiplier=math.sqrt(first.hidden)), *layers[1:])
        return replace(self, layers=layers, hidden=first.hidden, vocab=first.vocab)

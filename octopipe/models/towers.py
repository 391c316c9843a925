"""Layers of models that read more than one stream of tokens: vision and audio towers, encoder-decoders.

Knows: what an encoder reads (`Source`), its layers, the layer at which its output joins the decoder's tokens, and
decoder blocks that attend to an encoder's output. Does not know: config files (`readers/`), time, memory or torch.

A micro-batch passes all layers of such a model one after the other, as the model's forward runs them: the encoder, the
joining layer, the decoder. A model with two towers runs the one for recordings, then the one for images, and joins the
output of both; what a tower does not need passes it untouched (`Carried`). What differs from a plain decoder is how
much each layer works on. An encoder's layer works on the positions of its items (patches of images, frames of
recordings, tokens of a source text), of which a sequence may have any number.

>>> picture = Source(kind="image", positions=576, tokens=576)
>>> layer = TowerLayer(inner=Projection(hidden=1024, width=588), source=picture)
>>> layer.symbol, layer.parameters, picture.per(sequence=3.0).items
('v', 603136, 3.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from octopipe.base.errors import OctoPipeError
from octopipe.models.layers import Embedding, Layer, Mlp, norm_parameters
from octopipe.models.mixers import Attention, GroupedHeads

SourceKind = Literal["image", "audio", "text"]
_SYMBOLS = {"image": "V", "audio": "A", "text": "S"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What an encoder reads: items, each with a number of positions."""

    kind: SourceKind
    positions: int
    """Positions of one item in the encoder: patches of an image, frames of a recording, tokens of a source text."""
    tokens: int = 0
    """Positions that an item occupies in the decoder's sequence; 0: none, decoder blocks attend to the encoder's output
    instead."""
    free: bool = False
    """Whether items may have any number of positions; otherwise the model fixes it."""
    items: float = 1.0
    """Items per sequence, on average."""

    @property
    def is_attended(self) -> bool:
        """Whether this is the encoder of an encoder-decoder, which reads one item per sequence."""
        return self.tokens == 0

    def per(self, *, sequence: float) -> Source:
        """Return the same source with another number of items per sequence."""
        return replace(self, items=sequence)

    def of_size(self, positions: int) -> Source:
        """Return the same source with items of another size; the positions that they occupy in the decoder's sequence
        change in proportion."""
        return replace(
            self, positions=positions, tokens=max(1, self.tokens * positions // self.positions) * (self.tokens > 0)
        )

    def words(self) -> str:
        """Return the word for one item."""
        return {"image": "image", "audio": "recording", "text": "source text"}[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection(Layer):
    """One matrix from `width` values to the width of the stream: an embedding of patches or frames."""

    width: int
    bias: bool = True
    positions: int = field(default=0, metadata={"optional": True})
    """Learned positions; 0: none."""

    kind: ClassVar[str] = "projection"
    letter: ClassVar[str] = "="

    @property
    def parameters(self) -> int:
        return (self.width + self.bias + self.positions) * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Projector(Layer):
    """A norm and a feed-forward from `width` values through `ffn` values to the width of the decoder's stream."""

    width: int
    ffn: int = field(default=0, metadata={"optional": True})
    """Values between two matrices; 0: there is one matrix."""
    bias: bool = True

    kind: ClassVar[str] = "projector"
    letter: ClassVar[str] = "="

    @property
    def parameters(self) -> int:
        if not self.ffn:
            return (self.width + self.bias) * self.hidden
        return (self.width + self.bias) * self.ffn + (self.ffn + self.bias) * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Stem(Layer):
    """The convolutions in front of a tower, as matrix products that run a number of times per position."""

    products: tuple[tuple[int, int, float], ...]
    """For every product: values in, values out, and how often it runs per position of the tower."""
    last_bias: bool = True
    more: int = field(default=0, metadata={"optional": True})
    """Parameters that no product uses."""

    kind: ClassVar[str] = "stem"
    letter: ClassVar[str] = "="

    @property
    def parameters(self) -> int:
        count = sum((taken + 1) * given for taken, given, _ in self.products)
        return count + self.more - (0 if self.last_bias else self.products[-1][1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Something that passes the layers of a tower untouched, because a later layer takes it."""

    source: Source
    """The items that it belongs to."""
    width: int
    """Values per position of an item."""

    @property
    def values(self) -> float:
        """Values per sequence."""
        return self.source.items * self.source.positions * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerLayer(Layer):
    """A layer of an encoder: any other layer (`inner`) that processes the positions of the encoder's items."""

    hidden: int = 0
    """Taken from the inner layer if it is left out."""
    inner: Layer
    source: Source
    beside: tuple[Carried, ...] = ()
    """What passes this layer untouched, in a model with several towers."""

    kind: ClassVar[str] = "encoder"

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", self.hidden or self.inner.hidden)
        Layer.__post_init__(self)

    @property
    def symbol(self) -> str:
        """V, A or S for images, audio or source text; lower case for the embedding of patches, frames or tokens; w for
        windowed attention to images."""
        if len(self.parts) == 1:
            return _SYMBOLS[self.source.kind].lower()
        windowed = getattr(self.parts[0], "window", None) and self.source.kind != "audio"
        return "w" if windowed else _SYMBOLS[self.source.kind]

    @property
    def parameters(self) -> int:
        return self.inner.parameters

    @property
    def tied_parameters(self) -> int:
        return self.inner.tied_parameters

    @property
    def parts(self) -> tuple[Layer, ...]:
        return self.inner.parts

    @property
    def sources(self) -> tuple[Source | None, ...]:
        return (self.source,) * len(self.parts)

    def reading(self, known: Mapping[Source, Source]) -> TowerLayer:
        beside = tuple(replace(item, source=known.get(item.source, item.source)) for item in self.beside)
        return replace(self, source=known.get(self.source, self.source), beside=beside)

    def scaled(self, factor: float) -> TowerLayer:
        raise _not_scaled()


@dataclass(frozen=True, slots=True, kw_only=True)
class Join(Layer):
    """The layer at which the encoder's output joins the decoder: it embeds the decoder's tokens and projects the
    encoder's output to the decoder's width.

    Some decoders add features of the encoder again in later layers, without another embedding.
    """

    embedding: Embedding | None = None
    """None: the decoder began in an earlier layer, and only features are added to its stream."""
    projectors: tuple[Projector, ...] = ()
    source: Source
    others: tuple[tuple[Projector, Source], ...] = ()
    """The projectors of further towers' outputs, each with what its tower reads."""
    tied: bool = False
    """Whether the embedding uses the encoder's table (T5, BART)."""

    kind: ClassVar[str] = "join"

    @property
    def symbol(self) -> str:
        return "j" if self.embedding is None else "J"

    @property
    def parameters(self) -> int:
        own = 0 if self.embedding is None or self.tied else self.embedding.parameters
        return own + sum(p.parameters for p in (*self.projectors, *(other for other, _ in self.others)))

    @property
    def tied_parameters(self) -> int:
        return self.embedding.parameters if self.embedding is not None and self.tied else 0

    @property
    def parts(self) -> tuple[Layer, ...]:
        own = () if self.embedding is None else (self.embedding,)
        return (*own, *self.projectors, *(other for other, _ in self.others))

    @property
    def sources(self) -> tuple[Source | None, ...]:
        own = () if self.embedding is None else (None,)
        every = [*[self.source] * len(self.projectors), *(source for _, source in self.others)]
        return (*own, *(replace(source, positions=source.tokens or source.positions) for source in every))

    def reading(self, known: Mapping[Source, Source]) -> Join:
        others = tuple((other, known.get(source, source)) for other, source in self.others)
        return replace(self, source=known.get(self.source, self.source), others=others)

    def scaled(self, factor: float) -> Join:
        raise _not_scaled()


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttention(GroupedHeads):
    """Attention of the decoder's tokens to all positions of an encoder's output."""

    memory: int
    """Width of the encoder's output."""
    source: Source
    bias: bool = False

    kind: ClassVar[str] = "cross_attention"
    letter: ClassVar[str] = "c"

    @property
    def parameters(self) -> int:
        h, q, kv = self.hidden, self.query_width, self.kv_width
        count = h * q + 2 * self.memory * kv + q * h
        return count + (q + 2 * kv + h) * self.bias + norm_parameters("layer" if self.bias else "rms", h)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossBlock(Layer):
    """A decoder block that attends to its own tokens, then to an encoder's output, then feeds forward."""

    hidden: int = 0
    """Taken from the mixer if it is left out."""
    mixer: Attention
    cross: CrossAttention
    ffn: Mlp

    kind: ClassVar[str] = "decoder"
    letter: ClassVar[str] = "C"

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", self.hidden or self.mixer.hidden)
        Layer.__post_init__(self)
        if not self.hidden == self.mixer.hidden == self.cross.hidden == self.ffn.hidden:
            raise OctoPipeError(
                "decoder block: self-attention, cross-attention and feed-forward differ in width; make them equal"
            )

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def parts(self) -> tuple[Layer, ...]:
        return (self.mixer, self.cross, self.ffn)

    @property
    def source(self) -> Source:
        return self.cross.source

    def reading(self, known: Mapping[Source, Source]) -> CrossBlock:
        return replace(self, cross=replace(self.cross, source=known.get(self.source, self.source)))

    def scaled(self, factor: float) -> CrossBlock:
        raise _not_scaled()


def _not_scaled() -> OctoPipeError:
    return OctoPipeError("a model with a tower or an encoder cannot be scaled; give a config of smaller sizes")


TowerPart = TowerLayer | Join | CrossBlock
"""The layers that depend on what an encoder reads."""


def passed_on(layer: Layer, *, seq: float, sequences: float) -> float:
    """Return the number of values that a layer passes to the next one, for this number of sequences.

    These are its stream and, in the decoder of an encoder-decoder, the encoder's output, which every later block reads.
    With several towers, what another one takes or gave passes every layer of a tower, too.
    """
    if isinstance(layer, TowerLayer):
        own = layer.source.items * layer.source.positions * layer.hidden
        return sequences * (own + sum(item.values for item in layer.beside))
    values = sequences * seq * layer.hidden
    if isinstance(layer, Join | CrossBlock) and layer.source.is_attended:
        width = layer.cross.memory if isinstance(layer, CrossBlock) else layer.hidden
        values += sequences * layer.source.items * layer.source.positions * width
    return values


__all__ = [
    "Carried",
    "CrossAttention",
    "CrossBlock",
    "Join",
    "Projection",
    "Projector",
    "Source",
    "SourceKind",
    "Stem",
    "TowerLayer",
    "TowerPart",
    "passed_on",
]

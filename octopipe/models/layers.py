"""The layer kinds that frame a model: embedding, feed-forward, experts, block, prediction module, head.

Knows: the dimensions of a layer, its parameters and its one-character symbol. Does not know: the mixers
(`mixers.py`), time, memory, devices or torch.

Counts follow the published checkpoints: each layer owns its pre-norm, the head owns the final norm. Layers
that use weights of another layer (a tied head, the embedding that a prediction module looks up) report them as
`tied_parameters` and not as `parameters`.

>>> Mlp(hidden=64, ffn=128, activation="relu2").parameters
16448
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, TypeVar

from octopipe.base.errors import OctoPipeError

Norm = Literal["rms", "layer"]
Activation = Literal["relu2", "gelu", "swiglu", "geglu", "relu", "silu"]
GATED = frozenset({"swiglu", "geglu"})
"""Activations that multiply two projections: three matrices instead of two."""

L = TypeVar("L", bound="Layer")


def shrink_width(size: int, factor: float, multiple: int = 16) -> int:
    """Return `size * factor` rounded to a multiple of `multiple`, at least one multiple but never more than `size`."""
    if factor == 1.0:
        return size
    return min(size, max(multiple, round(size * factor / multiple) * multiple))


def shrink_heads(heads: int, groups: int, factor: float) -> tuple[int, int]:
    """Shrink a head count and the group count that divides it, keeping their ratio if possible."""
    new_groups = max(1, round(groups * factor))
    return new_groups * max(1, min(heads // groups, round(heads * factor / new_groups))), new_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of a model: the unit that a partition moves."""

    hidden: int
    """Width of the residual stream."""

    kind: ClassVar[str] = "layer"
    letter: ClassVar[str] = ""
    """The symbol, if it is the same for all layers of this kind."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            low = 0 if f.metadata.get("optional") else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < low:
                raise OctoPipeError(f"{self.kind} layer: {f.name} is {value}; give a whole number >= {low}")

    @property
    def symbol(self) -> str:
        """One character: the layer's letter in a pattern."""
        return self.letter

    @property
    def parameters(self) -> int:
        """The layer's own parameters, norms included."""
        raise NotImplementedError

    @property
    def tied_parameters(self) -> int:
        """Parameters of another layer that this layer uses as well; every rank with this layer holds a copy of them."""
        return 0

    @property
    def parts(self) -> tuple[Layer, ...]:
        """The layers that a compound layer runs one after another; a simple layer is its own only part."""
        return (self,)

    @property
    def sources(self) -> tuple[Any, ...]:
        """Per part: the items of an encoder that it processes (`towers.Source`); None: the decoder's tokens."""
        return (None,) * len(self.parts)

    def scaled(self: L, factor: float) -> L:
        """The same layer with narrower dimensions."""
        return replace(self, hidden=shrink_width(self.hidden, factor))


def norm_parameters(norm: Norm, width: int) -> int:
    return width if norm == "rms" else 2 * width


def _optional(default: int = 0) -> Any:
    return field(default=default, metadata={"optional": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding(Layer):
    """Token lookup, with learned positions if the model has them."""

    vocab: int
    positions: int = _optional()
    multiplier: float = 1.0
    """The factor that embeddings are multiplied by (Gemma: the square root of the width)."""

    kind: ClassVar[str] = "embedding"
    letter: ClassVar[str] = "E"

    @property
    def parameters(self) -> int:
        return (self.vocab + self.positions) * self.hidden

    def scaled(self, factor: float) -> Embedding:
        return replace(self, hidden=shrink_width(self.hidden, factor), vocab=shrink_width(self.vocab, factor))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp(Layer):
    """Dense feed-forward layer; gated activations have a third matrix."""

    ffn: int
    activation: Activation = "swiglu"
    bias: bool = False
    norm: Norm = "rms"
    post_norm: bool = False

    kind: ClassVar[str] = "mlp"
    letter: ClassVar[str] = "-"

    @property
    def matrices(self) -> int:
        return 3 if self.activation in GATED else 2

    @property
    def parameters(self) -> int:
        h, f = self.hidden, self.ffn
        bias = ((self.matrices - 1) * f + h) * self.bias
        return self.matrices * h * f + bias + norm_parameters(self.norm, h) * (1 + self.post_norm)

    def scaled(self, factor: float) -> Mlp:
        return replace(self, hidden=shrink_width(self.hidden, factor), ffn=shrink_width(self.ffn, factor))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe(Layer):
    """Mixture of experts: a router, `top_k` of `experts` per token, and shared experts for every token."""

    experts: int
    top_k: int
    ffn: int
    """Width of one routed expert."""
    activation: Activation = "swiglu"
    shared_ffn: int = _optional()
    """Width of all shared experts together; 0: none."""
    shared_gate: bool = False
    """A learned scalar gate on the shared expert (Qwen)."""
    bias: bool = False
    """Biases on router and experts (GPT-OSS)."""
    latent: int = _optional()
    """The narrower width in which routed experts work, between two projections; 0: they work in the full width."""

    kind: ClassVar[str] = "moe"
    letter: ClassVar[str] = "#"

    def __post_init__(self) -> None:
        Layer.__post_init__(self)
        if self.top_k > self.experts:
            raise OctoPipeError(f"moe layer: top {self.top_k} of {self.experts} experts; lower top_k")

    @property
    def matrices(self) -> int:
        return 3 if self.activation in GATED else 2

    @property
    def expert_width(self) -> int:
        return self.latent or self.hidden

    @property
    def expert_parameters(self) -> int:
        """Parameters of the routed experts, which expert parallelism divides."""
        w, f = self.expert_width, self.ffn
        bias = ((self.matrices - 1) * f + w) * self.bias
        return self.experts * (self.matrices * w * f + bias)

    @property
    def router_parameters(self) -> int:
        return self.experts * (self.hidden + self.bias) + self.hidden * self.shared_gate

    @property
    def parameters(self) -> int:
        shared = self.matrices * self.hidden * self.shared_ffn
        latent = 2 * self.hidden * self.latent
        return self.expert_parameters + self.router_parameters + shared + latent + self.hidden

    def scaled(self, factor: float) -> Moe:
        return replace(
            self,
            hidden=shrink_width(self.hidden, factor),
            experts=max(self.top_k, round(self.experts * factor)),
            ffn=shrink_width(self.ffn, factor),
            shared_ffn=shrink_width(self.shared_ffn, factor) if self.shared_ffn else 0,
            latent=shrink_width(self.latent, factor) if self.latent else 0,
        )


_BLOCK_SYMBOLS = {
    "attention": "TX",
    "latent_attention": "TX",
    "sliding_attention": "tx",
    "mamba1": "bB",
    "mamba2": "bB",
    "gated_delta_net": "gG",
    "kimi_delta_attention": "kK",
    "lightning_attention": "nN",
}
"""First letter with a dense feed-forward, second with a mixture of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block(Layer):
    """A mixer and a feed-forward layer that are partitioned as one: the usual transformer block."""

    hidden: int = 0
    """Taken from the mixer if it is left out."""
    mixer: Layer
    ffn: Mlp | Moe

    kind: ClassVar[str] = "block"

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", self.hidden or self.mixer.hidden)
        Layer.__post_init__(self)
        if not self.hidden == self.mixer.hidden == self.ffn.hidden:
            raise OctoPipeError(
                f"block: widths {self.hidden}, {self.mixer.hidden} and {self.ffn.hidden}; make them equal"
            )

    @property
    def symbol(self) -> str:
        """T and t (sliding) with a dense feed-forward, X and x with experts; linear mixers have their own."""
        kind = "sliding_attention" if getattr(self.mixer, "window", None) else self.mixer.kind
        return _BLOCK_SYMBOLS[kind][isinstance(self.ffn, Moe)]

    @property
    def parameters(self) -> int:
        return self.mixer.parameters + self.ffn.parameters

    @property
    def parts(self) -> tuple[Layer, ...]:
        return (self.mixer, self.ffn)

    def scaled(self, factor: float) -> Block:
        return Block(mixer=self.mixer.scaled(factor), ffn=self.ffn.scaled(factor))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mtp(Layer):
    """Multi-token prediction: joins the trunk's output with the next token's embedding and runs one block.

    It is between trunk and head and passes both hidden states on; embedding and head weights are shared.
    """

    hidden: int = 0
    vocab: int
    block: Block
    own_path: bool = False
    """Whether it is on a path of its own that ends with a head. It then passes on only its own hidden state, and takes
    the next token's embedding from the embedding layer instead of holding a copy of the table
    (`ModelSpec.with_prediction_paths`)."""

    kind: ClassVar[str] = "mtp"
    letter: ClassVar[str] = "P"

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", self.hidden or self.block.hidden)
        Layer.__post_init__(self)

    @property
    def parameters(self) -> int:
        return 2 * self.hidden * self.hidden + 3 * self.hidden + self.block.parameters

    @property
    def tied_parameters(self) -> int:
        return 0 if self.own_path else self.vocab * self.hidden

    @property
    def parts(self) -> tuple[Layer, ...]:
        return (self, *self.block.parts)

    def scaled(self, factor: float) -> Mtp:
        return replace(self, hidden=0, vocab=shrink_width(self.vocab, factor), block=self.block.scaled(factor))


@dataclass(frozen=True, slots=True, kw_only=True)
class Head(Layer):
    """Final norm, projection to the vocabulary and the cross-entropy loss."""

    vocab: int
    tied: bool = False
    """Whether the projection uses the embedding's matrix."""
    norm: Norm = "rms"
    predictions: int = 1
    """The number of hidden states that it scores per token: 2 after one multi-token prediction module."""

    kind: ClassVar[str] = "head"
    letter: ClassVar[str] = "L"

    @property
    def parameters(self) -> int:
        return (0 if self.tied else self.vocab * self.hidden) + norm_parameters(self.norm, self.hidden)

    @property
    def tied_parameters(self) -> int:
        return self.vocab * self.hidden if self.tied else 0

    def scaled(self, factor: float) -> Head:
        return replace(self, hidden=shrink_width(self.hidden, factor), vocab=shrink_width(self.vocab, factor))

"""The token mixers: softmax attention, latent attention, state-space models and linear attention.

Knows: the dimensions of each mixer, its parameters and its symbol. Does not know: what surrounds a mixer,
time, memory or torch.

>>> Attention(hidden=64, heads=4, kv_heads=2, head_dim=16, window=8).symbol
'~'
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from octopipe.base.errors import OctoPipeError
from octopipe.models.layers import Layer, Norm, norm_parameters, shrink_heads, shrink_width

H = TypeVar("H", bound="EqualHeads")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedHeads(Layer):
    """Heads of queries that share fewer heads of keys and values."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(GroupedHeads):
    """Softmax attention with grouped keys, over all tokens or the last `window` tokens."""

    window: int | None = None
    rope_theta: float | None = None
    """None: no rotary positions."""
    rotary_dim: int | None = None
    """Rotated part of each head; None: all of it."""
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    """One learned logit per head that takes attention away from the tokens (GPT-OSS)."""
    gated: bool = False
    """The query projection also yields an output gate (Qwen3-Next)."""
    norm: Norm = "rms"
    post_norm: bool = False
    """A second norm after the layer (Gemma)."""
    causal: bool = True
    """False in encoders: positions attend to all others, or to all of their own window."""

    kind: ClassVar[str] = "attention"

    def __post_init__(self) -> None:
        Layer.__post_init__(self)
        if self.heads % self.kv_heads:
            raise OctoPipeError(
                f"attention layer: {self.heads} heads over {self.kv_heads} key/value heads; give a multiple"
            )

    @property
    def symbol(self) -> str:
        return "*" if self.window is None else "~"

    @property
    def parameters(self) -> int:
        h, q, kv = self.hidden, self.query_width, self.kv_width
        q_out = 2 * q if self.gated else q
        count = h * (q_out + 2 * kv) + q * h
        count += (q_out + 2 * kv) * self.qkv_bias + h * self.out_bias
        count += 2 * self.head_dim * self.qk_norm + self.heads * self.sinks
        return count + norm_parameters(self.norm, h) * (1 + self.post_norm)

    def scaled(self, factor: float) -> Attention:
        heads, kv_heads = shrink_heads(self.heads, self.kv_heads, factor)
        return replace(self, hidden=shrink_width(self.hidden, factor), heads=heads, kv_heads=kv_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(Layer):
    """Multi-head latent attention (DeepSeek): low-rank queries, keys and values."""

    heads: int
    q_rank: int | None
    """None: queries come straight from the residual stream."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rope_theta: float | None = 10000.0
    bias: bool = False
    """Bias of the two down projections and of the output (the config's attention_bias)."""

    kind: ClassVar[str] = "latent_attention"
    letter: ClassVar[str] = "@"

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def down_parameters(self) -> int:
        """Parameters of the down projections and their norms, which every tensor-parallel rank holds unsharded."""
        h, kv = self.hidden, self.kv_rank + self.rope_dim
        count = h * kv + self.kv_rank + kv * self.bias
        if self.q_rank is not None:
            count += h * self.q_rank + self.q_rank + self.q_rank * self.bias
        return count

    @property
    def parameters(self) -> int:
        h = self.hidden
        queries = (h if self.q_rank is None else self.q_rank) * self.heads * self.qk_dim
        keys_values = self.kv_rank * self.heads * (self.nope_dim + self.v_dim)
        output = self.heads * self.v_dim * h + h * self.bias
        return self.down_parameters + queries + keys_values + output + h

    def scaled(self, factor: float) -> LatentAttention:
        return replace(
            self,
            hidden=shrink_width(self.hidden, factor),
            heads=max(1, round(self.heads * factor)),
            q_rank=None if self.q_rank is None else shrink_width(self.q_rank, factor),
            kv_rank=shrink_width(self.kv_rank, factor),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1(Layer):
    """Selective scan with a state per channel (Jamba)."""

    inner: int
    state: int
    dt_rank: int
    conv: int = 4
    inner_norms: bool = True
    """Norms on dt, B and C (Jamba has them, Mamba does not)."""

    kind: ClassVar[str] = "mamba1"
    letter: ClassVar[str] = "M"

    @property
    def parameters(self) -> int:
        h, di, n, r = self.hidden, self.inner, self.state, self.dt_rank
        projections = h * 2 * di + di * (r + 2 * n) + (r + 1) * di + di * h
        count = projections + di * (self.conv + 1) + di * n + di
        return count + (r + 2 * n) * self.inner_norms + h

    def scaled(self, factor: float) -> Mamba1:
        return replace(
            self,
            hidden=shrink_width(self.hidden, factor),
            inner=shrink_width(self.inner, factor),
            dt_rank=shrink_width(self.dt_rank, factor, 4),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(Layer):
    """State-space duality mixer: heads with a scalar decay, computed in chunks."""

    heads: int
    head_dim: int
    state: int
    groups: int = 8
    conv: int = 4
    chunk: int = 128

    kind: ClassVar[str] = "mamba2"
    letter: ClassVar[str] = "M"

    def __post_init__(self) -> None:
        Layer.__post_init__(self)
        if self.heads % self.groups:
            raise OctoPipeError(f"mamba2 layer: {self.heads} heads over {self.groups} groups; make it a multiple")

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def projection_width(self) -> int:
        """Gate, input, B, C and dt in one projection."""
        return 2 * self.inner + 2 * self.groups * self.state + self.heads

    @property
    def conv_width(self) -> int:
        return self.inner + 2 * self.groups * self.state

    @property
    def parameters(self) -> int:
        h = self.hidden
        count = h * self.projection_width + self.inner * h + self.conv_width * (self.conv + 1)
        return count + 3 * self.heads + self.inner + h  # dt bias, A, D; the gated norm; the pre-norm

    def scaled(self, factor: float) -> Mamba2:
        heads, groups = shrink_heads(self.heads, self.groups, factor)
        return replace(
            self,
            hidden=shrink_width(self.hidden, factor),
            heads=heads,
            groups=groups,
            state=shrink_width(self.state, factor),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet(Layer):
    """Linear attention with a gated delta rule (Qwen3-Next): key heads shared by value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int = 4
    chunk: int = 64

    kind: ClassVar[str] = "gated_delta_net"
    letter: ClassVar[str] = "D"

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def projection_width(self) -> int:
        """Queries, keys, values, output gate, and beta and decay per value head."""
        return 2 * self.key_width + 2 * self.value_width + 2 * self.value_heads

    @property
    def parameters(self) -> int:
        h = self.hidden
        count = h * self.projection_width + self.value_width * h
        count += (2 * self.key_width + self.value_width) * self.conv
        return count + 2 * self.value_heads + self.value_dim + h

    def scaled(self, factor: float) -> GatedDeltaNet:
        values, keys = shrink_heads(self.value_heads, self.key_heads, factor)
        return replace(self, hidden=shrink_width(self.hidden, factor), key_heads=keys, value_heads=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualHeads(Layer):
    """Heads of queries, keys and values of one width."""

    heads: int
    head_dim: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    def scaled(self: H, factor: float) -> H:
        return replace(self, hidden=shrink_width(self.hidden, factor), heads=max(1, round(self.heads * factor)))


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaAttention(EqualHeads):
    """Delta-rule linear attention with a decay per channel (Kimi Linear)."""

    conv: int = 4
    chunk: int = 64

    kind: ClassVar[str] = "kimi_delta_attention"
    letter: ClassVar[str] = "d"

    @property
    def parameters(self) -> int:
        h, w, d = self.hidden, self.inner, self.head_dim
        count = 4 * h * w + 3 * w * self.conv  # q, k, v, o and their short convolutions
        count += 2 * (h * d + d * w)  # low-rank decay and output gate
        count += h * self.heads + self.heads + w  # beta; A and dt bias
        return count + d + h


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningAttention(EqualHeads):
    """Linear attention with a fixed decay per head and an output gate (MiniMax)."""

    chunk: int = 256

    kind: ClassVar[str] = "lightning_attention"
    letter: ClassVar[str] = "/"

    @property
    def parameters(self) -> int:
        return 5 * self.hidden * self.inner + self.inner + self.hidden

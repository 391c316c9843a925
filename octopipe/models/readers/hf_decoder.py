"""The common decoder of Hugging Face configs: blocks of a mixer and a feed-forward layer.

Knows: the keys that decoders share, how to check them, and the traits in which families differ. Does not
know: which family a config belongs to (`hf_families.py`).

>>> Config(data={"hidden_size": 64}, where="config.json").hidden
64
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief, kind_of
from octopipe.base.limits import MAX_LAYERS, MAX_SIZE, MAX_TIME_MS, finite
from octopipe.models.spec import (
    Activation,
    Attention,
    Block,
    Embedding,
    GatedDeltaNet,
    Head,
    KimiDeltaAttention,
    LatentAttention,
    Layer,
    LightningAttention,
    Mlp,
    Moe,
    Mtp,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A config's keys with checks: the error for a wrong value names the file, the key and the remedy."""

    data: Mapping[str, object]
    where: str

    def get(self, *keys: str) -> object:
        """Return the value of the first of these keys that is present and not null, or None."""
        return next((self.data[key] for key in keys if self.data.get(key) is not None), None)

    def has(self, *keys: str) -> bool:
        return self.get(*keys) is not None

    def size(self, *keys: str, default: int | None = None) -> int:
        value = self.get(*keys)
        if value is None:
            if default is None:
                raise OctoPipeError(f'{self.where}: "{keys[0]}" is missing; add it to the config')
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SIZE:
            raise OctoPipeError(
                f'{self.where}: "{keys[0]}" is {brief(value)}; give a whole number >= 0, at most {MAX_SIZE}'
            )
        return value

    def number(self, *keys: str, default: float) -> float:
        value = self.get(*keys)
        if value is None:
            return default
        number = finite(value)
        if number is None or not 0 <= number <= MAX_TIME_MS:
            raise OctoPipeError(
                f'{self.where}: "{keys[0]}" is {brief(value)}; give a finite number >= 0, at most {MAX_TIME_MS:g}'
            )
        return number

    def flag(self, *keys: str, default: bool = False) -> bool:
        value = self.get(*keys)
        if value not in (None, False, True):  # 0 and 1 are accepted as well
            raise OctoPipeError(f'{self.where}: "{keys[0]}" is {brief(value)}; give true or false')
        return default if value is None else bool(value)

    def items(self, *keys: str) -> list[object] | None:
        value = self.get(*keys)
        if value is not None and not isinstance(value, list):
            raise OctoPipeError(f'{self.where}: "{keys[0]}" is {brief(value)}; give a list')
        return value

    def part(self, key: str) -> Config:
        """Return a nested object, empty if it is missing."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise OctoPipeError(f'{self.where}: "{key}" is a JSON {kind_of(value)}; give an object')
        return Config(data=value or {}, where=f"{self.where}: {key}")

    @property
    def hidden(self) -> int:
        return self.size("hidden_size", "n_embd")

    @property
    def blocks(self) -> int:
        return self.count("num_hidden_layers", "n_layer")

    def count(self, *keys: str) -> int:
        """Return a number of layers, checked to be within limits."""
        count = self.size(*keys)
        if not 1 <= count <= MAX_LAYERS:
            raise OctoPipeError(f'{self.where}: "{keys[0]}" is {count}; give 1 to {MAX_LAYERS}')
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family differs from the plain decoder (LLaMA)."""

    qkv_bias: bool | None = None
    """None: the config's attention_bias, or False if that is missing."""
    out_bias: bool | None = None
    """None: as qkv_bias."""
    qk_norm: bool = False
    gated_attention: bool = False
    post_norm: bool = False
    tied: bool = False
    """Default of tie_word_embeddings."""
    activation: Activation | None = None
    window_always: bool = False
    """Whether sliding_window applies to every layer (Mistral), unless layer_types says otherwise."""
    full_every: int = 0
    """If layer_types is missing: every n-th layer has full attention, the others have sliding or linear attention."""
    linear_first: bool = True
    moe_bias: bool = False
    sinks: bool = False
    shared_gate: bool = False
    embedding_multiplier: bool = False
    head_dim: int | None = None
    top_k: int | None = None
    dense_first: int = 0
    """Default of first_k_dense_replace."""
    shared: int = 0
    """Default of n_shared_experts."""
    mlp_bias: bool = False
    """Default of mlp_bias."""


def _layer_types(config: Config, family: Family) -> list[str]:
    """Return the kind of attention of every block: full, sliding or linear."""
    count = config.blocks
    kinds = config.items("layer_types")
    if kinds is None and config.has("attn_type_list"):  # MiniMax-Text-01: 1 is softmax attention
        kinds = ["full" if item == 1 else "linear" for item in config.items("attn_type_list") or []]
    linear = config.part("linear_attn_config")
    if kinds is None and linear.has("full_attn_layers"):  # Kimi Linear counts from 1
        full = set(map(str, linear.items("full_attn_layers") or []))
        kinds = ["full" if str(i + 1) in full else "linear" for i in range(count)]
    if kinds is None and config.get("model_type") == "kimi_linear":
        kinds = ["full" if i and i % 4 == 0 else "linear" for i in range(count)]
    if kinds is not None:
        if len(kinds) != count:
            raise OctoPipeError(
                f'{config.where}: "layer_types" has {len(kinds)} entries for {count} layers; make them equal'
            )
        return [_kind_of_type(str(kind), config) for kind in kinds]
    every = config.size("full_attention_interval", "sliding_window_pattern", default=family.full_every)
    other = "linear" if _has_linear(config) else "sliding"
    if every and not (other == "sliding" and not config.has("sliding_window")):
        offset = 1 if family.linear_first else 0
        return ["full" if (i + offset) % every == 0 else other for i in range(count)]
    if config.has("sliding_window") and family.window_always:
        return ["sliding"] * count
    if config.has("sliding_window") and config.flag("use_sliding_window"):
        first = config.size("max_window_layers", default=count)
        return ["sliding" if i >= first else "full" for i in range(count)]
    return ["full"] * count


def _kind_of_type(name: str, config: Config) -> str:
    for key, kind in (("linear", "linear"), ("sliding", "sliding"), ("full", "full"), ("attention", "full")):
        if key in name:
            return kind
    raise OctoPipeError(f'{config.where}: "layer_types" has {brief(name)}; use full, sliding or linear attention')


def _has_linear(config: Config) -> bool:
    kind = str(config.get("model_type"))
    return config.has("linear_num_value_heads", "linear_attn_config", "linear_num_heads") or kind in (
        "minimax",
        "minimax_text_01",
    )


def _attention(config: Config, family: Family, window: int | None) -> Layer:
    h, heads = config.hidden, config.size("num_attention_heads", "n_head")
    rope = config.part("rope_parameters")
    nested = rope.part("full_attention" if window is None else "sliding_attention")
    local = config.number("rope_local_base_freq", default=0.0) if window is not None else 0.0
    theta = nested.number("rope_theta", default=rope.number("rope_theta", default=0.0)) or config.number(
        "rope_theta", default=10000.0
    )
    theta = local or theta
    bias = config.flag("attention_bias")
    if config.has("kv_lora_rank"):
        return LatentAttention(
            hidden=h,
            heads=heads,
            q_rank=config.size("q_lora_rank", default=0) or None,
            kv_rank=config.size("kv_lora_rank"),
            nope_dim=config.size("qk_nope_head_dim"),
            rope_dim=config.size("qk_rope_head_dim"),
            v_dim=config.size("v_head_dim"),
            rope_theta=theta,
            bias=bias,
        )
    head_dim = config.size("head_dim", default=family.head_dim or (h // heads if heads else 0))
    qkv_bias = config.flag("qkv_bias", default=bias if family.qkv_bias is None else family.qkv_bias)
    share = config.number("partial_rotary_factor", default=rope.number("partial_rotary_factor", default=1.0))
    if share > 1:
        raise OctoPipeError(f'{config.where}: "partial_rotary_factor" is {share:g}; give a share from 0 to 1')
    return Attention(
        hidden=h,
        heads=heads,
        kv_heads=config.size("num_key_value_heads", default=heads),
        head_dim=head_dim,
        window=window,
        rope_theta=theta,
        rotary_dim=None if share == 1.0 else config.size("rotary_dim", default=int(head_dim * share)),
        qkv_bias=qkv_bias,
        out_bias=qkv_bias if family.out_bias is None else family.out_bias,
        qk_norm=config.flag("use_qk_norm", "qk_norm", default=family.qk_norm),
        sinks=family.sinks,
        gated=family.gated_attention,
        post_norm=family.post_norm,
    )


def _linear_mixer(config: Config) -> Layer:
    h = config.hidden
    if config.has("linear_num_value_heads"):
        return GatedDeltaNet(
            hidden=h,
            key_heads=config.size("linear_num_key_heads"),
            value_heads=config.size("linear_num_value_heads"),
            key_dim=config.size("linear_key_head_dim", default=128),
            value_dim=config.size("linear_value_head_dim", default=128),
            conv=config.size("linear_conv_kernel_dim", default=4),
        )
    nested = config.part("linear_attn_config")
    if nested.data or config.has("linear_num_heads") or config.get("model_type") == "kimi_linear":
        return KimiDeltaAttention(
            hidden=h,
            heads=nested.size("num_heads", default=config.size("linear_num_heads", default=32)),
            head_dim=nested.size("head_dim", default=config.size("linear_head_dim", default=128)),
            conv=nested.size("short_conv_kernel_size", default=config.size("linear_conv_kernel_dim", default=4)),
        )
    heads = config.size("num_attention_heads")
    return LightningAttention(
        hidden=h,
        heads=heads,
        head_dim=config.size("head_dim", default=h // heads if heads else 0),
        chunk=config.size("block_size", default=256),
    )


def _activation(config: Config, family: Family) -> Activation:
    name = str(config.get("hidden_act", "hidden_activation", "mlp_hidden_act") or "silu")
    return family.activation or ("geglu" if "gelu" in name else "swiglu")


def _experts(config: Config) -> int:
    return config.size("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", default=0)


def _is_sparse(config: Config, family: Family, i: int) -> bool:
    """Whether block i has experts."""
    if _experts(config) < 2:
        return False
    kinds = config.items("mlp_layer_types")
    if kinds is not None and i < len(kinds):
        return kinds[i] == "sparse"
    first = config.size("first_k_dense_replace", "moe_layer_start_index", default=family.dense_first)
    if i < first or i in (config.items("mlp_only_layers") or []):
        return False
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list):
        return i < len(frequency) and bool(frequency[i])
    if isinstance(frequency, int) and frequency > 1 and i % frequency:
        return False
    return (i + 1) % max(1, config.size("decoder_sparse_step", "interleave_moe_layer_step", default=1)) == 0


def _feed_forward(config: Config, family: Family, sparse: bool) -> Mlp | Moe:
    h, activation = config.hidden, _activation(config, family)
    if not sparse:
        return Mlp(
            hidden=h,
            ffn=config.size("intermediate_size_mlp", default=0) or config.size("intermediate_size"),
            activation=activation,
            bias=config.flag("mlp_bias", default=family.mlp_bias),
            post_norm=family.post_norm,
        )
    ffn = config.size("moe_intermediate_size", default=config.size("intermediate_size", default=0))
    shared = config.size("shared_expert_intermediate_size", "shared_intermediate_size", default=0)
    count = config.size("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=family.shared)
    return Moe(
        hidden=h,
        experts=_experts(config),
        top_k=config.size("num_experts_per_tok", "num_experts_per_token", "moe_k", default=family.top_k),
        ffn=ffn,
        activation=activation,
        shared_ffn=shared or ffn * count,
        shared_gate=family.shared_gate and shared > 0,
        bias=family.moe_bias,
    )


def decoder(config: Config, family: Family) -> tuple[Layer, ...]:
    """Return the layers of a decoder: embedding, blocks of mixer and feed-forward, prediction modules, and head."""
    h, vocab = config.hidden, config.size("vocab_size")
    kinds = _layer_types(config, family)
    window = config.size("sliding_window", default=0) or None
    mixers: dict[str, Layer] = {
        kind: _linear_mixer(config)
        if kind == "linear"
        else _attention(config, family, window if kind == "sliding" else None)
        for kind in set(kinds)
    }
    flags = [_is_sparse(config, family, i) for i in range(len(kinds))]
    feeds = {flag: _feed_forward(config, family, flag) for flag in set(flags)}
    blocks = [Block(mixer=mixers[kind], ffn=feeds[flag]) for kind, flag in zip(kinds, flags, strict=True)]
    modules = config.size("num_nextn_predict_layers", "num_mtp_layers", default=0)
    if modules > 16:
        raise OctoPipeError(f'{config.where}: "num_nextn_predict_layers" is {modules}; give at most 16')
    tail: list[Layer] = [Mtp(vocab=vocab, block=blocks[-1]) for _ in range(modules)]
    tied = config.flag("tie_word_embeddings", default=family.tied)
    scale = math.sqrt(h) if family.embedding_multiplier else 1.0
    return (
        Embedding(hidden=h, vocab=vocab, multiplier=scale),
        *blocks,
        *tail,
        Head(hidden=h, vocab=vocab, tied=tied, predictions=1 + modules),
    )

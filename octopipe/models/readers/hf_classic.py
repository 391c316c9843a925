"""Decoders similar to GPT-2: blocks of attention and an MLP without a gate, with the older names of config keys.

Knows: those names, the learned positions, biases and shared key/value heads of each family. Does not know: gated
decoders (`hf_decoder.py`) or hybrids (`hf_hybrids.py`).

>>> config = Config(data={"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 128}, where="config.json")
>>> [layer.kind for layer in classic(config, Classic())]
['embedding', 'block', 'block', 'head']
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from octopipe.base.errors import OctoPipeError
from octopipe.models.readers.hf_decoder import Config
from octopipe.models.spec import Activation, Attention, Block, Embedding, Head, Layer, Mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class Classic:
    """How a family differs from GPT-2."""

    positions: int | None = 0
    """Learned positions beyond those that the config names (OPT has two more); None: the family has none."""
    attention_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    tied: bool = True
    """Default of tie_word_embeddings."""


CLASSICS: Mapping[str, Classic] = MappingProxyType(
    {
        "gpt2": Classic(),
        "gpt-sw3": Classic(),
        "gpt_bigcode": Classic(),
        "gpt_neo": Classic(attention_bias=False),
        "gptj": Classic(positions=None, attention_bias=False, out_bias=False, tied=False),
        "codegen": Classic(positions=None, attention_bias=False, out_bias=False, tied=False),
        "gpt_neox": Classic(positions=None, tied=False),
        "bloom": Classic(positions=None),
        "falcon": Classic(positions=None, attention_bias=False, out_bias=False, mlp_bias=False),
        "mpt": Classic(positions=None, attention_bias=False, out_bias=False, mlp_bias=False),
        "opt": Classic(positions=2),
        "biogpt": Classic(positions=2),
        "openai-gpt": Classic(),
        "phi": Classic(positions=None, tied=False),
        "persimmon": Classic(positions=None, tied=False),
        "starcoder2": Classic(positions=None),
    }
)
"""The model types that are read this way."""


def classic(config: Config, family: Classic) -> tuple[Layer, ...]:
    """Return the layers of such a decoder: embedding, equal blocks, and head."""
    h = config.size("hidden_size", "n_embd", "d_model")
    heads = config.size("num_attention_heads", "n_head", "num_heads", "n_heads")
    vocab = config.size("vocab_size", default=50257)
    blocks = config.count("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if (width := config.size("word_embed_proj_dim", default=h)) != h:  # OPT-350M
        raise OctoPipeError(
            f'{config.where}: "word_embed_proj_dim" is {width}, and "hidden_size" {h}: an embedding with '
            "a projection has no analytic cost; `octopipe profile` measures the model itself"
        )
    bias = config.flag("attention_bias", "qkv_bias", "use_bias", "bias", default=family.attention_bias)
    mixer = Attention(
        hidden=h,
        heads=heads,
        kv_heads=_kv_heads(config, heads),
        head_dim=h // heads if heads else 0,
        rotary_dim=None,
        qkv_bias=bias,
        out_bias=config.flag("use_bias", "bias", default=family.out_bias),
        norm="layer",
    )
    mlp = Mlp(
        hidden=h,
        ffn=config.size("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", default=_inner(config, h)),
        activation=_activation(config),
        bias=config.flag("use_bias", "bias", default=family.mlp_bias),
        norm="layer",
    )
    positions = 0
    if family.positions is not None:
        positions = config.size("n_positions", "max_position_embeddings", default=1024) + family.positions
    tied = config.flag("tie_word_embeddings", default=family.tied)
    return (
        Embedding(hidden=h, vocab=vocab, positions=positions),
        *[Block(mixer=mixer, ffn=mlp)] * blocks,
        Head(hidden=h, vocab=vocab, tied=tied, norm="layer"),
    )


def _kv_heads(config: Config, heads: int) -> int:
    """Return the number of key/value heads, which Falcon and StarCoder (gpt_bigcode) state with keys of their own."""
    if config.get("model_type") == "falcon":
        if config.flag("new_decoder_architecture"):
            return config.size("num_kv_heads", default=heads)
        return 1 if config.flag("multi_query", default=True) else heads
    if config.get("model_type") == "gpt_bigcode":
        return 1 if config.flag("multi_query", default=True) else heads
    nested = config.part("attn_config")
    return config.size("num_key_value_heads", default=nested.size("kv_n_heads", default=heads))


def _inner(config: Config, hidden: int) -> int:
    """Return the width of the MLP if the config does not state it directly."""
    return config.size("expansion_ratio", default=4) * hidden


def _activation(config: Config) -> Activation:
    name = str(config.get("hidden_act", "activation_function", "activation", "afn") or "gelu")
    if name == "relu2":
        return "relu2"
    return "relu" if name == "relu" else "silu" if name in ("silu", "swish") else "gelu"

"""Hugging Face decoders with state-space layers: Nemotron-H, Jamba, Bamba, Granite 4, Mamba and Mamba-2.

Knows: where each family keeps its pattern of layers and the sizes of its state-space mixers. Does not know: decoders
with attention only (`hf_decoder.py`, `hf_classic.py`), or which model type a config has (`hf_config.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from octopipe.base.errors import OctoPipeError
from octopipe.base.limits import MAX_LAYERS
from octopipe.models.readers.hf_decoder import Config
from octopipe.models.spec import Attention, Block, Embedding, Head, Layer, Mamba1, Mamba2, Mlp, Moe

_SYMBOLS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "#",
}


def nemotron_h(config: Config) -> tuple[Layer, ...]:
    h, vocab = config.hidden, config.size("vocab_size", default=131072)
    types = config.items("layers_block_type", "layer_types")
    if types is not None:
        pattern = [_SYMBOLS.get(str(item), "?") for item in types]
    else:
        pattern = [("#" if symbol == "E" else symbol) for symbol in str(config.get("hybrid_override_pattern") or "")]
    if len(pattern) > MAX_LAYERS:
        raise OctoPipeError(f"{config.where}: {len(pattern)} layers; at most {MAX_LAYERS} are allowed")
    if not pattern or not set(pattern) <= set("M-*#"):
        raise OctoPipeError(f'{config.where}: "hybrid_override_pattern" must be letters M, -, * and E (one per layer)')
    mlp = config.size("intermediate_size", default=21504)
    kinds: dict[str, Callable[[], Layer]] = {
        "M": lambda: Mamba2(
            hidden=h,
            heads=config.size("mamba_num_heads", default=128),
            head_dim=config.size("mamba_head_dim", default=64),
            state=config.size("ssm_state_size", default=128),
            groups=config.size("n_groups", "mamba_n_groups", default=8),
            conv=config.size("conv_kernel", "mamba_d_conv", default=4),
            chunk=config.size("chunk_size", "mamba_chunk_size", default=128),
        ),
        "-": lambda: Mlp(hidden=h, ffn=mlp, activation="relu2", bias=config.flag("mlp_bias")),
        "*": lambda: Attention(
            hidden=h,
            heads=config.size("num_attention_heads"),
            kv_heads=config.size("num_key_value_heads", default=8),
            head_dim=config.size("head_dim", "attention_head_dim", default=128),
            qkv_bias=config.flag("attention_bias"),
            out_bias=config.flag("attention_bias"),
        ),
        "#": lambda: Moe(
            hidden=h,
            experts=config.size("n_routed_experts"),
            top_k=config.size("num_experts_per_tok"),
            ffn=config.size("moe_intermediate_size"),
            activation="relu2",
            shared_ffn=config.size("moe_shared_expert_intermediate_size", default=0),
            latent=config.size("moe_latent_size", default=0),
        ),
    }
    built = {symbol: kinds[symbol]() for symbol in set(pattern)}
    tied = config.flag("tie_word_embeddings")
    return (
        Embedding(hidden=h, vocab=vocab),
        *(built[symbol] for symbol in pattern),
        Head(hidden=h, vocab=vocab, tied=tied),
    )


def jamba(config: Config) -> tuple[Layer, ...]:
    h, vocab = config.hidden, config.size("vocab_size", default=65536)
    heads = config.size("num_attention_heads")
    rank = config.get("mamba_dt_rank")
    auto = rank is None or rank == "auto"
    mamba = Mamba1(
        hidden=h,
        inner=h * config.size("mamba_expand", default=2),
        state=config.size("mamba_d_state", default=16),
        dt_rank=math.ceil(h / 16) if auto else config.size("mamba_dt_rank"),
        conv=config.size("mamba_d_conv", default=4),
    )
    attention = Attention(
        hidden=h,
        heads=heads,
        kv_heads=config.size("num_key_value_heads", default=8),
        head_dim=h // heads if heads else 0,
    )
    mlp = Mlp(hidden=h, ffn=config.size("intermediate_size"))
    experts = config.size("num_experts", default=16)
    moe: Mlp | Moe = mlp
    if experts > 1:
        top_k = config.size("num_experts_per_tok", default=2)
        moe = Moe(hidden=h, experts=experts, top_k=top_k, ffn=mlp.ffn)
    attention_at = config.size("attn_layer_period", default=8), config.size("attn_layer_offset", default=4)
    experts_at = config.size("expert_layer_period", default=2), config.size("expert_layer_offset", default=1)
    layers: list[Layer] = [Embedding(hidden=h, vocab=vocab)]
    for i in range(config.blocks):
        layers.append(attention if i % max(1, attention_at[0]) == attention_at[1] else mamba)
        layers.append(moe if i % max(1, experts_at[0]) == experts_at[1] else mlp)
    return (*layers, Head(hidden=h, vocab=vocab, tied=config.flag("tie_word_embeddings")))


def bamba(config: Config) -> tuple[Layer, ...]:
    """Bamba: blocks of Mamba-2, or of attention at the positions that the config lists, each with a gated MLP."""
    places = config.items("attn_layer_indices") or []
    mlp = Mlp(hidden=config.hidden, ffn=config.size("intermediate_size"), bias=config.flag("mlp_bias"))
    mixers: dict[bool, Layer] = {True: _attention(config), False: _mamba2(config)}
    blocks = [Block(mixer=mixers[i in places], ffn=mlp) for i in range(config.blocks)]
    return _framed(config, blocks)


def granite_hybrid(config: Config) -> tuple[Layer, ...]:
    """Granite 4: blocks of Mamba-2 or attention, with experts and a shared expert, or with only the shared expert."""
    h, shared = config.hidden, config.size("shared_intermediate_size", default=1024)
    experts = config.size("num_local_experts", default=8)
    ffn: Mlp | Moe = Mlp(hidden=h, ffn=shared)
    if experts > 0:
        width, top_k = config.size("intermediate_size"), config.size("num_experts_per_tok", default=2)
        ffn = Moe(hidden=h, experts=experts, top_k=top_k, ffn=width, shared_ffn=shared)
    given = config.items("layer_types", "layers_block_type") or ["mamba"] * config.blocks
    types = [_SYMBOLS.get(str(item), "?") for item in given]
    if len(types) != config.blocks or not set(types) <= {"M", "*"}:
        raise OctoPipeError(
            f'{config.where}: "layer_types" must name mamba or attention for each of the {config.blocks} layers'
        )
    mixers: dict[str, Layer] = {"*": _attention(config), "M": _mamba2(config)}
    return _framed(config, [Block(mixer=mixers[kind], ffn=ffn) for kind in types])


def mamba(config: Config) -> tuple[Layer, ...]:
    """Mamba and Falcon-Mamba: only selective scans."""
    h = config.hidden
    rank = config.get("time_step_rank")
    mixer = Mamba1(
        hidden=h,
        inner=config.size("intermediate_size", default=h * config.size("expand", default=2)),
        state=config.size("state_size", default=16),
        dt_rank=math.ceil(h / 16) if rank in (None, "auto") else config.size("time_step_rank"),
        conv=config.size("conv_kernel", default=4),
        inner_norms=False,
    )
    return _framed(config, [mixer] * config.blocks, tied=config.get("model_type") == "mamba")


def mamba2(config: Config) -> tuple[Layer, ...]:
    """Mamba-2: only Mamba-2 mixers."""
    mixer = Mamba2(
        hidden=config.hidden,
        heads=config.size("num_heads", default=128),
        head_dim=config.size("head_dim", default=64),
        state=config.size("state_size", default=128),
        groups=config.size("n_groups", default=8),
        conv=config.size("conv_kernel", default=4),
        chunk=config.size("chunk_size", default=256),
    )
    return _framed(config, [mixer] * config.blocks)


def _mamba2(config: Config) -> Mamba2:
    """Return the Mamba-2 mixer of a config that names its sizes as Bamba and Granite do."""
    heads = config.size("mamba_n_heads", default=128)
    inner = config.size("mamba_expand", default=2) * config.hidden
    auto = config.get("mamba_d_head") in (None, "auto")
    return Mamba2(
        hidden=config.hidden,
        heads=heads,
        head_dim=inner // max(1, heads) if auto else config.size("mamba_d_head"),
        state=config.size("mamba_d_state", default=256),
        groups=config.size("mamba_n_groups", default=1),
        conv=config.size("mamba_d_conv", default=4),
        chunk=config.size("mamba_chunk_size", default=256),
    )


def _attention(config: Config) -> Attention:
    heads, bias = config.size("num_attention_heads"), config.flag("attention_bias")
    return Attention(
        hidden=config.hidden,
        heads=heads,
        kv_heads=config.size("num_key_value_heads", default=heads),
        head_dim=config.size("head_dim", default=config.hidden // heads if heads else 0),
        rope_theta=config.number("rope_theta", default=10000.0),
        qkv_bias=bias,
        out_bias=bias,
    )


def _framed(config: Config, layers: Sequence[Layer], *, tied: bool = False) -> tuple[Layer, ...]:
    h, vocab = config.hidden, config.size("vocab_size")
    tied = config.flag("tie_word_embeddings", default=tied)
    return (Embedding(hidden=h, vocab=vocab), *layers, Head(hidden=h, vocab=vocab, tied=tied))


HYBRIDS: Mapping[str, Callable[[Config], tuple[Layer, ...]]] = MappingProxyType(
    {
        "nemotron_h": nemotron_h,
        "jamba": jamba,
        "bamba": bamba,
        "granitemoehybrid": granite_hybrid,
        "mamba": mamba,
        "falcon_mamba": mamba,
        "mamba2": mamba2,
    }
)
"""The reader of each model type."""

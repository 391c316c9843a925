"""Any Hugging Face `config.json` of a decoder -> ModelSpec, read as plain JSON.

Knows: the keys of the families in `FAMILIES`, the defaults their configs leave out, and the common keys of
all decoders, so that an unknown family is read as a usual decoder. Does not know: transformers (never
imported) or weights. A config with a vision tower or an encoder is refused.

>>> spec = from_config({"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128,
...                     "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2})
>>> spec.pattern
'ETTTL'
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief, letters, read_json_object, shown, stem_of
from octopipe.base.limits import MAX_LAYERS
from octopipe.models.readers.hf_decoder import Config, Family, decoder
from octopipe.models.spec import (
    Attention,
    Block,
    Embedding,
    Head,
    Layer,
    Mamba1,
    Mamba2,
    Mlp,
    ModelSpec,
    Moe,
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(),
        "mistral": Family(window_always=True),
        "mixtral": Family(window_always=True, top_k=2),
        "qwen2": Family(qkv_bias=True, out_bias=False),
        "qwen2_moe": Family(qkv_bias=True, out_bias=False, shared_gate=True, top_k=4),
        "qwen3": Family(qk_norm=True, head_dim=128),
        "qwen3_moe": Family(qk_norm=True, top_k=8),
        "qwen3_next": Family(
            qk_norm=True, gated_attention=True, full_every=4, shared_gate=True, head_dim=256, top_k=10
        ),
        "qwen3_5_text": Family(qk_norm=True, gated_attention=True, full_every=4, head_dim=256),
        "qwen3_5_moe_text": Family(
            qk_norm=True, gated_attention=True, full_every=4, shared_gate=True, head_dim=256, top_k=10
        ),
        "gpt_oss": Family(qkv_bias=True, full_every=2, moe_bias=True, sinks=True, head_dim=64, top_k=4),
        "gemma": Family(tied=True, activation="geglu", embedding_multiplier=True, head_dim=256),
        "gemma2": Family(
            tied=True,
            activation="geglu",
            full_every=2,
            post_norm=True,
            embedding_multiplier=True,
            head_dim=256,
        ),
        "gemma3_text": Family(
            tied=True,
            activation="geglu",
            full_every=6,
            qk_norm=True,
            post_norm=True,
            embedding_multiplier=True,
            head_dim=256,
        ),
        "glm4_moe": Family(out_bias=False, head_dim=128, top_k=8, dense_first=1, shared=1),
        "deepseek_v2": Family(),
        "deepseek_v3": Family(top_k=8, dense_first=3, shared=1),
        "kimi_k2": Family(top_k=8, dense_first=1, shared=1),
        "kimi_linear": Family(top_k=8, dense_first=1, shared=1),
        "minimax": Family(full_every=2, linear_first=False, top_k=2),
        "minimax_text_01": Family(full_every=8, top_k=2),
    }
)
"""Model types read by the common decoder below; GPT-2, Nemotron-H and Jamba have readers of their own."""


def from_config(
    source: str | Path | Mapping[str, object], *, name: str | None = None, where: str | None = None
) -> ModelSpec:
    """The model a config describes: a path to `config.json` (or its folder), or the decoded object."""
    if isinstance(source, Mapping):
        data, where, name = source, where or "config", name if name is None else letters(name)
    else:
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        data, where = read_json_object(path), where or shown(path)
        name = name or (letters(path.parent.name) if path.name == "config.json" else stem_of(path))
    refuse_towers(data, where)
    outer = Config(data=data, where=where)
    config = outer.part("text_config") if isinstance(data.get("text_config"), dict) else outer
    _check_decoder(outer)
    kind = str(config.get("model_type") or outer.get("model_type") or "decoder")
    try:
        return _read(config, kind, name or kind)
    except OctoPipeError as error:
        text = str(error)  # a layer's own complaint does not know the file
        raise OctoPipeError(text if text.startswith(where) else f"{where}: {text}") from None
    except (ArithmeticError, ValueError) as error:
        why = " ".join(str(error).split())[:120]
        raise OctoPipeError(f"{where}: its numbers make no model ({why}); check the sizes") from None


def _read(config: Config, kind: str, name: str) -> ModelSpec:
    reader = READERS.get(kind)
    if reader is None:
        alien = [key for key in config.data if str(key).startswith(("mamba_", "ssm_", "rwkv"))]
        if kind not in FAMILIES and alien:
            raise OctoPipeError(
                f"{config.where}: model type {brief(kind)} has layers this reader does not know "
                f"({brief(sorted(alien)[0])}); known: {', '.join(sorted({*FAMILIES, *READERS}))}"
            )
        if kind not in FAMILIES and kind != "decoder":
            log.warning(
                "%s: model type %s is not known here: read as a usual decoder with a gated MLP, which it may not be; "
                "`octopipe profile` measures the model itself",
                config.where,
                brief(kind),
            )
        layers = decoder(config, FAMILIES.get(kind, Family()))
    else:
        layers = reader(config)
    eps = config.number("rms_norm_eps", "layer_norm_epsilon", "norm_eps", default=1e-5)
    return ModelSpec(name=name, layers=layers, norm_eps=eps)


log = logging.getLogger("octopipe.readers")
TOWERS = ("vision", "visual", "image", "video", "audio", "speech", "qformer", "perceiver", "vq_", "encoder_config")
"""How keys begin (or, for LLaVA's own, go on after `mm_`) whose value describes another tower than the decoder."""
ENCODERS = frozenset(
    """
    albert bart bert bigbird_pegasus blenderbot blenderbot-small camembert canine clip convbert data2vec-text
    deberta deberta-v2 dinov2 distilbert electra ernie esm flaubert fnet funnel hubert ibert layoutlm
    layoutlmv2 layoutlmv3 led longformer longt5 luke m2m_100 marian mbart megatron-bert mobilebert modernbert
    mpnet mt5 mvp nezha nllb-moe nomic_bert nystromformer pegasus pegasus_x plbart prophetnet qdqbert rembert
    roberta roberta-prelayernorm roc_bert roformer seamless_m4t siglip speech_to_text speecht5 squeezebert
    switch_transformers t5 tapas trocr udop umt5 vit wav2vec2 whisper xlm-prophetnet xlm-roberta
    xlm-roberta-xl xmod yoso
    """.split()  # noqa: SIM905
)
"""Model types whose usual models are encoders or encoder-decoders."""


def refuse_towers(data: Mapping[str, object], where: str) -> None:
    """Say so where a config describes more than a decoder: nothing is left out of a plan in silence."""
    for key, value in data.items():
        name = str(key).removeprefix("mm_")
        tower = isinstance(value, dict) or (isinstance(value, str) and str(key).startswith("mm_"))
        if tower and value and name.startswith(TOWERS):
            raise OctoPipeError(
                f'{where}: "{key}" is a part beside the decoder (a tower or an encoder), which cannot be planned or '
                "trained yet; give the config of the text model alone"
            )
    for key in ("encoder", "decoder"):
        if isinstance(data.get(key), dict):
            raise OctoPipeError(f'{where}: "{key}" makes it an encoder-decoder; give the config of a causal LM')


def _check_decoder(config: Config) -> None:
    kind = str(config.get("model_type"))
    if kind in ENCODERS:
        raise OctoPipeError(f"{config.where}: {kind} is an encoder (or has one); give the config of a causal LM")
    names = [str(item) for item in config.items("architectures") or []]
    good = ("CausalLM", "LMHead", "ConditionalGeneration")
    if config.flag("is_encoder_decoder") or (names and not any(g in n for n in names for g in good)):
        shown_name = brief(names[0]) if names else "an encoder-decoder"
        raise OctoPipeError(f"{config.where}: {shown_name} is not a decoder; give the config of a causal LM")


# The families that are built differently.


def _gpt2(config: Config) -> tuple[Layer, ...]:
    h, heads, vocab = config.hidden, config.size("n_head"), config.size("vocab_size", default=50257)
    positions = config.size("n_positions", default=1024)
    mixer = Attention(
        hidden=h,
        heads=heads,
        kv_heads=heads,
        head_dim=h // heads if heads else 0,
        qkv_bias=True,
        out_bias=True,
        norm="layer",
    )
    ffn = config.size("n_inner", default=4 * h)
    block = Block(mixer=mixer, ffn=Mlp(hidden=h, ffn=ffn, activation="gelu", bias=True, norm="layer"))
    return (
        Embedding(hidden=h, vocab=vocab, positions=positions),
        *[block] * config.blocks,
        Head(hidden=h, vocab=vocab, tied=config.flag("tie_word_embeddings", default=True), norm="layer"),
    )


_NEMOTRON_TYPES = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "#",
}


def _nemotron_h(config: Config) -> tuple[Layer, ...]:
    h, vocab = config.hidden, config.size("vocab_size", default=131072)
    types = config.items("layers_block_type", "layer_types")
    if types is not None:
        pattern = [_NEMOTRON_TYPES.get(str(item), "?") for item in types]
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


def _jamba(config: Config) -> tuple[Layer, ...]:
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


READERS: Mapping[str, Callable[[Config], tuple[Layer, ...]]] = MappingProxyType(
    {"gpt2": _gpt2, "nemotron_h": _nemotron_h, "jamba": _jamba}
)

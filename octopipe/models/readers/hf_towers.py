"""Configs of vision-language models, audio-language models and encoder-decoders -> the layers of a ModelSpec.

Knows: the keys that towers of transformers' models have in common, how many tokens an image or a recording becomes, and
the keys of encoder-decoders built like T5 and like BART. Does not know: the text model's own keys (`hf_decoder.py`),
models with two towers (`hf_two_towers.py`), or transformers, which is never imported.

The layers are in the order in which `octopipe.huggingface.layers` divides the same model, one for each of its pieces,
so that a plan made from a config is a plan for the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief
from octopipe.base.limits import MAX_LAYERS
from octopipe.models.readers.hf_decoder import Config
from octopipe.models.spec import Activation, Attention, Block, Embedding, Head, Layer, Mlp
from octopipe.models.towers import CrossAttention, CrossBlock, Join, Projection, Projector, Source, TowerLayer

ANY_SIZE_TOKENS = 1024
"""Tokens of an image for models that take images of any size (our choice; an image of 896 x 896 pixels for Qwen2.5-VL).
The set-up's encoder_seq overrides it."""
GATED = ("qwen2_5_vl", "pixtral", "glm4v", "qwen2_5_omni_vision")
"""The beginnings of the model types of towers whose feed-forward layers have a gate."""
TEXT_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "mistral": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000,
    },
    "qwen2": {"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32},
    "gemma": {
        "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 256000,
    },
    "gemma3_text": {
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "sliding_window": 4096,
    },
    "qwen2_5_omni_text": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064,
    },
    "qwen3_omni_moe_text": {
        "hidden_size": 2048, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 3584, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}  # fmt: skip
"""Sizes that published configs leave out of their text part because they are the family's defaults."""
TEXT_FAMILIES = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe",
}
"""The model types of text parts that are built like another family, and that family."""
T5_LIKE = frozenset(("t5", "mt5", "umt5"))
BART_LIKE = frozenset(
    ("bart", "mbart", "marian", "pegasus", "m2m_100", "plbart", "mvp", "blenderbot", "blenderbot-small", "whisper")
)
Text = Callable[[Config, str], tuple[Layer, ...]]
"""A function that reads the layers of a text model from its config and its model type."""


def towers_of(config: Config) -> list[Config]:
    """Return the parts of a config that describe a vision and an audio tower."""
    keys = ("vision_config", "audio_config")
    return [config.part(key) for key in keys if isinstance(config.get(key), dict) and config.get(key)]


def text_of(config: Config) -> tuple[Config, str]:
    """Return the text part with the defaults of its family, and its model type.

    Older configs have the keys of the text part at the top level.
    """
    inner = config.part("text_config") if isinstance(config.get("text_config"), dict) else config
    named = str(inner.get("model_type") or "decoder")
    kind = TEXT_FAMILIES.get(named, named)
    defaults = TEXT_DEFAULTS.get(named, TEXT_DEFAULTS.get(kind, {}))
    data = {**defaults, **{k: v for k, v in inner.data.items() if v is not None}}
    if "vocab_size" not in data and config.has("vocab_size"):
        data["vocab_size"] = config.get("vocab_size")
    if config.has("tie_word_embeddings") and "tie_word_embeddings" not in data:
        data["tie_word_embeddings"] = config.get("tie_word_embeddings")
    return Config(data=data, where=inner.where), kind


def with_tower(config: Config, tower: Config, read_text: Text) -> tuple[Layer, ...]:
    """Return the layers of a tower, the layer that joins its output, and the decoder's layers."""
    text, kind = text_of(config)
    embedding, *blocks, head = read_text(text, kind)
    assert isinstance(embedding, Embedding)
    audio = tower.where.endswith("audio_config")
    source = _recordings(config, tower) if audio else images_of(config, tower)
    first = _stem(tower, source) if audio else _patches(config, tower, source)
    projector = projector_of(config, tower, embedding.hidden)
    join = Join(hidden=embedding.hidden, embedding=embedding, projectors=(projector,), source=source)
    decoder = with_late_features(tower, projector, source, blocks)
    kind = str(tower.get("model_type") or config.get("model_type") or "")
    return (first, *(TowerLayer(inner=b, source=source) for b in tower_blocks(tower, kind)), join, *decoder, head)


def with_late_features(tower: Config, projector: Projector, source: Source, blocks: Sequence[Layer]) -> list[Layer]:
    """Return the decoder's blocks, with the layers that add features of the tower's inner layers behind the first of
    them (Qwen3-VL)."""
    count = len(tower.items("deepstack_visual_indexes") or [])
    more = Join(hidden=projector.hidden, projectors=(projector,), source=source)
    decoder: list[Layer] = []
    for i, block in enumerate(blocks):
        decoder += [block, more] if i < count else [block]
    return decoder


def images_of(config: Config, tower: Config) -> Source:
    patch = _side(tower, "patch_size")
    merge = max(1, tower.size("spatial_merge_size", default=config.size("spatial_merge_size", default=1)))
    free = tower.has("spatial_merge_size") or str(tower.get("model_type")) == "pixtral"
    if free:
        return Source(kind="image", positions=ANY_SIZE_TOKENS * merge**2, tokens=ANY_SIZE_TOKENS, free=True)
    patches = (_side(tower, "image_size") // patch) ** 2
    if not patches:
        raise OctoPipeError(f'{tower.where}: "patch_size" is {patch}, more than the image; check the sizes')
    said = config.get("mm_tokens_per_image", "image_seq_length", "num_image_tokens")
    shrunk = config.number("downsample_ratio", default=0.0) or 1.0 / max(
        1.0, config.number("downsample_factor", "scale_factor", default=1.0)
    )
    tokens = int(said) if isinstance(said, int) and not isinstance(said, bool) else round(patches * shrunk**2)
    return Source(kind="image", positions=patches, tokens=max(1, min(tokens, patches)))


def _recordings(config: Config, tower: Config) -> Source:
    frames = tower.size("max_source_positions", default=1500)
    return Source(kind="audio", positions=frames, tokens=max(1, frames // 2))


def _side(tower: Config, key: str) -> int:
    value = tower.get(key)
    first = value[0] if isinstance(value, list) and value else value
    return Config(data={key: first}, where=tower.where).size(key)


def width_of(tower: Config) -> int:
    return tower.size("embed_dim", "d_model", "hidden_size")


def pixels_of(tower: Config) -> int:
    """Return the number of values of a patch."""
    pixels = tower.size("in_channels", "in_chans", "num_channels", default=3) * _side(tower, "patch_size") ** 2
    return pixels * max(1, tower.size("temporal_patch_size", default=1))


def _patches(config: Config, tower: Config, source: Source) -> TowerLayer:
    width, pixels = width_of(tower), pixels_of(tower)
    learned = 0 if source.free else source.positions
    learned = tower.size("num_position_embeddings", default=learned)
    return TowerLayer(inner=Projection(hidden=width, width=pixels, positions=learned), source=source)


def _stem(tower: Config, source: Source) -> TowerLayer:
    """Return the first layer of an audio encoder: two convolutions over three frames each."""
    width, bins = width_of(tower), tower.size("num_mel_bins", default=80)
    inner = Projection(hidden=width, width=3 * bins + 3 * width, positions=source.positions)
    return TowerLayer(inner=inner, source=source)


def tower_blocks(tower: Config, kind: str) -> list[Block]:
    width = width_of(tower)
    count = tower.size("depth", "num_hidden_layers", "encoder_layers")
    if not 1 <= count <= MAX_LAYERS:
        raise OctoPipeError(f'{tower.where}: "num_hidden_layers" is {count}; give 1 to {MAX_LAYERS}')
    heads = tower.size("num_heads", "num_attention_heads", "encoder_attention_heads")
    ratio = tower.number("mlp_ratio", default=4.0)
    ffn = tower.size("intermediate_size", "encoder_ffn_dim", "mlp_dim", default=int(width * ratio))
    gated = kind.startswith(GATED)
    window = tower.size("window_size", default=0) // max(
        1, _side(tower, "patch_size") if tower.has("patch_size") else 1
    )
    full = tower.items("fullatt_block_indexes", "global_attn_indexes")
    attention = Attention(
        hidden=width,
        heads=heads,
        kv_heads=heads,
        head_dim=tower.size("head_dim", default=width // heads if heads else 0),
        qkv_bias=not gated or tower.has("window_size"),
        out_bias=not gated or tower.has("window_size"),
        norm="rms" if gated else "layer",
        causal=False,
    )
    activation: Activation = "swiglu" if gated else "gelu"
    mlp = Mlp(
        hidden=width,
        ffn=ffn,
        activation=activation,
        bias=not gated or tower.has("window_size"),
        norm="rms" if gated else "layer",
    )
    narrow = replace(attention, window=window**2) if window and full is not None else attention
    return [Block(mixer=attention if full is None or i in full else narrow, ffn=mlp) for i in range(count)]


def projector_of(config: Config, tower: Config, hidden: int) -> Projector:
    width = width_of(tower)
    merge = max(1, tower.size("spatial_merge_size", default=1)) ** 2
    bias = config.flag("multimodal_projector_bias", default=not config.has("mm_tokens_per_image"))
    if merge > 1:  # neighbouring patches are concatenated and pass through a feed-forward of that width
        return Projector(hidden=hidden, width=merge * width, ffn=merge * width)
    if config.has("mm_tokens_per_image") or str(config.get("model_type")) in ("paligemma", "qwen2_audio"):
        return Projector(hidden=hidden, width=width, bias=bias)
    ratio = config.number("downsample_ratio", default=0.0)
    joined = (
        round(1 / ratio**2) if ratio else round(config.number("downsample_factor", "scale_factor", default=1.0)) ** 2
    )
    return Projector(hidden=hidden, width=max(1, joined) * width, ffn=hidden, bias=bias)


# -- encoder-decoders --------------------------------------------------------------------------------------------------


def encoder_decoder(config: Config) -> tuple[Layer, ...] | None:
    """Return the layers of an encoder-decoder, or None if the config describes none."""
    kind = str(config.get("model_type"))
    if kind in T5_LIKE:
        return _t5(config)
    if kind in BART_LIKE:
        return _bart(config, kind)
    if config.flag("is_encoder_decoder") or any(isinstance(config.get(key), dict) for key in ("encoder", "decoder")):
        raise OctoPipeError(
            f"{config.where}: the encoder-decoder {brief(kind)} cannot be read from a config; `octopipe profile` "
            f"measures the model itself, and its profile is a MODEL (known: {', '.join(sorted(T5_LIKE | BART_LIKE))})"
        )
    return None


def _t5(config: Config) -> tuple[Layer, ...]:
    width, vocab = config.size("d_model", default=512), config.size("vocab_size", default=32128)
    heads, head_dim = config.size("num_heads", default=8), config.size("d_kv", default=64)
    encoder = config.size("num_layers", default=6)
    decoder = config.size("num_decoder_layers", default=encoder)
    form = str(config.get("feed_forward_proj") or ("relu" if config.get("model_type") == "t5" else "gated-gelu"))
    activation: Activation = ("geglu" if "gelu" in form else "swiglu") if "gated" in form else "relu"
    mlp = Mlp(hidden=width, ffn=config.size("d_ff", default=2048), activation=activation)
    attention = Attention(hidden=width, heads=heads, kv_heads=heads, head_dim=head_dim)
    source = Source(kind="text", positions=config.size("n_positions", default=512), free=True)
    cross = CrossAttention(hidden=width, heads=heads, kv_heads=heads, head_dim=head_dim, memory=width, source=source)
    table = Embedding(hidden=width, vocab=vocab)
    return _stacks(
        TowerLayer(inner=table, source=source),
        [Block(mixer=replace(attention, causal=False), ffn=mlp)] * _counted(config, "num_layers", encoder),
        Join(hidden=width, embedding=table, source=source, tied=True),
        [CrossBlock(mixer=attention, cross=cross, ffn=mlp)] * _counted(config, "num_decoder_layers", decoder),
        Head(hidden=width, vocab=vocab, tied=config.flag("tie_word_embeddings", default=True)),
    )


def _bart(config: Config, kind: str) -> tuple[Layer, ...]:
    width, vocab = config.size("d_model"), config.size("vocab_size")
    audio = config.has("num_mel_bins")
    positions = config.size("max_position_embeddings", "max_target_positions", default=1024)
    frames = config.size("max_source_positions", default=positions)
    source = Source(kind="audio" if audio else "text", positions=frames, free=not audio)

    def attention(side: str, *, causal: bool) -> Attention:
        heads = config.size(f"{side}_attention_heads")
        dim = width // heads if heads else 0
        return Attention(
            hidden=width, heads=heads, kv_heads=heads, head_dim=dim, qkv_bias=True, out_bias=True, norm="layer",
            causal=causal,
        )  # fmt: skip

    def mlp(side: str) -> Mlp:
        ffn = config.size(f"{side}_ffn_dim")
        return Mlp(hidden=width, ffn=ffn, activation="gelu", bias=True, norm="layer")

    inner = attention("decoder", causal=True)
    cross = CrossAttention(
        hidden=width, heads=inner.heads, kv_heads=inner.heads, head_dim=inner.head_dim, memory=width, source=source,
        bias=True,
    )  # fmt: skip
    sinusoid = kind in ("marian", "pegasus", "m2m_100")  # computed, not learned
    learned = 0 if sinusoid else (config.size("max_target_positions", default=448) if audio else positions)
    table = Embedding(hidden=width, vocab=vocab, positions=learned)
    first = _stem(config, source) if audio else TowerLayer(inner=table, source=source)
    return _stacks(
        first,
        [Block(mixer=attention("encoder", causal=False), ffn=mlp("encoder"))]
        * _counted(config, "encoder_layers", config.size("encoder_layers")),
        Join(hidden=width, embedding=table, source=source, tied=not audio),
        [CrossBlock(mixer=inner, cross=cross, ffn=mlp("decoder"))]
        * _counted(config, "decoder_layers", config.size("decoder_layers")),
        Head(hidden=width, vocab=vocab, tied=config.flag("tie_word_embeddings", default=True), norm="layer"),
    )


def _counted(config: Config, key: str, count: int) -> int:
    if not 1 <= count <= MAX_LAYERS:
        raise OctoPipeError(f'{config.where}: "{key}" is {count}; give 1 to {MAX_LAYERS}')
    return count


def _stacks(
    first: TowerLayer, encoder: list[Block], join: Join, decoder: list[CrossBlock], head: Head
) -> tuple[Layer, ...]:
    known = {block: TowerLayer(inner=block, source=first.source) for block in set(encoder)}
    return (first, *(known[block] for block in encoder), join, *decoder, head)

"""The preset models: the paper's Table II, the two of its Figure 3 and current heterogeneous models.

Knows: layer patterns and dimensions, by name. Does not know: config files (`readers/`) or costs.

Dimensions come from the published configs or papers unless a comment says otherwise. Hybrid models count
mixer and feed-forward as separate layers, as the paper does; the others are partitioned block by block
(`ModelSpec.split` takes blocks apart).

>>> preset("nemotron-h-8b").pattern[:12], round(preset("llama3-8b").parameters / 1e9, 2)
('EM-M-M-M*-M-', 8.03)
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from octopipe.base.errors import OctoPipeError
from octopipe.models.readers.hf_config import from_config
from octopipe.models.spec import (
    Attention,
    Block,
    Embedding,
    GatedDeltaNet,
    Head,
    LatentAttention,
    Layer,
    LightningAttention,
    Mamba1,
    Mamba2,
    Mlp,
    ModelSpec,
    Moe,
    Mtp,
)
from octopipe.models.tower_presets import CONFIGS


def _model(
    name: str,
    *inner: Layer,
    vocab: int,
    tied: bool = False,
    embedding: Embedding | None = None,
    head: Head | None = None,
    norm_eps: float = 1e-5,
) -> ModelSpec:
    hidden = inner[0].hidden
    first = embedding or Embedding(hidden=hidden, vocab=vocab)
    last = head or Head(hidden=hidden, vocab=vocab, tied=tied)
    if any(isinstance(layer, Mtp) for layer in inner):
        last = replace(last, predictions=2)
    return ModelSpec(name=name, layers=(first, *inner, last), norm_eps=norm_eps)


def _nemotron_pattern(middle: int) -> str:
    return "M-M-M-M*-" + "M-M-M-M-M*-" * middle + "M-M-M-M-M-"


_NEMOTRON_47B = "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-"
_NEMOTRON_NANO_V2 = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
_NEMOTRON_3_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME".replace("E", "#")


def nemotron_h(
    name: str,
    *,
    pattern: str,
    hidden: int,
    ffn: int,
    heads: int,
    mamba_heads: int,
    mamba_dim: int = 64,
    state: int = 128,
    kv_heads: int = 8,
    moe: Moe | None = None,
) -> ModelSpec:
    """A Nemotron-H hybrid: Mamba-2, squared-ReLU MLP and attention without rotary positions."""
    kinds: dict[str, Layer] = {
        "M": Mamba2(hidden=hidden, heads=mamba_heads, head_dim=mamba_dim, state=state),
        "-": Mlp(hidden=hidden, ffn=ffn, activation="relu2"),
        "*": Attention(hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=128),
    }
    if moe is not None:
        kinds["#"] = moe
    return _model(name, *(kinds[symbol] for symbol in pattern), vocab=131072)


def llama(
    name: str,
    *,
    blocks: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int = 8,
    theta: float = 5e5,
    vocab: int = 128256,
) -> ModelSpec:
    """LLaMA 3 with these dimensions, or LLaMA 2 if `vocab` and `theta` are given accordingly."""
    block = Block(
        mixer=Attention(hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=128, rope_theta=theta),
        ffn=Mlp(hidden=hidden, ffn=ffn),
    )
    return _model(name, *[block] * blocks, vocab=vocab)


def nemotron_4(name: str, *, blocks: int, hidden: int, ffn: int, heads: int) -> ModelSpec:
    """Nemotron-4: squared ReLU without a gate, layer norms, grouped attention, half of every head rotated."""
    width = hidden // heads
    attention = Attention(
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        head_dim=width,
        rope_theta=1e4,
        rotary_dim=width // 2,
        norm="layer",
    )
    block = Block(mixer=attention, ffn=Mlp(hidden=hidden, ffn=ffn, activation="relu2", norm="layer"))
    vocab = 256000
    return _model(name, *[block] * blocks, vocab=vocab, head=Head(hidden=hidden, vocab=vocab, norm="layer"))


def qwen3_moe(name: str, *, blocks: int, hidden: int, heads: int, expert_ffn: int) -> ModelSpec:
    """Qwen3 with experts in every block: grouped attention with norms on queries and keys, 8 of 128 experts."""
    attention = Attention(hidden=hidden, heads=heads, kv_heads=4, head_dim=128, rope_theta=1e6, qk_norm=True)
    block = Block(mixer=attention, ffn=Moe(hidden=hidden, experts=128, top_k=8, ffn=expert_ffn))
    return _model(name, *[block] * blocks, vocab=151936, norm_eps=1e-6)


def gpt(
    name: str, *, blocks: int, hidden: int, heads: int, positions: int, vocab: int = 50257, bias: bool = True
) -> ModelSpec:
    """A GPT-2/3 decoder: biases, layer norms, learned positions, tied head."""
    attention = Attention(
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        qkv_bias=bias,
        out_bias=bias,
        norm="layer",
    )
    ffn = Mlp(hidden=hidden, ffn=4 * hidden, activation="gelu", bias=bias, norm="layer")
    return _model(
        name,
        *[Block(mixer=attention, ffn=ffn)] * blocks,
        vocab=vocab,
        embedding=Embedding(hidden=hidden, vocab=vocab, positions=positions),
        head=Head(hidden=hidden, vocab=vocab, tied=True, norm="layer"),
    )


def jamba(name: str, *, units: int, hidden: int, ffn: int, heads: int, experts: int, vocab: int) -> ModelSpec:
    """Jamba: units of eight blocks, one of them with attention, every second one with experts."""
    kinds: dict[str, Layer] = {
        "M": Mamba1(hidden=hidden, inner=2 * hidden, state=16, dt_rank=hidden // 16),
        "-": Mlp(hidden=hidden, ffn=ffn),
        "*": Attention(hidden=hidden, heads=heads, kv_heads=8, head_dim=128),
        "#": Moe(hidden=hidden, experts=experts, top_k=2, ffn=ffn),
    }
    pattern = "M-M#M-M#*-M#M-M#" * units
    return _model(name, *(kinds[symbol] for symbol in pattern), vocab=vocab, norm_eps=1e-6)


def deepseek(
    name: str, *, dense: int, sparse: int, heads: int, experts: int, vocab: int, mtp: bool, theta: float
) -> ModelSpec:
    """DeepSeek-V3 and similar models: latent attention, a few dense blocks, then experts, then token prediction."""
    hidden = 7168
    mixer = LatentAttention(
        hidden=hidden,
        heads=heads,
        q_rank=1536,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        v_dim=128,
        rope_theta=theta,
    )
    thin = Block(mixer=mixer, ffn=Mlp(hidden=hidden, ffn=18432))
    wide = Block(mixer=mixer, ffn=Moe(hidden=hidden, experts=experts, top_k=8, ffn=2048, shared_ffn=2048))
    tail = [Mtp(vocab=vocab, block=wide)] if mtp else []
    return _model(name, *[thin] * dense, *[wide] * sparse, *tail, vocab=vocab, norm_eps=1e-6)


def gpt_oss(name: str, *, blocks: int, experts: int) -> ModelSpec:
    """GPT-OSS: sliding and full attention in turn, experts everywhere."""
    hidden = 2880
    ffn = Moe(hidden=hidden, experts=experts, top_k=4, ffn=2880, bias=True)

    def block(window: int | None) -> Block:
        attention = Attention(
            hidden=hidden,
            heads=64,
            kv_heads=8,
            head_dim=64,
            window=window,
            rope_theta=150000.0,
            qkv_bias=True,
            out_bias=True,
            sinks=True,
        )
        return Block(mixer=attention, ffn=ffn)

    return _model(name, *[block(None if i % 2 else 128) for i in range(blocks)], vocab=201088)


def qwen3_next(name: str, *, units: int) -> ModelSpec:
    """Qwen3-Next: three gated delta nets, then one gated attention, experts everywhere."""
    hidden = 2048
    ffn = Moe(hidden=hidden, experts=512, top_k=10, ffn=512, shared_ffn=512, shared_gate=True)
    delta = GatedDeltaNet(hidden=hidden, key_heads=16, value_heads=32, key_dim=128, value_dim=128)
    attention = Attention(
        hidden=hidden,
        heads=16,
        kv_heads=2,
        head_dim=256,
        rope_theta=1e7,
        rotary_dim=64,
        qk_norm=True,
        gated=True,
    )
    unit = [Block(mixer=delta, ffn=ffn)] * 3 + [Block(mixer=attention, ffn=ffn)]
    return _model(name, *unit * units, vocab=151936, norm_eps=1e-6)


def minimax(name: str, *, units: int) -> ModelSpec:
    """MiniMax-01: seven lightning attentions, then one softmax attention, experts everywhere."""
    hidden = 6144
    ffn = Moe(hidden=hidden, experts=32, top_k=2, ffn=9216)
    lightning = LightningAttention(hidden=hidden, heads=64, head_dim=128)
    attention = Attention(hidden=hidden, heads=64, kv_heads=8, head_dim=128, rope_theta=1e7, rotary_dim=64)
    unit = [Block(mixer=lightning, ffn=ffn)] * 7 + [Block(mixer=attention, ffn=ffn)]
    return _model(name, *unit * units, vocab=200064)


def gemma3(name: str, *, blocks: int, hidden: int, ffn: int, heads: int, kv_heads: int) -> ModelSpec:
    """Gemma 3, text part: five local attentions, then a global one; norms before and after each layer."""
    vocab = 262208

    def block(local: bool) -> Block:
        attention = Attention(
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=128,
            window=1024 if local else None,
            rope_theta=1e4 if local else 1e6,
            qk_norm=True,
            post_norm=True,
        )
        return Block(mixer=attention, ffn=Mlp(hidden=hidden, ffn=ffn, activation="geglu", post_norm=True))

    return _model(
        name,
        *[block(bool((i + 1) % 6)) for i in range(blocks)],
        vocab=vocab,
        embedding=Embedding(hidden=hidden, vocab=vocab, multiplier=math.sqrt(hidden)),
        tied=True,
        norm_eps=1e-6,
    )


def glm(
    name: str,
    *,
    dense: int,
    sparse: int,
    hidden: int,
    ffn: int,
    expert_ffn: int,
    experts: int,
    qk_norm: bool,
) -> ModelSpec:
    """GLM-4.5: grouped attention with biases, a few dense blocks, then experts, then token prediction."""
    mixer = Attention(
        hidden=hidden,
        heads=96,
        kv_heads=8,
        head_dim=128,
        rope_theta=1e6,
        rotary_dim=64,
        qkv_bias=True,
        qk_norm=qk_norm,
    )
    thin = Block(mixer=mixer, ffn=Mlp(hidden=hidden, ffn=ffn))
    wide = Block(
        mixer=mixer,
        ffn=Moe(hidden=hidden, experts=experts, top_k=8, ffn=expert_ffn, shared_ffn=expert_ffn),
    )
    vocab = 151552
    return _model(name, *[thin] * dense, *[wide] * sparse, Mtp(vocab=vocab, block=wide), vocab=vocab)


_MOE_3_NANO = Moe(hidden=2688, experts=128, top_k=6, ffn=1856, activation="relu2", shared_ffn=3712)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One entry of the zoo: how to build it and a line about it."""

    build: Callable[[], ModelSpec]
    about: str

    def __call__(self) -> ModelSpec:
        return self.build()


def _presets() -> Mapping[str, Preset]:
    table: dict[str, Preset] = {}

    def add(name: str, about: str, build: Callable[..., ModelSpec], **dims: object) -> None:
        table[name] = Preset(build=partial(build, name, **dims), about=about)

    hybrid = "hybrid of Mamba-2, MLP and attention"
    g3, g9 = _nemotron_pattern(3), _nemotron_pattern(9)
    big = {"hidden": 8192, "heads": 64, "mamba_heads": 256, "state": 256}
    nano3 = {"hidden": 2688, "ffn": 1856, "heads": 32, "kv_heads": 2, "mamba_heads": 64, "moe": _MOE_3_NANO}
    nano2 = {"hidden": 4480, "ffn": 15680, "heads": 40, "mamba_heads": 128, "mamba_dim": 80}
    add("nemotron-h-4b", hybrid, nemotron_h, pattern=g3, hidden=3072, ffn=12288, heads=32, mamba_heads=112)
    add("nemotron-h-8b", hybrid, nemotron_h, pattern=g3, hidden=4096, ffn=21504, heads=32, mamba_heads=128)
    add("nemotron-h-47b", hybrid, nemotron_h, pattern=_NEMOTRON_47B, ffn=30720, **big)
    add("nemotron-h-56b", hybrid, nemotron_h, pattern=g9, ffn=32768, **big)
    add("nemotron-nano-v2-9b", hybrid, nemotron_h, pattern=_NEMOTRON_NANO_V2, **nano2)
    add("nemotron-3-nano-30b", f"{hybrid}, with experts", nemotron_h, pattern=_NEMOTRON_3_NANO, **nano3)

    dense = "dense transformer"
    add("llama3-8b", dense, llama, blocks=32, hidden=4096, ffn=14336, heads=32)
    # The paper's 32B is not a released LLaMA: these dimensions are our inference from its size.
    add("llama3-32b", dense, llama, blocks=64, hidden=6144, ffn=21504, heads=48)
    add("llama3-70b", dense, llama, blocks=80, hidden=8192, ffn=28672, heads=64)
    add("llama3.1-405b", dense, llama, blocks=126, hidden=16384, ffn=53248, heads=128)
    two = {"theta": 1e4, "vocab": 32000}
    add("llama2-7b", dense, llama, blocks=32, hidden=4096, ffn=11008, heads=32, kv_heads=32, **two)
    add("llama2-13b", dense, llama, blocks=40, hidden=5120, ffn=13824, heads=40, kv_heads=40, **two)
    add("llama2-70b", dense, llama, blocks=80, hidden=8192, ffn=28672, heads=64, **two)
    # GPT-3 5B is NVIDIA's benchmark model; 175B is the paper's. Nemotron-4: its technical report.
    add("gpt3-5b", dense, gpt, blocks=24, hidden=4096, heads=32, positions=2048)
    add("gpt3-175b", dense, gpt, blocks=96, hidden=12288, heads=96, positions=2048)
    add("nemotron-340b", dense, nemotron_4, blocks=96, hidden=18432, ffn=73728, heads=96)
    # From memory of the GPT-3 13B row; 4096 positions are our choice (the paper trains on 4k tokens).
    add("gpt-13b", dense, gpt, blocks=40, hidden=5120, heads=40, positions=4096)

    jam = "hybrid of Mamba, attention, MLP and experts"
    # 52B is Jamba v0.1 with the paper's 128k vocabulary; 20B and 100B are inferred from their sizes.
    small = {"hidden": 4096, "ffn": 14336, "heads": 32, "vocab": 131072}
    add("jamba-20b", jam, jamba, units=2, experts=12, **small)
    add("jamba-52b", jam, jamba, units=4, experts=16, **small)
    add("jamba-100b", jam, jamba, units=9, hidden=8192, ffn=16384, heads=64, experts=4, vocab=131072)

    latent = "latent attention and experts"
    v3 = {"dense": 3, "sparse": 58, "heads": 128, "experts": 256, "vocab": 129280}
    # Kimi-K2's dimensions come from a secondary source.
    k2 = {"dense": 1, "sparse": 60, "heads": 64, "experts": 384, "vocab": 163840}
    add("deepseek-v3", f"{latent}, token prediction", deepseek, mtp=True, theta=1e4, **v3)
    add("kimi-k2", latent, deepseek, mtp=False, theta=5e4, **k2)
    add("gpt-oss-120b", "sliding and full attention, experts", gpt_oss, blocks=36, experts=128)
    add("gpt-oss-20b", "sliding and full attention, experts", gpt_oss, blocks=24, experts=32)
    add("qwen3-next-80b", "gated delta net and attention, experts", qwen3_next, units=12)
    add("qwen3-30b-a3b", "attention and experts", qwen3_moe, blocks=48, hidden=2048, heads=32, expert_ffn=768)
    add("qwen3-235b-a22b", "attention and experts", qwen3_moe, blocks=94, hidden=4096, heads=64, expert_ffn=1536)
    # MiniMax-01 and Gemma 3 come from secondary sources.
    add("minimax-01", "lightning and softmax attention, experts", minimax, units=10)
    gemma = {"blocks": 62, "hidden": 5376, "ffn": 21504, "heads": 32, "kv_heads": 16}
    add("gemma-3-27b", "local and global attention", gemma3, **gemma)
    wide = {"dense": 3, "sparse": 89, "hidden": 5120, "ffn": 12288, "expert_ffn": 1536, "experts": 160}
    air = {"dense": 1, "sparse": 45, "hidden": 4096, "ffn": 10944, "expert_ffn": 1408, "experts": 128}
    add("glm-4.5", "attention and experts, token prediction", glm, qk_norm=True, **wide)
    add("glm-4.5-air", "attention and experts, token prediction", glm, qk_norm=False, **air)
    for name, (about, config) in CONFIGS.items():
        table[name] = Preset(build=partial(from_config, config, name=name), about=about)
    return MappingProxyType(table)


PRESETS: Mapping[str, Preset] = _presets()


def names() -> list[str]:
    """Every preset's name, in the order of the families above."""
    return list(PRESETS)


def suggestion(name: str, known: list[str]) -> str:
    """Return ` (did you mean a or b?)`, or an empty string if no known name is similar."""
    lowered = name.strip().lower().replace("_", "-")
    close = difflib.get_close_matches(lowered, known, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def preset(name: str) -> ModelSpec:
    """Return the preset with this name; an unknown name raises an error with the nearest ones."""
    try:
        entry = PRESETS[name]
    except (KeyError, TypeError):
        hint = suggestion(str(name)[:80], names())
        raise OctoPipeError(f"unknown model {str(name)[:80]!r}{hint}; `octopipe models` lists the presets") from None
    return entry()

"""The model types of Hugging Face decoders that are read from a config, and those that are not.

Knows: in which traits every family differs from the usual decoder. Does not know: how a config is read
(`hf_decoder.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from octopipe.models.readers.hf_decoder import Family

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
        "glm4_moe": Family(out_bias=False, top_k=8, dense_first=1, shared=1),
        "deepseek_v2": Family(),
        "deepseek_v3": Family(top_k=8, dense_first=3, shared=1),
        "kimi_k2": Family(top_k=8, dense_first=1, shared=1),
        "kimi_linear": Family(top_k=8, dense_first=1, shared=1),
        "minimax": Family(full_every=2, linear_first=False, top_k=2),
        "minimax_text_01": Family(full_every=8, top_k=2),
        "minimax_m2": Family(qk_norm=True, top_k=8),
        "apertus": Family(activation="relu2", qk_norm=True),
        "arcee": Family(activation="relu2"),
        "bitnet": Family(),
        "cohere": Family(tied=True),
        "cohere2": Family(tied=True, full_every=4),
        "cwm": Family(),
        "ernie4_5": Family(tied=True, head_dim=128),
        "ernie4_5_moe": Family(tied=True, top_k=6),
        "exaone4": Family(qk_norm=True),
        "flex_olmo": Family(top_k=5),
        "glm": Family(qkv_bias=True, out_bias=False, head_dim=128),
        "glm4": Family(qkv_bias=True, out_bias=False, post_norm=True, head_dim=128),
        "glm4_moe_lite": Family(top_k=4, dense_first=1, shared=1),
        "granite": Family(),
        "granitemoe": Family(top_k=2),
        "granitemoeshared": Family(top_k=2),
        "helium": Family(),
        "internlm3": Family(),
        "jais2": Family(activation="relu2", qkv_bias=True, mlp_bias=True),
        "llama4_text": Family(top_k=1, shared=1),
        "minicpm3": Family(tied=True),
        "ministral3": Family(head_dim=128),
        "nanochat": Family(activation="relu2"),
        "nemotron": Family(activation="relu2"),
        "olmo": Family(),
        "olmo2": Family(),
        "olmo3": Family(full_every=4),
        "olmoe": Family(top_k=8),
        "phi3": Family(),
        "phimoe": Family(qkv_bias=True, top_k=2),
        "seed_oss": Family(qkv_bias=True, out_bias=False, head_dim=128),
        "smollm3": Family(tied=True),
        "solar_open": Family(top_k=8, shared=1),
        "stablelm": Family(),
        "vaultgemma": Family(tied=True, activation="geglu", embedding_multiplier=True, full_every=2, head_dim=256),
    }
)
"""Model types read by the common decoder; the families in `hf_classic.py` and `hf_hybrids.py` have readers of their
own."""
OTHERWISE: Mapping[str, str] = MappingProxyType(
    {
        "aria_text": "experts that are all fused into one matrix",
        "afmoe": "attention with gates of its own",
        "bailing_hybrid": "linear attention beside experts, in groups",
        "cpmant": "a table of relative positions",
        "ctrl": "blocks of its own",
        "dbrx": "sizes in nested parts",
        "deepseek_v4": "compressed attention",
        "doge": "a feed-forward layer of many small experts",
        "falcon_h1": "attention and Mamba side by side in one block",
        "gemma3n_text": "embeddings for every layer",
        "gemma4_text": "embeddings for every layer",
        "gemma4_unified_text": "embeddings for every layer",
        "hrm_text": "blocks that run several times",
        "jetmoe": "experts of attention",
        "lfm2": "short convolutions",
        "lfm2_moe": "short convolutions",
        "lfm3": "short convolutions",
        "longcat_flash": "two attentions in one block",
        "recurrent_gemma": "gated linear recurrences",
        "reformer": "hashed attention",
        "rwkv": "RWKV's time mixing",
        "xlnet": "two streams of attention",
        "xlstm": "xLSTM cells",
        "zamba": "blocks that share their weights",
        "zamba2": "blocks that share their weights",
    }
)
"""Model types with layers for which there is no analytic cost, and what they are."""

"""The set-ups of `bench_users.py`: eight kinds of models, at sizes that one GPU runs in seconds.

Knows: names, models, tokens, micro-batches. Does not know: how anything is measured.

Widths and numbers of layers are cut down; vocabularies are the real models', because a large head beside narrow layers
is what pipelines of such models have to cope with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 14, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
    "moe_intermediate_size": 768, "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 14,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 151936, "norm_topk_prob": True,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model and the size of a step."""

    model: str | dict[str, Any] = ""
    """A preset's name, or a Hugging Face config."""
    megatron: str = ""
    """Instead: the decoder layers of a Megatron-Core model (t GPT block, M Mamba-2, - MLP, * attention)."""
    tokens: int = 2048
    scale: float | None = None
    layers: int | None = None
    micro_batches: int = 8


SETUPS = {
    "hf-dense": Setup(model=QWEN3),
    "hf-moe": Setup(model=QWEN3_MOE),
    "gpt-oss": Setup(model="gpt-oss-20b", scale=0.5, layers=14),
    "nemotron-3": Setup(model="nemotron-3-nano-30b", scale=0.5, layers=18),
    "gemma": Setup(model="gemma-3-27b", scale=0.375, layers=14),
    "hybrid": Setup(model="nemotron-h-8b", scale=0.5, layers=26),
    "megatron-gpt": Setup(megatron="t" * 14),
    "megatron-hybrid": Setup(megatron="M-M-M-M*-M-M-M-M*-M-"),
}

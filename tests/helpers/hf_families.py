"""Tiny configs of the causal language models transformers has: any family, shrunk by the names of its keys."""

from __future__ import annotations

import logging
from typing import Any

import torch
import transformers
from hf_versions import config_class
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

logging.getLogger("transformers").setLevel(logging.ERROR)

SIZES: dict[str, Any] = {
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32, "embedding_size": 32, "word_embed_proj_dim": 32,
    "intermediate_size": 48, "n_inner": 48, "ffn_dim": 48, "ffn_hidden_size": 48, "decoder_ffn_dim": 48,
    "shared_intermediate_size": 24, "moe_intermediate_size": 24, "expert_ffn_hidden_size": 24, "d_inner": 48,
    "shared_expert_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24,
    "prefix_dense_intermediate_size": 48,
    "dense_intermediate_size": 48, "expert_intermediate_size": 24,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "decoder_layers": 4,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "attention_head_dim": 8, "rotary_dim": 4,
    "kv_channels": 8, "d_kv": 8,
    "vocab_size": 96, "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_seq_len": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2,
    "moe_top_k": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "qk_head_dim": 12,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64,
    "mamba_d_state": 8, "ssm_state_size": 8, "state_size": 8, "mamba_n_groups": 2, "n_groups": 2, "mamba_ngroups": 2,
    "mamba_expand": 2, "expand": 2, "mamba_dt_rank": 4, "time_step_rank": 4, "mamba_chunk_size": 8, "chunk_size": 8,
    "n_mamba_heads": 1, "num_heads": 4, "mamba_d_conv": 4, "conv_kernel": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "sliding_window": 4, "attention_window": 4, "block_size": 8, "lru_width": 32, "logits_soft_cap": 30.0,
    "full_attention_interval": 2, "sliding_window_pattern": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
    "attention_window_size": 4, "type_vocab_size": 2, "rope_local_base_freq": 100.0,
    "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 4, "laurel_rank": 4, "num_kv_shared_layers": 0,
    "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "use_mems_train": False,
    "num_mem_blocks": 1, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2,
    "adapter_rank": 4, "max_window_layers": 2,
}  # fmt: skip
"""By key. A family's config gets those of its own keys."""
MORE: dict[str, Any] = {
    "encoder_layers": 3, "decoder_layers": 4, "num_decoder_layers": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_ff": 48, "num_layers": 3, "depth": 4,
    "encoder_num_hidden_layers": 3, "decoder_num_hidden_layers": 4, "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4, "encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4,
    "image_size": 16, "patch_size": 4, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64,
    "embed_dim": 32, "projection_dim": 32, "output_dim": 32, "out_hidden_size": 32, "spatial_merge_size": 2,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2], "fullatt_block_indexes": [1, 3],
    "mm_tokens_per_image": 4, "num_experts": 4, "d_kv": 8, "conv_channels": 32, "vocab_size": 512,
    "encoder_vocab_size": 512, "decoder_vocab_size": 512, "src_vocab_size": 512, "tgt_vocab_size": 512,
    "decoder_start_token_id": 1, "mlp_dim": 48, "num_heads": 4, "in_channels": 3, "in_chans": 3,
    "num_global_layers": 1, "vision_output_dim": 32, "max_position_embeddings": 128, "expert_capacity": 64,
    "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 2, "encoder_sparse_step": 2, "decoder_sparse_step": 2,
    "image_token_id": 500, "image_token_index": 500, "video_token_id": 501, "audio_token_id": 502,
    "audio_token_index": 502, "vision_start_token_id": 503, "vision_end_token_id": 504, "boi_token_index": 505,
    "eoi_token_index": 506, "pad_token_id": 0, "forced_eos_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
    "vocab_size_per_layer_input": 512,
    "text_hidden_size": 32, "projector_hidden_size": 32, "vision_hidden_size": 32, "num_nextn_predict_layers": 0,
}  # fmt: skip
ZERO = ("dropout", "pdrop", "_drop", "drop_path", "jitter", "layerdrop")
_BYTES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
"""The parts of a model of bytes (BLT), which have configs of their own."""
_INDEXED = {
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_DRAFT = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
"""The text part of an assistant, all of whose layers use the keys and values of another model."""
FAMILIES: dict[str, dict[str, Any]] = {
    "nemotron_h": {"layers_block_type": ["mamba", "mlp", "attention", "moe"], "num_hidden_layers": None},
    "xlm": {"emb_dim": 32},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "zamba2": {"n_mamba_heads": 4, "mamba_headdim": 16, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "falcon_h1": {"mamba_d_ssm": 64},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "bert": {"is_decoder": True},
    "roberta": {"is_decoder": True},
    "bart": {"is_decoder": True, "is_encoder_decoder": False},
    "bailing_hybrid": {"num_expert_group": 1, "linear_head_dim": 8, "linear_num_heads": 4},
    "blt": {
        "patcher_config": {**_BYTES, "sliding_window": 4},
        "encoder_config": {**_BYTES, "num_hidden_layers": 1, "hidden_size_global": 64, "cross_attn_all_layers": False},
        "decoder_config": {**_BYTES, "hidden_size_global": 64, "cross_attn_all_layers": True},
        "global_config": {**_BYTES, "hidden_size": 64},
        "encoder_hash_byte_group_vocab": 50,
        "patching_threshold": 4.0,
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "ctrl": {"dff": 48},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots3_note": {
        "text_config": {"head_dim": 12},
        "vision_config": {
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
            "mlp_layer_types": ["dense", "sparse"] * 2,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4},
        },
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": {"head_dim": 12},
    "gemma4_assistant": {"text_config": _DRAFT},
    "gemma4_text": {"per_layer_config": {}, "hidden_size_per_layer_input": 0},
    "gemma4_unified_text": {"per_layer_config": {}, "hidden_size_per_layer_input": 0},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4, "mlp_layer_types": ["dense", "sparse"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "ministral": {"head_dim": 8},
    "modernbert-decoder": {"pad_token_id": 0},
    "nemotron": {"num_key_value_heads": 2},
    "openai-gpt": {"n_positions": 64},
    "xglm": {"attention_heads": 4},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "reformer": {"axial_pos_embds": False},
    "zaya": {"num_experts_per_tok": 1},
}
"""What the sizes alone do not say."""
PARTS = ("text_config", "vision_config", "audio_config")
"""Parts of which a family changes some keys; others are replaced."""


def shrunk(known: dict[str, Any], *, count: int = 4) -> dict[str, Any]:
    """A config as a dict, with the sizes of a test."""
    out: dict[str, Any] = {}
    before = next((known[k] for k in ("num_hidden_layers", "depth", "n_layer") if isinstance(known.get(k), int)), None)
    for key, value in known.items():
        if key == "per_layer_config":
            out[key] = {}
        elif isinstance(value, dict) and ("model_type" in value or key.endswith("_config")):
            out[key] = shrunk(value)
        elif isinstance(value, float) and any(z in key for z in ZERO):
            out[key] = 0.0
        elif key == "head_dim" and "qk_rope_head_dim" in known:
            out[key] = SIZES["qk_rope_head_dim"]
        elif key == "num_key_value_heads" and value is not None and value == known.get("num_attention_heads"):
            out[key] = SIZES["num_attention_heads"]
        elif (key in MORE or key in SIZES) and value is not None and not isinstance(value, dict):
            small = MORE.get(key, SIZES.get(key))
            if isinstance(value, list | tuple) and not isinstance(
                small, list
            ):  # one for every layer, or of its own kind
                out[key] = [small] * count if len(value) == before else value
            else:
                out[key] = small
        elif isinstance(value, list) and before and len(value) == before:
            each = list(dict.fromkeys(value)) if all(isinstance(v, str) for v in value) else value
            out[key] = (each * count)[:count]
        else:
            out[key] = value
    rope = out.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        out["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1]}
    return out


def merged(old: Any, new: Any) -> Any:
    """A changed part of a config, keeping what is not changed."""
    if not isinstance(new, dict):
        return new
    known = old if isinstance(old, dict) else {}
    return {**known, **{key: merged(known.get(key), value) for key, value in new.items()}}


def decodes(known: dict[str, Any]) -> dict[str, Any]:
    """What makes an encoder, or an encoder-decoder, the causal language model of its family."""
    return {key: value for key, value in (("is_decoder", True), ("is_encoder_decoder", False)) if key in known}


def every_family() -> list[str]:
    return [k for k in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if k in transformers.CONFIG_MAPPING]


def tiny_config(model_type: str, **changes: Any) -> Any:
    """The family's config at tiny size, without dropout."""
    cls = config_class(model_type)
    default = cls(text_config=_DRAFT) if model_type == "gemma4_assistant" else cls()
    known = default.to_dict()
    count = known.get("num_hidden_layers") or known.get("n_layer") or getattr(default, "num_hidden_layers", None)
    given: dict[str, Any] = {}
    for key, value in known.items():
        if key == "per_layer_config":
            given[key] = {}
        elif key == "pad_token_id":
            given[key] = value if isinstance(value, int) and 0 <= value < 96 else None
        elif key == "head_dim" and "qk_rope_head_dim" in known:
            given[key] = SIZES["qk_rope_head_dim"]
        elif key == "num_key_value_heads" and "kv_lora_rank" in known:
            given[key] = SIZES["num_attention_heads"]
        elif key in SIZES and value is not None and not isinstance(value, dict):
            given[key] = SIZES[key]
        elif isinstance(value, float) and any(z in key for z in ZERO):
            given[key] = 0.0
        elif isinstance(value, list) and count and len(value) == count and key != "layer_types":
            given[key] = value[:4]
        elif isinstance(value, dict) and "model_type" in value:  # a part with a config of its own
            given[key] = shrunk(value)
        elif isinstance(value, dict) and key.endswith("_config"):
            given[key] = {k: SIZES.get(k, v) for k, v in value.items() if v is not None}
    kinds = known.get("layer_types")
    if isinstance(kinds, list) and len(kinds) >= 4:
        each = list(dict.fromkeys(kinds))
        given["layer_types"] = (each * 4)[:4]
    for key in ("num_hidden_layers", "n_layer"):
        if key in getattr(cls, "attribute_map", {}):
            given.pop(key, None)
    if known.get("is_decoder") is False or known.get("is_encoder_decoder"):
        given |= decodes(known)
    for key, value in {**FAMILIES.get(model_type, {}), **changes}.items():
        given[key] = merged(given.get(key), value) if key in PARTS else value
    given = {k: v for k, v in given.items() if not (k == "num_hidden_layers" and v is None)}
    config = cls(**given)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    config.use_cache = False
    return config


def awake(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Every parameter away from the zeros and ones it starts with, so that no gradient vanishes by chance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype))
    return model

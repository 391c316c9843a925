"""Preset models with a tower or an encoder, as the configs that were published with them.

Knows: the keys of each `config.json` that decide its layers. Does not know: how they are read (`readers/`).

Sources: the `config.json` of Qwen/Qwen2.5-VL-7B-Instruct, Qwen/Qwen2.5-Omni-7B (its thinker),
llava-hf/llava-1.5-7b-hf, google/gemma-3-27b-it, openai/whisper-large-v3 and google/t5-v1_1-xxl on the Hugging Face
Hub; sizes that these leave out are transformers' defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_QWEN = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": False,
    "vocab_size": 152064,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "torch_dtype": "bfloat16",
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
_OMNI = {
    "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"],
    "model_type": "qwen2_5_omni_thinker",
    "audio_token_index": 151646,
    "image_token_index": 151655,
    "video_token_index": 151656,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "audio_config": {
        "model_type": "qwen2_5_omni_audio_encoder",
        "d_model": 1280,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "max_source_positions": 1500,
        "n_window": 100,
        "num_mel_bins": 128,
        "output_dim": 3584,
    },
    "text_config": {
        "model_type": "qwen2_5_omni_text",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": [16, 24, 24]},
        "vocab_size": 152064,
    },
    "vision_config": {
        "model_type": "qwen2_5_omni_vision_encoder",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_channels": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
_LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "torch_dtype": "float16",
    "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064},
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
        "projection_dim": 768,
    },
}
_GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "vocab_size": 262208,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
_WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_layers": 32,
    "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "num_mel_bins": 128,
    "vocab_size": 51866,
    "torch_dtype": "float16",
}
_T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "is_encoder_decoder": True,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_decoder_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "vocab_size": 32128,
}
CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "qwen2.5-vl-7b": ("vision tower of any image size, attention", _QWEN),
        "qwen2.5-omni-7b": ("audio and vision towers of the thinker, attention", _OMNI),
        "llava-1.5-7b": ("vision tower, attention", _LLAVA),
        "gemma-3-27b-vision": ("vision tower, local and global attention", _GEMMA),
        "whisper-large-v3": ("audio encoder, decoder with cross-attention", _WHISPER),
        "t5-v1.1-xxl": ("text encoder, decoder with cross-attention", _T5),
    }
)
"""Name -> (a line about it, its config)."""

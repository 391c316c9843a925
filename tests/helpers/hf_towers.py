"""Tiny configs of transformers' models with towers or an encoder, and their unsplit twins.

A family's own default config is shrunk part by part, by the names of its keys; what the sizes alone do not say is in
`CHANGES`. The example of its inputs comes from the package, its values are drawn here.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import transformers
from hf_families import FAMILIES, merged, shrunk
from hf_twins import finite, grads_of, stir, worst
from hf_versions import config_class
from torch import Tensor
from transformers.models.auto import modeling_auto as auto

from octopipe.base.errors import OctoPipeError
from octopipe.huggingface import layers, micro_batches
from octopipe.huggingface.examples import example_of, takes_more_than_tokens
from octopipe.huggingface.source import build_on_meta, model_class, refuse_other_models

_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_WHOLE_MROPE = {"text_config": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}}}
_QUERIES = {"encoder_hidden_size": 32}
_CONFORMER = {"hidden_dim": 32, "input_dim": 16, "dim_head": 8, "context_size": 8, "max_pos_emb": 8}
_TILES = [[16, 32], [32, 16], [32, 32]]
_TOKENIZER = {"depths": [1, 1, 1, 1], "downsampling_ratios": [4, 4, 8], "num_filters": 4, "vae_std": 0.0}
"""An encoder of samples, without the noise that it adds to its results."""
_VOCABULARY = {"<image>": 500, **{f"IMGIMG{chr(65 + k)}Z": 400 + k for k in range(8)}}
_QUANTIZER = {
    "embed_dim": 8,
    "num_embeddings": 8,
    "latent_channels": 8,
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
}
CHANGES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"text_config": {"rope_parameters": _MROPE}},
    "qwen2_5_vl": {"text_config": {"rope_parameters": _MROPE}},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blip-2": {"image_token_index": 500, "qformer_config": _QUERIES, "num_query_tokens": 4},
    "chameleon": {"vocabulary_map": _VOCABULARY, "image_token_id": 500, "vq_config": {**_QUANTIZER, "resolution": 16}},
    "cohere_compass": {
        "text_config": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}
    },
    "deepseek_ocr2": {
        "text_config": {
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        },
        "vision_config": {"sam_config": {"downsample_channels": [32, 32], "image_size": 64}},
    },
    "dia": {"decoder_config": {"cross_hidden_size": 32, "cross_head_dim": 8}},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}},
    "dots3_note": FAMILIES["dots3_note"],
    "emu3": {
        "vocabulary_map": {
            "<image>": 500,
            "<|extra_200|>": 499,
            **{f"<|visual token {k:06}|>": 400 + k for k in range(8)},
        },
        "image_token_id": 500,
        "vq_config": {
            **_QUANTIZER,
            "codebook_size": 8,
            "attn_resolutions": [],
            "temporal_downsample_factor": 2,
            "hidden_size": 32,
        },
    },
    "ernie4_5_vl_moe": {
        "text_config": {"rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2]}, "moe_intermediate_size": [24, 16]}
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "glm46v": _WHOLE_MROPE,
    "glm4v": _WHOLE_MROPE,
    "glm4v_moe": _WHOLE_MROPE,
    "glm5_next": {
        "text_config": {"index_kpool": 2, "qk_rope_head_dim": 0, "linear_head_dim": 8, "linear_num_heads": 4}
    },
    "glm_ocr": _WHOLE_MROPE,
    "glmga": _WHOLE_MROPE,
    "paddleocr_vl": _WHOLE_MROPE,
    "qwen2_5_omni_thinker": _WHOLE_MROPE,
    "gemma4": {
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "patch_size": 4,
            "position_embedding_size": 64,
        }
    },
    "gemma4_unified": {
        "vision_config": {
            "model_type": "gemma4_unified_vision",
            "patch_size": 2,
            "mm_embed_dim": 32,
            "mm_posemb_size": 16,
            "output_proj_dims": 32,
        }
    },
    "granite4_vision": {
        "deepstack_layer_map": [[1, 1], [2, 2]],
        "downsample_rate": "1/2",
        "image_grid_pinpoints": _TILES,
        "spatial_target_layers": [3],
        "vision_config": {"hidden_size": 64},
        "projector_dropout": 0.0,
    },
    "granite_speech": {
        "encoder_config": _CONFORMER,
        "projector_config": _QUERIES,
        "window_size": 4,
        "downsample_rate": 2,
    },
    "granite_speech_plus": {
        "encoder_config": _CONFORMER,
        "projector_config": _QUERIES,
        "window_size": 4,
        "downsample_rate": 2,
    },
    "hunyuan_vl": {"text_config": {"head_dim": 8, "rope_parameters": _MROPE}},
    "instructblip": {"image_token_index": 500, "qformer_config": _QUERIES, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": 500, "qformer_config": _QUERIES, "num_query_tokens": 4},
    "kimi_k25": {"projection_hidden_size": 32},
    "kyutai_speech_to_text": {
        "audio_pad_token_id": 3,
        "codebook_vocab_size": 8,
        "num_codebooks": 2,
        "codec_config": {"upsample_groups": 32},
    },
    "kosmos-2.5": {"latent_query_num": 4},
    "led": {"attention_window": [10] * 3},
    "llama4": {"vision_config": {"intermediate_size": 128, "projector_input_dim": 32, "projector_output_dim": 32}},
    "llava_next": {"image_grid_pinpoints": _TILES},
    "llava_next_video": {"image_grid_pinpoints": _TILES},
    "llava_onevision": {"image_grid_pinpoints": _TILES},
    "mllama": {"vision_config": {"intermediate_layers_indices": [0, 2], "vision_output_dim": 96}},
    "molmo2": {
        "adapter_config": {"vision_feature_layer": [3, 1]},
        "vision_config": {"image_size": [16, 16]},
        "image_patch_id": 500,
    },
    "moonshine_streaming": {"num_key_value_heads": 4, "encoder_config": {"num_key_value_heads": 4}},
    "muse_glimmer": {"out_hidden_size": 128},
    "muse_spark": {"out_hidden_size": 128},
    "nemo_speechlm": {
        "audio_config": {
            "diarization_config": {
                "audio_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
                "head_config": {"audio_hidden_size": 32},
            }
        },
        "word_timestamp_config": {"blank_token_id": 511},
        "text_config": FAMILIES["nemotron_h"],
    },
    "nemotron_h_omni": {"image_token_id": 500},
    "phi4_multimodal": {"vision_config": {"crop_size": 16}},
    "pp_formulanet": {"vision_config": {"post_conv_out_channels": 64, "decoder_hidden_size": 32}},
    "qwen3_omni_moe": {
        "talker_config": {"text_config": {"shared_expert_intermediate_size": 24}, "spatial_merge_size": 2}
    },
    "qwen4_exp": FAMILIES["qwen4_exp"],
    "speech-encoder-decoder": {"encoder": {"apply_spec_augment": False}},
    "speecht5": {"apply_spec_augment": False},
    "step3p7": {"text_config": {"sliding_window": 4}},
    "unlimited_ocr": {"vision_config": {"sam_config": {"downsample_channels": [32, 32], "image_size": 64}}},
    "vibevoice": {"audio_config": _TOKENIZER, "semantic_model_config": _TOKENIZER},
    "vibevoice_asr": {"acoustic_tokenizer_encoder_config": _TOKENIZER, "semantic_tokenizer_encoder_config": _TOKENIZER},
    "vipllava": {"vision_feature_layers": [-2, -3, 1]},
    "voxtral": {"audio_token_id": 502, "audio_config": {"intermediate_size": 128}},
}
"""By family: what differs, by key; a dict changes a part."""


def every_tower() -> dict[str, str]:
    """Families with towers or an encoder -> the class of their model."""
    out: dict[str, str] = {}
    for names in (
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    ):
        for family, name in names.items():
            if family in transformers.CONFIG_MAPPING:
                out.setdefault(family, name if isinstance(name, str) else name[0])
    return out


def tiny_tower(family: str, **changes: Any) -> Any:
    """The family's config at tiny size, without dropout."""
    cls = config_class(family)
    data = shrunk(cls().to_dict())
    for key, value in {**CHANGES.get(family, {}), **changes}.items():
        data[key] = merged(data.get(key), value)
    data["architectures"] = [every_tower()[family]]
    return cls.from_dict(data)


def drawn(example: dict[str, Tensor], seed: int = 3) -> dict[str, Tensor]:
    """The example with random floating values."""
    generator = torch.Generator().manual_seed(seed)
    out = {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)
        if value.is_floating_point()
        else value
        for name, value in example.items()
    }
    if "bbox" in out:  # places on a page
        out["bbox"] = example["bbox"]
    if "flattened_patches" in out:  # they begin with their row and their column
        out["flattened_patches"][..., :2] = example["flattened_patches"][..., :2]
    return out


def twin_of(family: str, config: Any, dtype: torch.dtype = torch.float64) -> Any:
    """The model as transformers builds it, away from zeros and ones."""
    torch.manual_seed(0)
    cls = model_class(config)
    model = cls._from_config(copy.deepcopy(config), dtype=dtype, experts_implementation="eager")
    for name, parameter in model.named_parameters():
        stir(name, parameter)
    return model.train()


def _example(model: Any) -> dict[str, Tensor]:
    """The example of the model's inputs; of some families and configs tokens alone."""
    refuse_other_models(model)
    if takes_more_than_tokens(model):
        return example_of(model)
    layers(model)  # what is no model of tokens is refused
    return {"input_ids": torch.arange(3, 38).view(5, 7)}


class UnsplitFails(Exception):
    """The model that transformers builds fails by itself: there is nothing to compare with."""


def _unsplit(family: str, config: Any, dtype: torch.dtype) -> tuple[Any, dict[str, Tensor], Tensor, Any]:
    """The model with its gradients, an example with random values, labels, and what its forward gives."""
    example = drawn(_example(build_on_meta(copy.deepcopy(config), dtype=dtype, attention=None)))
    model = twin_of(family, config, dtype)
    ids = example.get("decoder_input_ids", example.get("input_ids"))
    assert ids is not None
    labels = ids.roll(-1, 1).clone()
    labels[0, :2] = -100
    out = model(**example, labels=labels, use_cache=False)
    if getattr(out, "loss", None) is None:
        _ = layers(model).loss_fn
    out.loss.backward()
    if not all(torch.isfinite(g).all() for g in grads_of(model.named_parameters()).values()):
        raise ValueError("its gradients are not finite")
    return model, example, labels, out


def tower_difference(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[float, Any]:
    """The largest difference of logits, loss and gradients of the pieces one after another from the unsplit model, and
    the pieces."""
    warnings.filterwarnings("ignore")
    try:
        model, example, labels, out = _unsplit(family, tiny_tower(family, **changes), dtype)
    except OctoPipeError:
        raise
    except Exception as error:
        raise UnsplitFails(" ".join(str(error).split())) from error
    theirs = grads_of(model.named_parameters())
    model.zero_grad(set_to_none=True)
    parts = layers(model)
    value: Any = example
    for module in parts:
        value = module(value)
    _, targets = micro_batches([{**example, "labels": labels}])
    loss = parts.loss_fn(value, targets[0])
    loss.backward()
    value = value if isinstance(value, Tensor) else value[0]  # beside logits: the auxiliary loss of routers
    off = finite(float((value - out.logits).detach().abs().max()))
    off = max(off, finite(abs(float((loss - out.loss).detach()))))
    mine = grads_of(model.named_parameters())
    zero = {n for n in theirs.keys() - mine.keys() if not theirs[n].any()}
    theirs = {n: g for n, g in theirs.items() if n not in zero}
    return max(off, worst(mine, theirs)), parts

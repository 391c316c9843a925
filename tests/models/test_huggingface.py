"""Configs are read right when the parameter count equals that of the real class."""

from __future__ import annotations

import json

import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.models.readers.hf_config import from_config
from octopipe.models.zoo import preset

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
SHORT = {**BASE, "num_hidden_layers": 4, "pad_token_id": None}
TOP = {"num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}
CASES = {
    "Llama": ("LlamaForCausalLM", SHORT, "ETTTTL"),
    "Llama biased": ("LlamaForCausalLM", {**SHORT, "attention_bias": True, "mlp_bias": True}, "ETTTTL"),
    "Llama tied": ("LlamaForCausalLM", {**SHORT, "tie_word_embeddings": True}, "ETTTTL"),
    "Mistral": ("MistralForCausalLM", {**SHORT, "sliding_window": 8}, "EttttL"),
    "Qwen2": ("Qwen2ForCausalLM", SHORT, "ETTTTL"),
    "Qwen3": ("Qwen3ForCausalLM", SHORT, "ETTTTL"),
    "Mixtral": ("MixtralForCausalLM", {**SHORT, "num_local_experts": 4}, "EXXXXL"),
    "Qwen2Moe": (
        "Qwen2MoeForCausalLM",
        {
            **SHORT,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2,
        },
        "ETXTXL",
    ),
    "Qwen3Moe": (
        "Qwen3MoeForCausalLM",
        {**SHORT, **TOP, "num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
        "EXTXXL",
    ),
    "Qwen3Next": (
        "Qwen3NextForCausalLM",
        {
            **SHORT,
            **TOP,
            "head_dim": 24,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 20,
        },
        "EGGGXL",
    ),
    "GptOss": ("GptOssForCausalLM", {**SHORT, "head_dim": 24, "num_local_experts": 4}, "ExXxXL"),
    "Gemma3Text": ("Gemma3ForCausalLM", {**SHORT, "num_hidden_layers": 7, "head_dim": 24}, "EtttttTtL"),
    "Gemma2": ("Gemma2ForCausalLM", {**SHORT, "head_dim": 24}, "EtTtTL"),
    "DeepseekV3": (
        "DeepseekV3ForCausalLM",
        {**SHORT, **LATENT, "first_k_dense_replace": 1, "n_routed_experts": 8, "moe_intermediate_size": 32},
        "ETXXXPL",
    ),
    "DeepseekV3 whole queries": (
        "DeepseekV3ForCausalLM",
        {
            **SHORT,
            **LATENT,
            "q_lora_rank": None,
            "attention_bias": True,
            "num_nextn_predict_layers": 0,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "moe_intermediate_size": 32,
        },
        "ETTTXL",
    ),
    "Glm4Moe": (
        "Glm4MoeForCausalLM",
        {
            **SHORT,
            **TOP,
            "head_dim": 24,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "num_nextn_predict_layers": 1,
        },
        "ETXXXPL",
    ),
    "KimiLinear": (
        "KimiLinearForCausalLM",
        {
            **SHORT,
            **TOP,
            **LATENT,
            "q_lora_rank": None,
            "num_hidden_layers": 6,
            "linear_num_heads": 3,
            "linear_head_dim": 10,
            "moe_intermediate_size": 32,
            "num_local_experts": 4,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        "EkKKKXKL",
    ),
    "MiniMax": ("MiniMaxForCausalLM", {**SHORT, "head_dim": 24, "num_local_experts": 4}, "EXNXNL"),
    "NemotronH": (
        "NemotronHForCausalLM",
        {
            **BASE,
            "head_dim": 24,
            "hybrid_override_pattern": "M-*EM",
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 20,
            "num_experts_per_tok": 2,
        },
        "EM-*#ML",
    ),
    "Jamba": (
        "JambaForCausalLM",
        {**SHORT, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 3},
        "EM-M#*-M#L",
    ),
    "GPT2": (
        "GPT2LMHeadModel",
        {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 32},
        "ETTL",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parameters_equal_those_of_the_real_class(case, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    class_name, kwargs, pattern = CASES[case]
    model_class = getattr(transformers, class_name, None)
    if model_class is None:
        pytest.skip(f"this transformers has no {class_name}")
    config = model_class.config_class(**kwargs)
    with torch.device("meta"):
        model = model_class(config)
    real = sum(parameter.numel() for parameter in model.parameters())

    config.to_json_file(tmp_path / "config.json", use_diff=False)
    spec = from_config(tmp_path / "config.json")
    assert (spec.parameters, spec.pattern) == (real, pattern)

    # A config with the defaults left out, as the hub's older files have it, reads the same.
    assert from_config({"model_type": config.model_type, **kwargs}).parameters == real


def test_published_configs_read_like_the_presets():
    # The main dimensions of the published files, written down here by hand.
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    }
    assert from_config(llama, name="llama3-8b") == preset("llama3-8b")
    nemotron = {
        "model_type": "nemotron_h",
        "hidden_size": 4480,
        "intermediate_size": 15680,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "attention_head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 80,
        "ssm_state_size": 128,
        "vocab_size": 131072,
        "hybrid_override_pattern": preset("nemotron-nano-v2-9b").pattern[1:-1],
    }
    assert from_config(nemotron, name="nemotron-nano-v2-9b") == preset("nemotron-nano-v2-9b")
    minimax = {
        "model_type": "minimax_text_01",
        "hidden_size": 6144,
        "intermediate_size": 9216,
        "head_dim": 128,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 80,
        "num_local_experts": 32,
        "num_experts_per_tok": 2,
        "rope_theta": 10000000,
        "rotary_dim": 64,
        "vocab_size": 200064,
        "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10,
    }
    spec = from_config(minimax)
    assert (spec.parameters, spec.pattern) == (preset("minimax-01").parameters, preset("minimax-01").pattern)


def test_a_multimodal_config_gives_its_text_part():
    text = {"model_type": "llama", **BASE, "num_hidden_layers": 2}
    outer = {"model_type": "some_vl", "architectures": ["SomeForConditionalGeneration"], "text_config": text}
    assert from_config(outer).parameters == from_config(text).parameters


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {
                "model_type": "llava",
                "text_config": {**BASE, "num_hidden_layers": 2},
                "vision_config": {"hidden_size": 64, "patch_size": 8, "image_size": 64, "num_hidden_layers": 2},
            },
            'vision_config: "num_heads" is missing',
        ),
        ({"model_type": "qwen2_vl", **BASE, "vision_config": {"depth": 2}}, "vision_config"),
        ({"model_type": "llava_llama", **BASE, "mm_vision_tower": "openai/clip"}, "mm_vision_tower"),
        ({"model_type": "a_vl", **BASE, "audio_config": {"d_model": 8}, "vision_config": {"depth": 2}}, "two towers"),
        ({"model_type": "opt", **BASE, "word_embed_proj_dim": 8}, '"word_embed_proj_dim" is 8, and "hidden_size" 64'),
        ({"model_type": "bert", **BASE}, "bert is an encoder"),
        ({"model_type": "roberta", **BASE, "architectures": ["RobertaForCausalLM"]}, "roberta is an encoder"),
        ({"model_type": "longt5", "is_encoder_decoder": True}, "'longt5' cannot be read from a config"),
        ({"model_type": "encoder-decoder", "encoder": {"model_type": "bert"}, "decoder": {}}, "encoder-decoder"),
    ],
)
def test_what_is_more_than_a_decoder_is_never_read_as_one(config, message):
    with pytest.raises(OctoPipeError, match=message) as caught:
        from_config({"num_hidden_layers": 2, **config})
    assert "\n" not in str(caught.value)


def test_an_unknown_family_is_read_as_a_usual_decoder():
    known = from_config({"model_type": "llama", **BASE, "num_hidden_layers": 2})
    assert from_config({"model_type": "brand_new", **BASE, "num_hidden_layers": 2}).layers == known.layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "heads"),
        ({"num_attention_heads": 3}, "heads"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"hidden_size": -4}, "hidden_size"),
        ({"vocab_size": 2.5}, "vocab_size"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["odd", "odd"]}, "odd"),
        ({"layer_types": "full"}, "layer_types"),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"model_type": "zzz", "mamba_d_state": 16}, "zzz"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "hybrid_override_pattern"),
        ({"model_type": "nemotron_h"}, "hybrid_override_pattern"),
        ({"num_local_experts": 4}, "num_experts_per_tok"),
        ({"num_local_experts": 4, "num_experts_per_tok": 9}, "top_k"),
        ({"rope_theta": "fast"}, "rope_theta"),
    ],
)
def test_a_bad_config_is_one_line_with_file_and_key(change, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **BASE, "num_hidden_layers": 2, **change}))
    with pytest.raises(OctoPipeError) as caught:
        from_config(path)
    text = str(caught.value)
    assert str(path) in text and message in text and "\n" not in text

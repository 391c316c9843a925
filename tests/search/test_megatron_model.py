"""A model as Megatron-LM's flags: what Megatron-LM builds for them has exactly the layers that were priced."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest
from megatron_parameters import gpt_parameters, hybrid_parameters

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.models.readers.hf_classic import CLASSICS
from octopipe.models.readers.hf_config import from_config
from octopipe.models.readers.hf_families import FAMILIES
from octopipe.models.spec import Attention, Block, ModelSpec
from octopipe.models.zoo import PRESETS, preset
from octopipe.search.planner.megatron_line import megatron_line
from octopipe.search.planner.megatron_model import model_flags
from octopipe.search.planner.pricing import Pricer
from octopipe.search.planner.runtimes import RUNTIMES
from octopipe.search.planner.splits import Split

LETTERS = {"mamba2": "M", "attention": "*", "mlp": "-", "moe": "E"}
CONFIG: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_intermediate_size": 32, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "rope_theta": 20000.0, "shared_expert_intermediate_size": 24, "max_position_embeddings": 64,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}


def flags_of(spec: ModelSpec, seq: int = 64) -> tuple[str, dict[str, list[str]]]:
    script, flags = model_flags(spec, seq)
    out: dict[str, list[str]] = {}
    for word in shlex.split(" ".join(flags)):
        if word.startswith("--"):
            assert word not in out, f"{word} twice"
            last = out.setdefault(word, [])
        else:
            last.append(word)
    return script, out


def built_parameters(spec: ModelSpec) -> int:
    script, flags = flags_of(spec)
    if script == "pretrain_gpt.py":
        return gpt_parameters(flags)
    return hybrid_parameters(flags, "".join(LETTERS[layer.kind] for layer in spec.layers[1:-1]))


def test_megatron_lm_builds_the_parameters_of_every_preset_that_has_flags() -> None:
    told = {}
    for name in PRESETS:
        spec = preset(name)
        try:
            built = built_parameters(spec)
        except OctoPipeError as error:
            told[name] = str(error)
            continue
        assert built == sum(layer.parameters for layer in spec), name
    assert len(PRESETS) - len(told) >= 23, told


def test_megatron_lm_builds_the_parameters_of_every_config_or_it_is_refused() -> None:
    built, latent = set(), ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_linear", "minicpm3", "glm4_moe_lite")
    for kind in [*FAMILIES, *CLASSICS]:
        spec = from_config({**CONFIG, **(LATENT if kind in latent else {}), "model_type": kind})
        try:
            count = built_parameters(spec)
        except OctoPipeError as error:
            assert "Megatron-LM" in str(error) or "not known here" in str(error)
            continue
        assert count == sum(layer.parameters for layer in spec), kind
        built.add(kind)
    assert {"llama", "mistral", "qwen2", "qwen2_moe", "deepseek_v3", "glm4_moe", "gpt2", "phi3"} <= built


def test_biases_sinks_and_learned_positions_have_flags() -> None:
    oss, gpt = flags_of(preset("gpt-oss-20b"))[1], flags_of(preset("gpt3-5b"))[1]
    assert oss["--softmax-type"] == ["learnable"] and "--disable-bias-linear" not in oss
    assert "--no-bias-dropout-fusion" in oss, "its grouped experts assert that, where they have biases"
    assert gpt["--position-embedding-type"] == ["learned_absolute"] and gpt["--max-position-embeddings"] == ["2048"]
    assert "--disable-bias-linear" not in gpt
    qwen = flags_of(from_config({**CONFIG, "model_type": "qwen2"}))[1]
    assert "--add-qkv-bias" in qwen and "--disable-bias-linear" in qwen


def test_rotary_positions_have_their_base_and_their_share_of_a_head() -> None:
    glm = flags_of(preset("glm-4.5"))[1]
    assert glm["--rotary-base"] == ["1000000"] and glm["--rotary-percent"] == ["0.5"]
    kimi = flags_of(preset("kimi-k2"))[1]
    assert kimi["--rotary-base"] == ["50000"] and "--qk-layernorm" in kimi, "latent attention has norms of its own"
    assert "--rotary-percent" not in flags_of(preset("llama3-8b"))[1]


def test_layers_without_rotary_positions_are_listed() -> None:
    spec = from_config({**CONFIG, "model_type": "llama"})
    block = spec.layers[-2]
    assert isinstance(block, Block) and isinstance(block.mixer, Attention)
    without = Block(mixer=replace(block.mixer, rope_theta=None), ffn=block.ffn)
    some = replace(spec, layers=(*spec.layers[:-2], without, spec.layers[-1]))
    assert flags_of(some)[1]["--no-rope-freq"] == ["[0]*3+[1]*1"]
    assert "--no-rope-freq" not in flags_of(spec)[1]


def test_layers_without_a_window_are_listed_unless_every_nth_has_none() -> None:
    def said(kinds: str) -> list[str] | None:
        types = [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds]
        more = {"model_type": "mistral", "sliding_window": 8, "layer_types": types}
        spec = from_config({**{key: CONFIG[key] for key in CONFIG if "expert" not in key}, **more})
        return flags_of(spec)[1].get("--window-attn-skip-freq")

    assert said("sfsf") == ["2"] and said("sssf") == ["4"] and said("ssss") is None
    assert said("ffss") == ["[0]*2+[1]*2"] and said("sffs") == ["[1]*1+[0]*2+[1]*1"]


def test_mambas_heads_are_said() -> None:
    """Without the flag, Megatron-Core makes the inner width twice the hidden one, which these models do not have."""
    for name in ("nemotron-h-4b", "nemotron-nano-v2-9b", "nemotron-3-nano-30b"):
        assert flags_of(preset(name))[1]["--mamba-num-heads"] == [str(preset(name).layers[1].heads)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "glm4"}, "norms behind attention"),
        ({"model_type": "gpt_neox"}, "learns positions"),
        ({"model_type": "gpt_neo"}, "biases in all matrices, in none"),
        ({"attention_bias": True}, "biases in all matrices, in none"),
    ],
)
def test_what_its_flags_cannot_describe_is_refused_with_the_reason(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(OctoPipeError, match=why):
        model_flags(from_config({**CONFIG, "model_type": "llama", **changes}), 64)


def test_embeddings_that_are_multiplied_are_refused() -> None:
    spec = preset("llama3-8b")
    multiplied = replace(spec.layers[0], multiplier=64.0)  # type: ignore[call-arg]
    with pytest.raises(OctoPipeError, match="multiplied by a number"):
        model_flags(replace(spec, layers=(multiplied, *spec.layers[1:])), 64)


def test_experts_with_biases_are_not_divided() -> None:
    spec, base = preset("gpt-oss-20b"), Setup(gpu=gpu("h100"), seq=4096)
    assert RUNTIMES["megatron"].of_model(spec).most == {"etp": 1}
    assert RUNTIMES["megatron"].of_model(preset("qwen3-30b-a3b")).most == {}
    split = Split(tp=2, cp=1, ep=2, pp=1, vp=1, dp=4, micro_batch_size=1, zero=1)
    whole = Pricer(spec, replace(base, etp=1), 16).simulated(replace(split, etp=1), "none")
    assert "--expert-tensor-parallel-size 1" in megatron_line(whole, spec).flags
    shared = Pricer(spec, base, 16).simulated(replace(split, etp=2), "none")
    with pytest.raises(OctoPipeError, match="divides no experts that have biases"):
        megatron_line(shared, spec)

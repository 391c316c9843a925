"""Every model type that is read from a config has the number of parameters that transformers' own class has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.models.readers.hf_classic import CLASSICS
from octopipe.models.readers.hf_config import from_config
from octopipe.models.readers.hf_families import FAMILIES, OTHERWISE
from octopipe.models.readers.hf_hybrids import HYBRIDS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from octopipe.huggingface.source import read_config  # noqa: E402

QUICK = (
    *("apertus", "bamba", "ernie4_5_moe", "falcon", "gpt_neox", "granitemoehybrid", "llama4_text", "mamba2", "olmo2"),
    *("opt", "phi3", "starcoder2"),
)
ELSEWHERE = {"kimi_k2", "minimax_text_01"}
"""Not in transformers under this name."""
OTHER_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "glm4_moe": {"num_nextn_predict_layers": 0},
    "nemotron": {"num_key_value_heads": 8},
}
"""What a default config leaves out, or has that the class does not build."""
OFF = 2e-3
"""Norms and biases in which a family differs from the usual decoder."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow)
        for kind in sorted({*FAMILIES, *CLASSICS, *HYBRIDS} - ELSEWHERE)
    ],
)
@pytest.mark.parametrize("vocab", [None, 10007])
def test_a_config_has_the_parameters_of_the_real_class(kind: str, vocab: int | None) -> None:
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    config = transformers.CONFIG_MAPPING[kind](**OTHER_SIZES.get(kind, {}))
    if vocab is not None:
        config.vocab_size, config.pad_token_id = vocab, None
        for key in ("intermediate_size", "ffn_dim", "n_inner"):
            if getattr(config, key, None):
                setattr(config, key, getattr(config, key) // 2)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    real = sum(p.numel() for p in model.parameters())
    spec = from_config(json.loads(config.to_json_string(use_diff=False)), known_families=True)
    assert spec.parameters == pytest.approx(real, rel=OFF)


@pytest.mark.parametrize("kind", sorted(OTHERWISE))
def test_what_cannot_be_priced_is_refused_by_name(kind: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    with pytest.raises(OctoPipeError, match=rf"'{kind}' has layers this reader does not know.*octopipe profile"):
        from_config({**sizes, "vocab_size": 128, "model_type": kind})


def test_an_unknown_family_is_told_once_and_refused_where_asked(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {**sizes, "vocab_size": 128, "model_type": "someone_elses"}
    for _ in range(2):
        from_config(config, where="told-once.json")
    assert [r.getMessage() for r in caplog.records] == [
        "told-once.json: model type 'someone_elses' is not known here: read as a usual decoder with a gated MLP, which "
        "it may not be; `octopipe profile` measures the model itself"
    ]
    with pytest.raises(OctoPipeError, match="not known here"):
        from_config(config, known_families=True)


def test_a_file_that_transformers_wrote_is_read_back(tmp_path: Path) -> None:
    """Granite 4 has an infinite number in its config, which transformers writes as an object."""
    config = transformers.GraniteMoeHybridConfig(num_hidden_layers=2, layer_types=["mamba", "attention"])
    config.save_pretrained(tmp_path)
    assert '"__float__"' in (tmp_path / "config.json").read_text()
    again = read_config(tmp_path)
    assert tuple(again.time_step_limit) == tuple(config.time_step_limit)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    assert {**again.to_dict(), "_name_or_path": ""} == {**theirs, "_name_or_path": ""}

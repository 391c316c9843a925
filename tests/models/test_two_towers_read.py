"""Configs with a vision and an audio tower: the layers that are read are the pieces of transformers' own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.models.readers.hf_config import from_config
from octopipe.models.towers import TowerLayer
from octopipe.models.zoo import preset

SYMBOLS = {"audio_tower": "A", "visual": "Vw", "language_model": "TX"}
"""The symbols of the layers of each stack, by a word of the stack's name."""


@pytest.mark.parametrize("family", ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"])
def test_layers_are_the_pieces_of_the_model_in_their_order(family: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from hf_towers import tiny_tower

    from octopipe.huggingface import layers
    from octopipe.huggingface.source import build_on_meta

    config = tiny_tower(family)
    parts = layers(build_on_meta(config, dtype=torch.float32, attention=None))
    spec = from_config(config.to_dict())
    assert spec.num_layers == len(parts)
    # Norms of projectors and missing biases of keys are not read; every other kind of layer differs by more.
    assert [layer.parameters for layer in spec] == pytest.approx(parts.layer_parameters, rel=0.015)
    for symbol, stack in zip(spec.pattern, parts.stacks, strict=True):
        word = next((word for word in SYMBOLS if word in stack), None)
        assert word is None or symbol in SYMBOLS[word]
    assert [source.kind for source in spec.sources] == ["audio", "image"]
    assert spec.towers == ((0, parts.num_tower_layers - 1),)


@pytest.mark.parametrize("family", ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"])
def test_a_recording_has_as_many_positions_as_its_tower_gives_it(family: str) -> None:
    """The model's own audio tower on half a minute of sound, and the places that its features take."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from hf_towers import tiny_tower, twin_of

    config = tiny_tower(family, audio_config={"max_source_positions": 1500})
    source = from_config(config.to_dict()).sources[0]
    model = twin_of(family, config, torch.float32)
    tower = next(module for name, module in model.named_modules() if name.endswith("audio_tower"))
    seen: list[int] = []
    tower.layers[0].register_forward_pre_hook(lambda _, args, kwargs: seen.append(len(args[0])), with_kwargs=True)
    frames, bins = 3000, config.audio_config.num_mel_bins
    with torch.no_grad():
        out = tower(torch.ones(bins, frames), feature_lens=torch.tensor([frames]))
    assert (source.positions, source.tokens) == (seen[0], len(out.last_hidden_state))


def test_the_preset_is_as_large_as_the_published_thinker() -> None:
    spec = preset("qwen2.5-omni-7b")
    assert spec.parameters / 1e9 == pytest.approx(8.93, rel=1e-3)
    audio, vision = (
        sum(layer.parameters for layer in spec if isinstance(layer, TowerLayer) and layer.source.kind == kind)
        for kind in ("audio", "image")
    )
    assert audio / 1e6 == pytest.approx(635, rel=0.01)  # Whisper's encoder
    assert vision == sum(layer.parameters for layer in preset("qwen2.5-vl-7b") if isinstance(layer, TowerLayer)) - 1280


def test_a_head_is_tied_if_the_whole_model_says_so() -> None:
    from octopipe.models.tower_presets import CONFIGS

    config: dict[str, Any] = json.loads(json.dumps(CONFIGS["qwen2.5-omni-7b"][1]))
    config["text_config"]["tie_word_embeddings"] = True
    assert not from_config(config).layers[-1].tied_parameters
    config["tie_word_embeddings"] = True
    assert from_config(config).layers[-1].tied_parameters


def test_other_pairs_of_towers_and_whole_families_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = {"vision_config": {"depth": 2}, "audio_config": {"d_model": 8}}
    with pytest.raises(OctoPipeError, match=r"two towers, which can be read for qwen2_5_omni_thinker .* not for 'x'"):
        from_config({"model_type": "x", **both})
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen2_5_omni", "thinker_config": both}))
    assert main(["simulate", str(path), "--pp", "2"]) == 2
    said = capsys.readouterr().err.strip()
    assert "several models, of which one is trained at a time" in said and "Traceback" not in said

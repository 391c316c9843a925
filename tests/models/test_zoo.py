"""Presets have the layer counts and sizes that were published."""

from __future__ import annotations

import json

import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.models.zoo import PRESETS, names, preset

# Billions of parameters to the digits published, and layers between embedding and head (a "+ 1" is a
# multi-token prediction module, which the published sizes leave out).
PUBLISHED = {
    "nemotron-h-4b": ("4.49", 52),
    "nemotron-h-8b": ("8.10", 52),
    "nemotron-h-47b": ("46.79", 98),
    "nemotron-h-56b": ("56.32", 118),
    "nemotron-nano-v2-9b": ("8.89", 56),
    "nemotron-3-nano-30b": ("31.58", 52),
    "llama3-8b": ("8.03", 32),
    "llama3-32b": ("32.58", 64),
    "llama3-70b": ("70.55", 80),
    "gpt-13b": ("12.86", 40),
    "llama3.1-405b": ("405.85", 126),
    "llama2-7b": ("6.74", 32),
    "llama2-13b": ("13.02", 40),
    "llama2-70b": ("68.98", 80),
    "gpt3-5b": ("5.0", 24),
    "gpt3-175b": ("174.6", 96),
    "nemotron-340b": ("341", 96),
    "qwen3-30b-a3b": ("30.53", 48),
    "qwen3-235b-a22b": ("235.09", 94),
    "jamba-20b": ("20.95", 32),
    "jamba-52b": ("52.1", 64),
    "jamba-100b": ("102.5", 144),
    "deepseek-v3": ("671.0", 61 + 1),
    "kimi-k2": ("1026", 61),
    "gpt-oss-120b": ("116.8", 36),
    "gpt-oss-20b": ("20.9", 24),
    "qwen3-next-80b": ("79.7", 48),
    "minimax-01": ("456.1", 80),
    "gemma-3-27b": ("27.0", 62),
    "glm-4.5": ("352.8", 92 + 1),
    "glm-4.5-air": ("106.9", 46 + 1),
    # A tower's layers, the joining layer, the decoder's.
    "qwen2.5-vl-7b": ("8.29", 32 + 1 + 28),
    "qwen2.5-omni-7b": ("8.93", 32 + 1 + 32 + 1 + 28),
    "llava-1.5-7b": ("7.06", 24 + 1 + 32),
    "gemma-3-27b-vision": ("27.4", 27 + 1 + 62),
    "whisper-large-v3": ("1.54", 32 + 1 + 32),
    "t5-v1.1-xxl": ("11.1", 24 + 1 + 24),
}
MIX = {
    "nemotron-h-4b": {"M": 24, "-": 24, "*": 4},
    "nemotron-h-8b": {"M": 24, "-": 24, "*": 4},
    "nemotron-h-47b": {"M": 45, "-": 48, "*": 5},
    "nemotron-h-56b": {"M": 54, "-": 54, "*": 10},
    "nemotron-nano-v2-9b": {"M": 27, "-": 25, "*": 4},
    "nemotron-3-nano-30b": {"M": 23, "-": 0, "*": 6, "#": 23},
    "deepseek-v3": {"T": 3, "X": 58, "P": 1},
    "kimi-k2": {"T": 1, "X": 60},
    "gpt-oss-120b": {"x": 18, "X": 18},
    "qwen3-next-80b": {"G": 36, "X": 12},
    "minimax-01": {"N": 70, "X": 10},
    "gemma-3-27b": {"t": 52, "T": 10},
    "glm-4.5": {"T": 3, "X": 89, "P": 1},
}


def test_the_table_covers_every_preset():
    assert set(PUBLISHED) == set(names()) == set(PRESETS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_size_and_depth_match_the_published_ones(name):
    size, depth = PUBLISHED[name]
    spec = preset(name)
    digits = len(size.partition(".")[2])
    assert f"{spec.parameters / 1e9:.{digits}f}" == size
    assert (spec.name, spec.num_layers) == (name, depth + 2)


@pytest.mark.parametrize("name", MIX)
def test_layer_kinds_are_mixed_as_published(name):
    pattern = preset(name).pattern[1:-1]
    assert {symbol: pattern.count(symbol) for symbol in MIX[name]} == MIX[name]
    assert set(pattern) <= set(MIX[name])


def test_patterns_agree_with_the_authors_layer_times(profiles):
    for path in sorted(profiles.glob("*.json")):
        # Their Jamba-20B file has twice the layers of the paper's table; the preset follows the table.
        if path.stem in PRESETS and path.stem != "jamba-20b":
            assert preset(path.stem).pattern == json.loads(path.read_text())["pattern"]


@pytest.mark.parametrize(
    ("typo", "meant"), [("nemotron-h-56", "nemotron-h-56b"), ("LLaMA3_8B", "llama3-8b"), ("kimi2", "kimi-k2")]
)
def test_an_unknown_name_suggests_the_nearest(typo, meant):
    with pytest.raises(OctoPipeError) as caught:
        preset(typo)
    assert meant in str(caught.value) and "octopipe models" in str(caught.value)


def test_a_hopeless_name_still_says_how_to_list():
    with pytest.raises(OctoPipeError, match="octopipe models") as caught:
        preset("zzzzzzzzzzzz\n" * 50)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300

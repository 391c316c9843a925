"""Models with a tower for images and one for recordings: their pieces, and batches that have one kind, both or none."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from hf_towers import drawn, tiny_tower, tower_difference, twin_of  # noqa: E402
from hf_versions import since  # noqa: E402

from octopipe.huggingface import layers  # noqa: E402
from octopipe.huggingface.examples import example_of  # noqa: E402

THINKERS = ["qwen2_5_omni_thinker", pytest.param("qwen3_omni_moe_thinker", marks=pytest.mark.slow)]
STACKS = ["model.audio_tower.layers", "model.visual.blocks", "model.language_model.layers"]
IMAGES, RECORDINGS = ("pixel_values", "image_grid_thw"), ("input_features", "feature_attention_mask")


@since("5.18")  # older ones have the towers elsewhere
@pytest.mark.parametrize("family", THINKERS)
def test_both_towers_are_layers_and_the_pieces_are_the_model(family: str) -> None:
    off, parts = tower_difference(family)
    assert off < 1e-6
    assert list(dict.fromkeys(name for name in parts.stacks if "." in name)) == STACKS
    assert {*IMAGES, *RECORDINGS} <= parts.example.keys()


def test_batches_with_one_kind_or_none_pass_the_other_tower_untouched() -> None:
    """Each batch is compared with the unsplit model; the places of what is left out become words."""
    config = tiny_tower("qwen2_5_omni_thinker")
    model = twin_of("qwen2_5_omni_thinker", config)
    given = drawn(example_of(model))
    parts = layers(model)
    for left_out in (IMAGES, RECORDINGS, (*IMAGES, *RECORDINGS)):
        batch = {name: value for name, value in given.items() if name not in left_out}
        ids = batch["input_ids"].clone()
        for kind, names in (("image", IMAGES), ("audio", RECORDINGS)):
            if names[0] in left_out:
                ids[ids == getattr(config, f"{kind}_token_id")] = 7
        batch["input_ids"] = ids
        value: Any = batch
        for module in parts:
            value = module(value)  # type: ignore[operator]
        assert torch.allclose(value, model(**batch, use_cache=False).logits, atol=1e-10)

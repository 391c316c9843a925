"""Examples that are made up for models which take more than tokens: one family for every form of their inputs."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from effort import some  # noqa: E402
from hf_families import tiny_config  # noqa: E402
from hf_towers import drawn, tiny_tower, tower_difference, twin_of  # noqa: E402
from hf_versions import since  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.huggingface import layers  # noqa: E402
from octopipe.huggingface.examples import example_of  # noqa: E402
from octopipe.huggingface.inputs import form_of  # noqa: E402
from octopipe.huggingface.sections import stacks  # noqa: E402
from octopipe.huggingface.source import build_on_meta  # noqa: E402

FORMS = {
    "idefics3": {"pixel_values": 5, "pixel_attention_mask": 4},
    "voxtral_realtime": {"input_features": 3},
    "pix2struct": {"flattened_patches": 3},
    "git": {"pixel_values": 4},
    "llava_next": {"pixel_values": 5, "image_sizes": 2},
    "lfm2_vl": {"pixel_values": 3, "spatial_shapes": 2, "pixel_attention_mask": 2},
    "gemma4": {"pixel_values": 3, "image_position_ids": 3, "mm_token_type_ids": 2},
    "kimi_k25": {"pixel_values": 4, "image_grid_thw": 2},
    "video_llama_3": {"pixel_values": 2, "image_grid_thw": 2, "image_merge_sizes": 1},
    "mllama": {"pixel_values": 6, "aspect_ratio_ids": 2, "aspect_ratio_mask": 3},
    "granite_speech": {"input_features": 3},
    "glmasr": {"input_features": 3, "input_features_mask": 2},
    "evolla": {"protein_input_ids": 2, "protein_attention_mask": 2},
    "instructblip": {"pixel_values": 4, "qformer_input_ids": 2},
    "kosmos-2.5": {"flattened_patches": 3, "image_embeds_position_mask": 2},
    "phi4_multimodal": {"image_pixel_values": 5, "image_sizes": 2, "image_attention_mask": 4},
    "deepseek_vl_hybrid": {"pixel_values": 4, "high_res_pixel_values": 4},
    "molmo2": {
        "pixel_values": 3,
        "image_token_pooling": 2,
        "image_grids": 2,
        "image_num_crops": 1,
        "mm_token_type_ids": 2,
    },
    "nemotron_h_omni": {"pixel_values": 2, "image_grid_hw": 2},
    "fun_asr_nano": {"input_features": 3, "input_features_mask": 2},
    "emu3": {"pixel_values": 4, "image_sizes": 2},
    "udop": {"bbox": 3, "pixel_values": 4},
    "vibevoice": {"input_values": 3, "padding_mask": 2},
}
"""By family: the inputs of its example beside tokens, with their number of dimensions."""
OTHERS = ["longt5", "vision-encoder-decoder", "canary", "aria", "blip-2", "inkling_mm_model", "llama4", "unlimited_ocr"]
OTHERS += ["dia", "moonshine_streaming", "nemo_speechlm", "granite4_vision"]
"""Layers that return five results, decoders of other kinds, layers that change the shape of the hidden state, decoders
of several channels, recordings of whole frames, towers of several parts."""


@pytest.mark.parametrize(
    "family", [*list(FORMS)[:4], *(pytest.param(f, marks=pytest.mark.slow) for f in list(FORMS)[4:])]
)
def test_a_form_of_inputs_is_found_and_the_pieces_are_the_model(family: str) -> None:
    off, parts = tower_difference(family)
    assert off < 1e-6
    found = {name: value.ndim for name, value in parts.example.items() if name != "input_ids"}
    found.pop("decoder_input_ids", None)
    assert found == FORMS[family]


@pytest.mark.parametrize("family", [OTHERS[0], *(pytest.param(f, marks=pytest.mark.slow) for f in OTHERS[1:])])
def test_models_of_other_kinds_are_their_pieces(family: str) -> None:
    assert tower_difference(family)[0] < 1e-6


def test_patches_are_counted_in_merged_squares_where_the_model_counts_so() -> None:
    """Its rows are squares of 2 x 2 patches of 4 x 4 pixels, and its grid counts these squares."""
    found = example_of(twin_of("inkling2", tiny_tower("inkling2"), torch.float32))
    assert found["pixel_values"].shape == (5 * 4, 8, 8, 3)
    assert found["image_grid_thw"].tolist() == [[1, 2, 2]] * 5
    assert int((found["input_ids"] == 500).sum()) == 5 * 4


@pytest.mark.slow
def test_a_model_that_knows_single_precision_alone_is_its_pieces() -> None:
    assert tower_difference("inkling2", torch.float32)[0] < 1e-4


def test_words_that_a_forward_rules_out_do_not_hide_which_loss_it_has() -> None:
    """Chameleon never predicts image tokens: as labels they have an infinite loss, whatever the function is."""
    assert tower_difference("chameleon")[0] < 1e-6


def test_images_that_are_padding_are_left_out_in_every_piece() -> None:
    """Which images are real is read from their values, and every piece runs the forward from its beginning."""
    config = tiny_tower("idefics3")
    model = twin_of("idefics3", config)
    row = drawn(example_of(model))
    pixels = row["pixel_values"].repeat(1, 2, 1, 1, 1)
    pixels[1:, 1] = 0.0
    token, ids = config.image_token_id, row["input_ids"]
    marked = int((ids[0] == token).sum())
    second = torch.full((len(ids), marked), 7)
    second[0] = token
    given = {
        "input_ids": torch.cat((ids, second), 1),
        "pixel_values": pixels,
        "pixel_attention_mask": row["pixel_attention_mask"].repeat(1, 2, 1, 1),
    }
    value: Any = given
    for module in layers(model):
        value = module(value)  # type: ignore[operator]
    assert torch.allclose(value, model(**given, use_cache=False).logits, atol=1e-12)


@pytest.mark.parametrize("family", some(["qwen3_omni_moe_thinker", "musicgen"]))
def test_lists_of_torchs_own_operations_are_no_stacks(family: str) -> None:
    """The projector's products of one, the embeddings of the other: their number may be that of some layers."""
    config = tiny_config(family) if family == "musicgen" else tiny_tower(family)
    found = stacks(build_on_meta(config, dtype=torch.float32, attention=None))
    assert found and all(name.endswith(("layers", "blocks")) for name in found)


def test_pieces_leave_the_model_as_it_is() -> None:
    """A parameter of UDOP's decoder is tied to one inside a layer of its encoder, which pieces see as a placeholder."""
    model = twin_of("udop", tiny_tower("udop"))
    given = drawn(example_of(model))
    wanted = model(**given, use_cache=False).logits
    parts = layers(model)
    for _ in range(2):
        value: Any = given
        for module in parts:
            value = module(value)  # type: ignore[operator]
        assert torch.equal(value, wanted)
    assert torch.equal(model(**given, use_cache=False).logits, wanted)


@pytest.mark.parametrize("smoothing", some([0.1, 0.0]))
def test_a_loss_of_smoothed_labels_is_the_models(smoothing: float) -> None:
    assert tower_difference("blip", text_config={"label_smoothing": smoothing})[0] < 1e-6


def test_what_is_no_language_model_is_refused_with_its_reason() -> None:
    class Several(transformers.LlamaForCausalLM):  # type: ignore[misc]
        forward = torch.nn.Module.forward

    several = Several(tiny_config("llama"))
    with pytest.raises(OctoPipeError, match=r"Several has no forward of its own: its generate runs model, lm_head"):
        layers(several)
    with pytest.raises(OctoPipeError, match="PI0ForConditionalGeneration predicts no tokens: its config has no vocab"):
        layers(tiny_tower("pi0"))


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("dia", "decoder_input_ids of several channels"),
        pytest.param("udop", "its inputs", marks=pytest.mark.slow),
        pytest.param("molmo2", "image_token_pooling", marks=pytest.mark.slow),
    ],
)
def test_commands_refuse_models_whose_batches_they_cannot_make_up(family: str, named: str) -> None:
    config = tiny_tower(family)
    example = example_of(build_on_meta(config, dtype=torch.float32, attention=None))
    with pytest.raises(OctoPipeError, match=f"octopipe cannot make up batches of {named}; train it in a loop"):
        form_of(example, config, num_tower_layers=4, vocab=512)


@since("5.18")
def test_models_of_several_codebooks_are_refused_with_their_number() -> None:
    with pytest.raises(OctoPipeError, match="MusicgenForCausalLM takes codes of 4 codebooks for every position, not"):
        layers(tiny_config("musicgen"))


@pytest.mark.slow
def test_with_an_example_codes_of_several_codebooks_share_a_label() -> None:
    model = twin_of("kyutai_speech_to_text", tiny_tower("kyutai_speech_to_text"))
    ids = torch.randint(4, 8, (5, 7, 3), generator=torch.Generator().manual_seed(1))
    parts = layers(model, example={"input_ids": ids})
    wanted = model(input_ids=ids, labels=ids[..., 0], use_cache=False)
    value: Any = {"input_ids": ids}
    for module in parts:
        value = module(value)  # type: ignore[operator]
    assert torch.equal(value, wanted.logits)
    assert abs(float((parts.loss_fn(value, ids[..., 0]) - wanted.loss).detach())) < 1e-6


def test_a_forward_without_labels_has_no_loss() -> None:
    class Silent(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **more: Any) -> Any:
            return super().forward(input_ids, attention_mask, position_ids, **more)

    parts = layers(Silent(tiny_config("llama")))
    with pytest.raises(OctoPipeError, match="Silent computes no loss: its forward takes no labels; give Pipeline"):
        _ = parts.loss_fn


def test_a_loss_of_more_than_the_logits_is_refused_with_its_reason() -> None:
    parts = layers(twin_of("prophetnet", tiny_tower("prophetnet")))
    with pytest.raises(OctoPipeError, match="its loss uses more logits than its forward returns"):
        _ = parts.loss_fn

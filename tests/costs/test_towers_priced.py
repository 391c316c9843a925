"""Costs of models with a tower or an encoder: against counts by hand, and against a plain decoder's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.analytic.flops import layer_flops
from octopipe.costs.resolve import resolve_costs
from octopipe.models.spec import Attention, Block, ModelSpec
from octopipe.models.towers import CrossBlock, Join, TowerLayer
from octopipe.models.zoo import preset

QWEN, LLAVA, WHISPER, T5 = (preset(n) for n in ("qwen2.5-vl-7b", "llava-1.5-7b", "whisper-large-v3", "t5-v1.1-xxl"))
GPU: dict[str, Any] = {"gpu": "h100", "tp": 1}


@pytest.mark.parametrize(
    ("spec", "billions"),
    [(QWEN, 8.29), (LLAVA, 7.06), (WHISPER, 1.54), (T5, 11.14), (preset("gemma-3-27b-vision"), 27.4)],
)
def test_sizes_are_the_published_ones(spec: ModelSpec, billions: float) -> None:
    assert spec.parameters / 1e9 == pytest.approx(billions, rel=5e-3)


def test_a_towers_layer_works_on_its_patches_and_not_on_the_tokens() -> None:
    layer = LLAVA.layers[1]
    assert isinstance(layer, TowerLayer) and isinstance(layer.inner, Block)
    width, ffn, patches = 1024, 4096, 576
    # Four projections and two feed-forward matrices; scores and weighted values over all patches, none left out.
    by_hand = 2 * patches * (4 * width * width + 2 * width * ffn) + 4 * patches * patches * width
    for seq in (1024, 4096):
        assert layer_flops(layer, seq=seq).forward == by_hand
    assert layer_flops(layer, seq=1024, micro_batch_size=3).forward == 3 * by_hand


def test_windowed_attention_in_a_tower_costs_its_window() -> None:
    windowed, whole = (QWEN.layers[k] for k in (1, 8))
    gap = layer_flops(whole, seq=8192).forward - layer_flops(windowed, seq=8192).forward
    assert gap == 4 * 4096 * (4096 - 64) * 1280


def test_cross_attention_reads_the_encoders_positions() -> None:
    block = T5.layers[-2]
    assert isinstance(block, CrossBlock)
    width, inner, seq, read = 4096, 64 * 64, 256, 512
    keys_and_values = 2 * read * width * 2 * inner
    own = 2 * seq * 2 * width * inner
    work = layer_flops(block.cross, seq=seq).forward  # type: ignore[arg-type]
    assert work == keys_and_values + own + 4 * seq * read * inner


def test_costs_grow_with_the_images_and_only_in_the_tower_and_its_join() -> None:
    one, two = (resolve_costs(QWEN, pp=4, seq=8192, images=n, **GPU) for n in (1, 2))
    towers = np.array([isinstance(layer, TowerLayer) for layer in QWEN])
    joins = np.array([isinstance(layer, Join) for layer in QWEN])
    assert (two.forward_ms[towers] > 1.1 * one.forward_ms[towers]).all()  # one image does not fill the GPU
    four, eight = (resolve_costs(QWEN, pp=4, seq=16384, images=n, **GPU) for n in (4, 8))
    assert (eight.forward_ms[1:33] > 1.8 * four.forward_ms[1:33]).all()
    assert two.activation_bytes[1:33] == pytest.approx(2 * one.activation_bytes[1:33])
    assert (two.layer_ms[joins] > one.layer_ms[joins]).all()
    assert (two.layer_ms[~towers & ~joins] == one.layer_ms[~towers & ~joins]).all()
    half = resolve_costs(QWEN, pp=4, seq=8192, images=0.5, **GPU)
    assert half.forward_ms[towers] == pytest.approx(0.5 * one.forward_ms[towers])
    none = resolve_costs(QWEN, pp=4, seq=8192, images=0, **GPU)
    assert not none.layer_ms[towers].any()


def test_micro_batches_with_their_own_images_have_their_own_factor(tmp_path: Path) -> None:
    counts = [0, 3, 1, 4]
    costs = resolve_costs(QWEN, pp=4, seq=8192, images=counts, **GPU)
    assert costs.setup is not None and costs.setup.micro_batches == 4
    assert costs.micro_batch_factor is not None
    factor = costs.micro_batch_factor
    assert (factor[:, -2] == 1).all()
    # Priced one by one, each count costs what the mean costs times its factor, and holds no more than is said.
    alone = [resolve_costs(QWEN, pp=4, seq=8192, images=n, **GPU) for n in counts]
    assert costs.layer_ms[1] * factor[:, 1] == pytest.approx([c.layer_ms[1] for c in alone], rel=1e-9, abs=1e-4)
    assert (costs.activation_bytes[1] * factor[:, 1] >= [0.999 * c.activation_bytes[1] for c in alone]).all()
    file = tmp_path / "images.txt"
    file.write_text("0 # text alone\n3\n\n1\n4\n")
    again = resolve_costs(QWEN, pp=4, seq=8192, images=str(file), **GPU)
    assert again.digest() == costs.digest()
    with pytest.raises(OctoPipeError, match=r"images of 4 sequences for 3 micro-batches"):
        resolve_costs(QWEN, pp=4, seq=8192, images=counts, micro_batches=3, **GPU)


def test_a_frozen_tower_costs_no_backward_and_holds_no_state() -> None:
    free, still = resolve_costs(LLAVA, pp=4, **GPU), resolve_costs(LLAVA, pp=4, frozen="towers", **GPU)
    towers = np.array([isinstance(layer, TowerLayer) for layer in LLAVA])
    assert (still.forward_ms == free.forward_ms).all()
    assert not (still.input_ms[towers].any() or still.weight_ms[towers].any() or still.gradient_bytes[towers].any())
    assert not still.activation_bytes[towers].any()
    assert (still.layer_ms[~towers] == free.layer_ms[~towers]).all()
    assert still.setup is not None and "layers 0-24 frozen" in still.setup.words()


def test_a_frozen_tower_hands_over_no_more_than_its_images_make() -> None:
    """A micro-batch without images must not raise what the others send."""
    counts = [0, 3, 1, 4]
    free, still = (resolve_costs(QWEN, pp=4, seq=8192, images=counts, frozen=f, **GPU) for f in ("", "towers"))
    towers = np.array([isinstance(layer, TowerLayer) for layer in QWEN])
    most = np.asarray(still.micro_batch_factor).max(axis=0)[towers] * still.boundary_bytes[towers]
    alone = resolve_costs(QWEN, pp=4, seq=8192, images=max(counts), frozen="towers", **GPU).boundary_bytes[towers]
    assert (most >= 0.999 * alone).all() and (most < 2 * alone).all()
    assert (still.boundary_bytes[~towers] == free.boundary_bytes[~towers]).all()


def test_what_an_encoder_decoders_decoder_hands_on_includes_the_encoders_output() -> None:
    costs = resolve_costs(T5, pp=4, seq=256, encoder_seq=1024, **GPU)
    width = 4096
    assert costs.boundary_bytes[1] == 2 * 1024 * width
    assert costs.boundary_bytes[-2] == 2 * (256 + 1024) * width
    assert costs.boundary_bytes[-1] == 0


def test_a_decoder_is_priced_as_the_text_model_alone_is() -> None:
    text = ModelSpec(name="text", layers=(QWEN.layers[33].embedding, *QWEN.layers[34:]), norm_eps=1e-6)  # type: ignore[attr-defined]
    alone, together = resolve_costs(text, pp=4, seq=4096, **GPU), resolve_costs(QWEN, pp=4, seq=4096, **GPU)
    assert (alone.layer_ms[1:] == together.layer_ms[34:]).all()
    assert (alone.static_bytes[1:] == together.static_bytes[34:]).all()


@pytest.mark.parametrize(
    ("model", "asked", "said"),
    [
        ("llama3-8b", {"images": 2}, "has no tower and no encoder; images has no effect"),
        ("llama3-8b", {"encoder_seq": 64}, "encoder_seq has no effect"),
        ("llama3-8b", {"frozen": "towers"}, "has no tower and no encoder to freeze"),
        ("t5-v1.1-xxl", {"images": 2}, "reads one source text per sequence"),
        ("llava-1.5-7b", {"encoder_seq": 100}, "reads every image as 576 positions"),
        ("llava-1.5-7b", {"images": 9}, "9 images of 576 tokens do not fit in a sequence of 4096"),
        ("qwen2.5-vl-7b", {"encoder_seq": 32768}, "1 images of 8192 tokens do not fit in a sequence of 4096"),
        ("llava-1.5-7b", {"images": -1}, "is not a number of items"),
    ],
)
def test_what_changes_nothing_or_cannot_be_is_refused(model: str, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(OctoPipeError, match=said):
        resolve_costs(model, pp=4, **GPU, **asked)


def test_a_list_of_images_names_what_is_no_number_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["simulate", "qwen2.5-vl-7b", "--pp", "4", "--system", "1f1b"]
    with pytest.raises(SystemExit) as stopped:
        main([*flags, "--images", "1,x"])
    assert stopped.value.code == 2
    assert "'x' is not a number of items; give numbers separated by commas" in capsys.readouterr().err
    assert main([*flags, "--images", "counts.txt"]) == 2
    assert "counts.txt: no such file" in capsys.readouterr().err


def test_images_of_measured_times_say_where_to_measure_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = {"format": "octopipe.layer-times/1", "model": "seen", "pattern": "vVJTL", "forward_ms": [1] * 5}
    file |= {"backward_ms": [1] * 5, "weight_ms": [1] * 5}
    path = tmp_path / "times.json"
    path.write_text(json.dumps(file))
    assert main(["simulate", str(path), "--pp", "2", "--images", "0,1"]) == 2
    assert "measure with it (octopipe profile --images ...)" in capsys.readouterr().err


def test_attention_of_a_decoder_stays_causal() -> None:
    causal = Attention(hidden=64, heads=4, kv_heads=4, head_dim=16)
    both_ways = Attention(hidden=64, heads=4, kv_heads=4, head_dim=16, causal=False)
    gap = layer_flops(both_ways, seq=32).forward - layer_flops(causal, seq=32).forward
    assert gap == 2 * 32 * 32 * 64

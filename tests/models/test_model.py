"""Layers count their parameters like the tensors they stand for; specs keep their shape when they shrink."""

from __future__ import annotations

import pickle

import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.models.spec import (
    Attention,
    Block,
    Embedding,
    Head,
    LatentAttention,
    Mamba2,
    Mlp,
    ModelSpec,
    Moe,
    Mtp,
)
from octopipe.models.zoo import names, preset

H = 64
ATTENTION = Attention(hidden=H, heads=4, kv_heads=2, head_dim=16)
MLP = Mlp(hidden=H, ffn=128)


def tiny(*inner, vocab=256):
    return ModelSpec(name="tiny", layers=(Embedding(hidden=H, vocab=vocab), *inner, Head(hidden=H, vocab=vocab)))


def test_parameters_equal_the_written_out_shapes():
    assert ATTENTION.parameters == 64 * 64 + 2 * 64 * 32 + 64 * 64 + 64
    biased = Attention(
        hidden=H, heads=4, kv_heads=2, head_dim=16, qkv_bias=True, out_bias=True, norm="layer", sinks=True
    )
    assert biased.parameters == ATTENTION.parameters + 64 + 32 + 32 + 64 + 64 + 4
    assert MLP.parameters == 3 * 64 * 128 + 64
    assert Mlp(hidden=H, ffn=128, activation="relu2").parameters == 2 * 64 * 128 + 64
    mamba = Mamba2(hidden=H, heads=8, head_dim=16, state=8, groups=2)
    conv = 128 + 2 * 2 * 8
    shapes = [64 * (128 + conv + 8), conv * 4, conv, 8, 8, 8, 128, 128 * 64, 64]
    assert mamba.parameters == sum(shapes)
    moe = Moe(hidden=H, experts=4, top_k=2, ffn=32, shared_ffn=40)
    assert moe.parameters == 4 * 3 * 64 * 32 + 4 * 64 + 3 * 64 * 40 + 64


def test_a_tied_head_and_a_prediction_module_are_not_counted_twice():
    block = Block(mixer=ATTENTION, ffn=MLP)
    spec = ModelSpec(
        name="tied",
        layers=(
            Embedding(hidden=H, vocab=256),
            block,
            Mtp(vocab=256, block=block),
            Head(hidden=H, vocab=256, tied=True, predictions=2),
        ),
    )
    assert spec.parameters == 256 * H + block.parameters + H
    assert spec.training_parameters == spec.parameters + block.parameters + 2 * H * H + 3 * H
    assert spec.layers[-1].tied_parameters == 256 * H
    assert spec.pattern == "ETPL" and spec.without_mtp().pattern == "ETL"


def test_symbols_tell_apart_what_costs_differently():
    window = Attention(hidden=H, heads=4, kv_heads=2, head_dim=16, window=8)
    moe = Moe(hidden=H, experts=4, top_k=2, ffn=32)
    blocks = [Block(mixer=mixer, ffn=ffn) for mixer in (ATTENTION, window) for ffn in (MLP, moe)]
    assert tiny(*blocks).pattern == "ETXtxL"
    assert tiny(*blocks).split().pattern == "E*-*#~-~#L"


@pytest.mark.parametrize("name", names())
def test_splitting_blocks_keeps_every_parameter(name):
    spec = preset(name)
    assert spec.split().parameters == spec.parameters


@pytest.mark.parametrize("name", names())
def test_every_preset_has_symbols_that_tell_its_layer_kinds_apart(name):
    # A layer-times file has one time per symbol: two different layers must not share one.
    kinds = {}
    for layer in preset(name).layers:
        assert kinds.setdefault(layer.symbol, layer) == layer


@pytest.mark.parametrize("name", [name for name in names() if preset(name).source is None])
@pytest.mark.parametrize("factor", [1.0, 0.125, 1 / 64])
def test_scaling_keeps_the_pattern_and_shrinks_the_parameters(name, factor):
    spec = preset(name)
    small = spec.scaled(factor)
    assert small.pattern == spec.pattern
    if factor == 1.0:
        assert small == spec
    else:
        assert small.parameters < spec.parameters * factor * 1.2
        assert small.layers[-1].vocab == small.vocab < spec.vocab


def test_scaling_can_drop_layers_evenly():
    small = preset("nemotron-h-8b").scaled(1 / 16, num_layers=12)
    assert small.num_layers == 12 and small.pattern[0] == "E" and small.pattern[-1] == "L"
    assert set("M-") <= set(small.pattern)
    assert preset("deepseek-v3").scaled(1 / 64, num_layers=4).layers[-1].predictions == 1


@pytest.mark.parametrize("factor", [0.0, -1.0, 2.0, float("nan"), float("inf")])
def test_a_bad_scale_is_refused(factor):
    with pytest.raises(OctoPipeError, match="scale factor"):
        preset("llama3-8b").scaled(factor)


def test_bad_dimensions_are_refused_by_name():
    for build, word in (
        (lambda: Mlp(hidden=H, ffn=0), "ffn"),
        (lambda: Mlp(hidden=-1, ffn=8), "hidden"),
        (lambda: Attention(hidden=H, heads=5, kv_heads=2, head_dim=16), "multiple"),
        (lambda: Moe(hidden=H, experts=2, top_k=4, ffn=8), "top_k"),
        (lambda: Mamba2(hidden=H, heads=6, head_dim=8, state=8, groups=4), "multiple"),
        (lambda: Block(mixer=ATTENTION, ffn=Mlp(hidden=32, ffn=8)), "widths"),
        (lambda: tiny(Mlp(hidden=32, ffn=8)), "layer 1"),
        (lambda: ModelSpec(name="none", layers=()), "embedding"),
    ):
        with pytest.raises(OctoPipeError, match=word):
            build()


def test_a_spec_travels_between_processes():
    spec = preset("qwen3-next-80b")
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_latent_attention_knows_its_replicated_part():
    mixer = LatentAttention(hidden=H, heads=4, q_rank=20, kv_rank=12, nope_dim=16, rope_dim=8, v_dim=14)
    assert mixer.down_parameters == 64 * 20 + 20 + 64 * 20 + 12

"""Frozen layers and adapters: what is trained, held and computed, against counts by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.resolve import costs_of_setup
from octopipe.costs.table import CostTable
from octopipe.models.zoo import preset

LLAMA = preset("llama3-8b")
BLOCKS, HIDDEN, FFN, KV, VOCAB = 32, 4096, 14336, 1024, 128256


def table(**more: Any) -> CostTable:
    spec = more.pop("spec", LLAMA)
    return costs_of_setup(spec, Setup(gpu=gpu("h100"), seq=4096, micro_batches=8, **more))


def test_adapters_are_the_only_weights_with_gradients_and_state() -> None:
    rank, dp = 16, 8
    # Queries, keys and values are one matrix, gate and up another.
    sides = (HIDDEN + HIDDEN + 2 * KV) + (HIDDEN + HIDDEN) + (HIDDEN + 2 * FFN) + (FFN + HIDDEN)
    trained = BLOCKS * rank * sides
    costs = table(dp=dp, lora=rank)
    assert costs.gradient_bytes.sum() == 4 * trained
    assert costs.gradient_bytes[0] == costs.gradient_bytes[-1] == 0
    frozen = sum(layer.parameters for layer in LLAMA.layers)
    assert costs.static_bytes.sum() == pytest.approx(2 * frozen + (2 + 4 + 12 / dp) * trained)
    # ZeRO-3 divides frozen weights too.
    sharded = table(dp=dp, lora=rank, zero=3)
    assert sharded.static_bytes.sum() == pytest.approx((2 * frozen + 16 * trained) / dp)


def test_adapters_on_attention_alone_leave_the_rest_of_a_block_frozen() -> None:
    rank, dp = 16, 8
    sides = (HIDDEN + HIDDEN + 2 * KV) + (HIDDEN + HIDDEN)
    costs, everywhere = table(dp=dp, lora=rank, lora_on="attention"), table(dp=dp, lora=rank)
    assert costs.gradient_bytes.sum() == 4 * BLOCKS * rank * sides
    assert (costs.forward_ms[1:-1] < everywhere.forward_ms[1:-1]).all()
    assert costs.layer_ms.sum() < everywhere.layer_ms.sum()
    assert costs.setup is not None and "LoRA of rank 16 on attention" in costs.setup.words()


def test_adapters_save_the_weight_gradients_and_cost_a_little_forward() -> None:
    plain, costs = table(dp=8), table(dp=8, lora=16)
    assert (costs.forward_ms[1:-1] > plain.forward_ms[1:-1]).all()
    assert (costs.forward_ms[1:-1] < 1.15 * plain.forward_ms[1:-1]).all()
    assert (costs.weight_ms[1:-1] < 0.3 * plain.weight_ms[1:-1]).all()
    assert costs.weight_ms[0] == costs.weight_ms[-1] == 0, "embedding and head have no adapters"
    assert costs.model_flops == pytest.approx(2 / 3 * plain.model_flops)
    ranks = [float(table(dp=8, lora=rank).layer_ms.sum()) for rank in (4, 16, 64, 256)]
    assert ranks == sorted(ranks)


def test_adapters_of_experts_are_divided_as_the_experts_are() -> None:
    spec = preset("qwen3-30b-a3b")
    one, many = (table(spec=spec, dp=8, ep=ep, lora=8).gradient_bytes[1] / 4 for ep in (1, 8))
    experts = 128 * 8 * ((2048 + 2 * 768) + (768 + 2048))
    assert one - many == pytest.approx(experts * 7 / 8)


def test_a_frozen_layer_hands_the_gradient_on_and_nothing_else() -> None:
    plain, costs = table(dp=8), table(dp=8, frozen="5-8")
    rest = [i for i in range(plain.num_layers) if i not in (5, 6, 7, 8)]
    for name in ("forward_ms", "input_ms", "weight_ms", "static_bytes", "activation_bytes", "optimizer_ms"):
        np.testing.assert_array_equal(getattr(costs, name)[rest], getattr(plain, name)[rest], err_msg=name)
    assert (costs.weight_ms[5:9] == 0).all() and (costs.optimizer_ms[5:9] == 0).all()
    np.testing.assert_array_equal(costs.input_ms[5:9], plain.input_ms[5:9])
    assert (costs.static_bytes[5:9] == [2 * LLAMA.layers[i].parameters for i in range(5, 9)]).all()
    assert (costs.stash_bytes[5:9] == 0).all()


def test_layers_before_the_first_trained_one_run_forward_only() -> None:
    plain, costs = table(dp=8), table(dp=8, frozen=[[0, 16]])
    for name in ("input_ms", "weight_ms", "activation_bytes", "stash_bytes", "gradient_bytes"):
        assert not getattr(costs, name)[:17].any(), name
        np.testing.assert_array_equal(getattr(costs, name)[17:], getattr(plain, name)[17:])
    np.testing.assert_array_equal(costs.forward_ms, plain.forward_ms)
    again = table(dp=8, frozen="0-16", recompute="full")
    assert not again.input_ms[:17].any(), "what keeps nothing is not run again"
    # One pass of three for the first half, all three for the rest.
    assert plain.model_flops is not None and costs.model_flops is not None
    assert 1 / 3 < costs.model_flops / plain.model_flops < 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"frozen": "0-33"}, "leaves no layer to train"),
        ({"frozen": "30-40"}, "names layer 40; the model has layers 0 to 33"),
        ({"frozen": "a-b"}, "give ranges of layers like 0-15,33"),
        ({"frozen": "9-3"}, "give ranges of layers like 0-15,33"),
        ({"lora": 0}, "lora is 0; give a whole number >= 1"),
    ],
)
def test_what_cannot_be_frozen_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OctoPipeError, match=said):
        table(**given)

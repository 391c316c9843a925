"""Analytic costs: the FLOP and byte formulas written out again by hand, and how parallelism divides them."""

from __future__ import annotations

import numpy as np
import pytest

from octopipe.analytic import analytic_costs, layer_cost, layer_flops
from octopipe.calibration import Rates
from octopipe.cluster import Cluster, gpu
from octopipe.errors import OctoPipeError
from octopipe.model import Attention, Block, Embedding, Head, Mamba2, Mlp, Moe
from octopipe.zoo import names, preset

H800 = gpu("h800")
S, T, H, V = 4096, 4096, 8192, 131072
MLP = Mlp(hidden=H, ffn=32768, activation="relu2")
ATTENTION = Attention(hidden=H, heads=64, kv_heads=8, head_dim=128)
MAMBA = Mamba2(hidden=H, heads=256, head_dim=64, state=256)
MOE = Moe(hidden=H, experts=16, top_k=2, ffn=4096, shared_ffn=1024)
HEAD = Head(hidden=H, vocab=V)
# Products of any shape at half of the peak, kernels that start at once: what is left is arithmetic.
PLAIN = {"bf16": Rates(gemm=0.5, half=0.0, core=0.5, launch_ms=0.0, link=0.8)}


def test_flops_follow_the_published_counter():
    f = layer_flops(MLP, seq=S)
    assert f.forward == f.input == f.weight == 4 * T * H * 32768

    q, kv = 64 * 128, 8 * 128
    proj, core = 2 * T * H * (q + 2 * kv) + 2 * T * q * H, 2 * T * S * q
    f = layer_flops(ATTENTION, seq=S)
    assert (f.forward, f.input, f.weight) == (proj + core, proj + 2.5 * core, proj)

    di, gn, n, chunk = 256 * 64, 8 * 256, 256, 128
    gemm = 2 * T * H * (2 * di + 2 * gn + 256) + 2 * T * di * H
    scan = 2 * T * (chunk * gn + chunk * di + 2 * n * di)
    f = layer_flops(MAMBA, seq=S)
    assert (f.forward, f.input, f.weight) == (gemm + scan, gemm + 2.5 * scan, gemm)

    f = layer_flops(MOE, seq=S)
    assert f.forward == 2 * T * H * 16 + 2 * 6 * T * H * 4096 + 6 * T * H * 1024
    assert layer_flops(HEAD, seq=S).forward == 2 * T * H * V
    assert layer_flops(Embedding(hidden=H, vocab=V), seq=S).total == 0


def test_a_block_costs_what_its_parts_cost():
    block = Block(mixer=ATTENTION, ffn=MLP)
    parts = [layer_flops(part, seq=S).total for part in (ATTENTION, MLP)]
    assert layer_flops(block, seq=S).total == sum(parts)
    cluster = Cluster(gpu=H800, tp=8)
    whole, mixer, ffn = (layer_cost(x, cluster) for x in (block, ATTENTION, MLP))
    for name in ("forward_ms", "input_ms", "weight_ms", "activation_bytes", "stash_bytes", "static_bytes"):
        assert getattr(whole, name) == pytest.approx(getattr(mixer, name) + getattr(ffn, name))


def test_a_window_caps_the_attention_core():
    window = Attention(hidden=H, heads=64, kv_heads=8, head_dim=128, window=128)
    q = 64 * 128
    assert (
        layer_flops(ATTENTION, seq=S).forward - layer_flops(window, seq=S).forward
        == 2 * T * (S - 2 * 128) * q
    )
    assert layer_flops(window, seq=256).forward == layer_flops(ATTENTION, seq=256).forward


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("batch", [1, 2])
def test_activations_follow_the_formulas(tp, batch):
    t = T * batch
    cluster = Cluster(gpu=H800, tp=tp)
    q, kv, f = 64 * 128, 8 * 128, 32768
    di, gn, nh, n = 256 * 64, 8 * 256, 256, 256
    expected = {
        ATTENTION: 2 * t * (2 * H + 2 * q + 2 * kv),
        MLP: 2 * t * (2 * H + 2 * f),
        Mlp(hidden=H, ffn=f): 2 * t * (2 * H + 3 * f),
        MAMBA: 2 * t * (2 * H + (2 * di + 2 * gn + nh) + (di + 2 * gn) + 2 * di)
        + batch * 4 * (S // 128) * nh * 64 * n,
        Moe(hidden=H, experts=16, top_k=2, ffn=4096): 2 * t * (2 * H + 2 * (2 * H + 3 * 4096)) + 4 * t * 16,
        HEAD: 4 * t * H + 2 * t * V,
    }
    for layer, nbytes in expected.items():
        cost = layer_cost(layer, cluster, seq=S, micro_batch_size=batch)
        assert cost.activation_bytes == pytest.approx(nbytes / tp)
        assert 0 < cost.stash_bytes <= cost.activation_bytes


def test_without_sequence_parallelism_the_stream_is_whole():
    cluster = Cluster(gpu=H800, tp=8)
    cost = layer_cost(MLP, cluster, sequence_parallel=False)
    assert cost.activation_bytes == pytest.approx(2 * T * (2 * H + 2 * 32768 / 8))
    assert cost.boundary_bytes == 2 * T * H
    assert layer_cost(MLP, cluster).boundary_bytes == 2 * T * H / 8


@pytest.mark.parametrize("name", names())
def test_state_bytes_are_eighteen_a_parameter_over_one_gpu(name):
    spec = preset(name)
    table = analytic_costs(spec, Cluster(gpu=H800, tp=1))
    held = sum(layer.parameters + layer.tied_parameters for layer in spec.layers)
    assert table.static_bytes.sum() == pytest.approx(18 * held)
    assert table.gradient_bytes.sum() == pytest.approx(4 * held)


def test_a_distributed_optimizer_spreads_its_state():
    table = analytic_costs(preset("llama3-8b"), Cluster(gpu=H800, dp=4), distributed_optimizer=True)
    assert table.static_bytes.sum() == pytest.approx((6 + 12 / 4) * preset("llama3-8b").parameters)


def test_expert_parallelism_divides_experts_and_adds_traffic():
    alone = layer_cost(MOE, Cluster(gpu=H800, dp=8), rates=PLAIN)
    spread = layer_cost(MOE, Cluster(gpu=H800, dp=8, ep=8), rates=PLAIN)
    assert alone.static_bytes - spread.static_bytes == pytest.approx(18 * MOE.expert_parameters * 7 / 8)
    # Dispatch and combine of 2kTh(ep-1)/ep bytes each at 0.8 of 200 GB/s, in F and again in I.
    traffic_ms = 2 * 2 * 2 * T * H * 7 / 8 / (200e6 * 0.8)
    assert spread.forward_ms - alone.forward_ms == pytest.approx(traffic_ms, abs=0.01)
    assert spread.input_ms - alone.input_ms == pytest.approx(traffic_ms, abs=0.01)
    assert spread.weight_ms <= alone.weight_ms


def test_tensor_parallelism_divides_the_gemm_and_adds_its_collectives():
    one, eight = (layer_cost(MLP, Cluster(gpu=H800, tp=tp), rates=PLAIN) for tp in (1, 8))
    assert one.weight_ms == pytest.approx(layer_flops(MLP, seq=S).weight / (989e9 * 0.5))
    assert eight.weight_ms == pytest.approx(one.weight_ms / 8)
    traffic_ms = 2 * 7 / 8 * 2 * T * H / (200e6 * 0.8)
    assert eight.forward_ms - one.forward_ms / 8 == pytest.approx(traffic_ms, abs=0.02)


def test_few_tokens_are_bound_by_memory_and_not_by_flops():
    cost = layer_cost(MLP, Cluster(gpu=H800), seq=16, rates=PLAIN)
    # W reads and writes the fp32 gradient whatever the number of tokens.
    assert cost.weight_ms == pytest.approx(8 * (MLP.parameters - H) / (3.35e9 * 0.8))
    assert cost.forward_ms > 2 * (MLP.parameters - H) / (3.35e9 * 0.8)


def test_small_sides_of_a_product_cost_efficiency():
    rates = Rates(gemm=0.8, half=100.0, core=0.5)
    assert rates.product_share(100, 1e9, 1e9) == pytest.approx(0.4)
    assert rates.product_share(1e9, 1e9, 1e9) == pytest.approx(0.8)
    rows = [rates.product_share(n, 4096, 4096) for n in (16, 256, 4096, 65536)]
    assert rows == sorted(rows)


def test_the_embedding_has_no_input_gradient_and_the_head_no_output():
    table = analytic_costs(preset("nemotron-h-8b"), Cluster(gpu=H800, tp=8))
    assert table.input_ms[0] == 0 and table.weight_ms[0] > 0
    assert table.boundary_bytes[-1] == 0
    assert np.all(table.boundary_bytes[:-1] == 2 * T * 4096 / 8)


def test_a_prediction_module_hands_on_two_states_and_doubles_the_head():
    cluster = Cluster(gpu=H800, tp=8)
    spec = preset("deepseek-v3")
    with_mtp, without = analytic_costs(spec, cluster), analytic_costs(spec.without_mtp(), cluster)
    assert with_mtp.boundary_bytes[-2] == 2 * with_mtp.boundary_bytes[-3]
    # Kernels start once for both.
    assert 1.8 * without.forward_ms[-1] < with_mtp.forward_ms[-1] <= 2 * without.forward_ms[-1]


def test_micro_batches_of_different_length_scale_layer_kinds_differently():
    spec = preset("nemotron-h-8b")
    table = analytic_costs(spec, Cluster(gpu=H800), micro_batch_tokens=[4096, 8192, 1024])
    factor = table.micro_batch_factor
    assert factor.shape == (3, spec.num_layers) and np.allclose(factor[0], 1)
    mlp, attention = spec.pattern.index("-"), spec.pattern.index("*")
    assert factor[1, mlp] == pytest.approx(2, rel=0.05) and factor[1, attention] > factor[1, mlp] + 0.03
    assert 0.25 < factor[2, mlp] < 0.35
    assert table.tokens_per_micro_batch == round((4096 + 8192 + 1024) / 3)
    for i, seq in enumerate([4096, 8192, 1024]):
        exact = analytic_costs(spec, Cluster(gpu=H800), seq=seq).layer_ms
        assert np.allclose(table.layer_ms * factor[i], exact)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("gpu_name", ["h800", "l40s"])
def test_every_preset_has_finite_costs_everywhere(name, gpu_name):
    table = analytic_costs(preset(name), Cluster(gpu=gpu(gpu_name), tp=8, pp=8))
    assert np.all(table.forward_ms > 0) and np.all(table.input_ms[1:] > 0)
    assert np.all(table.stash_bytes <= table.activation_bytes)
    assert table.gpus_per_rank == 8


def test_the_model_flop_utilisation_stays_below_the_efficiencies():
    for name in names():
        spec = preset(name)
        table = analytic_costs(spec, Cluster(gpu=H800))
        flops = sum(layer_flops(layer, seq=S).total for layer in spec.layers)
        utilisation = flops / (table.layer_ms.sum() * H800.flops_per_ms)
        assert 0.1 < utilisation < 0.8, name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq": 0}, ["seq is 0"]),
        ({"seq": 1.5}, ["seq is 1.5"]),
        ({"micro_batch_size": -1}, ["micro_batch_size"]),
        ({"micro_batch_tokens": []}, ["micro_batch_tokens"]),
        ({"micro_batch_tokens": [4, 0]}, ["micro_batch_tokens[1]"]),
    ],
)
def test_bad_numbers_are_refused(change, words):
    with pytest.raises(OctoPipeError) as caught:
        analytic_costs(preset("llama3-8b"), Cluster(gpu=H800), **change)
    assert all(word in str(caught.value) for word in words)


def test_a_tensor_parallel_size_that_does_not_divide_is_named():
    cluster = Cluster(gpu=H800, tp=16)
    with pytest.raises(OctoPipeError, match=r"tp 16 does not divide the 40 heads of layer"):
        analytic_costs(preset("nemotron-nano-v2-9b"), cluster)

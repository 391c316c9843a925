"""Analytic costs: the FLOP and byte formulas written out again by hand, and how parallelism divides them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.costs.analytic.calibration import Rates
from octopipe.costs.analytic.flops import part_work
from octopipe.costs.analytic.footprint import Weights, megatron_activation_bytes
from octopipe.costs.analytic.pricing import Pricing
from octopipe.costs.analytic.reduction import reduction_ms
from octopipe.costs.analytic.table import (
    analytic_costs,
    checkpointed,
    layer_cost,
    layer_flops,
    setup_costs,
)
from octopipe.costs.analytic.traffic import exchange_ms, pass_round_ms, ring_ms
from octopipe.costs.cluster.hardware import Cluster, gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.models.lengths import Batch
from octopipe.models.spec import Attention, Block, Embedding, Head, KimiDeltaAttention, Mamba2, Mlp, ModelSpec, Moe
from octopipe.models.zoo import names, preset

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
    assert layer_flops(ATTENTION, seq=S).forward - layer_flops(window, seq=S).forward == 2 * T * (S - 2 * 128) * q
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
        MAMBA: 2 * t * (2 * H + (2 * di + 2 * gn + nh) + (di + 2 * gn) + 2 * di) + batch * 4 * (S // 128) * nh * 64 * n,
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
    tp = 8 if preset(name).source is None else 4  # 20 and 28 heads are not divided by 8
    table = analytic_costs(preset(name), Cluster(gpu=gpu(gpu_name), tp=tp, pp=8))
    works = [not all(isinstance(part, Embedding) for part in layer.parts) for layer in preset(name)]
    assert np.all(table.forward_ms > 0) and np.all(table.input_ms[works] > 0)
    assert np.all(table.stash_bytes <= table.activation_bytes)
    assert table.gpus_per_rank == tp


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


# -- by hand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 4])
def test_megatrons_published_activation_formulas_hold_in_every_column(tp):
    """Korthikanti et al., table 2: attention 11sbh + 5as^2b, feed-forward 19sbh, two norms 4sbh."""
    s, b, h, a = 96, 3, 64, 8
    sizes = {"seq": s, "batch": b, "hidden": h, "heads": a, "tp": tp}
    sbh = s * b * h
    assert megatron_activation_bytes(**sizes) == pytest.approx(sbh * (10 + 24 / tp + 5 * a * s / (h * tp)))
    assert megatron_activation_bytes(**sizes, sequence_parallel=True) == pytest.approx(sbh / tp * (34 + 5 * a * s / h))
    assert megatron_activation_bytes(**sizes, recompute="selective") == pytest.approx(sbh * (10 + 24 / tp))
    assert megatron_activation_bytes(**sizes, sequence_parallel=True, recompute="selective") == pytest.approx(
        34 * sbh / tp
    )
    assert megatron_activation_bytes(**sizes, recompute="full") == 2 * sbh
    one = {k: v for k, v in sizes.items() if k != "tp"}
    assert megatron_activation_bytes(**one) == megatron_activation_bytes(**one, tp=1)


@pytest.mark.parametrize(("hidden", "heads"), [(64, 6), (66, 8)])
def test_a_size_that_divides_heads_or_width_with_a_rest_is_refused(hidden, heads):
    with pytest.raises(OctoPipeError, match="tp 4 does not divide"):
        megatron_activation_bytes(seq=8, batch=1, hidden=hidden, heads=heads, tp=4)
    assert megatron_activation_bytes(seq=8, batch=1, hidden=64, heads=8) > 0  # nothing divides one


def test_a_packed_micro_batch_lies_between_one_sequence_and_two_halves():
    """Of sequences that attend to themselves alone only attention differs: it grows with the sum of squares."""
    spec, setup = preset("llama3-8b"), Setup(gpu=H800, seq=4096)

    def ms(count, length):
        return setup_costs(spec, Setup(gpu=H800, seq=length, micro_batch_size=count)).layer_ms

    groups = ((4096,), (2048, 2048), (3000, 1095), (1000, 2000, 1096))
    table = setup_costs(spec, setup, batch=Batch(groups=groups, packed=True))
    factor, base = table.micro_batch_factor, ms(1, 4096)
    assert np.allclose(factor[0], 1) and np.allclose(factor[1] * base, ms(2, 2048))
    for row, group in ((2, groups[2]), (3, groups[3])):
        half = 2048  # 4095 tokens are rounded up to two equal halves
        squares = sum(length**2 for length in group)
        part = (squares - 2 * half**2) / ((2 * half) ** 2 - 2 * half**2)
        assert np.allclose(factor[row] * base, ms(2, half) + part * (ms(1, 2 * half) - ms(2, half)))
    mean = sum(map(sum, groups)) / 4
    assert table.tokens_per_micro_batch == round(mean)
    attention = 32 * 2 * 4096  # layers, two products, width: FLOPs of attention a pair of tokens
    linear = (table.model_flops / 3 - sum(attention * n * n for g in groups for n in g) / 4) / mean
    one = setup_costs(spec, setup).model_flops / 3
    assert linear == pytest.approx((one - attention * 4096**2) / 4096)


def test_context_parallel_slices_of_a_shorter_micro_batch_are_whole():
    spec = preset("llama3-8b")
    table = setup_costs(spec, Setup(gpu=H800, cp=4, seq=8192), micro_batch_tokens=[8192, 4097, 4104])
    exact = setup_costs(spec, Setup(gpu=H800, cp=4, seq=4104)).layer_ms
    assert np.allclose(table.micro_batch_factor[1] * table.layer_ms, exact)  # two slices on each of four GPUs
    assert np.allclose(table.micro_batch_factor[2] * table.layer_ms, exact)


def test_state_is_whole_unless_a_distributed_optimizer_is_asked_for():
    spec, cluster = preset("llama3-8b"), Cluster(gpu=H800, dp=4)
    plain = analytic_costs(spec, cluster).static_bytes.sum()
    assert plain == analytic_costs(spec, cluster, distributed_optimizer=False).static_bytes.sum()
    assert plain == pytest.approx(18 * spec.parameters)
    assert layer_cost(MLP, cluster).static_bytes == pytest.approx(18 * MLP.parameters)


@pytest.mark.parametrize(
    ("keys", "shown"), [({}, False), ({"dp": 2}, True), ({"cp": 2}, True), ({"dp": 2, "zero": 3}, False)]
)
def test_gradients_are_reduced_where_there_are_replicas_and_at_the_end(keys, shown):
    setup = Setup(gpu=H800, **{"seq": 4096, "zero": 0, **keys})
    found = reduction_ms([Weights(1e6, 0.0), Weights(2e6, 0.0)], Pricing.of(setup, PLAIN))
    assert len(found) == 2
    if not shown:
        assert found == [0.0, 0.0]
    else:  # fp32 gradients scattered and gathered: half of them cross to the other GPU each time
        link = Cluster(gpu=H800).intra_link
        want = [2 * (link.latency_ms + 0.5 * 4 * n * link.ms_per_byte / 0.8) for n in (1e6, 2e6)]
        assert found == pytest.approx(want)


@pytest.mark.parametrize("kind", [ring_ms, exchange_ms, pass_round_ms])
def test_a_collective_of_one_gpu_or_of_nothing_takes_no_time(kind):
    cluster = Cluster(gpu=H800)
    assert kind(cluster, 1e6, 1, share=0.5) == 0.0 and kind(cluster, 0.0, 4, share=0.5) == 0.0
    assert kind(cluster, 1e-3, 2, share=0.5) > 0


def test_collectives_by_hand():
    """Eight GPUs a node: 16 of them fill two nodes, each eight apart from the next lie in nodes of their own."""
    cluster = Cluster(gpu=H800)
    near, far = cluster.intra_link, cluster.inter_link
    inside, across = near.ms_per_byte, far.ms_per_byte
    n = 64e6
    assert ring_ms(cluster, n, 4, share=0.5) == pytest.approx(2 * near.latency_ms + 2 * 3 / 4 * n * inside)
    slower = max(15 / 16 * n * inside, 1 / 2 * n * across / 8)
    assert ring_ms(cluster, n, 16, share=0.5) == pytest.approx(4 * far.latency_ms + 2 * slower)
    assert ring_ms(cluster, n, 4, 8, share=0.5) == pytest.approx(2 * far.latency_ms + 2 * 3 / 4 * n * across)
    assert exchange_ms(cluster, n, 4, share=0.5) == pytest.approx(near.latency_ms + 2 * 3 / 4 * n * inside)
    # Two nodes: of three copies at least one is wanted in the other with probability 7/8; one crosses for all.
    crossing = 7 / 8 * n / 3 * across
    slower = max(15 / 16 * n * inside, crossing)
    assert exchange_ms(cluster, n, 16, copies=3, share=0.5) == pytest.approx(far.latency_ms + 2 * slower)
    assert exchange_ms(cluster, n, 4, 8, share=0.5) == pytest.approx(far.latency_ms + 2 * 3 / 4 * n * across)
    assert pass_round_ms(cluster, n, 8, share=0.5) == pytest.approx(7 * (near.latency_ms + 2 * n * inside))
    assert pass_round_ms(cluster, n, 2, 8, share=0.5) == pytest.approx(far.latency_ms + 2 * n * across)


def test_gpus_in_nodes_of_their_own_use_no_link_inside_one():
    slow_inside = Cluster(gpu=replace(H800, intra_gb_per_s=0.1))
    far, n = slow_inside.inter_link, 64e3
    assert ring_ms(slow_inside, n, 4, 8, share=1.0) == pytest.approx(2 * far.latency_ms + 3 / 4 * n * far.ms_per_byte)
    assert exchange_ms(slow_inside, n, 4, 8, share=1.0) == pytest.approx(far.latency_ms + 3 / 4 * n * far.ms_per_byte)
    inside = 3 / 4 * n * slow_inside.intra_link.ms_per_byte  # two of the four in each node
    assert ring_ms(slow_inside, n, 4, 4, share=1.0) == pytest.approx(2 * far.latency_ms + inside)
    assert exchange_ms(slow_inside, n, 4, 4, share=1.0) == pytest.approx(far.latency_ms + inside)


def test_a_vocabulary_over_one_rank_or_without_layers_between_changes_nothing():
    spec = preset("llama3-8b")
    ends = ModelSpec(name="ends", layers=(spec.layers[0], spec.layers[-1]))
    for model, pp in ((spec, 1), (ends, 2)):
        plain, divided = (setup_costs(model, Setup(gpu=H800, seq=4096, pp=pp, vocab_parallel=v)) for v in (False, True))
        assert np.array_equal(plain.layer_ms, divided.layer_ms)
        assert np.array_equal(plain.static_bytes, divided.static_bytes)
    three = ModelSpec(name="three", layers=(spec.layers[0], spec.layers[1], spec.layers[-1]))
    plain, divided = (setup_costs(three, Setup(gpu=H800, seq=4096, pp=2, vocab_parallel=v)) for v in (False, True))
    assert divided.static_bytes.sum() == pytest.approx(plain.static_bytes.sum())
    assert divided.static_bytes[0] == pytest.approx(plain.static_bytes[0] / 2)


def test_kimis_delta_rule_by_hand():
    """q, k, v (3w), decay and gate through rank d, beta, output; chunks of 64 as in the gated delta rule."""
    h, heads, d, s = 64, 4, 16, 128
    w = heads * d
    work = part_work(KimiDeltaAttention(hidden=h, heads=heads, head_dim=d), seq=s)
    gemm = 2 * s * (h * 3 * w + h * 2 * d + d * 2 * w + h * heads + w * h)
    core = 2 * s * heads * (3 * 64 * d + 2 * 64 * d + 3 * d * d)
    assert work.gemm_flops == gemm and work.core_flops == core
    assert work.state_bytes == 2 * (s // 64) * w * d
    # The normed input and the two rank-d values (saved before and after), and per head: inputs and outputs of the
    # convolutions (3w each), decay and gate (2w), beta, the core's output and the gated output (2w).
    assert work.stream_width == 2 * h + 2 * d and work.inner_width == (3 + 2 + 3 + 2) * w + heads


def test_experts_in_a_latent_width_by_hand():
    h, latent, f, k, e, s = 64, 16, 32, 3, 8, 128
    part = Moe(hidden=h, experts=e, top_k=k, ffn=f, latent=latent, activation="relu2")
    work = part_work(part, seq=s)
    assert work.gemm_flops == 2 * s * (h * e + k * 2 * latent * f + 2 * h * latent)
    assert work.inner_width == k * (2 * latent + 2 * f) + 2 * latent and work.routed_width == k * latent


def test_experts_that_expert_parallelism_does_not_divide_are_named():
    spec = preset("deepseek-v3")
    with pytest.raises(OctoPipeError, match=r"ep 3 does not divide the 256 experts of layer 4"):
        setup_costs(spec, Setup(gpu=H800, seq=4096, ep=3, dp=3))
    with pytest.raises(OctoPipeError, match="has no experts"):
        setup_costs(preset("llama3-8b"), Setup(gpu=H800, seq=4096, ep=2, dp=2))
    with pytest.raises(OctoPipeError, match="give seq"):
        setup_costs(spec, Setup(gpu=H800, seq=None))
    with pytest.raises(OctoPipeError, match="not both"):
        setup_costs(spec, Setup(gpu=H800, seq=64), micro_batch_tokens=[64], batch=Batch(groups=((64,),)))


def test_a_checkpointed_layer_keeps_no_more_than_it_had():
    layer = replace(layer_cost(MLP, Cluster(gpu=H800)), activation_bytes=10.0, stash_bytes=6.0, workspace_bytes=0.5)
    small, large = checkpointed(layer, 4.0), checkpointed(layer, 12.0)
    assert (small.activation_bytes, small.stash_bytes, small.workspace_bytes) == (4.0, 6.0, 6.5)
    assert (large.activation_bytes, large.stash_bytes, large.workspace_bytes) == (10.0, 6.0, 0.5)
    assert small.input_ms == layer.input_ms + layer.forward_ms


def test_products_run_at_the_boards_own_clock():
    slow = replace(H800, clock=0.5)
    one, half = (layer_cost(MLP, Cluster(gpu=g), rates=PLAIN) for g in (H800, slow))
    assert half.weight_ms == pytest.approx(2 * one.weight_ms)

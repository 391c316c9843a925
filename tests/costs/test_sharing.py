"""Expert-tensor parallelism, copies of sharded state (HSDP), node-limited routing, state on the host, by counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.costs.analytic.layer_pricing import HOST_UPDATE_BYTES, _exchange_ms, priced
from octopipe.costs.analytic.pricing import Pricing
from octopipe.costs.analytic.traffic import exchange_ms, ring_ms
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup, setup_from
from octopipe.costs.resolve import costs_of_setup
from octopipe.costs.table import CostTable
from octopipe.models.spec import Moe
from octopipe.models.zoo import preset

EXPERTS, DENSE = preset("qwen3-30b-a3b"), preset("llama3-8b")


def setup(**more: Any) -> Setup:
    return Setup(gpu=gpu("h100"), **{"seq": 4096, "micro_batches": 8, **more})


def table(spec: Any, **more: Any) -> CostTable:
    return costs_of_setup(spec, setup(**more))


# -- expert-tensor parallelism -------------------------------------------------------------------------------------


def test_a_share_of_every_expert_is_held_and_the_rest_of_the_layer_is_as_before() -> None:
    """8 expert ranks of 4 GPUs among 32: each GPU holds a 32nd of the experts, and nobody else holds the same."""
    block, layer = EXPERTS.layers[1], 1
    experts = sum(part.expert_parameters for part in block.parts if isinstance(part, Moe))
    whole, shared = table(EXPERTS, tp=4, dp=8, ep=8, etp=1), table(EXPERTS, tp=4, dp=8, ep=8, etp=4)
    # Weight and fp32 gradient whole, 12 bytes of state divided among those who hold the same.
    by_count = experts / 8 * (2 + 4 + 12 / 4) - experts / 32 * (2 + 4 + 12 / 1)
    assert whole.static_bytes[layer] - shared.static_bytes[layer] == pytest.approx(by_count)
    # What W has to compute does not depend on how experts are divided, but for the shape of its products.
    assert shared.weight_ms[layer] < 1.1 * whole.weight_ms[layer]


def test_gpus_that_share_an_expert_gather_each_others_tokens() -> None:
    pricing = Pricing.of(setup(tp=4, dp=8, ep=8, etp=4))
    cluster, share, nbytes = pricing.cluster, pricing.rates.link, 1e8
    sent = exchange_ms(cluster, nbytes, 8, 4, copies=8, share=share)
    # Each of four receives what the other three got: 3 x nbytes over the links inside the node.
    gathered = 3 * nbytes * cluster.intra_link.ms_per_byte / share + 2 * cluster.intra_link.latency_ms
    assert _exchange_ms(nbytes, 8, pricing) == pytest.approx(sent + gathered)
    # And keeps them: seven eighths of a token's eight copies would otherwise lie elsewhere.
    one, four = (table(EXPERTS, tp=4, dp=8, ep=8, etp=n).activation_bytes[1] for n in (1, 4))
    tokens, copies, width = 4096 / 4, 8, 2048
    assert four - one == pytest.approx(3 * 2 * tokens * copies * width)


def test_the_tensor_parallel_group_shares_experts_unless_a_size_is_given() -> None:
    assert setup(tp=4, dp=8, ep=8).cluster().expert_tp == 4
    assert setup(tp=4, dp=2, ep=8).cluster().expert_tp == 1
    assert setup(tp=4, dp=8, ep=8, etp=2).cluster().expert_tp == 2
    same = table(EXPERTS, tp=4, dp=8, ep=8), table(EXPERTS, tp=4, dp=8, ep=8, etp=4)
    np.testing.assert_array_equal(same[0].layer_ms, same[1].layer_ms)


# -- HSDP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_copy_of_the_state_is_held_as_if_there_were_no_other(zero: int) -> None:
    alone, copies = table(DENSE, dp=8, zero=zero), table(DENSE, dp=64, zero=zero, hsdp=8)
    np.testing.assert_allclose(copies.static_bytes, alone.static_bytes)
    np.testing.assert_allclose(copies.optimizer_ms, alone.optimizer_ms)


def test_gradients_cross_nodes_once_more_and_weights_no_longer() -> None:
    """Eight nodes of eight GPUs, one copy a node: gathers stay on the fast links, every GPU's eighth of the gradient is
    all-reduced between nodes over its own link."""
    layer, wide, near = DENSE.layers[1], setup(dp=64, zero=3), setup(dp=64, zero=3, hsdp=8)
    cluster = near.cluster()
    pricing = Pricing.of(near)
    share, weights = pricing.rates.link, priced(layer, pricing)[1].dense
    gather = ring_ms(cluster, 2 * weights, 8, share=share)
    between = 2 * ring_ms(cluster, 4 * weights / 8, 8, 8, share=share)
    cost = priced(layer, pricing)[0]
    plain = priced(layer, Pricing.of(setup(dp=1, zero=0)))[0]
    hidden = pricing.rates.hidden
    assert cost.forward_ms == pytest.approx(plain.forward_ms + hidden * gather)
    spent = gather + max(between, ring_ms(cluster, 4 * weights, 8, share=share))
    assert cost.input_ms + cost.weight_ms == pytest.approx(plain.input_ms + plain.weight_ms + hidden * spent)
    assert priced(layer, Pricing.of(wide))[0].forward_ms > cost.forward_ms


# -- node-limited routing --------------------------------------------------------------------------------------------


def test_fewer_nodes_per_token_are_never_slower_and_a_limit_beyond_the_nodes_is_none() -> None:
    spec, sizes = preset("deepseek-v3"), {"dp": 64, "ep": 64, "pp": 16}
    times = [float(table(spec, nodes_per_token=n, **sizes).layer_ms.sum()) for n in range(1, 9)]
    assert times == sorted(times) and times[0] < times[-1]
    assert times[-1] == float(table(spec, **sizes).layer_ms.sum())


# -- optimizer state on the host -------------------------------------------------------------------------------------


def test_the_hosts_share_of_the_state_leaves_the_gpu_and_its_update_takes_the_links_time() -> None:
    here, half, host = (table(DENSE, dp=8, offload_optimizer=share) for share in (0.0, 0.5, 1.0))
    parameters = float(here.gradient_bytes.sum()) / 4
    assert (here.static_bytes - host.static_bytes).sum() == pytest.approx(12 * parameters / 8)
    assert (here.static_bytes - half.static_bytes).sum() == pytest.approx(6 * parameters / 8)
    moved = (4 + 2 + HOST_UPDATE_BYTES) * parameters / 8
    assert host.optimizer_ms.sum() == pytest.approx(moved / (gpu("h100").host_gb_per_s * 1e6))
    np.testing.assert_array_equal(host.layer_ms, here.layer_ms)
    twice = table(DENSE, dp=8, offload_optimizer=1.0, host_gb_per_s=2 * gpu("h100").host_gb_per_s)
    assert twice.optimizer_ms.sum() == pytest.approx(host.optimizer_ms.sum() / 2)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "given", "said"),
    [
        (DENSE, {"etp": 2, "tp": 2}, "has no experts; etp 2 has no effect"),
        (DENSE, {"nodes_per_token": 1}, "has no experts; nodes_per_token 1 has no effect"),
        (EXPERTS, {"tp": 4, "dp": 8, "ep": 8, "etp": 8}, "ep 8 x etp 8 does not divide tp * cp * dp = 32"),
        (EXPERTS, {"tp": 1, "dp": 9, "etp": 9}, "etp 9 does not divide the 768 expert ffn"),
        (DENSE, {"dp": 8, "hsdp": 3}, "hsdp 3 does not divide dp 8"),
        (EXPERTS, {"dp": 8, "ep": 8, "hsdp": 2}, "hsdp 2 does not divide the 1 replicas of an expert"),
        (DENSE, {"dp": 8, "hsdp": 2, "zero": 0}, "hsdp 2 needs state that ZeRO shards"),
        (DENSE, {"dp": 8, "zero": 3, "offload_optimizer": 1.0}, "not with ZeRO-3; give zero 1"),
        (DENSE, {"offload_optimizer": 1.5}, "give a share from 0 to 1"),
    ],
)
def test_what_makes_no_set_up_is_refused_in_one_line(spec: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(OctoPipeError, match=said.replace("*", r"\*")):
        table(spec, **given)


def test_the_record_is_read_back() -> None:
    asked = setup(tp=4, dp=8, ep=8, etp=2, hsdp=2, nodes_per_token=2, offload_optimizer=0.25, lora=8, frozen="0-3,7")
    assert setup_from(asked.as_dict()) == asked
    for word in ("etp 2", "2 copies of it", "LoRA of rank 8", "layers 0-3,7 frozen", "25% of the optimizer state"):
        assert word in asked.words()


# -- activations on the host ------------------------------------------------------------------------------------------


def test_offloaded_layers_keep_nothing_and_wait_only_for_what_the_link_cannot_hide() -> None:
    here, host = table(DENSE), table(DENSE, offload_layers=8)
    moved = here.activation_bytes[1:9] / (gpu("h100").host_gb_per_s * 1e6)
    assert not host.activation_bytes[1:9].any() and not host.stash_bytes[1:9].any()
    np.testing.assert_allclose(host.workspace_bytes[1:9], (here.workspace_bytes + here.activation_bytes)[1:9])
    for name in ("forward_ms", "input_ms"):
        work = getattr(here, name)[1:9]
        np.testing.assert_allclose(
            getattr(host, name)[1:9], np.maximum(work, moved) + 0.2 * np.minimum(work, moved), err_msg=name
        )
        np.testing.assert_array_equal(getattr(host, name)[9:], getattr(here, name)[9:])
    with pytest.raises(OctoPipeError, match="for one pipeline rank without recomputation"):
        setup(pp=2, offload_layers=4)
    with pytest.raises(OctoPipeError, match="leaves none of the 32 blocks on the GPU; name at most 31"):
        table(DENSE, offload_layers=32)

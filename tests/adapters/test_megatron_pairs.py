"""Megatron-Core's token dispatchers inside pairs, ep 2 x pp 2: the gradients of the same plan without pairs."""

from __future__ import annotations

import importlib.util
import random
import warnings
from dataclasses import replace

import pytest
from ranks import PATIENCE_S, Ranks, shared_ranks

torch = pytest.importorskip("torch")
if importlib.util.find_spec("megatron") is None:  # importing it takes seconds, and only its ranks need it
    pytest.skip("Megatron-Core is not installed", allow_module_level=True)
import torch.nn.functional as F  # noqa: E402
from megatron_jobs import IMPORTS  # noqa: E402
from mesh_checks import mesh_of  # noqa: E402
from test_pairs import with_pairs  # noqa: E402
from torch import nn  # noqa: E402

from octopipe import CostTable, Pipeline, build_plan  # noqa: E402
from octopipe.runtime import turns  # noqa: E402

WIDTH, EXPERTS, LAYERS, LENGTH = 8, 4, 4, 3


class Experts(nn.Module):
    """Megatron's MoE layer with a residual connection."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return x + torch.tanh(self.layer(x)[0])


def moe_layers(dispatcher: str) -> list[nn.Module]:
    """Equal weights for every dispatcher; of the experts, those of this rank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=2, ffn_hidden_size=2 * WIDTH,
        moe_ffn_hidden_size=WIDTH, num_moe_experts=EXPERTS, moe_router_topk=2, moe_token_dispatcher_type=dispatcher,
        moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0, expert_model_parallel_size=2,
        add_bias_linear=False, use_cpu_initialization=True, params_dtype=torch.float64,
        gradient_accumulation_fusion=False, bias_activation_fusion=False, hidden_dropout=0.0,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False).submodules.mlp
    layers = []
    for k in range(LAYERS):
        layer = build_module(spec, config=config).double()
        layer.set_layer_number(k + 1)
        first = parallel_state.get_expert_model_parallel_rank() * (EXPERTS // 2)
        for name, p in layer.named_parameters():
            parts = name.split(".")
            if "local_experts" in parts:
                at = parts.index("local_experts") + 1
                parts[at] = str(first + int(parts[at]))
            seed = sum(map(ord, ".".join(parts))) * 31 + k
            with torch.no_grad():
                p.copy_(torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(seed)) * 0.5)
        layers.append(Experts(layer))
    return layers


def paired_and_not(world, plan, dispatchers):
    """Per dispatcher: gradients with pairs, without, and how often turns changed within the pairs."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    from octopipe.megatron import use_cpu

    use_cpu()
    warnings.simplefilter("ignore")
    initialize_rng_tracker(inference_rng_tracker=True)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, create_gloo_process_groups=False)
    mesh = mesh_of((2, 2), ("pp", "ep"))
    handed = [0]
    before = turns._Pair.hand_over

    def counted(pair):
        handed[0] += 1
        before(pair)

    found = {}
    turns._Pair.hand_over = counted
    try:
        for dispatcher in dispatchers:
            grads = []
            for each in (plan, replace(plan, pairs=frozenset())):
                handed[0] = 0 if each.pairs else handed[0]
                torch.manual_seed(5 + mesh.get_local_rank("ep"))
                data = [torch.randn(LENGTH, 2, WIDTH, dtype=torch.float64) for _ in range(plan.num_micro_batches)]
                sharded = {"ep": ["*local_experts*"]}
                layers = moe_layers(dispatcher)
                with Pipeline(layers, each, F.mse_loss, mesh=mesh, sharded=sharded, timeout_s=PATIENCE_S) as pipe:
                    pipe.step(data, data)
                    grads.append({n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None})
            found[dispatcher] = (*grads, handed[0])
    finally:
        turns._Pair.hand_over = before
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture
def four() -> Ranks:
    """Ranks forked from one process that has imported Megatron-Core: each for itself would take seconds."""
    return shared_ranks(4, IMPORTS)


def test_megatrons_dispatchers_give_the_same_gradients_inside_pairs(four) -> None:
    plan = build_plan("zb-v", CostTable.uniform(num_layers=LAYERS), 2, 4)
    plan = with_pairs(random.Random(2), plan, share=1.0)
    assert plan.pairs
    for found in four.run(paired_and_not, plan, ("alltoall", "allgather")):
        for paired, plain, _ in found.values():
            assert paired.keys() == plain.keys() and paired
            assert all(torch.equal(paired[name], plain[name]) for name in plain)
            assert any(float(g.abs().max()) > 1e-3 for name, g in plain.items() if "local_experts" in name)
        # The two exchange tokens in different ways, and have the same gradients.
        one, other = found["alltoall"][0], found["allgather"][0]
        assert all(torch.allclose(one[name], other[name], rtol=1e-10, atol=1e-12) for name in one)
        assert found["alltoall"][2] > 0, "no exchange of the dispatcher was found"

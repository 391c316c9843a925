"""Megatron-Core's token dispatchers on ranks of ep 2 x pp 2, with pairs and without.

Knows: layers of experts with equal weights for every dispatcher, and what a step with each of them gives. Does not
know: which plan is run. Megatron-Core is imported by the functions that need it, on the ranks.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
import torch.nn.functional as F
from mesh_checks import mesh_of
from ranks import PATIENCE_S
from torch import nn

from octopipe import Pipeline
from octopipe.runtime import turns

WIDTH, EXPERTS, EXPERT_LAYERS, LENGTH = 8, 4, 4, 3


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
        num_layers=EXPERT_LAYERS, hidden_size=WIDTH, num_attention_heads=2, ffn_hidden_size=2 * WIDTH,
        moe_ffn_hidden_size=WIDTH, num_moe_experts=EXPERTS, moe_router_topk=2, moe_token_dispatcher_type=dispatcher,
        moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0, expert_model_parallel_size=2,
        add_bias_linear=False, use_cpu_initialization=True, params_dtype=torch.float64,
        gradient_accumulation_fusion=False, bias_activation_fusion=False, hidden_dropout=0.0,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False).submodules.mlp
    layers = []
    for k in range(EXPERT_LAYERS):
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
    groups = {name: value for name, value in vars(parallel_state).items() if name.isupper()}
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
        vars(parallel_state).update(groups)  # other jobs of these ranks go on with theirs
    return found

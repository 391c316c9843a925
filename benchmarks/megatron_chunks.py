"""GPT and hybrid chunks of Megatron-Core for the benchmarks, as a user of Megatron builds them.

Knows: local layers (no Transformer Engine, no apex, fusions off), bfloat16 weights under Megatron's own DDP with
float32 `main_grad`, random tokens, a forward step. Does not know: plans' orders, what is timed.

The hybrid's mixer is Mamba-2 between Megatron's own projections, compiled on a GPU: mamba_ssm's kernels are not needed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from octopipe import megatron
from octopipe.models.spec import Mamba2
from octopipe.plans.plan import Plan
from octopipe.runtime.nn.mamba import compiled_mamba2_mix, mamba2_mix


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """A Megatron model: what its chunks are made of."""

    pattern: str
    """Decoder layers: t GPT block, M Mamba-2, - MLP, * attention."""
    width: int
    heads: int
    ffn: int
    vocab: int
    tokens: int
    device: str
    mamba_heads: int = 64
    mamba_head_dim: int = 64
    mamba_state: int = 128
    mamba_groups: int = 8

    @property
    def hybrid(self) -> bool:
        return "t" not in self.pattern

    @property
    def num_layers(self) -> int:
        """With the embedding and the head."""
        return len(self.pattern) + 2

    def config(self, num_layers: int) -> Any:
        from megatron.core.transformer.transformer_config import TransformerConfig

        cuda = self.device == "cuda"
        dtype = torch.bfloat16 if cuda else torch.float32
        return TransformerConfig(
            num_layers=num_layers,
            hidden_size=self.width,
            num_attention_heads=self.heads,
            ffn_hidden_size=self.ffn,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            add_bias_linear=False,
            use_cpu_initialization=not cuda,
            pipeline_dtype=dtype,
            params_dtype=dtype,
            bf16=cuda,
            gradient_accumulation_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
            deallocate_pipeline_outputs=True,
        )

    def build(self, plan: Plan) -> list[Any]:
        """This rank's chunks of a plan, each under Megatron's DDP."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        made = megatron.build_chunks(plan, self._chunk)
        options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        return [
            DistributedDataParallel(config=chunk.config, ddp_config=options, module=chunk, disable_bucketing=k > 0)
            for k, chunk in enumerate(made)
        ]

    def _chunk(self, pre_process: bool, post_process: bool, layers: range) -> Any:
        """Exactly these layers: to its own block a chunk is a whole model on one rank."""
        inner = [k for k in layers if 1 <= k <= len(self.pattern)]
        config = self.config(max(1, len(inner)))
        torch.manual_seed(1234 + layers.start)
        made = (_hybrid if self.hybrid else _gpt)(self, config, inner, pre_process, post_process)
        made = made.to(self.device, config.params_dtype)  # as Megatron does: its local norms are made in float32
        made.config = whole = copy.copy(config)
        whole.num_layers = len(self.pattern)
        whole.pipeline_model_parallel_size = dist.get_world_size()
        return made

    def step_data(self, count: int) -> list[dict[str, Any]]:
        """Random tokens of a step's micro-batches, the same on every rank."""
        generator = torch.Generator().manual_seed(7)
        out = []
        for _ in range(count):
            tokens = torch.randint(self.vocab, (1, self.tokens + 1), generator=generator).to(self.device)
            out.append({"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()})
        return out


def start(device: str, pp: int) -> None:
    """Megatron's groups over the ranks that run already."""
    if device == "cpu":
        megatron.use_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pp, create_gloo_process_groups=False)
    initialize_rng_tracker(inference_rng_tracker=True)
    if device == "cuda":
        model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)


def forward_step(data: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
    batch = next(data)
    tokens = batch["tokens"]
    positions, mask = _places(tokens.shape[1], tokens.device)
    out = model(tokens, positions, mask, labels=batch["labels"])

    def loss(output: Any) -> Any:
        mean = output.float().mean()
        return mean, {"loss": mean.detach().clone()}  # Megatron divides the first one in place

    return out, loss


@cache
def _places(length: int, device: torch.device) -> tuple[Any, Any]:
    """Positions and the causal mask."""
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
    return torch.arange(length, device=device)[None], mask


@cache
def _alone() -> Any:
    """A group of this process only, for building a chunk by itself."""
    made = [dist.new_group([r]) for r in range(dist.get_world_size())]
    return made[dist.get_rank()]


def _groups() -> Any:
    """Megatron's groups with a pipeline of this process alone."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    out = ProcessGroupCollection()
    out.tp = parallel_state.get_tensor_model_parallel_group()
    out.cp = parallel_state.get_context_parallel_group()
    out.pp = out.embd = out.pos_embd = _alone()
    out.dp = parallel_state.get_data_parallel_group()
    out.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for name in ("ep", "expt_tp", "tp_ep", "expt_dp", "tp_cp", "hcp", "tp_ep_pp", "mp"):
        if not hasattr(out, name):
            setattr(out, name, _alone())
    return out


def _gpt(sizes: Chunks, config: Any, inner: list[int], pre: bool, post: bool) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config.num_layers = len(inner)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=sizes.vocab,
        max_sequence_length=sizes.tokens,
        pre_process=pre,
        post_process=post,
        position_embedding_type="rope",
        parallel_output=True,
        pg_collection=_groups(),
    )


def _hybrid(sizes: Chunks, config: Any, inner: list[int], pre: bool, post: bool) -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    stack, stack_parts, model, pattern_word = _hybrid_names(WrappedTorchNorm)
    local = get_gpt_layer_local_spec().submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm, self_attention=local.self_attention, self_attn_bda=get_bias_dropout_add
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=WrappedTorchNorm, mlp=local.mlp, mlp_bda=get_bias_dropout_add)
    mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm,
        mixer=ModuleSpec(module=_mixer_class(), params={"sizes": sizes}),
        mamba_bda=get_bias_dropout_add,
    )
    spec = ModuleSpec(
        module=stack,
        submodules=stack_parts(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )
    # Megatron-Core 0.16 refuses a stack without layers: one is made, and taken out again.
    spare = not inner and pattern_word == "hybrid_override_pattern"
    pattern = "M" if spare else "".join(sizes.pattern[k - 1] for k in inner)
    config.num_layers = len(pattern)
    made = model(
        config,
        spec,
        vocab_size=sizes.vocab,
        max_sequence_length=sizes.tokens,
        pre_process=pre,
        post_process=post,
        position_embedding_type="none",
        parallel_output=True,
        pg_collection=_groups(),
        **{pattern_word: pattern},
    )
    if spare:
        made.decoder.layers = nn.ModuleList()
    return made


def _hybrid_names(norm: Any) -> tuple[Any, Any, Any, str]:
    """Stack, its parts, model and the pattern's keyword: Megatron-Core renamed them after 0.16. Its final norm is made
    torch's, because Transformer Engine is not there."""
    try:
        from megatron.core.models.hybrid import hybrid_block
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ImportError:
        from megatron.core.models.mamba import MambaModel
        from megatron.core.ssm import mamba_block

        mamba_block.TENorm = norm
        return mamba_block.MambaStack, mamba_block.MambaStackSubmodules, MambaModel, "hybrid_override_pattern"
    hybrid_block.TENorm = norm
    return hybrid_block.HybridStack, hybrid_block.HybridStackSubmodules, HybridModel, "hybrid_layer_pattern"


@cache
def _mix(device: str) -> Callable[..., Any]:
    return compiled_mamba2_mix() if device == "cuda" else mamba2_mix


@cache
def _mixer_class() -> type:
    """Mamba-2 between Megatron's own column- and row-parallel projections."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    class Mixer(nn.Module):
        def __init__(self, config: Any, sizes: Chunks, submodules: Any = None, **_: Any):
            super().__init__()
            self.layer = layer = Mamba2(
                hidden=sizes.width,
                heads=sizes.mamba_heads,
                head_dim=sizes.mamba_head_dim,
                state=sizes.mamba_state,
                groups=sizes.mamba_groups,
            )
            self._mix = _mix(sizes.device)
            usual = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": True}
            width = layer.projection_width
            self.in_proj = ColumnParallelLinear(config.hidden_size, width, gather_output=False, **usual)
            self.out_proj = RowParallelLinear(layer.inner, config.hidden_size, input_is_parallel=True, **usual)
            made = {"dtype": config.params_dtype}
            self.conv_weight = nn.Parameter(torch.randn(layer.conv_width, layer.conv, **made) * 0.1)
            self.conv_bias = nn.Parameter(torch.zeros(layer.conv_width, **made))
            self.dt_bias = nn.Parameter(torch.full((layer.heads,), -3.0))
            self.a_log = nn.Parameter(torch.linspace(0.1, 2.5, layer.heads))
            self.d = nn.Parameter(torch.ones(layer.heads))
            self.gate_norm = nn.Parameter(torch.ones(layer.inner, **made))

        def forward(self, hidden: Any, **_: Any) -> Any:
            projected = self.in_proj(hidden)[0].transpose(0, 1)
            small = self.conv_weight, self.conv_bias, self.dt_bias, self.a_log, self.d, self.gate_norm
            mixed = self._mix(self.layer, 1e-5, projected, *small)
            return self.out_proj(mixed.transpose(0, 1).contiguous())

    return Mixer

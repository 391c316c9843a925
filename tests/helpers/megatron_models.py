"""Tiny Megatron-Core models on the CPU (`octopipe.megatron.use_cpu`): a GPT, an MoE and a hybrid, and their twins."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.megatron import use_cpu

VOCAB, WIDTH, LENGTH, DECODERS = 32, 16, 6, 6
_KEPT: dict[Any, dict[str, Any]] = {}
"""Megatron's groups by what they were made for. It forgets them without closing them, and every one has threads."""
_IN_USE: Any = None


def start(pp: int, *, virtual: int | None = None, embedding_ranks: Callable[..., list[int]] | None = None) -> None:
    """Megatron's groups for a pipeline of `pp` ranks; the other ranks are data-parallel."""
    global _IN_USE
    use_cpu()
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    initialize_rng_tracker(inference_rng_tracker=True)
    wanted = pp, tuple(embedding_ranks(list(range(pp)))) if embedding_ranks is not None else None
    state = vars(parallel_state)
    if _IN_USE is not None:
        _KEPT[_IN_USE] = {name: value for name, value in state.items() if name.isupper()}
    _IN_USE = wanted
    if wanted in _KEPT:
        state.update(_KEPT[wanted])
        parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual if pp > 1 else None)
        parallel_state.set_virtual_pipeline_model_parallel_rank(0 if virtual and pp > 1 else None)
        return
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual if pp > 1 else None,
        create_gloo_process_groups=False,
        get_embedding_ranks=embedding_ranks,
    )


def gpt_config(pp: int, virtual: int | None, layout: Any, *, kind: str = "gpt", **more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields: dict[str, Any] = {
        "num_layers": DECODERS,
        "hidden_size": WIDTH,
        "num_attention_heads": 2,
        "ffn_hidden_size": 2 * WIDTH,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": virtual,
        "pipeline_model_parallel_layout": layout,
        "pipeline_dtype": torch.float64,
        "params_dtype": torch.float64,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "deallocate_pipeline_outputs": True,
        "batch_p2p_comm": False,
        "overlap_p2p_comm": bool(virtual),
    }
    if kind == "moe":
        fields |= {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": WIDTH,
            "moe_aux_loss_coeff": 0.1,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_token_dispatcher_type": "allgather",
            "add_bias_linear": False,
        }
    return TransformerConfig(**fields | more)


def gpt(config: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None = None, tied: bool = False) -> Any:
    """A GPT (or MoE) chunk of local layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec

    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    mtp = None
    if config.mtp_num_layers and post_process:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage)
    return GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
        parallel_output=config.params_dtype == torch.float32,  # False fails in fp32, without a plan too
    ).to(config.params_dtype)


class Mixer(nn.Module):
    """What stands in for Mamba's kernels: an input projection, a gated running mean, an output projection."""

    def __init__(self, config: Any, submodules: Any = None, d_model: int = 0, **_: Any):
        super().__init__()
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        usual = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": True}
        self.in_proj = ColumnParallelLinear(config.hidden_size, 2 * WIDTH, gather_output=False, **usual)
        self.out_proj = RowParallelLinear(WIDTH, config.hidden_size, input_is_parallel=True, **usual)

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
        x, gate = self.in_proj(hidden)[0].chunk(2, -1)
        steps = torch.arange(1, x.shape[0] + 1, dtype=x.dtype)[:, None, None]
        return self.out_proj(x.cumsum(0) / steps * gate.sigmoid())


def hybrid(config: Any, pattern: str, *, pre_process: bool, post_process: bool, tied: bool = False) -> Any:
    """A hybrid chunk with exactly these layers (M stand-in mixer, * attention, - MLP)."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.mamba import MambaModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    local = get_gpt_layer_local_spec().submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=local.self_attention,
        self_attn_bda=get_bias_dropout_add,
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=WrappedTorchNorm, mlp=local.mlp, mlp_bda=get_bias_dropout_add)
    spec = ModuleSpec(
        module=MambaStack,
        submodules=MambaStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=WrappedTorchNorm, mixer=ModuleSpec(module=Mixer), mamba_bda=get_bias_dropout_add
                ),
            ),
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )
    # A chunk builds its own layers: to its stack it is a whole model of that many layers on one rank.
    own = copy.copy(config)
    own.num_layers = len(pattern)
    own.pipeline_model_parallel_size = 1
    own.virtual_pipeline_model_parallel_size = own.pipeline_model_parallel_layout = None
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp", "embd"])
    groups.pp = alone()
    model = MambaModel(
        own,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        pre_process=pre_process,
        post_process=post_process,
        hybrid_override_pattern=pattern,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="none",
        pg_collection=groups,
        parallel_output=config.params_dtype == torch.float32,  # False fails in fp32, without a plan too
    ).to(config.params_dtype)
    assert parallel_state.model_parallel_is_initialized()
    model.config = config
    return model


_ALONE: list[Any] = []


def alone() -> Any:
    """A group of this process only."""
    import torch.distributed as dist

    if not _ALONE:
        made = [dist.new_group([r]) for r in range(dist.get_world_size())]
        _ALONE.append(made[dist.get_rank()])
    return _ALONE[0]


def batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    out = []
    for _ in range(count):
        tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=generator)
        out.append({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
    return out


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Callable[..., Any]]:
    """What a Megatron training script has: one micro-batch through a chunk, and the loss of its output."""
    batch = next(data_iterator)
    tokens = batch["tokens"]
    positions = torch.arange(LENGTH).expand_as(tokens)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    out = model(tokens, positions, mask, labels=batch["labels"])

    def loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = output.mean()
        return mean, {"loss": mean.detach().clone()}

    return out, loss


def global_name(name: str, first_decoder: int) -> str:
    """A chunk's parameter under its name in the whole model."""
    name = name.removeprefix("module.")
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + first_decoder)
    return ".".join(parts)

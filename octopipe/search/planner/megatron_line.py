"""A split as a Megatron-LM command: the environment, the script, the model's flags and the split's flags.

Knows: Megatron-LM's flags and the rules of its `validate_args` at the version `runtimes.py` names. Does not know: how a
split was found or priced.

The predicted memory and communication of a split hold for exactly these flags, so everything that was priced has a flag
here: gradients in bf16, the modules that selective recomputation runs again, experts that tensor parallelism does not
shard, FSDP's checkpoint format. A command that Megatron-LM would reject is rejected here with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octopipe.base.errors import OctoPipeError
from octopipe.costs.analytic.traffic import nearby
from octopipe.models.spec import Attention, Block, LatentAttention, ModelSpec, Moe, Mtp
from octopipe.search.planner.megatron_model import model_flags
from octopipe.search.recompute import checkpointed_per_stage
from octopipe.views.export.megatron import megatron_layout

if TYPE_CHECKING:
    from octopipe.search.planner.pricing import Candidate

DATA = ("--mock-data", "--tokenizer-type NullTokenizer", "--train-iters 20", "--lr 1e-4", "--min-lr 1e-5")
"""Flags that suffice to start a run that measures speed; to be replaced by the user's data and schedule."""
RECIPES = {"fp8": "tensorwise", "mxfp8": "mxfp8"}
"""Megatron-LM's recipes: one scale per tensor from its current maximum, or one scale per block."""
MORE_RECOMPUTED = 0.05
"""Share of all layers that may be recomputed in addition to those that were priced: about one percent of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLine:
    """The parts of one command."""

    environment: dict[str, str]
    script: str
    model: tuple[str, ...]
    split: tuple[str, ...]

    @property
    def flags(self) -> str:
        return " ".join((*self.model, *self.split, *DATA))


def megatron_line(candidate: Candidate, spec: ModelSpec) -> MegatronLine:
    """The parts of the command; raises an error if Megatron-LM has no flags for the split or the model."""
    split = candidate.split
    script, model = model_flags(spec, candidate.setup.seq or 0)
    # Megatron-LM requires one connection for tensor and context parallelism and forbids it with FSDP; concurrent
    # kernels need many.
    one = (split.tp > 1 or split.cp > 1) and split.zero < 2
    connections = "32" if candidate.how == "interleaved-overlap" else "1" if one else ""
    return MegatronLine(
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": connections} if connections else {},
        script=script,
        model=tuple(model),
        split=tuple(split_flags(candidate, spec)),
    )


# -- the split -------------------------------------------------------------------------------------------------------


def split_flags(candidate: Candidate, spec: ModelSpec) -> list[str]:
    """The flags for parallel sizes, batch, layout, sharding, precision and recomputation."""
    setup, split = candidate.setup, candidate.split
    assert setup.gpu is not None
    experts = any(isinstance(part, Moe) for layer in spec for part in layer.parts)
    if candidate.how not in ("1f1b", "interleaved", "interleaved-overlap", "layout", "estimated"):
        plan = candidate.plan
        whole = plan is not None and len(plan.routes) == 1 and all(isinstance(s.recompute, bool) for s in plan.stages)
        ours = "octopipe.megatron.forward_backward_func(plan) runs it on Megatron's chunks; " if whole else ""
        raise OctoPipeError(f"its flags have no order of ops; {ours}--for megatron plans what flags can say")
    if split.zero >= 2 and split.pp > 1:
        raise OctoPipeError("Megatron-LM divides gradients and weights (its FSDP) only without a pipeline")
    flags = [
        f"--tensor-model-parallel-size {split.tp}",
        f"--pipeline-model-parallel-size {split.pp}",
        *_layout(candidate, spec),
        *_context(candidate, spec),
    ]
    cluster = setup.cluster()
    if cluster.expert_tp > 1 and any(part.bias for layer in spec for part in layer.parts if isinstance(part, Moe)):
        raise OctoPipeError("Megatron-LM divides no experts that have biases; give --etp 1")
    if split.ep > 1 or (experts and split.tp > 1):
        flags.append(f"--expert-model-parallel-size {split.ep} --expert-tensor-parallel-size {cluster.expert_tp}")
        flags += _routing(candidate, spec)
    if experts:
        # If only the matrices of experts are sharded, gathering the tokens once moves less than sending routed copies.
        gathers = split.ep == 1 and cluster.expert_tp > 1
        flags.append(f"--moe-token-dispatcher-type {'allgather' if gathers else 'alltoall'}")
    if candidate.how == "interleaved-overlap":
        # The exchange overlaps with the other direction's computation; a separate W fills what stays exposed.
        flags.append("--overlap-moe-expert-parallel-comm --delay-wgrad-compute")
    flags.append(f"--micro-batch-size {split.micro_batch_size} --global-batch-size {setup.global_batch}")
    # Experts with tensor parallelism require sequence parallelism.
    if split.tp > 1 and (setup.sequence_parallel or experts):
        flags.append("--sequence-parallel")
    if split.zero >= 2:
        what = "optim_grads_params" if split.zero == 3 else "optim_grads"
        flags += [f"--use-megatron-fsdp --data-parallel-sharding-strategy {what} --ckpt-format fsdp_dtensor"]
        flags += ["--overlap-grad-reduce --overlap-param-gather --no-gradient-accumulation-fusion"]
    elif split.zero == 1:
        flags += ["--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"]
    if split.hsdp > 1:
        flags.append(f"--num-distributed-optimizer-instances {split.hsdp}")
    if setup.offload_layers is not None:
        flags.append(f"--cpu-offloading-num-layers {setup.offload_layers}")
    if setup.offload_optimizer:
        if split.zero != 1:
            raise OctoPipeError("--optimizer-cpu-offload requires the distributed optimizer; give --zero 1")
        flags.append(f"--optimizer-cpu-offload --optimizer-offload-fraction {setup.offload_optimizer:g}")
    return [*flags, *_states(candidate), *_numbers(candidate), *_recompute(candidate, spec)]


def _numbers(candidate: Candidate) -> list[str]:
    """The precisions of matrix products and of gradients."""
    setup, fsdp = candidate.setup, candidate.split.zero >= 2
    gradients = "bf16" if setup.gradient_bytes == 2 else "fp32"
    flags = ["--bf16", *(["--grad-reduce-in-bf16"] if gradients == "bf16" else [])]
    # FSDP ignores the flag above; by default it keeps gradients in the precision of the weights.
    flags += [f"--megatron-fsdp-main-grads-dtype {gradients}"] if fsdp else []
    if setup.precision in RECIPES:
        flags.append(f"--fp8-format hybrid --fp8-recipe {RECIPES[setup.precision]}")
    elif setup.precision == "nvfp4":
        flags.append("--fp4-format e2m1 --fp4-recipe nvfp4")
    return flags


def _states(candidate: Candidate) -> list[str]:
    """The flags for optimizer state below fp32, and for state in host memory, which needs the same optimizer."""
    setup, split = candidate.setup, candidate.split
    if setup.states == "fp32":
        return ["--use-precision-aware-optimizer"] if setup.offload_optimizer else []
    if split.zero == 0:
        raise OctoPipeError("Megatron-LM keeps states in bf16 with the distributed optimizer alone; give --zero 1")
    if setup.states == "bf16" and split.zero < 2:
        raise OctoPipeError(
            "Megatron-LM's distributed optimizer keeps a main copy of every weight, and bf16 moments alone were "
            "priced; give --states bf16-moments"
        )
    flags = ["--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"]
    return [*flags, *(["--megatron-fsdp-main-params-dtype auto"] if setup.states == "bf16" else [])]


def _routing(candidate: Candidate, spec: ModelSpec) -> list[str]:
    """The flags for node-limited routing: one group of experts per node that the expert ranks span, and the number of
    groups that a token may use. Empty without such a limit, or if the ranks span no more nodes than the limit."""
    setup, cluster = candidate.setup, candidate.setup.cluster()
    nodes = -(-cluster.ep * cluster.expert_tp // cluster.node_size)
    if setup.nodes_per_token is None or nodes <= setup.nodes_per_token:
        return []
    routed = next(part for layer in spec for part in layer.parts if isinstance(part, Moe))
    if routed.experts % nodes or routed.top_k % setup.nodes_per_token:
        raise OctoPipeError(
            f"Megatron-LM's group-limited routing requires groups of equal size: {routed.experts} experts on {nodes} "
            f"nodes, {routed.top_k} of them per token on {setup.nodes_per_token}"
        )
    return [f"--moe-router-num-groups {nodes} --moe-router-group-topk {setup.nodes_per_token}"]


def _context(candidate: Candidate, spec: ModelSpec) -> list[str]:
    """The flags for context parallelism and for how it exchanges keys and values; a ring is Megatron-LM's default."""
    split, setup = candidate.split, candidate.setup
    if split.cp == 1:
        return []
    flags = [f"--context-parallel-size {split.cp}"]
    kinds = {"all-gather": "all_gather", "ulysses": "a2a", "hierarchical": "a2a+p2p"}
    if setup.cp_kind in kinds:
        flags.append(f"--cp-comm-type {kinds[setup.cp_kind]}")
    near = split.cp
    if setup.cp_kind == "hierarchical":
        near = nearby(setup.cluster(), split.cp, split.tp)
        flags.append(f"--hierarchical-context-parallel-sizes {near} {split.cp // near}")
    if setup.cp_kind in ("ulysses", "hierarchical"):
        # A rule of Transformer Engine, which Megatron-LM's argument parser does not check.
        heads = {part.kv_heads for layer in spec for part in layer.parts if isinstance(part, Attention)}
        if any(number % (split.tp * near) for number in heads):
            raise OctoPipeError(
                f"Transformer Engine's all-to-all divides key-value heads too, and {min(heads)} of them do not divide "
                f"over tp {split.tp} x {near} GPUs; give a smaller cp, or --cp-kind ring"
            )
    return flags


def _has_experts(candidate: Candidate) -> bool:
    return candidate.costs is not None and any(symbol in "X#xgGN" for symbol in candidate.costs.symbols)


def _layout(candidate: Candidate, spec: ModelSpec) -> list[str]:
    """The partition as Megatron-LM's layout, or as the segments of a hybrid's pattern."""
    plan, costs = candidate.plan, candidate.costs
    if candidate.split.pp == 1 and all(isinstance(layer, Block | Mtp) for layer in spec.layers[1:-1]):
        return []
    if plan is None or costs is None:
        raise OctoPipeError("the split was not simulated, so its layers per stage are not decided")
    text = megatron_layout(plan, costs.symbols).text
    flag = "--pipeline-model-parallel-layout" if text.kind == "layout" else "--hybrid-layer-pattern"
    return [f"{flag} '{text.text()}'"]


def _recompute(candidate: Candidate, spec: ModelSpec) -> list[str]:
    setup = candidate.setup
    if setup.recompute == "full":
        layers = candidate.plan.num_layers - 2 if candidate.plan is not None else 0
        if candidate.plan is None or setup.recompute_layers is None or setup.recompute_layers >= layers:
            return ["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
        per_stage, again = checkpointed_per_stage(candidate.plan, setup.recompute_layers)
        if again - setup.recompute_layers > MORE_RECOMPUTED * layers:
            raise OctoPipeError(
                f"Megatron-LM recomputes the same number of layers in every stage, {again} instead of the "
                f"{setup.recompute_layers} that this split counts on; plan with --for megatron"
            )
        return [f"--recompute-granularity full --recompute-method block --recompute-num-layers {per_stage}"]
    if setup.recompute != "selective":
        return []
    parts = [part for layer in spec for part in layer.parts]
    modules = ["layernorm"]
    modules += ["moe_act"] if any(isinstance(part, Moe) for part in parts) else []
    modules += ["mla_up_proj"] if any(isinstance(part, LatentAttention) for part in parts) else []
    return [f"--recompute-granularity selective --recompute-modules {' '.join(modules)}"]

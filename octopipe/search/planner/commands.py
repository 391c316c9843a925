"""Launch commands for a split: Megatron-LM, torchtitan, PyTorch, DeepSpeed and `octopipe train`.

Knows: how each runtime is launched, and why one cannot run a split. Does not know: how a split was found, or
Megatron-LM's flags (`megatron_line.py`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.fields import ranges_text
from octopipe.models.spec import ModelSpec, Moe, Mtp
from octopipe.models.zoo import PRESETS
from octopipe.search.planner.megatron_line import megatron_line
from octopipe.search.planner.predictions import refuses_paths
from octopipe.search.planner.pricing import Candidate
from octopipe.search.planner.runtimes import RUNTIMES

TITAN_CONFIGS = {
    "llama3-8b": ("llama3", "llama3_8b", 8_030_261_248),
    "llama3-70b": ("llama3", "llama3_70b", 70_553_706_496),
    "llama3.1-405b": ("llama3", "llama3_405b", 405_853_388_800),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b", 671_026_404_352),
    "gpt-oss-20b": ("gpt_oss", "gpt_oss_20b", 20_914_757_184),
    "gpt-oss-120b": ("gpt_oss", "gpt_oss_120b", 116_829_156_672),
    "qwen3-14b": ("qwen3", "qwen3_14b", 14_768_307_200),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b", 30_532_122_624),
    "qwen3-32b": ("qwen3", "qwen3_32b", 32_762_123_264),
}
"""Models that torchtitan has a config for: its module and its config, in the version that `runtimes.py` names, and the
parameters of the model. A user's config.json may have such a name and other sizes."""
OWN_CONFIG = ("${MODULE}", "${CONFIG}")
Line = Callable[[Candidate, ModelSpec, str, str | None], str]
"""(split, model, the user's name of the model, file of the plan) -> command; raises OctoPipeError if there is none."""


def nodes_of(candidate: Candidate) -> tuple[int, int | None]:
    """Return the number of nodes, and the number of GPUs used on each (None if nodes differ in size). Together the
    nodes provide exactly the GPUs of the split: if these do not fill whole nodes, the same number is used on every
    node."""
    setup, gpus = candidate.setup, candidate.setup.num_gpus
    assert setup.gpu is not None
    sizes = [size for _, count, size in setup.nodes for _ in range(count)]
    if len(set(sizes)) > 1:
        used = next((n for n in range(1, len(sizes) + 1) if sum(sizes[:n]) >= gpus), len(sizes))
        return used, None
    per_node = sizes[0] if sizes else setup.gpus_per_node or setup.gpu.gpus_per_node
    per_node = 4 if per_node > 8 else per_node  # a rack of 64 on one fast network is made of trays of four
    if gpus <= per_node:
        return 1, gpus
    tp = candidate.split.tp
    # Tensor-parallel groups stay within a node, or fill whole ones.
    shares = [n for n in range(1, per_node + 1) if gpus % n == 0]
    whole = [n for n in shares if n % tp == 0 or tp % n == 0]
    per_node = max(whole or shares)
    return gpus // per_node, per_node


def torchrun(candidate: Candidate) -> str:
    """Return the torchrun part of the command, with one process per used GPU of a node. Equal nodes are numbered by
    torchrun's rendezvous; unequal ones get the order of the cluster file, for which the stages were placed."""
    nodes, per_node = nodes_of(candidate)
    if nodes == 1:
        where = ""
    elif candidate.setup.nodes:
        where = f" --nnodes {nodes} --node-rank $NODE_RANK --master-addr $HEAD --master-port 29500"
    else:
        where = f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint $HEAD:29500"
    return f"torchrun{where} --nproc-per-node {'gpu' if per_node is None else per_node}"


def megatron(candidate: Candidate, spec: ModelSpec, model: str, plan_file: str | None) -> str:
    line = megatron_line(candidate, spec)
    environment = "".join(f"{name}={value} " for name, value in line.environment.items())
    return f"{environment}{torchrun(candidate)} {line.script} {line.flags}"


def octopipe(candidate: Candidate, spec: ModelSpec, model: str, plan_file: str | None) -> str:
    split, setup = candidate.split, candidate.setup
    if spec.takes and not (split.whole_layers and setup.recompute == "none"):
        return own_pipeline(candidate, plan_file)
    if split.tp * split.cp * split.ep > 1:
        raise OctoPipeError("`octopipe train` divides no tensor; give it layers that do, or plan with --for octopipe")
    if split.zero and split.dp > 1:
        raise OctoPipeError(
            f"`octopipe train` holds weights, gradients and state whole on every replica, and this split counts on "
            f"ZeRO-{split.zero}; plan with --for octopipe"
        )
    predicts = any(isinstance(layer, Mtp) for layer in spec.layers)
    if predicts and not spec.takes:
        raise OctoPipeError(
            "`octopipe train` runs multi-token prediction as a path of its own, and this plan has it before the head; "
            "plan with --mtp"
        )
    if predicts and model in PRESETS:
        raise OctoPipeError(
            f"`octopipe train --mtp` trains transformers' prediction layers; plan the config.json of {model} instead"
        )
    if setup.recompute != "none":
        raise OctoPipeError(
            f"`octopipe train` recomputes what a plan's R ops say, and this split counts on {recomputed(candidate)}; "
            "plan with --for octopipe"
        )
    file = needs_file(plan_file)
    words = f"{torchrun(candidate)} -m octopipe train {shlex.quote(model)} --plan {file} --dp {split.dp}"
    words += f" --offload-optimizer {setup.offload_optimizer:g}" if setup.offload_optimizer else ""
    words += " --mtp" if predicts else ""
    words += f" --seq {setup.seq} --micro-batch-size {split.micro_batch_size}"
    return f"{words} --precision bf16-main-fp32 --device cuda"


def own_pipeline(candidate: Candidate, plan_file: str | None) -> str:
    """Return the command for the user's own script around `octopipe.Pipeline`, which runs every plan, also on layers
    that shard their tensors."""
    split, file = candidate.split, needs_file(plan_file)
    mesh = f"a mesh of pp {split.pp} x dp {split.dp} x cp {split.cp} x tp {split.tp}"
    mesh += f", experts over {split.ep} ranks" if split.ep > 1 else ""
    mesh += f", {recomputed(candidate)}" if candidate.setup.recompute != "none" else ""
    mesh += f", ZeRO-{split.zero} over dp" if split.zero and split.dp > 1 else ""
    words = f"octopipe.Pipeline(layers, octopipe.load_plan({file!r}), losses) with {mesh}"
    return f"{torchrun(candidate)} train.py  # your own script: {words}"


def recomputed(candidate: Candidate) -> str:
    """Describe what layers recompute inside their own backward."""
    setup = candidate.setup
    if setup.recompute == "selective":
        return "selective recomputation"
    return f"{setup.recompute_layers or 'all'} checkpointed layers"


def needs_file(plan_file: str | None) -> str:
    if plan_file is None:
        raise OctoPipeError("the command reads the plan's file, and none was written; add -o plan.json")
    return shlex.quote(plan_file)


def for_torch(candidate: Candidate) -> None:
    """Raise an error if torch.distributed.pipelining cannot run the plan."""
    plan = candidate.plan
    if plan is not None and (len(plan.routes) > 1 or any(s.recompute for s in plan.stages)):
        what = "holds layers on several ranks" if len(plan.routes) > 1 else "recomputes single stages"
        raise OctoPipeError(f"the plan {what}, and its runtime has no such plans; plan with --for torch")
    if candidate.split.zero >= 2 and candidate.split.pp > 1:
        raise OctoPipeError("torch's pipelining keeps weights and gradients whole between micro-batches")


def torch(candidate: Candidate, spec: ModelSpec, model: str, plan_file: str | None) -> str:
    for_torch(candidate)
    split, start = candidate.split, torchrun(candidate)
    replicas = f"dp {split.dp}" if split.hsdp == 1 else f"dp {split.hsdp} (replicated) x {split.dp // split.hsdp}"
    mesh = f"a mesh of pp {split.pp} x {replicas} x cp {split.cp} x tp {split.tp}, {sharding(candidate)}"
    if split.ep > 1:
        mesh += f", experts over {split.ep} ranks" + (f" of {split.etp} GPUs each" if split.etp > 1 else "")
    if candidate.setup.recompute != "none":
        mesh += f", {recomputed(candidate)}"
    mesh += untrained(candidate) + numbers(candidate)
    if split.dp * split.cp > 1 and split.zero:
        mesh += f", gradients accumulated and reduced in {gradients_of(candidate)}"
    if candidate.setup.offload_layers is not None:
        mesh += f", the first {candidate.setup.offload_layers} blocks under torch.autograd.graph.save_on_cpu"
    if split.pp == 1:
        return f"{start} train.py  # your own script: {mesh}; no pipeline"
    if candidate.plan is not None and candidate.plan.pairs:
        mesh += ", a function registered for OVERLAP_F_B that runs both ops of a pair at once"
    export = f"octopipe export {needs_file(plan_file)} --to pytorch -o schedule.csv"
    return f"{export} && {start} train.py  # your own script: {mesh}; its schedule reads schedule.csv"


def gradients_of(candidate: Candidate) -> str:
    return "bf16" if candidate.setup.gradient_bytes == 2 else "fp32"


def numbers(candidate: Candidate) -> str:
    """Describe matrix products and optimizer state of lower precision than usual, to be appended to a sentence."""
    setup = candidate.setup
    words = "" if setup.precision == "bf16" else f", matrix products in {setup.precision} (torchao, Transformer Engine)"
    states = {"bf16-moments": "an optimizer with bf16 moments", "bf16": "an optimizer with bf16 weights and moments"}
    return words + (f", {states[setup.states]}" if setup.states in states else "")


def untrained(candidate: Candidate) -> str:
    """Describe which layers are frozen or have adapters, to be appended to a sentence."""
    setup = candidate.setup
    where = "every matrix of a block" if setup.lora_on == "all" else "the matrices of attention"
    words = f", adapters of rank {setup.lora} on {where} and all else frozen" if setup.lora else ""
    return words + (f", layers {ranges_text(setup.frozen)} frozen" if setup.frozen else "")


def sharding(candidate: Candidate) -> str:
    """Describe in terms of FSDP2 how replicas shard the training state."""
    split = candidate.split
    if split.dp * split.cp == 1:
        return "one replica"
    if split.pp > 1:
        return "fully_shard(reshard_after_forward=False) over dp and cp"
    return {0: "DDP", 1: "ZeroRedundancyOptimizer"}.get(
        split.zero, f"fully_shard(reshard_after_forward={split.zero == 3}) over dp and cp"
    )


def torchtitan(candidate: Candidate, spec: ModelSpec, model: str, plan_file: str | None) -> str:
    for_torch(candidate)
    if spec.source is not None:
        raise OctoPipeError(f"no torchtitan model is known here for {spec.name}, which has a tower or an encoder")
    split, setup = candidate.split, candidate.setup
    if split.zero < 2 and split.pp == 1 and split.dp * split.cp > 1:
        raise OctoPipeError(
            "torchtitan divides weights or gradients of replicas too (FSDP2); plan with --for torchtitan"
        )
    if split.etp > 1:
        raise OctoPipeError("torchtitan's expert ranks hold whole experts; plan with --for torchtitan, or --etp 1")
    if setup.recompute == "full" and setup.recompute_layers is not None:
        raise OctoPipeError("torchtitan checkpoints every block or none; give --recompute full or none")
    if candidate.plan is not None and candidate.plan.pairs:
        raise OctoPipeError(
            "torchtitan runs the two ops of a pair one after the other, and this split counts on both at once; plan "
            "with --for torchtitan"
        )
    predicts = any(isinstance(layer, Mtp) for layer in spec.layers)
    if predicts and split.pp * split.cp > 1:
        raise OctoPipeError(
            "torchtitan's multi-token prediction has neither a pipeline nor context parallelism; plan with "
            "--for torchtitan"
        )
    known = TITAN_CONFIGS.get(spec.name)
    module, config = known[:2] if known is not None and known[2] == spec.parameters else OWN_CONFIG
    notes = [f"your config of {model}" if module == "${MODULE}" or predicts else f"torchtitan's own config of {model}"]
    before = ""
    if split.pp > 1:
        base = f"{module}:{config}"
        before = f"octopipe export {needs_file(plan_file)} --to torchtitan --base {base} -o planned.py && "
        module, config = "planned", "planned"
    elif predicts:
        module, config = OWN_CONFIG
    notes += titan_notes(candidate, spec)
    start = f"{torchrun(candidate)} -m torchtitan.train --module {module} --config {config}"
    return f"{before}{start} {' '.join(titan_flags(candidate, spec))}  # {'; '.join(notes)}"


def titan_flags(candidate: Candidate, spec: ModelSpec) -> list[str]:
    """Return torchtitan's flags for the split. Sizes of 1 are included, because the config has sizes of its own."""
    split, setup = candidate.split, candidate.setup
    assert setup.seq is not None and setup.global_batch is not None
    tokens = setup.seq * split.micro_batch_size
    degrees = {"tensor": split.tp, "pipeline": split.pp, "context": split.cp, "expert": split.ep}
    flags = [f"--parallelism.{name}_parallel_degree {size}" for name, size in degrees.items()]
    flags += [f"--parallelism.data_parallel_shard_degree {split.dp // split.hsdp}"]
    flags += [f"--parallelism.data_parallel_replicate_degree {split.hsdp}"]
    if split.tp > 1 and not setup.sequence_parallel:
        flags += ["--parallelism.no-enable_sequence_parallel"]
    if split.dp * split.cp > 1:
        keep = "never" if split.pp > 1 or split.zero < 3 else "always"
        flags += [f"--parallelism.fsdp_reshard_after_forward {keep}"]
    flags += [f"--training.max_context_length {setup.seq} --training.num_tokens_per_microbatch_per_dp_rank {tokens}"]
    flags += [f"--training.num_tokens_per_train_step {setup.seq * setup.global_batch}"]
    flags += [f"--training.dtype {'bfloat16' if setup.states == 'bf16' else 'float32'}"]
    # torchtitan does not support CUDA graphs with a pipeline or with an exchange that synchronises with the host.
    flags += ["--training.disable_cuda_graphs"] if split.pp * split.ep > 1 else []
    flags += [f"--parallelism.num_pp_microbatches {setup.micro_batches}"] if split.pp > 1 else []
    if not any(isinstance(part, Moe) for layer in spec for part in layer.parts):
        # As in the runs that its rates were fitted to; its configs for models with experts compile only the loss.
        flags += ["--compile.enable"]
    flags += ["--compile.no-enable_async_tensor_parallel"] if split.tp == 1 else []
    # A subcommand, which ends the flags.
    return [*flags, f"activation_checkpoint:{setup.recompute}"]


CONVERTERS = {"fp8": "Float8", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}
"""Prefix of the names of torchtitan's converters, which make linear layers and experts multiply in this precision."""


def titan_notes(candidate: Candidate, spec: ModelSpec) -> list[str]:
    """Return notes about settings that torchtitan has no flags for and that must be made in its config."""
    setup, notes = candidate.setup, []
    if setup.precision in CONVERTERS:
        notes.append(f"{CONVERTERS[setup.precision]} converters in the config")
    elif spec.name == "llama3.1-405b":
        notes.append("without the Float8 converter of that config")
    if setup.lora:
        notes.append(f"LoRAConverter of rank {setup.lora}{' on attention' * (setup.lora_on != 'all')} in the config")
    if any(isinstance(layer, Mtp) for layer in spec.layers):
        notes.append("multi-token prediction in the config")
    return notes


def deepspeed(candidate: Candidate, spec: ModelSpec, model: str, plan_file: str | None) -> str:
    split, setup = candidate.split, candidate.setup
    if candidate.how not in ("1f1b", "estimated"):
        raise OctoPipeError("DeepSpeed's pipeline runs plain 1F1B over an even partition; plan with --for deepspeed")
    if split.cp * split.ep * split.vp > 1:
        raise OctoPipeError("DeepSpeed's pipeline has no context or expert parallelism and one stage a rank")
    if split.hsdp > 1:
        raise OctoPipeError("DeepSpeed's ZeRO shards over all replicas; plan with --hsdp 1")
    if 0 < setup.offload_optimizer < 1:
        raise OctoPipeError("DeepSpeed keeps all of the optimizer state in the host's memory or none (below ZeRO-3)")
    host = ', "offload_optimizer": {"device": "cpu"}' if setup.offload_optimizer else ""
    # With ZeRO-1 and fp32 gradients, bf16 gradients are accumulated immediately instead of being kept as well.
    settings = (
        f'{{"train_batch_size": {setup.global_batch}, "train_micro_batch_size_per_gpu": {split.micro_batch_size}, '
        f'"zero_optimization": {{"stage": {split.zero}{host}}}, '
        f'"bf16": {{"enabled": true, "immediate_grad_update": true}}, '
        f'"data_types": {{"grad_accum_dtype": "{gradients_of(candidate)}"}}}}'
    )
    pipeline = "no PipelineModule"
    if split.pp > 1:
        # Its default divides by parameters; `type:` divides the layers of one class, as the plan does.
        pipeline = f"PipelineModule(num_stages={split.pp}, partition_method='type:' and the class of your blocks)"
        if candidate.plan is not None:
            sizes = ", ".join(str(stage.num_layers) for stage in candidate.plan.stages)
            pipeline += f" with {sizes} layers per stage"
    again = f", {recomputed(candidate)}" if setup.recompute != "none" else ""
    words = f"{pipeline}, tp {split.tp}{again}{untrained(candidate)}{numbers(candidate)}"
    script = f"your own script, {words}; ds.json: {settings}"
    return f"{torchrun(candidate)} train.py --deepspeed ds.json  # {script}"


LINES: dict[str, Line] = {
    "megatron": megatron,
    "torchtitan": torchtitan,
    "torch": torch,
    "deepspeed": deepspeed,
    "octopipe": octopipe,
}


def command_lines(
    candidate: Candidate, *, spec: ModelSpec, model: str, plan_file: str | None, runtime: str
) -> dict[str, str]:
    """Return for every runtime the command that starts the split, or the reason why there is none ("none: ...")."""
    out = {}
    for name, line in LINES.items():
        if runtime not in ("any", name):
            continue
        try:
            if reason := RUNTIMES[name].refuses(candidate.setup) or refuses_paths(name, spec):
                raise OctoPipeError(reason)
            out[name] = line(candidate, spec, model, plan_file)
        except OctoPipeError as error:
            out[name] = f"none: {error}"
    return out


def runs_on(candidate: Candidate, spec: ModelSpec) -> list[str]:
    """Return the names of the runtimes that have a command for the split."""
    lines = command_lines(candidate, spec=spec, model=spec.name, plan_file="plan.json", runtime="any")
    return [name for name, line in lines.items() if not line.startswith("none: ") and name in RUNTIMES]

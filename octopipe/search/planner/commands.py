"""How a split is started: torchrun lines for Megatron-LM, for PyTorch and for `octopipe train`.

Knows: those programs' flags. Does not know: how a split was found.
"""

from __future__ import annotations

from octopipe.base.errors import OctoPipeError
from octopipe.search.planner.search import Candidate
from octopipe.views.export.megatron import megatron_arguments


def torchrun(candidate: Candidate) -> str:
    """The launcher's part: as many processes a node as the node has GPUs."""
    setup = candidate.setup
    assert setup.gpu is not None
    per_node = min(setup.gpus_per_node or setup.gpu.gpus_per_node, setup.num_gpus)
    # A rack of 64 on one fast network is made of trays of four.
    per_node = 4 if per_node > 8 and setup.num_gpus % 4 == 0 else per_node
    nodes = -(-setup.num_gpus // per_node)
    where = "" if nodes == 1 else f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint $HEAD:29500"
    return f"torchrun{where} --nproc-per-node {per_node}"


def megatron_flags(candidate: Candidate) -> str:
    """Megatron-LM's flags for the split; raises where it has no words for it."""
    setup, split = candidate.setup, candidate.split
    if candidate.how == "tuned":
        plan = candidate.plan
        whole = plan is not None and len(plan.routes) == 1 and all(isinstance(s.recompute, bool) for s in plan.stages)
        ours = "octopipe.megatron.forward_backward_func(plan) runs it on its chunks, " if whole else ""
        raise OctoPipeError(f"its flags cannot say a tuned order; {ours}--for megatron plans what they can say")
    if split.zero == 3 and split.pp > 1:
        raise OctoPipeError("Megatron-LM's FSDP runs without a pipeline")
    if split.zero == 2 and split.pp > 1:
        raise OctoPipeError("Megatron-LM holds gradients in parts only without a pipeline; plan with --for megatron")
    flags = [
        f"--tensor-model-parallel-size {split.tp}",
        f"--pipeline-model-parallel-size {split.pp}",
        *([f"--context-parallel-size {split.cp}"] if split.cp > 1 else []),
        *([f"--expert-model-parallel-size {split.ep}"] if split.ep > 1 else []),
        f"--micro-batch-size {split.micro_batch_size} --global-batch-size {setup.global_batch}",
        f"--seq-length {setup.seq}",
    ]
    if split.pp > 1 and candidate.plan is not None and candidate.costs is not None:
        try:
            layout = megatron_arguments(candidate.plan, candidate.costs.symbols).split(" ", 2)[2]
            flags.insert(2, layout)
        except OctoPipeError:
            if split.vp > 1:
                flags.insert(2, f"--num-virtual-stages-per-pipeline-rank {split.vp}")
    flags += ["--sequence-parallel"] * (split.tp > 1 and setup.sequence_parallel)
    if split.zero >= 2:
        what = "optim_grads_params" if split.zero == 3 else "optim_grads"
        flags += [f"--use-megatron-fsdp --data-parallel-sharding-strategy {what}"]
    elif split.zero >= 1:
        flags += ["--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"]
    flags += ["--bf16"] + ["--fp8-format hybrid"] * (setup.precision == "fp8")
    if setup.recompute == "full":
        stages = max(1, split.pp * split.vp)
        layers = setup.recompute_layers or (candidate.plan.num_layers - 2 if candidate.plan is not None else 1)
        per_stage = -(-layers // stages)
        flags += [f"--recompute-granularity full --recompute-method block --recompute-num-layers {per_stage}"]
    elif setup.recompute == "selective":
        flags += ["--recompute-granularity selective"]
    return " ".join(flags)


def octopipe_flags(candidate: Candidate, model: str, plan_file: str) -> str:
    """`octopipe train`'s flags; raises where it cannot run the split."""
    split, setup = candidate.split, candidate.setup
    if split.tp * split.cp * split.ep > 1:
        raise OctoPipeError("`octopipe train` shards no tensor; give it layers that do, or plan with --for octopipe")
    if split.zero and split.dp > 1:
        raise OctoPipeError(
            f"`octopipe train` holds weights, gradients and state whole on every replica, and this split counts on "
            f"ZeRO-{split.zero}; plan with --for octopipe"
        )
    if setup.recompute != "none":
        raise OctoPipeError(
            f"`octopipe train` recomputes what a plan's R ops say, and this split counts on {recomputed(candidate)}; "
            "plan with --for octopipe"
        )
    words = f"-m octopipe train {model} --plan {plan_file} --dp {split.dp} --seq {setup.seq}"
    return f"{words} --micro-batch-size {split.micro_batch_size} --dtype bfloat16 --device cuda"


def recomputed(candidate: Candidate) -> str:
    """What layers recompute by themselves, in words."""
    setup = candidate.setup
    if setup.recompute == "selective":
        return "selective recomputation"
    return f"{setup.recompute_layers or 'all'} checkpointed layers"


def torch_flags(candidate: Candidate, plan_file: str, start: str) -> str:
    """PyTorch's schedule from a file; raises where its runtime cannot run the plan."""
    split, plan = candidate.split, candidate.plan
    if plan is not None and (len(plan.routes) > 1 or any(s.recompute for s in plan.stages)):
        what = "holds layers on several ranks" if len(plan.routes) > 1 else "recomputes single stages"
        raise OctoPipeError(f"the plan {what}, which its runtime cannot; plan with --for torch")
    mesh = f"a mesh of pp {split.pp} x dp {split.dp} x cp {split.cp} x tp {split.tp}"
    if candidate.setup.recompute != "none":
        mesh += f", {recomputed(candidate)}"
    if split.pp == 1:
        return f"{start} train.py  # {mesh}; no pipeline"
    return (
        f"octopipe export {plan_file} --to pytorch -o schedule.csv && {start} train.py  "
        f"# {mesh}; the schedule reads schedule.csv"
    )


def command_lines(candidate: Candidate, *, model: str, plan_file: str, runtime: str) -> dict[str, str]:
    """Runtime -> the line that starts the split there, or why there is none."""
    start, out = torchrun(candidate), {}
    if runtime in ("any", "megatron"):
        try:
            out["megatron"] = f"{start} pretrain_gpt.py {megatron_flags(candidate)}"
        except OctoPipeError as error:
            out["megatron"] = f"none: {error}"
    if runtime in ("any", "octopipe"):
        try:
            out["octopipe"] = f"{start} {octopipe_flags(candidate, model, plan_file)}"
        except OctoPipeError as error:
            out["octopipe"] = f"none: {error}"
    if runtime in ("any", "torch"):
        try:
            out["torch"] = torch_flags(candidate, plan_file, start)
        except OctoPipeError as error:
            out["torch"] = f"none: {error}"
    return out

"""The training runtimes a split can be launched on: what each shards, keeps, recomputes and refuses.

Knows: the rules of Megatron-LM, torchtitan, plain torch.distributed.pipelining, DeepSpeed and `octopipe train`, each
at a stated version. Does not know: their flags (`commands.py`, `megatron_line.py`), splits or costs.

The most important rule is the effect of a pipeline on ZeRO. Between micro-batches, every one of these runtimes keeps
weights and gradients unsharded: torch's pipelining disables FSDP's resharding and gradient reduction until the last
micro-batch, torchtitan does not reshard in a pipeline, DeepSpeed rejects ZeRO-2 and ZeRO-3 there, and Megatron-LM's
FSDP replaces the pipeline. Only optimizer state stays sharded, which is ZeRO-1 in memory and in communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from octopipe.costs.cluster.setup import Setup

Target = Literal["octopipe", "torch", "megatron"]
Checkpoints = Literal["some", "stage", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What a training runtime can run."""

    name: str
    version: str
    """The version of the runtime that the rules were taken from."""
    zero: tuple[int, ...]
    """ZeRO levels without a pipeline."""
    zero_with_pipeline: tuple[int, ...]
    most: Mapping[str, int] = field(default_factory=dict)
    """The largest parallel sizes that it supports."""
    target: Target | None = "octopipe"
    """Which plans a search for it may return (see `search/restricted.py`); None: none but the schedules it brings."""
    overlaps: tuple[str, ...] = ()
    """Schedules in which it hides the experts' exchange behind the other direction's computation."""
    trains: tuple[str, ...] = ()
    """What it can train besides all weights: `lora` (adapters), `frozen` (a model with some layers frozen)."""
    offloads: tuple[str, ...] = ()
    """What it can keep in the host's memory, of what is priced here: `optimizer` state, whole layers' `activations`."""
    recomputes_by_ops: bool = False
    """Whether it recomputes exactly what the plan's R ops say; other runtimes checkpoint layers instead."""
    checkpoints: Checkpoints = "some"
    """Which layers it can checkpoint: `some` (any of them), as many in every `stage`, or `all` of them or none."""

    @property
    def tuned(self) -> bool:
        """Whether there is anything to search besides the split: an order, a placement, or at least a partition."""
        return self.target is not None

    @property
    def any_order(self) -> bool:
        """Whether it runs any order of ops, such as a zero-bubble schedule or a tuned order."""
        return self.target in ("octopipe", "torch")

    def zero_levels(self, pp: int) -> tuple[int, ...]:
        return self.zero if pp == 1 else self.zero_with_pipeline

    def refuses(self, setup: Setup) -> str:
        """The reason why it cannot run such a set-up under any split; empty if it can."""
        if setup.lora is not None and "lora" not in self.trains:
            return f"{self.title} has no adapters (LoRA)"
        if setup.frozen and "frozen" not in self.trains:
            return f"{self.title} has no switch that freezes single layers"
        if setup.offload_layers is not None and "activations" not in self.offloads:
            return f"{self.title} keeps no layer's activations in the host's memory"
        if setup.offload_optimizer and "optimizer" not in self.offloads:
            return f"{self.title} keeps no share of the optimizer state in the host's memory"
        return ""

    @property
    def title(self) -> str:
        """The name by which it is commonly known."""
        names = {"megatron": "Megatron-LM's pretraining script", "torch": "torch", "octopipe": "`octopipe train`"}
        return {**names, "deepspeed": "DeepSpeed"}.get(self.name, self.name)


RUNTIMES: Mapping[str, Runtime] = MappingProxyType(
    {
        # (Interleaved) 1F1B with stages in turn, any layers per stage (--pipeline-model-parallel-layout).
        "megatron": Runtime(
            name="megatron",
            version="Megatron-LM, main of August 2026 (d98e8a6)",
            zero=(1, 2, 3),
            zero_with_pipeline=(1,),
            target="megatron",
            # --overlap-moe-expert-parallel-comm wants interleaved 1F1B and no whole layers recomputed.
            overlaps=("interleaved-overlap",),
            offloads=("optimizer", "activations"),
            checkpoints="stage",  # --recompute-method block --recompute-num-layers N
        ),
        # FSDP2, DTensor TP, context and expert parallelism around torch.distributed.pipelining.
        "torchtitan": Runtime(
            name="torchtitan",
            version="torchtitan, main of August 2026 (b5bcd76)",
            zero=(2, 3),
            zero_with_pipeline=(1,),
            most={"etp": 1},  # its expert ranks hold whole experts
            target="torch",
            overlaps=("dualpipev",),
            trains=("lora",),
            checkpoints="all",
        ),
        "torch": Runtime(
            name="torch",
            version="torch.distributed.pipelining with FSDP2, torch 2.9 to 2.15",
            zero=(1, 2, 3),
            zero_with_pipeline=(1,),
            target="torch",
            trains=("lora", "frozen"),
            offloads=("activations",),
        ),
        # Its pipeline engine runs plain 1F1B over one chain of stages, without context or expert parallelism.
        "deepspeed": Runtime(
            name="deepspeed",
            version="DeepSpeed 0.18",
            zero=(1, 2, 3),
            zero_with_pipeline=(1,),
            most={"cp": 1, "ep": 1, "etp": 1, "vp": 1, "hsdp": 1},
            target=None,
            trains=("lora", "frozen"),
            offloads=("optimizer",),
        ),
        # `octopipe train` divides models over pipelines and replicas; it shards no tensor and no state.
        "octopipe": Runtime(
            name="octopipe",
            version="this package",
            zero=(0,),
            zero_with_pipeline=(0,),
            most={"tp": 1, "cp": 1, "ep": 1, "etp": 1, "hsdp": 1},
            trains=("frozen",),
            offloads=("optimizer",),
            recomputes_by_ops=True,
        ),
        # Every split that at least one of the others runs.
        "any": Runtime(
            name="any",
            version="any of the others",
            zero=(1, 2, 3),
            zero_with_pipeline=(1,),
            overlaps=("interleaved-overlap", "dualpipev"),
            trains=("lora", "frozen"),
            offloads=("optimizer", "activations"),
            checkpoints="stage",  # what most of them run; a script of one's own runs it too
        ),
    }
)

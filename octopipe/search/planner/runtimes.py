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
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from octopipe.costs.cluster.setup import PRECISIONS, Setup
from octopipe.models.spec import ModelSpec, Moe, Mtp

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
    divides_state: bool = False
    """Whether replicas always divide some of the training state; others also hold all of it whole (ZeRO-0) if asked."""
    most: Mapping[str, int] = field(default_factory=dict)
    """The largest parallel sizes that it supports."""
    most_with_predictions: Mapping[str, int] = field(default_factory=dict)
    """The same for models with multi-token prediction."""
    most_with_expert_biases: Mapping[str, int] = field(default_factory=dict)
    """The same for models whose experts have biases."""
    target: Target | None = "octopipe"
    """Class of plans that a search for it may return (see `search/restricted.py`); None if it runs only its own
    schedule."""
    overlaps: tuple[str, ...] = ()
    """Schedules in which it hides the experts' exchange behind the other direction's computation."""
    runs_pairs: bool = True
    """Whether the ops of a pair can run at the same time."""
    trains: tuple[str, ...] = ()
    """What it can train besides all weights: `lora` (adapters), `frozen` (a model with some layers frozen)."""
    offloads: tuple[str, ...] = ()
    """What it can keep in host memory: `optimizer` state, `activations` of whole layers."""
    recomputes_by_ops: bool = False
    """Whether it recomputes exactly what the plan's R ops say; other runtimes checkpoint layers instead."""
    checkpoints: Checkpoints = "some"
    """Which layers it can checkpoint: `some` (any of them), the same number in every `stage`, or `all` of them or
    none."""
    precisions: tuple[str, ...] = PRECISIONS
    """Precisions of matrix products that it supports, of those that are priced here."""
    gradients: tuple[str, ...] = ("fp32", "bf16")
    """Precisions in which it can accumulate and reduce gradients."""
    states: tuple[str, ...] = ("fp32", "bf16-moments", "bf16")
    """Optimizer states that it can keep, as `Setup.states` names them."""

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

    def zero_asked(self, pp: int) -> tuple[int, ...]:
        """Return the ZeRO levels that it runs if the user names one, which may be more than a search tries."""
        levels = self.zero_levels(pp)
        return levels if self.divides_state else tuple(sorted({0, *levels}))

    def refuses_sizes(self, sizes: Mapping[str, int]) -> str:
        """Return the reason why it runs no split with these sizes; empty if it runs some. Sizes that are not named may
        have any value."""
        if beyond := [f"{name} {sizes[name]}" for name, most in self.most.items() if sizes.get(name, 0) > most]:
            return f"{self.title} does not run {', '.join(beyond)}"
        zero, pp = sizes.get("zero"), sizes.get("pp")
        one_replica = sizes.get("dp") == sizes.get("cp") == 1
        if zero is None or one_replica:
            return ""
        # No runtime has ZeRO-2 and ZeRO-3 with a pipeline; `why_no_split` says so.
        either = pp is None or (pp > 1 and zero >= 2)
        levels = {*self.zero_asked(1), *self.zero_asked(2)} if either else {*self.zero_asked(pp or 1)}
        if zero in levels:
            return ""
        where = "" if either else " with a pipeline" if pp != 1 else " without a pipeline"
        runs = " or ".join(f"ZeRO-{level}" for level in sorted(levels))
        return f"{self.title} runs {runs}{where}, not ZeRO-{zero}"

    def refuses(self, setup: Setup) -> str:
        """Return the reason why it cannot run such a set-up under any split; empty if it can."""
        if setup.lora is not None and "lora" not in self.trains:
            return f"{self.title} has no adapters (LoRA)"
        if setup.frozen and "frozen" not in self.trains:
            return f"{self.title} has no switch that freezes single layers"
        if setup.offload_layers is not None and "activations" not in self.offloads:
            return f"{self.title} keeps no layer's activations in the host's memory"
        if setup.offload_optimizer and "optimizer" not in self.offloads:
            return f"{self.title} keeps no share of the optimizer state in the host's memory"
        return self._refuses_numbers(setup)

    def _refuses_numbers(self, setup: Setup) -> str:
        """Return the reason why it does not support the set-up's precision, gradients or optimizer state; empty if it
        does."""
        if setup.precision not in self.precisions:
            what = f"does not run the {setup.precision} products that are priced here"
            return f"{self.title} {what}; give --precision {self.precisions[0]}"
        gradients = "bf16" if setup.gradient_bytes == 2 else "fp32"
        if gradients not in self.gradients:
            only = self.gradients[0]
            return f"{self.title} accumulates and reduces gradients in {only} alone; give --gradients {only}"
        if setup.states not in self.states:
            kept = " or ".join(self.states)
            return f"{self.title} keeps {kept} optimizer state, not {setup.states}; give --states {self.states[0]}"
        return ""

    def of_model(self, spec: ModelSpec) -> Runtime:
        """Return the runtime with the limits on parallel sizes that it has for this model."""
        most = dict(self.most)
        if any(isinstance(layer, Mtp) for layer in spec.layers):
            most |= self.most_with_predictions
        if any(part.bias for layer in spec for part in layer.parts if isinstance(part, Moe)):
            most |= self.most_with_expert_biases
        return self if most == self.most else replace(self, most=most)

    def settled(self, setup: Setup) -> Setup:
        """Return the set-up with the runtime's gradient precision, if it supports only one and the set-up names
        none."""
        if setup.gradients is not None or len(self.gradients) > 1:
            return setup
        return replace(setup, gradients=self.gradients[0])  # type: ignore[arg-type]

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
            most_with_expert_biases={"etp": 1},
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
            divides_state=True,  # FSDP2
            most={"etp": 1},  # its expert ranks hold whole experts
            most_with_predictions={"pp": 1, "cp": 1},
            target="torch",
            # PyTorch runs the two ops of OVERLAP_F_B one after the other unless a function is registered for it, and
            # torchtitan registers one in its experimental graph_trainer alone.
            runs_pairs=False,
            trains=("lora",),
            checkpoints="all",
            gradients=("fp32",),  # training.mixed_precision_reduce has no other value
            states=("fp32", "bf16"),  # training.dtype: float32, or bfloat16 for weights and moments alike
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
            states=("fp32",),
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
            # Its fp8 multiplies W in bf16 and keeps float8 copies of weights: `octopipe profile` measures that.
            precisions=("bf16",),
            gradients=("fp32",),
            states=("fp32",),
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

"""The set-up: how a training run uses its GPUs, as one frozen record that every verb and every output shares.

Knows: GPU, parallel sizes, batch, sequence length, ZeRO, precision, recomputation and the memory kept free; how
they follow from each other, and how they read in one line and in JSON. Does not know: models, costs or plans.

>>> from octopipe.costs.cluster.hardware import gpu
>>> setup = Setup(gpu=gpu("h100"), tp=4, pp=8, dp=2, micro_batches=64, seq=8192)
>>> setup.num_gpus, setup.global_batch, setup.words()
(64, 128, '64 x h100: tp 4, pp 8, dp 2; 64 micro-batches of 1 x 8192 tokens, global batch 128; bf16, ZeRO-1')
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief
from octopipe.base.limits import MAX_SIZE, MAX_TIME_MS, finite
from octopipe.costs.analytic.calibration import Stack, stack_named, stack_record
from octopipe.costs.cluster.hardware import GIB, Cluster, Gpu, gpu_from, gpu_record

Precision = Literal["bf16", "fp8", "mxfp8", "nvfp4"]
Gradients = Literal["fp32", "bf16"]
CpKind = Literal["ring", "all-gather", "ulysses", "hierarchical"]
States = Literal["fp32", "bf16-moments", "bf16"]
Recompute = Literal["none", "selective", "full", "auto"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
RECOMPUTE: tuple[str, ...] = get_args(Recompute)
RESERVE_SHARE, RESERVE_LEAST_GIB = 0.06, 1.5
"""Memory kept free on every GPU for the CUDA context, NCCL's buffers and fragmentation: 6 % of the card and at
least 1.5 GiB (our choice: a context and communicators take 1.5 to 3 GiB, the rest is what allocators lose)."""
DEFAULT_SEQ = 4096


def default_reserve_gib(memory_gib: float) -> float:
    return max(RESERVE_LEAST_GIB, RESERVE_SHARE * memory_gib)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything a predicted number depends on besides the model and the plan."""

    gpu: Gpu | None = None
    """None: the costs were measured, and the file does not say on what."""
    tp: int = 1
    """GPUs a layer's matrices are split over."""
    cp: int = 1
    """GPUs a sequence is split over."""
    cp_kind: CpKind = "ring"
    """How they see each other's keys and values: handed round behind the attention core; gathered before it; heads
    instead of tokens divided around it (all-to-all); or all-to-all inside a node and a ring between nodes."""
    ep: int = 1
    """GPUs the experts of a layer are dealt to, inside tp * cp * dp."""
    pp: int = 1
    dp: int = 1
    """Pipelines side by side."""
    micro_batch_size: int = 1
    """Sequences per micro-batch."""
    micro_batches: int | None = None
    """Per pipeline and step; None: not decided yet."""
    seq: int | None = DEFAULT_SEQ
    """Tokens per sequence; None: the file of times does not say."""
    zero: int = 1
    """0: every replica holds all state; 1: optimizer state divided (Megatron's distributed optimizer); 2: gradients
    too; 3: weights too (FSDP)."""
    precision: Precision = "bf16"
    """Of matrix products: fp8 with one scale per tensor, mxfp8 and nvfp4 with one per block."""
    gradients: Gradients | None = None
    """Precision in which gradients are kept and reduced; None: fp32, or bf16 where `precision` is not bf16."""
    states: States = "fp32"
    """Optimizer state: an fp32 weight and two fp32 moments; fp32 weight and bf16 moments (DeepSeek-V3); or bf16 moments
    alone, where the optimizer updates bf16 weights."""
    recompute: Recompute = "none"
    """selective: outputs of norms, of experts' activation functions and of latent up-projections again (Megatron-LM's
    --recompute-modules layernorm moe_act mla_up_proj); full: whole layers again, one at a time, from their inputs;
    auto: as much of both as it takes to fit."""
    recompute_layers: int | None = None
    """With full: so many layers, spread evenly over the model, the rest selectively; None: all."""
    sequence_parallel: bool = True
    """With tp: norms and the residual stream divided over the group as well."""
    vocab_parallel: bool = False
    """Embedding and head divided over all pipeline ranks."""
    reserve_gib: float | None = None
    """Kept free on every GPU; None: 6 % of the card, at least 1.5 GiB."""
    memory_gib: tuple[float, ...] = ()
    """What may be used on each pipeline rank's GPUs, instead of the card's memory less the reserve."""
    speeds: tuple[float, ...] = ()
    """Relative speed per pipeline rank."""
    p2p_ms: float | None = None
    """Every transfer takes this long, instead of the links' own time."""
    gpus_per_node: int | None = None
    nodes: tuple[tuple[str, int, int], ...] = ()
    """Unequal nodes, in order: (GPU, nodes, GPUs per node)."""
    samples: int | None = None
    """Sequences per pipeline and step, where they differ in length; `seq` is then that of the micro-batch that prices
    are relative to."""
    batch: str | None = None
    """How micro-batches are made of them, in words."""
    stack: Stack | None = None
    """The training stack whose rates hold; None: the default one's."""

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "ep", "pp", "dp", "micro_batch_size"):
            _whole(name, getattr(self, name))
        for name in ("micro_batches", "seq", "gpus_per_node", "samples"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name))
        if self.batch is not None and not isinstance(self.batch, str):
            raise OctoPipeError(f"batch is {brief(self.batch)}; give words, or leave it out")
        for name in ("sequence_parallel", "vocab_parallel"):
            if not isinstance(getattr(self, name), bool):
                raise OctoPipeError(f"{name} is {brief(getattr(self, name))}; give true or false")
        if isinstance(self.zero, bool) or self.zero not in (0, 1, 2, 3):
            raise OctoPipeError(f"zero is {brief(self.zero)}; give 0, 1, 2 or 3")
        for name, known in (("precision", PRECISIONS), ("recompute", RECOMPUTE)):
            if getattr(self, name) not in known:
                raise OctoPipeError(f"{name} is {brief(getattr(self, name))}; one of {', '.join(known)}")
        if self.recompute_layers is not None:
            _whole("recompute_layers", self.recompute_layers)
            if self.recompute != "full":
                raise OctoPipeError(f"recompute_layers counts for full recomputation; here it is {self.recompute}")
        if self.gradients not in (None, *get_args(Gradients)):
            raise OctoPipeError(f"gradients is {brief(self.gradients)}; one of {', '.join(get_args(Gradients))}")
        if self.cp_kind not in get_args(CpKind):
            raise OctoPipeError(f"cp_kind is {brief(self.cp_kind)}; one of {', '.join(get_args(CpKind))}")
        if self.states not in get_args(States):
            raise OctoPipeError(f"states is {brief(self.states)}; one of {', '.join(get_args(States))}")
        for name in ("reserve_gib", "p2p_ms"):
            value = getattr(self, name)
            if value is not None and not 0 <= (-1.0 if finite(value) is None else value) <= MAX_TIME_MS:
                raise OctoPipeError(f"{name} is {brief(value)}; give a finite number >= 0, at most {MAX_TIME_MS:g}")
        if self.gpu is not None and self.precision != "bf16":
            self.gpu.peak_flops_per_ms(self.precision)
        if self.cp > 1 and self.seq is not None and self.seq % (2 * self.cp):
            raise OctoPipeError(
                f"cp {self.cp} needs a sequence that 2 x cp divides (two slices a GPU); {self.seq} tokens is none"
            )
        if self.gpu is not None and self.gpu_memory_gib <= self.reserved_gib and not self.memory_gib:
            raise OctoPipeError(
                f"reserve_gib {self.reserved_gib:g} leaves nothing of the {self.gpu_memory_gib:g} GiB of a "
                f"{self.gpu.name}; reserve less"
            )

    # -- what follows from it ----------------------------------------------------------------------------------------

    @property
    def num_gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def gpus_per_rank(self) -> int:
        return self.tp * self.cp

    @property
    def tokens_per_micro_batch(self) -> int | None:
        return None if self.seq is None else self.seq * self.micro_batch_size

    @property
    def global_batch(self) -> int | None:
        """Sequences per step over all pipelines."""
        if self.samples is not None:
            return self.samples * self.dp
        return None if self.micro_batches is None else self.micro_batches * self.micro_batch_size * self.dp

    @property
    def gradient_bytes(self) -> float:
        """Bytes of one parameter's gradient."""
        return 2.0 if (self.gradients or ("fp32" if self.precision == "bf16" else "bf16")) == "bf16" else 4.0

    @property
    def state_bytes(self) -> float:
        """Bytes of one parameter's optimizer state, its fp32 weight included where there is one."""
        return {"fp32": 12.0, "bf16-moments": 8.0, "bf16": 4.0}[self.states]

    @property
    def peak_flops_per_ms(self) -> float | None:
        """The mean data-sheet peak of the GPUs in use, in the run's precision; None where they are not known."""
        if self.gpu is None:
            return None
        kinds = [(gpu_from(name), count * size) for name, count, size in self.nodes] or [(self.gpu, self.num_gpus)]
        left, total = self.num_gpus, 0.0
        for kind, number in kinds:
            used = min(number, left)
            total += used * kind.peak_flops_per_ms(self.precision)
            left -= used
        return total / max(self.num_gpus - left, 1)

    @property
    def gpu_memory_gib(self) -> float:
        return self.gpu.memory_gib if self.gpu is not None else math.inf

    @property
    def reserved_gib(self) -> float:
        """Kept free on every GPU. A capacity that was given outright is meant to be used, unless a reserve was too."""
        if self.reserve_gib is not None:
            return self.reserve_gib
        return 0.0 if self.memory_gib or self.gpu is None else default_reserve_gib(self.gpu.memory_gib)

    def rank_memory_bytes(self) -> tuple[float, ...]:
        """What a plan may fill on every pipeline rank; empty: no limit is known."""
        limits = self.memory_gib or (() if self.gpu is None else (self.gpu.memory_gib,))
        usable = tuple(gib - self.reserved_gib for gib in limits)
        if any(gib <= 0 for gib in usable):
            raise OctoPipeError(f"reserve_gib {self.reserved_gib:g} leaves nothing of {min(limits):g} GiB; keep less")
        return tuple(gib * GIB for gib in usable)

    def cluster(self) -> Cluster:
        """The GPUs and links this set-up lies on."""
        if self.gpu is None:
            raise OctoPipeError("the set-up names no GPU; give one (`octopipe gpus` lists them)")
        return Cluster(
            gpu=self.gpu,
            tp=self.tp,
            cp=self.cp,
            ep=self.ep,
            pp=self.pp,
            dp=self.dp,
            gpus_per_node=self.gpus_per_node,
            rank_speed=self.speeds,
            rank_memory_gib=self.memory_gib,
        )

    def with_micro_batches(self, micro_batches: int) -> Setup:
        return replace(self, micro_batches=micro_batches)

    # -- how it is told ----------------------------------------------------------------------------------------------

    def words(self) -> str:
        """One line: what the numbers beside it are for."""
        if self.gpu is None:
            where = f"measured times: pp {self.pp}" + (f", dp {self.dp}" if self.dp > 1 else "")
        else:
            known = {name: getattr(self, name) for name in ("tp", "cp", "ep", "pp", "dp")}
            sizes = [f"{name} {size}" for name, size in known.items() if name in ("tp", "pp") or size > 1]
            kinds = " + ".join(f"{n * g} x {name}" for name, n, g in self.nodes) or f"{self.num_gpus} x {self.gpu.name}"
            where = f"{kinds}: {', '.join(sizes)}"
        length = "" if self.seq is None else f" x {self.seq} tokens"
        batch = "" if self.gpu is None and self.seq is None else f"micro-batches of {self.micro_batch_size}{length}"
        if self.batch is not None:
            batch = self.batch
        elif self.micro_batches is not None:
            batch = f"{self.micro_batches} {batch or 'micro-batches'}, global batch {self.global_batch}"
            batch = batch.replace("micro-batches", "micro-batch", 1) if self.micro_batches == 1 else batch
        how = []
        if self.gpu is not None:
            how = [self.precision] + ([f"ZeRO-{self.zero}"] if self.dp * self.cp > 1 else [])
            how += [self.recompute_words()] * (self.recompute != "none")
            how += ["no sequence parallelism"] * (not self.sequence_parallel and self.tp > 1)
            how += ["vocabulary parallel"] * self.vocab_parallel
            how += [f"{self.cp_kind} context parallelism"] * (self.cp > 1 and self.cp_kind != "ring")
            how += [f"{self.states} optimizer state"] * (self.states != "fp32")
            how += [] if self.stack is None else [f"{self.stack.name} rates"]
        return "; ".join(part for part in (where, batch, ", ".join(how)) if part)

    def recompute_words(self) -> str:
        """`none`, `selective recomputation`, `12 layers recomputed`."""
        if self.recompute_layers is not None:
            return f"{self.recompute_layers} layers recomputed"
        return "none" if self.recompute == "none" else f"{self.recompute} recomputation"

    def as_dict(self) -> dict[str, Any]:
        """The record as plain JSON values; `setup_from` reads it back."""
        out: dict[str, Any] = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("gpu", "memory_gib", "speeds", "nodes", "stack")
        }
        out["gpu"] = None if self.gpu is None else gpu_record(self.gpu)
        out["stack"] = None if self.stack is None else stack_record(self.stack)
        for name in ("memory_gib", "speeds"):
            out[name] = list(getattr(self, name)) or None
        out["nodes"] = [{"gpu": g, "count": n, "gpus_per_node": k} for g, n, k in self.nodes] or None
        return {
            **out,
            "gpus": self.num_gpus,
            "global_batch": self.global_batch,
            "tokens_per_micro_batch": self.tokens_per_micro_batch,
            "reserved_gib": self.reserved_gib,
        }


def setup_from(record: Mapping[str, Any], where: str = "setup") -> Setup:
    """The set-up in a JSON object as `Setup.as_dict` writes it; keys that follow from others are ignored."""
    known = {k: record[k] for k in Setup.__dataclass_fields__ if record.get(k) is not None}
    try:
        if "gpu" in known:
            known["gpu"] = gpu_from(known["gpu"])
        if "stack" in known:
            known["stack"] = stack_named(known["stack"])
        for name in ("memory_gib", "speeds"):
            if name in known:
                known[name] = tuple(float(v) for v in known[name])
        if "nodes" in known:
            known["nodes"] = tuple((str(n["gpu"]), int(n["count"]), int(n["gpus_per_node"])) for n in known["nodes"])
        if record.get("seq", 0) is None:
            known["seq"] = None
        return Setup(**known)
    except OctoPipeError as error:
        raise OctoPipeError(f"{where}: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        why = " ".join(str(error).split())[:120]
        raise OctoPipeError(f"{where}: cannot be used ({why}); write what `--json` prints under setup") from None


def derived_sizes(
    *, gpus: int | None, tp: int | None, cp: int | None, pp: int | None, dp: int | None
) -> dict[str, int | None]:
    """Fill in the one size that the others and the number of GPUs leave open.

    >>> derived_sizes(gpus=64, tp=4, cp=None, pp=8, dp=None)["dp"]
    2
    """
    sizes = {"tp": tp, "cp": 1 if cp is None else cp, "pp": pp, "dp": dp}
    if gpus is None:
        return sizes
    _whole("gpus", gpus)
    open_ones = [name for name in ("dp", "pp", "tp") if sizes[name] is None]
    known = math.prod(v for v in sizes.values() if v is not None)
    if gpus % known or (not open_ones and known != gpus):
        given = " x ".join(f"{k} {v}" for k, v in sizes.items() if v is not None)
        raise OctoPipeError(f"{given} = {known} does not make {gpus} GPUs; change one, or leave one out")
    if len(open_ones) == 1:
        sizes[open_ones[0]] = gpus // known
    elif open_ones == ["dp", "tp"]:
        return sizes  # tp has a default of its own; dp follows once it is known
    elif open_ones:
        raise OctoPipeError(
            f"{gpus} GPUs leave {' and '.join(open_ones)} open; give all but one, or let `octopipe plan` choose"
        )
    return sizes


def micro_batches_of(*, global_batch: int | None, micro_batch_size: int, dp: int, pp: int, given: int | None) -> int:
    """Micro-batches per pipeline and step: as given, as the global batch says, or 2 x pp."""
    if global_batch is None:
        return given or 2 * pp
    _whole("global_batch", global_batch)
    if global_batch % (micro_batch_size * dp):
        raise OctoPipeError(
            f"global batch {global_batch} is no multiple of micro-batch size {micro_batch_size} x dp {dp}; change one"
        )
    found = global_batch // (micro_batch_size * dp)
    if given is not None and given != found:
        raise OctoPipeError(
            f"global batch {global_batch} makes {found} micro-batches, not {given}; leave --micro-batches out"
        )
    return found


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
        raise OctoPipeError(f"{name} is {brief(value)}; give a whole number >= 1, at most {MAX_SIZE}")


__all__ = [
    "DEFAULT_SEQ",
    "PRECISIONS",
    "RECOMPUTE",
    "Precision",
    "Recompute",
    "Setup",
    "States",
    "default_reserve_gib",
    "derived_sizes",
    "micro_batches_of",
    "setup_from",
]

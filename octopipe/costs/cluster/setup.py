"""The set-up: how a training run uses its GPUs, as one frozen record that every verb and every output shares.

Knows: GPU, parallel sizes, batch, sequence length, ZeRO, precision, recomputation and the memory kept free; how
they follow from each other, and how they read in one line and in JSON. Does not know: models, costs or plans.

>>> from octopipe.costs.cluster.hardware import gpu
>>> setup = Setup(gpu=gpu("h100"), tp=4, pp=8, dp=2, micro_batches=64, seq=8192)
>>> setup.num_gpus, setup.global_batch, setup.words()
(64, 128, '64 x h100: tp 4, pp 8, dp 2; 64 micro-batches of 1 x 8192 tokens, global batch 128; bf16, ZeRO-1')
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief
from octopipe.costs.analytic.calibration import Stack
from octopipe.costs.cluster.fields import (
    Asked,
    Choice,
    GpuName,
    Lengths,
    NodeGroups,
    Number,
    Numbers,
    Part,
    Spread,
    StackName,
    Whole,
    Words,
    YesNo,
    asked,
    fields_of,
)
from octopipe.costs.cluster.hardware import GIB, INTER_LATENCY_MS, Cluster, Gpu, Link, gpu

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
DEFAULT_GPU = "h800"


def default_reserve_gib(memory_gib: float) -> float:
    return max(RESERVE_LEAST_GIB, RESERVE_SHARE * memory_gib)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything a predicted number depends on besides the model and the plan.

    A field is declared once, here. The flags of the command line, the keywords of `octopipe.tune` and its siblings, the
    keys of JSON and plan files and the form of the page are made from these declarations (`fields.py`).
    """

    gpu: Gpu | None = asked(
        None, GpuName(), part="hardware", optional=True, on_page=True, also={"hardware": lambda given: given},
        words="GPU preset (`octopipe gpus`), or a TOML file of GPU, links, NICs and power limit (docs/cluster.md)",
        unless_given=DEFAULT_GPU,
    )  # fmt: skip
    """None: the costs were measured, and the file does not say on what."""
    tp: int = asked(
        1, Whole(), of_a_model=True, follows=True, on_page=True, words="tensor-parallel size",
        unless_given="the smallest that fits",
    )  # fmt: skip
    """GPUs a layer's matrices are split over."""
    cp: int = asked(1, Whole(), of_a_model=True, words="context-parallel size", unless_given="1")
    """GPUs a sequence is split over."""
    cp_kind: CpKind = asked(
        "ring", Choice(get_args(CpKind)), part="training", of_a_model=True,
        words="with cp: keys and values handed round (ring), gathered first (all-gather), heads divided instead "
        "(ulysses), or that inside a node and a ring between nodes (hierarchical)", unless_given="ring",
    )  # fmt: skip
    """How GPUs of one sequence see each other's keys and values: handed round behind the attention core; gathered
    before it; heads instead of tokens divided around it (all-to-all); or that in a node and a ring between nodes."""
    ep: int = asked(1, Whole(), of_a_model=True, words="expert-parallel size", unless_given="1")
    """GPUs the experts of a layer are dealt to, inside tp * cp * dp."""
    pp: int = asked(1, Whole(), is_keyword=False, words="pipeline ranks")
    dp: int = asked(1, Whole(), words="data-parallel size: pipelines side by side", unless_given="1")
    """Pipelines side by side."""
    micro_batch_size: int = asked(
        1, Whole(), part="batch", of_a_model=True, words="sequences per micro-batch", unless_given="1"
    )
    """Sequences per micro-batch."""
    micro_batches: int | None = asked(
        None, Whole(), part="batch", optional=True, is_keyword=False, words="micro-batches per step",
        unless_given="2 x pp",
    )  # fmt: skip
    """Per pipeline and step; None: not decided yet."""
    seq: int | None = asked(
        DEFAULT_SEQ, Whole(), part="batch", optional=True, follows=True, on_page=True, words="tokens per sequence",
        unless_given=f"{DEFAULT_SEQ}, or what the file says",
    )  # fmt: skip
    """Tokens per sequence; None: the file of times does not say."""
    zero: int = asked(
        1, Choice((0, 1, 2, 3)), part="training", of_a_model=True, also={"distributed_optimizer": int},
        words="ZeRO stage, what data-parallel replicas shard: 1 optimizer state, 2 gradients too, 3 weights too (FSDP)",
        unless_given="1",
    )  # fmt: skip
    """0: every replica holds all state; 1: optimizer state divided (Megatron's distributed optimizer); 2: gradients
    too; 3: weights too (FSDP)."""
    precision: Precision = asked(
        "bf16", Choice(PRECISIONS), part="training", of_a_model=True, words="precision of matrix products",
        unless_given="bf16",
    )  # fmt: skip
    gradients: Gradients | None = asked(
        None, Choice(get_args(Gradients)), part="training", of_a_model=True, optional=True,
        words="precision of gradients", unless_given="fp32; bf16 with fp8",
    )  # fmt: skip
    """Precision in which gradients are kept and reduced; None: fp32, or bf16 where `precision` is not bf16."""
    states: States = asked(
        "fp32", Choice(get_args(States)), part="training", of_a_model=True,
        words="optimizer state: fp32 weight and moments, bf16 moments, or moments alone, in bf16", unless_given="fp32",
    )  # fmt: skip
    """An fp32 weight and two fp32 moments; an fp32 weight and bf16 moments (DeepSeek-V3); or bf16 moments alone, where
    the optimizer updates bf16 weights."""
    recompute: Recompute = asked(
        "none", Choice(RECOMPUTE), part="training", of_a_model=True,
        words="activations to recompute: the cheap ones (selective), all (full), or as many as it takes to fit (auto)",
        unless_given="none",
    )  # fmt: skip
    """selective: outputs of norms, of experts' activation functions and of latent up-projections again (Megatron-LM's
    --recompute-modules layernorm moe_act mla_up_proj); full: whole layers again, one at a time, from their inputs;
    auto: as much of both as it takes to fit."""
    recompute_layers: int | None = asked(
        None, Whole(), part="training", of_a_model=True, optional=True,
        words="with full: recompute only so many layers", unless_given="all",
    )  # fmt: skip
    """With full: so many layers, spread evenly over the model, the rest selectively; None: all."""
    sequence_parallel: bool = asked(
        True, YesNo(), part="training", of_a_model=True, words="with tp: divide the residual stream too",
        unless_given="yes",
    )  # fmt: skip
    """With tp: norms and the residual stream divided over the group as well."""
    imbalance: tuple[float, ...] = asked(
        (), Spread(), part="training", of_a_model=True,
        words="uneven routing: tokens of the busiest expert rank over the mean, or a file with every expert's tokens",
        unless_given="1, even",
    )  # fmt: skip
    """What the busiest expert rank gets over the mean, or the tokens of every expert; empty: all get the same."""
    vocab_parallel: bool = asked(
        False, YesNo(), part="ranks", of_a_model=True, words="embedding and head divided over all pipeline ranks",
        unless_given="no", has_flag=False,
    )  # fmt: skip
    """Embedding and head priced as divided over all pipeline ranks; `octopipe tune --cut-head` plans such a head."""
    reserve_gib: float | None = asked(
        None, Number(), part="training", optional=True, words="GiB kept free per GPU",
        unless_given="6 %, at least 1.5",
    )  # fmt: skip
    """Kept free on every GPU; None: 6 % of the card, at least 1.5 GiB."""
    memory_gib: tuple[float, ...] = asked(
        (), Numbers(), part="ranks", on_page=True, words="GiB usable per rank: one number, or one per rank",
        unless_given="the GPU's, less the reserve",
    )  # fmt: skip
    """What may be used on each pipeline rank's GPUs, instead of the card's memory less the reserve."""
    speeds: tuple[float, ...] = asked(
        (), Numbers(), part="ranks", also={"rank_speed": lambda given: given},
        words="relative speed per rank, e.g. 1,1,0.5,1",
    )  # fmt: skip
    """Relative speed per pipeline rank."""
    p2p_ms: float | None = asked(
        None, Number(), part="ranks", optional=True, words="time of every transfer in ms, instead of the links' own"
    )
    """Every transfer takes this long, instead of the links' own time."""
    host_gb_per_s: float | None = asked(
        None, Number(), part="ranks", optional=True, words="GB/s between a GPU and its host's memory, each way",
        unless_given="the GPU's",
    )  # fmt: skip
    """For what is offloaded; None: as the GPU's preset or the profile says."""
    gpus_per_node: int | None = asked(
        None, Whole(), part="hardware", of_a_model=True, optional=True,
        words="GPUs on the fast links of a node", unless_given="the preset's",
    )  # fmt: skip
    nodes: tuple[tuple[str, int, int], ...] = asked(
        (), NodeGroups(), part="hardware", of_a_model=True, flag="cluster", also={"cluster": lambda given: given},
        words="unequal nodes: a TOML or JSON file of [[nodes]]",
    )  # fmt: skip
    """Unequal nodes, in order: (GPU, nodes, GPUs per node)."""
    stack: Stack | None = asked(
        None, StackName(), part="hardware", of_a_model=True, optional=True,
        words="training stack whose rates hold (`octopipe calibrate --list`), or a file of `octopipe calibrate`",
        unless_given="nvidia-2025",
    )  # fmt: skip
    """None: the default stack's rates hold."""
    micro_batch_lengths: tuple[tuple[int, ...], ...] = asked(
        (), Lengths(2), part="batch", has_flag=False, words="the lengths of every micro-batch's sequences"
    )
    """Per micro-batch the lengths of its sequences, padded to the longest or `packed`."""
    packed: bool = asked(
        False, YesNo(), part="batch", has_flag=False, words="sequences of different length packed, not padded"
    )
    tokens_per_pipeline: int | None = asked(
        None, Whole(), part="batch", has_flag=False, optional=True,
        words="with lengths: tokens that all pipelines have on average",
    )  # fmt: skip
    """Where other pipelines have fewer tokens than this one: what they all have on average, for tokens per second."""
    micro_batch_tokens: tuple[int, ...] = asked(
        (), Lengths(), part="batch", has_flag=False, words="per micro-batch, the one length of its sequences"
    )
    samples: int | None = asked(None, Whole(), part="batch", optional=True, has_flag=False, is_keyword=False)
    """Sequences per pipeline and step, where they differ in length; `seq` is then that of the micro-batch that prices
    are relative to."""
    batch: str | None = asked(None, Words(), part="batch", optional=True, has_flag=False, is_keyword=False)
    """How micro-batches are made of them, in words."""

    def __post_init__(self) -> None:
        for name, how in fields_of(type(self)).items():
            object.__setattr__(self, name, how.read(name, getattr(self, name)))
        if self.recompute_layers is not None and self.recompute != "full":
            raise OctoPipeError(f"recompute_layers counts for full recomputation; here it is {self.recompute}")
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
        kinds = [(gpu(name), count * size) for name, count, size in self.nodes] or [(self.gpu, self.num_gpus)]
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

    def busiest_expert_rank(self, experts: int) -> float:
        """Tokens of the busiest rank of an expert group over the mean; a rank holds neighbouring experts."""
        if len(self.imbalance) < 2:
            return self.imbalance[0] if self.imbalance and self.ep > 1 else 1.0
        if len(self.imbalance) != experts:
            raise OctoPipeError(f"imbalance has the tokens of {len(self.imbalance)} experts; a layer has {experts}")
        held = experts // self.ep
        loads = [sum(self.imbalance[r * held : (r + 1) * held]) for r in range(self.ep)]
        return max(loads) * self.ep / sum(loads)

    @property
    def host_link(self) -> Link | None:
        """The link to host memory that was given outright; otherwise the GPU's or the profile's holds."""
        return None if self.host_gb_per_s is None else Link.of_bandwidth(self.host_gb_per_s, INTER_LATENCY_MS)

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
            if self.imbalance and self.ep > 1:
                spread = f"{self.imbalance[0]:g} x the mean" if len(self.imbalance) == 1 else "as counted"
                how.append(f"tokens of the busiest expert rank {spread}")
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
        return {
            **{name: how.kind.told(getattr(self, name)) for name, how in fields_of(type(self)).items()},
            "gpus": self.num_gpus,
            "global_batch": self.global_batch,
            "tokens_per_micro_batch": self.tokens_per_micro_batch,
            "reserved_gib": self.reserved_gib,
        }


def setup_from(record: Mapping[str, Any], where: str = "setup") -> Setup:
    """The set-up in a JSON object as `Setup.as_dict` writes it; keys that follow from others are ignored."""
    known = {name: record[name] for name in fields_of(Setup) if record.get(name) is not None}
    if record.get("seq", 0) is None:
        known["seq"] = None
    try:
        return Setup(**known)
    except OctoPipeError as error:
        raise OctoPipeError(f"{where}: {error}") from None


# -- how it is asked for --------------------------------------------------------------------------------------------


def keyword_fields() -> dict[str, Asked]:
    """The fields that are asked for by name: keywords of the package's functions, keys of a plan's "setting"."""
    return {name: how for name, how in fields_of(Setup).items() if how.is_keyword}


def flag_fields(*parts: Part) -> dict[str, Asked]:
    """The fields that have a flag, those of these parts alone where any is given."""
    every = fields_of(Setup).items()
    return {name: how for name, how in every if how.has_flag and (not parts or how.part in parts)}


def form_fields() -> dict[str, Asked]:
    """The fields that a page's form asks for: all that have a flag, but for files of the machine that serves it."""
    return {
        name: how for name, how in keyword_fields().items() if how.has_flag and not isinstance(how.kind, NodeGroups)
    }


def keywords(given: Mapping[str, Any], *, others: Iterable[str] = (), lenient: bool = False) -> dict[str, Any]:
    """What is asked for, under the fields' own names. An unknown name is an error that says the nearest one (`others`
    are known to the caller), or is left out where `lenient`; of two names of one field the first counts there."""
    fields = keyword_fields()
    older = {other: (name, convert) for name, how in fields.items() for other, convert in how.also.items()}
    out: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for word, value in given.items():
        name, convert = (word, None) if word in fields else older.get(word, ("", None))
        if not name:
            if lenient:
                continue
            close = difflib.get_close_matches(word, [*others, *fields, *older], 1)
            raise OctoPipeError(f"unknown keyword {word!r}" + (f"; did you mean {close[0]}?" if close else ""))
        if name in out:
            if lenient:
                continue
            raise OctoPipeError(f"{spelled[name]} and {word} are the same keyword; give one of them")
        if convert is not None and value is not None:
            try:
                value = convert(value)
            except (TypeError, ValueError):
                raise OctoPipeError(f"{word} is {brief(value)}; give {name} instead") from None
        out[name], spelled[name] = value, word
    return out


__all__ = [
    "DEFAULT_GPU",
    "DEFAULT_SEQ",
    "PRECISIONS",
    "RECOMPUTE",
    "Precision",
    "Recompute",
    "Setup",
    "default_reserve_gib",
    "flag_fields",
    "form_fields",
    "keyword_fields",
    "keywords",
    "setup_from",
]


def checkpointed_layers(num_layers: int, count: int | None) -> tuple[int, ...]:
    """The layers that full recomputation runs again inside the backward: all between embedding and head, or `count` of
    them, spread evenly."""
    inner = num_layers - 2
    count = inner if count is None else min(count, inner)
    return tuple(i for i in range(1, inner + 1) if i * count // inner > (i - 1) * count // inner)

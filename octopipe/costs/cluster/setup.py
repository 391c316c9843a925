"""The set-up: how a training run uses its GPUs, as one frozen record that every verb and every output shares.

Knows: GPU, parallel sizes, batch, sequence length, ZeRO, precision, recomputation and reserved memory; how they are
derived from each other, and their form as one line and in JSON. Does not know: models, costs or plans.

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
from octopipe.costs.analytic.calibration import Stack
from octopipe.costs.cluster.fields import (
    Choice,
    GpuName,
    LayerRanges,
    Lengths,
    NodeGroups,
    Number,
    Numbers,
    Share,
    Spread,
    StackName,
    Whole,
    Words,
    YesNo,
    fields_of,
    setup_field,
)
from octopipe.costs.cluster.file import node_gpus, used_gpus
from octopipe.costs.cluster.hardware import GIB, INTER_LATENCY_MS, Cluster, Gpu, Link, gpu
from octopipe.costs.cluster.item_counts import ItemCounts
from octopipe.costs.cluster.setup_words import words_of
from octopipe.costs.routing import busiest_rank

Precision = Literal["bf16", "fp8", "mxfp8", "nvfp4"]
Gradients = Literal["fp32", "bf16"]
CpKind = Literal["ring", "all-gather", "ulysses", "hierarchical"]
States = Literal["fp32", "bf16-moments", "bf16"]
Recompute = Literal["none", "selective", "full", "auto"]
LoraOn = Literal["all", "attention"]
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
    keys of JSON and plan files and the form of the web page are generated from these declarations (`fields.py`).
    """

    gpu: Gpu | None = setup_field(
        None, GpuName(), part="hardware", optional=True, on_page=True, also={"hardware": lambda given: given},
        words="GPU preset (`octopipe gpus`), or a TOML file of GPU, links, NICs and power limit (docs/cluster.md)",
        unless_given=DEFAULT_GPU,
    )  # fmt: skip
    """None: the costs were measured, and the file does not say on what."""
    tp: int = setup_field(
        1, Whole(), of_a_model=True, follows=True, on_page=True, words="tensor-parallel size",
        unless_given="the smallest that fits",
    )  # fmt: skip
    """GPUs a layer's matrices are split over."""
    cp: int = setup_field(1, Whole(), of_a_model=True, words="context-parallel size", unless_given="1")
    """GPUs a sequence is split over."""
    cp_kind: CpKind = setup_field(
        "ring", Choice(get_args(CpKind)), part="training", of_a_model=True,
        words="with cp: exchange keys and values in a ring (ring), gather them (all-gather), divide heads instead "
        "(ulysses), or ulysses within a node and a ring between nodes (hierarchical)", unless_given="ring",
    )  # fmt: skip
    """How the GPUs of one sequence obtain each other's keys and values: a ring that overlaps with attention; an
    all-gather before it; an all-to-all that divides heads instead of tokens; or such an all-to-all within a node and a
    ring between nodes."""
    ep: int = setup_field(1, Whole(), of_a_model=True, words="expert-parallel size", unless_given="1")
    """GPUs that the experts of a layer are distributed over, inside tp * cp * dp."""
    etp: int | None = setup_field(
        None, Whole(), of_a_model=True, optional=True,
        words="expert-tensor-parallel size: GPUs that the matrices of one expert are sharded over",
        unless_given="tp, or less if ep does not divide cp x dp",
    )  # fmt: skip
    """None: the tensor-parallel group, or fewer GPUs if ep does not divide cp * dp."""
    pp: int = setup_field(1, Whole(), is_keyword=False, words="pipeline-parallel size: number of pipeline ranks")
    dp: int = setup_field(1, Whole(), words="data-parallel size: number of pipelines", unless_given="1")
    """Number of data-parallel pipelines."""
    hsdp: int = setup_field(
        1, Whole(), of_a_model=True,
        words="number of copies of the state that ZeRO shards (HSDP); each is sharded over dp x cp / hsdp GPUs",
        unless_given="1",
    )  # fmt: skip
    """Gradients are reduced inside a copy's GPUs first, then between the copies."""
    micro_batch_size: int = setup_field(
        1, Whole(), part="batch", of_a_model=True, words="sequences per micro-batch", unless_given="1"
    )
    """Sequences per micro-batch."""
    micro_batches: int | None = setup_field(
        None, Whole(), part="batch", optional=True, is_keyword=False, words="micro-batches per step",
        unless_given="2 x pp",
    )  # fmt: skip
    """Per pipeline and step; None: not decided yet."""
    seq: int | None = setup_field(
        DEFAULT_SEQ, Whole(), part="batch", optional=True, follows=True, on_page=True, words="tokens per sequence",
        unless_given=f"{DEFAULT_SEQ}, or what the file says",
    )  # fmt: skip
    """Tokens per sequence; None: the file of times does not say."""
    images: tuple[float, ...] = setup_field(
        (), ItemCounts(), part="batch", of_a_model=True, unless_given="1",
        words="models with a tower: images per sequence, one number, or a list or file with one per sequence",
    )  # fmt: skip
    """One number: the mean of every micro-batch; several: each sequence's own. Empty: 1."""
    recordings: tuple[float, ...] = setup_field(
        (), ItemCounts(), part="batch", of_a_model=True, unless_given="1",
        words="models with an audio tower: recordings per sequence, as in --images (with one tower, the same flag)",
    )  # fmt: skip
    encoder_seq: int | None = setup_field(
        None, Whole(), part="batch", of_a_model=True, optional=True, unless_given="the model's",
        words="models with a tower or an encoder: positions per image, recording or source text",
    )  # fmt: skip
    zero: int = setup_field(
        1, Choice((0, 1, 2, 3)), part="training", of_a_model=True, also={"distributed_optimizer": int},
        words="ZeRO stage, what data-parallel replicas shard: 1 optimizer state, 2 gradients too, 3 weights too (FSDP)",
        unless_given="1",
    )  # fmt: skip
    """0: every replica holds all state; 1 is what Megatron calls the distributed optimizer."""
    precision: Precision = setup_field(
        "bf16", Choice(PRECISIONS), part="training", of_a_model=True, words="precision of matrix products",
        unless_given="bf16",
    )  # fmt: skip
    gradients: Gradients | None = setup_field(
        None, Choice(get_args(Gradients)), part="training", of_a_model=True, optional=True,
        words="precision in which gradients are stored and reduced", unless_given="fp32; bf16 with fp8",
    )  # fmt: skip
    """Precision in which gradients are kept and reduced; None: fp32, or bf16 if `precision` is not bf16."""
    states: States = setup_field(
        "fp32", Choice(get_args(States)), part="training", of_a_model=True,
        words="master weights and moments in fp32, moments in bf16, or bf16 moments alone", unless_given="fp32",
    )  # fmt: skip
    """fp32: an fp32 weight and two fp32 moments; bf16-moments: an fp32 weight and bf16 moments (DeepSeek-V3); bf16:
    only bf16 moments, so that the optimizer updates bf16 weights."""
    recompute: Recompute = setup_field(
        "none", Choice(RECOMPUTE), part="training", of_a_model=True,
        words="recompute nothing, cheap activations (selective), whole layers (full), or as needed to fit (auto)",
        unless_given="none",
    )  # fmt: skip
    """selective: recompute outputs of norms, of experts' activation functions and of latent up-projections
    (Megatron-LM's --recompute-modules layernorm moe_act mla_up_proj); full: recompute whole layers from their inputs,
    one at a time; auto: the least that fits of nothing, selective, some whole layers and all of them."""
    recompute_layers: int | None = setup_field(
        None, Whole(), part="training", of_a_model=True, optional=True,
        words="with full: number of layers to recompute", unless_given="all",
    )  # fmt: skip
    """With full: this many layers, spread evenly over the model; the others keep their activations. None: all."""
    sequence_parallel: bool = setup_field(
        True, YesNo(), part="training", of_a_model=True, words="with tp: shard the residual stream too",
        unless_given="yes",
    )  # fmt: skip
    """With tp: norms and the residual stream are sharded over the group as well."""
    imbalance: tuple[float, ...] = setup_field(
        (), Spread(), part="training", of_a_model=True,
        words="uneven routing: tokens of the busiest expert rank over the mean, or a file with the tokens per expert",
        unless_given="1, even",
    )  # fmt: skip
    """Tokens of the busiest expert rank over the mean, or the tokens of every expert; empty: even routing."""
    nodes_per_token: int | None = setup_field(
        None, Whole(), part="training", of_a_model=True, optional=True,
        words="node-limited routing: the experts of a token are on at most this many nodes",
        unless_given="no limit",
    )  # fmt: skip
    """None: a token's experts may lie on any node."""
    lora: int | None = setup_field(
        None, Whole(), part="training", of_a_model=True, optional=True,
        words="rank of low-rank adapters (LoRA) on the matrices of every block; all other weights are frozen",
        unless_given="none: weights are trained",
    )  # fmt: skip
    """None: no adapters, and every layer outside `frozen` is trained."""
    lora_on: LoraOn = setup_field(
        "all", Choice(get_args(LoraOn)), part="training", of_a_model=True,
        words="with lora: put adapters on all matrices of a block, or on those of attention only",
        unless_given="all",
    )  # fmt: skip
    frozen: tuple[tuple[int, int], ...] = setup_field(
        (), LayerRanges(), part="training", of_a_model=True, also={"freeze": lambda given: given},
        words="layers whose weights are not trained, counted from 0 (the embedding), e.g. 0-15,33, or `towers`",
    )  # fmt: skip
    """(first, last) of each range of layers without gradients and optimizer state."""
    offload_optimizer: float = setup_field(
        0.0, Share(), part="training", of_a_model=True,
        words="share of the optimizer state that is kept in host memory and updated by the CPU, from 0 to 1",
        unless_given="0",
    )  # fmt: skip
    """A share of the optimizer state that a GPU would hold after ZeRO's sharding."""
    offload_layers: int | None = setup_field(
        None, Whole(), part="training", of_a_model=True, optional=True,
        words="number of layers after the embedding whose activations are kept in host memory until the backward (only "
        "with pp 1 and without recomputation)",
        unless_given="none",
    )  # fmt: skip
    """None: all activations stay on the GPU."""
    vocab_parallel: bool = setup_field(
        False, YesNo(), part="ranks", of_a_model=True, words="embedding and head sharded over all pipeline ranks",
        unless_given="no", has_flag=False,
    )  # fmt: skip
    """Embedding and head are priced as sharded over all pipeline ranks; `octopipe tune --cut-head` plans that."""
    reserve_gib: float | None = setup_field(
        None, Number(), part="training", optional=True, words="GiB kept free per GPU (CUDA, NCCL, fragmentation)",
        unless_given="6 %, at least 1.5",
    )  # fmt: skip
    """Memory kept free on every GPU; None: 6 % of the GPU's memory, at least 1.5 GiB."""
    memory_gib: tuple[float, ...] = setup_field(
        (), Numbers(), part="ranks", on_page=True, words="GiB usable per rank: one number, or one per rank",
        unless_given="the GPU's, less the reserve",
    )  # fmt: skip
    """Usable memory of each pipeline rank's GPUs, instead of the GPU's memory less the reserve."""
    speeds: tuple[float, ...] = setup_field(
        (), Numbers(), part="ranks", also={"rank_speed": lambda given: given},
        words="relative speed of every rank, e.g. 1,1,0.5,1",
    )  # fmt: skip
    """Relative speed per pipeline rank."""
    p2p_ms: float | None = setup_field(
        None, Number(), part="ranks", optional=True, words="time of every transfer in ms (default: its link's)"
    )
    """Every transfer takes this long, instead of the time of its link."""
    host_gb_per_s: float | None = setup_field(
        None, Number(), part="ranks", optional=True, words="GB/s between a GPU and host memory, in each direction",
        unless_given="the GPU's",
    )  # fmt: skip
    """For offloaded activations; None: the rate of the GPU preset or of the profile."""
    gpus_per_node: int | None = setup_field(
        None, Whole(), part="hardware", of_a_model=True, optional=True,
        words="number of GPUs per node, which its fast links connect", unless_given="the preset's",
    )  # fmt: skip
    nodes: tuple[tuple[str, int, int], ...] = setup_field(
        (), NodeGroups(), part="hardware", of_a_model=True, flag="cluster", also={"cluster": lambda given: given},
        words="unequal nodes: a TOML or JSON file of [[nodes]]",
    )  # fmt: skip
    """Unequal nodes, in order: (GPU, nodes, GPUs per node)."""
    stack: Stack | None = setup_field(
        None, StackName(), part="hardware", of_a_model=True, optional=True,
        words="training stack whose rates are used (`octopipe calibrate --list`), or a file that `calibrate` wrote",
        unless_given="nvidia-2025",
    )  # fmt: skip
    """None: the rates of the default stack are used."""
    micro_batch_lengths: tuple[tuple[int, ...], ...] = setup_field(
        (), Lengths(2), part="batch", has_flag=False, words="the lengths of every micro-batch's sequences"
    )
    """For each micro-batch, the lengths of its sequences, which are padded to the longest or `packed`."""
    packed: bool = setup_field(
        False, YesNo(), part="batch", has_flag=False, words="sequences of different length packed, not padded"
    )
    tokens_per_pipeline: int | None = setup_field(
        None, Whole(), part="batch", has_flag=False, optional=True,
        words="with lengths: mean number of tokens per pipeline",
    )  # fmt: skip
    """If other pipelines have fewer tokens than this one: the mean over all of them, for tokens per second."""
    micro_batch_tokens: tuple[int, ...] = setup_field(
        (), Lengths(), part="batch", has_flag=False, words="per micro-batch, the common length of its sequences"
    )
    samples: int | None = setup_field(None, Whole(), part="batch", optional=True, has_flag=False, is_keyword=False)
    """Sequences per pipeline and step, if they differ in length; `seq` is then the length of the micro-batch that
    prices are relative to."""
    batch: str | None = setup_field(None, Words(), part="batch", optional=True, has_flag=False, is_keyword=False)
    """A description of how micro-batches are made of these sequences."""

    def __post_init__(self) -> None:
        for name, how in fields_of(type(self)).items():
            object.__setattr__(self, name, how.read(name, getattr(self, name)))
        if self.lora_on != "all" and self.lora is None:
            raise OctoPipeError(f"lora_on {self.lora_on} has no effect without adapters; give lora, their rank")
        if self.recompute_layers is not None and self.recompute != "full":
            raise OctoPipeError(f"recompute_layers applies to full recomputation only; recompute is {self.recompute}")
        if self.gpu is not None and self.precision != "bf16":
            self.gpu.peak_flops_per_ms(self.precision)
        if self.hsdp > 1 and self.zero == 0:
            raise OctoPipeError(f"hsdp {self.hsdp} needs state that ZeRO shards, and zero is 0; give zero 1 to 3")
        if self.offload_optimizer and self.zero >= 2:
            raise OctoPipeError(
                f"offload_optimizer is priced with ZeRO-0 and ZeRO-1 (Megatron-LM's --optimizer-cpu-offload), "
                f"not with ZeRO-{self.zero}; give zero 1"
            )
        if self.offload_layers is not None and (self.pp > 1 or self.recompute not in ("none", "auto")):
            raise OctoPipeError(
                "offload_layers is for one pipeline rank without recomputation, as Megatron-LM's "
                f"--cpu-offloading-num-layers is; here pp is {self.pp} and recompute {self.recompute}: leave it out"
            )
        if self.cp > 1 and self.seq is not None and self.seq % (2 * self.cp):
            raise OctoPipeError(
                f"cp {self.cp} needs a seq divisible by 2 x cp (two slices per GPU), and it is {self.seq}; change one "
                "of them"
            )
        if self.gpu is not None and self.gpu_memory_gib <= self.reserved_gib and not self.memory_gib:
            raise OctoPipeError(
                f"reserve_gib {self.reserved_gib:g} leaves nothing of the {self.gpu_memory_gib:g} GiB of a "
                f"{self.gpu.name}; reserve less"
            )

    # -- derived values ----------------------------------------------------------------------------------------------

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
        """Bytes of one parameter's optimizer state, including its fp32 weight if there is one."""
        return {"fp32": 12.0, "bf16-moments": 8.0, "bf16": 4.0}[self.states]

    @property
    def peak_flops_per_ms(self) -> float | None:
        """The mean data-sheet peak of the GPUs in use, in the run's precision; None if they are not known."""
        if self.gpu is None:
            return None
        kinds = [(gpu(name), number) for name, number in self.used_gpus] or [(self.gpu, self.num_gpus)]
        total = sum(number * kind.peak_flops_per_ms(self.precision) for kind, number in kinds)
        return total / max(sum(number for _, number in kinds), 1)

    @property
    def used_gpus(self) -> list[tuple[str, int]]:
        """The GPUs of unequal nodes that ranks use, as (GPU, number) in order; empty without a cluster file."""
        return used_gpus(self.nodes, self.num_gpus)

    @property
    def gpu_memory_gib(self) -> float:
        return self.gpu.memory_gib if self.gpu is not None else math.inf

    @property
    def reserved_gib(self) -> float:
        """GiB kept free on every GPU. A given `memory_gib` may be used entirely, unless a reserve is given as well."""
        if self.reserve_gib is not None:
            return self.reserve_gib
        return 0.0 if self.memory_gib or self.gpu is None else default_reserve_gib(self.gpu.memory_gib)

    def rank_memory_bytes(self) -> tuple[float, ...]:
        """Return the bytes that a plan may use on every pipeline rank; empty if no limit is known."""
        limits = self.memory_gib or (() if self.gpu is None else (self.gpu.memory_gib,))
        usable = tuple(gib - self.reserved_gib for gib in limits)
        if any(gib <= 0 for gib in usable):
            raise OctoPipeError(
                f"reserve_gib {self.reserved_gib:g} leaves nothing of {min(limits):g} GiB; reserve less"
            )
        return tuple(gib * GIB for gib in usable)

    def busiest_expert_rank(self, experts: int) -> float:
        """Return the tokens of the busiest rank of an expert group over the mean; a rank holds consecutive experts."""
        if len(self.imbalance) < 2:
            return self.imbalance[0] if self.imbalance and self.ep > 1 else 1.0
        if len(self.imbalance) != experts:
            raise OctoPipeError(
                f"imbalance has the tokens of {len(self.imbalance)} experts, and a layer has {experts}; give one "
                "number per expert"
            )
        return busiest_rank(self.imbalance, self.ep)

    @property
    def host_link(self) -> Link | None:
        """The link to host memory with the given rate; None: that of the GPU or the profile applies."""
        return None if self.host_gb_per_s is None else Link.of_bandwidth(self.host_gb_per_s, INTER_LATENCY_MS)

    def cluster(self) -> Cluster:
        """Return the GPUs and links that this set-up uses."""
        if self.gpu is None:
            raise OctoPipeError("the set-up names no GPU; give one (`octopipe gpus` lists them)")
        return Cluster(
            gpu=self.gpu,
            tp=self.tp,
            cp=self.cp,
            ep=self.ep,
            pp=self.pp,
            dp=self.dp,
            etp=self.etp,
            hsdp=self.hsdp,
            gpus_per_node=self.gpus_per_node or node_gpus(self.nodes, self.gpu.name),
            rank_speed=self.speeds,
            rank_memory_gib=self.memory_gib,
        )

    @property
    def listed_sequences(self) -> int:
        """The number of sequences whose images or recordings are listed; at most 1 if none are."""
        return max(len(self.images), len(self.recordings))

    def with_micro_batches(self, micro_batches: int) -> Setup:
        return replace(self, micro_batches=micro_batches)

    def words(self) -> str:
        """Describe the set-up in one line, which is shown with the numbers that it applies to."""
        return words_of(self)

    def recompute_words(self) -> str:
        """Describe the recomputation: `none`, `selective recomputation`, `12 layers recomputed`."""
        if self.recompute_layers is not None:
            return f"{self.recompute_layers} layers recomputed"
        return "none" if self.recompute == "none" else f"{self.recompute} recomputation"

    def as_dict(self) -> dict[str, Any]:
        """The record as plain JSON values; `setup_from` reads it back."""
        return {
            **{name: how.kind.as_json(getattr(self, name)) for name, how in fields_of(type(self)).items()},
            "gpus": self.num_gpus,
            "global_batch": self.global_batch,
            "tokens_per_micro_batch": self.tokens_per_micro_batch,
            "reserved_gib": self.reserved_gib,
        }


def setup_from(record: Mapping[str, Any], where: str = "setup") -> Setup:
    """Return the set-up in a JSON object that `Setup.as_dict` wrote; keys that are derived from others are ignored."""
    known = {name: record[name] for name in fields_of(Setup) if record.get(name) is not None}
    if record.get("seq", 0) is None:
        known["seq"] = None
    try:
        return Setup(**known)
    except OctoPipeError as error:
        raise OctoPipeError(f"{where}: {error}") from None

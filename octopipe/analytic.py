"""The analytic cost model: (ModelSpec, Cluster, training setup) -> CostTable.

Knows: a roofline with an efficiency per layer kind, tensor- and expert-parallel traffic, and what mixed-
precision training keeps in memory. Does not know: FLOP formulas (`flops.py`) or plans.

Everything is per GPU: FLOPs and weights divided by tp, links per GPU. Absolute times are first principles at
healthy efficiency; measured layer times (`layer_times.py`) replace them where there are any.

>>> from octopipe.cluster import Cluster, gpu
>>> from octopipe.zoo import preset
>>> table = analytic_costs(preset("nemotron-h-56b"), Cluster(gpu=gpu("h800"), tp=8, pp=8))
>>> float(table.boundary_bytes[1]) / (1 << 20), table.tokens_per_micro_batch, table.gpus_per_rank
(8.0, 4096, 8)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from octopipe.cluster import Cluster
from octopipe.cost import CostTable
from octopipe.errors import OctoPipeError
from octopipe.flops import CORE_BACKWARD, Flops, Work, layer_flops, part_work
from octopipe.model import Embedding, Head, LatentAttention, Layer, ModelSpec, Moe, Mtp

__all__ = ["EFFICIENCY", "Efficiency", "Flops", "LayerCost", "analytic_costs", "layer_cost", "layer_flops"]

WEIGHT_BYTES, GRADIENT_BYTES, STATE_BYTES = 2.0, 4.0, 12.0
"""Megatron mixed precision: bf16 weight, fp32 gradient, fp32 master weight and two moments: 18 in all."""
LOSS_BYTES = 20.0
"""Memory traffic of the cross-entropy per logit (our estimate: bf16 and fp32 passes over the logits)."""
SCATTER_BYTES = 12.0
"""Traffic of an embedding's weight gradient per table entry (our estimate: a bf16 table zeroed, scattered
into and added to the fp32 gradient)."""
HBM_EFFICIENCY = 0.8
LINK_EFFICIENCY = 0.8
"""Share of the data-sheet bandwidth that streaming kernels and collectives reach. Our choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Share of the peak FLOP rate that a kind reaches."""

    gemm: float
    core: float = 1.0


EFFICIENCY: Mapping[str, Efficiency] = MappingProxyType(
    {
        # All of these are our choice. An H200 was measured at about 0.8 of peak on large GEMMs and at 0.73 on
        # a 2048-8192-2048 MLP; a compiled Mamba-2 scan at 0.02 of peak, fused kernels taken as twice that.
        "attention": Efficiency(gemm=0.7, core=0.5),
        "latent_attention": Efficiency(gemm=0.65, core=0.5),
        "mlp": Efficiency(gemm=0.75),
        "moe": Efficiency(gemm=0.5),
        "mamba1": Efficiency(gemm=0.7, core=0.01),
        "mamba2": Efficiency(gemm=0.7, core=0.04),
        "gated_delta_net": Efficiency(gemm=0.7, core=0.04),
        "kimi_delta_attention": Efficiency(gemm=0.65, core=0.04),
        "lightning_attention": Efficiency(gemm=0.7, core=0.15),
        "mtp": Efficiency(gemm=0.7),
        "embedding": Efficiency(gemm=0.7),
        "head": Efficiency(gemm=0.75),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One layer and one micro-batch on one GPU of a pipeline rank."""

    forward_ms: float
    input_ms: float
    weight_ms: float
    activation_bytes: float
    stash_bytes: float
    static_bytes: float
    gradient_bytes: float
    boundary_bytes: float
    workspace_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    """What every formula below needs to know of the run."""

    cluster: Cluster
    seq: int
    micro_batch_size: int
    sequence_parallel: bool
    distributed_optimizer: bool

    @property
    def tokens(self) -> int:
        return self.seq * self.micro_batch_size

    @property
    def stream_share(self) -> float:
        """The part of the residual stream a GPU holds."""
        return 1.0 / self.cluster.tp if self.sequence_parallel else 1.0


def _weights(part: Layer, cluster: Cluster) -> tuple[float, float]:
    """Parameters on one GPU: (dense ones, routed experts). Norms, routers and latent down projections are
    replicated over the tensor-parallel group."""
    tp = cluster.tp
    total = float(part.parameters + part.tied_parameters)
    if isinstance(part, Mtp):
        total -= part.block.parameters  # its block's parts are counted on their own
    experts, whole = 0.0, float(part.hidden)
    if isinstance(part, Moe):
        experts = float(part.expert_parameters)
        whole += part.router_parameters
    elif isinstance(part, LatentAttention):
        whole += part.down_parameters
    elif isinstance(part, Embedding):
        whole = 0.0
    dense = whole + (total - experts - whole) / tp
    return dense, experts / (cluster.ep * cluster.expert_tp)


def _part_ms(part: Layer, work: Work, setup: _Setup) -> tuple[float, float, float]:
    """F, I and W time of one part."""
    cluster, gpu, tp = setup.cluster, setup.cluster.gpu, setup.cluster.tp
    efficiency = EFFICIENCY[part.kind]
    bytes_per_ms = gpu.hbm_bytes_per_ms * HBM_EFFICIENCY
    gemm_ms = work.gemm_flops / tp / (gpu.flops_per_ms * efficiency.gemm)
    core_ms = work.core_flops / tp / (gpu.flops_per_ms * efficiency.core)
    weights = sum(_weights(part, cluster))

    # The GEMMs read the weights; every saved tensor is written once and read once more by its neighbour.
    saved = _held_bytes(work.stream_width, work.inner_width, work.state_bytes, setup)
    read_ms = WEIGHT_BYTES * weights / bytes_per_ms
    stream_ms = 2 * saved / bytes_per_ms
    # W adds into the fp32 gradient: one read, one write.
    accumulate_ms = 2 * GRADIENT_BYTES * weights / bytes_per_ms

    # All-gather and reduce-scatter (or an all-reduce, which moves as much) of the stream, in F and in I. W's
    # own all-gather overlaps with the GEMM of I that precedes it and is not charged.
    stream_bytes = 2.0 * setup.tokens * part.hidden
    tp_ms = ep_ms = 0.0
    if tp > 1:
        link = cluster.group_link(tp)
        moved = 2 * (tp - 1) / tp * stream_bytes
        tp_ms = work.collectives * (2 * link.latency_ms + moved * link.ms_per_byte / LINK_EFFICIENCY)
    if cluster.ep > 1 and work.routed_width:
        link = cluster.group_link(cluster.ep * cluster.expert_tp)
        share = (cluster.ep - 1) / cluster.ep * setup.stream_share
        moved = 2 * 2.0 * setup.tokens * work.routed_width * share  # dispatch and combine
        ep_ms = 2 * link.latency_ms + moved * link.ms_per_byte / LINK_EFFICIENCY

    match part:
        case Embedding():
            lookup_ms = 2 * stream_bytes * setup.stream_share / bytes_per_ms
            return lookup_ms + tp_ms, 0.0, SCATTER_BYTES * weights / bytes_per_ms
        case Head():
            loss_ms = LOSS_BYTES * part.predictions * setup.tokens * part.vocab / tp / bytes_per_ms
            gemm_ms = max(gemm_ms, read_ms)
            return gemm_ms + loss_ms + tp_ms, gemm_ms + tp_ms, max(gemm_ms, accumulate_ms)
    forward = max(gemm_ms, read_ms) + core_ms + stream_ms + tp_ms + ep_ms
    backward = max(gemm_ms, read_ms) + CORE_BACKWARD * core_ms + 1.5 * stream_ms + tp_ms + ep_ms
    return forward, backward, max(gemm_ms, accumulate_ms)


def _held_bytes(stream_width: float, inner_width: float, state_bytes: float, setup: _Setup) -> float:
    """Saved bytes on one GPU: bf16 values, the residual stream whole without sequence parallelism."""
    per_token = stream_width * setup.stream_share + inner_width / setup.cluster.tp
    return 2.0 * setup.tokens * per_token + state_bytes / setup.cluster.tp


def _workspace_bytes(part: Layer, work: Work, setup: _Setup) -> float:
    """Bytes that live only while an op runs (our estimate): the gathered stream under sequence parallelism,
    the routed tokens' copies, the fp32 gradient of the logits."""
    cluster = setup.cluster
    gathered = 2.0 * setup.tokens * part.hidden if setup.sequence_parallel and cluster.tp > 1 else 0.0
    routed = 2 * 2.0 * setup.tokens * work.routed_width / cluster.tp
    logits = 4.0 * setup.tokens * part.vocab / cluster.tp if isinstance(part, Head) else 0.0
    return gathered + routed + logits


def layer_cost(
    layer: Layer,
    cluster: Cluster,
    *,
    seq: int = 4096,
    micro_batch_size: int = 1,
    sequence_parallel: bool = True,
    distributed_optimizer: bool = False,
) -> LayerCost:
    """What one layer costs on one GPU of a pipeline rank."""
    setup = _Setup(
        cluster=cluster,
        seq=seq,
        micro_batch_size=micro_batch_size,
        sequence_parallel=sequence_parallel,
        distributed_optimizer=distributed_optimizer,
    )
    forward = backward = weight = activation = stash = static = gradient = workspace = 0.0
    for part in layer.parts:
        work = part_work(part, seq=seq, micro_batch_size=micro_batch_size)
        part_f, part_i, part_w = _part_ms(part, work, setup)
        forward, backward, weight = forward + part_f, backward + part_i, weight + part_w
        activation += _held_bytes(work.stream_width, work.inner_width, work.state_bytes, setup)
        stash += _held_bytes(work.stash_stream_width, work.stash_inner_width, 0.0, setup)
        dense, experts = _weights(part, cluster)
        for count, replicas in ((dense, cluster.dp), (experts, cluster.expert_dp)):
            shards = replicas if distributed_optimizer else 1
            static += count * (WEIGHT_BYTES + GRADIENT_BYTES + STATE_BYTES / shards)
            gradient += count * GRADIENT_BYTES
        workspace = max(workspace, _workspace_bytes(part, work, setup))
    # The head hands nothing on; a prediction module hands on two hidden states.
    tensors = 0 if isinstance(layer, Head) else 2 if isinstance(layer, Mtp) else 1
    return LayerCost(
        forward_ms=forward,
        input_ms=backward,
        weight_ms=weight,
        activation_bytes=activation,
        stash_bytes=min(stash, activation),
        static_bytes=static,
        gradient_bytes=gradient,
        boundary_bytes=tensors * 2.0 * setup.tokens * layer.hidden * setup.stream_share,
        workspace_bytes=workspace,
    )


def _check_divides(spec: ModelSpec, tp: int) -> None:
    for i, layer in enumerate(spec.layers):
        for part in layer.parts:
            for name in ("heads", "value_heads", "inner", "ffn", "shared_ffn"):
                size = getattr(part, name, None)
                if isinstance(size, int) and size % tp:
                    raise OctoPipeError(
                        f"{spec.name}: tp {tp} does not divide the {size} {name} of layer {i} "
                        f"({layer.symbol}); give a divisor of {size}"
                    )


def _check_positive(**values: object) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OctoPipeError(f"{name} is {value!r}; give a whole number >= 1")


def analytic_costs(
    spec: ModelSpec,
    cluster: Cluster,
    *,
    seq: int = 4096,
    micro_batch_size: int = 1,
    sequence_parallel: bool = True,
    distributed_optimizer: bool = False,
    micro_batch_tokens: Sequence[int] | None = None,
) -> CostTable:
    """Price every layer of a model on a cluster.

    `micro_batch_tokens` gives each micro-batch its own sequence length; the table then carries a factor per
    micro-batch and layer, relative to `seq` (attention grows faster than the rest).
    """
    _check_positive(seq=seq, micro_batch_size=micro_batch_size)
    _check_divides(spec, cluster.tp)

    def price(length: int) -> list[LayerCost]:
        known: dict[Layer, LayerCost] = {}
        for layer in spec.layers:
            if layer not in known:
                known[layer] = layer_cost(
                    layer,
                    cluster,
                    seq=length,
                    micro_batch_size=micro_batch_size,
                    sequence_parallel=sequence_parallel,
                    distributed_optimizer=distributed_optimizer,
                )
        return [known[layer] for layer in spec.layers]

    costs = price(seq)
    columns = {
        name: np.array([getattr(cost, name) for cost in costs]) for name in LayerCost.__dataclass_fields__
    }
    tokens, factor = seq * micro_batch_size, None
    if micro_batch_tokens is not None:
        lengths = list(micro_batch_tokens)
        if not lengths:
            raise OctoPipeError("micro_batch_tokens is empty; give one sequence length per micro-batch")
        for i, length in enumerate(lengths):
            _check_positive(**{f"micro_batch_tokens[{i}]": length})
        base = _total_ms(costs)
        of_length = {length: _total_ms(price(length)) / base for length in set(lengths)}
        factor = np.array([of_length[length] for length in lengths])
        tokens = max(1, round(sum(lengths) / len(lengths))) * micro_batch_size
    return CostTable(
        model=spec.name,
        symbols=spec.pattern,
        network=cluster.network(),
        rank_slowdown=cluster.rank_slowdown(),
        rank_memory_bytes=cluster.rank_memory_bytes(),
        micro_batch_factor=factor,
        tokens_per_micro_batch=tokens,
        gpus_per_rank=cluster.tp,
        **columns,  # type: ignore[arg-type]
    )


def _total_ms(costs: list[LayerCost]) -> np.ndarray:
    return np.array([cost.forward_ms + cost.input_ms + cost.weight_ms for cost in costs])

"""The analytic cost model: (ModelSpec, Setup) -> CostTable.

Knows: how long a layer's products, cores, memory passes and collectives take on one GPU of a set-up, and what
happens once per step (gradient reduction, optimizer). Does not know: FLOP formulas (`flops.py`), bytes held
(`footprint.py`), what collectives cost (`traffic.py`), the calibrated rates (`calibration.py`) or plans.

Everything is per GPU. Measured layer times (`layer_times.py`) replace all of it where there are any.

>>> from octopipe.cluster import Cluster, gpu
>>> from octopipe.zoo import preset
>>> table = analytic_costs(preset("nemotron-h-56b"), Cluster(gpu=gpu("h800"), tp=8, pp=8))
>>> float(table.boundary_bytes[1]) / (1 << 20), table.tokens_per_micro_batch, table.gpus_per_rank
(8.0, 4096, 8)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from octopipe.calibration import Rates, rates_of
from octopipe.cluster import Cluster, Link
from octopipe.cost import CostTable
from octopipe.errors import OctoPipeError
from octopipe.flops import CORE_BACKWARD, Flops, Product, Work, layer_flops, model_flops, part_work
from octopipe.footprint import (
    STATE_BYTES,
    WEIGHT_BYTES,
    Weights,
    gathered_bytes,
    held_bytes,
    shards_of,
    stashed_bytes,
    static_bytes,
    stream_share,
    weights_of,
    workspace_bytes,
)
from octopipe.model import Embedding, Head, Layer, ModelSpec, Moe, Mtp
from octopipe.setup import Setup
from octopipe.traffic import exchange_ms, pass_round_ms, ring_ms

__all__ = [
    "SCAN_SHARE",
    "STATE_BYTES",
    "Flops",
    "LayerCost",
    "analytic_costs",
    "layer_cost",
    "layer_flops",
    "setup_costs",
]

LOSS_BYTES = 20.0
"""Memory traffic of the cross-entropy per logit (our estimate: bf16 and fp32 passes over the logits)."""
SCATTER_BYTES = 12.0
"""Traffic of an embedding's weight gradient per table entry (our estimate: a bf16 table zeroed, scattered
into and added to the fp32 gradient)."""
OPTIMIZER_BYTES = 26.0
"""Traffic of one parameter's Adam update beside its gradient: master weight and moments read and written, the bf16
weight written."""
KERNELS, MOE_KERNELS = 6, 24
"""Kernels of a part beside two per product (norm, residual, activation, casts), and those that routing adds."""

SCAN_SHARE: Mapping[str, float] = MappingProxyType(
    {
        # Share of the bf16 peak that cores other than softmax attention reach. Our choice: a compiled Mamba-2 scan
        # was measured on an H200 at 0.02 of peak; fused kernels are taken as twice that.
        "mamba1": 0.01,
        "mamba2": 0.04,
        "gated_delta_net": 0.04,
        "kimi_delta_attention": 0.04,
        "lightning_attention": 0.15,
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
    optimizer_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pricing:
    """What every formula below needs to know of the run."""

    setup: Setup
    cluster: Cluster
    rates: Rates
    plain: Rates
    """Rates of what stays in bf16."""

    @classmethod
    def of(cls, setup: Setup, rates: Mapping[str, Rates] | None = None) -> _Pricing:
        cluster = setup.cluster()
        found = rates or {name: rates_of(cluster.gpu, name) for name in {setup.precision, "bf16"}}
        return cls(setup=setup, cluster=cluster, rates=found[setup.precision], plain=found["bf16"])

    @property
    def bytes_per_ms(self) -> float:
        return self.cluster.gpu.hbm_bytes_per_ms * self.rates.hbm

    def flops_per_ms(self, precision: str) -> float:
        return self.cluster.gpu.peak_flops_per_ms(precision) * self.cluster.gpu.clock


class _Products:
    """Time of a part's matrix products: the same in F, I and W but for the weights' traffic."""

    def __init__(self, work: Work, pricing: _Pricing):
        self.forward_ms = self.weight_ms = 0.0
        self.cast_in = self.cast_out = 0.0
        setup = pricing.setup
        for product in work.products:
            rows, inner, outer, weights = _share(product, work.tokens, pricing)
            low = setup.precision == "fp8" and product.low_precision
            rates = pricing.rates if low else pricing.plain
            share = rates.product_share(rows / max(weights, 1.0), inner, outer)
            took = 2.0 * rows * inner * outer / (pricing.flops_per_ms("fp8" if low else "bf16") * share)
            elements = weights * inner * outer
            self.forward_ms += max(took, WEIGHT_BYTES * elements / pricing.bytes_per_ms)
            # W adds into the gradient: one read, one write.
            self.weight_ms += max(took, 2 * setup.gradient_bytes * elements / pricing.bytes_per_ms)
            if low:
                self.cast_in += rows * inner
                self.cast_out += rows * outer


def _share(product: Product, tokens: float, pricing: _Pricing) -> tuple[float, float, float, float]:
    """Rows, sides and number of weights of one GPU's part of a product."""
    cluster = pricing.cluster
    rows, weights, tp = tokens / cluster.cp * product.rows, 1.0, cluster.tp
    if product.experts:
        # Balanced routing: a GPU computes as many rows as it sends, over its own experts.
        weights, tp = product.experts / cluster.ep, cluster.expert_tp
        rows *= tp / cluster.tp
    inner = product.inner / tp if product.cut == "inner" else float(product.inner)
    outer = product.outer / tp if product.cut == "outer" else float(product.outer)
    return rows, inner, outer, weights


def _part_ms(part: Layer, work: Work, pricing: _Pricing) -> tuple[float, float, float]:
    """F, I and W time of one part."""
    setup, cluster, rates = pricing.setup, pricing.cluster, pricing.rates
    tp, cp, tokens = setup.tp, setup.cp, work.tokens / setup.cp
    products = _Products(work, pricing)
    cast_ms = [rates.cast_bytes * n / pricing.bytes_per_ms for n in (products.cast_in, products.cast_out)]
    launch_ms = rates.launch_ms * (KERNELS + 2 * len(work.products) + MOE_KERNELS * isinstance(part, Moe))

    # Collectives of the stream, in F and in I: an all-gather and a reduce-scatter (or an all-reduce, which moves as
    # much). W's own all-gather overlaps with the product of I that precedes it and is not charged.
    stream_bytes = 2.0 * tokens * part.hidden
    tp_ms = 2 * work.collectives * ring_ms(cluster, stream_bytes, tp, share=rates.link)
    match part:
        case Embedding():
            lookup_ms = 2 * stream_bytes * stream_share(setup) / pricing.bytes_per_ms
            table = sum(weights_of(part, cluster))
            return lookup_ms + tp_ms + launch_ms, 0.0, SCATTER_BYTES * table / pricing.bytes_per_ms + launch_ms
        case Head():
            loss_ms = LOSS_BYTES * part.predictions * tokens * part.vocab / tp / pricing.bytes_per_ms
            forward = products.forward_ms + tp_ms + launch_ms
            return forward + loss_ms, forward, products.weight_ms + launch_ms

    core = SCAN_SHARE.get(part.kind, pricing.plain.core)
    core_ms = work.core_flops / (tp * cp) / (pricing.flops_per_ms("bf16") * core)
    # Every saved tensor is written and read by its neighbours; I reads it again and writes its gradient.
    width = work.stream_width * stream_share(setup) + work.inner_width / tp
    stream_ms = rates.passes * (2.0 * tokens * width + work.state_bytes / (tp * cp)) / pricing.bytes_per_ms
    routed_ms = 0.0
    if work.routed_width:
        routed = 2.0 * tokens * work.routed_width * stream_share(setup)
        routed_ms = rates.moe_passes * routed / pricing.bytes_per_ms
        size = cluster.ep * cluster.expert_tp
        if cluster.ep > 1:
            copies = max(1, round(work.routed_width / getattr(part, "expert_width", part.hidden)))
            routed_ms += 2 * exchange_ms(cluster, routed, size, copies=copies, share=rates.link)
    ring = pass_round_ms(cluster, 2.0 * tokens * work.ring_width / tp, cp, tp, share=rates.link)
    forward = products.forward_ms + max(core_ms, ring) + stream_ms + cast_ms[0] + tp_ms + routed_ms + launch_ms
    backward = products.forward_ms + max(CORE_BACKWARD * core_ms, 2 * ring) + 1.5 * stream_ms + cast_ms[1]
    backward += tp_ms + routed_ms + launch_ms
    if setup.recompute == "selective":
        again = 2.0 * tokens * (work.cheap_stream_width * stream_share(setup) + work.cheap_inner_width / tp)
        backward += 2 * again / pricing.bytes_per_ms
        backward += work.cheap_flops / (tp * cp) / (pricing.flops_per_ms("bf16") * pricing.plain.gemm)
    return forward, backward, products.weight_ms + rates.launch_ms * len(work.products)


def _gather_ms(weights: Weights, pricing: _Pricing) -> tuple[float, float]:
    """ZeRO-3, per micro-batch: gathering a layer's weights, and dividing its gradient."""
    setup, cluster = pricing.setup, pricing.cluster
    if setup.zero < 3:
        return 0.0, 0.0
    gather = reduce = 0.0
    strides = (cluster.tp, cluster.ep * cluster.expert_tp)
    for count, copies, stride in zip(weights, shards_of(setup, cluster), strides, strict=True):
        gather += ring_ms(cluster, WEIGHT_BYTES * count, int(copies), stride, share=pricing.rates.link)
        reduce += ring_ms(cluster, setup.gradient_bytes * count, int(copies), stride, share=pricing.rates.link)
    return gather, reduce


def _priced(layer: Layer, pricing: _Pricing) -> tuple[LayerCost, Weights]:
    setup, cluster = pricing.setup, pricing.cluster
    assert setup.seq is not None
    forward = backward = weight = activation = stash = workspace = 0.0
    held = Weights(0.0, 0.0)
    for part in layer.parts:
        work = part_work(part, seq=setup.seq, micro_batch_size=setup.micro_batch_size)
        part_f, part_i, part_w = _part_ms(part, work, pricing)
        forward, backward, weight = forward + part_f, backward + part_i, weight + part_w
        activation += held_bytes(work, setup)
        stash += stashed_bytes(work, setup)
        mine = weights_of(part, cluster)
        held = Weights(held.dense + mine.dense, held.experts + mine.experts)
        workspace = max(workspace, workspace_bytes(part, work, setup))
    # FSDP fetches the next layer's weights while this one computes; only what takes longer than that shows.
    gather, reduce = _gather_ms(held, pricing)
    forward = max(forward, gather)
    weight = max(weight, gather + reduce - backward)
    shards = shards_of(setup, cluster) if setup.zero >= 1 else Weights(1.0, 1.0)
    updated = sum(count / n for count, n in zip(held, shards, strict=True))
    # The head hands nothing on; a prediction module hands on two hidden states.
    tensors = 0 if isinstance(layer, Head) else 2 if isinstance(layer, Mtp) else 1
    tokens = setup.seq * setup.micro_batch_size / setup.cp
    cost = LayerCost(
        forward_ms=forward,
        input_ms=backward,
        weight_ms=weight,
        activation_bytes=activation,
        stash_bytes=min(stash, activation),
        static_bytes=static_bytes(held, setup, cluster),
        gradient_bytes=setup.gradient_bytes * sum(held),
        boundary_bytes=tensors * 2.0 * tokens * layer.hidden * stream_share(setup),
        workspace_bytes=workspace + gathered_bytes(held, setup, cluster),
        optimizer_ms=updated * (OPTIMIZER_BYTES + setup.gradient_bytes) / pricing.bytes_per_ms,
    )
    return cost, held


def layer_cost(
    layer: Layer, cluster: Cluster, *, rates: Mapping[str, Rates] | None = None, **options: Any
) -> LayerCost:
    """What one layer costs on one GPU of a pipeline rank; options as in `analytic_costs`."""
    return _priced(layer, _Pricing.of(_setup_of(cluster, **options), rates))[0]


def check_divides(spec: ModelSpec, tp: int, ep: int = 1) -> None:
    """Raise unless the set-up can divide every layer."""
    for i, layer in enumerate(spec.layers):
        for part in layer.parts:
            for name in ("heads", "value_heads", "inner", "ffn", "shared_ffn"):
                size = getattr(part, name, None)
                if isinstance(size, int) and size % tp:
                    raise OctoPipeError(
                        f"{spec.name}: tp {tp} does not divide the {size} {name} of layer {i} "
                        f"({layer.symbol}); give a divisor of {size}"
                    )
            if isinstance(part, Moe) and part.experts % ep:
                raise OctoPipeError(
                    f"{spec.name}: ep {ep} does not divide the {part.experts} experts of layer {i} ({layer.symbol}); "
                    f"give a divisor of {part.experts}"
                )


def _setup_of(
    cluster: Cluster,
    *,
    seq: int = 4096,
    micro_batch_size: int = 1,
    sequence_parallel: bool = True,
    distributed_optimizer: bool = False,
) -> Setup:
    return Setup(
        gpu=cluster.gpu,
        tp=cluster.tp,
        cp=cluster.cp,
        ep=cluster.ep,
        pp=cluster.pp,
        dp=cluster.dp,
        seq=seq,
        micro_batch_size=micro_batch_size,
        sequence_parallel=sequence_parallel,
        zero=int(distributed_optimizer),
        gpus_per_node=cluster.gpus_per_node,
        speeds=cluster.rank_speed,
        memory_gib=cluster.rank_memory_gib,
    )


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
    """Price every layer of a model on a cluster: `setup_costs` for those who have one already."""
    setup = _setup_of(
        cluster,
        seq=seq,
        micro_batch_size=micro_batch_size,
        sequence_parallel=sequence_parallel,
        distributed_optimizer=distributed_optimizer,
    )
    return setup_costs(spec, setup, micro_batch_tokens=micro_batch_tokens)


def setup_costs(
    spec: ModelSpec,
    setup: Setup,
    *,
    micro_batch_tokens: Sequence[int] | None = None,
    rates: Mapping[str, Rates] | None = None,
) -> CostTable:
    """Price every layer of a model under a set-up.

    `micro_batch_tokens` gives each micro-batch its own sequence length; the table then carries a factor per
    micro-batch and layer, relative to `seq` (attention grows faster than the rest). `rates` replaces the calibrated
    ones, by precision.
    """
    if setup.seq is None:
        raise OctoPipeError(f"{spec.name}: how long are the sequences? give seq")
    check_divides(spec, setup.tp, setup.ep)
    if setup.ep > 1 and not any(isinstance(part, Moe) for layer in spec for part in layer.parts):
        raise OctoPipeError(f"{spec.name} has no experts; ep {setup.ep} would change nothing, leave it out")
    pricing = _Pricing.of(setup, rates)
    costs, weights = _price_all(spec, pricing)
    columns = {name: np.array([getattr(c, name) for c in costs]) for name in LayerCost.__dataclass_fields__}
    exposed_ms = _exposed_reduction_ms(columns, weights, pricing)
    reduction, total = Link(), float(columns["gradient_bytes"].sum())
    if setup.dp > 1 and total > 0:
        # The simulator multiplies by 2 (n-1)/n, as for an all-reduce among `dp` pipelines.
        reduction = Link(ms_per_byte=exposed_ms / total / (2 * (setup.dp - 1) / setup.dp))
    elif total > 0:
        # One pipeline: context-parallel GPUs reduce among themselves, before the update.
        columns["optimizer_ms"] = columns["optimizer_ms"] + exposed_ms * columns["gradient_bytes"] / total
    if setup.vocab_parallel:
        columns = _over_all_ranks(columns, pricing)
    tokens, factor = setup.seq * setup.micro_batch_size, None
    if micro_batch_tokens is not None:
        lengths = list(micro_batch_tokens)
        if not lengths:
            raise OctoPipeError("micro_batch_tokens is empty; give one sequence length per micro-batch")
        for i, length in enumerate(lengths):
            if isinstance(length, bool) or not isinstance(length, int) or length < 1:
                raise OctoPipeError(f"micro_batch_tokens[{i}] is {length!r}; give a whole number >= 1")
        base = _total_ms(costs)
        of_length = {
            length: _total_ms(_price_all(spec, replace(pricing, setup=replace(setup, seq=length)))[0]) / base
            for length in set(lengths)
        }
        factor = np.array([of_length[length] for length in lengths])
        tokens = max(1, round(sum(lengths) / len(lengths))) * setup.micro_batch_size
    return CostTable(
        model=spec.name,
        symbols=spec.pattern,
        network=pricing.cluster.network(),
        rank_slowdown=pricing.cluster.rank_slowdown(),
        rank_memory_bytes=setup.rank_memory_bytes(),
        micro_batch_factor=factor,
        tokens_per_micro_batch=tokens,
        gpus_per_rank=setup.gpus_per_rank,
        data_parallel=setup.dp,
        reduction=reduction,
        model_flops=model_flops(spec.layers, seq=setup.seq, micro_batch_size=setup.micro_batch_size),
        setup=setup,
        **columns,  # type: ignore[arg-type]
    )


def _price_all(spec: ModelSpec, pricing: _Pricing) -> tuple[list[LayerCost], list[Weights]]:
    known: dict[Layer, tuple[LayerCost, Weights]] = {}
    for layer in spec.layers:
        if layer not in known:
            known[layer] = _priced(layer, pricing)
    return [known[layer][0] for layer in spec.layers], [known[layer][1] for layer in spec.layers]


def _exposed_reduction_ms(columns: Mapping[str, np.ndarray], weights: Sequence[Weights], pricing: _Pricing) -> float:
    """What shows of the gradient reduction at the end of a step, over all layers.

    Gradients are reduced (ZeRO-1, 2: reduce-scattered, and updated weights gathered) while the last backward and the
    next step's first forward compute, layer by layer; what does not fit behind them, and the last layer's share,
    shows. With ZeRO-3 all of it happened during the micro-batches.
    """
    setup, cluster = pricing.setup, pricing.cluster
    if setup.dp * setup.cp == 1 or setup.zero == 3:
        return 0.0
    exposed, layers_per_rank = 0.0, max(1.0, len(weights) / setup.pp)
    strides = (cluster.tp, cluster.ep * cluster.expert_tp)
    behind = columns["forward_ms"] + columns["input_ms"] + columns["weight_ms"]
    second = setup.gradient_bytes if setup.zero == 0 else WEIGHT_BYTES
    for i, held in enumerate(weights):
        took = 0.0
        for count, n, stride in zip(held, shards_of(setup, cluster), strides, strict=True):
            for size in (setup.gradient_bytes, second):
                took += ring_ms(cluster, size * count, int(n), stride, share=pricing.rates.link)
        exposed += max(took - float(behind[i]), took / layers_per_rank)
    return exposed


def _over_all_ranks(columns: dict[str, np.ndarray], pricing: _Pricing) -> dict[str, np.ndarray]:
    """Embedding and head divided over the pipeline ranks: each keeps 1/pp, the rest is spread over the layers between,
    as an even partition spreads it over ranks; the last hidden states go to every rank and back."""
    pp, out = pricing.setup.pp, {name: values.copy() for name, values in columns.items()}
    inner = len(columns["forward_ms"]) - 2
    if pp == 1 or inner < 1:
        return out
    spread = ("forward_ms", "input_ms", "weight_ms", "static_bytes", "gradient_bytes", "optimizer_ms")
    for name in (*spread, "activation_bytes", "stash_bytes", "workspace_bytes"):
        ends = out[name][0] + out[name][-1]
        out[name][[0, -1]] /= pp
        if name in spread:
            out[name][1:-1] += ends * (pp - 1) / pp / inner
    link = pricing.cluster.inter_link
    sent = math.ceil(math.log2(pp)) * link.latency_ms + columns["boundary_bytes"][0] * link.ms_per_byte
    out["forward_ms"][-1] += sent
    out["input_ms"][-1] += sent
    return out


def _total_ms(costs: list[LayerCost]) -> np.ndarray:
    return np.array([cost.forward_ms + cost.input_ms + cost.weight_ms for cost in costs])

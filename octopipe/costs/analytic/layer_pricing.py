"""The cost of one layer on one GPU of a set-up: F, I and W time, memory held, its optimizer update.

Knows: how long a layer's products, cores (attention, scans), memory passes and collectives take. Does not know: whole
models (`table.py`), FLOP formulas (`flops.py`), memory (`footprint.py`), the cost of collectives (`traffic.py`) or
the calibrated rates (`calibration.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from octopipe.costs.analytic.calibration import RACK
from octopipe.costs.analytic.flops import CORE_BACKWARD, items_of, part_work
from octopipe.costs.analytic.footprint import (
    NO_WEIGHTS,
    WEIGHT_BYTES,
    Weights,
    frozen_bytes,
    gathered_bytes,
    held_bytes,
    shards_of,
    stashed_bytes,
    static_bytes,
    stream_share,
    weights_of,
    workspace_bytes,
)
from octopipe.costs.analytic.frozen import State, adapted, adapter_parameters, adapters
from octopipe.costs.analytic.pricing import Pricing
from octopipe.costs.analytic.products import Products
from octopipe.costs.analytic.traffic import context_traffic, exchange_ms, ring_ms
from octopipe.costs.analytic.work import Work
from octopipe.costs.cluster.hardware import Cluster
from octopipe.costs.segments import Part
from octopipe.models.spec import Embedding, Head, Layer, Moe, Mtp
from octopipe.models.towers import passed_on

LOSS_BYTES = 20.0
"""Memory traffic of the cross-entropy per logit (our estimate: bf16 and fp32 passes over the logits)."""
SCATTER_BYTES = 12.0
"""Traffic of an embedding's weight gradient per table entry (our estimate: a bf16 table zeroed, scattered
into and added to the fp32 gradient)."""
OPTIMIZER_BYTES = 26.0
"""Traffic of one parameter's Adam update in addition to reading its gradient: master weight and moments read and
written, the bf16 weight written."""
HOST_UPDATE_BYTES = 30.0
"""Traffic in the host's memory of one parameter's Adam update there: gradient, master weight and moments read, the
latter three and the bf16 weight written. Per GPU, the host's memory is assumed to be as fast as the GPU's link to it
(our choice): two sockets with eight channels of DDR5 have about 75 GB/s for each of eight GPUs, the link has 50."""
BIAS_PASSES = 6.0
"""Memory passes over the experts' outputs for biases, in F and again in I (our estimate)."""
HIDDEN_COST = 0.2
"""Share of an overlapped collective that is exposed, unless a stack defines it; chosen, not fitted."""
KERNELS = 6
"""Kernels of a part in addition to two per product: norm, residual, activation, casts."""

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
    forward_parts: tuple[Part, ...] = ()
    """F as segments on the compute and the exchange lane, in ms; empty: all compute."""
    input_parts: tuple[Part, ...] = ()
    """I in the same form."""


class _PartTimes(NamedTuple):
    """Times of one part of a layer; with experts, also of both exchanges and of what runs between them."""

    forward_ms: float
    input_ms: float
    weight_ms: float
    dispatch_ms: float = 0.0
    """Time to send tokens to the experts in F, and gradients in I."""
    combine_ms: float = 0.0
    """Time to send the results back."""
    between_ms: float = 0.0
    """Time between dispatch and combine in F: the experts, and sorting tokens for them."""
    between_again_ms: float = 0.0
    """The same in I."""

    def parts(self, kind: str) -> list[Part]:
        """Return F or I as segments: routing, dispatch, experts, combine for F, and the reverse order for I."""
        whole = self.forward_ms if kind == "F" else self.input_ms
        if self.combine_ms <= 0:
            return [("compute", whole)]
        between = self.between_ms if kind == "F" else self.between_again_ms
        rest = max(whole - self.dispatch_ms - self.combine_ms - between, 0.0)
        middle: list[Part] = [
            ("exchange", self.dispatch_ms),
            ("compute", between),
            ("exchange", self.combine_ms),
        ]
        return [("compute", rest), *middle] if kind == "F" else [*middle, ("compute", rest)]


def _part_ms(part: Layer, work: Work, pricing: Pricing, state: State) -> _PartTimes:
    """Return the F, I and W times of one part. W is priced as if its weights were trained; with adapters, it is the W
    of the adapters."""
    setup, cluster, rates = pricing.setup, pricing.cluster, pricing.rates
    tp, cp, tokens = setup.tp, setup.cp, work.tokens / setup.cp
    products = Products(work, pricing)
    if adapted(part, setup, state):
        assert setup.lora is not None
        extra = Products(adapters(work, setup.lora), pricing)
        products.forward_ms += extra.forward_ms
        products.experts_ms += extra.experts_ms
        products.weight_ms = extra.weight_ms
    cast_ms = [rates.cast_bytes * n / pricing.bytes_per_ms for n in (products.cast_in, products.cast_out)]
    launch_ms = rates.launch_ms * (KERNELS + 2 * len(work.products))
    if isinstance(part, Moe):
        launch_ms += rates.rack_moe_ms if cluster.gpu.gpus_per_node > RACK else rates.moe_ms

    # Collectives of the stream, in F and in I: an all-gather and a reduce-scatter (or an all-reduce, which moves as
    # much). W's own all-gather overlaps with the product of I that precedes it and is not charged.
    stream_bytes = 2.0 * tokens * part.hidden
    pairs = work.collectives
    if isinstance(part, Moe) and cluster.ep > 1 and not part.shared_ffn:
        pairs = 0  # every GPU sends its own tokens to their experts, so the stream is not gathered
    tp_ms = pricing.unless_free("tp", 2 * pairs * ring_ms(cluster, stream_bytes, tp, share=rates.link))
    match part:
        case Embedding():
            lookup_ms = 2 * stream_bytes * stream_share(setup) / pricing.bytes_per_ms
            table = sum(weights_of(part, cluster))
            scatter_ms = SCATTER_BYTES * table / pricing.bytes_per_ms
            return _PartTimes(lookup_ms + tp_ms + launch_ms, 0.0, scatter_ms + launch_ms)
        case Head():
            loss_ms = LOSS_BYTES * part.predictions * tokens * part.vocab / tp / pricing.bytes_per_ms
            forward = products.forward_ms + tp_ms + launch_ms
            return _PartTimes(forward + loss_ms, forward, products.weight_ms + launch_ms)

    scan = SCAN_SHARE.get(part.kind)
    core = pricing.plain.core * _narrow(part) if scan is None else scan * pricing.plain.scan
    core_ms = pricing.unless_free("cores", work.core_flops / (tp * cp) / (pricing.flops_per_ms("bf16") * core))
    # Every saved tensor is written and read by its neighbours; I reads it again and writes its gradient
    # (`backward_passes`).
    width = work.stream_width * stream_share(setup) + work.inner_width / tp
    stream_ms = rates.passes * (2.0 * tokens * width + work.state_bytes / (tp * cp)) / pricing.bytes_per_ms
    routing = _routing(part, work, products, pricing) if isinstance(part, Moe) else _Routing()
    context = context_traffic(
        cluster,
        setup.cp_kind,
        kv_bytes=2.0 * tokens * work.ring_width / tp,
        heads_bytes=2.0 * tokens * work.heads_width / tp,
        size=cp,
        stride=tp,
        share=rates.link,
    )
    ring, dealt = (pricing.unless_free("cp", ms) for ms in (context.behind_ms, context.shown_ms))
    forward = (
        products.forward_ms
        + max(core_ms, ring)
        + stream_ms
        + cast_ms[0]
        + tp_ms
        + routing.forward_ms
        + launch_ms
        + dealt
    )
    backward = (
        products.forward_ms + max(CORE_BACKWARD * core_ms, 2 * ring) + rates.backward_passes * stream_ms + cast_ms[1]
    )
    backward += context.backward * dealt
    backward += tp_ms + routing.input_ms + launch_ms
    if setup.recompute == "selective":
        again = 2.0 * tokens * (work.cheap_stream_width * stream_share(setup) + work.cheap_inner_width / tp)
        backward += 2 * again / pricing.bytes_per_ms
        backward += work.cheap_flops / (tp * cp) / (pricing.flops_per_ms("bf16") * pricing.plain.gemm)
    weight = products.weight_ms + rates.launch_ms * len(work.products)
    return _PartTimes(forward, backward, weight, *routing[2:])


class _Routing(NamedTuple):
    """What the experts of a layer take besides their products: sorting, biases and exchanges."""

    forward_ms: float = 0.0
    input_ms: float = 0.0
    dispatch_ms: float = 0.0
    combine_ms: float = 0.0
    between_ms: float = 0.0
    between_again_ms: float = 0.0


def _routing(part: Moe, work: Work, products: Products, pricing: Pricing) -> _Routing:
    """Return the times of routing; the last four fields as in `_PartTimes`."""
    cluster, rates, tokens = pricing.cluster, pricing.rates, work.tokens / pricing.setup.cp
    routed = 2.0 * tokens * work.routed_width * stream_share(pricing.setup)
    biases_ms = 0.0
    if part.bias:
        # No grouped kernel adds biases: outputs are read and written again, and reduced for their gradients.
        outputs = 2.0 * tokens * part.top_k * ((part.matrices - 1) * part.ffn + part.expert_width) / pricing.setup.tp
        biases_ms = BIAS_PASSES * outputs / pricing.bytes_per_ms
    # Tokens are sorted by rank before they leave, by expert when they arrive (those of all GPUs that share an expert,
    # where several do), and both again on the way back.
    arriving = _arriving(cluster)
    passes_ms = rates.moe_passes * routed / 2 / pricing.bytes_per_ms
    inside_ms, whole_ms = biases_ms + arriving * passes_ms, biases_ms + (1 + arriving) * passes_ms
    dispatch_ms = combine_ms = 0.0
    if cluster.ep > 1 and "ep" not in pricing.free:
        dispatch_ms, combine_ms = (
            rates.exchange * _exchange_ms(routed * width / 2.0, part.top_k, pricing)
            for width in (pricing.exchange.dispatch_bytes, 2.0)
        )
    exchanged_ms = dispatch_ms + combine_ms
    return _Routing(
        whole_ms + exchanged_ms,
        rates.moe_backward * whole_ms + exchanged_ms,
        dispatch_ms,
        combine_ms,
        products.experts_ms + inside_ms,
        products.experts_ms + rates.moe_backward * inside_ms,
    )


def _exchange_ms(nbytes: float, copies: int, pricing: Pricing) -> float:
    """Return the time to send tokens to their experts, or back.

    This is an all-to-all among the GPUs that hold different experts. If several GPUs share each expert, it also
    includes an all-gather (on the way back a reduce-scatter) of what each of them received; these GPUs are neighbours.
    """
    cluster, how = pricing.cluster, pricing.exchange
    share = how.link_share or pricing.rates.link
    sent = exchange_ms(
        cluster, nbytes, cluster.ep, cluster.expert_tp, copies=copies, share=share, most_nodes=how.most_nodes
    )
    return sent + ring_ms(cluster, cluster.expert_tp * nbytes, cluster.expert_tp, share=share)


def _arriving(cluster: Cluster) -> int:
    """Return the number of GPUs whose routed tokens each GPU of an expert receives.

    Without expert parallelism it is 1, because the stream itself was gathered.
    """
    return cluster.expert_tp if cluster.ep > 1 else 1


def gathering_experts(work: Work, pricing: Pricing) -> Work:
    """Return the work with the inputs that experts keep: those of all GPUs that share the expert."""
    more = (_arriving(pricing.cluster) - 1) * work.routed_width
    if not more:
        return work
    widths = ("inner_width", "stash_inner_width", "quantized_inner_width")
    return replace(work, **{name: getattr(work, name) + more for name in widths})


def on_busiest_rank(work: Work, spread: float) -> Work:
    """Return the work of experts on the rank of their group that receives `spread` times the mean number of tokens.

    All other ranks wait for it at the next exchange, so it determines the layer's time, and its memory is the limit.
    """
    if spread == 1.0:
        return work
    widths = ("inner_width", "stash_inner_width", "quantized_inner_width", "cheap_inner_width", "routed_width")
    return replace(
        work,
        products=tuple(p._replace(rows=p.rows * spread) if p.experts else p for p in work.products),
        **{name: getattr(work, name) * spread for name in widths},
    )


def _narrow(part: Layer) -> float:
    """Return the share of its usual speed that softmax attention reaches: heads narrower than 128 leave a matrix unit
    partly idle."""
    width = getattr(part, "head_dim", 128)
    return min(1.0, max(0.25, width / 128))


def _gather_ms(weights: Weights, frozen: Weights, pricing: Pricing) -> tuple[float, float]:
    """Return the times per micro-batch to gather a layer's weights (ZeRO-3) and to reduce its gradient (ZeRO-2 and 3).

    A gradient that is stored in shards must be reduced before the next micro-batch's is computed. Frozen weights have
    no gradient.
    """
    setup, cluster = pricing.setup, pricing.cluster
    if setup.zero < 2 or "dp" in pricing.free:
        return 0.0, 0.0
    gather = reduce = 0.0
    groups = zip(weights, frozen, shards_of(setup, cluster), strides_of(cluster), strict=True)
    for trained, still, copies, stride in groups:
        if setup.zero == 3:
            whole = WEIGHT_BYTES * (trained + still)
            gather += ring_ms(cluster, whole, int(copies), stride, share=pricing.rates.link)
        reduce += reduce_ms(pricing, setup.gradient_bytes * trained, int(copies), stride)
    return gather, reduce


def strides_of(cluster: Cluster) -> tuple[int, int]:
    """Return the distance between the GPUs that hold the same dense weights, and between those with the same expert."""
    return cluster.tp, cluster.ep * cluster.expert_tp


def reduce_ms(pricing: Pricing, nbytes: float, copies: int, stride: int) -> float:
    """Return the time to reduce a gradient of `nbytes` to one shard per GPU.

    It is reduced among the GPUs that shard one copy of the state; if there are several copies (HSDP), every shard is
    then reduced between the copies. One layer's second step overlaps with the next layer's first, so the slower of the
    two determines the time.
    """
    cluster, share, instances = pricing.cluster, pricing.rates.link, pricing.setup.hsdp
    inside = ring_ms(cluster, nbytes, copies, stride, share=share)
    return max(inside, 2 * ring_ms(cluster, nbytes / copies, instances, stride * copies, share=share))


def priced(
    layer: Layer, pricing: Pricing, state: State = "trained", offloaded: bool = False
) -> tuple[LayerCost, Weights]:
    """Return the cost of a layer and its trained weights. `offloaded`: its activations are kept on the host until I."""
    setup, cluster = pricing.setup, pricing.cluster
    assert setup.seq is not None
    forward = backward = weight = activation = stash = workspace = 0.0
    trained, frozen = NO_WEIGHTS, NO_WEIGHTS
    parts: list[_PartTimes] = []
    for part, source in zip(layer.parts, layer.sources, strict=True):
        length, count, share = items_of(source, setup.seq, setup.micro_batch_size)
        work = part_work(part, seq=length, micro_batch_size=count)
        if isinstance(part, Moe):
            work = on_busiest_rank(work, setup.busiest_expert_rank(part.experts))
            work = gathering_experts(work, pricing)
        parts.append(_part_ms(part, work, pricing, state))
        forward, backward = forward + share * parts[-1].forward_ms, backward + share * parts[-1].input_ms
        mine, still = _weights(part, work, pricing, state)
        weight += share * parts[-1].weight_ms if any(mine) else 0.0
        activation += share * held_bytes(work, setup)
        stash += share * stashed_bytes(work, setup) if any(mine) else 0.0
        trained = Weights(*(a + b for a, b in zip(trained, mine, strict=True)))
        frozen = Weights(*(a + b for a, b in zip(frozen, still, strict=True)))
        workspace = max(workspace, workspace_bytes(part, work, setup, _arriving(cluster)))
    exchanges = any(p.combine_ms > 0 for p in parts)
    if state == "idle":  # no gradient passes: nothing is kept, and there is no backward
        backward = activation = stash = 0.0
    # FSDP fetches the next layer's weights while this one computes; only what takes longer than that is exposed.
    gather, reduce = _gather_ms(trained, frozen, pricing)
    # What is hidden takes compute units and memory bandwidth from the kernels it runs beside.
    forward = max(forward, gather) + pricing.rates.hidden * min(forward, gather)
    if state != "idle":
        hidden = min(backward + weight, gather + reduce)
        weight = max(weight, gather + reduce - backward) + pricing.rates.hidden * hidden
    if offloaded:
        # Activations are copied to the host behind the forward and back behind the backward of the layer after it. Only
        # the layer that is running has them on the GPU.
        host_ms = pricing.unless_free("host", activation / pricing.host_bytes_per_ms)
        forward = max(forward, host_ms) + HIDDEN_COST * min(forward, host_ms)
        backward = max(backward, host_ms) + HIDDEN_COST * min(backward, host_ms)
        workspace, activation = workspace + activation, 0.0
    # The head passes nothing on; a prediction module passes on two hidden states, unless it is on a path of its own.
    tensors = 0 if isinstance(layer, Head) else 2 if isinstance(layer, Mtp) and not layer.own_path else 1
    values = tensors * passed_on(layer, seq=setup.seq, sequences=setup.micro_batch_size)
    cost = LayerCost(
        forward_ms=forward,
        input_ms=backward,
        weight_ms=weight,
        activation_bytes=activation,
        stash_bytes=min(stash, activation),
        static_bytes=static_bytes(trained, setup, cluster) + frozen_bytes(frozen, setup, cluster),
        gradient_bytes=setup.gradient_bytes * sum(trained),
        boundary_bytes=2.0 * values / setup.cp * stream_share(setup),
        workspace_bytes=workspace + gathered_bytes(trained, setup, cluster, frozen),
        optimizer_ms=_update_ms(trained, pricing),
        forward_parts=tuple(x for p in parts for x in p.parts("F")) if exchanges else (),
        input_parts=tuple(x for p in reversed(parts) for x in p.parts("I")) if exchanges and state != "idle" else (),
    )
    return cost, trained


def _weights(part: Layer, work: Work, pricing: Pricing, state: State) -> tuple[Weights, Weights]:
    """Return the weights of a part that are trained, and those that are not."""
    whole = weights_of(part, pricing.cluster)
    if pricing.setup.lora is None and state == "trained":
        return whole, NO_WEIGHTS
    if not adapted(part, pricing.setup, state):
        return NO_WEIGHTS, whole
    return Weights(*adapter_parameters(work, pricing.setup.lora or 1, pricing.cluster)), whole


def _update_ms(trained: Weights, pricing: Pricing) -> float:
    """Return the time of the optimizer's update of a layer: of one GPU's weights, and of the share on the host."""
    setup = pricing.setup
    shards = shards_of(setup, pricing.cluster) if setup.zero >= 1 else Weights(1.0, 1.0)
    updated = sum(count / n for count, n in zip(trained, shards, strict=True))
    host = setup.offload_optimizer
    on_gpu = (1.0 - host) * (OPTIMIZER_BYTES + setup.gradient_bytes) / pricing.bytes_per_ms
    # Gradients are copied to the host, the host updates, and updated weights are copied back, one after the other.
    moved = setup.gradient_bytes + WEIGHT_BYTES + HOST_UPDATE_BYTES
    return updated * (on_gpu + host * moved / pricing.host_bytes_per_ms)

"""Memory of a layer: weights and their optimizer state, activations, workspace.

Knows: what each kind of parallelism and ZeRO shard, what fp8 and selective recomputation save, and Megatron's published
activation formulas. Does not know: time.

>>> megatron_activation_bytes(seq=2048, batch=1, hidden=12288, heads=96, tp=8, sequence_parallel=True) / 2**20
342.0
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from octopipe.base.errors import OctoPipeError
from octopipe.costs.analytic.work import Work
from octopipe.costs.cluster.hardware import Cluster
from octopipe.costs.cluster.setup import Setup
from octopipe.models.spec import Embedding, Head, LatentAttention, Layer, Moe, Mtp

WEIGHT_BYTES, STATE_BYTES = 2.0, 12.0
"""Megatron mixed precision: bf16 weight; fp32 master weight and two moments. With an fp32 gradient: 18 in all."""


class Weights(NamedTuple):
    """Parameters on one GPU before ZeRO shards anything."""

    dense: float
    experts: float


NO_WEIGHTS = Weights(0.0, 0.0)


def weights_of(part: Layer, cluster: Cluster) -> Weights:
    """Return the parameters of a part on one GPU before ZeRO shards them.

    Norms, routers and latent down projections are replicated over the tensor-parallel group.
    """
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
    dense = whole + (total - experts - whole) / cluster.tp
    return Weights(dense, experts / (cluster.ep * cluster.expert_tp))


def shards_of(setup: Setup, cluster: Cluster) -> Weights:
    """Return the numbers of GPUs over which ZeRO shards dense weights, and over which it shards experts.

    These are the GPUs that hold the same dense weights, and the same expert. With several copies of the state (HSDP),
    ZeRO shards inside each copy.
    """
    return Weights(float(setup.dp * setup.cp // setup.hsdp), float(cluster.expert_dp // setup.hsdp))


def static_bytes(weights: Weights, setup: Setup, cluster: Cluster) -> float:
    """Return the bytes of weights, gradients and optimizer state on one GPU after sharding by ZeRO.

    Stage 3 keeps the fp32 master weight as the only copy (FSDP); bf16 weights exist only while they are gathered.
    """
    total = 0.0
    for count, copies in zip(weights, shards_of(setup, cluster), strict=True):
        n = copies if setup.zero >= 1 else 1.0
        gradient = setup.gradient_bytes / (copies if setup.zero >= 2 else 1.0)
        if setup.zero == 3:
            whole = 0.0 if setup.states != "bf16" else WEIGHT_BYTES  # without an fp32 weight the bf16 one is kept
            total += count * (setup.gradient_bytes + setup.state_bytes + whole) / copies
        else:
            on_gpu = (1.0 - setup.offload_optimizer) * setup.state_bytes
            total += count * (WEIGHT_BYTES + gradient + on_gpu / n)
    return total


def frozen_bytes(weights: Weights, setup: Setup, cluster: Cluster) -> float:
    """Return the bytes of weights that are not trained: bf16 only, sharded by ZeRO-3 as well."""
    copies = shards_of(setup, cluster)
    return sum(WEIGHT_BYTES * count / (n if setup.zero == 3 else 1.0) for count, n in zip(weights, copies, strict=True))


def gathered_bytes(weights: Weights, setup: Setup, cluster: Cluster, frozen: Weights = NO_WEIGHTS) -> float:
    """Return the bytes of buffers for sharded state.

    ZeRO-2 and 3 need a gradient before it is reduce-scattered. ZeRO-3 also needs the gathered weights of this layer and
    of the next one, which is being prefetched. Frozen weights have no gradient.
    """
    if setup.zero < 2:
        return 0.0
    copies = shards_of(setup, cluster)
    total = 0.0
    for count, n in zip(weights, copies, strict=True):
        if setup.zero == 2:
            total += setup.gradient_bytes * count if n > 1 else 0.0
            continue
        # A weight without copies is not gathered, but its bf16 form exists only while it is used all the same.
        total += (2 * WEIGHT_BYTES + setup.gradient_bytes if n > 1 else WEIGHT_BYTES) * count
    if setup.zero == 3:
        total += sum(2 * WEIGHT_BYTES * count for count, n in zip(frozen, copies, strict=True) if n > 1)
    return total


def stream_share(setup: Setup) -> float:
    """The share of the residual stream that one GPU of a tensor-parallel group holds."""
    return 1.0 / setup.tp if setup.sequence_parallel else 1.0


def held_bytes(work: Work, setup: Setup) -> float:
    """Return the bytes of activations that one GPU holds from F to I."""
    return _bytes(
        setup,
        work,
        (work.stream_width, work.quantized_stream_width, work.cheap_stream_width),
        (work.inner_width, work.quantized_inner_width, work.cheap_inner_width),
        work.state_bytes,
    )


def stashed_bytes(work: Work, setup: Setup) -> float:
    """Return the bytes that W still needs after I: inputs of products, and gradients of their outputs.

    Values that selective recomputation drops are not included: I restores them, and they are held for at most one
    micro-batch (`dropped_bytes`).
    """
    return _bytes(
        setup,
        work,
        (work.stash_stream_width, work.quantized_stream_width, work.cheap_stream_width),
        (work.stash_inner_width, work.quantized_inner_width, work.cheap_inner_width),
        0.0,
    )


def dropped_bytes(work: Work, setup: Setup) -> float:
    """Return the bytes of activations that selective recomputation restores while I of one micro-batch runs."""
    if setup.recompute != "selective":
        return 0.0
    tokens = work.tokens / setup.cp
    return 2.0 * tokens * (work.cheap_stream_width * stream_share(setup) + work.cheap_inner_width / setup.tp)


def _bytes(
    setup: Setup, work: Work, stream: tuple[float, float, float], inner: tuple[float, float, float], state: float
) -> float:
    total = 0.0
    for (width, quantized, cheap), share in ((stream, stream_share(setup)), (inner, 1.0 / setup.tp)):
        if setup.recompute == "selective":
            width, quantized = max(width - cheap, 0.0), max(quantized - cheap, 0.0)
        # fp4 values are kept with their scales and, for W, with a transposed copy: about one byte as well.
        one_byte = min(quantized, width) if setup.precision != "bf16" else 0.0
        total += (2.0 * width - one_byte) * share
    return work.tokens / setup.cp * total + state / (setup.tp * setup.cp)


def workspace_bytes(part: Layer, work: Work, setup: Setup, arriving: int = 1) -> float:
    """Return the bytes that are needed only while an op runs (our estimate).

    These are the gathered stream under sequence parallelism, the copies of routed tokens (those of `arriving` GPUs, if
    GPUs share experts), the fp32 gradient of the logits, and what selective recomputation restores.
    """
    tokens = work.tokens / setup.cp
    gathered = 2.0 * tokens * part.hidden if setup.sequence_parallel and setup.tp > 1 else 0.0
    routed = 2 * 2.0 * tokens * work.routed_width * arriving / setup.tp
    logits = 4.0 * tokens * part.vocab / setup.tp if isinstance(part, Head) else 0.0
    return gathered + routed + logits + dropped_bytes(work, setup)


def megatron_activation_bytes(
    *,
    seq: int,
    batch: int,
    hidden: int,
    heads: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: Literal["none", "selective", "full"] = "none",
) -> float:
    """Return the bytes of 16-bit activations of one GPT layer without flash attention, with dropout masks of one byte.

    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023, Table 2, built
    from its parts: attention 11sbh + 5as²b, MLP 19sbh, two layer norms 4sbh. Tensor parallelism divides what is between
    its collectives (24sbh + 5as²b), sequence parallelism the rest (10sbh). Selective recomputation drops the part that
    is quadratic in s; full recomputation keeps only the input, 2sbh.

    >>> s, b, h, a = 1024, 2, 4096, 32
    >>> megatron_activation_bytes(seq=s, batch=b, hidden=h, heads=a) == s * b * h * (34 + 5 * a * s / h)
    True
    """
    if heads % tp or hidden % tp:
        raise OctoPipeError(f"tp {tp} does not divide {heads} heads and {hidden} values; give a divisor")
    sbh, squares = seq * batch * hidden, heads * seq * seq * batch
    if recompute == "full":
        return 2.0 * sbh
    # Inputs of both layer norms (4), of the query-key-value product and of the first feed-forward product (2 each),
    # and the dropout masks after attention and after the feed-forward (1 each): outside the parallel region.
    outside = (4 + 2 + 2 + 1 + 1) * sbh
    # Queries, keys (4), values (2), the projection's input (2); the 4h-wide products' output and input (8 each).
    inside = (4 + 2 + 2 + 8 + 8) * sbh
    # Softmax output (2), its dropout mask (1) and its output (2), a x s x s each.
    core = 0 if recompute == "selective" else 5 * squares
    return (inside + core) / tp + outside / (tp if sequence_parallel else 1)

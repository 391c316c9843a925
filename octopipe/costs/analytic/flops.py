"""Work of a layer: matrix products, FLOPs, bytes and traffic of F, I and W, independent of any device.

Knows: the arithmetic of every layer kind. Does not know: how fast anything runs (`layer_pricing.py`), or how the work
is divided over GPUs, except for which side of a product tensor parallelism shards.

F terms follow Megatron's own FLOP counter. The division of the backward pass into I and W, and the saved bytes, are our
inference: a GEMM costs the same in F, I and W; a core (attention scores, scan) has no weights, so it does not occur
in W, and its I is 2.5 times its F because the flash-style backward recomputes the forward.

T = tokens of a micro-batch, s = sequence length; bf16 has 2 bytes.

>>> from octopipe.models.spec import Mlp
>>> layer_flops(Mlp(hidden=64, ffn=256, activation="relu2"), seq=10)
Flops(forward=655360.0, input=655360.0, weight=655360.0)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from octopipe.base.errors import OctoPipeError
from octopipe.costs.analytic.work import Flops, Product, Size, Work
from octopipe.models.spec import (
    Attention,
    Embedding,
    GatedDeltaNet,
    Head,
    KimiDeltaAttention,
    LatentAttention,
    Layer,
    LightningAttention,
    Mamba1,
    Mamba2,
    Mlp,
    Moe,
    Mtp,
)
from octopipe.models.towers import CrossAttention, Projection, Projector, Source, Stem

CORE_BACKWARD = 2.5
"""Time of I of attention or a scan, as a multiple of its F."""


def part_work(part: Layer, *, seq: int, micro_batch_size: int = 1) -> Work:
    """The work of one simple layer, or of the projection of an `Mtp`."""
    size = Size(float(seq * micro_batch_size), seq, micro_batch_size)
    match part:
        case Attention():
            return _attention(part, size)
        case LatentAttention():
            return _latent_attention(part, size)
        case Mamba2():
            return _mamba2(part, size)
        case Mamba1():
            return _mamba1(part, size)
        case GatedDeltaNet():
            return _gated_delta_net(part, size)
        case KimiDeltaAttention():
            return _kimi_delta_attention(part, size)
        case LightningAttention():
            return _lightning_attention(part, size)
        case Mlp():
            return _mlp(part, size)
        case Moe():
            return _moe(part, size)
        case Mtp():
            return _mtp(part, size)
        case Embedding():
            return _embedding(part, size)
        case Head():
            return _head(part, size)
        case CrossAttention():
            return _cross_attention(part, size)
        case Projection():
            return _matrices(part.hidden, size, Product(part.width, part.hidden))
        case Stem():
            return _matrices(part.hidden, size, *(Product(i, o, rows=rows) for i, o, rows in part.products))
        case Projector():
            inner = (Product(part.width, part.ffn), Product(part.ffn, part.hidden, "inner")) if part.ffn else ()
            return _matrices(part.hidden, size, *(inner or (Product(part.width, part.hidden),)))
    raise OctoPipeError(f"no cost formula for a layer of kind {part.kind!r}; add one to flops.py")


def _attention(part: Attention, size: Size) -> Work:
    """Softmax attention; a gate doubles the query projection."""
    h = part.hidden
    q, kv = part.query_width, part.kv_width
    # A gate doubles the query projection; it is saved, and W needs its gradient.
    q_out = 2 * q if part.gated else q
    if part.causal:  # half of the scores are left out
        span = size.seq if part.window is None else min(size.seq, 2 * part.window)
    else:
        span = 2 * (size.seq if part.window is None else min(size.seq, part.window))
    width = q_out + q + 2 * kv
    return Work(
        tokens=size.tokens,
        products=(Product(h, q_out + 2 * kv), Product(q, h, "inner")),
        core_flops=2 * size.tokens * span * q,
        stream_width=2 * h,
        quantized_stream_width=h,
        cheap_stream_width=h,
        ring_width=2 * kv,
        heads_width=2 * q,
        inner_width=width,
        stash_stream_width=2 * h,
        stash_inner_width=width,
        collectives=1,
    )


def _latent_attention(part: LatentAttention, size: Size) -> Work:
    """Attention over latents that are projected up."""
    h = part.hidden
    qk, v = part.heads * part.qk_dim, part.heads * part.v_dim
    down = part.kv_rank + part.rope_dim + (part.q_rank or 0)
    up = Product(part.kv_rank, part.heads * (part.nope_dim + part.v_dim)), Product(part.q_rank or h, qk)
    # Saved: both latents before and after their norms, queries, keys, values and the output.
    inner = 2 * qk + 2 * v
    return Work(
        tokens=size.tokens,
        products=(Product(h, down, ""), *up, Product(v, h, "inner")),
        core_flops=size.tokens * size.seq * (qk + v),
        stream_width=2 * h + 2 * down,
        quantized_stream_width=h + down,
        # Selective recomputation projects queries, keys and values again from the latents, which are kept.
        cheap_stream_width=h,
        cheap_inner_width=2 * qk + v,
        cheap_flops=sum(2 * size.tokens * p.inner * p.outer for p in up),
        ring_width=qk + v,
        heads_width=qk + v,
        inner_width=inner,
        stash_stream_width=2 * h + 2 * down,
        stash_inner_width=inner,
        collectives=1,
    )


def _mamba2(part: Mamba2, size: Size) -> Work:
    """A chunked scan."""
    h = part.hidden
    di, gn = part.inner, part.groups * part.state
    scan = part.chunk * gn + part.chunk * di + 2 * part.state * di
    return Work(
        tokens=size.tokens,
        products=(Product(h, part.projection_width), Product(di, h, "inner")),
        core_flops=2 * size.tokens * scan,
        stream_width=2 * h,
        quantized_stream_width=h,
        quantized_inner_width=di,
        inner_width=part.projection_width + (di + 2 * gn) + 2 * di,
        stash_stream_width=2 * h,
        stash_inner_width=part.projection_width + di,
        state_bytes=4 * size.micro_batch_size * -(-size.seq // part.chunk) * di * part.state,
        collectives=1,
    )


def _mamba1(part: Mamba1, size: Size) -> Work:
    """A selective scan."""
    h = part.hidden
    di, low = part.inner, part.dt_rank + 2 * part.state
    return Work(
        tokens=size.tokens,
        products=(
            Product(h, 2 * di),
            Product(di, low, "inner"),
            Product(part.dt_rank, di),
            Product(di, h, "inner"),
        ),
        # Our count: decay, input, update, output and the skip, about nine operations a state element.
        core_flops=9 * size.tokens * di * part.state,
        stream_width=2 * h,
        quantized_stream_width=h,
        quantized_inner_width=di,
        inner_width=6 * di + low,
        stash_stream_width=2 * h,
        stash_inner_width=5 * di + low + part.dt_rank,
        collectives=1,
    )


def _gated_delta_net(part: GatedDeltaNet, size: Size) -> Work:
    """A chunked delta rule with gates."""
    h = part.hidden
    kw, vw = part.key_width, part.value_width
    core = _delta_core(part.value_heads, part.key_dim, part.value_dim, part.chunk)
    return Work(
        tokens=size.tokens,
        products=(Product(h, part.projection_width), Product(vw, h, "inner")),
        core_flops=2 * size.tokens * core,
        stream_width=2 * h,
        quantized_stream_width=h,
        quantized_inner_width=vw,
        inner_width=part.projection_width + (2 * kw + vw) + 2 * vw,
        stash_stream_width=2 * h,
        stash_inner_width=part.projection_width + vw,
        state_bytes=2 * size.micro_batch_size * -(-size.seq // part.chunk) * vw * part.key_dim,
        collectives=1,
    )


def _kimi_delta_attention(part: KimiDeltaAttention, size: Size) -> Work:
    """A chunked delta rule with a decay per channel."""
    h = part.hidden
    w, d = part.inner, part.head_dim
    ranks = Product(h, 2 * d, ""), Product(d, 2 * w), Product(h, part.heads)
    inner = 3 * w + 2 * w + part.heads
    return Work(
        tokens=size.tokens,
        products=(Product(h, 3 * w), *ranks, Product(w, h, "inner")),
        core_flops=2 * size.tokens * _delta_core(part.heads, d, d, part.chunk),
        stream_width=2 * h + 2 * d,
        quantized_stream_width=h + d,
        quantized_inner_width=w,
        inner_width=inner + 3 * w + 2 * w,
        stash_stream_width=2 * h + 2 * d,
        stash_inner_width=inner + w,
        state_bytes=2 * size.micro_batch_size * -(-size.seq // part.chunk) * w * d,
        collectives=1,
    )


def _lightning_attention(part: LightningAttention, size: Size) -> Work:
    """Linear attention in chunks."""
    h = part.hidden
    w = part.inner
    return Work(
        tokens=size.tokens,
        products=(Product(h, 4 * w), Product(w, h, "inner")),
        core_flops=2 * size.tokens * w * (min(size.seq, part.chunk) + 2 * part.head_dim),
        stream_width=2 * h,
        quantized_stream_width=h,
        quantized_inner_width=w,
        inner_width=4 * w + 2 * w,
        stash_stream_width=2 * h,
        stash_inner_width=4 * w + w,
        collectives=1,
    )


def _mlp(part: Mlp, size: Size) -> Work:
    """A dense feed-forward."""
    h = part.hidden
    return Work(
        tokens=size.tokens,
        products=_two_layers(h, part.ffn, part.matrices),
        stream_width=2 * h,
        quantized_stream_width=h,
        quantized_inner_width=part.ffn,
        cheap_stream_width=h,
        inner_width=part.matrices * part.ffn,
        stash_stream_width=2 * h,
        stash_inner_width=part.matrices * part.ffn,
        collectives=1,
    )


def _moe(part: Moe, size: Size) -> Work:
    """Experts with their router."""
    h = part.hidden
    w = part.expert_width
    routed = part.top_k * (2 * w + part.matrices * part.ffn)
    shared = part.matrices * part.shared_ffn
    latent = 2 * part.latent
    products = [Product(h, part.experts, "", low_precision=False)]
    products += _two_layers(w, part.ffn, part.matrices, rows=part.top_k, experts=part.experts)
    if part.shared_ffn:
        products += _two_layers(h, part.shared_ffn, part.matrices)
    if part.latent:
        products += [Product(h, part.latent, ""), Product(part.latent, h, "")]
    return Work(
        tokens=size.tokens,
        products=tuple(products),
        stream_width=2 * h,
        quantized_stream_width=h,
        quantized_inner_width=part.top_k * (w + part.ffn) + part.shared_ffn,
        cheap_stream_width=h,
        cheap_inner_width=part.top_k * (w + part.ffn),
        inner_width=routed + shared + latent,
        stash_stream_width=2 * h,
        stash_inner_width=routed + shared + latent,
        state_bytes=4 * size.tokens * part.experts,
        routed_width=part.top_k * w,
        collectives=1,
    )


def _mtp(part: Mtp, size: Size) -> Work:
    """The projection of (trunk, next token's embedding); its block is priced part by part."""
    h = part.hidden
    # Its own projection of (trunk, next token's embedding); its block is priced part by part.
    return Work(
        tokens=size.tokens,
        products=(Product(2 * h, h),),
        stream_width=4 * h,
        quantized_stream_width=2 * h,
        stash_stream_width=3 * h,
        collectives=1,
    )


def _embedding(part: Embedding, size: Size) -> Work:
    """A table that is looked up."""
    h = part.hidden
    # W needs the output's gradient. `CostTable` requires the stash to be part of the activation, so the gradient is
    # counted from F on, which is one boundary tensor too many before I.
    return Work(tokens=size.tokens, stream_width=h, stash_stream_width=h, collectives=0.5)


def _head(part: Head, size: Size) -> Work:
    """Logits and their loss."""
    h = part.hidden
    n = part.predictions
    return Work(
        tokens=size.tokens,
        products=(Product(h, part.vocab, rows=n, low_precision=False),),
        stream_width=n * 2 * h,
        # The logits; a fused cross-entropy writes their gradient over them.
        inner_width=n * part.vocab,
        stash_stream_width=n * h,
        stash_inner_width=n * part.vocab,
        collectives=0.5 * n,
    )


def _cross_attention(part: CrossAttention, size: Size) -> Work:
    """Queries of the decoder's tokens, keys and values of the encoder's output."""
    h, q, kv = part.hidden, part.query_width, part.kv_width
    read = part.source.items * part.source.positions  # positions per sequence
    rows = read / size.seq
    return Work(
        tokens=size.tokens,
        products=(Product(h, q), Product(part.memory, 2 * kv, rows=rows), Product(q, h, "inner")),
        core_flops=4 * size.tokens * read * q,  # no causal half of the scores is left out
        stream_width=2 * h,
        quantized_stream_width=h,
        cheap_stream_width=h,
        heads_width=2 * q,
        inner_width=2 * q + 2 * kv * rows,
        stash_stream_width=2 * h,
        stash_inner_width=2 * q + 2 * kv * rows,
        collectives=1,
    )


def _matrices(width: int, size: Size, *products: Product) -> Work:
    """Matrices with activations between; their inputs are kept."""
    kept = float(sum(p.rows * p.inner for p in products))
    return Work(
        tokens=size.tokens,
        products=products,
        stream_width=width,
        inner_width=kept,
        stash_stream_width=width,
        stash_inner_width=kept,
        collectives=0.5,
    )


def _two_layers(width: int, ffn: int, matrices: int, rows: float = 1.0, experts: int = 0) -> tuple[Product, ...]:
    """A feed-forward layer: up (and gate, as one product), then down."""
    return (
        Product(width, (matrices - 1) * ffn, "outer", rows, experts),
        Product(ffn, width, "inner", rows, experts),
    )


def _delta_core(heads: int, key_dim: int, value_dim: int, chunk: int) -> int:
    """Multiply-adds per token of a chunked delta rule (our count): in a chunk, the products of queries and
    keys, of keys and keys, the triangular solve on keys and on values, and the weighted values; across
    chunks, reading the state twice and updating it once."""
    return heads * (3 * chunk * key_dim + 2 * chunk * value_dim + 3 * key_dim * value_dim)


def items_of(source: Source | None, seq: int, micro_batch_size: int) -> tuple[int, int, float]:
    """Return the length and the number of the sequences that a part processes, and a factor for its costs.

    An encoder's items per micro-batch need not be a whole number: the number is rounded, and the factor corrects it.
    """
    if source is None:
        return seq, micro_batch_size, 1.0
    items = source.items * micro_batch_size
    whole = max(1, round(items))
    return source.positions, whole, items / whole


def layer_flops(layer: Layer, *, seq: int, micro_batch_size: int = 1) -> Flops:
    """F, I and W FLOPs of a whole layer for one micro-batch, before tensor parallelism divides them."""
    forward = weight = backward = 0.0
    for part, source in zip(layer.parts, layer.sources, strict=True):
        length, count, share = items_of(source, seq, micro_batch_size)
        work = part_work(part, seq=length, micro_batch_size=count)
        forward += share * (work.gemm_flops + work.core_flops)
        backward += share * (work.gemm_flops + CORE_BACKWARD * work.core_flops)
        weight += share * work.gemm_flops
    return Flops(forward=float(forward), input=float(backward), weight=float(weight))


def model_flops(layers: Iterable[Layer], *, seq: int, micro_batch_size: int = 1) -> float:
    """The FLOPs that MFU counts: three times the forward FLOPs, without recomputation."""
    counts = Counter(layers)
    return 3.0 * sum(
        count * layer_flops(layer, seq=seq, micro_batch_size=micro_batch_size).forward
        for layer, count in counts.items()
    )

"""The records of a layer's work: its matrix products, and what it saves and moves besides.

Knows: the records. Does not know: how much work a layer is (`flops.py`), or how fast anything runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Floating-point operations of one layer and one micro-batch, over all its tensor-parallel ranks."""

    forward: float
    input: float
    weight: float

    @property
    def total(self) -> float:
        return self.forward + self.input + self.weight


class Product(NamedTuple):
    """One matrix product with a weight: maps `inner` values per token to `outer` values."""

    inner: int
    outer: int
    cut: Literal["outer", "inner", ""] = "outer"
    """The side that tensor parallelism shards; empty: every GPU of the group computes the whole product."""
    rows: float = 1.0
    """Rows per token, for example the number of experts that process each token."""
    experts: int = 0
    """The rows are distributed over this many weights of the same shape; 0: there is one weight."""
    low_precision: bool = True
    """May run in fp8. Routers and the vocabulary projection stay in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one part of a layer for one micro-batch, over all its tensor-parallel ranks."""

    tokens: float = 0.0
    products: tuple[Product, ...] = ()
    """Matrix products with weights, computed once in each of F, I and W."""
    core_flops: float = 0.0
    """FLOPs of products without weights in F; I needs 2.5 times as many."""
    stream_width: float = 0.0
    """Saved values per token outside the tensor-parallel region; sharded only by sequence parallelism."""
    inner_width: float = 0.0
    """Saved values per token inside the tensor-parallel region; always sharded."""
    stash_stream_width: float = 0.0
    stash_inner_width: float = 0.0
    """The saved values that W still needs after I: GEMM inputs and gradients of GEMM outputs."""
    state_bytes: float = 0.0
    """Saved bytes that do not grow with the width: chunk states, router probabilities; sharded."""
    routed_width: float = 0.0
    """Values per token that expert parallelism dispatches and combines."""
    collectives: float = 0.0
    """All-gather and reduce-scatter pairs of the residual stream in F, and again in I."""
    quantized_stream_width: float = 0.0
    quantized_inner_width: float = 0.0
    """The saved values that only a matrix product reads, which take one byte instead of two under fp8."""
    cheap_stream_width: float = 0.0
    cheap_inner_width: float = 0.0
    """The saved values that selective recomputation drops, as far as runtimes have switches for it: outputs of the
    norms before attention and feed-forward, of the experts' activation functions and of latent up-projections, and the
    experts' outputs before they are weighted. Nothing inside dense feed-forwards, shared experts and scans."""
    cheap_flops: float = 0.0
    """FLOPs of the products that selective recomputation runs again."""
    ring_width: float = 0.0
    """Values per token that context parallelism passes around: keys and values of softmax attention. (A linear mixer
    passes on one state per slice, which is too little to count.)"""

    heads_width: float = 0.0
    """Values per token of queries and attention outputs, which are moved in addition to `ring_width` if context
    parallelism divides heads instead of tokens."""

    @property
    def gemm_flops(self) -> float:
        return sum(2 * self.tokens * p.rows * p.inner * p.outer for p in self.products)


class Size(NamedTuple):
    """The input of a layer: tokens of a micro-batch, sequence length, and sequences per micro-batch."""

    tokens: float
    seq: int
    micro_batch_size: int

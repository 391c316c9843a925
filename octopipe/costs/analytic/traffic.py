"""Costs of collectives on a cluster: rings, the exchange between experts, all-gathers of weights.

Knows: how long a group of GPUs, within or across nodes, takes to gather, reduce or exchange a number of bytes. Does not
know: which layer needs it (`layer_pricing.py`).

A group consists of `size` GPUs `stride` apart, numbered as in `Cluster`. GPUs of one node communicate over the fast
links, and every GPU has its own link to other nodes.

>>> from octopipe.costs.cluster.hardware import Cluster, gpu
>>> h100 = Cluster(gpu=gpu("h100"))
>>> round(ring_ms(h100, 450e6, 8, share=1.0), 3), round(ring_ms(h100, 450e6, 16, share=1.0), 3)
(0.884, 0.958)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from octopipe.costs.cluster.hardware import Cluster


def ring_ms(cluster: Cluster, nbytes: float, size: int, stride: int = 1, *, share: float) -> float:
    """Return the time of an all-gather whose result, or a reduce-scatter whose input, is a tensor of `nbytes`.

    Inside a node every GPU passes on (n-1)/n of the tensor. Between nodes, each node receives one copy of what the
    other nodes hold, over the links of all its members at once. The slower of the two determines the time. `share`:
    the share of the link bandwidth that is reached.
    """
    if size <= 1 or nbytes <= 0:
        return 0.0
    near, far = cluster.intra_link, cluster.link_across(size * stride)
    per_node = cluster.members_per_node(size, stride)
    nodes = math.ceil(size / per_node)
    inside = (size - 1) / size * nbytes * near.ms_per_byte if per_node > 1 else 0.0
    across = (nodes - 1) / nodes * nbytes * far.ms_per_byte / per_node
    latency = math.ceil(math.log2(size)) * (far.latency_ms if nodes > 1 else near.latency_ms)
    return latency + max(inside, across) / share


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How tokens are exchanged between expert-parallel ranks; defaults are those of other bf16 collectives."""

    link_share: float | None = None
    """Share of the link bandwidth that the exchange reaches; None: that of other collectives."""
    dispatch_bytes: float = 2.0
    """Bytes per value of the dispatch (1: fp8); the combine uses bf16."""
    most_nodes: int | None = None
    """The experts of a token are on at most this many nodes (node-limited routing)."""
    slows_compute: float = 20 / 112
    """Compute that overlaps with an exchange takes 1 + `slows_compute` times as long, because the exchange's kernels
    occupy 20 of 132 multiprocessors (DeepSeek-V3's report, section 3.2.2)."""
    slows_exchange: float = 0.0


def exchange_ms(
    cluster: Cluster,
    nbytes: float,
    size: int,
    stride: int = 1,
    *,
    copies: int = 1,
    share: float,
    most_nodes: int | None = None,
) -> float:
    """Return the time of an all-to-all in which every GPU sends `nbytes`: `copies` of each token, evenly distributed.

    A token is sent to a node once, however many of its copies go there, and is copied inside that node. Routing may
    limit the experts of a token to `most_nodes` nodes.
    """
    if size <= 1 or nbytes <= 0:
        return 0.0
    near, far = cluster.intra_link, cluster.link_across(size * stride)
    per_node = cluster.members_per_node(size, stride)
    nodes = math.ceil(size / per_node)
    inside = (size - 1) / size * nbytes * near.ms_per_byte if per_node > 1 else 0.0
    within = nodes if most_nodes is None else min(most_nodes, nodes)
    # The expected number of nodes that a token's copies go to, not counting the token's own node.
    visits = (nodes - 1) / nodes * within * (1.0 - (1.0 - 1.0 / within) ** copies)
    across = visits * nbytes / copies * far.ms_per_byte
    latency = far.latency_ms if nodes > 1 else near.latency_ms
    return latency + max(inside, across) / share


def pass_round_ms(cluster: Cluster, nbytes: float, size: int, stride: int = 1, *, share: float) -> float:
    """Return the time to pass each GPU's `nbytes` around the whole group in a ring."""
    if size <= 1 or nbytes <= 0:
        return 0.0
    whole = cluster.members_per_node(size, stride) >= size
    link = cluster.intra_link if whole else cluster.link_across(size * stride)
    return (size - 1) * (link.latency_ms + nbytes * link.ms_per_byte / share)


class ContextTraffic(NamedTuple):
    """What context parallelism adds to one forward of attention."""

    behind_ms: float
    """Communication that overlaps with attention."""
    shown_ms: float
    """Communication before and after attention."""
    backward: float
    """`shown_ms` of the backward, as a multiple of that of the forward."""


def context_traffic(
    cluster: Cluster, kind: str, *, kv_bytes: float, heads_bytes: float, size: int, stride: int, share: float
) -> ContextTraffic:
    """Return the communication of attention if `size` GPUs share a sequence.

    Each GPU has `kv_bytes` of keys and values and `heads_bytes` of queries and outputs. The backward passes keys and
    values around (or gathers them) once more and reduces their gradients. If heads are divided instead, it moves the
    gradients of what the forward moved.
    """
    if kind == "ring":
        return ContextTraffic(pass_round_ms(cluster, kv_bytes, size, stride, share=share), 0.0, 2.0)
    if kind == "all-gather":
        return ContextTraffic(0.0, ring_ms(cluster, kv_bytes * size, size, stride, share=share), 2.0)
    near = size if kind == "ulysses" else nearby(cluster, size, stride)
    # All-to-alls before the core (queries, keys, values) and after it (outputs).
    near_ms = exchange_ms(cluster, kv_bytes + heads_bytes, near, stride, share=share)
    far = pass_round_ms(cluster, kv_bytes, size // near, stride * near, share=share)
    return ContextTraffic(far, near_ms, 1.0)


def nearby(cluster: Cluster, size: int, stride: int) -> int:
    """Return the largest divisor of `size` for which that many GPUs of the group are within one node."""
    return max(d for d in range(1, size + 1) if size % d == 0 and cluster.members_per_node(d, stride) >= d)

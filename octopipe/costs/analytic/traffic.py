"""What collectives cost on a cluster: rings, exchanges of experts, gathers of weights.

Knows: how long a group of GPUs, near or far apart, takes to gather, reduce or exchange so many bytes. Does not
know: which layer asks for it (`analytic.py`).

A group is `size` GPUs `stride` apart, numbered as in `Cluster`; those of one node talk over the fast links, and every
GPU has its own way out of the node.

>>> from octopipe.costs.cluster.hardware import Cluster, gpu
>>> h100 = Cluster(gpu=gpu("h100"))
>>> round(ring_ms(h100, 450e6, 8, share=1.0), 3), round(ring_ms(h100, 450e6, 16, share=1.0), 3)
(0.884, 0.958)
"""

from __future__ import annotations

import math

from octopipe.costs.cluster.hardware import Cluster


def ring_ms(cluster: Cluster, nbytes: float, size: int, stride: int = 1, *, share: float) -> float:
    """An all-gather to, or a reduce-scatter of, a tensor of `nbytes`.

    Inside a node every GPU passes (n-1)/n of the tensor on; between nodes one copy of what the others hold enters
    each node, over all of its members' links at once. The slower of the two sets the pace.
    """
    if size <= 1 or nbytes <= 0:
        return 0.0
    near, far = cluster.intra_link, cluster.inter_link
    per_node = cluster.members_per_node(size, stride)
    nodes = math.ceil(size / per_node)
    inside = (size - 1) / size * nbytes * near.ms_per_byte if per_node > 1 else 0.0
    across = (nodes - 1) / nodes * nbytes * far.ms_per_byte / per_node
    latency = math.ceil(math.log2(size)) * (far.latency_ms if nodes > 1 else near.latency_ms)
    return latency + max(inside, across) / share


def exchange_ms(cluster: Cluster, nbytes: float, size: int, stride: int = 1, *, copies: int = 1, share: float) -> float:
    """An all-to-all in which a GPU sends `nbytes`, `copies` of every token to members chosen evenly.

    A token crosses to a node once, however many of its copies are wanted there, and is copied on inside it.
    """
    if size <= 1 or nbytes <= 0:
        return 0.0
    near, far = cluster.intra_link, cluster.inter_link
    per_node = cluster.members_per_node(size, stride)
    nodes = math.ceil(size / per_node)
    inside = (size - 1) / size * nbytes * near.ms_per_byte if per_node > 1 else 0.0
    visits = (nodes - 1) * (1.0 - (1.0 - 1.0 / nodes) ** copies)
    across = visits * nbytes / copies * far.ms_per_byte
    latency = far.latency_ms if nodes > 1 else near.latency_ms
    return latency + max(inside, across) / share


def pass_round_ms(cluster: Cluster, nbytes: float, size: int, stride: int = 1, *, share: float) -> float:
    """Each GPU's `nbytes` handed round the whole group, neighbour to neighbour."""
    if size <= 1 or nbytes <= 0:
        return 0.0
    whole = cluster.members_per_node(size, stride) >= size
    link = cluster.intra_link if whole else cluster.inter_link
    return (size - 1) * (link.latency_ms + nbytes * link.ms_per_byte / share)

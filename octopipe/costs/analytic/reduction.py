"""The reduction of gradients over replicas, and the gathering of updated weights, once per step.

Knows: which of it ZeRO's stages do at the end of a step, and which part of it computation hides. Does not know: the
cost of layers (`layer_pricing.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from octopipe.costs.analytic.footprint import WEIGHT_BYTES, Weights, shards_of
from octopipe.costs.analytic.layer_pricing import reduce_ms, strides_of
from octopipe.costs.analytic.pricing import Pricing
from octopipe.costs.analytic.traffic import ring_ms


def exposed_reduction_ms(columns: Mapping[str, np.ndarray], weights: Sequence[Weights], pricing: Pricing) -> float:
    """Return the exposed time of the gradient reduction at the end of a step, over all layers.

    Layer by layer, gradients are reduced (ZeRO-1: reduce-scattered) while the last backward computes, and updated
    weights are gathered while the next step's first forward computes. What takes longer than that computation is
    exposed, and so is the last layer's share. With ZeRO-2 gradients were reduced during the micro-batches, so that
    mainly the gathering of weights remains; with ZeRO-3 both were done there.
    """
    setup = pricing.setup
    if setup.dp * setup.cp == 1 or setup.zero == 3:
        return 0.0
    exposed, layers_per_rank = 0.0, max(1.0, len(weights) / setup.pp)
    forward, backward = columns["forward_ms"], columns["input_ms"] + columns["weight_ms"]
    for i, (reduced, gathered) in enumerate(reduction_parts_ms(weights, pricing)):
        # ZeRO-2 reduces behind every backward, including the last one: only the last layer's share is exposed.
        behind = math.inf if setup.zero == 2 else float(backward[i])
        exposed += max(reduced - behind, reduced / layers_per_rank)
        exposed += max(gathered - float(forward[i]), gathered / layers_per_rank)
    return exposed


def reduction_ms(weights: Sequence[Weights], pricing: Pricing) -> list[float]:
    """Return, per layer, the time once a step to reduce its gradient over the replicas and to gather its updated
    weights, without overlap. ZeRO-2 and 3 reduce during the micro-batches, so that this reduction is not included."""
    after = 0.0 if pricing.setup.zero >= 2 else 1.0
    return [after * reduced + gathered for reduced, gathered in reduction_parts_ms(weights, pricing)]


def reduction_parts_ms(weights: Sequence[Weights], pricing: Pricing) -> list[tuple[float, float]]:
    """Return, per layer, the time to reduce its gradient (behind the backward) and the time to gather its updated
    weights (behind the next forward).

    Without ZeRO, both halves of the all-reduce count as reduction. With ZeRO-3 both times are zero.
    """
    setup, cluster = pricing.setup, pricing.cluster
    if setup.dp * setup.cp == 1 or setup.zero == 3:
        return [(0.0, 0.0)] * len(weights)
    known: dict[Weights, tuple[float, float]] = {}
    for held in set(weights):
        reduced = gathered = 0.0
        for count, n, stride in zip(held, shards_of(setup, cluster), strides_of(cluster), strict=True):
            reduced += reduce_ms(pricing, setup.gradient_bytes * count, int(n), stride)
            gathered += ring_ms(cluster, WEIGHT_BYTES * count, int(n), stride, share=pricing.rates.link)
        known[held] = (2 * reduced, 0.0) if setup.zero == 0 else (reduced, gathered)
    return [known[held] for held in weights]

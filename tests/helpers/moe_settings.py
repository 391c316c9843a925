"""Random models of which some layers exchange tokens between expert ranks."""

from __future__ import annotations

import random

import numpy as np

from octopipe.costs.cluster.hardware import Network
from octopipe.costs.segments import Segments
from octopipe.costs.table import CostTable


def moe_setting(
    rng: random.Random, share: float, *, ranks: tuple[int, ...] = (2, 4), layers_per_rank: tuple[int, int] = (3, 5)
) -> tuple[CostTable, int, int]:
    """Costs, ranks and micro-batches; `share` of the work of a layer with experts is exchange."""
    num_ranks = rng.choice(ranks)
    micro_batches, layers = num_ranks * rng.choice((2, 3, 4)), num_ranks * rng.randint(*layers_per_rank)
    forward = [rng.uniform(0.5, 2.0) for _ in range(layers)]
    inward = [f * rng.uniform(0.9, 1.3) for f in forward]
    weight = [f * rng.uniform(0.4, 0.9) for f in forward]
    rows: tuple[list[list[tuple[str, float]]], list[list[tuple[str, float]]]] = ([], [])
    for k in range(layers):
        if k in (0, layers - 1) or rng.random() < 0.25:
            rows[0].append([("compute", forward[k])])
            rows[1].append([("compute", inward[k])])
            continue
        part = rng.uniform(0.3, 0.7)
        x = (forward[k] + inward[k] + weight[k]) * share / (1 - share) / 4
        rows[0].append(
            [("compute", forward[k] * part), ("exchange", x), ("compute", forward[k] * (1 - part)), ("exchange", x)]
        )
        rows[1].append(
            [("exchange", x), ("compute", inward[k] * (1 - part)), ("exchange", x), ("compute", inward[k] * part)]
        )
    sums = [np.array([sum(ms for _, ms in row) for row in kind]) for kind in rows]
    costs = CostTable(
        model="moe",
        symbols="X" * layers,
        forward_ms=sums[0],
        input_ms=sums[1],
        weight_ms=np.array(weight),
        activation_bytes=np.ones(layers),
        stash_bytes=np.full(layers, 0.6),
        static_bytes=np.ones(layers),
        network=Network.constant(0.05),
        segments=Segments.from_ms(*rows, slows_compute=rng.choice((0.0, 0.1, 0.18))),
    )
    return costs, num_ranks, micro_batches

"""DynaPipe's micro-batches for a model: groups sequences of different length by their cost.

Knows: a formula for the time of a number of sequences of one length, fitted to the model's costs, and how many tokens
fit. Does not know: DynaPipe's dynamic program (`systems/dynapipe.py`) or how lengths are read (`lengths.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.resolve import costs_of_setup
from octopipe.costs.table import CostTable
from octopipe.models.lengths import Groups
from octopipe.models.spec import ModelSpec
from octopipe.search.systems.dynapipe import micro_batch_samples

MOST_SEQUENCES = 2048
"""Maximum number of sequences in one step: the dynamic program considers every pair of them."""


def dynamic_groups(spec: ModelSpec, setup: Setup, lengths: Sequence[int]) -> Groups:
    """Micro-batches of padded sequences that minimise (S-1) t_max + sum t, the shortest first.

    A micro-batch fits if all activations that a rank holds in flight fit, which are about one micro-batch of the whole
    model. A single sequence is always tried, and the simulation decides in the end.
    """
    if len(lengths) > MOST_SEQUENCES:
        raise OctoPipeError(f"{len(lengths)} sequences; DynaPipe's grouping takes up to {MOST_SEQUENCES} a step")
    time_ms, room = prices(spec, setup, max(lengths))
    groups = micro_batch_samples(
        lengths, setup.pp, time_ms, fits=lambda count, length: count == 1 or count * length <= room
    )
    return tuple(tuple(lengths[i] for i in group) for group in groups)


def prices(spec: ModelSpec, setup: Setup, longest: int) -> tuple[Callable[[int, int], float], float]:
    """The time of one stage for `count` sequences of `length`, and the number of tokens that fit.

    The time is a + b tokens + c tokens x length (kernel launches, matrix products, attention); it is exact at three
    points.
    """

    def table(count: int, length: int) -> CostTable:
        length = -(-length // (2 * setup.cp)) * 2 * setup.cp
        return costs_of_setup(spec, replace(setup, seq=length, micro_batch_size=count, micro_batches=None))

    half = max(1, longest // 2)
    points = [(1, longest), (1, half), (2, longest)] if half < longest else [(1, longest), (2, longest), (3, longest)]
    rows = np.array([[1.0, n * length, n * length * length] for n, length in points])
    tables = [table(*point) for point in points]
    times = np.array([float(t.layer_ms.sum()) / setup.pp for t in tables])
    a, b, c = np.linalg.lstsq(rows, times, rcond=None)[0].tolist()
    one = tables[0]
    free = min(one.capacity_bytes(r) for r in range(setup.pp)) - float(one.static_bytes.sum()) / setup.pp
    per_token = float(one.activation_bytes.sum()) / longest
    room = free / per_token if per_token > 0 else float("inf")
    return lambda count, length: max(a + count * length * (b + c * length), 1e-9), room

"""Times of the shards of the two layers that can be cut by vocabulary, the embedding and the head.

Knows: how a shard runs alone, as it would in a plan that cuts its layer, and how its time compares with that of the
whole layer. Does not know: plans, or what the numbers are fitted to (`costs/shard_times.py`).

Shards are timed as the layers are, one after the other on every rank while all ranks are at work, each rank with a
shard of its own. Plans whose path forks do not run as CUDA graphs, and neither do shards here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.costs.shard_times import ShardTimes, Three, fitted
from octopipe.runtime.measure.one_layer import Layer
from octopipe.runtime.stages.shards import CutLoss, cut_loss, cut_module

Seen = Mapping[int, Mapping[int, Three]]
"""By layer and number of shards: the times of F, I and W of one shard, as shares of the whole layer's."""
LEAST_HEAD = 0.05
"""The least share of a micro-batch's time for which a head is worth cutting; shards of a smaller one are not
measured."""


def worth_measuring(layer_ms: Sequence[float], ranks: int) -> bool:
    """Return whether splitting the head of a model with these layer times could gain anything.

    >>> worth_measuring([1.0, 8.0, 8.0, 3.0], 4), worth_measuring([1.0, 80.0, 80.0, 3.0], 4)
    (True, False)
    """
    return ranks > 1 and len(layer_ms) > 2 and layer_ms[-1] >= LEAST_HEAD * sum(layer_ms)


def counts_for(ranks: int) -> tuple[int, ...]:
    """Return the numbers of shards that are measured: two, and as many as there are ranks (at least four).

    >>> counts_for(2), counts_for(4)
    ((2, 4), (2, 4))
    """
    return (2, max(ranks, 4))


def measure_shards(
    ends: Mapping[int, Layer],
    loss_fn: Callable[..., Tensor],
    target: Any,
    *,
    whole_ms: Mapping[int, np.ndarray[Any, Any]],
    counts: Sequence[int],
    rank: int,
    precision: str,
    agree: Callable[[bool], bool],
    timed: Callable[[list[Layer]], np.ndarray[Any, Any]],
) -> Seen:
    """Time shards of `ends`, the first and the last layer by number (collective). `agree` returns whether a condition
    holds on all ranks; `timed` runs shards and returns [layers, 3] in ms.

    Layers or losses that cannot be cut are left out: a plan that cuts them is refused later, with the reason.
    """
    last = max(ends)
    try:
        loss = cut_loss(loss_fn)
    except OctoPipeError:
        return {}
    found: dict[int, dict[int, Three]] = {}
    for number, whole in sorted(ends.items(), reverse=True):
        if number != last and last not in found:
            break  # an embedding is cut together with the head only
        for count in counts:
            shard = None
            with suppress(Exception):  # a user's head may fail in any way, and the profile does not depend on it
                shard = _shard(whole, number, count, rank % count, loss if number == last else None, target, precision)
            if not agree(shard is not None):
                found.pop(number, None)
                break
            assert shard is not None
            ms = timed([shard])[0]
            f, i, w = (float(a / b) if b > 0 else 1 / count for a, b in zip(ms, whole_ms[number], strict=True))
            found.setdefault(number, {})[count] = (f, i, w)
            del shard
    return found


def _shard(
    whole: Layer, number: int, count: int, mine: int, loss: CutLoss | None, target: Any, precision: str
) -> Layer:
    module = cut_module(whole.module, mine, count, number)
    then = None
    if loss is not None:
        of_shard = loss.partial(module)
        then = partial(_with_target, of_shard, target)
    return Layer(module, whole.value, then, not whole.stage.input_grad, precision, ends_in_loss=False)


def _with_target(function: Callable[[Any, Any], Any], target: Any, output: Any) -> Any:
    return function(output, target)


def shard_times(ranks: Sequence[Seen]) -> tuple[ShardTimes, ...]:
    """Return the measurements of all ranks, fitted for every layer that all of them could split."""
    layers = sorted(set.intersection(*(set(seen) for seen in ranks))) if ranks else []
    out = []
    for layer in layers:
        means: dict[int, Three] = {}
        for count in ranks[0][layer]:
            f, i, w = np.mean([seen[layer][count] for seen in ranks], axis=0).tolist()
            means[count] = (f, i, w)
        out.append(fitted(layer, means))
    return tuple(out)


__all__ = ["Seen", "counts_for", "measure_shards", "shard_times", "worth_measuring"]

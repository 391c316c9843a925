"""Bounds on plans that may split the head, and the embedding, by vocabulary.

Knows: why a bound on another model holds for such plans. Does not know: the bounds themselves (`bounds`).

Take a plan whose head is split into n shards on n of R ranks, and remove all shards but one. The result is a plan for
the model whose head takes 1/n of the time, and it is no slower. Since n is at most R, no such plan is faster than the
bound on the model whose head takes 1/R of the time; the same holds for the embedding. Where the times of shards were
measured (`costs/shard_times.py`), one of R shards takes the shortest of them. The ranks together still have to do all
the work, or that of all shards, if these together are shorter.
"""

from __future__ import annotations

from octopipe.costs.shard_times import parts_of
from octopipe.costs.table import PER_LAYER, CostTable

TIMES = ("forward_ms", "input_ms", "weight_ms")


def with_cut_ends(costs: CostTable, num_ranks: int) -> CostTable:
    """Return the costs of the model that has only one shard of the head and one of the embedding."""
    changed: dict[str, object] = {}
    for name in PER_LAYER:
        values = getattr(costs, name).copy()
        if name != "boundary_bytes":
            for k in (0, costs.num_layers - 1):
                part = dict(zip(TIMES, parts_of(costs.shard_times, k, num_ranks), strict=True)).get(name)
                values[k] = (
                    values[k] / num_ranks if part is None or not costs.shard_times else values[k] * min(1.0, part)
                )
        changed[name] = values
    return costs.replace(tied_bytes=costs.tied_bytes / num_ranks, **changed)


def with_least_work(costs: CostTable) -> CostTable:
    """Return the costs of the model whose cut layers take no longer than all of their shards together."""
    changed = {name: getattr(costs, name).copy() for name in TIMES}
    for one in costs.shard_times:
        for name, part in zip(TIMES, one.least_sum(), strict=True):
            changed[name][one.layer] *= part
    return costs.replace(**changed) if costs.shard_times else costs

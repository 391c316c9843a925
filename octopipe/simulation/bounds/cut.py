"""Bounds on plans that may split the head, and the embedding, by vocabulary.

Knows: why a bound on another model holds for such plans. Does not know: the bounds themselves (`bounds`).

Take a plan whose head is split into n shards on n of R ranks, and remove all shards but one. The result is a plan for
the model whose head takes 1/n of the time, and it is no slower. Since n is at most R, no such plan is faster than the
bound on the model whose head takes 1/R of the time; the same holds for the embedding. The ranks together still have to
do all the work.
"""

from __future__ import annotations

from octopipe.costs.table import PER_LAYER, CostTable


def with_cut_ends(costs: CostTable, num_ranks: int) -> CostTable:
    """The model of which one shard of the head and one of the embedding are left."""
    changed: dict[str, object] = {}
    for name in PER_LAYER:
        values = getattr(costs, name).copy()
        if name != "boundary_bytes":
            values[[0, -1]] /= num_ranks
        changed[name] = values
    return costs.replace(tied_bytes=costs.tied_bytes / num_ranks, **changed)

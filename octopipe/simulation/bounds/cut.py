"""Bounds on plans that may cut the head, and the embedding, by vocabulary.

Knows: why a bound on another model holds for such plans. Does not know: the arguments themselves (`bounds`).

Take a plan whose head is cut into n shards on n of R ranks, and drop all shards but one. What is left is a plan of the
model whose head takes 1/n of its time, and it is no slower. As n is at most R, no such plan beats the bound on the
model whose head takes 1/R of its time; the same holds for the embedding. All work still has to be done by all ranks.
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

"""Proven lower bounds on the step time of any plan: what no partition, placement or order can beat.

Knows: the costs, the number of ranks and micro-batches. Does not know: any plan.

- *work*: all the work divided by all the ranks' speed.
- *chain*: some layer's F and I of every micro-batch run on one rank, one after another; before the first of
  them a forward chain must pass, and after the last an input-gradient chain back to layer 0.
"""

from __future__ import annotations

import numpy as np

from octopipe.cost import CostTable


def work_bound_ms(costs: CostTable, num_ranks: int, num_micro_batches: int) -> float:
    """Total work over total speed."""
    speed = sum(1.0 / costs.slowdown(r) for r in range(num_ranks))
    return float(_totals(costs, num_micro_batches).sum()) / speed


def chain_bound_ms(costs: CostTable, num_ranks: int, num_micro_batches: int) -> float:
    """max over layers l of: forward chain before l + every F_l and I_l + input-gradient chain after it."""
    fastest = min(costs.slowdown(r) for r in range(num_ranks))
    factor = costs.micro_batch_factor
    size = np.ones((num_micro_batches, costs.num_layers)) if factor is None else factor[:num_micro_batches]
    lead = np.concatenate(([0.0], np.cumsum(size.min(axis=0) * costs.forward_ms)[:-1]))
    tail = np.concatenate(([0.0], np.cumsum(size.min(axis=0) * costs.input_ms)[:-1]))
    serial = size.sum(axis=0) * (costs.forward_ms + costs.input_ms)
    return fastest * float((lead + serial + tail).max())


def lower_bound_ms(costs: CostTable, num_ranks: int, num_micro_batches: int) -> float:
    """The strongest bound known here."""
    return max(
        work_bound_ms(costs, num_ranks, num_micro_batches), chain_bound_ms(costs, num_ranks, num_micro_batches)
    )


def _totals(costs: CostTable, num_micro_batches: int) -> np.ndarray:
    if costs.micro_batch_factor is None:
        return num_micro_batches * costs.layer_ms
    return costs.micro_batch_factor[:num_micro_batches].sum(axis=0) * costs.layer_ms

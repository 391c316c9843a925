"""The error that is raised if no plan fits in memory: which rank lacks how much, and what would help.

Knows: the minimum memory that any plan needs. Does not know: how plans are searched.
"""

from __future__ import annotations

import numpy as np

from octopipe.base.errors import DoesNotFitError
from octopipe.costs.table import CostTable

GIB = float(1 << 30)


def does_not_fit_error(costs: CostTable, num_ranks: int, may_recompute: bool) -> DoesNotFitError:
    """Return the error for a setting in which no plan that fits was found."""
    capacity = np.array([costs.capacity_bytes(r) for r in range(num_ranks)])
    # What a rank needs at least: its share of the static bytes, one micro-batch's activations, the largest workspace.
    static = float(costs.static_bytes.sum())
    finite = np.isfinite(capacity)
    share = capacity / capacity[finite].sum() if finite.all() else np.where(finite, 1.0 / num_ranks, 0.0)
    held = costs.activation_bytes.sum() / num_ranks
    if may_recompute:
        held = costs.boundary_bytes.sum() / num_ranks + costs.activation_bytes.max()
    need = static * share + held + costs.workspace_bytes.max()
    need = np.maximum(need, (costs.static_bytes + costs.activation_bytes * (not may_recompute)).max())
    lack = need - capacity
    rank = int(np.argmax(lack))
    missing = max(float(lack[rank]) / GIB, 0.0)
    most = f"about {missing:.1f} GiB" if missing > 0.05 else "a little memory"
    helps = ["more ranks (--pp)", "a larger --memory-gib", "a larger --tp", "shorter sequences (--seq)"]
    if finite.any() and costs.host_link is not None and static / num_ranks < capacity[rank]:
        helps.insert(0, "activations in host memory (tune --offload)")
    if not may_recompute and finite.any():
        helps.insert(0, "recomputation")
    return DoesNotFitError(
        f"{costs.model}: no plan fits: rank {rank} of {num_ranks} has {capacity[rank] / GIB:.1f} GiB and lacks "
        f"{most} (weights and optimizer alone need {static / num_ranks / GIB:.1f} GiB a rank); "
        f"what would help: {', '.join(helps)}"
    )

"""What fills a rank's memory: the numbers from which the page computes every part at every time.

Knows: which parts can be told apart (weights, gradients, optimizer state; activations; buffers between stages;
workspace of the running op) and the bytes of each. Does not know: when anything happens; the page's memory.js adds the
parts up over time, by the rules of `simulator.memory_curves`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from octopipe.base.errors import OctoPipeError
from octopipe.costs.analytic import footprint
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.plans.price import boundary_bytes, stage_memory, static_bytes, workspace_bytes
from octopipe.views.report.pack import Packer

WHOLE_STATE = "weights, gradients and optimizer state"
"""The name used if the costs do not say how static memory divides, such as those of a profile or of a user's table."""
MAX_NUMBERS = 200_000


def state_shares(costs: CostTable) -> dict[str, float]:
    """Return the shares into which the static bytes of every layer divide; a single part if that is not known.

    It is known if the costs come from our own formulas for a named GPU. The shares are checked against the bytes of the
    gradients: costs that were changed by hand, or experts with fewer replicas than the dense weights beside them,
    divide differently.
    """
    setup = costs.setup
    if setup is None or setup.gpu is None:
        return {WHOLE_STATE: 1.0}
    try:
        cluster = setup.cluster()
    except OctoPipeError:
        return {WHOLE_STATE: 1.0}
    n = footprint.shards_of(setup, cluster).dense
    weights, gradients, state = footprint.WEIGHT_BYTES, setup.gradient_bytes, footprint.STATE_BYTES
    if setup.zero == 3:
        # The fp32 master is the only copy of the weight: 4 of the 12 bytes are weights, the two moments are state.
        weights, gradients, state = 4.0 / n, gradients / n, (state - 4.0) / n
    else:
        gradients /= n if setup.zero >= 2 else 1.0
        state /= n if setup.zero >= 1 else 1.0
    total = weights + gradients + state
    parameters = costs.gradient_bytes / setup.gradient_bytes
    if not costs.static_bytes.any() or not np.allclose(costs.static_bytes, parameters * total, rtol=1e-9):
        return {WHOLE_STATE: 1.0}
    return {"weights": weights / total, "gradients": gradients / total, "optimizer state": state / total}


def micro_batch_classes(plan: Plan, costs: CostTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group micro-batches by size and route; return a member of each class, and each micro-batch's class."""
    route = np.asarray(plan.route_of_micro_batch)[:, None]
    factor = costs.micro_batch_factor
    key = route.astype(float) if factor is None else np.hstack((route, factor[: plan.num_micro_batches]))
    _, member, class_of = np.unique(key, axis=0, return_index=True, return_inverse=True)
    return member, class_of.ravel()


def memory_model(plan: Plan, costs: CostTable, pack: Packer) -> dict[str, Any] | None:
    """Return the bytes per class of micro-batches and stage. None if no bytes are known, there are too many numbers,
    paths fork, or activations are offloaded to host memory."""
    if plan.forks or plan.offloads:
        return None
    member, class_of = micro_batch_classes(plan, costs)
    if len(member) * len(plan.stages) > MAX_NUMBERS:
        return None
    static = static_bytes(plan, costs)
    memory = stage_memory(plan, costs)
    if not static.any() and not memory.activation.any():
        return None
    out, gradient = boundary_bytes(plan, costs)

    def by_class(values: NDArray[np.float64]) -> int:
        return pack.floats(values[:, member].T)

    return {
        "class_of_micro_batch": pack.integers(class_of),
        "kept": by_class(memory.after_forward),
        "activation": by_class(memory.activation),
        "stash": by_class(memory.stash),
        "out": by_class(out),
        "gradient": by_class(gradient),
        "workspace": pack.floats(workspace_bytes(plan, costs)),
        "static": static.tolist(),
        "shares": [[name, share] for name, share in state_shares(costs).items()],
    }

"""A plan as the compute-only CSV that torch.distributed.pipelining loads.

Knows: what PyTorch's schedule text can say: one line per rank, F, I, W and B of one chain of stages. Does not
know: torch; PyTorch derives the sends and receives itself, in its own order.
"""

from __future__ import annotations

from octopipe.errors import OctoPipeError
from octopipe.plan import Plan


def pytorch_csv(plan: Plan) -> str:
    """The text for `_PipelineScheduleRuntime._load_csv(path, format="compute_only")`.

    R has no word in PyTorch's schedules: its stages recompute inside the backward when their module uses
    activation checkpointing, so R ops are left out.
    """
    if len(plan.routes) > 1:
        raise OctoPipeError(
            "PyTorch's schedules know one chain of stages; this plan has "
            f"{len(plan.routes)} routes: run it with `octopipe train`"
        )
    route = plan.routes[0]
    place = {stage: position for position, stage in enumerate(route)}
    rows = ([op._replace(stage=place[op.stage]) for op in order if op.kind != "R"] for order in plan.orders)
    return "".join(",".join(map(str, row)) + "\n" for row in rows)

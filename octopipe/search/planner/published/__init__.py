"""Published systems that plan a whole cluster, not the pipeline alone: Alpa, DAPPLE, Metis and Mist.

Knows: how each system is called, which micro-batch sizes are tried, and that the plan returned fits by simulation.
Does not know: their rules (one file per system) or the command line.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from octopipe.base.errors import DoesNotFitError, OctoPipeError
from octopipe.costs.cluster.setup import Setup
from octopipe.models.spec import ModelSpec
from octopipe.search.planner.published.alpa import alpa
from octopipe.search.planner.published.arrangement import Arrangement, SystemPlan, judged, limit_excess, on_real_devices
from octopipe.search.planner.published.dapple import dapple
from octopipe.search.planner.published.meshes import MeshPricer
from octopipe.search.planner.published.metis import metis
from octopipe.search.planner.published.mist import mist
from octopipe.search.planner.published.query import Query, query_of

Planner = Callable[[Query, MeshPricer, int, float, float], Arrangement | None]
"""(query, prices, samples per micro-batch, share of memory kept free, objective to beat) -> its best arrangement, or
None."""
PLANNERS: Mapping[str, Planner] = MappingProxyType({"alpa": alpa, "dapple": dapple, "metis": metis, "mist": mist})
TRIES, NEAR = 4, 1.1
"""How often an arrangement that does not fit by simulation is planned again with less memory, and up to which multiple
of the best objective arrangements are kept."""
MOST_OPS = 1_500_000
"""Plans with more ops are not simulated."""


def plan_by(
    name: str,
    spec: ModelSpec,
    base: Setup,
    *,
    gpus: int,
    global_batch: int,
    recompute: str = "auto",
    fixed: Mapping[str, int] | None = None,
    budget_s: float = 30.0,
) -> SystemPlan:
    """Return the plan of a published system for a cluster: the best one by its own formula that fits by simulation.

    `recompute` none, selective or full holds for every stage; auto takes the first of them with which a plan fits. Mist
    chooses the recomputed layers itself. Raises DoesNotFitError if nothing fits.
    """
    if name not in PLANNERS:
        raise OctoPipeError(f"{name[:40]!r} does not plan clusters; choose one of {', '.join(PLANNERS)}")
    began = time.monotonic()
    modes = ("none", "selective", "full") if recompute == "auto" else (recompute,)
    if name == "mist" and recompute in ("auto", "full"):
        modes = ("none",)  # it recomputes whole layers by itself
    pricer = MeshPricer(spec, base)
    for mode in modes:
        query = query_of(pricer, gpus, global_batch, mode, fixed)
        found = _best(PLANNERS[name], query, pricer, began + budget_s)
        if found is not None:
            return found
    raise DoesNotFitError(
        f"{name}: no arrangement of {spec.name} on {gpus} GPUs fits as it was published ({_limits(name)}); "
        "take more GPUs, a smaller reserve, or another system"
    )


def _limits(name: str) -> str:
    return {
        "alpa": "tensor and data parallel submeshes, optimizer state divided",
        "dapple": "replicated stages without tensor parallelism and ZeRO; --tp and --zero enable them",
        "metis": "groups of GPUs without ZeRO; --zero enables it",
        "mist": "everything offloaded and recomputed",
    }[name]


def _best(planner: Planner, query: Query, pricer: MeshPricer, until: float) -> SystemPlan | None:
    """Return the arrangement with the smallest objective over all micro-batch sizes that fits by simulation; None if
    there is none."""
    found: list[Arrangement] = []
    worth = math.inf
    for samples in query.sample_counts():
        if found and time.monotonic() > until:
            break
        # Slightly worse arrangements are kept too, because the best one by formula may not fit by simulation.
        arrangement = planner(query, pricer, samples, 0.0, NEAR * worth)
        if arrangement is not None:
            found.append(arrangement)
            worth = min(worth, arrangement.objective_ms)
    for arrangement in sorted(found, key=lambda a: a.objective_ms):
        reserve = 0.0
        now: Arrangement | None = arrangement
        for _ in range(TRIES):
            if now is None or 2 * len(now.stages) * now.micro_batches > MOST_OPS:
                break
            plan = judged(pricer, on_real_devices(now))
            if plan.fits:
                return plan
            reserve += max(0.005, limit_excess(plan) * 1.1)
            now = planner(query, pricer, arrangement.samples, min(reserve, 0.5), math.inf)
    return None


__all__ = ["PLANNERS", "Arrangement", "SystemPlan", "plan_by"]

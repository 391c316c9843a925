"""Alpa on a whole cluster: every stage gets a submesh of its own size and the best intra-operator plan for it.

Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning", OSDI 2022.
Rule: minimise T = sum_s t_s + (m-1) max_s t_s, t_s the forward and backward of a stage on its submesh; submeshes are
powers of two inside a node or whole nodes, and together they are the cluster. For every t_max a dynamic programme
finds the least sum; transfers between stages are ignored.
Simplified: the intra-operator plan is the best of the tensor, data and expert parallel ways to use the submesh, with
optimizer state divided over its replicas (Alpa's integer programme cuts every operator on its own); layers are joined
to at most 33 runs of even work (its operator clustering); t_max grows by steps of 1 %.
"""

from __future__ import annotations

from collections.abc import Iterator

from octopipe.search.planner.published.arrangement import Arrangement, StageChoice
from octopipe.search.planner.published.meshes import Mesh, MeshPricer
from octopipe.search.planner.published.query import Query
from octopipe.search.planner.published.submeshes import Space, least


def alpa(query: Query, pricer: MeshPricer, samples: int, reserve: float, worth_ms: float) -> Arrangement | None:
    """The arrangement with the smallest T for micro-batches of `samples`; None if none fits and is below `worth_ms`."""
    m = query.global_batch // samples
    space = Space(
        devices=query.devices,
        unit=query.unit,
        edges=query.edges,
        micro_batches=m,
        meshes=lambda start, gpus: intra_operator_meshes(query, pricer, gpus, samples),
        with_hops=False,
        reserve=reserve,
    )
    return least("alpa", space, pricer, lambda stages: alpa_ms(pricer, stages, m), samples, worth_ms)


def alpa_ms(pricer: MeshPricer, stages: list[StageChoice], micro_batches: int) -> float:
    """The value of T for an arrangement."""
    times = [float(pricer.price(s.mesh).layer_ms[s.first : s.stop].sum()) for s in stages]
    return sum(times) + (micro_batches - 1) * max(times)


def intra_operator_meshes(query: Query, pricer: MeshPricer, gpus: int, samples: int) -> Iterator[Mesh]:
    """Tensor times data parallelism over a submesh, with and without expert parallelism."""
    kind = query.assumed
    zero = 1 if query.zero is None else query.zero
    for tp in query.tensor_sizes(pricer, gpus):
        dp = gpus // tp
        if samples % dp:
            continue
        for ep in pricer.expert_sizes(gpus):
            yield Mesh(
                kinds=(kind,) * dp, shares=(samples // dp,) * dp, tp=tp, ep=ep, zero=zero, recompute=query.recompute
            )

"""DAPPLE on a whole cluster: data-parallel replicas per stage, so that a heavy stage takes more GPUs.

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP 2021.
Rule: stages and their replicas by dynamic programming over (layers, devices) with transfers as stages of their own;
finalists are ranked by L = Tw + Ts + Te around the pivot stage (`systems/dapple.py`), gradient all-reduce included.
The replicas of a stage split every micro-batch evenly. 1F1B with at most p-i micro-batches in flight on stage i.
Simplified: no placement policies (stages lie on consecutive GPUs); of partitions with the same slowest part the
programme keeps the one of least total. DAPPLE has neither tensor parallelism nor ZeRO; `--tp` and `--zero` grant them.
"""

from __future__ import annotations

from itertools import pairwise

from octopipe.search.planner.published.arrangement import Arrangement, StageChoice, hop_ms
from octopipe.search.planner.published.meshes import Mesh, MeshPricer
from octopipe.search.planner.published.query import Query
from octopipe.search.planner.published.submeshes import Space, least
from octopipe.search.systems.dapple import latency_ms


def dapple(query: Query, pricer: MeshPricer, samples: int, reserve: float, worth_ms: float) -> Arrangement | None:
    """The arrangement with the smallest L for micro-batches of `samples`; None if none fits and is below `worth_ms`."""
    m = query.global_batch // samples

    def meshes(start: int, gpus: int) -> list[Mesh]:
        tp = query.tp or 1
        if gpus % tp or samples % (gpus // tp):
            return []
        dp = gpus // tp
        return [
            Mesh(
                kinds=(query.assumed,) * dp,
                shares=(samples // dp,) * dp,
                tp=tp,
                ep=ep,
                zero=query.zero or 0,
                recompute=query.recompute,
            )
            for ep in pricer.expert_sizes(gpus)
        ]

    space = Space(
        devices=query.devices,
        unit=query.unit,
        edges=query.edges,
        micro_batches=m,
        meshes=meshes,
        with_hops=True,
        reserve=reserve,
    )
    return least("dapple", space, pricer, lambda stages: dapple_ms(query, pricer, stages, m), samples, worth_ms)


def dapple_ms(query: Query, pricer: MeshPricer, stages: list[StageChoice], micro_batches: int) -> float:
    """The value of L for an arrangement."""
    prices = [pricer.price(s.mesh) for s in stages]
    forward = [float(p.forward_ms[s.first : s.stop].sum()) for p, s in zip(prices, stages, strict=True)]
    backward = [float((p.input_ms + p.weight_ms)[s.first : s.stop].sum()) for p, s in zip(prices, stages, strict=True)]
    reduce = [float(p.reduction_ms[s.first : s.stop].sum()) for p, s in zip(prices, stages, strict=True)]
    hops = [hop_ms(pricer, query.devices, a, b) / 2 for a, b in pairwise(stages)]
    return latency_ms(forward, backward, micro_batches, hops, reduce)

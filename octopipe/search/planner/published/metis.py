"""Metis on a whole cluster: groups of unequal GPUs per stage, and data shares by their speed.

Um et al., "Metis: Fast Automatic Distributed Training on Heterogeneous GPUs", ATC 2024.
Rule: minimise (m-1) max t + sum t + transfers + slowest gradient all-reduce + slowest optimizer update over the order
of GPU kinds along the pipeline, the group of GPUs of every stage, its tensor and data parallelism, and the layers.
A group of several kinds gives each replica samples in proportion to its speed (data balancing); stages of slower
groups get fewer layers (layer balancing).
Simplified: group sizes are those of `submeshes.py`; layers by an exact programme per bound instead of filling by shares
and repairing. Metis has no ZeRO (`--zero` grants it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise, permutations

from octopipe.search.planner.published.arrangement import Arrangement, StageChoice, hop_ms
from octopipe.search.planner.published.meshes import Devices, Mesh, MeshPricer
from octopipe.search.planner.published.query import Query
from octopipe.search.planner.published.submeshes import Space, least

MOST_TYPES = 3
"""With more kinds of GPU, only the cluster's own order of the kinds and its reverse are tried."""


def metis(query: Query, pricer: MeshPricer, samples: int, reserve: float, worth_ms: float) -> Arrangement | None:
    """The arrangement with the smallest cost for micro-batches of `samples`; None if none fits and is below
    `worth_ms`."""
    m = query.global_batch // samples
    best: Arrangement | None = None
    for devices in orders(query.devices):
        space = Space(
            devices=devices,
            unit=query.unit,
            edges=query.edges,
            micro_batches=m,
            meshes=partial(group_meshes, query, pricer, devices, samples),
            with_hops=True,
            reserve=reserve,
        )
        found = least("metis", space, pricer, partial(metis_ms, devices, pricer, m), samples, worth_ms)
        if found is not None:
            worth_ms, best = found.objective_ms, found
    return best


def orders(devices: Devices) -> Iterator[Devices]:
    """Yield the GPUs in every order of their kinds along the pipeline, the cluster's own order first."""
    types = devices.types
    seen = [devices]
    yield devices
    if len(types) <= MOST_TYPES:
        every = list(permutations(types))
    else:
        every = [types, types[::-1]]
    for order in every:
        found = devices.grouped(order)
        if found not in seen:
            seen.append(found)
            yield found


def group_meshes(
    query: Query, pricer: MeshPricer, devices: Devices, samples: int, start: int, gpus: int
) -> Iterator[Mesh]:
    """Yield the meshes of a group of GPUs: equal GPUs get equal shares of the samples, unequal ones shares by speed."""
    kinds = devices.kinds[start : start + gpus]
    zero = query.zero or 0
    for tp in query.tensor_sizes(pricer, gpus):
        replicas = kinds[::tp]
        whole = all(len(set(kinds[i : i + tp])) == 1 for i in range(0, gpus, tp))
        if not whole or len(replicas) > samples:
            continue
        for ep in pricer.expert_sizes(gpus) if len(set(kinds)) == 1 else [1]:
            mesh = Mesh(kinds=replicas, shares=(1,) * len(replicas), tp=tp, ep=ep, zero=zero, recompute=query.recompute)
            if len(set(kinds)) == 1:
                if samples % len(replicas):
                    continue
                yield replace(mesh, shares=(samples // len(replicas),) * len(replicas))
            else:
                shares = balanced(pricer, mesh, samples)
                if shares is not None:
                    yield replace(mesh, shares=shares)


def balanced(pricer: MeshPricer, mesh: Mesh, samples: int) -> tuple[int, ...] | None:
    """Return the samples per replica that minimise the time of the slowest one; None if there is no division.

    Replicas of one kind take equal shares, so there is one number per kind; all combinations are tried.
    """
    counts = {kind: mesh.kinds.count(kind) for kind in dict.fromkeys(mesh.kinds)}
    times: dict[tuple[str, int], float] = {}

    def took(kind: str, share: int) -> float:
        if (kind, share) not in times:
            one = Mesh(kinds=(kind,), shares=(share,), tp=mesh.tp, zero=0, recompute=mesh.recompute)
            times[kind, share] = float(pricer.price(one).layer_ms.sum())
        return times[kind, share]

    best: tuple[float, dict[str, int]] | None = None
    for shares in _shares(tuple(counts.values()), samples):
        named = dict(zip(counts, shares, strict=True))
        slowest = max(took(kind, share) for kind, share in named.items())
        if best is None or slowest < best[0]:
            best = slowest, named
    return None if best is None else tuple(best[1][kind] for kind in mesh.kinds)


def _shares(counts: tuple[int, ...], samples: int) -> Iterator[tuple[int, ...]]:
    """Yield all samples per replica of every kind, at least one each, that add up to `samples`. `counts` are the
    numbers of replicas of every kind."""
    if len(counts) == 1:
        if samples % counts[0] == 0 and samples >= counts[0]:
            yield (samples // counts[0],)
        return
    for share in range(1, math.floor(samples / counts[0]) + 1):
        for rest in _shares(counts[1:], samples - share * counts[0]):
            yield (share, *rest)


def metis_ms(devices: Devices, pricer: MeshPricer, micro_batches: int, stages: list[StageChoice]) -> float:
    """The cost of an arrangement."""
    prices = [pricer.price(s.mesh) for s in stages]
    times = [float(p.layer_ms[s.first : s.stop].sum()) for p, s in zip(prices, stages, strict=True)]
    hops = sum(hop_ms(pricer, devices, a, b) for a, b in pairwise(stages))
    reduce = max(float(p.reduction_ms[s.first : s.stop].sum()) for p, s in zip(prices, stages, strict=True))
    update = max(float(p.optimizer_ms[s.first : s.stop].sum()) for p, s in zip(prices, stages, strict=True))
    return (micro_batches - 1) * max(times) + sum(times) + hops + reduce + update

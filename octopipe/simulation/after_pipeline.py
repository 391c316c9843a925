"""What follows the pipeline in a step: the reductions of gradients, and the optimizer.

Knows: which ranks sum the gradients of a layer (its copies, tied weights, weights that layers share, data-parallel
replicas), when they can begin, and how long they take. Does not know: ops, transfers or memory (`simulator.py`).

A rank's reductions run one after the other, each as soon as its gradients are complete; its optimizer follows the last
of them. A layer that several stages of a rank hold is reduced and updated once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from octopipe.costs.cluster.hardware import Link
from octopipe.costs.table import CostTable
from octopipe.plans.plan import B, Plan, W
from octopipe.plans.price import first_held, part_of
from octopipe.simulation.timeline import Extra, Spans

Floats = NDArray[np.float64]


def all_reduce_ms(nbytes: float, members: int, link: Link) -> float:
    """Ring all-reduce: every byte crosses the link 2(n-1)/n times; latency grows with the tree depth."""
    if members <= 1 or nbytes <= 0:
        return 0.0
    return 2 * math.ceil(math.log2(members)) * link.latency_ms + 2 * (members - 1) / members * nbytes * link.ms_per_byte


def _tied_holders(plan: Plan, costs: CostTable) -> tuple[int, ...]:
    """Return the ranks that hold weights shared by a tied head and the embedding, whose gradients must be summed.
    Shards of a cut head do not count: every rank holds other rows, and each row exists once."""
    if not costs.tied_bytes:
        return ()
    ends = [s for s in plan.stages if s.shard is None and (s.first == 0 or s.stop == plan.num_layers > s.first)]
    return tuple(sorted({s.rank for s in ends}))


def _shared_sums(plan: Plan, costs: CostTable, done: Floats) -> dict[int, list[tuple[float, float]]]:
    """Return, per rank, when the gradients of weights that layers on several ranks share are complete, and how long
    their all-reduce takes, both in milliseconds."""
    out: dict[int, list[tuple[float, float]]] = {}
    for layers, held in () if costs.graph is None else costs.graph.shared:
        # Every rank holds other rows of a cut head.
        whole = [(s, stage) for s, stage in enumerate(plan.stages) if stage.shard is None]
        mine = [s for s, stage in whole if any(stage.first <= k < stage.stop for k in layers)]
        ranks = sorted({plan.stages[s].rank for s in mine})
        ready = float(max((done[s] for s in mine), default=0.0))
        part = [costs.gradient_bytes[k] / costs.static_bytes[k] for k in layers if costs.static_bytes[k] > 0]
        nbytes = float(held * min(part, default=0.0))
        for rank in ranks if len(ranks) > 1 else ():
            link = costs.sum_link(rank, next(r for r in ranks if r != rank))
            took = all_reduce_ms(nbytes, len(ranks), link)
            if took > 0:
                out.setdefault(rank, []).append((ready, took))
    return out


def _by_holders(
    layers: NDArray[np.int64], replicas: Mapping[int, tuple[int, ...]]
) -> list[tuple[tuple[int, ...], NDArray[np.int64]]]:
    """Return the layers that several ranks hold, grouped by these ranks."""
    found: dict[tuple[int, ...], list[int]] = {}
    for layer in layers.tolist() if replicas else ():
        if layer in replicas:
            found.setdefault(replicas[layer], []).append(layer)
    return [(holders, np.array(some)) for holders, some in found.items()]


def after_pipeline(plan: Plan, costs: CostTable, spans: Spans) -> tuple[Extra, ...]:
    """Return the reductions of gradients, each of which starts when its last weight gradient is complete and the rank's
    reduction before it has ended, and then the optimizer of every rank."""
    done = np.zeros(len(plan.stages))
    weights = (spans.kind == W) | (spans.kind == B)
    np.maximum.at(done, spans.stage[weights], spans.end_ms[weights])
    replicas = plan.replicas()
    # A layer of several stages is complete when all of them are; sorting by that gives every holder the same order.
    ready_at = done.copy()
    first, stop = (np.array([getattr(stage, name) for stage in plan.stages]) for name in ("first", "stop"))
    for s, stage in enumerate(plan.stages if len(plan.routes) > 1 else ()):
        if stage.shard is None and stage.first < stage.stop:
            ready_at[s] = done[(first < stage.stop) & (stage.first < stop)].max()
    held: list[list[int]] = [[] for _ in range(plan.num_ranks)]
    for s, stage in enumerate(plan.stages):
        held[stage.rank].append(s)
    tied, tied_ready = _tied_holders(plan, costs), 0.0
    if len(tied) > 1:
        tied_ready = float(max(done[s] for s, x in enumerate(plan.stages) if x.first == 0 or x.stop == plan.num_layers))
    shared = _shared_sums(plan, costs, done)
    extras = []
    for rank in range(plan.num_ranks):
        clock = update = 0.0
        mine = sorted(held[rank], key=lambda s: (ready_at[s], plan.stages[s].first))
        # By the order of the stages, not of their times: a stage's reduction is as long whatever ops take.
        counted = dict(zip(held[rank], first_held(plan, held[rank]), strict=True))
        for s in mine:
            stage, layers = plan.stages[s], counted[s]
            took = 0.0
            for holders, some in _by_holders(layers, {} if stage.shard is not None else replicas):
                other = next(h for h in holders if h != rank)
                nbytes = float(costs.gradient_bytes[some].sum()) * part_of(stage)
                took += all_reduce_ms(nbytes, len(holders), costs.sum_link(rank, other))
            nbytes = float(costs.gradient_bytes[layers].sum()) * part_of(stage)
            took += all_reduce_ms(nbytes, costs.data_parallel, costs.reduction)
            update += float(costs.optimizer_ms[layers].sum()) * part_of(stage)
            if took > 0:
                begin = max(clock, ready_at[s])
                clock = begin + took
                extras.append(Extra(f"reduce stage {s}", rank, begin, clock))
        if rank in tied and len(tied) > 1:
            nbytes = float(min(costs.gradient_bytes[0], costs.gradient_bytes[-1]))
            took = all_reduce_ms(nbytes, len(tied), costs.sum_link(rank, next(r for r in tied if r != rank)))
            if took > 0:
                begin = max(clock, tied_ready)
                clock = begin + took
                extras.append(Extra("reduce tied weights", rank, begin, clock))
        for ready, took in shared.get(rank, ()):
            begin = max(clock, ready)
            clock = begin + took
            extras.append(Extra("reduce shared weights", rank, begin, clock))
        if update > 0:
            begin = max([clock, *(float(done[s]) for s in mine)])
            extras.append(Extra("optimizer", rank, begin, begin + update * costs.slowdown(rank)))
    return tuple(extras)

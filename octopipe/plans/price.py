"""Costs of the stages of a plan: op times, sizes and times of transfers, memory held by a stage.

Knows: how layer costs add up over a stage, and the effects of rank speed, micro-batch size, recomputation and shards.
Does not know: when anything happens, or what two ops cost together (`pair_price`). Lowering, simulation and the tuner
all take their costs from here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from octopipe.base.errors import OctoPipeError
from octopipe.costs.shard_times import parts_of
from octopipe.costs.table import CostTable
from octopipe.plans.paths import neighbours
from octopipe.plans.plan import KINDS, Plan, Stage, route_neighbours

Array = NDArray[np.float64]
Priced = TypeVar("Priced", Array, tuple[Array, Array], "StageMemory")


class StageMemory(NamedTuple):
    """Bytes per stage and micro-batch, each an array [stages, micro_batches]."""

    after_forward: Array
    """Held from F on if the stage recomputes or offloads; otherwise equal to `activation`."""
    activation: Array
    """Held from F (or R) until I."""
    stash: Array
    """The part of the activation that is held until W."""


_CACHE: ContextVar[dict[str, tuple[tuple[Any, ...], Any]] | None] = ContextVar("cached prices", default=None)


@contextlib.contextmanager
def prices_cached() -> Iterator[None]:
    """Cache the prices of the last stages while this context is active, for searches that change only orders.

    Cached objects are compared by identity, so nothing that is priced may be modified in place meanwhile.
    """
    token = _CACHE.set({})
    try:
        yield
    finally:
        _CACHE.reset(token)


def _cached(price: Callable[[Plan, CostTable], Priced]) -> Callable[[Plan, CostTable], Priced]:
    @functools.wraps(price)
    def priced(plan: Plan, costs: CostTable) -> Priced:
        cache = _CACHE.get()
        if cache is None:
            return price(plan, costs)
        inputs = (costs, plan.stages, plan.routes, plan.edges, plan.route_of_micro_batch, plan.num_micro_batches)
        entry = cache.get(price.__name__)
        if entry is None or any(a is not b for a, b in zip(entry[0], inputs, strict=True)):
            prices = price(plan, costs)
            for array in prices if isinstance(prices, tuple) else (prices,):
                array.flags.writeable = False
            entry = cache[price.__name__] = inputs, prices
        return cast(Priced, entry[1])

    return priced


def match(plan: Plan, costs: CostTable) -> None:
    """Raise an error unless the costs cover the plan's layers, ranks and micro-batches, and its offloading if any."""
    if plan.num_layers != costs.num_layers:
        raise OctoPipeError(
            f"the plan has {plan.num_layers} layers, {costs.model} has {costs.num_layers}; use the plan's own model"
        )
    if costs.rank_slowdown and len(costs.rank_slowdown) < plan.num_ranks:
        raise OctoPipeError(f"{len(costs.rank_slowdown)} rank speeds for {plan.num_ranks} ranks; give one per rank")
    if len(costs.rank_memory_bytes) > 1 and len(costs.rank_memory_bytes) < plan.num_ranks:
        raise OctoPipeError(
            f"{len(costs.rank_memory_bytes)} memory sizes for {plan.num_ranks} ranks; give one per rank"
        )
    if plan.offloads and costs.host_link is None:
        raise OctoPipeError(
            "the plan offloads activations, and the link to host memory is not known; give --host-gb-per-s "
            "(host_gb_per_s), or costs with a host_link"
        )
    factor = costs.micro_batch_factor
    if factor is not None and factor.shape[0] < plan.num_micro_batches:
        raise OctoPipeError(
            f"sizes of {factor.shape[0]} micro-batches for {plan.num_micro_batches} micro-batches; give one each"
        )


def _per_micro_batch(plan: Plan, costs: CostTable, values: Array, select: list[NDArray[np.int64]]) -> Array:
    """Sum of `values` over each stage's selected layers for every micro-batch: [stages, micro_batches]."""
    factor = costs.handed_factor if values is costs.boundary_bytes else costs.micro_batch_factor
    out = np.empty((len(select), plan.num_micro_batches))
    for s, layers in enumerate(select):
        if factor is None:
            out[s] = values[layers].sum()
        else:
            out[s] = factor[: plan.num_micro_batches, layers] @ values[layers]
    return out


def _layers(stage: Stage) -> NDArray[np.int64]:
    return np.arange(stage.first, stage.stop)


def part_of(stage: Stage) -> float:
    """Return the share of its layers' work, activations and weights that a stage has (1, or 1/n for a shard)."""
    return 1.0 if stage.shard is None else 1.0 / stage.shard[1]


def _parts(plan: Plan) -> Array | float:
    """Return `part_of` all stages as a column, or 1 if no stage is a shard."""
    if all(s.shard is None for s in plan.stages):
        return 1.0
    return np.array([part_of(s) for s in plan.stages])[:, None]


def time_parts(stage: Stage, costs: CostTable, kind: str) -> Array:
    """Return, for each layer of a stage, the share of the layer's time that an op takes: 1, or for a shard the measured
    share, or 1/n if none was measured."""
    layers = range(stage.first, stage.stop)
    if stage.shard is None:
        return np.ones(len(layers))
    count = stage.shard[1]
    f, i, w = np.array([parts_of(costs.shard_times, k, count) for k in layers]).T
    if kind != "B":
        return cast(Array, {"F": f, "R": f, "I": i, "W": w}[kind])
    input_ms, weight_ms = costs.input_ms[stage.first : stage.stop], costs.weight_ms[stage.first : stage.stop]
    both = input_ms + weight_ms
    return np.where(both > 0, (i * input_ms + w * weight_ms) / np.where(both > 0, both, 1.0), 1.0 / count)


@_cached
def stage_times(plan: Plan, costs: CostTable) -> Array:
    """Time of every op as [kind, stage, micro_batch], including the speed of the stage's rank."""
    whole = [_layers(s) for s in plan.stages]
    again = [np.asarray(s.recomputed_layers, dtype=np.int64) for s in plan.stages]
    speed = np.array([costs.slowdown(s.rank) for s in plan.stages])[:, None]
    measured = [s for s, stage in enumerate(plan.stages) if costs.shard_times and stage.shard is not None]
    out = np.empty((len(KINDS), len(plan.stages), plan.num_micro_batches))
    for code, kind in enumerate(KINDS):
        chosen, times = again if kind == "R" else whole, costs.layer_times(kind)
        out[code] = speed * _parts(plan) * _per_micro_batch(plan, costs, times, chosen)
        for s in measured:  # layers of a shard may have different shares
            own, stage = times.copy(), plan.stages[s]
            own[stage.first : stage.stop] *= time_parts(stage, costs, kind)
            out[code, s] = speed[s] * _per_micro_batch(plan, costs, own, chosen[s : s + 1])[0]
    return out


PARTIAL_BYTES = 8.0
"""Bytes that a shard of the head sends per token: log-sum-exp of its logits and the target's logit, 32 bits each."""


@_cached
def boundary_bytes(plan: Plan, costs: CostTable) -> tuple[Array, Array]:
    """Bytes of each stage's output and of its input gradient, in a chain: two arrays [stages, micro_batches].

    A shard of a head sends partial sums of the softmax instead of the layer's output.
    """
    heads = plan.cut_heads
    last = [np.array([s.stop - 1]) for s in plan.stages]
    before = [np.array([s.first - 1] if s.first > 0 else [], dtype=np.int64) for s in plan.stages]
    out = _per_micro_batch(plan, costs, costs.boundary_bytes, last)
    for s, stage in enumerate(plan.stages):
        if stage.shard is not None and stage.stop - 1 in heads:
            tokens = np.full(plan.num_layers, PARTIAL_BYTES * (costs.tokens_per_micro_batch or 0))
            out[s] = _per_micro_batch(plan, costs, tokens, [last[s]])[0]
    return out, _per_micro_batch(plan, costs, costs.boundary_bytes, before)


@_cached
def hop_times(plan: Plan, costs: CostTable) -> tuple[Array, Array]:
    """Transfer time of each stage's output to the next stage's rank, and of its input gradient back.

    Zero if the neighbour is on the same rank or does not exist: two arrays [stages, micro_batches].
    """
    out_bytes, gradient_bytes = boundary_bytes(plan, costs)
    before, after = route_neighbours(plan)
    forward, gradient = np.zeros_like(out_bytes), np.zeros_like(out_bytes)
    ranks = [s.rank for s in plan.stages]
    route = np.asarray(plan.route_of_micro_batch)
    for r in range(len(plan.routes)):
        mine = np.flatnonzero(route == r)
        for s in plan.routes[r]:
            for neighbour, nbytes, out in ((after[r, s], out_bytes, forward), (before[r, s], gradient_bytes, gradient)):
                if neighbour >= 0 and ranks[neighbour] != ranks[s]:
                    link = costs.network.link(ranks[s], ranks[neighbour])
                    out[s, mine] = link.latency_ms + nbytes[s, mine] * link.ms_per_byte
    return forward, gradient


@_cached
def stage_memory(plan: Plan, costs: CostTable) -> StageMemory:
    """Bytes every stage holds per micro-batch, with and without recomputation.

    A recomputed run of layers keeps the input of its first layer; any other layer keeps its activation. A stage that
    offloads keeps its input on the device, in the buffer in which it was received.
    """
    whole = [_layers(s) for s in plan.stages]
    parts = _parts(plan)
    activation = _per_micro_batch(plan, costs, costs.activation_bytes, whole) * parts
    stash = _per_micro_batch(plan, costs, costs.stash_bytes, whole) * parts
    kept = activation.copy()
    received = _received_bytes(plan, costs) if any(s.recompute or s.offload for s in plan.stages) else kept
    for s, stage in enumerate(plan.stages):
        again = set(range(stage.first, stage.stop)) if stage.offload else set(stage.recomputed_layers)
        if not again:
            continue
        stays = np.array([k for k in range(stage.first, stage.stop) if k not in again], dtype=np.int64)
        inputs = np.array([k - 1 for k in sorted(again) if k - 1 not in again and k > stage.first], dtype=np.int64)
        kept[s] = (
            part_of(stage) * _per_micro_batch(plan, costs, costs.activation_bytes, [stays])[0]
            + _per_micro_batch(plan, costs, costs.boundary_bytes, [inputs])[0]
        )
        if stage.first in again:
            kept[s] += received[s]
    return StageMemory(np.minimum(kept, activation), activation, stash)


def _received_bytes(plan: Plan, costs: CostTable) -> Array:
    """Return the bytes that each stage receives from other stages per micro-batch: the outputs of all stages before it
    on the path, and those of shards of one layer only once, because they are added up."""
    sizes, in_chain = boundary_bytes(plan, costs)
    if not plan.edges:
        return in_chain
    before, _ = neighbours(plan.routes, plan.edges, len(plan.stages))
    every = np.arange(plan.num_micro_batches)
    out = np.zeros(sizes.shape)
    for number in range(len(plan.routes)):
        mine = every[np.asarray(plan.route_of_micro_batch) == number]
        for s in plan.routes[number]:
            into = [int(a) for a in before[number, s] if a >= 0]
            if plan.adds_up(s, into):
                into = into[:1]
            out[s, mine] = sizes[np.ix_(into, mine)].sum(axis=0)
    return out


def offload_bytes(plan: Plan, costs: CostTable) -> Array:
    """Return the bytes that each stage moves to host memory, and back, per micro-batch; zero if it does not offload."""
    memory = stage_memory(plan, costs)
    return np.where(np.array([s.offload for s in plan.stages])[:, None], memory.activation - memory.after_forward, 0.0)


def first_held(plan: Plan, stages: Iterable[int]) -> list[NDArray[np.int64]]:
    """Return, for each of these stages, those of its layers that no stage before it in this sequence holds on the same
    rank: a rank has a layer's weights once, however many of its stages run the layer."""
    held: dict[tuple[int, tuple[int, int] | None], NDArray[np.bool_]] = {}
    out = []
    for s in stages:
        stage, layers = plan.stages[s], _layers(plan.stages[s])
        known = held.setdefault((stage.rank, stage.shard), np.zeros(plan.num_layers, bool))
        out.append(layers[~known[layers]])
        known[layers] = True
    return out


def static_bytes(plan: Plan, costs: CostTable) -> Array:
    """Return the bytes of weights, gradients and optimizer state per rank.

    A replicated stage counts on each of its ranks, and a layer that several stages of a rank hold counts once. Weights
    that layers share (a tied head and the embedding) count once on a rank that holds several of these layers.
    """
    out = np.zeros(plan.num_ranks)
    for stage, layers in zip(plan.stages, first_held(plan, range(len(plan.stages))), strict=True):
        out[stage.rank] += costs.static_bytes[layers].sum() * part_of(stage)
    if costs.tied_bytes:
        # A part of the embedding and the same part of the head are one tensor, as the whole ones are.
        first, last = (
            {(s.rank, s.shard or (0, 1)) for s in plan.stages if k in range(s.first, s.stop)}
            for k in (0, plan.num_layers - 1)
        )
        for rank, (_, parts) in first & last:
            out[rank] -= costs.tied_bytes / parts
    if costs.graph is not None and costs.graph.shared:
        for rank in range(plan.num_ranks):
            held: dict[tuple[int, int], set[int]] = {}
            for s in plan.stages:
                if s.rank == rank:  # the same parts of two layers are one tensor, as whole ones are
                    held.setdefault(s.shard or (0, 1), set()).update(range(s.first, s.stop))
            out[rank] -= sum(costs.graph.weights_held_twice(some) / parts for (_, parts), some in held.items())
    return out


def workspace_bytes(plan: Plan, costs: CostTable) -> Array:
    """Return the additional bytes while an op of each stage runs: those of its layer that needs most."""
    return np.array([costs.workspace_bytes[s.first : s.stop].max(initial=0.0) * part_of(s) for s in plan.stages])

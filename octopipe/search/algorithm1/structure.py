"""Stages of a chain, and how an order is adapted when the stages change.

Knows: how stages result from layers and their ranks, and how an order is carried over to other stages by the times at
which the layers ran. Does not know: which change is an improvement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from octopipe.plans.plan import B, F, I, Stage, W
from octopipe.search.algorithm1.candidate import Evaluator, State, TooSlow, recomputing
from octopipe.search.algorithm1.prices import Floats

Keys = tuple[float, float, float, float, float]


def recomputed(stages: Sequence[Stage]) -> set[int]:
    """Return the layers that are recomputed; a layer keeps this property when it moves to another stage."""
    return {layer for s in stages for layer in s.recomputed_layers}


def stages_of(bounds: Sequence[int], ranks: Sequence[int], again: set[int]) -> tuple[Stage, ...]:
    """Return the stages between these bounds; they recompute the layers in `again`."""
    out = []
    for (first, stop), rank in zip(pairwise(bounds), ranks, strict=True):
        some = tuple(layer for layer in range(first, stop) if layer in again)
        which = some if 0 < len(some) < stop - first else bool(some)
        out.append(Stage(first=first, stop=stop, rank=rank, recompute=which))
    return tuple(out)


def homes_of(stages: Sequence[Stage]) -> list[int]:
    """The rank of every layer of a chain."""
    return [s.rank for s in stages for _ in range(s.first, s.stop)]


def stages_on(homes: Sequence[int], again: set[int], cuts: set[int] | None = None) -> tuple[Stage, ...]:
    """Return one stage for each run of consecutive layers on the same rank; runs are also cut at `cuts`."""
    bounds = [0] + [k for k in range(1, len(homes)) if homes[k] != homes[k - 1] or (cuts and k in cuts)] + [len(homes)]
    return stages_of(bounds, [homes[k] for k in bounds[:-1]], again)


def layer_times(evaluator: Evaluator, st: State, starts: Floats) -> Floats:
    """Return the start times of every layer's F, I and W within the ops: [F, I or W, layer, micro_batch]. W of all
    layers of a stage start together."""
    at = np.zeros((3, evaluator.costs.num_layers, evaluator.num_micro_batches))
    stage, kind, batch = st.ops.T
    first, stop = np.array([s.first for s in st.stages]), np.array([s.stop for s in st.stages])
    begins = np.zeros((5, len(st.stages), evaluator.num_micro_batches))
    begins[kind, stage, batch] = starts
    fused = np.zeros(len(st.stages), bool)
    fused[stage[kind == B]] = True
    begins[I] = np.where(fused[:, None], begins[B], begins[I])
    begins[W] = np.where(fused[:, None], begins[B] + st.prices.ms[I], begins[W])
    of = np.repeat(np.arange(len(st.stages)), stop - first)
    layers = np.arange(evaluator.costs.num_layers)
    slow = evaluator.slow[st.prices.rank[of]][:, None]
    at[0] = begins[F][of] + slow * (evaluator.sums[0][:, layers] - evaluator.sums[0][:, first[of]]).T
    at[1] = begins[I][of] + slow * (evaluator.sums[1][:, stop[of]] - evaluator.sums[1][:, layers + 1]).T
    at[2] = begins[W][of]
    return at


def retimed(evaluator: Evaluator, st: State, at: Floats, stages: tuple[Stage, ...]) -> tuple[State, Floats]:
    """The order carried over to other stages, and its keys [F or I, stage, micro_batch].

    `at` are the times at which the layers ran in the old order (from layer_times). An F of a new stage is placed at the
    time of its first layer, an I at that of its last layer, and a W at the latest time of its layers. Every op comes
    later than all ops it depends on, so the new order cannot deadlock.
    """
    most = evaluator.num_micro_batches
    first, last = [s.first for s in stages], [s.stop - 1 for s in stages]
    weights = np.maximum.reduceat(at[2], first, axis=0)
    forward, inward = at[0, first], at[1, last]
    # Sort all ops by rank, then time; equal times are sorted in the order of the chain.
    n = len(stages)
    stage, batch = (x.ravel() for x in np.meshgrid(np.arange(n), np.arange(most), indexing="ij"))
    rank = np.array([s.rank for s in stages])
    parts = []
    for code, depth, time in ((F, stage, forward), (I, 2 * n - stage, inward), (W, 3 * n + stage, weights)):
        parts.append(np.stack([rank[stage], time.ravel(), depth, stage, np.full(stage.size, code), batch]))
    table = np.concatenate(parts, axis=1)
    table = table[:, np.lexsort((table[2], table[1], table[0]))]
    offsets = np.searchsorted(table[0], np.arange(evaluator.num_ranks + 1)).astype(np.int32)
    ops = np.ascontiguousarray(table[3:].T.astype(np.int32))
    routes = (tuple(range(n)),)
    new = State(
        stages=stages, routes=routes, route_of=st.route_of, ops=ops, offsets=offsets,
        prices=evaluator.price(stages, routes, st.route_of),
    )  # fmt: skip
    return recomputing(new), np.stack([forward, inward])


def keys_of(st: State, starts: Floats) -> Floats:
    """The start times of a chain's F and I, as keys for the list scheduler."""
    keys = np.zeros((2, len(st.stages), len(st.route_of)))
    stage, kind, batch = st.ops.T
    for row, kinds in ((0, (F,)), (1, (I, B))):
        mine = np.isin(kind, kinds)
        keys[row, stage[mine], batch[mine]] = starts[mine]
    return keys


def rule_keys(evaluator: Evaluator, stages: Sequence[Stage]) -> Iterator[Floats]:
    """Yield keys of simple rules, which weigh the number of a micro-batch against the position of the stage in the
    chain and run gradients first or in turn with forwards."""
    r, most = float(evaluator.num_ranks), np.arange(evaluator.num_micro_batches)
    forward, inward = np.cumsum(evaluator.costs.forward_ms), np.cumsum(evaluator.costs.input_ms)
    ahead = np.array([forward[s.first] - evaluator.costs.forward_ms[s.first] for s in stages]) / max(forward[-1], 1e-12)
    behind = 1.0 - np.array([inward[s.stop - 1] for s in stages]) / max(inward[-1], 1e-12)
    rules: tuple[Keys, ...] = (
        (1.0, r / 2, 1.0, r / 2, -1e3), (1.0, r / 2, 1.0, r / 2, -r / 4), (1.0, -r, 1.0, 0.0, -1e3),
        (1.0, r, 1.0, r, -1e3), (1.0, 2 * r, 1.0, 2 * r, -1e3), (1.0, r, 1.0, r, r / 2),
    )  # fmt: skip
    for a_f, b_f, a_i, b_i, c_i in rules:
        yield np.stack([
            b_f * ahead[:, None] + a_f * most[None, :], c_i + b_i * behind[:, None] + a_i * most[None, :],
        ])  # fmt: skip


def place(num_stages: int, num_ranks: int, wave: bool) -> list[int]:
    """Return the rank of every stage: round robin over all ranks, or up and down again with `wave`."""
    turns = [s % (2 * num_ranks) for s in range(num_stages)]
    return [r if r < num_ranks else (2 * num_ranks - 1 - r if wave else r - num_ranks) for r in turns]


def even_cuts(work: Floats, first: int, stop: int, ways: int) -> list[int]:
    """Return the bounds that divide the layers first .. stop-1 into `ways` pieces of about equal work."""
    total = np.concatenate(([0.0], np.cumsum(work[first:stop])))
    cuts = [first]
    for k in range(1, ways):
        at = first + int(np.searchsorted(total, total[-1] * k / ways))
        cuts.append(min(max(at, cuts[-1] + 1), stop - (ways - k)))
    return [*cuts, stop]


def derived(
    evaluator: Evaluator,
    st: State,
    keys: Floats,
    *,
    wait_ms: float = 0.0,
    overrun: float = 1.0,
    cutoff_ms: float = np.inf,
) -> Iterator[State]:
    """Yield up to two orders of the chain from list scheduling with these keys. Under a memory limit, decreasing
    numbers of micro-batches in flight are tried. Orders that would take longer than the cutoff are not yielded, but
    count."""
    most = evaluator.num_micro_batches
    flights = [most]
    if evaluator.has_limit:
        p = st.prices
        again = np.array([bool(s.recompute) for s in st.stages])
        held = np.bincount(p.rank, np.where(again, p.kept[:, 0], p.held[:, 0]), evaluator.num_ranks)
        with np.errstate(divide="ignore", invalid="ignore"):
            safe = int(np.nanmin(np.where(held > 0, np.clip((evaluator.capacity - p.static) / held, 1, most), most)))
        flights = sorted({most, min(2 * safe, most), min(safe + 1, most), safe, max(1, safe - 1), 1}, reverse=True)
    found = 0
    for flight in flights:
        try:
            new = evaluator.arranged(st, keys, flight=flight, wait_ms=wait_ms, overrun=overrun, cutoff_ms=cutoff_ms)
        except TooSlow:
            new, found = None, found + 1
        if new is not None:
            yield new
            found += 1
        if found >= 2:
            return

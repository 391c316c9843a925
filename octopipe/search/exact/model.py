"""The exact method's problem, stated to CP-SAT: variables and constraints for partition, placement, order, memory.

Knows: what a plan of one stage per layer must satisfy. Does not know: how a solve is run or read (`solver.py`).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from octopipe.costs.table import CostTable

RESOLUTION = 1_000_000
"""Number of time units into which the serial time of a step is divided."""
BYTES_RESOLUTION = 100_000


@dataclass(slots=True)
class Model:
    """The CP-SAT model and the variables from which its solution is read."""

    model: Any
    start: dict[tuple[str, int, int], Any]
    """(kind, layer, micro-batch) -> when it starts."""
    on: list[list[Any]]
    """[layer][rank] -> whether the layer is on the rank."""
    drops: list[Any]
    """[layer] -> whether its activations are dropped and recomputed; empty if recomputation is not allowed or
    needed."""
    again: dict[tuple[int, int], Any]
    """(layer, micro-batch) -> whether the layer's forward runs again (R)."""
    full: dict[tuple[int, int], Any]
    """(layer, micro-batch) -> the time from which all activations take memory: the start of F, or of R if there is
    one."""
    joined: list[Any]
    """[layer] -> whether it forms one stage with the layer before it."""


class OutOfTime(Exception):
    """Stating the problem took longer than the budget."""


def state_problem(
    cp: Any, costs: CostTable, ranks: int, micro_batches: int, unit_ms: float, deadline: float, decides: bool
) -> Model:
    """State the whole problem to CP-SAT. `decides`: whether the solver decides what is recomputed. Raises OutOfTime
    after the deadline."""
    model = cp.CpModel()
    layers, horizon = costs.num_layers, RESOLUTION
    on = [[model.new_bool_var("") for _ in range(ranks)] for _ in range(layers)]
    for row in on:
        model.add_exactly_one(row)
    if _ranks_alike(costs, ranks):
        _reach_in_order(model, on)
    makespan = model.new_int_var(0, horizon, "makespan")
    start: dict[tuple[str, int, int], Any] = {}
    end: dict[tuple[str, int, int], Any] = {}
    lanes: list[list[Any]] = [[] for _ in range(ranks)]
    for layer in range(layers):
        for m in range(micro_batches):
            in_time(deadline, f"stated {len(start)} of {3 * layers * micro_batches} ops")
            for kind in "FIW":
                cell = kind, layer, m
                ms = float((costs.layer_times(kind) * costs.factor(m))[layer])
                begins, ends = model.new_int_var(0, horizon, ""), model.new_int_var(0, horizon, "")
                start[cell], end[cell] = begins, ends
                for r in range(ranks):
                    took = math.floor(ms * costs.slowdown(r) / unit_ms + 1e-9)
                    lanes[r].append(model.new_optional_interval_var(begins, took, ends, on[layer][r], ""))
                if kind == "W":
                    model.add(makespan >= ends)
    stated = Model(model, start, on, [], {}, {}, [])
    if decides:
        _recomputation(stated, costs, ranks, micro_batches, unit_ms, end, lanes)
    for lane in lanes:
        model.add_no_overlap(lane)
    alike = costs.micro_batch_factor is None
    queues: dict[tuple[int, int], list[Any]] = {}
    for layer in range(layers):
        for m in range(micro_batches):
            model.add(start["W", layer, m] >= end["I", layer, m])
            model.add(start["I", layer, m] >= end["F", layer, m])
            if alike and m > 0:
                # With recomputation, one micro-batch may overtake others. Then only their numbering is arbitrary, so
                # the order is fixed for F of the first layer alone.
                for kind in "FIW" if not decides else "F" if layer == 0 else "":
                    model.add(start[kind, layer, m] >= end[kind, layer, m - 1])
    for layer in range(layers - 1):
        in_time(deadline, f"stated all {len(start)} ops, transfers up to layer {layer} of {layers}")
        _transfers(model, costs, ranks, micro_batches, unit_ms, on, start, end, layer, queues)
    for queue in queues.values():
        model.add_no_overlap(queue)
    _memory(stated, costs, ranks, micro_batches, end)
    # A redundant constraint that the solver does not derive itself: every rank needs time for its layers.
    in_step = np.sum([costs.layer_ms * costs.factor(m) for m in range(micro_batches)], axis=0)
    for r in range(ranks):
        # The rounded-down ops may add up to less than the rounded-down sum.
        work = [max(0, math.floor(ms * costs.slowdown(r) / unit_ms) - 3 * micro_batches) for ms in in_step.tolist()]
        model.add(sum(w * here[r] for w, here in zip(work, on, strict=True)) <= makespan)
    model.minimize(makespan)
    return stated


def _ranks_alike(costs: CostTable, ranks: int) -> bool:
    same_links = costs.network.intra == costs.network.inter or costs.network.ranks_per_node >= ranks
    speeds = {costs.slowdown(r) for r in range(ranks)}
    return (
        len(speeds) == 1
        and len({costs.capacity_bytes(r) for r in range(ranks)}) == 1
        and (same_links and not costs.network.pairs)
    )


def _reach_in_order(model: Any, on: list[list[Any]]) -> None:
    """Break the symmetry of equal ranks: the first layer of rank r + 1 comes after the first layer of rank r."""
    for layer, row in enumerate(on):
        for r in range(1, len(row)):
            model.add(sum(on[before][r - 1] for before in range(layer)) >= row[r])


def in_time(deadline: float, reached: str) -> None:
    if time.monotonic() > deadline:
        raise OutOfTime(reached)


def _transfers(
    model: Any, costs: CostTable, ranks: int, micro_batches: int, unit_ms: float, on: Any, start: Any, end: Any,
    layer: int, queues: dict[tuple[int, int], list[Any]],
) -> None:  # fmt: skip
    """State the transfers between a layer and the next one if they are on different ranks. Transfers of one direction
    between two ranks share a queue, in which each takes its transfer time."""
    apart = {}
    for a in range(ranks):
        for b in range(ranks):
            if a != b:
                apart[a, b] = model.new_bool_var("")
                model.add_bool_or([on[layer][a].negated(), on[layer + 1][b].negated(), apart[a, b]])
                model.add_implication(apart[a, b], on[layer][a])
                model.add_implication(apart[a, b], on[layer + 1][b])
    for m in range(micro_batches):
        nbytes = float((costs.boundary_bytes * costs.handed(m))[layer])
        for kind, source, target, back in (("F", layer, layer + 1, False), ("I", layer + 1, layer, True)):
            model.add(start[kind, target, m] >= end[kind, source, m])
            for (a, b), holds in apart.items():
                ways = (b, a) if back else (a, b)
                took = math.floor(costs.network.transfer_ms(*ways, nbytes) / unit_ms + 1e-9)
                if took == 0:
                    continue
                leaves = model.new_int_var(0, RESOLUTION, "")
                model.add(leaves >= end[kind, source, m]).only_enforce_if(holds)
                model.add(start[kind, target, m] >= leaves + took).only_enforce_if(holds)
                interval = model.new_optional_fixed_size_interval_var(leaves, took, holds, "")
                queues.setdefault(ways, []).append(interval)


def _recomputation(
    stated: Model, costs: CostTable, ranks: int, micro_batches: int, unit_ms: float, end: Any,
    lanes: list[list[Any]],
) -> None:  # fmt: skip
    """State which layers drop their activations and run R before I, and which of them form one stage with the layer
    before."""
    model, start, on, layers = stated.model, stated.start, stated.on, costs.num_layers
    stated.drops = [model.new_bool_var("") for _ in range(layers)]
    ops: dict[int, list[list[Any]]] = {r: [[] for _ in range(micro_batches)] for r in range(ranks)}
    for r, lane in enumerate(lanes):
        for number, interval in enumerate(lane):
            ops[r][number // 3 % micro_batches].append(interval)
    for layer in range(layers):
        for m in range(micro_batches):
            again, full = model.new_bool_var(""), model.new_int_var(0, RESOLUTION, "")
            stated.again[layer, m], stated.full[layer, m] = again, full
            model.add_implication(again, stated.drops[layer])
            model.add(full == start["F", layer, m]).only_enforce_if(again.negated())
            model.add(full >= end["F", layer, m]).only_enforce_if(again)
            # A layer that drops its activations needs no R if nothing of another micro-batch runs between F and I.
            at_once = model.new_bool_var("")
            model.add_bool_or([stated.drops[layer].negated(), again, at_once])
            ms = float((costs.forward_ms * costs.factor(m))[layer])
            for r in range(ranks):
                took = math.floor(ms * costs.slowdown(r) / unit_ms + 1e-9)
                here, skips = model.new_bool_var(""), model.new_bool_var("")
                for both, one in ((here, again), (skips, at_once)):
                    model.add_bool_or([one.negated(), on[layer][r].negated(), both])
                    model.add_implication(both, one)
                    model.add_implication(both, on[layer][r])
                done = model.new_int_var(0, RESOLUTION, "")
                interval = model.new_optional_interval_var(full, took, done, here, "")
                lanes[r].append(interval)
                model.add(start["I", layer, m] >= done).only_enforce_if(here)
                gap = model.new_int_var(0, RESOLUTION, "")
                between = model.new_optional_interval_var(end["F", layer, m], gap, start["I", layer, m], skips, "")
                others = [x for k in range(micro_batches) if k != m for x in ops[r][k]]
                model.add_no_overlap([between, *others])
    stated.joined = [model.new_constant(0)]
    for layer in range(1, layers):
        joined = model.new_bool_var("")
        stated.joined.append(joined)
        for before in (stated.drops[layer], stated.drops[layer - 1]):
            model.add_implication(joined, before)
        for r in range(ranks):
            model.add(on[layer][r] == on[layer - 1][r]).only_enforce_if(joined)
        for m in range(micro_batches):
            model.add(stated.again[layer, m] == stated.again[layer - 1, m]).only_enforce_if(joined)
            model.add(start["F", layer, m] == end["F", layer - 1, m]).only_enforce_if(joined)
            model.add(start["I", layer - 1, m] == end["I", layer, m]).only_enforce_if(joined)
            model.add(start["W", layer, m] == end["W", layer - 1, m]).only_enforce_if(joined)


def _memory(stated: Model, costs: CostTable, ranks: int, micro_batches: int, end: Any) -> None:
    """Limit the memory of every rank with a limit: static bytes, plus the bytes that F or R takes and I and W
    release."""
    model, on, start = stated.model, stated.on, stated.start
    for r in range(ranks):
        capacity = costs.capacity_bytes(r)
        if not math.isfinite(capacity):
            continue
        unit = capacity / BYTES_RESOLUTION
        static = [math.floor(float(b) / unit) for b in costs.static_bytes]
        room = model.new_int_var(0, BYTES_RESOLUTION, "")
        model.add(room == BYTES_RESOLUTION - sum(b * here[r] for b, here in zip(static, on, strict=True)))
        intervals, demands = [], []
        for layer, here in enumerate(on):
            for m in range(micro_batches):
                size = (costs.factor(m) * np.ones(costs.num_layers))[layer] / unit
                held = math.floor(float(costs.activation_bytes[layer] * size))
                stash = math.floor(float(costs.stash_bytes[layer] * size))
                kept = min(held, stash)
                begins = stated.full.get((layer, m), start["F", layer, m])
                until_i, until_w = end["I", layer, m], end["W", layer, m]
                spans = [(begins, until_i, held - kept, here[r]), (begins, until_w, kept, here[r])]
                spans.append((until_i, until_w, stash - kept, here[r]))  # what a forward inside I restores
                if stated.drops:
                    stays = _keeps_input(stated, layer, r)
                    handed = (costs.boundary_bytes * costs.handed(m))[layer - 1] / unit
                    given = math.floor(float(handed)) if layer else 0
                    spans.append((start["F", layer, m], begins, min(held, given), stays))
                for begin, ends, nbytes, present in spans:
                    if nbytes:
                        lasts = model.new_int_var(0, RESOLUTION, "")
                        intervals.append(model.new_optional_interval_var(begin, lasts, ends, present, ""))
                        demands.append(nbytes)
        if intervals:
            model.add_cumulative(intervals, demands, room)


def _keeps_input(stated: Model, layer: int, rank: int) -> Any:
    """Return a variable that is true if the layer is on the rank and is the first of its stage, so that it keeps its
    own input if it drops its activations."""
    model = stated.model
    stays = model.new_bool_var("")
    model.add_bool_or([stated.on[layer][rank].negated(), stated.joined[layer], stays])
    model.add_implication(stays, stated.on[layer][rank])
    return stays

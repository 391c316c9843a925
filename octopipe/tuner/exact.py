"""The exact method: partition, placement and order as one CP-SAT problem, for small cases.

Knows: how to state the whole problem to OR-tools' CP-SAT, and how to read a plan and a proven bound off it. Does
not know: heuristics. ortools is imported when a solve begins; it comes with the `exact` extra.

Every layer is a stage of its own. That loses nothing in time: a coarser stage's op is its layers' ops back to back on
one rank, and tensors change hands only between ranks. (Neighbours on one rank are joined again where that costs no
time.) Micro-batches of equal size pass every layer first in, first out, and of equal ranks the lower number is reached
first; both by exchanging names.

Its optimum is that of plans that hold every layer once: bidirectional pipelines, which hold layers twice and reduce
their gradients, are outside, and so is recomputation. Times are whole units of about a millionth of the step, rounded
down; memory counts activations and static bytes but not buffers of transfers. Both only loosen the problem, so its
bound holds; the plan is judged by the simulator, and it is called optimal when the two meet.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from octopipe.cost import CostTable
from octopipe.errors import DoesNotFitError, NotApplicableError, OctoPipeError
from octopipe.plan import Op, Plan, Stage
from octopipe.simulator import simulate
from octopipe.timeline import Timeline
from octopipe.tuner.algorithm1 import IterativeSearch
from octopipe.tuner.core.problem import make_problem
from octopipe.tuner.memory import explain_misfit
from octopipe.tuner.result import Found, Step

RESOLUTION = 1_000_000
"""Time units in the serial time of a step."""
BYTES_RESOLUTION = 100_000
SMALL = 1000
"""Layers x micro-batches x ranks up to which the solver gets a quick plan to start from; above, it is on its own."""
SOLVE_SHARE = 0.3
TOLERANCE = 1e-4
"""A plan within this share of the bound is optimal: rounding alone accounts for as much."""


class Solved(NamedTuple):
    """What the solver reached."""

    found: Found
    lower_bound_ms: float
    """Proven by the solver for every plan that holds each layer once."""
    optimal: bool


def cp_model() -> Any:
    """The ortools module, or an error that names the extra."""
    try:
        from ortools.sat.python import cp_model as module
    except ImportError:
        raise NotApplicableError(
            "the exact method needs OR-tools, which is not installed; install octopipe[exact] or use --method best"
        ) from None
    return module


@dataclass(slots=True)
class _Model:
    """The variables that a solution is read from."""

    model: Any
    start: dict[tuple[str, int, int], Any]
    """(kind, layer, micro-batch) -> when it starts."""
    on: list[list[Any]]
    """[layer][rank]: the layer lies on the rank."""


class _OutOfTime(Exception):
    """Stating the problem took longer than the budget."""


def solve(
    costs: CostTable,
    num_ranks: int,
    num_micro_batches: int,
    *,
    budget_s: float,
    seed: int = 0,
    workers: int | None = None,
    start: Plan | None = None,
) -> Solved:
    """The best plan CP-SAT finds within the budget, with its proven bound.

    Raises OctoPipeError when it finds none; a given start is returned instead, where it fits.
    """
    began = time.monotonic()
    cp = cp_model()
    if start is None and costs.num_layers * num_micro_batches * num_ranks <= SMALL:
        start = _quick_plan(costs, num_ranks, num_micro_batches, budget_s)
    given = simulate(start, costs) if start is not None else None
    unit_ms = _serial_ms(costs, num_ranks, num_micro_batches) / RESOLUTION
    reached, bound_ms = "", 0.0
    try:
        stated = _state(cp, costs, num_ranks, num_micro_batches, unit_ms, began + budget_s)
        size = f"{len(stated.model.proto.variables)} variables, {len(stated.model.proto.constraints)} constraints"
        # Handing a model to the solver takes about as long again as stating it, and no limit stops that.
        _in_time(began + budget_s - SOLVE_SHARE * (time.monotonic() - began), f"stated {size}")
        if start is not None and given is not None:
            _hint(stated, costs, start, given, unit_ms)
        solver = cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(budget_s - (time.monotonic() - began), 0.01)
        solver.parameters.num_workers = max(1, workers or os.cpu_count() or 1)
        solver.parameters.random_seed = seed
        status = solver.solve(stated.model)
        reached = f"{size}, {time.monotonic() - began:.1f} s"
        if status == cp.INFEASIBLE:
            raise _misfit(costs, num_ranks, num_micro_batches)
        bound_ms = max(0.0, float(solver.best_objective_bound)) * unit_ms
        if status in (cp.OPTIMAL, cp.FEASIBLE):
            plan = _read(solver, stated, costs, num_ranks, num_micro_batches)
            timeline = simulate(plan, costs)
            if timeline.fits and (given is None or not given.fits or timeline.step_ms <= given.step_ms):
                plan, timeline = _joined(plan, timeline, costs)
                return _solved(plan, timeline, bound_ms, time.monotonic() - began)
    except _OutOfTime as error:
        reached = str(error)
    if start is not None and given is not None and given.fits:
        return _solved(start, given, bound_ms, time.monotonic() - began)
    raise OctoPipeError(
        f"exact: CP-SAT found no plan for {costs.model} ({costs.num_layers} layers, pp {num_ranks}, "
        f"{num_micro_batches} micro-batches) in {budget_s:g} s ({reached}); it is for small cases: use --method best, "
        "or a longer --budget"
    )


def _quick_plan(costs: CostTable, num_ranks: int, num_micro_batches: int, budget_s: float) -> Plan | None:
    """A plan of a few dozen iterations of Algorithm 1: a bound from above for the solver."""
    try:
        search = IterativeSearch(
            costs, num_ranks, num_micro_batches, budget_s=0.2 * budget_s, seed=0, iterations=40, recompute=False
        )
        return search.run().plan
    except DoesNotFitError:
        return None


def _solved(plan: Plan, timeline: Timeline, bound_ms: float, seconds: float) -> Solved:
    ms = timeline.step_ms
    bound_ms = min(bound_ms, ms)
    log = [Step(1, seconds, "schedule", "CP-SAT", ms, ms, ms)]
    found = Found(plan=plan, timeline=timeline, iterations=1, log=log, interrupted=False)
    return Solved(found, bound_ms, ms <= bound_ms * (1 + TOLERANCE))


def _serial_ms(costs: CostTable, num_ranks: int, num_micro_batches: int) -> float:
    """A step with one op at a time: no plan worth having is slower."""
    slow = max(costs.slowdown(r) for r in range(num_ranks))
    work = sum(float((costs.layer_ms * costs.factor(m)).sum()) for m in range(num_micro_batches)) * slow
    hops = [
        costs.network.transfer_ms(a, b, float(costs.boundary_bytes.max()))
        for a in range(num_ranks)
        for b in range(num_ranks)
    ]
    return max(work + 2 * num_micro_batches * costs.num_layers * max(hops, default=0.0), 1e-9)


def _state(cp: Any, costs: CostTable, ranks: int, micro_batches: int, unit_ms: float, deadline: float) -> _Model:
    """The whole problem."""
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
            _in_time(deadline, f"stated {len(start)} of {3 * layers * micro_batches} ops")
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
    for lane in lanes:
        model.add_no_overlap(lane)
    alike = costs.micro_batch_factor is None
    queues: dict[tuple[int, int], list[Any]] = {}
    for layer in range(layers):
        for m in range(micro_batches):
            model.add(start["W", layer, m] >= end["I", layer, m])
            model.add(start["I", layer, m] >= end["F", layer, m])
            if alike and m > 0:
                for kind in "FIW":
                    model.add(start[kind, layer, m] >= end[kind, layer, m - 1])
    for layer in range(layers - 1):
        _in_time(deadline, f"stated all {len(start)} ops, transfers up to layer {layer} of {layers}")
        _transfers(model, costs, ranks, micro_batches, unit_ms, on, start, end, layer, queues)
    for queue in queues.values():
        model.add_no_overlap(queue)
    _memory(model, costs, ranks, micro_batches, on, start, end)
    # What the solver does not see by itself: every rank needs time for its layers.
    in_step = np.sum([costs.layer_ms * costs.factor(m) for m in range(micro_batches)], axis=0)
    for r in range(ranks):
        # Floors of single ops may add up to less than the floor of the sum.
        work = [max(0, math.floor(ms * costs.slowdown(r) / unit_ms) - 3 * micro_batches) for ms in in_step.tolist()]
        model.add(sum(w * here[r] for w, here in zip(work, on, strict=True)) <= makespan)
    model.minimize(makespan)
    return _Model(model, start, on)


def _ranks_alike(costs: CostTable, ranks: int) -> bool:
    same_links = costs.network.intra == costs.network.inter or costs.network.ranks_per_node >= ranks
    speeds = {costs.slowdown(r) for r in range(ranks)}
    return (
        len(speeds) == 1
        and len({costs.capacity_bytes(r) for r in range(ranks)}) == 1
        and (same_links and not costs.network.pairs)
    )


def _reach_in_order(model: Any, on: list[list[Any]]) -> None:
    """Of equal ranks, rank r + 1 gets its first layer after rank r has one."""
    for layer, row in enumerate(on):
        for r in range(1, len(row)):
            model.add(sum(on[before][r - 1] for before in range(layer)) >= row[r])


def _in_time(deadline: float, reached: str) -> None:
    if time.monotonic() > deadline:
        raise _OutOfTime(reached)


def _transfers(
    model: Any, costs: CostTable, ranks: int, micro_batches: int, unit_ms: float, on: Any, start: Any, end: Any,
    layer: int, queues: dict[tuple[int, int], list[Any]],
) -> None:  # fmt: skip
    """Between a layer and the next on other ranks: the tensor waits for its queue and takes its time in it."""
    apart = {}
    for a in range(ranks):
        for b in range(ranks):
            if a != b:
                apart[a, b] = model.new_bool_var("")
                model.add_bool_or([on[layer][a].negated(), on[layer + 1][b].negated(), apart[a, b]])
                model.add_implication(apart[a, b], on[layer][a])
                model.add_implication(apart[a, b], on[layer + 1][b])
    for m in range(micro_batches):
        nbytes = float((costs.boundary_bytes * costs.factor(m))[layer])
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


def _memory(model: Any, costs: CostTable, ranks: int, micro_batches: int, on: Any, start: Any, end: Any) -> None:
    """On every rank with a limit: what F takes, I and W give back, beside the static bytes."""
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
                kept = min(held, math.floor(float(costs.stash_bytes[layer] * size)))
                begins = start["F", layer, m]
                for ends, nbytes in ((end["I", layer, m], held - kept), (end["W", layer, m], kept)):
                    if nbytes:
                        lasts = model.new_int_var(0, RESOLUTION, "")
                        intervals.append(model.new_optional_interval_var(begins, lasts, ends, here[r], ""))
                        demands.append(nbytes)
        if intervals:
            model.add_cumulative(intervals, demands, room)


def _hint(stated: _Model, costs: CostTable, plan: Plan, timeline: Timeline, unit_ms: float) -> None:
    """Where the given plan puts layers and ops."""
    for stage in plan.stages:
        for layer in range(stage.first, stage.stop):
            for r, here in enumerate(stated.on[layer]):
                stated.model.add_hint(here, int(r == stage.rank))
    s = timeline.spans
    for span in range(s.rank.size):
        op = timeline.op(span)
        if op.kind in "FIW":
            stage, at = plan.stages[op.stage], float(s.start_ms[span])
            times = costs.layer_times(op.kind) * costs.factor(op.micro_batch) * costs.slowdown(stage.rank)
            layers = range(stage.first, stage.stop)
            for layer in reversed(layers) if op.kind == "I" else layers:
                stated.model.add_hint(stated.start[op.kind, layer, op.micro_batch], int(at / unit_ms))
                at += float(times[layer])


def _read(solver: Any, stated: _Model, costs: CostTable, num_ranks: int, num_micro_batches: int) -> Plan:
    """The solution as a plan of one stage per layer."""
    home = [next(r for r, here in enumerate(row) if solver.boolean_value(here)) for row in stated.on]
    rows: list[list[tuple[tuple[int, int, int], Op]]] = [[] for _ in range(num_ranks)]
    depth = {"F": 0, "I": 1, "W": 2}
    for (kind, layer, m), begins in stated.start.items():
        # Ops of no time may start together: the order of the chain breaks ties.
        at = layer if kind == "F" else costs.num_layers - layer
        rows[home[layer]].append(((solver.value(begins), depth[kind], at), Op(layer, kind, m)))
    stages = tuple(Stage(first=k, stop=k + 1, rank=home[k]) for k in range(costs.num_layers))
    orders = tuple(tuple(op for _, op in sorted(row)) for row in rows)
    return Plan(
        model=costs.model, num_layers=costs.num_layers, num_ranks=num_ranks, num_micro_batches=num_micro_batches,
        stages=stages, orders=orders,
    ).check("exact")  # fmt: skip


def _joined(plan: Plan, timeline: Timeline, costs: CostTable) -> tuple[Plan, Timeline]:
    """Neighbouring stages of one rank joined where the step takes no longer and still fits."""
    s = 1
    while s < len(plan.stages):
        if plan.stages[s - 1].rank == plan.stages[s].rank:
            fewer = _join(plan, s)
            if not fewer.problems():
                then = simulate(fewer, costs)
                if then.fits and then.step_ms <= timeline.step_ms * (1 + 1e-12):
                    plan, timeline = fewer, then
                    continue
        s += 1
    return plan, timeline


def _join(plan: Plan, at: int) -> Plan:
    """Stages at-1 and at as one: F where the later F stood, I where the later I and W where the later W did."""
    a, b = plan.stages[at - 1], plan.stages[at]
    stages = (*plan.stages[: at - 1], Stage(first=a.first, stop=b.stop, rank=a.rank), *plan.stages[at + 1 :])
    orders = []
    for order in plan.orders:
        seen: set[tuple[str, int]] = set()
        row = []
        for op in order:
            if op.stage not in (at - 1, at):
                row.append(Op(op.stage - (op.stage > at), op.kind, op.micro_batch))
            elif (op.kind, op.micro_batch) in seen:
                row.append(Op(at - 1, op.kind, op.micro_batch))
            else:
                seen.add((op.kind, op.micro_batch))
        orders.append(tuple(row))
    return Plan(
        model=plan.model, num_layers=plan.num_layers, num_ranks=plan.num_ranks,
        num_micro_batches=plan.num_micro_batches, stages=stages, orders=tuple(orders), extra=plan.extra,
    )  # fmt: skip


def _misfit(costs: CostTable, num_ranks: int, num_micro_batches: int) -> DoesNotFitError:
    return explain_misfit(costs, make_problem(costs, num_ranks, num_micro_batches), may_recompute=False)

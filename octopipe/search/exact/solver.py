"""The exact method: partition, placement and order as one CP-SAT problem, for small cases.

Knows: how to formulate the whole problem for OR-tools' CP-SAT, and how to extract a plan and a proven bound. Does not
know: heuristics. ortools is imported when a solve begins; it is part of the `exact` extra.

Every layer is a separate stage. This costs no time: an op of a coarser stage is equivalent to its layers' ops back to
back on one rank, and transfers happen only between ranks. (Adjacent stages on one rank are merged again if that costs
no time.) Micro-batches of equal size pass every layer first in, first out, and among equal ranks the lower number is
reached first; both are without loss of generality by renaming.

The optimum is over plans that hold every layer once: bidirectional pipelines, which hold layers twice and reduce their
gradients, are excluded. Under a memory limit, recomputation is decided as well, if it is allowed: a layer that drops
its activations keeps its input (nothing, if the preceding layer is on the same rank, drops its activations too and
their ops are adjacent: then the two form one stage) and runs its forward again before I, unless no op of another
micro-batch runs between F and I. Times are integer units of about a millionth of the step, rounded down; memory counts
activations and static bytes but not transfer buffers. Both relax the problem, so its bound is valid. The plan is
evaluated by the simulator, and it is called optimal if its time equals the bound.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any, NamedTuple

from octopipe.base.compile import usable_cores
from octopipe.base.errors import DoesNotFitError, NotApplicableError, OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan, Stage
from octopipe.search.algorithm1 import IterativeSearch
from octopipe.search.algorithm1.settings import Settings
from octopipe.search.does_not_fit import does_not_fit_error
from octopipe.search.exact.model import RESOLUTION, Model, OutOfTime, in_time, state_problem
from octopipe.search.result import Callback, Found, Progress, Step
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline

SMALL = 1000
"""The solver gets a quick plan to start from if layers x micro-batches x ranks do not exceed this number."""
QUICK_SHARE, QUICK_PATIENCE = 0.2, 12
"""The search for that plan: its largest share of the budget, and the iterations without improvement that end it."""
QUICK_MOVES = 60
"""Its largest number of iterations, if iterations limit the solve instead of time."""
SOLVE_SHARE = 0.3
"""Expected time to hand a problem over to the solver, as a share of the time that stating it took."""
POLL_S = 0.1
"""Seconds between two looks at a running solve."""
STOP_S = 1.0
"""Seconds that CP-SAT gets to react to a request to stop."""
TOLERANCE = 1e-4
"""A plan within this share of the bound counts as optimal, because rounding can cause such a difference."""


class Solved(NamedTuple):
    """The result of the solver."""

    found: Found
    lower_bound_ms: float
    """Proven by the solver for every plan that holds each layer once."""
    optimal: bool


def cp_model() -> Any:
    """The ortools module; raises an error that names the extra to install."""
    try:
        from ortools.sat.python import cp_model as module
    except ImportError:
        raise NotApplicableError(
            "the exact method needs OR-tools, which is not installed; install octopipe[exact] or use --method best"
        ) from None
    return module


def solve(
    costs: CostTable,
    num_ranks: int,
    num_micro_batches: int,
    *,
    budget_s: float,
    seed: int = 0,
    workers: int | None = None,
    start: Plan | None = None,
    iterations: int | None = None,
    recompute: bool = True,
    progress: Callback | None = None,
) -> Solved:
    """The best plan that CP-SAT finds within the budget, with its proven bound.

    Raises OctoPipeError if it finds none; if a start is given and fits, that is returned instead. `iterations`:
    conflicts of one worker instead of a time, so that the result depends only on the seed. `recompute` allows
    activations to be recomputed. (Without a memory limit, that is never useful.) A callback that returns True ends the
    solve.
    """
    began = time.monotonic()
    cp = cp_model()
    if start is None and costs.num_layers * num_micro_batches * num_ranks <= SMALL:
        start = _quick_plan(costs, num_ranks, num_micro_batches, budget_s, iterations, recompute)
    limit_s = budget_s if iterations is None else math.inf
    given = simulate(start, costs) if start is not None else None
    decides = recompute and any(math.isfinite(costs.capacity_bytes(r)) for r in range(num_ranks))
    unit_ms = _serial_ms(costs, num_ranks, num_micro_batches, again=decides) / RESOLUTION
    reached, bound_ms, stopped = "", 0.0, False
    try:
        stated = state_problem(cp, costs, num_ranks, num_micro_batches, unit_ms, began + limit_s, decides)
        size = f"{len(stated.model.proto.variables)} variables, {len(stated.model.proto.constraints)} constraints"
        # Handing a model to the solver takes a share of the time that stating it took, and no limit stops that.
        in_time(began + limit_s - SOLVE_SHARE * (time.monotonic() - began), f"stated {size}")
        if start is not None and given is not None:
            _hint(stated, costs, start, given, unit_ms)
        solver = cp.CpSolver()
        if iterations is None:
            solver.parameters.max_time_in_seconds = max(budget_s - (time.monotonic() - began), 0.01)
            solver.parameters.num_workers = max(1, workers or usable_cores())
        else:  # several workers would exchange results at random times
            solver.parameters.max_number_of_conflicts = iterations
            solver.parameters.num_workers = 1
        solver.parameters.catch_sigint_signal = False
        solver.parameters.random_seed = seed
        status, stopped = _run(solver, stated.model, began, budget_s, given, progress)
        reached = f"{size}, {time.monotonic() - began:.1f} s"
        if status == cp.INFEASIBLE:
            raise does_not_fit_error(costs, num_ranks, recompute)
        bound_ms = max(0.0, float(solver.best_objective_bound)) * unit_ms
        if status in (cp.OPTIMAL, cp.FEASIBLE):
            plan = _read(solver, stated, costs, num_ranks, num_micro_batches)
            timeline = simulate(plan, costs) if not plan.problems() else None
            least = given.step_ms if given is not None and given.fits else math.inf
            if timeline is not None and timeline.fits and timeline.step_ms <= least:
                plan, timeline = _joined(plan, timeline, costs)
                return _solved(plan, timeline, bound_ms, time.monotonic() - began, stopped)
    except OutOfTime as error:
        reached = str(error)
    except KeyboardInterrupt:
        stopped = True
        if given is None or not given.fits:
            raise
    if start is not None and given is not None and given.fits:
        return _solved(start, given, bound_ms, time.monotonic() - began, stopped)
    spent, more = f"{budget_s:g} s", "a longer --budget"
    if iterations is not None:
        spent, more = f"{iterations} conflicts", "more --iterations"
    raise OctoPipeError(
        f"exact: CP-SAT found no plan for {costs.model} ({costs.num_layers} layers, pp {num_ranks}, "
        f"{num_micro_batches} micro-batches) in {spent} ({reached}); it is for small cases: use --method best, "
        f"or {more}"
    )


def _run(
    solver: Any, model: Any, began: float, budget_s: float, given: Timeline | None, progress: Callback | None
) -> tuple[Any, bool]:
    """Solve in a separate thread, so that this one can report and stop it; returns (status, ended early)."""
    status: list[Any] = []
    worker = threading.Thread(target=lambda: status.append(solver.solve(model)), daemon=True)
    worker.start()
    stopped = False
    try:
        while worker.is_alive():
            worker.join(POLL_S)
            if progress is None or stopped:
                continue
            best = given.step_ms if given is not None and given.fits else math.inf
            if progress(Progress(time.monotonic() - began, budget_s, 0, "schedule", best, 0.0, {}, None)) is True:
                stopped = True
                solver.stop_search()
    except KeyboardInterrupt:
        stopped = True
        solver.stop_search()
        worker.join(STOP_S)
        if worker.is_alive():  # presolving does not react to a request to stop
            raise
    return status[0], stopped


def _quick_plan(
    costs: CostTable, num_ranks: int, num_micro_batches: int, budget_s: float, iterations: int | None, recompute: bool
) -> Plan | None:
    """Return the plan of a short run of Algorithm 1, from which the solver starts; None if it finds none that fits."""
    try:
        search = IterativeSearch(
            costs, num_ranks, num_micro_batches, budget_s=QUICK_SHARE * budget_s, recompute=recompute, systems=False,
            settings=Settings(patience=QUICK_PATIENCE), iterations=iterations and min(iterations, QUICK_MOVES),
        )  # fmt: skip
        found = search.run()
    except DoesNotFitError:
        return None
    if found.interrupted:  # the search ends normally, but the interrupt is meant for the whole solve
        raise KeyboardInterrupt
    return found.plan


def _solved(plan: Plan, timeline: Timeline, bound_ms: float, seconds: float, stopped: bool) -> Solved:
    ms = timeline.step_ms
    bound_ms = min(bound_ms, ms)
    log = [Step(1, seconds, "schedule", "CP-SAT", ms, ms, ms)]
    found = Found(plan=plan, timeline=timeline, iterations=1, log=log, interrupted=stopped)
    return Solved(found, bound_ms, ms <= bound_ms * (1 + TOLERANCE))


def _serial_ms(costs: CostTable, num_ranks: int, num_micro_batches: int, *, again: bool) -> float:
    """Return the time of a step that runs one op at a time, the horizon of the problem. `again`: with all layers
    recomputed."""
    slow = max(costs.slowdown(r) for r in range(num_ranks))
    layer_ms = costs.layer_ms + costs.forward_ms if again else costs.layer_ms
    work = sum(float((layer_ms * costs.factor(m)).sum()) for m in range(num_micro_batches)) * slow
    most = max(float((costs.boundary_bytes * costs.handed(m)).max()) for m in range(num_micro_batches))
    hops = [costs.network.transfer_ms(a, b, most) for a in range(num_ranks) for b in range(num_ranks)]
    return max(work + 2 * num_micro_batches * costs.num_layers * max(hops, default=0.0), 1e-9)


def _hint(stated: Model, costs: CostTable, plan: Plan, timeline: Timeline, unit_ms: float) -> None:
    """Hint the given plan to the solver: the ranks of its layers and the start times of its ops."""
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


def _read(solver: Any, stated: Model, costs: CostTable, num_ranks: int, num_micro_batches: int) -> Plan:
    """Return the solution as a plan with one stage per layer; layers that recompute together form one stage."""
    home = [next(r for r, here in enumerate(row) if solver.boolean_value(here)) for row in stated.on]
    rows: list[list[tuple[tuple[int, int, int], Op]]] = [[] for _ in range(num_ranks)]
    depth = {"F": 0, "I": 1, "W": 2}
    for (kind, layer, m), begins in stated.start.items():
        # Ops of no time may start together: the order of the chain breaks ties.
        at = layer if kind == "F" else costs.num_layers - layer
        rows[home[layer]].append(((solver.value(begins), depth[kind], at), Op(layer, kind, m)))
    for (layer, m), again in stated.again.items():
        if solver.boolean_value(again):
            rows[home[layer]].append(((solver.value(stated.full[layer, m]), 1, layer), Op(layer, "R", m)))
    drops = [bool(solver.boolean_value(x)) for x in stated.drops] or [False] * costs.num_layers
    # A layer that runs R for no micro-batch keeps its activations.
    again_at = {layer for (layer, _), x in stated.again.items() if solver.boolean_value(x)}
    stages = tuple(
        Stage(first=k, stop=k + 1, rank=home[k], recompute=drops[k] and k in again_at) for k in range(costs.num_layers)
    )
    orders = tuple(tuple(op for _, op in sorted(row)) for row in rows)
    plan = Plan(
        model=costs.model, num_layers=costs.num_layers, num_ranks=num_ranks, num_micro_batches=num_micro_batches,
        stages=stages, orders=orders,
    )  # fmt: skip
    for at in range(costs.num_layers - 1, 0, -1):
        if stated.joined and solver.boolean_value(stated.joined[at]) and plan.stages[at].recompute:
            plan = _join(plan, at)
    return plan


def _joined(plan: Plan, timeline: Timeline, costs: CostTable) -> tuple[Plan, Timeline]:
    """Join neighbouring stages of one rank if the plan then still fits and is not slower; return it and its
    timeline."""
    s = 1
    while s < len(plan.stages):
        if plan.stages[s - 1].rank == plan.stages[s].rank and plan.stages[s - 1].recompute == plan.stages[s].recompute:
            fewer = _join(plan, s)
            if not fewer.problems():
                then = simulate(fewer, costs)
                if then.fits and then.step_ms <= timeline.step_ms * (1 + 1e-12):
                    plan, timeline = fewer, then
                    continue
        s += 1
    return plan, timeline


def _join(plan: Plan, at: int) -> Plan:
    """Join the stages at-1 and at; each pair of their ops becomes one op at the position of the later one."""
    a, b = plan.stages[at - 1], plan.stages[at]
    one = Stage(first=a.first, stop=b.stop, rank=a.rank, recompute=a.recompute)
    stages = (*plan.stages[: at - 1], one, *plan.stages[at + 1 :])
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

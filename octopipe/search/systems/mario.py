"""Mario: activation checkpointing with recomputation in the bubbles of the pipeline.

Liu et al., "Mario: Near Zero-cost Activation Checkpointing in Pipeline Parallelism", PPoPP 2025. Only the
abstract was at hand; the passes are general knowledge. Rule: take any schedule (1F1B, or option `base`)
and (1) checkpoint: every F keeps only its input, R runs before the backward; (2) overlap: R needs its own F
only, so it runs ahead of the gradient's arrival; (3) drop R where the backward follows its F at once; (4)
prepose later forwards into bubbles while memory fits and the makespan improves.
1F1B makespans: (m+p-1)(F+R+b) after pass 1, m(F+R+b)+(p-1)(F+b) after pass 2; p=4, m=8, F=R=1, b=2 gives 44,
41, and 39 after pass 3. Peak about in-flight * checkpoint + one micro-batch's activations.

Simplified: a plan cannot make R wait for the gradient, so recomputation overlaps already after pass 1;
`naive_makespan_ms` is the time in a runtime that recomputes inside the backward. Every stage checkpoints,
even if memory is not short. Pass 4 tries to move one forward at a time, and one more warm-up forward on the
first ranks, and evaluates this by simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan
from octopipe.search.systems.registry import Setting, get_system, system
from octopipe.simulation.simulator import makespan_ms, simulate
from octopipe.simulation.timeline import Timeline

if TYPE_CHECKING:
    from octopipe.search.systems.closed_forms import ClosedForm

MOST_TRIALS = 300
"""Maximum number of candidates that a pass simulates. It limits the time independently of the machine."""
Orders = list[list[Op]]


@system(
    name="mario",
    title="Mario",
    paper="Liu et al., PPoPP 2025",
    year=2025,
    tunes=("scheduling",),
    constraint="recomputes every stage",
)
def mario(setting: Setting) -> Plan:
    """Option `base`: the system whose schedule the passes rework (1f1b)."""
    base = str(setting.option("base", "1f1b"))
    if base == "mario":
        raise OctoPipeError("mario: base mario would run the passes twice; name another system")
    plan = get_system(base).policy(replace(setting, options={}))
    plan = overlap_recompute(checkpoint(plan), setting.costs)
    return prepose_forwards(drop_recompute(plan), setting.costs)


def checkpoint(plan: Plan) -> Plan:
    """Pass 1: every stage keeps only its inputs and runs R right before each backward."""
    if any(op.kind == "R" for order in plan.orders for op in order):
        raise OctoPipeError("mario: the base schedule recomputes already; name one that does not")
    orders = []
    for order in plan.orders:
        row: list[Op] = []
        for op in order:
            if op.kind in "IB":
                row.append(Op(op.stage, "R", op.micro_batch))
            row.append(op)
        orders.append(tuple(row))
    stages = tuple(replace(stage, recompute=True) for stage in plan.stages)
    return replace(plan, stages=stages, orders=tuple(orders))


def naive_makespan_ms(plan: Plan, costs: CostTable) -> float:
    """Return the makespan after pass 1 in a runtime that waits for the gradient before it recomputes."""
    orders = tuple(tuple(op for op in order if op.kind != "R") for order in plan.orders)
    stages = tuple(replace(stage, recompute=False) for stage in plan.stages)
    inside = costs.replace(input_ms=costs.input_ms + costs.forward_ms)
    return makespan_ms(replace(plan, stages=stages, orders=orders), inside)


def overlap_recompute(plan: Plan, costs: CostTable) -> Plan:
    """Pass 2: move R into bubbles, before ops that wait for a gradient or an activation, while that helps."""
    return _improved(plan, costs, lambda candidate, timeline: _into_bubbles(candidate, timeline, "R"))


def drop_recompute(plan: Plan) -> Plan:
    """Pass 3: remove R if F, R and backward of one micro-batch follow each other directly; F keeps its activations."""
    orders = []
    for order in plan.orders:
        row: list[Op] = []
        for i, op in enumerate(order):
            again = op.kind == "R" and 0 < i < len(order) - 1
            cell = (op.stage, op.micro_batch)
            if again and _is(order[i - 1], "F", cell) and _is(order[i + 1], "IB", cell):
                continue
            row.append(op)
        orders.append(tuple(row))
    return replace(plan, orders=tuple(orders))


def prepose_forwards(plan: Plan, costs: CostTable) -> Plan:
    """Pass 4: move forwards into earlier bubbles as long as the makespan falls and memory suffices."""

    def candidates(current: Plan, timeline: Timeline) -> Iterator[Orders]:
        yield from _deeper_warmups(current)
        yield from _into_bubbles(current, timeline, "F")

    return _improved(plan, costs, candidates)


def _is(op: Op, kinds: str, cell: tuple[int, int]) -> bool:
    return op.kind in kinds and (op.stage, op.micro_batch) == cell


def _improved(plan: Plan, costs: CostTable, candidates: Callable[[Plan, Timeline], Iterator[Orders]]) -> Plan:
    """Replace the plan by the first candidate that is faster and fits, until there is none or `MOST_TRIALS` is
    reached."""
    timeline = simulate(plan, costs)
    trials = 0
    while timeline.fits:
        for orders in candidates(plan, timeline):
            trials += 1
            if trials > MOST_TRIALS:
                return plan
            candidate = replace(plan, orders=tuple(map(tuple, orders)))
            try:
                if makespan_ms(candidate, costs) >= timeline.makespan_ms * (1 - 1e-9):
                    continue
                after = simulate(candidate, costs)
            except OctoPipeError:
                continue  # the move causes a deadlock
            if after.fits:
                plan, timeline = candidate, after
                break
        else:
            return plan
    return plan


def _glued(plan: Plan, rank: int) -> set[Op]:
    """Return the backwards of a rank that must directly follow their F, because their R was removed."""
    order = plan.orders[rank]
    again = {(op.stage, op.micro_batch) for op in order if op.kind == "R"}
    return {op for op in order if op.kind in "IB" and plan.stages[op.stage].recompute and op[0::2] not in again}


def _waits(timeline: Timeline) -> NDArray[np.float64]:
    """Return the idle time directly before every op, except before the first op of a rank."""
    spans = timeline.spans
    waits = np.zeros(spans.start_ms.size)
    waits[1:] = np.where(spans.rank[1:] == spans.rank[:-1], spans.start_ms[1:] - spans.end_ms[:-1], 0.0)
    return waits


def _into_bubbles(plan: Plan, timeline: Timeline, kind: str) -> Iterator[Orders]:
    """Yield for every op that waits, longest wait first, the orders in which the next op of `kind` on its rank runs
    before it, if that op is ready."""
    spans, table, data = timeline.spans, plan.table(), plan.predecessor_table()
    waits = _waits(timeline)
    for at in (-waits).argsort(kind="stable"):
        if waits[at] <= 1e-9:
            return
        rank = int(spans.rank[at])
        first, stop = int(table.offsets[rank]), int(table.offsets[rank + 1])
        glued = _glued(plan, rank)
        if plan.op(int(at)) in glued:
            continue
        for later in range(int(at) + 1, stop):
            op = plan.op(later)
            if op.kind != kind:
                continue
            needed = [int(q) for q in data[later] if q >= 0]
            ready = all(spans.end_ms[q] < spans.start_ms[at] for q in needed)
            if ready and not (later + 1 < stop and plan.op(later + 1) in glued):
                orders = [list(order) for order in plan.orders]
                orders[rank].insert(int(at) - first, orders[rank].pop(later - first))
                yield orders
            break


def _deeper_warmups(plan: Plan) -> Iterator[Orders]:
    """Yield for every r the orders with one more forward before the first backward on ranks 0..r. The remaining
    forwards of these ranks each move up by one place."""
    deeper = [list(row) if _glued(plan, rank) else _deepened(row) for rank, row in enumerate(plan.orders)]
    for last in range(plan.num_ranks):
        if deeper[last] != list(plan.orders[last]):
            yield deeper[: last + 1] + [list(order) for order in plan.orders[last + 1 :]]


def _deepened(order: tuple[Op, ...]) -> list[Op]:
    forwards = [op for op in order if op.kind == "F"]
    others = [op for op in order if op.kind != "F"]
    pattern = [op.kind == "F" for op in order]
    warmup = pattern.index(False) if False in pattern else len(pattern)
    if warmup == len(forwards):
        return list(order)
    pattern.insert(warmup, True)
    del pattern[len(pattern) - 1 - pattern[::-1].index(True)]
    return [forwards.pop(0) if forward else others.pop(0) for forward in pattern]


def closed_forms() -> list[ClosedForm]:
    """1F1B makespans after passes 1, 2 and 3."""
    from octopipe.search.systems.closed_forms import ClosedForm, even_layers
    from octopipe.search.systems.registry import build_plan

    def after(passes: int, p: int, m: int, costs: CostTable) -> Callable[[], float]:
        def run() -> float:
            plan = checkpoint(build_plan("1f1b", costs, p, m))
            if passes == 1:
                return naive_makespan_ms(plan, costs)
            plan = overlap_recompute(plan, costs)
            return makespan_ms(plan if passes == 2 else drop_recompute(plan), costs)

        return run

    forms = []
    for p, m, f, b in ((4, 8, 1.0, 2.0), (8, 16, 1.5, 2.5)):
        costs, case = even_layers(p, f, b), f"p={p} m={m} F=R={f:g} b={b:g}"
        values = (
            (1, "(m+p-1)(F+R+b)", (m + p - 1) * (2 * f + b)),
            (2, "m(F+R+b)+(p-1)(F+b)", m * (2 * f + b) + (p - 1) * (f + b)),
        )
        forms += [
            ClosedForm(
                system="mario",
                case=case,
                quantity=f"makespan after pass {passes}",
                formula=formula,
                expected=expected,
                simulate=after(passes, p, m, costs),
            )
            for passes, formula, expected in values
        ]
    forms.append(
        ClosedForm(
            system="mario",
            case="p=4 m=8 F=R=1 b=2",
            quantity="makespan after pass 3",
            expected=39.0,
            simulate=after(3, 4, 8, even_layers(4, 1.0, 2.0)),
        )
    )
    return forms

"""OptPipe: one program decides the order of F, I and W and what moves to host memory, under a memory limit.

Li et al., "OptPipe: Memory- and Scheduling-Optimized Pipeline Parallelism for LLM Training", 2025 (arXiv 2510.05186).
Rule: stage i on rank i. A mixed-integer program chooses the start of every F, I and W and which activations are copied
to host memory and back, on lanes of their own, so that the step is shortest and no rank exceeds its memory. It starts
from a heuristic schedule that fits.
Simplified: CP-SAT solves the program, within a fixed deterministic time instead of seconds and without a store of
schedules that were solved before. A plan marks whole stages, and lowering decides when they are copied
(`host_moves.py`); if that does not suffice, the program is solved again with less memory. Buffers between stages and
workspaces are not part of the program; what the heuristic schedule needs for them is subtracted from the memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from octopipe.base.errors import DoesNotFitError, OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.plans.price import static_bytes
from octopipe.search.does_not_fit import does_not_fit_error
from octopipe.search.offload import fitting, offloading
from octopipe.search.systems.optpipe_program import Floats, Prices, Program, Schedule, cp_model, priced
from octopipe.search.systems.registry import Setting, build_plan, require, system
from octopipe.search.systems.shapes import one_f_one_b_order
from octopipe.search.systems.split import split_backward
from octopipe.search.systems.zero_bubble import straight_plan
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline

EFFORT = 2.0
"""CP-SAT's deterministic time for one solve; one unit takes a few seconds."""
ROUNDS = 3
"""Maximum number of solves, each with less memory than the one before."""
MOST_OPS = 6000
"""Largest number of F, I and W of all stages and micro-batches for which the program is solved."""
HEURISTICS = ("zb-h1", "zb-1p", "zb-2p")
"""Systems with stage i on rank i that are tried as a start, in addition to 1F1B."""


@system(
    name="optpipe",
    title="OptPipe",
    paper="Li et al., 2025",
    year=2025,
    tunes=("scheduling",),
    constraint=f"needs OR-tools (the exact extra); at most {MOST_OPS // 3} micro-batches times ranks",
)
def optpipe(setting: Setting) -> Plan:
    """Option `effort` (2): CP-SAT's deterministic time for one solve; there are up to three solves."""
    cp_model()
    costs, p, m = setting.costs, setting.num_ranks, setting.num_micro_batches
    effort = setting.option("effort", EFFORT)
    if isinstance(effort, bool) or not isinstance(effort, int | float) or not 0 < effort < math.inf:
        raise OctoPipeError(f"optpipe: effort is {effort}; give deterministic time > 0")
    require(
        3 * p * m <= MOST_OPS, "optpipe",
        f"{p} ranks and {m} micro-batches make a program of {3 * p * m} ops, at most {MOST_OPS} are solved; use zb-2p",
    )  # fmt: skip
    starts = [(base, *made) for base in heuristics(costs, p, m) if (made := _made(base, costs)) is not None]
    if not starts:
        raise DoesNotFitError(f"optpipe: {does_not_fit_error(costs, p, False)}")
    base, plan, timeline = min(starts, key=lambda start: start[2].step_ms)
    prices, room = priced(base, costs), _room(base, costs)
    for _ in range(ROUNDS):
        found = solved(prices, costs, base, room, timeline.step_ms, effort)
        if found is None:
            break
        ordered = straight_plan(costs, p, m, found.orders)
        marked = offloading(ordered, found.moving)
        made = _made(marked, costs) or _made(ordered, costs)
        if made is not None:
            return min((plan, timeline), made, key=lambda one: one[1].step_ms)[0]
        excess = simulate(marked, costs, check=False).peak_bytes - _capacity(costs, p)
        room = room - np.maximum(excess, 0.0)
    return plan


def heuristics(costs: CostTable, p: int, m: int) -> Iterator[Plan]:
    """Yield schedules to start from: 1F1B with split backwards, with less and less warm-up until it fits, and
    zero-bubble schedules."""
    for ahead in range(p - 1, -1, -1):
        orders = [one_f_one_b_order(s, min(p - 1 - s, ahead), m) for s in range(p)]
        plan = split_backward(straight_plan(costs, p, m, orders), costs)
        yield plan
        if _made(plan, costs) is not None:
            break
    for name in HEURISTICS:
        yield build_plan(name, costs, p, m)


def solved(
    prices: Prices, costs: CostTable, base: Plan, room: Floats, most_ms: float, effort: float
) -> Schedule | None:
    """Solve the program, with the schedule `base` as a hint, which may need more memory than there is; None if no
    solution was found."""
    timeline = simulate(base, costs, check=False)
    program = Program(prices, room, _after_ms(timeline), most_ms)
    program.hint(_starts_ms(timeline, prices))
    return program.solve(effort)


def _made(plan: Plan, costs: CostTable) -> tuple[Plan, Timeline] | None:
    """Return the plan and its timeline, with offload if necessary and possible; None if it does not fit."""
    if costs.host_link is not None:
        return fitting(plan, costs)
    timeline = simulate(plan, costs, check=False)
    return (plan, timeline) if timeline.fits else None


def _capacity(costs: CostTable, p: int) -> Floats:
    return np.array([costs.capacity_bytes(r) for r in range(p)])


def _room(base: Plan, costs: CostTable) -> Floats:
    """Return the bytes per rank that are free for activations: the capacity minus weights and minus the buffers and
    workspaces of the initial schedule."""
    capacity = _capacity(costs, base.num_ranks)
    if not np.isfinite(capacity).any():
        return capacity
    nothing = np.zeros(costs.num_layers)
    bare = costs.replace(boundary_bytes=nothing, workspace_bytes=nothing)
    beside = simulate(base, costs, check=False).peak_bytes - simulate(base, bare, check=False).peak_bytes
    return capacity - static_bytes(base, costs) - np.maximum(beside, 0.0)


def _after_ms(timeline: Timeline) -> Floats:
    """Return for every rank the time from its last op to the end of its reductions and its optimizer."""
    last = np.zeros(timeline.num_ranks)
    np.maximum.at(last, timeline.spans.rank, timeline.spans.end_ms)
    ends = last.copy()
    for extra in timeline.extras:
        ends[extra.rank] = max(ends[extra.rank], extra.end_ms)
    return ends - last


def _starts_ms(timeline: Timeline, prices: Prices) -> dict[tuple[str, int, int], float]:
    """Return the start times of a schedule's ops; a fused backward counts as I followed by W."""
    starts: dict[tuple[str, int, int], float] = {}
    for span, begins in enumerate(timeline.spans.start_ms.tolist()):
        op = timeline.op(span)
        kind = "I" if op.kind == "B" else op.kind
        starts[kind, op.stage, op.micro_batch] = begins
        if op.kind == "B":
            took = float(prices.took["I"][op.stage, op.micro_batch]) * prices.unit_ms
            starts["W", op.stage, op.micro_batch] = begins + took
    return starts

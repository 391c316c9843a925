"""Hanayo: stages zig-zag over the ranks in waves, without a second copy of the weights.

Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training Efficiency",
SC 2023. Only the abstract was at hand; the order is reconstructed. Rule: 2pW stages, W waves down and up
again; order = greedy list schedule at unit costs (F = b = 1): backward before forward, then the lowest
micro-batch, then the deepest stage, at most p micro-batches in flight; that order is then run at real times.
Bubble 2(p-1)f for F=b and any W, with f the time of one stage; 2(p-1)(1+m/p)f for b=2f; both where p divides
m (a last group of fewer than p micro-batches leaves ranks idle). Peak p micro-batches of one rank's layers.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan
from octopipe.search.systems.registry import Setting, require, system
from octopipe.search.systems.shapes import even_sizes, make_plan, stages_from_sizes, wave
from octopipe.simulation.simulator import simulate

if TYPE_CHECKING:
    from octopipe.search.systems.closed_forms import ClosedForm

MOST_WAVES = 4


@system(
    name="hanayo",
    title="Hanayo",
    paper="Liu et al., SC 2023",
    year=2023,
    tunes=("placement",),
    constraint="at least 2 layers a rank",
)
def hanayo(setting: Setting) -> Plan:
    """Option `waves`: waves over the ranks; by default the fastest of 1..4 that fits (the fastest of all if none
    fits)."""
    p, m, costs = setting.num_ranks, setting.num_micro_batches, setting.costs
    layers = costs.num_layers
    most = layers // (2 * p)
    require(most >= 1, "hanayo", f"{layers} layers do not fill the {2 * p} stages of one wave over pp {p}")
    waves = setting.option("waves", None)
    if waves is not None:
        if isinstance(waves, bool) or not isinstance(waves, int) or not 1 <= waves <= most:
            raise OctoPipeError(f"hanayo: waves is {waves}; give a whole number from 1 to {most}")
        return hanayo_plan(costs, p, m, waves)
    plans = [hanayo_plan(costs, p, m, w) for w in range(1, min(MOST_WAVES, most) + 1)]
    timelines = [simulate(plan, costs) for plan in plans]
    best = min(range(len(plans)), key=lambda k: (not timelines[k].fits, timelines[k].step_ms))
    return plans[best]


def hanayo_plan(costs: CostTable, p: int, m: int, waves: int) -> Plan:
    ranks = wave(2 * p * waves, p)
    stages = stages_from_sizes(even_sizes(costs, len(ranks)), ranks)
    return make_plan(costs, p, m, stages, unit_cost_orders(ranks, p, m))


def unit_cost_orders(ranks: list[int], p: int, m: int) -> list[list[Op]]:
    """Return the orders of the greedy list schedule in which every op takes one slot."""
    last = len(ranks) - 1
    # A rank's ready ops, best first: backward before forward, lowest micro-batch, deepest stage.
    ready: list[list[tuple[bool, int, int]]] = [[] for _ in range(p)]
    orders: list[list[Op]] = [[] for _ in range(p)]
    for k in range(m):
        heappush(ready[ranks[0]], (True, k, 0))
    in_flight, left = 0, 2 * len(ranks) * m
    while left:
        ran: list[tuple[bool, int, int]] = []
        for rank in range(p):
            waiting = ready[rank]
            if not waiting:
                continue
            forward, k, depth = waiting[0]
            if forward and depth == 0 and in_flight >= p:
                continue  # at the limit; ops of micro-batches in flight would come first, so none is ready
            heappop(waiting)
            stage = -depth
            in_flight += forward and stage == 0
            orders[rank].append(Op(stage, "F" if forward else "B", k))
            ran.append((forward, k, depth))
        for forward, k, depth in ran:
            stage = -depth
            if forward:
                follower = (True, k, depth - 1) if stage < last else (False, k, depth)
                heappush(ready[ranks[min(stage + 1, last)]], follower)
            elif stage > 0:
                heappush(ready[ranks[stage - 1]], (False, k, depth + 1))
            else:
                in_flight -= 1
        left -= len(ran)
    return orders


def closed_forms() -> list[ClosedForm]:
    """The bubbles for F = b and b = 2f, and the peak."""
    from octopipe.search.systems.closed_forms import ClosedForm, bubble_ms, even_layers, highest_peak, on_timeline

    forms = []
    for p, m, waves in ((4, 4, 1), (4, 12, 2), (8, 16, 1), (8, 8, 3)):
        bubbles = ((1.0, "2(p-1)f", 2.0 * (p - 1)), (2.0, "2(p-1)(1+m/p)f", 2 * (p - 1) * (1 + m / p)))
        for backward, formula, bubble in bubbles:
            costs = even_layers(2 * p * waves, 1.0, backward)
            forms.append(
                ClosedForm(
                    system="hanayo",
                    case=f"p={p} m={m} W={waves} f=1 b={backward:g}",
                    quantity="bubble",
                    formula=formula,
                    expected=bubble,
                    simulate=on_timeline("hanayo", costs, p, m, bubble_ms, waves=waves),
                )
            )
        forms.append(
            ClosedForm(
                system="hanayo",
                case=f"p={p} m={m} W={waves} f=1 b=2",
                quantity="highest peak, stages",
                formula="2Wp",
                expected=2.0 * waves * p,
                simulate=on_timeline("hanayo", costs, p, m, highest_peak, waves=waves),
            )
        )
    return forms

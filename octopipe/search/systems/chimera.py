"""Chimera: two pipelines in opposite directions share the ranks and fill each other's bubbles.

Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines",
SC 2021. Rule: D = p ranks, even; down stage s on rank s, up stage s on rank D-1-s. A unit of D micro-batches
injects D/2 in each direction: in unit slots F(s, j) at 2j+s and B(s, j) at 2j+2D-1-s, which never collide.
More micro-batches: units follow each other every 2D slots; the slot order is kept and runs at real times.
Bubble (D-2)F for F=b, (D-2)(1+N/D)F for b=2F; peak between D/2+1 and D micro-batches of one rank's layers.

Simplified: a last unit that is not full leaves slots empty (the paper assumes that N is a multiple of D, or
N < D); its forward doubling and backward halving for large N are not used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octopipe.plans.plan import Op, Plan
from octopipe.search.systems.bidirectional import DOWN, UP, bidirectional_plan, micro_batch_of, stage_on
from octopipe.search.systems.registry import Setting, require, system

if TYPE_CHECKING:
    from octopipe.search.systems.closed_forms import ClosedForm


@system(
    name="chimera",
    title="Chimera",
    paper="Li and Hoefler, SC 2021",
    year=2021,
    tunes=("placement",),
    constraint="even pp; weights held twice",
)
def chimera(setting: Setting) -> Plan:
    p, m = setting.num_ranks, setting.num_micro_batches
    require(p % 2 == 0, "chimera", f"pp {p} is odd; its two directions need an even number of ranks")
    orders = [[op for _, op in sorted(slots(rank, p, m))] for rank in range(p)]
    return bidirectional_plan(setting.costs, p, m, orders)


def slots(rank: int, p: int, m: int) -> list[tuple[int, Op]]:
    """Return (time slot, op) for every op of a rank."""
    out = []
    for direction in (DOWN, UP):
        number = stage_on(rank, direction, p)
        depth = rank if direction == DOWN else p - 1 - rank
        for index in range((m - direction + 1) // 2):
            unit, j = divmod(index, p // 2)
            begin = 2 * p * unit + 2 * j
            k = micro_batch_of(index, direction)
            out.append((begin + depth, Op(number, "F", k)))
            out.append((begin + 2 * p - 1 - depth, Op(number, "B", k)))
    return out


def closed_forms() -> list[ClosedForm]:
    """The published bubbles for F = b and b = 2F, and the interval of the peaks."""
    from octopipe.search.systems.closed_forms import ClosedForm, bubble_ms, even_layers, highest_peak, on_timeline

    forms = []
    for p, m in ((4, 4), (4, 12), (8, 8), (8, 16)):
        bubbles = ((1.0, "(D-2)F", p - 2.0), (2.0, "(D-2)(1+N/D)F", (p - 2) * (1 + m / p)))
        for backward, formula, bubble in bubbles:
            costs = even_layers(p, 1.0, backward)
            forms.append(
                ClosedForm(
                    system="chimera",
                    case=f"D={p} N={m} F=1 b={backward:g}",
                    quantity="bubble",
                    formula=formula,
                    expected=bubble,
                    simulate=on_timeline("chimera", costs, p, m, bubble_ms),
                )
            )
        forms.append(
            ClosedForm(
                system="chimera",
                case=f"D={p} N={m} F=1 b=2",
                quantity="highest peak, micro-batches",
                formula="D",
                expected=float(p),
                simulate=on_timeline("chimera", even_layers(p, 1.0, 2.0), p, m, highest_peak),
            )
        )
    return forms

"""Common parts of the zero-bubble systems with stage i on rank i: the plan and the hand-crafted orders.

Knows: the order "F_x, I_{x-k(p-1-i)}, W_{x-k(p-1)}" of ZB-H1 (k=1) and ZB-H2 (k=2), and the values that the
paper publishes about them. Does not know: the heuristic (zb_heuristic.py) and the V (v_shape.py).

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024. Its B (input gradient) is our I.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan
from octopipe.search.systems.closed_forms import ClosedForm, on_timeline, peak_of_rank, span_bubble_ms
from octopipe.search.systems.shapes import even_sizes, loop, make_plan, stages_from_sizes

ZERO_BUBBLE = "Qi et al., ICLR 2024"


def straight_plan(costs: CostTable, p: int, m: int, orders: Sequence[Sequence[Op]]) -> Plan:
    """Return the plan with these orders on the even split, stage i on rank i."""
    return make_plan(costs, p, m, stages_from_sizes(even_sizes(costs, p), loop(p, p)), orders)


def handcrafted_order(rank: int, p: int, m: int, k: int) -> list[Op]:
    """Return the order of one rank in ZB-H1 (k=1) or ZB-H2 (k=2).

    >>> " ".join(map(str, handcrafted_order(0, 2, 3, 1)))
    '0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2'
    """
    order = []
    for x in range(m + k * (p - 1)):
        for kind, index in (("F", x), ("I", x - k * (p - 1 - rank)), ("W", x - k * (p - 1))):
            if 0 <= index < m:
                order.append(Op(rank, kind, index))
    return order


# -- what the paper publishes -----------------------------------------------------------------------------


class Published(NamedTuple):
    """A row of the paper's bubble rates: (span - m(F+I+W)) / span, with transfers of `hop_ms`."""

    p: int
    m: int
    forward_ms: float
    input_ms: float
    weight_ms: float
    hop_ms: float
    hidden: int
    heads: int
    rates: dict[str, float]

    def costs(self) -> CostTable:
        """One layer a stage; bytes as in the paper, for one sample of 1024 tokens."""
        tokens = 1024
        return CostTable.uniform(
            num_layers=self.p,
            forward_ms=self.forward_ms,
            input_ms=self.input_ms,
            weight_ms=self.weight_ms,
            p2p_ms=self.hop_ms,
            activation_bytes=tokens * (34 * self.hidden + 5 * self.heads * tokens),
            stash_bytes=32 * tokens * self.hidden,
        )


def published_rates() -> list[Published]:
    """Zero Bubble, the table of simulated bubble rates: sizes, measured times, and a rate per system."""
    models = ((2304, 24), (4096, 32), (5120, 40), (6144, 48))
    rows = (
        (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083, 0.0433),
        (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837, 0.0039),
        (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444, 0.0026),
        (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698, 0.0029),
        (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559, 0.0022),
        (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294, 0.0010),
        (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672, 0.0066),
        (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088, 0.0516, 0.0054),
        (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576, 0.0266, 0.0028),
        (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641, 0.0038),
        (32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106, 0.0490, 0.0029),
        (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594, 0.0257, 0.0018),
    )
    out = []
    for k, (p, m, f, i, w, hop, plain, h1, h2, two) in enumerate(rows):
        # ZB-1p has the same rate as ZB-H1 in every row.
        rates = {"1f1b": plain, "zb-h1": h1, "zb-1p": h1, "zb-h2": h2, "zb-2p": two}
        out.append(Published(p, m, f, i, w, hop, *models[k // 3], rates))
    return out


def rate_forms(*names: str) -> list[ClosedForm]:
    """The published rates of these systems, to the four digits in which they are printed."""
    return [
        ClosedForm(
            system=name,
            case=f"p={row.p} m={row.m} F={row.forward_ms:g} I={row.input_ms:g} W={row.weight_ms:g} c={row.hop_ms:g}",
            quantity="bubble rate of the span",
            expected=row.rates[name],
            simulate=on_timeline(name, row.costs(), row.p, row.m, lambda timeline: timeline.span_bubble_ratio),
            tolerance=0.5e-4,
        )
        for name in names
        for row in published_rates()
    ]


def handcrafted_forms(name: str, k: int) -> list[ClosedForm]:
    """Span bubble and every rank's memory of ZB-H1 (k=1) or ZB-H2 (k=2)."""
    forms = []
    for p, m, f, i, w in ((4, 8, 1.0, 1.0, 1.0), (8, 16, 3.0, 4.0, 2.0), (5, 13, 6.0, 5.0, 3.5)):
        held, stashed = 68.0, 64.0
        costs = CostTable.uniform(
            num_layers=p, forward_ms=f, input_ms=i, weight_ms=w, activation_bytes=held, stash_bytes=stashed
        )
        case = f"p={p} m={m} F={f:g} I={i:g} W={w:g}"
        forms.append(
            ClosedForm(
                system=name,
                case=case,
                quantity="bubble (span)",
                formula="(p-1)(F+I-W)" if k == 1 else "(p-1)(F+I-2W)",
                expected=(p - 1) * (f + i - k * w),
                simulate=on_timeline(name, costs, p, m, span_bubble_ms),
            )
        )
        for rank in (0, p // 2, p - 1):
            forms.append(
                ClosedForm(
                    system=name,
                    case=f"{case} M_B={held:g} M_W={stashed:g}",
                    quantity=f"peak of rank {rank}",
                    formula="(p-i)M_B + i M_W" if k == 1 else "(2p-2i-1)M_B + 2i M_W",
                    expected=(k * (p - rank - 1) + 1) * held + k * rank * stashed,
                    simulate=on_timeline(name, costs, p, m, peak_of_rank(rank)),
                )
            )
    return forms

"""What the straight zero-bubble systems share: stage i on rank i, and the hand-crafted orders.

Knows: the order "F_x, I_{x-k(p-1-i)}, W_{x-k(p-1)}" of ZB-H1 (k=1) and ZB-H2 (k=2). Does not know: times.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024. Its B (input gradient) is our I.
"""

from __future__ import annotations

from collections.abc import Sequence

from octopipe.cost import CostTable
from octopipe.plan import Op, Plan
from octopipe.systems.shapes import even_sizes, loop, make_plan, stages_from_sizes

ZERO_BUBBLE = "Qi et al., ICLR 2024"


def straight_plan(costs: CostTable, p: int, m: int, orders: Sequence[Sequence[Op]]) -> Plan:
    """The plan of these orders over the even split, stage i on rank i."""
    return make_plan(costs, p, m, stages_from_sizes(even_sizes(costs, p), loop(p, p)), orders)


def handcrafted_order(rank: int, p: int, m: int, k: int) -> list[Op]:
    """ZB-H1 (k=1) or ZB-H2 (k=2) of one rank.

    >>> " ".join(map(str, handcrafted_order(0, 2, 3, 1)))
    '0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2'
    """
    order = []
    for x in range(m + k * (p - 1)):
        for kind, index in (("F", x), ("I", x - k * (p - 1 - rank)), ("W", x - k * (p - 1))):
            if 0 <= index < m:
                order.append(Op(rank, kind, index))
    return order

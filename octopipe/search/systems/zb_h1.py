"""ZB-H1: 1F1B with the weight gradients moved into the bubble, in 1F1B's memory.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, hand-crafted schedule 1.
Rule: for x = 0, 1, ... rank i runs F_x, I_{x-(p-1-i)} and W_{x-(p-1)}, each where its index is in [0, m).
Span bubble (p-1)(F+I-W) where W <= F, else (p-1)I; rank i holds (p-i)M_B + i M_W (m >= 2p-1).
"""

from octopipe.plans.plan import Plan
from octopipe.search.systems.closed_forms import ClosedForm
from octopipe.search.systems.registry import Setting, system
from octopipe.search.systems.zero_bubble import (
    ZERO_BUBBLE,
    handcrafted_forms,
    handcrafted_order,
    rate_forms,
    straight_plan,
)


@system(name="zb-h1", title="ZB-H1", paper=ZERO_BUBBLE, year=2024, tunes=("scheduling",))
def zb_h1(setting: Setting) -> Plan:
    p, m = setting.num_ranks, setting.num_micro_batches
    return straight_plan(setting.costs, p, m, [handcrafted_order(i, p, m, 1) for i in range(p)])


def closed_forms() -> list[ClosedForm]:
    """The closed forms, and the paper's bubble rates of ZB-H1 and of the 1F1B it is measured against."""
    return handcrafted_forms("zb-h1", 1) + rate_forms("1f1b", "zb-h1")

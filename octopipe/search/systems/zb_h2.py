"""ZB-H2: twice 1F1B's warm-up, so that (almost) no bubble is left inside a rank's span.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, hand-crafted schedule 2.
Rule: for x = 0, 1, ... rank i runs F_x, I_{x-2(p-1-i)} and W_{x-2(p-1)}, each where its index is in [0, m).
Span bubble (p-1)(F+I-2W) where W <= F, and 0 where that is negative; rank i holds (2p-2i-1)M_B + 2i M_W
(m >= 2p-1): about twice 1F1B's memory.
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


@system(name="zb-h2", title="ZB-H2", paper=ZERO_BUBBLE, year=2024, tunes=("scheduling",))
def zb_h2(setting: Setting) -> Plan:
    p, m = setting.num_ranks, setting.num_micro_batches
    return straight_plan(setting.costs, p, m, [handcrafted_order(i, p, m, 2) for i in range(p)])


def closed_forms() -> list[ClosedForm]:
    """The closed forms, and the paper's bubble rates."""
    return handcrafted_forms("zb-h2", 2) + rate_forms("zb-h2")

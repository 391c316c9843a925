"""V-Min: the least activation memory a V allows, a third of 1F1B's for many ranks.

Qi, Wan, Amar, Lin, "Pipeline Parallelism with Controllable Memory", NeurIPS 2024.
Rule: stages r and 2p-1-r on rank r; rank i runs F, F, I, I of its chunks 0, 1, 1, 0 in slots i, 2p-1-i,
2p+d+i, 4p+d-1-i (d = 2 if 3 divides p, else 0), again every six slots; W in the first free slots; warm-up
and cool-down are tightened without raising the peak (see v_shape.py).
With F = I = W, in half-chunks and m >= 2p, bubble/peak: p=4 11/4, 6 17/6, 8 27/8, 12 41/10, 16 59/12.
"""

from octopipe.plans.plan import Plan
from octopipe.search.systems.closed_forms import ClosedForm
from octopipe.search.systems.registry import Setting, system
from octopipe.search.systems.v_shape import block_orders, require_two_chunks, unit_forms, v_plan


@system(
    name="v-min",
    title="V-Min",
    paper="Qi et al., NeurIPS 2024",
    year=2024,
    tunes=("placement", "scheduling"),
    constraint="at least 2 layers a rank",
)
def v_min(setting: Setting) -> Plan:
    p, m, costs = setting.num_ranks, setting.num_micro_batches, setting.costs
    require_two_chunks("v-min", costs, p)
    return v_plan(costs, p, m, block_orders(p, m, block))


def block(i: int, p: int) -> tuple[int, int, int, int]:
    """Slots of F chunk 0, F chunk 1, I chunk 1, I chunk 0 on rank i."""
    shift = 2 if p % 3 == 0 else 0
    return i, 2 * p - 1 - i, 2 * p + shift + i, 4 * p + shift - 1 - i


def closed_forms() -> list[ClosedForm]:
    """The published bubbles and peaks, p by p."""
    table = {4: (11, 4), 6: (17, 6), 8: (27, 8), 12: (41, 10), 16: (59, 12)}
    return [form for p, (b, top) in table.items() for form in unit_forms("v-min", p, b, top, formula=("", ""))]

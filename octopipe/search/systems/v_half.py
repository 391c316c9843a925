"""V-Half: half of 1F1B's activation memory, for a longer warm-up.

Qi, Wan, Amar, Lin, "Pipeline Parallelism with Controllable Memory", NeurIPS 2024.
Rule: stages r and 2p-1-r on rank r; rank i runs F, F, I, I of its chunks 0, 1, 1, 0 in slots 2i, 3p-2-i,
3p-1+e+2i, 6p+e-2-i (e = 3 if p is even, else 0), again every six slots; W in the first free slots; warm-up
and cool-down are tightened without raising the peak (see v_shape.py).
With F = I = W, in half-chunks and m >= 2p: bubble 3p-7, peak p+2 (p even, p >= 4); 3p-4 and p+1 (p odd).
"""

from octopipe.plans.plan import Plan
from octopipe.search.systems.closed_forms import ClosedForm
from octopipe.search.systems.registry import Setting, system
from octopipe.search.systems.v_shape import block_orders, require_two_chunks, unit_forms, v_plan


@system(
    name="v-half",
    title="V-Half",
    paper="Qi et al., NeurIPS 2024",
    year=2024,
    tunes=("placement", "scheduling"),
    constraint="at least 2 layers a rank",
)
def v_half(setting: Setting) -> Plan:
    p, m, costs = setting.num_ranks, setting.num_micro_batches, setting.costs
    require_two_chunks("v-half", costs, p)
    return v_plan(costs, p, m, block_orders(p, m, block))


def block(i: int, p: int) -> tuple[int, int, int, int]:
    """Slots of F chunk 0, F chunk 1, I chunk 1, I chunk 0 on rank i."""
    shift = 3 if p % 2 == 0 else 0
    return 2 * i, 3 * p - 2 - i, 3 * p - 1 + shift + 2 * i, 6 * p + shift - 2 - i


def closed_forms() -> list[ClosedForm]:
    """Bubble and peak for even and odd p."""
    forms = []
    for p in (3, 4, 5, 8, 11, 16):
        if p % 2 == 0:
            forms += unit_forms("v-half", p, 3 * p - 7, p + 2, formula=("3p-7", "p+2"))
        else:
            forms += unit_forms("v-half", p, 3 * p - 4, p + 1, formula=("3p-4", "p+1"))
    return forms

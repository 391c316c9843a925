"""ZB-V: no bubble inside a rank's span, in 1F1B's memory, on a V of two chunks per rank.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section on the schedule in p M_B of memory.
Rule: stages r and 2p-1-r on rank r. Worker i (from 1) warms up with 2p-i forwards of chunk 1 and i-1 of
chunk 2, runs p-i groups (F, I, W) of chunk 2, then groups of chunks 2 and 1 in turn; from the last chunk-1
forward on, F and I come first and W fills the gaps. The order is made in unit slots and replayed.
With F = I = W: span bubble 0 (m >= 2p-1), peak 2p half-chunks = p M_B.
"""

from octopipe.plans.plan import Op, Plan
from octopipe.search.systems.closed_forms import ClosedForm
from octopipe.search.systems.registry import Setting, system
from octopipe.search.systems.v_shape import cool_down, require_two_chunks, unit_forms, v_plan


@system(
    name="zb-v",
    title="ZB-V",
    paper="Qi et al., ICLR 2024",
    year=2024,
    tunes=("placement", "scheduling"),
    constraint="at least 2 layers a rank",
)
def zb_v(setting: Setting) -> Plan:
    p, m, costs = setting.num_ranks, setting.num_micro_batches, setting.costs
    require_two_chunks("zb-v", costs, p)
    return v_plan(costs, p, m, cool_down(p, [_pattern(r, p, m) for r in range(p)], 2 * p))


def _pattern(r: int, p: int, m: int) -> list[Op]:
    """Return warm-up and groups of rank r (from 0); micro-batches from m on are left out."""
    down, up = r, 2 * p - 1 - r
    # The first chunk-2 forward arrives after 2(p-r)-1 chunk-1 forwards; then the two take turns.
    shape = [(down, "F")] * (2 * (p - r) - 1) + [(up, "F"), (down, "F")] * r
    shape += [(up, kind) for kind in "FIW"] * (p - 1 - r)
    # m rounds are enough for every op; those that an earlier group has run already are left out below.
    shape += [(stage, kind) for stage in (up, down) for kind in "FIW"] * m
    order: list[Op] = []
    done: dict[tuple[int, str], int] = {}
    for stage, kind in shape:
        b = done.get((stage, kind), 0)
        if b < m:
            order.append(Op(stage, kind, b))
            done[stage, kind] = b + 1
    return order


def closed_forms() -> list[ClosedForm]:
    """No span bubble, and 1F1B's peak."""
    return [form for p in (2, 4, 7, 8) for form in unit_forms("zb-v", p, 0, 2 * p, formula=("0", "2p = p M_B"))]

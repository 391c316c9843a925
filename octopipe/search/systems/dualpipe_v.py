"""DualPipeV: DualPipe folded in half, so that each rank holds two stages and the weights are held once.

DeepSeek-AI, "DualPipe", public code release, 2025 ("cut-in-half" after Sea AI Lab's proposal). Rule: stages r
and 2p-1-r on rank r; the eight steps of DualPipe with p in the place of p/2, r in the place of h, and
m-2p+r+1 steady iterations; phase 0 is the way down, phase 1 the way up. m >= 2p.
Bubble (p-1)(F&B + B - 3W) in times of one of the 2p stages; activations 2p+1 stages.

If the costs have an exchange between expert ranks, F&B is a pair of the plan; without one it is F followed by B, as in
DualPipe. torchtitan runs this schedule's overlapped pairs as OVERLAP_F_B.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octopipe.plans.plan import Op, Plan
from octopipe.search.systems.dualpipe import Block, dual_order, forms_of_pairs, overlapped
from octopipe.search.systems.registry import Setting, require, system
from octopipe.search.systems.shapes import even_sizes, make_plan, stages_from_sizes, wave

if TYPE_CHECKING:
    from octopipe.search.systems.closed_forms import ClosedForm


@system(
    name="dualpipev",
    title="DualPipeV",
    paper="DeepSeek-AI, 2025",
    year=2025,
    tunes=("placement",),
    constraint="micro-batches >= 2 pp; at least 2 layers a rank",
)
def dualpipe_v(setting: Setting) -> Plan:
    p, m, costs = setting.num_ranks, setting.num_micro_batches, setting.costs
    require(m >= 2 * p, "dualpipev", f"{m} micro-batches are fewer than 2 pp = {2 * p}")
    layers = costs.num_layers
    require(layers >= 2 * p, "dualpipev", f"{layers} layers do not fill 2 stages on each of pp {p}")
    stages = stages_from_sizes(even_sizes(costs, 2 * p), wave(2 * p, p))
    blocks = dualpipe_v_blocks(p, m)
    plan = make_plan(costs, p, m, stages, [[op for block in row for op in block] for row in blocks])
    return overlapped(plan, costs, blocks)


def dualpipe_v_blocks(p: int, m: int) -> list[list[Block]]:
    """Return the order of every rank as blocks: an overlapped pair F&B is one block, every other op a block by
    itself."""
    return [
        [
            tuple(Op(rank if phase == 0 else 2 * p - 1 - rank, kind, k) for phase, kind, k in block)
            for block in dual_order(p, rank, m - 2 * p)
        ]
        for rank in range(p)
    ]


def closed_forms() -> list[ClosedForm]:
    """DualPipe's bubble with 2p stages in the place of p, with pairs as blocks, and the activations."""
    forms = []
    for p, m, weight, pace in ((2, 8, 1.0, 1.0), (4, 16, 0.5, 0.9), (8, 32, 0.5, 0.8)):
        case = f"p={p} m={m} per stage F=1 B={1 + weight:g} W={weight:g} F&B={pace * (2 + weight):g}"
        rules = "(p-1)(F&B+B-3W)", "stages", "2p+1"
        forms += forms_of_pairs("dualpipev", dualpipe_v_blocks, p, m, weight, pace, p, case, rules)
    return forms

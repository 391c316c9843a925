"""1F1B: each rank alternates one forward and one backward after a short warm-up.

Fan et al., "DAPPLE", PPoPP 2021; Narayanan et al., "PipeDream-Flush" / Megatron-LM, SC 2021.
Rule: one stage per rank; rank i warms up with p-1-i forwards, then F and B in turn, then the remaining B.
Bubble (p-1)(F+b), peak (p-i) micro-batches of activations on rank i.
"""

from octopipe.plans.plan import Plan
from octopipe.search.systems.registry import Setting, system
from octopipe.search.systems.shapes import even_sizes, loop, make_plan, one_f_one_b_order, stages_from_sizes


@system(name="1f1b", title="1F1B", paper="Fan et al., PPoPP 2021", year=2021)
def one_f_one_b(setting: Setting) -> Plan:
    p, m = setting.num_ranks, setting.num_micro_batches
    stages = stages_from_sizes(even_sizes(setting.costs, p), loop(p, p))
    orders = [one_f_one_b_order(s, p - 1 - s, m) for s in range(p)]
    return make_plan(setting.costs, p, m, stages, orders)

"""GPipe: all forwards, then all backwards.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019.
Rule: one stage per rank; every rank runs all its forwards, then its backwards in the same order.
Bubble (p-1)(F+b), peak m micro-batches of activations. Simplified: no recomputation of its own.
"""

from octopipe.plans.plan import Op, Plan
from octopipe.search.systems.registry import Setting, system
from octopipe.search.systems.shapes import even_sizes, loop, make_plan, stages_from_sizes


@system(name="gpipe", title="GPipe", paper="Huang et al., NeurIPS 2019", year=2019)
def gpipe(setting: Setting) -> Plan:
    p, m = setting.num_ranks, setting.num_micro_batches
    stages = stages_from_sizes(even_sizes(setting.costs, p), loop(p, p))
    orders = [[Op(s, kind, k) for kind in "FB" for k in range(m)] for s in range(p)]
    return make_plan(setting.costs, p, m, stages, orders)

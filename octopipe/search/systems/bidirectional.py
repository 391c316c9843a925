"""Two pipelines through the same ranks, one down and one up: the common part of Chimera and DualPipe.

Knows: which stages and routes a bidirectional plan has. Does not know: any order. Stage s of the down
pipeline is stage s, stage s of the up pipeline is stage p + s; both hold the same layers, on different ranks,
so the weights are held twice and the simulator adds the reduction of their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan
from octopipe.search.systems.shapes import even_sizes, make_plan, stages_from_sizes

DOWN, UP = 0, 1


def stage_on(rank: int, direction: int, num_ranks: int) -> int:
    """The number of the stage that a rank holds in one direction."""
    return rank if direction == DOWN else num_ranks + (num_ranks - 1 - rank)


def micro_batch_of(index: int, direction: int) -> int:
    """The number of the `index`-th micro-batch of a direction: direction 0 takes the even ones, direction 1 the odd
    ones."""
    return 2 * index + direction


def bidirectional_plan(
    costs: CostTable, num_ranks: int, num_micro_batches: int, orders: Sequence[Sequence[Op]]
) -> Plan:
    """Return the plan with these orders on the even split, which is held once in each direction."""
    p = num_ranks
    sizes = even_sizes(costs, p)
    stages = stages_from_sizes(sizes, range(p)) + stages_from_sizes(sizes, range(p - 1, -1, -1))
    return make_plan(
        costs,
        p,
        num_micro_batches,
        stages,
        orders,
        routes=(tuple(range(p)), tuple(range(p, 2 * p))),
        route_of_micro_batch=tuple(k % 2 for k in range(num_micro_batches)),
    )

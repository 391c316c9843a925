"""Building blocks of many systems: even splits, stage-to-rank maps, the 1F1B order.

Knows: partitions, placements and orders as plain lists. Does not know: any one system's rules.
"""

from __future__ import annotations

from collections.abc import Sequence

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan, Stage


def even_sizes(costs: CostTable, num_stages: int) -> list[int]:
    """Return the layers per stage of the even split.

    The layers between embedding and head are divided evenly, the remainder goes to the last stages; the
    embedding joins the first stage and the head the last. If that would leave a stage empty, embedding and head
    count as any other layer.
    """
    layers = costs.num_layers
    if num_stages > layers:
        raise OctoPipeError(
            f"{num_stages} stages for the {layers} layers of {costs.model}; every stage needs a layer: use fewer"
        )
    embedding = int(layers > 1 and costs.symbols[0] == "E")
    head = int(layers > 1 and costs.symbols[-1] == "L")
    inner = layers - embedding - head
    if inner < num_stages:
        embedding = head = 0
        inner = layers
    base, rest = divmod(inner, num_stages)
    sizes = [base + (1 if s >= num_stages - rest else 0) for s in range(num_stages)]
    sizes[0] += embedding
    sizes[-1] += head
    return sizes


def stages_from_sizes(
    sizes: Sequence[int], ranks: Sequence[int], recompute: Sequence[object] = ()
) -> tuple[Stage, ...]:
    """Return consecutive stages of these sizes on these ranks; `recompute` has one entry per stage, as in `Stage`."""
    stages, first = [], 0
    for s, (size, rank) in enumerate(zip(sizes, ranks, strict=True)):
        again = recompute[s] if recompute else False
        stages.append(Stage(first=first, stop=first + size, rank=rank, recompute=again))  # type: ignore[arg-type]
        first += size
    return tuple(stages)


def loop(num_stages: int, num_ranks: int) -> list[int]:
    """Stage s on rank s mod p."""
    return [s % num_ranks for s in range(num_stages)]


def wave(num_stages: int, num_ranks: int) -> list[int]:
    """Return the rank of every stage, down and up again: 0 1 .. p-1 p-1 .. 1 0 0 1 .."""
    turns = [s % (2 * num_ranks) for s in range(num_stages)]
    return [r if r < num_ranks else 2 * num_ranks - 1 - r for r in turns]


def one_f_one_b_order(stage: int, warmup: int, num_micro_batches: int) -> list[Op]:
    """`warmup` forwards, then one forward and one backward in turn, then the remaining backwards."""
    warmup = min(warmup, num_micro_batches)
    order = [Op(stage, "F", m) for m in range(warmup)]
    for m in range(num_micro_batches):
        if warmup + m < num_micro_batches:
            order.append(Op(stage, "F", warmup + m))
        order.append(Op(stage, "B", m))
    return order


def make_plan(
    costs: CostTable, num_ranks: int, num_micro_batches: int, stages: tuple[Stage, ...], orders: Sequence[Sequence[Op]],
    **more: object,
) -> Plan:  # fmt: skip
    """Return a Plan for the model of these costs; `more` are further fields of Plan."""
    return Plan(
        model=costs.model,
        num_layers=costs.num_layers,
        num_ranks=num_ranks,
        num_micro_batches=num_micro_batches,
        stages=stages,
        orders=tuple(tuple(order) for order in orders),
        **more,  # type: ignore[arg-type]
    )

"""Converts a plan for a chain of layers to a plan for layers that fork and join.

Knows: where the stages of a chain must be divided because layers are connected differently, the edges between the
parts, the positions of the parts' ops, and when the edges of a plan are those of the layers. Does not know: times or
how plans are searched.

The layers of a graph are numbered so that a forward could run them one after the other. Every plan for that chain is
therefore also a plan for the graph: a stage that contains a fork, a join or an end becomes several stages on the same
rank, and each of its ops becomes the ops of the parts, in the order of the layers (backward: in reverse). An order of
ops that satisfies the dependencies of the chain also satisfies those of the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from octopipe.base.errors import OctoPipeError
from octopipe.costs.layer_graph import LayerGraph
from octopipe.plans.op import Op, Stage
from octopipe.plans.paths import Edge, edges_of
from octopipe.plans.plan import Plan


def along_graph(plan: Plan, graph: LayerGraph | None) -> Plan:
    """Return the plan with the connections of the graph; a plan that already forks must have them, and is returned
    unchanged."""
    if plan.forks and graph is not None:
        check_connections(plan, graph)
    if graph is None or plan.forks:
        return plan
    if plan.num_layers != graph.num_layers:
        raise OctoPipeError(f"the plan has {plan.num_layers} layers, the graph {graph.num_layers}; use the plan's own")
    stages: list[Stage] = []
    parts: list[list[int]] = []
    again = {(op.stage, op.micro_batch) for order in plan.orders for op in order if op.kind == "R"}
    for s, stage in enumerate(plan.stages):
        inside = [k for k in graph.borders if stage.first < k < stage.stop]
        ends = [stage.first, *inside, stage.stop]
        parts.append(list(range(len(stages), len(stages) + len(ends) - 1)))
        if inside and all(number != s for number, _ in again):
            stage = replace(stage, recompute=False)  # its backward directly follows its forward
        stages += [_part(stage, first, stop) for first, stop in itertools.pairwise(ends)]
    routes = tuple(tuple(part for s in route for part in parts[s]) for route in plan.routes)
    orders, pairs = [], set[tuple[Op, Op]]()
    for rank in range(plan.num_ranks):
        order: list[Op] = []
        for slot in plan.slots(rank):
            made = [_ops(op, parts[op.stage], stages, again) for op in slot]
            if len(made) == 2:
                made = [_beside(made[0], made[1], stages, pairs)]
            order += made[0]
        orders.append(tuple(order))
    return replace(
        plan,
        stages=tuple(stages),
        orders=tuple(orders),
        pairs=frozenset(pairs),
        routes=routes,
        edges=tuple(_edges(route, stages, graph) for route in routes),
    ).check()


def chain_of(num_layers: int) -> LayerGraph:
    """Return the graph of layers each of which takes the output of the layer before it."""
    return LayerGraph(takes=((), *((k,) for k in range(num_layers - 1))))


def check_connections(plan: Plan, graph: LayerGraph) -> None:
    """Raise an error unless every stage of a plan that forks takes exactly what its first layer takes, in the same
    order: edges between other stages would compute another model."""
    if plan.num_layers != graph.num_layers:
        raise OctoPipeError(f"the plan has {plan.num_layers} layers, the graph {graph.num_layers}; use the plan's own")
    for number, route in enumerate(plan.routes):
        ending: dict[int, list[int]] = {}
        held: set[int] = set()
        for s in sorted(route, key=lambda s: plan.stages[s].shard or (0, 1)):
            stage = plan.stages[s]
            held |= set(range(stage.first, stage.stop))
            if stage.first < stage.stop:
                ending.setdefault(stage.stop - 1, []).append(s)
        if len(held) < plan.num_layers:
            gone = min(set(range(plan.num_layers)) - held)
            raise OctoPipeError(f"path {number} leaves out layer {gone}, which every micro-batch passes; add its stage")
        for s in route:
            _check_stage(plan, graph, number, s, ending)


def _check_stage(plan: Plan, graph: LayerGraph, number: int, s: int, ending: Mapping[int, list[int]]) -> None:
    """Raise an error unless a stage takes what its first layer takes. `ending`: the stages that end with a layer, on
    the path with this number."""
    stage = plan.stages[s]
    if stage.first == stage.stop:  # the loss of shards, which the plan's own rules check
        return
    inside = [k for k in graph.borders if stage.first < k < stage.stop]
    if inside:
        raise OctoPipeError(
            f"stage {s} holds layers [{stage.first}, {stage.stop}), and layer {inside[0]} must begin a stage, because "
            "layers fork or join there; divide the stage"
        )
    taken = graph.takes[stage.first]
    into = [a for a, b in edges_of(plan.routes, plan.edges, number) if b == s]
    wanted = [a for k in taken for a in ending.get(k, ())]
    if into != wanted and not (len(taken) == 1 and sorted(into) == sorted(wanted)):
        raise OctoPipeError(
            f"path {number}: stage {s} takes its input from stages {into}, but layer {stage.first} takes the outputs "
            f"of layers {list(taken)}, in this order, from stages {wanted}; give the path these edges"
        )


def _part(stage: Stage, first: int, stop: int) -> Stage:
    again = stage.recompute
    if isinstance(again, tuple):
        again = tuple(k for k in again if first <= k < stop) or False
    return replace(stage, first=first, stop=stop, recompute=again)


def _ops(op: Op, parts: list[int], stages: list[Stage], again: set[tuple[int, int]]) -> list[Op]:
    """Return the ops of a stage's parts that replace an op of the stage; only parts that recompute something have an R.

    A stage may recompute some micro-batches and run the backward of others directly after their forward. Once it is
    divided, forwards of other parts lie between the two, so that the parts recompute these micro-batches as well.
    """
    redone = [s for s in parts if stages[s].recomputed_layers]
    mine = redone if op.kind == "R" else parts
    made = [Op(s, op.kind, op.micro_batch) for s in (mine if op.kind in "FR" else reversed(mine))]
    if op.kind in "IB" and len(parts) > 1 and (op.stage, op.micro_batch) not in again:
        return [*(Op(s, "R", op.micro_batch) for s in redone), *made]
    return made


def _beside(first: list[Op], second: list[Op], stages: list[Stage], pairs: set[tuple[Op, Op]]) -> list[Op]:
    """Return the ops of a pair whose stages were divided, and add the new pair to `pairs`.

    The largest part of one op is paired with the largest part of the other. The parts before and after each of them run
    alone, before and after the pair.
    """
    at = [
        max(range(len(ops)), key=lambda k: (ops[k].kind != "R", stages[ops[k].stage].num_layers))
        for ops in (first, second)
    ]
    pair = first[at[0]], second[at[1]]
    pairs.add(pair)
    return [*first[: at[0]], *second[: at[1]], *pair, *first[at[0] + 1 :], *second[at[1] + 1 :]]


def _edges(route: tuple[int, ...], stages: list[Stage], graph: LayerGraph) -> tuple[Edge, ...]:
    """Return the edges of a route, with the inputs of every stage in the order in which its first layer takes them."""
    ending = {stages[s].stop - 1: s for s in route}
    return tuple((ending[k], s) for s in route for k in graph.takes[stages[s].first])

"""Random plans for tests: any partition, placement, order, recomputation and routes that check accepts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import numpy as np

from octopipe.costs.cluster.hardware import Link, Network
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan, Stage, parse_orders


def random_cuts(rng: random.Random, layers: int, stages: int) -> list[tuple[int, int]]:
    inner = sorted(rng.sample(range(1, layers), stages - 1))
    edges = [0, *inner, layers]
    return list(itertools.pairwise(edges))


def from_csv(text: str) -> tuple[tuple[Op, ...], ...]:
    """Orders as `Plan.to_csv` writes them; empty cells are skipped."""
    return parse_orders([[cell for cell in line.split(",") if cell] for line in text.splitlines()])


def interleaved(rng: random.Random, needs: Mapping[Op, set[Op]], stages: Sequence[Stage], ranks: int) -> list[list[Op]]:
    """The orders of one random interleaving of all ops; `needs` says what must be over before an op."""
    orders: list[list[Op]] = [[] for _ in range(ranks)]
    done: set[Op] = set()
    while len(done) < len(needs):
        op = rng.choice(sorted(op for op in needs if op not in done and needs[op] <= done))
        done.add(op)
        orders[stages[op.stage].rank].append(op)
    return orders


def random_plan(
    rng: random.Random, *, max_layers: int = 8, max_ranks: int = 4, max_micro_batches: int = 5, routes: int = 1
) -> Plan:
    """A valid plan; its orders are one random interleaving of all ops that respects the dependencies."""
    layers = rng.randint(1, max_layers)
    ranks = rng.randint(1, max_ranks)
    micro_batches = rng.randint(1, max_micro_batches)
    stages: list[Stage] = []
    paths: list[tuple[int, ...]] = []
    for _ in range(routes):
        cuts = random_cuts(rng, layers, rng.randint(1, layers))
        paths.append(tuple(range(len(stages), len(stages) + len(cuts))))
        for first, stop in cuts:
            again = rng.choice([False, False, True, (rng.randrange(first, stop),)])
            stages.append(Stage(first=first, stop=stop, rank=rng.randrange(ranks), recompute=again))
    route_of = tuple(rng.randrange(routes) for _ in range(micro_batches))
    needs: dict[Op, list[Op]] = {}
    for m in range(micro_batches):
        path = paths[route_of[m]]
        split = {s: rng.random() < 0.7 for s in path}
        for k, s in enumerate(path):
            forward, back = Op(s, "F", m), Op(s, "I" if split[s] else "B", m)
            needs[forward] = [Op(path[k - 1], "F", m)] if k else []
            needs[back] = [forward]
            if stages[s].recompute:
                needs[Op(s, "R", m)] = [forward]
                needs[back].append(Op(s, "R", m))
            if k + 1 < len(path):
                after = path[k + 1]
                needs[back].append(Op(after, "I" if split[after] else "B", m))
            if split[s]:
                needs[Op(s, "W", m)] = [back]
    orders: list[list[Op]] = [[] for _ in range(ranks)]
    done: set[Op] = set()
    waiting = list(needs)
    while waiting:
        ready = [op for op in waiting if all(p in done for p in needs[op])]
        op = rng.choice(ready)
        orders[stages[op.stage].rank].append(op)
        done.add(op)
        waiting.remove(op)
    return Plan(
        model="random",
        num_layers=layers,
        num_ranks=ranks,
        num_micro_batches=micro_batches,
        stages=tuple(stages),
        orders=tuple(map(tuple, orders)),
        routes=tuple(paths),
        route_of_micro_batch=route_of,
    )


def random_graph_plan(rng: random.Random) -> Plan:
    """A plan whose paths are random graphs over stages, some of which are shards, in a random order. The shards of a
    layer take the same inputs, and their outputs meet."""
    ranks, micro_batches = rng.randint(1, 4), rng.randint(1, 4)
    stages: list[Stage] = []
    blocks: list[list[int]] = []  # a whole stage, or all shards of some layers
    layers = 0
    for _ in range(rng.randint(2, 5)):
        parts = rng.choice((1, 1, 1, 2, 3))
        width = rng.randint(1, 2)
        blocks.append(list(range(len(stages), len(stages) + parts)))
        for k in range(parts):
            shard = (k, parts) if parts > 1 else None
            stages.append(Stage(first=layers, stop=layers + width, rank=rng.randrange(ranks), shard=shard))
        layers += width
    if stages[-1].shard is not None:  # a split head: its shards meet in the loss
        blocks.append([len(stages)])
        stages.append(Stage(first=layers, stop=layers, rank=rng.randrange(ranks)))
    paths, edges = [], []
    for number in range(rng.choice((1, 2))):
        members = list(blocks)
        if number and len(members) > 2:  # a second path may leave whole layers out, as a micro-batch without an image
            members.remove(rng.choice(members[:-2]))
        paths.append(tuple(s for block in members for s in block))
        edges.append(_random_edges(rng, stages, members))
    route_of = tuple(rng.randrange(len(paths)) for _ in range(micro_batches))
    needs: dict[Op, set[Op]] = {}
    for m in range(micro_batches):
        back = {s: Op(s, rng.choice("IB"), m) for s in paths[route_of[m]]}
        for s in paths[route_of[m]]:
            needs[Op(s, "F", m)] = {Op(a, "F", m) for a, b in edges[route_of[m]] if b == s}
            needs[back[s]] = {Op(s, "F", m)} | {back[b] for a, b in edges[route_of[m]] if a == s}
            if back[s].kind == "I":
                needs[Op(s, "W", m)] = {back[s]}
    orders = interleaved(rng, needs, stages, ranks)
    plan = Plan(
        num_layers=layers,
        num_ranks=ranks,
        num_micro_batches=micro_batches,
        stages=tuple(stages),
        orders=tuple(map(tuple, orders)),
        routes=tuple(paths),
        edges=tuple(edges),
        route_of_micro_batch=route_of,
    )
    used = {s for path in plan.routes for s in path}
    assert used == set(range(len(stages)))
    plan.check()
    for op in needs:
        assert set(plan.predecessors(op)) == needs[op]
    return plan


def _random_edges(rng: random.Random, stages: list[Stage], members: list[list[int]]) -> tuple[tuple[int, int], ...]:
    """Random edges between the blocks of a path. What takes the shards of a layer takes nothing else."""
    arrows: list[tuple[int, int]] = []
    for at, block in enumerate(members[1:], 1):
        some = rng.sample(members[:at], min(at, rng.choice((1, 1, 2, 3))))
        split = [one for one in some if len(one) > 1]
        if len(members[at - 1]) > 1 or stages[block[0]].first == stages[block[0]].stop:
            some = [members[at - 1]]
        elif split:
            some = split[:1]
        arrows += [(a, b) for one in some for a in one for b in block]
    return tuple(sorted(arrows))


def random_costs(rng: random.Random, plan: Plan, *, zeros: bool = True) -> CostTable:
    """Uneven layers, links, ranks and micro-batches; with `zeros`, some times are exactly zero."""
    layers = plan.num_layers

    def times() -> np.ndarray:
        return np.array([rng.choice([0.0 if zeros else 0.5, 1.0, rng.uniform(0.01, 5)]) for _ in range(layers)])

    activation = np.array([rng.uniform(0, 4) for _ in range(layers)])
    factor = None
    if rng.random() < 0.5:
        factor = np.array([[rng.uniform(0.5, 2) for _ in range(layers)] for _ in range(plan.num_micro_batches)])
    return CostTable(
        model="random",
        symbols="T" * layers,
        forward_ms=times(),
        input_ms=times(),
        weight_ms=times(),
        activation_bytes=activation,
        stash_bytes=activation * rng.random(),
        static_bytes=np.array([rng.uniform(0, 3) for _ in range(layers)]),
        boundary_bytes=np.array([rng.choice([0.0, rng.uniform(0, 2)]) for _ in range(layers)]),
        workspace_bytes=np.array([rng.choice([0.0, rng.uniform(0, 2)]) for _ in range(layers)]),
        network=Network(
            intra=Link(latency_ms=rng.choice([0.0 if zeros else 0.1, 0.3, 2.0]), ms_per_byte=rng.choice([0.0, 0.5])),
            inter=Link(latency_ms=rng.uniform(0.01, 3), ms_per_byte=rng.uniform(0, 1)),
            ranks_per_node=rng.randint(1, 4),
        ),
        rank_slowdown=tuple(rng.uniform(0.5, 2) for _ in range(plan.num_ranks)) if rng.random() < 0.5 else (),
        micro_batch_factor=factor,
    )

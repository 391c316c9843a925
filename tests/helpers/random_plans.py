"""Random plans of every irregular kind: partition, placement, routes, order, split, recompute.

Any order that a random walk over ready ops produces is valid, so `check` must accept every plan made here.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from octopipe.plans.plan import Op, Plan, Stage


def random_plan(
    rng: random.Random,
    *,
    num_ranks: int,
    num_layers: int,
    num_micro_batches: int,
    routes: int | None = None,
    recompute: bool = True,
) -> Plan:
    """A checked plan; `routes` None draws one or two (two hold some or all layers twice)."""
    routes = routes or rng.choice((1, 1, 2))
    stages: list[Stage] = []
    paths: list[tuple[int, ...]] = []
    for r in range(routes):
        shared = 0
        if r and rng.random() < 0.3:  # the second route may leave the first one later than at the start
            shared = rng.randrange(1, len(paths[0]) + 1)
        path = list(paths[0][:shared]) if r else []
        first = stages[path[-1]].stop if path else 0
        while first < num_layers:
            stop = rng.randint(first + 1, min(num_layers, first + 3))
            again: bool | tuple[int, ...] = False
            if recompute and rng.random() < 0.4:
                some = tuple(k for k in range(first, stop) if rng.random() < 0.6)
                again = rng.choice((True, some or True))
            path.append(len(stages))
            stages.append(Stage(first=first, stop=stop, rank=rng.randrange(num_ranks), recompute=again))
            first = stop
        paths.append(tuple(path))
    of = [rng.randrange(routes) for _ in range(num_micro_batches)]
    for r in range(routes):  # a route nobody takes would leave stages without ops, which is fine; keep some taken
        if rng.random() < 0.8:
            of[rng.randrange(num_micro_batches)] = r
    return Plan(
        num_layers=num_layers,
        num_ranks=num_ranks,
        num_micro_batches=num_micro_batches,
        stages=tuple(stages),
        orders=_orders(rng, stages, paths, of, num_ranks),
        routes=tuple(paths),
        route_of_micro_batch=tuple(of),
        model="random",
    ).check()


def _orders(
    rng: random.Random, stages: list[Stage], paths: list[tuple[int, ...]], of: list[int], num_ranks: int
) -> tuple[tuple[Op, ...], ...]:
    needs: dict[Op, list[Op]] = {}
    for m, r in enumerate(of):
        path = paths[r]
        backward = {}
        for s in path:
            split = rng.random() < 0.6
            backward[s] = Op(s, "I" if split else "B", m)
        for at, s in enumerate(path):
            forward = Op(s, "F", m)
            needs[forward] = [Op(path[at - 1], "F", m)] if at else []
            back = [forward]
            if stages[s].recompute:
                needs[Op(s, "R", m)] = [forward]
                back = [Op(s, "R", m)]
            if at + 1 < len(path):
                back.append(backward[path[at + 1]])
            needs[backward[s]] = back
            if backward[s].kind == "I":
                needs[Op(s, "W", m)] = [backward[s]]
    taste = {kind: rng.random() for kind in "FRIWB"}
    missing = {op: len(before) for op, before in needs.items()}
    after: dict[Op, list[Op]] = {}
    for op, before in needs.items():
        for b in before:
            after.setdefault(b, []).append(op)
    ready = sorted(op for op, n in missing.items() if n == 0)
    orders: list[list[Op]] = [[] for _ in range(num_ranks)]
    while ready:
        # A bias per kind, so that some plans hold W back, some run depth first, some breadth first.
        op = rng.choices(ready, weights=[0.05 + taste[op.kind] for op in ready])[0]
        ready.remove(op)
        orders[stages[op.stage].rank].append(op)
        for follower in after.get(op, ()):
            missing[follower] -= 1
            if missing[follower] == 0:
                ready.append(follower)
    return tuple(map(tuple, orders))


def needed(
    rng: random.Random, stages: Sequence[Stage], edges: Iterable[tuple[int, int]], micro_batches: int,
    fused: Sequence[int] = (),
) -> dict[Op, set[Op]]:  # fmt: skip
    """What must be over before each op. The backward of every micro-batch in every stage is split or not at random;
    `fused`: stages in which it never is."""
    needs: dict[Op, set[Op]] = {}
    for m in range(micro_batches):
        kinds = {s: "B" if s in fused else rng.choice("IB") for s in range(len(stages))}
        for s in range(len(stages)):
            needs[Op(s, "F", m)] = {Op(a, "F", m) for a, b in edges if b == s}
            own = {Op(s, "F", m)}
            if stages[s].recompute:
                needs[Op(s, "R", m)] = own
                own = own | {Op(s, "R", m)}
            needs[Op(s, kinds[s], m)] = own | {Op(b, kinds[b], m) for a, b in edges if a == s}
            if kinds[s] == "I":
                needs[Op(s, "W", m)] = {Op(s, "I", m)}
    return needs

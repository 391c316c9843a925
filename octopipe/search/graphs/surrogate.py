"""A chain that approximates a model with a split head, so that the default search can place the body.

Knows: how a split head is represented as a chain (one shard remains at the end, and the work of the others is spread
evenly over the layers before it, as it is over the ranks), and how a plan for that chain becomes one with shards. Does
not know: how either is searched.
"""

from __future__ import annotations

import numpy as np

from octopipe.costs.shard_times import parts_of
from octopipe.costs.table import CostTable
from octopipe.plans.plan import KINDS, Op, Plan
from octopipe.search.graphs.layout import Layout
from octopipe.simulation.simulator import simulate

SPREAD = (  # the three times first, in the order of `parts_of`
    "forward_ms",
    "input_ms",
    "weight_ms",
    "activation_bytes",
    "stash_bytes",
    "static_bytes",
)


def chain_for(costs: CostTable, parts: int) -> CostTable:
    """The costs of the chain: one of `parts` shards at its end, and the others spread over the layers between the
    embedding and the head."""
    inner = costs.layer_ms[1:-1]
    weight = inner / inner.sum() if inner.sum() > 0 else np.full(inner.size, 1.0 / max(inner.size, 1))
    changed: dict[str, object] = {}
    measured = dict(zip(SPREAD, parts_of(costs.shard_times, costs.num_layers - 1, parts), strict=False))
    for name in SPREAD:
        values = getattr(costs, name).copy()
        if costs.shard_times and name in measured:
            values[1:-1] += values[-1] * (parts - 1) * measured[name] * weight
            values[-1] *= measured[name]
        else:
            values[1:-1] += values[-1] * (parts - 1) / parts * weight
            values[-1] /= parts
        changed[name] = values
    changed["stash_bytes"] = np.minimum(changed["stash_bytes"], changed["activation_bytes"])  # type: ignore[call-overload]
    return costs.replace(tied_bytes=0.0, segments=None, **changed)


def layout_of(plan: Plan, parts: int) -> Layout | None:
    """The partition of a chain plan, with the head split into shards on ranks 0 to `parts` - 1. None if the plan has
    several routes, forks, or fewer than three layers."""
    head = plan.num_layers - 1
    if len(plan.routes) != 1 or plan.forks or head < 2:
        return None
    cut = [(s.first, min(s.stop, head), s.rank) for s in (plan.stages[k] for k in plan.routes[0])]
    cut = [(a, b, r) for a, b, r in cut if a < b]
    return Layout(
        bounds=(*(a for a, _, _ in cut), head),
        ranks=tuple(r for _, _, r in cut),
        shards=tuple(range(parts)),
        loss=cut[-1][2],
    )


def with_shards(plan: Plan, chain: CostTable, layout: Layout) -> Plan:
    """A plan of the chain in which the head's ops are replaced by those of its shards, which are placed in every rank's
    order at the time when the chain's own head would run."""
    timeline = simulate(plan, chain, check=False)
    head, size = plan.num_layers - 1, len(layout.ranks)
    number = {s: k for k, s in enumerate(plan.routes[0]) if plan.stages[s].first < head}
    last = plan.routes[0][-1]
    loss = size + len(layout.shards)
    rows: list[list[tuple[float, int, Op]]] = [[] for _ in range(plan.num_ranks)]
    spans = timeline.spans
    met: dict[tuple[str, int], float] = {}
    for k in range(spans.stage.size):
        s, kind, m = int(spans.stage[k]), KINDS[spans.kind[k]], int(spans.micro_batch[k])
        start = float(spans.start_ms[k])
        if s in number and kind != "R":
            # A fused backward is written as I and W, which the search for split heads moves one by one.
            for turn, part in {"F": [(0, "F")], "B": [(5, "I"), (6, "W")]}.get(kind, [(5, kind)]):
                rows[int(spans.rank[k])].append((start, turn, Op(number[s], part, m)))
        if s == last:
            met[kind, m] = float(spans.end_ms[k]) if kind == "F" else start
    for m in range(plan.num_micro_batches):
        ends = met["F", m]
        back = max(ends, met.get(("I", m), met.get(("B", m), ends)))
        for k, r in enumerate(layout.shards):
            rows[r].append((ends, 1, Op(size + k, "F", m)))
            rows[r].append((back, 4, Op(size + k, "I", m)))
            rows[r].append((back, 4, Op(size + k, "W", m)))
        rows[layout.loss].append((ends, 2, Op(loss, "F", m)))
        rows[layout.loss].append((ends, 3, Op(loss, "B", m)))
    return Plan(
        model=plan.model,
        num_layers=plan.num_layers,
        num_ranks=plan.num_ranks,
        num_micro_batches=plan.num_micro_batches,
        stages=tuple(layout.stages()),
        orders=tuple(tuple(op for *_, op in sorted(row, key=lambda entry: entry[:2])) for row in rows),
        routes=(tuple(range(loss + 1)),),
        edges=(layout.edges(),),
    )

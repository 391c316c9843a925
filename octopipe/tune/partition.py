"""Partition tuning: migrate layers from the most to the least loaded rank.

Paper, section VI, "Partitioning Tuning". Knows: which migrations are worth a simulation. Does not know: phases.

Layers move between ranks that need not be neighbours in the chain: all stage boundaries between a stage of the
one and a stage of the other slide by as many layers, so the stages between keep their sizes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from octopipe.tune.anneal import State
from octopipe.tune.candidate import Candidate, Desk

MOST = 16
"""Migrations judged in an iteration, the most even first."""
PAIRS = 24


def moves(desk: Desk, now: Candidate, lot: random.Random) -> Iterator[tuple[str, State]]:
    """Migrations from the busiest ranks to the least busy ones, those that even out the work best first."""
    st, n = now.state, int(now.state.size[0])
    rank = st.rank[:n]
    by_load = np.argsort(-now.loads_ms, kind="stable").tolist()
    donors, takers = by_load[:2], by_load[::-1][: max(1, len(by_load) // 2)]
    pairs = [
        (int(i), int(j))
        for a in donors
        for b in takers
        if a != b
        for i in np.flatnonzero(rank == a)
        for j in np.flatnonzero(rank == b)
    ]
    if len(pairs) > PAIRS:
        # The very busiest with the very least busy always; of the others as many as there is time for.
        ends = {donors[0], takers[0]}
        first = [p for p in pairs if {int(rank[p[0]]), int(rank[p[1]])} == ends]
        rest = [p for p in pairs if {int(rank[p[0]]), int(rank[p[1]])} != ends]
        pairs = (first + lot.sample(rest, min(len(rest), PAIRS)))[: 2 * PAIRS]
    layer_ms = desk.problem.total[-1] / desk.problem.num_layers
    tried: list[tuple[float, int, int, int, State]] = []
    for i, j in pairs:
        apart = float(now.loads_ms[rank[i]] - now.loads_ms[rank[j]])
        half = max(1, round(apart / 2 / max(layer_ms, 1e-12)))
        for count in {1, 2, half, max(1, half // 2)}:
            moved = slide(st, i, j, count)
            if moved is not None:
                loads = desk.loads(moved)
                tried.append((float(loads.max()) + 0.05 * float(loads.std()), i, j, count, moved))
    tried.sort(key=lambda t: t[:4])
    for _, i, j, count, moved in tried[:MOST]:
        layers = "layer" if count == 1 else "layers"
        yield f"migrate {count} {layers} from rank {int(rank[i])} to {int(rank[j])}", moved


def slide(st: State, giver: int, taker: int, count: int) -> State | None:
    """`count` layers leave stage `giver` and as many enter stage `taker`; None where the giver would be empty."""
    if st.bounds[giver + 1] - st.bounds[giver] <= count:
        return None
    moved = State(*(np.copy(a) if k == 1 else a for k, a in enumerate(st)))
    if giver < taker:
        moved.bounds[giver + 1 : taker + 1] -= count
    else:
        moved.bounds[taker + 1 : giver + 1] += count
    return moved

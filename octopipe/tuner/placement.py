"""Placement tuning: stage dispersion and layer exchange.

Paper, section VI, "Placement Tuning". Knows: which stages are worth splitting over ranks, and which are worth
exchanging. Does not know: phases.

- Dispersion: a stage of several layers, or every such stage at once, is cut into pieces of equal time, each on
  another rank. Finer stages reach the ranks earlier and leave them later: boundary bubbles shrink. When every stage
  is dispersed the order is derived anew, from one of a few simple rules of priority.
- Exchange: two ranks with comparable work swap a stage each; the one with the longer bubbles gets the heavier.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from octopipe.tuner.anneal import State, insert_stage
from octopipe.tuner.candidate import Candidate, Desk, merge_neighbours
from octopipe.tuner.starts import key_presets, place

DISPERSIONS, REFINEMENTS, EXCHANGES = 14, 3, 10
"""Candidates of each kind judged in an iteration; of refinements each with every rule of priority."""
COMPARABLE = 0.25
"""Stages and ranks whose work differs by no more than this share are comparable."""


def moves(desk: Desk, now: Candidate, lot: random.Random) -> Iterator[tuple[str, State]]:
    """Dispersions and exchanges, drawn with those first that touch long stages and long bubbles."""
    yield from _dispersions(desk, now, lot)
    yield from _refinements(desk, now, lot)
    yield from _exchanges(desk, now, lot)


def _dispersions(desk: Desk, now: Candidate, lot: random.Random) -> Iterator[tuple[str, State]]:
    st, n, ranks = now.state, int(now.state.size[0]), desk.problem.num_ranks
    width = np.diff(st.bounds[: n + 1])
    many = [s for s in range(n) if width[s] > 1]
    if not many or ranks < 2:
        return
    load = desk.stage_loads(st)
    for _ in range(DISPERSIONS):
        s = lot.choices(many, [float(load[k]) + 1e-12 for k in many])[0]
        ways = min(lot.choice((2, 2, 3, 4, ranks)), int(width[s]), ranks, desk.max_stages - n + 1)
        if ways < 2:
            continue
        # The pieces go round the ranks from a drawn one on, or the first stays where it is.
        begin = int(st.rank[s]) if lot.random() < 0.5 else lot.randrange(ranks)
        step = lot.choice((1, -1)) if ways > 2 else lot.randrange(1, ranks)
        homes = [(begin + step * k) % ranks for k in range(ways)]
        if ways == 2 and lot.random() < 0.5:
            homes.reverse()
        moved = disperse(desk, st, s, homes)
        merge_neighbours(moved)
        yield f"disperse stage {s} over ranks {', '.join(map(str, homes))}", moved


def disperse(desk: Desk, st: State, stage: int, homes: list[int]) -> State:
    """Cut a stage into len(homes) pieces of about equal time, on these ranks."""
    moved = desk.copy(st)
    first, stop = int(st.bounds[stage]), int(st.bounds[stage + 1])
    total = desk.problem.total
    ways = len(homes)
    cuts = [first]
    for k in range(1, ways):
        at = int(np.searchsorted(total, total[first] + (total[stop] - total[first]) * k / ways))
        cuts.append(min(max(at, cuts[-1] + 1), stop - (ways - k)))
    for k in range(ways - 1):
        insert_stage(moved, stage + k)
        moved.bounds[stage + k + 1] = cuts[k + 1]
    moved.rank[stage : stage + ways] = homes
    return moved


def _refinements(desk: Desk, now: Candidate, lot: random.Random) -> Iterator[tuple[str, State]]:
    """Every stage dispersed: its pieces follow each other round the ranks, or down and up again."""
    st, n, ranks = now.state, int(now.state.size[0]), desk.problem.num_ranks
    if ranks < 2:
        return
    rules = list(key_presets(desk.problem))
    ways_and_routes = [(more, wave) for more in (1, 2, 3) if n * more <= desk.max_stages for wave in (False, True)]
    for more, wave in lot.sample(ways_and_routes, min(len(ways_and_routes), REFINEMENTS)):
        finer = desk.copy(st)
        for s in range(n - 1, -1, -1):
            ways = min(more, int(st.bounds[s + 1] - st.bounds[s]))
            finer = disperse(desk, finer, s, [int(st.rank[s])] * ways)
        stages = int(finer.size[0])
        finer.rank[:stages] = place(stages, ranks, wave)
        merge_neighbours(finer)
        finer.wiggle[:] = 0.0
        for keys in rules:
            moved = desk.copy(finer)
            moved.glob[: len(keys)] = keys
            what = "place every stage anew" if more == 1 else f"disperse every stage over {more} ranks"
            yield f"{what}, {'down and up' if wave else 'round'}", moved


def _exchanges(desk: Desk, now: Candidate, lot: random.Random) -> Iterator[tuple[str, State]]:
    st, n = now.state, int(now.state.size[0])
    rank, load = st.rank[:n], desk.stage_loads(st)
    idle = now.timeline.bubbles.boundary_ms + now.timeline.bubbles.residual_ms
    pairs = []
    for i in range(n):
        for j in range(n):
            a, b = int(rank[i]), int(rank[j])
            if a == b or idle[a] <= idle[b] or load[i] > load[j]:
                continue
            if load[j] - load[i] > COMPARABLE * load[j] or abs(now.loads_ms[a] - now.loads_ms[b]) > (
                COMPARABLE * now.loads_ms.mean()
            ):
                continue
            pairs.append((float(idle[a] - idle[b]), i, j))
    if not pairs:
        return
    pairs.sort(reverse=True)
    drawn = pairs[: EXCHANGES // 2] + lot.sample(pairs, min(len(pairs), EXCHANGES // 2))
    for _, i, j in dict.fromkeys(drawn):
        moved = desk.copy(st)
        moved.rank[i], moved.rank[j] = rank[j], rank[i]
        merge_neighbours(moved)
        yield f"exchange stages {i} and {j} of ranks {int(rank[i])} and {int(rank[j])}", moved

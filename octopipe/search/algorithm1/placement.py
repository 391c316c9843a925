"""Placement tuning: stage dispersion and layer exchange.

Paper, section VI, "Placement Tuning". Knows: which stages are worth splitting over ranks, and which layers are worth
exchanging. Does not know: phases.

- Dispersion: a stage of several layers, or every such stage at once, is cut into pieces of equal time (single layers at
  the finest), each on another rank. Finer stages reach the ranks earlier and leave them later: boundary bubbles shrink.
- Exchange: of two ranks with comparable work the one with the longer bubbles gives a layer for a heavier one.

The order is carried over by the times at which the layers ran (`structure.retimed`). If the schedule phase is enabled,
orders are also derived by list scheduling from the same times and, for dispersions of all stages, from simple rules.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from octopipe.plans.plan import Stage
from octopipe.search.algorithm1.candidate import Candidate, Evaluator, State
from octopipe.search.algorithm1.structure import (
    derived,
    even_cuts,
    homes_of,
    layer_times,
    place,
    recomputed,
    retimed,
    rule_keys,
    stages_of,
    stages_on,
)


def moves(evaluator: Evaluator, now: Candidate, lot: random.Random, derive: bool) -> Iterator[tuple[str, State]]:
    """Yield dispersions and exchanges with their names. They are drawn at random; long stages and ranks with long
    bubbles are more likely. `derive`: also yield orders from list scheduling."""
    if evaluator.num_ranks < 2 or not now.state.chain:
        return
    starts = layer_times(evaluator, now.state, now.timeline.spans.start_ms)
    for name, stages in (*_dispersions(evaluator, now, lot), *_exchanges(evaluator, now, lot)):
        if evaluator.num_ranks <= len(stages) <= evaluator.max_stages:
            moved, keys = retimed(evaluator, now.state, starts, stages)
            yield name, moved
            if derive:
                yield from ((name, order) for order in derived(evaluator, moved, keys))
    for name, stages in _refinements(evaluator, now, lot):
        moved, keys = retimed(evaluator, now.state, starts, stages)
        yield name, moved
        if derive:
            for rule in (keys, *rule_keys(evaluator, stages)):
                yield from ((name, order) for order in derived(evaluator, moved, rule))


def _dispersions(evaluator: Evaluator, now: Candidate, lot: random.Random) -> Iterator[tuple[str, tuple[Stage, ...]]]:
    stages, ranks = now.state.stages, evaluator.num_ranks
    many = [s for s, stage in enumerate(stages) if stage.num_layers > 1]
    if not many:
        return
    load = [float(evaluator.layer_ms[stages[s].first : stages[s].stop].sum()) + 1e-12 for s in many]
    for _ in range(evaluator.settings.dispersions):
        s = lot.choices(many, load)[0]
        stage = stages[s]
        ways = min(lot.choice((2, 2, 3, 4, ranks)), stage.num_layers, ranks)
        # The pieces go around the ranks, starting at the present rank or at a random one.
        begin = stage.rank if lot.random() < 0.5 else lot.randrange(ranks)
        step = lot.choice((1, -1)) if ways > 2 else lot.randrange(1, ranks)
        homes = [(begin + step * k) % ranks for k in range(ways)]
        if ways == 2 and lot.random() < 0.5:
            homes.reverse()
        yield f"disperse stage {s} over ranks {', '.join(map(str, homes))}", disperse(evaluator, stages, s, homes)


def disperse(evaluator: Evaluator, stages: tuple[Stage, ...], stage: int, homes: list[int]) -> tuple[Stage, ...]:
    """Cut a stage into len(homes) pieces of about equal time, on these ranks; neighbouring pieces on one rank are
    joined."""
    layers, old = homes_of(stages), stages[stage]
    cuts = even_cuts(evaluator.layer_ms, old.first, old.stop, len(homes))
    for home, first, stop in zip(homes, cuts[:-1], cuts[1:], strict=True):
        layers[first:stop] = [home] * (stop - first)
    return stages_on(layers, recomputed(stages))


def _refinements(evaluator: Evaluator, now: Candidate, lot: random.Random) -> Iterator[tuple[str, tuple[Stage, ...]]]:
    """Yield dispersions of all stages at once: the pieces are placed round robin over the ranks, or up and down
    again."""
    stages, ranks = now.state.stages, evaluator.num_ranks
    ways = [(k, wave) for k in (1, 2, 3) if len(stages) * k <= evaluator.max_stages for wave in (False, True)]
    for more, wave in lot.sample(ways, min(len(ways), evaluator.settings.refinements)):
        bounds = [0]
        for s in stages:
            bounds += even_cuts(evaluator.layer_ms, s.first, s.stop, min(more, s.num_layers))[1:]
        homes = place(len(bounds) - 1, ranks, wave)
        finer = stages_of(bounds, homes, recomputed(stages))
        what = "place every stage anew" if more == 1 else f"disperse every stage over {more} ranks"
        yield f"{what}, {'down and up' if wave else 'round'}", stages_on(homes_of(finer), recomputed(stages))


def _exchanges(evaluator: Evaluator, now: Candidate, lot: random.Random) -> Iterator[tuple[str, tuple[Stage, ...]]]:
    """Yield exchanges of a layer of a rank with long bubbles for a longer layer of a rank that has a similar amount of
    work and shorter bubbles."""
    stages, work = now.state.stages, evaluator.layer_ms
    homes, busy, bubbles = homes_of(stages), now.timeline.busy_ms, now.timeline.bubbles
    idle = bubbles.boundary_ms + bubbles.residual_ms + bubbles.communication_ms
    edges = {k for s in stages for k in (s.first, s.stop - 1)}
    pairs = []
    for a in range(evaluator.num_ranks):
        for b in range(evaluator.num_ranks):
            if idle[a] <= idle[b] or abs(busy[a] - busy[b]) > evaluator.settings.comparable * busy.mean():
                continue
            light = [k for k, home in enumerate(homes) if home == a]
            heavy = [k for k, home in enumerate(homes) if home == b]
            # Exchanging a layer in the middle of a stage cuts the stage in three, so layers at the ends are preferred.
            pairs += [
                (float(idle[a] - idle[b]) * (2.0 if i in edges and j in edges else 1.0), i, j)
                for i in light for j in heavy if work[j] > work[i]
            ]  # fmt: skip
    if not pairs:
        return
    half = evaluator.settings.exchanges // 2
    pairs.sort(reverse=True)
    top = pairs[: 16 * half]
    for _, i, j in dict.fromkeys(lot.sample(top, min(len(top), half)) + lot.sample(pairs, min(len(pairs), half))):
        moved = list(homes)
        moved[i], moved[j] = homes[j], homes[i]
        if len(set(moved)) == len(set(homes)):
            name = f"exchange layers {i} and {j} of ranks {homes[i]} and {homes[j]}"
            yield name, stages_on(moved, recomputed(stages))


def balanced_stages(
    evaluator: Evaluator, num_stages: int, wave: bool, again: bool, need: np.ndarray
) -> tuple[Stage, ...]:
    """Return initial stages with about equal sums of `need` (work or bytes per layer), placed by `place`."""
    bounds = even_cuts(need, 0, evaluator.costs.num_layers, num_stages)
    layers = set(range(evaluator.costs.num_layers)) if again else set()
    return stages_of(bounds, place(num_stages, evaluator.num_ranks, wave), layers)

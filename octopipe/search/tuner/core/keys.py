"""Keys, the priorities of list scheduling: vectors that are drawn, mutated, crossed and kept in populations.

Knows: the ranges of good keys, and how one vector is derived from others. Does not know: searches or time.

Keys do not refer to single stages or ops, so they apply to any structure and can be transferred between structures: a
few hundred vectors evolved on a structure come within one or two percent of the best known order. Their ranges are in
settings.py.
"""

from __future__ import annotations

import numpy as np

from octopipe.base.compile import njit
from octopipe.search.tuner.core.rows import (
    A_F, A_I, B_F, B_I, BANK, C_I, LOOK, NUM_KEYS, RHO, RULE, RULE_MORE, RULE_SLACK, W_OVER,
)  # fmt: skip
from octopipe.search.tuner.core.problem import (
    ACTIVATION, BOUNDARY, BOUNDS, CAPACITY, FLIGHT, FORWARD, HAS_LIMIT, INPUT, LAYERS, MICRO_BATCHES, RANK, RANKS,
    REDO, SIZE, STATIC, UNIT, bell, below, uniform,
)  # fmt: skip
from octopipe.search.tuner.settings import SETTINGS

FREE_RULE, SAME_RULE, SHARE_RULE, LITTLE_RULE = range(4)
"""These rules limit the micro-batches in flight: no limit; the same number for all stages; as many as fill a share of
the memory of each rank; Little's law (the time from F to I over the time per micro-batch)."""
FIRST_I = -1e3
"""With this value of C_I, any I goes before any F."""
W_NEVER = 10.0
"""With this value of W_OVER, W waits until nothing else can run."""
HALVINGS, WIDEST = 12, 4.0
"""The number of micro-batches in flight that fills a share of memory is found by bisection in HALVINGS steps. The
interval ends where the stage with the longest time from F to I holds at least WIDEST times all micro-batches."""
K = SETTINGS.keys
FRESH, MOST_VARIED = SETTINGS.fresh, SETTINGS.most_varied


@njit
def draw_keys(p, keys, rng):  # type: ignore[no-untyped-def]
    """Draw priorities, limits and tolerances from the ranges in `settings.KeyRanges`."""
    r = float(p.count[RANKS])
    limited = p.count[HAS_LIMIT] > 0
    keys[A_F] = 10.0 ** (K.decades * (2.0 * uniform(rng) - 1.0))
    keys[A_I] = 10.0 ** (K.decades * (2.0 * uniform(rng) - 1.0))
    keys[B_F] = (K.slope_width * uniform(rng) + K.slope_from) * r
    keys[B_I] = (K.slope_width * uniform(rng) + K.slope_from) * r
    keys[C_I] = FIRST_I if uniform(rng) < 0.5 else (K.i_width * uniform(rng) + K.slope_from) * r
    keys[LOOK] = 0.0 if uniform(rng) < 0.5 else K.look * uniform(rng) ** 4
    keys[RHO] = 1.0 if uniform(rng) < 0.5 else uniform(rng)
    keys[W_OVER] = W_NEVER if uniform(rng) < K.rarely else K.w_over * uniform(rng)
    keys[BANK] = uniform(rng) if limited and uniform(rng) < K.rarely else 0.0
    # Every rule that makes sense is as likely as the others.
    rule = below(rng, 3) if limited else 2 * below(rng, 2)
    keys[RULE_MORE] = 0.0
    if rule == 0 and not limited:
        keys[RULE], keys[RULE_SLACK] = FREE_RULE, 0.0
    elif rule == 0:
        keys[RULE], keys[RULE_SLACK] = SAME_RULE, r + below(rng, K.flight_width) - K.flight_width // 3
    elif rule == 1:
        keys[RULE], keys[RULE_SLACK] = SHARE_RULE, 1.0 + K.share_width * (uniform(rng) - 0.5)
    else:
        keys[RULE], keys[RULE_SLACK] = LITTLE_RULE, 10.0 ** (K.little_decades * uniform(rng))
        keys[RULE_MORE] = 0.5 * K.flight_width * uniform(rng)


@njit
def vary_keys(p, keys, rng):  # type: ignore[no-untyped-def]
    """Change a few of the numbers at random."""
    step = K.step * p.count[RANKS]
    for _ in range(1 + below(rng, MOST_VARIED)):
        k = below(rng, 9)
        if k <= 1:
            keys[A_F if k == 0 else A_I] *= 10.0 ** (K.step * bell(rng))
        elif k <= 3:
            keys[B_F if k == 2 else B_I] += step * bell(rng)
        elif k == 4:
            if keys[C_I] < 0.9 * FIRST_I:
                keys[C_I] = (K.i_width * uniform(rng) + K.slope_from) * p.count[RANKS]
            else:
                keys[C_I] += step * bell(rng)
        elif k == 5:
            keys[LOOK] = 0.0 if uniform(rng) < K.rarely else abs(keys[LOOK] + K.step * K.w_over * bell(rng))
        elif k == 6:
            keys[RHO] = min(max(keys[RHO] + K.step * bell(rng), 0.0), 1.0)
        elif k == 7:
            keys[W_OVER] = W_NEVER if uniform(rng) < K.rarely else K.w_over * uniform(rng)
        elif keys[RULE] == SAME_RULE:
            keys[RULE_SLACK] = max(keys[RULE_SLACK] + (1.0 if uniform(rng) < 0.5 else -1.0), 1.0)
        elif keys[RULE] == SHARE_RULE:
            keys[RULE_SLACK] = max(keys[RULE_SLACK] + K.share_step * bell(rng), 1.0 - K.share_width)
        elif keys[RULE] == LITTLE_RULE:
            keys[RULE_SLACK] = max(keys[RULE_SLACK] + K.step * bell(rng), 1.0 - K.share_width)
            keys[RULE_MORE] += 0.5 * K.step * K.flight_width * bell(rng)


@njit
def make_child(p, population, count, keys, rng):  # type: ignore[no-untyped-def]
    """Combine keys from the first `count` members of a population; better members are chosen more often."""
    if count == 0 or uniform(rng) < FRESH:
        draw_keys(p, keys, rng)
        return
    lot = uniform(rng)
    keys[:] = population[min(int(lot * lot * count), count - 1)]
    if uniform(rng) < 0.5:
        other = below(rng, count)
        for k in range(RULE):
            if uniform(rng) < 0.5:
                keys[k] = population[other, k]
        if uniform(rng) < 0.5:
            for k in range(RULE, NUM_KEYS):
                keys[k] = population[other, k]
    if uniform(rng) >= FRESH:
        vary_keys(p, keys, rng)


@njit
def keep_keys(population, values, keys, value):  # type: ignore[no-untyped-def]
    """Insert keys into a population sorted by step time, unless the population is better already or contains keys with
    this step time."""
    last = values.size - 1
    if not value < values[last]:
        return
    for i in range(values.size):
        if values[i] == value:
            return
    i = last
    while i > 0 and values[i - 1] > value:
        values[i] = values[i - 1]
        population[i] = population[i - 1]
        i -= 1
    values[i] = value
    population[i] = keys


@njit
def count_of(values):  # type: ignore[no-untyped-def]
    """The number of keys in a sorted population that were evaluated, which are those with a finite step time."""
    count = values.size
    while count > 0 and values[count - 1] == np.inf:
        count -= 1
    return count


@njit
def set_flight(p, st, keys):  # type: ignore[no-untyped-def]
    """Set the maximum number of micro-batches in flight of every stage, according to the keys' rule."""
    n, M, last = st[SIZE, 0], p.count[MICRO_BATCHES], p.count[LAYERS]
    rule, slack, more = keys[RULE], keys[RULE_SLACK], keys[RULE_MORE]
    if rule == SHARE_RULE:
        for rank in range(p.count[RANKS]):
            fill_memory(p, st, rank, slack)
        return
    for s in range(n):
        flight = M
        if rule == SAME_RULE:
            flight = int(slack)
        elif rule == LITTLE_RULE:
            flight = int(more + slack * way_back(p, st[BOUNDS, s], last) / p.number[UNIT])
        st[FLIGHT, s] = min(max(flight, 1), M)


@njit
def way_back(p, a, last):  # type: ignore[no-untyped-def]
    """The time from the F of a stage that begins at layer `a` to its I, if nothing waits."""
    return p.layer[FORWARD, 0, last] - p.layer[FORWARD, 0, a] + p.layer[INPUT, 0, last] - p.layer[INPUT, 0, a]


@njit
def fill_memory(p, st, rank, share):  # type: ignore[no-untyped-def]
    """Let the stages of a rank keep as many micro-batches in flight as fill this share of its memory without weights.

    The number is proportional to the time from a stage's F to its I (Little's law), so that no stage takes the memory
    that later stages of the rank need for the same micro-batches.
    """
    n, M, last = st[SIZE, 0], p.count[MICRO_BATCHES], p.count[LAYERS]
    room = p.rank[CAPACITY, rank]
    most = 0.0
    for s in range(n):
        if st[RANK, s] == rank:
            a = st[BOUNDS, s]
            room -= p.whole[STATIC, st[BOUNDS, s + 1]] - p.whole[STATIC, a]
            most = max(most, way_back(p, a, last))
    room *= share
    low, high = 0.0, WIDEST * max(M * p.number[UNIT] / max(most, 1e-9), 1.0)
    if room == np.inf:
        low = high
    for _ in range(HALVINGS):
        if low == high:
            break
        slack = 0.5 * (low + high)
        held = 0.0
        for s in range(n):
            if st[RANK, s] == rank:
                a, z = st[BOUNDS, s], st[BOUNDS, s + 1]
                hold = p.layer[BOUNDARY, 0, a] if st[REDO, s] else p.layer[ACTIVATION, 0, z] - p.layer[ACTIVATION, 0, a]
                held += hold * min(int(1.5 + slack * way_back(p, a, last) / p.number[UNIT]), M)
        if held <= room:
            low = slack
        else:
            high = slack
    for s in range(n):
        if st[RANK, s] == rank:
            st[FLIGHT, s] = min(int(1.5 + low * way_back(p, st[BOUNDS, s], last) / p.number[UNIT]), M)

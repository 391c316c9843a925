"""Priorities of the list scheduler as vectors ("keys") that are drawn, varied, crossed and kept in populations.

Knows: the ranges in which good priorities were seen, and how one set is made from others. Does not know: structures,
searches or time.

A vector holds the scheduler's global numbers (`kernels.A_F` and so on) and the rule for micro-batches in flight. It
fits any structure, other than the offsets of single stages and ops that annealing finds: a few hundred vectors bred on
a structure come within one or two percent of the best order known for it, whereas annealing from poor ones does not.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from octopipe.tuner.anneal import bell, below, fit_flight, judge, uniform
from octopipe.tuner.kernels import (
    A_F,
    A_I,
    B_F,
    B_I,
    BANK,
    C_I,
    C_W,
    LOOK,
    NEVER,
    NUM_GLOBALS,
    RHO,
    W_OVER,
)
from octopipe.tuner.starts import limit_flight

RULE, SLACK_OF_RULE, MORE_OF_RULE, NUM_KEYS = range(NUM_GLOBALS, NUM_GLOBALS + 4)
"""Behind the globals: the rule for micro-batches in flight and its two numbers."""
FREE_RULE, SAME_RULE, SHARE_RULE, LITTLE_RULE = range(4)
"""No limit; the same for all stages; as many as fill a share of each rank's memory; Little's law."""
CROSSED, FRESH_KEYS = 0.5, 0.1
"""How often a child has two parents, and how often none: without new ones a population settles on one kind of order."""


@njit(cache=True, nogil=True)
def draw_keys(p, keys, rng):  # type: ignore[no-untyped-def]
    """Priorities, limits and tolerances from the ranges in which good ones were seen."""
    r = float(p.num_ranks)
    keys[A_F] = 10.0 ** (2.0 * uniform(rng) - 1.0)
    keys[A_I] = 10.0 ** (2.0 * uniform(rng) - 1.0)
    keys[B_F] = (6.0 * uniform(rng) - 2.0) * r
    keys[B_I] = (6.0 * uniform(rng) - 2.0) * r
    keys[C_I] = -1e3 if uniform(rng) < 0.5 else (4.0 * uniform(rng) - 2.0) * r
    keys[LOOK] = 0.0 if uniform(rng) < 0.5 else uniform(rng) * (0.05 if uniform(rng) < 0.8 else 0.5)
    keys[RHO] = 1.0 if uniform(rng) < 0.5 else uniform(rng)
    keys[W_OVER] = 10.0 if uniform(rng) < 0.25 else 0.1 * uniform(rng)
    keys[C_W] = NEVER
    keys[BANK] = 0.0 if not p.has_limit or uniform(rng) < 0.85 else uniform(rng)
    draw_rule(p, keys, rng)


@njit(cache=True, nogil=True)
def draw_rule(p, keys, rng):  # type: ignore[no-untyped-def]
    """A rule for micro-batches in flight."""
    u = uniform(rng)
    keys[MORE_OF_RULE] = 0.0
    if not p.has_limit and u < 0.6:
        keys[RULE], keys[SLACK_OF_RULE] = FREE_RULE, 0.0
    elif u < 0.4:
        keys[RULE], keys[SLACK_OF_RULE] = SAME_RULE, p.num_ranks + below(rng, 6) - 2.0
    elif u < 0.75 and p.has_limit:
        keys[RULE], keys[SLACK_OF_RULE] = SHARE_RULE, 0.7 + 0.6 * uniform(rng)
    else:
        keys[RULE], keys[SLACK_OF_RULE] = LITTLE_RULE, 10.0 ** (0.5 * uniform(rng))
        keys[MORE_OF_RULE] = 0.5 + 2.5 * uniform(rng)


@njit(cache=True, nogil=True)
def vary_keys(p, keys, rng):  # type: ignore[no-untyped-def]
    """Change one to four of the numbers."""
    step = 0.15 * p.num_ranks
    for _ in range(1 + below(rng, 4)):
        k = below(rng, 9)
        if k == 0:
            keys[A_F] *= 10.0 ** (0.2 * bell(rng))
        elif k == 1:
            keys[A_I] *= 10.0 ** (0.2 * bell(rng))
        elif k == 2:
            keys[B_F] += step * bell(rng)
        elif k == 3:
            keys[B_I] += step * bell(rng)
        elif k == 4:
            if keys[C_I] < -900.0:
                keys[C_I] = (4.0 * uniform(rng) - 2.0) * p.num_ranks
            else:
                keys[C_I] += step * bell(rng)
        elif k == 5:
            keys[LOOK] = 0.0 if uniform(rng) < 0.2 else abs(keys[LOOK] + 0.015 * bell(rng))
        elif k == 6:
            keys[RHO] = min(max(keys[RHO] + 0.25 * bell(rng), 0.0), 1.0)
        elif k == 7:
            keys[W_OVER] = 10.0 if uniform(rng) < 0.1 else 0.1 * uniform(rng)
        elif keys[RULE] == SAME_RULE:
            keys[SLACK_OF_RULE] = max(keys[SLACK_OF_RULE] + (1.0 if uniform(rng) < 0.5 else -1.0), 1.0)
        elif keys[RULE] == SHARE_RULE:
            keys[SLACK_OF_RULE] = max(keys[SLACK_OF_RULE] + 0.08 * bell(rng), 0.3)
        elif keys[RULE] == LITTLE_RULE:
            keys[SLACK_OF_RULE] = max(keys[SLACK_OF_RULE] + 0.15 * bell(rng), 0.3)
            keys[MORE_OF_RULE] += 0.4 * bell(rng)


@njit(cache=True, nogil=True)
def make_child(p, population, count, keys, rng):  # type: ignore[no-untyped-def]
    """New keys from the first `count` of a population, the best of them most often."""
    if count == 0 or uniform(rng) < FRESH_KEYS:
        draw_keys(p, keys, rng)
        return
    keys[:] = population[min(int(uniform(rng) ** 2 * count), count - 1)]
    if uniform(rng) < CROSSED:
        other = population[below(rng, count)]
        for k in range(NUM_GLOBALS):
            if uniform(rng) < 0.5:
                keys[k] = other[k]
        if uniform(rng) < 0.5:
            keys[RULE:] = other[RULE:]
    if uniform(rng) < 0.9:
        vary_keys(p, keys, rng)


@njit(cache=True, nogil=True)
def keep_keys(population, values, keys, value):  # type: ignore[no-untyped-def]
    """Sort keys into a population by the step time they gave, unless it is as good already or has such a one."""
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


@njit(cache=True, nogil=True)
def use_keys(p, st, keys):  # type: ignore[no-untyped-def]
    """Set a state's priorities; offsets of stages and ops are cleared."""
    n = st.size[0]
    for k in range(NUM_GLOBALS):
        st.glob[k] = keys[k]
    st.offset[:, :n] = 0.0
    st.wiggle[:, :n] = 0.0
    st.flight[:] = p.num_micro_batches
    if keys[RULE] == SAME_RULE:
        st.flight[:n] = min(max(int(keys[SLACK_OF_RULE]), 1), p.num_micro_batches)
    elif keys[RULE] == SHARE_RULE:
        for rank in range(p.num_ranks):
            fit_flight(p, st, rank, keys[SLACK_OF_RULE])
    elif keys[RULE] == LITTLE_RULE:
        limit_flight(p, st, keys[SLACK_OF_RULE], keys[MORE_OF_RULE])


@njit(cache=True, nogil=True)
def judge_keys(p, st, keys, margin, cutoff, sc):  # type: ignore[no-untyped-def]
    """Step time of a structure under these priorities; infinite beyond the cutoff."""
    use_keys(p, st, keys)
    return judge(p, st, margin, cutoff, sc)


@njit(cache=True, nogil=True)
def breed(p, st, population, values, drawn, bred, margin, sc, rng):  # type: ignore[no-untyped-def]
    """Judge `drawn` new keys and `bred` children on a structure and keep the best of them in the population."""
    keys = np.zeros(NUM_KEYS)
    last = values.size - 1
    for i in range(drawn + bred):
        if i < drawn:
            draw_keys(p, keys, rng)
        else:
            make_child(p, population, count_of(values), keys, rng)
        keep_keys(population, values, keys, judge_keys(p, st, keys, margin, values[last], sc))


@njit(cache=True, nogil=True)
def count_of(values):  # type: ignore[no-untyped-def]
    """How many members a population has."""
    count = values.size
    while count > 0 and values[count - 1] == np.inf:
        count -= 1
    return count

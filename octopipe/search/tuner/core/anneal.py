"""Annealing of structures together with a population of keys, and of partitions by their balance alone.

Knows: the loop that proposes, evaluates, accepts or reverts moves, and logs. Does not know: time, threads or plans.

With one fixed vector of keys, most changes of a structure look bad, because the keys suit the previous structure.
Therefore a changed structure is evaluated with the best keys and with a newly bred vector of the population. If it is
accepted, the population is evaluated again and evolved slightly on it. The objective is not the step time alone but a
score that also reflects progress which the step time does not show: when ranks finish on average, and whether one rank
is so loaded that gains elsewhere have no effect. The acceptance threshold is drawn before a move is evaluated, so a
move can be rejected by its work bound, or as soon as its schedule falls behind the current one: most moves cost a
fraction of a full schedule.
"""

from __future__ import annotations

import numpy as np

from octopipe.base.compile import njit
from octopipe.search.tuner.core.decode import LAPS, decode
from octopipe.search.tuner.core.keys import (
    count_of, draw_keys, keep_keys, make_child, set_flight, vary_keys, way_back,
)  # fmt: skip
from octopipe.search.tuner.core.moves import change, migrate, repair, shift
from octopipe.search.tuner.core.problem import (
    ACTIVATION, BOUNDARY, BOUNDS, CAPACITY, FORWARD, INPUT, LAYERS, LENGTH, MICRO_BATCHES, OWED, RANK, RANKS, REDO,
    SIZE, STASH, STATIC, UNIT, below, uniform, work_bound,
)  # fmt: skip
from octopipe.search.tuner.core.rows import NUM_KEYS
from octopipe.search.tuner.settings import SETTINGS

KNOWN, NEAR_KNOWN, DRAWN, BRED, MOVES, MAY_RECOMPUTE, HALT, NUM_TASKS = range(8)
"""These are the places in the task of `walk`: how many keys of the population it evaluates, how many variants of them,
how many new keys and how many children, then how many moves it makes, and whether moves may change recomputation.
Another thread may set HALT while `walk` runs; it then returns after the schedule that it is evaluating."""
HEAT, STEP_MS, SCORE, BEST_MS, WORK_MS, LIMIT_MS, NUM_VALUES = range(7)
"""These are the places in what `walk` reads and writes: the temperature as a share of the score, the step time and the
score of the member, the best step time seen, the smallest possible load, and a step time beyond which keys are not
worth evaluating."""

TRIES, REJUDGED = SETTINGS.tries, SETTINGS.rejudged
PROMISING = LAPS - 3
"""Other keys are tried only if the schedule under the first keys reached this lap."""
NEAR, BEHIND, ROOM, SOMETIMES = SETTINGS.near, SETTINGS.behind, SETTINGS.room, SETTINGS.sometimes
MEAN, SLACK, ANY_PACE = SETTINGS.mean_weight, SETTINGS.slack, SETTINGS.any_pace
RELIEF, LITTLE, BALANCE_HOT = SETTINGS.relief, SETTINGS.little, SETTINGS.balance_hot


@njit
def threshold(value, temperature, rng):  # type: ignore[no-untyped-def]
    """The largest value that a move may lead to: the present value plus an exponentially distributed random number with
    this mean."""
    return value - temperature * np.log(max(uniform(rng), 1e-300))


@njit
def write_line(log, lines, i, move, before, after):  # type: ignore[no-untyped-def]
    """Append an improvement to the log if there is space for it; returns the number of lines."""
    if lines == log.shape[0]:
        return lines
    log[lines, 0] = i
    log[lines, 1] = move
    log[lines, 2] = before
    log[lines, 3] = after
    return lines + 1


@njit
def room(step_ms, work):  # type: ignore[no-untyped-def]
    """The load up to which a rank leaves the other ranks enough freedom for their orders to matter."""
    return work + ROOM * max(step_ms - work, 0.0)


@njit
def rate(step_ms, pace, ranks, load, work):  # type: ignore[no-untyped-def]
    """The score of a schedule: its step time, plus a small weight of the ranks' mean finish time (extrapolated after
    nine tenths of the ops), plus the amount by which the load of the busiest rank exceeds `room` (`work` is the
    smallest possible load)."""
    mean = min(pace[LAPS - 2] / ranks, step_ms)
    return (1.0 - MEAN) * step_ms + MEAN * mean + max(load - room(step_ms, work), 0.0)


@njit
def judge(p, st, keys, cutoff, pace_limit, sc):  # type: ignore[no-untyped-def]
    set_flight(p, st, keys)
    return decode(p, st, keys, cutoff, pace_limit, sc)


@njit
def walk(p, st, back, best, population, values, best_keys, pace, sc, rng, task, value, log):  # type: ignore[no-untyped-def]
    """Breed keys for a structure, then evaluate it (if the task has no moves) or anneal it from the step time and score
    in `value`. Returns the number of schedules evaluated and of lines in `log`.

    The structure, its population of keys and its pace change in place. `best` and `best_keys` receive whatever is
    better than value[BEST_MS]. `back` is working space. Without moves, the scratch finally holds the orders for the
    best keys; after moves, it holds those of the last schedule that was tried.
    """
    keys, chosen = np.zeros(NUM_KEYS), np.zeros(NUM_KEYS)
    limit = np.full(LAPS, np.inf)
    ranks, work = p.count[RANKS], value[WORK_MS]
    judged, lines = breed(p, st, population, values, keys, limit, sc, rng, task, value), 0
    load = work_bound(p, st, sc)
    if task[MOVES] == 0 and task[HALT] > 0:
        value[STEP_MS] = np.inf
        return judged, 0
    if task[MOVES] == 0:
        keys[:] = population[0]
        value[STEP_MS] = judge(p, st, keys, np.inf, limit, sc)
        value[SCORE] = rate(value[STEP_MS], sc.pace, ranks, load, work)
        pace[:] = sc.pace
        return judged + 1, 0
    critical = -1
    step_ms, score = value[STEP_MS], value[SCORE]
    for i in range(task[MOVES]):
        if task[HALT] > 0:
            break
        back[:] = st
        move = propose(p, st, rng, task[MAY_RECOMPUTE] > 0, critical)
        if move < 0:
            st[:] = back
            continue
        cutoff = threshold(score, value[HEAT] * score, rng)
        # With a step time beyond this, the score meets the cutoff only if the mean finish time falls by more than
        # BEHIND, which is so unlikely that the schedule is abandoned.
        limit_ms = (cutoff - MEAN * (1.0 - BEHIND) * min(pace[LAPS - 2] / ranks, step_ms)) / (1.0 - MEAN)
        target = room(limit_ms, work)
        if step_ms <= load * (1.0 + 0.1 * RELIEF) and uniform(rng) < SOMETIMES:
            target = step_ms * (1.0 - RELIEF * uniform(rng))
        found, tried = np.inf, 0
        busiest = repair(p, st, rng, target, sc)
        if busiest <= limit_ms:
            late = ranks * (cutoff - score + SLACK * score)
            if uniform(rng) < ANY_PACE:
                late = np.inf
            for lap in range(LAPS):
                limit[lap] = pace[lap] + late
            found, tried = try_keys(
                p, st, population, values, keys, chosen, limit, sc, rng, cutoff, limit_ms, busiest, work
            )
        judged += tried
        if not found <= cutoff:
            st[:] = back
            continue
        load = busiest
        step_ms, score, critical = renew(p, st, population, values, chosen, sc, rng, pace, limit, load, work)
        judged += 1 + 2 * REJUDGED
        if step_ms < value[BEST_MS] - 1e-9:
            lines = write_line(log, lines, i, move, value[BEST_MS], step_ms)
            value[BEST_MS] = step_ms
            best[:] = st
            best_keys[:] = population[0]
    value[STEP_MS], value[SCORE] = step_ms, score
    return judged, lines


@njit
def breed(p, st, population, values, keys, limit, sc, rng, task, value):  # type: ignore[no-untyped-def]
    """Evaluate keys on a structure as the task says (known keys, variants of them, new keys, children) and keep the
    best in the population, sorted by step time. Returns the number of keys evaluated. `keys` is working space."""
    judged, known, last = 0, task[KNOWN], values.size - 1
    fresh = known + task[NEAR_KNOWN]
    for i in range(fresh + task[DRAWN] + task[BRED]):
        if task[HALT] > 0:
            break
        if i == known and known > 0:
            sort_keys(population, values)
        if i < known:
            keys[:] = population[i]
        elif i < fresh:
            keys[:] = population[below(rng, known)]
            vary_keys(p, keys, rng)
        elif i < fresh + task[DRAWN]:
            draw_keys(p, keys, rng)
        else:
            make_child(p, population, count_of(values), keys, rng)
        then = judge(p, st, keys, min(values[last], value[LIMIT_MS]), limit, sc)
        judged += 1
        if i < known:
            values[i] = then
        else:
            keep_keys(population, values, keys, then)
    if known > 0:
        sort_keys(population, values)
    return judged


@njit
def propose(p, st, rng, may_recompute, critical):  # type: ignore[no-untyped-def]
    """Change the structure in place by one random move, or occasionally by several. Returns the first move that
    applied, or -1."""
    move = change(p, st, rng, may_recompute, critical)
    while uniform(rng) < SOMETIMES:
        more = change(p, st, rng, may_recompute, critical)
        if move < 0:
            move = more
    return move


@njit
def try_keys(p, st, population, values, keys, chosen, limit, sc, rng, cutoff, limit_ms, load, work):  # type: ignore[no-untyped-def]
    """Evaluate a changed structure under the best keys and, while the result is promising, under children of them.
    Returns the best score and the number of evaluations; `chosen` receives the best keys. `keys` is working space."""
    found, tried = np.inf, 0
    for t in range(TRIES):
        if t == 0:
            keys[:] = population[0]
        elif found <= cutoff or sc.pace[PROMISING] == np.inf:
            break
        else:
            make_child(p, population, count_of(values), keys, rng)
        then_ms = judge(p, st, keys, limit_ms, limit, sc)
        then = rate(then_ms, sc.pace, p.count[RANKS], load, work)
        tried += 1
        if then < found:
            found = then
            chosen[:] = keys
    return found, tried


@njit
def sort_keys(population, values):  # type: ignore[no-untyped-def]
    """Sort a population of keys by step time."""
    keys = np.zeros(NUM_KEYS)
    for i in range(1, values.size):
        value = values[i]
        keys[:] = population[i]
        j = i
        while j > 0 and values[j - 1] > value:
            values[j] = values[j - 1]
            population[j] = population[j - 1]
            j -= 1
        values[j] = value
        population[j] = keys


@njit
def renew(p, st, population, values, keys, sc, rng, pace, limit, load, work):  # type: ignore[no-untyped-def]
    """Evaluate the best keys of a population again, on a structure that was accepted under `keys`, and breed a few
    children.

    The other keys stay in the population as parents, without being evaluated: evaluating all of them every time took
    longer than the walk itself. Returns step time and score under the best keys and the rank that finishes last; `pace`
    becomes the pace of these keys.
    """
    ranks = p.count[RANKS]
    before = population.copy()
    values[:] = np.inf
    limit[:] = np.inf
    value = judge(p, st, keys, np.inf, limit, sc)
    score, critical = rate(value, sc.pace, ranks, load, work), sc.place[LENGTH, ranks]
    pace[:] = sc.pace
    keep_keys(population, values, keys, value)
    other = np.zeros(NUM_KEYS)
    for i in range(2 * REJUDGED):
        if i == REJUDGED:
            count = count_of(values)
            for j in range(REJUDGED, min(before.shape[0], REJUDGED + values.size - count)):
                population[count] = before[j]
                values[count] = value * NEAR * (1.0 + 1e-9 * j)
                count += 1
        if i < REJUDGED:
            other[:] = before[i]
        else:
            make_child(p, population, count_of(values), other, rng)
        for lap in range(LAPS):
            limit[lap] = pace[lap] + ranks * BEHIND * value
        then = judge(p, st, other, min(value * NEAR, values[values.size - 1]), limit, sc)
        if then < values[0]:
            score, critical = rate(then, sc.pace, ranks, load, work), sc.place[LENGTH, ranks]
            pace[:] = sc.pace
        keep_keys(population, values, other, then)
    return values[0], score, critical


# -- partitions --------------------------------------------------------------------------------------------


@njit
def imbalance(p, st, sc, even, tilt, rising, wanted):  # type: ignore[no-untyped-def]
    """What `balance` minimises: the work bound, times a penalty for every rank that exceeds its memory, times a penalty
    for stages whose F and I times deviate from the proportions `wanted`.

    With `rising`, memory is estimated with Little's law: a stage holds as many micro-batches as pass through it between
    the F and the I of one of them. Otherwise every stage is assumed to hold one micro-batch per rank.
    """
    value = work_bound(p, st, sc)
    uneven = 0.0
    last, M = p.count[LAYERS], float(p.count[MICRO_BATCHES])
    for r in range(p.count[RANKS]):
        sc.mine[r, OWED] = 0.0
    for s in range(st[SIZE, 0]):
        a, z = st[BOUNDS, s], st[BOUNDS, s + 1]
        flight = min(1.0 + LITTLE * way_back(p, a, last) / p.number[UNIT] if rising else float(p.count[RANKS]), M)
        hold = p.layer[BOUNDARY, 0, a] if st[REDO, s] else p.layer[ACTIVATION, 0, z] - p.layer[ACTIVATION, 0, a]
        held = hold * flight + p.layer[STASH, 0, z] - p.layer[STASH, 0, a]
        sc.mine[st[RANK, s], OWED] += p.whole[STATIC, z] - p.whole[STATIC, a] + held
        took = p.layer[FORWARD, 0, z] - p.layer[FORWARD, 0, a] + tilt * (p.layer[INPUT, 0, z] - p.layer[INPUT, 0, a])
        uneven += took * took / wanted[s]
    for r in range(p.count[RANKS]):
        if sc.mine[r, OWED] > p.rank[CAPACITY, r]:
            value *= 0.5 + 0.5 * sc.mine[r, OWED] / p.rank[CAPACITY, r]
    whole = p.layer[FORWARD, 0, last] + tilt * p.layer[INPUT, 0, last]
    return value * (1.0 + even * (np.sqrt(uneven) / max(whole, 1e-12) - 1.0))


@njit
def balance(p, st, back, sc, rng, iterations, even, tilt, rising, wanted):  # type: ignore[no-untyped-def]
    """Anneal the stage boundaries on their imbalance; stages keep their ranks. `back` is working space."""
    current = best = imbalance(p, st, sc, even, tilt, rising, wanted)
    kept = st.copy()
    for i in range(iterations):
        back[:] = st
        moved = False
        for _ in range(1 + below(rng, 2)):
            moved = (migrate(st, rng, -1) if uniform(rng) < 0.5 else shift(st, rng)) or moved
        if not moved:
            continue
        value = imbalance(p, st, sc, even, tilt, rising, wanted)
        left = 1.0 - i / iterations
        if value <= threshold(current, best * BALANCE_HOT * (left * left), rng):
            current = value
            if value < best:
                best = value
                kept[:] = st
        else:
            st[:] = back
    st[:] = kept

"""Where the search begins: balanced partitions on loops and waves, published systems, a plan of the user's.

Knows: how to make a walker's state from a shape or from a plan. Does not know: how states are improved.

A shape is a number of stages and a way round the ranks. Its partition is balanced on what binds the step time
from below: a rank's work plus the time until its first micro-batch arrives.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numba import njit

from octopipe.plan import Plan
from octopipe.tuner.anneal import State, below, make_state, migrate, shift, uniform
from octopipe.tuner.kernels import C_W, KIND_F, KIND_I, LOOK, NEVER, RHO, W_OVER, Problem, quick_bound

LITTLE = 1.3
"""How much longer than without any wait a micro-batch is assumed to be under way."""


def key_presets(problem: Problem) -> Iterator[tuple[float, float, float, float, float]]:
    """Priorities worth trying first: (A_F, B_F, A_I, B_I, C_I)."""
    r = float(problem.num_ranks)
    yield (1.0, r / 2, 1.0, r / 2, -1e3)
    yield (1.0, r / 2, 1.0, r / 2, -r / 4)
    yield (1.0, -r, 1.0, 0.0, -1e3)
    yield (1.0, r, 1.0, r, -1e3)
    yield (1.0, 0.0, 1.0, 0.0, 0.0)
    yield (1.0, 2 * r, 1.0, 2 * r, -1e3)
    yield (1.0, r, 1.0, r, r / 2)


def shapes(problem: Problem, max_stages: int) -> list[tuple[int, bool]]:
    """(number of stages, wave instead of loop), from one stage a rank up to eight."""
    ranks = problem.num_ranks
    counts = sorted({max(1, round(ranks * f)) for f in (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8)})
    counts = [c for c in counts if ranks <= c <= max_stages] or [min(max_stages, ranks)]
    return [(c, wave) for c in counts for wave in ((False, True) if c > ranks else (False,))]


def place(num_stages: int, num_ranks: int, wave: bool) -> list[int]:
    """Ranks of the stages: round and round, or down and up again."""
    if not wave:
        return [s % num_ranks for s in range(num_stages)]
    turns = [s % (2 * num_ranks) for s in range(num_stages)]
    return [r if r < num_ranks else 2 * num_ranks - 1 - r for r in turns]


def shaped_state(problem: Problem, max_stages: int, num_stages: int, wave: bool, seed: int) -> State:
    """A balanced start of this shape, with neutral keys."""
    st = make_state(problem, max_stages)
    ranks = place(num_stages, problem.num_ranks, wave)
    partition_evenly(problem, st, ranks, seed=seed, even=4.0, tilt=1.0, rising=True, iterations=3000)
    neutral_keys(st)
    return st


def partition_evenly(
    problem: Problem,
    st: State,
    ranks: list[int],
    *,
    seed: int,
    even: float,
    tilt: float,
    rising: bool,
    iterations: int,
    sizes: np.ndarray | None = None,
) -> None:
    """Give stages on these ranks their layers: cut at equal work, then annealed on the imbalance.

    `even` weighs stages that differ from their wanted sizes (all the same unless said): ranks hand micro-batches on in
    step where stages take equally long, and of all that was tried this made starts better by most; `tilt` is how much
    their I counts beside their F. `rising`: early stages are taken to hold more micro-batches.
    """
    layers, num_stages = problem.num_layers, len(ranks)
    share = problem.total / max(problem.total[-1], 1e-300)
    wanted = np.ones(num_stages) if sizes is None else np.asarray(sizes, np.float64)
    wanted = wanted / wanted.sum()
    reach = np.cumsum(wanted)
    bounds = [0]
    for s in range(1, num_stages):
        cut = int(np.argmin(np.abs(share - reach[s - 1])))
        bounds.append(min(max(cut, bounds[-1] + 1), layers - (num_stages - s)))
    st.size[0] = num_stages
    st.bounds[: num_stages + 1] = [*bounds, layers]
    st.rank[:num_stages] = ranks
    balance(problem, st, np.array([seed * 7919 + 88172645463325252], np.uint64), iterations, even, tilt, rising, wanted)


@njit(cache=True, nogil=True)
def limit_flight(p, st, slack, more):  # type: ignore[no-untyped-def]
    """Micro-batches in flight per stage after Little's law: time from F to I over the time per micro-batch."""
    last = p.num_layers
    for s in range(st.size[0]):
        a = st.bounds[s]
        way = p.forward[0, last] - p.forward[0, a] + p.input[0, last] - p.input[0, a]
        st.flight[s] = min(max(int(more + slack * way / p.unit), 1), p.num_micro_batches)


def neutral_keys(st: State) -> None:
    st.glob[LOOK], st.glob[RHO], st.glob[W_OVER], st.glob[C_W] = 0.0, 1.0, 10.0, NEVER


@njit(cache=True, nogil=True)
def _imbalance(p, st, loads, held, even, tilt, rising, wanted):  # type: ignore[no-untyped-def]
    """The work bound, plus what memory exceeds, plus a little for uneven stages.

    Memory after Little's law: a stage holds as many micro-batches as pass while one goes from its F to its I.
    """
    value = quick_bound(p, st.size[0], st.bounds, st.rank, st.recompute, loads)
    held[:] = 0.0
    uneven = 0.0
    last = p.num_layers
    for s in range(st.size[0]):
        a, z = st.bounds[s], st.bounds[s + 1]
        way = p.forward[0, last] - p.forward[0, a] + p.input[0, last] - p.input[0, a]
        flight = min(1.0 + LITTLE * way / p.unit if rising else p.num_ranks, p.num_micro_batches)
        hold = p.boundary[0, a] if st.recompute[s] else p.activation[0, z] - p.activation[0, a]
        held[st.rank[s]] += p.static[z] - p.static[a] + hold * flight + p.stash[0, z] - p.stash[0, a]
        uneven += (p.forward[0, z] - p.forward[0, a] + tilt * (p.input[0, z] - p.input[0, a])) ** 2 / wanted[s]
    for r in range(p.num_ranks):
        if held[r] > p.capacity[r]:
            value *= 1.0 + (held[r] / p.capacity[r] - 1.0) * 0.5
    whole = p.forward[0, last] + tilt * p.input[0, last]
    return value * (1.0 + even * (np.sqrt(uneven) / max(whole, 1e-12) - 1.0))


@njit(cache=True, nogil=True)
def balance(p, st, rng, iterations, even, tilt, rising, wanted):  # type: ignore[no-untyped-def]
    """Anneal the boundaries on the imbalance; stages keep their ranks."""
    loads, held = np.zeros(p.num_ranks), np.zeros(p.num_ranks)
    n = st.size[0]
    current = _imbalance(p, st, loads, held, even, tilt, rising, wanted)
    best, kept, back = current, st.bounds.copy(), st.bounds.copy()
    for i in range(iterations):
        for s in range(n + 1):
            back[s] = st.bounds[s]
        moved = False
        for _ in range(1 + below(rng, 2)):
            moved = (migrate(st, rng) if uniform(rng) < 0.6 else shift(st, rng)) or moved
        if not moved:
            continue
        value = _imbalance(p, st, loads, held, even, tilt, rising, wanted)
        heat = best * 0.02 * (1.0 - i / iterations) ** 2
        if value <= current - heat * np.log(max(uniform(rng), 1e-300)):
            current = value
            if value < best:
                best = value
                for s in range(n + 1):
                    kept[s] = st.bounds[s]
        else:
            for s in range(n + 1):
                st.bounds[s] = back[s]
    for s in range(n + 1):
        st.bounds[s] = kept[s]


def usable(plan: Plan) -> bool:
    """Can the walker represent this plan's structure? One route, stages in chain order."""
    return len(plan.routes) == 1 and tuple(plan.routes[0]) == tuple(range(len(plan.stages)))


def state_from_plan(problem: Problem, max_stages: int, plan: Plan) -> State:
    """The plan's structure, with keys that repeat its order of F and I on every rank."""
    st = make_state(problem, max_stages)
    n = len(plan.stages)
    st.size[0] = n
    st.bounds[: n + 1] = [s.first for s in plan.stages] + [plan.num_layers]
    st.rank[:n] = [s.rank for s in plan.stages]
    st.recompute[:n] = [bool(s.recompute) for s in plan.stages]
    neutral_keys(st)
    position = {m: i for i, m in enumerate(_entry_order(plan))}
    st.entry[:] = list(position)
    per_unit = max(1.0, len(plan.stages) * 2.0 / plan.num_ranks)
    for order in plan.orders:
        for at, op in enumerate(o for o in order if o.kind in "FIB"):
            kind = KIND_F if op.kind == "F" else KIND_I
            st.wiggle[0 if kind == KIND_F else 1, op.stage, position[op.micro_batch]] = at / per_unit
    return st


def _entry_order(plan: Plan) -> list[int]:
    """Micro-batches in the order in which the first stage runs them."""
    first = plan.stages[0].rank
    return [op.micro_batch for op in plan.orders[first] if op.stage == 0 and op.kind == "F"]

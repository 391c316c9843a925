"""The problem as arrays: costs of layers, ranks and links, and working memory for building a schedule.

Knows: the only source of the search's costs (`CostTable`), structures, and random numbers for kernels. Does not know:
schedules, moves or plans.

Kernels take a few large arrays of two types instead of many small ones, so that values read together are adjacent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from octopipe.base.compile import njit
from octopipe.costs.table import CostTable
from octopipe.base.errors import OctoPipeError

RANKS, MICRO_BATCHES, LAYERS, VARIANTS, HAS_EXTRAS, HAS_LIMIT, HAS_BUFFERS, NUM_COUNTS = range(8)
"""These are the places in `Problem.count`. The last three are flags (0 or 1): whether gradient reductions or the
optimizer follow the pipeline, whether memory is limited, and whether tensors between stages occupy limited memory."""
FORWARD, INPUT, WEIGHT, ACTIVATION, STASH, BOUNDARY, NUM_LAYER = range(7)
"""These are the rows of `Problem.layer`. BOUNDARY is not a prefix sum: it holds the bytes of the tensor that enters a
layer, and 0 for the first layer."""
STATIC, OPTIMIZER, GRADIENT, TOTAL, AGAIN, FASTEST, ONCE, WORKSPACE, NUM_WHOLE = range(9)
"""These are the rows of `Problem.whole`: the bytes of weights and optimizer state, the time of the optimizer, the bytes
of gradients, the work of all micro-batches, the work of their forwards alone, the forward of the smallest micro-batch
and the number of layers that cannot be recomputed. WORKSPACE is not a prefix sum but a value per layer."""
SLOW, CAPACITY, MARGIN, NUM_RANK = range(4)
"""These are the rows of `Problem.rank`: the factor on compute times, the capacity in bytes (infinite without a limit)
and the bytes that are kept free."""
LATENCY, PER_BYTE, SUM_LATENCY, SUM_PER_BYTE = range(4)
"""These are the planes of `Problem.link`."""
UNIT, REDUCE_LATENCY, REDUCE_PER_BYTE, NUM_NUMBERS = range(4)
"""These are the places in `Problem.number`: the mean work of a rank per micro-batch, which is the unit of priorities,
and the latency and the time per byte of the gradient reduction."""
KIND_F, KIND_R, KIND_I, KIND_W = 0, 1, 2, 3
"""The kinds of ops are numbered as in `plan.KINDS`."""
KIND_BITS, STAGE_BITS, MASK = 28, 14, (1 << 14) - 1
"""An op is packed into 32 bits as kind << 28 | stage << 14 | micro-batch."""

SIZE, BOUNDS, RANK, REDO, FLIGHT, ENTRY, ROUTES, NUM_ROWS = range(8)
"""These are the rows of a structure. [SIZE, 0] is the number of segments of the chain of layers, and [SIZE, 1] the
largest number allowed. BOUNDS holds the first layer of every segment, and the end of the last one. Every stage has its
rank, whether it recomputes, and the largest number of micro-batches between its F and its I (FLIGHT). ENTRY says in
which order micro-batches enter. [ROUTES, 0] is the number of routes: stage `route * size + k` holds segment k, so with
several routes every layer is held several times."""

F_MS, I_MS, W_MS, HOP_F, HOP_I, HOLD, FULL, TAIL, NUM_PRICES = range(9)
"""These are the rows of `Scratch.price`: the times of the ops, the transfer times of the outputs of F and I, the bytes
that F takes, the bytes of the whole activation, and the bytes that stay from I until W."""
LEFT, USED, LIMIT, FREE, OWED, WAY, CLOCK, LOAD, NUM_MINE = range(9)
"""These are the columns of `Scratch.mine`, one row per rank: the time of the work that is left, the bytes in use and
their limit, the time since which the rank is free, the bytes that micro-batches which passed the rank's first stage
will still take in its other stages, the time of the F and I that are left plus that of the last gradient's way back to
stage 0, the time of the rank's next decision, and its work bound."""
SLOT, AT_SLOT, FIRST, LENGTH, NUM_PLACES = range(5)
"""These are the rows of `Scratch.place`: the slot of a stage (slots are stages sorted by rank, in the order of the
chain), the stage of a slot, the first slot of a rank (followed by the number of slots), and the number of ops of a rank
so far (followed by the rank that finished last)."""


class Problem(NamedTuple):
    """Everything that the search knows about the model, the R ranks and the M micro-batches. L is the number of layers;
    V is 1, or M if micro-batches differ in size."""

    count: Any
    """The shape is [NUM_COUNTS]: numbers of ranks, micro-batches, layers and variants, and flags."""
    layer: Any
    """The shape is [NUM_LAYER, V, L + 1]: prefix sums over layers, for every variant of a micro-batch."""
    whole: Any
    """The shape is [NUM_WHOLE, L + 1]: prefix sums over layers that do not depend on the micro-batch."""
    rank: Any
    """The shape is [NUM_RANK, R]: speed and memory of every rank."""
    link: Any
    """The shape is [4, R, R]: latency in ms and time per byte in ms, from one rank to another, of messages and of the
    sums of copies' gradients."""
    number: Any
    """The shape is [NUM_NUMBERS]: the unit of priorities and the costs of gradient reduction."""

    @property
    def ranks(self) -> int:
        return int(self.count[RANKS])

    @property
    def micro_batches(self) -> int:
        return int(self.count[MICRO_BATCHES])

    @property
    def layers(self) -> int:
        return int(self.count[LAYERS])

    @property
    def has_limit(self) -> bool:
        return bool(self.count[HAS_LIMIT])

    @property
    def has_buffers(self) -> bool:
        """Whether tensors between stages occupy memory that is limited."""
        return bool(self.count[HAS_BUFFERS])

    def with_margin(self, margin: np.ndarray) -> Problem:
        """The same problem with other numbers of bytes kept free per rank."""
        rank = self.rank.copy()
        rank[MARGIN] = margin
        return self._replace(rank=rank)


def make_problem(costs: CostTable, num_ranks: int, num_micro_batches: int) -> Problem:
    """The arrays of the given costs, number of ranks and number of micro-batches."""
    layers, factor = costs.num_layers, costs.micro_batch_factor
    if max(num_micro_batches, layers) > MASK:
        raise OctoPipeError(
            f"{num_micro_batches} micro-batches over {layers} layers; the tuner takes at most {MASK} of either"
        )
    size = np.ones((1, layers)) if factor is None else factor[:num_micro_batches]
    handed = size if costs.handed_factor is None else costs.handed_factor[:num_micro_batches]
    every = size.sum(axis=0) * (num_micro_batches if factor is None else 1)

    def summed(values: Any) -> Any:
        rows = np.atleast_2d(values)
        return np.concatenate((np.zeros((rows.shape[0], 1)), np.cumsum(rows, axis=1)), axis=1)

    layer = np.stack([
        *(summed(size * v) for v in (costs.forward_ms, costs.input_ms, costs.weight_ms)),
        *(summed(size * v) for v in (costs.activation_bytes, costs.stash_bytes)),
        np.concatenate((np.zeros((size.shape[0], 1)), handed * costs.boundary_bytes), axis=1),
    ])  # fmt: skip
    once = np.zeros(layers)
    once[list(costs.not_repeatable())] = 1.0
    whole = np.concatenate([
        *(summed(v) for v in (costs.static_bytes, costs.optimizer_ms, costs.gradient_bytes)),
        *(summed(v) for v in (every * costs.layer_ms, every * costs.forward_ms, size.min(axis=0) * costs.forward_ms)),
        summed(once),
        np.append(costs.workspace_bytes, 0.0)[None],
    ])  # fmt: skip
    slow = np.array([costs.slowdown(r) for r in range(num_ranks)])
    capacity = np.array([costs.capacity_bytes(r) for r in range(num_ranks)])
    link = np.zeros((4, num_ranks, num_ranks))
    for a in range(num_ranks):
        for b in range(num_ranks):
            if a != b:
                between, summing = costs.network.link(a, b), costs.sum_link(a, b)
                link[:, a, b] = between.latency_ms, between.ms_per_byte, summing.latency_ms, summing.ms_per_byte
    dp = costs.data_parallel
    reduces = dp > 1 and bool(costs.gradient_bytes.any())
    limited = bool(np.isfinite(capacity).any())
    count = np.zeros(NUM_COUNTS, np.int64)
    count[:] = (
        num_ranks, num_micro_batches, layers, size.shape[0], reduces or bool(costs.optimizer_ms.any()), limited,
        limited and bool(costs.boundary_bytes.any()),
    )  # fmt: skip
    unit = max(float(whole[TOTAL, -1]) / float((1.0 / slow).sum()) / num_micro_batches, 1e-9)
    latency = 2 * int(np.ceil(np.log2(dp))) * costs.reduction.latency_ms if reduces else 0.0
    per_byte = 2 * (dp - 1) / dp * costs.reduction.ms_per_byte if reduces else 0.0
    return Problem(
        count=count,
        layer=np.ascontiguousarray(layer),
        whole=np.ascontiguousarray(whole),
        rank=np.stack((slow, capacity, np.zeros(num_ranks))),
        link=link,
        number=np.array([unit, latency, per_byte]),
    )


class Scratch(NamedTuple):
    """Working space in which a thread builds and times schedules; allocated once. `seq` holds the orders."""

    price: Any
    """The shape is [NUM_PRICES, S, V]: times and bytes of the ops of every stage."""
    row: Any
    """The shape is [slot, 12]: what decode.py reads about the next ops of a stage. Slots are stages sorted by rank."""
    num: Any
    """The shape is [slot + rank, 10]: the whole numbers that decode.py reads about a stage, and about a rank."""
    mine: Any
    """The shape is [R + 1, NUM_MINE]: the state of every rank."""
    place: Any
    """The shape is [NUM_PLACES, S or R + 1]: which slot belongs to which stage and rank."""
    arrive: Any
    """The shape is [2, S, M]: when the input and the gradient arrive; infinite while that is not known."""
    channel: Any
    """The shape is [R, R]: when the queue of transfers from one rank to another is empty."""
    done: Any
    """The shape is [S]: when the last W of a stage ends."""
    seq: Any
    """The shape is [R, ops]: the ops of every rank in order, packed."""
    end: Any
    """The shape is [R, ops]: when each op of `seq` ends."""
    pace: Any
    """The shape is [laps]: after each lap, the sum over ranks of the times at which they would finish if none of them
    waited any more; infinite for laps that the schedule did not reach."""


def make_scratch(problem: Problem, max_stages: int, laps: int) -> Scratch:
    s, m, r = max_stages, problem.micro_batches, problem.ranks
    return Scratch(
        price=np.zeros((NUM_PRICES, s, int(problem.count[VARIANTS]))),
        row=np.zeros((s, 12)),
        num=np.zeros((s + r + 1, 10), np.int64),
        mine=np.zeros((r + 1, NUM_MINE)),
        place=np.zeros((NUM_PLACES, max(s, r + 1)), np.int64),
        arrive=np.zeros((2, s, m)),
        channel=np.zeros((r, r)),
        done=np.zeros(s),
        seq=np.zeros((r, 4 * s * m), np.int32),
        end=np.zeros((r, 4 * s * m)),
        pace=np.zeros(laps),
    )


def make_structure(problem: Problem, max_stages: int) -> np.ndarray:
    st = np.zeros((NUM_ROWS, max(max_stages + 1, problem.micro_batches)), np.int64)
    st[FLIGHT] = problem.micro_batches
    st[ENTRY, : problem.micro_batches] = np.arange(problem.micro_batches)
    st[ROUTES, 0] = 1
    st[SIZE, 1] = max_stages
    return st


# -- random numbers ----------------------------------------------------------------------------------------


def make_rng(*seed: int) -> np.ndarray:
    """The state of a random generator for kernels; every thread has its own."""
    return np.random.default_rng(seed).integers(1, 1 << 62, 1).astype(np.uint64)


@njit
def uniform(rng):  # type: ignore[no-untyped-def]
    """A random number in [0, 1), by xorshift."""
    x = rng[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    rng[0] = x
    return np.float64((x * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@njit
def below(rng, n):  # type: ignore[no-untyped-def]
    return min(int(uniform(rng) * n), n - 1)


@njit
def bell(rng):  # type: ignore[no-untyped-def]
    """A roughly normal random number with mean 0 and deviation 1, without long tails."""
    return (uniform(rng) + uniform(rng) + uniform(rng) - 1.5) * 2.0


# -- prices and bounds of a structure ----------------------------------------------------------------------


@njit
def price(p, st, sc):  # type: ignore[no-untyped-def]
    """Compute the costs of every stage and the sums of every rank, in the scratch. Returns False if the static memory
    alone does not fit.

    Recomputation is switched off for a stage that received a layer which cannot be recomputed.
    """
    size, stages = st[SIZE, 0], st[SIZE, 0] * st[ROUTES, 0]
    for r in range(p.count[RANKS]):
        sc.place[FIRST, r] = 0
        sc.mine[r, USED] = p.rank[MARGIN, r]
        sc.mine[r, LEFT] = 0.0
        sc.mine[r, LIMIT] = p.rank[CAPACITY, r]
    for s in range(stages):
        k, r = s % size, st[RANK, s]
        a, z = st[BOUNDS, k], st[BOUNDS, k + 1]
        slow = p.rank[SLOW, r]
        if p.whole[ONCE, z] > p.whole[ONCE, a]:
            st[REDO, s] = 0
        sc.place[FIRST, r] += 1
        sc.mine[r, USED] += p.whole[STATIC, z] - p.whole[STATIC, a]
        work = 0.0
        for l in range(a, z):
            work = max(work, p.whole[WORKSPACE, l])
        sc.mine[r, LIMIT] = min(sc.mine[r, LIMIT], p.rank[CAPACITY, r] - work)
        after = st[RANK, s + 1] if k + 1 < size else r
        before = st[RANK, s - 1] if k > 0 else r
        sc.mine[r, LEFT] += (p.whole[TOTAL, z] - p.whole[TOTAL, a]) * slow
        if st[REDO, s] and k + 1 < size:
            sc.mine[r, LEFT] += (p.whole[AGAIN, z] - p.whole[AGAIN, a]) * slow
        sc.mine[r, LEFT] += (p.whole[OPTIMIZER, z] - p.whole[OPTIMIZER, a]) * slow
        for v in range(p.count[VARIANTS]):
            sc.price[F_MS, s, v] = (p.layer[FORWARD, v, z] - p.layer[FORWARD, v, a]) * slow
            sc.price[I_MS, s, v] = (p.layer[INPUT, v, z] - p.layer[INPUT, v, a]) * slow
            sc.price[W_MS, s, v] = (p.layer[WEIGHT, v, z] - p.layer[WEIGHT, v, a]) * slow
            hop = 0.0
            if after != r:
                hop = p.link[LATENCY, r, after] + p.layer[BOUNDARY, v, z] * p.link[PER_BYTE, r, after]
            sc.price[HOP_F, s, v] = hop
            hop = 0.0
            if before != r:
                hop = p.link[LATENCY, r, before] + p.layer[BOUNDARY, v, a] * p.link[PER_BYTE, r, before]
            sc.price[HOP_I, s, v] = hop
            full = p.layer[ACTIVATION, v, z] - p.layer[ACTIVATION, v, a]
            sc.price[FULL, s, v] = full
            sc.price[TAIL, s, v] = p.layer[STASH, v, z] - p.layer[STASH, v, a]
            sc.price[HOLD, s, v] = min(p.layer[BOUNDARY, v, a], full) if st[REDO, s] else full
    # Slots: stages sorted by rank, in the order of the chain.
    first = 0
    for r in range(p.count[RANKS]):
        count = sc.place[FIRST, r]
        sc.place[FIRST, r] = first
        sc.place[LENGTH, r] = first
        first += count
    sc.place[FIRST, p.count[RANKS]] = first
    for s in range(stages):
        r = st[RANK, s]
        at = sc.place[LENGTH, r]
        sc.place[SLOT, s] = at
        sc.place[AT_SLOT, at] = s
        sc.place[LENGTH, r] += 1
    for r in range(p.count[RANKS]):
        if sc.mine[r, USED] > sc.mine[r, LIMIT]:
            return False
    return True


@njit
def work_bound(p, st, sc):  # type: ignore[no-untyped-def]
    """The maximum over ranks of (arrival of the first micro-batch + the rank's work): a lower bound on the step time of
    any order on one route.

    The sum of every rank is left in the scratch's LOAD column.
    """
    ranks, stages = p.count[RANKS], st[SIZE, 0]
    hop = 0.0
    fill = 0.0
    for r in range(ranks):
        sc.mine[r, LOAD] = -1.0
    for s in range(stages):
        r, a, z = st[RANK, s], st[BOUNDS, s], st[BOUNDS, s + 1]
        slow = p.rank[SLOW, r]
        if sc.mine[r, LOAD] < 0.0:
            sc.mine[r, LOAD] = fill + hop
        work = p.whole[TOTAL, z] - p.whole[TOTAL, a] + p.whole[OPTIMIZER, z] - p.whole[OPTIMIZER, a]
        if st[REDO, s] and s + 1 < stages and p.whole[ONCE, z] == p.whole[ONCE, a]:
            # The last stage may run I right after F and skip R; no other can. Where a layer of the stage must not be
            # recomputed, `price` switches recomputation off.
            work += p.whole[AGAIN, z] - p.whole[AGAIN, a]
        sc.mine[r, LOAD] += work * slow
        fill += (p.whole[FASTEST, z] - p.whole[FASTEST, a]) * slow
        if s + 1 < stages and st[RANK, s + 1] != r:
            hop += p.link[LATENCY, r, st[RANK, s + 1]]
    worst = 0.0
    for r in range(ranks):
        worst = max(worst, sc.mine[r, LOAD])
    return worst


@njit
def extras_end(p, st, sc):  # type: ignore[no-untyped-def]
    """The end of the last reduction and optimizer update, given the end of every stage's last W in `sc.done`. The sum
    of the gradients of weights that several layers share (tied embeddings) is left to the simulator."""
    size, routes = st[SIZE, 0], st[ROUTES, 0]
    latest = 0.0
    for r in range(p.count[RANKS]):
        clock = 0.0
        finished = 0.0
        update = 0.0
        before = -1.0
        # Visit stages in the order in which their gradients are complete (in all copies). Ranks have few stages, so
        # repeated selection is cheap.
        while True:
            nearest = np.inf
            for i in range(sc.place[FIRST, r], sc.place[FIRST, r + 1]):
                ready = ready_at(size, routes, sc.place[AT_SLOT, i], sc)
                if before < ready < nearest:
                    nearest = ready
            if nearest == np.inf:
                break
            for i in range(sc.place[FIRST, r], sc.place[FIRST, r + 1]):
                s = sc.place[AT_SLOT, i]
                if ready_at(size, routes, s, sc) != nearest:
                    continue
                k = s % size
                a, z = st[BOUNDS, k], st[BOUNDS, k + 1]
                moved = p.whole[GRADIENT, z] - p.whole[GRADIENT, a]
                took = 0.0
                if moved > 0.0:
                    if p.number[REDUCE_PER_BYTE] > 0.0 or p.number[REDUCE_LATENCY] > 0.0:
                        took = p.number[REDUCE_LATENCY] + moved * p.number[REDUCE_PER_BYTE]
                    if routes > 1:
                        other = st[RANK, k] if st[RANK, k] != r else st[RANK, k + size]
                        if other != r:
                            # All-reduce among the copies: a tree's latency, every byte 2 (n - 1) / n times.
                            deep = np.ceil(np.log2(routes))
                            took += 2.0 * deep * p.link[SUM_LATENCY, r, other]
                            took += 2.0 * (routes - 1) / routes * moved * p.link[SUM_PER_BYTE, r, other]
                if took > 0.0:
                    clock = max(clock, nearest) + took
                finished = max(finished, sc.done[s])
                update += p.whole[OPTIMIZER, z] - p.whole[OPTIMIZER, a]
            before = nearest
        latest = max(latest, max(clock, finished) + update * p.rank[SLOW, r])
    return latest


@njit
def ready_at(size, routes, s, sc):  # type: ignore[no-untyped-def]
    """When the gradients of a stage are complete: its own, and those of the other copies of its layers."""
    latest = sc.done[s]
    for other in range(routes):
        latest = max(latest, sc.done[s % size + other * size])
    return latest


@njit
def pack(kind, s, m):  # type: ignore[no-untyped-def]
    return (kind << KIND_BITS) | (s << STAGE_BITS) | m

"""Proven lower bounds on the step time of any plan: what no partition, placement or order can beat.

Knows: the costs, the number of ranks and micro-batches. Does not know: any plan. Only *ramp* knows the memory limit
(which can only slow a plan down, so the others stay valid under it).

Notation: layer l has work w(l) over all micro-batches (its optimizer update included); P(l) is the forward time
of the smallest micro-batch through the layers before l, on the fastest rank; c the shortest transfer. A plan
holds every layer once (plans that hold layers twice do the same work, see `systems/chimera.py`; the arguments
below that speak of "the rank of a layer" do not cover them, so they are left out for such plans: work only).

- *work*: all the work, divided by the speed of all ranks.
- *chain*: all F and I of a layer run on one rank, one after another. Before the first of them a micro-batch
  passes the layers before; after the last one its gradient passes back to layer 0. Of the R ranks in use at
  most L-1-l first appear after layer l, so both ways cross at least R-1-(L-1-l) times between ranks.
- *heads*: let ranks be numbered in the order in which the chain first reaches them. Rank j is reached after at
  least j layers and j transfers, so it idles P(j) + jc at first. Sum over ranks: T >= work + mean idle time.
- *ramp*: by time u only so much work can have been done: the first gradient waits for the whole forward chain, later
  ones for each other, and F without gradients fills the memory. The rest of the ranks' time was idle. What a rank
  idles after u because it has not been reached yet is added to that. The proof is in `ramp.py`.
- *loads*: layers cannot be cut: the smallest possible maximum over ranks of (head + work of whole layers),
  where the rank that is reached first holds layer 0. Found by dealing layers of equal work out rank by rank
  (dynamic programming over how many of each kind are dealt), exact to a hundred-thousandth.

All but work and loads-without-heads assume that every rank is used; otherwise one rank fewer shares the work,
so the result is capped by the work bound of one rank fewer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octopipe._compile import njit
from octopipe.cost import CostTable
from octopipe.ramp import Ramp

Array = NDArray[np.float64]
_MAX_STATES = 60_000
_MAX_DEALS = 40_000_000
"""Steps of one round of dealing (about twenty rounds are made); beyond it the loads bound is the work bound."""


class Bound(NamedTuple):
    """One argument and what it proves."""

    name: str
    ms: float


def bounds(costs: CostTable, num_ranks: int, num_micro_batches: int, recompute: bool = True) -> tuple[Bound, ...]:
    """Every bound, the strongest first; those without `recompute` hold for plans that do not recompute alone."""
    work = work_bound_ms(costs, num_ranks, num_micro_batches)
    # With a rank unused the slowest one is left out at best.
    cap = _work_over(costs, num_micro_batches, sorted(_slow(costs, num_ranks))[: num_ranks - 1])
    found = [
        Bound("work", work),
        Bound("chain", max(chain_bound_ms(costs, num_ranks, num_micro_batches), work)),
        Bound("heads", min(heads_bound_ms(costs, num_ranks, num_micro_batches), cap)),
        Bound("ramp", min(ramp_bound_ms(costs, num_ranks, num_micro_batches, recompute), cap)),
        Bound("loads", min(loads_bound_ms(costs, num_ranks, num_micro_batches), cap)),
    ]
    return tuple(sorted(found, key=lambda b: -b.ms))


def lower_bound(costs: CostTable, num_ranks: int, num_micro_batches: int, recompute: bool = True) -> Bound:
    """The strongest bound, with its name."""
    return bounds(costs, num_ranks, num_micro_batches, recompute)[0]


def lower_bound_ms(costs: CostTable, num_ranks: int, num_micro_batches: int) -> float:
    """The strongest bound known here."""
    return lower_bound(costs, num_ranks, num_micro_batches).ms


# -- the bounds one by one -------------------------------------------------------------------------------


def work_bound_ms(costs: CostTable, num_ranks: int, num_micro_batches: int) -> float:
    """Total work over total speed."""
    return _work_over(costs, num_micro_batches, _slow(costs, num_ranks))


def chain_bound_ms(costs: CostTable, num_ranks: int, num_micro_batches: int) -> float:
    """max over layers l of: forward chain before l + every F_l and I_l + input-gradient chain after it."""
    fastest = min(_slow(costs, num_ranks))
    size = _sizes(costs, num_micro_batches)
    least = size.min(axis=0)
    lead = np.concatenate(([0.0], np.cumsum(least * costs.forward_ms)[:-1]))
    tail = np.concatenate(([0.0], np.cumsum(least * costs.input_ms)[:-1]))
    serial = size.sum(axis=0) * (costs.forward_ms + costs.input_ms)
    plain = fastest * (lead + serial + tail)
    behind = costs.num_layers - 1 - np.arange(costs.num_layers)
    best = 0.0
    # k ranks in use: fewer ranks mean fewer transfers but more work each; the truth is the best of these cases.
    for used in range(num_ranks, 0, -1):
        hops = np.maximum(used - 1 - behind, 0)
        chain = float((plain + 2 * hops * _hop_ms(costs, num_ranks)).max())
        work = _work_over(costs, num_micro_batches, sorted(_slow(costs, num_ranks))[:used])
        best = max(chain, work) if used == num_ranks else min(best, max(chain, work))
    return best


def heads_bound_ms(costs: CostTable, num_ranks: int, num_micro_batches: int) -> float:
    """Work plus the mean time until the ranks are first reached (all ranks used)."""
    rates = np.sort(1.0 / np.array(_slow(costs, num_ranks)))[::-1]
    work = float(_layer_work(costs, num_micro_batches).sum())
    return float((work + (rates * _heads(costs, num_ranks)).sum()) / rates.sum())


def ramp_bound_ms(costs: CostTable, num_ranks: int, num_micro_batches: int, recompute: bool = True) -> float:
    """Work plus the idle time that the start-up forces (all ranks used)."""
    # The fastest ranks may be the first to be reached: pairing large rates with small heads idles least.
    rates = np.sort(1.0 / np.array(_slow(costs, num_ranks)))[::-1]
    work = float(_layer_work(costs, num_micro_batches).sum())
    ramp = Ramp(costs, num_ranks, num_micro_batches, _hop_ms(costs, num_ranks), recompute)
    return ramp.bound_ms(work, rates, _heads(costs, num_ranks))


def loads_bound_ms(costs: CostTable, num_ranks: int, num_micro_batches: int) -> float:
    """The smallest T for which whole layers can be dealt out so that no rank's head + work exceeds T.

    Ranks of different speed: without heads, since which rank is reached when is not known.
    """
    slow = _slow(costs, num_ranks)
    even = min(slow) == max(slow)
    heads = _heads(costs, num_ranks) if even else np.zeros(num_ranks)
    work = _layer_work(costs, num_micro_batches)
    kinds, kind_of, counts = np.unique(np.round(work, 9), return_inverse=True, return_counts=True)
    first = int(kind_of[0]) if even and kinds[kind_of[0]] > 0 else -1
    if kinds[0] <= 0:
        kinds, counts, first = kinds[1:], counts[1:], max(first - 1, -1)
    floor = work_bound_ms(costs, num_ranks, num_micro_batches)
    if kinds.size == 0:
        return floor
    # The most frequent kind becomes the value of a state, so that it costs no states.
    main = int(np.argmax(counts))
    others = np.delete(np.arange(kinds.size), main)
    if np.prod(counts[others] + 1.0) > _MAX_STATES:
        return floor
    low = high = max(floor, min(slow) * float(work.max()))
    states = int(np.prod(counts[others] + 1.0))
    most_deals = _MAX_DEALS // (states * num_ranks)
    if _deals(high / min(slow), kinds[others], counts[others] + 1, most_deals) >= most_deals:
        return floor  # many layers that all differ: the exact answer would take minutes
    while not _dealable(high, heads, slow, kinds, counts, main, others, first):
        low, high = high, high * 1.04
    while high - low > 1e-5 * high:
        middle = 0.5 * (low + high)
        if _dealable(middle, heads, slow, kinds, counts, main, others, first):
            high = middle
        else:
            low = middle
    return low


# -- pieces ----------------------------------------------------------------------------------------------


def _slow(costs: CostTable, num_ranks: int) -> list[float]:
    return [costs.slowdown(r) for r in range(num_ranks)]


def _sizes(costs: CostTable, num_micro_batches: int) -> Array:
    if costs.micro_batch_factor is None:
        return np.ones((num_micro_batches, costs.num_layers))
    return costs.micro_batch_factor[:num_micro_batches]


def _layer_work(costs: CostTable, num_micro_batches: int) -> Array:
    """All the work of each layer in one step, on a rank of speed 1."""
    return _sizes(costs, num_micro_batches).sum(axis=0) * costs.layer_ms + costs.optimizer_ms


def _work_over(costs: CostTable, num_micro_batches: int, slow: list[float]) -> float:
    speed = sum(1.0 / s for s in slow)
    return float(_layer_work(costs, num_micro_batches).sum()) / speed if speed > 0 else float("inf")


def _hop_ms(costs: CostTable, num_ranks: int) -> float:
    """No transfer between two of the ranks is shorter."""
    links = [costs.network.link(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b]
    if not links or costs.num_layers < 2:
        return 0.0
    size = costs.boundary_bytes[:-1]
    if costs.micro_batch_factor is not None:
        size = size * costs.micro_batch_factor[:, :-1].min(axis=0)
    least = float(size.min())
    return min(link.latency_ms + least * link.ms_per_byte for link in links)


def _heads(costs: CostTable, num_ranks: int) -> Array:
    """Idle time of the j-th rank that the chain reaches, before it is reached."""
    least = 1.0 if costs.micro_batch_factor is None else costs.micro_batch_factor.min(axis=0)
    before = np.concatenate(([0.0], np.cumsum(least * costs.forward_ms)))[:num_ranks]
    return min(_slow(costs, num_ranks)) * before + np.arange(num_ranks) * _hop_ms(costs, num_ranks)


def _dealable(
    limit: float, heads: Array, slow: list[float], kinds: Array, counts: NDArray[np.int64], main: int,
    others: NDArray[np.int64], first: int,
) -> bool:  # fmt: skip
    """Can all layers be dealt to the ranks within `limit`?

    State: layers dealt of every kind but `main`; value: the most layers of `main` dealt beside them. `first`
    is the kind of layer 0, which the rank that is reached first holds (-1: not known which that is).
    """
    shape = counts[others] + 1
    strides = np.concatenate((np.cumprod(shape[::-1])[::-1][1:], [1])).astype(np.int64) if others.size else shape
    most = np.full(int(np.prod(shape)), -1, np.int64)
    most[0] = 0
    if first >= 0:
        # Layer 0 is dealt before all others.
        if first == main:
            most[0] = 1
        else:
            most[0] = -1
            most[strides[int(np.flatnonzero(others == first)[0])]] = 0
    for number, (head, factor) in enumerate(zip(heads, slow)):
        room = (limit - head) / factor - (kinds[first] if first >= 0 and number == 0 else 0.0)
        if room < -1e-9:
            if first >= 0 and number == 0:
                return False
            continue
        most = _deal(most, room, kinds[others], shape, strides, kinds[main])
    return bool(most[-1] >= counts[main])


@njit(cache=True, nogil=True)
def _deals(room, kinds, shape, limit):  # type: ignore[no-untyped-def]
    """How many mixes of layers fit into one rank's room, counted up to `limit`."""
    combo = np.zeros(kinds.size, np.int64)
    count = 0
    while count < limit:
        left = room
        for d in range(kinds.size):
            left -= combo[d] * kinds[d]
        d = kinds.size - 1
        if left >= -1e-9:
            count += 1
        else:
            while d >= 0 and combo[d] == 0:
                d -= 1
            if d < 0:
                return count
            combo[d] = 0
            d -= 1
        while d >= 0:
            combo[d] += 1
            if combo[d] < shape[d]:
                break
            combo[d] = 0
            d -= 1
        if d < 0:
            return count
    return count


@njit(cache=True, nogil=True)
def _deal(most, room, kinds, shape, strides, main_ms):  # type: ignore[no-untyped-def]
    """States after one more rank of this room: every mix of the other kinds, filled up with the main one."""
    dims = kinds.size
    grown = np.full(most.size, -1, np.int64)
    combo = np.zeros(dims, np.int64)
    place = np.zeros(dims, np.int64)
    while True:
        left = room
        shift = 0
        for d in range(dims):
            left -= combo[d] * kinds[d]
            shift += combo[d] * strides[d]
        fits = left >= -1e-9
        if fits:
            extra = np.int64(np.floor(left / main_ms + 1e-9))
            place[:] = 0
            for state in range(most.size):
                if most[state] >= 0:
                    inside = True
                    for d in range(dims):
                        if place[d] + combo[d] >= shape[d]:
                            inside = False
                            break
                    if inside and most[state] + extra > grown[state + shift]:
                        grown[state + shift] = most[state] + extra
                for d in range(dims - 1, -1, -1):
                    place[d] += 1
                    if place[d] < shape[d]:
                        break
                    place[d] = 0
        # The next combination; one that does not fit ends its innermost digit.
        d = dims - 1
        if not fits:
            while d >= 0 and combo[d] == 0:
                d -= 1
            if d < 0:
                return grown
            combo[d] = 0
            d -= 1
        while d >= 0:
            combo[d] += 1
            if combo[d] < shape[d]:
                break
            combo[d] = 0
            d -= 1
        if d < 0:
            return grown

"""How much work can have been done by a given time: a lower bound from the start-up, the memory limit included.

Knows: earliest times of every op and how much work any schedule can have behind it at a time. Does not know: plans.

At the start there is little to do: the first gradient waits for the whole forward chain, and until gradients flow only
F can run, each of which takes memory. Ranks idle while there is nothing to do; T >= u + (work left at u) / ranks.

*Tokens.* Let token j be the j-th run of every op of the chain F(0) .. F(L-1), I(L-1) .. I(0). If op i has run j times,
so has op i-1: token j has passed a prefix of the chain (and may be inside the op after it). W of layer l may follow
token j's I(l). So a state at time u is: per token a prefix, and some of the W it allows.

*Earliest times.* Token j ends op i no earlier than it ended op i-1, than token j-1 ended op i, and, where op i is I(l),
than j F(l) and j I(l) have run one after another (a layer has one rank) since layer l was first reached.

*Memory.* Tokens that have passed F(l) but not I(l) hold layer l's activation, then its stash until W. All of them fit
into the memory of all ranks together. For any price q >= 0 of a byte, the most that can be done is at most
q * memory + the sum over tokens of max over prefixes of (work - q * bytes): a simple maximum; the best q is searched.

*Recomputation* drops an activation but repeats the F later. Count an F whose activation is dropped at u as not done: it
adds as much work after u. So a token in its forward may leave out any F, and the bound holds for such plans too. Only
where I follows its F at once (the last stage, one micro-batch at a time) nothing is repeated: that stage's F is added
to what can be done, for the stage (a suffix of the layers) that is worst for the bound; a long one has much work, and
all of it stands on one rank.

*Copies.* Where c ranks may hold layer l, of any c + 1 runs of an op two stand on one rank: run j ends no earlier than
run j - c and the op's time after it; token j starts I(l) no earlier than j + 1 F(l) and j + 1 - c I(l) take on c ranks;
the layer's work by u is at most c times what fits into one rank's time. Prefixes and memory are counted as before: a
copy only takes more. Recomputation beside copies: the limit is left out.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from octopipe.base.compile import njit
from octopipe.costs.table import CostTable

Array = NDArray[np.float64]
_TIMES, _FINER, _PRICES = 80, 24, 32
_LARGE = 30_000
"""Above this product of tokens and ops, fewer times and prices are tried. The bound is then weaker but takes less
time."""


class Ramp:
    """The earliest start of every op, and the most work that can be done by a given time, for one table of costs and
    one number of ranks and micro-batches. Times are those of the fastest rank."""

    def __init__(
        self, costs: CostTable, num_ranks: int, num_micro_batches: int, hop_ms: float, recompute: bool,
        copies: NDArray[np.int64] | None = None,
    ) -> None:  # fmt: skip
        """`copies`: the most ranks that may hold each layer. None: one, and the chain passes through all ranks."""
        self.costs, self.num_ranks, self.recompute = costs, num_ranks, recompute
        self.copies = np.ones(costs.num_layers, np.int64) if copies is None else copies
        self.fast = min(costs.slowdown(r) for r in range(num_ranks))
        factor = costs.micro_batch_factor
        size = np.ones((num_micro_batches, costs.num_layers)) if factor is None else factor[:num_micro_batches]
        self.least, self.most = size.min(axis=0), size.max(axis=0)
        layers = costs.num_layers
        self.forward, self.input = self.fast * self.least * costs.forward_ms, self.fast * self.least * costs.input_ms
        # With copies a micro-batch need not cross between ranks at all.
        hops = _hops(layers, num_ranks) * hop_ms if copies is None else np.zeros(layers)
        self.start = earliest_starts(self.forward, self.input, num_micro_batches, hops, self.copies)
        room = costs.free_bytes(num_ranks)
        large = self.start.size > _LARGE
        self.times, self.prices = (_TIMES // 2, _PRICES // 3) if large else (_TIMES, _PRICES)
        # Micro-batches of different sizes hold different memory; the argument does not cover them.
        known = factor is None and room > 0 and not (recompute and copies is not None)
        self.room_bytes = room if known else np.inf
        self.arrays = (
            self.start, self.forward, self.input, self.fast * self.least * costs.weight_ms,
            self.most * costs.forward_ms, self.most * costs.input_ms, self.most * costs.weight_ms,
            # What a forward inside I restores for W is not counted: with less memory, the bound remains valid.
            costs.activation_bytes, np.minimum(costs.stash_bytes, costs.activation_bytes),
        )  # fmt: skip
        """The arguments of the kernels below."""

    def most_done(self, until_ms: float, room_bytes: float) -> float:
        """Return an upper bound on the work (in ms of a rank of speed 1) that any schedule has done by `until_ms`, if
        all ranks together have `room_bytes` for activations."""
        costs, arrays = self.costs, self.arrays
        done = min(_per_layer(until_ms, self.fast, self.copies, *arrays[:7]), _tokens(until_ms, 0.0, False, *arrays))
        if not np.isfinite(room_bytes):
            return done
        per_byte = costs.forward_ms.sum() / max(float(costs.activation_bytes.sum()), 1e-300)
        if per_byte <= 0.0:  # forwards that take no time have no price
            return done
        low, high = np.log(0.02 * per_byte), np.log(50.0 * per_byte)
        # Convex in the price, so nearly unimodal in its logarithm; any price gives a valid bound.
        prices = np.linspace(low, high, self.prices)
        values = _priced(until_ms, _powers_of_e(prices), room_bytes, self.recompute, *arrays)
        k = int(np.argmin(values))
        finer = np.linspace(prices[max(k - 1, 0)], prices[min(k + 1, self.prices - 1)], self.prices)
        fine = _priced(until_ms, _powers_of_e(finer), room_bytes, self.recompute, *arrays)
        return float(min(done, values[k], fine.min()))

    def bound_ms(self, work_ms: float, rates: Array, heads: Array) -> float:
        """Return the bound on the step time from the instant that gives the largest one. `heads` are the least times
        until ranks are reached, `rates` the ranks' speeds."""
        speed = float(rates.sum())
        plain = (work_ms + self._most_idle(rates, heads, np.inf)) / speed
        if not np.isfinite(self.room_bytes):
            return plain
        bound = (work_ms + self._most_idle(rates, heads, self.room_bytes)) / speed
        if not self.recompute:
            return max(plain, bound)
        # The last stage may skip its recomputation: for every suffix of layers that it may consist of.
        costs, count = self.costs, self.start.shape[1]
        suffix_work = np.cumsum((costs.layer_ms * count * self.fast)[::-1])
        suffix_forward = np.cumsum(costs.forward_ms[::-1])
        return max(plain, float(np.maximum(suffix_work, bound - suffix_forward / speed).min()))

    def _most_idle(self, rates: Array, heads: Array, room_bytes: float) -> float:
        def idle(until_ms: float) -> float:
            lost = max(float(rates.sum()) * until_ms - self.most_done(until_ms, room_bytes), 0.0)
            return lost + float((rates * np.maximum(heads - until_ms, 0.0)).sum())

        # Up to the earliest start of the last gradient, which is within every step.
        times = np.linspace(0.0, float(self.start.max()), self.times)
        found = [idle(float(u)) for u in times]
        k = int(np.argmax(found))
        finer = np.linspace(times[max(k - 1, 0)], times[min(k + 1, self.times - 1)], _FINER)
        return max(found[k], *(idle(float(u)) for u in finer))


def _powers_of_e(values: Array) -> Array:
    """Return e to the power of each value, the same on every processor; the last digit of np.exp of an array is not."""
    return np.array([math.exp(value) for value in values])


def _hops(num_layers: int, num_ranks: int) -> Array:
    """Return how many transfers a token has passed at least when it reaches each layer, if all ranks are used: at most
    as many ranks first appear after a layer as there are layers after it."""
    behind = num_layers - 1 - np.arange(num_layers)
    return np.maximum(num_ranks - 1 - behind, 0).astype(np.float64)


def earliest_starts(forward: Array, inward: Array, num_tokens: int, hop_ms: Array, copies: NDArray[np.int64]) -> Array:
    """Return, for [op of the chain, token], a time before which the token cannot start the op."""
    layers, j = forward.size, np.arange(num_tokens)
    start = np.empty((2 * layers, num_tokens))
    ready = np.zeros(num_tokens)
    reached = np.concatenate(([0.0], np.cumsum(forward)[:-1])) + hop_ms
    for l in range(layers):
        c = int(copies[l])
        ready = np.maximum(ready, reached[l] + j // c * forward[l])
        start[l] = _in_turn(ready, forward[l], c)
        ready = start[l] + forward[l]
    for l in range(layers - 1, -1, -1):
        c = int(copies[l])
        behind = ((j + 1) * forward[l] + np.maximum(j + 1 - c, 0) * inward[l]) / c
        ready = np.maximum(ready, start[l, 0] + behind)
        start[2 * layers - 1 - l] = _in_turn(ready, inward[l], c)
        ready = start[2 * layers - 1 - l] + inward[l]
    return start


def _in_turn(ready: Array, took: float, ranks: int) -> Array:
    """Return start[j] = max(ready[j], start[j - ranks] + took, start[j - 1]), for all j at once."""
    turn = np.empty_like(ready)
    for k in range(min(ranks, ready.size)):
        lag = took * np.arange(ready[k::ranks].size)
        turn[k::ranks] = np.maximum.accumulate(ready[k::ranks] - lag) + lag
    return np.asarray(np.maximum.accumulate(turn))


@njit
def _per_layer(until, slow, copies, start, f_took, i_took, w_took, f_work, i_work, w_work):  # type: ignore[no-untyped-def]
    """Return the most work done by `until` without regard to memory. A layer does no more than fits between its first
    start and `until` on the ranks that hold it."""
    layers, tokens = f_took.size, start.shape[1]
    total = 0.0
    for l in range(layers):
        done = 0.0
        for j in range(tokens):
            done += min(max((until - start[l, j]) / slow, 0.0), f_work[l])
            at = start[2 * layers - 1 - l, j]
            done += min(max((until - at) / slow, 0.0), i_work[l])
            done += min(max((until - at - i_took[l]) / slow, 0.0), w_work[l])
        total += min(done, copies[l] * max(until - start[l, 0], 0.0) / slow)
    return total


@njit
def _tokens(  # type: ignore[no-untyped-def]
    until, price, drop, start, f_took, i_took, w_took, f_work, i_work, w_work, activation, stash
):
    """Return the sum over tokens of the most (work - price * bytes) that a prefix of the chain can give by `until`."""
    layers, tokens = f_took.size, start.shape[1]
    total = 0.0
    for j in range(tokens):
        so_far = 0.0
        best = 0.0
        for i in range(2 * layers):
            at = start[i, j]
            if at >= until:
                break
            inward = i >= layers
            l = 2 * layers - 1 - i if inward else i
            took = i_took[l] if inward else f_took[l]
            held = price * activation[l]
            if not inward:
                kept = f_work[l] - held
                if drop and kept < 0.0:
                    kept = 0.0
                if at + took > until:
                    best = max(best, so_far + kept)  # inside the op: its memory is taken, its work counts in full
                    break
                so_far += kept
            else:
                if at + took > until:
                    # Inside the op nothing is freed yet; a dropped activation is back.
                    inside = so_far + i_work[l]
                    if drop and f_work[l] < held:
                        inside += f_work[l] - held
                    best = max(best, inside)
                    break
                if drop and f_work[l] < held:
                    so_far += f_work[l] - held
                so_far += i_work[l] + price * (activation[l] - stash[l])
                left = until - at - took
                if left >= w_took[l]:
                    so_far += w_work[l] + price * stash[l]
                else:
                    so_far += min(left / max(w_took[l], 1e-300), 1.0) * w_work[l]
            best = max(best, so_far)
        total += best
    return total


@njit
def _priced(  # type: ignore[no-untyped-def]
    until, prices, room, drop, start, f_took, i_took, w_took, f_work, i_work, w_work, activation, stash
):
    """Return, for every price of a byte, an upper bound on the work done by `until` with `room` bytes."""
    most = np.empty(prices.size)
    for k in range(prices.size):
        most[k] = prices[k] * room + _tokens(
            until, prices[k], drop, start, f_took, i_took, w_took, f_work, i_work, w_work, activation, stash
        )
    return most

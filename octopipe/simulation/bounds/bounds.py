"""Proven lower bounds on the step time of the plans of a class: what no partition, placement or order can beat.

Knows: the costs, the number of ranks and micro-batches. Does not know: any plan. Only *ramp* knows the memory limit
(which can only slow a plan down, so the others stay valid under it).

A bound speaks of a `PlanClass`: plans may or may not recompute, and hold each layer once or on several ranks. A wider
class has faster plans, so its bound is lower; every answer names the class it is about.

Notation: layer l has work w(l) over all micro-batches (its optimizer update included); P(l) is the forward time
of the smallest micro-batch through the layers before l, on the fastest rank; c the shortest transfer.

Plans that hold each layer once:
- *work*: all the work, divided by the speed of all ranks.
- *chain*: all F and I of a layer run on one rank, one after another. Before the first of them a micro-batch
  passes the layers before; after the last one its gradient passes back to layer 0, whose W comes last. Of the R ranks
  in use at most L-1-l first appear after layer l, so both ways cross at least R-1-(L-1-l) times between ranks.
- *heads*: let ranks be numbered in the order in which the chain first reaches them. Rank j is reached after at
  least j layers and j transfers, so it idles P(j) + jc at first. Sum over ranks: T >= work + mean idle time.
- *ramp*: by time u only so much work can have been done: the first gradient waits for the whole forward chain, later
  ones for each other, and F without gradients fills the memory. The rest of the ranks' time was idle. What a rank
  idles after u because it has not been reached yet is added to that. The proof is in `ramp.py`.
- *loads*: layers cannot be cut: the smallest possible maximum over ranks of (head + work of whole layers),
  where the rank that is reached first holds layer 0. Found by dealing layers of equal work out rank by rank
  (dynamic programming over how many of each kind are assigned), exact to a hundred-thousandth.

Plans that may hold layers on several ranks: `copied_bound`, with the same arguments for layers that as many ranks share
as have room for the weights, and with the reduction of gradients that every copied layer ends with.

Where ops exchange tokens between expert ranks, a rank has two lanes, and pairs of ops may use both at once. Every
argument about a rank's work then holds for each lane with the lane's own part of the work, and the stronger of the two
counts; how long a micro-batch takes through the layers before or after is the ops' whole time in both.

Where layers fork and join (`CostTable.graph`), the bounds are those of the longest path, and the work is that of all
layers.

All but work and loads-without-heads assume that every rank is used; otherwise one rank fewer shares the work,
so the result is capped by the work bound of one rank fewer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octopipe.costs.table import CostTable
from octopipe.simulation.after_pipeline import all_reduce_ms
from octopipe.simulation.bounds.cut import with_cut_ends, with_least_work
from octopipe.simulation.bounds.loads import assignable, steps_of
from octopipe.simulation.bounds.ramp import Ramp

Array = NDArray[np.float64]
_MAX_STEPS = 6e6
"""The most steps of one round of dealing (about fourteen rounds are made); beyond it the loads bound is the work
bound."""


class PlanClass(NamedTuple):
    """The class of plans to which a bound or an optimum applies."""

    recompute: bool = True
    """Plans may recompute activations."""
    copies: bool = False
    """Plans may hold layers on several ranks."""
    cuts_head: bool = False
    """Plans may cut the head, and with it the embedding, by vocabulary."""
    offloads: bool = False
    """Plans may keep activations in host memory."""

    @property
    def words(self) -> str:
        """The class in words, such as `plans that hold each layer once and recompute nothing`."""
        held = "may hold layers on several ranks" if self.copies else "hold each layer once"
        cut = "may cut the head, " if self.cuts_head else ""
        moved = " and use host memory" if self.offloads else ""
        return f"plans that {cut}{held} and {'may recompute' if self.recompute else 'recompute nothing'}{moved}"

    def as_dict(self) -> dict[str, object]:
        more = {name: True for name in ("cuts_head", "offloads") if getattr(self, name)}
        return {"copies": self.copies, "recompute": self.recompute, **more, "words": self.words}


class Bound(NamedTuple):
    """The name of an argument and the step time that it proves to be the least."""

    name: str
    ms: float


def bounds(
    costs: CostTable,
    num_ranks: int,
    num_micro_batches: int,
    recompute: bool = True,
    copies: bool = False,
    cuts_head: bool = False,
    offloads: bool = False,
) -> tuple[Bound, ...]:
    """Return every bound on plans of this class, the strongest first."""
    if costs.graph is not None:
        return _along_graph(costs, num_ranks, num_micro_batches, recompute, copies, cuts_head, offloads)
    if offloads:  # activations in host memory are not limited
        nothing = np.zeros(costs.num_layers)
        costs = costs.replace(activation_bytes=nothing, stash_bytes=nothing)
    if cuts_head:
        less = bounds(with_cut_ends(costs, num_ranks), num_ranks, num_micro_batches, recompute, copies)
        every = [_work(lane, num_ranks, num_micro_batches) for lane in lanes_of(with_least_work(costs))]
        return _ordered([*less, max(every, key=lambda b: b.ms)])
    found: list[list[Bound]] = []
    for lane in lanes_of(costs):
        if copies:
            setting = lane, num_ranks, num_micro_batches
            found.append([copied_bound(*setting, recompute), _work(*setting)])
        else:
            found.append(_single(costs, num_ranks, num_micro_batches, recompute, lane))
    best = [max(same, key=lambda b: b.ms) for same in zip(*found, strict=True)]
    return tuple(best) if copies else _ordered(best)


def _along_graph(costs: CostTable, num_ranks: int, num_micro_batches: int, *plans: bool) -> tuple[Bound, ...]:
    """Return the bounds for layers that fork and join. A plan without the layers beside one path is a plan for that
    path's chain, and no slower. Where ops exchange tokens, each lane alone is a model whose ops cannot overlap."""
    assert costs.graph is not None
    found: list[tuple[Bound, ...]] = []
    for lane in lanes_of(costs):
        work = _work(with_least_work(lane), num_ranks, num_micro_batches)
        path = costs.graph.longest((lane.forward_ms + lane.input_ms).tolist())
        less = bounds(lane.only(path), num_ranks, num_micro_batches, *plans) if len(path) >= num_ranks else ()
        found.append(_ordered([*(bound for bound in less if bound.name != work.name), work]))
    return max(found, key=lambda ordered: ordered[0].ms)


def lanes_of(costs: CostTable) -> list[CostTable]:
    """Return the costs of each lane of a rank alone; if nothing is exchanged, the costs themselves."""
    found = costs.segments
    if found is None or not found.any_exchange:
        return [costs]
    forward, inward = (found.share(kind, "exchange") for kind in "FI")
    # Compute beside an exchange makes the shares add up to more than 1; capping a share at 1 keeps the bound valid.
    compute = {
        "forward_ms": costs.forward_ms * np.minimum(found.share("F", "compute"), 1.0),
        "input_ms": costs.input_ms * np.minimum(found.share("I", "compute"), 1.0),
    }
    exchange = {
        "forward_ms": costs.forward_ms * np.minimum(forward, 1.0),
        "input_ms": costs.input_ms * np.minimum(inward, 1.0),
        "weight_ms": np.zeros(costs.num_layers),
        "optimizer_ms": np.zeros(costs.num_layers),
    }
    return [costs.replace(segments=None, **times) for times in (compute, exchange)]


def lower_bound(
    costs: CostTable,
    num_ranks: int,
    num_micro_batches: int,
    recompute: bool = True,
    copies: bool = False,
    cuts_head: bool = False,
    offloads: bool = False,
) -> Bound:
    """Return the strongest bound on plans of this class (the fields of `PlanClass`), with its name."""
    return bounds(costs, num_ranks, num_micro_batches, recompute, copies, cuts_head, offloads)[0]


def lower_bound_ms(costs: CostTable, num_ranks: int, num_micro_batches: int) -> float:
    """Return the strongest bound on plans that hold each layer once."""
    return lower_bound(costs, num_ranks, num_micro_batches).ms


def _work(costs: CostTable, num_ranks: int, num_micro_batches: int) -> Bound:
    return Bound("work", work_bound_ms(costs, num_ranks, num_micro_batches))


def _ordered(found: list[Bound]) -> tuple[Bound, ...]:
    return tuple(sorted(found, key=lambda b: -b.ms))


def _cap_ms(costs: CostTable, num_ranks: int, num_micro_batches: int) -> float:
    """Return the work bound of one rank fewer; at best the slowest rank is the one left out."""
    return _work_over(costs, num_micro_batches, sorted(_slow(costs, num_ranks))[: num_ranks - 1])


def _single(
    costs: CostTable, num_ranks: int, num_micro_batches: int, recompute: bool, lane: CostTable | None = None
) -> list[Bound]:
    """Return the bounds of all arguments. `lane` has the times that occupy the rank, `costs` those that a micro-batch
    takes."""
    lane = costs if lane is None else lane
    setting, busy = (costs, num_ranks, num_micro_batches), (lane, num_ranks, num_micro_batches)
    work, cap = _work(*busy), _cap_ms(*busy)
    return [
        work,
        Bound("chain", max(chain_bound_ms(*setting, lane), work.ms)),
        Bound("heads", min(heads_bound_ms(*setting, lane), cap)),
        Bound("ramp", min(ramp_bound_ms(*busy, recompute), cap)),
        Bound("loads", min(loads_bound_ms(*setting, lane), cap)),
    ]


# -- the bounds one by one -------------------------------------------------------------------------------


def work_bound_ms(costs: CostTable, num_ranks: int, num_micro_batches: int) -> float:
    """Return the total work divided by the speed of all ranks together."""
    return _work_over(costs, num_micro_batches, _slow(costs, num_ranks))


def chain_bound_ms(costs: CostTable, num_ranks: int, num_micro_batches: int, lane: CostTable | None = None) -> float:
    """Return the maximum over layers l of: forward chain before l + every F_l and I_l + input-gradient chain after
    it."""
    lane = costs if lane is None else lane
    fastest = min(_slow(costs, num_ranks))
    size = _sizes(costs, num_micro_batches)
    least = size.min(axis=0)
    lead = np.concatenate(([0.0], np.cumsum(least * costs.forward_ms)[:-1]))
    tail = np.concatenate(([0.0], np.cumsum(least * costs.input_ms)[:-1]))
    serial = size.sum(axis=0) * (lane.forward_ms + lane.input_ms)
    plain = fastest * (lead + serial + tail + least[0] * costs.weight_ms[0])
    behind = costs.num_layers - 1 - np.arange(costs.num_layers)
    best = 0.0
    # k ranks in use: fewer ranks mean fewer transfers but more work each; the truth is the best of these cases.
    for used in range(num_ranks, 0, -1):
        hops = np.maximum(used - 1 - behind, 0)
        chain = float((plain + 2 * hops * _hop_ms(costs, num_ranks)).max())
        work = _work_over(lane, num_micro_batches, sorted(_slow(costs, num_ranks))[:used])
        best = max(chain, work) if used == num_ranks else min(best, max(chain, work))
    return best


def heads_bound_ms(costs: CostTable, num_ranks: int, num_micro_batches: int, lane: CostTable | None = None) -> float:
    """Return the work plus the mean time until the ranks are first reached (all ranks used)."""
    rates = np.sort(1.0 / np.array(_slow(costs, num_ranks)))[::-1]
    work = float(_layer_work(costs if lane is None else lane, num_micro_batches).sum())
    return float((work + (rates * _heads(costs, num_ranks)).sum()) / rates.sum())


def ramp_bound_ms(costs: CostTable, num_ranks: int, num_micro_batches: int, recompute: bool = True) -> float:
    """Return the work plus the idle time that the start-up forces (all ranks used)."""
    # The fastest ranks may be the first to be reached: pairing large rates with small heads idles least.
    rates = np.sort(1.0 / np.array(_slow(costs, num_ranks)))[::-1]
    work = float(_layer_work(costs, num_micro_batches).sum())
    ramp = Ramp(costs, num_ranks, num_micro_batches, _hop_ms(costs, num_ranks), recompute)
    return ramp.bound_ms(work, rates, _heads(costs, num_ranks))


def loads_bound_ms(costs: CostTable, num_ranks: int, num_micro_batches: int, lane: CostTable | None = None) -> float:
    """Return the smallest T for which whole layers can be assigned to ranks so that no rank's head + work exceeds T.

    If ranks differ in speed, heads are left out, since it is not known which rank is reached when.
    """
    lane = costs if lane is None else lane
    slow = _slow(costs, num_ranks)
    even = min(slow) == max(slow)
    heads = _heads(costs, num_ranks) if even else np.zeros(num_ranks)
    work = _layer_work(lane, num_micro_batches)
    kinds, kind_of, counts = np.unique(np.round(work, 9), return_inverse=True, return_counts=True)
    first = int(kind_of[0]) if even else -1
    if kinds[0] <= 0:  # layers without work fit on any rank
        kinds, counts, first = kinds[1:], counts[1:], max(first - 1, -1)
    floor = work_bound_ms(lane, num_ranks, num_micro_batches)
    if kinds.size == 0:
        return floor
    if steps_of(counts) > _MAX_STEPS:
        return floor  # many layers that all differ: the exact answer would take long
    low = high = max(floor, min(slow) * float(work.max()))
    while not assignable(high, heads, slow, kinds, counts, first):
        low, high = high, high * 1.04
    while high - low > 1e-5 * high:
        middle = 0.5 * (low + high)
        if assignable(middle, heads, slow, kinds, counts, first):
            high = middle
        else:
            low = middle
    return low


# -- layers on several ranks --------------------------------------------------------------------------------


def copied_bound(costs: CostTable, num_ranks: int, num_micro_batches: int, recompute: bool = True) -> Bound:
    """Return the bound on plans that may hold layers on several ranks.

    A plan that copies layer l ends with the reduction of its gradients, which waits for all its weight gradients: it
    takes at least t(l). Let layers be numbered by t. For any k, a plan that copies none but the first k layers takes at
    least the bound for such plans. Any other plan takes at least t(k + 1), and the bound for plans that may copy all
    layers.
    """
    most = _most_copies(costs, num_ranks)
    ends = _copied_ms(costs, num_ranks, num_micro_batches, most)
    order = [int(l) for l in np.argsort(ends, kind="stable") if most[l] > 1]

    def may_copy(k: int) -> NDArray[np.int64]:
        copies = np.ones(costs.num_layers, np.int64)
        copies[order[:k]] = most[order[:k]]
        return copies

    # The bound with the first k layers copied falls with k, and t(k) rises: `low` is the last k before they cross.
    low, high = 0, len(order) + 1
    while high - low > 1:
        middle = (low + high) // 2
        held = _shared(costs, num_ranks, num_micro_batches, recompute, may_copy(middle), ramp=False)
        low, high = (middle, high) if ends[order[middle - 1]] < held.ms else (low, middle)
    if low == 0:
        best = _ordered(_single(costs, num_ranks, num_micro_batches, recompute))[0]
    else:
        best = _shared(costs, num_ranks, num_micro_batches, recompute, may_copy(low))
    if high > len(order):
        return best
    beyond = _shared(costs, num_ranks, num_micro_batches, recompute, may_copy(len(order)))
    least = float(ends[order[high - 1]])
    return min(best, beyond if beyond.ms >= least else Bound("reduction", least), key=lambda b: b.ms)


def _most_copies(costs: CostTable, num_ranks: int) -> NDArray[np.int64]:
    """Return on how many ranks each layer can be held: once, and as many further times as its static bytes fit into the
    memory of all ranks that remains if every layer is held once."""
    room = costs.free_bytes(num_ranks)
    with np.errstate(divide="ignore", invalid="ignore"):
        extra = np.where(costs.static_bytes > 0, np.floor(room / costs.static_bytes * (1 + 1e-9)), np.inf)
    return np.asarray(1 + np.clip(extra, 0, num_ranks - 1)).astype(np.int64)


def _share(costs: CostTable, num_micro_batches: int, copies: NDArray[np.int64]) -> Array:
    """Return, per layer, the fewest micro-batches (in average ones) that the busiest of its ranks can have."""
    if costs.micro_batch_factor is None:
        return np.ceil(num_micro_batches / copies)
    return np.asarray(_sizes(costs, num_micro_batches).sum(axis=0) / copies)


def _copied_ms(costs: CostTable, num_ranks: int, num_micro_batches: int, most: NDArray[np.int64]) -> Array:
    """Return, per layer, the least step time of a plan that holds the layer on two or more ranks: the time until all
    its weight gradients are there, plus their reduction."""
    fastest, least = min(_slow(costs, num_ranks)), _sizes(costs, num_micro_batches).min(axis=0)
    forward, inward = least * costs.forward_ms, least * costs.input_ms
    lead = np.concatenate(([0.0], np.cumsum(forward)[:-1]))
    shared = lead + _share(costs, num_micro_batches, most) * costs.layer_ms
    once = forward.sum() + np.cumsum(inward[::-1])[::-1] + least * costs.weight_ms
    links = [costs.sum_link(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b]
    reduced = [min((all_reduce_ms(float(b), 2, link) for link in links), default=0.0) for b in costs.gradient_bytes]
    return np.asarray(fastest * np.maximum(shared, once) + np.array(reduced))


def _shared(
    costs: CostTable, num_ranks: int, num_micro_batches: int, recompute: bool, copies: NDArray[np.int64],
    *, ramp: bool = True,
) -> Bound:  # fmt: skip
    """Return the strongest bound on plans that hold layer l on at most copies[l] ranks."""
    slow, least = _slow(costs, num_ranks), _sizes(costs, num_micro_batches).min(axis=0)
    forward, inward = least * costs.forward_ms, least * costs.input_ms
    lead, tail = (np.concatenate(([0.0], np.cumsum(x)[:-1])) for x in (forward, inward))
    serial = _share(costs, num_micro_batches, copies) * (costs.forward_ms + costs.input_ms)
    chain = min(slow) * float((lead + serial + tail).max() + least[0] * costs.weight_ms[0])
    heads = _shared_heads(costs, num_ranks, copies)
    rates = np.sort(1.0 / np.array(slow))[::-1]
    work_ms = float(_layer_work(costs, num_micro_batches).sum())
    cap = _cap_ms(costs, num_ranks, num_micro_batches)
    idle = float((work_ms + (rates * heads).sum()) / rates.sum())
    work = _work(costs, num_ranks, num_micro_batches)
    found = [work, Bound("chain", max(chain, work.ms)), Bound("heads", min(idle, cap))]
    if ramp:
        start_up = Ramp(costs, num_ranks, num_micro_batches, 0.0, recompute, copies)
        found.append(Bound("ramp", min(start_up.bound_ms(work_ms, rates, heads), cap)))
    return _ordered(found)[0]


def _shared_heads(costs: CostTable, num_ranks: int, copies: NDArray[np.int64]) -> Array:
    """Return the least idle time before the j-th rank is reached. At most sum over l <= k of copies[l] ranks hold a
    layer up to k, and no more than there is memory for copies of these."""
    room = costs.free_bytes(num_ranks)
    before = min(_slow(costs, num_ranks)) * np.concatenate(([0.0], np.cumsum(_least_forward(costs))))
    hop = _hop_ms(costs, num_ranks)
    heads: list[float] = []
    extra: list[float] = []
    for k in range(costs.num_layers):
        extra += [float(costs.static_bytes[k])] * int(copies[k] - 1)
        affordable = int(np.searchsorted(np.cumsum(sorted(extra)), room * (1 + 1e-9), side="right"))
        reached = min(k + 1 + affordable, num_ranks)
        heads += [float(before[k]) + (hop if k else 0.0)] * (reached - len(heads))
        if len(heads) == num_ranks:
            break
    return np.array(heads + [heads[-1]] * (num_ranks - len(heads)))


# -- pieces ----------------------------------------------------------------------------------------------


def _slow(costs: CostTable, num_ranks: int) -> list[float]:
    return [costs.slowdown(r) for r in range(num_ranks)]


def _sizes(costs: CostTable, num_micro_batches: int) -> Array:
    if costs.micro_batch_factor is None:
        return np.ones((num_micro_batches, costs.num_layers))
    return costs.micro_batch_factor[:num_micro_batches]


def _layer_work(costs: CostTable, num_micro_batches: int) -> Array:
    """Return all the work of each layer in one step, on a rank of speed 1."""
    return _sizes(costs, num_micro_batches).sum(axis=0) * costs.layer_ms + costs.optimizer_ms


def _work_over(costs: CostTable, num_micro_batches: int, slow: list[float]) -> float:
    speed = sum(1.0 / s for s in slow)
    return float(_layer_work(costs, num_micro_batches).sum()) / speed if speed > 0 else float("inf")


def _hop_ms(costs: CostTable, num_ranks: int) -> float:
    """Return the time of the shortest transfer between two of the ranks; 0 if there is none."""
    links = [costs.network.link(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b]
    if not links or costs.num_layers < 2:
        return 0.0
    size = costs.boundary_bytes[:-1]
    if costs.handed_factor is not None:
        size = size * costs.handed_factor[:, :-1].min(axis=0)
    least = float(size.min())
    return min(link.latency_ms + least * link.ms_per_byte for link in links)


def _least_forward(costs: CostTable) -> Array:
    """Forward time of the smallest micro-batch through every layer."""
    least = 1.0 if costs.micro_batch_factor is None else costs.micro_batch_factor.min(axis=0)
    return np.asarray(least * costs.forward_ms)


def _heads(costs: CostTable, num_ranks: int) -> Array:
    """Return how long the j-th rank that the chain reaches is idle at least before it is reached."""
    before = np.concatenate(([0.0], np.cumsum(_least_forward(costs))))[:num_ranks]
    return min(_slow(costs, num_ranks)) * before + np.arange(num_ranks) * _hop_ms(costs, num_ranks)

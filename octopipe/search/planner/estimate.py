"""Estimates of a split without simulation: step time, memory and recomputation of 1F1B, plain or interleaved, and an
estimate of what tuning can reach.

Knows: the closed forms of (interleaved) 1F1B for the even partition, and how evenly layers can be distributed over
ranks. Does not know: how splits are enumerated (`splits.py`) or tuned (`search.py`). Estimates only rank splits; the
simulator decides.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from octopipe.costs.table import CostTable
from octopipe.search.recompute import Price
from octopipe.search.systems.shapes import even_sizes
from octopipe.simulation.timeline import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The estimated result of a split."""

    step_ms: float
    tuned_ms: float
    """The step time with layers distributed over the ranks as evenly as their sizes allow; tuned plans approach it."""
    peak_gib: float
    """Memory of the fullest rank."""
    limit_gib: float
    bubble: float
    fits: bool
    recompute: str
    """none, selective, partial (some whole layers) or full."""
    recomputed_share: float = 0.0
    """Share of all layers that are recomputed as a whole."""


def estimate(
    price: Price,
    pp: int,
    chunks: int,
    micro_batches: int,
    *,
    modes: tuple[str, ...] = ("none", "selective", "full"),
    pairs: bool = False,
    layouts: bool = False,
) -> Estimate:
    """Return the estimate with the least recomputation that fits; if nothing fits, the one with the most recomputation.
    `modes`: in order of increasing recomputation. `pairs`: a tuned plan may hide the experts' exchange behind compute.
    `layouts`: stages on faster ranks may hold more layers."""

    def under(mode: str) -> Estimate:
        costs = price(mode)
        paired = pairs and mode != "full"  # no runtime runs pairs whose layers are checkpointed
        even = _under(costs, mode, even_sizes(costs, pp * chunks), pp, micro_batches, paired)
        sizes = sizes_by_speed(costs, [r % pp for r in range(pp * chunks)]) if layouts else None
        if sizes is None:
            return even
        other = _under(costs, mode, sizes, pp, micro_batches, paired)
        return min((even, other), key=lambda found: (not found.fits, found.step_ms))

    if "full" in modes and len(modes) > 1:
        # Most splits of a large model do not fit at all, so try full recomputation first.
        leanest = under("full")
        if not leanest.fits:
            return leanest
    best: Estimate | None = None
    for mode in modes:
        best = under(mode)
        if best.fits:
            break
    assert best is not None
    if best.fits and best.recompute == "full" and len(modes) > 1:
        # Interpolate time and memory linearly between no and full recomputation.
        lean = under("none")
        if lean.peak_gib > best.limit_gib > best.peak_gib:
            share = min(1.0, (lean.peak_gib - best.limit_gib) / (lean.peak_gib - best.peak_gib) + 1.0 / (1 + chunks))
            if share < 1.0:
                step, tuned, peak = (
                    getattr(lean, name) + share * (getattr(best, name) - getattr(lean, name))
                    for name in ("step_ms", "tuned_ms", "peak_gib")
                )
                best = replace(
                    best, step_ms=step, tuned_ms=tuned, peak_gib=peak, recompute="partial", recomputed_share=share
                )
    return best


def in_flight(rank: int, pp: int, chunks: int, micro_batches: int) -> int:
    """The largest number of chunks whose activations a rank holds at the same time."""
    if chunks == 1:
        return min(micro_batches, pp - rank)
    return min(micro_batches * chunks, 2 * (pp - 1 - rank) + (chunks - 1) * pp + 1)


def evenest_ms(layer_ms: np.ndarray, slowdowns: np.ndarray) -> float:
    """Return the time of the busiest rank if layers are assigned to ranks greedily: in order of decreasing size, each
    to the rank that would finish it first."""
    ranks = [(0.0, r) for r in range(len(slowdowns))]
    if slowdowns.min() == slowdowns.max():
        for ms in sorted(layer_ms * slowdowns[0], reverse=True):
            heapq.heapreplace(ranks, (ranks[0][0] + float(ms), ranks[0][1]))
        return max(ranks)[0]
    loads = np.zeros(len(slowdowns))
    for ms in sorted(layer_ms, reverse=True):
        rank = int(np.argmin(loads + ms * slowdowns))
        loads[rank] += ms * slowdowns[rank]
    return float(loads.max())


def paired_ms(costs: CostTable) -> np.ndarray:
    """Return the time of F, I and W of every layer if its exchange runs during the computation of another micro-batch
    and slows that down."""
    if costs.segments is None:
        return costs.layer_ms
    segments = costs.segments
    exchange = costs.forward_ms * segments.share("F", "exchange") + costs.input_ms * segments.share("I", "exchange")
    compute = costs.layer_ms - exchange
    # During an exchange, compute runs at 1 / (1 + slows_compute) of its speed.
    behind = exchange / (1.0 + segments.slows_compute)
    return np.where(compute >= behind, exchange + compute - behind, exchange)


def sizes_by_speed(costs: CostTable, ranks: Sequence[int]) -> list[int] | None:
    """Return layers per stage such that the work of a stage is proportional to the speed of its rank (`ranks` has one
    entry per stage); None if all ranks are equally fast or if a stage would be empty."""
    slow = np.array([costs.slowdown(rank) for rank in ranks])
    if slow.min() == slow.max():
        return None
    done = np.concatenate(([0.0], np.cumsum(costs.layer_ms)))
    wanted = np.cumsum(1.0 / slow)[:-1] / (1.0 / slow).sum() * done[-1]
    inner = np.searchsorted((done[:-1] + done[1:]) / 2, wanted)
    sizes = np.diff(np.concatenate(([0], inner, [costs.num_layers])))
    return [int(size) for size in sizes] if sizes.min() > 0 else None


def _under(costs: CostTable, mode: str, sizes: Sequence[int], pp: int, m: int, pairs: bool) -> Estimate:
    chunks = len(sizes) // pp
    edges = np.concatenate(([0], np.cumsum(sizes)))
    rank_of = np.arange(pp * chunks) % pp

    def per_stage(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, edges[:-1])

    def per_rank(values: np.ndarray) -> np.ndarray:
        return np.bincount(rank_of, weights=per_stage(values), minlength=pp)

    slow = np.array([costs.slowdown(r) for r in range(pp)])
    forward = per_stage(costs.forward_ms) * slow[rank_of]
    backward = per_stage(costs.input_ms + costs.weight_ms) * slow[rank_of]
    limit = np.array([costs.capacity_bytes(r) for r in range(pp)])
    held, boundary = per_rank(costs.activation_bytes), float(costs.boundary_bytes.max(initial=0.0))
    flight = np.array([in_flight(r, pp, chunks, m) for r in range(pp)], float)
    space = np.maximum.reduceat(costs.workspace_bytes, edges[:-1])
    fixed = per_rank(costs.static_bytes) + np.array([space[rank_of == r].max() for r in range(pp)]) + 2 * boundary
    mean_held = held / chunks
    peak = fixed + flight * mean_held
    work = np.bincount(rank_of, weights=forward + backward, minlength=pp)
    hop = 0.0
    if pp > 1:
        hop = float(np.mean([costs.network.transfer_ms(r, (r + 1) % pp, boundary) for r in range(pp)]))
    stage = forward + backward
    if chunks == 1:
        makespan = float(stage.sum() + (m - 1) * stage.max() + 2 * (pp - 1) * hop)
    else:
        makespan = float(m * work.max() + (pp - 1) * (stage.mean() + 2 * hop))
    after = per_rank(costs.optimizer_ms) * slow
    if costs.data_parallel > 1:
        n = costs.data_parallel
        after = after + 2 * (n - 1) / n * per_rank(costs.gradient_bytes) * costs.reduction.ms_per_byte
    step = makespan + float(after.max())
    fill = (pp - 1) * (float(stage.mean()) + 2 * hop)
    layer_ms = paired_ms(costs) if pairs else costs.layer_ms
    tuned = m * evenest_ms(layer_ms, slow) + fill + float(after.max())
    return Estimate(
        step_ms=step,
        tuned_ms=min(step, tuned),
        peak_gib=float(peak.max()) / GIB,
        limit_gib=float(limit[int(np.argmax(peak))]) / GIB,
        bubble=1.0 - float(m * work.mean()) / step if step > 0 else 0.0,
        fits=bool(np.all(peak <= limit * (1 + 1e-12))),
        recompute=mode,
    )

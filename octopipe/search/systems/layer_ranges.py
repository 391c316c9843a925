"""The costs of every run of layers as a stage of a 1F1B pipeline, which the partitioners use.

Knows: times, transfers, gradient reductions and peak bytes of all (stage, first layer, stop), and the memory
limits. Does not know: which partition is best; each partitioner has its own objective.

Memory of a stage: static bytes + in-flight micro-batches * activations + the largest workspace of a layer + one
boundary tensor at each end. Buffers that are held longer show only in the simulation of a finished plan;
`within_memory` then keeps their bytes free and solves again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octopipe.base.errors import DoesNotFitError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan
from octopipe.search.systems.shapes import even_sizes, make_plan, one_f_one_b_order, stages_from_sizes
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import GIB

Floats = NDArray[np.float64]
TRIES = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerRanges:
    """Arrays [stage, first, stop] over all layer ranges; stage s runs on ranks[s]."""

    costs: CostTable
    ranks: tuple[int, ...]
    in_flight: tuple[int, ...]
    """Number of micro-batches whose activations stage s holds at its peak."""
    forward_ms: Floats
    backward_ms: Floats
    reduce_ms: Floats
    """Data-parallel gradient reduction."""
    optimizer_ms: Floats
    transfer_ms: Floats
    """[stage, stop]: activation to the next stage plus gradient back; 0 after the last stage."""
    fixed_bytes: Floats
    """Static bytes, workspace and boundary tensors."""
    activation_bytes: Floats
    """Activations of one micro-batch."""
    layer_bytes: Floats
    """[layer]: activations of one micro-batch."""
    entering_bytes: Floats
    """[layer]: the tensor that enters the layer, which recomputation keeps."""
    capacity_bytes: Floats
    """[stage]"""

    @property
    def num_layers(self) -> int:
        return self.costs.num_layers

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def fits(self) -> NDArray[np.bool_]:
        """[stage, first, stop]: whether the stage fits in its rank's memory without recomputation."""
        held = np.array(self.in_flight)[:, None, None] * self.activation_bytes
        return self.fixed_bytes + held <= self.capacity_bytes[:, None, None]

    def read(self, values: NDArray[Any], sizes: Sequence[int]) -> NDArray[Any]:
        """Return the values of the stages of one partition."""
        stops = np.cumsum(sizes)
        return values[np.arange(len(sizes)), stops - np.asarray(sizes), stops]

    def transfers(self, sizes: Sequence[int]) -> Floats:
        """Transfer time after each stage of one partition."""
        return self.transfer_ms[np.arange(len(sizes)), np.cumsum(sizes)]


def layer_ranges(
    costs: CostTable,
    num_ranks: int,
    num_micro_batches: int,
    *,
    ranks: Sequence[int] | None = None,
    in_flight: Sequence[int] | None = None,
    reserve_bytes: Floats | None = None,
    equal_ranks: bool = False,
) -> LayerRanges:
    """Return the costs of every range; micro-batches of different sizes count with their mean time and largest bytes.

    `equal_ranks` is for systems that assume equal devices: no rank is slower than another, and all have the smallest
    memory of all.
    """
    p, m, layers = num_ranks, num_micro_batches, costs.num_layers
    ranks = tuple(range(p)) if ranks is None else tuple(ranks)
    held = tuple(min(p - s, m) for s in range(p)) if in_flight is None else tuple(in_flight)
    factor, handed = costs.micro_batch_factor, costs.handed_factor
    mean, largest = (1.0, 1.0) if factor is None else (factor[:m].mean(axis=0), factor[:m].max(axis=0))
    slow = np.array([1.0 if equal_ranks else costs.slowdown(r) for r in ranks])[:, None, None]
    usual, most = (1.0, 1.0) if handed is None else (handed[:m].mean(axis=0), handed[:m].max(axis=0))
    moved = np.concatenate(([0.0], costs.boundary_bytes * usual))  # moved[k]: the tensor that enters layer k
    before = np.concatenate(([0.0], costs.boundary_bytes * most))
    after = before.copy()
    after[layers] = 0.0  # nothing leaves the last layer
    reduce = np.zeros((layers + 1, layers + 1))
    if costs.data_parallel > 1:
        n, link = costs.data_parallel, costs.reduction
        gradient = _sums(costs.gradient_bytes)
        reduce = 2 * math.ceil(math.log2(n)) * link.latency_ms + 2 * (n - 1) / n * gradient * link.ms_per_byte
        reduce = np.where(gradient > 0, reduce, 0.0)
    transfer = np.zeros((p, layers + 1))
    for s in range(p - 1):
        for a, b in ((ranks[s], ranks[s + 1]), (ranks[s + 1], ranks[s])):
            link = costs.network.link(a, b)
            transfer[s] += link.latency_ms + moved * link.ms_per_byte
    fixed = _sums(costs.static_bytes) + _maxima(costs.workspace_bytes) + before[:, None] + after[None, :]
    capacity = np.array([costs.capacity_bytes(r) for r in ranks])
    if reserve_bytes is not None:
        capacity = capacity - reserve_bytes[list(ranks)]
    if equal_ranks:
        capacity = np.full(p, capacity.min())
    return LayerRanges(
        costs=costs,
        ranks=ranks,
        in_flight=held,
        forward_ms=slow * _sums(costs.forward_ms * mean),
        backward_ms=slow * _sums((costs.input_ms + costs.weight_ms) * mean),
        reduce_ms=np.broadcast_to(reduce, (p, *reduce.shape)),
        optimizer_ms=slow * _sums(costs.optimizer_ms),
        transfer_ms=transfer,
        fixed_bytes=np.broadcast_to(fixed, (p, *fixed.shape)),
        activation_bytes=np.broadcast_to(_sums(costs.activation_bytes * largest), (p, *fixed.shape)),
        layer_bytes=costs.activation_bytes * largest,
        entering_bytes=before[:-1],
        capacity_bytes=capacity,
    )


def _sums(values: Floats) -> Floats:
    """Return the sums over all ranges [first, stop]; zero below the diagonal."""
    prefix = np.concatenate(([0.0], np.cumsum(values)))
    return np.triu(prefix[None, :] - prefix[:, None])


def _maxima(values: Floats) -> Floats:
    """Return the maxima over all ranges [first, stop]."""
    out = np.zeros((values.size + 1, values.size + 1))
    for first in range(values.size):
        out[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return out


def one_f_one_b_plan(
    costs: CostTable,
    num_ranks: int,
    num_micro_batches: int,
    sizes: Sequence[int],
    *,
    ranks: Sequence[int] | None = None,
    in_flight: Sequence[int] | None = None,
    recompute: Sequence[tuple[int, ...]] = (),
) -> Plan:
    """Return the 1F1B plan of a partition. `recompute`: the recomputed layers of every stage, whose R runs right before
    the backward. `ranks`: the rank of every stage. `in_flight`: the largest number of micro-batches per stage."""
    p, m = num_ranks, num_micro_batches
    ranks = list(range(p)) if ranks is None else list(ranks)
    orders: list[list[Op]] = [[] for _ in range(p)]
    for s in range(p):
        order = one_f_one_b_order(s, (p - s if in_flight is None else in_flight[s]) - 1, m)
        if recompute and recompute[s]:
            order = _with_recompute(order)
        orders[ranks[s]] = order
    again = [layers or False for layers in recompute]
    return make_plan(costs, p, m, stages_from_sizes(sizes, ranks, again), orders)


def _with_recompute(order: Sequence[Op]) -> list[Op]:
    """Insert R before every backward that does not directly follow its forward."""
    out: list[Op] = []
    for op in order:
        if op.kind == "B" and (not out or out[-1] != Op(op.stage, "F", op.micro_batch)):
            out.append(Op(op.stage, "R", op.micro_batch))
        out.append(op)
    return out


def within_memory(name: str, costs: CostTable, num_ranks: int, solve: Callable[[Floats], Plan | None]) -> Plan:
    """Return the first plan of `solve(bytes kept free per rank)` that fits by simulation.

    `solve` returns None if nothing fits. The bytes by which a rank exceeds its capacity are kept free in the next
    try, so the limit holds exactly although the partitioner's memory formula ignores buffers that wait. Raises
    DoesNotFitError if nothing fits after `TRIES` tries.
    """
    reserve = np.zeros(num_ranks)
    capacity = np.array([costs.capacity_bytes(r) for r in range(num_ranks)])
    for _ in range(TRIES):
        plan = solve(reserve)
        if plan is None:
            break
        timeline = simulate(plan, costs, check=False)
        if timeline.fits:
            return plan
        reserve = reserve + np.maximum(timeline.peak_bytes - capacity, 0.0)
    raise DoesNotFitError(_no_fit(name, costs, num_ranks))


def _no_fit(name: str, costs: CostTable, num_ranks: int) -> str:
    p = num_ranks
    plan = one_f_one_b_plan(costs, p, p, even_sizes(costs, p))
    peaks = simulate(plan, costs, check=False).peak_bytes
    over = peaks - np.array([costs.capacity_bytes(r) for r in range(p)])
    worst = int(np.argmax(over))
    return (
        f"{name}: no split of the {costs.num_layers} layers over {p} ranks fits in memory; the even split needs "
        f"{peaks[worst] / GIB:.1f} GiB on rank {worst} of {costs.capacity_bytes(worst) / GIB:.1f} GiB: "
        "raise --pp, --tp or --memory-gib"
    )

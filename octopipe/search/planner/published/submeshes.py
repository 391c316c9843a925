"""Stages on submeshes of a cluster by dynamic programming, for every bound on the slowest stage.

Knows: layers in runs, devices in units, and for each bound t_max the partition into stages and submeshes with the
smallest total time that uses every device. Does not know: what a system adds to that total, or which meshes it allows.

F(s, k, d) = min over i > k and submeshes of n devices of t(k..i) + F(s-1, i, d-n), t <= t_max: the last s stages hold
layers k and up on the last d devices. A stage is allowed if its s micro-batches in flight fit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from octopipe.search.planner.published.arrangement import Arrangement, StageChoice
from octopipe.search.planner.published.meshes import Devices, Floats, LayerPrices, Mesh, MeshPricer

MOST_RUNS = 33
"""Maximum number of runs of layers; in larger models, neighbouring layers are joined to runs of about equal work."""
MOST_UNITS = 64
MOST_STAGES = 32
GAP = 0.01
"""Bounds t_max that exceed the last one tried by less than this share are skipped."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunCosts:
    """The costs on one mesh: arrays [first run, stop run]."""

    stage_ms: Floats
    hop_ms: Floats
    """Time to transfer the tensor that leaves the run, and its gradient back; 0 after the last run."""
    fixed_bytes: Floats
    activation_bytes: Floats
    capacity_bytes: float


def layer_runs(layer_ms: Floats, most: int = MOST_RUNS) -> list[int]:
    """The bounds of at most `most` runs of layers with even work; embedding and head remain runs of their own."""
    layers = layer_ms.size
    if layers <= most:
        return list(range(layers + 1))
    inner = np.cumsum(layer_ms[1:-1])
    targets = inner[-1] * np.arange(1, most - 2) / (most - 2)
    cuts = {int(np.searchsorted(inner, target * (1 - 1e-12))) + 2 for target in targets}
    return sorted({0, 1, layers - 1, layers, *(c for c in cuts if c < layers - 1)})


def run_costs(prices: LayerPrices, edges: Sequence[int], hop_ms_per_byte: float, reserve: float) -> RunCosts:
    """Return the costs of all runs; `reserve` is a share of the memory kept free for buffers that are held longer than
    their transfer takes."""
    at = np.asarray(edges)

    def sums(values: Floats) -> Floats:
        prefix = np.concatenate(([0.0], np.cumsum(values)))[at]
        return prefix[None, :] - prefix[:, None]

    k = len(edges) - 1
    runs = np.maximum.reduceat(prices.workspace_bytes, at[:-1])
    space = np.zeros((k + 1, k + 1))
    for first in range(k):
        space[first, first + 1 :] = np.maximum.accumulate(runs[first:])
    leaving = np.concatenate(([0.0], prices.boundary_bytes))[at]
    leaving[-1] = 0.0
    upper = np.triu(np.ones((k + 1, k + 1), bool), 1)
    return RunCosts(
        stage_ms=np.where(upper, sums(prices.layer_ms), np.inf),
        hop_ms=np.broadcast_to(2 * leaving[None, :] * hop_ms_per_byte, (k + 1, k + 1)),
        fixed_bytes=sums(prices.static_bytes) + space + leaving[:, None] + leaving[None, :],
        activation_bytes=sums(prices.activation_bytes),
        capacity_bytes=prices.capacity_bytes * (1.0 - reserve),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The choices of the dynamic program."""

    devices: Devices
    unit: int
    """Number of GPUs that are assigned together."""
    edges: tuple[int, ...]
    micro_batches: int
    meshes: Callable[[int, int], Iterable[Mesh]]
    """(first GPU, number of GPUs) -> meshes to consider."""
    with_hops: bool
    """Whether transfers count in the total as stages of their own."""
    reserve: float = 0.0

    @property
    def units(self) -> int:
        return len(self.devices.kinds) // self.unit

    def sizes(self) -> list[int]:
        """Return the possible numbers of units of a submesh: powers of two within a node, then whole nodes."""
        node = max(1, self.devices.node_size // self.unit)
        inside = [n for n in (1 << i for i in range(10)) if n <= min(node, self.units)]
        nodes = self.units // node
        several = range(2, nodes + 1) if nodes <= 8 else [1 << i for i in range(1, 10)]
        whole = [n * node for n in several if n * node <= self.units]
        return sorted({*inside, *whole, self.units})

    def key(self, start: int, size: int) -> Hashable:
        """Return a key that is equal for submeshes with the same GPU kinds, and so the same costs."""
        a, b = start * self.unit, (start + size) * self.unit
        kinds = self.devices.kinds[a:b]
        return size, kinds if len(set(kinds)) > 1 else kinds[0]


class Programme:
    """The tables of the dynamic program for one space, and the best partition under each bound."""

    def __init__(self, space: Space, pricer: MeshPricer):
        self.space, self.pricer = space, pricer
        self.runs = len(space.edges) - 1
        self.stages = min(self.runs, space.units, MOST_STAGES)
        self.options: dict[Hashable, list[tuple[Mesh, RunCosts]]] = {}
        self.key_at: dict[tuple[int, int], Hashable] = {}
        for size in space.sizes():
            for start in range(space.units - size + 1):
                key = self.key_at[start, size] = space.key(start, size)
                if key not in self.options:
                    self.options[key] = self._priced(start, size)
        self.best = {key: [self._best(found, s) for s in range(self.stages + 1)] for key, found in self.options.items()}

    def _priced(self, start: int, size: int) -> list[tuple[Mesh, RunCosts]]:
        space = self.space
        out = []
        for mesh in space.meshes(start * space.unit, size * space.unit):
            prices = self.pricer.price(mesh)
            cluster = self.pricer.setup(mesh).cluster()
            one_node = space.devices.in_one_node(0, len(space.devices.kinds))
            slow = (cluster.intra_link if one_node else cluster.inter_link).ms_per_byte
            out.append((mesh, run_costs(prices, space.edges, slow, space.reserve)))
        return out

    def _best(self, found: Sequence[tuple[Mesh, RunCosts]], s: int) -> tuple[Floats, Floats, Floats]:
        """Return arrays [first, stop] for the s-th stage from the end, with the fastest mesh that fits: the time, the
        larger of stage time and transfer time, and the number of the mesh."""
        shape = (self.runs + 1, self.runs + 1)
        cost, block, number = np.full(shape, np.inf), np.full(shape, np.inf), np.zeros(shape)
        held = min(s, self.space.micro_batches)
        for i, (_, c) in enumerate(found):
            total = c.stage_ms + (c.hop_ms if self.space.with_hops else 0.0)
            fits = c.fixed_bytes + held * c.activation_bytes <= c.capacity_bytes
            better = fits & (total < cost)
            cost = np.where(better, total, cost)
            block = np.where(better, np.maximum(c.stage_ms, c.hop_ms), block)
            number = np.where(better, i, number)
        return cost, block, number

    def bounds(self) -> Floats:
        values = np.concatenate([tables[1][1][np.isfinite(tables[1][1])] for tables in self.best.values()])
        return np.unique(values)

    def table(self, t_max: float) -> list[Floats]:
        """Return F for each number of stages: arrays [first run of the last stages, units that they use]."""
        k, units = self.runs, self.space.units
        empty = np.full((k + 1, units + 1), np.inf)
        empty[k, 0] = 0.0
        out = [empty]
        for s in range(1, self.stages + 1):
            now = np.full((k + 1, units + 1), np.inf)
            before = out[-1]
            for key, used in self._groups():
                cost, block, _ = self.best[key][s]
                size = key[0]  # type: ignore[index]
                allowed = np.where(block <= t_max, cost, np.inf)
                reached = (allowed[:, :, None] + before[None, :, used - size]).min(axis=1)
                now[:, used] = np.minimum(now[:, used], reached)
            out.append(now)
            if not np.isfinite(now).any():
                break
        return out

    def _groups(self) -> Iterator[tuple[Hashable, np.ndarray]]:
        """Yield (key of a submesh, units used with it, one entry per place at which it has these costs)."""
        where: dict[Hashable, list[int]] = {}
        for (start, _), key in self.key_at.items():
            where.setdefault(key, []).append(self.space.units - start)
        for key, used in where.items():
            yield key, np.array(used)

    def stages_of(self, table: Sequence[Floats], s: int, t_max: float) -> list[StageChoice]:
        """Return the partition whose total is F(s, 0, all devices)."""
        space, out = self.space, []
        k, used = 0, space.units
        while s > 0:
            target = table[s][k, used]
            for size in space.sizes():
                start = space.units - used
                key = self.key_at.get((start, size))
                if key is None:
                    continue
                cost, block, number = self.best[key][s]
                reached = np.where(block[k] <= t_max, cost[k], np.inf) + table[s - 1][:, used - size]
                i = int(np.argmin(reached))
                if reached[i] <= target * (1 + 1e-12):
                    mesh = self.options[key][int(number[k, i])][0]
                    first, stop = space.edges[k], space.edges[i]
                    out.append(StageChoice(first=first, stop=stop, mesh=mesh, start=start * space.unit))
                    k, used, s = i, used - size, s - 1
                    break
        return out

    def finalists(self, worth: Callable[[], float]) -> Iterator[list[StageChoice]]:
        """Yield the stages with the smallest total for increasing t_max, starting from the smallest feasible one, as
        long as (m-1) t_max plus the smallest total of all is below the best objective found so far, which `worth`
        returns."""
        values = self.bounds()
        if not values.size:
            return
        rounds = self.space.micro_batches - 1
        least = min(float(f[0, self.space.units]) for f in self.table(float(values[-1])))
        low, high = 0, values.size
        while low < high:  # feasibility is monotone in t_max
            middle = (low + high) // 2
            bound = float(values[middle])
            if rounds * bound + least >= worth() or self._possible(self.table(bound)):
                high = middle
            else:
                low = middle + 1
        tried = 0.0
        for t_max in values[low:].tolist():
            if t_max < tried * (1 + GAP):
                continue
            if rounds * t_max + least >= worth():
                return
            tried = t_max
            table = self.table(t_max)
            ends = [float(f[0, self.space.units]) for f in table]
            s = int(np.argmin(ends))
            if np.isfinite(ends[s]):
                yield self.stages_of(table, s, t_max)

    def _possible(self, table: Sequence[Floats]) -> bool:
        return any(np.isfinite(f[0, self.space.units]) for f in table[1:])


def least(
    system: str,
    space: Space,
    pricer: MeshPricer,
    objective: Callable[[list[StageChoice]], float],
    samples: int,
    worth_ms: float,
) -> Arrangement | None:
    """The arrangement with the smallest objective among the finalists; None if none is below `worth_ms`."""
    known = [worth_ms]
    best: Arrangement | None = None
    for stages in Programme(space, pricer).finalists(lambda: known[-1]):
        value = objective(stages)
        if value < known[-1]:
            known.append(value)
            best = Arrangement(
                system=system,
                stages=tuple(stages),
                samples=samples,
                micro_batches=space.micro_batches,
                objective_ms=value,
                devices=space.devices,
            )
    return best


def unit_of(gpus: int) -> int:
    """The number of GPUs that are assigned together: one, or on large clusters as many as leave 64 units."""
    unit = 1
    while gpus // unit > MOST_UNITS and gpus % (2 * unit) == 0:
        unit *= 2
    return unit

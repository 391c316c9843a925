"""Mist on a whole cluster: ZeRO, offloading and recomputation per stage, together with the parallel sizes.

Zhu et al., "Mist: Efficient Distributed Training of Large Language Models via Memory-Parallelism Co-Optimization",
EuroSys 2025.
Rule: stages of equal meshes; minimise (m-1) max_i t_i + sum_i t_i + max_i(d_i - sum_{j<i} t_j). t is the steady time of
a micro-batch, including the offloading that overlaps with it; d is the time that the first and last one add (gradient
reduction, optimizer, its state from the host). Every stage chooses tensor and data parallelism, the ZeRO level, how
many layers it recomputes and which shares of optimizer state, gradients, weights and activations lie with the host; the
number of stages and the micro-batch size are tried in turn. Simplified: offloaded shares climb a ladder of nine steps;
a stage recomputes the fewest first layers that fit; ZeRO-0 is left out where replicas exist (here ZeRO-1 costs no
more). Instead of a MILP over sampled Pareto points: with t_max given, X = max_i(d_i + sum_{i<=j} t_j) grows by X' = t +
max(X, d), so a programme over layers keeps one number. Recomputation is Mist's own choice: --recompute only says how
layers that are not run again are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from octopipe.costs.analytic.layer_pricing import HIDDEN_COST
from octopipe.search.planner.published.arrangement import Arrangement, Offload, StageChoice
from octopipe.search.planner.published.meshes import Floats, LayerPrices, Mesh, MeshPricer
from octopipe.search.planner.published.query import Query
from octopipe.search.planner.published.submeshes import GAP, MOST_STAGES

LADDER = (
    Offload(),
    Offload(optimizer=0.5),
    Offload(optimizer=1.0),
    Offload(activations=0.5),
    Offload(optimizer=1.0, activations=0.5),
    Offload(optimizer=1.0, gradients=1.0),
    Offload(optimizer=1.0, gradients=1.0, weights=1.0),
    Offload(optimizer=1.0, gradients=1.0, weights=1.0, activations=0.5),
    Offload(optimizer=1.0, gradients=1.0, weights=1.0, activations=1.0),
)
MOST_SHARES = 1.5
"""Largest work of a stage in even shares, plus that of one run of layers (the paper allows two layers more)."""


class Option(NamedTuple):
    """One way to run a stage, with its costs for any run of layers: arrays [first, stop]."""

    mesh: Mesh
    offload: Offload
    steady_ms: Floats
    extra_ms: Floats
    again: Floats
    """Number of recomputed layers. The steady time is infinite if the stage does not fit."""


def mist(query: Query, pricer: MeshPricer, samples: int, reserve: float, worth_ms: float) -> Arrangement | None:
    """The arrangement with the smallest objective for micro-batches of `samples`; None if none fits and is below
    `worth_ms`."""
    m = query.global_batch // samples
    best: Arrangement | None = None
    gpus = len(query.devices.kinds)
    for stages in range(1, min(gpus, len(query.edges) - 1, MOST_STAGES) + 1):
        if gpus % stages:
            continue
        found = _Pipeline(query, pricer, samples, stages, reserve).best(worth_ms)
        if found is not None and found[0] < worth_ms:
            worth_ms = found[0]
            best = Arrangement(
                system="mist",
                stages=tuple(found[1]),
                samples=samples,
                micro_batches=m,
                objective_ms=found[0],
                devices=query.devices,
            )
    return best


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sums:
    """Sums and maxima over runs of layers, [first, stop], for one mesh."""

    prices: LayerPrices
    edges: np.ndarray

    def sums(self, values: Floats) -> Floats:
        prefix = np.concatenate(([0.0], np.cumsum(values)))[self.edges]
        return prefix[None, :] - prefix[:, None]

    def largest(self, values: Floats) -> Floats:
        runs = np.maximum.reduceat(values, self.edges[:-1])
        out = np.zeros((self.edges.size, self.edges.size))
        for first in range(runs.size):
            out[first, first + 1 :] = np.maximum.accumulate(runs[first:])
        return out


class _Pipeline:
    """The search for a given number of stages and micro-batch size."""

    def __init__(self, query: Query, pricer: MeshPricer, samples: int, stages: int, reserve: float):
        self.query, self.pricer, self.samples, self.stages, self.reserve = query, pricer, samples, stages, reserve
        self.micro_batches = query.global_batch // samples
        self.gpus = len(query.devices.kinds) // stages
        self.edges = np.asarray(query.edges)

    def meshes(self) -> Iterator[Mesh]:
        for tp in self.query.tensor_sizes(self.pricer, self.gpus):
            dp = self.gpus // tp
            if self.samples % dp:
                continue
            zeros = (1,) if dp == 1 else (1, 2, 3)
            for zero in zeros if self.query.zero is None else (self.query.zero,):
                for ep in self.pricer.expert_sizes(self.gpus):
                    yield Mesh(
                        kinds=(self.query.assumed,) * dp,
                        shares=(self.samples // dp,) * dp,
                        tp=tp,
                        ep=ep,
                        zero=zero,
                        recompute="none" if self.query.recompute == "full" else self.query.recompute,
                    )

    def best(self, incumbent: float) -> tuple[float, list[StageChoice]] | None:
        meshes = list(self.meshes())
        if not meshes:
            return None
        # A bound: the work divided evenly, on the fastest mesh.
        work = min(float(self.pricer.price(mesh).layer_ms.sum()) for mesh in meshes)
        if (self.micro_batches - 1) * work / self.stages + work >= incumbent:
            return None
        sums = [_Sums(prices=self.pricer.price(mesh), edges=self.edges) for mesh in meshes]
        positions = [self._position(i, meshes, sums) for i in range(self.stages)]
        if not all(positions):
            return None
        return self._programme(positions, incumbent)

    def _position(self, i: int, meshes: list[Mesh], sums: list[_Sums]) -> list[Option]:
        """Return the options of stage i that fit for at least one run of layers, those with the least offloading
        first."""
        held = min(self.stages - i, self.micro_batches)
        out = []
        for mesh, sum_ in zip(meshes, sums, strict=True):
            for offload in LADDER:
                option = self._option(mesh, sum_, offload, held)
                if not np.isfinite(option.steady_ms).any():
                    continue
                out.append(option)
                if np.isfinite(option.steady_ms).sum() == self._sensible(sum_).sum() and not option.again.any():
                    break  # every run fits without recomputation, so offloading more gains nothing
        return out

    def _sensible(self, s: _Sums) -> np.ndarray:
        """Return which runs of layers may be a stage: their work is limited to a multiple of an even share."""
        work = s.sums(s.prices.layer_ms)
        longest = MOST_SHARES * work[0, -1] / self.stages + float(np.diag(work, 1).max())
        return np.triu(work <= longest, 1)

    def _option(self, mesh: Mesh, s: _Sums, offload: Offload, held: int) -> Option:
        p = s.prices
        boundary = np.concatenate(([0.0], p.boundary_bytes))
        enters = np.minimum(boundary[:-1], p.activation_bytes)  # what a recomputed layer keeps
        stays = 1.0 - offload.activations
        moved = (
            offload.optimizer * p.held_state_bytes
            + offload.gradients * p.held_gradient_bytes
            + offload.weights * p.held_weight_bytes
        )
        static = s.sums(np.maximum(p.static_bytes - moved, 0.0))
        leaving = boundary[self.edges].copy()
        leaving[-1] = 0.0
        space = s.largest(p.workspace_bytes + moved + offload.activations * p.activation_bytes)
        fixed = static + space + leaving[:, None] + leaving[None, :]
        activation = s.sums(p.activation_bytes)
        room = p.capacity_bytes * (1.0 - self.reserve) - fixed
        upper = self._sensible(s)
        # Layers are recomputed from the first one of the stage on, as many as are needed to make the stage fit.
        saved = np.concatenate(([0.0], np.cumsum(p.activation_bytes - enters)))
        restored = s.largest(p.activation_bytes - enters)
        lacking = (held * stays * activation - room) / max(held * stays, 1e-9)
        again_room = room - restored
        lacking_again = (held * stays * activation - again_room) / max(held * stays, 1e-9)
        first = np.broadcast_to(self.edges[:, None], room.shape)
        count = np.searchsorted(saved, saved[first] + lacking_again - 1e-6, side="left") - first
        again = np.where(lacking <= 0, 0, np.maximum(count, 1))
        fits = upper & (room >= 0) & (again <= self.edges[None, :] - self.edges[:, None])
        if stays == 0:
            fits = upper & (room >= activation)  # the activations of the running micro-batch are on the device
            again = np.zeros_like(again)
        again = np.where(fits, again, 0)
        forward = np.concatenate(([0.0], np.cumsum(p.forward_ms)))
        work = s.sums(p.layer_ms) + forward[first + again] - forward[first]
        kept = activation - (saved[first + again] - saved[first])
        moved_back = offload.activations * kept + s.sums(offload.gradients * p.held_gradient_bytes)
        each = (moved_back + 2 * s.sums(offload.weights * p.held_weight_bytes)) * p.host_ms_per_byte
        steady = np.maximum(work, each) + HIDDEN_COST * np.minimum(work, each)
        once = s.sums(offload.optimizer * p.held_state_bytes) * p.host_ms_per_byte
        late = np.maximum(once - work, 0.0) + HIDDEN_COST * np.minimum(once, work)
        extra = s.sums(p.reduction_ms) + s.sums(p.optimizer_ms) + late
        return Option(mesh, offload, np.where(fits, steady, np.inf), extra, again.astype(float))

    def _programme(self, positions: list[list[Option]], incumbent: float) -> tuple[float, list[StageChoice]] | None:
        steady = [np.stack([o.steady_ms for o in options]) for options in positions]
        extra = [np.stack([o.extra_ms for o in options]) for options in positions]
        values = np.unique(np.concatenate([t[np.isfinite(t)] for t in steady]))
        low, high = 0, values.size
        while low < high:
            middle = (low + high) // 2
            if np.isfinite(self._walk(steady, extra, float(values[middle]))[-1][-1]):
                high = middle
            else:
                low = middle + 1
        best: tuple[float, list[StageChoice]] | None = None
        tried = 0.0
        m = self.micro_batches
        for t_max in values[low:].tolist():
            if t_max < tried * (1 + GAP):
                continue
            tried = t_max
            if (m - 1) * t_max >= min(incumbent, np.inf if best is None else best[0]):
                break
            table = self._walk(steady, extra, t_max)
            stages = self._stages(positions, steady, extra, table, t_max)
            value = mist_ms([self._times(s, positions) for s in stages], m)
            if best is None or value < best[0]:
                best = value, [choice for _, _, _, choice in stages]
        return best

    def _walk(self, steady: list[Floats], extra: list[Floats], t_max: float) -> list[Floats]:
        """Return the smallest X after every stage, [runs placed], with all stages within t_max."""
        x = np.full(self.edges.size, np.inf)
        x[0] = 0.0
        out = [x]
        for t, d in zip(steady, extra, strict=True):
            grown = t + np.maximum(out[-1][None, :, None], d)
            out.append(np.where(t <= t_max, grown, np.inf).min(axis=(0, 1)))
        return out

    def _stages(
        self,
        positions: list[list[Option]],
        steady: list[Floats],
        extra: list[Floats],
        table: list[Floats],
        t_max: float,
    ) -> list[tuple[int, int, int, StageChoice]]:
        """Trace the last X back and return for every stage (number of its option, first run, stop run, choice)."""
        out: list[tuple[int, int, int, StageChoice]] = []
        stop = self.edges.size - 1
        for i in range(self.stages - 1, -1, -1):
            t, d = steady[i][:, :, stop], extra[i][:, :, stop]
            grown = np.where(t <= t_max, t + np.maximum(table[i][None, :], d), np.inf)
            number, first = np.unravel_index(int(np.argmin(grown)), grown.shape)
            option = positions[i][int(number)]
            choice = StageChoice(
                first=int(self.edges[first]),
                stop=int(self.edges[stop]),
                mesh=option.mesh,
                start=i * self.gpus,
                again=int(option.again[first, stop]),
                offload=option.offload,
            )
            out.append((int(number), int(first), int(stop), choice))
            stop = int(first)
        return out[::-1]

    def _times(self, stage: tuple[int, int, int, StageChoice], positions: list[list[Option]]) -> tuple[float, float]:
        number, first, stop, choice = stage
        option = positions[choice.start // self.gpus][number]
        return float(option.steady_ms[first, stop]), float(option.extra_ms[first, stop])


def mist_ms(times: list[tuple[float, float]], micro_batches: int) -> float:
    """Return the objective of stages with the times (t, d): (m-1) max t + sum t + max_i(d_i - sum_{j<i} t_j)."""
    t = np.array([a for a, _ in times])
    d = np.array([b for _, b in times])
    return float((micro_batches - 1) * t.max() + t.sum() + (d - (np.cumsum(t) - t)).max())

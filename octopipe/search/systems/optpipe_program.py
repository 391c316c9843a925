"""OptPipe's program: when every F, I and W starts and which activations move to host memory, stated to CP-SAT.

Knows: the prices of one stage per rank as integers, the constraints, and how a solution is read as orders. Does not
know: where a first schedule comes from, or whether lowering places the moves as the program does (`optpipe.py`).
ortools is imported when a solve begins; it comes with the `exact` extra.

The solve is limited by CP-SAT's deterministic time, on one worker with a fixed seed, so that its result does not depend
on the machine. Micro-batches pass every stage first in, first out, in F, in I and in W.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octopipe.base.errors import NotApplicableError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import F, I, Op, Plan, W
from octopipe.plans.price import hop_times, offload_bytes, stage_memory, stage_times
from octopipe.simulation.host_moves import MARGIN

OP_RESOLUTION = 100
"""Number of time units into which the shortest op is divided."""
MOST_UNITS = 1_000_000_000
"""Maximum number of time units in a step, even if the shortest op then has fewer."""
BYTES_RESOLUTION = 1 << 30
"""Number of units into which the memory of a rank is divided."""
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def cp_model() -> Any:
    """The ortools module, or an error that names the extra."""
    try:
        from ortools.sat.python import cp_model as module
    except ImportError:
        raise NotApplicableError(
            "optpipe: its solver is OR-tools, which is not installed; install octopipe[exact], or use zb-2p"
        ) from None
    return module


class Prices(NamedTuple):
    """The times and bytes that the program uses; times are integers, [stage, micro-batch]."""

    unit_ms: float
    took: dict[str, Ints]
    """Durations of F, I and W."""
    hop: dict[str, Ints]
    """Transfer times of F's output to the next stage and of I's gradient to the previous stage."""
    move: Ints | None
    """Time of a copy in one direction between device and host memory, with the same margin as in lowering; None without
    a host link."""
    held: Floats
    """Bytes held from the start of F to the end of I, or the bytes that I restores for W if these are more."""
    stash: Floats
    """Bytes held from the end of I to the end of W."""
    movable: Floats
    """Bytes of `held` that can be moved to host memory."""


class Schedule(NamedTuple):
    """A solution."""

    orders: list[list[Op]]
    moving: list[int]
    """Stages of which an activation moves to host memory."""
    step_ms: float
    """The step time according to the program."""


def priced(shape: Plan, costs: CostTable) -> Prices:
    """Return the prices of a plan with stage i on rank i; they do not depend on its orders."""
    times, hops = stage_times(shape, costs), hop_times(shape, costs)
    every = np.concatenate([times[k].ravel() for k in (F, I, W)])
    shortest = float(every[every > 0].min(initial=np.inf))
    unit = max(min(shortest, 1.0) / OP_RESOLUTION, float(every.sum() + hops[0].sum() + hops[1].sum()) / MOST_UNITS)
    memory = stage_memory(shape, costs)
    link, movable = costs.host_link, np.zeros_like(memory.activation)
    move = None
    if link is not None:
        leaving = replace(shape, stages=tuple(replace(s, offload=True) for s in shape.stages))
        movable = offload_bytes(leaving, costs)
        move = _whole(MARGIN * (link.latency_ms + movable * link.ms_per_byte), unit)
    return Prices(
        unit_ms=unit,
        took={kind: _whole(times[code], unit) for kind, code in (("F", F), ("I", I), ("W", W))},
        hop={"F": _whole(hops[0], unit), "I": _whole(hops[1], unit)},
        move=move,
        held=np.maximum(memory.activation, memory.stash),
        stash=memory.stash,
        movable=movable,
    )


def _whole(ms: Floats, unit: float) -> Ints:
    return np.rint(ms / unit).astype(np.int64)


class Program:
    """The program of one set of prices under a memory limit per rank."""

    def __init__(self, prices: Prices, room: Floats, after_ms: Floats, most_ms: float) -> None:
        """`room`: bytes for activations per rank. `after_ms`: the time after a rank's last W. `most_ms`: a step time
        that is known to be possible, which limits the horizon."""
        self.cp, self.prices, self.room = cp_model(), prices, room
        self.model = self.cp.CpModel()
        self.stages, self.micro_batches = prices.took["F"].shape
        # Rounding may lengthen every op on the longest path by half a unit.
        self.horizon = int(most_ms / prices.unit_ms) + 3 * self.stages * self.micro_batches
        self.start: dict[tuple[str, int, int], Any] = {}
        self.end: dict[tuple[str, int, int], Any] = {}
        self.moved: dict[tuple[int, int], Any] = {}
        self._ops()
        for s in range(self.stages):
            self._memory(s)
        after = _whole(after_ms, prices.unit_ms)
        self.makespan = self._time()
        for s in range(self.stages):
            self.model.add(self.makespan >= self.end["W", s, self.micro_batches - 1] + int(after[s]))
        self.model.minimize(self.makespan)

    def _time(self) -> Any:
        return self.model.new_int_var(0, self.horizon, "")

    def _ops(self) -> None:
        """State that a rank runs its ops one at a time, each after everything that it needs has arrived."""
        model, prices = self.model, self.prices
        for s in range(self.stages):
            lane = []
            for kind in "FIW":
                for m in range(self.micro_batches):
                    took, begins = int(prices.took[kind][s, m]), self._time()
                    self.start[kind, s, m], self.end[kind, s, m] = begins, begins + took
                    lane.append(model.new_fixed_size_interval_var(begins, took, ""))
                    if m:
                        model.add(begins >= self.end[kind, s, m - 1])
            model.add_no_overlap(lane)
        for s in range(self.stages):
            for m in range(self.micro_batches):
                model.add(self.start["I", s, m] >= self.end["F", s, m])
                model.add(self.start["W", s, m] >= self.end["I", s, m])
            if s:
                self._transfers("F", s - 1, s)
                self._transfers("I", s, s - 1)

    def _transfers(self, kind: str, source: int, target: int) -> None:
        """State that the transfers of one direction between two stages run one after the other."""
        before: Any = None
        for m in range(self.micro_batches):
            hop, ready = int(self.prices.hop[kind][source, m]), self.end[kind, source, m]
            arrives = ready + hop
            if hop:
                arrives = self._time()
                self.model.add(arrives >= ready + hop)
                if before is not None:
                    self.model.add(arrives >= before + hop)
                before = arrives
            self.model.add(self.start[kind, target, m] >= arrives)

    def _memory(self, s: int) -> None:
        """Limit the memory of a rank. It is checked while each op runs, because it grows only when an F starts or an
        activation begins to come back from the host."""
        prices, count = self.prices, self.micro_batches
        limit = float(self.room[s])
        if not np.isfinite(limit) or float(prices.held[s].sum()) <= limit:
            return
        unit = max(limit, 1e-9) / BYTES_RESOLUTION
        held, stash, leaves = (
            (x[s] / unit).astype(np.int64).tolist() for x in (prices.held, prices.stash, prices.movable)
        )
        first = {pair: self._orders(s, *pair) for pair in (("F", "I"), ("F", "W"), ("I", "W"))}
        moves = [self._move(s, m) for m in range(count)] if prices.move is not None else []
        self._lanes(s, moves)
        for m in range(count):
            # Earlier micro-batches hold what their I and W have not released when this F starts.
            used = held[m] + sum(
                held[k] - (held[k] - stash[k]) * ~first["F", "I"][m, k] - stash[k] * ~first["F", "W"][m, k]
                for k in range(m)
            )
            away = sum(leaves[k] * self._away(moves[k], s, "F", m) for k in range(m) if moves)
            self.model.add(used - away <= BYTES_RESOLUTION)
            if not moves:
                continue
            later = range(m + 1, count)
            used = held[m] + sum(held[k] * first["F", "I"][k, m] for k in later)
            used += sum(stash[k] * first["I", "W"][m, k] for k in range(m))
            away = sum(leaves[k] * self._away(moves[k], s, "I", m) for k in later)
            self.model.add(used - away <= BYTES_RESOLUTION)
            used = stash[m] + sum(
                held[k] * first["F", "W"][k, m] - (held[k] - stash[k]) * first["I", "W"][k, m] for k in later
            )
            away = sum(leaves[k] * self._away(moves[k], s, "W", m) for k in later)
            self.model.add(used - away <= BYTES_RESOLUTION)

    def _orders(self, s: int, one: str, other: str) -> dict[tuple[int, int], Any]:
        """Return variables (k, m) -> whether op `one` of micro-batch k runs before op `other` of the earlier
        micro-batch m."""
        model, first = self.model, {}
        for k in range(self.micro_batches):
            for m in range(k):
                before = first[k, m] = model.new_bool_var("")
                model.add(self.start[other, s, m] >= self.end[one, s, k]).only_enforce_if(before)
                model.add(self.start[one, s, k] >= self.end[other, s, m]).only_enforce_if(~before)
        for (k, m), before in first.items():  # first in, first out
            for weaker in ((k - 1, m), (k, m + 1)):
                if weaker in first:
                    model.add_implication(before, first[weaker])
        return first

    def _move(self, s: int, m: int) -> tuple[Any, Any, Any]:
        """Return variables: whether an activation is moved, when it has left the device, and when its way back
        begins."""
        model, took = self.model, int(self.prices.move[s, m]) if self.prices.move is not None else 0
        moved, left, back = model.new_bool_var(""), self._time(), self._time()
        self.moved[s, m] = moved
        model.add(left >= self.end["F", s, m] + took).only_enforce_if(moved)
        model.add(back >= left).only_enforce_if(moved)
        model.add(back + took <= self.start["I", s, m]).only_enforce_if(moved)
        return moved, left, back

    def _lanes(self, s: int, moves: list[tuple[Any, Any, Any]]) -> None:
        """State that moves in the same direction run one at a time."""
        down, up = [], []
        for m, (moved, left, back) in enumerate(moves):
            took = int(self.prices.move[s, m]) if self.prices.move is not None else 0
            down.append(self.model.new_optional_fixed_size_interval_var(left - took, took, moved, ""))
            up.append(self.model.new_optional_fixed_size_interval_var(back, took, moved, ""))
        for lane in (down, up):
            self.model.add_no_overlap(lane)

    def _away(self, move: tuple[Any, Any, Any], s: int, kind: str, m: int) -> Any:
        """Return a variable that may be true only if an activation is in host memory during the whole of an op."""
        moved, left, back = move
        away = self.model.new_bool_var("")
        self.model.add_implication(away, moved)
        self.model.add(left <= self.start[kind, s, m]).only_enforce_if(away)
        self.model.add(back >= self.end[kind, s, m]).only_enforce_if(away)
        return away

    def hint(self, starts_ms: dict[tuple[str, int, int], float]) -> None:
        """Pass the start times of a known schedule to the solver."""
        for cell, ms in starts_ms.items():
            self.model.add_hint(self.start[cell], round(ms / self.prices.unit_ms))

    def solve(self, effort: float) -> Schedule | None:
        """Return the best schedule found within this deterministic time; None if none was found."""
        solver = self.cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        # Probing and symmetries of the many order variables would take longer than the search.
        solver.parameters.cp_model_probing_level = 0
        solver.parameters.symmetry_level = 0
        solver.parameters.max_deterministic_time = effort
        if solver.solve(self.model) not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return None
        orders = []
        for s in range(self.stages):
            # Ops of zero duration may start together; sort them F, I, W, as their micro-batch needs them.
            mine = [
                (solver.value(at), m, "FIW".index(kind), kind)
                for (kind, stage, m), at in self.start.items()
                if stage == s
            ]
            orders.append([Op(s, kind, m) for _, m, _, kind in sorted(mine)])
        moving = sorted({s for (s, _), moved in self.moved.items() if solver.boolean_value(moved)})
        return Schedule(orders, moving, solver.value(self.makespan) * self.prices.unit_ms)

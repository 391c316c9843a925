"""The measured Timeline: the times of one training step on all ranks, with a common clock.

Knows: how ranks record op times (host clock, or CUDA events on a GPU) and how they become the same `Timeline` type that
the simulator produces. Does not know: how ops run.

A transfer starts when its send is issued and ends when its receiver knows that it is complete. This is exact if the
receiver waited for it, and an upper bound if the tensor arrived before it was needed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.runtime.ranks.world import Group
from octopipe.runtime.slots import RankProgram
from octopipe.runtime.wire.driver import Driver
from octopipe.runtime.wire.telling import gather_values, moment, naming_lost_peers
from octopipe.simulation.simulator import memory_curves
from octopipe.simulation.timeline import Extra, Spans, Timeline, Transfers

REDUCE = "reduce"
"""The name under which a rank records the wait for its gradient reductions after its last op."""


class Recorder:
    """Start and end of every op of one rank in the last training step."""

    def __init__(self, num_ops: int, device: torch.device):
        self.started, self.ended = [0.0] * num_ops, [0.0] * num_ops
        self._extras: list[tuple[str, Any, Any]] = []
        """The work that followed the ops: its name, and its start and end in seconds or as events."""
        self.device = device
        self._cuda = device.type == "cuda"
        self._stream: Any = None
        """The stream of the step's ops; looked up once per step, because a lookup costs as much as recording."""
        self.events: list[Any] = []
        self.mark: Callable[[int, int], None] | None = None
        """On a GPU: records the event of an op's start (0) or end (1). None on a CPU, where the clock is enough."""
        if self._cuda:
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * num_ops + 1)]
            self._done = _asking()
            self.mark = self._mark_event

    def begin_step(self) -> None:
        self._extras.clear()
        if self._cuda:
            self._stream = torch.cuda.current_stream(self.device)

    def _mark_event(self, op: int, end: int) -> None:
        self.events[2 * op + end].record(self._stream)

    def end_step(self) -> None:
        """Record that all ops of the step have been issued."""
        if self._cuda:
            self.events[-1].record()

    def finished(self) -> bool:
        """Return whether the device has finished the last step."""
        return not self._cuda or self._done(self.events[-1])

    def device_at(self) -> tuple[int, bool] | None:
        """Return the first op, by its position in the rank's order, that the device has not finished, and whether it
        has begun.

        None if the device has finished all that was issued. Ops of this step that are not issued yet have the events of
        the step before, which are done. Called from another thread (see `driver`).
        """
        for k, event in enumerate(self.events[:-1]):
            if not self._done(event):
                return k // 2, bool(k % 2)
        return None

    @contextmanager
    def extra(self, name: str) -> Iterator[None]:
        """A context that times work that follows the ops of a step."""
        begin = self._now()
        yield
        self._extras.append((name, begin, self._now()))

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def times(self) -> tuple[list[float], list[float]]:
        """Return starts and ends of ops in seconds on the host's clock; waits for the device."""
        return self.all_times()[:2]

    def all_times(self) -> tuple[list[float], list[float], list[tuple[str, float, float]]]:
        """Return the same as `times`, and the times of extras."""
        if not self._cuda:
            return self.started, self.ended, self._extras
        # The anchor: an event recorded on an idle device takes place at the host's present time.
        torch.cuda.synchronize()
        anchor = torch.cuda.Event(enable_timing=True)
        anchor.record()
        torch.cuda.synchronize()
        now = time.perf_counter()

        def seconds(event: Any) -> float:
            return now - float(event.elapsed_time(anchor)) / 1e3

        ops = [seconds(event) for event in self.events[:-1]]
        return ops[0::2], ops[1::2], [(name, seconds(a), seconds(b)) for name, a, b in self._extras]


def _asking() -> Callable[[Any], bool]:
    """Return a function that tells whether an event is done: through libcuda, without holding Python's lock, or through
    torch if there is no libcuda (as on ROCm)."""
    try:
        driver = Driver()
    except (OSError, AttributeError):
        return lambda event: bool(event.query())
    return lambda event: driver.event_done(event.cuda_event)


def clock_offset_s(group: Group, rank: int) -> float:
    """Return what to add to this rank's clock to get rank 0's (collective). Ranks of one host share a clock."""
    if len(set(gather_values(group, socket.gethostname()))) == 1:
        return 0.0
    offsets = torch.zeros(group.size(), dtype=torch.float64)
    mine = torch.zeros(1, dtype=torch.float64)
    for other in range(1, group.size()):
        best = float("inf")
        for _ in range(16):  # the exchange with the shortest round trip has the best midpoint
            if rank == 0:
                sent = time.perf_counter()
                group.send([mine], other, 0).wait()
                group.recv([mine], other, 0).wait()
                back = time.perf_counter()
                if back - sent < best:
                    best = back - sent
                    offsets[other] = (sent + back) / 2 - float(mine)
            elif rank == other:
                group.recv([mine], 0, 0).wait()
                mine[0] = time.perf_counter()
                group.send([mine], 0, 0).wait()
    return float(gather_values(group, offsets.tolist() if rank == 0 else None)[0][rank])


@moment("while the timeline was collected")
@naming_lost_peers()
def measured_timeline(
    program: RankProgram, recorder: Recorder, group: Group, costs: CostTable | None, label: str
) -> Timeline:
    """Return the timeline of the last step of all ranks (collective). Memory curves are the cost table's bytes at the
    measured times."""
    plan, rank = program.plan, program.rank
    offset = 0.0 if group is None else clock_offset_s(group, rank)
    started, ended, extras = recorder.all_times()
    if ended and not any(ended):
        raise OctoPipeError("no step was run yet; call step() before timeline()")
    slots = [(s.number, s.sending, s.started if s.sending else s.ended, s.nbytes) for s in program.slots]
    mine: dict[str, list[Any]] = {
        "ops": [(a + offset, b + offset) for a, b in zip(started, ended)],
        "slots": [(number, sending, when + offset, size) for number, sending, when, size in slots],
        "extras": [(name, a + offset, b + offset) for name, a, b in extras],
    }
    everyone = [mine] if group is None else gather_values(group, mine)
    t = plan.table()
    times = np.array([pair for one in everyone for pair in one["ops"]], np.float64).reshape(-1, 2)
    zero = float(times.min()) if times.size else 0.0
    times = (times - zero) * 1e3
    inner = program.program
    begin, end, nbytes = (np.zeros(inner.num_transfers) for _ in range(3))
    for one in everyone:
        for number, sending, when, size in one["slots"]:
            (begin if sending else end)[number] = (when - zero) * 1e3
            nbytes[number] += size
    # A device runs behind its host: a transfer cannot start before what it carries was made.
    begin = np.maximum(begin, times[inner.source, 1])
    end = np.maximum(end, begin)
    spans = Spans(t.rank, t.stage, t.kind.astype(np.int32), t.micro_batch, times[:, 0].copy(), times[:, 1].copy())
    transfers = Transfers(inner.source, inner.target, t.rank[inner.source], t.rank[inner.target], begin, end, nbytes)
    after = tuple(
        Extra(name, r, (a - zero) * 1e3, (b - zero) * 1e3)
        for r, one in enumerate(everyone)
        for name, a, b in one["extras"]
    )
    return Timeline(
        num_ranks=plan.num_ranks,
        spans=spans,
        transfers=transfers,
        memory=() if costs is None else memory_curves(inner, costs, spans, transfers),
        extras=after,
        measured=True,
        label=label,
        model=plan.model,
    )

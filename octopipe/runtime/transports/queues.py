"""Lanes and the hardware queues of a GPU: which lanes may stand in one queue, and streams that stand in none together.

Knows: that a GPU takes work from a process through a few in-order queues, that streams are dealt out to them in a way
nobody documents, and what a program's lanes wait for. Does not know: how messages travel (`ring`, `cuda_ipc`).

A lane that waits for another rank holds up everything that was put into its queue after it, of whatever stream. If
that is the computation, or the lane by which the thing arrives that the other rank needs first, both wait for ever. So

- every lane has a stream of our own, chosen by trial: while it waits, work on the computation's stream and on all
  lanes chosen before must go through (`independent`); streams of torch's pool are never used, nor is anything that
  takes one behind our back (see `world.HostWork`);
- where there are fewer queues than lanes, lanes share one only where the program's own order proves that harmless
  (`lane_plan`); otherwise the pipeline is refused.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from octopipe._graph import find_cycle
from octopipe.errors import OctoPipeError
from octopipe.lowering import Program
from octopipe.plan import F
from octopipe.runtime.driver import Driver

LaneKey = tuple[int, bool]
"""The other rank, and whether this one sends."""
TRIES = 64
"""Streams that may turn out to share a queue before no more are tried."""
PATIENCE_S = 0.2
"""How long work may take that nothing holds up (it takes microseconds)."""


def lanes_of(program: Program, rank: int) -> list[LaneKey]:
    """The lanes of a rank: one per direction and peer."""
    ranks = program.plan.table().rank
    out = {(int(ranks[b]), True) for a, b in zip(program.source, program.target) if ranks[a] == rank}
    out |= {(int(ranks[a]), False) for a, b in zip(program.source, program.target) if ranks[b] == rank}
    return sorted(out)


SHARINGS: tuple[Callable[[LaneKey], Any], ...] = (
    lambda lane: lane,
    lambda lane: lane[0],
    lambda lane: lane[1],
    lambda lane: 0,
)
"""From most queues to fewest: one per lane, per peer, per direction, one."""


def lane_plan(program: Program, queues: Sequence[int]) -> list[dict[LaneKey, int]]:
    """Per rank: the queue of each of its lanes, for ranks that have so many besides the computation's.

    Raises where no sharing is proven harmless.
    """
    everyone = [lanes_of(program, rank) for rank in range(program.plan.num_ranks)]
    for sharing in SHARINGS:
        maps = []
        for lanes in everyone:
            names = sorted({sharing(lane) for lane in lanes}, key=str)
            maps.append({lane: names.index(sharing(lane)) for lane in lanes})
        if all(len(set(m.values())) <= n for m, n in zip(maps, queues)) and not find_cycle(waits(program, maps)):
            return maps
    short = next(r for r, lanes in enumerate(everyone) if len(lanes) > queues[r])
    raise OctoPipeError(
        f"rank {short} has {len(everyone[short])} lanes for messages and {queues[short]} hardware queues of its GPU to "
        "put them in, and sharing them could stop this program: set CUDA_DEVICE_MAX_CONNECTIONS higher before CUDA "
        "starts, put fewer ranks on the GPU, or lower the plan with channel='single'"
    )


def waits(program: Program, maps: Sequence[dict[LaneKey, int]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """What waits for what when lanes share queues so: ops first, then transfers, as a predecessor table.

    A transfer waits for the computation issued before it on both ranks, and for what stands before it in both queues.
    """
    plan = program.plan
    t, data = plan.table(), plan.predecessor_table()
    computes, width = data.shape
    preds = np.full((computes + program.num_transfers, max(width + 1, 5)), -1, np.int32)
    preds[:computes, 1 : width + 1] = np.where(
        program.transfer_of >= 0, computes + np.maximum(program.transfer_of, 0), data
    )
    preds[computes:, 0] = program.source
    for rank in range(plan.num_ranks):
        previous = -1
        last: dict[int, int] = {}
        for kind, number in issue_order(program, rank):
            if kind == 0:
                preds[number, 0] = previous
                previous = number
                continue
            sending = kind == 1
            peer = int(t.rank[program.target[number] if sending else program.source[number]])
            queue = maps[rank][peer, sending]
            preds[computes + number, kind] = previous
            preds[computes + number, 2 + kind] = last.get(queue, -1)
            last[queue] = computes + number
    return preds


def issue_order(program: Program, rank: int) -> list[tuple[int, int]]:
    """A rank's instructions (kind, number) as an ordered transport issues them.

    A gradient's receive is held back until the output it answers was sent, and with it all from the same peer behind
    it (see `ordered`).
    """
    t = program.plan.table()
    out: list[tuple[int, int]] = []
    sent: set[tuple[int, int]] = set()
    held: dict[int, list[int]] = {}

    def known(number: int) -> bool:
        consumer = int(program.target[number])
        return t.kind[consumer] == F or (int(t.stage[consumer]), int(t.micro_batch[consumer])) in sent

    for i in range(program.instr_offsets[rank], program.instr_offsets[rank + 1]):
        kind, number = int(program.instr_kind[i]), int(program.instr_id[i])
        if kind == 2:
            peer = int(t.rank[program.source[number]])
            if held.get(peer) or not known(number):
                held.setdefault(peer, []).append(number)
                continue
        out.append((kind, number))
        if kind == 1 and t.kind[program.source[number]] == F:
            source, peer = int(program.source[number]), int(t.rank[program.target[number]])
            sent.add((int(t.stage[source]), int(t.micro_batch[source])))
            waiting = held.get(peer, [])
            while waiting and known(waiting[0]):
                out.append((2, waiting.pop(0)))
    return out


# -- streams -------------------------------------------------------------------------------------------


def independent(
    create: Callable[[], int],
    destroy: Callable[[int], None],
    holds_up: Callable[[int, Sequence[int]], bool],
    wanted: int,
    *,
    tries: int = TRIES,
) -> list[int]:
    """At most `wanted` streams none of which holds up the computation or another of them while it waits.

    `holds_up(stream, others)`: whether, while the stream waits, the computation or one of the others stands still.
    Streams that do are given back only at the end: until then they keep the driver from dealing out their queue again.
    """
    chosen: list[int] = []
    refused: list[int] = []
    while len(chosen) < wanted and len(refused) < tries:
        stream = create()
        (refused if holds_up(stream, chosen) else chosen).append(stream)
    for stream in refused:
        destroy(stream)
    return chosen


class Trial:
    """Lets one stream of a GPU wait and looks what still moves."""

    def __init__(self, driver: Driver, device: torch.device):
        self._driver, self._device = driver, device
        self._gate = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        """The host's: it can be opened whatever stands still."""
        self._host = torch.zeros(64, dtype=torch.uint8, pin_memory=True)
        self._there = torch.zeros(64, dtype=torch.uint8, device=device)
        self._count = torch.zeros(1, device=device)
        self._turn = 0
        torch.cuda.synchronize(device)

    def holds_up(self, stream: int, others: Sequence[int]) -> bool:
        driver, compute = self._driver, torch.cuda.current_stream(self._device).cuda_stream
        self._turn += 1
        driver.wait(stream, self._gate.data_ptr(), self._turn)
        try:
            self._count.add_(1)
            for other in (compute, *others):  # the ways lanes and computations use: a kernel, and copies both ways
                driver.copy(other, self._there.data_ptr(), self._host.data_ptr(), self._host.nbytes)
                driver.copy(other, self._host.data_ptr(), self._there.data_ptr(), self._host.nbytes)
            end = time.monotonic() + PATIENCE_S
            while not all(driver.stream_done(other) for other in (compute, *others)):
                if time.monotonic() > end:
                    return True
                time.sleep(1e-4)
            return False
        finally:
            ctypes.c_int32.from_address(self._gate.data_ptr()).value = self._turn
            while not driver.stream_done(stream):
                time.sleep(1e-4)
            torch.cuda.synchronize(self._device)


def device_streams(driver: Driver, device: torch.device, wanted: int) -> list[int]:
    """Streams of high priority on this device, as many as are independent, at most `wanted`."""
    trial = Trial(driver, device)
    return independent(lambda: driver.create_stream(-1), driver.destroy_stream, trial.holds_up, wanted)

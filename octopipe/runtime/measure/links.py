"""Links: measures the cost of a transfer between two ranks by ping-pong over the transport that training uses.

Knows: the alpha-beta fit, and how to send a tensor back and forth. Does not know: how transports work.

The cost of a link is latency + bytes / bandwidth. Round trips of a small and of larger tensors are timed one pair after
the other; the one-way time is half the median round trip. The fit uses all sizes and minimises relative errors.
`measure_overlap` measures how much a transfer slows concurrent computation, and `measure_sum` how long two ranks that
share a device take to sum gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from octopipe.costs.cluster.hardware import Link
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan, Stage
from octopipe.runtime.ranks.reduce import BUCKET_BYTES
from octopipe.runtime.ranks.ring_group import summing
from octopipe.runtime.ranks.world import World
from octopipe.runtime.slots import RankProgram, rank_program
from octopipe.runtime.wire.transports import make_transport
from octopipe.simulation.lowering import lower

BOUNCES = 8


def measure_links(
    world: World,
    device: torch.device,
    *,
    sizes: Sequence[int] = (1 << 12, 1 << 18, 1 << 22, 1 << 24),
    repeats: int = 5,
    transport: str | None = None,
    pairs: Sequence[tuple[int, int]] | None = None,
) -> dict[tuple[int, int], Link]:
    """Measure the links between every pair of ranks (collective); both directions of a pair get the mean of the two."""
    if pairs is None:
        pairs = [(a, b) for a in range(world.size) for b in range(a + 1, world.size)]
    out: dict[tuple[int, int], Link] = {}
    for a, b in pairs:
        times = [_bounce(world, device, a, b, size, repeats, transport) for size in sizes]
        link = fit(sizes, world.gather(times)[a])
        out[a, b] = out[b, a] = link
    return out


def measure_overlap(
    world: World,
    device: torch.device,
    work: Callable[[], None],
    *,
    nbytes: int,
    repeats: int = 5,
    transport: str | None = None,
) -> float:
    """Return by which factor `work` takes longer on rank 0 while it exchanges tensors of `nbytes` with rank 1; 1.0
    means no longer. Collective, with at least two ranks. All ranks do the work; the result compares the medians of
    alternating runs with and without the exchange."""
    program = lower(_plan(world.size, 0, 1), CostTable.uniform(num_layers=2, p2p_ms=0.01))
    mine = rank_program(program, world.rank)
    mover = make_transport(transport, world, program, device, 120.0)
    mover.open(mine)
    tensor = torch.zeros(max(1, nbytes // 4), dtype=torch.float32, device=device)
    ends: list[tuple[Any, Any]] = _by_micro_batch(mine) if world.rank < 2 else [(None, None)] * BOUNCES
    times: dict[bool, list[float]] = {True: [], False: []}
    for k in range(2 * repeats + 2):
        moving = k % 2 == 0
        _settle(world, device)
        mover.begin_step()
        clock = _Clock(device)
        for there, back in ends:
            if moving and world.rank == 0:
                there.cell.output_message = mover.send_forward(there, tensor, [True])
                mover.post(back)
            elif moving and world.rank == 1:
                mover.post(there)
            work()
            if moving and world.rank == 1:
                mover.send_gradient(back, [mover.take_forward(there)[0]])
        took = clock.stop_ms()
        if moving and world.rank == 0:
            for _, back in ends:
                mover.take_gradient(back)
        for slot in mine.slots:
            if moving and slot.sending:
                mover.release(slot)
        mover.end_step()
        if k >= 2:
            times[moving].append(took)
    _settle(world, device)
    mover.close()
    ratio = float(np.median(times[True]) / max(np.median(times[False]), 1e-9))
    return float(world.gather(ratio)[0])


def measure_sum(
    world: World,
    device: torch.device,
    *,
    sizes: Sequence[int] = (1 << 20, 1 << 23, 1 << 26, 1 << 28),
    repeats: int = 5,
    transport: str | None = None,
) -> Link | None:
    """Return the link over which two ranks sum gradients as copies of a layer do (collective).

    None unless the ranks share a device: otherwise such sums are predicted from the link between the two ranks. A sum
    over two ranks takes 2 latency + bytes / bandwidth, as the simulator prices it.

    Ranks 0 and 1, 2 and 3, ... sum at the same time, each pair its own numbers, in buckets as in training: a plan that
    holds layers twice makes all ranks sum in the end of a step, and they share one link to the host.
    """
    if world.size < 2:
        return None
    program = lower(_plan(world.size, 0, 1), CostTable.uniform(num_layers=2, p2p_ms=0.01))
    mover = make_transport(transport, world, program, device, 120.0)
    mover.open(rank_program(program, world.rank))
    times: list[float] = []
    if mover.name == "cuda_ipc":
        first = world.rank - world.rank % 2
        paired = first + 1 < world.size
        group = summing(world.subgroup((first, first + 1)), mover, device, 120.0, bool) if paired else None
        for size in sizes:
            numbers = torch.zeros(size // 4 if paired else 0, dtype=torch.float32, device=device)
            took = []
            for _ in range(repeats + 2):
                _settle(world, device)
                clock = _Clock(device)
                works = [] if group is None else [group.all_reduce(b) for b in numbers.split(BUCKET_BYTES // 4)]
                for work in works:
                    work.wait(timedelta(seconds=120))
                took.append(clock.stop_ms())
            times.append(float(np.median(took[2:])))
        _settle(world, device)
        if group is not None:
            group.close()
    mover.close()
    if not times:
        return None
    slowest = np.max(world.gather(times), axis=0)
    link = fit(sizes, slowest.tolist())
    return Link(latency_ms=link.latency_ms / 2, ms_per_byte=link.ms_per_byte)


class _Clock:
    """Measures the time in milliseconds of the work that is issued between its construction and `stop_ms`."""

    def __init__(self, device: torch.device):
        self._device, self._event = device, None
        self._began = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def stop_ms(self) -> float:
        if self._event is None:
            return 1e3 * (time.perf_counter() - self._began)
        last = torch.cuda.Event(enable_timing=True)
        last.record()
        last.synchronize()
        return float(self._event.elapsed_time(last))


def _settle(world: World, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if world.control is not None:
        world.gather(None)


def fit(sizes: Sequence[float], times_ms: Sequence[float]) -> Link:
    """The link that fits these one-way times: least squares of relative errors, with both parts at least 0.

    >>> link = fit([1e3, 1e6, 1e7], [0.011, 1.01, 10.01])
    >>> round(link.latency_ms, 4), round(link.ms_per_byte * 1e6, 4)
    (0.01, 1.0)
    """
    x, y = np.asarray(sizes, float), np.maximum(np.asarray(times_ms, float), 1e-9)
    design = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    (latency, rate), *_ = np.linalg.lstsq(design, np.ones_like(y), rcond=None)
    if rate < 0:
        latency, rate = float(np.median(y)), 0.0
    if latency < 0:
        latency, rate = 0.0, float(np.median(y / x))
    return Link(latency_ms=float(latency), ms_per_byte=float(rate))


def _plan(ranks: int, a: int, b: int) -> Plan:
    orders: list[tuple[Op, ...]] = [() for _ in range(ranks)]
    orders[a] = tuple(op for m in range(BOUNCES) for op in (Op(0, "F", m), Op(0, "B", m)))
    orders[b] = tuple(op for m in range(BOUNCES) for op in (Op(1, "F", m), Op(1, "B", m)))
    return Plan(
        num_layers=2,
        num_ranks=ranks,
        num_micro_batches=BOUNCES,
        stages=(Stage(first=0, stop=1, rank=a), Stage(first=1, stop=2, rank=b)),
        orders=tuple(orders),
    )


def _bounce(
    world: World, device: torch.device, a: int, b: int, size: int, repeats: int, transport: str | None
) -> float:
    """Return the median one-way time in milliseconds on rank `a`, and 0 on all other ranks."""
    costs = CostTable.uniform(num_layers=2, p2p_ms=0.01)
    program = lower(_plan(world.size, a, b), costs)
    mine = rank_program(program, world.rank)
    mover = make_transport(transport, world, program, device, 120.0)
    mover.open(mine)
    tensor = torch.zeros(max(1, size // 4), dtype=torch.float32, device=device)
    times = []
    for k in range(repeats + 2):
        _settle(world, device)
        mover.begin_step()
        if world.rank == a:
            took = _ping(mover, mine, tensor, device)
            if k >= 2:
                times.append(took / (2 * BOUNCES))
        elif world.rank == b:
            _pong(mover, mine)
        for slot in mine.slots:
            if slot.sending:
                mover.release(slot)
        mover.end_step()
    _settle(world, device)
    mover.close()
    return float(np.median(times)) if times else 0.0


def _by_micro_batch(mine: RankProgram) -> list[tuple[Any, Any]]:
    """Return, for every micro-batch, the forward slot and the gradient slot of this rank."""
    forward = {s.op.micro_batch: s for s in mine.slots if s.forward}
    gradient = {s.op.micro_batch: s for s in mine.slots if not s.forward}
    return [(forward[m], gradient[m]) for m in sorted(forward)]


def _ping(mover: Any, mine: RankProgram, tensor: torch.Tensor, device: torch.device) -> float:
    clock = _Clock(device)
    for there, back in _by_micro_batch(mine):
        there.cell.output_message = mover.send_forward(there, tensor, [True])
        mover.post(back)
        tensor = mover.take_gradient(back)[0]
    return clock.stop_ms()


def _pong(mover: Any, mine: RankProgram) -> None:
    for there, back in _by_micro_batch(mine):
        mover.post(there)
        value = mover.take_forward(there)[0]
        mover.send_gradient(back, [value])

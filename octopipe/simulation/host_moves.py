"""Offloading of activations to host memory and back: which of them, and when, on two lanes concurrent with compute.

Knows: a rank's ops with their times without offloading, and how long the link to host memory needs for each stage. Does
not know: how a program is built (`lowering`), devices, how tensors are copied.

A stage that offloads copies its activations to the host after F (down) and back before I or B (up). Each direction is
an in-order lane: down in the order of the F ops, up in the order of the backwards. A move is defined by four points in
the rank's order:

- down begins when F has ended and the lane is free;
- `release`: the op before which the device memory is freed; it waits for down;
- `fetch`: the op before which memory is allocated again; up may begin once the preceding ops have ended and everything
  released there has been copied; where there is time enough, it begins together with that op (`with_op`), so that what
  the op receives from other ranks does not stand behind it in a copy engine;
- `back`, the backward, waits for up.

Release and fetch are chosen so that, according to the given times, no op waits for a lane. Among the activations that
may be offloaded, those with the longest lifetimes are chosen, as many as the lanes can copy in time. In a pipeline the
peak falls by more than the offloaded share, because long lifetimes overlap most (PipeOffload, arXiv 2503.01328,
section 3).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octopipe.costs.table import CostTable
from octopipe.plans.plan import B, F, I, Plan
from octopipe.plans.price import offload_bytes

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
MARGIN = 1.5
"""Moves are placed as if each took this many times its price. On an H200, a plan that used all the time of both lanes
ran 1.21 times as long as predicted; with this margin, 1.03 times."""
TRIED = 16
"""How many different numbers of moved activations are compared per rank."""


class HostMoves(NamedTuple):
    """The moves of a program: one entry per stage and micro-batch whose activations leave the device, rank after rank
    in the order of their F ops."""

    forward: Ints
    back: Ints
    """The I or B that needs the activations again."""
    release: Ints
    fetch: Ints
    nbytes: Floats
    ms: Floats
    """The time of one direction."""
    with_op: NDArray[np.bool_]
    """Whether the copy back (up) waits for everything that the op at `fetch` waits for."""

    @property
    def number(self) -> int:
        return int(self.forward.size)


class _Lanes(NamedTuple):
    """The candidates of one rank, with the times of its ops."""

    offset: int
    start: Floats
    end: Floats
    forward: Ints
    back: Ints
    ms: Floats


def moves_of(plan: Plan, costs: CostTable, start: Floats, end: Floats) -> HostMoves:
    """Choose the moves of a plan's stages, given the times of its ops without offloading."""
    link = costs.host_link
    assert link is not None  # `match` requires it
    t = plan.table()
    may = np.array([s.offload for s in plan.stages])
    forward = np.flatnonzero((t.kind == F) & may[t.stage]).astype(np.int32)
    cells = t.stage[forward], t.micro_batch[forward]
    back = np.maximum(t.index[I][cells], t.index[B][cells])
    nbytes = offload_bytes(plan, costs)[cells]
    return choose_moves(t.offsets, forward, back, nbytes, link.latency_ms + nbytes * link.ms_per_byte, start, end)


def choose_moves(
    offsets: Ints, forward: Ints, back: Ints, nbytes: Floats, ms: Floats, start: Floats, end: Floats
) -> HostMoves:
    """Choose the moves of all ranks. `forward`, `back`: the ops of everything that may be moved; `start`, `end`: the
    times of all ops."""
    found: list[Chosen] = []
    for rank in range(offsets.size - 1):
        lo, hi = int(offsets[rank]), int(offsets[rank + 1])
        mine = np.flatnonzero((forward >= lo) & (forward < hi))
        if mine.size:
            found.append(_of_rank(mine, lo, hi, forward, back, nbytes, ms, start, end))
    if not found:
        none = np.zeros(0, np.int32)
        return HostMoves(none, none, none, none, np.zeros(0), np.zeros(0), np.zeros(0, np.bool_))
    which, release, fetch, with_op = (np.concatenate(column) for column in zip(*found, strict=True))
    return HostMoves(
        forward[which].astype(np.int32),
        back[which].astype(np.int32),
        release.astype(np.int32),
        fetch.astype(np.int32),
        nbytes[which],
        ms[which],
        with_op.astype(np.bool_),
    )


Chosen = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]
"""Which candidates of a rank move, with `release`, `fetch` and `with_op` of each."""


def _of_rank(
    mine: NDArray[np.int64],
    lo: int,
    hi: int,
    forward: Ints,
    back: Ints,
    nbytes: Floats,
    ms: Floats,
    start: Floats,
    end: Floats,
) -> Chosen:
    """Choose, among one rank's candidates, the activations with the longest lifetimes, and as many of them as free the
    most memory for the most time (bytes times milliseconds)."""
    ms = MARGIN * ms
    able = mine[start[back[mine]] - end[forward[mine]] >= 2 * ms[mine]]
    by_life = able[np.argsort(end[forward[able]] - start[back[able]], kind="stable")]
    best, most = (np.zeros(0, np.int64),) * 3, 0.0
    for count in np.unique(np.linspace(1, by_life.size, TRIED).astype(np.int64)) if by_life.size else ():
        chosen = by_life[:count]
        chosen = chosen[np.argsort(forward[chosen], kind="stable")]
        release = fetch = chosen
        for _ in range(2):  # dropping the moves that do not fit only frees the lanes, so the others still fit
            release, fetch = _positions(_Lanes(lo, start[lo:hi], end[lo:hi], forward[chosen], back[chosen], ms[chosen]))
            if (release < fetch).all():
                break
            chosen = chosen[release < fetch]
        freed = float((nbytes[chosen] * np.maximum(start[lo + fetch] - start[lo + release], 0.0)).sum()) + 1e-9 * count
        if chosen.size and freed > most:
            best, most = (chosen, lo + release, lo + fetch), freed
    chosen, release, fetch = best
    lanes = _Lanes(lo, start[lo:hi], end[lo:hi], forward[chosen], back[chosen], ms[chosen])
    return chosen, release, fetch, _with_op(lanes, fetch - lo)


def _with_op(lanes: _Lanes, fetch: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which copies back can begin as late as the op at their `fetch` and still end before their backward
    starts, and so early that no later copy of the lane is late."""
    out = np.zeros(fetch.size, np.bool_)
    back = lanes.back - lanes.offset
    order = np.argsort(back, kind="stable")
    latest, following = np.empty(fetch.size), np.inf  # when a copy must have begun
    for k in order[::-1]:
        latest[k] = following = min(following, lanes.start[back[k]]) - lanes.ms[k]
    before = np.concatenate(([0.0], lanes.end))
    at, place = -np.inf, -1
    for k in order:
        late = max(at, lanes.start[fetch[k]])
        # If the copy before it in the lane waits at the same place, waiting as well costs nothing.
        follows = fetch[k] == place
        if follows or (fetch[k] < back[k] and late <= latest[k]):
            out[k], at, place = True, late + lanes.ms[k], int(fetch[k])
        else:
            at = max(at, before[fetch[k]]) + lanes.ms[k]
    return out


def _positions(lanes: _Lanes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the earliest release and the latest fetch of every candidate, as positions in the rank's order."""
    slack = 1e-9 * max(float(lanes.end[-1]), 1.0)
    down_end = _in_order(lanes.end[lanes.forward - lanes.offset], lanes.ms)
    up_start, at = np.empty(lanes.back.size), np.inf
    for k in np.argsort(-lanes.back, kind="stable"):
        at = min(at, lanes.start[lanes.back[k] - lanes.offset]) - lanes.ms[k]
        up_start[k] = at
    release = np.searchsorted(lanes.start, down_end - slack, side="left")
    release = np.maximum(release, lanes.forward - lanes.offset + 1)
    # When memory is free before an op: the ops in front of it have ended, and what is released there is copied.
    ready = np.concatenate(([0.0], lanes.end))
    np.maximum.at(ready, release, down_end)
    fetch = np.searchsorted(lanes.end, up_start + slack, side="right")
    fetch = np.minimum(fetch, lanes.back - lanes.offset)
    for k in np.flatnonzero(ready[fetch] > up_start + slack):
        while fetch[k] > 0 and ready[fetch[k]] > up_start[k] + slack:
            fetch[k] -= 1
    following = np.iinfo(np.int64).max
    for k in np.argsort(-lanes.back, kind="stable"):  # the lane's order: what is needed earlier is fetched earlier
        following = fetch[k] = min(fetch[k], following)
    return release, fetch


def _in_order(ready: Floats, ms: Floats) -> Floats:
    """Return when each item ends if items pass a lane one after the other, none before it is ready."""
    out, at = np.empty(ready.size), -np.inf
    for k in range(ready.size):
        at = out[k] = max(at, ready[k]) + ms[k]
    return out


def memory_times(moves: HostMoves, offsets: Ints, start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """Return when each move frees device memory and when it allocates it again, given the times of all ops."""
    down_end = np.empty(moves.number)
    rank = np.searchsorted(offsets, moves.forward, side="right")
    for r in np.unique(rank):
        mine = np.flatnonzero(rank == r)
        mine = mine[np.argsort(moves.forward[mine], kind="stable")]
        down_end[mine] = _in_order(end[moves.forward[mine]], moves.ms[mine])
    released = np.minimum(np.maximum(end[moves.release - 1], down_end), start[moves.release])
    ready = np.concatenate(([0.0], end))
    np.maximum.at(ready, moves.release, released)
    return released, ready[moves.fetch]


def with_moves(preds: Ints, moves: HostMoves, offsets: Ints) -> Ints:
    """Return a rendezvous graph with the moves added as further nodes: all copies down, then all copies up."""
    count, nodes = moves.number, preds.shape[0]
    if count == 0:
        return preds
    down = nodes + np.arange(count, dtype=np.int32)
    up = down + count
    rank = np.searchsorted(offsets, moves.forward, side="right")
    edges: dict[int, list[int]] = {}
    table = np.full((2 * count, 3), -1, np.int32)
    table[:count, 0] = moves.forward
    table[count:, 0] = down
    table[count:, 1] = moves.fetch - 1
    for column, rows, order in ((1, 0, np.argsort(moves.forward)), (2, count, np.argsort(moves.back))):
        lane = np.argsort(rank[order], kind="stable")
        order = order[lane]
        same = rank[order][1:] == rank[order][:-1]
        table[rows + order[1:][same], column] = nodes + rows + order[:-1][same]
    leaving: dict[int, list[int]] = {}
    for k in range(count):
        leaving.setdefault(int(moves.release[k]), []).append(int(down[k]))
        edges.setdefault(int(moves.back[k]), []).append(int(up[k]))
    for k in range(count):  # the memory that is allocated is what was released just before
        edges.setdefault(int(up[k]), []).extend(leaving.get(int(moves.fetch[k]), ()))
        if moves.with_op[k]:
            edges[int(up[k])].extend(int(p) for p in preds[moves.fetch[k]] if p >= 0)
    for op, downs in leaving.items():
        edges.setdefault(op, []).extend(downs)
    wide = max(preds.shape[1], 3)
    out = np.full((nodes + 2 * count, wide + max(map(len, edges.values()))), -1, np.int32)
    out[:nodes, : preds.shape[1]] = preds
    out[nodes:, :3] = table
    for node, more in edges.items():
        out[node, wide : wide + len(more)] = more
    return out

"""Tessel: search for a repetend, the period of a pipeline's steady state, then its warm-up and cool-down.

Lin et al., "Tessel: Boosting Distributed Execution of Large DNN Models via Flexible Schedule Search", HPCA 2024.
Rule: give the chain of one micro-batch's blocks non-increasing micro-batch ids by cutting it; every block once
per repetend, no overlap on a rank, dependencies kept, memory within the cap; the repetend with the least bubble
wins, then the one over the fewest micro-batches. Complete it with the shortest warm-up and cool-down, repeat
it for large m. The fast mode packs each rank's blocks without regard to dependencies (odd ranks in reverse) and
finds the ids in one scan of the chain.

Here: CP-SAT chooses the cuts together with the places instead of solving once per set of cuts; the period is
the busiest rank's work (no bubble), or longer where memory asks for it. Transfers count as delays. Placements
tried: one stage per rank, and two in V and in loop form; the best by simulation wins. Times of micro-batches of
different lengths are averaged. Backward stays whole unless option `split` is set. The search stops after
`time_limit_s` with the best it found.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.plans.price import static_bytes
from octopipe.search.systems.registry import Setting, require, system
from octopipe.search.systems.repetend import Blocks, Floats, Repetend, packed, packed_tightly, plan_of, serial
from octopipe.search.systems.repetend_solver import complete, cp_model, find_repetend
from octopipe.search.systems.shapes import even_sizes, loop, stages_from_sizes, wave
from octopipe.simulation.simulator import simulate

TIME_LIMIT_S = 12.0
SEARCH_SHARE = 0.3
"""Share of the time for finding repetends; the rest is for warm-up and cool-down."""
MOST_COMPLETED = 5
STRETCH = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 9.0)
"""Periods tried under a memory cap, as multiples of the busiest rank's work."""
PAPER = "Lin et al., HPCA 2024"


@system(
    name="tessel",
    title="Tessel",
    paper=PAPER,
    year=2024,
    tunes=("scheduling",),
    constraint="needs OR-tools (the exact extra)",
)
def tessel(setting: Setting) -> Plan:
    """Options `time_limit_s` (12) and `split` (False: backward whole)."""
    cp_model()
    limit = setting.option("time_limit_s", TIME_LIMIT_S)
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < float("inf"):
        raise OctoPipeError(f"tessel: time_limit_s is {limit}; give seconds > 0")
    m, begin = setting.num_micro_batches, time.monotonic()
    best = _Best(setting.costs)
    found: list[tuple[tuple[bool, float], Repetend, Floats]] = []
    placements = list(_placements(setting))
    for blocks in placements:
        room = _room(blocks, m)
        searched = _search(blocks, room, SEARCH_SHARE * limit / len(placements))
        # The fast mode's repetends span more micro-batches, which may be better if there are few micro-batches in all.
        found += [(best.offer(r.plan(m)), r, room) for r in (searched, *_packings(blocks))]
    found.sort(key=lambda entry: entry[0])
    contenders = [entry for entry in found if not entry[0][0]][:MOST_COMPLETED] or found[:1]
    for k, (_, repetend, room) in enumerate(contenders):
        left = limit - (time.monotonic() - begin)
        if left <= 0:
            break
        order = complete(repetend, m, room, left / (len(contenders) - k))
        if order is not None:
            best.offer(plan_of(repetend.of, m, order))
    if not best.fits:
        for blocks in placements:
            best.offer(serial(blocks).plan(m))
    return best.plan


@system(
    name="tessel-fast",
    title="Tessel (fast mode)",
    paper=PAPER,
    year=2024,
    tunes=("scheduling",),
)
def tessel_fast(setting: Setting) -> Plan:
    """Option `split` (False: backward whole)."""
    m, best = setting.num_micro_batches, _Best(setting.costs)
    placements = list(_placements(setting))
    for blocks in placements:
        for repetend in _packings(blocks):
            best.offer(repetend.plan(m))
    if not best.fits:
        for blocks in placements:
            best.offer(serial(blocks).plan(m))
    return best.plan


def _packings(blocks: Blocks) -> Iterator[Repetend]:
    """Yield the fast mode's repetends: with the odd ranks in reverse, as published, or the even ranks, or none."""
    for backwards in (range(1, blocks.num_ranks, 2), range(0, blocks.num_ranks, 2), range(0)):
        yield packed(blocks, backwards)


class _Best:
    """Keeps the fastest plan offered so far that fits; as long as none fits, the fastest of all."""

    def __init__(self, costs: CostTable):
        self._costs = costs
        self._score = (True, float("inf"))
        self._plan: Plan | None = None

    def offer(self, plan: Plan) -> tuple[bool, float]:
        """Keep the plan if it is better than the present one; return (whether it does not fit, step time)."""
        timeline = simulate(plan, self._costs, check=False)
        score = (not timeline.fits, timeline.step_ms)
        if self._plan is None or score < self._score:
            self._plan, self._score = plan, score
        return score

    @property
    def fits(self) -> bool:
        return not self._score[0]

    @property
    def plan(self) -> Plan:
        assert self._plan is not None
        return self._plan


def _placements(setting: Setting) -> Iterator[Blocks]:
    """Yield the blocks of every placement: one stage per rank and, if there are enough layers, two in V and loop
    form."""
    p, costs = setting.num_ranks, setting.costs
    require(bool(costs.layer_ms.any()), "tessel", "no layer takes any time, so there is no period to repeat")
    shapes = [loop(p, p)]
    if costs.num_layers >= 2 * p and p > 1:
        shapes += [wave(2 * p, p), loop(2 * p, p)]
    for ranks in shapes:
        stages = stages_from_sizes(even_sizes(costs, len(ranks)), ranks)
        yield Blocks.of(costs, p, stages, split=bool(setting.option("split", False)))


def _room(blocks: Blocks, m: int) -> Floats:
    """Return the bytes per rank for activations: the capacity minus weights and minus what buffers and workspaces add
    to the peak."""
    costs, plan = blocks.costs, packed_tightly(blocks, max(blocks.work)).plan(m)
    capacity = np.array([costs.capacity_bytes(r) for r in range(blocks.num_ranks)])
    if not np.any(np.isfinite(capacity)):
        return capacity
    bare = costs.replace(
        boundary_bytes=np.zeros(costs.num_layers),
        workspace_bytes=np.zeros(costs.num_layers),
        stash_bytes=np.minimum(costs.stash_bytes, costs.activation_bytes),
    )
    beside = simulate(plan, costs, check=False).peak_bytes - simulate(plan, bare, check=False).peak_bytes
    return capacity - static_bytes(plan, costs) - np.maximum(beside, 0.0)


def _search(blocks: Blocks, room: Floats, seconds: float) -> Repetend:
    """Return the repetend with the shortest of the periods tried that fits. If the solver finds none in time: one
    micro-batch at a time or, without a memory limit, a repetend of `packed_tightly`."""
    shortest = max(blocks.work)
    begin = time.monotonic()
    for tried, stretch in enumerate(STRETCH):
        left = seconds - (time.monotonic() - begin)
        if left <= 0:
            break
        found = find_repetend(blocks, round(shortest * stretch), room, left if tried > 2 else left / 2)
        if found is not None:
            return found
    if not np.any(np.isfinite(room)):
        return packed_tightly(blocks, shortest)
    return serial(blocks)

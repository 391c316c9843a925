"""Computes a bound for every split and an estimate for the promising ones.

Knows: in which order splits are estimated and which are kept. Does not know: how a split is priced (`pricing.py`),
simulated or tuned (`search.py`).

A split cannot be faster than its work divided evenly over all pipeline ranks, plus the shortest time to fill the
pipeline. Splits are estimated in the order of that bound until it exceeds the estimate of the worst split kept.
"""

from __future__ import annotations

import csv
import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations, zip_longest

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.measured import PUBLISHED_RUNS
from octopipe.search.planner.budget import Stop, never
from octopipe.search.planner.choice import fastest_if_tuned, simpler_first
from octopipe.search.planner.pricing import Candidate, Pricer
from octopipe.search.planner.runtimes import Runtime
from octopipe.search.planner.splits import Split, finer

KEPT = 24
SEEDS = 2
"""Number of splits of every pipeline size, tensor-parallel size and kind of sharding that are evaluated before the
others."""
CLIMBED = 6
"""Number of splits whose neighbours are evaluated: the best by estimate, and the best by the step time that tuning may
reach."""
REFINED = 8
"""Number of splits, the best ones, that are tried with every number of stages per rank."""
Say = Callable[[str], None]


def modes_of(recompute: str, runtime: Runtime, base: Setup | None = None) -> tuple[str, ...]:
    """The recomputation modes under which splits are estimated, in order of increasing recomputation."""
    if base is not None and base.offload_layers is not None:
        if recompute not in ("auto", "none"):
            raise OctoPipeError(f"offload_layers is for runs without recomputation; leave --recompute {recompute} out")
        return ("none",)
    if recompute == "auto":
        return ("none", "full") if runtime.recomputes_by_ops else ("none", "selective", "full")
    if recompute == "selective" and runtime.recomputes_by_ops:
        raise OctoPipeError("`octopipe train` recomputes whole layers only; give --recompute auto, full or none")
    return (recompute,)


def judge(
    pricer: Pricer,
    every: Sequence[Split],
    modes: tuple[str, ...],
    tell: Say,
    *,
    over: Stop = never,
    bounding: Stop | None = None,
    tuned: bool = True,
    always: Iterable[Split] = (),
) -> tuple[list[Candidate], int, float | None]:
    """Estimate splits in the order of their bounds; return the best ones, how many were judged, and `left_ms`.

    The best are the `KEPT` fastest splits that fit by estimate and, if `tuned`, the `KEPT` fastest by the time after
    tuning. `left_ms` is the lowest bound of the splits that were not judged because time was `over`: None if none of
    them may be better, 0 if some have no bound because `bounding` (default: `over`) ended its computation. Splits whose
    bound exceeds all kept estimates are not judged. Those of `always` come first, however short the time is, then
    `SEEDS` of every combination of pipeline size, tensor-parallel size and kind of sharding.
    """
    always = [split for split in dict.fromkeys(always) if pricer.may_fit(split)]
    queue, unbounded = _bounded(pricer, every, bounding or over)
    kinds: dict[tuple[int, int, bool], list[Split]] = {}
    for _, split in queue:
        kinds.setdefault((split.pp, split.tp, split.zero >= 2), []).append(split)
    seeds = [split for some in zip_longest(*(found[:SEEDS] for found in kinds.values())) for split in some if split]
    first = dict.fromkeys([*always, *seeds])
    heaps: tuple[list[tuple[float, int, Candidate]], ...] = ([], []) if tuned else ([],)
    seen: set[Split] = set()
    judged, left_ms = 0, None
    for bound, split in [*((0.0, split) for split in first), *queue]:
        if split in seen:
            continue
        if all(len(heap) >= KEPT and bound >= -heap[0][0] for heap in heaps):
            break
        if heaps[0] and judged >= len(always) and over():
            left_ms = min((ms for ms, other in queue if other not in seen), default=None)
            break
        seen.add(split)
        judged += 1
        if judged % 50 == 0:
            tell(f"{judged} of {len(every)} splits evaluated")
        found = pricer.candidate(split, modes)
        if found.fits:
            for heap, ms in zip(heaps, (found.step_ms, found.tuned_ms)):
                heapq.heappush(heap, (-ms, judged, found))
                if len(heap) > KEPT:
                    heapq.heappop(heap)
    kept = {number: candidate for heap in heaps for _, number, candidate in heap}
    if not kept and unbounded:  # no split with a bound fits, so compute the bounds of all to see whether any does
        return judge(pricer, every, modes, tell, over=over, bounding=never, tuned=tuned, always=always)
    left_ms = 0.0 if unbounded else left_ms
    return sorted(kept.values(), key=simpler_first), judged, left_ms


def _bounded(pricer: Pricer, every: Sequence[Split], over: Stop) -> tuple[list[tuple[float, Split]], bool]:
    """Return the splits that may fit, sorted by their bounds, and whether time ran out before all had a bound. The
    bounds are computed in random order, so that a part of the splits is a sample of all."""
    queue: list[tuple[float, Split]] = []
    for number, split in enumerate(random.Random(0).sample(every, len(every))):
        if number % 16 == 15 and over():
            return sorted(queue), True
        if pricer.may_fit(split):
            queue.append((pricer.bound_ms(split), split))
    return sorted(queue), False


def climbed(
    pricer: Pricer, kept: Sequence[Candidate], every: Iterable[Split], modes: tuple[str, ...], over: Stop = never
) -> tuple[list[Candidate], int]:
    """Return the kept splits with those found by hill climbing from them, and how many more were judged. The neighbours
    of the best splits are judged until all of them are known or time is `over`. For models with experts, bounds say
    little about the speed: a good split is often some steps away from those that were judged first."""
    known, seen = set(every), {c.split for c in kept}
    out, more = list(kept), 0
    while True:
        starts = {c.split for key in (simpler_first, fastest_if_tuned) for c in sorted(out, key=key)[:CLIMBED]}
        reached = dict.fromkeys(split for start in sorted(starts) for split in neighbours(start))
        near = [split for split in reached if split in known and split not in seen]
        if not near:
            break
        for split in near:
            if over():
                return sorted(out, key=simpler_first), more
            seen.add(split)
            more += 1
            found = pricer.candidate(split, modes) if pricer.may_fit(split) else None
            out += [found] if found is not None and found.fits else []
    return sorted(out, key=simpler_first), more


def neighbours(split: Split) -> list[Split]:
    """Return the splits one step away: a factor of two is moved between two kinds of parallelism, or one other size is
    doubled or halved, or the ZeRO level is changed."""
    out = []
    for grown, shrunk in permutations(("tp", "cp", "pp", "dp"), 2):
        if getattr(split, shrunk) % 2 == 0:
            sizes = {grown: 2 * getattr(split, grown), shrunk: getattr(split, shrunk) // 2}
            moved = replace(split, **sizes)
            out += [replace(moved, zero=zero) for zero in (1, 2, 3)]
            out += [replace(moved, vp=1)]
    for name in ("ep", "etp", "micro_batch_size", "vp", "hsdp"):
        size = getattr(split, name)
        out += [replace(split, **{name: other}) for other in (2 * size, size // 2) if other >= 1]
    return [*out, *(replace(split, zero=zero) for zero in (1, 2, 3) if zero != split.zero)]


def refined(
    pricer: Pricer, kept: Sequence[Candidate], modes: tuple[str, ...], runtime: Runtime, over: Stop = never
) -> list[Candidate]:
    """Return the kept splits and, for the best `REFINED` of them, every possible number of stages per rank."""
    splits_seen = {c.split for c in kept}
    out = list(kept)
    for candidate in kept[:REFINED]:
        m = pricer.global_batch // (candidate.split.dp * candidate.split.micro_batch_size)
        for split in finer(candidate.split, pricer.spec.num_layers, m, runtime):
            if split not in splits_seen and not over():
                splits_seen.add(split)
                out.append(pricer.candidate(split, modes))
    return sorted((c for c in out if c.fits), key=simpler_first)


def published_splits(pricer: Pricer, every: Iterable[Split], gpus: int, runtime: Runtime) -> list[Split]:
    """Return the splits of published runs of this model that divide this cluster and batch; they are tried whatever
    their bounds are. dp follows from the number of GPUs."""
    coarse = {_groups(split) for split in every}
    out = []
    for tp, cp, ep, pp, vp, size, zero in sorted(set(_published().get(pricer.spec.name, ()))):
        if gpus % (tp * cp * pp):
            continue
        dp = gpus // (tp * cp * pp)
        levels = runtime.zero_levels(pp)
        level = zero if zero in levels else levels[0]
        split = Split(tp=tp, cp=cp, ep=ep, pp=pp, dp=dp, vp=vp, micro_batch_size=size, zero=level)
        if pricer.global_batch % (dp * size) or _groups(split) not in coarse:
            continue
        m = pricer.global_batch // (dp * size)
        most = min(runtime.most.get("vp", vp), pricer.spec.num_layers // pp)
        if vp == 1 or (m % pp == 0 and vp <= most):
            out.append(split)
    return out


def _groups(split: Split) -> tuple[int, ...]:
    """Return the sizes of a split that determine its groups of GPUs; micro-batch size and vp are left out."""
    return split.tp, split.cp, split.ep, split.etp, split.pp, split.dp, split.zero, split.hsdp


@cache
def _published() -> dict[str, list[tuple[int, ...]]]:
    """Return for every model the sizes of its published runs: tp, cp, ep, pp, vp, micro-batch size, ZeRO level."""
    out: dict[str, list[tuple[int, ...]]] = {}
    with PUBLISHED_RUNS.open(newline="") as file:
        for row in csv.DictReader(file):
            tp, cp, ep, pp, vp, size = (int(row.get(name) or 1) for name in ("tp", "cp", "ep", "pp", "vp", "mbs"))
            zero = int(row.get("zero") or (3 if row.get("fsdp") == "1" else 1))
            out.setdefault(row["model"], []).append((tp, cp, ep, pp, vp if pp > 1 else 1, size, zero))
    return out

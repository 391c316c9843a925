"""Computes a bound for every split and an estimate for the promising ones.

Knows: in which order splits are estimated and which are kept. Does not know: how a split is priced (`pricing.py`),
simulated or tuned (`search.py`).

A split cannot be faster than its work divided evenly over all pipeline ranks, plus the shortest time to fill the
pipeline. Splits are estimated in the order of that bound until it exceeds the estimate of the worst split kept.
"""

from __future__ import annotations

import csv
import heapq
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import zip_longest

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.measured import PUBLISHED_RUNS
from octopipe.search.planner.budget import Stop, never
from octopipe.search.planner.choice import simpler_first
from octopipe.search.planner.pricing import Candidate, Pricer
from octopipe.search.planner.runtimes import Runtime
from octopipe.search.planner.splits import Split, finer

KEPT = 24
SEEDS = 2
"""Splits of every length of pipeline, tensor-parallel size and kind of sharding that are judged before the others."""
REFINED = 8
"""Splits that are tried with every number of stages per rank."""
Say = Callable[[str], None]


def modes_of(recompute: str, runtime: Runtime, base: Setup | None = None) -> tuple[str, ...]:
    """Ways of recomputing to judge splits under, the least first."""
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
    tuned: bool = True,
    always: Iterable[Split] = (),
) -> tuple[list[Candidate], int, float | None]:
    """The `KEPT` fastest splits that fit, by estimate, and as many by what tuning may come to; how many were judged;
    and, where time ended it, the lowest bound of those that were not (None: nothing is left that may be better).

    Splits whose bound is above all of those kept are never judged, nor, once time is `over`, those whose bounds are the
    worst. Those of `always` are judged before all others, and then some of every length of pipeline, tensor-parallel
    size and kind of sharding: where time is short, none of them goes unseen.
    """
    queue = sorted((pricer.bound_ms(split), split) for split in every if pricer.may_fit(split))
    kinds: dict[tuple[int, int, bool], list[Split]] = {}
    for _, split in queue:
        kinds.setdefault((split.pp, split.tp, split.zero >= 2), []).append(split)
    seeds = [split for some in zip_longest(*(found[:SEEDS] for found in kinds.values())) for split in some if split]
    first = [split for split in dict.fromkeys([*always, *seeds]) if pricer.may_fit(split)]
    heaps: tuple[list[tuple[float, int, Candidate]], ...] = ([], []) if tuned else ([],)
    seen: set[Split] = set()
    judged, left_ms = 0, None
    for bound, split in [*((0.0, split) for split in first), *queue]:
        if split in seen:
            continue
        if all(len(heap) >= KEPT and bound >= -heap[0][0] for heap in heaps):
            break
        if heaps[0] and over():
            left_ms = min((ms for ms, other in queue if other not in seen), default=None)
            break
        seen.add(split)
        judged += 1
        if judged % 50 == 0:
            tell(f"{judged} of {len(every)} splits judged")
        found = pricer.candidate(split, modes)
        if found.fits:
            for heap, ms in zip(heaps, (found.step_ms, found.tuned_ms)):
                heapq.heappush(heap, (-ms, judged, found))
                if len(heap) > KEPT:
                    heapq.heappop(heap)
    kept = {number: candidate for heap in heaps for _, number, candidate in heap}
    return sorted(kept.values(), key=simpler_first), judged, left_ms


def refined(
    pricer: Pricer, kept: Sequence[Candidate], modes: tuple[str, ...], runtime: Runtime, over: Stop = never
) -> list[Candidate]:
    """The best splits with every number of stages per rank."""
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
    """Splits that published runs of this model used, as far as they divide this cluster and batch: whatever the bounds
    say, they are among those tried. Replicas follow from the number of GPUs."""
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
    """A split's groups of GPUs, whatever its micro-batches and stages are."""
    return split.tp, split.cp, split.ep, split.etp, split.pp, split.dp, split.zero, split.hsdp


@cache
def _published() -> dict[str, list[tuple[int, ...]]]:
    """Model -> sizes of its published runs: tp, cp, ep, pp, vp, micro-batch size, ZeRO level."""
    out: dict[str, list[tuple[int, ...]]] = {}
    with PUBLISHED_RUNS.open(newline="") as file:
        for row in csv.DictReader(file):
            tp, cp, ep, pp, vp, size = (int(row.get(name) or 1) for name in ("tp", "cp", "ep", "pp", "vp", "mbs"))
            zero = int(row.get("zero") or (3 if row.get("fsdp") == "1" else 1))
            out.setdefault(row["model"], []).append((tp, cp, ep, pp, vp if pp > 1 else 1, size, zero))
    return out

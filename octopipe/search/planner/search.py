"""The search: every split bounded, the promising ones judged, the best few simulated and tuned.

Knows: how one budget is spent. Does not know: how results are shown (verbs/plan.py).

A split cannot be faster than its work divided evenly over all pipeline ranks, plus the shortest way of filling the
pipeline; splits are judged in the order of that bound until it exceeds the worst of the splits kept.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from octopipe.base.errors import DoesNotFitError, OctoPipeError, StoppedError
from octopipe.costs.cluster.setup import Setup
from octopipe.models.spec import ModelSpec
from octopipe.plans.plan import Plan
from octopipe.search.planner.pricing import Candidate, Pricer
from octopipe.search.planner.runtimes import RUNTIMES, Runtime
from octopipe.search.planner.splits import Split, finer, least_state_bytes, splits

KEPT, SIMULATED, TUNED = 24, 8, 2
TUNABLE_OPS = 400_000
"""Above so many ops a search within seconds has only a few moves."""
JUDGING, SIMULATING = 0.3, 0.15
"""Shares of the budget that judging and simulating may take; tuning gains more than either."""
LEFT_FOR_TUNING = 0.94
"""Share of the budget after which no search runs: the rest is for simulating what was found."""
MARGIN = 0.02
"""Splits this close to the fastest are within the model's own error of each other."""
SPARE = 0.97
"""A rank filled beyond this share of what it may use is at its limit."""
Say = Callable[[str], None]
Stop = Callable[[], bool]
"""Whether somebody has asked to end with what there is."""


def never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The ranking, and how much of the space was looked at."""

    best: Candidate
    ranked: tuple[Candidate, ...]
    today: Candidate | None
    splits: int
    judged: int
    cut_short: bool
    """Time was over before every split that may be among the best was judged."""
    seconds: float
    skipped: tuple[str, ...] = ()
    """What was left out for time or size, and what more time may bring, in whole sentences."""
    margin: float = 0.0
    """Splits within this share of the fastest count as equally fast; the simplest of them was chosen."""
    fastest: Candidate | None = None
    """The fastest where `best` is a simpler one."""
    interrupted: bool = False
    """Somebody ended the search; this is the best so far."""


def search(
    spec: ModelSpec,
    base: Setup,
    *,
    gpus: int,
    global_batch: int,
    fixed: Mapping[str, int] | None = None,
    today: Mapping[str, int] | None = None,
    runtime: Runtime = RUNTIMES["any"],
    recompute: str = "auto",
    budget_s: float = 30.0,
    margin: float = MARGIN,
    seed: int = 0,
    say: Say | None = None,
    stop: Stop = never,
) -> Found:
    """The best split of `gpus` GPUs for steps of `global_batch` sequences, `budget_s` seconds of tuning included."""
    began = time.monotonic()
    tell = say or (lambda words: None)
    pricer = Pricer(spec, base, global_batch, recompute_ops=runtime.recomputes_by_ops, overlaps=runtime.overlaps)
    modes = modes_of(recompute, runtime)
    every = list(splits(spec, base, gpus=gpus, global_batch=global_batch, fixed=fixed, runtime=runtime))
    if not every:
        given = ", ".join(f"{k} {v}" for k, v in (fixed or {}).items())
        raise OctoPipeError(
            f"no split of {gpus} GPUs divides {spec.name} and a global batch of {global_batch}"
            + (f" with {given}; give fewer sizes" if given else "; change the batch or the GPUs")
        )
    kept, judged, cut_short = judge(
        pricer, every, modes, tell, cpu_s=JUDGING * budget_s, tuned=runtime.tuned, stop=stop
    )
    if "vp" not in (fixed or {}) and not stop():
        kept = _refined(pricer, kept, modes, runtime)
    if not kept and stop():
        raise StoppedError("the search was stopped before it found a first split; give it more time")
    if not kept:
        raise DoesNotFitError(_nothing_fits(pricer, every, modes))
    tell("simulating the best few")
    simulated = _simulated(pricer, kept, recompute, SIMULATING * budget_s, stop)
    present = _today(pricer, base, gpus, today, runtime, recompute) if today else None
    tuned: list[Candidate] = []
    interrupted = stop()
    skipped = [f"Judging stopped after {judged} of {len(every)} splits: give a longer --budget."] * cut_short
    if runtime.tuned:
        until = began + LEFT_FOR_TUNING * budget_s
        worth = _varied([c for c in sorted(kept, key=_hoped_first) if c.split.pp > 1], TUNED, each=1)
        for i, candidate in enumerate(worth):
            if interrupted := interrupted or stop():
                break
            known = next((c for c in simulated if c.split == candidate.split), None)
            begun = known or pricer.simulated(candidate.split, recompute)
            if known is None:
                simulated.append(begun)
            if runtime.any_order:
                simulated += _other_orders(pricer, begun, until)
            tell(f"tuning {candidate.split.words()}")
            share = (until - time.monotonic()) / (len(worth) - i)
            better, why_not, interrupted = tune_candidate(pricer, begun, share, seed, runtime, recompute, stop)
            if better is not None:
                tuned.append(better)
            elif why_not:
                hope = 100 * (begun.step_ms / candidate.tuned_ms - 1.0)
                may = f" By estimate it may become up to {hope:.0f} % faster." if hope >= 1.0 else ""
                skipped.append(f"{candidate.split.words()} was not tuned: {why_not}.{may}")
    fitting = sorted((c for c in simulated if c.fits), key=lambda c: c.step_ms)
    if not fitting and not tuned and interrupted:
        raise StoppedError("the search was stopped before it found a split that fits; give it more time")
    if not fitting and not tuned:
        raise DoesNotFitError(_unfit(pricer, min(simulated, key=lambda c: c.peak_gib - c.limit_gib)))
    rivals = [*fitting, *tuned, *([present] if present is not None and present.fits else [])]
    fastest = min(rivals, key=lambda c: c.step_ms)
    best = simplest(rivals, margin)
    done = {c.split for c in simulated}
    rest = [c for c in kept if c.split not in done]
    # What was only estimated comes last: a closed form is not an answer beside a simulation.
    ranked = sorted(
        [*tuned, *simulated, *rest], key=lambda c: (c is not best, not c.fits, c.how == "estimated", c.step_ms)
    )
    return Found(
        best=best,
        ranked=tuple(ranked),
        today=present,
        splits=len(every),
        judged=judged,
        cut_short=cut_short,
        seconds=time.monotonic() - began,
        skipped=tuple(skipped),
        margin=margin,
        fastest=fastest if fastest is not best else None,
        interrupted=interrupted,
    )


def simplest(rivals: Sequence[Candidate], margin: float) -> Candidate:
    """Of the splits that are as fast as the fastest within `margin`, the one that is simplest to run and leaves memory
    free; of equally simple ones the fastest."""
    fastest = min(c.step_ms for c in rivals)
    close = [c for c in rivals if c.step_ms <= fastest * (1.0 + margin)]
    return min(close, key=lambda c: (complexity(c), c.step_ms))


def complexity(candidate: Candidate) -> float:
    """How much there is to get right: groups of GPUs by their size, a schedule of one's own, memory at its limit."""
    s = candidate.split
    groups = 2 * math.log2(s.tp * s.cp) + math.log2(s.pp * s.ep) + 0.5 * math.log2(s.vp)
    order = {"estimated": 0.0, "1f1b": 0.0, "interleaved": 0.0, "interleaved-overlap": 0.25, "layout": 0.5}.get(
        candidate.how, 1.0
    )
    memory = 2.0 if candidate.peak_gib > SPARE * candidate.limit_gib else 0.0
    return groups + order + memory + (candidate.recompute != "none") + 0.25 * (s.zero >= 2)


def _other_orders(pricer: Pricer, begun: Candidate, until: float) -> list[Candidate]:
    """The split under zero-bubble schedules, and those that hide the experts' exchange: what a tuned order has to beat,
    and what is left where it finds none."""
    out = []
    hiding = [s for s in pricer.overlaps if s != "interleaved-overlap" and begun.split.ep > 1]
    for system in ("zb-v", "zb-h1", *hiding):
        if time.monotonic() < until:
            found = pricer.scheduled(begun.split, system)
            out += [found] if found is not None else []
    return out


def modes_of(recompute: str, runtime: Runtime) -> tuple[str, ...]:
    """Ways of recomputing to judge splits under, the least first."""
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
    cpu_s: float = math.inf,
    tuned: bool = True,
    stop: Stop = never,
) -> tuple[list[Candidate], int, bool]:
    """The `KEPT` fastest splits that fit, by estimate, and as many by what tuning may come to; how many were judged;
    and whether others would have been. Splits whose bound is above all of those kept are never judged, nor, after
    `cpu_s` seconds of this process's own time, those whose bounds are the worst."""
    until = time.process_time() + cpu_s
    queue = sorted((pricer.bound_ms(split), split) for split in every if pricer.may_fit(split))
    heaps: tuple[list[tuple[float, int, Candidate]], ...] = ([], []) if tuned else ([],)
    judged, cut_short = 0, False
    for bound, split in queue:
        if all(len(heap) >= KEPT and bound >= -heap[0][0] for heap in heaps):
            break
        if stop() or (heaps[0] and time.process_time() > until):
            cut_short = True
            break
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
    return sorted(kept.values(), key=simpler_first), judged, cut_short


def _simulated(
    pricer: Pricer, kept: Sequence[Candidate], recompute: str, seconds: float, stop: Stop
) -> list[Candidate]:
    """The best by estimate, op by op: until none is left that its estimate puts ahead of the best, or time is over."""
    until = time.monotonic() + seconds
    out: list[Candidate] = []
    for candidate in _varied(kept, 2 * SIMULATED, each=2):
        best_ms = min((c.step_ms for c in out if c.fits), default=math.inf)
        settled = len(out) >= SIMULATED and candidate.step_ms >= best_ms
        if best_ms < math.inf and (settled or time.monotonic() > until or stop()):
            break
        out.append(pricer.simulated(candidate.split, recompute))
    return out


def _refined(pricer: Pricer, kept: Sequence[Candidate], modes: tuple[str, ...], runtime: Runtime) -> list[Candidate]:
    """The best splits with every number of stages per rank."""
    splits_seen = {c.split for c in kept}
    out = list(kept)
    for candidate in kept[:SIMULATED]:
        m = pricer.global_batch // (candidate.split.dp * candidate.split.micro_batch_size)
        for split in finer(candidate.split, pricer.spec.num_layers, m, runtime):
            if split not in splits_seen:
                splits_seen.add(split)
                out.append(pricer.candidate(split, modes))
    return sorted((c for c in out if c.fits), key=simpler_first)


def simpler_first(candidate: Candidate) -> float:
    """Step time, with a little more for every doubling of a group: of equals, the simpler split."""
    s = candidate.split
    return candidate.step_ms * (1 + 2e-3 * math.log2(s.tp * s.cp * s.cp) + 5e-4 * math.log2(s.pp * s.ep * s.vp))


def _hoped_first(candidate: Candidate) -> float:
    """The same of what tuning may come to."""
    return candidate.tuned_ms * simpler_first(candidate) / candidate.step_ms


def _varied(kept: Sequence[Candidate], number: int, *, each: int) -> list[Candidate]:
    """The first, but no more than `each` that differ in stages per rank alone."""
    seen: dict[tuple[int, ...], int] = {}
    out = []
    for candidate in kept:
        s = candidate.split
        key = (s.tp, s.cp, s.ep, s.pp, s.dp, s.micro_batch_size, s.zero)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= each:
            out.append(candidate)
    return out[:number]


def tune_candidate(
    pricer: Pricer,
    candidate: Candidate,
    budget_s: float,
    seed: int,
    runtime: Runtime,
    recompute: str = "auto",
    stop: Stop = never,
) -> tuple[Candidate | None, str, bool]:
    """The candidate's split tuned as far as the runtime can run it, None where that found nothing faster; the reason
    where no search ran; and whether somebody ended it."""
    from octopipe.search.tuner import tune

    plan, costs = candidate.plan, candidate.costs
    assert plan is not None and costs is not None
    ops = sum(map(len, plan.orders))
    if ops > TUNABLE_OPS:
        return None, f"its {ops:,} ops a step are more than a search of seconds improves", stop()
    if budget_s < 1.0:
        return None, "the budget was spent before", stop()
    start: Plan | None = None
    if candidate.fits and not any(s.recompute for s in plan.stages):
        start = replace(plan, pairs=frozenset())
    if costs.setup is not None and costs.setup.recompute == "full" and recompute == "auto" and runtime.name == "any":
        # The search knows better than a number of layers for all which ones to recompute.
        costs, start = pricer.costs(candidate.split, "selective"), None
    assert runtime.target is not None
    try:
        result = tune(
            costs,
            plan.num_ranks,
            plan.num_micro_batches,
            budget_s=budget_s,
            seed=seed,
            recompute=recompute == "auto" and runtime.target == "octopipe",
            start=start,
            target=runtime.target,
            progress=lambda seen: stop(),
        )
    except OctoPipeError:
        return None, "", stop()
    if candidate.fits and result.step_ms >= candidate.step_ms:
        return None, "", result.interrupted
    how = "layout" if runtime.target == "megatron" else "tuned"
    return pricer.of_plan(candidate.split, result.plan, costs, how), "", result.interrupted


def _today(
    pricer: Pricer,
    base: Setup,
    gpus: int,
    today: Mapping[str, int],
    runtime: Runtime,
    recompute: str,
) -> Candidate:
    """What the user runs now, under the same model."""
    sizes = {"tp": 1, "cp": 1, "ep": 1, "pp": 1, "vp": 1, "micro_batch_size": 1, "zero": base.zero, **today}
    product = sizes["tp"] * sizes["cp"] * sizes["pp"]
    dp = sizes.pop("dp", 0) or gpus // product
    if product * dp != gpus:
        named = ", ".join(f"{k} {today[k]}" for k in ("tp", "cp", "pp", "dp") if k in today) or "one GPU"
        need = f"is of {product * dp}" if "dp" in today else f"needs multiples of {product}"
        raise OctoPipeError(f"today's split ({named}) {need} GPUs, the cluster has {gpus}; check its sizes")
    if sizes["pp"] > 1:
        sizes["zero"] = min(sizes["zero"], 1)  # what every runtime makes of it under a pipeline
    split = Split(dp=dp, **sizes)
    if pricer.global_batch % (dp * split.micro_batch_size):
        raise OctoPipeError(
            f"today's dp {dp} and micro-batch size {split.micro_batch_size} do not divide the global batch "
            f"{pricer.global_batch}"
        )
    return pricer.simulated(split, recompute)


def _nothing_fits(pricer: Pricer, every: Sequence[Split], modes: tuple[str, ...]) -> str:
    """The leanest split and what it lacks."""
    leanest = min(
        every,
        key=lambda s: (
            least_state_bytes(s, pricer.dense, pricer.experts, pricer.base.gradient_bytes),
            s.micro_batch_size,
            s.vp,
        ),
    )
    return _unfit(pricer, pricer.candidate(leanest, modes))


def _unfit(pricer: Pricer, found: Candidate) -> str:
    return (
        f"no split of {found.setup.num_gpus} GPUs fits {pricer.spec.name}: even {found.split.words()} needs "
        f"{found.peak_gib:.1f} of {found.limit_gib:.1f} GiB; take more GPUs, or a smaller reserve or batch"
    )

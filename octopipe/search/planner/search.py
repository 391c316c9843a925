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
from typing import Any

import numpy as np

from octopipe.base.errors import DoesNotFitError, NotApplicableError, OctoPipeError, StoppedError
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.resolve import costs_of_setup
from octopipe.costs.table import CostTable
from octopipe.models.spec import ModelSpec, Moe
from octopipe.plans.plan import Plan
from octopipe.search.planner.estimate import Estimate, estimate
from octopipe.search.planner.runtimes import RUNTIMES, Runtime
from octopipe.search.planner.splits import Split, finer, least_state_bytes, splits
from octopipe.search.recompute import least_recomputing, plan_under, recomputing
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import GIB, Timeline

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
class Candidate:
    """A split with its numbers: estimated, simulated, or tuned."""

    split: Split
    setup: Setup
    how: str
    """estimated, tuned (any order), layout (layers per stage alone), or the published system it was simulated under."""
    step_ms: float
    tuned_ms: float
    """What tuning may come to, by estimate; of a simulated or tuned one its own step time."""
    tokens_per_gpu_per_second: float
    mfu: float | None
    bubble: float
    peak_gib: float
    limit_gib: float
    fits: bool
    recompute: str
    plan: Plan | None = None
    costs: CostTable | None = None
    timeline: Timeline | None = None

    def as_dict(self) -> dict[str, object]:
        names = ("tp", "cp", "ep", "pp", "dp", "vp", "micro_batch_size", "zero")
        more = ("how", "step_ms", "tokens_per_gpu_per_second", "mfu", "bubble", "peak_gib", "limit_gib", "fits")
        return {
            **{n: getattr(self.split, n) for n in names},
            **{n: getattr(self, n) for n in more},
            "recompute": self.recompute,
            "setup": self.setup.as_dict(),
        }


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


class Pricer:
    """Costs of splits, each priced once."""

    def __init__(self, spec: ModelSpec, base: Setup, global_batch: int, *, recompute_ops: bool = False):
        """`recompute_ops`: recomputation is R ops of the plan, not a matter of prices."""
        self.spec, self.base, self.global_batch, self.recompute_ops = spec, base, global_batch, recompute_ops
        parts = [part for layer in spec for part in layer.parts]
        self.experts = float(sum(part.expert_parameters for part in parts if isinstance(part, Moe)))
        self.dense = float(spec.training_parameters) - self.experts
        self._known: dict[Setup, CostTable] = {}
        self._work: dict[tuple[object, ...], tuple[float, float]] = {}

    def costs(self, split: Split, mode: str = "none", layers: int | None = None) -> CostTable:
        setup = split.setup(self.base, self.global_batch)
        setup = replace(setup, recompute=mode, recompute_layers=layers)  # type: ignore[arg-type]
        if setup not in self._known:
            self._known[setup] = costs_of_setup(self.spec, setup)
        return self._known[setup]

    def bound_ms(self, split: Split) -> float:
        """No order of this split's ops is faster: even work, and one micro-batch's way through the other ranks."""
        m = self.global_batch // (split.dp * split.micro_batch_size)
        # Without ZeRO-3 a layer's time does not depend on how many ranks and replicas there are.
        # ZeRO-3's gathers can only add to it.
        key = (split.tp, split.cp, split.ep, split.micro_batch_size, split.dp * split.cp % split.ep)
        if key not in self._work:
            costs = self.costs(replace(split, zero=0))
            self._work[key] = float(costs.layer_ms.sum()), float(min(costs.slowdown(r) for r in range(split.pp)))
        work, fastest = self._work[key]
        return fastest * (m * work / split.pp + (split.pp - 1) / (split.pp * split.vp) * work)

    def may_fit(self, split: Split) -> bool:
        """Is there room for the state alone?"""
        limit = max((self.base.rank_memory_bytes() if not self.base.nodes else ()) or (math.inf,))
        return least_state_bytes(split, self.dense, self.experts, self.base.gradient_bytes) < limit

    def candidate(self, split: Split, modes: tuple[str, ...]) -> Candidate:
        m = self.global_batch // (split.dp * split.micro_batch_size)
        found = estimate(lambda *how: self.costs(split, *how), split.pp, split.vp, m, modes=modes)
        return self._candidate(split, self.costs(split), "estimated", found)

    def _candidate(self, split: Split, costs: CostTable, how: str, found: Estimate) -> Candidate:
        m = self.global_batch // (split.dp * split.micro_batch_size)
        rate = costs.throughput(split.pp, m, found.step_ms)
        assert costs.setup is not None
        return Candidate(
            split=split,
            setup=costs.setup,
            how=how,
            step_ms=found.step_ms,
            tuned_ms=found.tuned_ms,
            tokens_per_gpu_per_second=float(rate["tokens_per_gpu_per_second"] or 0.0),
            mfu=rate["mfu"],
            bubble=found.bubble,
            peak_gib=found.peak_gib,
            limit_gib=found.limit_gib,
            fits=found.fits,
            recompute=found.recompute,
        )

    def simulated(self, split: Split, recompute: str = "auto") -> Candidate:
        """The split under (interleaved) 1F1B, op by op."""
        m = self.global_batch // (split.dp * split.micro_batch_size)
        system = "interleaved" if split.vp > 1 else "1f1b"
        options: dict[str, Any] = {"chunks": split.vp} if split.vp > 1 else {}

        def build(costs: CostTable) -> Plan:
            return build_plan(system, costs, split.pp, m, **options)

        if self.recompute_ops:
            costs = self.costs(split)
            plan = build(costs)
            if recompute != "none":
                plan = recomputing(plan) if recompute == "full" else least_recomputing(plan, costs)
        else:
            plan, costs = plan_under(recompute, build, lambda *how: self.costs(split, *how))
        return self.of_plan(split, plan, costs, system)

    def scheduled(self, split: Split, system: str) -> Candidate | None:
        """The split under a published schedule that needs a runtime for any order; None where it does not apply."""
        m = self.global_batch // (split.dp * split.micro_batch_size)
        try:
            costs = self.costs(split)
            plan = build_plan(system, costs, split.pp, m)
            found = self.of_plan(split, plan, costs, system)
            if not found.fits and not self.recompute_ops:
                costs = self.costs(split, "selective")
                found = self.of_plan(split, build_plan(system, costs, split.pp, m), costs, system)
        except (NotApplicableError, DoesNotFitError):
            return None
        return found if found.fits else None

    def of_plan(self, split: Split, plan: Plan, costs: CostTable, how: str) -> Candidate:
        timeline = simulate(plan, costs, check=False)
        rate = costs.throughput(plan.num_ranks, plan.num_micro_batches, timeline.step_ms)
        full = int(np.argmax(timeline.peak_bytes))
        assert costs.setup is not None
        again = sum(len(s.recomputed_layers) for s in plan.stages) + (costs.setup.recompute_layers or 0)
        mode = f"{again} layer{'s' if again > 1 else ''}" if again else costs.setup.recompute
        return Candidate(
            split=split,
            setup=costs.setup,
            how=how,
            step_ms=timeline.step_ms,
            tuned_ms=timeline.step_ms,
            tokens_per_gpu_per_second=float(rate["tokens_per_gpu_per_second"] or 0.0),
            mfu=rate["mfu"],
            bubble=timeline.bubble_ratio,
            peak_gib=float(timeline.peak_bytes[full]) / GIB,
            limit_gib=timeline.capacity_bytes[full] / GIB,
            fits=timeline.fits,
            recompute=mode,
            plan=plan,
            costs=costs,
            timeline=timeline,
        )


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
    pricer = Pricer(spec, base, global_batch, recompute_ops=runtime.recomputes_by_ops)
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
                simulated += _zero_bubble(pricer, begun, until)
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
    order = {"estimated": 0.0, "1f1b": 0.0, "interleaved": 0.0, "layout": 0.5}.get(candidate.how, 1.0)
    memory = 2.0 if candidate.peak_gib > SPARE * candidate.limit_gib else 0.0
    return groups + order + memory + (candidate.recompute != "none") + 0.25 * (s.zero >= 2)


def _zero_bubble(pricer: Pricer, begun: Candidate, until: float) -> list[Candidate]:
    """The split under zero-bubble schedules: what a tuned order has to beat, and what is left where it finds none."""
    out = []
    for system in ("zb-v", "zb-h1"):
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
    start: Plan | None = plan if candidate.fits and not any(s.recompute for s in plan.stages) else None
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

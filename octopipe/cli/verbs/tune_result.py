"""How the result of `octopipe tune` is told: what one gains, against what, in which set-up, and what to do next.

Knows: words, tables and the JSON of a result. Does not know: flags or how the search works.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octopipe.cli.verbs.common import counted

if TYPE_CHECKING:
    from rich.console import Console

    from octopipe.costs.table import CostTable
    from octopipe.search.tuner import TuneResult
    from octopipe.simulation.timeline import Timeline

GIB = float(1 << 30)
RIVALS_S = 0.5
"""Time for building published systems that the search has not built itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rivals:
    """1F1B and the fastest published system that fits, in the same setting."""

    baseline_ms: float
    """1F1B, its backward split as the tuned plan's is; not a number where it has no plan."""
    baseline_fits: bool
    best: str
    """Empty where no published system fits."""
    best_ms: float
    complete: bool
    """All systems were built (but those whose own search takes long)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Everything that is told."""

    result: TuneResult
    timeline: Timeline
    setup: dict[str, Any]
    rate: Mapping[str, float | None]
    """Tokens, TFLOP/s and share of the peak per GPU; None where they are not known."""
    rivals: Rivals
    model: str | None
    """MODEL as it was named, where it can be trained; None for a file of times."""
    output: str | None


def gap_words(gap: float) -> str:
    """`1.25 %`; never a negative zero.

    >>> gap_words(-1e-9)
    '0.00 %'
    """
    return f"{max(100.0 * gap, 0.0) + 0.0:.2f} %" if gap < 5e-5 else f"{100.0 * gap:.2f} %"


def rivals(costs: CostTable, num_ranks: int, num_micro_batches: int, result: TuneResult) -> Rivals:
    """Step times of 1F1B and of the best published system; what the search built is not built again."""
    from octopipe.search.algorithm1.starts import one_f_one_b_plan, published
    from octopipe.simulation.simulator import simulate

    plan = one_f_one_b_plan(costs, num_ranks, num_micro_batches)
    reference = simulate(plan, costs, check=False)
    known = {name: ms for name, ms in result.systems.items() if math.isfinite(ms)}
    if reference.fits:
        known["1f1b"] = reference.step_ms
    # Whoever has ended the search does not wait for the others either.
    until, complete = time.monotonic() + (0.0 if result.interrupted else RIVALS_S), True
    for name, other in published(
        costs, num_ranks, num_micro_batches, until=until, skip=frozenset(result.systems) | {"1f1b"}
    ):
        timeline = simulate(other, costs, check=False)
        if timeline.fits:
            known[name] = timeline.step_ms
    if time.monotonic() >= until:
        complete = False
    best = min(known, key=lambda name: known[name], default="")
    return Rivals(
        baseline_ms=reference.step_ms,
        baseline_fits=reference.fits,
        best=best,
        best_ms=known.get(best, math.nan),
        complete=complete,
    )


def setup_of(costs: CostTable, num_ranks: int, num_micro_batches: int) -> dict[str, Any]:
    """The set-up behind the numbers, as it was resolved from the flags; in words too."""
    known = costs.setup.as_dict() if costs.setup is not None else {}
    return {
        **known,
        "model": costs.model,
        "pp": num_ranks,
        "micro_batches": num_micro_batches,
        "tokens_per_micro_batch": costs.tokens_per_micro_batch,
        "memory_gib_per_rank": [costs.capacity_bytes(r) / GIB for r in range(num_ranks)],
        "words": f"{costs.model} on {costs.setup.words()}" if costs.setup is not None else costs.model,
    }


def summary(told: Told) -> dict[str, Any]:
    """The result as one JSON object, without the plan itself."""
    result, timeline, other = told.result, told.timeline, told.rivals
    return {
        "setup": told.setup,
        "step_ms": result.step_ms,
        "lower_bound_ms": result.lower_bound_ms,
        "bound": result.bound_name,
        "bound_of": result.plans.as_dict(),
        "gap": max(result.gap, 0.0),
        "optimal": result.optimal,
        "baseline": {
            "system": "1f1b",
            "step_ms": other.baseline_ms,
            "fits": other.baseline_fits,
            "speedup": other.baseline_ms / result.step_ms if result.step_ms > 0 else None,
        },
        "best_system": {
            "system": other.best or None,
            "step_ms": other.best_ms,
            "speedup": other.best_ms / result.step_ms if other.best and result.step_ms > 0 else None,
            "all_systems": other.complete,
        },
        **told.rate,
        "peak_memory_gib": list(timeline.peak_gib),
        "fits": timeline.fits,
        "hidden_share": result.hidden_share,
        "overlappable_share": result.overlappable_share,
        "method": result.method,
        "seconds": result.seconds,
        "iterations": result.iterations,
        "phase_iterations": result.phase_iterations,
        "interrupted": result.interrupted,
        "mean_jittered_ms": result.mean_jittered_ms,
        "explanation": result.explanation,
        "notes": list(result.notes),
        "num_stages": len(result.plan.stages),
        "partition": list(result.plan.partition),
        "placement": [s.rank for s in result.plan.stages],
        "recompute": [bool(s.recompute) for s in result.plan.stages],
        "log": [s.as_dict() for s in result.log],
    }


def tell(told: Told, out: Console) -> None:
    """The result in words."""
    result, plan = told.result, told.result.plan
    out.print(told.setup["words"], markup=False)
    out.print(f"step time {result.step_ms:.2f} ms{_gain(told)}", markup=False)
    if (tokens := told.rate["tokens_per_gpu_per_second"]) is not None:
        mfu = told.rate["mfu"]
        used = f", {100 * mfu:.1f} % MFU" if mfu is not None else ""
        out.print(f"{tokens:,.0f} tokens/s per GPU{used}", markup=False)
    proven = f"; proven optimal of {result.plans.words}" if result.optimal else ""
    out.print(
        f"{gap_words(result.gap)} above the bound {result.lower_bound_ms:.2f} ms ({result.bound_name}) "
        f"on {result.plans.words}{proven}",
        markup=False,
    )
    if result.mean_jittered_ms is not None:
        out.print(f"mean over jittered layer times {result.mean_jittered_ms:.2f} ms")
    out.print(result.explanation, markup=False)
    out.print(memory_line(told.timeline), markup=False)
    if told.timeline.overlap.communications:
        out.print(
            f"transfers: {result.hidden_share:.0%} of sends and receives wholly behind computation, "
            f"{result.overlappable_share:.0%} at least in part",
            markup=False,
        )
    again = sum(bool(s.recompute) for s in plan.stages)
    more = f", {again} of them recompute" if again else ""
    if copied := len(plan.replicas()):
        more += f", {copied} layers on several ranks"
    out.print(
        f"{len(plan.stages)} stages on {counted(plan.num_ranks, 'rank')}{more}; "
        f"{result.iterations:,} moves in {result.seconds:.1f} s, method {result.method}",
        markup=False,
    )
    for note in result.notes:
        out.print(f"note: {note}", markup=False)
    if result.interrupted:
        out.print("interrupted: this is the best plan so far")
    if told.output:
        name = shlex.quote(told.output)
        out.print(f"plan written to {told.output}", markup=False)
        out.print(f"next: octopipe report {name} -o report.html", markup=False)
        if told.model is not None:
            out.print(f"      octopipe train {shlex.quote(told.model)} --plan {name}", markup=False)
        # The text formats of other trainers know no layer on two ranks.
        out.print(f"      octopipe export {name} --to {'perfetto' if plan.replicas() else 'pytorch'}", markup=False)
    else:
        out.print("next: the same command with -o plan.json keeps the plan; then octopipe report plan.json")


def _gain(told: Told) -> str:
    """`: 1.31x 1F1B (745.3 ms), 1.09x mist (620.0 ms), the best published system here`."""
    other, step_ms = told.rivals, told.result.step_ms
    if not step_ms > 0:
        return ""
    parts = []
    if math.isfinite(other.baseline_ms):
        fits = "" if other.baseline_fits else ", which does not fit"
        parts.append(f"{other.baseline_ms / step_ms:.2f}x 1F1B ({other.baseline_ms:.2f} ms{fits})")
    if other.best:
        which = "the best published system here" if other.complete else "the best published system built in time"
        parts.append(f"{other.best_ms / step_ms:.2f}x {other.best} ({other.best_ms:.2f} ms), {which}")
    else:
        parts.append("no published system fits")
    return ": " + ", ".join(parts)


def memory_line(timeline: Timeline) -> str:
    """Memory of every rank against its limit."""
    parts = []
    for peak, capacity in zip(timeline.peak_gib, timeline.capacity_bytes, strict=True):
        limit = capacity / GIB
        parts.append(f"{peak:.1f} of {limit:.1f}" if math.isfinite(limit) else f"{peak:.1f}")
    if not any(timeline.peak_gib):
        return "memory: not known (the costs hold no bytes)"
    return "memory per rank (GiB): " + ", ".join(parts)

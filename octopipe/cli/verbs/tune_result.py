"""The output of `octopipe tune`: the gain over other systems, the set-up, and suggested next commands.

Knows: text, tables and the JSON of a result. Does not know: flags or how the search works.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from octopipe.base.display import milliseconds
from octopipe.cli.verbs.common import counted
from octopipe.cli.verbs.numbers import after_words, contended_numbers, contended_words, path_words

if TYPE_CHECKING:
    from rich.console import Console

    from octopipe.costs.table import CostTable
    from octopipe.search.tuner import TuneResult
    from octopipe.simulation.timeline import Timeline

GIB = float(1 << 30)
RIVALS_S = 0.5
"""Seconds for building the published systems that the search has not built itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """The step time of a published system in the same setting, in one of its two modes."""

    system: str
    split_backward: bool
    """Whether its backward runs as I and W, as in the tuned plan; False: as `simulate` runs it by default."""
    step_ms: float
    """NaN if the system has no plan."""
    fits: bool
    copies: bool = False
    """Whether the plan has copies of layers on several ranks."""

    def numbers(self, step_ms: float) -> dict[str, Any]:
        """Return the JSON object for the system; `step_ms` is the step time of the tuned plan."""
        gain = self.step_ms / step_ms if step_ms > 0 and math.isfinite(self.step_ms) else None
        return {
            "system": self.system,
            "split_backward": self.split_backward,
            "step_ms": self.step_ms if math.isfinite(self.step_ms) else None,
            "fits": self.fits,
            "speedup": gain,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Rivals:
    """1F1B in both modes, and the fastest published system that fits."""

    baseline: Rival
    """1F1B as published; its step time is the one that `simulate` and `compare` print."""
    baseline_split: Rival
    best: Rival | None
    """The fastest published system in its faster mode; None if none fits in memory."""
    complete: bool
    """Whether all systems were built in time (except those whose own search takes long)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOutput:
    """Everything that the output of `octopipe tune` is made from."""

    result: TuneResult
    timeline: Timeline
    setup: dict[str, Any]
    rate: Mapping[str, float | None]
    """Tokens, TFLOP/s and share of the peak per GPU; values that are not known are None."""
    rivals: Rivals
    model: str | None
    """MODEL as given on the command line if it can be trained; None for a file of times."""
    plan_file: str | None
    target: str = "octopipe"
    """The runtime that the plan was searched for."""
    contended: Timeline | None = None
    predicts: bool = False
    """Whether the plan's layers include multi-token prediction, as one layer."""
    forks: bool = False
    """Whether they include it as a separate path."""


def gap_words(gap: float) -> str:
    """Format the gap as `1.25 %`, without a negative zero.

    >>> gap_words(-1e-9)
    '0.00 %'
    """
    return f"{max(100.0 * gap, 0.0) + 0.0:.2f} %" if gap < 5e-5 else f"{100.0 * gap:.2f} %"


def rivals(costs: CostTable, num_ranks: int, num_micro_batches: int, result: TuneResult) -> Rivals:
    """Return step times of 1F1B and of the best published system; systems that the search built are not built again."""
    from octopipe.search.algorithm1.starts import published
    from octopipe.simulation.simulator import simulate

    sizes = (num_ranks, num_micro_batches)
    known = {name: ms for name, ms in result.systems.items() if math.isfinite(ms)}
    plain = _rival("1f1b", costs, *sizes, split=False)
    split = _split(plain, known.get("1f1b", math.nan)) or _rival("1f1b", costs, *sizes, split=True)
    if split.fits:
        known["1f1b"] = split.step_ms
    # After an interruption of the search, do not wait for the other systems.
    until, complete = time.monotonic() + (0.0 if result.interrupted else RIVALS_S), True
    for name, other in published(costs, *sizes, until=until, skip=frozenset(result.systems) | {"1f1b"}):
        timeline = simulate(other, costs, check=False)
        if timeline.fits:
            known[name] = timeline.step_ms
    if time.monotonic() >= until:
        complete = False
    found = []
    if (name := min(known, key=lambda name: known[name], default="1f1b")) != "1f1b":
        # The search has times with split backward; as published, a system may need less memory but never less time.
        as_published = _rival(name, costs, *sizes, split=False)
        found = [r for r in (as_published, _split(as_published, known[name])) if r is not None and r.fits]
    found += [r for r in (plain, split) if r.fits]
    best = min(found, key=lambda r: r.step_ms, default=None)
    return Rivals(baseline=plain, baseline_split=split, best=best, complete=complete)


def _split(as_published: Rival, split_ms: float) -> Rival | None:
    """Return the system with split backward and this step time.

    None if the time alone does not show that this mode exists and fits: it is not finite, or no shorter than the step
    time as published.
    """
    if as_published.fits and not split_ms < as_published.step_ms:
        return None
    if not math.isfinite(split_ms):
        return None
    return replace(as_published, split_backward=True, step_ms=split_ms, fits=True)


def _rival(name: str, costs: CostTable, num_ranks: int, num_micro_batches: int, *, split: bool) -> Rival:
    """Simulate a published system as it was published, or with its backward split."""
    from octopipe.base.errors import OctoPipeError
    from octopipe.search.systems import build_plan
    from octopipe.simulation.simulator import simulate

    try:
        plan = build_plan(name, costs, num_ranks, num_micro_batches, split_backward=split or None)
    except (OctoPipeError, ImportError):
        return Rival(system=name, split_backward=split, step_ms=math.nan, fits=False)
    timeline = simulate(plan, costs, check=False)
    return Rival(
        system=name,
        split_backward=plan.splits_backward,
        step_ms=timeline.step_ms,
        fits=timeline.fits,
        copies=bool(plan.replicas()),
    )


def setup_of(costs: CostTable, num_ranks: int, num_micro_batches: int) -> dict[str, Any]:
    """Return the set-up behind the numbers, as resolved from the flags, with a description in words."""
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


def summary(output: TuneOutput) -> dict[str, Any]:
    """Return the result as one JSON object, without the plan itself."""
    result, timeline, other = output.result, output.timeline, output.rivals
    return {
        "setup": output.setup,
        "step_ms": result.step_ms,
        "lower_bound_ms": result.lower_bound_ms,
        "bound": result.bound_name,
        "bound_of": result.plans.as_dict(),
        "gap": max(result.gap, 0.0),
        "optimal": result.optimal,
        "makespan_ms": timeline.makespan_ms,
        **contended_numbers(output.contended),
        "baseline": other.baseline.numbers(result.step_ms),
        "baseline_split": other.baseline_split.numbers(result.step_ms),
        "best_system": {
            **(other.best.numbers(result.step_ms) if other.best else dict.fromkeys(("system", "step_ms", "speedup"))),
            "all_systems": other.complete,
        },
        **output.rate,
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


def print_result(output: TuneOutput, out: Console) -> None:
    """Print the result."""
    result, plan = output.result, output.result.plan
    out.print(output.setup["words"], markup=False)
    out.print(f"step {milliseconds(result.step_ms)}{after_words(output.timeline)}", markup=False)
    for line in gain_lines(output):
        out.print(f"  {line}", markup=False)
    if output.contended is not None:
        out.print(contended_words(output.contended), markup=False)
    if (tokens := output.rate["tokens_per_gpu_per_second"]) is not None:
        mfu = output.rate["mfu"]
        used = f", {100 * mfu:.1f} % MFU" if mfu is not None else ""
        out.print(f"{tokens:,.0f} tokens/s per GPU{used}", markup=False)
    proven = "; proven to be the fastest of them" if result.optimal else ""
    out.print(
        f"{gap_words(result.gap)} above the lower bound {milliseconds(result.lower_bound_ms)} ({result.bound_name}) "
        f"for {result.plans.words}{proven}",
        markup=False,
    )
    if result.mean_jittered_ms is not None:
        out.print(f"mean over jittered layer times {milliseconds(result.mean_jittered_ms)}")
    out.print(result.explanation, markup=False)
    out.print(memory_line(output.timeline), markup=False)
    if output.timeline.overlap.communications:
        out.print(
            f"transfers: {result.hidden_share:.0%} of sends and receives fully hidden behind computation, "
            f"{result.overlappable_share:.0%} at least in part",
            markup=False,
        )
    again = sum(bool(s.recompute) for s in plan.stages)
    more = f", {again} of them recompute" if again else ""
    if copied := len(plan.replicas()):
        more += f", {counted(copied, 'layer')} on several ranks"
    if cut := plan.shards():
        more += f", {counted(len(cut), 'layer')} cut into shards"
    out.print(
        f"{len(plan.stages)} stages on {counted(plan.num_ranks, 'rank')}{more}; "
        f"{result.iterations:,} moves in {result.seconds:.1f} s, method {result.method}",
        markup=False,
    )
    if words := path_words(plan):
        out.print(words, markup=False)
    for note in result.notes:
        out.print(f"note: {note}", markup=False)
    if result.interrupted:
        out.print("interrupted: this is the best plan so far")
    if output.plan_file:
        name = shlex.quote(output.plan_file)
        out.print(f"plan written to {output.plan_file}", markup=False)
        out.print(f"next: octopipe report {name} -o report.html", markup=False)
        if output.predicts:
            out.print(
                "the plan counts the model's multi-token prediction as one layer, as Megatron-LM has it; for `octopipe "
                "train --mtp`, tune with --mtp, or tune a profile (octopipe profile --mtp)",
                markup=False,
            )
        elif output.model is not None and output.target == "octopipe":
            more = " --mtp" if output.forks else ""
            out.print(f"      octopipe train {shlex.quote(output.model)} --plan {name}{more}", markup=False)
        # The text formats of other runtimes support neither copies of layers, nor forked paths, nor host memory.
        target = {"torch": "torch-csv", "megatron": "megatron"}.get(output.target, "torch-csv")
        out.print(
            f"      octopipe export {name} --to "
            f"{'perfetto' if plan.replicas() or plan.forks or plan.offloads else target}",
            markup=False,
        )
    else:
        out.print("next: the same command with -o plan.json keeps the plan; then octopipe report plan.json")


def gain_lines(output: TuneOutput) -> list[str]:
    """Return one line per system, such as `1.52x the speed of 1F1B as published (1074.0 ms)`, with remarks."""
    other, step_ms = output.rivals, output.result.step_ms
    if not step_ms > 0:
        return []
    rows = [r for r in (other.baseline, other.baseline_split) if math.isfinite(r.step_ms)]
    lines = list(dict.fromkeys(_gain(r, step_ms) for r in rows))  # if memory allows no split, both are one plan
    best = other.best
    if best is None:
        return [*lines, "no published system fits in memory"]
    which = "the fastest published system that fits"
    if not other.complete:
        which += ", among those built in time"
    if best in rows:
        at = rows.index(best)
        lines[at] += f", {which}"
        return lines
    why = ""
    if best.step_ms < step_ms and best.copies and not output.result.plans.copies:
        why = "; it holds layers on two ranks, which this search excluded (--copies includes it)"
    elif best.step_ms < step_ms and output.target != "octopipe":
        why = f"; {output.target} cannot run it"
    return [*lines, f"{_gain(best, step_ms)}, {which}{why}"]


def _gain(rival: Rival, step_ms: float) -> str:
    name = "1F1B" if rival.system == "1f1b" else rival.system
    mode = "with its backward split into I and W" if rival.split_backward else "as published"
    fits = "" if rival.fits else ", which does not fit in memory"
    return f"{rival.step_ms / step_ms:.2f}x the speed of {name} {mode} ({milliseconds(rival.step_ms)}{fits})"


def memory_line(timeline: Timeline) -> str:
    """Return the memory of every rank with its limit, as one line."""
    parts = []
    for peak, capacity in zip(timeline.peak_gib, timeline.capacity_bytes, strict=True):
        limit = capacity / GIB
        parts.append(f"{peak:.1f} of {limit:.1f}" if math.isfinite(limit) else f"{peak:.1f}")
    if not any(timeline.peak_gib):
        return "memory: not known (the costs contain no sizes)"
    return "memory per rank (GiB): " + ", ".join(parts)

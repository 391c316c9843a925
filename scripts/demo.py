"""`make demo`: what OctoPipe does, in less than two minutes on two cores.

1. Every published system on a real model, side by side.
2. The tuned plan for it, how far from a proven bound it is, and a page to look at.
3. A real training run on this machine: two processes, 1F1B against a plan tuned for what was just measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import write_whole
from octopipe.cli.verbs.common import console
from octopipe.cli.verbs.compare import show
from octopipe.costs.resolve import resolve_costs
from octopipe.models.spec import Embedding, Head, ModelSpec
from octopipe.models.zoo import preset
from octopipe.plans.file import save_plan
from octopipe.search.comparison import Result, compare
from octopipe.search.tuner import Progress, TuneResult, tune
from octopipe.simulation.simulator import simulate

if TYPE_CHECKING:
    from rich.status import Status

    from octopipe.costs.table import CostTable
    from octopipe.plans.plan import Plan
    from octopipe.runtime.training.job import TrainJob, TrainResult

MODEL, GPU, TP = "nemotron-h-56b", "h800", 8
SETTING = {"model": MODEL, "gpu": GPU, "tp": TP}
PP, MICRO_BATCHES = 8, 8
SOLVERS = {"tessel": {"time_limit_s": 3.0}}
BUSY = 0.25
"""Where other programs use more cores than this, the demo says that its measured times mean little."""
OUT = Path("out")
out = console()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=15.0, help="seconds of tuning (default: 15)")
    parser.add_argument("--steps", type=int, default=12, help="training steps (default: 12)")
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    began = time.monotonic()
    try:
        costs, results = published_systems()
        tuned_plan(costs, results, args.budget)
        train_for_real(args.steps)
    except OctoPipeError as error:
        out.print(f"octopipe: {error}", soft_wrap=True)
        return 2
    out.rule(style="dim")
    out.print(f"{time.monotonic() - began:.0f} s. Next: `octopipe --help`, README.md, docs/", style="dim")
    return 0


def part(number: int, title: str) -> None:
    out.print()
    out.rule(f"[bold]{number}. {title}", align="left", style="dim")


def published_systems() -> tuple[CostTable, list[Result]]:
    part(1, "Published systems on Nemotron-H 56B, 64 H800 GPUs (predicted)")
    costs = resolve_costs(MODEL, pp=PP, gpu=GPU, tp=TP)
    result = compare(costs, PP, MICRO_BATCHES, options=SOLVERS)
    show(result)
    return costs, [r for r in result.results if r.plan is not None]


def tuned_plan(costs: CostTable, published: list[Result], budget_s: float) -> None:
    part(2, f"The tuned plan: partition, placement and order together, {budget_s:g} s of search")
    best = published[0]
    result = tuned(costs, best.plan, budget_s)
    base = next(r for r in published if r.system == "1f1b")
    out.print(
        f"[bold green]{result.step_ms:.1f} ms a step[/]: [bold]{base.step_ms / result.step_ms:.2f}x[/] over 1F1B "
        f"({base.step_ms:.1f} ms), {best.step_ms / result.step_ms:.2f}x over the best published system "
        f"({best.system}, {best.step_ms:.1f} ms)"
    )
    out.print(
        f"Lower bound for {result.plans.words}: {result.lower_bound_ms:.1f} ms, this plan is {result.gap:.1%} above it."
    )
    if result.explanation:
        out.print(result.explanation, style="dim")
    save_plan(result.plan.with_extra(setting=SETTING), OUT / "plan.json")
    assert base.plan is not None and best.plan is not None
    plans = {"1F1B": base.plan, f"{best.system} (best published)": best.plan, "tuned": result.plan}
    report(costs, plans, OUT / "report.html")


def report(costs: CostTable, plans: dict[str, Plan], path: Path) -> None:
    from octopipe.views.report.entry import Entry
    from octopipe.views.report.page import report_html

    entries = [
        Entry(timeline=simulate(plan, costs, label=label), plan=plan, costs=costs, label=label)
        for label, plan in plans.items()
    ]
    write_whole(path, report_html(entries).encode())
    out.print(f"Look at it: [bold]{path}[/] (one page, works offline). The plan: {OUT / 'plan.json'}")


def tuned(costs: CostTable, start: Plan | None, budget_s: float) -> TuneResult:
    """Tune from a plan (and the tuner's own starts), with a live line where there is a terminal."""
    assert start is not None
    live: AbstractContextManager[Status | None] = out.status("tuning") if out.is_terminal else nullcontext()
    with live as status:

        def tell(p: Progress) -> None:
            if status is not None:
                status.update(f"tuning {p.seconds:.0f}/{p.budget_s:.0f} s  best {p.best_ms:.2f} ms  gap {p.gap:.1%}")

        ranks, micro_batches = start.num_ranks, start.num_micro_batches
        return tune(costs, ranks, micro_batches, budget_s=budget_s, start=start, progress=tell)


def busy_cores(seconds: float = 0.5) -> float:
    """Cores that other programs use just now; 0 where the system does not say. The load average would not do: it
    remembers for minutes what was installed before the demo began."""

    def used() -> float:
        times = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        return sum(times) - times[3] - times[4]  # all but idle and waiting for disks

    try:
        before, began = used(), time.monotonic()
        time.sleep(seconds)
        return (used() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def train_for_real(steps: int) -> None:
    part(3, "Training for real: two processes on this machine, 1F1B against a tuned plan")
    if importlib.util.find_spec("torch") is None:
        out.print('Skipped: torch is not installed; pip install "octopipe[torch]" and run this again.')
        return
    from octopipe.runtime.training.job import TrainJob

    spec = narrow_model()
    job = TrainJob(spec=spec, nproc=2, steps=steps, micro_batches=6, seq=128, timeout_s=60.0)
    busy = busy_cores()
    plain, mine = run([job, replace(job, tune_s=5.0)])
    busy = max(busy, busy_cores())
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("plan", "predicted ms", "measured ms", "bubble", "tokens/s", "first loss", "last loss"):
        table.add_column(title, justify="left" if title == "plan" else "right", no_wrap=True)
    for name, result in (("1F1B", plain), ("tuned", mine)):
        table.add_row(name, *numbers_of(result, job.tokens_per_step))
    out.print(
        f"{spec.pattern}: {spec.training_parameters / 1e6:.1f} M parameters, {job.num_micro_batches} micro-batches of "
        f"{job.seq} tokens, {steps} steps"
    )
    out.print(table)
    out.print("measured: median of the pipeline's times, without the optimizer; tokens/s: over that time", style="dim")
    off = max(abs(a - b) / b for a, b in zip(mine.losses, plain.losses))
    equal = "equal bit for bit" if off == 0 else f"equal to {off:.0e}, the rounding of float32 sums"
    measured, predicted = plain.pipeline_ms / mine.pipeline_ms, (plain.predicted_ms or 0) / (mine.predicted_ms or 1)
    out.print(
        f"[bold green]{measured:.2f}x[/] measured, {predicted:.2f}x predicted; losses of all {steps} steps are {equal}."
    )
    if busy > BUSY:
        out.print(
            f"Other programs used {busy:.1f} of {os.cpu_count()} cores just before or after the training, so these "
            "times say little about the plans.",
            style="dim",
        )


def numbers_of(result: TrainResult, tokens_per_step: int) -> tuple[str, ...]:
    """A row of the table. Tokens per second are over the very time that stands beside them."""
    return (
        f"{result.predicted_ms:.1f}",
        f"{result.pipeline_ms:.1f}",
        f"{result.bubble_ratio:.1%}",
        f"{1e3 * tokens_per_step / result.pipeline_ms:,.0f}",
        f"{result.losses[0]:.6f}",
        f"{result.losses[-1]:.6f}",
    )


def narrow_model() -> ModelSpec:
    """Nemotron-H in small: 12 of its layers, narrow enough for a CPU, under a head that is not: as in the large
    models, the vocabulary is the layer that an even cut puts on one rank."""
    words = 24_576
    spec = preset("nemotron-h-8b").scaled(0.04, num_layers=14)
    first, *inner, last = spec.layers
    assert isinstance(first, Embedding) and isinstance(last, Head)
    return ModelSpec(name=spec.name, layers=(replace(first, vocab=words), *inner, replace(last, vocab=words)))


def run(jobs: list[TrainJob]) -> list[TrainResult]:
    """A step of each job in turn, so that whatever else the machine does, it does to both."""
    from octopipe.cli.verbs.train_result import step_line
    from octopipe.runtime.training.job import EvalReport, Phase, StepReport
    from octopipe.runtime.training.train import train_in_turns

    live: AbstractContextManager[Status | None] = out.status("starting ranks") if out.is_terminal else nullcontext()
    with live as status:

        def tell(news: Phase | StepReport | EvalReport) -> None:
            if status is not None and not isinstance(news, EvalReport):
                status.update(news.text if isinstance(news, Phase) else step_line(news, jobs[0].steps))

        results = train_in_turns(jobs, tell)
    if results is None:
        raise OctoPipeError("the demo starts its ranks itself; run it without torchrun")
    return results


if __name__ == "__main__":
    raise SystemExit(main())

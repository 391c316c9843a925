"""The output of `octopipe train`: the progress line during a run, and the summary or the JSON object at its end.

Knows: the text and numbers of the reports. Does not know: flags (`train.py`), or how training works.
"""

from __future__ import annotations

import argparse
import math
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from octopipe.cli.verbs.common import console, named
from octopipe.cli.verbs.numbers import predicted_numbers, without_contention_words
from octopipe.cli.verbs.runnable import code_words
from octopipe.cli.verbs.screen import LINE_EVERY_S

if TYPE_CHECKING:
    from octopipe.runtime.training.job import EvalReport, Phase, StepReport, TrainJob, TrainResult

GIB = float(1 << 30)


class Screen:
    """Shows progress: a live line on a terminal, plain lines at intervals on a pipe."""

    def __init__(self, job: TrainJob, *, quiet: bool):
        self.job, self.quiet = job, quiet
        self._err = console(stderr=True)
        self._live: Any = self._err.status("starting ranks") if self._err.is_terminal else nullcontext()
        self._out = console()
        self._every = max(1, job.steps // 20)
        self._told_s = time.monotonic()

    def __enter__(self) -> Screen:
        self._status = self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def show(self, news: Phase | StepReport | EvalReport) -> None:
        from octopipe.runtime.training.job import EvalReport, Phase

        if isinstance(news, EvalReport):
            if not self.quiet:
                self._out.print(eval_line(news, self.job.steps), soft_wrap=True)
            return
        text = news.text if isinstance(news, Phase) else step_line(news, self.job.steps)
        if isinstance(news, Phase) and news.notice:
            self._err.print(f"note: {text}", soft_wrap=True, markup=False, highlight=False)
        elif self._status is not None:
            self._status.update(text)
        elif isinstance(news, Phase):
            if not self.quiet and time.monotonic() - self._told_s >= LINE_EVERY_S:
                self._err.print(text, style="dim", soft_wrap=True, markup=False, highlight=False)
                self._told_s = time.monotonic()
        elif not self.quiet and self._is_due(news.step):
            self._out.print(text, soft_wrap=True)

    def _is_due(self, step: int) -> bool:
        return step % self._every == 0 or step in (1, self.job.steps)


def step_line(r: StepReport, steps: int) -> str:
    """Format a step report as one line: step, loss, learning rate, speed, idle time, memory."""
    memory = " ".join(f"{b / GIB:.2f}" for b in r.memory_bytes)
    mfu = "" if r.mfu is None else f"  MFU {r.mfu:.1%}"
    return (
        f"step {r.step:>{len(str(steps))}}/{steps}  loss {r.loss:.4f}  lr {r.lr:.2e}  {r.step_ms:.0f} ms  "
        f"{r.tokens_per_s:,.0f} tokens/s{mfu}  bubble {r.bubble_ratio:.1%}  memory {memory} GiB"
    )


def eval_line(r: EvalReport, steps: int) -> str:
    return (
        f"step {r.step:>{len(str(steps))}}/{steps}  evaluation: loss {r.loss:.4f}, perplexity {r.perplexity:.2f} "
        f"over {r.tokens:,} tokens"
    )


def summary(job: TrainJob, result: TrainResult) -> dict[str, Any]:
    """Return the run as one JSON object."""
    predicted = result.predicted
    return {
        "model": result.plan.model or None,
        "layers": code_words(job.spec),
        "system": result.plan.extra.get("system"),
        "parameters": result.parameters,
        "precision": job.mode.precision,
        "num_ranks": result.plan.num_ranks,
        "num_micro_batches": result.plan.num_micro_batches,
        "first_step": result.first_step,
        "steps": len(result.reports),
        "loss": result.losses[-1] if result.reports else None,
        "losses": result.losses,
        "step_ms": _finite(result.step_ms),
        "pipeline_ms": _finite(result.pipeline_ms),
        "predicted_ms": result.predicted_ms,
        "reduced_ms": _finite(result.reduced_ms),
        "predicted_reduced_ms": result.predicted_reduced_ms,
        "bubble_ratio": _finite(result.bubble_ratio),
        "predicted": _predicted(result),
        "predicted_bubble_ratio": None if predicted is None else predicted.bubble_ratio,
        "tokens_per_s": result.reports[-1].tokens_per_s if result.reports else None,
        "memory_gib": [b / GIB for b in result.reports[-1].memory_bytes] if result.reports else [],
        "checkpoint": result.checkpoint,
        "notices": list(result.notices),
        "mfu": result.reports[-1].mfu if result.reports else None,
        "evaluations": [
            {"step": e.step, "loss": e.loss, "perplexity": _finite(e.perplexity), "tokens": e.tokens}
            for e in result.evaluations
        ],
        "history": [
            {
                "step": r.step,
                "loss": r.loss,
                "lr": r.lr,
                "grad_norm": r.grad_norm,
                "step_ms": r.step_ms,
                "pipeline_ms": r.pipeline_ms,
                "reduced_ms": r.reduced_ms,
                "bubble_ratio": r.bubble_ratio,
            }
            for r in result.reports
        ],
    }


def print_result(job: TrainJob, result: TrainResult, args: argparse.Namespace) -> None:
    """Print the result of a run, the change of the loss first."""
    out = console()
    if not result.reports:
        out.print(f"nothing to do: the checkpoint is already at step {result.first_step - 1}, --steps is {job.steps}")
        return
    first, last = result.reports[0], result.reports[-1]
    name = str(result.plan.extra.get("system") or args.plan or "plan")
    out.print(
        f"[bold]loss {first.loss:.4f} -> {last.loss:.4f}[/] in steps {first.step} to {last.step}: "
        f"{named(name)}, {job.nproc} ranks"
    )
    for evaluation in result.evaluations[-1:]:
        out.print(
            f"evaluation: loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.2f} after step "
            f"{evaluation.step}, {evaluation.tokens:,} tokens"
        )
    out.print(f"{named(job.spec.name)}: {code_words(job.spec)}", soft_wrap=True)
    batch = f"{job.num_micro_batches} micro-batches of {job.micro_batch_size} x {job.seq} tokens"
    if job.lengths:
        batch = f"{job.num_micro_batches} micro-batches a pipeline of {len(job.lengths)} sequences in all, "
        batch += f"{min(job.lengths)} to {max(job.lengths)} tokens"
    out.print(f"{result.parameters / 1e6:.1f} M parameters, {batch}, {job.mode.precision}")
    out.print(f"pipeline: measured {result.pipeline_ms:.1f} ms, bubble {result.bubble_ratio:.1%}")
    if result.predicted is not None:
        predicted_ms, idle = result.predicted.makespan_ms, result.predicted.bubble_ratio
        off = predicted_ms / result.pipeline_ms - 1
        out.print(f"         predicted {predicted_ms:.1f} ms, bubble {idle:.1%} ({off:+.1%})")
        numbers = _predicted(result)
        if numbers is not None and (note := without_contention_words(numbers)):
            out.print(note, style="dim", soft_wrap=True)
    if reductions := _reduction_words(result):
        out.print(reductions)
    speed = 1e3 * job.tokens_per_step / result.step_ms
    out.print(f"whole step {result.step_ms:.1f} ms, {speed:,.0f} tokens/s (medians)")
    for text, path in (
        ("checkpoint", result.checkpoint),
        ("plan", args.output),
        ("measured timeline", args.timeline),
    ):
        if path:
            out.print(f"{text}: {named(path)}", soft_wrap=True)


def _reduction_words(result: TrainResult) -> str:
    """Return a line on the time with gradient reductions; empty if nothing is reduced."""
    measured_ms, predicted = result.reduced_ms, result.predicted
    predicts = predicted is not None and predicted.reduced_ms > predicted.makespan_ms
    if not predicts and measured_ms <= result.pipeline_ms:
        return ""
    words = f"with the reduction of gradients: measured {measured_ms:.1f} ms"
    if predicted is None or not predicts:
        return words
    return f"{words}, predicted {predicted.reduced_ms:.1f} ms ({predicted.reduced_ms / measured_ms - 1:+.1%})"


def _predicted(result: TrainResult) -> dict[str, float] | None:
    """Return the prediction under the names that `simulate`, `tune` and `validate` use for its parts."""
    if result.predicted is None or result.profile is None:
        return None
    return predicted_numbers(result.plan, result.profile, result.predicted)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

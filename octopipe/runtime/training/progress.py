"""Progress reports of a step: times, idle time, memory, utilisation.

Knows: how the values of all ranks become one report, the model's FLOPs and the peak of known GPUs. Does not know: when
a run reports (`train.py`).
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

import torch

from octopipe.costs.analytic.flops import model_flops
from octopipe.costs.cluster.hardware import GPUS
from octopipe.models.spec import ModelSpec
from octopipe.runtime.measure.layer_sizes import planned_spec
from octopipe.runtime.measured import REDUCE
from octopipe.runtime.pipeline import Pipeline
from octopipe.runtime.ranks.reduce import wait_for
from octopipe.runtime.ranks.world import all_reduce
from octopipe.runtime.training.job import StepReport, TrainJob
from octopipe.runtime.training.run_parts import memory_bytes


class Progress:
    """The properties of a run that every report needs."""

    def __init__(self, job: TrainJob, *, one_clock: bool):
        """`one_clock`: whether all ranks of the pipeline are on one host."""
        self._one_clock, self._tokens = one_clock, job.tokens_per_step
        self._flops, self._peak = step_flops(job), peak_flops(job)

    def report(self, rows: list[list[float]], *, step_ms: float, **known: Any) -> StepReport:
        """Return a report on a step. `rows`: the result of `exchange`; `known`: the other fields of the report."""
        span_s, bubble = span_and_bubble(rows, one_clock=self._one_clock)
        reduced_s = span_with_reductions(rows, one_clock=self._one_clock)
        return StepReport(
            step_ms=step_ms,
            pipeline_ms=1e3 * span_s,
            reduced_ms=1e3 * reduced_s,
            bubble_ratio=bubble,
            memory_bytes=tuple(row[3] for row in rows),
            tokens_per_s=1e3 * self._tokens / step_ms,
            mfu=None if self._peak is None else self._flops / (1e-3 * step_ms * self._peak),
            **known,
        )


def exchange(pipe: Pipeline, timeout_s: float) -> list[list[float]]:
    """Return, for every rank of the pipeline: first start, last end, time at work (s), memory (bytes), end of the
    gradient reductions. Collective."""
    started, ended, extras = pipe.recorder.all_times()
    first, last = min(started, default=math.inf), max(ended, default=-math.inf)
    reduced = max([last, *(end for name, _, end in extras if name == REDUCE)])
    row = [first, last, sum(ended) - sum(started), memory_bytes(pipe.device), reduced]
    table = torch.zeros(pipe.world.size, len(row), dtype=torch.float64)
    table[pipe.rank] = torch.tensor(row, dtype=torch.float64)
    if pipe.world.control is not None:
        work = all_reduce(pipe.world.control, table)
        wait_for(work, timeout_s, "the exchange of step times")
    rows: list[list[float]] = table.tolist()
    return rows


def span_and_bubble(rows: list[list[float]], *, one_clock: bool) -> tuple[float, float]:
    """Return the seconds from the first op to the last one, and the share of the ranks' time in between that was
    idle."""
    active = [row for row in rows if math.isfinite(row[0])]
    if one_clock:
        span_s = max(row[1] for row in active) - min(row[0] for row in active)
    else:  # clocks differ: take the longest span of a single rank
        span_s = max(row[1] - row[0] for row in active)
    return span_s, 1.0 - sum(row[2] for row in active) / (len(rows) * span_s) if span_s > 0 else 0.0


def span_with_reductions(rows: list[list[float]], *, one_clock: bool) -> float:
    """Return the seconds from the first op to the end of the last gradient reduction."""
    active = [row for row in rows if math.isfinite(row[0])]
    if one_clock:
        return max(row[4] for row in active) - min(row[0] for row in active)
    return max(row[4] - row[0] for row in active)


def step_flops(job: TrainJob) -> float:
    """Return the model's own FLOPs in one step: three times those of the forward, without recomputation.

    They are computed from the planner's layers if it knows the model layer by layer, otherwise as 6 FLOPs per parameter
    and token.
    """
    spec = job.spec
    known = spec if isinstance(spec, ModelSpec) else None if spec.shortened else planned_spec(spec)
    if job.lengths:
        return sum(_flops(known, spec.training_parameters, length) for length in job.lengths)
    sequences = job.dp * job.num_micro_batches * job.micro_batch_size
    return sequences * _flops(known, spec.training_parameters, job.seq)


def _flops(spec: ModelSpec | None, parameters: int, seq: int) -> float:
    return 6.0 * parameters * seq if spec is None else model_flops(spec, seq=seq)


def peak_flops(job: TrainJob) -> float | None:
    """Return the peak FLOP/s of all GPUs of the run together, in the precision in which its layers compute; None if it
    is not known."""
    if job.device != "cuda" or not job.mode.precision.startswith(("bf16", "autocast")) or not torch.cuda.is_available():
        return None
    each = known_peak(torch.cuda.get_device_name())
    return None if each is None else each * min(job.nproc, torch.cuda.device_count() * _hosts(job))


def _hosts(job: TrainJob) -> int:
    return max(1, job.nproc // int(os.environ.get("LOCAL_WORLD_SIZE", job.nproc)))


def known_peak(name: str) -> float | None:
    """Return the bf16 FLOP/s of a GPU, given the name that the driver reports; None if the GPU is not known.

    >>> known_peak("NVIDIA H100 80GB HBM3") == 989e12, known_peak("Tesla T4")
    (True, None)
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    found = [gpu for key, gpu in GPUS.items() if key in words]
    return found[0].bf16_tflops * 1e12 if len(found) == 1 else None

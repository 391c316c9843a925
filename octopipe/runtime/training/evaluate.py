"""Evaluation: the mean loss over held-out tokens, and the perplexity.

Knows: how a fixed set of samples runs through a pipeline with any micro-batches, with every target counted once. Does
not know: when a run evaluates (`train.py`).

Samples are taken in the order of the file, either all of them or a given number from the start, so every evaluation of
a run uses the same tokens. An incomplete last batch is filled with samples whose targets are ignored.
"""

from __future__ import annotations

from typing import Any

import torch

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.batches import to_device
from octopipe.runtime.pipeline import Pipeline
from octopipe.runtime.training.data.batches import IGNORED, micro_batches
from octopipe.runtime.training.data.corpus import Windows
from octopipe.runtime.training.data.samples import Samples
from octopipe.runtime.training.data.source import Source
from octopipe.runtime.training.job import EvalReport, TrainJob
from octopipe.runtime.training.step_batches import sample_batches


def evaluation_samples(source: Source, job: TrainJob) -> int:
    """Return the number of samples of an evaluation."""
    if isinstance(source, Windows):
        return min(source.windows, job.eval_samples or source.windows)
    if isinstance(source, Samples):
        return min(len(source), job.eval_samples or len(source))
    if job.eval_samples is None:
        raise OctoPipeError("synthetic data has no end; give --eval-samples")
    return job.eval_samples


def evaluate(pipe: Pipeline, source: Source, job: TrainJob, step: int) -> EvalReport:
    """Return the loss of the samples with the pipeline's current parameters (collective over all pipelines)."""
    total, count = 0.0, 0
    samples = evaluation_samples(source, job)
    each = job.num_micro_batches * job.micro_batch_size
    size, replica = job.dp * each, pipe.world.replica
    program = pipe.executor.program
    pipe.eval()
    try:
        for first in range(0, samples, size):
            count += sum(_targets(source, k, job.seq) for k in range(first, min(first + size, samples)))
            inputs: Any = None
            targets: Any = None
            if program.needs_batch or program.needs_target:
                inputs, targets = _batch(source, first + replica * each, samples, job)
                inputs, targets = (to_device(part, pipe.device) for part in (inputs, targets))
            # Every micro-batch's loss is the sum over its targets (items: 1); the pipeline gives their mean.
            total += float(pipe.evaluate(inputs, targets)) * job.num_micro_batches
    finally:
        pipe.train()
    total *= job.dp
    return EvalReport(step=step, loss=total / count, tokens=count, samples=samples)


def _batch(source: Source, first: int, stop: int, job: TrainJob) -> tuple[list[Any], list[Any]]:
    """Return the micro-batches of one pipeline; samples from number `stop` on only fill the batch."""
    size = job.micro_batch_size
    if isinstance(source, Samples):
        inputs, targets = sample_batches(job, source, first, 1.0, stop)
        return inputs, [{**target, "tokens_alone": True} for target in targets]
    inputs, targets = micro_batches(_Wrapped(source, stop), first, job.num_micro_batches, size, 1.0)
    for m, target in enumerate(targets):
        if isinstance(target, torch.Tensor):
            target = targets[m] = {"labels": target, "items": torch.tensor(1.0, dtype=torch.float64)}
        target["tokens_alone"] = True
        real = min(max(stop - (first + m * size), 0), size)
        target["labels"][real:] = IGNORED
    return inputs, targets


class _Wrapped:
    """A source whose samples from number `stop` on are copies of the first one."""

    def __init__(self, source: Source, stop: int):
        self._source, self._stop = source, stop

    def sample(self, number: int) -> Any:
        return self._source.sample(number if number < self._stop else 0)

    def marks(self, number: int) -> Any:
        return self._source.marks(number if number < self._stop else 0)

    def about(self) -> dict[str, object]:
        return self._source.about()


def _targets(source: Source, number: int, seq: int) -> int:
    if isinstance(source, Samples):
        return source.counted(number)
    marks = source.marks(number)
    return seq if marks is None else int(marks.counted.sum())

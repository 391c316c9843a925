"""The micro-batches of a training step, for every kind of data.

Knows: which samples a step takes, which of its sequences has how many images, and that places of images are not
predicted. Does not know: how samples are read (`data/`), how items are synthesised (`huggingface/inputs.py`), plans or
devices.

The loss of a step is the mean over all its counted targets, as in `data/batches.py`: every micro-batch's loss is the
sum over its own targets divided by `items`, the step's targets over its micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.precision import PARAMETER_DTYPES
from octopipe.runtime.training.data.batches import IGNORED, counted_targets, length_micro_batches, micro_batches
from octopipe.runtime.training.data.samples import Samples
from octopipe.runtime.training.data.source import Source
from octopipe.runtime.training.job import TrainJob


def step_batches(
    job: TrainJob, source: Source, first: int, replica: int, numbers: Sequence[Sequence[Sequence[int]]]
) -> tuple[list[Any], list[Any]]:
    """Return inputs and targets of one pipeline's micro-batches; the samples of the step begin with `first`. `numbers`:
    the numbers of the step's sequences of different length, [pipeline][micro-batch][position]."""
    count, size = job.num_micro_batches, job.micro_batch_size
    if job.lengths:
        inputs, targets = length_micro_batches(source, first, numbers[replica], job.lengths, job.dp)
        return list(inputs), list(targets)
    begin = first + replica * count * size
    if job.inputs is None:
        items = counted_targets(source, first, job.dp * count * size)
        share = () if items is None else (items / (job.dp * count),)
        return micro_batches(source, begin, count, size, *share)
    if isinstance(source, Samples):
        every = range(first, first + job.dp * count * size)
        total = sum(source.counted(k) for k in every)
        if not total:
            raise OctoPipeError(f"{source.where}: none of a step's {len(every)} samples has a label that counts")
        return sample_batches(job, source, begin, total / (job.dp * count))
    return _made_up(job, source, begin)


def sample_batches(
    job: TrainJob, source: Samples, begin: int, items: float, stop: int | None = None
) -> tuple[list[Any], list[Any]]:
    """Return micro-batches of samples from a folder; those from number `stop` on do not count."""
    size, dtype = job.micro_batch_size, PARAMETER_DTYPES[job.mode.precision]
    inputs, targets = [], []
    for m in range(job.num_micro_batches):
        numbers = range(begin + m * size, begin + (m + 1) * size)
        real = [k if stop is None or k < stop else 0 for k in numbers]
        given, labels = source.micro_batch(real, dtype=dtype)
        for row, number in enumerate(numbers):
            if stop is not None and number >= stop:
                labels[row] = IGNORED
        inputs.append(given)
        targets.append({"labels": labels, "items": torch.tensor(items, dtype=torch.float64)})
    return inputs, targets


def _made_up(job: TrainJob, source: Source, begin: int) -> tuple[list[Any], list[Any]]:
    """Return micro-batches of tokens with synthetic images, recordings or source texts."""
    form = job.inputs
    assert form is not None
    count, size = job.num_micro_batches, job.micro_batch_size
    items = [kind.items(count * size) for kind in form.kinds]
    counted = sum(job.seq - form.ignored(*each) for each in zip(*items, strict=True))
    share = torch.tensor(counted / count, dtype=torch.float64)
    inputs, targets = [], []
    for m in range(count):
        numbers = [begin + m * size + row for row in range(size)]
        tokens = torch.from_numpy(np.stack([source.sample(k) for k in numbers]))
        seeds = [job.seed * 1_000_003 + k for k in numbers]
        dtype = PARAMETER_DTYPES[job.mode.precision]
        mine = (column[m * size : (m + 1) * size] for column in items)
        given, wanted = form.made_up(tokens, *mine, seed=seeds, dtype=dtype)
        inputs.append(given)
        targets.append({"labels": wanted, "items": share})
    return inputs, targets

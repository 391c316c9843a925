"""Preparation of a run before its ranks start: reads and checks data, decides about document masks, checks memory.

Knows: what is determined once, in the process that starts the ranks, and which lines are shown to the user. Does not
know: ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.huggingface.documents import cannot_keep_apart
from octopipe.models.spec import ModelSpec
from octopipe.runtime.ranks.rank_process import no_report
from octopipe.runtime.training.data.corpus import Corpus, Windows
from octopipe.runtime.training.data.opening import check_form, read
from octopipe.runtime.training.data.samples import Samples, is_samples
from octopipe.runtime.training.job import Phase, TrainJob
from octopipe.runtime.training.memory_check import check_host


def with_data(job: TrainJob, tell: Callable[[Any], None]) -> TrainJob:
    """Return the job with everything decided that its data and model determine. Raises an error for whatever would stop
    the run later."""
    if os.environ.get("RANK", "0") != "0":  # under torchrun every rank runs this; only the first one reports
        tell = no_report
    check_host(job)
    corpora = {}
    for path in dict.fromkeys(p for p in (job.data, job.eval_data) if p is not None):
        check_form(path, job.inputs)
        if job.inputs is not None and is_samples(path):
            samples = Samples(path, vocab=job.spec.vocab, seed=job.seed, form=job.inputs)
            samples.counted(0)  # raises an error about the first sample before ranks start
            what = "data" if path == job.data else "evaluation"
            tell(Phase(text=f"{what}: {samples.where}, {len(samples):,} samples", notice=True))
            continue
        say = lambda text: tell(Phase(text=text))  # noqa: E731
        corpora[path] = read(path, job.reading, vocab=job.spec.vocab, tell=say)
    if not corpora:
        return job
    apart = _apart(job, list(corpora.values()), tell)
    job = replace(job, reading=replace(job.reading, apart=apart))
    for path, corpus in corpora.items():
        windows = Windows(corpus, vocab=job.spec.vocab, seq=job.seq, seed=job.seed, apart=apart)
        for text in (*corpus.notes, *_described(windows, path == job.data)):
            tell(Phase(text=text, notice=True))
        if job.lengths and windows.marks(0) is not None:
            raise OctoPipeError(f"{corpus.where}: --lengths applies to token files only; leave it out, or give tokens")
    return job


def _described(samples: Windows, trained: bool) -> list[str]:
    corpus = samples.corpus
    documents = "" if corpus.starts is None else f" in {corpus.starts.size:,} documents"
    what = "data" if trained else "evaluation"
    out = [
        f"{what}: {corpus.where}, {corpus.tokens.shape[0]:,} tokens{documents}, {samples.windows:,} samples of "
        f"{samples.seq} tokens" + (", documents kept apart" if samples.apart else "")
    ]
    if samples.cut:
        out.append(f"{corpus.where}: {samples.cut:,} documents are longer than --seq and are truncated")
    return out


def _apart(job: TrainJob, corpora: list[Corpus], tell: Callable[[Any], None]) -> bool:
    """Return whether documents of one sample are masked from each other."""
    asked = job.reading.apart
    known = [corpus for corpus in corpora if corpus.starts is not None]
    if asked is False:
        return False
    if not known:
        if asked:
            raise OctoPipeError(f"{corpora[0].where} does not state where documents begin; leave --document-mask out")
        return False
    why = "--lengths defines the sequences" if job.lengths else _obstacle(job)
    if not why:
        return True
    if asked:
        raise OctoPipeError(
            f"{job.spec.name}: documents cannot be masked from each other: {why}; leave --document-mask out"
        )
    tell(Phase(text=f"documents of one sample attend to each other: {why}", notice=True))
    return False


def _obstacle(job: TrainJob) -> str:
    if isinstance(job.spec, ModelSpec):
        return "octopipe's own layers cannot mask documents of one sequence from each other"
    import torch

    return cannot_keep_apart(job.spec.layers(dtype=torch.float32, device="cpu", seed=0))

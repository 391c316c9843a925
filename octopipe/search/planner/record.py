"""The record of a search that accompanies its plan: the ranked splits, and the best split on fewer and on more GPUs.

Knows: which numbers the cluster panel of a report needs. Does not know: how it is drawn (report/cluster.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from octopipe.costs.cluster.setup import Setup
from octopipe.models.spec import ModelSpec
from octopipe.search.planner.budget import Budget
from octopipe.search.planner.errors import expected_error
from octopipe.search.planner.judging import judge, modes_of
from octopipe.search.planner.pricing import Candidate, Pricer
from octopipe.search.planner.runtimes import RUNTIMES, Runtime
from octopipe.search.planner.search import Found
from octopipe.search.planner.splits import splits
from octopipe.search.planner.why import why

MOST_ROWS = 12
STEPS = (0.25, 0.5, 2.0, 4.0)
"""Further numbers of GPUs for which a split is found, as multiples of the requested number."""


def record_of(
    found: Found,
    spec: ModelSpec,
    *,
    words: list[str],
    scaling: list[dict[str, Any]],
    commands: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the record that is stored with the plan and drawn in the report's panel; its splits are sorted, best
    first."""
    rows = [*found.ranked[: MOST_ROWS - 1]]
    out = [row_of(c, spec) for c in rows]
    if found.today is not None:
        out.append(row_of(found.today, spec, "today"))
    setup = found.best.setup
    return {
        "title": f"{spec.name} on {setup.words()}",
        "gpus": setup.num_gpus,
        "global_batch": setup.global_batch,
        "expected_error": expected_error(setup),
        "words": words,
        "candidates": out,
        "scaling": scaling,
        "commands": dict(commands or {}),
    }


def row_of(candidate: Candidate, spec: ModelSpec, how: str = "") -> dict[str, Any]:
    """Return the numbers of a split and, if it was simulated, the parts of its step time."""
    parts = why(candidate, spec)
    names = ("tokens_per_gpu_per_second", "mfu", "bubble", "peak_gib", "limit_gib", "fits", "recompute")
    return {
        "split": candidate.split.words(),
        "zero": candidate.split.zero,
        "how": how or candidate.how,
        **{name: getattr(candidate, name) for name in names},
        **({} if parts is None else {"why": parts.as_dict()}),
    }


def scaled(
    spec: ModelSpec,
    base: Setup,
    found: Found,
    *,
    global_batch: int,
    fixed: Mapping[str, int] | None = None,
    runtime: Runtime = RUNTIMES["any"],
    budget_s: float = 8.0,
) -> list[dict[str, Any]]:
    """Return one row per number of GPUs, from a quarter to four times as many, with the same batch. On other numbers of
    GPUs than the search's own, the best split by estimate is simulated under (interleaved) 1F1B and not tuned. On a
    cluster of unequal nodes there is only the row of the search itself."""
    gpus, best = found.best.setup.num_gpus, found.best
    base, runtime = runtime.settled(base), runtime.of_model(spec)
    rows = [_point(gpus, best)]
    if base.nodes:
        return rows
    open_ones = {k: v for k, v in (fixed or {}).items() if k not in ("dp", "pp")}
    until, longest = time.monotonic() + budget_s, 0.0
    for share in STEPS:
        count, began = int(gpus * share), time.monotonic()
        if count < 1 or count == gpus or began + longest > until:
            continue
        pricer = Pricer(
            spec,
            base,
            global_batch,
            recompute_ops=runtime.recomputes_by_ops,
            overlaps=runtime.overlaps,
            checkpoints=runtime.checkpoints,
        )
        every = list(splits(spec, base, gpus=count, global_batch=global_batch, fixed=open_ones, runtime=runtime))
        judging = Budget(seconds=budget_s / (2 * len(STEPS)))
        kept, *_ = judge(pricer, every, modes_of("auto", runtime, base), lambda words: None, over=judging.over)
        if not kept:
            rows.append({"gpus": count, "fits": False})
            continue
        rows.append(_point(count, pricer.simulated(kept[0].split)))
        longest = max(longest, time.monotonic() - began)
    return sorted(rows, key=lambda row: row["gpus"])


def _point(gpus: int, candidate: Candidate) -> dict[str, Any]:
    return {
        "gpus": gpus,
        "tokens_per_second": candidate.tokens_per_gpu_per_second * gpus,
        "tokens_per_gpu_per_second": candidate.tokens_per_gpu_per_second,
        "split": candidate.split.words(),
        "peak_gib": candidate.peak_gib,
        "limit_gib": candidate.limit_gib,
        "fits": candidate.fits,
    }

"""Why a search has no answer: even the split that needs least memory does not fit, or no runtime runs the best one.

Knows: the words of these errors and what would help. Does not know: how splits are searched (`search.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octopipe.models.spec import ModelSpec
from octopipe.search.planner.commands import command_lines
from octopipe.search.planner.pricing import Candidate, Pricer
from octopipe.search.planner.runtimes import Runtime
from octopipe.search.planner.splits import Split, least_state_bytes


def nothing_fits(pricer: Pricer, every: Sequence[Split], modes: tuple[str, ...], runtime: Runtime) -> str:
    """Return the error for a search in which no split fits: the split that needs least memory, what it needs, and
    whether keeping optimizer state in host memory would help."""
    words = unfit(pricer, pricer.candidate(_leanest(pricer, every), modes))
    small = [split for split in every if split.zero < 2]
    if pricer.base.offload_optimizer or not small or "optimizer" not in runtime.offloads:
        return words
    host = Pricer(pricer.spec, replace(pricer.base, offload_optimizer=1.0), pricer.global_batch)
    found = host.candidate(_leanest(host, small), modes)
    if not found.fits:
        return words
    return (
        f"{words}; or keep the optimizer state in the host's memory: --offload-optimizer 1 fits {found.split.words()}"
    )


def _leanest(pricer: Pricer, every: Sequence[Split]) -> Split:
    def size(split: Split) -> tuple[float, int, int]:
        state = least_state_bytes(split, pricer.dense, pricer.experts, pricer.base, pricer.trained)
        return state, split.micro_batch_size, split.vp

    return min(every, key=size)


def unrun(best: Candidate, spec: ModelSpec) -> str:
    """Return the error that lists why each runtime cannot run the best simulated split."""
    lines = command_lines(best, spec=spec, model=spec.name, plan_file="plan.json", runtime="any")
    reasons = "; ".join(f"{name}: {line.removeprefix('none: ')}" for name, line in lines.items())
    return f"no runtime runs {best.split.words()}, the best of what was simulated in time; give more time ({reasons})"


def unfit(pricer: Pricer, found: Candidate) -> str:
    return (
        f"no split of {found.setup.num_gpus} GPUs fits {pricer.spec.name}: even {found.split.words()} needs "
        f"{found.peak_gib:.1f} of {found.limit_gib:.1f} GiB; take more GPUs, or a smaller reserve or batch"
    )

"""Why a search has no answer: even the split that needs least memory does not fit, or no runtime runs the best one.

Knows: the words of these errors, and what would help. Does not know: how splits are searched (`search.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octopipe.costs.cluster.setup import RESERVE_LEAST_GIB
from octopipe.models.spec import ModelSpec
from octopipe.search.planner.commands import command_lines
from octopipe.search.planner.pricing import Candidate, Pricer
from octopipe.search.planner.runtimes import Runtime
from octopipe.search.planner.splits import Split, least_state_bytes
from octopipe.simulation.timeline import GIB

PROBED = 32
"""Number of splits that are estimated to find the one that needs least memory."""


def nothing_fits(pricer: Pricer, every: Sequence[Split], modes: tuple[str, ...], runtime: Runtime) -> str:
    """Return the error for a search in which no split fits: the split that needs least memory, what it needs, and
    whether keeping optimizer state in host memory would help."""
    words = unfit(pricer, _leanest(pricer, every, modes), modes)
    small = [split for split in every if split.zero < 2]
    if pricer.base.offload_optimizer or not small or "optimizer" not in runtime.offloads:
        return words
    host = Pricer(pricer.spec, replace(pricer.base, offload_optimizer=1.0), pricer.global_batch)
    found = _leanest(host, small, modes)
    if not found.fits:
        return words
    return (
        f"{words}; or keep the optimizer state in the host's memory: --offload-optimizer 1 fits {found.split.words()}"
    )


def _leanest(pricer: Pricer, every: Sequence[Split], modes: tuple[str, ...]) -> Candidate:
    """Return the split that needs least memory by estimate, of those with the smallest training state and
    micro-batches. Their state is often the same, and what differs is how activations and gathered weights are
    divided."""

    def size(split: Split) -> tuple[float, int, int, int]:
        state = least_state_bytes(split, pricer.dense, pricer.experts, pricer.base, pricer.trained)
        return state, split.micro_batch_size, split.vp, -split.tp * split.cp

    probed = sorted(every, key=size)[:PROBED]
    return min((pricer.candidate(split, modes) for split in probed), key=lambda found: found.peak_gib)


def unrun(best: Candidate, spec: ModelSpec) -> str:
    """Return the error that lists why each runtime cannot run the best simulated split."""
    lines = command_lines(best, spec=spec, model=spec.name, plan_file="plan.json", runtime="any")
    reasons = "; ".join(f"{name}: {line.removeprefix('none: ')}" for name, line in lines.items())
    return f"no runtime runs {best.split.words()}, the best of what was simulated in time; give more time ({reasons})"


def unfit(pricer: Pricer, found: Candidate, modes: tuple[str, ...]) -> str:
    """Return the error for a split that is the leanest and does not fit, with what would help it."""
    base, setup = pricer.base, found.setup
    remedies = ["take more GPUs"]
    if modes in (("none",), ("selective",)) and base.offload_layers is None:
        again = pricer.candidate(found.split, ("none", "full"))
        remedies += [f"give --recompute auto, with which {found.split.words()} fits"] if again.fits else []
    state = least_state_bytes(found.split, pricer.dense, pricer.experts, base, pricer.trained) / GIB
    if state < found.limit_gib:
        remedies.append("take shorter sequences (--seq)")
    if setup.gpu is not None and not setup.nodes and found.peak_gib <= setup.gpu_memory_gib - RESERVE_LEAST_GIB:
        remedies.append("keep a smaller --reserve-gib")
    words = remedies[0] if len(remedies) == 1 else f"{', '.join(remedies[:-1])}, or {remedies[-1]}"
    gpus = f"{setup.num_gpus} GPU{'s' if setup.num_gpus > 1 else ''}"
    return (
        f"no split of {gpus} fits {pricer.spec.name}: even {found.split.words()} needs "
        f"{found.peak_gib:.1f} of {found.limit_gib:.1f} GiB; {words}"
    )

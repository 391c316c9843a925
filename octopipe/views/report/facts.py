"""What a timeline's numbers are for: the set-up as named facts, and the factors from step time to throughput.

Knows: how GPU, parallel sizes, batch and precision are shown to a reader. Does not know: HTML, or how the step time was
obtained. Facts that are not known are left out, never guessed.
"""

from __future__ import annotations

from octopipe.costs.cluster.setup import Setup
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.simulation.timeline import Timeline

SETTING_NAMES = {
    "gpu": "GPU", "tp": "TP", "cp": "CP", "ep": "EP", "pp": "PP", "dp": "DP", "seq": "sequence",
    "micro_batches": "micro-batches", "micro_batch_size": "micro-batch size", "precision": "precision",
    "device": "device", "world_size": "processes", "dtype": "precision",
}  # fmt: skip
"""Keys of a timeline's setting that the page shows, and the names it uses for them."""


def facts_of(timeline: Timeline, plan: Plan | None, costs: CostTable | None) -> list[list[str]]:
    """Return [name, value] pairs for the page's head; empty if the set-up is not known."""
    if costs is None or costs.setup is None:
        own = timeline.setting
        return [[SETTING_NAMES[k], str(own[k])[:80]] for k in SETTING_NAMES if own.get(k) not in (None, "", [])]
    return _of_setup(costs.setup, plan, costs, timeline.num_ranks)


def _of_setup(setup: Setup, plan: Plan | None, costs: CostTable, ranks: int) -> list[list[str]]:
    facts: list[tuple[str, object]] = []
    if setup.gpu is None:
        facts += [("GPU", "as measured"), ("PP", ranks)]
    else:
        kinds = " + ".join(f"{number} × {name}" for name, number in setup.used_gpus)
        facts.append(("GPU", kinds or f"{ranks * costs.gpus_per_rank * costs.data_parallel} × {setup.gpu.name}"))
        facts += [("TP", setup.tp), ("PP", ranks)]
        facts += [(name.upper(), getattr(setup, name)) for name in ("cp", "ep") if getattr(setup, name) > 1]
    facts.append(("DP", costs.data_parallel))
    if setup.seq is not None:
        facts.append(("sequence", f"{setup.seq} tokens"))
    if plan is not None:
        size = f" × {setup.micro_batch_size}" if setup.micro_batch_size > 1 else ""
        facts.append(("micro-batches", f"{plan.num_micro_batches}{size}"))
        facts.append(("global batch", plan.num_micro_batches * setup.micro_batch_size * costs.data_parallel))
    if setup.gpu is not None:
        facts.append(("precision", setup.precision))
        if setup.dp * setup.cp > 1:
            facts.append(("ZeRO", setup.zero))
    return [[name, str(value)] for name, value in facts]


def rates_of(timeline: Timeline, plan: Plan | None, costs: CostTable | None) -> dict[str, float | None] | None:
    """Return the throughput of a step of one second; the page divides it by step times, also of what-ifs."""
    if costs is None or plan is None:
        return None
    rate = costs.throughput(timeline.num_ranks, plan.num_micro_batches, 1e3)
    if all(value is None for value in rate.values()):
        return None
    return {**rate, "gpus": float(timeline.num_ranks * costs.gpus_per_rank * costs.data_parallel)}

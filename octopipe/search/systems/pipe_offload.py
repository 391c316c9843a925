"""PipeOffload: interleaved 1F1B with the activations that are held longest in host memory.

Wan et al., "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization", ICML 2025
(arXiv 2503.01328).
Rule: if moving activations to the host and back takes no longer than the computation, those of all stages are
offloaded (full offload); otherwise those of the first half of a rank's stages, which are held longest (selective
offload: the peak falls by more than half). Transfers overlap with the computation and delay nothing.
Simplified: the order is Narayanan's interleaved 1F1B, not the paper's own, whose warm-up spreads a rank's chunks more
evenly. Single activations stay on the device if the link has no time for them, instead of a fixed share.
"""

from dataclasses import replace

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.search.systems.interleaved import MOST_CHUNKS, interleaved_plan
from octopipe.search.systems.registry import Setting, require, system
from octopipe.simulation.simulator import simulate


@system(
    name="pipe-offload",
    title="PipeOffload",
    paper="Wan et al., ICML 2025",
    year=2025,
    tunes=("scheduling",),
    constraint="micro-batches a multiple of pp; at least 2 layers a rank; a known link to host memory",
)
def pipe_offload(setting: Setting) -> Plan:
    """Option `chunks`: stages per rank; by default the fastest of 2..8 that fits (the fastest of all if none fits)."""
    p, m, costs = setting.num_ranks, setting.num_micro_batches, setting.costs
    require(m % p == 0, "pipe-offload", f"{m} micro-batches are not a multiple of pp {p}")
    require(
        costs.host_link is not None,
        "pipe-offload",
        "the speed of the link to host memory is not known; give --host-gb-per-s (host_gb_per_s)",
    )
    most = min(MOST_CHUNKS, costs.num_layers // p)
    require(most >= 2, "pipe-offload", f"{costs.num_layers} layers are too few for two stages on each of {p} ranks")
    chunks = setting.option("chunks", None)
    if chunks is not None:
        require(
            isinstance(chunks, int) and 2 <= chunks <= costs.num_layers // p, "pipe-offload",
            f"chunks is {chunks}; give 2 to {costs.num_layers // p} stages per rank",
        )  # fmt: skip
    plans = [offloaded(costs, p, m, v) for v in (range(2, most + 1) if chunks is None else (chunks,))]
    timelines = [simulate(plan, costs) for plan in plans]
    return plans[min(range(len(plans)), key=lambda k: (not timelines[k].fits, timelines[k].step_ms))]


def round_trip_share(costs: CostTable) -> float:
    """Return the paper's k: the time to move all activations to the host and back, over the time of all computation."""
    link = costs.host_link
    assert link is not None
    moved = 2 * sum(link.transfer_ms(float(b)) for b in costs.activation_bytes)
    return moved / max(float(costs.layer_ms.sum()), 1e-12)


def offloaded(costs: CostTable, p: int, m: int, v: int) -> Plan:
    """Return interleaved 1F1B with v stages per rank, with the stages marked that are offloaded."""
    plan = interleaved_plan(costs, p, m, v)
    leaving = v if round_trip_share(costs) <= 1.0 else (v + 1) // 2
    return replace(plan, stages=tuple(replace(s, offload=k // p < leaving) for k, s in enumerate(plan.stages)))

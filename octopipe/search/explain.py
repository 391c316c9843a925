"""A sentence about what limits a plan: the busiest rank, a layer that cannot be split, the causes of idle time.

Knows: timelines and costs. Does not know: how the plan was found.
"""

from __future__ import annotations

import numpy as np

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.simulation.bounds.bounds import PlanClass
from octopipe.simulation.timeline import Timeline

_NAMES = {"E": "embedding", "L": "head", "*": "attention", "M": "Mamba", "-": "MLP"}
_WORTH = 0.5
"""Causes of idle time with a share below this many percent are left out."""
_WIDE = 1.5
"""A layer is mentioned if it takes at least this many times the mean layer time."""


def explain(
    plan: Plan,
    costs: CostTable,
    timeline: Timeline,
    lower_bound_ms: float = 0.0,
    bound_name: str = "",
    plans: PlanClass | None = None,
) -> str:
    """Explain why the step takes as long as it does; `plans` is the class of plans for which the bound holds."""
    step_ms = timeline.step_ms
    if step_ms <= 0:
        return "no op takes any time"
    parts = [_busiest(timeline), *_heaviest(plan, costs), _idle(timeline), *_memory(timeline), *_after(timeline)]
    if lower_bound_ms > 0:
        over = 100.0 * (step_ms / lower_bound_ms - 1.0)
        by = f" ({bound_name})" if bound_name else ""
        which = (plans or PlanClass()).words
        parts.append(
            f"of {which} none can be faster than {lower_bound_ms:.2f} ms{by}" if over < 0.005 else
            f"at most {over:.2f} % above the best of {which}{by}"
        )  # fmt: skip
    return "; ".join(p for p in parts if p)


def _busiest(timeline: Timeline) -> str:
    share = 100.0 * timeline.busy_ms / timeline.step_ms
    rank = int(np.argmax(share))
    return f"rank {rank} is busiest ({share[rank]:.1f} %)"


def _heaviest(plan: Plan, costs: CostTable) -> list[str]:
    """Name the largest layer, if it takes much longer than the mean layer."""
    layer_ms = costs.layer_ms
    total = float(layer_ms.sum())
    if costs.num_layers < 2 or total <= 0:
        return []
    k = int(np.argmax(layer_ms))
    if layer_ms[k] < _WIDE * total / costs.num_layers:
        return []
    name = _NAMES.get(costs.symbols[k], f"{costs.symbols[k]!r}")
    known = f"the {name} layer" if costs.symbols.count(costs.symbols[k]) == 1 else f"{name} layer {k}"
    share = f"{known} is {100.0 * layer_ms[k] / total:.0f} % of all work"
    if parts := plan.shards().get(k):
        return [f"{share} and is cut over ranks {', '.join(map(str, sorted(parts)))}"]
    words = f"{share} and cannot be split"
    holders = plan.replicas().get(k, ())
    if len(holders) > 1:
        return [f"{words}; ranks {' and '.join(map(str, holders))} hold a copy of it each and share its work"]
    rank = next(s.rank for s in plan.stages if s.first <= k < s.stop)
    fair = total / sum(1.0 / costs.slowdown(r) for r in range(plan.num_ranks))
    if layer_ms[k] * costs.slowdown(rank) > fair:
        words += f" (more than rank {rank}'s fair share)"
    return [words]


def _idle(timeline: Timeline) -> str:
    """Idle time by cause, as shares of the time of all ranks."""
    bubbles = timeline.bubbles
    whole = max(timeline.makespan_ms * timeline.num_ranks, 1e-300)
    shares = {n[:-3]: 100.0 * float(getattr(bubbles, n).sum()) / whole for n in bubbles._fields if n != "idle_ms"}
    named = sorted(((v, n) for n, v in shares.items() if v >= _WORTH), reverse=True)
    if not named:
        return f"ranks idle {sum(shares.values()):.1f} % of the time"
    return ", ".join(f"{v:.1f} % {n}" for v, n in named)


def _memory(timeline: Timeline) -> list[str]:
    """Name the rank that is nearest to its memory limit, if it uses more than 90 % of it."""
    if not timeline.memory:
        return []
    used = timeline.peak_bytes / np.array(timeline.capacity_bytes)
    rank = int(np.argmax(used))
    return [f"memory of rank {rank} is {100.0 * used[rank]:.0f} % full"] if used[rank] > 0.9 else []


def _after(timeline: Timeline) -> list[str]:
    extra = 100.0 * (timeline.step_ms - timeline.makespan_ms) / timeline.step_ms
    return [f"{extra:.1f} % after the last op (reductions, optimizer)"] if extra >= _WORTH else []

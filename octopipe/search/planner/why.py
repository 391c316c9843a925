"""Breakdown of the step time: what a split spends on products, memory, each kind of parallelism and waiting.

Knows: how a simulated step is divided into components that add up to it, how much communication is hidden, and how two
splits differ. Does not know: the breakdown of a layer's time (`costs/analytic/shares.py`) or how components are shown.

The step of a rank consists of its ops, its gradient reductions, its optimizer and the rest, which is waiting. Ops are
divided by the shares of their layers. Components are means over the pipeline ranks, so they are also shares of the
total GPU time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from octopipe.base.display import milliseconds
from octopipe.costs.analytic.pricing import Pricing
from octopipe.costs.analytic.reduction import reduction_ms
from octopipe.costs.analytic.shares import COLLECTIVES, NAMES, LayerShares, layer_shares
from octopipe.costs.analytic.table import price_layers
from octopipe.costs.table import CostTable
from octopipe.models.spec import ModelSpec
from octopipe.plans.plan import KINDS, Plan
from octopipe.plans.price import stage_times
from octopipe.search.planner.pricing import Candidate
from octopipe.simulation.timeline import Timeline

TITLES: Mapping[str, str] = MappingProxyType(
    {
        "products": "matrix products",
        "cores": "attention and scans",
        "memory": "memory passes",
        "launches": "kernel launches",
        "recomputation": "recomputation",
        "tp": "tensor parallelism",
        "cp": "context parallelism",
        "ep": "expert parallelism",
        "dp": "data parallelism",
        "host": "activations to the host and back",
        "bubble": "pipeline bubble",
        "optimizer": "optimizer",
    }
)
"""The names of the parts, in the order in which they are shown."""
ROUNDING = 1e-9
LEAST = 0.005
"""Parts with a smaller share are not mentioned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One part of a step."""

    name: str
    ms: float
    """Its exposed time, averaged over the ranks."""
    hidden_ms: float = 0.0
    """The time that is hidden behind other parts."""

    @property
    def title(self) -> str:
        return TITLES[self.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """A step in parts that add up to it."""

    step_ms: float
    shares: tuple[Share, ...]
    waits: Mapping[str, float]
    """The bubble by cause, in ms: filling and draining, transfers, uneven ranks, other."""

    def of(self, name: str) -> Share:
        return next(share for share in self.shares if share.name == name)

    def as_dict(self) -> dict[str, object]:
        return {
            "step_ms": self.step_ms,
            "parts": {
                s.name: {"title": s.title, "ms": s.ms, "share": s.ms / self.step_ms, "hidden_ms": s.hidden_ms}
                for s in self.shares
            },
            "bubble_by_cause_ms": dict(self.waits),
        }

    def words(self) -> str:
        """The largest parts, in decreasing order, as one sentence."""
        told = []
        for share in sorted(self.shares, key=lambda s: -s.ms):
            part, hidden = share.ms / self.step_ms, share.hidden_ms / self.step_ms
            if part >= LEAST or hidden >= LEAST:
                more = f" (and {100 * hidden:.1f} % hidden)" if hidden >= LEAST else ""
                told.append(f"{share.title} {100 * part:.1f} %{more}")
        return ", ".join(told)


def why(candidate: Candidate, spec: ModelSpec) -> Why | None:
    """Return the parts of a simulated split's step; None if the split was only estimated or its set-up has no GPU."""
    plan, costs, timeline = candidate.plan, candidate.costs, candidate.timeline
    if plan is None or costs is None or timeline is None or costs.setup is None or costs.setup.gpu is None:
        return None
    shares, pricing = layer_shares(spec, costs.setup), Pricing.of(costs.setup)
    layers, weights = price_layers(spec, pricing)
    ranks, step = timeline.num_ranks, float(timeline.step_ms)
    took = _took(plan, costs, timeline)
    ms, alone = (dict(zip(NAMES, values / ranks, strict=True)) for values in _by_layers(plan, took, shares))
    # The ops of a pair take less time together than in sequence; the difference is exchange hidden behind compute.
    ms["ep"] -= (float(took.sum()) - float(timeline.busy_ms.sum())) / ranks if timeline.lanes is not None else 0.0
    reduced = _reducing(timeline) / ranks
    updated = sum(e.end_ms - e.start_ms for e in timeline.extras if e.name == "optimizer") / ranks
    # Context-parallel GPUs of one pipeline reduce gradients among themselves; the costs count that as optimizer time.
    update = float(costs.optimizer_ms.sum())
    own = min(1.0, sum(layer.optimizer_ms for layer in layers) / update) if update > 0 else 1.0
    ms["dp"] += reduced + (1.0 - own) * updated
    alone["dp"] += sum(reduction_ms(weights, pricing)) / ranks
    updated *= own
    waiting = step - sum(ms.values()) - updated
    parts = {**ms, "bubble": waiting, "optimizer": updated}
    parts = {name: 0.0 if abs(value) < ROUNDING * step else value for name, value in parts.items()}
    behind = {name: float(alone[name] - ms[name]) for name in COLLECTIVES}
    hidden = {name: value if value > ROUNDING * step else 0.0 for name, value in behind.items()}
    return Why(
        step_ms=step,
        shares=tuple(Share(name=n, ms=float(parts[n]), hidden_ms=hidden.get(n, 0.0)) for n in TITLES),
        waits=_waits(timeline, waiting),
    )


def _took(plan: Plan, costs: CostTable, timeline: Timeline) -> np.ndarray:
    """Return the milliseconds of all ops by stage and kind. If ops run in pairs, each op counts with the time that it
    takes alone, because its span in the timeline covers both ops."""
    spans, kinds = timeline.spans, len(KINDS)
    where: np.ndarray = spans.stage * kinds + spans.kind
    ms = spans.end_ms - spans.start_ms
    if timeline.lanes is not None:
        table = plan.table()
        where, ms = (
            table.stage * kinds + table.kind,
            stage_times(plan, costs)[table.kind, table.stage, table.micro_batch],
        )
    flat = np.bincount(where, weights=ms, minlength=len(plan.stages) * kinds)
    return flat.reshape(len(plan.stages), kinds)


def _reducing(timeline: Timeline) -> float:
    """Return the milliseconds in which ranks reduce gradients without computing, summed over all ranks."""
    spans, total = timeline.spans, 0.0
    for rank in range(timeline.num_ranks):
        mine = spans.rank == rank
        order = np.argsort(spans.start_ms[mine], kind="stable")
        start, end = spans.start_ms[mine][order], spans.end_ms[mine][order]
        # Of an op that overlaps an earlier one, only the part after that one counts.
        start = np.maximum(start, np.concatenate(([-np.inf], np.maximum.accumulate(end)[:-1])) if end.size else start)
        for extra in timeline.extras:
            if extra.rank == rank and extra.name != "optimizer":
                computing = np.minimum(end, extra.end_ms) - np.maximum(start, extra.start_ms)
                total += extra.end_ms - extra.start_ms - float(np.maximum(computing, 0.0).sum())
    return total


def _by_layers(plan: Plan, took: np.ndarray, shares: LayerShares) -> tuple[np.ndarray, np.ndarray]:
    """Divide the time of all ops by the shares of their layers; return the milliseconds of every name: the exposed
    time, and the time that collectives would take if nothing were hidden."""
    shown, alone = np.zeros(len(NAMES)), np.zeros(len(NAMES))
    for number, k in zip(*np.nonzero(took), strict=True):
        stage = plan.stages[number]
        shown += took[number, k] * shares.per_ms(KINDS[k], stage.first, stage.stop)
        alone += took[number, k] * shares.per_ms(KINDS[k], stage.first, stage.stop, alone=True)
    return shown, alone


def _waits(timeline: Timeline, waiting: float) -> dict[str, float]:
    """Return the bubble by cause. The rest, which the causes of the timeline do not explain, is mostly waiting for the
    slowest reduction."""
    b = timeline.bubbles
    causes = {
        "filling and draining": float(b.boundary_ms.mean()),
        "transfers": float(b.communication_ms.mean()),
        "uneven ranks": float(b.imbalance_ms.mean()),
    }
    total = sum(causes.values())
    if total > waiting > 0:  # a rank reduces while it waits for the others: that part is not waiting
        causes["filling and draining"] = max(causes["filling and draining"] - (total - waiting), 0.0)
        total = sum(causes.values())
    return {**causes, "other": float(max(waiting - total, 0.0))}


def difference(best: Why, today: Why) -> list[tuple[str, float]]:
    """Return (title of a part, ms per step that `best` saves in it), sorted by size; negative if it takes longer."""
    moved = [(s.title, today.of(s.name).ms - s.ms) for s in best.shares]
    return sorted(moved, key=lambda pair: -abs(pair[1]))


def difference_words(best: Why, today: Why) -> str:
    """Describe which parts of the step account for the time saved over today's split."""
    saved = today.step_ms - best.step_ms
    told = [
        f"{title} {'-' if ms > 0 else '+'}{milliseconds(abs(ms))}"
        for title, ms in difference(best, today)
        if abs(ms) >= LEAST * today.step_ms
    ]
    verb = "saves" if saved >= 0 else "costs"
    return f"It {verb} {milliseconds(abs(saved))} a step: {', '.join(told) or 'nothing significant'}"

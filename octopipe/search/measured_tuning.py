"""Tuning with measurements: runs plans, corrects the costs with the measured times, and tunes again until both agree.

Knows: the loop, how measured op times correct a profile per layer kind, and which plan is kept: the one measured to be
fastest, which may be a published system. Does not know: how plans are run (`run` is passed in) or searched (`search` is
passed in); it does not need torch.

A profile times layers one by one. A run includes effects that this misses: stages of many layers, hosts that fall
behind, experts that fill up, transfers concurrent with products. Every op that ran gives one equation: its time is the
sum of its layers' times, each multiplied by a factor for the layer kind and the op kind. The factors that best fit all
ops of all plans, regularised towards 1, correct the profile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octopipe.base.errors import OctoPipeError
from octopipe.costs.layer_times import TIMES
from octopipe.costs.profile_file import Profile
from octopipe.costs.table import CostTable
from octopipe.plans.pair_price import op_durations
from octopipe.plans.plan import CODES, B, Plan
from octopipe.search.systems import build_plan
from octopipe.simulation.contention import predict

Floats = NDArray[np.float64]
TOLERANCE = 0.02
"""Largest relative error of a predicted step time that counts as agreement with the run."""
PUBLISHED = ("1f1b", "interleaved", "zb-v")
"""The published systems that are run for comparison, unless others are named."""
PULL = 0.02
"""Weight of the regularisation of the factors towards 1, relative to the weight of the equations."""
LEAST_FACTOR, MOST_FACTOR = 0.4, 2.5
_COLUMN = {"F": TIMES["forward_ms"], "I": TIMES["backward_ms"], "W": TIMES["weight_ms"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The measurements of a plan's timed steps."""

    steps_ms: tuple[float, ...]
    """`Timeline.reduced_ms` of every timed step: with the gradient reductions that plans with copies need."""
    op_ms: Floats
    """Median time of every op, numbered as in the plan."""
    gap_ms: float
    """Median gap between two consecutive ops of a rank if the second one has nothing to wait for."""
    start_ms: Floats | None = None
    """When every op of the middle step started; None if that was not measured."""
    host_us: tuple[float, ...] = ()
    """Time that the host of the first rank took to issue an op: the 10th, 50th and 90th percentile over its ops. This
    includes waiting for room in the device's queue, if the host runs far ahead of the device."""
    peak_gib: tuple[float, ...] = ()

    @property
    def step_ms(self) -> float:
        return float(np.median(self.steps_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan of the loop, with its prediction and measurement."""

    name: str
    round: int
    """0 for published systems; from 1 on, the round in which the plan was tuned with the costs corrected so far."""
    plan: Plan
    predicted_ms: float
    ran: Ran

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_ms / self.ran.step_ms - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """The factor by which the times of a layer kind were multiplied."""

    kind: str
    layers: int
    forward: float
    input: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of the loop."""

    rows: tuple[Row, ...]
    best: Row
    """The plan that was measured fastest."""
    profile: Profile
    """The profile, corrected with all runs."""
    corrections: tuple[Correction, ...]
    agreed: bool
    """Whether the last tuned plan ran as predicted."""
    skipped: tuple[str, ...]
    """Systems that could not run, and why."""

    @property
    def best_published(self) -> Row | None:
        return min((r for r in self.rows if r.round == 0), key=lambda r: r.ran.step_ms, default=None)

    @property
    def predicted_ms(self) -> float:
        """The step time of the winner, predicted with the corrected profile."""
        return predict(self.best.plan, self.profile).reduced_ms

    def as_dict(self) -> dict[str, Any]:
        published = self.best_published
        return {
            "best": self.best.name,
            "measured_ms": self.best.ran.step_ms,
            "predicted_ms": self.predicted_ms,
            "agreed": self.agreed,
            "gain_over_published": None if published is None else published.ran.step_ms / self.best.ran.step_ms,
            "rows": [
                {
                    "name": r.name,
                    "round": r.round,
                    "predicted_ms": r.predicted_ms,
                    "measured_ms": r.ran.step_ms,
                    "error": r.error,
                    "steps_ms": list(r.ran.steps_ms),
                    "host_us_per_op": list(r.ran.host_us),
                    "peak_gib": list(r.ran.peak_gib),
                }
                for r in self.rows
            ],
            "corrections": [
                {"layer": c.kind, "layers": c.layers, "F": c.forward, "I": c.input, "W": c.weight}
                for c in self.corrections
            ],
            "op_overhead_ms": self.profile.op_overhead_ms,
            "fused_factor": self.profile.fused_factor,
            "skipped": list(self.skipped),
        }


Run = Callable[[str, Plan, Profile], Ran]
Search = Callable[[CostTable, bool], Plan]
"""(costs, whether copies of layers are allowed) -> plan."""


def tune_measured(
    profile: Profile,
    num_ranks: int,
    num_micro_batches: int,
    *,
    run: Run,
    search: Search,
    kinds: Sequence[str] = (),
    systems: Sequence[str] = PUBLISHED,
    copies: Sequence[bool] = (False, True),
    also: Mapping[str, Callable[[CostTable], Plan]] | None = None,
    rounds: int = 3,
    budget_s: float = 300.0,
    tolerance: float = TOLERANCE,
    fitted: Callable[[Plan], Plan] = lambda plan: plan,
    tell: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Run the published systems, then tune, run and correct, up to `rounds` times or until the budget ends.

    `also`: further searches of every round, by a name for their plans ("with a cut head"). `kinds`: a description of
    every layer; layers of one kind are corrected together (default: by their symbols). `budget_s` limits the whole: a
    new round begins only if the longest one so far still fits. `fitted`: converts every plan to the form that the
    runtime takes (with other names of ranks, for example); a system whose plan it rejects is skipped.
    """
    costs = profile.costs
    kinds = _kind_of_every_layer(kinds, costs)
    searches = _searches(search, copies, also or {})
    began = time.monotonic()
    rows: list[Row] = []
    skipped: list[str] = []
    now = profile

    def measure(name: str, number: int, plan: Plan) -> Row:
        tell(f"running {name}")
        row = Row(
            name=name,
            round=number,
            plan=plan,
            predicted_ms=predict(plan, now).reduced_ms,
            ran=run(name, plan, now),
        )
        rows.append(row)
        tell(f"{name}: {row.ran.step_ms:.2f} ms, predicted {row.predicted_ms:.2f} ({100 * row.error:+.1f} %)")
        return row

    for system in systems:
        try:
            plan = fitted(build_plan(system, costs, num_ranks, num_micro_batches))
        except OctoPipeError as error:
            skipped.append(f"{system}: {error}")
            continue
        measure(system, 0, plan)
    corrections: tuple[Correction, ...] = ()
    if rows:
        now, corrections = corrected(profile, rows, kinds)
    agreed, longest = False, 0.0
    for number in range(1, rounds + 1):
        start = time.monotonic()
        if number > 1 and start - began + longest > budget_s:
            break
        tuned = []
        for words, look in searches.items():
            tell(f"round {number}: tuning{words}")
            plan = fitted(look(now.costs))
            known = next((r for r in rows if r.plan.orders == plan.orders and r.plan.stages == plan.stages), None)
            tuned.append(known or measure(f"tuned {number}{words}", number, plan))
        errors = [predict(r.plan, now).reduced_ms / r.ran.step_ms - 1.0 for r in tuned]
        now, corrections = corrected(profile, rows, kinds)
        longest = max(longest, time.monotonic() - start)
        agreed = max(abs(e) for e in errors) <= tolerance
        if agreed:
            break
    return Outcome(
        rows=tuple(rows),
        best=min(rows, key=lambda r: r.ran.step_ms),
        profile=now,
        corrections=corrections,
        agreed=agreed,
        skipped=tuple(skipped),
    )


def _kind_of_every_layer(kinds: Sequence[str], costs: CostTable) -> tuple[str, ...]:
    """The given kinds, or the layers' symbols where none are given."""
    kinds = tuple(kinds) or tuple(costs.symbols)
    if len(kinds) != costs.num_layers:
        raise OctoPipeError(f"{len(kinds)} kinds for {costs.num_layers} layers; give one per layer")
    return kinds


def _searches(
    search: Search, copies: Sequence[bool], also: Mapping[str, Callable[[CostTable], Plan]]
) -> dict[str, Callable[[CostTable], Plan]]:
    """Return the searches of every round, by the suffix that the names of their plans get."""
    found: dict[str, Callable[[CostTable], Plan]] = {
        " with copies" if twice else "": partial(_with_copies, search, twice) for twice in copies
    }
    return found | {f" {name}": one for name, one in also.items()}


def _with_copies(search: Search, copies: bool, costs: CostTable) -> Plan:
    return search(costs, copies)


def corrected(
    profile: Profile, rows: Sequence[Row], kinds: Sequence[str], *, passes: int = 3
) -> tuple[Profile, tuple[Correction, ...]]:
    """Return the profile corrected with all these runs, and the factors of each layer kind."""
    names = list(dict.fromkeys(kinds))
    group = np.array([names.index(kind) for kind in kinds])
    factors = {kind: np.ones(len(names)) for kind in _COLUMN}
    gap = float(np.median([r.ran.gap_ms for r in rows]))
    fused = profile.fused_factor
    now = profile
    for _ in range(passes):  # which ranks work at the same time depends on the times, so iterate
        seen = [_equations(now, r, group, len(names)) for r in rows]
        for kind in _COLUMN:
            parts = np.concatenate([parts[kind] for parts, _ in seen])
            took = np.concatenate([times[kind] for _, times in seen])
            if took.size:
                factors[kind] = np.clip(factors[kind] * _fit(parts, took, factors[kind]), LEAST_FACTOR, MOST_FACTOR)
        both = np.concatenate([parts["B"].sum(axis=1) for parts, _ in seen])
        took = np.concatenate([times["B"] for _, times in seen])
        if took.size and not any(times["I"].size for _, times in seen):
            ratio = float(np.median(took / np.maximum(both, 1e-9)))
            for kind in "IW":  # no run had separate I and W, so both get the same correction
                factors[kind] = np.clip(factors[kind] * ratio, LEAST_FACTOR, MOST_FACTOR)
        elif took.size:
            fused = float(np.clip(fused * np.median(took / np.maximum(both, 1e-9)), 0.5, 1.5))
        scale = {_COLUMN[kind]: factors[kind][group] for kind in _COLUMN}
        now = _scaled(profile, scale, gap, fused)
    told = tuple(
        Correction(
            kind=name,
            layers=int((group == g).sum()),
            forward=float(factors["F"][g]),
            input=float(factors["I"][g]),
            weight=float(factors["W"][g]),
        )
        for g, name in enumerate(names)
    )
    return now, told


def _scaled(profile: Profile, scale: dict[str, Floats], gap_ms: float, fused: float) -> Profile:
    def table(costs: CostTable) -> CostTable:
        return costs.replace(**{name: getattr(costs, name) * by for name, by in scale.items()})

    return replace(
        profile,
        costs=table(profile.costs),
        partial={level: table(costs) for level, costs in profile.partial.items()},
        op_overhead_ms=max(0.0, gap_ms),
        fused_factor=fused,
        about={**profile.about, "corrected_by_runs": True},
    )


def _equations(profile: Profile, row: Row, group: Any, groups: int) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Return, by op kind, the part of every op's predicted time that each layer kind takes [ops, layer kinds], and the
    measured times of the ops."""
    plan, costs = row.plan, profile.costs
    spans = predict(plan, profile).spans
    predicted = spans.end_ms - spans.start_ms
    full = op_durations(plan, costs) * np.where(spans.kind == B, profile.fused_factor, 1.0)
    # Ops run faster while other ranks are idle; all layer kinds in an op are scaled alike.
    shared = np.divide(predicted, full, out=np.ones_like(full), where=full > 0)
    parts = np.stack(
        [
            op_durations(
                plan,
                costs.replace(**{name: np.where(group == g, getattr(costs, name), 0.0) for name in TIMES.values()}),
            )
            for g in range(groups)
        ],
        axis=1,
    )
    parts = parts * np.where(spans.kind == B, profile.fused_factor, 1.0)[:, None] * shared[:, None]
    fits = (row.ran.op_ms > 0) & (full > 0)  # the loss of a cut head has no layers, so no costs to correct
    out: dict[str, Floats] = {}
    times: dict[str, Floats] = {}
    for kind in "FIWB":
        mine = (spans.kind == CODES[kind]) & fits
        out[kind], times[kind] = parts[mine], row.ran.op_ms[mine]
    return out, times


def _fit(parts: Floats, took: Floats, before: Floats) -> Floats:
    """Fit one factor per column so that the row sums match the measured times, by least squares of relative errors.
    `before`: the factors that the columns contain already; the product of old and new factor is drawn towards 1.

    >>> parts, took = np.array([[1.0, 1.0], [1.0, 3.0], [2.0, 0.0]]), np.array([3.0, 7.0, 2.0])
    >>> _fit(parts, took, np.ones(2)).round(1).tolist()
    [1.0, 2.0]
    """
    rows = parts / took[:, None]
    weight = np.sqrt(PULL * max(len(took), 1) / max(parts.shape[1], 1)) * np.abs(rows).mean()
    equations = np.vstack([rows, weight * np.diag(before)])
    wanted = np.concatenate([np.ones(len(took)), np.full(parts.shape[1], weight)])
    factors, *_ = np.linalg.lstsq(equations, wanted, rcond=None)
    return np.maximum(factors, 1e-3)

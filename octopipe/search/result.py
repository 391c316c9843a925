"""What a search returns and what it reports while it runs.

Knows: the records. Does not know: how their values are obtained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from octopipe.base.display import html_of, one_line
from octopipe.plans.plan import Plan
from octopipe.simulation.bounds.bounds import PlanClass
from octopipe.simulation.timeline import Timeline


def gap_of(step_ms: float, bound_ms: float) -> float:
    """How far a time is above a bound, as a share of the bound; a rounding error below the bound counts as equal to it.

    >>> gap_of(85.0 - 1e-12, 85.0), gap_of(110.0, 100.0) > 0.0999
    (0.0, True)
    """
    gap = step_ms / bound_ms - 1.0 if bound_ms > 0 else 0.0
    return 0.0 if abs(gap) < 1e-9 else gap


class Step(NamedTuple):
    """One iteration of a search: when, in which phase, which move, and the step time before and after it."""

    iteration: int
    seconds: float
    phase: str
    """partition, placement, schedule, recompute, or start."""
    move: str
    before_ms: float
    after_ms: float
    """Infinite where the move did not lead to a plan that runs and fits."""
    best_ms: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON: infinite times become None."""
        return {k: None if isinstance(v, float) and v == float("inf") else v for k, v in self._asdict().items()}


class Progress(NamedTuple):
    """The state of a search, as its callback receives it."""

    seconds: float
    budget_s: float
    iterations: int
    phase: str
    best_ms: float
    """Infinite before the first plan."""
    lower_bound_ms: float
    bubbles: dict[str, float]
    """Share of all rank time per kind of idle time: boundary, communication, imbalance, residual."""
    plan: Plan | None = None
    """The best plan gathered so far (it may lag behind best_ms by a moment)."""

    @property
    def gap(self) -> float:
        """How far the best plan is above the bound, as a share of the bound."""
        return gap_of(self.best_ms, self.lower_bound_ms)


Callback = Callable[[Progress], object]
"""A function that is called a few times per second. If it returns True, the search ends with the best plan so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a search before it is completed to a `TuneResult`."""

    plan: Plan
    timeline: Timeline
    iterations: int
    log: list[Step]
    interrupted: bool
    phase_iterations: dict[str, int] = field(default_factory=dict)
    finalists: list[Plan] = field(default_factory=list)
    """Plans that fit and are almost as fast as the best one. A robust search chooses among them."""
    systems: dict[str, float] = field(default_factory=dict)
    """Step times of the published systems whose plans the search built; infinite if a plan does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The best plan found, how good it is, and how it was found."""

    plan: Plan
    step_ms: float
    """The step time that `simulate(plan, costs).step_ms` returns."""
    lower_bound_ms: float
    """No plan of the class `plans` is faster."""
    bound_name: str
    """The argument (proof) from which the bound follows."""
    method: str
    seconds: float
    iterations: int
    """Number of moves that were evaluated, summed over all workers."""
    log: tuple[Step, ...]
    """Every iteration of Algorithm 1 and of random search; only the improvements of method `best`."""
    explanation: str
    interrupted: bool = False
    optimal: bool = False
    """The exact method proved that no plan of the class `plans` is faster."""
    plans: PlanClass = field(default_factory=PlanClass)
    """The class of plans that was searched, to which the bound and `optimal` refer."""
    mean_jittered_ms: float | None = None
    """The mean step time over randomly varied layer times; only set by a robust search."""
    phase_iterations: dict[str, int] = field(default_factory=dict)
    """Number of iterations of each phase."""
    systems: dict[str, float] = field(default_factory=dict)
    """Step times of published systems in this setting, as far as the search built them (infinite: does not fit)."""
    notes: tuple[str, ...] = ()
    """Hints for the user, such as a default that was chosen because the costs lack some value."""
    hidden_share: float = 1.0
    """The share of sends and receives that are hidden completely behind their rank's computation."""
    overlappable_share: float = 1.0
    """The same share as the paper counts it: transfers that are hidden at least in part."""

    def __repr__(self) -> str:
        plan = f"{len(self.plan.stages)} stages on {self.plan.num_ranks} ranks"
        found = f"method {self.method} in {self.seconds:.1f} s"
        return one_line("TuneResult", f"{self.step_ms:.2f} ms, {self.gap:.2%} above the bound", plan, found)

    def _repr_html_(self) -> str | None:
        return html_of(self)

    @property
    def gap(self) -> float:
        """How far the plan is above the proven bound, as a share of the bound."""
        return gap_of(self.step_ms, self.lower_bound_ms)

"""The numbers that several verbs print about a plan, each defined once, with its name in words and in JSON.

Knows:
- the *step* (`step_ms`): from the start of the first op to the end of everything, gradient reduction and optimizer
  included; the *pipeline* (`makespan_ms`): from the start of the first op to the end of the last one. They are equal if
  the costs contain neither a reduction nor an optimizer;
- the *lower bound* (`lower_bound_ms`) and the class of plans it holds for (`bound_of`): the bound that a tuned plan
  carries, if it is priced with its own costs, else that of the smallest class to which the plan belongs;
- the same step *with contention* (`contended_step_ms`, `contended_makespan_ms`), if the costs are a profile measured on
  ranks that share a device: for `step_ms` every op takes as long as while all ranks are busy.

Does not know: how any of them is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from octopipe.base.display import milliseconds

if TYPE_CHECKING:
    from octopipe.costs.profile_file import Profile
    from octopipe.costs.table import CostTable
    from octopipe.plans.plan import Plan
    from octopipe.simulation.bounds.bounds import PlanClass
    from octopipe.simulation.timeline import Timeline


def after_words(timeline: Timeline) -> str:
    """Return words on what the step contains in addition to its pipeline; empty if there is nothing."""
    after = timeline.step_ms - timeline.makespan_ms
    if after <= 1e-9 * timeline.step_ms:
        return ""
    return f" (pipeline {milliseconds(timeline.makespan_ms)}, then gradient reduction and optimizer)"


class PlanBound(NamedTuple):
    """A lower bound on the step time, and the class of plans for which it holds."""

    ms: float
    plans: PlanClass

    def words(self, step_ms: float) -> str:
        """Return e.g. `lower bound 146.7 ms for plans that hold each layer once and may recompute (3.1 % above it)`."""
        over = f" ({100 * max(step_ms / self.ms - 1, 0.0):.1f} % above it)" if self.ms > 0 and step_ms > 0 else ""
        return f"lower bound {milliseconds(self.ms)} for {self.plans.words}{over}"

    def numbers(self) -> dict[str, Any]:
        return {"lower_bound_ms": self.ms, "bound_of": self.plans.as_dict()}


def bound_of(costs: CostTable, plan: Plan, step_ms: float) -> PlanBound:
    """Return the bound in the plan if `costs` are its own, else that of the smallest class that includes it."""
    from octopipe.plans.setting import COSTS
    from octopipe.simulation.bounds.bounds import PlanClass, lower_bound

    carried, words = plan.extra.get("lower_bound_ms"), plan.extra.get("bound_of")
    classes = [PlanClass(*flags) for flags in itertools.product((True, False), repeat=4)]
    named = next((c for c in classes if c.words == words), None)
    if isinstance(carried, int | float) and named is not None and plan.extra.get(COSTS) == costs.digest():
        return PlanBound(float(carried), named)
    moved = any(stage.offload for stage in plan.stages)
    plans = named or PlanClass(copies=bool(plan.replicas()), cuts_head=bool(plan.shards()), offloads=moved)
    if plan.edges and not plan.shards():
        return PlanBound(0.0, plans)  # no bound is proven for paths that fork, unless they fork because of a split head
    # Rounding may put the bound slightly above the step time of a plan that attains it.
    found = lower_bound(costs, plan.num_ranks, plan.num_micro_batches, *plans).ms
    return PlanBound(min(found, step_ms) if found <= step_ms * (1 + 1e-9) else found, plans)


def exchange_words(timeline: Timeline) -> str:
    """Return words on how long experts exchange tokens and how much of that is hidden; "" if there is no exchange."""
    if timeline.exchange.total_ms <= 0:
        return ""
    share = 100 * timeline.exchange.share
    hidden = f"{share:.0f} % of it runs" if share >= 0.5 else "nothing of it runs"
    took = timeline.exchange.total_ms / timeline.num_ranks
    return f"Experts exchange tokens for {took:.0f} ms of a step on every GPU; {hidden} behind computation."


def evenly_routed_ms(plan: Plan, costs: CostTable, model: str | None) -> float | None:
    """Return the plan's step time if all expert ranks got equally many tokens.

    None if the costs already assume that, or if MODEL's costs cannot be computed without the imbalance.
    """
    from dataclasses import replace

    from octopipe.costs.resolve import costs_of_setup, resolve_measured, resolve_spec
    from octopipe.simulation.simulator import simulate

    setup = costs.setup
    if setup is None or not setup.imbalance or model is None:
        return None
    spec = resolve_spec(model)
    if spec is None:
        measured = resolve_measured(model)
        if measured is None or measured.num_layers != costs.num_layers:
            return None
        even = measured.with_imbalance(())
        times = {name: getattr(even, name) for name in ("forward_ms", "input_ms", "weight_ms", "segments")}
        return simulate(plan, costs.replace(**times), check=False).step_ms
    if setup.ep == 1:
        return None
    return simulate(plan, costs_of_setup(spec, replace(setup, imbalance=())), check=False).step_ms


def uneven_words(even_ms: float | None, step_ms: float) -> str:
    """Return words on the cost of uneven routing; "" if it was not computed."""
    if even_ms is None:
        return ""
    costs = f"Uneven routing costs {100 * (1 - even_ms / step_ms):.1f} % of the step"
    return f"{costs}: with the same tokens on every expert rank this plan would take {milliseconds(even_ms)}."


def contended(plan: Plan, costs: CostTable, model: str | None, channel: str = "directed") -> Timeline | None:
    """Return the timeline with contention; None unless MODEL is a profile of ranks that slow each other down."""
    profile = _profile_of(model)
    if profile is None or profile.costs.num_layers != plan.num_layers or channel == "blocking":
        return None
    from octopipe.simulation.contention import predict

    profile = profile.with_costs(costs) if costs.routing is None else profile.as_priced(costs)
    return predict(plan, profile, channel=channel)  # type: ignore[arg-type]


def contended_numbers(timeline: Timeline | None) -> dict[str, float]:
    if timeline is None:
        return {}
    return {"contended_step_ms": timeline.step_ms, "contended_makespan_ms": timeline.makespan_ms}


def predicted_numbers(plan: Plan, profile: Profile, predicted: Timeline) -> dict[str, float]:
    """Return a run's prediction under `simulate`'s names: with contention, and with all ranks always busy."""
    from octopipe.simulation.simulator import simulate

    plain = simulate(plan, profile.costs)
    return {"step_ms": plain.step_ms, "makespan_ms": plain.makespan_ms, **contended_numbers(predicted)}


def without_contention_words(numbers: Mapping[str, float]) -> str:
    """Return how the prediction with contention differs from what `simulate` prints first; "" if they agree."""
    plain = numbers["makespan_ms"]
    if abs(plain / numbers["contended_makespan_ms"] - 1) <= 1e-6:
        return ""
    return (
        f"the prediction is with contention; with the op times of all ranks busy, which `simulate` and "
        f"`tune` call the pipeline, it would be {milliseconds(plain)}"
    )


def contended_words(timeline: Timeline) -> str:
    return (
        f"with contention as the profile measured it {milliseconds(timeline.step_ms)} a step{after_words(timeline)}: "
        "an op is faster while other ranks are idle; the time above takes every op as measured with all ranks busy"
    )


def _profile_of(model: str | None) -> Any:
    import os

    from octopipe.base.errors import OctoPipeError
    from octopipe.base.files import read_json_object
    from octopipe.costs.profile_file import FORMAT, load_profile

    if not model or not os.path.isfile(model):
        return None
    try:
        tag = read_json_object(model).get("format")
        if not isinstance(tag, str) or tag.split("/")[0] != FORMAT.split("/")[0]:
            return None
        profile = load_profile(model)
    except (OSError, OctoPipeError):
        return None  # the code that needs the file reports what is wrong with it
    plain = not profile.partial and profile.op_overhead_ms == 0 and profile.fused_factor == 1
    return None if plain else profile


def model_of_plan(plan: Plan) -> str | None:
    """Return the model that a plan's setting names, if any."""
    setting = plan.extra.get("setting")
    name = setting.get("model") if isinstance(setting, Mapping) else None
    return name if isinstance(name, str) else None


def path_words(plan: Plan) -> str:
    """Return the ranks that a micro-batch passes if its path forks or joins, e.g. `0 > 1 > (0 1 2 3) > 2`, else ""."""
    from octopipe.plans.paths import levels

    if not plan.edges:
        return ""
    words = []
    for stages in levels(plan.routes[0], plan.edges[0]):
        ranks = " ".join(str(plan.stages[s].rank) for s in stages)
        words.append(ranks if len(stages) == 1 else f"({ranks})")
    return f"path by rank, stages side by side in brackets: {' > '.join(words)}"

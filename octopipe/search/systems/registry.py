"""The registry of pipeline systems: name -> policy that turns costs into a Plan.

Knows: how a policy is declared, found (including entry points of other packages) and run. Does not know:
any policy; each has a file of its own in this package.

A policy of your own is one small file:

    from octopipe.search.systems import Setting, system

    @system(name="mine", title="My schedule", paper="none yet", year=2026, tunes=("scheduling",))
    def mine(setting: Setting) -> Plan: ...

and, to ship it in a package, an entry point in the group `octopipe.systems` that names the module.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from octopipe.base.errors import NotApplicableError, OctoPipeError
from octopipe.base.limits import refuse_too_large
from octopipe.costs.table import CostTable
from octopipe.plans.branches import along_graph
from octopipe.plans.plan import Plan

BUILT_IN = (
    "gpipe",
    "one_f_one_b",
    "interleaved",
    "breadth_first",
    "bpipe",
    "pipe_offload",
    "optpipe",
    "alpa",
    "dapple",
    "adapipe",
    "metis",
    "mist",
    "zb_h1",
    "zb_h2",
    "zb_heuristic",
    "zb_v",
    "v_half",
    "v_min",
    "chimera",
    "hanayo",
    "dualpipe",
    "dualpipe_v",
    "tessel",
    "dynapipe",
    "mario",
)
"""Modules of this package that declare policies, in the order of `systems()`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The information that a policy may use."""

    costs: CostTable
    num_ranks: int
    num_micro_batches: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the policy (`chunks` of interleaved systems, a solver's time limit, ...)."""
    asked: set[str] = field(default_factory=set, compare=False)
    """Names of the options that the policy has read; other given options are rejected."""

    def option(self, name: str, default: Any) -> Any:
        self.asked.add(name)
        return self.options.get(name, default)


Policy = Callable[[Setting], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A policy with its description for `octopipe systems`."""

    name: str
    title: str
    paper: str
    year: int
    tunes: tuple[str, ...]
    """Which of partitioning, placement and scheduling it optimises: the columns of the paper's Table I."""
    constraint: str
    """The conditions under which it applies, in words; empty if it always applies."""
    policy: Policy


_REGISTERED: dict[str, System] = {}


def system(
    *, name: str, title: str, paper: str, year: int, tunes: tuple[str, ...] = (), constraint: str = ""
) -> Callable[[Policy], Policy]:
    """Declare a policy under a name."""

    def register(policy: Policy) -> Policy:
        _REGISTERED[name] = System(
            name=name, title=title, paper=paper, year=year, tunes=tunes, constraint=constraint, policy=policy
        )
        return policy

    return register


@cache
def _load_all() -> None:
    for module in BUILT_IN:
        importlib.import_module(f"octopipe.search.systems.{module}")
    for point in entry_points(group="octopipe.systems"):
        try:
            point.load()
        except Exception as error:
            raise OctoPipeError(
                f"the systems plug-in {point.name} ({point.value}) fails to load: {error}; fix or uninstall it"
            ) from error


def systems() -> dict[str, System]:
    """Every known system by name: those of this package in the order of `BUILT_IN`, then all others as they came.

    Modules of this package also import each other, so the order in which they register depends on which of them a
    program happens to import first. Searches that start from every system must not depend on that.
    """
    _load_all()
    place = {f"octopipe.search.systems.{module}": number for number, module in enumerate(BUILT_IN)}
    known = sorted(
        _REGISTERED.items(), key=lambda item: place.get(getattr(item[1].policy, "__module__", ""), len(place))
    )
    return dict(known)


def get_system(name: str) -> System:
    known = systems()
    if name not in known:
        close = difflib.get_close_matches(name, known, 3)
        hint = f"; did you mean {' or '.join(close)}?" if close else "; `octopipe systems` lists them"
        raise OctoPipeError(f"unknown system {name[:60]!r}{hint}")
    return known[name]


def check_sizes(costs: CostTable, num_ranks: int, num_micro_batches: int) -> None:
    """Reject sizes for which there is no plan."""
    if num_ranks < 1 or num_micro_batches < 1:
        raise OctoPipeError(f"pp {num_ranks} and {num_micro_batches} micro-batches; both must be at least 1")
    if num_ranks > costs.num_layers:
        raise OctoPipeError(
            f"pp {num_ranks} is larger than the {costs.num_layers} layers of {costs.model}; use a smaller --pp"
        )
    refuse_too_large(num_ranks, num_micro_batches)


def build_plan(
    name: str,
    costs: CostTable,
    num_ranks: int,
    num_micro_batches: int,
    *,
    split_backward: bool | None = None,
    **options: Any,
) -> Plan:
    """Build and check the plan of a system. `split_backward=True` splits B into I and W if the system does not do so.

    Raises an error for unknown options, and if the plan recomputes a layer that must not run twice.
    """
    check_sizes(costs, num_ranks, num_micro_batches)
    entry = get_system(name)
    # Published systems plan chains: the plan is built for the layers in sequence, then connected along the real graph.
    graph, costs = costs.graph, costs.as_chain()
    setting = Setting(costs=costs, num_ranks=num_ranks, num_micro_batches=num_micro_batches, options=options)
    plan = entry.policy(setting)
    if idle := sorted(set(options) - setting.asked):
        raise OctoPipeError(f"{name} has no option {idle[0]}; leave it out, it would change nothing")
    if split_backward and not plan.splits_backward:
        from octopipe.search.systems.split import split_backward as split

        plan = split(plan, costs)
    bad = {k for k in costs.not_repeatable() if any(k in stage.recomputed_layers for stage in plan.stages)}
    if bad:
        raise NotApplicableError(
            f"{name}: it recomputes layer {min(bad)}, which gave another result when it ran a second time in the "
            "profile; use a system that does not recompute"
        )
    return along_graph(plan.with_extra(system=name).check(name), graph)


def require(condition: bool, name: str, reason: str) -> None:
    """Raise NotApplicableError with the reason unless a system's constraint holds."""
    if not condition:
        raise NotApplicableError(f"{name}: {reason}")

"""Closed forms: values that a system's paper publishes, compared with the simulation of its plan.

Knows: how an expected value is declared, collected from the systems' modules and checked. Does not know: the
formulas of the systems, except of the oldest (GPipe, 1F1B, interleaved), which are at the end.

A system's module may define

    def closed_forms() -> list[ClosedForm]: ...

and `octopipe systems --check` and the tests compare its plans with them; this includes modules of other packages.

>>> form = ClosedForm(system="1f1b", case="p=2", quantity="bubble", expected=3.0, simulate=lambda: 3.0)
>>> form.checked().matches
True
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octopipe.costs.table import CostTable
from octopipe.search.systems.registry import build_plan, systems
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """One published value and the simulation that must reproduce it."""

    system: str
    case: str
    """The setting in words: `p=4 m=8 F=1 b=2`."""
    quantity: str
    """What is compared: `bubble (makespan)`, `peak of rank 0 in micro-batches`, ..."""
    expected: float
    simulate: Callable[[], float]
    """Runs the simulation; called only when the form is checked."""
    formula: str = ""
    """The formula in the paper's letters, where there is one."""
    tolerance: float = 1e-9
    """Largest difference, relative to the expected value (absolute below 1)."""
    at_most: bool = False
    """The published value is an upper bound instead of an equality."""

    def checked(self) -> Checked:
        return Checked(form=self, simulated=float(self.simulate()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A closed form after its simulation."""

    form: ClosedForm
    simulated: float

    @property
    def matches(self) -> bool:
        slack = self.form.tolerance * max(1.0, abs(self.form.expected))
        if self.form.at_most:
            return self.simulated <= self.form.expected + slack
        return abs(self.simulated - self.form.expected) <= slack


def all_closed_forms() -> list[ClosedForm]:
    """The forms of every system, in the order of the registry."""
    forms = _oldest()
    seen: set[str] = set()
    for entry in systems().values():
        name = entry.policy.__module__
        declare = getattr(sys.modules.get(name), "closed_forms", None)
        if declare is not None and name not in seen:
            forms += declare()
        seen.add(name)
    order = {name: i for i, name in enumerate(systems())}
    return sorted(forms, key=lambda form: order.get(form.system, len(order)))


# -- helpers for the modules that declare forms -----------------------------------------------------------


def on_timeline(
    system: str, costs: CostTable, p: int, m: int, read: Callable[[Timeline], float], **options: Any
) -> Callable[[], float]:
    """Return a function that simulates the system's own plan and applies `read` to the timeline; options go to
    build_plan."""

    def run() -> float:
        return read(simulate(build_plan(system, costs, p, m, **options), costs))

    return run


def bubble_ms(timeline: Timeline) -> float:
    """Return the makespan minus the work of the busiest rank."""
    return timeline.makespan_ms - float(timeline.busy_ms.max())


def span_bubble_ms(timeline: Timeline) -> float:
    """Return the span minus the work of the busiest rank, as the Zero Bubble papers measure the bubble."""
    return timeline.span_ms - float(timeline.busy_ms.max())


def peak_of_rank(rank: int) -> Callable[[Timeline], float]:
    """Return a function that reads the peak bytes of a rank above its static bytes. With activation_bytes=1 this is a
    number of stage activations."""

    def read(timeline: Timeline) -> float:
        return float(timeline.peak_bytes[rank]) - timeline.memory[rank].static_bytes

    return read


def highest_peak(timeline: Timeline) -> float:
    """The largest of all ranks' peaks above their static bytes."""
    return max(peak_of_rank(rank)(timeline) for rank in range(timeline.num_ranks))


def even_layers(num_layers: int, forward_ms: float, backward_ms: float) -> CostTable:
    """Return equal layers of one byte of activations each; I and W take half of the backward each."""
    half = backward_ms / 2
    return CostTable.uniform(
        num_layers=num_layers, forward_ms=forward_ms, input_ms=half, weight_ms=half, activation_bytes=1.0
    )


# -- the oldest systems -----------------------------------------------------------------------------------


def _oldest() -> list[ClosedForm]:
    forms = []
    for p, m, f, b in ((4, 8, 1.0, 2.0), (8, 16, 1.5, 2.5), (3, 3, 1.0, 1.0)):
        case, costs = f"p={p} m={m} F={f:g} b={b:g}", even_layers(p, f, b)
        for name, peak, rule in (("gpipe", m, "m"), ("1f1b", min(p, m), "p-i")):
            forms += [
                ClosedForm(
                    system=name,
                    case=case,
                    quantity="bubble",
                    formula="(p-1)(F+b)",
                    expected=(p - 1) * (f + b),
                    simulate=on_timeline(name, costs, p, m, bubble_ms),
                ),
                ClosedForm(
                    system=name,
                    case=case,
                    quantity="peak of rank 0, micro-batches",
                    formula=rule,
                    expected=float(peak),
                    simulate=on_timeline(name, costs, p, m, peak_of_rank(0)),
                ),
            ]
    rule = "2(p-1)+(v-1)p+1, at most mv"
    return forms + looped_forms("interleaved", rule, lambda p, m, v: min(2 * (p - 1) + (v - 1) * p + 1, m * v))


def looped_forms(system: str, rule: str, peak: Callable[[int, int, int], int]) -> list[ClosedForm]:
    """Return the forms for the bubble and the peak of rank 0 with v stages per rank. `peak(p, m, v)` is the expected
    peak in stage activations, and `rule` its formula in words."""
    forms = []
    for p, m, v in ((4, 8, 2), (4, 4, 3), (8, 16, 2)):
        f, b = 1.0, 2.0
        case, costs = f"p={p} m={m} v={v} F={v * f:g} b={v * b:g}", even_layers(p * v, f, b)
        forms += [
            ClosedForm(
                system=system,
                case=case,
                quantity="bubble",
                formula="(p-1)(F+b)/v",
                expected=(p - 1) * (f + b),
                simulate=on_timeline(system, costs, p, m, bubble_ms, chunks=v),
            ),
            ClosedForm(
                system=system,
                case=case,
                quantity="peak of rank 0, chunks",
                formula=rule,
                expected=float(peak(p, m, v)),
                simulate=on_timeline(system, costs, p, m, peak_of_rank(0), chunks=v),
            ),
        ]
    return forms

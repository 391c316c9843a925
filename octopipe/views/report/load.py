"""Loads files as report entries: plan files are simulated, timeline files are shown as they are.

Knows: which kind of file is which. Does not know: how a plan's costs are found (plans/setting.py), the rules for a
valid timeline (simulation/timeline_file.py), or the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import read_bytes, shown, stem_of
from octopipe.base.limits import MAX_TIMELINE_BYTES
from octopipe.plans.file import FORMAT as PLAN_FORMAT
from octopipe.plans.file import plan_from_json
from octopipe.plans.setting import costs_of_plan
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline, timeline_from_json
from octopipe.simulation.timeline_file import FORMAT as TIMELINE_FORMAT
from octopipe.views.report.entry import Entry


def load_entry(path: str | Path, setting: Mapping[str, Any]) -> Entry:
    """Load a plan file (and simulate it) or a timeline file as an entry of a report."""
    where = shown(path)
    data = read_bytes(path, most_bytes=MAX_TIMELINE_BYTES)
    form = _format(data, where)
    family = form.split("/")[0]
    if family == TIMELINE_FORMAT.split("/")[0]:
        timeline = timeline_from_json(data, where)
        return Entry(timeline=timeline, label=timeline.label or stem_of(path))
    if family == PLAN_FORMAT.split("/")[0]:
        plan = plan_from_json(data, where)
        costs = costs_of_plan(plan, setting, where)
        if any(value is not None for value in setting.values()):
            plan = plan.with_extra(lower_bound_ms=None)  # proven for the plan's own costs, not for the given ones
        label = str(plan.extra.get("label") or plan.extra.get("system") or stem_of(path))
        return Entry(timeline=simulate(plan, costs, label=label), plan=plan, costs=costs, label=label)
    raise OctoPipeError(
        f'{where}: neither a plan nor a timeline; expected "format": "{PLAN_FORMAT}" or "{TIMELINE_FORMAT}"'
    )


def load_entries(paths: Sequence[str | Path], setting: Mapping[str, Any]) -> list[Entry]:
    """Load all files in order. A timeline gets layers from a plan with the same ops, and all labels are unique."""
    entries = [load_entry(path, setting) for path in paths]
    labels = unique_labels(
        [(e.name, e.timeline.measured, stem_of(path)) for e, path in zip(entries, paths, strict=True)]
    )
    plans = [e for e in entries if e.plan is not None]
    out: list[Entry] = []
    for entry, label in zip(entries, labels, strict=True):
        if entry.plan is None:
            twin = next((p for p in plans if same_ops(p.timeline, entry.timeline)), None)
            if twin is not None:
                entry = Entry(timeline=entry.timeline, plan=twin.plan, costs=twin.costs, label=entry.label, channel="")
        out.append(
            Entry(timeline=entry.timeline, plan=entry.plan, costs=entry.costs, label=label, channel=entry.channel)
        )
    return out


def unique_labels(found: Sequence[tuple[str, bool, str]]) -> list[str]:
    """Return unique labels from names, whether each was measured, and the files; a label states only what is needed.

    >>> unique_labels([("octopipe", False, "plan"), ("octopipe", True, "run"), ("1f1b", False, "base")])
    ['octopipe, predicted', 'octopipe, measured', '1f1b']
    >>> unique_labels([("octopipe", False, "a"), ("octopipe", False, "b"), ("octopipe", False, "b")])
    ['octopipe (a)', 'octopipe (b)', 'octopipe (b), 2']
    """
    kinds: dict[str, set[bool]] = {}
    for name, measured, _ in found:
        kinds.setdefault(name, set()).add(measured)
    labels = [
        f"{name}, {'measured' if measured else 'predicted'}" if len(kinds[name]) > 1 else name
        for name, measured, _ in found
    ]
    files = [(label, stem) for label, (_, _, stem) in zip(labels, found, strict=True)]
    out: list[str] = []
    for label, stem in files:
        alike = {other for same, other in files if same == label}
        chosen = f"{label} ({stem})" if len(alike) > 1 else label
        first, number = chosen, 2
        while chosen in out:
            chosen, number = f"{first}, {number}", number + 1
        out.append(chosen)
    return out


def same_ops(a: Timeline, b: Timeline) -> bool:
    """Whether both run the same ops in the same order on every rank."""
    names = ("rank", "stage", "kind", "micro_batch")
    return all(np.array_equal(getattr(a.spans, n), getattr(b.spans, n)) for n in names)


def _format(data: bytes, where: str) -> str:
    class Tagged(msgspec.Struct):
        format: str = ""

    try:
        return msgspec.json.decode(data, type=Tagged).format
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise OctoPipeError(f"{where}: not a JSON object ({' '.join(str(error).split())[:120]})") from None

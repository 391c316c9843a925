"""Files into report entries: plan files are priced and simulated, timeline files are shown as they are.

Knows: which kind of file is which, and what must hold in a timeline. Does not know: how a plan finds its costs
(plan_setting.py), or the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octopipe.errors import OctoPipeError
from octopipe.files import read_bytes, shown
from octopipe.plan_file import FORMAT as PLAN_FORMAT
from octopipe.plan_file import plan_from_json
from octopipe.plan_setting import costs_of_plan
from octopipe.report.entry import Entry
from octopipe.simulator import simulate
from octopipe.timeline import FORMAT as TIMELINE_FORMAT
from octopipe.timeline import Timeline, timeline_from_json


def load_entry(path: str | Path, setting: Mapping[str, Any]) -> Entry:
    """A plan file (simulated) or a timeline file as an entry of a report."""
    where = shown(path)
    data = read_bytes(path, most_bytes=1 << 30)
    form = _format(data, where)
    if form == TIMELINE_FORMAT:
        timeline = checked(timeline_from_json(data, where), where)
        return Entry(timeline=timeline, label=timeline.label or Path(path).stem)
    if form == PLAN_FORMAT:
        plan = plan_from_json(data, where)
        costs = costs_of_plan(plan, setting, where)
        if any(value is not None for value in setting.values()):
            plan = plan.with_extra(lower_bound_ms=None)  # proven for the plan's own costs, not for those asked for
        label = str(plan.extra.get("label") or plan.extra.get("system") or Path(path).stem)
        return Entry(timeline=simulate(plan, costs, label=label), plan=plan, costs=costs, label=label)
    raise OctoPipeError(
        f'{where}: neither a plan nor a timeline; expected "format": "{PLAN_FORMAT}" or "{TIMELINE_FORMAT}"'
    )


def load_entries(paths: Sequence[str | Path], setting: Mapping[str, Any]) -> list[Entry]:
    """All files in order; timelines borrow layers from a plan of the same ops, equal labels get numbers."""
    entries = [load_entry(path, setting) for path in paths]
    plans = [e for e in entries if e.plan is not None]
    out: list[Entry] = []
    for entry in entries:
        if entry.plan is None:
            twin = next((p for p in plans if same_ops(p.timeline, entry.timeline)), None)
            if twin is not None:
                entry = Entry(timeline=entry.timeline, plan=twin.plan, costs=twin.costs, label=entry.label, channel="")
        taken = [e.name for e in out]
        label, number = entry.name, 2
        while label in taken:
            label, number = f"{entry.name} ({number})", number + 1
        out.append(
            Entry(timeline=entry.timeline, plan=entry.plan, costs=entry.costs, label=label, channel=entry.channel)
        )
    return out


def same_ops(a: Timeline, b: Timeline) -> bool:
    """Do the two run the same ops in the same order on every rank?"""
    names = ("rank", "stage", "kind", "micro_batch")
    return all(np.array_equal(getattr(a.spans, n), getattr(b.spans, n)) for n in names)


def checked(timeline: Timeline, where: str) -> Timeline:
    """The timeline, if every number in it points at something."""
    s, t = timeline.spans, timeline.transfers
    ops, nodes = s.rank.size, s.rank.size + t.source.size

    def inside(values: np.ndarray, low: int, stop: int, name: str) -> None:
        if values.size and not (low <= int(values.min()) and int(values.max()) < stop):
            raise OctoPipeError(f"{where}: {name} must lie from {low} to {stop - 1}; the file is damaged")

    inside(s.rank, 0, timeline.num_ranks, "rank of an op")
    inside(s.kind, 0, 5, "kind of an op")
    inside(s.stage, 0, 1 << 20, "stage of an op")
    inside(s.micro_batch, 0, 1 << 20, "micro-batch of an op")
    inside(t.producer, 0, ops, "producer of a transfer")
    inside(t.consumer, 0, ops, "consumer of a transfer")
    inside(timeline.binding, -1, nodes, "binding node")
    if timeline.binding.size not in (0, nodes):
        raise OctoPipeError(f"{where}: binding has {timeline.binding.size} entries for {nodes} nodes")
    if np.any(np.diff(s.rank) < 0):
        raise OctoPipeError(f"{where}: ops must stand rank after rank; sort them by rank, then by start")
    if np.any(s.end_ms < s.start_ms) or np.any(s.start_ms < 0) or np.any(t.end_ms < t.start_ms):
        raise OctoPipeError(f"{where}: an op or a transfer ends before it starts; the file is damaged")
    for name, per_rank in (("memory", timeline.memory), ("capacity_bytes", timeline.capacity_bytes)):
        if len(per_rank) not in (0, timeline.num_ranks):
            raise OctoPipeError(f"{where}: {name} has {len(per_rank)} rows for {timeline.num_ranks} ranks")
    return timeline


def _format(data: bytes, where: str) -> str:
    class Tagged(msgspec.Struct):
        format: str = ""

    try:
        return msgspec.json.decode(data, type=Tagged).format
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise OctoPipeError(f"{where}: not a JSON object ({' '.join(str(error).split())[:120]})") from None

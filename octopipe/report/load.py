"""Files into report entries: plan files are priced and simulated, timeline files are shown as they are.

Knows: how a plan file's own setting (`"setting"` beside the plan: model, gpu, tp, seq, ...) and the user's
flags together find its costs. Does not know: the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octopipe.cost import CostTable
from octopipe.errors import OctoPipeError
from octopipe.files import read_bytes, shown
from octopipe.plan import Plan
from octopipe.plan_file import FORMAT as PLAN_FORMAT
from octopipe.plan_file import plan_from_json
from octopipe.report.entry import Entry
from octopipe.simulator import simulate
from octopipe.timeline import FORMAT as TIMELINE_FORMAT
from octopipe.timeline import Timeline, timeline_from_json

SETTING = (
    *("model", "gpu", "tp", "cp", "ep", "dp", "seq", "micro_batch_size", "zero", "precision", "gradients", "recompute"),
    *("sequence_parallel", "vocab_parallel", "reserve_gib", "p2p_ms", "memory_gib", "speeds", "gpus_per_node", "nodes"),
)
"""Keys of a plan's setting that price it; others are ignored."""


def costs_of(plan: Plan, setting: Mapping[str, Any], where: str = "plan") -> CostTable:
    """The costs behind a plan: its own setting, overruled by what `setting` gives (None gives nothing)."""
    from octopipe.resolve import resolve_costs

    own = plan.extra.get("setting")
    known = dict(own) if isinstance(own, Mapping) else {}
    known |= {key: value for key, value in setting.items() if value is not None}
    model = known.get("model") or plan.model
    if not model:
        raise OctoPipeError(f"{where}: the file does not say which model it is about; give --model")
    numbers = {key: known[key] for key in SETTING[1:] if known.get(key) is not None}
    speeds = numbers.pop("speeds", None)
    if numbers.get("recompute") in ("auto", "full"):
        del numbers["recompute"]  # which layers are computed again stands in the plan itself
    memory = numbers.get("memory_gib")
    if isinstance(memory, list | tuple):
        numbers["memory_gib"] = memory[0] if len(memory) == 1 else tuple(memory)
    try:
        if speeds:
            numbers["rank_speed"] = tuple(float(s) for s in speeds)
        costs = resolve_costs(
            str(model), pp=plan.num_ranks, micro_batches=plan.num_micro_batches, **numbers
        )
    except OctoPipeError as error:
        raise OctoPipeError(f"{where}: {error}") from None
    except (TypeError, ValueError) as error:
        raise OctoPipeError(f'{where}: "setting" cannot be used ({error}); mend it or give --model') from None
    if costs.num_layers != plan.num_layers:
        raise OctoPipeError(
            f"{where}: the plan has {plan.num_layers} layers, {costs.model} has {costs.num_layers}; "
            "give the plan's own model with --model"
        )
    return costs


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
        costs = costs_of(plan, setting, where)
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

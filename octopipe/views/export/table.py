"""Timelines as CSV: one row per op and per transfer, for spreadsheets and notebooks.

Knows: columns. Does not know: PyTorch's schedule CSV, which is a different thing (pytorch.py).
"""

from __future__ import annotations

import csv
import io

from octopipe.plans.plan import KINDS, Plan
from octopipe.simulation.timeline import Timeline

COLUMNS = (
    "what",
    "rank",
    "op",
    "stage",
    "kind",
    "micro_batch",
    "first_layer",
    "stop_layer",
    "start_ms",
    "end_ms",
    "to_rank",
    "bytes",
)


def timeline_csv(timeline: Timeline, plan: Plan | None = None) -> str:
    """Return the CSV text. `what` is compute, transfer (op: the op whose result is sent; rank: the sender), or the name
    of what follows the step."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    s, t = timeline.spans, timeline.transfers

    def about(i: int) -> list[object]:
        stage = int(s.stage[i])
        layers = [plan.stages[stage].first, plan.stages[stage].stop] if plan is not None else ["", ""]
        return [str(timeline.op(i)), stage, KINDS[s.kind[i]], int(s.micro_batch[i]), *layers]

    for i in range(s.rank.size):
        times = [repr(float(s.start_ms[i])), repr(float(s.end_ms[i]))]
        writer.writerow(["compute", int(s.rank[i]), *about(i), *times, "", ""])
    for i in range(t.source.size):
        times = [repr(float(t.start_ms[i])), repr(float(t.end_ms[i]))]
        row = ["transfer", int(t.source[i]), *about(int(t.producer[i])), *times]
        writer.writerow([*row, int(t.destination[i]), int(t.nbytes[i])])
    for e in timeline.extras:
        times = [repr(float(e.start_ms)), repr(float(e.end_ms))]
        writer.writerow([e.name, e.rank, *[""] * 6, *times, "", ""])
    return out.getvalue()

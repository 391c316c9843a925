"""Timelines and plans as they show themselves in a notebook: a picture and its numbers, no scripts.

Knows: `_repr_html_`. Does not know: the interactive report (page.py).
"""

from __future__ import annotations

import base64
import html

from octopipe.cost import CostTable
from octopipe.errors import OctoPipeError
from octopipe.export.png import timeline_png
from octopipe.export.svg import timeline_svg
from octopipe.plan import Plan
from octopipe.report.load import costs_of
from octopipe.simulator import simulate
from octopipe.timeline import Timeline

MAX_SVG_OPS = 3000
"""Beyond, a notebook gets pixels: thousands of boxes make an editor slow."""


def notebook_html(what: Timeline | Plan) -> str:
    """A small HTML fragment about a timeline, or about a plan with the best costs at hand."""
    if isinstance(what, Timeline):
        return _fragment(what, _numbers(what))
    timeline, note = plan_timeline(what)
    stages = f"{len(what.stages)} stages on {what.num_ranks} ranks, {what.num_micro_batches} micro-batches"
    return _fragment(timeline, f"{stages}; {note}")


def plan_timeline(plan: Plan) -> tuple[Timeline, str]:
    """The plan simulated with its own setting where that can be found, else as a schematic; and which it is."""
    label = str(plan.extra.get("system", "") or "plan")
    try:
        costs = costs_of(plan, {})
        return simulate(plan, costs, label=label), f"predicted for {costs.model}"
    except OctoPipeError:
        costs = CostTable.uniform(num_layers=plan.num_layers, model="")
        return simulate(plan, costs, label=label), "a schematic: every layer takes one unit for F, I and W"


def _numbers(timeline: Timeline) -> str:
    parts = [
        f"step {timeline.step_ms:.2f} ms",
        f"bubble {100 * timeline.bubble_ratio:.1f} %",
        "measured" if timeline.measured else "predicted",
    ]
    if timeline.memory and max(timeline.peak_gib, default=0.0) > 0:
        parts.append(f"peak {max(timeline.peak_gib):.1f} GiB" + ("" if timeline.fits else ", does not fit"))
    if timeline.transfers.source.size:
        parts.append(f"{100 * timeline.overlap.rate:.0f} % of transfers hidden")
    return "; ".join(parts)


def _fragment(timeline: Timeline, words: str) -> str:
    if timeline.spans.rank.size == 0:
        return f"<div>{html.escape('an empty timeline')}</div>"
    if timeline.spans.rank.size <= MAX_SVG_OPS:
        picture = timeline_svg(timeline).replace("<svg ", '<svg style="max-width:100%;height:auto" ', 1)
    else:
        data = base64.b64encode(timeline_png(timeline)).decode()
        picture = f'<img style="max-width:100%" alt={_quoted(words)} src="data:image/png;base64,{data}">'
    return f"<div>{picture}<div style='font-size:90%'>{html.escape(words)}</div></div>"


def _quoted(text: str) -> str:
    return '"' + html.escape(text, quote=True) + '"'

"""Timelines and plans in a notebook: a picture and its numbers, without scripts.

Knows: what `_repr_html_` shows, and that a plan is shown with times only if it carries the costs it was made for. Does
not know: the interactive report (page.py). The package registers `notebook_html` for it (`octopipe/__init__.py`).
"""

from __future__ import annotations

import base64
import html

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.plans.setting import COST_TABLE, SETTING, costs_of_plan
from octopipe.search.comparison import Comparison
from octopipe.search.result import TuneResult
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline
from octopipe.views.export.svg import timeline_svg

MAX_INLINE_OPS = 3000
"""Above this number of ops the picture is embedded as an image: thousands of boxes in the page make an editor slow."""
SCHEMATIC = "a schematic of the order alone: every layer takes one unit for F, I and W, so its lengths are not times"


def notebook_html(what: object) -> str | None:
    """Return an HTML fragment about a timeline, a plan, a comparison or a tuning result; None for anything else."""
    if isinstance(what, Timeline):
        setting = ", ".join(f"{key} {value}" for key, value in what.setting.items() if value is not None)
        return _fragment(what, "; ".join(filter(None, (_numbers(what), setting))))
    if isinstance(what, Comparison):
        return _comparison(what)
    if isinstance(what, TuneResult):
        bound = f"{what.gap:.1%} above the lower bound {what.lower_bound_ms:.1f} ms for {what.plans.words}"
        timeline, note = plan_timeline(what.plan)
        return _fragment(timeline, f"{note}; {bound}; {what.explanation}")
    if not isinstance(what, Plan):
        return None
    timeline, note = plan_timeline(what)
    stages = f"{len(what.stages)} stages on {what.num_ranks} ranks, {what.num_micro_batches} micro-batches"
    return _fragment(timeline, f"{stages}; {note}")


def _comparison(found: Comparison) -> str:
    """Return the comparison as a table, best first, with a bar for every step time."""
    ran = [r for r in found.results if not r.reason]
    longest = max((r.step_ms for r in ran), default=1.0)
    head = "".join(f"<th style='text-align:right'>{name}</th>" for name in ("step ms", "speed-up", "bubble", "GiB"))
    rows = [f"<tr><th style='text-align:left'>system</th>{head}<th></th></tr>"]
    for r in ran:
        speedup = "" if r.speedup is None else f"{r.speedup:.2f}x"
        memory = f"{r.max_memory_gib:.1f}" + ("" if r.fits else ", does not fit")
        cells = (f"{r.step_ms:.1f}", speedup, f"{100 * r.bubble_ratio:.1f} %", memory)
        numbers = "".join(f"<td style='text-align:right'>{cell}</td>" for cell in cells)
        width, colour = 160 * r.step_ms / max(longest, 1e-12), "#4c78a8" if r.fits else "#c44e52"
        bar = f"<div style='height:10px;width:{width:.0f}px;background:{colour}'></div>"
        rows.append(f"<tr><td style='text-align:left'>{html.escape(r.system)}</td>{numbers}<td>{bar}</td></tr>")
    others = "; ".join(f"{r.system}: {r.reason}" for r in found.results if r.reason)
    mode = "every backward split" if found.split_backward else "as published"
    words = (
        f"{found.model}, {found.num_ranks} ranks, {found.num_micro_batches} micro-batches, {mode}; lower bound "
        f"{found.lower_bound_ms:.1f} ms for {found.bound_of.words}"
    )
    said = f"<div style='font-size:90%'>{html.escape(words)}</div>"
    left_out = f"<div style='font-size:80%'>not run: {html.escape(others)}</div>" if others else ""
    return f"<div>{said}<table>{''.join(rows)}</table>{left_out}</div>"


def plan_timeline(plan: Plan) -> tuple[Timeline, str]:
    """Simulate the plan with the costs it carries, else with unit costs; return the timeline and a description."""
    label = str(plan.extra.get("system", "") or "plan")
    try:
        costs = costs_of_plan(plan)
        timeline = simulate(plan, costs, label=label)
        return timeline, f"{_numbers(timeline)} for {costs.model} ({_setting(plan)})"
    except OctoPipeError as error:
        carries = SETTING in plan.extra or COST_TABLE in plan.extra
        why = f" (the plan's own costs cannot be used: {error})" if carries else " (the plan carries no set-up)"
        costs = CostTable.uniform(num_layers=plan.num_layers, model="")
        return simulate(plan, costs, label=f"{label}, schematic in units"), SCHEMATIC + why


def _setting(plan: Plan) -> str:
    own = plan.extra.get(SETTING)
    if plan.extra.get(COST_TABLE) is not None or not isinstance(own, dict):
        return "the costs it was made with"
    words = (f"{key} {value}" for key, value in own.items() if key != "model" and value is not None)
    return ", ".join(words) or "default set-up"


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
    picture = timeline_svg(timeline)
    if timeline.spans.rank.size <= MAX_INLINE_OPS:
        picture = picture.replace("<svg ", '<svg style="max-width:100%;height:auto" ', 1)
    else:
        data = base64.b64encode(picture.encode()).decode()
        alt = html.escape(words, quote=True)
        picture = f'<img style="max-width:100%" alt="{alt}" src="data:image/svg+xml;base64,{data}">'
    return f"<div>{picture}<div style='font-size:90%'>{html.escape(words)}</div></div>"

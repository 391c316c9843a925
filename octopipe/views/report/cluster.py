"""A cluster's plan as a panel: tokens per second against GPUs, memory against the limit, the splits in a table.

Knows: how the record that `octopipe plan` stores in a plan is drawn, as HTML and SVG without scripts. Does not know:
how splits are found, or the pages around the panel (page.py, serve.py).
"""

from __future__ import annotations

import base64
import html
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief
from octopipe.base.limits import MAX_GPUS
from octopipe.views.report.assets import asset, fill
from octopipe.views.report.why_picture import why_svg

KEY = "cluster_plan"
"""Key of the record in a plan's `extra`."""
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 560, 300, 64, 44, 18
LETTER = 7.4
"""The width of a character of a label, also of a bold one, at 12 px in any sans-serif font."""
MOST_ROWS = 12
MOST_POINTS = 64
MOST_WHY = 6
"""The largest number of splits whose step time is drawn in parts."""
STYLE = """
.plan-command { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12px; }
.plan-charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 18px; }
.plan-charts svg { width: 100%; height: auto; display: block; }
.plan-charts text { font-size: 12px; fill: var(--quiet); font-variant-numeric: tabular-nums; }
.plan-charts text { paint-order: stroke; stroke: var(--card); stroke-width: 3px; stroke-linejoin: round; }
.plan-charts text.strong { fill: var(--text); font-weight: 600; }
.plan-charts h3 { font-size: 13px; margin: 0 0 4px; font-weight: 600; }
.plan-table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; margin-top: 12px; }
.plan-table th { text-align: right; color: var(--quiet); font-weight: 500; font-size: 12px; padding: 3px 8px; }
.plan-table td { text-align: right; padding: 4px 8px; border-top: 1px solid var(--line); white-space: nowrap; }
.plan-table td:nth-child(2), .plan-table th:nth-child(2) { text-align: left; white-space: normal; min-width: 15em; }
.plan-compare .plan-table :is(td, th):first-child { text-align: left; }
.plan-compare .plan-table :is(td, th):nth-child(2) { text-align: right; min-width: 0; }
.plan-table tr.best td { font-weight: 650; color: var(--accent); }
.plan-table tr.today td { color: var(--loss); }
.plan-why { margin-top: 14px; max-width: 980px; }
.plan-why svg { width: 100%; height: auto; display: block; }
.plan-scroll { overflow-x: auto; }
.plan-scroll .note { margin: 8px 0 0; }
#download { color: var(--accent); }
.cluster-panels { max-width: 1480px; margin: 0 auto; padding: 0 24px; }
"""

THEME = """
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
"""


def panel(record: object) -> str:
    """Return the HTML of the panel; empty if there is no record."""
    if not isinstance(record, Mapping):
        return ""
    try:
        rows = [row for row in record["candidates"] if isinstance(row, Mapping)][:MOST_ROWS]
        scaling = [row for row in record.get("scaling", ()) if isinstance(row, Mapping)][:MOST_POINTS]
        words = [str(w) for w in record.get("words", ())]
        charts = [_scaling(scaling, int(record["gpus"])), _memory(rows)]
        error = record.get("expected_error")
        commands = _commands(record.get("commands") or {})
        table, parts = _table(rows, None if error is None else float(error)), _why(rows)
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        why = " ".join(str(error).split())[:80]
        raise OctoPipeError(f"the plan's {KEY} cannot be drawn ({why}); plan again, or remove the key") from None
    title = html.escape(str(record.get("title", "The cluster")))
    said = "".join(f'<p class="note">{html.escape(w)}</p>' for w in words)
    return (
        f'<section class="card" id="cluster" aria-labelledby="cluster-title"><h2 id="cluster-title">{title}</h2>{said}'
        f'<div class="plan-charts">{"".join(charts)}</div>{parts}<div class="plan-scroll">{table}</div>'
        f"{commands}</section>"
    )


def _commands(lines: Mapping[str, Any]) -> str:
    """Return the commands that start the chosen split on every runtime, or the reason why there is none."""
    out = []
    for name, line in lines.items():
        text, runtime = str(line), html.escape(str(name))
        if text.startswith("none: "):
            out.append(f'<p class="note">{runtime}: no command, because {html.escape(text.removeprefix("none: "))}</p>')
        else:
            out.append(f'<p class="note">{runtime}</p><pre class="plan-command">{html.escape(text)}</pre>')
    return f'<details class="plan-commands"><summary>Commands</summary>{"".join(out)}</details>' if out else ""


def _why(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draw the parts of the step time for the best split, for today's split and for the splits closest to the best."""
    known = [r for r in rows if isinstance(r.get("why"), Mapping)]
    today = [r for r in known if r.get("how") == "today"]
    shown = [*known[:1], *today, *(r for r in known[1:] if r.get("how") != "today")][:MOST_WHY]
    if not shown:
        return ""
    bars = why_svg([(label, r["why"]) for label, r in zip(_labels(shown, _why_label), shown, strict=True)])
    return f'<div class="plan-why">{bars}</div>'


def _labels(rows: Sequence[Mapping[str, Any]], label: Callable[[Mapping[str, Any], int], str]) -> list[str]:
    """Return every row's label; rows with equal labels also state how they were found."""
    names = [label(row, number) for number, row in enumerate(rows)]
    return [
        f"{name} {row['how']}" if names.count(name) > 1 and row.get("how") else name
        for name, row in zip(names, rows, strict=True)
    ]


def _why_label(row: Mapping[str, Any], number: int) -> str:
    name = "today" if row.get("how") == "today" else "chosen" if number == 0 else ""
    return f"{name}: {_split_label(row)}" if name else _split_label(row)


def page(record: Mapping[str, Any], plan: bytes | None = None) -> str:
    """Return the panel as a page of its own, with a link to download the plan file if one is given."""
    link = ""
    if plan is not None:
        data = base64.b64encode(plan).decode()
        link = (
            f'<p class="note"><a id="download" download="plan.json" href="data:application/json;base64,{data}">'
            "Download the plan (plan.json)</a> for octopipe report, export, train and simulate</p>"
        )
    parts = {
        "title": html.escape(f"OctoPipe: {str(record.get('title', 'a cluster')).split(': ', 1)[0]}"),
        "style": asset("report.css") + STYLE,
        "panel": panel(record) + link,
        "script": THEME + asset("compare.js") + "compare(document);",
    }
    return fill(asset("cluster.html"), parts)


def _nice(most: float) -> float:
    """Return the smallest round number that is at least the value; 1 if the value is not positive and finite."""
    if not most > 0 or not math.isfinite(most):
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0) if step * power >= most)


def _number(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _gpus(row: Mapping[str, Any]) -> int:
    count = int(row["gpus"])
    if not 1 <= count <= MAX_GPUS:
        raise ValueError(f"scaling names {brief(count)} GPUs")
    return count


def _scaling(rows: Sequence[Mapping[str, Any]], gpus: int) -> str:
    """Plot the best split's tokens per second by number of GPUs, on logarithmic axes, with perfect scaling."""
    known = sorted((_gpus(r), float(r["tokens_per_second"]), str(r["split"])) for r in rows if r.get("fits"))
    missing = [_gpus(r) for r in rows if not r.get("fits")]
    for count, value, _ in known:
        if not 0 < value < math.inf:
            raise ValueError(f"{value:g} tokens per second on {count} GPUs")
    heading = "<h3>tokens per second against GPUs</h3>"
    if not known:
        return f'<div>{heading}<p class="note">no number of GPUs was evaluated</p></div>'
    low, high = min(k[0] for k in known), max(k[0] for k in known)
    here = next((k for k in known if k[0] == gpus), known[0])
    per_gpu = here[1] / here[0]
    tops = [k[1] for k in known] + [per_gpu * high, per_gpu * low]
    bottom, top = min(tops) / 1.5, max(tops) * 1.5
    width, height = WIDTH - LEFT - 24, HEIGHT - TOP - BOTTOM

    def x(count: float) -> float:
        share = 0.5 if low == high else math.log(count / low) / math.log(high / low)
        return LEFT + 30 + share * (width - 50)

    def y(value: float) -> float:
        return TOP + height - math.log(value / bottom) / math.log(top / bottom) * height

    out = [_frame(heading, "Tokens per second against GPUs")]
    power = math.floor(math.log10(bottom))
    while 10.0**power <= top:
        for step in (1, 2, 5):
            value = step * 10.0**power
            if bottom <= value <= top:
                out.append(_line(LEFT, y(value), WIDTH - 24, y(value), "var(--line)"))
                out.append(_text(LEFT - 8, y(value) + 4, _number(value), "end"))
        power += 1
    out.append(_line(x(low), y(per_gpu * low), x(high), y(per_gpu * high), "var(--quiet)", dash="4 4"))
    for (a, av, _), (b, bv, _) in pairwise(known):
        out.append(_line(x(a), y(av), x(b), y(bv), "var(--accent)", width=2))
    for count, value, split in known:
        mine = count == gpus
        label = f"{count} GPUs: {_number(value)} tokens/s, {value / count:.0f} per GPU ({split})"
        out.append(
            f'<circle cx="{x(count):.1f}" cy="{y(value):.1f}" r="{7 if mine else 4.5}" fill="var(--accent)" '
            f'stroke="var(--card)" stroke-width="2"><title>{html.escape(label)}</title></circle>'
        )
        out.append(_text(x(count), y(value) - 11, _number(value), "middle", strong=mine))
        out.append(_text(x(count), HEIGHT - BOTTOM + 18, str(count), "middle", strong=mine))
    out.append(_text((LEFT + WIDTH) / 2, HEIGHT - 6, "GPUs, the same batch (dashed: as many tokens per GPU)", "middle"))
    out.append("</svg>")
    if missing:
        out.append(f'<p class="note">nothing fits on {", ".join(map(str, missing))} GPUs</p>')
    return "".join(out) + "</div>"


def _memory(rows: Sequence[Mapping[str, Any]]) -> str:
    """Plot the peak memory of the fullest GPU against its limit, for every split."""
    bar, gap = 18, 7
    height = TOP + len(rows) * (bar + gap) + 30
    most = _nice(max([float(r["limit_gib"]) for r in rows] + [float(r["peak_gib"]) for r in rows], default=1.0))
    labels = _labels(rows, lambda row, _: _split_label(row))
    left = 16 + LETTER * max(map(len, labels), default=0)
    wide = WIDTH - left - 72

    def x(gib: float) -> float:
        return left + min(gib / most, 1.0) * wide

    out = [_frame("<h3>memory of the fullest GPU against its limit, GiB</h3>", "Memory against limit", height)]
    for tick in range(5):
        gib = most * tick / 4
        out.append(_line(x(gib), TOP - 6, x(gib), height - 26, "var(--line)"))
        out.append(_text(x(gib), height - 10, f"{gib:g}", "middle"))
    for i, r in enumerate(rows):
        top = TOP + i * (bar + gap)
        peak, limit = float(r["peak_gib"]), float(r["limit_gib"])
        colour = f"var(--{'loss' if r.get('how') == 'today' else 'memory'})" if r.get("fits") else "var(--over)"
        out.append(_text(left - 8, top + bar - 5, labels[i], "end", strong=i == 0))
        out.append(
            f'<rect x="{left}" y="{top}" width="{max(x(peak) - left, 1):.1f}" height="{bar}" rx="3" fill="{colour}">'
            f"<title>{html.escape(str(r['split']))}: {peak:.1f} of {limit:.1f} GiB</title></rect>"
        )
        out.append(_line(x(limit), top - 3, x(limit), top + bar + 3, "var(--over)", width=2))
        out.append(_text(max(x(peak), x(limit)) + 8, top + bar - 5, f"{peak:.0f} of {limit:.0f}", "start"))
    return "".join(out) + "</svg></div>"


def _split_label(row: Mapping[str, Any]) -> str:
    """Return the split with its ZeRO level, because rows that differ only in that need different memory."""
    name = str(row["split"])
    named = "ZeRO" in name or "FSDP" in name
    return short(f"{name}, ZeRO-{row['zero']}" if row.get("zero") and not named else name)


def short(split: str) -> str:
    """Shorten a split's description to a label.

    >>> short("tp 2, pp 8, vp 10, dp 4, micro-batch 1, FSDP")
    'tp2 pp8 vp10 dp4 mb1 FSDP'
    """
    label = re.sub(r"(\w+) (\d+)", r"\1\2", split.replace("micro-batch", "mb").replace(",", ""))
    return label if len(label) <= 34 else label[:33] + "…"


def _table(rows: Sequence[Mapping[str, Any]], error: float | None = None) -> str:
    head = ("compare", "split", "ZeRO", "recompute", "tokens/s/GPU", "MFU", "bubble", "GiB", "found by")
    out = ["<tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>"]
    for i, r in enumerate(rows):
        mfu, guessed = r.get("mfu"), r.get("how") == "estimated"
        cells = (
            str(r["split"]),
            str(r.get("zero", "")),
            str(r.get("recompute", "")),
            f"{'~' * guessed}{float(r['tokens_per_gpu_per_second']):.0f}"
            + ("" if error is None else f" ± {error * float(r['tokens_per_gpu_per_second']):.0f}"),
            "" if mfu is None else f"{100 * float(mfu):.1f} %",
            f"{100 * float(r['bubble']):.1f} %",
            f"{float(r['peak_gib']):.0f} of {float(r['limit_gib']):.0f}",
            str(r.get("how", "")) + (", chosen" if i == 0 else ""),
        )
        kind = "today" if r.get("how") == "today" else "best" if i == 0 else ""
        known = isinstance(r.get("why"), Mapping)
        data = f' data-why="{html.escape(json.dumps(r["why"], allow_nan=False))}"' if known else ""
        first = kind in ("best", "today") and known
        box = f'<td><input class="choose" type="checkbox" aria-label="compare"{" checked" if first else ""}></td>'
        out.append(f'<tr class="{kind}"{data}>{box}' + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>")
    notes = []
    if any(r.get("how") == "estimated" for r in rows):
        notes.append("~ estimated by a formula and not simulated; such rows come after all that were simulated.")
    speeds = [float(r["tokens_per_gpu_per_second"]) for r in rows if r.get("how") != "estimated" and r.get("fits")]
    if speeds and max(speeds) > speeds[0]:
        notes.append("Splits that are nearly as fast as the fastest count as equal; the simplest of them is chosen.")
    if error is not None:
        notes.append(f"±: half of the published runs lie within {100 * error:.0f} % of their prediction.")
    said = "".join(f'<p class="note">{html.escape(note)}</p>' for note in notes)
    return f'<table class="plan-table">{"".join(out)}</table>{said}<div class="plan-compare"></div>'


def _frame(heading: str, label: str, height: int = HEIGHT) -> str:
    return f'<div>{heading}<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1, dash: str = "") -> str:
    more = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"{more}/>'
    )


def _text(x: float, y: float, words: str, anchor: str, *, strong: bool = False) -> str:
    kind = ' class="strong"' if strong else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{html.escape(words)}</text>'

"""Results as Markdown: the page, its appendix, and a page per part.

Knows: tables and texts; that rows of one group share a line of the page. Does not know: how a result was computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octopipe.views.reproduce.noise import NOISE
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.row import COUNTED, OUTCOMES, VERDICTS, Result, Row, Value

COLUMNS = (
    *("claim", "paper", "Algorithm 1", "our search", "verdict"),
    *("fitted head: Algorithm 1", "our search", "verdict", "difference tested by"),
)
IN_A_ROW = 3
"""Number of pictures next to each other."""
SHORT = {"differs, higher": "**higher**", "differs, lower": "**lower**"}
"""Verdicts with a shorter text in the cells of the page."""


def table(columns: Sequence[str], lines: Iterable[Sequence[Value]]) -> str:
    """Return a Markdown table; columns of numbers are aligned right."""
    cells = [[text(value) for value in line] for line in lines]
    numeric = [
        bool(cells) and all(c[k][:1].isdigit() or c[k][:1] in "-+−" or not c[k] for c in cells)
        for k in range(len(columns))
    ]
    head = "| " + " | ".join(columns) + " |"
    rule = "|" + "|".join("--:" if right else ":--" for right in numeric) + "|"
    return "\n".join([head, rule, *("| " + " | ".join(line) + " |" for line in cells)])


def text(value: Value, unit: str = "") -> str:
    """Format a value with a number of digits that suits its size.

    >>> text(1.4871), text(2406.2, "ms"), text(None), text(0.0338, "%")
    ('1.49', '2406 ms', '', '3.38 %')
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value.replace("|", "\\|").replace("\n", " ")
    if unit == "%":
        return f"{100 * value:.2f} %" if abs(value) < 0.1 else f"{100 * value:.1f} %"
    shown = f"{value:.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.2f}"
    return f"{shown} {unit}".strip() if unit != "×" else f"{value:.2f}×"


def rows_table(rows: Iterable[Row]) -> str:
    """Return a table with all rows of a part, one per line."""
    columns = ("id", *COLUMNS, "supposed reason", "see also")
    return table(columns, ((row.id, *_cells([row]), *_reason(row)) for row in rows))


def _reason(row: Row) -> tuple[str, str]:
    if not any(v.startswith("differs") for v in row.verdicts):
        return "", ""
    return row.why, f"`{row.tested}`" if row.tested else ""


def grouped(rows: Iterable[Row]) -> list[list[Row]]:
    """Group the rows that share a line of the page; a group is at the position of its first row."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group or row.id, []).append(row)
    return list(groups.values())


def _cells(rows: list[Row]) -> tuple[str, ...]:
    """Return the cells of a line, with values joined by slashes."""
    unit = rows[0].unit

    def ours(side: int) -> tuple[str, str]:
        pairs = [(r.published, r.fitted)[side] for r in rows]
        bounds = [r.bound[side] for r in rows]
        first, second = ([p[k] for p in pairs] for k in (0, 1))
        return _joined(first, unit) + _gaps(first, bounds), _joined(second, unit) + _gaps(second, bounds)

    return (
        _claim(rows),
        _joined([r.paper for r in rows], unit),
        *ours(0),
        _verdicts([r.verdict for r in rows]),
        *ours(1),
        _verdicts([r.fitted_verdict for r in rows]),
        _tests(rows),
    )


def _gaps(values: list[Value], bounds: list[Value]) -> str:
    """Return the most that any plan could still gain: the distance of a step time or throughput from a proven bound."""
    gaps = [
        f"{100 * (1 - min(b, v) / max(b, v)):.0f}"
        for v, b in zip(values, bounds, strict=True)
        if isinstance(v, int | float) and isinstance(b, int | float)
    ]
    return f" (≤ {' / '.join(gaps)} %)" if gaps else ""


def _tests(rows: list[Row]) -> str:
    """For rows that differ, return the change tested, our values with it, and whether it explains the difference."""
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.verdict.startswith("differs") and row.outcome:
            kinds.setdefault((row.test, row.outcome), []).append(row)
    return "; ".join(
        f"{test}: {_joined([r.test_value for r in some], some[0].unit)} ({outcome})"
        for (test, outcome), some in kinds.items()
    )


def _claim(rows: list[Row]) -> str:
    sources = list(dict.fromkeys(part for r in rows for part in r.source.split(", ") if part))
    source = f" ({', '.join(sources)})" if sources else ""
    if len(rows) == 1:
        return rows[0].claim + source
    claims = [r.claim for r in rows]
    start = claims[0]
    while not all(c.startswith(start) for c in claims):
        start = start[:-1]
    start = start[: start.rfind(" ") + 1]
    ends = [c[len(start) :] for c in claims]
    back = ends[0]
    while not all(c.endswith(back) for c in ends):
        back = back[1:]
    back = back[back.find(" ") :] if " " in back else ""
    words = [e[: len(e) - len(back)] for e in ends]
    if len({w[-1:] for w in words}) == 1 and words[0][-1:] in (",", ":"):
        words, back = [w[:-1] for w in words], words[0][-1] + back
    return start + " / ".join(words) + back + source


def _joined(values: list[Value], unit: str) -> str:
    shown = [text(v, unit) for v in values]
    if not any(shown):
        return ""
    if len(shown) > 1 and unit:
        shown = [s.removesuffix(unit).strip() for s in shown]
        return " / ".join(s or "–" for s in shown) + (f" {unit}" if unit != "×" else " ×")
    return " / ".join(s or "–" for s in shown)


def _verdicts(verdicts: list[str]) -> str:
    counts = [(v, sum(x == v for x in verdicts)) for v in (*VERDICTS, "")]
    given = [(SHORT.get(v, v), n) for v, n in counts if n and v]
    if len(given) == 1 and given[0][1] == len(verdicts):
        return given[0][0]
    return ", ".join(f"{n} {v}" for v, n in given)


def part_page(part: Part, result: Result, *, level: int = 1, pictures: str = "") -> str:
    """Return the page of one part: title, text, rows, further tables, pictures."""
    named = f"*{', '.join(part.labels)}* · " if part.labels else ""
    blocks = [f"{'#' * level} {part.title}", f"{named}costs: {result.costs}.", *result.text]
    if result.rows:
        blocks.append(rows_table(result.rows))
    for title, columns, lines in result.tables:
        blocks += [f"**{title}**", table(columns, lines)]
    blocks += [f"![{part.title}]({pictures}{name})" for name in sorted(result.pictures)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def whole_page(results: Sequence[tuple[Part, Result]], *, preface: Sequence[str], pictures: str) -> str:
    """Return the page: counts of verdicts, all claims with one line per group, open assumptions, pictures."""
    rows = [row for _, result in results for row in result.rows]
    claims = [row for row in rows if row.verdict]
    body = [_cells(some) for some in grouped(r for r in claims if r.verdict != "by construction")]
    shown = [row for row in rows if not row.verdict]
    tests = [r for r in shown if not r.id.startswith("beyond.")]
    beyond = [r for r in shown if r.id.startswith("beyond.")]
    drawn = [f"![{part.title}]({pictures}{name})" for part, result in results for name in sorted(result.pictures)]
    lines = [
        "# The paper, number by number",
        *preface,
        _counts(claims),
        _explained(claims),
        "## Every table and figure\n" + table(COLUMNS, body),
        "## What the paper leaves open: one assumption changed at a time\n"
        + table(("changed", "paper", "ours"), (_shown(r) for r in tests)),
        "## Beyond the paper\n" + table(("what", "ours"), ((r.claim, _shown(r)[2]) for r in beyond)),
        "## Pictures\nOurs are bars, curves and timelines; black marks are the paper's numbers, where it prints them.",
        "\n".join(" ".join(drawn[k : k + IN_A_ROW]) for k in range(0, len(drawn), IN_A_ROW)),
    ]
    return "\n\n".join(lines) + "\n"


def _shown(row: Row) -> tuple[str, str, str]:
    values = [v for v in (*row.published, *row.fitted) if v is not None]
    return row.claim, text(row.paper, row.unit), _joined(list(values), row.unit)


def _counts(claims: Sequence[Row]) -> str:
    """Return a table of how many claims got each verdict, under both readings of the head."""
    both: list[list[str]] = [
        [row.verdict for row in claims],
        [row.fitted_verdict for row in claims if row.fitted_verdict],
    ]
    lines: list[tuple[Value, ...]] = [
        (name, *(float(sum(x == v for x in some)) for v in VERDICTS), float(sum(x in COUNTED for x in some)))
        for name, some in zip(("published head", "fitted head"), both, strict=True)
    ]
    return table(("claims", *VERDICTS, "the first four together"), lines)


def _explained(claims: Sequence[Row]) -> str:
    """Return a paragraph on how many differences have each outcome of a test."""
    outcomes = [row.outcome for row in claims if row.verdict.startswith("differs")]
    told = [f"the change {o} in {outcomes.count(o)}" for o in OUTCOMES[:3]]
    alone = f"; {outcomes.count('')} are looked into by a row of their own below" if "" in outcomes else ""
    return (
        f"Of the {len(outcomes)} differences with the published head, {', '.join(told)}; {outcomes.count(OUTCOMES[3])} "
        f"are numbers to which the head is fitted{alone}. *noise, one queue*: {100 * NOISE:.1f} % of noise on every op "
        "(the paper's own figure, §VIII-C), and OctoPipe's transfers in one queue per rank as the baselines' are."
    )


def appendix(results: Sequence[tuple[Part, Result]]) -> str:
    """Return every row with its reason, and the further tables, part by part."""
    page = "# The paper, row by row\n\nThe appendix of [the page](../reproduction.md), made with it; do not edit.\n"
    return page + "".join("\n" + part_page(part, result, level=2) for part, result in results)

"""Results as Markdown: a page per part, and the page of the whole reproduction.

Knows: tables and words. Does not know: how a result came about.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.row import VERDICTS, Result, Row, Value

COLUMNS = ("claim", "paper", "ours", "ratio", "verdict", "note")


def table(columns: Sequence[str], lines: Iterable[Sequence[Value]]) -> str:
    """A Markdown table; numbers to the right."""
    cells = [[text(value) for value in line] for line in lines]
    numeric = [
        bool(cells) and all(c[k][:1].isdigit() or c[k][:1] in "-+−" or not c[k] for c in cells)
        for k in range(len(columns))
    ]
    head = "| " + " | ".join(columns) + " |"
    rule = "|" + "|".join("--:" if right else ":--" for right in numeric) + "|"
    return "\n".join([head, rule, *("| " + " | ".join(line) + " |" for line in cells)])


def text(value: Value, unit: str = "") -> str:
    """A number with as many digits as it deserves.

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
    """The rows of a part: paper, ours, ratio, verdict."""
    return table(
        COLUMNS,
        (
            (
                row.claim + (f" ({row.source})" if row.source else ""),
                text(row.paper, row.unit),
                text(row.ours, row.unit),
                "" if row.ratio is None else f"{row.ratio:.3f}",
                row.verdict if row.verdict != "not reproduced" else "**not reproduced**",
                row.note,
            )
            for row in rows
        ),
    )


def part_page(part: Part, result: Result, *, level: int = 1, pictures: str = "") -> str:
    """One part: title, words, rows, further tables, pictures."""
    blocks = [f"{'#' * level} {part.title}", f"*{', '.join(part.labels)}* · costs: {result.costs}.", *result.text]
    blocks.append(rows_table(result.rows))
    for title, columns, lines in result.tables:
        blocks += [f"**{title}**", table(columns, lines)]
    blocks += [f"![{part.title}]({pictures}{name})" for name in sorted(result.pictures)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def whole_page(results: Sequence[tuple[Part, Result]], *, preface: Sequence[str], pictures: str) -> str:
    """The page of the whole reproduction."""
    rows = [row for _, result in results for row in result.rows]
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in VERDICTS}
    told = sum(counts[v] for v in VERDICTS if v != "shown")
    lines = [
        "# The paper, number by number",
        *preface,
        f"**{told} claims: {counts['reproduced']} reproduced, {counts['better']} better, {counts['not reproduced']} "
        f"not reproduced** (and {counts['shown']} numbers of ours for which the paper prints none).",
        table(
            ("part", "labels", *VERDICTS),
            (
                (
                    f"[{part.title}](#{anchor(part.title)})",
                    ", ".join(part.labels),
                    *(float(sum(row.verdict == v for row in result.rows)) for v in VERDICTS),
                )
                for part, result in results
            ),
        ),
    ]
    missed = [(part, row) for part, result in results for row in result.rows if row.verdict == "not reproduced"]
    if missed:
        lines += ["## What is not reproduced, and why"]
        lines.append("\n".join(f"- *{part.title}*: {row.claim}. {_sentence(row)}" for part, row in missed))
    page = "\n\n".join(lines) + "\n"
    return page + "".join("\n" + part_page(part, result, level=2, pictures=pictures) for part, result in results)


def _sentence(row: Row) -> str:
    numbers = f"Paper {text(row.paper, row.unit) or '–'}, ours {text(row.ours, row.unit) or '–'}: "
    return numbers + row.note


def anchor(title: str) -> str:
    """The name by which a heading is linked to.

    >>> anchor("PP sizes 4, 8 and 16")
    'pp-sizes-4-8-and-16'
    """
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -")
    return kept.replace(" ", "-")

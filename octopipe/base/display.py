"""How records are displayed: one line in a shell, a picture in a notebook, times in one unit.

Knows: that a registered function draws the picture, and how a time is written. Does not know: any record, or how
pictures are drawn; the package registers `report/notebook.py`, so that no lower package has to import the report.
"""

from __future__ import annotations

from collections.abc import Callable

Draw = Callable[[object], str | None]
_draw: list[Draw] = []


def draw_with(draw: Draw) -> None:
    """Register the function that turns a plan or a timeline into HTML; a later registration replaces an earlier one."""
    _draw[:] = [draw]


def html_of(what: object) -> str | None:
    """Return the picture of a record, or None (so that a notebook shows its `repr`) if no function is registered."""
    return _draw[0](what) if _draw else None


def milliseconds(value: float) -> str:
    """Format a time as all commands and pages do: always in ms, with at least three significant digits from 1 ms on.

    >>> milliseconds(1074.04), milliseconds(14.199), milliseconds(0.1234)
    ('1074.0 ms', '14.20 ms', '0.123 ms')
    """
    digits = 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f} ms"


def parameter_count(number: float) -> str:
    """Format a model's number of parameters, in billions or millions.

    >>> parameter_count(8.03e9), parameter_count(2.6e6), parameter_count(812)
    ('8.03 B', '2.60 M', '812')
    """
    if number >= 1e8:
        return f"{number / 1e9:.2f} B"
    return f"{number / 1e6:.2f} M" if number >= 1e4 else f"{number:.0f}"


def duration(seconds: float) -> str:
    """Format a waiting time, rounded to a second, a minute or a tenth of an hour.

    >>> duration(0.2), duration(42.4), duration(400), duration(9000)
    ('1 s', '42 s', '7 min', '2.5 h')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def one_line(kind: str, *facts: str) -> str:
    """Return a `repr` that fits on one line; empty facts are left out.

    >>> one_line("Plan", "1f1b", "", "4 stages on 2 ranks")
    '<Plan: 1f1b, 4 stages on 2 ranks>'
    """
    text = ", ".join(fact for fact in facts if fact)
    text = text if text.isprintable() else repr(text)
    return f"<{kind}: {text if len(text) <= 100 else text[:97] + '...'}>"

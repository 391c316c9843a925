"""Two-line CSVs of layer times: a header of names or numbers, a line of milliseconds; or one line per F, B, I, W.

Knows: the lines and their labels. Does not know: costs.

    layer,embedding,0,1,head          or          0,1,2,3
    F,0.1,1.0,1.1,2.0                             0.3,3.0,3.1,6.2
    B,0.2,2.1,2.2,4.1

>>> read_times_csv("embed,0,head\\n0.3,3,6\\n", "t.csv").total_ms
(0.3, 3.0, 6.0)
"""

from __future__ import annotations

import csv
import math

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief
from octopipe.base.limits import MAX_LAYERS, MAX_TIME_MS, over
from octopipe.costs.readers.spans import LayerTimes

_ROWS = {
    "f": "forward", "fwd": "forward", "forward": "forward", "forward_ms": "forward",
    "b": "backward", "bwd": "backward", "backward": "backward",
    "i": "input", "input": "input", "dgrad": "input", "input_ms": "input",
    "w": "weight", "wgrad": "weight", "weight": "weight", "weight_ms": "weight",
    "total": "total", "f+b": "total", "time": "total", "ms": "total", "time_ms": "total", "": "total",
}  # fmt: skip
_GOOD = ({"total"}, {"forward"}, {"forward", "backward"}, {"forward", "input", "weight"})


def looks_like_times(text: str) -> bool:
    """Return whether a text is such a CSV: its second line consists of numbers, possibly after a label."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not 2 <= len(lines) <= 5:
        return False
    cells = [cell.strip() for cell in lines[1].split(",")]
    numbers = cells[1:] if _number(cells[0]) is None else cells
    return len(numbers) >= 1 and all(_number(cell) is not None for cell in numbers)


def read_times_csv(text: str, where: str) -> LayerTimes:
    """Read times per layer in ms; a line without a label is F plus B."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if any(c.strip() for c in row)]
    if len(rows) < 2:
        raise OctoPipeError(f"{where}: one line only; give a line of names or numbers and a line of times in ms")
    labelled = _number(rows[1][0]) is None
    names = rows[0][1:] if labelled else rows[0]
    if over("layers", len(names), MAX_LAYERS):
        raise OctoPipeError(f"{where}: {over('layers', len(names), MAX_LAYERS)[0]}")
    twice = next((name for k, name in enumerate(names) if name in names[:k]), None) if len(names) < 5000 else None
    if twice is not None:
        raise OctoPipeError(f"{where}: layer {brief(twice)} appears twice in the first line; name each layer once")
    times: dict[str, tuple[float, ...]] = {}
    for line, row in enumerate(rows[1:], 2):
        label = row[0].lower() if labelled else ""
        kind = _ROWS.get(label)
        if kind is None:
            raise OctoPipeError(f"{where}: line {line} begins with {brief(row[0])}; use F, B, I, W or total")
        cells = row[1:] if labelled else row
        if len(cells) != len(names):
            raise OctoPipeError(f"{where}: line {line} has {len(cells)} times for {len(names)} layers; give one each")
        if kind in times:
            raise OctoPipeError(f"{where}: line {line} is a second {kind} line; keep one")
        numbers = [_number(cell) for cell in cells]
        for name, cell, number in zip(names, cells, numbers):
            if number is None or not 0 <= number <= MAX_TIME_MS:
                raise OctoPipeError(f"{where}: line {line}: layer {brief(name)} has {brief(cell)}; give ms from 0 on")
        times[kind] = tuple(numbers)  # type: ignore[arg-type]
    if set(times) not in _GOOD:
        raise OctoPipeError(
            f"{where}: has lines for {', '.join(sorted(times))}; give total, or F, or F and B, or F, I and W"
        )
    return LayerTimes(names=tuple(names), **{f"{kind}_ms": row for kind, row in times.items()})  # type: ignore[arg-type]


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and len(text) <= 40 else None

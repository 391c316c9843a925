"""Exports of Nsight Systems: the SQLite file of `nsys export`, and CSVs of `nsys stats` about NVTX ranges.

Knows: the tables NVTX_EVENTS, StringIds, CUPTI_ACTIVITY_KIND_RUNTIME and _KERNEL, what `emit_nvtx` writes into a
range's name, and the columns of the reports nvtx_sum, nvtx_pushpop_sum, nvtx_gpu_proj_sum and nvtx_pushpop_trace. Does
not know: layers (`spans.py`). Times in the files are nanoseconds.
"""

from __future__ import annotations

import csv
import math
import re
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief
from octopipe.base.limits import over
from octopipe.costs.readers.spans import HOW, Kernel, LayerTimes, Recording, Span, layer_times, named_times, phase_of

SQLITE_MAGIC = b"SQLite format 3\x00"
MAX_ROWS = 1 << 22
"""The most rows of all tables together: about two gigabytes in memory here, and some minutes of a recording."""
MAX_SECONDS = 60.0
MAX_NAME = 4096
"""How many characters of a range's name are read."""
_TABLES = {"NVTX_EVENTS", "StringIds", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"}
_OPERATOR = re.compile(r"^(.*?)(?:, op_id = \d{1,18})?, seq = (\d{1,18})\b.*$")
_RANGES = (59, 60)
"""NVTX_EVENTS.eventType of a push/pop range and of a start/end range."""
_TIMES = (
    ("Proj Med (ns)", None),
    ("Med (ns)", None),
    ("Median (ns)", None),
    ("Proj Avg (ns)", None),
    ("Avg (ns)", None),
    ("Average (ns)", None),
    ("Average", None),
    ("Total Proj Time (ns)", "Range Instances"),
    ("Total Time (ns)", "Instances"),
)
"""Columns that say how long one instance of a range takes, best first; totals are divided by the other column."""
_FIRST, _LAST = ("embed", "wte"), ("head", "loss", "output", "logits")


# -- SQLite --------------------------------------------------------------------------------------------


def read_nsight_sqlite(path: str | Path, where: str) -> Recording:
    """Read the spans and kernels in an exported SQLite file, without writing to it.

    The file may come from an untrusted source: its tables are read one by one and joined here, where an id can match
    only once, and reading is limited to `MAX_ROWS` rows and `MAX_SECONDS`.
    """
    try:
        base = sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        try:
            base.execute("PRAGMA trusted_schema = OFF")
            base.execute("PRAGMA query_only = ON")
            end = time.monotonic() + MAX_SECONDS
            base.set_progress_handler(lambda: time.monotonic() > end, 10_000)
            return _recording(base, where)
        finally:
            base.close()
    except (sqlite3.Error, OverflowError, ValueError, TypeError) as error:
        why = " ".join(str(error).split())[:160]
        if why == "interrupted":
            raise OctoPipeError(f"{where}: takes longer than {MAX_SECONDS:g} s to read; record fewer steps") from None
        raise OctoPipeError(
            f"{where}: not an export of Nsight Systems ({why}); run nsys export --type sqlite"
        ) from None


def _recording(base: sqlite3.Connection, where: str) -> Recording:
    tables = {row[0] for row in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "NVTX_EVENTS" not in tables:
        raise OctoPipeError(f"{where}: it contains no NVTX ranges; record with nsys profile --trace nvtx,cuda ({HOW})")
    used = {table: _columns(base, table, where) for table in sorted(tables & _TABLES)}
    count = sum(base.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in used)
    if over("rows", count, MAX_ROWS):
        raise OctoPipeError(f"{where}: {over('rows', count, MAX_ROWS)[0]}; record fewer steps")
    strings = _strings(base, where) if "StringIds" in used else {}
    columns = used["NVTX_EVENTS"]
    kinds = f"AND eventType IN {_RANGES}" if "eventType" in columns else ""
    named = "textId" if "textId" in columns else "NULL"
    rows = base.execute(
        f'SELECT text, {named}, globalTid, start, "end" FROM NVTX_EVENTS '
        f'WHERE start IS NOT NULL AND "end" IS NOT NULL {kinds}'
    )
    marks, operators = [], []
    for text, number, thread, start, stop in rows:
        name = strings.get(number) if text is None else text
        if not isinstance(name, str) or not isinstance(start, int) or not isinstance(stop, int):
            continue
        found = _OPERATOR.match(name[:MAX_NAME])
        if found:
            operators.append(Span(found[1], thread, start / 1e3, stop / 1e3, int(found[2])))
        else:
            marks.append(Span(name[:MAX_NAME], thread, start / 1e3, stop / 1e3))
    return Recording(marks=marks, operators=operators, kernels=_kernels(base, used, strings, where))


def _columns(base: sqlite3.Connection, table: str, where: str) -> set[str]:
    """Return a table's columns. Raise an error for a virtual table or a column that is computed when it is read: nsys
    writes none, and reading them may never end."""
    sql = base.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)).fetchone()[0]
    if not isinstance(sql, str) or re.match(r"\s*CREATE\s+VIRTUAL", sql, re.IGNORECASE):
        raise OctoPipeError(f"{where}: {table} is not a plain table; export it again with nsys")
    found = set()
    for _, name, *_, hidden in base.execute(f"PRAGMA table_xinfo({table})"):
        if hidden:
            raise OctoPipeError(f"{where}: {table} has a computed column ({brief(name)}); export it again with nsys")
        found.add(name)
    return found


def _strings(base: sqlite3.Connection, where: str) -> dict[Any, str]:
    out: dict[Any, str] = {}
    for number, text in base.execute("SELECT id, value FROM StringIds"):
        if number in out:
            raise OctoPipeError(f"{where}: StringIds names {brief(number)} twice; export it again with nsys")
        out[number] = text
    return out


def _kernels(
    base: sqlite3.Connection, used: Mapping[str, set[str]], strings: Mapping[Any, str], where: str
) -> list[Kernel]:
    if not {"CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"} <= used.keys():
        return []
    columns = used["CUPTI_ACTIVITY_KIND_KERNEL"]
    name = "shortName" if strings and "shortName" in columns else "NULL"
    process = "globalPid" if "globalPid" in columns else "NULL"
    launches: dict[tuple[int | None, Any], tuple[Any, int]] = {}
    for thread, number, start in base.execute(
        "SELECT globalTid, correlationId, start FROM CUPTI_ACTIVITY_KIND_RUNTIME"
    ):
        # A process id is the upper part of a thread id. Correlation ids start again in every process.
        if not isinstance(thread, int) or not isinstance(start, int):
            continue
        key = (thread // 0x1000000 if process != "NULL" else None, number)
        if key in launches:
            raise OctoPipeError(f"{where}: two launches have correlation id {brief(number)}; export it again with nsys")
        launches[key] = (thread, start)
    out = []
    for short, pid, number, start, stop in base.execute(
        f'SELECT {name}, {process}, correlationId, start, "end" FROM CUPTI_ACTIVITY_KIND_KERNEL'
    ):
        if not isinstance(start, int) or not isinstance(stop, int) or not isinstance(pid, int | None):
            continue
        launch = launches.get((None if pid is None else pid // 0x1000000, number))
        if launch is None or "nccl" in str(strings.get(short, "")).lower():
            continue
        out.append(Kernel(launch[0], launch[1] / 1e3, start / 1e3, stop / 1e3))
    return out


# -- CSV -----------------------------------------------------------------------------------------------


def looks_like_stats(text: str) -> bool:
    """Whether a text is a CSV of `nsys stats` about ranges."""
    return _header(text) is not None


def read_nsight_csv(text: str, where: str) -> LayerTimes:
    """Read layer times from a report about NVTX ranges; lines before the header (`Processing ...`) are skipped."""
    at = _header(text)
    if at is None:
        raise OctoPipeError(f"{where}: not a report of nsys stats about NVTX ranges; use --report nvtx_gpu_proj_sum")
    rows = list(csv.DictReader(text.splitlines()[at:]))
    fields = rows[0].keys() if rows else ()
    if "Start (ns)" in fields and "Name" in fields:
        return layer_times(Recording(marks=_trace_rows(rows, where)), where)
    time, count = next((pair for pair in _TIMES if pair[0] in fields), (None, None))
    if time is None:
        raise OctoPipeError(f"{where}: no column with a range's time (Med (ns), Proj Med (ns)); export it again")
    table: dict[str, dict[str, float]] = {}
    for line, row in enumerate(rows, at + 2):
        # A range's name follows its domain: "domain:name", or ":name" in the default one.
        name = (row.get("Range") or "").split(":", 1)[-1] if (row.get("Range") or "")[:1] == ":" else row.get("Range")
        found = phase_of(name or "")
        if found is None:
            continue
        label, phase = found
        if phase in table.setdefault(label, {}):
            raise OctoPipeError(f"{where}: line {line}: {brief(name)} appears twice; keep one domain")
        instances = 1.0 if count is None else _number(row.get(count), where, line)
        table[label][phase] = _number(row.get(time), where, line) / max(1.0, instances) / 1e6
    forward = {label: phases for label, phases in table.items() if "forward" in phases}
    ordered = dict(sorted(forward.items(), key=lambda item: _place(item[0], where)))
    notes = ["times are those of the GPU" if time.startswith(("Proj", "Total Proj")) else
             "times are the host's, not the GPU's: nsys stats --report nvtx_gpu_proj_sum has those"]  # fmt: skip
    return named_times(ordered, where, notes)


def _header(text: str) -> int | None:
    for at, line in enumerate(text.splitlines()[:50]):
        cells = {cell.strip().strip('"') for cell in line.split(",")}
        if ("Range" in cells and any("(ns)" in cell for cell in cells)) or {"Start (ns)", "Name"} <= cells:
            return at
    return None


def _trace_rows(rows: list[dict[str, str]], where: str) -> list[Span]:
    spans = []
    for line, row in enumerate(rows, 2):
        start = _number(row.get("Start (ns)"), where, line) / 1e3
        length = row.get("Duration (ns)") or row.get("DurNonChild (ns)")
        stop = _number(row.get("End (ns)"), where, line) / 1e3 if row.get("End (ns)") else None
        stop = start + _number(length, where, line) / 1e3 if stop is None else stop
        spans.append(Span((row.get("Name") or "").removeprefix(":"), row.get("TID"), start, stop))
    return spans


def _number(text: str | None, where: str, line: int) -> float:
    try:
        number = float((text or "").replace(",", ""))
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise OctoPipeError(f"{where}: line {line}: {brief(text)} is not a time; export it again")
    return number


def _place(label: str, where: str) -> tuple[int, int]:
    """Return a key that sorts layers by their position in the model.

    A summary is sorted by time, so the position is read from the layer's name; an error says so if it has none.
    """
    number = re.findall(r"\d+", label)
    if number:
        return (1, int(number[-1][:9]))
    if any(word in label.lower() for word in _FIRST):
        return (0, 0)
    if any(word in label.lower() for word in _LAST):
        return (2, 0)
    raise OctoPipeError(
        f"{where}: the position of {brief(label)} is not known; number the ranges (layer 0, layer 1, ...); {HOW}"
    )

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
from pathlib import Path

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief
from octopipe.base.limits import MAX_TIMELINE_VALUES, over
from octopipe.costs.readers.spans import HOW, Kernel, LayerTimes, Recording, Span, layer_times, named_times, phase_of

SQLITE_MAGIC = b"SQLite format 3\x00"
_OPERATOR = re.compile(r"^(.*?)(?:, op_id = \d+)?, seq = (\d+)\b.*$")
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
    """The spans and kernels in an exported SQLite file, which is only ever read."""
    try:
        base = sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        try:
            return _recording(base, where)
        finally:
            base.close()
    except (sqlite3.Error, OverflowError, ValueError) as error:
        why = " ".join(str(error).split())[:160]
        raise OctoPipeError(f"{where}: no export of Nsight Systems ({why}); run nsys export --type sqlite") from None


def _recording(base: sqlite3.Connection, where: str) -> Recording:
    tables = {row[0] for row in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "NVTX_EVENTS" not in tables:
        raise OctoPipeError(f"{where}: no NVTX ranges in it; record with nsys profile --trace nvtx,cuda ({HOW})")
    count = sum(
        base.execute(f"SELECT COUNT(*) FROM {t}").fetchone()[0]
        for t in sorted(tables & {"NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"})
    )
    if over("rows", count, MAX_TIMELINE_VALUES):
        raise OctoPipeError(f"{where}: {over('rows', count, MAX_TIMELINE_VALUES)[0]}; record fewer steps")
    columns = {row[1] for row in base.execute("PRAGMA table_info(NVTX_EVENTS)")}
    strings = "StringIds" in tables
    text = "COALESCE(e.text, s.value)" if strings and "textId" in columns else "e.text"
    joined = "LEFT JOIN StringIds s ON s.id = e.textId" if strings and "textId" in columns else ""
    kinds = f"AND e.eventType IN {_RANGES}" if "eventType" in columns else ""
    rows = base.execute(
        f'SELECT {text}, e.globalTid, e.start, e."end" FROM NVTX_EVENTS e {joined} '
        f'WHERE e.start IS NOT NULL AND e."end" IS NOT NULL {kinds}'
    )
    marks, operators = [], []
    for name, thread, start, stop in rows:
        if not isinstance(name, str) or not isinstance(start, int) or not isinstance(stop, int):
            continue
        found = _OPERATOR.match(name)
        if found:
            operators.append(Span(found[1], thread, start / 1e3, stop / 1e3, int(found[2])))
        else:
            marks.append(Span(name, thread, start / 1e3, stop / 1e3))
    return Recording(marks=marks, operators=operators, kernels=_kernels(base, tables))


def _kernels(base: sqlite3.Connection, tables: set[str]) -> list[Kernel]:
    if not {"CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"} <= tables:
        return []
    columns = {row[1] for row in base.execute("PRAGMA table_info(CUPTI_ACTIVITY_KIND_KERNEL)")}
    named = "StringIds" in tables and "shortName" in columns
    name, joined = ("n.value", "LEFT JOIN StringIds n ON n.id = k.shortName") if named else ("NULL", "")
    # A process id is the upper part of a thread's: correlation ids begin anew in every process.
    same = "AND r.globalTid / 0x1000000 = k.globalPid / 0x1000000" if "globalPid" in columns else ""
    rows = base.execute(
        f'SELECT {name}, r.globalTid, r.start, k.start, k."end" FROM CUPTI_ACTIVITY_KIND_KERNEL k '
        f"JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId {same} {joined}"
    )
    return [
        Kernel(thread, launched / 1e3, start / 1e3, stop / 1e3)
        for name, thread, launched, start, stop in rows
        if not (isinstance(name, str) and "nccl" in name.lower())
    ]


# -- CSV -----------------------------------------------------------------------------------------------


def looks_like_stats(text: str) -> bool:
    """Whether a text is a CSV of `nsys stats` about ranges."""
    return _header(text) is not None


def read_nsight_csv(text: str, where: str) -> LayerTimes:
    """Layer times from a report about NVTX ranges; lines before the header (`Processing ...`) are passed over."""
    at = _header(text)
    if at is None:
        raise OctoPipeError(f"{where}: no report of nsys stats about NVTX ranges; use --report nvtx_gpu_proj_sum")
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
            raise OctoPipeError(f"{where}: line {line}: {brief(name)} stands there twice; keep one domain")
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
        raise OctoPipeError(f"{where}: line {line}: {brief(text)} is no time; export it again")
    return number


def _place(label: str, where: str) -> tuple[int, int]:
    """Where a layer stands in the model: a summary is sorted by time, so only its name can say."""
    number = re.findall(r"\d+", label)
    if number:
        return (1, int(number[-1][:9]))
    if any(word in label.lower() for word in _FIRST):
        return (0, 0)
    if any(word in label.lower() for word in _LAST):
        return (2, 0)
    raise OctoPipeError(f"{where}: where does {brief(label)} stand? number the ranges (layer 0, layer 1, ...); {HOW}")

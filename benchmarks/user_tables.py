"""The lines that `bench_users.py` writes, as Markdown.

Knows: which plans of a set-up are compared, and the tables of plans as they were timed and as they were trained. Does
not know: how anything is measured; imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

PLANS = {
    "1F1B": ("1f1b",),
    "interleaved": ("interleaved",),
    "ZB-V": ("zb-v",),
    "tuned": ("tuned",),
    "tuned with copies": ("tuned", "copies"),
    "tuned layout by flags": ("tuned", "flags"),
}
"""The compared kinds of plans: how the names of such plans begin, and which of the words of `MORE` they have."""
MORE = ("copies", "flags")
"""Words in the names of tuned plans that are not the plain one: layers held twice; Megatron's own flags and order."""
PUBLISHED = ("1F1B", "interleaved", "ZB-V")
Row = TypeVar("Row")


def fastest_of_each(rows: Iterable[Row], name: Callable[[Row], str], ms: Callable[[Row], float]) -> dict[str, Row]:
    """By kind of plan: the fastest row of that kind."""
    found: dict[str, Row] = {}
    for kind, words in PLANS.items():
        mine = [
            row for row in rows
            if name(row).startswith(words[0]) and all((word in name(row)) == (word in words) for word in MORE)
        ]  # fmt: skip
        if mine:
            found[kind] = min(mine, key=ms)
    return found


def tables(paths: Sequence[str]) -> str:
    """The lines of one or several runs: their plans as they were timed and, where they were, as they were trained."""
    runs = list(_runs(paths))
    return "\n\n".join(filter(None, [timed_table(runs), trained_table(runs)]))


def _runs(paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for path in paths for line in Path(path).read_text().splitlines())


def timed_table(runs: Sequence[dict[str, Any]]) -> str:
    """A row per set-up and run, then errors and gains over all."""
    lines = [
        f"| set-up | {' | '.join(PLANS)} | over the best published | promised | memory | host per op |",
        f"|:--|{'--:|' * (len(PLANS) + 4)}",
    ]
    errors: list[float] = []
    gains, arrived, memories = [], [], []
    for run in runs:
        rows = run["rows"]
        tuned = [r for r in rows if r["round"] > 0]
        published = min((r for r in rows if r["round"] == 0), key=lambda r: r["measured_ms"])
        best = min(rows, key=lambda r: r["measured_ms"])
        shown = fastest_of_each(rows, lambda r: r["name"], lambda r: r["measured_ms"])
        errors += [abs(r["error"]) for r in shown.values()]
        cells = [_cell(shown.get(kind), "measured_ms", best) for kind in PLANS]
        gain = published["measured_ms"] / best["measured_ms"]
        # What the tuner promised: the published system and its own best plan, both as they were predicted.
        promise = min(r["predicted_ms"] for r in rows if r["round"] == 0) / min(r["predicted_ms"] for r in tuned)
        off = [abs(p / m - 1) for r in rows for p, m in zip(r["predicted_gib"], r["peak_gib"])]
        gains.append(gain)
        arrived.append(gain / promise)
        memories += off
        hosts = [r["host_us_per_op"][0] for r in rows if r["host_us_per_op"]]
        host = f"{np.median(hosts):.0f} µs" if hosts else ""
        lines.append(f"| {run['setup']} | {' | '.join(cells)} | {gain:.2f} | {promise:.2f} | {_mean(off)} | {host} |")
    if not gains:
        return "no runs"
    lines += ["", *_over_all("step", errors, gains, arrived, memories)]
    return "\n".join(lines)


def trained_table(runs: Sequence[dict[str, Any]]) -> str:
    """The same plans in training: the pipeline's time with its error, and the whole step of the fastest plan. Empty
    where nothing was trained."""
    lines = [
        f"| in training | {' | '.join(PLANS)} | whole step, best published | whole step, best "
        "| over the best published | promised | memory |",
        f"|:--|{'--:|' * (len(PLANS) + 5)}",
    ]
    errors: list[float] = []
    gains, arrived, memories = [], [], []
    failed: list[str] = []
    for run in runs:
        plans = run.get("train", {}).get("plans", [])
        failed += [f"{run['setup']}, {p['name']}: {p['error']}" for p in plans if "error" in p]
        shown = fastest_of_each([p for p in plans if "error" not in p], lambda p: p["name"], lambda p: p["pipeline_ms"])
        if not shown:
            continue
        theirs, ours = ([p for kind, p in shown.items() if (kind in PUBLISHED) is known] for known in (True, False))
        errors += [abs(p["predicted_ms"] / p["pipeline_ms"] - 1) for p in shown.values()]
        best = min(shown.values(), key=lambda p: p["pipeline_ms"])
        off = [abs(a / b - 1) for p in shown.values() for a, b in zip(p["predicted_gib"], p["memory_gib"])]
        memories += off
        cells = [_cell(shown.get(kind), "pipeline_ms", best) for kind in PLANS]
        if theirs and ours:
            published = min(theirs, key=lambda p: p["pipeline_ms"])
            gain = published["pipeline_ms"] / best["pipeline_ms"]
            promise = min(p["predicted_ms"] for p in theirs) / min(p["predicted_ms"] for p in ours)
            gains.append(gain)
            arrived.append(gain / promise)
            cells += [f"{published['step_ms']:.1f}", f"{best['step_ms']:.1f}", f"{gain:.2f}", f"{promise:.2f}"]
        else:
            cells += ["", f"{best['step_ms']:.1f}", "", ""]
        lines.append(f"| {run['setup']} | {' | '.join(cells)} | {_mean(off)} |")
    told = ["", *_over_all("pipeline in training", errors, gains, arrived, memories)] if errors else []
    return "\n".join([*(lines if errors else []), *told, *(f"not trained: {words}" for words in failed)])


def _cell(row: dict[str, Any] | None, measured: str, best: dict[str, Any]) -> str:
    """A plan's time, bold where it is the fastest of its set-up, and the error of its prediction."""
    if row is None:
        return ""
    figure = f"{row[measured]:.1f}"
    return f"{f'**{figure}**' if row is best else figure} ({100 * (row['predicted_ms'] / row[measured] - 1):+.1f} %)"


def _mean(shares: Sequence[float]) -> str:
    return f"{100 * np.mean(shares):.1f} %" if shares else ""


def _over_all(
    what: str, errors: Sequence[float], gains: Sequence[float], arrived: Sequence[float], memories: Sequence[float]
) -> list[str]:
    lines = [f"{what}: mean error {_mean(errors)}, worst {100 * max(errors):.1f} %"]
    if gains:
        lines.append(f"over the best published: mean {np.mean(gains):.3f}, least {min(gains):.3f}")
        lines.append(f"of the promise: mean {_mean(arrived)}, least {100 * min(arrived):.1f} %")
    if memories:
        lines.append(f"memory: mean error {_mean(memories)}, worst {100 * max(memories):.1f} %")
    return lines

"""Figure "Time and peak memory model fidelity": predictions against the measured runs kept in benchmarks/results."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.pictures import bars
from octopipe.views.reproduce.row import Result, Row

SECTION = "§VIII-C"
MISSING = "no measured runs at hand; give --measured FILE, as benchmarks/bench_gpu.py writes it"


def run(bench: Bench) -> Result:
    runs = _runs(bench.options.measured)
    steps = [abs(r["step_error"]) for r in runs]
    memory = [abs(e) for r in runs for e in r["memory_error"]]
    rows = [
        *_rows("step time", steps, (0.0088, 0.0413, 0.0338), len(runs), "plans"),
        *_rows("peak memory", memory, (0.05, 0.0924, 0.0553), len(memory), "ranks"),
    ]
    if not runs:
        return Result(rows=tuple(rows), costs="none")
    by_model: dict[str, list[dict[str, Any]]] = {}
    for r in runs:
        by_model.setdefault(f"{r['model']}\n{r['micro_batches']} mb", []).append(r)
    groups = list(by_model)
    series = {
        "step time": [100 * statistics.mean(abs(r["step_error"]) for r in by_model[g]) for g in groups],
        "peak memory": [
            100 * statistics.mean([abs(e) for r in by_model[g] for e in r["memory_error"]] or [0.0]) for g in groups
        ],
    }
    picture = bars("Mean error of the prediction, measured on an H200", groups, series, unit="% error")
    text = (
        "Ours is measured on one H200 shared by four ranks, not on 64 H800: the same simulator against another "
        "machine. Each run is one plan (a published system or a tuned one) of a hybrid, a LLaMA or a Jamba.",
    )
    costs = f"profiles measured on the device ({bench.options.measured.name if bench.options.measured else ''})"
    return Result(rows=tuple(rows), costs=costs, text=text, pictures={"fidelity.svg": picture})


def _rows(what: str, errors: list[float], paper: tuple[float, float, float], count: int, of: str) -> list[Row]:
    ours = (min(errors), max(errors), statistics.mean(errors)) if errors else (None, None, None)
    names = ("smallest", "largest", "mean")
    sources = (SECTION, SECTION, f"abstract of §I, {SECTION}")
    return [
        Row.at_most(
            f"{name} error of {what}",
            p,
            o,
            unit="%",
            why=MISSING if o is None else "a larger error",
            source=source,
            note=f"{count} {of}" if o is not None else "",
        )
        for name, p, o, source in zip(names, paper, ours, sources, strict=True)
    ]


def _runs(path: Path | None) -> list[dict[str, Any]]:
    """The runs of a file, blocking ones left out: the paper's are overlapped."""
    if path is None:
        return []
    out = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            run = json.loads(line)
            {"model": run["model"], "step": float(run["step_error"]), "memory": list(run["memory_error"])}
        except (ValueError, KeyError, TypeError):
            raise OctoPipeError(
                f"{path.name}: line {number} is no measured run; give what bench_gpu.py wrote"
            ) from None
        if not str(run.get("name", "")).endswith("-blocking"):
            out.append(run)
    return out


PART = Part(name="fidelity", title="Fidelity of the performance model", labels=("fig:sim_thro_mem",), run=run)

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
from octopipe.views.reproduce.row import Result, Row, baseline

SECTION = "§VIII-C"
MISSING = "no measured runs at hand; give --measured FILE, as benchmarks/bench_gpu.py writes it"


def run(bench: Bench) -> Result:
    runs = _runs(bench.options.measured)
    steps = [abs(r["step_error"]) for r in runs]
    memory = [abs(e) for r in runs for e in r["memory_error"]]
    plain_steps = [abs(r["plain_ms"] / r["measured_ms"] - 1) for r in runs if r.get("plain_ms")]
    signed = [e for r in runs for e in r["memory_error"]]
    under = sum(e < 0 for e in signed)
    if not runs:
        return Result(rows=(), costs="none", text=(MISSING,))
    rows = [
        *_rows("time", "step time", steps, (0.0088, 0.0413, 0.0338)),
        *_rows("memory", "peak memory", memory, (0.05, 0.0924, 0.0553)),
        Row.order(
            "fidelity.memory.over",
            "predicted memory is an upper bound of the measured",
            "on every rank",
            baseline(f"under-predicted on {under} of {len(signed)} ranks"),
            (under == 0, None),
            source=SECTION,
            why="our account follows what is held op by op and takes no theoretical bound",
            tested="fidelity.margin",
        ),
        Row.shown(
            "fidelity.margin",
            "tested: margin on the prediction that makes it an upper bound on every rank",
            baseline(max(-e / (1 + e) for e in signed)),
            unit="%",
        ),
        Row.shown(
            "fidelity.plain",
            "tested: mean error of the plain simulator, without what a rehearsal measures of contention",
            baseline(statistics.mean(plain_steps) if plain_steps else "not recorded"),
            paper=0.0338,
            unit="%",
        ),
        Row.constructed(
            "fidelity.noise",
            "3.73 ± 0.239 ms of a Mamba layer",
            0.064,
            0.239 / 3.73,
            abs(0.239 / 3.73 - 0.064) < 1e-3,
            unit="%",
            source=SECTION,
        ),
    ]
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
        "Ours is measured on one H200 that four ranks share under MPS, not on 64 H800, and predicted after a rehearsal "
        "that measures how the ranks slow each other down: more than the simulator of the other parts knows. Each run "
        "is one plan of a hybrid, a LLaMA or a Jamba.",
    )
    costs = f"profiles measured on the device ({bench.options.measured.name if bench.options.measured else ''})"
    return Result(rows=tuple(rows), costs=costs, text=text, pictures={"fidelity.svg": picture})


def _rows(id: str, what: str, errors: list[float], paper: tuple[float, float, float]) -> list[Row]:
    ours = (min(errors), max(errors), statistics.mean(errors))
    return [
        Row.number(
            f"fidelity.{id}.{name}",
            f"{name} error of {what}",
            p,
            baseline(o),
            unit="%",
            source=SECTION if name != "mean" else f"§I, {SECTION}",
            group=f"fidelity.{id}",
            why="one card and a rehearsal instead of 64 cards and the simulator alone",
            tested="fidelity.plain",
        )
        for name, p, o in zip(("smallest", "largest", "mean"), paper, ours, strict=True)
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

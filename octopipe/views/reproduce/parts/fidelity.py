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
    margin = max(-e / (1 + e) for e in signed)
    raised = [abs((1 + e) * (1 + margin) - 1) for e in signed]
    rows = [
        *_rows("time", "step time", steps, (0.0088, 0.0413, 0.0338), "simulator alone", plain_steps),
        *_rows("memory", "peak memory", memory, (0.05, 0.0924, 0.0553), "margin for an upper bound", raised),
        Row.order(
            "fidelity.memory.over",
            "predicted memory is an upper bound of the measured",
            "on every rank",
            baseline(f"under-predicted on {under} of {len(signed)} ranks"),
            (under == 0, None),
            source=SECTION,
            why="our account follows what is held op by op and takes no theoretical upper bound",
            test=f"{100 * margin:.1f} % of margin",
            trial=lambda: (f"under-predicted on {_under(signed, margin)} ranks", _under(signed, margin) == 0),
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
    by_model["all runs"] = runs
    groups = list(by_model)
    series = {
        "step time": [100 * statistics.mean(abs(r["step_error"]) for r in by_model[g]) for g in groups],
        "peak memory": [
            100 * statistics.mean([abs(e) for r in by_model[g] for e in r["memory_error"]] or [0.0]) for g in groups
        ],
    }
    absent: list[float | None] = [None] * (len(groups) - 1)
    picture = bars(
        "Fig. 12: mean error of the prediction; ours is measured on one H200, the paper's on 64 H800",
        groups,
        series,
        paper={"step time": [*absent, 3.38], "peak memory": [*absent, 5.53]},
        unit="% error",
    )
    text = (
        "Ours is measured on one H200 that four ranks share under MPS, not on 64 H800, and predicted after a rehearsal "
        "that measures how the ranks slow each other down: more than the simulator of the other parts knows. Each run "
        "is one plan of a hybrid, a LLaMA or a Jamba.",
    )
    costs = f"profiles measured on the device ({bench.options.measured.name if bench.options.measured else ''})"
    return Result(rows=tuple(rows), costs=costs, text=text, pictures={"fidelity.svg": picture})


def _under(errors: list[float], margin: float) -> int:
    """Return the number of ranks whose memory is under-predicted even if predictions are raised by the margin."""
    return sum((1 + e) * (1 + margin) < 1 - 1e-9 for e in errors)


def _rows(
    id: str, what: str, errors: list[float], paper: tuple[float, float, float], test: str, tried: list[float]
) -> list[Row]:
    def ends(some: list[float]) -> tuple[float, float, float]:
        return min(some), max(some), statistics.mean(some)

    ours, then = ends(errors), ends(tried or errors)
    return [
        Row.number(
            f"fidelity.{id}.{name}",
            f"{name} error of {what}",
            p,
            baseline(o),
            unit="%",
            source=SECTION if name != "mean" else f"§I, {SECTION}",
            group=f"fidelity.{id}",
            why="one card and a rehearsal instead of 64 cards and the simulator alone"
            if id == "time"
            else "our account of memory follows what is held op by op instead of an upper bound",
            test=test,
            trial=lambda t=t: t,  # type: ignore[misc]
        )
        for name, p, o, t in zip(("smallest", "largest", "mean"), paper, ours, then, strict=True)
    ]


def _runs(path: Path | None) -> list[dict[str, Any]]:
    """Return the runs in a file except blocking ones, since the paper's runs overlap transfers."""
    if path is None:
        return []
    out = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            run = json.loads(line)
            {"model": run["model"], "step": float(run["step_error"]), "memory": list(run["memory_error"])}
        except (ValueError, KeyError, TypeError):
            raise OctoPipeError(
                f"{path.name}: line {number} is not a measured run; give what bench_gpu.py wrote"
            ) from None
        if not str(run.get("name", "")).endswith("-blocking"):
            out.append(run)
    return out


PART = Part(name="fidelity", title="Fidelity of the performance model", labels=("fig:sim_thro_mem",), run=run)

"""`make demo`: its table has one definition of speed, and only other programs are called other programs."""

from __future__ import annotations

import importlib.util
import io
import os
import threading
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

DEMO = Path(__file__).resolve().parents[2] / "scripts" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> Any:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plan_with_the_shorter_time_has_more_tokens_a_second(demo: Any) -> None:
    """However long the optimizer and the first steps took: 617 tokens/s stood beside the time of the faster plan."""
    rows = []
    for pipeline_ms, step_ms in ((300.0, 400.0), (200.0, 440.0)):
        result = SimpleNamespace(
            predicted_ms=1.0, pipeline_ms=pipeline_ms, step_ms=step_ms, bubble_ratio=0.1, losses=[1.0, 0.5]
        )
        rows.append(demo.numbers_of(result, 600))
    assert [row[1] for row in rows] == ["300.0", "200.0"]
    assert [row[3] for row in rows] == ["2,000", "3,000"]


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system does not say how busy it is")
def test_busy_cores_are_those_of_now(demo: Any) -> None:
    """A load average remembers for minutes what was installed before."""
    end = time.monotonic() + 60.0
    stop = threading.Event()
    child = os.fork()
    if child == 0:
        while time.monotonic() < end:
            pass
        os._exit(0)
    try:
        assert demo.busy_cores(1.0) > 0.3
    finally:
        stop.set()
        os.kill(child, 9)
        os.waitpid(child, 0)


def fake_result(loss: float) -> SimpleNamespace:
    return SimpleNamespace(predicted_ms=1.0, pipeline_ms=2.0, bubble_ratio=0.1, losses=[loss, loss / 2])


def test_the_training_part_uses_what_the_package_has(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it but the ranks: `make demo` broke unnoticed when a function moved to another file."""
    pytest.importorskip("torch")
    from octopipe.runtime.training import train
    from octopipe.runtime.training.job import Phase, StepReport, TrainJob

    asked: list[TrainJob] = []

    def in_turns(jobs: list[TrainJob], tell: Any) -> list[SimpleNamespace]:
        asked.extend(jobs)
        tell(Phase(text="measuring layers"))
        tell(StepReport(**{field.name: 1.0 for field in fields(StepReport)} | {"memory_bytes": (1.0, 2.0)}))
        return [fake_result(6.0), fake_result(6.0)]

    monkeypatch.setattr(train, "train_in_turns", in_turns)
    monkeypatch.setattr(demo, "busy_cores", lambda: 0.0)
    out = Console(force_terminal=True, width=100, file=io.StringIO())
    monkeypatch.setattr(demo, "out", out)
    demo.train_for_real(2)
    assert [job.tune_s for job in asked] == [None, 5.0]
    assert asked[0].spec.num_layers == 14 and "equal bit for bit" in out.file.getvalue()


@pytest.mark.slow
def test_the_training_part_trains(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    out = Console(width=100, file=io.StringIO())
    monkeypatch.setattr(demo, "out", out)
    demo.train_for_real(2)
    assert "losses of all 2 steps are equal" in out.file.getvalue()


@pytest.mark.parametrize(("samples", "told"), [((0.0, 0.9), True), ((0.9, 0.0), True), ((0.1, 0.1), False)])
def test_a_busy_machine_is_told_whether_it_was_busy_before_or_after(
    demo: Any, monkeypatch: pytest.MonkeyPatch, samples: tuple[float, float], told: bool
) -> None:
    pytest.importorskip("torch")
    left = list(samples)
    monkeypatch.setattr(demo, "run", lambda jobs: [fake_result(6.0), fake_result(6.0)])
    monkeypatch.setattr(demo, "busy_cores", lambda: left.pop(0))
    out = Console(width=100, file=io.StringIO())
    monkeypatch.setattr(demo, "out", out)
    demo.train_for_real(2)
    assert ("say little about the plans" in " ".join(out.file.getvalue().split())) is told

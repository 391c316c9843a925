"""`make demo`: its table has one definition of speed, and only other programs are called other programs."""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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

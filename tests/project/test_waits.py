"""No test fails because the machine is busy: whatever is not waited out on purpose has minutes, not a guess of seconds.

Looks at every call in the tests that gives a time limit as a number.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from ranks import PATIENCE_S

TESTS = Path(__file__).resolve().parents[1]
LIMITS = ("timeout", "timeout_s", "limit_s")
ON_PURPOSE = {
    ("test_board.py", "timeout_s=0.1"): "the watch must give up and say what it waited for",
    ("ranks.py", "timeout=5"): "ranks that do not end by themselves are killed",
    ("test_setting.py", "timeout_s=1.0"): "the driver is made and asked, and never waits",
    ("test_megatron.py", "timeout_s=1.0"): "the driver is made and asked, and never waits",
}
"""Limits that are reached, or never counted."""


def limits(path: Path) -> list[tuple[int, str, float]]:
    """(line, source, seconds) of every time limit that a call in this file gives as a number."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        for word in node.keywords:
            if (
                word.arg in LIMITS
                and isinstance(word.value, ast.Constant)
                and isinstance(word.value.value, int | float)
            ):
                found.append((word.value.lineno, f"{word.arg}={word.value.value}", float(word.value.value)))
    return found


@pytest.mark.parametrize("folder", sorted(p.name for p in TESTS.iterdir() if p.is_dir() and p.name != "golden"))
def test_time_limits_are_patient_or_reached_on_purpose(folder: str) -> None:
    hasty = [
        f"{path.relative_to(TESTS)}:{line}: {source}; use PATIENCE_S of helpers/ranks.py"
        for path in sorted((TESTS / folder).rglob("*.py"))
        for line, source, seconds in limits(path)
        if seconds < PATIENCE_S * 0.8 and (path.name, source) not in ON_PURPOSE
    ]
    assert hasty == []


def test_a_hasty_limit_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text("run(1, timeout=20)\nrun(timeout_s=PATIENCE_S)\nwait(timeout_s=3.5)\n")
    assert limits(file) == [(1, "timeout=20", 20.0), (3, "timeout_s=3.5", 3.5)]

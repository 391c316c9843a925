"""No test fails because the machine is busy: whatever is not waited out on purpose has minutes, not a guess of seconds.

Looks at every call in the tests that gives a time limit as a number, by name or as what `join` or `wait` is called
with, and at every constant that is named a limit.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from ranks import PATIENCE_S

TESTS = Path(__file__).resolve().parents[1]
LIMITS = ("timeout", "timeout_s", "limit_s")
WAITS = ("join", "wait", "poll", "result")
ON_PURPOSE = {
    ("test_board.py", "timeout_s=0.1"): "the watch must give up and say what it waited for",
    ("ranks.py", "timeout=5"): "ranks that do not end by themselves are killed",
    ("test_cli_limits.py", "wait(60.0)"): "given up on purpose; the event is set right after",
    ("test_executor_failures.py", "HANG_TIMEOUT_S=30.0"): "a rank hangs, and this is waited out",
    ("test_faults.py", "TIMEOUT_S=30.0"): "a rank hangs or stands still, and this is waited out",
    ("test_nccl.py", "HANG_TIMEOUT_S=20.0"): "a rank hangs, and this is waited out",
    ("test_nccl.py", "TIMEOUT_S=30.0"): "a deadlock on the device is waited out",
    ("test_pairs_run.py", "TIMEOUT_S=30.0"): "a rank hangs, and this is waited out",
    ("test_train_faults.py", "wait(0.1)"): "how often a loop looks, not how long it waits",
    ("test_report_server.py", "wait(0.02)"): "how often a loop looks, not how long it waits",
    ("test_setting.py", "timeout_s=1.0"): "the driver is made and asked, and never waits",
    ("test_megatron.py", "timeout_s=1.0"): "the driver is made and asked, and never waits",
}
"""Limits that are reached, or never counted."""


def limits(path: Path) -> list[tuple[int, str, float]]:
    """(line, source, seconds) of every time limit that a call in this file gives as a number."""
    found: list[tuple[ast.expr, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id.endswith(("TIMEOUT_S", "LIMIT_S")):
                    found.append((node.value, f"{target.id}="))
        elif isinstance(node, ast.Call):
            found += [(word.value, f"{word.arg}=") for word in node.keywords if word.arg in LIMITS]
            if isinstance(node.func, ast.Attribute) and node.func.attr in WAITS and node.args:
                found.append((node.args[0], f"{node.func.attr}("))
    return [
        (value.lineno, f"{name}{value.value}{')' if name.endswith('(') else ''}", float(value.value))
        for value, name in found
        if isinstance(value, ast.Constant) and isinstance(value.value, int | float)
    ]


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
    lines = ("run(1, timeout=20)", "run(timeout_s=PATIENCE_S)", "wait(timeout_s=3.5)", "p.join(60)", "A_LIMIT_S = 9")
    file.write_text("\n".join((*lines, "'-'.join(parts)", "q.wait(PATIENCE_S)", "")))
    assert sorted(limits(file)) == [
        (1, "timeout=20", 20.0),
        (3, "timeout_s=3.5", 3.5),
        (4, "join(60)", 60.0),
        (5, "A_LIMIT_S=9", 9.0),
    ]


def test_drawn_examples_have_no_deadline_and_are_the_same_in_every_run() -> None:
    used = settings()
    assert used.deadline is None and used.derandomize and HealthCheck.too_slow in used.suppress_health_check

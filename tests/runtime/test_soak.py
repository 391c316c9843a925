"""The soak, in little: plans that change and a rank that dies cost neither a step nor a digit of a loss."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import soak


@pytest.mark.slow
def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    assert soak.soak(24, 1, 3, tmp_path, told.append) == []
    assert "24 steps" in told[-1] and " 1 faults, " in told[-1] and "0 problems" in told[-1]
    assert " 0 plan switches" not in told[-1]

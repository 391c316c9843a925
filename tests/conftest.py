"""Where tests find each other's helpers and the authors' measured layer times."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
PROFILES = Path(__file__).resolve().parents[2] / "shared" / "profiles"


def pytest_configure(config: pytest.Config) -> None:
    """In a worker of a whole run, ranks of all tests are forked from one server that has loaded everything."""
    if hasattr(config, "workerinput") and importlib.util.find_spec("torch"):
        from ranks import start_server

        start_server()


@pytest.fixture
def profiles() -> Path:
    """The folder of layer times published by the paper's authors; tests that need it skip without it."""
    if not PROFILES.is_dir():
        pytest.skip("the authors' layer times (../shared/profiles) are not on this machine")
    return PROFILES

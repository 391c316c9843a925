"""Where tests find each other's helpers, worlds of ranks and the authors' measured layer times."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from ranks import Ranks, close_shared, shared_ranks, start_server

from octopipe.costs.measured import AUTHORS


def pytest_configure(config: pytest.Config) -> None:
    """In a worker of a whole run, ranks of all tests are forked from one server that has loaded everything."""
    if hasattr(config, "workerinput") and importlib.util.find_spec("torch"):
        start_server()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        close_shared()


@pytest.fixture
def two() -> Ranks:
    """A world of two ranks."""
    return shared_ranks(2)


@pytest.fixture
def four() -> Ranks:
    """A world of four ranks."""
    return shared_ranks(4)


@pytest.fixture
def profiles() -> Path:
    """The folder of layer times published by the paper's authors."""
    return AUTHORS

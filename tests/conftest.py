"""Where tests find each other's helpers, worlds of ranks and the authors' measured layer times."""

from __future__ import annotations

import gc
import importlib.util
import sys
import time
from pathlib import Path

import pytest
from effort import draws
from hypothesis import HealthCheck, settings
from known_warnings import as_lines
from ranks import Ranks, close_shared, same_numbers, shared_ranks, start_server, start_server_for_workers
from sleep_clock import SleepClock

from octopipe.costs.measured import AUTHORS

# The same examples in every run and on every machine, however slow it is: what a test says must not depend on luck.
# `make fuzz` looks for new ones.
settings.register_profile(
    "same", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")

# Objects are made by the million until all tests are collected, and all of them stay: see `pytest_collection_finish`.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """In a run with workers, ranks of all tests are forked from one server that has loaded everything."""
    for line in as_lines():
        config.addinivalue_line("filterwarnings", line)
    if importlib.util.find_spec("torch"):
        if hasattr(config, "workerinput"):
            start_server()
        elif config.getoption("numprocesses", None) and not config.option.collectonly:
            start_server_for_workers()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Workers share the cores: a test computes with one thread, whatever the tests before it asked for. And it draws
    the same numbers, whichever tests ran before it in this process."""
    same_numbers()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_collection_modifyitems() -> None:
    """In the quick tier, searches that count their moves end with fewer random moves of transfers: of a search of a few
    moves, these were a third of the time. tests/simulation/test_hide.py looks at them alone."""
    if "octopipe.search.tuner" in sys.modules:
        tuner = sys.modules["octopipe.search.tuner"]
        tuner.HIDE_MOVES = draws(tuner.HIDE_MOVES, least=50)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Millions of objects have been imported by now and stay: looking at them again and again took a tenth of the time
    of tests that make many objects. What tests leave behind is collected after every file."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        close_shared()
        gc.collect()


@pytest.fixture
def two() -> Ranks:
    """A world of two ranks."""
    return shared_ranks(2)


@pytest.fixture
def four() -> Ranks:
    """A world of four ranks."""
    return shared_ranks(4)


@pytest.fixture
def only_sleeping_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a `SleepClock` in the place of the one that profilers of this process look at."""
    clock = SleepClock()
    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(time, "sleep", clock.sleep)


@pytest.fixture
def profiles() -> Path:
    """The folder of layer times published by the paper's authors."""
    return AUTHORS

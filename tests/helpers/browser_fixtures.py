"""A real browser for the tests of the report: Debian's Chromium, driven by Playwright.

Skipped with a message on a machine without either, but never where CI=true.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from browser_cases import Seen
from ranks import PATIENCE_S

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def _missing(words: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{words}; where CI=true the browser tests must run")
    pytest.skip(words)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("Playwright is not installed (pip install playwright)")
    path = os.environ.get("OCTOPIPE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        _missing("Chromium is not on this machine (apt-get install chromium)")
    with sync_playwright() as play:
        running = play.chromium.launch(executable_path=path, args=FLAGS, timeout=1e3 * PATIENCE_S)
        yield running
        running.close()


@pytest.fixture(scope="module")
def page_of_all(browser: Any) -> Iterator[Seen]:
    """A page needs a process of its own, which takes longer to start than a report to be shown."""
    one = Seen(browser)
    yield one
    one.page.close()


@pytest.fixture
def seen(page_of_all: Seen) -> Iterator[Seen]:
    one = page_of_all
    one.afresh()
    yield one
    assert one.complaints == []
    assert all(re.match(r"(file|data|blob):", url) for url in one.requests), one.requests
    assert sum(url.startswith("file:") for url in one.requests) <= 1

"""What the tests ask of the report's pages: opening one, waiting, places on the chart, and the what-if question."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from ranks import PATIENCE_S

from octopipe.costs.cluster.hardware import Link, Network
from octopipe.costs.table import CostTable

SIZE: Any = {"width": 1440, "height": 900}


def until(page: Any, expression: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait for an expression to be true; Playwright's own waiting evaluates strings, which the page forbids."""
    end = time.monotonic() + timeout_s
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"{expression} does not become true"
        page.wait_for_timeout(20)


class Seen:
    """A page together with what it complained about and what it asked the network for."""

    def __init__(self, browser: Any, **options: Any):
        self.page = browser.new_page(viewport=SIZE, **options)
        self.page.set_default_timeout(1e3 * PATIENCE_S)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.complaints.append(str(e)))
        self.page.on("request", lambda r: self.requests.append(r.url))

    def afresh(self) -> None:
        """As if it had just been made: nothing is open, seen or held down."""
        self.page.goto("about:blank")
        self.page.set_viewport_size(SIZE)
        self.page.emulate_media(media="null", color_scheme="null", reduced_motion="null", forced_colors="null")
        self.page.mouse.move(0, 0)
        self.complaints.clear()
        self.requests.clear()

    def open(self, path: Path) -> Any:
        self.page.goto(path.as_uri())
        until(self.page, "window.octopipe")
        return self.page


def place(page: Any, entry: int, op: int) -> tuple[int, int]:
    """Where an op's middle is on the screen."""
    page.locator("canvas").scroll_into_view_if_needed()
    x, y = page.evaluate(
        """([n, i]) => { const {view, entries} = octopipe, e = entries[n];
        return [view.xAt((e.now.start[i] + e.now.end[i]) / 2), view.laneY(e, e.rank[i]) - view.scroll + 5]; }""",
        [entry, op],
    )
    box = page.locator("canvas").bounding_box()
    return round(box["x"] + x), round(box["y"] + y)


def scaled(costs: CostTable, scale: dict[str, float], factor: float, plus_ms: float) -> CostTable:
    """The what-if panel's question, put to the Python simulator."""
    by_layer = np.array([scale.get(c, 1.0) for c in costs.symbols])

    def link(one: Link) -> Link:
        return Link(latency_ms=one.latency_ms * factor + plus_ms, ms_per_byte=one.ms_per_byte * factor)

    net = costs.network
    return costs.replace(
        forward_ms=costs.forward_ms * by_layer,
        input_ms=costs.input_ms * by_layer,
        weight_ms=costs.weight_ms * by_layer,
        network=Network(intra=link(net.intra), inter=link(net.inter), ranks_per_node=net.ranks_per_node),
    )

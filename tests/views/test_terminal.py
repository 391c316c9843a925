"""The terminal timeline: it fits, it says the truth, and it stays plain where colour does not belong."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from octopipe.costs.table import CostTable
from octopipe.plans.plan import KINDS
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Spans, Timeline, Transfers
from octopipe.views.export.terminal import timeline_lines, timeline_text


def _timeline(system: str = "1f1b", ranks: int = 4, micro_batches: int = 8) -> Timeline:
    costs = CostTable.uniform(num_layers=8, p2p_ms=0.25)
    return simulate(build_plan(system, costs, ranks, micro_batches), costs)


def _lanes(timeline: Timeline, width: int) -> list[str]:
    return [line.plain for line in timeline_lines(timeline, width, color=False)][: timeline.num_ranks]


@pytest.mark.parametrize("width", [50, 80, 120, 200])
@pytest.mark.parametrize("color", [False, True])
def test_it_fits_the_width(width: int, color: bool) -> None:
    lines = list(timeline_lines(_timeline(), width, color))
    assert max(len(line.plain.rstrip()) for line in lines[:-1]) <= width


def test_every_cell_shows_what_runs_for_most_of_it() -> None:
    timeline = _timeline("zb-h1")
    cells = 60
    for rank, line in enumerate(_lanes(timeline, cells + len("rank 0 ") + len(" 100.0% busy"))):
        drawn = line[7 : 7 + cells]
        for cell, letter in enumerate(drawn):
            a, b = cell * timeline.makespan_ms / cells, (cell + 1) * timeline.makespan_ms / cells
            mine = np.flatnonzero(timeline.spans.rank == rank)
            inside = np.minimum(timeline.spans.end_ms[mine], b) - np.maximum(timeline.spans.start_ms[mine], a)
            best = int(np.argmax(inside))
            idle = (b - a) - inside.clip(0).sum()
            if abs(inside[best] - idle) < 1e-6 or letter.isdigit():
                continue
            expected = "." if idle > inside[best] else KINDS[timeline.spans.kind[mine][best]]
            assert letter.upper() == expected, f"rank {rank} cell {cell}: {drawn}"


def test_plain_text_is_ascii_and_reads_as_a_schedule() -> None:
    text = "\n".join(line.plain for line in timeline_lines(_timeline(), 100, color=False))
    assert text.isascii()
    assert "F0" in text and "B7" in text and "F forward" in text and "B fused backward" in text


def test_a_pipe_gets_no_escape_codes() -> None:
    out = io.StringIO()
    Console(file=out, width=90).print(timeline_text(_timeline()))
    assert "\x1b" not in out.getvalue() and "F0" in out.getvalue()


def test_a_terminal_gets_colours_and_no_color_takes_them_away(monkeypatch: pytest.MonkeyPatch) -> None:
    colourful = io.StringIO()
    Console(file=colourful, width=90, force_terminal=True, color_system="truecolor").print(timeline_text(_timeline()))
    assert "\x1b[38;2" in colourful.getvalue() or "48;2;79;143;208" in colourful.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = io.StringIO()
    Console(file=plain, width=90, force_terminal=True).print(timeline_text(_timeline(), color=False))
    assert "48;2" not in plain.getvalue()


def test_sixteen_colours_are_enough() -> None:
    """Without shades, an op kind has one colour: a terminal of 16 would turn light shades into white."""

    def tints(shades: int) -> set[str]:
        lanes = list(timeline_lines(_timeline(), 90, color=True, shades=shades))[:4]
        return {str(span.style) for lane in lanes for span in lane.spans if " on " in str(span.style)}

    assert len(tints(1)) == 2 and len(tints(4)) == 4


def test_an_empty_timeline_says_so() -> None:
    ints, floats = np.zeros(0, np.int32), np.zeros(0)
    empty = Timeline(
        num_ranks=2,
        spans=Spans(ints, ints, ints, ints, floats, floats),
        transfers=Transfers(ints, ints, ints, ints, floats, floats, floats),
    )
    assert "empty" in "".join(line.plain for line in timeline_lines(empty, 80, color=False))


def test_ops_of_no_time_do_no_harm() -> None:
    costs = CostTable.uniform(num_layers=4, forward_ms=0.0, input_ms=0.0, weight_ms=0.0)
    lines = list(timeline_lines(simulate(build_plan("1f1b", costs, 2, 4), costs), 80, color=False))
    assert len(lines) == 4


def test_more_ops_than_cells_still_fit() -> None:
    assert all(len(line) <= 100 for line in _lanes(_timeline("interleaved", 4, 64), 100))

"""Pictures of timelines, against a PNG decoder and committed SVGs, and the command that exports."""

from __future__ import annotations

import itertools
import os
import re
import struct
import sys
import types
import zlib
from pathlib import Path

import numpy as np
import pytest
from export_cases import small_case, small_costs

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.segments import Segments
from octopipe.costs.table import CostTable
from octopipe.plans.plan import KINDS
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import simulate
from octopipe.views.export.png import timeline_png
from octopipe.views.export.scene import LEFT, RIGHT, Rect, timeline_scene
from octopipe.views.export.style import BUBBLES, COLOURS, shade, ticks
from octopipe.views.export.svg import timeline_svg

GOLDEN = Path(__file__).parents[1] / "golden"


# -- colours -------------------------------------------------------------------------------------------

# Severe protanopia, deuteranopia and tritanopia (Machado, Oliveira, Fernandes 2009), on linear RGB.
DEFICIENCIES = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def _lab(rgb: tuple[int, int, int], seen: np.ndarray) -> np.ndarray:
    c = np.array(rgb) / 255
    linear = np.clip(seen @ np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4), 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    f = np.cbrt(xyz / [0.9505, 1.0, 1.089])
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
@pytest.mark.parametrize("palette", [COLOURS, BUBBLES], ids=["kinds", "bubbles"])
def test_colours_stay_apart_with_every_common_deficiency(deficiency: str, palette: dict) -> None:
    seen = np.array(DEFICIENCIES[deficiency])
    for (a, x), (b, y) in itertools.combinations(palette.items(), 2):
        assert np.linalg.norm(_lab(x, seen) - _lab(y, seen)) > 18, f"{a} and {b} with {deficiency}"


def test_labels_are_readable_on_every_shade() -> None:
    def luminance(rgb: tuple[int, int, int]) -> float:
        c = np.array(rgb) / 255
        return float(np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722])

    ink = luminance((0x17, 0x21, 0x2B))
    for colour in COLOURS.values():
        for step in range(4):
            assert (luminance(shade(colour, step)) + 0.05) / (ink + 0.05) >= 4.3


@pytest.mark.parametrize(("first", "last", "count"), [(0, 1, 5), (0, 1330.3, 8), (3.2, 3.3, 4), (0, 1e-6, 3)])
def test_ticks_are_round_numbers_inside_the_axis(first: float, last: float, count: int) -> None:
    found = ticks(first, last, count)
    steps = np.diff(found)
    assert 2 <= len(found) <= 2 * count + 1 and np.allclose(steps, steps[0])
    assert first - 1e-9 <= found[0] and found[-1] <= last + 1e-9
    assert re.match(r"[125]\.?0*e", f"{steps[0]:.6e}")


# -- pictures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["1f1b", "zb-h1", "interleaved", "gpipe"])
def test_pictures_of_small_plans_do_not_change_unnoticed(system: str) -> None:
    """OCTOPIPE_UPDATE_GOLDEN=1 writes them anew; look at them before you commit."""
    svg = timeline_svg(small_case(system)[1], width=800)
    path = GOLDEN / f"{system}.svg"
    if os.environ.get("OCTOPIPE_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(svg)
    assert svg == path.read_text(), f"{path.name} differs; OCTOPIPE_UPDATE_GOLDEN=1 accepts the new picture"


def test_svg_boxes_are_as_long_as_the_ops() -> None:
    _, timeline = small_case("zb-h1")
    svg = timeline_svg(timeline, width=2000)
    scale = (2000 - LEFT - RIGHT) / timeline.step_ms
    boxes = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="22" fill="(#\w+)"', svg)
    found = sorted((float(y), float(x)) for x, y, _, fill in boxes if fill != "#f1f3f5")
    spans = timeline.spans
    lanes = sorted({y for y, _ in found})
    assert len(found) == spans.rank.size and len(lanes) == 4
    expected = sorted((lanes[r], LEFT + s * scale) for r, s in zip(spans.rank.tolist(), spans.start_ms.tolist()))
    assert np.allclose(found, expected, atol=0.006)


def test_svg_of_a_large_plan_stays_small_and_names_are_escaped() -> None:
    costs = small_costs()
    timeline = simulate(build_plan("1f1b", costs, 4, 3000), costs, label="<&>")
    svg = timeline_svg(timeline)
    assert len(svg) < 1_500_000 and "&lt;&amp;&gt;" in svg and "<&>" not in svg


def _decode_png(data: bytes) -> np.ndarray:
    """Eight-bit RGBA, every filter of the PNG standard: a decoder of our own, so that resvg is not its own judge."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, body, header = 8, b"", b""
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        header, body = (content, body) if kind == b"IHDR" else (header, body + content if kind == b"IDAT" else body)
        at += 12 + length
    wide, high, depth, colour = struct.unpack(">IIBB", header[:10])
    assert (depth, colour) == (8, 6)
    rows = np.frombuffer(zlib.decompress(body), np.uint8).reshape(high, 1 + 4 * wide).astype(np.int64)
    above, out = np.zeros((wide, 4), np.int64), []
    for row in rows:
        raw = row[1:].reshape(wide, 4)
        if row[0] in (0, 1, 2):  # of whole rows at once: nothing, what is left of a pixel, what is above it
            line = (raw, raw.cumsum(axis=0), raw + above)[row[0]] % 256
        else:
            channels = [_unfiltered(int(row[0]), *(each[:, k].tolist() for each in (raw, above))) for k in range(4)]
            line = np.array(channels).T
        out.append(line[:, :3])
        above = line
    return np.array(out)


def _unfiltered(kind: int, raw: list[int], above: list[int]) -> list[int]:
    """One channel of a row that was filtered by the mean of its neighbours (3) or by Paeth's choice of them (4)."""
    line, a, c = [], 0, 0
    for value, b in zip(raw, above, strict=True):
        p = a + b - c
        nearest = min((a, b, c), key=lambda neighbour: abs(p - neighbour))
        a, c = (value + ((a + b) // 2 if kind == 3 else nearest)) % 256, b
        line.append(a)
    return line


def test_png_is_a_png_and_shows_the_ops_in_their_colours() -> None:
    pytest.importorskip("resvg_py")
    _, timeline = small_case("zb-h1", ranks=2, micro_batches=2)
    image = _decode_png(timeline_png(timeline, width=300, scale=2))
    assert image.shape[1] == 600
    scale = 2 * (300 - LEFT - RIGHT) / timeline.step_ms
    first_lane = 2 * (6 + 22) + 6  # below the title, above the label of the box
    for i in range(timeline.spans.rank.size):
        x = 2 * LEFT + scale * (
            timeline.spans.start_ms[i] + 0.2 * (timeline.spans.end_ms[i] - timeline.spans.start_ms[i])
        )
        y = first_lane + 2 * 25 * int(timeline.spans.rank[i])
        kind = KINDS[timeline.spans.kind[i]]
        assert tuple(image[y, round(x)]) == shade(COLOURS[kind], int(timeline.spans.micro_batch[i]))


def test_png_without_its_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(OctoPipeError, match=r"octopipe\[png\].*--to svg"):
        timeline_png(small_case("1f1b")[1])


def test_png_on_a_machine_without_fonts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """resvg leaves text out in silence there."""
    blind = types.SimpleNamespace(svg_to_bytes=lambda **_: b"\x89PNG the same, whatever is written")
    monkeypatch.setitem(sys.modules, "resvg_py", blind)
    with pytest.raises(OctoPipeError, match="no fonts"):
        timeline_png(small_case("1f1b")[1])


def test_impossible_pictures_are_refused_in_one_line() -> None:
    _, timeline = small_case("1f1b")
    with pytest.raises(OctoPipeError, match="at least 200"):
        timeline_svg(timeline, width=10)
    with pytest.raises(OctoPipeError, match="too large"):
        timeline_png(timeline, width=1e6)


# -- the verb ------------------------------------------------------------------------------------------


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    assert main(["simulate", "nemotron-h-8b", "--pp", "4", "--tp", "4", "-o", str(path), "--json"]) == 0
    return path


@pytest.mark.parametrize(
    ("form", "name", "start"),
    [
        ("perfetto", "t.json", b'{"displayTimeUnit"'),
        ("perfetto", "t.json.gz", b"\x1f\x8b"),
        ("svg", "t.svg", b"<svg"),
        ("png", "t.png", b"\x89PNG"),
        ("csv", "t.csv", b"what,rank"),
        ("pytorch", "t.csv", b"0F0,"),
        ("megatron", "t.txt", b"--pipeline-model-parallel-size 4"),
    ],
)
def test_export_writes_every_format(plan_file: Path, tmp_path: Path, form: str, name: str, start: bytes) -> None:
    if form == "png":
        pytest.importorskip("resvg_py")
    assert main(["export", str(plan_file), "--to", form, "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_bytes().startswith(start)


def test_export_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "none.json"), "--to", "svg"]) == 2
    assert "none.json" in capsys.readouterr().err
    (tmp_path / "x.json").write_text('{"format": "other/1"}')
    assert main(["export", str(tmp_path / "x.json"), "--to", "svg"]) == 2
    assert "neither a plan nor a timeline" in capsys.readouterr().err


def test_both_lanes_of_a_rank_are_drawn() -> None:
    costs = CostTable.uniform(num_layers=8)
    rows = [[("compute", 0.6), ("exchange", 0.4)]] * 8
    moe = costs.replace(segments=Segments.from_ms(rows, [row[::-1] for row in rows]))
    plan = build_plan("dualpipev", moe, 2, 8)
    timeline = simulate(plan, moe)
    whole = {shape.height for shape in timeline_scene([simulate(plan, costs)]).shapes if isinstance(shape, Rect)}
    drawn = [shape for shape in timeline_scene([timeline]).shapes if isinstance(shape, Rect)]
    lane = max(whole)
    exchanges = [r for r in drawn if r.height == pytest.approx(0.32 * lane)]
    took = timeline.lanes.end_ms - timeline.lanes.start_ms
    total = float(took[timeline.lanes.lane == 1].sum())
    scale = (1000.0 - LEFT - RIGHT) / timeline.step_ms
    assert sum(r.width for r in exchanges) == pytest.approx(total * scale, abs=0.6 * len(exchanges) + 1e-6)

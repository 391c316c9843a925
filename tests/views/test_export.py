"""Exports, each against something independent: torch's own loader, a PNG decoder, the Trace Event rules."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import os
import random
import re
import struct
import sys
import types
import zlib
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from moe_settings import moe_setting
from plans import from_csv

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.segments import Segments
from octopipe.costs.table import CostTable
from octopipe.plans.file import save_plan
from octopipe.plans.plan import KINDS, Op, Plan, Stage, parse_slots
from octopipe.plans.readers.megatron_text import read_megatron
from octopipe.plans.readers.torch_csv import read_torch_csv
from octopipe.search.foreign_plan import megatron_plan, torch_plan
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline
from octopipe.views.export.megatron import megatron_arguments, megatron_layout
from octopipe.views.export.perfetto import trace_bytes, trace_events
from octopipe.views.export.png import timeline_png
from octopipe.views.export.pytorch import actions_of_version, pytorch_csv, pytorch_csv_with_communication
from octopipe.views.export.scene import LEFT, RIGHT, Rect, timeline_scene
from octopipe.views.export.style import BUBBLES, COLOURS, shade, ticks
from octopipe.views.export.svg import timeline_svg
from octopipe.views.export.table import timeline_csv

GOLDEN = Path(__file__).parents[1] / "golden"


def _costs(layers: int = 8, p2p_ms: float = 0.3) -> CostTable:
    return CostTable.uniform(num_layers=layers, p2p_ms=p2p_ms, activation_bytes=1 << 28, model="uniform")


def _case(system: str, ranks: int = 4, micro_batches: int = 8) -> tuple[Plan, Timeline]:
    costs = _costs()
    plan = build_plan(system, costs, ranks, micro_batches)
    return plan, simulate(plan, costs)


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
    svg = timeline_svg(_case(system)[1], width=800)
    path = GOLDEN / f"{system}.svg"
    if os.environ.get("OCTOPIPE_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(svg)
    assert svg == path.read_text(), f"{path.name} differs; OCTOPIPE_UPDATE_GOLDEN=1 accepts the new picture"


def test_svg_boxes_are_as_long_as_the_ops() -> None:
    _, timeline = _case("zb-h1")
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
    costs = _costs()
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
    above, out = np.zeros((wide + 1, 4), np.int64), []
    for row in rows:
        line, raw = np.zeros((wide + 1, 4), np.int64), row[1:].reshape(wide, 4)
        for x in range(wide):
            a, b, c = line[x], above[x + 1], above[x]
            p = a + b - c
            paeth = np.where(
                (abs(p - a) <= abs(p - b)) & (abs(p - a) <= abs(p - c)), a, np.where(abs(p - b) <= abs(p - c), b, c)
            )
            line[x + 1] = (raw[x] + (0, a, b, (a + b) // 2, paeth)[row[0]]) % 256
        out.append(line[1:, :3])
        above = line
    return np.array(out)


def test_png_is_a_png_and_shows_the_ops_in_their_colours() -> None:
    pytest.importorskip("resvg_py")
    _, timeline = _case("zb-h1", ranks=2, micro_batches=2)
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
        timeline_png(_case("1f1b")[1])


def test_png_on_a_machine_without_fonts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """resvg leaves text out in silence there."""
    blind = types.SimpleNamespace(svg_to_bytes=lambda **_: b"\x89PNG the same, whatever is written")
    monkeypatch.setitem(sys.modules, "resvg_py", blind)
    with pytest.raises(OctoPipeError, match="no fonts"):
        timeline_png(_case("1f1b")[1])


def test_impossible_pictures_are_refused_in_one_line() -> None:
    _, timeline = _case("1f1b")
    with pytest.raises(OctoPipeError, match="at least 200"):
        timeline_svg(timeline, width=10)
    with pytest.raises(OctoPipeError, match="too large"):
        timeline_png(timeline, width=1e6)


# -- CSV, PyTorch, Megatron ----------------------------------------------------------------------------


def test_csv_holds_every_op_and_transfer_exactly() -> None:
    plan, timeline = _case("interleaved")
    rows = list(csv.DictReader(timeline_csv(timeline, plan).splitlines()))
    ops = [r for r in rows if r["what"] == "compute"]
    assert [float(r["start_ms"]) for r in ops] == timeline.spans.start_ms.tolist()
    assert [float(r["end_ms"]) for r in ops] == timeline.spans.end_ms.tolist()
    assert [Op.parse(r["op"]) for r in ops] == [op for order in plan.orders for op in order]
    moves = [r for r in rows if r["what"] == "transfer"]
    assert [int(r["to_rank"]) for r in moves] == timeline.transfers.destination.tolist()
    stage = plan.stages[int(ops[-1]["stage"])]
    assert (int(ops[-1]["first_layer"]), int(ops[-1]["stop_layer"])) == (stage.first, stage.stop)


@pytest.mark.parametrize("system", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_torch_loads_the_schedule(system: str) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    plan, _ = _case(system)
    rows = list(csv.reader(pytorch_csv(plan).splitlines()))
    actions = {rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    mapping = schedules._validate_schedule(actions, plan.num_ranks, len(plan.stages), plan.num_micro_batches)
    assert mapping == {i: s.rank for i, s in enumerate(plan.stages)}
    lowered = schedules._add_send_recv(actions, lambda s: mapping[s], len(plan.stages))
    # PyTorch leaves the very same compute order, and sends one tensor per transfer of ours.
    for rank in actions:
        compute = [str(a) for a in lowered[rank] if "SEND" not in str(a) and "RECV" not in str(a)]
        assert compute == [str(a) for a in actions[rank]]
    sends = sum("SEND" in str(a) for row in lowered.values() for a in row)
    assert sends == _case(system)[1].transfers.source.size


def test_pytorch_text_leaves_recomputation_to_the_modules() -> None:
    plan = Plan(
        num_layers=1,
        num_ranks=1,
        num_micro_batches=1,
        stages=(Stage(first=0, stop=1, rank=0, recompute=True),),
        orders=((Op(0, "F", 0), Op(0, "R", 0), Op(0, "B", 0)),),
    ).check()
    assert pytorch_csv(plan) == "0F0,0B0\n"
    assert from_csv(pytorch_csv(plan)) == ((Op(0, "F", 0), Op(0, "B", 0)),)


def test_pytorch_text_refuses_two_routes() -> None:
    costs = _costs()
    with pytest.raises(OctoPipeError, match="routes"):
        pytorch_csv(build_plan("chimera", costs, 4, 4))


def _expand(layout: str) -> list[str]:
    """Megatron's layout grammar: (..)*n and x*n repeat, commas are nothing, | ends a stage."""
    text = layout.replace(",", "")
    while match := re.search(r"\(([^()]*)\)\*(\d+)|([^|()*])\*(\d+)", text):
        body, times = (match[1], match[2]) if match[1] is not None else (match[3], match[4])
        text = text[: match.start()] + body * int(times) + text[match.end() :]
    return text.split("|")


def _partitioned(symbols: str, sizes: list[int], ranks: int) -> Plan:
    edges = [0, *itertools.accumulate(sizes)]
    stages = tuple(Stage(first=a, stop=b, rank=i % ranks) for i, (a, b) in enumerate(itertools.pairwise(edges)))
    orders = tuple(
        tuple(Op(s, "F", 0) for s in range(r, len(stages), ranks))
        + tuple(Op(s, "B", 0) for s in reversed(range(r, len(stages), ranks)))
        for r in range(ranks)
    )
    return Plan(num_layers=len(symbols), num_ranks=ranks, num_micro_batches=1, stages=stages, orders=orders).check()


def test_megatron_layout_is_the_documented_one_for_deepseek_v3() -> None:
    symbols = "E" + "T" * 3 + "X" * 58 + "P" + "L"
    plan = _partitioned(symbols, [4] + [2] * 29 + [1, 1], 16)
    text = megatron_arguments(plan, symbols)
    assert "--pipeline-model-parallel-size 16" in text
    layout = re.search(r'layout "(.*)"', text)
    assert layout is not None and _expand(layout[1]) == _expand("Et*3|(tt|)*29,m|L")


def test_megatron_gets_a_hybrid_pattern_for_hybrids() -> None:
    symbols = "EM-M*#L"
    text = megatron_arguments(_partitioned(symbols, [3, 4], 2), symbols)
    assert text.endswith('--hybrid-layer-pattern "M-|M*E"')


def test_megatron_refuses_placements_it_cannot_say() -> None:
    costs = _costs()
    with pytest.raises(OctoPipeError, match="embedding and loss are both on rank 0"):
        megatron_arguments(build_plan("zb-v", costs, 4, 8), costs.symbols)


def _placed(sizes: list[int], ranks: list[int]) -> Plan:
    """One micro-batch through stages of these sizes on these ranks."""
    edges = [0, *itertools.accumulate(sizes)]
    pairs = enumerate(zip(itertools.pairwise(edges), ranks))
    stages = tuple(Stage(first=a, stop=b, rank=r) for _, ((a, b), r) in pairs)
    orders = tuple(
        tuple(Op(s, "F", 0) for s, at in enumerate(ranks) if at == r)
        + tuple(Op(s, "B", 0) for s, at in reversed(list(enumerate(ranks))) if at == r)
        for r in range(max(ranks) + 1)
    )
    return Plan(
        num_layers=edges[-1], num_ranks=max(ranks) + 1, num_micro_batches=1, stages=stages, orders=orders
    ).check()


def test_megatron_carries_other_placements_with_empty_stages_and_renamed_ranks() -> None:
    found = megatron_layout(_placed([2, 1, 1, 1, 2], [0, 2, 1, 2, 1]), "ETTTTTL")
    assert found.ranks == (0, 2, 1)
    assert found.text.stages == ("Et", "t", "t", "", "t", "tL")
    assert any("renamed" in note for note in found.notes) and any("empty" in note for note in found.notes)
    # Read back, the stages lie where the plan had them.
    back = megatron_plan(found.text, pp=3, num_micro_batches=3).plan
    assert [found.ranks[s.rank] for s in back.stages] == [0, 2, 1, 2, 1]
    assert back.partition == (2, 1, 1, 1, 2)


def test_megatron_joins_neighbours_on_one_rank() -> None:
    found = megatron_layout(_placed([2, 1, 2], [0, 0, 1]), "EM-*L")
    assert found.text.text() == "M-|*"


def test_megatron_pattern_has_delta_nets_latent_attention_and_predictions() -> None:
    assert megatron_layout(_placed([3, 3], [0, 1]), "EDM@#L").text.text() == "GM|+E"
    with pytest.raises(OctoPipeError, match="not both"):
        megatron_layout(_placed([3, 3], [0, 1]), "E*M@#L")
    plan = megatron_plan(read_megatron("M-|*E/M*/M*"), pp=2, num_micro_batches=2).plan
    assert megatron_layout(plan, "EM-*#PPL").text.text() == "M-|*E/M*/M*"


def test_megatron_refuses_predictions_where_megatron_does() -> None:
    with pytest.raises(OctoPipeError, match="last stage of its rank"):
        megatron_layout(_placed([2, 1, 1, 1], [0, 1, 0, 1]), "ETTPL")


def test_torch_csv_renames_micro_batches_the_last_stage_runs_out_of_order(tmp_path: Path, capsys) -> None:
    order = (0, 2, 1)
    stages = (Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=1))
    orders = (
        tuple(Op(0, "F", m) for m in order) + tuple(Op(0, "B", m) for m in order),
        tuple(op for m in order for op in (Op(1, "F", m), Op(1, "B", m))),
    )
    plan = Plan(num_layers=2, num_ranks=2, num_micro_batches=3, stages=stages, orders=orders).check()
    assert pytorch_csv(plan).splitlines()[1] == "1F0,1B0,1F1,1B1,1F2,1B2"
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    assert main(["export", str(path), "--to", "torch-csv"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0].startswith("0F0,0F1,0F2")
    assert "renamed" in captured.err


@pytest.mark.parametrize("system", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_torch_csv_with_communication_is_what_pytorchs_own_simulator_accepts(system: str) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    plan, _ = _case(system)
    text = pytorch_csv_with_communication(plan, version=version("torch"))
    rows = [[schedules._Action.from_str(c) for c in row] for row in csv.reader(text.splitlines())]
    # Its simulator has no waits: they come after a receive that has been posted, which is checked below.
    unmoving = ("SHARD", "REDUCE", "WAIT")
    moves = {rank: [a for a in row if not any(u in str(a) for u in unmoving)] for rank, row in enumerate(rows)}
    home = {i: s.rank for i, s in enumerate(plan.stages)}
    # Its simulator raises where an action waits for ever.
    schedules._simulate_comms_compute(moves, lambda s: home[s], len(plan.stages))
    for rank, row in enumerate(rows):
        words = [str(a) for a in row]
        for s in plan.stages_of_rank(rank):
            assert words.count(f"{s}REDUCE_GRAD") == ("REDUCE_GRAD" in actions_of_version(version("torch")))
            assert words.count(f"{s}UNSHARD") == words.count(f"{s}RESHARD") >= 1
    assert read_torch_csv(text).rows == tuple(tuple(map(str, order)) for order in plan.orders)


@pytest.mark.parametrize("system", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_torch_csv_of_the_newest_version_waits_once_for_every_send_and_reduction(system: str) -> None:
    plan, _ = _case(system)
    for row in csv.reader(pytorch_csv_with_communication(plan).splitlines()):
        at = {word: k for k, word in enumerate(row)}
        assert len(at) == len(set(row))
        sends = [word for word in row if re.fullmatch(r"\d+SEND_[FB]\d+", word)]
        assert sends or plan.num_ranks == 1
        assert sum("WAIT_SEND" in word for word in row) == len(sends)
        for word in sends:
            stage, kind, micro_batch = re.fullmatch(r"(\d+)SEND_([FB])(\d+)", word).groups()
            wait = at[f"{stage}WAIT_SEND_{kind}{micro_batch}"]
            assert wait > at[word]
            if kind == "F":  # the gradient proves that the output was received
                assert wait > min(at.get(f"{stage}{k}{micro_batch}", len(row)) for k in "BI")
        reductions = [word for word in row if "REDUCE_GRAD" in word]
        for start, wait in zip(reductions[::2], reductions[1::2], strict=True):
            assert wait == start.replace("REDUCE", "WAIT_REDUCE")


def test_torch_csv_is_written_for_the_version_that_is_asked_for(tmp_path: Path, capsys) -> None:
    plan, _ = _case("1f1b")
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    found = {}
    for number in ("2.9", "2.14.1", "2.15.0+cu130"):
        assert main(["export", str(path), "--to", "torch-csv", "--with-communication", "--torch", number]) == 0
        captured = capsys.readouterr()
        assert f"written for PyTorch {number}" in captured.err
        found[number] = {word.strip("0123456789") for word in captured.out.replace("\n", ",").split(",") if word}
    assert "REDUCE_GRAD" not in found["2.9"]
    assert found["2.14.1"] - found["2.9"] == {"REDUCE_GRAD"}
    assert found["2.15.0+cu130"] - found["2.14.1"] == {"WAIT_REDUCE_GRAD", "WAIT_SEND_F", "WAIT_SEND_B"}
    for wrong in ("2.8", "new"):
        assert main(["export", str(path), "--to", "torch-csv", "--with-communication", "--torch", wrong]) == 2
        assert "not a version of PyTorch" in capsys.readouterr().err
    assert main(["export", str(path), "--to", "svg", "--torch", "2.13"]) == 2


# -- Perfetto ------------------------------------------------------------------------------------------

REQUIRED = {
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "dur": float, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "C": {"name": str, "pid": int, "ts": float, "args": dict},
    "s": {"name": str, "cat": str, "id": int, "pid": int, "tid": int, "ts": float},
    "t": {"name": str, "cat": str, "id": int, "pid": int, "tid": int, "ts": float},
    "f": {"name": str, "cat": str, "id": int, "pid": int, "tid": int, "ts": float, "bp": str},
}


@pytest.fixture(scope="module", params=["1f1b", "interleaved", "chimera", "free transfers"])
def trace(request: pytest.FixtureRequest) -> tuple[Timeline, list[dict]]:
    costs = _costs(p2p_ms=0.0 if request.param == "free transfers" else 0.3).replace(
        data_parallel=2, gradient_bytes=np.full(8, 1e6), optimizer_ms=np.full(8, 0.1)
    )
    name = "1f1b" if request.param == "free transfers" else request.param
    plan = build_plan(name, costs, 4, 8)
    timeline = simulate(plan, costs)
    return timeline, json.loads(gzip.decompress(trace_bytes(timeline, plan)))["traceEvents"]


def test_every_event_has_its_fields_and_no_others(trace: tuple[Timeline, list[dict]]) -> None:
    for event in trace[1]:
        required = REQUIRED[event["ph"]]
        for field, kind in required.items():
            assert isinstance(event[field], kind if kind is not float else (int, float)), event
        assert set(event) <= {*required, "ph", "tid"}
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0


def test_thread_ids_are_unique_and_named_and_sort(trace: tuple[Timeline, list[dict]]) -> None:
    timeline, events = trace
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xstf"}
    tids = [tid for _, tid in used]
    assert len(tids) == len(set(tids)), "a thread id belongs to two processes"
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert used <= set(named) == set(order) and len(set(order.values())) == len(order)
    for pid in {p for p, _ in named}:
        lanes = sorted((order[k], named[k]) for k in named if k[0] == pid)
        assert lanes[0][1] == "compute"
        groups = [name.split()[0] for _, name in lanes]
        assert groups == sorted(groups, key=["compute", "send", "receive", "after"].index)
    ranks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(ranks.values()) == [f"rank {r}" for r in range(timeline.num_ranks)]


def test_slices_of_a_thread_nest(trace: tuple[Timeline, list[dict]]) -> None:
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in trace[1]:
        if e["ph"] == "X":
            lanes.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in lanes.values():
        spans.sort()
        assert all(a_end <= b_start + 1e-6 for (_, a_end), (b_start, _) in itertools.pairwise(spans))


def test_flows_are_paired_and_join_producer_and_consumer(trace: tuple[Timeline, list[dict]]) -> None:
    timeline, events = trace
    slices: dict[int, list[dict]] = {}
    for e in events:
        if e["ph"] == "X":
            slices.setdefault(e["tid"], []).append(e)

    def around(flow: dict) -> set[str]:
        # Two slices may touch at the time of the flow's end; the viewer takes the one that starts there.
        return {s["name"] for s in slices[flow["tid"]] if s["ts"] - 1e-6 <= flow["ts"] <= s["ts"] + s["dur"] + 1e-6}

    flows: dict[int, list[dict]] = {}
    for e in events:
        if e["ph"] in "stf":
            flows.setdefault(e["id"], []).append(e)
    assert len(flows) == timeline.transfers.source.size
    for number, chain in flows.items():
        assert [e["ph"] for e in chain] in (["s", "t", "t", "f"], ["s", "f"])
        assert all(a["ts"] <= b["ts"] + 1e-6 for a, b in itertools.pairwise(chain))
        assert all(b["bp"] == "e" for b in chain if b["ph"] == "f")
        producer = timeline.op(int(timeline.transfers.producer[number - 1]))
        consumer = timeline.op(int(timeline.transfers.consumer[number - 1]))
        assert str(producer) in around(chain[0]) and str(consumer) in around(chain[-1])


def test_counters_follow_the_memory_curve(trace: tuple[Timeline, list[dict]]) -> None:
    timeline, events = trace
    for rank in range(timeline.num_ranks):
        values = [e["args"]["GiB"] for e in events if e["ph"] == "C" and e["pid"] == rank + 1]
        assert max(values) == pytest.approx(timeline.peak_gib[rank])
        times = [e["ts"] for e in events if e["ph"] == "C" and e["pid"] == rank + 1]
        assert times == sorted(times)


def test_compute_slices_are_the_timeline(trace: tuple[Timeline, list[dict]]) -> None:
    timeline, events = trace
    found = {e["name"]: (e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["cat"] in KINDS}
    for i in range(timeline.spans.rank.size):
        start, length = found[str(timeline.op(i))]
        assert start == pytest.approx(1000 * timeline.spans.start_ms[i])
        assert length == pytest.approx(1000 * (timeline.spans.end_ms[i] - timeline.spans.start_ms[i]))


def test_exchanges_have_a_thread_of_their_own_and_pairs_are_one_slice() -> None:
    costs, ranks, micro_batches = moe_setting(random.Random(4), 0.4)
    plan = build_plan("interleaved-overlap", costs, ranks, micro_batches)
    timeline = simulate(plan, costs)
    events = trace_events(timeline, plan)["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    exchanged = [e for e in events if e["ph"] == "X" and e["cat"] == "exchange"]
    assert {names[e["tid"]] for e in exchanged} == {"exchange"}
    assert sum(e["dur"] for e in exchanged) == pytest.approx(1000 * timeline.exchange.total_ms)
    slices = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and "+" in e["name"]}
    assert set(slices) == {"+".join(map(str, pair)) for pair in plan.pairs}
    # Slices of one thread lie within each other or apart: viewers nest them.
    threads: dict[int, list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            threads.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    for rows in threads.values():
        open_until: list[float] = []
        for start, end in sorted(rows, key=lambda row: (row[0], -row[1])):
            while open_until and open_until[-1] <= start + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3
            open_until.append(end)


def test_overlapping_measured_transfers_get_rows_of_their_own() -> None:
    _, timeline = _case("interleaved")
    t = timeline.transfers
    overlapping = t._replace(start_ms=np.maximum(t.start_ms - 1.5, 0), end_ms=t.end_ms + 1.5)
    events = trace_events(Timeline(num_ranks=4, spans=timeline.spans, transfers=overlapping, measured=True))[
        "traceEvents"
    ]
    lanes: dict[int, list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X" and e["cat"] == "transfer":
            lanes.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in lanes.values():
        spans.sort()
        assert all(a_end <= b_start + 1e-6 for (_, a_end), (b_start, _) in itertools.pairwise(spans))


def test_the_trace_is_the_same_every_time() -> None:
    plan, timeline = _case("1f1b")
    assert trace_bytes(timeline, plan) == trace_bytes(timeline, plan)


def test_perfettos_own_trace_processor_reads_it(tmp_path: Path) -> None:
    perfetto = pytest.importorskip("perfetto.trace_processor", reason="PyPI's perfetto is not installed")
    plan, timeline = _case("1f1b")
    path = tmp_path / "trace.json"
    path.write_bytes(trace_bytes(timeline, plan, compress=False))
    try:
        processor = perfetto.TraceProcessor(trace=str(path))
    except Exception as error:  # its native part is fetched from the network on first use
        pytest.skip(f"the trace processor's binary cannot be had here: {error}")
    with processor:
        count = next(iter(processor.query("select count(*) as n from slice"))).n
        flows = next(iter(processor.query("select count(*) as n from flow"))).n
    assert count == timeline.spans.rank.size + 2 * timeline.transfers.source.size
    assert flows >= timeline.transfers.source.size


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


def test_pairs_travel_through_pytorchs_csv() -> None:
    stages = (Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=1))
    orders, pairs = parse_slots([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1+1B0", "1B1"]])
    plan = Plan(num_layers=2, num_ranks=2, num_micro_batches=2, stages=stages, orders=orders, pairs=pairs).check()
    text = pytorch_csv(plan)
    assert text.splitlines()[1] == "1F0,(1F1;1B0)OVERLAP_F_B,1B1"
    assert torch_plan(read_torch_csv(text)).plan.pairs == plan.pairs
    rows = [row.split(",") for row in pytorch_csv_with_communication(plan).splitlines()]
    at = rows[1].index("(1F1;1B0)OVERLAP_F_B")
    assert rows[1].index("1RECV_F1") < at < rows[1].index("1SEND_B0")
    assert torch_plan(read_torch_csv(pytorch_csv_with_communication(plan))).plan.pairs == plan.pairs
    layout = megatron_layout(plan, "EL")
    assert any("pairs are left out" in note for note in layout.notes)


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


@pytest.mark.parametrize(
    ("numbers", "flags", "note"),
    [
        ({}, "", ""),
        ({"recompute": "full"}, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", ""),
        # Five layers spread over four stages of eight: one of the stages holds two of them.
        (
            {"recompute": "full", "recompute_layers": 5},
            "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
            "the plan recomputes 5 layers; Megatron-LM recomputes the first 2 of every stage, 8 in all",
        ),
        ({"recompute": "selective"}, "--recompute-granularity selective --recompute-modules layernorm", "mla_up_proj"),
    ],
)
def test_what_prices_recompute_is_exported_and_told(
    numbers: dict, flags: str, note: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A plan made with --recompute says so to every runtime that it is exported to."""
    path = str(tmp_path / "plan.json")
    given = [word for name, value in numbers.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["simulate", "llama3-8b", "--pp", "4", "--tp", "2", "--micro-batches", "8", *given, "-o", path]) == 0
    capsys.readouterr()
    assert main(["export", path, "--to", "megatron"]) == 0
    found = capsys.readouterr()
    assert found.out.strip().endswith(flags or '"') and ("recompute" in found.out) == bool(flags)
    assert note in " ".join(found.err.split())
    for target in ("torch-csv", "torchtitan"):
        assert main(["export", path, "--to", target, "-o", str(tmp_path / "out.csv")]) == 0
        words = " ".join(capsys.readouterr().err.split())
        assert (f"priced with --recompute {numbers.get('recompute')}" in words) == bool(numbers), (target, words)


def test_ops_that_recompute_become_flags_of_megatron() -> None:
    """R of whole stages: of all, as Megatron does layer by layer; of one, as many in every stage."""
    costs = CostTable.uniform(num_layers=10)
    plan = build_plan("1f1b", costs, 2, 2)
    symbols = "E" + "T" * 8 + "L"
    for again, flags in (((0, 1), "uniform --recompute-num-layers 1"), ((0,), "block --recompute-num-layers 4")):
        stages = tuple(
            Stage(first=s.first, stop=s.stop, rank=s.rank, recompute=k in again) for k, s in enumerate(plan.stages)
        )
        layout = megatron_layout(
            Plan(num_layers=10, num_ranks=2, num_micro_batches=2, stages=stages, orders=plan.orders), symbols
        )
        assert layout.recompute.endswith(flags)
        assert any("4 layers" in note and "8 in all" in note for note in layout.notes) == (again == (0,))

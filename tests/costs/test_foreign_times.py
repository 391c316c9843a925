"""Recordings of other tools become layer times: the numbers in the file, or one line that says what is missing."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.foreign_times import kind_of_file, load_foreign_profile
from octopipe.costs.profile_file import load_profile
from octopipe.costs.resolve import resolve_costs

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "profiles.md"
BACKWARD = "autograd::engine::evaluate_function: "


# -- traces of torch.profiler --------------------------------------------------------------------------


def record(path: Path, *, stacks: bool, marks: bool, passes: int = 1) -> None:
    """A training step of a small model under torch.profiler."""
    torch = pytest.importorskip("torch")
    from torch import nn
    from torch.profiler import ProfilerActivity, profile, record_function

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.relu(self.up(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Embedding(16, 8), nn.ModuleList(Block() for _ in range(4))
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 16)

        def forward(self, x: Any) -> Any:
            h = self.embed(x)
            for k, block in enumerate(self.blocks):
                if marks:
                    with record_function(f"layer {k}"):
                        h = block(h)
                else:
                    h = block(h)
            return self.head(self.norm(h))

    model, x = Model(), torch.randint(0, 16, (2, 4))
    with profile(activities=[ProfilerActivity.CPU], with_stack=stacks) as recorded:
        for _ in range(passes):
            nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    recorded.export_chrome_trace(str(path))


def backward_ms(path: Path) -> float:
    """All of autograd's work in a trace, from its events alone."""
    events = json.loads(path.read_text())["traceEvents"]
    return sum(e["dur"] for e in events if str(e.get("name")).startswith(BACKWARD)) / 1e3


def test_modules_of_a_real_trace_are_layers_and_all_of_the_backward_is_theirs(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    record(path, stacks=True, marks=False)
    profile = load_profile(path)
    assert profile.about["layers"] == ["embedding", *(f"Block_{k}" for k in range(4)), "head"]
    assert profile.costs.symbols == "ETTTTL"
    costs = profile.costs
    assert (costs.input_ms + costs.weight_ms).sum() == pytest.approx(backward_ms(path))
    assert (costs.forward_ms > 0).all() and (costs.weight_ms > 0).all()
    assert costs.input_ms[0] == 0 and costs.input_ms[1:] == pytest.approx(costs.weight_ms[1:])
    assert any("split by the analytic ratio" in note for note in profile.about["notes"])


def test_marks_alone_give_the_layers_of_the_same_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    record(path, stacks=True, marks=True)
    by_marks = load_profile(path)
    assert by_marks.about["layers"] == ["embedding", *(f"layer {k}" for k in range(4)), "head"]
    events = json.loads(path.read_text())
    events["traceEvents"] = [e for e in events["traceEvents"] if e.get("cat") != "user_annotation"]
    path.write_text(json.dumps(events))
    by_modules = load_profile(path)
    assert by_marks.costs.layer_ms == pytest.approx(by_modules.costs.layer_ms)


def test_several_passes_and_a_packed_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    record(path, stacks=False, marks=True, passes=3)
    packed = tmp_path / "run.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    a, b = load_profile(path), load_profile(packed)
    assert "3 passes" in a.about["notes"][0] and a.costs.model == b.costs.model == "run"
    assert a.costs.layer_ms.tolist() == b.costs.layer_ms.tolist()


def x(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "pid": 7, "args": args}


def gpu_trace() -> list[dict[str, Any]]:
    """Two layers and a loss; the host runs ahead, autograd in a thread of its own, kernels on the device."""
    events, clock = [], 0.0

    def kernel(at: float, tid: int, dur: float, name: str = "gemm") -> None:
        nonlocal clock
        number = len(events)
        events.append(x("cuda_runtime", "cudaLaunchKernel", at, 0.5, tid, correlation=number))
        clock = max(clock, at + 1000.0)
        events.append(x("kernel", name, clock, dur, 99, correlation=number))
        clock += dur

    for k in range(2):
        events.append(x("user_annotation", f"layer {k}", 100.0 * k, 50.0))
        events.append(x("cpu_op", "aten::linear", 100.0 * k + 5, 20.0, **{"Sequence number": k}))
        kernel(100.0 * k + 10, 1, 1000.0 * (k + 1))
        kernel(100.0 * k + 12, 1, 5e6, "ncclDevKernel_AllReduce")
    events.append(x("cpu_op", "aten::loss", 180.0, 10.0, **{"Sequence number": 2}))
    kernel(181.0, 1, 300.0)
    for at, number in ((200.0, 2), (220.0, 1), (240.0, 0)):
        events.append(x("cpu_op", BACKWARD + "X", at, 10.0, 2, **{"Sequence number": number}))
        kernel(at + 1, 2, 4000.0 + number)
    return events


def test_on_a_device_kernels_count_and_collectives_do_not(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"traceEvents": gpu_trace()}))
    costs = load_profile(path).costs
    assert costs.forward_ms.tolist() == [1.0, 2.0, 0.3]
    assert (costs.input_ms + costs.weight_ms).tolist() == pytest.approx([4.0, 4.001, 4.002])


def test_a_layer_run_again_in_the_backward_is_told(tmp_path: Path) -> None:
    events = gpu_trace()
    events.append(x("cpu_op", BACKWARD + "CheckpointBackward", 300.0, 100.0, 1))
    events += [x("user_annotation", f"layer {k}", 310.0 + 20 * k, 5.0) for k in range(2)]
    path = tmp_path / "again.json"
    path.write_text(json.dumps(events))
    profile = load_profile(path)
    assert profile.costs.forward_ms.tolist() == [1.0, 2.0, 0.3]
    assert any("activation checkpointing" in note for note in profile.about["notes"])


def test_ranges_with_a_phase_need_no_operators(tmp_path: Path) -> None:
    events = []
    for step in range(3):
        for k, name in enumerate(("embed", "layers.0", "layers.1", "lm_head")):
            events.append(x("user_annotation", f"{name}.forward", 1e5 * step + 1000 * k, 100.0 * (k + 1 + step)))
            events.append(x("user_annotation", f"{name}.dgrad", 1e5 * step + 5e4 + 1000 * k, 200.0 * k))
            events.append(x("user_annotation", f"{name}.wgrad", 1e5 * step + 6e4 + 1000 * k, 10.0))
    path = tmp_path / "named.json"
    path.write_text(json.dumps({"traceEvents": events}))
    profile = load_profile(path)
    assert profile.about["layers"] == ["embed", "layers.0", "layers.1", "lm_head"]
    assert profile.costs.symbols == "ETTL"
    assert profile.costs.forward_ms == pytest.approx([0.2, 0.3, 0.4, 0.5])  # medians of three steps
    assert profile.costs.input_ms == pytest.approx([0.0, 0.2, 0.4, 0.6])
    assert not any("split" in note for note in profile.about["notes"])


# -- Nsight Systems ------------------------------------------------------------------------------------


def nsight(path: Path, *, phases: bool = True, kernels: bool = True) -> None:
    """An export with the documented tables: ranges of three layers, and what they launched."""
    base = sqlite3.connect(path)
    base.execute(
        'CREATE TABLE NVTX_EVENTS (start INTEGER, "end" INTEGER, eventType INTEGER, rangeId INTEGER, category INTEGER, '
        "color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER)"
    )
    base.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    thread = (7 << 24) | 9
    names: list[str] = ["gemm"]

    def ranged(name: str, start: int, stop: int) -> None:
        if len(names) % 2:  # names stand in the row or in the table of strings
            base.execute("INSERT INTO NVTX_EVENTS VALUES (?,?,59,0,0,0,?,?,0,NULL,0)", (start, stop, name, thread))
        else:
            row = (start, stop, thread, len(names))
            base.execute("INSERT INTO NVTX_EVENTS VALUES (?,?,59,0,0,0,NULL,?,0,?,0)", row)
        names.append(name)

    launches = []
    for k in range(3):
        if phases:
            ranged(f"layer {k} forward", 1000 * k, 1000 * k + 500)
            ranged(f"layer {k} backward", 9000 - 1000 * k, 9500 - 1000 * k)
        else:
            ranged(f"layer {k}", 1000 * k, 1000 * k + 500)
            ranged(f"aten::linear, seq = {k}, op_id = {10 + k}", 1000 * k + 1, 1000 * k + 400)
            ranged(f"{BACKWARD}AddmmBackward0, seq = {k}, op_id = {20 + k}", 9000 - 1000 * k, 9500 - 1000 * k)
        launches += [(1000 * k + 100, 1_000_000 * (k + 1)), (9100 - 1000 * k, 3_000_000)]
    ranged("a mark", 5, 6)
    base.executemany("INSERT INTO StringIds VALUES (?,?)", enumerate(names))
    if kernels:
        base.execute(
            'CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, "end" INTEGER, deviceId INTEGER, '
            "globalPid INTEGER, correlationId INTEGER, shortName INTEGER)"
        )
        base.execute(
            'CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, "end" INTEGER, globalTid INTEGER, '
            "correlationId INTEGER, nameId INTEGER)"
        )
        for number, (launched, took) in enumerate(launches):
            begin = 10_000_000 * (number + 1)
            row = (begin, begin + took, 7 << 24, number)
            base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,0,?,?,0)", row)
            # Another process has used the same number.
            base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,0)", (50, 60, 8 << 24, number))
            row = (launched, launched + 9, thread, number)
            base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,0)", row)
    base.commit()
    base.close()


@pytest.mark.parametrize("phases", [True, False])
def test_nsights_ranges_cost_what_their_kernels_take(phases: bool, tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    nsight(path, phases=phases)
    before = path.read_bytes()
    profile = load_profile(path)
    assert profile.about["layers"] == ["layer 0", "layer 1", "layer 2"]
    assert profile.costs.forward_ms.tolist() == [1.0, 2.0, 3.0]
    assert (profile.costs.input_ms + profile.costs.weight_ms).tolist() == [3.0, 3.0, 3.0]
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["report.sqlite"]


def test_without_kernels_nsights_ranges_are_the_hosts(tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    nsight(path, kernels=False)
    assert load_profile(path).costs.forward_ms.tolist() == pytest.approx([5e-4] * 3)


COMPUTED = "(WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT MAX(n) FROM c)"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        # 70 kB of rows that all match each other: a join of them has a billion.
        (["INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME SELECT 1, 2, 7 << 24, 0, 0 FROM NVTX_EVENTS"], "correlation id 0"),
        (["INSERT INTO StringIds SELECT 0, value FROM StringIds"], "StringIds names 0 twice"),
        (["ALTER TABLE NVTX_EVENTS ADD COLUMN more AS (hex(zeroblob(400000000)))"], "computed column"),
        (["ALTER TABLE StringIds RENAME TO s", "CREATE VIRTUAL TABLE StringIds USING fts5(id, value)"], "plain table"),
        (["DROP TABLE NVTX_EVENTS", f"CREATE VIEW NVTX_EVENTS AS SELECT {COMPUTED} AS start"], "no NVTX ranges"),
    ],
)
def test_an_export_that_is_a_trap_is_refused_in_one_line(changes: list[str], said: str, tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    nsight(path)
    base = sqlite3.connect(path)
    for change in changes:
        try:
            base.execute(change)
        except sqlite3.OperationalError as error:
            pytest.skip(f"this SQLite cannot make it ({error})")
    base.commit()
    base.close()
    with pytest.raises(OctoPipeError, match=said):
        load_profile(path)


def test_an_export_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octopipe.costs.readers import nsight as reader

    path = tmp_path / "report.sqlite"
    nsight(path)
    base = sqlite3.connect(path)
    for _ in range(13):
        base.execute("INSERT INTO NVTX_EVENTS SELECT * FROM NVTX_EVENTS")
    base.commit()
    base.close()
    monkeypatch.setattr(reader, "MAX_SECONDS", 0.0)
    with pytest.raises(OctoPipeError, match="longer than 0 s"):
        load_profile(path)
    monkeypatch.setattr(reader, "MAX_SECONDS", 60.0)
    monkeypatch.setattr(reader, "MAX_ROWS", 100)
    with pytest.raises(OctoPipeError, match="at most 100 are allowed"):
        load_profile(path)


SUMMARY = """Processing [report.sqlite] with [nvtx_sum.py]...

Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Style,Range
40.0,9000,3,3000.0,2000000.0,1,9,1.0,PushPop,:layer 1 backward
20.0,3000,3,1000.0,1500000.0,1,9,1.0,PushPop,:lm_head forward
10.0,3000,3,1000.0,3000000.0,1,9,1.0,PushPop,:lm_head backward
10.0,3000,3,1000.0,1000000.0,1,9,1.0,PushPop,:layer 1 forward
10.0,3000,3,1000.0,250000.0,1,9,1.0,PushPop,:embedding forward
10.0,3000,3,1000.0,500000.0,1,9,1.0,PushPop,:embedding backward
10.0,3000,3,1000.0,1000000.0,1,9,1.0,PushPop,:layer 0 forward
10.0,3000,3,1000.0,2000000.0,1,9,1.0,PushPop,:layer 0 backward
1.0,3000,3,1000.0,2000000.0,1,9,1.0,PushPop,:optimizer
"""
PROJECTED = """Range,Style,Total Proj Time (ns),Total Range Time (ns),Range Instances,Proj Avg (ns),Proj Med (ns)
:layer 0 forward,PushPop,8000000,1,4,2000000,1000000.0
:layer 0 backward,PushPop,8000000,1,4,2000000,3000000.0
:layer 10 forward,PushPop,8000000,1,4,2000000,5000000.0
:layer 10 backward,PushPop,8000000,1,4,2000000,6000000.0
:layer 2 forward,PushPop,8000000,1,4,2000000,7000000.0
:layer 2 backward,PushPop,8000000,1,4,2000000,8000000.0
"""


def test_reports_of_nsys_stats_are_read_in_the_models_order(tmp_path: Path) -> None:
    path = tmp_path / "ranges.csv"
    path.write_text(SUMMARY)
    profile = load_profile(path)
    assert profile.about["layers"] == ["embedding", "layer 0", "layer 1", "lm_head"]
    assert profile.costs.forward_ms.tolist() == [0.25, 1.0, 1.0, 1.5]
    assert profile.costs.weight_ms.tolist() == [0.5, 1.0, 1.0, 1.5] and profile.costs.input_ms[0] == 0
    assert any("the host's" in note for note in profile.about["notes"])
    path.write_text(PROJECTED)
    profile = load_profile(path)
    assert profile.about["layers"] == ["layer 0", "layer 2", "layer 10"]
    assert profile.costs.forward_ms.tolist() == [1.0, 7.0, 5.0]


def test_the_trace_report_of_nsys_stats_has_spans(tmp_path: Path) -> None:
    rows = ["Start (ns),End (ns),Duration (ns),DurChild (ns),DurNonChild (ns),Name,PID,TID,Lvl"]
    for k in range(2):
        rows.append(f"{k}000,{k}500,500,0,500,:layer {k} fwd,1,2,0")
        rows.append(f"9{k}000,9{k}900,900,0,900,:layer {k} bwd,1,2,0")
    path = tmp_path / "spans.csv"
    path.write_text("\n".join(rows))
    assert load_profile(path).costs.forward_ms.tolist() == pytest.approx([5e-4, 5e-4])


# -- CSVs of times -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "forward", "backward"),
    [
        ("embed,0,1,head\n3,6,6,12\n", [1, 2, 2, 4], [2, 4, 4, 8]),
        ("layer,embed,0,1,head\nF,1,2,2,4\nB,2,4,5,8\n", [1, 2, 2, 4], [2, 4, 5, 8]),
        ("layer,embed,0,1,head\nF,1,2,2,4\n", [1, 2, 2, 4], [2, 4, 4, 8]),
        ("layer,embed,0,1,head\r\nF,1,2,2,4\r\nI,0,1,2,3\r\nW,2,3,3,5\r\n", [1, 2, 2, 4], [2, 4, 5, 8]),
        ("layer,embed,0,1,head\ntotal,3,6,6,12\n", [1, 2, 2, 4], [2, 4, 4, 8]),
    ],
)
def test_a_line_of_names_and_lines_of_times(text: str, forward: Any, backward: Any, tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text(text)
    profile = load_profile(path)
    assert profile.costs.symbols == "ETTL" and profile.costs.forward_ms.tolist() == forward
    assert (profile.costs.input_ms + profile.costs.weight_ms).tolist() == backward
    assert profile.costs.input_ms[0] == 0.0
    split = "\nI," not in text
    assert any("analytic ratio" in note for note in profile.about["notes"]) == split


def test_a_named_model_splits_the_backward_as_its_layers_do(tmp_path: Path) -> None:
    analytic = resolve_costs("nemotron-h-4b", pp=1)
    names = ",".join(map(str, range(analytic.num_layers)))
    path = tmp_path / "times.csv"
    ones, threes = (",".join([cell] * analytic.num_layers) for cell in "13")
    path.write_text(f"layer,{names}\nF,{ones}\nB,{threes}\n")
    profile = load_foreign_profile(path, analytic)
    assert profile is not None and profile.costs.symbols == analytic.symbols
    share = analytic.input_ms / (analytic.input_ms + analytic.weight_ms)
    assert profile.costs.input_ms == pytest.approx(3 * share)
    assert profile.costs.activation_bytes.tolist() == analytic.activation_bytes.tolist()
    assert "layers of nemotron-h-4b" in " ".join(profile.about["notes"])


# -- refusals ------------------------------------------------------------------------------------------

BAD = {
    "no layers": (json.dumps({"traceEvents": [x("cpu_op", "aten::add", 0, 1)]}), "neither ranges named after layers"),
    "no backward": (
        json.dumps({"traceEvents": [x("user_annotation", f"layer {k}", 10 * k, 5) for k in range(3)]}),
        "it contains no backward pass",
    ),
    "a layer without": (
        json.dumps({"traceEvents": [
            x("user_annotation", "layer 0 fwd", 0, 5), x("user_annotation", "layer 1 fwd", 10, 5),
            x("user_annotation", "layer 1 bwd", 20, 5)]}),
        "'layer 0' has no range for its backward",
    ),
    "half split": (
        json.dumps({"traceEvents": [
            x("user_annotation", f"layer {k} {p}", 10 * k, 5) for k in range(2) for p in ("fwd", "dgrad")]}),
        "a range for input and none for weight",
    ),
    "wrong type": ('{"traceEvents": [{"ph": "X", "ts": "soon"}]}', "not a trace of torch.profiler"),
    "cut off": ('{"traceEvents": [{"ph": "X", ', "not a trace of torch.profiler"),
    "unknown place": (SUMMARY.replace("lm_head", "the end"), "the position of 'the end' is not known"),
    "no time": (SUMMARY.replace("1500000.0", "fast"), "'fast' is not a time"),
    "too few": ("a,b,c\n1,2\n", "2 times for 3 layers"),
    "negative": ("a,b\n1,-2\n", "give ms from 0 on"),
    "twice": ("a,a\n1,2\n", "appears twice"),
    "label": ("layer,a,b\nQ,1,2\n", "use F, B, I, W or total"),
    "missing": ("layer,a,b\nF,1,2\nI,1,2\n", "give total, or F"),
    "zero": ("a,b\n0,0\n", "all times are zero"),
    "huge": ("a,b\n1,1e300\n", "give ms from 0 on"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_meant_is_one_line(case: str, tmp_path: Path) -> None:
    text, why = BAD[case]
    path = tmp_path / "file.csv"
    path.write_text(text)
    with pytest.raises(OctoPipeError) as caught:
        load_profile(path)
    line = str(caught.value)
    assert why in line and line.startswith(str(path)) and "\n" not in line and ";" in line


def test_damaged_exports_are_one_line(tmp_path: Path) -> None:
    whole = tmp_path / "report.sqlite"
    nsight(whole)
    data = whole.read_bytes()
    for k, bad in enumerate((data[:100], data[: len(data) // 2], data[:16] + bytes(200), gzip.compress(data)[:60])):
        path = tmp_path / f"bad{k}.json"
        path.write_bytes(bad)
        with pytest.raises(OctoPipeError) as caught:
            load_profile(path)
        assert "\n" not in str(caught.value)
    empty = tmp_path / "empty.sqlite"
    base = sqlite3.connect(empty)
    base.execute("CREATE TABLE other (x)")
    base.commit()
    base.close()
    with pytest.raises(OctoPipeError, match="no NVTX ranges"):
        load_profile(empty)


def test_files_of_our_own_are_none_of_theirs(tmp_path: Path, profiles: Path) -> None:
    schedule = tmp_path / "schedule.csv"
    schedule.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # nobody writes to it: reading would wait for ever
    found = [kind_of_file(p) for p in (*profiles.glob("*.json"), schedule, config, tmp_path, tmp_path / "none", pipe)]
    assert set(found) == {None}


# -- the command line ----------------------------------------------------------------------------------


def test_every_command_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GUIDE.read_text()
    monkeypatch.chdir(tmp_path)
    record(Path("trace.json"), stacks=True, marks=False)
    nsight(Path("report.sqlite"))
    Path("ranges.csv").write_text(SUMMARY)
    Path("times.csv").write_text(re.search(r"^```csv\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1])  # type: ignore[index]
    commands = [line for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    assert len(commands) == 6
    for line in commands:
        assert main(shlex.split(line.removeprefix("$ octopipe "))) == 0, line


def test_import_tells_what_it_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "times.csv", tmp_path / "profile.json"
    path.write_text("layer,embed,0,head\nF,1,2,4\nB,2,4,8\n")
    assert main(["import", str(path), "-o", str(out), "--json"]) == 0
    told = capsys.readouterr()
    assert "analytic ratio" in told.err and json.loads(told.out)["layers"] == ["embed", "0", "head"]
    assert load_profile(out).costs.layer_ms.tolist() == [3.0, 6.0, 12.0]
    assert main(["import", str(path), "--pp", "2"]) == 2
    assert "--pp is for plans" in capsys.readouterr().err
    assert main(["simulate", str(path), "--pp", "2", "--json"]) == 0
    assert "analytic ratio" in capsys.readouterr().err

"""Timelines as Perfetto traces, against the rules of the Trace Event format."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
from export_cases import small_case, small_costs
from moe_settings import moe_setting

from octopipe.plans.plan import KINDS
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline
from octopipe.views.export.perfetto import trace_bytes, trace_events

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
    costs = small_costs(p2p_ms=0.0 if request.param == "free transfers" else 0.3).replace(
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
    _, timeline = small_case("interleaved")
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
    plan, timeline = small_case("1f1b")
    assert trace_bytes(timeline, plan) == trace_bytes(timeline, plan)


def test_perfettos_own_trace_processor_reads_it(tmp_path: Path) -> None:
    perfetto = pytest.importorskip("perfetto.trace_processor", reason="PyPI's perfetto is not installed")
    plan, timeline = small_case("1f1b")
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

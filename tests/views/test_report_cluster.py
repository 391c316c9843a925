"""A cluster's plan as a panel, as a page and in the local server."""

from __future__ import annotations

import html
import json
import re
import threading
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from ranks import PATIENCE_S

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.cli.verbs.serve import planned
from octopipe.plans.file import load_plan
from octopipe.views.report.cluster import page, panel
from octopipe.views.report.serve import Server, make_server

pytest_plugins = ("browser_fixtures",)
HOSTILE = '<img src=x onerror="alert(1)">'


def record(**more: Any) -> dict[str, Any]:
    row = {
        "split": "tp 2, pp 4, dp 8",
        "how": "tuned",
        "tokens_per_gpu_per_second": 1234.4,
        "mfu": 0.51,
        "bubble": 0.04,
    }
    row |= {"peak_gib": 61.0, "limit_gib": 75.2, "fits": True, "recompute": "none"}
    tight = {**row, "split": "tp 1, pp 4, dp 16", "peak_gib": 90.0, "fits": False, "how": "today"}
    points = [
        {"gpus": n, "tokens_per_second": 1000.0 * n**0.9, "split": "tp 2", "fits": n > 16} for n in (16, 32, 64, 128)
    ]
    known = {"title": "model on 64 x h100", "gpus": 64, "words": ["best: tp 2"], "candidates": [row, tight]}
    return {**known, "scaling": points, **more}


def test_the_panel_shows_every_number_it_was_given() -> None:
    text = panel(record())
    assert "1234" in text and "51.0 %" in text and "61 of 75" in text and "90 of 75" in text
    assert text.count("<circle") == 3  # nothing fits on 16
    assert "nothing fits on 16 GPUs" in text
    assert "32 GPUs:" in text and "128 GPUs:" in text
    heights = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', text)]
    assert heights == sorted(heights, reverse=True)  # more GPUs, more tokens: higher up
    over = re.findall(r'<rect [^>]*fill="var\(--(\w+)\)"', text)
    assert over == ["memory", "over"]


def test_the_panel_says_how_the_split_is_started_or_why_it_is_not() -> None:
    text = panel(record(commands={"megatron": "torchrun <script>", "octopipe": "none: it divides no tensor"}))
    assert "torchrun &lt;script&gt;" in text and "octopipe: no command, because it divides no tensor" in text
    assert "plan-commands" not in panel(record())


def test_the_page_asks_for_the_runtime_and_every_field_of_a_set_up() -> None:
    from octopipe.costs.cluster.asking import form_fields
    from octopipe.search.planner.runtimes import RUNTIMES
    from octopipe.views.report.serve import PLANNED_FOR, plan_page

    text = plan_page({"llama3-8b": "llama3-8b"})
    assert set(PLANNED_FOR) == set(RUNTIMES)
    for name in set(form_fields()) - {"p2p_ms", "speeds", "memory_gib"}:
        assert f'name="{name}"' in text, name


def test_an_answer_keeps_to_the_runtime_and_the_sizes_that_were_chosen() -> None:
    asked = {"model": "llama3-8b", "gpu": "h100", "gpus": "8", "global_batch": "32", "budget_s": "2", "tp": "2"}
    found = planned({**asked, "runtime": "megatron"})
    assert all(row["split"].startswith("tp 2") for row in found["candidates"])
    assert list(found["commands"]) == ["megatron"] and "torchrun" in found["commands"]["megatron"]
    with pytest.raises(OctoPipeError, match="runtime: 'abacus' is not one of megatron"):
        planned({**asked, "runtime": "abacus"})


def test_an_answer_about_experts_is_plain_json() -> None:
    """Rows whose exchange is hidden were made of numpy's numbers once, and the page got an error instead of them."""
    import msgspec

    asked = {"model": "qwen3-30b-a3b", "gpu": "h100", "gpus": "16", "global_batch": "64", "budget_s": "2", "ep": "8"}
    found = planned({**asked, "pp": "2", "runtime": "megatron", "today": "pp=2,ep=8,vp=2"})
    assert json.loads(msgspec.json.encode(found)) == json.loads(json.dumps(found))


def test_rows_of_one_split_are_told_apart_and_no_label_is_cut_off() -> None:
    """ZeRO levels are in the labels; where those are equal too, how the split was found."""
    why = {"step_ms": 1430.0, "parts": {"products": {"title": "matrix products", "ms": 1390.0}, "tp": {"ms": 40.0}}}
    row = record()["candidates"][0] | {"why": why, "zero": 1}
    rows = [row, {**row, "zero": 2}, {**row, "how": "interleaved"}, {**row, "how": "zb-v", "split": "x" * 34}]
    text = panel(record(candidates=rows))
    labels = re.findall(r'text-anchor="end"[^>]*>([^<]*tp2[^<]*)<', text)
    memory, times = labels[: len(labels) // 2], labels[len(labels) // 2 :]
    assert memory == ["tp2 pp4 dp8 ZeRO-1 tuned", "tp2 pp4 dp8 ZeRO-2", "tp2 pp4 dp8 ZeRO-1 interleaved"]
    assert times == ["chosen: tp2 pp4 dp8 ZeRO-1", "tp2 pp4 dp8 ZeRO-2", "tp2 pp4 dp8 ZeRO-1"]
    picture = text[text.index('class="plan-why"') :]
    # A label ends ten units before the bars; all of it lies inside the picture.
    ends = [(float(x), len(label)) for x, label in re.findall(r'<text x="([\d.]+)"[^>]*"end">([^<]*)<', picture)]
    assert max(letters for _, letters in ends) > 30 and all(x - 6.0 * letters >= 0 for x, letters in ends)


def test_one_unit_for_the_times_of_a_page() -> None:
    """Steps of seconds and parts of milliseconds stand in one unit, in words, picture and table."""
    why = {"step_ms": 1430.0, "parts": {"products": {"title": "matrix products", "ms": 1390.0}, "tp": {"ms": 40.0}}}
    row = record()["candidates"][0] | {"why": why}
    text = page(record(candidates=[row]))
    assert "1430.0 ms" in text and not re.search(r"\d s\b", re.sub(r"<(script|style).*?</\1>", "", text, flags=re.S))
    assert "toFixed(1)} ms" in text and "} s`" not in text  # the table that the page's script makes


def test_names_are_text_and_bad_records_are_refused() -> None:
    text = page(record(title=HOSTILE, words=[HOSTILE]))
    assert "<img" not in text and "&lt;img" in text
    for broken in (
        {"candidates": 3},
        {"gpus": "many"},
        {"candidates": [{"split": "x"}]},
        {"scaling": [{"fits": True}]},
        *({"scaling": [{"fits": True, "gpus": n, "tokens_per_second": 1.0, "split": "x"}]} for n in (0, -1, 10**400)),
        {"scaling": [{"fits": False, "gpus": 0}]},
        *({"scaling": [{"fits": True, "gpus": 8, "tokens_per_second": v, "split": "x"}]} for v in (0, -1.0, 1e999)),
    ):
        with pytest.raises(OctoPipeError, match="cannot be drawn"):
            panel(record(**broken))
    assert panel(None) == panel("text") == ""


def test_plan_writes_a_page_and_a_plan_whose_report_has_the_panel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, shown, report = tmp_path / "plan.json", tmp_path / "page.html", tmp_path / "report.html"
    words = ["plan", "llama3-8b", "--gpus", "8", "--gpu", "h100", "--global-batch", "16", "--budget", "1s", "--json"]
    assert main([*words, "-o", str(plan), "--page", str(shown)]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    kept = load_plan(plan).extra["cluster_plan"]
    assert kept["candidates"][0]["tokens_per_gpu_per_second"] == pytest.approx(best["tokens_per_gpu_per_second"])
    here = next(point for point in kept["scaling"] if point["gpus"] == 8)
    assert here["tokens_per_second"] == pytest.approx(8 * best["tokens_per_gpu_per_second"])
    assert f"{best['tokens_per_gpu_per_second']:.0f}" in shown.read_text()
    assert main(["report", str(plan), "-o", str(report)]) == 0
    assert 'id="cluster"' in report.read_text()


# -- the server ---------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Server]:
    def plan(asked: Mapping[str, Any], stop: object) -> dict[str, Any]:
        if asked["gpus"] == "7":
            raise OctoPipeError("no split of 7 GPUs fits")
        why = {"step_ms": 100.0, "parts": {"products": {"title": "matrix products", "ms": 100.0, "hidden_ms": 0.0}}}
        rows = [{**row, "why": why} for row in record()["candidates"]]
        return record(title=f"{asked['model']} on {asked['gpus']}", candidates=rows, parameters=2**60 + 1)

    made = make_server(planner=plan)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def ask(server: Server, method: str, path: str, body: object = None, seconds: float = PATIENCE_S) -> tuple[int, str]:
    connection = HTTPConnection(*server.server_address[:2], timeout=seconds)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_servers_page_plans_a_cluster(server: Server) -> None:
    status, text = ask(server, "GET", "/plan")
    assert status == 200 and "llama3-70b" in text and 'href="/"' in text
    assert 'href="/plan"' in ask(server, "GET", "/")[1]
    status, text = ask(server, "POST", "/api/plan", {"model": "llama3-8b", "gpus": "64"})
    assert status == 200 and "llama3-8b on 64" in json.loads(text)["html"]
    for asked, said in (
        ({"model": "llama3-8b", "gpus": "7"}, "no split of 7"),
        ({"model": "/etc/passwd"}, "no such model"),
    ):
        status, text = ask(server, "POST", "/api/plan", asked)
        assert status == 400 and said in json.loads(text)["error"]
    for broken in ([1], b'{"model": "\xff"}', b'{"a":' * 5000):
        assert ask(server, "POST", "/api/plan", broken)[0] == 400


def test_the_page_answers_with_a_real_search() -> None:
    """The search of `octopipe plan` behind the page: its record is JSON, with today's split and its plan file."""
    from octopipe.cli.verbs.serve import planned

    made = make_server(planner=planned)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    asked = {
        "model": "llama3-8b",
        "gpu": "h100",
        "gpus": "8",
        "global_batch": "16",
        "today": "tp=2,pp=2",
        "budget_s": 1,
    }
    try:
        status, text = ask(made, "POST", "/api/plan", asked)
    finally:
        made.shutdown()
        made.server_close()
    answer = json.loads(text)
    assert status == 200, answer
    rows = json.loads(answer["answer"])["record"]["candidates"]
    assert rows[-1]["how"] == "today" and all(isinstance(r["bubble"], float) for r in rows)
    assert json.loads(answer["plan"])["format"].startswith("octopipe.plan/")


def test_an_answer_is_a_file_that_opens_again(server: Server) -> None:
    status, text = ask(server, "POST", "/api/plan", {"model": "llama3-8b", "gpus": "64"})
    first = json.loads(text)
    kept = json.loads(first["answer"])
    assert status == 200 and kept["format"] == "octopipe.cluster-answer/1"
    status, text = ask(server, "POST", "/api/answer", first["answer"].encode())
    assert status == 200 and json.loads(text) == first
    for broken in ({}, {"format": "octopipe.cluster-answer/1"}, {**kept, "record": {"candidates": 3}}, [1]):
        status, text = ask(server, "POST", "/api/answer", broken)
        assert status == 400 and json.loads(text)["error"]


def test_an_answer_downloaded_in_a_browser_opens_with_the_same_panel(
    server: Server, browser: Any, tmp_path: Path
) -> None:
    """Its numbers included: a browser that wrote the file itself would write 0.0 as 0, and 2**60 + 1 as 2**60."""
    host, port = server.server_address[:2]
    panels, files = [], [tmp_path / "first.json", tmp_path / "second.json"]
    for number, path in enumerate(files):
        view = browser.new_page()
        view.set_default_timeout(1e3 * PATIENCE_S)
        view.goto(f"http://{host}:{port}/plan")
        if number == 0:
            view.click("#go")
        else:
            view.set_input_files("#open", files[0])
        with view.expect_download() as download:
            view.click("#share")
        download.value.save_as(path)
        panels.append(re.sub(r'href="blob:[^"]*"', "", view.inner_html("#found")))
        view.close()
    assert "0.0" in panels[0] and str(2**60 + 1) in files[0].read_text()
    assert panels[1] == panels[0] and files[1].read_bytes() == files[0].read_bytes()


def test_rows_can_be_chosen_and_carry_where_their_time_goes() -> None:
    parts = {"products": {"title": "matrix products", "ms": 60.0, "hidden_ms": 0.0}}
    parts |= {"dp": {"title": HOSTILE, "ms": 40.0, "hidden_ms": 5.0}}
    rows = [{**row, "why": {"step_ms": 100.0, "parts": parts}} for row in record()["candidates"]]
    text = page(record(candidates=rows))
    assert text.count('class="choose"') == 2 and text.count(" checked>") == 2 and "plan-compare" in text
    kept = re.findall(r'data-why="(.*?)"', text)
    assert [json.loads(html.unescape(why))["step_ms"] for why in kept] == [100.0, 100.0]
    assert "<img" not in text and "matrix products" in text and "function compare" in text
    with pytest.raises(OctoPipeError, match="cannot be drawn"):
        panel(record(candidates=[{**rows[0], "why": {"step_ms": 1e999, "parts": {}}}]))


def test_without_a_planner_there_is_no_such_page() -> None:
    with make_server() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        assert ask(made, "GET", "/plan")[0] == 404
        made.shutdown()


def test_the_form_is_answered_by_the_same_search_as_the_verb() -> None:
    asked = {"model": "llama3-8b", "gpu": "h100", "gpus": "8", "global_batch": "16", "seq": "4096", "budget_s": "1"}
    found = planned(asked)
    assert found["gpus"] == 8 and found["candidates"][0]["fits"] and panel(found)
    for wrong, said in (
        ({"gpus": "many"}, "gpus"),
        ({"budget_s": "soon"}, "not a number"),
        ({"today": "x"}, "cannot read"),
    ):
        with pytest.raises(OctoPipeError, match=said):
            planned({**asked, **wrong})

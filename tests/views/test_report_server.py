"""The local server's manners: searches that run, wait, stop and fail, bad input, foreign pages."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ranks import PATIENCE_S

from octopipe.base.errors import DoesNotFitError
from octopipe.cli import main
from octopipe.costs.table import CostTable
from octopipe.plans.file import plan_from_json
from octopipe.plans.plan import Plan
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import simulate
from octopipe.views.report.serve import Server, make_server


class SlowTuner:
    """Stands for the tuner: reports progress until told to go on. `seen`: it has reported once."""

    def __init__(self) -> None:
        self.go_on, self.seen = threading.Event(), threading.Event()

    def __call__(self, costs: CostTable, ranks: int, micro_batches: int, *, budget_s: float, progress: Any) -> Any:
        if micro_batches == 13:
            raise DoesNotFitError("rank 0 lacks 3.0 GiB; give more ranks")
        if micro_batches == 14:
            raise ZeroDivisionError("a fault")
        plan: Plan = build_plan("zb-h1", costs, ranks, micro_batches)
        best = simulate(plan, costs).step_ms
        seen = SimpleNamespace(
            seconds=1.0,
            iterations=5,
            phase="schedule",
            best_ms=np.float64(best),
            lower_bound_ms=np.float64(best / 2),
            plan=plan,
        )
        while not progress(seen) and not self.go_on.wait(0.02):
            self.seen.set()
        return SimpleNamespace(plan=plan, step_ms=best, lower_bound_ms=best / 2, seconds=2.0, iterations=10)


@pytest.fixture
def server() -> Iterator[tuple[Server, SlowTuner]]:
    tuner = SlowTuner()
    with make_server(tune=tuner) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running, tuner
        tuner.go_on.set()
        running.shutdown()
        thread.join()


def _ask(server: Server, path: str, body: Any = None, **headers: str) -> tuple[int, bytes, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=PATIENCE_S)
    if body is None:
        connection.request("GET", path, headers=headers)
    else:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, data, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    found = (answer.status, answer.read(), answer.headers)
    connection.close()
    return found


FORM = {"model": "nemotron-h-8b", "pp": 4, "micro_batches": 8, "tp": 4, "budget_s": 5, "systems": ["1f1b"]}


def _events(server: Server, number: int, heard: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """All events of a job; `heard` is called after each of them, while the job goes on."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=PATIENCE_S)
    connection.request("GET", f"/api/jobs/{number}/events")
    events = []
    for line in connection.getresponse():
        if line.startswith(b"data: "):
            events.append(json.loads(line[6:]))
            heard()
    connection.close()
    return events


def test_a_search_runs_is_watched_and_is_taken_home(server: tuple[Server, SlowTuner]) -> None:
    here, tuner = server
    status, answer, _ = _ask(here, "/api/jobs", FORM)
    assert status == 201
    number = json.loads(answer)["id"]
    events = _events(here, number, heard=tuner.go_on.set)
    assert events[-1]["state"] == "done" and events[-1]["best_ms"] > 0
    assert any(e["state"] == "running" for e in events)
    _, data, _ = _ask(here, f"/api/jobs/{number}/data")
    assert [e["label"] for e in json.loads(data)["head"]["entries"]] == ["1F1B", "OctoPipe"]
    _, plan_text, headers = _ask(here, f"/api/jobs/{number}/plan.json")
    assert "attachment" in headers["Content-Disposition"]
    plan = plan_from_json(plan_text)
    assert plan.extra["setting"]["model"] == "nemotron-h-8b"
    _, page, _ = _ask(here, f"/api/jobs/{number}/report.html")
    assert page.startswith(b"<!doctype html>")


def test_a_search_can_be_stopped_and_keeps_its_best(server: tuple[Server, SlowTuner]) -> None:
    here, tuner = server
    number = json.loads(_ask(here, "/api/jobs", FORM)[1])["id"]
    assert tuner.seen.wait(PATIENCE_S)
    assert _ask(here, f"/api/jobs/{number}/cancel", {})[0] == 200
    assert _events(here, number)[-1]["state"] == "stopped"
    assert _ask(here, f"/api/jobs/{number}/plan.json")[0] == 200


def test_a_second_search_waits_its_turn(server: tuple[Server, SlowTuner]) -> None:
    here, _ = server
    assert _ask(here, "/api/jobs", FORM)[0] == 201
    status, answer, _ = _ask(here, "/api/jobs", FORM)
    assert status == 400 and "running" in json.loads(answer)["error"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "gpt-9"}, "unknown model"),
        ({"model": "../../etc/passwd"}, "unknown model"),
        ({"pp": 0}, "pipeline ranks"),
        ({"pp": 100}, "54 layers"),
        ({"pp": "four"}, "pp"),
        ({"pp": 1.5}, "pp"),
        ({"micro_batches": 10**9}, "micro-batches"),
        ({"tp": 0}, "tp"),
        ({"tp": 3}, "3"),
        ({"memory_gib": -1}, "memory"),
        ({"budget_s": 0}, "seconds"),
        ({"budget_s": 1e9}, "seconds"),
        ({"gpu": "abacus"}, "abacus"),
        ({"systems": ["nonsense"]}, "nonsense"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_bad_input_gets_one_clear_line(server: tuple[Server, SlowTuner], change: dict, words: str) -> None:
    status, answer, _ = _ask(server[0], "/api/jobs", {**FORM, **change})
    error = json.loads(answer)["error"]
    assert status == 400 and words in error and "\n" not in error and "Traceback" not in error


def test_a_system_that_does_not_apply_is_left_out_with_its_reason(server: tuple[Server, SlowTuner]) -> None:
    here, tuner = server
    tuner.go_on.set()
    form = {**FORM, "micro_batches": 7, "systems": ["interleaved", "gpipe"]}
    number = json.loads(_ask(here, "/api/jobs", form)[1])["id"]
    last = _events(here, number)[-1]
    assert last["state"] == "done" and any("multiple" in note for note in last["notes"])


@pytest.mark.parametrize(("micro_batches", "words"), [(13, "lacks 3.0 GiB"), (14, "ZeroDivisionError")])
def test_a_search_that_fails_says_why(server: tuple[Server, SlowTuner], micro_batches: int, words: str) -> None:
    here, _ = server
    number = json.loads(_ask(here, "/api/jobs", {**FORM, "micro_batches": micro_batches})[1])["id"]
    last = _events(here, number)[-1]
    assert last["state"] == "failed" and words in last["error"]
    assert _ask(here, f"/api/jobs/{number}/plan.json")[0] == 409


def test_foreign_pages_cannot_use_the_server(server: tuple[Server, SlowTuner]) -> None:
    here, _ = server
    assert _ask(here, "/", Host="evil.example")[0] == 403
    assert _ask(here, "/api/jobs", FORM, Host="evil.example")[0] == 403
    assert _ask(here, "/api/jobs", b"model=x", **{"Content-Type": "text/plain"})[0] == 415
    assert _ask(here, "/", Host=f"localhost:{here.server_address[1]}")[0] == 200
    assert here.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("path", ["/nothing", "/api/jobs/99/data", "/api/jobs/1/../2/data", "/report.css", "/api/jobs"])
def test_unknown_paths_are_not_found(server: tuple[Server, SlowTuner], path: str) -> None:
    assert _ask(server[0], path)[0] == 404


def test_bodies_of_no_sense_are_refused(server: tuple[Server, SlowTuner]) -> None:
    here, _ = server
    assert _ask(here, "/api/jobs", b"{")[0] == 400
    assert _ask(here, "/api/jobs", b"[" * 60_000)[0] == 400
    assert _ask(here, "/api/jobs", b"x" * (1 << 17))[0] == 413


def test_a_taken_port_is_one_clear_line(server: tuple[Server, SlowTuner], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", str(server[0].server_address[1])]) == 2
    assert "cannot listen" in capsys.readouterr().err
    assert main(["serve", "no-such-file.json"]) == 2
    assert "no such file" in capsys.readouterr().err

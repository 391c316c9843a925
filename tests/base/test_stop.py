"""Ctrl-C and SIGTERM: every verb ends within seconds, with 130 or 143, and hands over what it has."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import some
from ranks import PATIENCE_S

from octopipe.base.errors import StoppedError, Terminated
from octopipe.base.stop import StopRequest
from octopipe.costs.table import CostTable
from octopipe.plans.file import load_plan
from octopipe.search.tuner import tune
from octopipe.search.tuner.search import Search
from octopipe.views.report import jobs as jobs_module
from octopipe.views.report.jobs import Jobs, Request
from octopipe.views.report.serve import make_server
from octopipe.views.reproduce.bench import Bench, Options
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.row import Result
from octopipe.views.reproduce.runner import run_parts

SIGNALS = [signal.SIGINT, signal.SIGTERM]
LONG = "900s"
"""A budget that no test waits for: whoever ignores the signal runs into the limit below."""
LIMIT_S = 300.0
# The process sends the signal to itself at a moment that matters, not after a guess of seconds. Two seconds to hand
# over what there is are plenty for a user, and not on a busy machine: the test of the grace itself has its own.
AT = """
import os, signal, sys
from {module} import {owner}
from octopipe.base.stop import StopRequest
StopRequest.__init__.__defaults__ = ({limit},)
before, calls = {owner}.{name}, []
def at(*given, **named):
    calls.append(1)
    if len(calls) == {call}:
        os.kill(os.getpid(), {number})
    return before(*given, **named)
{owner}.{name} = at
from octopipe.cli import main
sys.exit(main(sys.argv[1:]))
"""


# A shell starts background jobs with SIGINT ignored, and their children inherit that.
def _hears_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stopped(number: int, module: str, owner: str, name: str, *words: str, call: int = 1) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that gets a signal at that call of that function."""
    code = AT.format(module=module, owner=owner, name=name, number=int(number), call=call, limit=LIMIT_S)
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        preexec_fn=_hears_ctrl_c,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


DRAWING = ("octopipe.search.tuner.search", "Search", "_draw")


@pytest.mark.parametrize("number", some(SIGNALS))
def test_tune_hands_over_the_best_plan_so_far(number: signal.Signals, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    words = ("tune", "llama3-8b", "--pp", "2", "--budget", LONG, "--json", "-o", str(file))
    code, out, _ = stopped(number, *DRAWING, *words)
    assert code == 128 + number
    told = json.loads(out)
    assert told["interrupted"] and load_plan(file).extra["step_ms"] == pytest.approx(told["step_ms"])


@pytest.mark.parametrize("number", some(SIGNALS))
def test_plan_hands_over_the_best_split_so_far(number: signal.Signals, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    words = ("plan", "llama3-8b", "--gpus", "8", "--gpu", "h100", "--global-batch", "32", "--budget", LONG)
    code, out, _ = stopped(number, *DRAWING, *words, "--pp", "4", "--for", "octopipe", "--json", "-o", str(file))
    assert code == 128 + number
    told = json.loads(out)
    assert told["interrupted"] and told["best"]["fits"] and told["seconds"] < LIMIT_S
    assert load_plan(file).num_ranks == told["best"]["pp"]


def test_plan_that_is_stopped_while_it_judges_hands_over_what_it_has() -> None:
    words = ("plan", "llama3-8b", "--gpus", "8", "--gpu", "h100", "--global-batch", "32", "--budget", LONG)
    code, out, err = stopped(signal.SIGTERM, "octopipe.search.planner.search", "Pricer", "bound_ms", *words)
    assert code == 143 and "interrupted: this is the best split so far" in out, err
    # Published splits are evaluated before any bound is asked for; the others are not.
    evaluated, splits = (int(re.search(rf"(\d+) {word}", out)[1]) for word in ("evaluated", "splits"))  # type: ignore[index]
    assert 1 <= evaluated < splits


@pytest.mark.parametrize("number", [SIGNALS[0], pytest.param(SIGNALS[1], marks=pytest.mark.slow)])
def test_compare_shows_what_is_finished_and_waits_for_no_solver(number: signal.Signals) -> None:
    pytest.importorskip("ortools")
    words = ("compare", "llama3-8b", "--pp", "4", "--systems", "1f1b,gpipe,tessel", "--time-limit", "900", "--json")
    code, out, _ = stopped(number, "octopipe.search", "comparison", "wait", *words, call=2)
    assert code == 128 + number
    told = json.loads(out)
    assert told["interrupted"] and any("step_ms" in row for row in told["results"])


def test_a_second_signal_and_a_grace_that_is_over_raise() -> None:
    with pytest.raises(Terminated), StopRequest(grace_s=PATIENCE_S) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested and stop.exit_code(0) == 143
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), StopRequest(grace_s=0.05):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(PATIENCE_S)
    with pytest.raises(KeyboardInterrupt), StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        raise StoppedError("nothing yet")
    with StopRequest() as stop:
        pass
    assert stop.exit_code(3) == 3 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# -- what is kept --------------------------------------------------------------------------------------


def _costs() -> CostTable:
    return CostTable.uniform(num_layers=8).replace(forward_ms=np.arange(1.0, 9.0))


@pytest.mark.parametrize("where", ["_draw", "_hide"])
def test_a_search_of_the_reproduction_that_was_cut_short_is_not_kept(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once kept as finished it would be read instead of run for ever."""
    from octopipe.search import tuner
    from octopipe.search.tuner.search import Search

    def run(bench: Bench) -> Result:
        bench.searched(_costs(), 2, 4, robust=where == "_hide")
        return Result(rows=(), costs="ours")

    owner, name = (Search, "_draw") if where == "_draw" else (tuner, "hide_transfers")
    before = getattr(owner, name)

    def interrupted(*given: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return before(*given, **named)

    part = Part(name="short", title="A part", run=run, labels=())
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_parts([part], Options(iterations=200), tmp_path)
    assert not list(tmp_path.glob("short*")) and not list((tmp_path / "plans").glob("*"))
    assert run_parts([part], Options(iterations=200), tmp_path)[0].reused is False
    assert run_parts([part], Options(iterations=200), tmp_path)[0].reused is True


def test_reproduce_ends_with_130_and_143(tmp_path: Path) -> None:
    words = ("reproduce", "two-stages", "--profiles", "none", "-o", str(tmp_path / "out"))
    for number in SIGNALS:
        code, out, err = stopped(number, "octopipe.views.reproduce", "runner", "_kept", *words)
        assert code == 128 + number and out == "" and err.strip().splitlines()[-1].startswith("octopipe: "), err


# -- searches of the local page ------------------------------------------------------------------------


def test_a_search_that_is_stopped_before_its_first_plan_does_not_say_that_nothing_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # How soon a search has its first plan depends on the machine: here, every simulation ends after the search.
    stopped = threading.Event()
    simulated = Search._simulated

    def late(search: Search, plan: Any) -> Any:
        stopped.wait(PATIENCE_S)
        return simulated(search, plan)

    monkeypatch.setattr(Search, "_simulated", late)
    monkeypatch.setattr(Search, "_consider", lambda *_: False)
    try:
        with pytest.raises(StoppedError, match="before it found a first plan"):
            tune(_costs(), 2, 16_000, budget_s=600.0, progress=lambda seen: True)
    finally:
        stopped.set()


def test_a_huge_search_hears_that_it_is_cancelled() -> None:
    """118 ranks and 1,024 micro-batches: a single schedule takes longer than anybody waits."""
    jobs = Jobs({"nemotron-h-56b": "nemotron-h-56b"}, tune)
    job = jobs.start(Request(model="nemotron-h-56b", pp=118, micro_batches=1024, budget_s=5.0))
    job.cancel()
    began = time.monotonic()
    job.wait(2 * PATIENCE_S)
    assert job.state == "stopped" and time.monotonic() - began < PATIENCE_S
    again = jobs.start(Request(model="nemotron-h-56b", pp=2, micro_batches=2, budget_s=0.1))
    again.cancel()


def test_a_search_whose_page_was_closed_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "ABANDONED_S", 0.0)
    ended = threading.Event()

    def search(*_: Any, progress: Any, **__: Any) -> Any:
        ended.wait(PATIENCE_S)
        raise StoppedError("stopped")

    jobs = Jobs({"llama3-8b": "llama3-8b"}, search)
    request = Request(model="llama3-8b", pp=2, micro_batches=2)
    first = jobs.start(request)
    with pytest.raises(jobs_module.OctoPipeError, match="a search is running"):
        jobs.start(request)
    with first.watched(), pytest.raises(jobs_module.OctoPipeError, match="a search is running"):
        jobs.start(request)
    assert jobs.start(request).state == "running" and first.state == "stopped"
    ended.set()


def test_a_client_that_went_away_frees_the_planner() -> None:
    begun, ended = threading.Event(), threading.Event()

    def planner(asked: Any, stop: Any) -> dict[str, Any]:
        begun.set()
        while not stop():
            time.sleep(0.01)
        ended.set()
        raise StoppedError("nobody waits")

    with make_server(planner=planner) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        client = HTTPConnection(*server.server_address[:2], timeout=PATIENCE_S)
        client.request("POST", "/api/plan", '{"model": "llama3-8b"}', {"Content-Type": "application/json"})
        assert begun.wait(PATIENCE_S)
        client.sock.close()
        assert ended.wait(PATIENCE_S)
        server.shutdown()


@pytest.mark.parametrize("length", ["²", "１０", "-1", "1e3", "9" * 30, ""])
def test_a_length_that_is_no_number_is_answered(length: str) -> None:
    with make_server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        client = HTTPConnection(*server.server_address[:2], timeout=PATIENCE_S)
        client.putrequest("POST", "/api/jobs")
        client.putheader("Content-Length", length.encode("latin-1", "replace"))
        client.endheaders()
        assert client.getresponse().status == 413
        server.shutdown()


@pytest.mark.parametrize("budget", ["1" + "0" * 400, "1e400", '"nan"', "-1", '"1e999"'])
def test_a_budget_that_is_no_time_is_answered(budget: str) -> None:
    from octopipe.cli.verbs.serve import planned

    with make_server(planner=planned) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        for path, more in (
            ("/api/jobs", '"pp": 2, "micro_batches": 2'),
            ("/api/plan", '"gpu": "h100", "gpus": "7", "global_batch": "1", "seq": "9999999999"'),
        ):
            client = HTTPConnection(*server.server_address[:2], timeout=PATIENCE_S)
            body = f'{{"model": "llama3-8b", {more}, "budget_s": {budget}}}'
            client.request("POST", path, body, {"Content-Type": "application/json"})
            answer = client.getresponse()
            assert answer.status == 400 and json.loads(answer.read())["error"]
        server.shutdown()

"""What a machine lacks, and what an environment says wrongly: one line and exit code 2, never a fault of ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from effort import some

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import check_target
from octopipe.cli import main
from octopipe.runtime.ranks import rendezvous
from octopipe.runtime.ranks.rendezvous import Place, aside, place_from
from octopipe.search.systems import systems

OCTOPIPE = [sys.executable, "-m", "octopipe"]


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line of bash in which $OCTOPIPE is the command."""
    words = {**os.environ, "OCTOPIPE": " ".join(OCTOPIPE), **environment}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, env=words, timeout=300)


@pytest.mark.parametrize("words", some(["models --json", "simulate llama3-8b --pp 2", "gpus"], quick=2))
def test_an_output_that_is_full_is_named(words: str) -> None:
    done = shell(f"$OCTOPIPE {words} > /dev/full")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no space is left" in done.stderr, done.stderr
    assert shell(f"$OCTOPIPE {words} > /dev/full 2> /dev/full").returncode == 2


def test_a_help_text_that_a_full_output_loses_is_no_success() -> None:
    done = shell("$OCTOPIPE models --help > /dev/full")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no space is left" in done.stderr, done.stderr


def test_closed_streams_are_no_fault() -> None:
    for line in ("gpus >&-", "gpus <&- >&- 2>&-", "gpus 2>&-", "gpus --json >&-", "gpus --help >&-", "--help >&-"):
        assert shell(f"$OCTOPIPE {line}").returncode == 0, line
    assert shell("$OCTOPIPE nonsense 2>&-").returncode == 2


@pytest.mark.parametrize(
    "words",
    some(
        [
            "profile nemotron-h-4b --scale 0.05 -o {}",
            "validate none.json --profile none.json --report {}",
            "tune none.json --pp 2 --measure --corrected {}",
            "validate none.json --profile none.json --timelines {}",
        ],
        quick=3,
    ),
)
def test_a_result_that_cannot_be_written_is_named_before_anything_is_read_or_measured(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.format(tmp_path / "missing" / "it.json").split()) == 2
    assert "its folder does not exist" in capsys.readouterr().err


def test_a_folder_that_is_read_only_is_named_before_the_search() -> None:
    """`tune -o` asks `check_target` first: a search whose plan nobody can keep is a lost one."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        privileged = os.geteuid() == 0  # root may write everywhere: look with the rights of nobody
        if privileged:
            os.seteuid(65534)
        try:
            with pytest.raises(OctoPipeError, match=r"plan\.json: cannot be written: its folder is read-only"):
                check_target(os.path.join(name, "plan.json"))
        finally:
            if privileged:
                os.seteuid(0)
            os.chmod(name, 0o755)


def test_the_number_of_a_closed_stdout_goes_to_nothing_else() -> None:
    """A rank writes to descriptor 1: what stands there must not be somebody's pipe."""
    code = (
        "import os; from octopipe.base.streams import open_standard_streams\n"
        "open_standard_streams(); read, write = os.pipe(); assert min(read, write) > 2, (read, write)"
    )
    done = subprocess.run(["bash", "-c", f"{sys.executable} -c '{code}' >&- <&-"], check=False, timeout=300)
    assert done.returncode == 0


@pytest.mark.parametrize("columns", some(["0", "²", "99999999999", "1", "-3", ""], quick=3))
def test_a_width_that_is_none_does_not_hide_the_answer(columns: str) -> None:
    done = shell("$OCTOPIPE gpus", COLUMNS=columns)
    assert done.returncode == 0 and "h100" in done.stdout


@pytest.mark.parametrize("limit", ["ulimit -n 16", "ulimit -v 300000"])
def test_few_descriptors_and_little_memory_are_named(limit: str) -> None:
    done = shell(f"{limit}; $OCTOPIPE compare llama3-8b --pp 2 --systems 1f1b,gpipe,zb-v,interleaved")
    assert done.returncode in (0, 2) and "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0 or "limit" in done.stderr, done.stderr


def test_ranks_that_may_open_too_few_files_are_not_started() -> None:
    code = (
        "import resource; from octopipe.runtime.ranks.launch import allow_descriptors as allow\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 100)); allow(80)\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (80, 100); allow(200)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert "ranks need about 200 open files, and 100 are allowed" in done.stderr, done.stderr


def test_json_writes_bidirectional_marks_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a\u202eb\u2066.json"
    layers = {"E": 1, "-": 2, "L": 3}
    path.write_text(json.dumps({"pattern": "E--L", "forward_ms": layers, "backward_ms": layers, "weight_ms": layers}))
    assert main(["simulate", str(path), "--pp", "2", "--json"]) == 0
    out = capsys.readouterr().out
    assert "\u202e" not in out and "\\u202e" in out and "\u202e" in json.dumps(json.loads(out), ensure_ascii=False)


def test_a_profile_of_two_ranks_says_that_it_is_of_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ortools")
    path = tmp_path / "two.json"
    layers = {"E": 1, "-": 2, "L": 3}
    times = {"pattern": "E-----L", "forward_ms": layers, "backward_ms": layers, "weight_ms": layers}
    for more in ({"rank_slowdown": [1.0, 1.5]}, {"memory_gib": [10, 12]}):
        path.write_text(json.dumps({"format": "octopipe.profile/1", **times, **more}))
        verbs = [["simulate", "--system", name] for name in systems() if name not in ("tessel", "pipe-offload")]
        for verb, *words in (*verbs, ["compare", "--systems", "1f1b,dapple"], ["tune", "--budget", "1s"]):
            assert main([verb, str(path), "--pp", "3", *words]) == 2, (verb, words)
            err = capsys.readouterr().err
            assert err.count("\n") == 1 and ("one per rank" in err or "pp 3 is odd" in err), err


# -- ranks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE 2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is '-1'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"RANK": "0", "WORLD_SIZE": "²"}, "WORLD_SIZE is '²'"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "99999"}, "MASTER_PORT is '99999'"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "one"}, "LOCAL_RANK is 'one'"),
    ],
)
def test_an_environment_that_contradicts_itself(known: dict[str, str], said: str) -> None:
    with pytest.raises(OctoPipeError, match=said.replace("(", r"\(")):
        place_from(known)


def test_a_first_rank_that_nobody_started_is_waited_for_no_longer_than_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    import socket

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(unused.getsockname()[1]))
        with pytest.raises(OctoPipeError, match=r"rank 0 did not answer within 0\.5 s"):
            rendezvous.rendezvous(Place(1, 2, 1), "gloo", 0.5)
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    with pytest.raises(OctoPipeError, match="cannot be resolved to a host"):
        rendezvous.rendezvous(Place(1, 2, 1), "gloo", 0.5)


def test_a_wait_in_c_is_given_up_and_hears_its_error() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError):
        aside(lambda: never.wait(60.0), -1.9)
    never.set()

    def fails() -> None:
        raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        aside(fails, 10.0)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no namespaces here")
def test_a_loopback_interface_that_is_down_is_named() -> None:
    pytest.importorskip("torch")
    code = "from octopipe.runtime.ranks.rendezvous import local_store; local_store()"
    done: Any = subprocess.run(
        ["unshare", "-rn", sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    if "unshare" in done.stderr and "OctoPipeError" not in done.stderr:
        pytest.skip("no namespaces for this user")
    assert "does not answer itself on 127.0.0.1" in done.stderr and "ip link set lo up" in done.stderr

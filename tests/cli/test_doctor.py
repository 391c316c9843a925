"""octopipe doctor: says what is broken and how to remedy it, whatever is missing, and never fails itself."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octopipe.cli import main
from octopipe.cli.verbs import doctor


def quick(monkeypatch: pytest.MonkeyPatch, rows: list[Any] | None = None, **result: Any) -> None:
    """Torch is looked at in a process of its own, which takes seconds: here it is said what that process says."""
    said = {"returncode": 0, "stdout": json.dumps(rows or []) + "\n", "stderr": "", **result}
    answer = subprocess.CompletedProcess(args=[], **said)
    found = list(doctor.torch(lambda *_, **__: answer))

    def torch() -> Iterator[doctor.Finding]:
        yield from found

    monkeypatch.setattr(doctor, "torch", torch)


def test_a_machine_where_all_works_has_exit_code_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick(monkeypatch, [["torch", "ok", "2.13", ""]])
    assert main(["doctor", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    names = [finding["name"] for finding in out["findings"]]
    assert out["works"] and {"Python", "numpy", "kernels", "cache folder", "loopback", "open files"} <= {*names}
    assert main(["doctor"]) == 0
    assert "nothing is broken" in capsys.readouterr().out


def test_what_is_broken_is_named_with_its_mend_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refused)
    quick(monkeypatch, [["GPUs", "broken", "the driver shows 2 GPUs, torch uses none", "install another torch"]])
    assert main(["doctor"]) == 1
    out = capsys.readouterr()
    assert "Connection refused" in out.out and "install another torch" in out.out and "Traceback" not in out.err
    assert "2 of" in out.out and "loopback, GPUs" in out.out


def test_a_torch_that_crashes_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    quick(monkeypatch, returncode=-11, stdout="", stderr="libcudart.so.12: cannot open shared object file\n")
    assert main(["doctor", "--json"]) == 1
    broken = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["state"] == "broken"]
    assert [f["name"] for f in broken] == ["torch"] and "libcudart" in broken[0]["found"]


def test_a_cache_folder_that_others_can_write_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("OCTOPIPE_CACHE_DIR", str(tmp_path))
    found = list(doctor.cache())
    assert found[0].state == "note" and "chmod 700" in found[0].remedy


def test_doctor_runs_where_torch_is_not_installed() -> None:
    code = (
        "import sys, importlib.metadata as m\n"
        "from octopipe.cli import main\n"
        "real = m.version\n"
        "def version(name):\n"
        "    if name in ('torch', 'transformers'): raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
        "sys.modules['torch'] = None\n"
        "sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'pip install "octopipe[torch]"' in done.stdout and "nothing is broken" in done.stdout


@pytest.mark.slow
def test_torch_itself_is_looked_at_by_using_it() -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", "octopipe.runtime.torch_check"], capture_output=True, text=True, timeout=300
    )
    rows = {row[0]: row[1:] for row in json.loads(done.stdout.strip().splitlines()[-1])}
    assert rows["two ranks"][0] == "ok" and rows["torch"][0] in ("ok", "note") and rows["gloo"][0] == "ok"

"""How the process of a rank reports an error."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.ranks.rank_process import described


@pytest.mark.parametrize(
    ("name", "value", "printed"),
    [
        ("OCTOPIPE_TRACEBACK", "1", True),
        ("OCTOPIPE_TRACEBACK", "0", False),
        ("OCTOPIPE_TRACE", "1", True),
        ("OCTOPIPE_OTHER", "1", False),
    ],
)
def test_the_variable_of_the_command_prints_the_traceback_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, printed: bool
) -> None:
    for each in ("OCTOPIPE_TRACEBACK", "OCTOPIPE_TRACE"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    assert described(OctoPipeError("give a plan")) == "give a plan"
    assert ("OctoPipeError: give a plan" in capsys.readouterr().err) is printed

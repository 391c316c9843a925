"""Commands run inside the test's own process.

Knows: how to call the command line and take what it printed. Does not know: any command.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from octopipe.cli import main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `octopipe WORDS`."""
    try:
        code = main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The JSON of `octopipe simulate WORDS`; exit code 3 says that the plan does not fit in memory."""
    code, out, err = run(capsys, "simulate", *words, "--json")
    assert code in (0, 3), err
    return dict(json.loads(out))

"""Texts that users write or export: any usual encoding says the same, and what is no text is told as that."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import read_numbers
from octopipe.cli.verbs.import_plan import _read as read_import
from octopipe.costs.cluster.file import read_cluster
from octopipe.costs.cluster.hardware_file import read_hardware
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.runs import read_runs
from octopipe.models.lengths import read_lengths

_ARGUMENTS: dict[str, Any] = {
    "partition": "1", "model": None, "pp": None, "micro_batches": None, "vp": None, "schedule": None,
    "group_size": None,
}  # fmt: skip


def imported(path: Path) -> object:
    arguments = argparse.Namespace(source=str(path), **_ARGUMENTS)
    return read_import(arguments).plan


def forward_ms(path: Path) -> object:
    return resolve_costs(path, pp=2).forward_ms.tolist()


RANGES = "Range,Total Proj Time (ns),Range Instances,Proj Med (ns)\n" + "".join(
    f":layer {k} {phase},8,4,{2 + k}000000\n" for k in range(2) for phase in ("forward", "backward")
)
TEXTS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "nodes.toml": ('[[nodes]]\ngpu = "h100"\ncount = 2\n', read_cluster),
    "nodes.json": ('{"nodes": [{"gpu": "h100",\n "count": 2}]}', read_cluster),
    "gpu.toml": ('[gpu]\nlike = "h100"\npower_watts = 500\n', read_hardware),
    "lengths.txt": ("4096\n1024\n", read_lengths),
    "lengths.json": ("[4096,\n 1024]", read_lengths),
    "tokens.txt": ("4\n1\n", read_numbers),
    "times.csv": ("layer,0,1\nF,1.0,2.0\nB,2.0,4.5\n", forward_ms),
    "ranges.csv": (RANGES, forward_ms),
    "runs.csv": ("system,model,gpus,gbs,tokens_per_s_per_gpu\nh100,llama3-8b,8,64,8120\n", read_runs),
    "schedule.csv": ("0F0,0F1,0B0,0B1\n", imported),
}
"""Per name: a text, and what reads it."""


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_windows_tools_write_say_the_same(name: str, tmp_path: Path) -> None:
    """Spreadsheets write a byte order mark, PowerShell redirects into UTF-16, and both end lines with two letters."""
    text, read = TEXTS[name]
    path = tmp_path / name
    path.write_text(text)
    expected = repr(read(path))
    windows = text.replace("\n", "\r\n")
    for data in (windows.encode("utf-8-sig"), windows.encode("utf-16"), ("\ufeff" + windows).encode("utf-16-be")):
        path.write_bytes(data)
        assert repr(read(path)) == expected, data[:4]


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_text_is_told_as_that(name: str, tmp_path: Path) -> None:
    text, read = TEXTS[name]
    path = tmp_path / name
    path.write_bytes(text.encode() + b"\n# caf\xe9\n")  # Latin-1
    with pytest.raises(OctoPipeError, match=r"not a text in UTF-8; save it as UTF-8|not valid JSON"):
        read(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [("t.csv", "a line of layer names"), ("t.sqlite", "nsys export"), ("t.toml", "no model"), ("t.gz", "packed trace")],
)
def test_a_file_that_holds_no_model_is_told_what_such_a_file_holds(name: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("hello\n")
    with pytest.raises(OctoPipeError, match=said):
        resolve_costs(path, pp=2)


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    for name in ("model.json", "nodes.json"):
        (tmp_path / name).write_text("\n")
    with pytest.raises(OctoPipeError, match=r"model\.json is empty"):
        resolve_costs(tmp_path / "model.json", pp=2)
    with pytest.raises(OctoPipeError, match=r"nodes\.json is empty"):
        read_cluster(tmp_path / "nodes.json")

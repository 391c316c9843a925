"""A checkpoint's folder from somebody else: whatever stands in a file's place is refused in one line, and soon."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from octopipe.cli import main  # noqa: E402
from octopipe.runtime.training import convert  # noqa: E402
from octopipe.runtime.training.checkpoint_folder import choose, layer_file  # noqa: E402

STEP = 3
MIB = 1 << 20


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    """A test that waits for a pipe fails instead of standing still."""

    def late(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def content(**state: Any) -> dict[str, Any]:
    return {"layer": 0, "step": STEP, "state": state or {"weight": torch.ones(4)}, "optimizer": {}}


def saved(value: Any) -> bytes:
    memory = io.BytesIO()
    torch.save(value, memory)
    return memory.getvalue()


def folder(home: Path, data: bytes | None = None, nbytes: int | None = None) -> Path:
    """A checkpoint of one layer whose run.json is right about these bytes."""
    path = home / f"step-{STEP:08d}"
    path.mkdir()
    data = saved(content()) if data is None else data
    (path / layer_file(0)).write_bytes(data)
    entry = {
        "layer": 0,
        "file": layer_file(0),
        "bytes": nbytes or len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    record = {"format": "octopipe.checkpoint/2", "step": STEP, "num_layers": 1, "layers": [entry], "optimizer": None}
    (path / "run.json").write_text(json.dumps(record))
    return path


def rewritten(data: bytes, change: Callable[[str, bytes], bytes], pack: bool = False) -> bytes:
    """The archive of torch.save with its records changed, or packed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            record = change(name, old.read(name))
            new.writestr(name, record, zipfile.ZIP_DEFLATED if pack else zipfile.ZIP_STORED)
    return out.getvalue()


def a_storage_that_lies(data: bytes) -> bytes:
    """An index that names a storage of 256 MiB elements where the record has four."""
    count = (1 << 28).to_bytes(4, "little")

    def change(name: str, record: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return record
        at = record.find(b"K\x04tq")  # a storage's elements, as a one-byte number, end its tuple
        assert at > 0
        return record[:at] + b"J" + count + record[at + 2 :]

    return rewritten(data, change)


STRANGE: dict[str, Callable[[], bytes]] = {
    "an expanded tensor": lambda: saved(content(weight=torch.ones(1).expand(1 << 40))),
    "many views of one storage": lambda: saved(
        content(**{str(k): v for k, v in enumerate(torch.ones(MIB).unsqueeze(0).expand(4096, MIB).unbind())})
    ),
    "a sparse tensor": lambda: saved(
        content(
            weight=torch.sparse_coo_tensor(
                torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), (1 << 40,), check_invariants=False
            )
        )
    ),
    "a storage larger than its record": lambda: a_storage_that_lies(saved(content())),
    "packed records": lambda: rewritten(saved(content(weight=torch.zeros(64 * MIB))), lambda _, r: r, pack=True),
    "a pickle": lambda: pickle.dumps(content(weight=[1.0])),
    "nothing": lambda: b"",
    "an archive of nothing": lambda: rewritten(saved(content()), lambda _, r: b""),
    "no dictionary": lambda: saved([1, 2]),
}


def memory_taken() -> Callable[[], int]:
    """What says how much memory this process took at its peak since now."""

    def status(name: str) -> int:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
        return 1024 * int(line.split()[1])

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    return lambda: status("VmHWM") - before


def refused(path: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> str:
    taken = memory_taken()
    code = main(["convert", str(path), "--to", "dcp", "-o", str(target)])
    err = capsys.readouterr().err
    assert code == 2 and err.count("\n") == 1 and "Traceback" not in err, err
    assert taken() < 1024 * MIB, "most of it is what convert imports"
    assert not target.exists() or not list(target.iterdir())
    with pytest.raises(Exception, match=r"layer-0000|none of the"):
        choose(path.parent)
        convert.read_layer(path, 0, convert.read_record(path))
    return err


@pytest.mark.parametrize("what", STRANGE)
def test_a_file_that_is_not_what_torch_saves_of_a_layer(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path, STRANGE[what]())
    assert layer_file(0) in refused(path, tmp_path / "out", capsys)


@pytest.mark.parametrize("what", ["pipe", "/dev/zero", "/dev/full", "folder", "terabyte", "missing", "socket"])
def test_something_else_in_a_files_place(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(tmp_path, nbytes=1 << 40 if what == "terabyte" else None)
    file = path / layer_file(0)
    file.unlink()
    if what == "pipe":
        os.mkfifo(file)
    elif what.startswith("/dev"):
        file.symlink_to(what)
    elif what == "folder":
        file.mkdir()
    elif what == "terabyte":
        with open(file, "wb") as sparse:
            sparse.truncate(1 << 40)
    elif what == "socket":
        os.mknod(file, 0o140600)
    refused(path, tmp_path / "out", capsys)


@pytest.mark.parametrize("name", ["run.json", "older-good"])
@pytest.mark.parametrize("what", ["pipe", "/dev/zero"])
def test_something_else_in_the_place_of_a_note(name: str, what: str, tmp_path: Path) -> None:
    from octopipe.runtime.training.checkpoint_folder import rotate

    good = folder(tmp_path)
    place = good / name if name == "run.json" else tmp_path / name
    place.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(what)
    if name == "run.json":
        with pytest.raises(Exception, match=r"not a regular file|no checkpoint"):
            convert.read_record(good)
    else:
        rotate(tmp_path, 1)
        assert good.is_dir()


def test_a_good_folder_is_still_read(tmp_path: Path) -> None:
    weight = torch.randn(3, 5).t()  # not contiguous: torch keeps its strides
    state = {"weight": weight, "count": torch.tensor(7), "mask": torch.zeros(0), "half": torch.ones(3).bfloat16()}
    path = folder(tmp_path, saved(content(**state)))
    assert choose(tmp_path) == (path, [])
    found = convert.read_layer(path, 0, convert.read_record(path))["state"]
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert main(["convert", str(tmp_path), "--to", "dcp", "-o", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("existed", [True, False])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    existed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch.distributed.checkpoint raises something that is no Exception."""
    import torch.distributed.checkpoint.filesystem as filesystem

    class Full(io.BytesIO):
        def write(self, *_: Any) -> int:
            raise OSError(28, "No space left on device")

    path, target = folder(tmp_path), tmp_path / "out"
    if existed:
        target.mkdir()
    monkeypatch.setattr(filesystem.FileSystem, "create_stream", lambda *_: __import__("contextlib").nullcontext(Full()))
    code = main(["convert", str(path), "--to", "dcp", "-o", str(target)])
    err = capsys.readouterr().err
    assert code == 2 and err.count("\n") == 1 and "No space left on device" in err, err
    assert target.exists() == existed and not list(target.glob("*"))


def test_a_tokenizer_that_never_ends_is_not_copied(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir(), out.mkdir()
    with open(source / "tokenizer.json", "wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(convert.OctoPipeError, match=r"tokenizer.json has \d+ bytes"):
        convert._companions(source, out)

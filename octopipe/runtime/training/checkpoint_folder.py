"""The folder of a run's checkpoints: who may write to it, which checkpoints are kept, which one to resume from.

Knows: the folder, the files of a checkpoint and their checksums. Does not know: their contents (`checkpoint.py`), or
torch.

A run locks its folder and writes a test file before its first step, so that two runs never mix their steps, and a
folder that is not writable is detected before any work is done. The newest checkpoints are kept, and in addition one
verified older one, at least as far back as the newest ones reach, so that it is still available if a run slowly goes
wrong. Partial checkpoints of a killed run are removed by the next one; their names never look like a checkpoint's.

A run that resumes from an earlier step is a new branch. When its first checkpoint is saved, the later checkpoints of
the old branch move to a separate folder (`branch-1`, `branch-2`, ...). The newest checkpoint then belongs to the new
branch, and the old branch can be resumed from its folder like any other run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief, read_bytes, read_json_object, shown
from octopipe.base.limits import MAX_LAYERS
from octopipe.base.memory import free_memory_bytes
from octopipe.runtime.training.layer_file import WrongFile, check_sum

FORMAT = "octopipe.checkpoint/2"
FORMAT_1 = "octopipe.checkpoint/1"
"""The older format, which has no checksums."""
RUN = "run.json"
LOCK = ".lock"
OLDER = "older-good"
"""The file that names the older checkpoint which is kept in addition to the newest ones."""
PARTIAL, ASIDE = ".partial", ".before.partial"
"""Endings of the names of a checkpoint that is being written or removed, and of one that is about to be replaced."""
_LEFTOVER = re.compile(rf"(?P<step>step-\d+)((?P<aside>\{ASIDE})|\{PARTIAL})|{OLDER}\{PARTIAL}|\.probe-[0-9a-f]+")
BRANCH = "branch-"
"""The beginning of the names of folders with the checkpoints of an abandoned branch."""
log = logging.getLogger("octopipe.checkpoint")


class DamagedCheckpoint(OctoPipeError):
    """A checkpoint whose files are not those that were written; an older one may be valid."""


# -- one checkpoint --------------------------------------------------------------------------------------


def read_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the contents of a checkpoint's run.json. Older ones have no `step_number`, which is the step there."""
    if not (Path(path) / RUN).exists() and (newest := latest(path)) is not None:
        raise OctoPipeError(f"{shown(path)} is a folder of checkpoints; load {shown(newest)}")
    record: dict[str, Any] = read_json_object(Path(path) / RUN)
    if record.get("format") not in (FORMAT, FORMAT_1) or not _count(record.get("step")):
        raise DamagedCheckpoint(
            f"{shown(path)}: format is {brief(record.get('format'))}, step {brief(record.get('step'))}; "
            f"expected {FORMAT!r} and a whole number: take another checkpoint"
        )
    layers = record.get("layers", [])
    good = isinstance(layers, list) and all(
        isinstance(x, dict) and _count(x.get("layer")) and isinstance(x.get("sha256"), str) for x in layers
    )
    number = record.get("num_layers")
    if not good or not (isinstance(number, int) and _count(number) and number <= MAX_LAYERS):
        raise DamagedCheckpoint(f"{shown(path)}: {RUN} does not list its layers; use another checkpoint")
    expected = {
        "optimizer": (_name, "a name or null"),
        "model": (_name, "a name"),
        "seed": (lambda x: isinstance(x, int), "a whole number"),
        "samples": (lambda x: isinstance(x, int) and x >= 0, "a whole number from 0 on"),
        "step_number": (_count, "a whole number from 0 on"),
    }
    for key, (meant, words) in expected.items():
        if key in record and (isinstance(record[key], bool) or not meant(record[key])):
            raise DamagedCheckpoint(
                f"{shown(path)}: {RUN} has {key} {brief(record[key])}, not {words}; use another checkpoint"
            )
    return {"optimizer": None, "step_number": record["step"], **record}


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    try:
        found = [p for p in Path(folder).iterdir() if re.fullmatch(r"step-\d+", p.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise OctoPipeError(f"{shown(folder)}: cannot be read ({error.strerror}); check the folder") from None
    return sorted((p for p in found if (p / RUN).is_file()), key=_step)


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint, or None."""
    found = checkpoints(folder)
    return found[-1] if found else None


def damage(path: str | os.PathLike[str], layers: Callable[[int], bool] | None = None, *, to_load: bool = False) -> str:
    """Describe, in one line, what is wrong with a checkpoint's files; empty if nothing is. `layers`: check only the
    files of these layers.

    `to_load`: the files are about to be loaded, so one that does not fit in memory is wrong as well, and is not read.
    """
    try:
        record = read_record(path)
    except OctoPipeError as error:
        return str(error)
    listed = {x["layer"]: x for x in record.get("layers", [])}
    # A loss with parameters comes after the last layer.
    if record["format"] == FORMAT and listed.keys() - {record["num_layers"]} != set(range(record["num_layers"])):
        return f"{shown(path)}: {RUN} lists {len(listed)} of {record['num_layers']} layers"
    wanted = range(record["num_layers"]) if not listed else sorted(listed)
    chosen = {k: listed.get(k, {}) for k in wanted if layers is None or layers(k)}
    return wrong_files(Path(path), chosen, free_memory_bytes() if to_load else math.inf)


def sync_folder(folder: Path) -> None:
    """Make sure that files which were created, renamed or removed in a folder remain so after a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def layer_file(layer: int) -> str:
    """Return the name of a layer's file in a checkpoint."""
    return f"layer-{layer:04d}.pt"


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _name(value: object) -> bool:
    return value is None or isinstance(value, str)


def wrong_files(folder: Path, layers: Mapping[int, Mapping[str, Any]], most_bytes: float = math.inf) -> str:
    """Describe what is wrong with the files of these layers of a checkpoint; without a checksum, only whether they
    exist. `most_bytes`: larger files are not read."""
    for k, expected in layers.items():
        path = folder / layer_file(k)
        try:
            check_sum(path, expected, most_bytes)
        except WrongFile as why:
            return f"{shown(path)}: {why}"
    return ""


# -- the folder ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Lock a folder for one run; creates it and tests that it can be written to, or raises an error that says why
    not."""
    home = Path(folder)
    try:
        home.mkdir(parents=True, exist_ok=True)
        handle = os.open(home / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except OSError as error:
        raise OctoPipeError(
            f"{shown(home)}: checkpoints cannot be written there ({error.strerror}); name another folder"
        ) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OctoPipeError(
                f"{shown(home)}: {_holder(handle)} writes its checkpoints there; wait for it, or name another folder"
            ) from None
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(about).encode(), 0)
            probe = home / f".probe-{uuid.uuid4().hex}"
            probe.mkdir()
            probe.rmdir()
            clear_leftovers(home)
            sync_folder(home)
        except OSError as error:
            raise OctoPipeError(
                f"{shown(home)}: checkpoints cannot be written there ({error.strerror}); name another folder"
            ) from None
        yield home
    finally:
        os.close(handle)  # releases the lock; the file stays: once removed, two other runs could both hold a lock


def clear_leftovers(folder: str | os.PathLike[str]) -> None:
    """Remove the leftovers of a run that was killed while it wrote or removed a checkpoint; only the holder of the lock
    may do so.

    A checkpoint that was set aside for its successor, which was never completed, gets its name back.
    """
    home = Path(folder)
    for path in sorted(home.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or path.is_symlink():
            continue
        target = home / (match["step"] or "")
        if match["aside"] and (path / RUN).is_file() and not target.exists() and not damage(path):
            path.rename(target)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _holder(handle: int) -> str:
    try:
        about = json.loads(os.pread(handle, 4096, 0))
        return f"process {int(about['pid'])} on {str(about['host'])[:64]!r}, since {str(about['since'])[:32]},"
    except (ValueError, KeyError, TypeError, OSError):
        return "another run"


def rotate(folder: str | os.PathLike[str], keep: int) -> None:
    """Keep the newest `keep` checkpoints and one older checkpoint that has been verified."""
    home = Path(folder)
    found = checkpoints(home)
    newest, rest = found[-max(1, keep) :], found[: -max(1, keep)]
    if not rest:
        return
    kept = _older(home)
    if kept not in rest or _step(rest[-1]) - _step(kept) >= _step(newest[-1]) - _step(rest[-1]):
        # The newest of the older ones that is valid replaces it.
        good = next((path for path in reversed(rest) if not damage(path)), None)
        if good is not None:
            kept = good
            _name_older(home, good)
    for old in rest:
        if old != kept and old not in newest:
            # Renamed first: a half deleted folder must not look complete.
            gone = old.with_name(old.name + PARTIAL)
            shutil.rmtree(gone, ignore_errors=True)
            old.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
    sync_folder(home)


def set_aside(folder: str | os.PathLike[str], after: int) -> Path | None:
    """Move the checkpoints of later steps into a folder of their own, which is returned; None if there are none.

    The newest is moved first: if this is interrupted at any point, what remains is a run up to some step.
    """
    home = Path(folder)
    later = [path for path in checkpoints(home) if _step(path) > after]
    if not later:
        return None
    number = 1
    while (home / f"{BRANCH}{number}").exists():
        number += 1
    branch = home / f"{BRANCH}{number}"
    branch.mkdir()
    for path in reversed(later):
        path.rename(branch / path.name)
    sync_folder(branch)
    sync_folder(home)
    return branch


def _step(path: Path) -> int:
    return int(path.name[5:])


def _older(home: Path) -> Path | None:
    with contextlib.suppress(OctoPipeError, UnicodeDecodeError):
        return home / read_bytes(home / OLDER, most_bytes=4096).decode().strip()
    return None


def _name_older(home: Path, path: Path) -> None:
    beside = home / (OLDER + PARTIAL)
    beside.write_text(path.name + "\n")
    beside.replace(home / OLDER)


def resolve(path: str | os.PathLike[str], step: int | None = None) -> Path:
    """Return a checkpoint that is named by its own folder or by the folder of its run: the one of a step, or the newest
    valid one."""
    if (Path(path) / RUN).is_file():
        if step is not None:
            raise OctoPipeError(f"{shown(path)} is one checkpoint; leave --step out, or name its run's folder")
        if why := damage(path, to_load=True):
            raise DamagedCheckpoint(f"{why}; use another checkpoint")
        return Path(path)
    if not checkpoints(path):
        refuse_dcp(path)
        raise OctoPipeError(f"{shown(path)}: no checkpoint there; name the folder that train --checkpoint wrote")
    found, problems = choose(path, step)
    for why in problems:
        log.warning("%s: skipped; %s is used, the newest valid checkpoint", why, found.name)
    return found


def refuse_dcp(folder: str | os.PathLike[str]) -> None:
    """Raise an error for a checkpoint of torch.distributed.checkpoint: its index is a pickle, which may execute code
    when it is read."""
    home = Path(folder)
    with contextlib.suppress(OSError):
        if (home / ".metadata").is_file() or next(home.glob("*.distcp"), None) is not None:
            raise OctoPipeError(
                f"{shown(folder)}: a folder of torch.distributed.checkpoint; its index is pickled and could run code, "
                "so it is not read: name the folder that train --checkpoint wrote"
            )


def nothing_to_resume(folder: str | os.PathLike[str]) -> OctoPipeError:
    """The error for a folder without checkpoints; one of them in the place of their folder is told."""
    path = Path(folder).absolute()
    if (path / RUN).exists() and path in checkpoints(path.parent):
        return OctoPipeError(f"{shown(folder)} is one checkpoint; give its folder: --checkpoint {shown(path.parent)}")
    return OctoPipeError(f"{shown(folder)}: no checkpoint to resume from; leave --resume out")


def choose(folder: str | os.PathLike[str], step: int | None = None) -> tuple[Path, list[str]]:
    """Return the checkpoint from which to continue (the one of a step, or the newest valid one), and what is wrong with
    newer ones."""
    found = checkpoints(folder)
    if not found:
        refuse_dcp(folder)
        raise nothing_to_resume(folder)
    if step is not None:
        path = next((p for p in found if _step(p) == step), None)
        if path is None:
            there = ", ".join(str(_step(p)) for p in found[-8:])
            raise OctoPipeError(f"{shown(folder)}: no checkpoint of step {step}; there are {there}")
        if why := damage(path, to_load=True):
            raise DamagedCheckpoint(f"{why}; choose another --resume-step")
        return path, []
    problems: list[str] = []
    for path in reversed(found):
        why = damage(path, to_load=True)
        if not why:
            return path, problems
        problems.append(why)
    raise DamagedCheckpoint(f"{problems[0]}; none of the {len(found)} checkpoints in {shown(folder)} is good")

"""Files that users hand over or ask for: read whole, written whole, or one clear line about what is wrong.

Knows: every way a path or a file can be bad. Does not know: what the object means.

>>> kind_of([1]), kind_of(None), kind_of(1.5)
('list', 'null', 'number')
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path

import msgspec

from octopipe.errors import OctoPipeError

MAX_FILE_BYTES = 16 << 20


def shown(path: str | os.PathLike[str]) -> str:
    """A path as it stands in an error line: always one printable line."""
    text = str(path)
    text = text if len(text) <= 200 else text[:200] + "..."
    return text if text.isprintable() else repr(text)


def read_bytes(path: str | os.PathLike[str], *, most_bytes: int = MAX_FILE_BYTES) -> bytes:
    """A regular file's bytes, or one line about what is wrong with the path."""
    name = shown(path)
    try:
        info = Path(path).stat()
        if stat.S_ISDIR(info.st_mode):
            raise OctoPipeError(f"{name} is a directory; name a JSON file in it")
        if not stat.S_ISREG(info.st_mode):
            raise OctoPipeError(f"{name} is not a regular file; name a JSON file")
        if info.st_size > most_bytes:
            raise OctoPipeError(f"{name} has {info.st_size} bytes; such a file has at most {most_bytes}")
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise OctoPipeError(f"{name}: no such file; check the path") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise OctoPipeError(f"{name}: cannot be read ({why}); check the path") from None


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write beside the target, then rename over it: an interrupted write leaves the old file whole."""
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    try:
        partial.write_bytes(data)
        partial.replace(target)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        with contextlib.suppress(OSError, ValueError):
            partial.unlink(missing_ok=True)
        raise OctoPipeError(f"{shown(path)}: cannot be written ({why}); check the folder") from None


def plain(value: object) -> object:
    """What JSON cannot say by itself: numpy numbers and arrays as plain numbers and lists, paths as text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def read_json_object(path: str | Path) -> dict[str, object]:
    """The JSON object in a file; anything else there raises one line that says what to do."""
    name, data = shown(path), read_bytes(path)
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise OctoPipeError(f"{name}: nested too deeply for a model file; flatten it") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        value = _lenient(data)
        if value is None:
            raise OctoPipeError(f"{name}: not valid JSON ({error}); write the file again") from None
    if not isinstance(value, dict):
        raise OctoPipeError(f"{name}: holds a JSON {kind_of(value)}; a model file is one object {{...}}")
    return value


def _lenient(data: bytes) -> object:
    """What Python's own decoder makes of it, or None.

    It takes NaN and Infinity, which are no JSON but which Python programs write: so the error that follows
    names the key that holds one instead of a byte offset.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def kind_of(value: object) -> str:
    """What JSON calls a value of this type."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def brief(value: object) -> str:
    """A value in an error line: short, even where it is a number of a thousand digits."""
    if isinstance(value, int) and abs(value) > 10**20:
        return "a huge number"
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."

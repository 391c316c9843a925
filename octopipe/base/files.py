"""Files that users pass or request: read completely, written atomically, or rejected with a one-line error.

Knows: every way in which a path, a file or a JSON text can be invalid. Does not know: what the object means.

A JSON object with a duplicate key is rejected, because decoders silently keep one of the two values. A file is written
next to its target and renamed over it, and only a regular file is ever replaced; for a symbolic link, the file it
points to is replaced.

>>> kind_of([1]), kind_of(None), kind_of(1.5)
('list', 'null', 'number')
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from octopipe.base.errors import OctoPipeError
from octopipe.base.limits import MAX_FILE_BYTES, MAX_VALUES, finite

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path as error messages show it: always one printable line, shortened if it is long."""
    text = str(path)
    text = text if len(text) <= 200 else text[:200] + "..."
    return text if text.isprintable() else repr(text)


def stem_of(path: str | os.PathLike[str]) -> str:
    """Return the name for an object read from this file; printable even if the file's name is not valid text."""
    return letters(Path(path).stem)


def letters(text: str) -> str:
    """Return the text with undecodable bytes (for example, in a file name) escaped, so that every output can show it.

    >>> letters("a" + chr(0xdcff))
    'a\\\\udcff'
    """
    return text.encode("utf-8", "backslashreplace").decode()


# -- reading -------------------------------------------------------------------------------------------


def read_bytes(path: str | os.PathLike[str], *, most_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the bytes of a regular file; raise OctoPipeError if the path is wrong or the file too large."""
    name = shown(path)
    try:
        # Open first and inspect the descriptor afterwards, so that both concern the same file. O_NONBLOCK: do not block
        # on a pipe.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        with open(handle, "rb") as file:
            info = os.fstat(handle)
            if stat.S_ISDIR(info.st_mode):
                raise OctoPipeError(f"{name} is a directory; name a JSON file in it")
            if not stat.S_ISREG(info.st_mode):
                raise OctoPipeError(f"{name} is not a regular file; name a JSON file")
            data = b"" if info.st_size > most_bytes else file.read(most_bytes + 1)
            size = max(info.st_size, len(data))
    except FileNotFoundError:
        raise OctoPipeError(f"{name}: no such file; check the path") from None
    except IsADirectoryError:
        raise OctoPipeError(f"{name} is a directory; name a JSON file in it") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise OctoPipeError(f"{name}: cannot be read ({_why(error)}); check the path") from None
    if size > most_bytes:
        raise OctoPipeError(f"{name} has {size} bytes; a file of this kind may have at most {most_bytes}")
    return data


def decode_text(data: bytes, where: str) -> str:
    """Return the text in the bytes of a file: UTF-8, or UTF-16 with a byte order mark, which PowerShell writes.

    >>> decode_text("a,b".encode("utf-8-sig"), "f") == decode_text("a,b".encode("utf-16"), "f") == "a,b"
    True
    """
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError:
        raise OctoPipeError(f"{where}: not a text in UTF-8; save it as UTF-8") from None


def read_toml(path: str | os.PathLike[str]) -> object:
    """Return the value of a small TOML file, or of a JSON file if its name says so."""
    data, where = read_bytes(path), shown(path)
    if str(path).endswith(".json"):
        return decode_json(data, where)
    try:
        return tomllib.loads(decode_text(data, where))
    except (ValueError, RecursionError) as error:  # a number of more digits than Python reads is a ValueError too
        raise OctoPipeError(f"{where}: not valid TOML ({_one_line(error)}); write the file again") from None


def decode_json(data: bytes | str, where: str, *, most_values: int = MAX_VALUES) -> object:
    """Return the value of a JSON text; raise OctoPipeError for duplicate keys or more values than `most_values`."""
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if not raw.strip():
        raise OctoPipeError(f"{where} is empty; write the file again")
    values = 1 + raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if values > most_values:
        raise OctoPipeError(f"{where}: up to {values} values; a file of this kind may have at most {most_values}")
    try:
        value = msgspec.json.decode(raw)
    except RecursionError:
        raise OctoPipeError(f"{where}: nested too deeply; flatten it") from None
    except (msgspec.MsgspecError, UnicodeError, ValueError) as error:
        value = _lenient(raw, where)
        if value is None:
            raise OctoPipeError(f"{where}: not valid JSON ({_one_line(error)}); write the file again") from None
        return value
    keys = _count_keys(value)
    if raw.count(b":") != keys and _STRING.sub(b"", raw).count(b":") != keys:
        raise OctoPipeError(f"{where}: {_twice(raw)}; keep one of the two")
    return value


def check_format(tag: object, known: str | tuple[str, ...], where: str) -> None:
    """Raise unless `tag` is a format that this version reads; the error for a newer version says so. `known`: the
    versions, the newest last."""
    versions = (known,) if isinstance(known, str) else known
    if tag in versions:
        return
    family = versions[-1].split("/")[0]
    if isinstance(tag, str) and tag.startswith(family + "/"):
        raise OctoPipeError(f"{where}: format {brief(tag)} is newer than {versions[-1]!r}; update octopipe")
    found = 'it has no "format"' if tag is None else f"its format is {brief(tag)}"
    raise OctoPipeError(f"{where}: {found}; expected {' or '.join(map(repr, versions))}")


def read_json_object(path: str | Path) -> dict[str, object]:
    """Return the JSON object in a file; raise OctoPipeError with one line if the file contains anything else."""
    name = shown(path)
    value = decode_json(read_bytes(path), name)
    if not isinstance(value, dict):
        raise OctoPipeError(f"{name}: holds a JSON {kind_of(value)}; a model file is one object {{...}}")
    return value


def read_numbers(path: str | os.PathLike[str]) -> list[float]:
    """Return the finite numbers in a file: a JSON list, or words on lines, of which everything after a `#` is ignored.
    The list is empty if the file contains anything else."""
    data = read_bytes(path)
    values: Iterable[object]
    if data.lstrip()[:1] == b"[":
        decoded = decode_json(data, shown(path))
        values = decoded if isinstance(decoded, list) else ()
    else:
        lines = decode_text(data, shown(path)).splitlines()
        values = (_number_of(word) for line in lines for word in line.split("#", 1)[0].split())
    found = []
    for value in values:  # a large file of something else is left at its first word
        number = finite(value)
        if number is None:
            return []
        found.append(number)
    return found


def _number_of(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _count_keys(value: object) -> int:
    """Return the number of keys in all nested objects; a list of numbers costs only one pass in C."""
    count, todo = 0, [value]
    while todo:
        here = todo.pop()
        inside = list(here.values()) if isinstance(here, dict) else here
        if not isinstance(inside, list):
            continue
        count += len(inside) if isinstance(here, dict) else 0
        if not {dict, list}.isdisjoint(map(type, inside)):
            todo += [item for item in inside if isinstance(item, dict | list)]
    return count


class _TwiceError(Exception):
    """A duplicate key; the argument is the key."""


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out: dict[str, object] = {}
    for key, value in pairs:
        if key in out:
            raise _TwiceError(key)
        out[key] = value
    return out


def _twice(raw: bytes) -> str:
    try:
        json.loads(raw, object_pairs_hook=_once)
    except _TwiceError as error:
        return f"the key {brief(error.args[0])} appears twice in one object"
    except (ValueError, RecursionError):
        pass
    return "a key appears twice in one object"


def _lenient(raw: bytes, where: str) -> object:
    """Decode with Python's own JSON decoder, or return None.

    It accepts NaN, Infinity and 1e400, which are not valid JSON but which Python programs write. The error that the
    caller raises later can then name the key with such a value instead of a byte offset. Unpaired surrogates, which
    Python's decoder also accepts, are still rejected.
    """
    try:
        value = json.loads(raw, object_pairs_hook=_once)
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except _TwiceError as error:
        raise OctoPipeError(
            f"{where}: the key {brief(error.args[0])} appears twice in one object; keep one of the two"
        ) from None
    except (ValueError, RecursionError):
        return None


# -- writing -------------------------------------------------------------------------------------------


def check_target(path: str | os.PathLike[str]) -> Path:
    """Return the file that writing to `path` would create or replace, with links resolved.

    Raises OctoPipeError unless it is a regular file, or does not exist yet, in a folder that can be written.
    """
    name = shown(path)
    try:
        if _through_a_device(path):
            raise OctoPipeError(f"{name} is a device, which is never overwritten; give the name of a file")
        target = Path(os.path.realpath(path, strict=False))
        if os.fspath(path) == "" or target.is_dir():
            raise OctoPipeError(f"{name} is a folder; name a file")
        if os.path.lexists(target) and not stat.S_ISREG(target.lstat().st_mode):
            raise OctoPipeError(f"{name} is not a regular file, and is therefore not overwritten; give another name")
        if not target.parent.is_dir():
            raise OctoPipeError(f"{name}: cannot be written: its folder does not exist; create it first")
        # The file is written beside its target and renamed, so the folder's permissions decide, not the file's.
        if not os.access(target.parent, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            raise OctoPipeError(f"{name}: cannot be written: its folder is read-only for this user; name another one")
    except (OSError, ValueError) as error:
        raise OctoPipeError(f"{name}: cannot be written ({_why(error)}); check the folder") from None
    return target


def _through_a_device(path: str | os.PathLike[str]) -> bool:
    """Whether the path, or a link on it, is in a folder of devices or open files (/dev, /proc, /sys)."""
    at = os.path.abspath(path)
    for _ in range(40):  # as many links as the kernel follows
        if at.startswith(("/dev/", "/proc/", "/sys/")) and not at.startswith("/dev/shm/"):
            return True
        if not os.path.islink(at):
            return False
        at = os.path.abspath(os.path.join(os.path.dirname(at), os.readlink(at)))
    return True


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file next to the target and rename it, so that an interrupted write leaves the old file intact."""
    target = check_target(path)
    # The name is unpredictable and opened with O_EXCL, so that a link planted in advance is not followed.
    beside = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.partial")
    try:
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(handle, "wb") as file:
            if mode is not None:
                os.fchmod(handle, mode)
            file.write(data)
            file.flush()
            os.fsync(handle)
        beside.replace(target)
    except (OSError, ValueError) as error:
        raise OctoPipeError(f"{shown(path)}: cannot be written ({_why(error)}); check the folder") from None
    finally:
        with contextlib.suppress(OSError, ValueError):
            beside.unlink(missing_ok=True)


def plain(value: object) -> object:
    """Convert values that JSON cannot encode directly: numpy numbers and arrays to numbers and lists, paths to text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


# -- words ---------------------------------------------------------------------------------------------


def kind_of(value: object) -> str:
    """Return JSON's name for the type of a value."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def brief(value: object) -> str:
    """Format a value for an error message: short, even if it is a number with a thousand digits."""
    if isinstance(value, int) and abs(value) > 10**20:
        return "a huge number"
    try:
        text = repr(value)
    except ValueError:  # a list with a number of more digits than Python converts to text
        return f"a {kind_of(value)} with a huge number"
    return text if len(text) <= 40 else text[:40] + "..."


def _why(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _one_line(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:200]

"""The folder where compiled code is kept between runs; as it is executed, only files that are provably ours are read.

Knows: which folder is private, and how a file is proved to be what its name says. Does not know: what code is.

The folder is opened once per access and everything in it is named relative to that descriptor, so nobody can replace
the folder after its owner and permissions were checked. A file begins with a digest of its own name and of its content,
so a file that was truncated, renamed or swapped with another one is rejected. A file or folder that fails a check is
neither used nor repaired: the kernel is compiled in memory, and one warning names the folder.

The folder is the one that OCTOPIPE_CACHE_DIR names, else the user's cache folder, else a private one in the folder for
temporary files. If there is none (or the system cannot open files relative to a folder, as on Windows) nothing is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

DAY_S = 24 * 3600.0
UNUSED_S = 30 * DAY_S
"""Code that has not been used for this long is removed."""
MAX_CODE_BYTES = 64 << 20
"""The largest file that is read; no kernel's code comes near this size."""
SUFFIXES = (".o", ".k")
"""The suffixes of object files, and of notes about them."""
_NAME = re.compile(r"[\w.-]+")
"""A plain file name, so that a name read from a note cannot lead out of the folder."""
_HEAD = hashlib.sha256().digest_size
_PRIVATE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_log = logging.getLogger("octopipe.compile")


def kept(name: str) -> bytes | None:
    """Return the content that was kept under this name, or None if there is no intact file of ours."""
    with _folder() as folder:
        if folder is None or not _NAME.fullmatch(name):
            return None
        try:
            # O_NONBLOCK: do not block if there is a pipe under this name.
            handle = os.open(name, os.O_RDONLY | _PRIVATE | os.O_NONBLOCK, dir_fd=folder)
        except OSError:
            return None
        with open(handle, "rb") as file:
            info = os.fstat(handle)
            if not stat.S_ISREG(info.st_mode) or not _ours(info) or info.st_size > MAX_CODE_BYTES:
                _refused(f"{name} in the folder for compiled code is not a private file of this user")
                return None
            found = file.read(MAX_CODE_BYTES + 1)
        content = found[_HEAD:]
        if found[:_HEAD] != _digest(name, content):
            return None
        if time.time() - info.st_mtime > DAY_S:
            with contextlib.suppress(OSError):
                os.utime(name, dir_fd=folder, follow_symlinks=False)
        return content


def keep(name: str, content: bytes) -> None:
    """Store this content under this name; errors (a full disk, a missing folder) are ignored."""
    with _folder() as folder:
        if folder is None:
            return
        beside = f".{secrets.token_hex(8)}.partial"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PRIVATE
            with open(os.open(beside, flags, 0o600, dir_fd=folder), "wb") as file:
                file.write(_digest(name, content) + content)
            os.replace(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(beside, dir_fd=folder)
        with contextlib.suppress(OSError):
            _prune(folder)


def _digest(name: str, content: bytes) -> bytes:
    """Return a digest that ties a content to the name under which it is kept."""
    return hashlib.sha256(b"octopipe kernel\0" + name.encode() + b"\0" + content).digest()


# -- the folder ----------------------------------------------------------------------------------------


def _folders() -> Iterator[tuple[str, bool]]:
    """Yield the folders for compiled code, and whether the last component of each path may be a link."""
    named = os.environ.get("OCTOPIPE_CACHE_DIR", "")
    if named:
        yield named, True
    home = os.environ.get("XDG_CACHE_HOME", "") or os.path.join(os.path.expanduser("~"), ".cache")
    if os.path.isabs(home):
        yield os.path.join(home, "octopipe"), True
    # Anybody may put a link into this folder, so links are not followed.
    yield os.path.join(tempfile.gettempdir(), f"octopipe-kernels-{_user()}"), False


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _ours(info: os.stat_result) -> bool:
    """Whether the file belongs to this user and nobody else may write to it."""
    return info.st_uid == _user() and not info.st_mode & 0o022


@contextlib.contextmanager
def _folder() -> Iterator[int | None]:
    """Yield a descriptor of the first folder that is private and writable, or None if there is none.

    It is opened again for every access: if it were kept open, other code in this process could close it, and its number
    would then refer to another file.
    """
    folder = None
    if os.open in os.supports_dir_fd and os.rename in os.supports_dir_fd:
        folder = next((found for place in _folders() if (found := _opened(*place)) is not None), None)
    try:
        yield folder
    finally:
        if folder is not None:
            os.close(folder)


def private_folder() -> Path | None:
    """Return the first cache folder that is private to this user, or None. For data that is never executed."""
    for path, may_be_link in _folders():
        found = _opened(path, may_be_link)
        if found is not None:
            os.close(found)
            return Path(os.path.realpath(path) if may_be_link else path)
    return None


def _opened(path: str, may_be_link: bool) -> int | None:
    try:
        place = os.path.realpath(path) if may_be_link else path
        os.makedirs(os.path.dirname(os.path.abspath(place)), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(place, 0o700)
        folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | _PRIVATE)
    except NotADirectoryError:
        _refused(f"{path} is a link or a file")
        return None
    except (OSError, ValueError):
        if not may_be_link and os.path.islink(path):
            _refused(f"{path} is a link")
        return None
    info = os.fstat(folder)
    if not _ours(info):
        _refused(f"{path} belongs to another user, or others may write to it")
    elif os.access(".", os.W_OK | os.X_OK, dir_fd=folder):
        return folder
    os.close(folder)
    return None


@cache
def _refused(what: str) -> None:
    """Log a warning, once per process and reason."""
    _log.warning("%s; compiled code is not taken from there (set OCTOPIPE_CACHE_DIR to a private folder)", what)


def _prune(folder: int) -> None:
    """Remove files that were not used for a month, such as an older version's. Only processes that compile do so."""
    for name in os.listdir(folder):
        if name.endswith(SUFFIXES):
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if time.time() - info.st_mtime > UNUSED_S:
                os.unlink(name, dir_fd=folder)

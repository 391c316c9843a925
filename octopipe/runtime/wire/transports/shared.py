"""Memory shared by the ranks of one host, which is freed with the last of them, however they end.

Knows: how such memory is created, announced to another process and opened there. Does not know: what it contains.

The memory has no name in any folder: it is a file that exists only as long as some process has it open, and another
process opens it through the creator's entry in /proc. A rank that is killed at any moment therefore leaves nothing
behind. On systems without such files, named files are used, which their creator removes once all ranks have opened
them.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import NamedTuple

FOLDER = "/dev/shm"


class Address(NamedTuple):
    """The path under which another process can open the memory, with values that identify it."""

    path: str
    home: str
    """Identifies the host and the process namespace in which `path` is valid."""
    device: int
    inode: int


def make_shared(nbytes: int, *, reserve: int) -> tuple[int, Address]:
    """A file descriptor of this number of zero bytes, of which `reserve` are allocated at once (OSError if there is not
    enough memory)."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("octopipe", os.MFD_CLOEXEC)
        path = f"/proc/{os.getpid()}/fd/{file}"
    else:
        file, path = tempfile.mkstemp(prefix="octopipe-", dir=FOLDER if os.path.isdir(FOLDER) else None)
    try:
        os.ftruncate(file, nbytes)
        if hasattr(os, "posix_fallocate"):  # otherwise, writing to a sparse file can fail later
            os.posix_fallocate(file, 0, reserve)
        status = os.fstat(file)
    except OSError:
        os.close(file)
        forget(path)
        raise
    return file, Address(path, _home(), status.st_dev, status.st_ino)


def open_shared(address: Address) -> int:
    """A file descriptor of another process's memory; OSError if it does not belong to a process of this host."""
    if address.home != _home():
        raise FileNotFoundError(f"{address.path} belongs to another host or container")
    file = os.open(address.path, os.O_RDWR | os.O_CLOEXEC)
    status = os.fstat(file)
    if (status.st_dev, status.st_ino) != (address.device, address.inode):
        os.close(file)
        raise FileNotFoundError(f"{address.path} is another file")
    return file


def forget(path: str) -> None:
    """Remove the name of the memory, if it has one."""
    if not path.startswith("/proc/"):
        with contextlib.suppress(OSError):
            os.unlink(path)


def _home() -> str:
    """A value that is equal for processes which can open each other's files."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return os.uname().nodename

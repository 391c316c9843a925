"""The exit code and the error line for unexpected errors: missing machine resources are named, all others are internal.

Knows: how Python, numpy, torch and the system report that memory, descriptors, processes or disk space have run out.
Does not know: any command.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

BAD_INPUT, FAULT = 2, 70
EXTRAS = {
    "torch": "torch",
    "ortools": "exact",
    "transformers": "hf",
    "resvg_py": "png",
    **dict.fromkeys(("tokenizers", "datasets", "tensorboard"), "train"),
}
"""Optional packages, and the extra of octopipe that installs each."""
NO_MEMORY = "out of memory; give fewer micro-batches or ranks, or a shorter plan, or raise the limit (ulimit -v)"
NO_PROCESSES = "no more processes or threads can be started; raise the limit (ulimit -u), or end some"
_OUT_OF_MEMORY = (
    "cannot allocate memory",
    "can't allocate memory",
    "out of memory",
    "bad_alloc",
    "failed to map segment",
)
"""Texts by which libraries report a lack of memory other than with MemoryError."""
_PER_FILE = {
    errno.ENOSPC: "no space is left on the device; free some, or name another folder (TMPDIR for temporary files)",
    errno.EDQUOT: "the disk quota is used up; free some space, or name another folder",
    errno.EROFS: "the file system is read-only; name another folder (TMPDIR for temporary files)",
    errno.EACCES: "permission denied; name another one, or change its permissions",
    errno.EPERM: "not permitted; name another one, or change its permissions",
    errno.EIO: "the device reports an error",
    errno.EBADF: "it is closed",
}


def explained(error: Exception, words: Sequence[str]) -> tuple[int, str]:
    """Return the exit code and the error line for an exception that no verb handles."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.split(".")[0]
        if package in EXTRAS:
            return BAD_INPUT, f'{words[0]} needs {package}; install it: pip install "octopipe[{EXTRAS[package]}]"'
    lack = _lacking(error)
    if lack:
        return BAD_INPUT, lack
    import shlex

    why = " ".join(str(error).split())[:200]
    again = shlex.join(["octopipe", *words[:1], "--debug", *words[1:]])
    return FAULT, (
        f"{type(error).__name__}{': ' if why else ''}{why}{_place(error)}: an internal error of octopipe; "
        f"please report it with what `{again}` prints"
    )


def _lacking(error: BaseException | None) -> str:
    """Return a line about the resource that an error, or one of its causes, reports as exhausted, or ''."""
    for _ in range(10):
        if error is None:
            break
        text = str(error).lower()
        number = error.errno if isinstance(error, OSError) else None
        if isinstance(error, MemoryError) or number == errno.ENOMEM or any(w in text for w in _OUT_OF_MEMORY):
            return NO_MEMORY
        if number in (errno.EMFILE, errno.ENFILE) or "too many open files" in text:
            return f"too many open files{_limit()}; raise the limit (ulimit -n 1024)"
        if number == errno.EAGAIN or "can't start new thread" in text:
            return NO_PROCESSES
        if "no usable temporary directory" in text:
            return "no folder for temporary files can be written; set TMPDIR to one that can"
        if number in _PER_FILE:
            name = error.filename if isinstance(error, OSError) and error.filename else "an output"
            return f"{os.fsdecode(name) if isinstance(name, str | bytes) else name} cannot be used: {_PER_FILE[number]}"
        error = error.__cause__ or error.__context__
    return ""


def _limit() -> str:
    try:
        import resource

        return f" (this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    except (ImportError, OSError, ValueError):
        return ""


def _place(error: Exception) -> str:
    """Return the innermost frame of this package in the traceback, as text."""
    place, at = "", error.__traceback__
    while at is not None:
        folder, name = os.path.split(at.tb_frame.f_code.co_filename)
        if os.sep + "octopipe" in folder:
            place = f" in {os.path.join(os.path.basename(folder), name)} line {at.tb_lineno}"
        at = at.tb_next
    return place

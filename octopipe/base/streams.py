"""The three standard streams, any of which may be closed.

Knows: descriptors 0 to 2. Does not know: what is printed.
"""

from __future__ import annotations

import os
import sys


def open_standard_streams() -> None:
    """If stdin, stdout or stderr is closed, open the null device in its place.

    Otherwise the next file or socket that is opened gets its number, and output to stdout would be written into it.
    Python's own objects for closed streams are None; they get the null device too, so that a verb can write to them as
    to any other stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # os.open returns the lowest free number, which is this one
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - it stays open like any stream

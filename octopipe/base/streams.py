"""The three standard streams, any of which may be closed.

Knows: descriptors 0 to 2. Does not know: what is printed.
"""

from __future__ import annotations

import os


def open_standard_streams() -> None:
    """Where stdin, stdout or stderr was closed, open nothing in its place.

    Otherwise the next file or socket gets its number, and whoever writes to stdout writes into that.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free is this one

"""The start time of this process, for budgets that count from the start of a command, and lengths of time in words.

Knows: how Linux reports the start of a process, and how people write a length of time. Does not know: budgets. On other
systems, the time at which this module is first imported is used.
"""

from __future__ import annotations

import math
import os
import re
import time
from functools import cache

from octopipe.base.errors import OctoPipeError

_IMPORTED = time.monotonic()
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "ms": 1e-3}


def seconds_of(given: float | str) -> float:
    """Return a length of time in seconds, given as a number or as text such as "2m".

    >>> seconds_of(10), seconds_of("2m"), seconds_of("500ms")
    (10.0, 120.0, 0.5)
    """
    if isinstance(given, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(ms|s|min|m|h|)\s*", given.lower())
        value = float(match[1]) * _UNITS[match[2]] if match else math.nan
        if not 0 < value <= 1e7:
            raise OctoPipeError(f"{given[:40]!r} is not a time; write 30s, 2m or 1h")
        return value
    return float(given)


@cache
def process_began() -> float:
    """Return the time at which this process started, on the clock of `time.monotonic`."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return _IMPORTED
    return min(time.monotonic() - age, _IMPORTED) if age >= 0 else _IMPORTED

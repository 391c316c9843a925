"""The start time of this process, for budgets that count from the start of a command.

Knows: how Linux reports the start of a process. Does not know: budgets. On other systems, the time at which this module
is first imported is used.
"""

from __future__ import annotations

import os
import time
from functools import cache

_IMPORTED = time.monotonic()


@cache
def process_began() -> float:
    """On the clock of `time.monotonic`."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return _IMPORTED
    return min(time.monotonic() - age, _IMPORTED) if age >= 0 else _IMPORTED

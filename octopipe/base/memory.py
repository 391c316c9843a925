"""How much memory is available to this process.

Knows: the limits of the system, of the control group and of the process. Does not know: what the memory is for.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")


def free_memory_bytes() -> float:
    """Return the memory that can be allocated without swapping; infinite if the system states no limit.

    >>> free_memory_bytes() > 0
    True
    """
    return min(_system(), _group("memory.max", "memory.current"), _own_limit())


def _system() -> float:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return math.inf


def _group(limit: str, used: str) -> float:
    """Return what is left below the limit of the cgroup (version 2)."""
    with contextlib.suppress(OSError, ValueError):
        return max(0.0, float((_GROUP / limit).read_text()) - float((_GROUP / used).read_text()))
    return math.inf


def _own_limit() -> float:
    """Return what is left below the limit of the address space (ulimit -v)."""
    with contextlib.suppress(ImportError, OSError, ValueError, IndexError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            return max(0.0, float(limit - pages * os.sysconf("SC_PAGE_SIZE")))
    return math.inf

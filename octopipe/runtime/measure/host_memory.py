"""Available memory of this host, or of the container of this process.

Knows: the values reported by Linux and by control groups. Does not know: what needs memory (`memory_check.py`). Imports
no torch.
"""

from __future__ import annotations

import os
from pathlib import Path


def free_host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the free memory of this host, or of the container of this process; None if it is not known."""
    found = [b for b in (_available(proc / "meminfo"), _cgroup_free(proc, cgroups)) if b is not None]
    return min(found, default=None)


def _available(meminfo: Path) -> float | None:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, AttributeError):
        return None


def _cgroup_free(proc: Path, cgroups: Path) -> float | None:
    """Return the free memory under the tightest limit of the control groups of this process; reclaimable page cache
    counts as free."""
    try:
        entries = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
    except OSError:
        return None
    found: list[float] = []
    for number, controllers, path in (entry for entry in entries if len(entry) == 3):
        if number == "0":
            root, limit, used = cgroups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, used = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        here = root / path.lstrip("/")
        for folder in (here, *here.parents):
            found += _room(folder, limit, used)
            if folder == root:
                break
    return min(found, default=None)


def _room(folder: Path, limit: str, used: str) -> list[float]:
    try:
        most = int((folder / limit).read_text())
        now = int((folder / used).read_text())
        cache = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
        now -= next((int(n) for name, n in cache if name in ("inactive_file", "total_inactive_file")), 0)
        return [float(max(0, most - now))] if most < 1 << 60 else []
    except (OSError, ValueError):
        return []

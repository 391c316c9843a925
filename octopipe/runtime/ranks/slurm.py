"""Ranks started by Slurm: reads srun's variables and sets those of torch.distributed, as torchrun would.

Knows: SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, lists of nodes and of tasks per node. Does not know: torch, sockets.

    srun --ntasks 16 octopipe train ...            adopts them by itself
    octopipe.runtime.ranks.slurm.adopt()                 in a script of your own, before init_process_group

>>> found = environment({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
...                      "SLURM_JOB_NODELIST": "gpu[03-04]", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_ID": "77"})
>>> [found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
['5', '8', '1', '4', 'gpu03', '20077']
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from octopipe.base.errors import OctoPipeError

FIRST_PORT, PORTS = 20_000, 20_000
"""Range of the port, which depends on the job's number so that jobs on one node use different ones."""


def adopt() -> bool:
    """Set torch.distributed's variables if srun has started this process; returns whether it has."""
    found = environment(os.environ)
    for name, value in found.items():
        os.environ.setdefault(name, value)
    return bool(found)


def environment(known: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would have set; empty if Slurm has started only one task, or if something else has
    started the ranks.

    A batch script runs as a single task, whatever number of tasks the job has; only srun starts several.
    """
    if "RANK" in known or "SLURM_PROCID" not in known:
        return {}
    if known.get("ENVIRONMENT") == "BATCH" and not known.keys() & {"SLURM_STEP_ID", "SLURM_STEPID"}:
        return {}
    size = _number(known, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", default="1")
    if size == 1:
        return {}
    rank = _number(known, "SLURM_PROCID")
    if rank >= size:
        raise OctoPipeError(f"SLURM_PROCID is {rank} of {size} tasks; start the ranks with srun")
    hosts = _first(known, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    out = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(_number(known, "SLURM_LOCALID", default="0"))}
    here = _tasks_here(known)
    if here is not None:
        out["LOCAL_WORLD_SIZE"] = str(here)
    if "MASTER_ADDR" not in known:
        if not hosts:
            raise OctoPipeError("Slurm names no nodes (SLURM_JOB_NODELIST); set MASTER_ADDR to the first rank's host")
        out["MASTER_ADDR"] = first_host(hosts)
    if "MASTER_PORT" not in known:
        job = _number(known, "SLURM_JOB_ID", "SLURM_JOBID", default="0")
        step = _number(known, "SLURM_STEP_ID", "SLURM_STEPID", default="0")
        out["MASTER_PORT"] = str(FIRST_PORT + (job + 101 * step) % PORTS)
    return out


def first_host(nodes: str) -> str:
    """The first name of a list of nodes as Slurm writes it.

    >>> first_host("gpu[07,09-12],other3"), first_host("rack2-n[001-004]-ib"), first_host("alone")
    ('gpu07', 'rack2-n001-ib', 'alone')
    """
    match = re.match(r"\s*([^\[\],\s]*)(?:\[([^\]]*)\])?([^\[\],\s]*)", nodes)
    name, inside, rest = match.groups() if match else ("", None, "")
    if inside is not None:
        name += re.split(r"[,-]", inside)[0]
    if not name + rest:
        raise OctoPipeError(f"{nodes[:60]!r} is not a list of Slurm nodes; set MASTER_ADDR to the first rank's host")
    return name + rest


def _tasks_here(known: Mapping[str, str]) -> int | None:
    """The number of tasks on this node, from a list such as 4(x3),2."""
    text = _first(known, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if not text:
        return None
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip())
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(known, "SLURM_NODEID", default="0")
    return counts[node] if node < len(counts) else None


def _first(known: Mapping[str, str], *names: str) -> str:
    return next((known[name] for name in names if known.get(name)), "")


def _number(known: Mapping[str, str], *names: str, default: str = "") -> int:
    text = _first(known, *names) or default
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise OctoPipeError(f"{names[0]} is {text[:40]!r}; expected a whole number: start the ranks with srun")
    return int(text)

"""The search's kernels made ready before a clock starts: a budget is for searching, not for compiling.

Knows: which kernels a search calls, in four groups, and that a second process can compile some of them meanwhile. Does
not know: what they find. Where their code is kept from an earlier run all this takes a moment.

Otherwise this process compiles the kernels of structures while a second one compiles those of plans (bounds, the
simulator), which is what a search needs to begin; the second process goes on with those of orders and of published
systems, which the search waits for when it comes to them (`wait_for`). Where no process can be started, or code cannot
be kept, this one compiles everything.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache

import numpy as np

from octopipe._compile import usable_cores
from octopipe.bounds import lower_bound
from octopipe.cost import CostTable
from octopipe.errors import OctoPipeError
from octopipe.simulator import makespan_ms, simulate
from octopipe.systems import build_plan
from octopipe.tuner.core.anneal import balance, walk
from octopipe.tuner.core.follow import polish
from octopipe.tuner.core.problem import make_problem, make_rng
from octopipe.tuner.encode import arrays_of
from octopipe.tuner.polish import Polisher
from octopipe.tuner.population import Judge
from octopipe.tuner.starts import Starts


def _tiny() -> CostTable:
    return CostTable.uniform(num_layers=4, activation_bytes=1.0).replace(
        rank_memory_bytes=(1e3,), forward_ms=np.array([1.0, 2.0, 1.0, 3.0])
    )


def _structures() -> None:
    Starts(Judge(make_problem(_tiny(), 2, 2), 4, make_rng(0)), (0, 0)).draw(False)


def _plans() -> None:
    costs = _tiny()
    lower_bound(costs, 2, 2)
    simulate(build_plan("gpipe", costs, 2, 2), costs)


def _orders() -> None:
    costs = _tiny()
    problem, plan = make_problem(costs, 2, 2), build_plan("gpipe", costs, 2, 2)
    Polisher(problem, 4, make_rng(0), *arrays_of(problem, 4, plan)).run(1, 0.0)
    makespan_ms(plan, costs)


def _systems() -> None:
    for name in ("zb-v", "adapipe", "chimera"):
        try:
            build_plan(name, _tiny(), 2, 4, split_backward=True)
        except OctoPipeError:
            continue


GROUPS: dict[str, Callable[[], None]] = {
    "structures": _structures,
    "plans": _plans,
    "orders": _orders,
    "systems": _systems,
}
_awaited: dict[str, threading.Event] = {}
"""Groups that a second process is compiling; set when it is done."""


@cache
def compile_search() -> None:
    """Compile or load what a search needs to begin; begin to compile the rest."""
    others = [name for name in GROUPS if name != "structures"]
    begun = not _kept() and usable_cores() > 1 and _begin_helper(others)
    for name in ("structures", "plans") if begun else GROUPS:
        wait_for(name)


def ready(name: str) -> bool:
    """Can a group's kernels be had without waiting for another process?"""
    return name not in _awaited or _awaited[name].is_set()


def wait_for(name: str) -> None:
    """Return when a group's kernels are compiled and loaded."""
    if name in _awaited:
        _awaited[name].wait()
    _load(name)


@cache
def _load(name: str) -> None:
    """Call a group's kernels once: what is kept is loaded, what is not is compiled."""
    GROUPS[name]()


def _kept() -> bool:
    """Is the kernels' code there from an earlier run? Yes as well where it could not be kept."""
    for kernel in (walk, balance, polish):
        file = getattr(kernel._cache, "_cache_file", None)
        try:
            if file is not None and not file._load_index():
                return False
        except Exception:  # a damaged index: numba compiles again and replaces it
            return False
    return True


def _begin_helper(names: list[str]) -> bool:
    """Let a second process compile these groups, one after another."""
    if not sys.executable:
        return False
    try:
        helper = subprocess.Popen(
            [sys.executable, "-m", "octopipe.tuner.warm", *names],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
    except OSError:
        return False
    _awaited.update({name: threading.Event() for name in names})

    def listen() -> None:
        assert helper.stdout is not None
        for line in helper.stdout:
            if line.strip() in _awaited:
                _awaited[line.strip()].set()
        helper.wait()
        for event in _awaited.values():  # whatever it could not do is done here when it is needed
            event.set()

    threading.Thread(target=listen, daemon=True).start()
    return True


if __name__ == "__main__":
    for _name in sys.argv[1:]:
        GROUPS[_name]()
        with contextlib.suppress(OSError):  # who asked may have ended; the next run is glad of the rest
            print(_name, flush=True)

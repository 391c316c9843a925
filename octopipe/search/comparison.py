"""Every system on one model, side by side.

Knows: how systems are run on all cores, what of a timeline is compared, and which result comes first. Does not
know: how results are shown (verbs/compare.py) or what any system does.

A system whose constraints do not hold, or that finds no plan that fits, is listed with its reason.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octopipe.base.display import html_of, one_line
from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.search.recompute import Price, plan_under
from octopipe.search.systems.bpipe import balanced_peak_bytes
from octopipe.search.systems.registry import build_plan, get_system, systems
from octopipe.simulation.bounds.bounds import PlanClass, lower_bound_ms
from octopipe.simulation.lowering import Channel
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import GIB, ROUNDING

REFERENCE = "1f1b"
"""Speed-ups are relative to this system under the same options."""
LONGEST_FIRST = ("tessel", "optpipe", "dynapipe", "zb-1p", "zb-2p", "adapipe")
"""Systems that may search for seconds; they are started first."""
Progress = Callable[[str, int, int], None]
"""(the system just finished, systems finished, all systems)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one system, or the reason why it did not run."""

    system: str
    title: str = ""
    reason: str = ""
    """Why there is no plan; empty where there is one."""
    step_ms: float = float("nan")
    speedup: float | None = None
    """Speed relative to 1F1B; None if 1F1B has no plan."""
    bubble_ratio: float = float("nan")
    makespan_ms: float = float("nan")
    span_ms: float = float("nan")
    peak_memory_gib: tuple[float, ...] = ()
    """Peak memory per rank, as in the JSON of every command."""
    max_memory_gib: float = float("nan")
    """The largest peak of all ranks."""
    fits: bool = False
    tokens_per_gpu_per_second: float | None = None
    mfu: float | None = None
    communications: int = 0
    overlapped: int = 0
    overlap_rate: float = float("nan")
    exchange_hidden: float | None = None
    """The share of the experts' exchange that is hidden behind computation; None without an exchange."""
    stages: int = 0
    splits_backward: bool = False
    micro_batches: int = 0
    planning_s: float = float("nan")
    plan: Plan | None = field(default=None, repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """The JSON of one row."""
        if self.reason:
            return {"system": self.system, "reason": self.reason}
        names = [n for n in self.__slots__ if n not in ("reason", "plan", "title")]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison:
    """All results, the best first: plans that fit by step time, then plans that do not fit, then systems that did not
    run."""

    model: str
    num_ranks: int
    num_micro_batches: int
    split_backward: bool
    lower_bound_ms: float
    """No plan of the class `bound_of` is faster than this; a system that holds layers on two ranks may be faster."""
    results: tuple[Result, ...]
    bound_of: PlanClass = field(default_factory=PlanClass)
    setup: Setup | None = None
    interrupted: bool = False
    """Whether the comparison was interrupted before all systems had run."""

    def __repr__(self) -> str:
        ran = [r for r in self.results if not r.reason]
        best = f"{ran[0].system} {ran[0].step_ms:.1f} ms" if ran and ran[0].fits else "nothing fits"
        sizes = f"{self.num_ranks} ranks, {self.num_micro_batches} micro-batches"
        return one_line("Comparison", f"{len(ran)} systems on {self.model}", sizes, f"best {best}")

    def _repr_html_(self) -> str | None:
        return html_of(self)

    def as_dict(self) -> dict[str, Any]:
        return {
            "interrupted": self.interrupted,
            "model": self.model,
            "pp": self.num_ranks,
            "micro_batches": self.num_micro_batches,
            "setup": None if self.setup is None else self.setup.as_dict(),
            "split_backward": self.split_backward,
            "lower_bound_ms": self.lower_bound_ms,
            "bound_of": self.bound_of.as_dict(),
            "results": [result.as_dict() for result in self.results],
        }


def compare(
    costs: CostTable,
    num_ranks: int,
    num_micro_batches: int,
    *,
    names: Sequence[str] | None = None,
    split_backward: bool = False,
    recompute: str = "none",
    price: Price | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    own: Mapping[str, tuple[CostTable, int]] | None = None,
    channel: Channel = "directed",
    processes: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Run the named systems (all, if none are named) on all cores.

    `split_backward` splits B into I and W for systems that do not (as the paper does for its comparison). `recompute`
    (full or auto) recomputes for systems that do not decide that themselves, with `price` for the costs of every mode.
    `options` are options of single systems: {"tessel": {"time_limit_s": 5}}. `own` gives the costs and the number of
    micro-batches of those systems that form their own micro-batches from the same sequences.
    """
    wanted = list(dict.fromkeys(systems() if names is None else names))
    for name in wanted:
        get_system(name)
    # Systems that search for seconds start first, so that no core waits for them at the end.
    queue = sorted(dict.fromkeys([*wanted, REFERENCE]), key=lambda name: name not in LONGEST_FIRST)
    settings = {name: dict((options or {}).get(name, {})) for name in queue}
    prices = price or _Fixed(costs)
    task = _Task(costs, num_ranks, num_micro_batches, split_backward, channel, recompute, prices, own or {})
    done: dict[str, Result] = {}
    interrupted = False
    try:
        for result in _run_all(task, settings, processes):
            done[result.system] = result
            if progress is not None:
                progress(result.system, len(done), len(queue))
    except KeyboardInterrupt:  # what is finished is kept
        if not done:
            raise
        interrupted = True
        for name in queue:
            left = Result(system=name, title=get_system(name).title, reason="interrupted before its end")
            done.setdefault(name, left)
    reference = done[REFERENCE]
    ranked = sorted((_with_speedup(done[name], reference) for name in wanted), key=_rank)
    return Comparison(
        model=costs.model,
        num_ranks=num_ranks,
        num_micro_batches=num_micro_batches,
        split_backward=split_backward,
        lower_bound_ms=lower_bound_ms(costs, num_ranks, num_micro_batches),
        results=tuple(ranked),
        setup=costs.setup,
        interrupted=interrupted,
    )


def _rank(result: Result) -> tuple[bool, bool, float]:
    return bool(result.reason), not result.fits, result.step_ms if not result.reason else 0.0


def _with_speedup(result: Result, reference: Result) -> Result:
    if result.reason or reference.reason or result.step_ms <= 0:
        return result
    values = {name: getattr(result, name) for name in result.__slots__}
    return Result(**values | {"speedup": reference.step_ms / result.step_ms})


@dataclass(frozen=True, slots=True)
class _Fixed:
    """A `Price` that returns the same costs for every mode."""

    costs: CostTable

    def __call__(self, mode: str, layers: int | None = None, /) -> CostTable:
        return self.costs


@dataclass(frozen=True, slots=True)
class _Task:
    costs: CostTable
    num_ranks: int
    num_micro_batches: int
    split_backward: bool
    channel: Channel
    recompute: str
    price: Price
    own: Mapping[str, tuple[CostTable, int]]

    def build(self, name: str, options: Mapping[str, Any], costs: CostTable) -> Plan:
        split = self.split_backward or None
        count = self.own[name][1] if name in self.own else self.num_micro_batches
        return build_plan(name, costs, self.num_ranks, count, split_backward=split, **options)

    def run(self, name: str, options: Mapping[str, Any]) -> Result:
        entry = get_system(name)
        began = time.perf_counter()
        try:
            plan, costs = plan_under(
                "none" if name in self.own else self.recompute,
                lambda table: self.build(name, options, table),
                _Fixed(self.own[name][0]) if name in self.own else self.price,
            )
            took = time.perf_counter() - began
            timeline = simulate(plan, costs, channel=self.channel)
        except OctoPipeError as error:
            return Result(system=name, title=entry.title, reason=str(error).removeprefix(f"{name}: "))
        except Exception as error:  # a plug-in's mistake must not cost the user the other rows
            if isinstance(error, OSError) and error.errno in _FEW_FILES:  # no property of a system: the verb names it
                raise
            return Result(system=name, title=entry.title, reason=f"fails with {type(error).__name__}: {error}")
        peaks = timeline.peak_bytes
        if plan.extra.get("balances_memory"):
            peaks = balanced_peak_bytes(plan, costs, timeline)
        capacity = np.array(timeline.capacity_bytes)
        overlap = timeline.overlap
        rate = costs.throughput(plan.num_ranks, plan.num_micro_batches, timeline.step_ms)
        return Result(
            system=name,
            title=entry.title,
            step_ms=timeline.step_ms,
            bubble_ratio=timeline.bubble_ratio,
            makespan_ms=timeline.makespan_ms,
            span_ms=timeline.span_ms,
            peak_memory_gib=tuple((peaks / GIB).tolist()),
            max_memory_gib=float(peaks.max()) / GIB,
            fits=bool(np.all(peaks <= capacity * (1 + ROUNDING))),
            tokens_per_gpu_per_second=rate["tokens_per_gpu_per_second"],
            mfu=rate["mfu"],
            communications=overlap.communications,
            overlapped=overlap.overlapped,
            overlap_rate=overlap.rate,
            exchange_hidden=timeline.exchange.share if costs.exchanges else None,
            stages=len(plan.stages),
            splits_backward=plan.splits_backward,
            micro_batches=plan.num_micro_batches,
            planning_s=took,
            plan=plan,
        )


def _run_all(task: _Task, settings: Mapping[str, Mapping[str, Any]], processes: int | None) -> Iterable[Result]:
    """Yield results as they are finished, from as many processes as there are cores (from this process if there is only
    one core)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(cores if processes is None else processes, len(settings))
    pool = _pool_of(workers) if workers > 1 and _enough_descriptors(workers) else None
    pending: dict[Future[Result], str] = {}
    if pool is not None:
        try:
            pending = {pool.submit(task.run, name, options): name for name, options in settings.items()}
        except OSError:  # no process for one of the workers
            _end(pool)
            pool = None
    if pool is None:
        for name, options in settings.items():
            yield task.run(name, options)
        return
    try:
        while pending:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                name = pending.pop(future)
                try:
                    yield future.result()
                except BrokenProcessPool:  # the others of this pool are lost with it
                    yield Result(system=name, title=get_system(name).title, reason=KILLED)
    finally:
        if pending:
            _end(pool)
        else:
            pool.shutdown(wait=True, cancel_futures=True)


def _pool_of(workers: int) -> ProcessPoolExecutor | None:
    """A pool whose workers know the systems that this process has registered (where processes can be forked); None
    where there is no shared memory or descriptor for its queues."""
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    try:
        return ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context(method), initializer=_ignore_interrupts
        )
    except (OSError, NotImplementedError, ImportError):
        return None


def _enough_descriptors(workers: int) -> bool:
    """Whether this process may open as many files as a pool needs. A pool that runs out of them in the middle waits for
    its workers forever."""
    try:
        import resource

        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        opened = len(os.listdir("/proc/self/fd"))
    except ImportError:  # not on this system
        return True
    except OSError as error:
        return error.errno not in _FEW_FILES
    return allowed == resource.RLIM_INFINITY or opened + DESCRIPTORS + PER_WORKER * workers <= allowed


def _end(pool: ProcessPoolExecutor) -> None:
    """End a pool whose results are no longer wanted. Workers have nothing to save, and a solver does not react to
    signals, so they are killed."""
    for process in list((pool._processes or {}).values()):
        process.kill()
        process.join()
    pool.shutdown(wait=True, cancel_futures=True)


_FEW_FILES = frozenset({errno.EMFILE, errno.ENFILE})
DESCRIPTORS, PER_WORKER = 24, 2
"""Files that a pool opens for itself and what its workers load, and further ones per worker."""
KILLED = "its process was killed (out of memory?); name fewer --systems"


def _ignore_interrupts() -> None:
    """Ignore Ctrl-C in workers: it reaches all processes of a terminal, and the parent handles it and ends the
    workers."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

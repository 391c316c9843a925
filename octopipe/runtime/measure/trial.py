"""Trials: profiles a model on this machine's ranks, or runs it under plans and times it.

Knows: the parts of a profile, and how plans are measured together with it. Does not know: processes (`launch.py`) or
how the numbers are used (`validate.py`, `adapt.py`). All functions here are collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from octopipe.base.errors import DoesNotFitError, OctoPipeError
from octopipe.costs.cluster.hardware import Link
from octopipe.costs.profile_file import Profile
from octopipe.huggingface.described import HfModel
from octopipe.models.spec import ModelSpec
from octopipe.plans.plan import Plan
from octopipe.runtime.measure.forecast import UNFIT, check_device_memory
from octopipe.runtime.measure.host_link import measure_host_link
from octopipe.runtime.measure.links import measure_links, measure_overlap, measure_sum
from octopipe.runtime.measure.one_layer import Layer
from octopipe.runtime.measure.profiler import LayerRing, Measured, assemble, gather
from octopipe.runtime.measure.rehearsal import pairs_plan, pairs_rehearsed, rehearsal_plan, rehearsed
from octopipe.runtime.measure.rounds import Tell, no_report, rounds_of
from octopipe.runtime.measure.timed_run import MeasuredSteps, TimedRun, free, run_plan
from octopipe.runtime.measure.workload import Workload
from octopipe.runtime.ranks.rank_process import Seat, Work
from octopipe.runtime.ranks.world import World
from octopipe.simulation.contention import predict
from octopipe.simulation.fidelity import Fidelity, compare
from octopipe.simulation.lowering import Channel
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline

__all__ = [
    "STEADY_MEMORY",
    "Fidelity",
    "MeasuredSteps",
    "ProfileJob",
    "ValidateJob",
    "Workload",
    "fidelity",
    "on_ranks",
    "profile_task",
    "profile_workload",
    "rehearsal_plan",
    "rehearsed",
    "run_plan",
    "side_by_side",
    "validate_task",
]  # fmt: skip


STEADY_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_MMAP_MAX_": "0"}
"""For CPU ranks under glibc: freed memory stays with the process. Otherwise every large tensor brings thousands of
page faults, or none, depending on what was freed before it: an op's time would depend on the plan around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileJob:
    """The parameters of `profile_task`."""

    work: Workload
    repeats: int
    warm_up: int
    state_factor: float
    about: dict[str, Any]
    memory_check: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateJob:
    """The parameters of `validate_task`."""

    work: Workload
    plan: Plan
    profile: Profile
    steps: int
    warm_up: int
    channel: Channel
    profile_again: bool
    optimizer: str = "none"
    """The optimizer whose state the profile counts in memory; the run allocates it as well."""


LEAST_S = 900.0
"""Seconds that a profile or trial may take; more if its layers are known to need more."""
STEP_S = 120.0
"""Seconds that one step of a plan may take."""
STATE_FACTOR = {"adamw": 2.0, "none": 0.0}
"""Bytes of an optimizer's state per byte of parameters."""


def profile_workload(
    work: Workload,
    world: World,
    *,
    repeats: int = 10,
    warm_up: int = 3,
    state_factor: float = 2.0,
    levels: Sequence[int] = (1,),
    links: bool = True,
    rehearsal: bool = True,
    about: dict[str, Any] | None = None,
    tell: Tell = no_report,
) -> Profile:
    """Measure layers and links with all ranks busy. `rehearsal`: also run a few steps of a GPipe plan, see `rehearsed`.
    `tell` receives progress reports."""
    began = time.perf_counter()
    device = work.place(world.rank)
    rounds = rounds_of(repeats, warm_up, levels, world.size)
    mine = _ring(work, world, device, tell, rounds).measure(repeats, warm_up, levels)
    free(device)
    found: dict[tuple[int, int], Link] = {}
    if world.size > 1 and links:
        tell(f"links between {world.size} ranks", 0.8)
        found, slowdown = _links(work, world, device, mine)
        about = {**(about or {}), "overlap_slowdown": round(slowdown, 4)}
    profile = _profile(work, world, device, mine, found, state_factor, about)
    if links:
        copy_sum = measure_sum(world, device, transport=work.transport(world))
        measured = profile.costs.replace(host_link=measure_host_link(world, device), copy_sum=copy_sum)
        profile = profile.with_costs(measured)
    if rehearsal and links and world.size > 1 and work.spec.num_layers >= world.size:
        tell("a few steps of a plan", 0.9)
        plan = rehearsal_plan(profile, world.size)
        seen, arrivals = _few_steps(work, plan, world, profile)
        profile = rehearsed(profile, plan, seen, world, arrivals=arrivals)
        paired = pairs_plan(profile, world.size)
        if paired is not None:
            seen, _ = _few_steps(work, paired, world, profile)
            profile = pairs_rehearsed(profile, paired, seen, world)
    seconds = round(time.perf_counter() - began, 2)
    return replace(profile, about={**profile.about, "total_seconds": seconds})


def _few_steps(work: Workload, plan: Plan, world: World, profile: Profile) -> tuple[list[Timeline], bool]:
    """Run a plan and return the timelines of three steps after the warm-up, and whether they have the device's own
    arrival times."""
    with closing(TimedRun(work, plan, world, profile, timeout_s=step_limit_s(plan, profile))) as run:
        warm_up = max(2, run.pipe.executor.ops.warm_up_steps)
        for k in range(warm_up + 3):
            run.step(timed=k >= warm_up)
        return run.timelines, run.knows_arrivals


def step_limit_s(plan: Plan, profile: Profile) -> float:
    """Return how long a rank may wait for another one in a step of the plan: at least ten times the predicted step,
    because the machine may be busy."""
    return max(STEP_S, 10e-3 * simulate(plan, profile.costs).makespan_ms)


def _ring(work: Workload, world: World, device: torch.device, tell: Tell = no_report, rounds: int = 0) -> LayerRing:
    layers = work.layers(device)
    return LayerRing(
        layers,
        work.batch(device, 1)[0],
        work.loss(layers),
        work.targets(device, 1)[0],
        groups=work.groups,
        takes=getattr(work.spec, "takes", ()),
        group=world.control,
        tell=tell,
        rounds=rounds,
        precision=work.precision,
        graphs=work.graphs,
    )


def _links(
    work: Workload, world: World, device: torch.device, mine: Measured
) -> tuple[dict[tuple[int, int], Link], float]:
    """Return the links between all ranks, and by which factor a transfer slows concurrent computation."""
    boundary = int(max(m.boundary_bytes for m in mine.memory))
    sizes = sorted({1 << 12, max(1 << 13, boundary // 4), max(1 << 14, boundary)})
    found = measure_links(world, device, sizes=sizes, transport=work.transport(world))
    return found, _overlap_slowdown(work, world, device, boundary)


def _profile(
    work: Workload,
    world: World,
    device: torch.device,
    mine: Measured,
    links: Mapping[tuple[int, int], Link],
    state_factor: float,
    about: dict[str, Any] | None,
) -> Profile:
    memory = None
    if device.type == "cuda":
        shared = max(1, -(-world.size // torch.cuda.device_count()))
        memory = 0.92 * torch.cuda.get_device_properties(device).total_memory / shared
    last: Any = work.spec.layers[-1:] if isinstance(work.spec, ModelSpec) else ()
    return assemble(
        gather(mine, world.control),
        tied=bool(last) and bool(getattr(last[0], "tied", False)),
        graph_of=work.spec.graph if isinstance(work.spec, HfModel) else None,
        model=work.spec.name,
        symbols=work.spec.pattern,
        tokens=work.tokens * work.micro_batch_size,
        links=links,
        state_factor=state_factor,
        memory_bytes=memory,
        mode=work.mode,
        about={
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "layers": list(work.kinds),
            "kernels": work.kernel_names(),
            "torch": str(torch.__version__),
            "date": time.strftime("%Y-%m-%d"),
            **(about or {}),
        },
    )


def _overlap_slowdown(work: Workload, world: World, device: torch.device, nbytes: int) -> float:
    """Return by which factor transfers slow concurrent computation, measured on the model's second layer."""
    layers = work.layers(device)
    made = [layers[0](), layers[min(1, len(layers) - 2)]()]
    with torch.no_grad():
        first = made[0](work.batch(device, 1)[0])
    layer = Layer(made[1], first, None, False, work.precision, work.graphs) if len(layers) > 2 else None
    if layer is not None:
        layer.capture()

    def once() -> None:
        if layer is not None:
            layer.once(lambda: None)

    found = measure_overlap(world, device, once, nbytes=nbytes, transport=work.transport(world))
    free(device)
    return found if layer is not None else 1.0


def side_by_side(
    work: Workload,
    plans: Mapping[str, Plan],
    world: World,
    profile: Profile,
    *,
    rounds: int = 11,
    warm_up: int = 2,
    levels: Iterable[int] = (1,),
) -> tuple[Profile, dict[str, MeasuredSteps]]:
    """Return a new profile and the measured steps of every plan, from interleaved rounds: each round times all layers
    once and runs one step of the rehearsal and one of every plan. This is for machines whose speed drifts from second
    to second, because a drift affects all of them alike. Links, memory and the lowering come from `profile`."""
    device = work.place(world.rank)
    ring = _ring(work, world, device)
    own = rehearsal_plan(profile, world.size)
    levels = [k for k in levels if 0 < k < world.size]
    with ExitStack() as stack:
        rehearsal, *runs = (
            stack.enter_context(closing(TimedRun(work, plan, world, profile))) for plan in (own, *plans.values())
        )
        warm_up = max(warm_up, rehearsal.pipe.executor.ops.warm_up_steps)
        for k in range(warm_up + rounds):
            ring.round(levels, timed=k >= warm_up)
            for run in (rehearsal, *runs):
                run.step(timed=k >= warm_up)
        fresh = _profile(work, world, device, ring.measured(), profile.costs.network.pairs, 0.0, dict(profile.about))
        static = {"static_bytes": profile.costs.static_bytes, "tied_bytes": profile.costs.tied_bytes}
        static["graph"] = profile.costs.graph
        fresh = fresh.with_costs(fresh.costs.replace(**static))
        fresh = rehearsed(fresh, own, rehearsal.timelines, world)
        return fresh, {name: run.trial() for name, run in zip(plans, runs)}


def fidelity(plan: Plan, profile: Profile, trial: MeasuredSteps, *, channel: Channel = "directed") -> Fidelity:
    """Compare the measured steps of a plan with their prediction."""
    predicted = predict(plan, profile, channel=channel)
    return compare(predicted, trial.timeline, measured_bytes=trial.peak_bytes, step_ms=trial.step_ms)


def profile_task(seat: Seat, job: ProfileJob) -> Profile:
    """Run `octopipe profile` on one rank; reports [what is done now, the share that is done]."""
    world = World.make(None, None, None)
    if job.memory_check:
        check_device_memory(job.work, world.size, job.work.place(world.rank))
    return profile_workload(
        job.work,
        world,
        repeats=job.repeats,
        warm_up=job.warm_up,
        state_factor=job.state_factor,
        about=job.about,
        tell=lambda doing, share: seat.tell([doing, share]),
    )


def validate_task(seat: Seat, job: ValidateJob) -> tuple[MeasuredSteps, Profile]:
    """Run `octopipe validate` on one rank."""
    world, profile = World.make(None, None, None), job.profile
    if job.work.compiles and not job.profile_again:
        # All ranks compile at once; in the pipeline's first step each would wait for the one before it.
        ring = _ring(job.work, world, job.work.place(world.rank))
        del ring
        free(job.work.place(world.rank))
    if job.profile_again:
        factor = STATE_FACTOR[job.optimizer]
        profile = profile_workload(job.work, world, state_factor=factor, about=dict(profile.about))
    trial = run_plan(
        job.work,
        job.plan,
        world,
        profile,
        steps=job.steps,
        warm_up=job.warm_up,
        channel=job.channel,
        optimizer=job.optimizer,
        timeout_s=step_limit_s(job.plan, profile),
    )
    return trial, profile


def on_ranks(
    task: Work,
    nproc: int,
    job: Any,
    *,
    device: str,
    timeout_s: float = LEAST_S,
    listen: Callable[[Any], None] | None = None,
    share_percent: float | None = None,
) -> list[Any]:
    """Run a task of this module on ranks of this machine. Ranks that must share a GPU do so under MPS, each with
    `share_percent` of its multiprocessors (default: see `Mps.start`). `listen` receives the first rank's reports."""
    from octopipe.runtime.ranks.launch import GROUP_TIMEOUT_S, RankError, run_ranks

    usual: dict[str, Any] = {"timeout_s": timeout_s, "listen": listen}
    usual["group_timeout_s"] = max(GROUP_TIMEOUT_S, timeout_s)
    try:
        if device == "cpu":
            return run_ranks(task, nproc, job, environment=STEADY_MEMORY, **usual)
        return _on_gpus(task, nproc, job, share_percent, usual)
    except RankError as error:
        if UNFIT in str(error):
            raise DoesNotFitError(str(error)) from None
        raise


def _on_gpus(task: Work, nproc: int, job: Any, share_percent: float | None, usual: dict[str, Any]) -> list[Any]:
    from octopipe.runtime.measure.mps import Mps
    from octopipe.runtime.ranks.launch import run_ranks

    # Counted without initialising CUDA here: a process that has done so before MPS started stays outside it.
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise OctoPipeError("no CUDA device here; use --device cpu")
    if gpus >= nproc:
        return run_ranks(task, nproc, job, **usual)
    with Mps.start(num_ranks=-(-nproc // gpus), share_percent=share_percent) as mps:
        return run_ranks(task, nproc, job, environment=mps.environment, **usual)

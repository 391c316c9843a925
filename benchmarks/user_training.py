"""The plans of `bench_users.py` in training, one after the other in ranks that run already.

Knows: which plans are trained and with which prediction, how a plan that fails is told from one that trained, and what
is kept of a run. Octopipe's own runtime trains with what a rank of `octopipe train` runs (`train_rank`); Megatron's
chunks are stepped through the drop-in, with AdamW on float32 master weights. Does not know: how plans are found
(`bench_users.py`), tables (`user_tables.py`).
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from user_tables import fastest_of_each

from octopipe.base.errors import OctoPipeError
from octopipe.costs.profile_file import Profile
from octopipe.plans.plan import Plan
from octopipe.runtime.measure.timed_run import free
from octopipe.runtime.measure.workload import Workload
from octopipe.runtime.ranks.rank_process import Seat, attributed, described
from octopipe.runtime.ranks.world import World
from octopipe.runtime.torch_private import default_store
from octopipe.runtime.training.job import WARM_UP_STEPS, EvalReport, Phase, StepReport, TrainJob
from octopipe.runtime.training.train import train_rank
from octopipe.search.measured_tuning import Outcome, Row, corrected
from octopipe.simulation.contention import predict

GIB = float(1 << 30)
ADAM_MOMENTS = 2.0
TOGETHER_S = 20.0
"""Ranks that are all through with a plan meet within this time."""
LEARNING_RATE = 1e-4
"""Of Megatron's chunks, whose gradients are not clipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What the training of one plan showed; lists have one entry per step."""

    pipelines_ms: list[float]
    """From the first op to the end of the gradient reductions (of Megatron's chunks: to the last op)."""
    reduces: bool
    """Whether these times contain the reductions of layers that several ranks hold."""
    steps_ms: list[float]
    """With data, clipping and optimizer."""
    losses: list[float]
    memory_gib: list[float]
    """Peak of every rank after the last step; empty on a CPU."""
    warm_up: int
    """So many of the first steps are not counted."""
    start_s: float
    """Until the first step was over."""


Train = Callable[[Plan, Profile], Trained | None]
"""Trains a plan on all ranks (collective); the first rank has the result."""


def train_plans(
    world: World,
    outcome: Outcome,
    profile: Profile,
    kinds: Sequence[str],
    train: Train,
    *,
    device: torch.device,
    timeout_s: float,
    until: float,
    tell: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Train the fastest plan of every kind, and yield what is recorded of each (collective).

    A plan that fails is recorded with its reason, and the next one is trained, unless the failure broke the ranks'
    group: then it is raised after it was yielded. Nothing begins after the time `until`.
    """
    chosen = fastest_of_each(outcome.rows, lambda r: r.name, lambda r: r.ran.step_ms)
    for row in chosen.values():
        # All ranks ask one clock: one that begins alone would wait for the others for ever.
        if not world.gather(time.time() < until)[0]:
            yield {"name": row.name, "error": "no time left"}
            continue
        tell(f"training {row.name}")
        before = with_state(profile_before(row, outcome, profile, kinds))
        began, found, why = time.perf_counter(), None, ""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            found = train(row.plan, before)
        except Exception as error:  # whatever it is, the other plans are to be trained
            why = described(error)
        free(device)
        first = _first_failure(world, why, timeout_s)
        record: dict[str, Any] = {"name": row.name, "seconds": round(time.perf_counter() - began, 1)}
        if device.type == "cuda":
            record["left_gib"] = round(torch.cuda.memory_allocated(device) / GIB, 3)
        if first:
            tell(f"{row.name} was not trained: {first}")
            yield record | {"error": first}
            _check_group(world, first)
        else:
            yield record | ({} if found is None else _told(row, before, found, tell))


def profile_before(row: Row, outcome: Outcome, profile: Profile, kinds: Sequence[str]) -> Profile:
    """The profile that predicted a plan before the plan had run: corrected by the rounds before its own."""
    earlier = [r for r in outcome.rows if r.round < row.round]
    return corrected(profile, earlier, kinds)[0] if earlier else profile


def with_state(profile: Profile) -> Profile:
    """A profile that was taken without an optimizer, with AdamW's state and master weights in its memory."""
    mode, costs = profile.mode, profile.costs
    assert mode is not None
    factor = mode.bytes_per_parameter(state_factor=ADAM_MOMENTS) / mode.bytes_per_parameter(state_factor=0.0)
    return profile.with_costs(
        costs.replace(static_bytes=factor * costs.static_bytes, tied_bytes=factor * costs.tied_bytes)
    )


def _first_failure(world: World, words: str, timeout_s: float) -> str:
    """What the rank that failed first says about the plan; "" where none did. A rank whose failure the others do not
    notice raises it, so that all end: they would wait for it as long as ranks may wait."""
    try:
        said = _everyones(world, f"{time.time():.6f} {words}", TOGETHER_S if words else 2.0 * timeout_s)
    except RuntimeError:
        raise OctoPipeError(words or "another rank did not say how the training of this plan ended") from None
    timed = [one.split(" ", 1) for one in said]
    failed = [(float(when), rank, why) for rank, (when, why) in enumerate(timed) if why]
    if not failed:
        return ""
    _, rank, first = min(failed)
    return attributed(rank, first)


def _check_group(world: World, why: str) -> None:
    """Raise where the ranks' group did not survive a failure: a collective that one rank left while others were in it
    breaks it, and the next one would wait for ever."""
    if world.size == 1:
        return
    broken = ""
    try:
        torch.distributed.monitored_barrier(world.control, timeout=timedelta(seconds=TOGETHER_S))
    except RuntimeError:
        broken = "broken"
    if any(_everyones(world, broken, 2.0 * TOGETHER_S)):
        raise OctoPipeError(why)


def _everyones(world: World, words: str, patience_s: float) -> list[str]:
    """What every rank says. It goes through the store: where ranks failed in different places, one of them may still
    wait in a collective that another one has left."""
    if world.size == 1:
        return [words]
    store, place = default_store(), "octopipe/users"
    turn = store.add(f"{place}/{world.rank}", 1)
    store.set(f"{place}/{turn}/{world.rank}", f"{words}.")  # a store may take an empty value for none
    keys = [f"{place}/{turn}/{r}" for r in range(world.size)]
    store.wait(keys, timedelta(seconds=patience_s))
    return [store.get(key).decode()[:-1] for key in keys]


def _told(row: Row, profile: Profile, found: Trained, tell: Callable[[str], None]) -> dict[str, Any]:
    """What is recorded of a plan, on the first rank."""
    predicted = predict(row.plan, profile)
    pipeline_ms, step_ms = (
        statistics.median(times[found.warm_up :] or times) for times in (found.pipelines_ms, found.steps_ms)
    )
    predicted_ms = predicted.reduced_ms if found.reduces else predicted.makespan_ms
    error = predicted_ms / pipeline_ms - 1.0
    tell(
        f"{row.name} in training: {pipeline_ms:.2f} ms, predicted {predicted_ms:.2f} ({100 * error:+.1f} %), "
        f"whole step {step_ms:.2f} ms"
    )
    return {
        "predicted_ms": predicted_ms,
        "reduction_ms": round(predicted.reduced_ms - predicted.makespan_ms, 2) if found.reduces else None,
        "pipeline_ms": pipeline_ms,
        "step_ms": step_ms,
        "pipelines_ms": found.pipelines_ms,
        "steps_ms": found.steps_ms,
        "losses": found.losses,
        "warm_up": found.warm_up,
        "predicted_gib": list(predicted.peak_gib),
        "memory_gib": found.memory_gib,
        "start_s": found.start_s,
    }


def train_workload(
    seat: Seat, work: Workload, plan: Plan, profile: Profile, *, steps: int, timeout_s: float
) -> Trained | None:
    """The loop of `octopipe train` on made-up text, with the precision and the graphs of the profile."""
    began = time.perf_counter()
    starts: list[float] = []

    def hear(news: Phase | StepReport | EvalReport) -> None:
        if isinstance(news, StepReport) and not starts:
            starts.append(time.perf_counter() - began)
        elif isinstance(news, Phase) and news.notice:
            seat.tell(news.text)

    job = TrainJob(
        spec=work.spec,
        nproc=seat.size,
        steps=steps,
        plan=plan,
        seq=work.tokens,
        micro_batch_size=work.micro_batch_size,
        precision=work.precision,
        graphs=work.graphs if work.device == "cuda" else None,
        device=work.device,
        seed=work.seed,
        profile=profile,
        timeout_s=timeout_s,
    )
    result = train_rank(replace(seat, tell=hear), job)
    if result is None:
        return None
    last = result.reports[-1].memory_bytes if work.device == "cuda" else ()
    return Trained(
        pipelines_ms=[r.reduced_ms for r in result.reports],
        reduces=True,
        steps_ms=[r.step_ms for r in result.reports],
        losses=result.losses,
        memory_gib=[size / GIB for size in last],
        warm_up=result.warm_up,
        start_s=round(starts[0], 1),
    )


def train_chunks(
    world: World,
    build: Callable[[Plan], list[Any]],
    arguments: Callable[[list[Any]], dict[str, Any]],
    plan: Plan,
    profile: Profile,
    *,
    steps: int,
    transport: str | None,
    timeout_s: float,
) -> Trained | None:
    """Megatron-Core's chunks: the drop-in's step and AdamW in a loop. `arguments(chunks)`: those of one step."""
    from octopipe.megatron import forward_backward_func

    began, start_s = time.perf_counter(), 0.0
    chunks = build(plan)
    device = next((p.device for chunk in chunks for p in chunk.parameters()), torch.device("cpu"))
    optimizer = MasterAdamW([p for chunk in chunks for p in chunk.parameters() if p.requires_grad])
    step = forward_backward_func(plan, costs=profile.costs, transport=transport, timeout_s=timeout_s, record=True)
    pipelines_ms, steps_ms, losses = [], [], []
    with contextlib.closing(step):
        for _ in range(steps):
            at = time.perf_counter()
            for chunk in chunks:
                chunk.zero_grad_buffer()
            found = step(**arguments(chunks))
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            told = world.gather([float(one["loss"]) for one in found])  # waits for all ranks: the step is over
            steps_ms.append(1e3 * (time.perf_counter() - at))
            pipelines_ms.append(step.timeline().makespan_ms)
            losses.append(statistics.fmean(next(mine for mine in told if mine)))
            if not math.isfinite(losses[-1]):
                raise OctoPipeError(f"the loss is {losses[-1]:g} at step {len(losses)}")
            start_s = start_s or time.perf_counter() - began
    peaks = world.gather(torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None)
    if world.rank:
        return None
    return Trained(
        pipelines_ms=pipelines_ms,
        reduces=False,
        steps_ms=steps_ms,
        losses=losses,
        memory_gib=[] if device.type == "cpu" else peaks,
        warm_up=WARM_UP_STEPS,
        start_s=round(start_s, 1),
    )


class MasterAdamW:
    """AdamW of float32 master weights, on the gradients that Megatron's DDP adds up in `main_grad`."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]):
        self._parameters = list(parameters)
        # A parameter that is float32 itself is updated in place, as Megatron's own optimizer does.
        self._masters = [p if p.dtype is torch.float32 else p.detach().float() for p in self._parameters]
        fused = any(p.is_cuda for p in self._parameters) or None
        # torch's optimizers refuse an empty list, and a rank may hold nothing.
        self._inner = torch.optim.AdamW(self._masters or [torch.zeros(0)], lr=LEARNING_RATE, fused=fused)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters):
            master.grad = parameter.main_grad  # type: ignore[attr-defined]
        self._inner.step()
        for parameter, master in zip(self._parameters, self._masters):
            master.grad = None
            if parameter is not master:
                parameter.copy_(master)

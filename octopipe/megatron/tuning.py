"""Tuning by running on Megatron-Core's chunks: published orders and tuned plans, each built, stepped and timed.

Knows: how a plan's chunks are built, stepped through the drop-in and deleted again, and what the timed steps say. Does
not know: how costs are corrected and which plan wins (`search/measured_tuning.py`), how layers are profiled
(`profiling.py`).

    outcome = octopipe.megatron.tune_measured(               # on every rank
        profile, build, forward_step_func=forward_step, data=batches, seq_length=4096, micro_batch_size=1,
        num_micro_batches=16, budget_s=120)
    if outcome.best.name.startswith("tuned"): ...            # the plan that was measured fastest: outcome.best.plan

Every plan is measured in the pipeline that Megatron was initialized with, so `build(plan)` must make chunks that do not
depend on Megatron's own virtual size; `octopipe.megatron.build_chunks` inside it gives each provider its layers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from octopipe.base.errors import OctoPipeError
from octopipe.costs.profile_file import Profile
from octopipe.costs.table import CostTable
from octopipe.megatron.driver import forward_backward_func
from octopipe.megatron.placing import for_megatron
from octopipe.megatron.reduction import megatron_groups
from octopipe.plans.plan import Plan
from octopipe.runtime.measure.tuned_run import led, ran
from octopipe.runtime.ranks.world import World
from octopipe.search.measured_tuning import PUBLISHED, Outcome, Ran, Run
from octopipe.search.measured_tuning import tune_measured as tune_by_running
from octopipe.search.tuner import tune
from octopipe.simulation.timeline import Timeline

WARM_UP_STEPS = 2
"""Number of warm-up steps, in which libraries select kernels and the allocator grows; their times are discarded."""


def tune_measured(
    profile: Profile,
    build: Callable[[Plan], list[Any]],
    *,
    forward_step_func: Callable[..., Any],
    data: Callable[[], Any],
    seq_length: int,
    micro_batch_size: int,
    num_micro_batches: int,
    tune_s: float = 10.0,
    budget_s: float = 300.0,
    rounds: int = 2,
    steps: int = 4,
    systems: Sequence[str] = PUBLISHED,
    flags_too: bool = False,
    transport: str | None = None,
    timeout_s: float = 120.0,
    pg_collection: Any = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Return the plan that was measured fastest on these chunks, published orders included (collective over the
    pipeline).

    `profile`: the result of `octopipe.megatron.profile`. `build(plan)`: returns this rank's chunks of a plan; they are
    deleted before those of the next plan are built. `data()`: returns the `data_iterator` of one step (called before
    every step). `tune_s`: seconds of each search; `budget_s`: of everything. Plans are restricted to what the drop-in
    runs: every layer once, nothing recomputed. `flags_too`: also search and run the best plan that Megatron's own flags
    express, in Megatron's own order (named "by flags"), to show what its layout alone would give.
    """
    if steps < 1:
        raise OctoPipeError(f"{steps} timed steps of each plan; give at least one")
    groups = pg_collection or megatron_groups()
    world = World(groups.pp if groups.pp.size() > 1 else None)
    names = tuple(str(kind) for kind in profile.about.get("layers", ()))

    def step_arguments(chunks: list[Any]) -> dict[str, Any]:
        return {
            "forward_step_func": forward_step_func,
            "data_iterator": data(),
            "model": chunks,
            "num_microbatches": num_micro_batches,
            "seq_length": seq_length,
            "micro_batch_size": micro_batch_size,
            "pg_collection": pg_collection,
        }

    def search(costs: CostTable, copies: bool) -> Plan:
        return tune(costs, world.size, num_micro_batches, budget_s=tune_s, copies=False, recompute=False).plan

    def by_flags(costs: CostTable) -> Plan:
        return tune(costs, world.size, num_micro_batches, budget_s=tune_s, recompute=False, target="megatron").plan

    def loop(run: Run) -> Outcome:
        return tune_by_running(
            profile,
            world.size,
            num_micro_batches,
            run=run,
            search=search,
            kinds=names if len(names) == profile.costs.num_layers else (),
            systems=systems,
            copies=(False,),
            also={"by flags": by_flags} if flags_too else None,
            rounds=rounds,
            budget_s=budget_s,
            fitted=for_megatron,
            tell=tell,
        )

    run_here = partial(
        _run, world=world, build=build, arguments=step_arguments, steps=steps, transport=transport, timeout_s=timeout_s
    )
    return led(world, run_here, loop)


def _run(
    plan: Plan,
    profile: Profile,
    *,
    world: World,
    build: Callable[[Plan], list[Any]],
    arguments: Callable[[list[Any]], dict[str, Any]],
    steps: int,
    transport: str | None,
    timeout_s: float,
) -> Ran:
    """Run a few timed steps of a plan on all ranks (collective)."""
    gc.collect()  # earlier chunks, kept alive by Megatron's reference cycles, would count as this plan's memory
    chunks = build(plan)
    device = next((p.device for chunk in chunks for p in chunk.parameters()), torch.device("cpu"))
    cuda = device.type == "cuda"
    step = forward_backward_func(plan, costs=profile.costs, transport=transport, timeout_s=timeout_s, record=True)
    timelines: list[Timeline] = []
    peak = 0.0
    try:
        for k in range(WARM_UP_STEPS + steps):
            _clear_gradients(chunks)
            if cuda:
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            world.gather(None)
            step(**arguments(chunks))
            timeline = step.timeline()
            if k >= WARM_UP_STEPS:
                timelines.append(timeline)
                peak = max(peak, float(torch.cuda.max_memory_allocated(device)) if cuda else 0.0)
    finally:
        step.close()
    del chunks, step
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return ran(timelines, peak_bytes=world.gather(peak) if cuda else ())


def _clear_gradients(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        if hasattr(chunk, "zero_grad_buffer"):  # Megatron's DDP
            chunk.zero_grad_buffer()
        else:
            chunk.zero_grad(set_to_none=True)

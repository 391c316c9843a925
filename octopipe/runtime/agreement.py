"""Makes the program that a pipeline runs, and checks that all ranks have the same plan, channel model and program.

Knows: which plans fit the layers and ranks at hand, how to compare what ranks would run, and how to report the first
difference. Does not know: how any of it runs.

A rank's instructions depend on the costs used for lowering. Two ranks whose costs differ by a few per cent (because
each measured its own) would queue their transfers in different orders and wait for each other forever. A pipeline that
lowers its plan itself therefore runs rank 0's instructions on every rank; programs that were lowered elsewhere must be
equal. Data-parallel pipelines may be lowered differently, because they exchange only gradients (see `replicas`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.costs.layer_graph import LayerGraph
from octopipe.costs.table import CostTable
from octopipe.plans.branches import chain_of, check_connections
from octopipe.plans.plan import Plan
from octopipe.plans.setting import lowering_costs
from octopipe.runtime.ranks.world import World
from octopipe.simulation.lowering import Channel, Program, lower, prove_deadlock_free, with_instructions


def program_of(
    plan: Plan | Program, costs: CostTable | None, channel: Channel, *, num_ranks: int, layers: Sequence[Any]
) -> Program:
    """Return the program as given, or lower it from the plan. Raises an error if it is for other numbers of ranks or
    layers, or for layers with other connections."""
    num_layers, takes = len(layers), getattr(layers, "takes", None)  # only layers that know their connections say them
    checked = plan.plan if isinstance(plan, Program) else plan.check()
    if checked.num_ranks != num_ranks:
        raise OctoPipeError(f"the plan has {checked.num_ranks} ranks, the process group {num_ranks}; use as many")
    if num_layers != checked.num_layers:
        raise OctoPipeError(f"{num_layers} layers for a plan of {checked.num_layers}; use the plan's own model")
    if takes or (takes is not None and checked.forks):
        check_connections(checked, LayerGraph(takes=takes) if takes else chain_of(num_layers))
    if isinstance(plan, Program):
        return plan
    return lower(checked, lowering_costs(checked) if costs is None else costs, channel=channel, check=False)


def agreed_program(world: World, program: Program, *, lowered_here: bool, prove: bool = True) -> Program:
    """Return the program that every rank of the pipeline runs, proven free of deadlock (collective over the pipeline).

    `lowered_here`: this pipeline made it from its plan, so rank 0's program may replace it; otherwise a program that
    differs from rank 0's is an error. `prove=False` is for transports that exist to show deadlocks.
    """
    said = world.gather((_plan_parts(program.plan), program.channel, lowered_here, _digest(program)))
    for rank, (parts, channel, here, _) in enumerate(said):
        plans, channels, made = said[0][:3]
        if parts != plans:
            what = next(name for name, digest in parts.items() if plans.get(name) != digest)
            raise OctoPipeError(
                f"rank {rank} runs another plan than rank 0: they differ in {what}; give all ranks the same plan"
            )
        if channel != channels:
            raise OctoPipeError(
                f"rank {rank} has the channel model {channel!r}, rank 0 {channels!r}; give all ranks the same"
            )
        if here != made:
            raise OctoPipeError(
                f"rank {rank} was given a {'plan' if here else 'program'}, rank 0 a {'plan' if made else 'program'}; "
                "give all ranks the same"
            )
    if any(digest != said[0][3] for *_, digest in said):
        program = _reconciled(world, program, lowered_here)
    if prove:
        prove_deadlock_free(program)
    return program


def _reconciled(world: World, program: Program, lowered_here: bool) -> Program:
    lists = (program.instr_kind, program.instr_id, program.instr_offsets)
    everybody = world.gather(lists)
    if lowered_here:
        return with_instructions(program, *everybody[0])
    other = next(r for r, theirs in enumerate(everybody) if _differ(everybody[0], theirs))
    raise OctoPipeError(
        f"rank {other} runs another program than rank 0: {_difference(program, everybody[0], everybody[other])}; lower "
        "the plan with the same costs on all ranks, or give the Pipeline the plan instead of a program"
    )


def _differ(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return any(not np.array_equal(x, y) for x, y in zip(a, b))


def _difference(program: Program, first: Sequence[Any], other: Sequence[Any]) -> str:
    """Return a description of the first difference between the instruction lists of two ranks."""
    one, two = (with_instructions(program, *lists) for lists in (first, other))
    for rank in range(program.plan.num_ranks):
        a, b = one.instructions(rank), two.instructions(rank)
        for k, (x, y) in enumerate(zip(a, b)):
            if x != y:
                return f"instruction {k} of rank {rank} is {y} there and {x} here"
    return "their lists have different lengths"


def _plan_parts(plan: Plan) -> dict[str, str]:
    """Return digests of the decisions of a plan, part by part, short enough to be exchanged."""
    parts: dict[str, Any] = {
        "the number of layers, ranks or micro-batches": (plan.num_layers, plan.num_ranks, plan.num_micro_batches),
        "the stages": plan.stages,
        "the routes": (plan.routes, plan.route_of_micro_batch, plan.edges),
        "the pairs": sorted(plan.pairs),
    }
    for rank, order in enumerate(plan.orders):
        parts[f"the order of rank {rank}"] = ",".join(map(str, order))
    return {name: _short(repr(part).encode()) for name, part in parts.items()}


def _digest(program: Program) -> str:
    """Return a digest of transfers and instructions that is equal for programs that execute in the same way."""
    arrays = [program.source, program.target, program.instr_offsets, program.instr_kind, program.instr_id]
    if program.moves is not None:
        arrays += [program.moves.forward, program.moves.release, program.moves.fetch]
        arrays.append(program.moves.with_op.astype(np.int32))
    return _short(b"".join(np.ascontiguousarray(a, np.int32).tobytes() + b"|" for a in arrays))


def _short(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=12).hexdigest()

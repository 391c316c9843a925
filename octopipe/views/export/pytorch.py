"""A plan as the schedule CSVs that torch.distributed.pipelining loads, with or without communication.

Knows: what PyTorch's schedule text can say (one line per rank; F, I, W and B of one chain of stages; sends,
receives, FSDP's unshard and reshard, the reduction of gradients), and two things its runtime needs said:
micro-batches in the order in which the last stage runs them, and a stage on every rank. Does not know: torch.

PyTorch's runtime appends losses as they are computed and reads them by micro-batch: where the last stage runs
0, 2, 1 it gives wrong gradients and no error. So micro-batches are renamed here in the last stage's order; they
are alike, and only which slice of the batch is called 1 changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan, Stage
from octopipe.plans.setting import lowering_costs
from octopipe.simulation.lowering import lower

ACTIVE_STAGES = 3
"""Sharded stages of one rank that are gathered at the same time, as in PyTorch's own lowering."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOrder:
    """A plan as PyTorch can run it: stages numbered along the chain, micro-batches renamed, R left out."""

    plan: Plan
    renamed: tuple[int, ...]
    """renamed[m]: what micro-batch m of the given plan is called now."""
    notes: tuple[str, ...]
    """What differs from the given plan, a line each."""


def torch_order(plan: Plan) -> TorchOrder:
    """The plan in PyTorch's terms, or one line about why PyTorch cannot run it."""
    plan.check()
    if len(plan.routes) > 1:
        raise OctoPipeError(
            "PyTorch's schedules know one chain of stages; this plan has "
            f"{len(plan.routes)} routes: run it with `octopipe train`"
        )
    route = plan.routes[0]
    place = {stage: position for position, stage in enumerate(route)}
    last = route[-1]
    seen = [op.micro_batch for op in plan.orders[plan.stages[last].rank] if op.stage == last and op.kind == "F"]
    renamed = [0] * plan.num_micro_batches
    for new, old in enumerate(seen):
        renamed[old] = new
    notes = []
    if seen != sorted(seen):
        notes.append(
            f"micro-batches renamed in the last stage's order {', '.join(map(str, seen[:16]))}"
            f"{', ...' if len(seen) > 16 else ''}: PyTorch's runtime reads losses in that order"
        )
    recomputing = sum(bool(plan.stages[s].recompute) for s in route)
    if recomputing:
        notes.append(
            f"{recomputing} of {len(route)} stages recompute: PyTorch's schedules have no R, so their modules must "
            "checkpoint their activations (`octopipe.torch_engine.make_stages` does)"
        )
    stages = tuple(Stage(first=s.first, stop=s.stop, rank=s.rank) for s in (plan.stages[number] for number in route))
    orders = tuple(
        tuple(Op(place[op.stage], op.kind, renamed[op.micro_batch]) for op in order if op.kind != "R")
        for order in plan.orders
    )
    out = Plan(
        model=plan.model,
        num_layers=plan.num_layers,
        num_ranks=plan.num_ranks,
        num_micro_batches=plan.num_micro_batches,
        stages=stages,
        orders=orders,
        extra=plan.extra,
    )
    return TorchOrder(plan=out, renamed=tuple(renamed), notes=tuple(notes))


def pytorch_csv(plan: Plan) -> str:
    """The text for `_PipelineScheduleRuntime._load_csv(path, format="compute_only")`.

    R has no word in PyTorch's schedules: its stages recompute inside the backward when their module uses
    activation checkpointing, so R ops are left out.
    """
    return _text(map(str, order) for order in torch_order(plan).plan.orders)


def pytorch_csv_with_communication(plan: Plan, costs: CostTable | None = None) -> str:
    """The text for `_load_csv(path, format="compute_comms")`: our order of sends and receives, proven.

    `costs` time the lowering (default: those that the plan carries).
    """
    return _text(communicating_rows(torch_order(plan).plan, costs))


def communicating_rows(plan: Plan, costs: CostTable | None = None) -> tuple[tuple[str, ...], ...]:
    """Per rank: compute, sends, receives, unshards, reshards and reductions, in order.

    Lowered for one in-order queue per rank, which no backend is stricter than: free of deadlocks everywhere.
    """
    for rank in range(plan.num_ranks):
        if not plan.orders[rank]:
            raise OctoPipeError(
                f"rank {rank} holds no stage; PyTorch's runtime needs one on every rank: use fewer ranks"
            )
    program = lower(plan, lowering_costs(plan) if costs is None else costs, channel="single")
    rows = []
    for rank in range(plan.num_ranks):
        cells: list[str] = []
        for step in program.instructions(rank):
            if step.kind == "compute":
                cells.append(str(step.op))
            elif step.kind == "send":
                cells.append(f"{step.op.stage}SEND_{_way(step.op)}{step.op.micro_batch}")
            else:
                assert step.consumer is not None
                cells.append(f"{step.consumer.stage}RECV_{_way(step.op)}{step.op.micro_batch}")
        rows.append(tuple(_with_shards(cells, plan.orders[rank])))
    return tuple(rows)


def _way(op: Op) -> str:
    return "F" if op.kind == "F" else "B"


def _with_shards(cells: Sequence[str], order: Sequence[Op]) -> list[str]:
    """Cells with UNSHARD before a stage's use, RESHARD when others come first, REDUCE_GRAD after its last op."""
    ops = {str(op): k for k, op in enumerate(order)}
    last = {op.stage: str(op) for op in order}
    active: list[int] = []
    out: list[str] = []
    for cell in cells:
        at = ops.get(cell)
        if at is None:
            out.append(cell)
            continue
        soon: list[int] = []
        for op in order[at:]:
            if op.stage not in soon:
                soon.append(op.stage)
            if len(soon) == ACTIVE_STAGES:
                break
        out += [f"{s}RESHARD" for s in active if s not in soon]
        out += [f"{s}UNSHARD" for s in soon if s not in active]
        active = soon
        out.append(cell)
        stage = order[at].stage
        if last[stage] == cell:
            out.append(f"{stage}REDUCE_GRAD")
    return out + [f"{s}RESHARD" for s in active]


def _text(rows: Iterable[Iterable[str]]) -> str:
    return "".join(",".join(row) + "\n" for row in rows)

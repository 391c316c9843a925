"""A plan as the schedule CSVs that torch.distributed.pipelining loads, with or without communication.

Knows: what PyTorch's schedule text can express (one line per rank; F, I, W and B of one chain of stages; sends and the
waits for them, receives, FSDP's unshard and reshard, the reduction of gradients and the wait for it), which version of
PyTorch supports what, and two requirements of its runtime: micro-batches in the order in which the last stage runs
them, and a stage on every rank. Does not know: torch.

PyTorch's runtime appends losses as they are computed and reads them by micro-batch: if the last stage runs 0, 2, 1, it
computes wrong gradients without an error. So micro-batches are renamed here in the last stage's order; they are
interchangeable, and only which slice of the batch is called 1 changes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan, Stage, slot_text
from octopipe.plans.setting import checkpointed_by_prices, lowering_costs, priced_recomputation
from octopipe.simulation.lowering import lower

OLDEST_TORCH = (2, 9)
ACTIONS_SINCE: dict[tuple[int, int], frozenset[str]] = {
    OLDEST_TORCH: frozenset(
        ("F", "I", "W", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "OVERLAP_F_B")
    ),
    (2, 10): frozenset(("REDUCE_GRAD",)),
    (2, 15): frozenset(("WAIT_REDUCE_GRAD", "WAIT_SEND_F", "WAIT_SEND_B")),
}
"""Actions by the PyTorch version that introduced them (in `torch/distributed/pipelining/schedules.py`)."""
ACTIVE_STAGES = 3
"""Number of a rank's sharded stages that are gathered at the same time, as in PyTorch's own lowering."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOrder:
    """A plan in the form that PyTorch can run: stages are numbered along the chain, micro-batches renamed and R
    omitted."""

    plan: Plan
    renamed: tuple[int, ...]
    """renamed[m]: the new number of micro-batch m of the given plan."""
    notes: tuple[str, ...]
    """The differences from the given plan, one line each."""


def torch_order(plan: Plan) -> TorchOrder:
    """Return the plan in PyTorch's terms; raise OctoPipeError with the reason if PyTorch cannot run it."""
    plan.check()
    if plan.forks:
        raise OctoPipeError(
            "PyTorch's schedules support one chain of stages, and this plan's paths fork or join; run it with "
            "`octopipe train`, or plan without --mtp and --cut-head"
        )
    if plan.offloads:
        raise OctoPipeError(
            "PyTorch's pipeline runtime does not offload activations to host memory, which this plan needs to fit; run "
            "it with `octopipe train`, or plan without --offload"
        )
    if len(plan.routes) > 1:
        raise OctoPipeError(
            "PyTorch's schedules support one chain of stages; this plan has "
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
    if again := checkpointed_by_prices(plan):
        notes.append(
            f"the plan was priced with --recompute full: {len(again)} layers must checkpoint their activations "
            '(`octopipe.torch_engine.make_stages` does; in torchtitan, activation_checkpoint.mode = "full")'
        )
    elif priced_recomputation(plan) == "selective":
        notes.append(
            "the plan was priced with --recompute selective, which a schedule cannot express: without it the modules "
            "hold more memory than the plan says"
        )
    stages = tuple(Stage(first=s.first, stop=s.stop, rank=s.rank) for s in (plan.stages[number] for number in route))
    orders = tuple(
        tuple(Op(place[op.stage], op.kind, renamed[op.micro_batch]) for op in order if op.kind != "R")
        for order in plan.orders
    )

    def named(op: Op) -> Op:
        return Op(place[op.stage], op.kind, renamed[op.micro_batch])

    pairs = frozenset((named(a), named(b)) for a, b in plan.pairs if a.kind == "F" and b.kind in "IB")
    if len(pairs) < len(plan.pairs):
        notes.append(
            f"{len(plan.pairs) - len(pairs)} of {len(plan.pairs)} pairs became single ops: PyTorch's OVERLAP_F_B is a "
            "forward and a backward"
        )
    out = Plan(
        model=plan.model,
        num_layers=plan.num_layers,
        num_ranks=plan.num_ranks,
        num_micro_batches=plan.num_micro_batches,
        stages=stages,
        orders=orders,
        pairs=pairs,
        extra=plan.extra,
    )
    return TorchOrder(plan=out, renamed=tuple(renamed), notes=tuple(notes))


def pytorch_csv(plan: Plan) -> str:
    """Return the text for `_PipelineScheduleRuntime._load_csv(path, format="compute_only")`.

    PyTorch's schedules have no R: its stages recompute inside the backward if their module uses activation
    checkpointing, so R ops are left out.
    """
    return torch_order(plan).plan.to_csv()


def pytorch_csv_with_communication(plan: Plan, costs: CostTable | None = None, *, version: str | None = None) -> str:
    """Return the text for `_load_csv(path, format="compute_comms")`, with our deadlock-free sends and receives.

    `costs` time the lowering (default: those that the plan carries). `version`: the PyTorch that will load it (default:
    the newest).
    """
    return _text(rows_with(communicating_rows(torch_order(plan).plan, costs), actions_of_version(version)))


def actions_of_version(version: str | None = None) -> frozenset[str]:
    """Return the kinds of action in schedules of a PyTorch version (`2.13`, `2.15.0+cu130`); None: of the newest known.

    >>> sorted(actions_of_version("2.15.0") - actions_of_version("2.14.1"))
    ['WAIT_REDUCE_GRAD', 'WAIT_SEND_B', 'WAIT_SEND_F']
    """
    if version is None:
        return frozenset().union(*ACTIONS_SINCE.values())
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (number := (int(match[1]), int(match[2]))) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise OctoPipeError(f"{version[:40]!r} is not a version of PyTorch from {oldest} on; write it like 2.13")
    return frozenset().union(*(kinds for since, kinds in ACTIONS_SINCE.items() if since <= number))


def rows_with(rows: Iterable[Sequence[str]], kinds: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Return the rows with only these kinds of action; an older PyTorch does not need the others."""
    return tuple(tuple(cell for cell in row if _kind(cell) in kinds) for row in rows)


def _kind(cell: str) -> str:
    """Return the kind of action in a cell; a pair is written `(2F3;1I0)OVERLAP_F_B`."""
    return cell.rpartition(")")[2] if cell.startswith("(") else cell.strip("0123456789")


def communicating_rows(plan: Plan, costs: CostTable | None = None) -> tuple[tuple[str, ...], ...]:
    """Return, for every rank, computation, sends, receives, waits, unshards, reshards and reductions, in order.

    Every send has a wait, which PyTorch requires from 2.15 on: after the backward of the same stage and micro-batch if
    the output went to another stage, else at the end. By then the send is complete, so the wait never stalls; it
    releases the tensor that was sent.

    The plan is lowered for one in-order queue per rank. No backend is stricter, so the order is free of deadlocks on
    all.
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
        unwaited: dict[str, None] = {}
        for step in program.instructions(rank):
            if step.kind == "compute":
                ops = (step.op,) if step.beside is None else (step.op, step.beside)
                cells.append(slot_text(ops))
                for op in ops:
                    # The gradient for this backward came from the stage that received the output, so the send is
                    # complete.
                    sent = f"{op.stage}WAIT_SEND_F{op.micro_batch}"
                    if op.kind in "BI" and sent in unwaited:
                        cells.append(sent)
                        del unwaited[sent]
            elif step.kind == "send":
                to = f"SEND_{_way(step.op)}{step.op.micro_batch}"
                cells.append(f"{step.op.stage}{to}")
                unwaited[f"{step.op.stage}WAIT_{to}"] = None
            else:
                assert step.consumer is not None
                cells.append(f"{step.consumer.stage}RECV_{_way(step.op)}{step.op.micro_batch}")
        rows.append(tuple(_with_shards([*cells, *unwaited], plan.slots(rank))))
    return tuple(rows)


def _way(op: Op) -> str:
    return "F" if op.kind == "F" else "B"


def _with_shards(cells: Sequence[str], slots: Sequence[Sequence[Op]]) -> list[str]:
    """Add UNSHARD before a stage's use, RESHARD when other stages come first, REDUCE_GRAD after its last op."""
    places = {slot_text(slot): k for k, slot in enumerate(slots)}
    last = {op.stage: k for k, slot in enumerate(slots) for op in slot}
    active: list[int] = []
    out: list[str] = []
    for cell in cells:
        at = places.get(cell)
        if at is None:
            out.append(cell)
            continue
        soon: list[int] = []
        for op in (op for slot in slots[at:] for op in slot):
            if op.stage not in soon:
                soon.append(op.stage)
            if len(soon) == ACTIVE_STAGES:
                break
        out += [f"{s}RESHARD" for s in active if s not in soon]
        out += [f"{s}UNSHARD" for s in soon if s not in active]
        active = soon
        out.append(cell)
        for stage in (op.stage for op in slots[at] if last[op.stage] == at):
            out += [f"{stage}REDUCE_GRAD", f"{stage}WAIT_REDUCE_GRAD"]
    return out + [f"{s}RESHARD" for s in active]


def _text(rows: Iterable[Iterable[str]]) -> str:
    return "".join(",".join(row) + "\n" for row in rows)

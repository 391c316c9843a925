"""Plans of other tools: Megatron's layout strings with its own orders, and PyTorch's schedule CSVs.

Knows: Megatron's placement (stage i on rank i mod pp) and its two orders, 1F1B and interleaved 1F1B with micro-batch
groups; how layers are assigned to the stages of a schedule CSV. Does not know: the formats (`readers/`), times, files.

>>> from octopipe.plans.readers.megatron_text import read_megatron
>>> found = megatron_plan(read_megatron("Et|tt|tt|tL"), pp=2, num_micro_batches=2)
>>> found.plan.partition, [str(op) for op in found.plan.orders[1]]
((2, 2, 2, 2), ['1F0', '1F1', '3F0', '3B0', '3F1', '3B1', '1B0', '1B1'])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan, Stage, parse_orders
from octopipe.plans.readers.megatron_text import MegatronText
from octopipe.plans.readers.torch_csv import TorchSchedule
from octopipe.search.systems.shapes import even_sizes

_BLOCKS = frozenset("TtXxbBgGkKnN")
OWN_SYMBOLS = {
    "layout": {"E": frozenset("E"), "t": _BLOCKS, "m": frozenset("P"), "L": frozenset("L")},
    "hybrid": {
        "M": frozenset("M"),
        "G": frozenset("D"),
        "*": frozenset("*~"),
        "D": frozenset("@"),
        "+": frozenset("@"),
        "-": frozenset("-"),
        "E": frozenset("#"),
    },
}
"""For each kind of text, Megatron's letters and the symbols of a ModelSpec's layers that each letter may denote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignPlan:
    """A plan of another tool, and notes about it of one line each."""

    plan: Plan
    notes: tuple[str, ...] = ()


# -- Megatron ------------------------------------------------------------------------------------------


def megatron_plan(
    text: MegatronText,
    *,
    pp: int,
    num_micro_batches: int,
    vp: int | None = None,
    schedule: str | None = None,
    group_size: int | None = None,
    costs: CostTable | None = None,
) -> ForeignPlan:
    """The plan that Megatron runs for this text: its placement and its order.

    `vp` (stages per rank) and `schedule` ("1f1b" or "interleaved") follow from the text; if they are given, they must
    agree with it. `group_size`: `--microbatch-group-size-per-virtual-pipeline-stage` (default: pp). With `costs`, the
    text must match that model's layers, and the plan gets its name.
    """
    pieces, notes = _with_ends(text, pp)
    if len(pieces) % pp:
        raise OctoPipeError(
            f"{len(pieces)} stages on {pp} ranks; Megatron requires the same number on every rank: change --pp"
        )
    chunks = len(pieces) // pp
    if vp is not None and vp != chunks:
        raise OctoPipeError(f"the text has {len(pieces)} stages, {chunks} per rank of {pp}; --vp {vp} does not fit it")
    own = "1f1b" if chunks == 1 else "interleaved"
    if schedule is not None and schedule != own:
        raise OctoPipeError(f"{chunks} stages per rank run as {own} in Megatron, not {schedule}; leave --schedule out")
    _check_predictions(text, pieces, pp)
    if costs is not None:
        _check_model(text.kind, pieces, costs)
    group = group_size or pp
    if chunks > 1 and not pp <= group <= num_micro_batches:
        raise OctoPipeError(f"groups of {group} micro-batches; Megatron takes from pp ({pp}) to {num_micro_batches}")
    if chunks > 1 and 0 < num_micro_batches % group < pp:
        raise OctoPipeError(
            f"{num_micro_batches} micro-batches leave a last group of {num_micro_batches % group}; Megatron wants "
            f"none or at least pp ({pp}): change --micro-batches or --group-size"
        )
    return ForeignPlan(
        plan=_assembled(text, pieces, pp, num_micro_batches, group, costs), notes=tuple(notes + _empties(pieces))
    )


def _with_ends(text: MegatronText, pp: int) -> tuple[list[str], list[str]]:
    """Return the letters of every stage, and notes. The pattern of a hybrid model lacks the embedding (<), prediction
    layers (m) and head (>), so these are added, and a pattern without | is split evenly."""
    pieces = list(text.stages)
    notes: list[str] = []
    if text.kind == "layout":
        return pieces, notes
    if len(pieces) == 1 and pp > 1:
        inner = pieces[0]
        if len(inner) % pp:
            raise OctoPipeError(
                f"{len(inner)} layers without | on {pp} ranks; Megatron splits evenly only: put | where stages end"
            )
        size = len(inner) // pp
        pieces = [inner[k : k + size] for k in range(0, len(inner), size)]
        notes.append("the pattern has no |: split evenly, as Megatron does")
    pieces[0] = "<" + pieces[0]
    pieces[-1] += "m" * text.depths + ">"
    return pieces, notes


def _check_predictions(text: MegatronText, pieces: Sequence[str], pp: int) -> None:
    if text.kind == "layout" and text.depths:
        at = next(k for k, piece in enumerate(pieces) if "m" in piece)
        if at < len(pieces) - pp:
            raise OctoPipeError(f"multi-token prediction in stage {at}; Megatron requires it in its rank's last stage")


def _check_model(kind: str, pieces: Sequence[str], costs: CostTable) -> None:
    letters = "".join(pieces)
    if len(letters) != costs.num_layers:
        raise OctoPipeError(
            f"the text has {len(letters)} layers with embedding and head, {costs.model} has {costs.num_layers}; "
            "give the model the text was written for"
        )
    ends = {"<": frozenset("E"), ">": frozenset("L"), "m": frozenset("P")}
    known = OWN_SYMBOLS[kind] | (ends if kind == "hybrid" else {})
    for k, (letter, symbol) in enumerate(zip(letters, costs.symbols)):
        if symbol not in known[letter]:
            raise OctoPipeError(
                f"layer {k} is {letter} in the text and {symbol} in {costs.model}; give the text's model"
            )


def _empties(pieces: Sequence[str]) -> list[str]:
    empty = [k for k, piece in enumerate(pieces) if not piece]
    if not empty:
        return []
    return [
        f"stages {', '.join(map(str, empty))} hold no layers: left out of the plan (Megatron still passes every "
        "micro-batch through their ranks: one more transfer each way)"
    ]


def _assembled(text: MegatronText, pieces: Sequence[str], pp: int, m: int, group: int, costs: CostTable | None) -> Plan:
    chunks = len(pieces) // pp
    full = [k for k, piece in enumerate(pieces) if piece]
    name = {k: number for number, k in enumerate(full)}
    stages, first = [], 0
    for k in full:
        stages.append(Stage(first=first, stop=first + len(pieces[k]), rank=k % pp))
        first += len(pieces[k])
    orders = []
    for rank in range(pp):
        order = megatron_order(rank, pp, chunks, m, group)
        orders.append(tuple(Op(name[op.stage], op.kind, op.micro_batch) for op in order if op.stage in name))
    flag = "--pipeline-model-parallel-layout" if text.kind == "layout" else "--hybrid-layer-pattern"
    return Plan(
        model=costs.model if costs else "",
        num_layers=first,
        num_ranks=pp,
        num_micro_batches=m,
        stages=tuple(stages),
        orders=tuple(orders),
        extra={"system": "megatron " + ("1f1b" if chunks == 1 else "interleaved"), "megatron": {flag: text.text()}},
    ).check("Megatron's plan")


def megatron_order(rank: int, pp: int, chunks: int, num_micro_batches: int, group: int) -> tuple[Op, ...]:
    """Megatron's own order on one rank, with stages numbered round robin: 1F1B, or interleaved in groups."""
    table = [
        (chunk, m)
        for start in range(0, num_micro_batches, group)
        for chunk in range(chunks)
        for m in range(start, min(start + group, num_micro_batches))
    ]
    forward = [Op(chunk * pp + rank, "F", m) for chunk, m in table]
    backward = [Op((chunks - 1 - chunk) * pp + rank, "B", m) for chunk, m in table]
    warmup = pp - rank - 1 if chunks == 1 else 2 * (pp - rank - 1) + (chunks - 1) * group
    warmup = min(warmup, len(table))
    order = forward[:warmup]
    for k, op in enumerate(backward):
        order += [*forward[warmup + k : warmup + k + 1], op]
    return tuple(order)


# -- PyTorch -------------------------------------------------------------------------------------------


def torch_plan(
    schedule: TorchSchedule, *, partition: Sequence[int] = (), costs: CostTable | None = None, where: str = "schedule"
) -> ForeignPlan:
    """The plan that PyTorch runs for this CSV.

    A CSV contains nothing about layers: `partition` gives the number of layers of each stage. Without it, the model of
    `costs` is split evenly; without a model, every stage is one layer.
    """
    orders = parse_orders(schedule.rows)
    count = max(op.stage for order in orders for op in order) + 1
    micro_batches = max(op.micro_batch for order in orders for op in order) + 1
    if count > 1 << 16 or micro_batches > 1 << 20:
        raise OctoPipeError(f"{where}: {count} stages, {micro_batches} micro-batches; that is not a schedule")
    home: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for op in order:
            if home.setdefault(op.stage, rank) != rank:
                raise OctoPipeError(f"{where}: stage {op.stage} runs on ranks {home[op.stage]} and {rank}; keep one")
    missing = [s for s in range(count) if s not in home]
    if missing:
        raise OctoPipeError(f"{where}: stage {missing[0]} of {count} has no op; number stages without gaps")
    notes = []
    sizes = list(partition)
    if sizes and len(sizes) != count:
        raise OctoPipeError(f"{where}: {count} stages, but --partition gives {len(sizes)} sizes; give one per stage")
    if not sizes and costs is not None:
        sizes = even_sizes(costs, count)
        notes.append(f"the file does not say which layers a stage holds: {costs.model} split evenly (--partition)")
    elif not sizes:
        sizes = [1] * count
        notes.append("the file does not say which layers a stage holds: one layer per stage (--model, --partition)")
    if costs is not None and sum(sizes) != costs.num_layers:
        raise OctoPipeError(
            f"--partition has {sum(sizes)} layers, {costs.model} has {costs.num_layers}; make them equal"
        )
    if schedule.communicates:
        notes.append("its sends and receives are derived again: a plan holds the order of computation")
    if schedule.pairs:
        notes.append(f"{len(schedule.pairs)} OVERLAP_F_B are pairs of the plan: their ops run together")
    last = [op.micro_batch for op in orders[home[count - 1]] if op.stage == count - 1 and op.kind == "F"]
    if last != sorted(last):
        notes.append(
            f"the last stage runs micro-batches {', '.join(map(str, last[:16]))}: PyTorch's runtime silently "
            "assigns their losses to other micro-batches; export this plan to have them renumbered"
        )
    first = 0
    stages = []
    for s, size in enumerate(sizes):
        stages.append(Stage(first=first, stop=first + size, rank=home[s]))
        first += size
    plan = Plan(
        model=costs.model if costs else "",
        num_layers=first,
        num_ranks=len(orders),
        num_micro_batches=micro_batches,
        stages=tuple(stages),
        orders=orders,
        pairs=frozenset((Op.parse(a), Op.parse(b)) for a, b in schedule.pairs),
        extra={"system": "torch csv"},
    )
    return ForeignPlan(plan=plan.check(where), notes=tuple(notes))

"""Orders on the V placement (stages r and 2p-1-r on rank r), built in unit slots and then kept.

Knows: how a repeated block of F and I becomes an order with W in the free slots, and how its warm-up and its
cool-down are tightened without holding more than a given number of half-chunks. Does not know: real times;
a plan built here keeps its order whatever its stages cost.

Qi, Wan, Amar, Lin, "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (V-Half, V-Min), and Qi et
al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (ZB-V). Every op takes one slot, a forward holds one
half-chunk until its W, and transfers are free: the setting of their closed forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan
from octopipe.search.systems.closed_forms import ClosedForm, highest_peak, on_timeline, span_bubble_ms
from octopipe.search.systems.registry import require
from octopipe.search.systems.shapes import even_sizes, make_plan, stages_from_sizes, wave

PERIOD = 6
"""Slots in which a rank repeats: F, I and W of two chunks."""
NEVER = 1 << 60
Block = Callable[[int, int], Sequence[int]]
"""(rank, p) -> slots of F chunk 0, F chunk 1, I chunk 1, I chunk 0 of micro-batch 0."""


def v_plan(costs: CostTable, p: int, m: int, orders: Sequence[Sequence[Op]]) -> Plan:
    """Return the plan with these orders on the even split into 2p stages."""
    return make_plan(costs, p, m, stages_from_sizes(even_sizes(costs, 2 * p), wave(2 * p, p)), orders)


def require_two_chunks(name: str, costs: CostTable, p: int) -> None:
    """Raise NotApplicableError if there are not enough layers for two stages per rank."""
    require(
        costs.num_layers >= 2 * p,
        name,
        f"pp {p} needs {2 * p} stages but {costs.model} has {costs.num_layers} layers",
    )


def unit_forms(name: str, p: int, bubble: float, peak: float, *, formula: tuple[str, str]) -> list[ClosedForm]:
    """Return the forms for span bubble and highest peak with F = I = W = 1 and one half-chunk per layer."""
    m = 3 * p
    costs = CostTable.uniform(num_layers=2 * p, activation_bytes=1.0, stash_bytes=1.0)
    return [
        ClosedForm(
            system=name,
            case=f"p={p} m={m} F=I=W=1",
            quantity=quantity,
            formula=rule,
            expected=expected,
            simulate=on_timeline(name, costs, p, m, read),
        )
        for quantity, rule, expected, read in (
            ("bubble (span)", formula[0], bubble, span_bubble_ms),
            ("highest peak, half-chunks", formula[1], peak, highest_peak),
        )
    ]


def block_orders(p: int, m: int, block: Block) -> list[list[Op]]:
    """Return the orders of a block that repeats every six slots, with warm-up and cool-down tightened within its
    peak."""
    cap = max(_peak([op for _, op in row]) for row in _repeat(p, max(m, 2 * p), block))
    rows = _squeeze(p, _repeat(p, m, block))
    moved = True
    while moved:
        rows, moved = _move_earlier(p, rows, cap)
    return cool_down(p, [[op for _, op in row] for row in rows], cap)


def _repeat(p: int, m: int, block: Block) -> list[list[tuple[int, Op]]]:
    """Return for every rank its (slot, op) in slot order: the block of every micro-batch, each W in the first free slot
    after its I."""
    rows = []
    for r in range(p):
        down, up = r, 2 * p - 1 - r
        slots: dict[int, Op] = {}
        for b in range(m):
            chain = (Op(down, "F", b), Op(up, "F", b), Op(up, "I", b), Op(down, "I", b))
            for slot, op in zip(block(r, p), chain, strict=True):
                slots[slot + PERIOD * b] = op
        for slot in sorted(slots):
            stage, kind, b = slots[slot]
            if kind == "I":
                free = slot + 1
                while free in slots:
                    free += 1
                slots[free] = Op(stage, "W", b)
        rows.append(sorted(slots.items()))
    return rows


def _peak(order: Sequence[Op]) -> int:
    """Return the largest number of half-chunks that an order holds at once."""
    held = most = 0
    for op in order:
        held += (op.kind == "F") - (op.kind == "W")
        most = max(most, held)
    return most


class _Slots:
    """The slots in which the ops run so far have ended; `ready` returns the first slot in which an op can run."""

    def __init__(self, p: int) -> None:
        self.last = 2 * p - 1
        self.end: dict[tuple[int, str, int], int] = {}

    def ready(self, op: Op) -> int:
        stage, kind, b = op
        if kind == "F":
            return self.end.get((stage - 1, "F", b), NEVER) if stage > 0 else 0
        if kind == "W":
            return self.end.get((stage, "I", b), NEVER)
        own = self.end.get((stage, "F", b), NEVER)
        return own if stage == self.last else max(own, self.end.get((stage + 1, "I", b), NEVER))


def _squeeze(p: int, rows: list[list[tuple[int, Op]]]) -> list[list[tuple[int, Op]]]:
    """Return the same orders with every op in the earliest possible slot."""
    slots = _Slots(p)
    out: list[list[tuple[int, Op]]] = [[] for _ in range(p)]
    # Slots of the repeated block respect every dependency, so all ops in slot order are a topological order.
    for _, rank, op in sorted((slot, rank, op) for rank, row in enumerate(rows) for slot, op in row):
        begin = max(slots.ready(op), out[rank][-1][0] + 1 if out[rank] else 0)
        slots.end[op] = begin + 1
        out[rank].append((begin, op))
    return out


def _move_earlier(p: int, rows: list[list[tuple[int, Op]]], cap: int) -> tuple[list[list[tuple[int, Op]]], bool]:
    """Fill each free slot with the first later op of its rank that can run there without exceeding `cap`; return the
    rows and whether any op has moved."""
    slots = _Slots(p)
    left = [list(row) for row in rows]
    held = [0] * p
    out: list[list[tuple[int, Op]]] = [[] for _ in range(p)]
    moved = False
    now = 0
    while any(left):
        ran = []
        for rank, row in enumerate(left):
            at = _pick(slots, row, held[rank], now, cap)
            if at < 0:
                continue
            slot, op = row.pop(at)
            moved |= slot != now
            held[rank] += (op.kind == "F") - (op.kind == "W")
            out[rank].append((now, op))
            ran.append(op)
        now += 1
        for op in ran:
            slots.end[op] = now
    return out, moved


def _pick(slots: _Slots, row: list[tuple[int, Op]], held: int, now: int, cap: int) -> int:
    """Return the position of the op to run now, or -1. Ops never move to a later slot, so an op whose slot has come
    runs."""
    if row and row[0][0] == now:
        return 0
    most = held
    seen = set()
    for at, (_, op) in enumerate(row):
        if slots.ready(op) <= now and (op.kind != "F" or most < cap):
            return at
        # Ops of one stage and kind run in the order of micro-batches: if one cannot run, later ones cannot either.
        seen.add(op[:2])
        if len(seen) == PERIOD:
            break
        held += (op.kind == "F") - (op.kind == "W")
        most = max(most, held)
    return -1


def cool_down(p: int, orders: Sequence[Sequence[Op]], cap: int) -> list[list[Op]]:
    """Reorder the ops after a rank's last chunk-0 forward: F and I first, W if nothing else can run or for lack of
    room."""
    fixed, rest, weights = [], [], []
    for rank, order in enumerate(orders):
        cut = 1 + max(k for k, op in enumerate(order) if op.kind == "F" and op.stage == rank)
        fixed.append(list(reversed(order[:cut])))
        rest.append([op for op in order[cut:] if op.kind != "W"])
        weights.append([op for op in order[cut:] if op.kind == "W"])
    slots = _Slots(p)
    held = [0] * p
    out: list[list[Op]] = [[] for _ in range(p)]
    now = 0
    while any(fixed) or any(rest) or any(weights):
        ran = []
        for rank in range(p):
            op = _next(slots, fixed[rank], rest[rank], weights[rank], held[rank] < cap, now)
            if op is not None:
                held[rank] += (op.kind == "F") - (op.kind == "W")
                out[rank].append(op)
                ran.append(op)
        now += 1
        for op in ran:
            slots.end[op] = now
    return out


def _next(slots: _Slots, fixed: list[Op], rest: list[Op], weights: list[Op], room: bool, now: int) -> Op | None:
    """Remove the op that a rank runs now from its lists and return it; None if none can run. `fixed` is reversed, the
    others are in order."""
    if fixed:
        return fixed.pop() if slots.ready(fixed[-1]) <= now else None
    for at, op in enumerate(rest):
        if slots.ready(op) <= now and (op.kind == "I" or room):
            return rest.pop(at)
        if op.kind == "F":
            break  # nothing overtakes a forward, because the next rank waits for it
    for at, op in enumerate(weights):
        if slots.ready(op) <= now:
            return weights.pop(at)
    return None

"""What makes a plan's pairs wrong, a line for each thing that names the pair and the mend.

Knows: which two ops may run together. Does not know: whether it is worth it (costs do), the rest of a plan's rules.

At most one of a pair is a backward (I or B): a device has one autograd thread. W runs beside anything with an exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octopipe.plans.op import Op

if TYPE_CHECKING:
    from octopipe.plans.plan import Plan

MAX_PAIR_PROBLEMS = 20


def pair_problems(plan: Plan) -> list[str]:
    """Everything wrong with the pairs as such; whether orders wait for each other is looked at with the orders."""
    if not plan.pairs:
        return []
    place: dict[Op, tuple[int, int]] = {}
    named = {op for pair in plan.pairs for op in pair}
    for rank, order in enumerate(plan.orders):
        for position, op in enumerate(order):
            if op in named:
                place[op] = rank, position
    out: list[str] = []
    taken: dict[Op, tuple[Op, Op]] = {}
    for pair in sorted(plan.pairs):
        words = "+".join(map(str, pair))
        missing = next((op for op in pair if op not in place), None)
        if missing is not None:
            out.append(f"pair {words}: no rank runs {missing}; remove the pair or add the op")
            continue
        (rank, at), (other, after) = place[pair[0]], place[pair[1]]
        shared = next((op for op in pair if op in taken), None)
        if shared is not None:
            out.append(f"pair {words}: {shared} is part of another pair already; an op is part of one at most")
        elif rank != other or after != at + 1:
            out.append(f"pair {words}: its ops must stand side by side in one rank's order, in this sequence")
        elif wrong := _kinds_wrong(pair):
            out.append(f"pair {words}: {wrong}")
        taken |= dict.fromkeys(pair, pair)
        if len(out) >= MAX_PAIR_PROBLEMS:
            break
    return out


def _kinds_wrong(pair: tuple[Op, Op]) -> str:
    first, second = pair
    backward = [op for op in pair if op.kind in "IB"]
    if len(backward) == 2:
        return f"{first} and {second} are both backward; only one of a pair may be"
    if first.kind == second.kind == "W":
        return "two weight gradients cannot hide anything; write them as single ops"
    if first[::2] == second[::2]:
        return "both are of one stage and micro-batch; each needs the other's result"
    return ""

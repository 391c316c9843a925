"""Validity rules for pairs; each problem is one line that names the pair and the remedy.

Knows: which two ops may run together. Does not know: whether that is faster (costs do), or the other rules for plans.

At most one op of a pair is a backward (I or B), because a device has one autograd thread. W can be paired with any op
that contains an exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octopipe.plans.op import Op

if TYPE_CHECKING:
    from octopipe.plans.plan import Plan

MAX_PAIR_PROBLEMS = 20


def pair_problems(plan: Plan) -> list[str]:
    """All problems of the pairs themselves; cyclic waits are checked together with the orders."""
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
            out.append(f"pair {words}: {shared} is already part of another pair; an op belongs to at most one")
        elif rank != other or after != at + 1:
            out.append(f"pair {words}: its ops must be adjacent in one rank's order, in this sequence")
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

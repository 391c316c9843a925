"""DualPipe: micro-batches enter from both ends; forwards of one direction pair with backwards of the other.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024. Rule: p even, m even, m >= 2p; direction 0 has stage r on
rank r, direction 1 stage p-1-r, so the weights are held twice. Eight steps per rank (see `dual_order`), in
which phase 0 is the direction that enters from the rank's nearer end.
Bubble (p/2-1)(F&B + B - 3W) for F = I, with B the full backward I + W and F&B the time of an overlapped pair;
activations p+1 micro-batches.

If the costs have an exchange between expert ranks, F&B is a pair of the plan, and its W fills what stays exposed (as in
the paper's figure of an overlapped chunk). Simplified: without an exchange there is nothing to hide in a pair, and F&B
is F followed by B. The forward's result is then sent at the end of the forward, not of the pair, so the simulated
bubble is smaller than the published one; `paired_idle_ms` replays the order with pairs as blocks and reproduces the
published one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from octopipe.costs.segments import Segments
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan
from octopipe.search.systems.bidirectional import bidirectional_plan, micro_batch_of, stage_on
from octopipe.search.systems.registry import Setting, build_plan, require, system
from octopipe.simulation.timeline import Timeline

if TYPE_CHECKING:
    from octopipe.search.systems.closed_forms import ClosedForm

Block = tuple[Op, ...]


@system(
    name="dualpipe",
    title="DualPipe",
    paper="DeepSeek-AI, 2024",
    year=2024,
    tunes=("placement",),
    constraint="even pp, even micro-batches >= 2 pp; weights held twice",
)
def dualpipe(setting: Setting) -> Plan:
    p, m = setting.num_ranks, setting.num_micro_batches
    require(p % 2 == 0, "dualpipe", f"pp {p} is odd; its two directions need an even number of ranks")
    require(m % 2 == 0, "dualpipe", f"{m} micro-batches cannot be shared evenly by two directions")
    require(m >= 2 * p, "dualpipe", f"{m} micro-batches are fewer than 2 pp = {2 * p}")
    blocks = dualpipe_blocks(p, m)
    plan = bidirectional_plan(setting.costs, p, m, [[op for block in row for op in block] for row in blocks])
    return overlapped(plan, setting.costs, blocks)


def overlapped(plan: Plan, costs: CostTable, blocks: list[list[Block]]) -> Plan:
    """Return the plan with its blocks of two ops as pairs, if the costs have an exchange to hide."""
    if not costs.exchanges:
        return plan
    return replace(plan, pairs=frozenset((b[0], b[1]) for row in blocks for b in row if len(b) == 2))


def dualpipe_blocks(p: int, m: int) -> list[list[Block]]:
    """Return the order of every rank as blocks: an overlapped pair F&B is one block, every other op a block by
    itself."""
    ranks = []
    for rank in range(p):
        # Phase 0 enters from the rank's nearer end: direction 0 on the first half of the ranks.
        flip = int(rank >= p // 2)
        ranks.append(
            [
                tuple(
                    Op(stage_on(rank, phase ^ flip, p), kind, micro_batch_of(index, phase ^ flip))
                    for phase, kind, index in block
                )
                for block in dual_order(p // 2, min(rank, p - 1 - rank), m // 2 - p)
            ]
        )
    return ranks


def dual_order(half: int, h: int, surplus: int) -> list[tuple[tuple[int, str, int], ...]]:
    """Return the eight steps of a rank that is `h` ranks from its end of a pipeline of `half` ranks.

    Each entry is (phase, kind, index of the micro-batch within its phase); an overlapped pair is one block of
    two entries. `surplus` is the number of micro-batches per phase beyond those of fill and drain: m/2 - p, or
    m - 2p in the V form.
    """
    out: list[tuple[tuple[int, str, int], ...]] = []
    taken = {(phase, kind): 0 for phase in (0, 1) for kind in "FB"}
    waiting: list[tuple[int, int]] = []

    def next_of(phase: int, kind: str) -> int:
        taken[phase, kind] += 1
        return taken[phase, kind] - 1

    def forward(phase: int) -> None:
        out.append(((phase, "F", next_of(phase, "F")),))

    def backward(phase: int, defer: bool = False) -> None:
        index = next_of(phase, "B")
        out.append(((phase, "I" if defer else "B", index),))
        if defer:
            waiting.append((phase, index))

    def pair(phase: int) -> None:
        out.append(((phase, "F", next_of(phase, "F")), (1 - phase, "B", next_of(1 - phase, "B"))))

    def weight() -> None:
        phase, index = waiting.pop(0)
        out.append(((phase, "W", index),))

    rest = half - h - 1
    for _ in range(2 * rest):  # 1: fill
        forward(0)
    for _ in range(h + 1):  # 2: both directions
        forward(0)
        forward(1)
    for _ in range(rest):  # 3: the first gradients come back, weights at once
        backward(1, defer=True)
        weight()
        forward(1)
    for i in range(surplus + h + 1):  # 4: the steady state, overlapped pairs
        if i == 0 and rest == 0:  # not a pair on the middle ranks, so that the forward's result leaves sooner
            forward(0)
            backward(1)
        else:
            pair(0)
        pair(1)
    for _ in range(rest):  # 5: phase 0 has no forwards left
        backward(1)
        pair(1)
    for i in range(h + 1):  # 6: drain both, weights deferred in the second half
        second = i > (h + 1) // 2
        middle = i == (h + 1) // 2
        backward(1, defer=second or (middle and h % 2 == 1))
        backward(0, defer=second or middle)
    for _ in range(rest):  # 7: weights fill the wait for the last gradients
        weight()
        backward(0, defer=True)
    for _ in range(h + 1):  # 8: the remaining weights
        weight()
    return out


def paired_idle_ms(plan: Plan, ranks: list[list[Block]], block_ms: Callable[[Block], float]) -> float:
    """Return the longest idle time of a rank if a pair is one block, as in the published formula.

    A block needs all of its inputs to start and has its results at its end. The simulator passes on the result of a
    forward as soon as that forward is done, which gives less idle time.
    """
    block_of = {op: (r, k) for r, row in enumerate(ranks) for k, block in enumerate(row) for op in block}
    done: dict[tuple[int, int], float] = {}
    left = sum(map(len, ranks))
    head, clock = [0] * len(ranks), [0.0] * len(ranks)
    while left:
        before = left
        for r, blocks in enumerate(ranks):
            while head[r] < len(blocks):
                here = (r, head[r])
                needed = {block_of[q] for op in blocks[here[1]] for q in plan.predecessors(op)} - {here}
                if not needed <= done.keys():
                    break
                begin = max([clock[r], *(done[n] for n in needed)])
                clock[r] = done[here] = begin + block_ms(blocks[here[1]])
                head[r] += 1
                left -= 1
        assert left < before, "the blocks wait for each other"
    busy = [sum(map(block_ms, blocks)) for blocks in ranks]
    return max(clock) - min(busy)


def closed_forms() -> list[ClosedForm]:
    """The published bubble, with pairs as blocks, and the activations."""
    forms = []
    for p, m, weight, pace in ((4, 8, 1.0, 1.0), (8, 16, 0.5, 1.0), (8, 32, 1.0, 0.8), (16, 32, 0.5, 0.9)):
        case = f"p={p} m={m} F=1 B={1 + weight:g} W={weight:g} F&B={pace * (2 + weight):g}"
        rules = "(p/2-1)(F&B+B-3W)", "micro-batches", "p+1"
        forms += forms_of_pairs("dualpipe", dualpipe_blocks, p, m, weight, pace, p // 2, case, rules)
    return forms


def forms_of_pairs(
    system: str,
    blocks: Callable[[int, int], list[list[Block]]],
    p: int,
    m: int,
    weight_ms: float,
    pace: float,
    half: int,
    case: str,
    rules: tuple[str, str, str],
) -> list[ClosedForm]:
    """Return the closed forms of a system with two directions of `half` stages each.

    `rules`: the formula of the idle time, the unit of the peak, and the formula of the peak.
    """
    from octopipe.search.systems.closed_forms import ClosedForm, highest_peak, on_timeline

    costs = CostTable.uniform(num_layers=2 * half, weight_ms=weight_ms, activation_bytes=1.0)
    idle, unit, peak = rules
    idle_ms = (half - 1) * (pace * (2 + weight_ms) + (1 + weight_ms) - 3 * weight_ms)
    return [
        ClosedForm(
            system=system,
            case=case,
            quantity="idle of the idlest rank",
            formula=idle,
            expected=idle_ms,
            simulate=published_idle(system, blocks, costs, p, m, pace),
        ),
        ClosedForm(
            system=system,
            case=case + ", as pairs",
            quantity="idle of the idlest rank",
            formula=idle,
            expected=idle_ms,
            simulate=on_timeline(system, paced(costs, pace), p, m, idlest_ms),
        ),
        ClosedForm(
            system=system,
            case=case,
            quantity=f"highest peak, {unit}",
            formula=peak,
            expected=2 * half + 1.0,
            simulate=on_timeline(system, costs, p, m, highest_peak),
        ),
    ]


def paced(costs: CostTable, pace: float) -> CostTable:
    """Return the costs of equal layers with an exchange such that a pair of F and B takes `pace` times as long as F and
    B in sequence."""
    forward, inward, weight = (float(x[0]) for x in (costs.forward_ms, costs.input_ms, costs.weight_ms))
    hidden = (1.0 - pace) * (forward + inward + weight)
    # The exchange at the end of F is hidden completely behind I. It must not be zero, or the costs have no exchange.
    part = max(hidden, 1e-12)
    row = [("compute", forward - part), ("exchange", part)]
    rows = [row for _ in range(costs.num_layers)]
    plain = [[("compute", inward)] for _ in range(costs.num_layers)]
    return costs.replace(segments=Segments.from_ms(rows, plain))


def idlest_ms(timeline: Timeline) -> float:
    """Return the makespan minus the work of the rank with the least work; a pair counts once."""
    return timeline.makespan_ms - float(timeline.busy_ms.min())


def published_idle(
    name: str, blocks: Callable[[int, int], list[list[Block]]], costs: CostTable, p: int, m: int, pace: float
) -> Callable[[], float]:
    """Return a function that computes the idle time on equal layers if an overlapped pair takes `pace` times F + B."""

    def block_ms(block: Block) -> float:
        alone = sum(float(costs.layer_times(op.kind)[0]) for op in block)
        return alone * (pace if len(block) > 1 else 1.0)

    return lambda: paired_idle_ms(build_plan(name, costs, p, m), blocks(p, m), block_ms)

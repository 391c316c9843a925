"""How the paper's measurements are read: the assumptions that it leaves open, and costs and plans under them.

Knows: the assumptions that determine a baseline's step time and how each is applied. Does not know: which of them fit;
parts/sensitivity.py changes them one at a time, and READING fits nine step times, throughputs and bubbles of baselines
best.

Open are: whether the baselines run their backward fused, as I and W one after the other, or with W deferred into
bubbles; whether a rank sends its share of a tensor or the whole tensor; whether transfers run beside computation;
whether Mist's stages may have any number of layers or, as in its published program, at most two more or fewer than the
mean; and the cost of the head, whose loss and logits may be missing in the published layer times (fitted per layer
kind).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import Network
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan
from octopipe.search.systems import build_plan
from octopipe.search.systems.frontier import Floats, Ints, best_partition
from octopipe.search.systems.layer_ranges import layer_ranges, one_f_one_b_plan
from octopipe.search.systems.mist import steady_ms
from octopipe.search.systems.split import split_backward
from octopipe.simulation.lowering import Channel
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline

Backward = Literal["fused", "in place", "deferred"]
Sent = Literal["share", "whole"]
LINK_GB_PER_S, NODE_GB_PER_S = 25.0, 200.0
"""Bandwidth of a GPU between nodes (200 Gbit/s) and inside a node, as the paper gives them."""
HEADS = (1.0, 1.5, 2.0, 2.5, 3.0)
BASELINES = ("1f1b", "interleaved", "tessel", "mist")
TITLES = {
    "1f1b": "1F1B",
    "interleaved": "Interleaved",
    "tessel": "Tessel",
    "mist": "Mist",
    "octopipe": "OctoPipe",
    "algorithm1": "Algorithm 1",
    "search": "our search",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One set of assumptions."""

    backward: Backward = "deferred"
    """The backward of every baseline; OctoPipe's own backward is always split."""
    head: float = 1.0
    """Factor on the measured times of the head."""
    sent: Sent = "share"
    """What every GPU of a rank sends: its share of the boundary tensor (sequence parallelism), or the whole tensor."""
    channel: Channel = "directed"
    """How the baselines' transfers relate to computation: beside it, in one queue per rank, or blocking it. OctoPipe's
    executor runs them beside it."""
    mist_slack: int | None = None
    """The largest number of layers by which a stage of Mist may differ from the mean; None: any."""

    @property
    def without_head(self) -> Reading:
        """The assumptions that affect a baseline besides its costs, which already include the head's factor."""
        return replace(self, head=1.0)

    @property
    def words(self) -> str:
        sent = "its share of" if self.sent == "share" else "the whole of"
        how = {
            "directed": "transfers beside computation",
            "pair": "transfers in one queue per pair of ranks",
            "single": "transfers in one queue a rank",
            "blocking": "computation waits for transfers",
        }
        return (
            f"backward {self.backward}; head × {self.head:g}; a GPU sends {sent} a boundary tensor; "
            f"{how[self.channel]}; "
            + (
                "Mist's stages of any size"
                if self.mist_slack is None
                else f"Mist's stages within {self.mist_slack} layers"
            )
        )


Head = Literal["published", "fitted"]
READING = Reading(backward="deferred", head=2.5, sent="whole", channel="single", mist_slack=2)
"""The reading that fits the paper's baselines best, with the authors' layer times; the head's factor is fitted."""
PUBLISHED = replace(READING, head=1.0)
"""The same with the head's time as the authors published it."""
LLAMA_HEAD = 1.5
"""The fitted factor for LLaMA. LLaMA 8B gains 1.40 over 1F1B in the paper, which no plan can reach with a factor above
2, and the baselines' ratios on 70B fit best with this factor. READING's factor fits Jamba and Nemotron-H best."""
ANALYTIC = replace(PUBLISHED, sent="share")
"""The reading for analytic costs, which already include the loss and the logits."""


def reading_of(head: Head | None, model: str = "") -> Reading:
    """Return the reading used for a model; None: the reading for analytic costs."""
    if head is None:
        return ANALYTIC
    if head == "published":
        return PUBLISHED
    return replace(READING, head=LLAMA_HEAD) if model.startswith("llama") else READING


def transfer_ms(hidden: int, *, tp: int, sent: Sent, gb_per_s: float = LINK_GB_PER_S, tokens: int = 4096) -> float:
    """Return the time of one boundary tensor in bf16.

    >>> round(transfer_ms(8192, tp=8, sent="share"), 2), round(transfer_ms(8192, tp=8, sent="whole"), 2)
    (0.34, 2.68)
    """
    return 2.0 * tokens * hidden / (tp if sent == "share" else 1) / (gb_per_s * 1e9) * 1e3


def read(costs: CostTable, reading: Reading, *, hidden: int, tp: int = 8, gb_per_s: float = LINK_GB_PER_S) -> CostTable:
    """Return measured costs under a reading: with its factor on the head and its transfer times."""
    changed = {}
    for name in ("forward_ms", "input_ms", "weight_ms"):
        times = getattr(costs, name).copy()
        times[-1] *= reading.head
        changed[name] = times
    hop = transfer_ms(hidden, tp=tp, sent=reading.sent, gb_per_s=gb_per_s)
    return costs.replace(network=Network.constant(hop), **changed)


def in_place(plan: Plan) -> Plan:
    """Replace every B by I and W, one after the other."""
    orders = []
    for order in plan.orders:
        out: list[Op] = []
        for op in order:
            if op.kind == "B":
                out += [Op(op.stage, "I", op.micro_batch), Op(op.stage, "W", op.micro_batch)]
            else:
                out.append(op)
        orders.append(tuple(out))
    return replace(plan, orders=tuple(orders))


CHUNKS = (1, 2, 3, 4, 5, 6, 7)
"""Numbers of stages per rank that are tried for Interleaved, including the 7 of the paper's Table III; the fastest
counts, as a user of Interleaved would choose it."""


def whole_plan(
    name: str,
    costs: CostTable,
    num_ranks: int,
    num_micro_batches: int,
    *,
    mist_slack: int | None = None,
    chunks: int = 2,
) -> Plan:
    """Return a baseline's plan with its backward fused. Tessel is represented by its fast mode, because a solver that
    stops by the clock may return a different plan each time."""
    if name == "interleaved":
        return build_plan(name, costs, num_ranks, num_micro_batches, chunks=chunks)
    if name == "mist" and mist_slack is not None:
        sizes = _mist_sizes(costs, num_ranks, num_micro_batches, mist_slack)
        if sizes is not None:
            return one_f_one_b_plan(costs, num_ranks, num_micro_batches, sizes)
    return build_plan("tessel-fast" if name == "tessel" else name, costs, num_ranks, num_micro_batches)


def _mist_sizes(costs: CostTable, num_ranks: int, num_micro_batches: int, slack: int) -> tuple[int, ...] | None:
    """Return Mist's partition among those whose stages differ from the mean by at most `slack` layers.

    None if there is no such plan without recomputation.
    """
    ranges = layer_ranges(costs, num_ranks, num_micro_batches, reserve_bytes=np.zeros(num_ranks))
    stage_ms = steady_ms(ranges)
    extra_ms = ranges.reduce_ms + ranges.optimizer_ms
    number = np.arange(ranges.num_layers + 1)
    allowed = np.abs(number[None, :] - number[:, None] - round(ranges.num_layers / num_ranks)) <= slack
    bare = np.isclose(stage_ms, ranges.forward_ms + ranges.backward_ms)

    def extend(labels: Floats, s: int, first: Ints, stop: Ints) -> Floats:
        t, d = stage_ms[s, first, stop], extra_ms[s, first, stop]
        return np.column_stack((t + np.maximum(labels[:, 0], d), np.maximum(labels[:, 1], t)))

    def value(labels: Floats) -> Floats:
        return labels[:, 0] + (num_micro_batches - 1) * labels[:, 1]

    best = best_partition(np.isfinite(stage_ms) & bare & allowed[None], np.zeros(2), extend, value)
    return None if best is None else best.sizes


def with_backward(plan: Plan, costs: CostTable, backward: Backward) -> Plan:
    if backward == "fused":
        return plan
    return in_place(plan) if backward == "in place" else split_backward(plan, costs)


def baseline_plan(name: str, costs: CostTable, num_ranks: int, num_micro_batches: int, reading: Reading) -> Plan:
    """Return a baseline's plan under a reading; Interleaved gets its fastest number of chunks."""
    if name != "interleaved":
        whole = whole_plan(name, costs, num_ranks, num_micro_batches, mist_slack=reading.mist_slack)
        return with_backward(whole, costs, reading.backward)
    found = interleaved_by_chunks(costs, num_ranks, num_micro_batches, reading)
    return min(found.values(), key=lambda pair: pair[1])[0]


def interleaved_by_chunks(
    costs: CostTable, num_ranks: int, num_micro_batches: int, reading: Reading
) -> dict[int, tuple[Plan, float]]:
    """Return Interleaved's plan and step time for every number of chunks that the model and its schedule allow."""
    out = {}
    for chunks in CHUNKS:
        try:
            whole = whole_plan("interleaved", costs, num_ranks, num_micro_batches, chunks=chunks)
        except OctoPipeError:
            continue
        plan = with_backward(whole, costs, reading.backward)
        out[chunks] = plan, simulate(plan, costs, channel=reading.channel, check=False).step_ms
    return out


def baseline(name: str, costs: CostTable, num_ranks: int, num_micro_batches: int, reading: Reading) -> Timeline:
    """Simulate a baseline's step under a reading."""
    plan = baseline_plan(name, costs, num_ranks, num_micro_batches, reading)
    return simulate(plan, costs, channel=reading.channel, label=TITLES[name], check=False)

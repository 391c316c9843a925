"""How the paper's measurements are to be read: what it leaves open, one record, and costs and plans under it.

Knows: the assumptions that decide a baseline's step time and how each is applied. Does not know: which of them fits;
parts/readings.py tries all of them on every step time the paper prints, and READING is what fits best there.

What is open: do the baselines run their backward whole, as I and W one after the other, or with W put off into
bubbles; does a rank send its share of a tensor or the whole of it; do transfers run beside computation; may Mist's
stages have any number of layers, or, as in its published programme, two more or fewer than the mean; and what the head
costs, whose loss and logits the published layer times (fitted per layer kind) may not hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

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
"""Between nodes (200 Gbit/s a GPU) and inside one, as the paper gives them."""
BACKWARDS: tuple[Backward, ...] = ("fused", "in place", "deferred")
SENT: tuple[Sent, ...] = ("share", "whole")
HEADS = (1.0, 1.5, 2.0, 2.5, 3.0)
CHANNELS: tuple[Channel, ...] = ("directed", "single", "blocking")
SLACKS: tuple[int | None, ...] = (None, 2)
BASELINES = ("1f1b", "interleaved", "tessel", "mist")
TITLES = {"1f1b": "1F1B", "interleaved": "Interleaved", "tessel": "Tessel", "mist": "Mist", "octopipe": "OctoPipe"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One set of assumptions."""

    backward: Backward = "deferred"
    """Of every baseline; OctoPipe's own is always split."""
    head: float = 1.0
    """Factor on the measured times of the head."""
    sent: Sent = "share"
    """What every GPU of a rank sends: its share of the boundary tensor (sequence parallelism) or the whole."""
    channel: Channel = "directed"
    """How the baselines' transfers meet computation: beside it, in one queue a rank, or instead of it. OctoPipe's
    executor runs them beside it."""
    mist_slack: int | None = None
    """Most layers by which a stage of Mist's departs from the mean; None: any."""

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


READING = Reading(backward="deferred", head=2.5, sent="whole", channel="single", mist_slack=2)
"""With the authors' layer times."""
LLAMA_HEAD = 1.5
"""The factor for LLaMA. Its 8B gains 1.40 over 1F1B in the paper, which no plan can with a head of more than × 2, and
the baselines' ratios on 70B fit best here; Jamba's and Nemotron-H's fit best with the factor of READING."""
ANALYTIC = replace(READING, head=1.0, sent="share")
"""With analytic costs, which hold the loss and the logits already."""


def reading_of(measured: bool, model: str = "") -> Reading:
    """The reading used for a model."""
    if not measured:
        return ANALYTIC
    return replace(READING, head=LLAMA_HEAD) if model.startswith("llama") else READING


def transfer_ms(hidden: int, *, tp: int, sent: Sent, gb_per_s: float = LINK_GB_PER_S, tokens: int = 4096) -> float:
    """Time of one boundary tensor in bf16.

    >>> round(transfer_ms(8192, tp=8, sent="share"), 2), round(transfer_ms(8192, tp=8, sent="whole"), 2)
    (0.34, 2.68)
    """
    return 2.0 * tokens * hidden / (tp if sent == "share" else 1) / (gb_per_s * 1e9) * 1e3


def read(costs: CostTable, reading: Reading, *, hidden: int, tp: int = 8, gb_per_s: float = LINK_GB_PER_S) -> CostTable:
    """Measured costs under a reading."""
    changed = {}
    for name in ("forward_ms", "input_ms", "weight_ms"):
        times = getattr(costs, name).copy()
        times[-1] *= reading.head
        changed[name] = times
    hop = transfer_ms(hidden, tp=tp, sent=reading.sent, gb_per_s=gb_per_s)
    return costs.replace(network=Network.constant(hop), **changed)


def in_place(plan: Plan) -> Plan:
    """Every B as I and W, one after the other."""
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


def chunks_of(costs: CostTable, num_ranks: int) -> int:
    """Stages per rank of Interleaved: of about two layers each, as the 56 stages of the paper's Table III."""
    return max(2, (costs.num_layers - 2) // (2 * num_ranks))


def whole_plan(
    name: str, costs: CostTable, num_ranks: int, num_micro_batches: int, *, mist_slack: int | None = None
) -> Plan:
    """A baseline's plan with its backward whole. Tessel's fast mode stands for Tessel: a solver that stops by the clock
    gives another plan on another day."""
    if name == "interleaved":
        return build_plan(name, costs, num_ranks, num_micro_batches, chunks=chunks_of(costs, num_ranks))
    if name == "mist" and mist_slack is not None:
        sizes = _mist_sizes(costs, num_ranks, num_micro_batches, mist_slack)
        if sizes is not None:
            return one_f_one_b_plan(costs, num_ranks, num_micro_batches, sizes)
    return build_plan("tessel-fast" if name == "tessel" else name, costs, num_ranks, num_micro_batches)


def _mist_sizes(costs: CostTable, num_ranks: int, num_micro_batches: int, slack: int) -> tuple[int, ...] | None:
    """Mist's partition among those whose stages have at most so many layers more or fewer than the mean; None where
    that leaves no plan without recomputation."""
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


def baseline(name: str, costs: CostTable, num_ranks: int, num_micro_batches: int, reading: Reading) -> Timeline:
    """A baseline's predicted step under a reading."""
    whole = whole_plan(name, costs, num_ranks, num_micro_batches, mist_slack=reading.mist_slack)
    plan = with_backward(whole, costs, reading.backward)
    return simulate(plan, costs, channel=reading.channel, label=TITLES[name])

"""The operating cost of a split: time lost to failures, and money and energy per token.

Knows: how often a job on many GPUs fails, the optimal checkpoint interval, the resulting share of useful work, and the
price and energy of a token. Does not know: how fast a split is (`pricing.py`).

Failures are random and independent, every `mtbf_hours` on average for each GPU, and stop the whole job, which restarts
from the last checkpoint. Between two checkpoints a job works for `interval_s` and writes for `checkpoint_s`; with M
seconds between failures of the job and R to restart, a segment takes M e^(R/M) (e^((interval + checkpoint)/M) - 1)
seconds on average (Daly, "A higher order estimate of the optimum checkpoint interval", 2006, equation 13).

>>> round(goodput(gpus=16384, mtbf_hours=50_000, checkpoint_s=30, restart_s=600).share, 3)
0.879
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The share of useful work of a job that fails from time to time."""

    share: float
    """The useful share of the job's time."""
    interval_s: float
    """Seconds of work between two checkpoints for which that share is largest."""
    hours_between_failures: float
    """Mean time between failures of the whole job."""


def segment_s(interval_s: float, checkpoint_s: float, restart_s: float, between_s: float) -> float:
    """The mean time until `interval_s` seconds of work have been done and saved in a checkpoint."""
    exponent = (interval_s + checkpoint_s) / between_s
    if exponent > 600 or restart_s / between_s > 600:
        return math.inf
    return between_s * math.exp(restart_s / between_s) * math.expm1(exponent)


def goodput(*, gpus: int, mtbf_hours: float, checkpoint_s: float = 60.0, restart_s: float = 600.0) -> Goodput:
    """The useful share of a job's time at its best checkpoint interval."""
    between_s = 3600.0 * mtbf_hours / gpus

    def useful(interval_s: float) -> float:
        return interval_s / segment_s(interval_s, checkpoint_s, restart_s, between_s)

    # The share has a single maximum: ternary search over the logarithm of the interval.
    low, high = math.log(max(checkpoint_s, 1.0) / 100), math.log(100 * max(between_s, checkpoint_s, 1.0))
    for _ in range(120):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (a, high) if useful(math.exp(a)) < useful(math.exp(b)) else (low, b)
    interval = math.exp((low + high) / 2)
    return Goodput(share=useful(interval), interval_s=interval, hours_between_failures=between_s / 3600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Economy:
    """The user's inputs for the cost of a job; None means that the result is not requested."""

    mtbf_hours: float | None = None
    checkpoint_s: float = 60.0
    restart_s: float = 600.0
    price: float | None = None
    """The price of one GPU for an hour, in any currency."""

    def numbers(self, *, gpus: int, tokens_per_gpu_per_second: float, watts: float | None) -> dict[str, Any]:
        """The goodput, and the cost and energy of a million tokens with failures included."""
        found = None
        if self.mtbf_hours is not None:
            found = goodput(
                gpus=gpus, mtbf_hours=self.mtbf_hours, checkpoint_s=self.checkpoint_s, restart_s=self.restart_s
            )
        useful = tokens_per_gpu_per_second * (1.0 if found is None else found.share)
        hours = None if useful <= 0 else 1e6 / useful / 3600.0
        return {
            "goodput": None if found is None else found.share,
            "checkpoint_every_s": None if found is None else found.interval_s,
            "hours_between_failures": None if found is None else found.hours_between_failures,
            "tokens_per_day": 86400.0 * useful * gpus,
            "price_per_million_tokens": None if self.price is None or hours is None else self.price * hours,
            "kwh_per_million_tokens": None if watts is None or hours is None else watts * hours / 1e3,
        }


def words_of(numbers: dict[str, Any]) -> list[str]:
    """The numbers as sentences."""
    out = []
    if numbers["goodput"] is not None:
        out.append(
            f"with failures every {numbers['hours_between_failures']:.3g} h, {100 * numbers['goodput']:.1f} % of "
            f"the time is useful work (a checkpoint every {numbers['checkpoint_every_s'] / 60:.3g} min): "
            f"{numbers['tokens_per_day'] / 1e9:.3g} B tokens a day."
        )
    if numbers["price_per_million_tokens"] is not None:
        out.append(f"a million tokens cost {numbers['price_per_million_tokens']:.3g}.")
    if numbers["kwh_per_million_tokens"] is not None:
        out.append(
            f"a million tokens take {numbers['kwh_per_million_tokens']:.3g} kWh on the GPU boards at their power limit "
            "(hosts, network and cooling not counted)."
        )
    return out

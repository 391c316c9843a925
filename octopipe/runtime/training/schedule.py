"""Learning rates: the rate of every step of a run.

Knows: the shapes of schedules. Does not know: optimizers or runs. Imports no torch.

Step t counts from 1, w is the warm-up and T the step at which the schedule ends:

    t <= w      rate x t / w
    afterwards  with p = (t - 1 - w) / (T - w), the part of the rest that is over:
    constant    rate
    linear      from rate to the least rate in proportion to p
    cosine      least + (rate - least) x (1 + cos(pi p)) / 2
    wsd         rate until the last `decay` steps, then linear to the least rate (warm-up, stable, decay)

So the first step after the warm-up has the full rate and the last one still trains, as in transformers' schedules.

>>> cosine = Schedule(kind="cosine", rate=1.0, warmup=2, steps=6)
>>> [round(cosine.at(t), 3) for t in range(1, 7)]
[0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
>>> wsd = Schedule(kind="wsd", rate=1.0, steps=6, decay=2, least=0.2)
>>> [round(wsd.at(t), 3) for t in range(1, 7)]
[1.0, 1.0, 1.0, 1.0, 1.0, 0.6]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from octopipe.base.errors import OctoPipeError

SCHEDULES = ("constant", "linear", "cosine", "wsd")
DECAY_SHARE = 0.1
"""The share of the steps in which WSD decays, if it is not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate of every step."""

    kind: str = "constant"
    rate: float = 1e-3
    """The largest rate."""
    least: float = 0.0
    """The rate at the end of the schedule."""
    warmup: int = 0
    steps: int = 1
    """The step at which the schedule ends; later ones have the least rate."""
    decay: int | None = None
    """Steps of the last part of WSD; default: a tenth of all."""

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise OctoPipeError(f"schedule is {self.kind!r}; one of {', '.join(SCHEDULES)}")
        if not (math.isfinite(self.rate) and self.rate >= 0 and math.isfinite(self.least) and self.least >= 0):
            raise OctoPipeError(f"learning rates {self.rate} and {self.least}; give numbers from 0 on")
        if self.least > self.rate:
            raise OctoPipeError(f"the final learning rate, {self.least}, is above {self.rate}; give a smaller --min-lr")
        if self.warmup < 0 or (self.decay is not None and self.decay < 1):
            raise OctoPipeError("warm-up steps must be at least 0 and decay steps at least 1")
        if self.kind != "constant" and self.warmup >= self.steps:
            raise OctoPipeError(
                f"{self.warmup} warm-up steps leave none of {self.steps} steps for the decay; use a shorter "
                "--warmup or --schedule constant"
            )
        if self.kind == "wsd" and self.warmup + self.decay_steps > self.steps:
            raise OctoPipeError(
                f"{self.warmup} steps of warm-up and {self.decay_steps} of decay are more than {self.steps}; "
                "use a shorter --decay-steps"
            )
        if self.decay is not None and self.kind != "wsd":
            raise OctoPipeError(f"--decay-steps belongs to --schedule wsd, not to {self.kind}; leave it out")

    @property
    def decay_steps(self) -> int:
        return max(1, round(DECAY_SHARE * self.steps)) if self.decay is None else self.decay

    def at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        if step <= self.warmup:
            return self.rate * step / self.warmup
        if self.kind == "constant":
            return self.rate
        first = self.steps - self.decay_steps if self.kind == "wsd" else self.warmup
        part = min(1.0, max(0.0, (step - 1 - first) / (self.steps - first)))
        left = (1.0 + math.cos(math.pi * part)) / 2.0 if self.kind == "cosine" else 1.0 - part
        return self.least + (self.rate - self.least) * left

    def about(self) -> dict[str, Any]:
        """Return the schedule as a checkpoint stores it, so that a resumed run can report differences."""
        out: dict[str, Any] = {"schedule": self.kind, "lr": self.rate, "min_lr": self.least, "warmup": self.warmup}
        if self.kind != "constant":
            out["schedule_steps"] = self.steps
        if self.kind == "wsd":
            out["decay_steps"] = self.decay_steps
        return out

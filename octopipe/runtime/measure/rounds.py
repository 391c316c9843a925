"""How far a profile has come: what runs now, and how long the rest will take.

Knows: how many rounds a profile has, how often each kind of layer runs in one, and how long it took so far. Does not
know: how layers run (`one_layer.py`), or how progress is shown.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from octopipe.base.display import duration

Tell = Callable[[str, float], None]
"""Receives what runs now, and the share of the whole work (0 to 1) that has been done."""
REPORT_EVERY_S = 1.0
"""Minimum number of seconds between two reports: a report takes host time, which would disturb the layers of other
ranks."""
LAYERS_END, ROUNDS_END = 0.1, 0.8
"""Shares of the whole after which every kind of layer has run once, and after which all rounds have run. Links and a
rehearsed plan come last."""


def no_report(doing: str, share: float) -> None:
    """Ignore every report."""


def rounds_of(repeats: int, warm_up: int, levels: Sequence[int], ranks: int) -> int:
    """Return how often the first rank runs the whole model in a profile.

    >>> rounds_of(10, 3, (1,), 1), rounds_of(10, 3, (1,), 4)
    (14, 20)
    """
    return 1 + warm_up + repeats + sum(1 + max(3, repeats // 2) for level in levels if 0 < level < ranks)


class Rounds:
    """Reports progress according to the times that layers took."""

    def __init__(
        self,
        group_of: Sequence[int],
        tell: Tell = no_report,
        *,
        total: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """`group_of`: the kind of every layer. `total`: the number of rounds of the profile, 0 if it is not known."""
        self._tell, self._clock, self._total = tell, clock, total
        self._count = Counter(group_of)
        self._seconds: dict[int, float] = {}
        self._names: dict[int, str] = {}
        self._ran = 0
        self._last = self._reported_at = clock()

    def preparing(self, kind: int, name: str) -> None:
        """Report that a kind of layer is about to run for the first time."""
        self._names[kind] = name
        number = len(self._names)
        left = self._round_s() * self._total
        rest = f", at least {duration(left)} to go" if left >= REPORT_EVERY_S else ""
        share = LAYERS_END * (number - 1) / len(self._count)
        self._tell(f"layer kind {number} of {len(self._count)} ({name}), memory{rest}", share)

    def begin(self) -> None:
        """Start timing: the time spent before this call does not count."""
        self._last = self._clock()

    def done(self, kind: int) -> None:
        """Record that a layer of this kind has run since `begin`, or since the preceding call."""
        now = self._clock()
        taken = now - self._last
        self._last = now
        self._seconds[kind] = (taken + self._seconds.get(kind, taken)) / 2  # the machine's speed drifts
        self._ran += 1
        if now - self._reported_at >= REPORT_EVERY_S and self._total:
            self._reported_at = now
            self._report(kind)

    def first_run(self, kind: int, seconds: float) -> None:
        """Record the time of a layer's first run, before it is measured."""
        self._seconds[kind] = seconds

    def _round_s(self) -> float:
        return sum(count * self._seconds.get(kind, 0.0) for kind, count in self._count.items())

    def _report(self, kind: int) -> None:
        layers = sum(self._count.values())
        number, layer = divmod(self._ran - 1, layers)
        done = min(1.0, self._ran / (layers * self._total))
        left = (1.0 - done) * self._round_s() * self._total
        number = min(number + 1, self._total)
        self._tell(
            f"round {number} of {self._total}, layer {layer + 1} of {layers} ({self._names.get(kind, '')}), "
            f"about {duration(left)} to go",
            LAYERS_END + (ROUNDS_END - LAYERS_END) * done,
        )

"""Measured times of the shards of a layer that is cut by vocabulary.

Knows: the time of one of n shards as a share of the whole layer's time, `fixed + share / n`, for every kind of op. Does
not know: which layers a plan cuts, or how shards are measured (`runtime/measure/shards.py`).

Without a measurement, a shard is assumed to take 1/n of the layer's time. It really takes longer: every shard of a head
runs the norm before it, and every shard of an embedding looks at all tokens.

>>> found = fitted(3, {2: (0.6, 0.5, 0.5), 4: (0.35, 0.25, 0.25)})
>>> [round(part, 3) for part in found.parts(8)]
[0.225, 0.125, 0.125]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief, kind_of
from octopipe.base.limits import MAX_RATIO, finite

Three = tuple[float, float, float]
"""One number each for F, I and W."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTimes:
    """The times of the shards of one layer."""

    layer: int
    fixed: Three
    """The time of every shard that does not depend on their number, as a share of the whole layer's F, I and W."""
    share: Three
    """The time that is divided among the shards, as a share of the whole layer's F, I and W."""

    def parts(self, count: int) -> Three:
        """Return F, I and W of one of `count` shards, as shares of those of the whole layer."""
        f, i, w = (a + b / count for a, b in zip(self.fixed, self.share, strict=True))
        return f, i, w

    def least_sum(self) -> Three:
        """Return a lower bound for the time of all shards of the layer together, for any number of shards (1, an uncut
        layer, included), as shares of F, I and W of the whole layer."""
        f, i, w = (min(1.0, 2 * a + b) for a, b in zip(self.fixed, self.share, strict=True))
        return f, i, w

    def record(self) -> dict[str, object]:
        return {"layer": self.layer, "fixed": list(self.fixed), "share": list(self.share)}


def parts_of(times: tuple[ShardTimes, ...], layer: int, count: int) -> Three:
    """Return F, I and W of one of `count` shards of a layer, as shares of those of the whole layer."""
    for one in times:
        if one.layer == layer:
            return one.parts(count)
    return 1 / count, 1 / count, 1 / count


def fitted(layer: int, seen: Mapping[int, Three]) -> ShardTimes:
    """Fit `fixed + share / n`, neither of them negative, to the shares measured for some numbers of shards n."""
    counts = np.array(sorted(seen), np.float64)
    fixed, share = [], []
    for kind in range(3):
        took = np.array([seen[int(n)][kind] for n in counts])
        slope, offset = np.polyfit(1 / counts, took, 1) if counts.size > 1 else (float((took * counts)[0]), 0.0)
        if offset < 0:
            slope, offset = float(np.mean(took * counts)), 0.0
        elif slope < 0:
            slope, offset = 0.0, float(np.mean(took))
        fixed.append(float(offset))
        share.append(float(slope))
    return ShardTimes(layer=layer, fixed=(fixed[0], fixed[1], fixed[2]), share=(share[0], share[1], share[2]))


def shard_times_from_object(value: object, num_layers: int, where: str) -> tuple[ShardTimes, ...]:
    """Return the shard times in a profile's "shards", a list of objects with layer, fixed and share."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise OctoPipeError(f'{where}: "shards" is a JSON {kind_of(value)}; give a list of objects')
    out: list[ShardTimes] = []
    for i, entry in enumerate(value):
        what = f'{where}: "shards" entry {i}'
        if not isinstance(entry, dict):
            raise OctoPipeError(f"{what} is a JSON {kind_of(entry)}; give an object with layer, fixed and share")
        layer = entry.get("layer")
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < num_layers:
            raise OctoPipeError(f"{what} is of layer {brief(layer)}; give one from 0 to {num_layers - 1}")
        if any(one.layer == layer for one in out):
            raise OctoPipeError(f"{what}: layer {layer} was given before; keep one of the two")
        fixed, share = (_three(entry.get(key), f"{what}: {key}") for key in ("fixed", "share"))
        out.append(ShardTimes(layer=layer, fixed=fixed, share=share))
    return tuple(out)


def _three(value: object, what: str) -> Three:
    numbers = [finite(x) for x in value] if isinstance(value, list) else []
    if len(numbers) != 3 or any(n is None or not 0 <= n <= MAX_RATIO for n in numbers):
        raise OctoPipeError(f"{what} is {brief(value)}; give three numbers from 0 to {MAX_RATIO:g}, for F, I and W")
    f, i, w = (float(n) for n in numbers if n is not None)
    return f, i, w

"""A profile: costs that were measured on real devices, and their JSON form.

Knows: what is measured in addition to layer times, and the JSON of `octopipe.profile/1`. Does not know: how a profile
is read (`profile_file`, `foreign_times`) or measured (`runtime/measure/`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octopipe.base.files import write_whole
from octopipe.costs.cluster.hardware import GIB
from octopipe.costs.layer_times import BYTES, TIMES, segments_object
from octopipe.costs.mode import Mode
from octopipe.costs.table import CostTable

FORMAT = "octopipe.profile/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured costs of a model on the ranks of one machine or cluster."""

    costs: CostTable
    """Costs with the times that apply while all ranks are busy."""
    partial: Mapping[int, CostTable] = field(default_factory=dict)
    """The same costs with a rank's times while only that many ranks are busy; empty if ranks share no resources."""
    op_overhead_ms: float = 0.0
    """Time of running one op in addition to its layers' own times."""
    fused_factor: float = 1.0
    """Time of B as a multiple of the time of I and W run one after the other."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Device, date, spread of the times: for people."""

    @property
    def mode(self) -> Mode | None:
        """How the layers ran when they were measured; None if the file does not say."""
        return self.costs.mode

    def with_costs(self, costs: CostTable) -> Profile:
        """Return the same profile with other costs (for example with a memory limit); `partial` keeps its times."""
        partial = {
            level: costs.replace(**{name: getattr(table, name) for name in TIMES.values()})
            for level, table in self.partial.items()
        }
        return replace(self, costs=costs, partial=partial)

    def as_priced(self, costs: CostTable) -> Profile:
        """Return the same profile with `costs`, which are its own costs priced for another routing. The times for fewer
        busy ranks change in the same proportion."""
        changed = {}
        for name in TIMES.values():
            own, asked = getattr(self.costs, name), getattr(costs, name)
            changed[name] = np.divide(asked, own, out=np.ones_like(own), where=own > 0)
        partial = {
            level: table.replace(**{name: getattr(table, name) * ratio for name, ratio in changed.items()})
            for level, table in self.partial.items()
        }
        return replace(self, partial=partial).with_costs(costs)

    def checkpointing(self, layers: Sequence[int]) -> Profile:
        """Return the profile with these layers checkpointed: they keep only their input, and run again before I."""
        if not layers:
            return self
        which = np.asarray(layers, dtype=np.int64)

        def again(costs: CostTable) -> CostTable:
            input_ms = costs.input_ms.copy()
            input_ms[which] += costs.forward_ms[which]
            held, workspace = costs.activation_bytes.copy(), costs.workspace_bytes.copy()
            handed = np.broadcast_to(costs.boundary_bytes, held.shape)
            taken = handed[which - 1]
            if costs.graph is not None:
                taken = np.array([sum(handed[k] for k in costs.graph.takes[layer]) for layer in layers])
            kept = np.minimum(held[which], taken)
            workspace[which] += held[which] - kept
            held[which] = kept  # the second forward restores the stash, so what is held until W does not change
            return costs.replace(input_ms=input_ms, activation_bytes=held, workspace_bytes=workspace)

        partial = {level: again(table) for level, table in self.partial.items()}
        return replace(self, costs=again(self.costs), partial=partial)

    def to_json(self) -> bytes:
        c = self.costs
        out: dict[str, Any] = {"format": FORMAT, "model": c.model, "pattern": c.symbols}
        if c.tokens_per_micro_batch is not None:
            out["tokens"] = c.tokens_per_micro_batch
        out |= {key: getattr(c, name).tolist() for key, name in TIMES.items()}
        if self.partial:
            out["partial"] = {
                str(level): {key: getattr(table, name).tolist() for key, name in TIMES.items()}
                for level, table in sorted(self.partial.items())
            }
        out |= {key: (getattr(c, name) / GIB).tolist() for key, name in BYTES.items()}
        out["optimizer_ms"] = c.optimizer_ms.tolist()
        if c.exchanges:
            out["segments"] = segments_object(c)
        if c.routing is not None:
            out["routing"] = c.routing.record()
        if c.shard_times:
            out["shards"] = [one.record() for one in c.shard_times]
        if c.graph is not None:
            out["graph"] = c.graph.record()
        if c.tied_bytes:
            out["tied_gib"] = c.tied_bytes / GIB
        out["links"] = [
            {
                "source": a,
                "destination": b,
                "latency_ms": link.latency_ms,
                "gb_per_s": 1e-6 / link.ms_per_byte if link.ms_per_byte > 0 else None,
            }
            for (a, b), link in sorted(c.network.pairs.items())
        ]
        for name, link in (("host_link", c.host_link), ("copy_sum", c.copy_sum)):
            if link is not None:
                rate = link.ms_per_byte
                out[name] = {"latency_ms": link.latency_ms, "gb_per_s": 1e-6 / rate if rate > 0 else None}
        out["rank_slowdown"] = list(c.rank_slowdown)
        if c.rank_memory_bytes:
            out["memory_gib"] = [b / GIB for b in c.rank_memory_bytes]
        if c.repeatable:
            out["repeatable"] = list(c.repeatable)
        out["op_overhead_ms"] = self.op_overhead_ms
        out["fused_factor"] = self.fused_factor
        if c.mode is not None:
            out["mode"] = c.mode.record()
        out["about"] = dict(self.about)
        return msgspec.json.format(msgspec.json.encode(out), indent=1)

    def save(self, path: str | Path) -> None:
        """Write the profile; an interrupted write leaves the old file intact."""
        write_whole(path, self.to_json())

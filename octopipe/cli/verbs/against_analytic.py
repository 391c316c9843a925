"""`octopipe profile --against-analytic`: measured times beside analytic costs, for every kind of layer.

Knows: which analytic costs belong to a profile (the same layers, tokens and GPU, one rank alone) and how the two are
shown. Does not know: how layers are measured (runtime/measure) or how analytic costs are computed (costs/analytic).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octopipe.base.errors import OctoPipeError
from octopipe.cli.verbs.common import console, named

if TYPE_CHECKING:
    from octopipe.costs.profile_file import Profile
    from octopipe.models.spec import ModelSpec

TIMES = {"F": "forward_ms", "I": "input_ms", "W": "weight_ms"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRow:
    """One kind of layer: measured and analytic milliseconds, by op."""

    kind: str
    layers: int
    measured_ms: dict[str, float]
    analytic_ms: dict[str, float]

    def ratio(self, op: str | None = None) -> float | None:
        """Return measured over analytic time of one op, or of all three; None if the analytic time is zero."""
        priced = sum(self.analytic_ms.values()) if op is None else self.analytic_ms[op]
        found = sum(self.measured_ms.values()) if op is None else self.measured_ms[op]
        return found / priced if priced > 1e-6 else None

    def record(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "layers": self.layers,
            "measured_ms": self.measured_ms,
            "analytic_ms": self.analytic_ms,
            "ratio": {**{op: self.ratio(op) for op in TIMES}, "all": self.ratio()},
        }


def gpu_of(asked: str, device: str) -> str:
    """Return the GPU whose analytic costs to use: the one asked for, or the preset that the device's name contains."""
    from octopipe.costs.cluster.hardware import GPUS

    if asked:
        if asked not in GPUS:
            raise OctoPipeError(f"--against-analytic {asked[:40]}: unknown GPU; `octopipe gpus` lists them")
        return asked
    words = device.lower().replace("-", " ").split()
    found = next((name for name in GPUS if name in words), None)
    if found is None:
        raise OctoPipeError(
            f"there are no analytic costs for {device or 'this device'}; name a GPU to compare with: "
            "--against-analytic h100 (`octopipe gpus` lists them)"
        )
    return found


def against_analytic(profile: Profile, spec: ModelSpec, *, gpu: str, seq: int, micro_batch_size: int) -> list[KindRow]:
    """Return a row per kind of layer, in the model's order; prefers times measured with one rank active.

    Prices are those of this package's own runtime, whose kernels are measured here; those of Megatron and other stacks
    differ, most of all for experts.
    """
    from octopipe.costs.analytic.calibration import OWN_STACK
    from octopipe.costs.resolve import resolve_costs

    priced = resolve_costs(spec, pp=1, tp=1, seq=seq, micro_batch_size=micro_batch_size, gpu=gpu, stack=OWN_STACK)
    measured = profile.partial.get(1, profile.costs)
    if priced.num_layers != measured.num_layers:
        raise OctoPipeError(
            f"{measured.num_layers} layers were measured, and the analytic model has {priced.num_layers}; profile a "
            "preset or a config.json whose layers are priced one by one, or leave --against-analytic out"
        )
    names: Sequence[str] = profile.about.get("layers") or list(priced.symbols)
    # Layers with the same name may differ (in their attention windows); their analytic time tells them apart.
    keys = [(name, round(float(priced.layer_ms[i]), 9)) for i, name in enumerate(names)]
    rows = []
    for key in dict.fromkeys(keys):
        i = keys.index(key)
        twins = [k for k in dict.fromkeys(keys) if k[0] == key[0]]
        rows.append(
            KindRow(
                kind=key[0] + (f" {chr(97 + twins.index(key))}" if len(twins) > 1 else ""),
                layers=keys.count(key),
                measured_ms={op: float(getattr(measured, name)[i]) for op, name in TIMES.items()},
                analytic_ms={op: float(getattr(priced, name)[i]) for op, name in TIMES.items()},
            )
        )
    return rows


def show(rows: Sequence[KindRow], gpu: str) -> None:
    from rich.table import Table

    from octopipe.costs.analytic.calibration import OWN_STACK, stack_named

    out = console()
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("layer", no_wrap=True)
    for op in TIMES:
        for title in (f"{op} ms", "priced", "x"):
            table.add_column(title, justify="right", no_wrap=True)
    table.add_column("all x", justify="right")
    for row in rows:
        cells = []
        for op in TIMES:
            cells += [f"{row.measured_ms[op]:.3f}", f"{row.analytic_ms[op]:.3f}", _times(row.ratio(op))]
        table.add_row(named(row.kind), *cells, _times(row.ratio()))
    stack = stack_named(OWN_STACK)
    out.print(f"measured against the analytic price of {gpu} with the stack {stack.name} (x: measured over priced)")
    out.print(table)
    if stack.errors is not None:
        out.print(f"the rates of {stack.name} were fitted to {stack.errors.words()}", style="dim", soft_wrap=True)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"

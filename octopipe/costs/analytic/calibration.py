"""Stacks: how much of a GPU's data sheet a training stack's kernels and collectives reach, fitted to training runs.

Knows: the rates of a stack per (GPU generation, precision), which stacks come with the package
(`measured/stacks.json`, written by `benchmarks/bench_published.py --fit` and `benchmarks/fit_own_stack.py`), stack
files, and the substitute rates for a GPU on which no run of the stack was fitted. Does not know: what the rates are
applied to (`products.py`, `layer_pricing.py`) or how they are fitted (`fitting.py`).

A matrix product of m x k by k x n reaches `gemm / (1 + half * (1/m + 1/n + 1/k))` of the peak: the share of a large
product, less what small sides lose to tile edges, prologues and waves.

>>> stack_named("torchtitan").name, stack_named(None).name
('torchtitan', 'nvidia-2025')
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief, check_format, read_json_object, shown
from octopipe.base.limits import finite
from octopipe.costs.cluster.hardware import Gpu
from octopipe.costs.measured import STACKS_FILE

FORMAT, FORMAT_OF_ALL = "octopipe.stack/1", "octopipe.stacks/1"
DEFAULT_STACK = "nvidia-2025"
OWN_STACK = "octopipe"
"""The stack of this package's own runtime: its layers, as measured one by one on an H200."""
KERNELS_ALONE = "kernels-alone"
"""The stack used for GPUs on which only single kernels were measured."""
LIKE = {"cdna4": "cdna3"}
"""Generations without data of their own, and the generation whose rates they use."""
RACK = 16
"""A node with more GPUs than this is a rack-scale system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The shares of data-sheet figures that training kernels reach."""

    gemm: float
    """Share of the peak FLOP rate that a large matrix product reaches."""
    half: float
    """A length: a product whose three sides have this length reaches a quarter of `gemm`."""
    core: float
    """Share of the bf16 peak that softmax attention reaches."""
    launch_ms: float = 0.017
    """Time per counted kernel: its exposed start, drain and host time, and small kernels that are not counted."""
    passes: float = 2.25
    """How many times every saved value crosses the memory bus in F; in I it is one and a half times as often."""
    moe_passes: float = 5.8
    """How many times routed tokens cross the memory bus to be sorted, gathered and weighted, in F and again in I."""
    moe_ms: float = 0.408
    """Time of routing that does not depend on the number of tokens, in F and again in I: kernels, and exposed waits of
    the host for token counts."""
    rack_moe_ms: float = 0.408
    """The same for rack-scale systems (GB200, GB300), which have other hosts and exchanges."""
    cast_bytes: float = 0.0
    """Memory traffic in bytes per value that is quantized before a matrix product."""
    hbm: float = 0.8
    """Share of the memory bandwidth that streaming kernels reach; chosen, not fitted."""
    link: float = 0.9
    """Share of the link bandwidth that collectives reach, including the effect of partial overlap with compute."""
    exchange: float = 1.0
    """Share of the expert exchange that is exposed; the rest overlaps with compute."""
    scan: float = 1.0
    """Speed of the scans of recurrent mixers relative to `layer_pricing.SCAN_SHARE`."""
    hidden: float = 0.2
    """Share of the all-gathers and reductions of sharded weights that is exposed although they overlap with compute."""
    backward_passes: float = 1.5
    """How many times as often as in F saved values cross the memory bus in I."""
    moe_backward: float = 1.0
    """How many times as long as in F routed tokens take in I to be sorted, gathered and weighted."""
    separate_sum: float = 0.0
    """Share of the experts' weight gradients that a second kernel adds after the matrix product has written them: 0
    where the product itself adds them, 1 where no product does."""

    def product_share(self, rows: float, inner: float, outer: float) -> float:
        """The share of the peak that one matrix product reaches."""
        return self.gemm / (1.0 + self.half * (1.0 / rows + 1.0 / inner + 1.0 / outer))


LIMITS: Mapping[str, tuple[float, float]] = {
    "gemm": (0.02, 1.0),
    "half": (1.0, 1e5),
    "core": (0.002, 1.0),
    "launch_ms": (0.0, 10.0),
    "passes": (0.0, 200.0),
    "moe_passes": (0.0, 200.0),
    "moe_ms": (0.0, 100.0),
    "rack_moe_ms": (0.0, 100.0),
    "cast_bytes": (0.0, 200.0),
    "hbm": (0.01, 1.0),
    "link": (0.005, 1.0),
    "exchange": (0.0, 1.0),
    "scan": (0.01, 100.0),
    "hidden": (0.0, 1.0),
    "backward_passes": (0.5, 20.0),
    "moe_backward": (0.1, 20.0),
    "separate_sum": (0.0, 1.0),
}
"""The allowed range of each rate in a stack file."""
LEFT_OUT = ("runs", "timed ops")
"""The measurements that the errors of a stack may be of."""
GENERATIONS = ("ampere", "ada", "hopper", "blackwell", "cdna3", "cdna4")


class Errors(NamedTuple):
    """Leave-one-out errors of a stack's predictions."""

    runs: int
    median: float
    p90: float
    worst: float
    of: str = "runs"
    """What was left out in turn: training runs, or ops of single layers."""

    def words(self) -> str:
        spread = f"median {self.median:.0%}, 90 % within {self.p90:.0%}, worst {self.worst:.0%}"
        return f"{self.runs} {self.of}, each left out in turn: {spread}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The rates of one training stack."""

    name: str
    about: str = ""
    rates: tuple[tuple[str, str, Rates], ...]
    """(generation, precision, rates)."""
    derived: tuple[tuple[str, str], ...] = ()
    """The (generation, precision) pairs among them without runs of their own, such as bf16 next to runs in fp8."""
    errors: Errors | None = None
    """None: too few runs for leave-one-out errors."""

    def fitted(self, generation: str, precision: str) -> bool:
        pair = generation, precision
        return pair not in self.derived and any((g, p) == pair for g, p, _ in self.rates)

    def rates_of(self, generation: str, precision: str) -> Rates:
        """The rates fitted for a GPU generation, or their substitute if there are none."""
        return _rates_of(self, generation, precision)

    def as_dict(self) -> dict[str, Any]:
        """The record in the form of a stack file."""
        rates = [
            {"generation": g, "precision": p, "measured": (g, p) not in self.derived}
            | {f.name: getattr(r, f.name) for f in fields(Rates)}
            for g, p, r in self.rates
        ]
        errors = {} if self.errors is None else {"errors": self.errors._asdict()}
        return {"format": FORMAT, "name": self.name, "about": self.about, **errors, "rates": rates}


@lru_cache(maxsize=1024)
def _rates_of(stack: Stack, generation: str, precision: str) -> Rates:
    known = {(g, p): r for g, p, r in stack.rates}
    found = known.get((generation, precision))
    if found is not None:
        return found
    # Memory passes, launches and links are those of another precision that this stack was fitted for. The share of the
    # peak is the default stack's, times the median ratio of this stack to the default stack where both have rates.
    plain = {(g, p): r for g, p, r in _defaults().rates}
    base = plain.get((generation, precision)) or plain.get((generation, "bf16" if precision == "bf16" else "fp8"))
    base = base or _by_kernels(generation, precision) or plain["hopper", "bf16" if precision == "bf16" else "fp8"]
    if stack.name == DEFAULT_STACK or not known:
        return replace(base, gemm=0.75 * base.gemm) if precision == "nvfp4" else base
    same = [r for (g, _), r in known.items() if g == generation] or list(known.values())
    like = next((r for (g, p), r in known.items() if g == generation and p != "bf16"), same[0])
    reference = [plain.get(key) for key in known]
    ratios = [r.gemm / b.gemm for r, b in zip(known.values(), reference, strict=True) if b is not None]
    ratio = sorted(ratios)[len(ratios) // 2] if ratios else 1.0
    cast = like.cast_bytes or base.cast_bytes
    core = like.core if any(g == generation for g, _ in known) else base.core
    gemm = min(1.0, base.gemm * ratio) * (0.75 if precision == "nvfp4" else 1.0)
    return replace(like, gemm=gemm, half=base.half, core=core, cast_bytes=0.0 if precision == "bf16" else cast)


def _by_kernels(generation: str, precision: str) -> Rates | None:
    """Rates of a generation without training runs, from published measurements of single kernels."""
    known = {(g, p): r for g, p, r in _shipped()[KERNELS_ALONE].rates}
    return known.get((LIKE.get(generation, generation), "bf16" if precision == "bf16" else "fp8"))


@lru_cache(maxsize=1)
def _shipped() -> Mapping[str, Stack]:
    raw = read_json_object(STACKS_FILE)
    return {stack.name: stack for stack in (stack_from(entry, shown(STACKS_FILE)) for entry in raw["stacks"])}  # type: ignore[attr-defined]


def _defaults() -> Stack:
    return _shipped()[DEFAULT_STACK]


def stack_names() -> list[str]:
    """The stacks that are included in the package."""
    return [name for name in _shipped() if name != KERNELS_ALONE]


def stacks_on(gpu: Gpu, precision: str = "bf16") -> list[str]:
    """The stacks that were fitted on runs of this generation and precision."""
    return [name for name in stack_names() if _shipped()[name].fitted(gpu.generation, precision)]


def stack_named(stack: str | Path | Mapping[str, Any] | Stack | None) -> Stack:
    """Return the stack with this name, in this file, or in a decoded file; None: the default stack."""
    if stack is None:
        return _defaults()
    if isinstance(stack, Stack):
        return stack
    if isinstance(stack, Mapping):
        return stack_from(stack, "stack")
    found = _shipped().get(str(stack))
    if found is not None:
        return found
    if not str(stack).endswith(".json") and not os.path.exists(stack):
        close = difflib.get_close_matches(str(stack)[:80], _shipped(), n=2, cutoff=0.4)
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise OctoPipeError(
            f"unknown stack {str(stack)[:80]!r}{hint}; one of {', '.join(_shipped())}, or a file that "
            "`octopipe calibrate` wrote"
        )
    return stack_from(read_json_object(stack), shown(stack))


def stack_record(stack: Stack) -> str | dict[str, Any]:
    """A stack as JSON values: its name if it is included in the package, otherwise all of its contents."""
    return stack.name if _shipped().get(stack.name) == stack else stack.as_dict()


def stack_from(raw: object, where: str) -> Stack:
    """The stack in a decoded file."""
    if not isinstance(raw, Mapping) or not isinstance(raw.get("rates"), list) or not raw["rates"]:
        raise OctoPipeError(f"{where}: no rates found; give a file that `octopipe calibrate` wrote")
    if raw.get("format") is not None:
        check_format(raw["format"], FORMAT, where)
    name = raw.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= 80 or not name.isprintable():
        raise OctoPipeError(f"{where}: name is {brief(name)}; give up to 80 letters")
    rates, seen = [], set()
    for i, entry in enumerate(raw["rates"]):
        rates.append(_entry(entry, f"{where}: rates entry {i}"))
        if rates[-1][:2] in seen:
            raise OctoPipeError(f"{where}: rates of {rates[-1][0]} in {rates[-1][1]} appear twice; keep one")
        seen.add(rates[-1][:2])
    derived = [pair[:2] for pair, entry in zip(rates, raw["rates"], strict=True) if entry.get("measured") is False]
    about = raw.get("about")
    return Stack(
        name=name,
        about=about[:400] if isinstance(about, str) else "",
        rates=tuple(rates),
        derived=tuple(derived),
        errors=_errors(raw.get("errors"), where),
    )


def _errors(raw: object, where: str) -> Errors | None:
    if not isinstance(raw, Mapping):
        return None
    needed = [name for name in Errors._fields if name != "of"]
    numbers = [finite(raw.get(name)) for name in needed]
    if any(n is None or n < 0 for n in numbers):
        raise OctoPipeError(f"{where}: errors has no {', '.join(needed)}; leave it out, or give all four")
    of = raw.get("of", "runs")
    if of not in LEFT_OUT:
        raise OctoPipeError(f"{where}: errors are of {brief(of)}; one of {', '.join(LEFT_OUT)}")
    median, p90, worst = (float(n or 0.0) for n in numbers[1:])
    return Errors(int(numbers[0] or 0), median, p90, worst, of)


def _entry(entry: object, where: str) -> tuple[str, str, Rates]:
    if not isinstance(entry, Mapping):
        raise OctoPipeError(f"{where} is not a table; give generation, precision, gemm, half, core, ...")
    known = {f.name for f in fields(Rates)}
    unknown = sorted(str(key) for key in set(entry) - known - {"generation", "precision", "measured"})
    if unknown:
        raise OctoPipeError(f"{where}: unknown key {brief(unknown[0])}; one of {', '.join(sorted(known))}")
    generation, precision = entry.get("generation"), entry.get("precision")
    if not isinstance(generation, str) or not 1 <= len(generation) <= 40 or not generation.isprintable():
        raise OctoPipeError(f"{where}: generation is {brief(generation)}; one of {', '.join(GENERATIONS)}")
    if precision not in ("bf16", "fp8", "mxfp8", "nvfp4"):
        raise OctoPipeError(f"{where}: precision is {brief(precision)}; one of bf16, fp8, mxfp8, nvfp4")
    if not isinstance(entry.get("measured", True), bool):
        raise OctoPipeError(f"{where}: measured is {brief(entry['measured'])}; give true or false")
    for name in ("gemm", "half", "core"):
        if name not in entry:
            raise OctoPipeError(f"{where}: {name} is missing; give gemm, half and core at least")
    values: dict[str, float] = {}
    for name in known & set(entry):
        low, high = LIMITS[name]
        value = finite(entry[name])
        if value is None or not low <= value <= high:
            raise OctoPipeError(f"{where}: {name} is {brief(entry[name])}; give a number from {low:g} to {high:g}")
        values[name] = value
    return generation, str(precision), Rates(**values)


def rates_of(gpu: Gpu, precision: str, stack: Stack | None = None) -> Rates:
    """The rates of a stack (None: the default) on a GPU's generation in this precision."""
    return (stack or _defaults()).rates_of(gpu.generation, precision)


def is_calibrated(gpu: Gpu, precision: str = "bf16", stack: Stack | None = None) -> bool:
    """Whether training runs of this generation and precision were among those that the stack was fitted on."""
    return (stack or _defaults()).fitted(gpu.generation, precision)

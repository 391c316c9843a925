"""Fits the rates of a stack to training runs: a robust fit of few numbers, and its accuracy on unseen runs.

Knows: which rates a set of runs can determine, their prior values, the fit, and its leave-one-out errors. Does not
know: where runs come from (`costs/runs.py`) or the format of a stack file (`costs/analytic/calibration.py`).

Every rate is fitted as a factor relative to a prior (`PRIOR`), with a penalty for deviating from it (`SPREAD`): two
runs change a rate slightly, twenty determine it. Residuals are logarithms of predicted over measured tokens per second.
Beyond `ODD` they count linearly instead of quadratically, so that a single outlier does not distort the fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.costs.analytic.calibration import RACK, Errors, Rates, Stack
from octopipe.costs.analytic.layer_pricing import SCAN_SHARE, LayerCost
from octopipe.costs.analytic.pricing import Pricing
from octopipe.costs.analytic.table import price_layers, setup_costs
from octopipe.costs.cluster.hardware import Gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.runs import Run, under
from octopipe.costs.table import CostTable
from octopipe.models.spec import ModelSpec, Moe
from octopipe.search.planner.estimate import Estimate, estimate

NOISE, ODD = 0.08, 0.15
"""Standard deviation of runs for reasons that no rate describes, and the residual beyond which a run counts as an
outlier; both are logarithms of ratios."""
ROUNDS, AGAIN = 9, 20
"""Gauss-Newton steps of a fit from the prior, and of one that starts from the fit of nearly the same runs."""
FEWEST_TO_LEAVE_OUT = 4
"""Fewer measurements than this give no leave-one-out errors."""
MOST_DERIVED = 1.15
"""Largest factor over the prior for bf16 products of a generation of which no bf16 run was measured."""
PRIOR: Mapping[tuple[str, str], Rates] = {
    ("ampere", "bf16"): Rates(gemm=0.80, half=120.0, core=0.50),
    ("hopper", "bf16"): Rates(gemm=0.72, half=250.0, core=0.45),
    ("hopper", "fp8"): Rates(gemm=0.64, half=350.0, core=0.45, cast_bytes=4.0),
    ("blackwell", "bf16"): Rates(gemm=0.72, half=300.0, core=0.40),
    ("blackwell", "fp8"): Rates(gemm=0.62, half=420.0, core=0.40, cast_bytes=4.0),
    ("blackwell", "mxfp8"): Rates(gemm=0.60, half=420.0, core=0.40, cast_bytes=5.0),
    ("blackwell", "nvfp4"): Rates(gemm=0.48, half=700.0, core=0.40, cast_bytes=6.0),
}
"""Rates before any run is seen: round numbers that large products reach in the vendors' own kernels."""
OTHER = Rates(gemm=0.5, half=300.0, core=0.3, cast_bytes=4.0)
"""The same for GPUs of no generation above."""
SPREAD: Mapping[str, float] = {
    "gemm": 0.25,
    "half": 0.4,
    "core": 0.4,
    "launch_ms": 0.8,
    "passes": 0.4,
    "moe_passes": 0.6,
    "moe_ms": 1.0,
    "rack_moe_ms": 1.0,
    "cast_bytes": 0.5,
    "link": 0.4,
    "exchange": 0.7,
    "scan": 0.8,
    "hidden": 0.8,
    "backward_passes": 0.5,
    "moe_backward": 0.5,
}
"""Standard deviation of each rate around its prior, as a logarithm."""
BOUNDS: Mapping[str, tuple[float, float]] = {
    "gemm": (0.1, 0.88),
    "half": (30.0, 4000.0),
    "core": (0.02, 0.95),
    "launch_ms": (0.001, 0.3),
    "passes": (0.5, 12.0),
    "moe_passes": (0.5, 60.0),
    "moe_ms": (0.02, 30.0),
    "rack_moe_ms": (0.02, 30.0),
    "cast_bytes": (0.5, 20.0),
    "link": (0.1, 1.0),
    "exchange": (0.02, 1.0),
    "scan": (0.1, 20.0),
    "hidden": (0.01, 1.0),
    "backward_passes": (0.5, 10.0),
    "moe_backward": (0.1, 10.0),
}


class Rate(NamedTuple):
    """One number that is fitted: a rate of one GPU generation in one precision, of one generation in all precisions, or
    of all generations."""

    name: str
    generation: str = ""
    precision: str = ""


class Seen(Protocol):
    """A measurement to which rates are fitted."""

    @property
    def generation(self) -> str: ...

    @property
    def precision(self) -> str: ...

    def asks(self) -> set[str]:
        """Return the rates, besides gemm and core, on which its time depends."""

    def log_ratio(self, rates: Mapping[str, Rates]) -> float:
        """Return the logarithm of predicted over measured speed, given the rates of every precision."""


def rates_to_fit(seen: Sequence[Seen]) -> list[Rate]:
    """Return the rates that these measurements depend on."""
    pairs = sorted({(one.generation, one.precision) for one in seen})
    out = [Rate("gemm", *pair) for pair in pairs]
    out += [Rate("core", generation) for generation in sorted({g for g, _ in pairs})]
    asked = set().union(*(one.asks() for one in seen))
    return [*out, *(Rate(name) for name in SPREAD if name in asked and name not in ("gemm", "core"))]


def asked_by_layers(spec: ModelSpec, gpu: Gpu, precision: str) -> set[str]:
    """The rates on which the time of a model's layers alone depends."""
    routing = "rack_moe_ms" if gpu.gpus_per_node > RACK else "moe_ms"
    parts = [part for layer in set(spec.layers) for part in layer.parts]
    out = {"half", "launch_ms", "passes"}
    out |= {"cast_bytes"} if precision != "bf16" else set()
    out |= {"moe_passes", routing} if any(isinstance(part, Moe) for part in parts) else set()
    return out | ({"scan"} if any(part.kind in SCAN_SHARE for part in parts) else set())


def prior_of(generation: str, precision: str) -> Rates:
    return PRIOR.get((generation, precision)) or PRIOR.get((generation, "bf16")) or OTHER


class SeenRun:
    """One training run, which can be priced with any rates. What it recomputes is determined once, with the prior
    rates."""

    def __init__(self, run: Run):
        assert run.setup.gpu is not None
        self.run, self.generation, self.precision = run, run.setup.gpu.generation, run.setup.precision
        self.share = 0.0
        self.mode, self.fits = run.recompute, True
        rates: dict[str, Rates] = {p: prior_of(self.generation, p) for p in ("bf16", self.precision)}
        modes = ("none", "selective", "full") if run.recompute == "auto" else (run.recompute,)
        found = self._estimate(rates, modes)
        self.mode, self.fits, self.share = found.recompute, found.fits, found.recomputed_share

    def _estimate(self, rates: Mapping[str, Rates], modes: tuple[str, ...]) -> Estimate:
        run = self.run

        def price(mode: str, layers: int | None = None) -> CostTable:
            return setup_costs(run.spec, under(run, mode, layers), rates=rates, lanes=False)

        assert run.setup.micro_batches is not None
        return estimate(price, run.setup.pp, run.chunks, run.setup.micro_batches, modes=modes)

    def step_ms(self, rates: Mapping[str, Rates]) -> float:
        if self.run.exchange == "hidden":
            rates = {name: replace(r, exchange=0.0) for name, r in rates.items()}
        name = "tuned_ms" if self.run.balanced else "step_ms"
        if self.mode != "partial":
            return float(getattr(self._estimate(rates, (self.mode,)), name))
        lean, whole = (float(getattr(self._estimate(rates, (mode,)), name)) for mode in ("selective", "full"))
        return lean + self.share * (whole - lean)

    def asks(self) -> set[str]:
        setup = self.run.setup
        assert setup.gpu is not None
        out = asked_by_layers(self.run.spec, setup.gpu, self.precision)
        out |= {"exchange"} if "moe_passes" in out and setup.ep > 1 and self.run.exchange != "hidden" else set()
        out |= {"link"} if setup.num_gpus > setup.pp else set()
        return out | ({"hidden"} if setup.zero >= 2 else set())

    def log_ratio(self, rates: Mapping[str, Rates]) -> float:
        setup = self.run.setup
        assert setup.seq is not None and setup.micro_batches is not None
        tokens = setup.seq * setup.micro_batch_size * setup.micro_batches / setup.gpus_per_rank / setup.pp
        return math.log(tokens / self.step_ms(rates) * 1e3 / self.run.tokens_per_s_per_gpu)


class SeenLayer:
    """One kind of layer that was timed on one GPU: F, I or W of one micro-batch."""

    def __init__(self, spec: ModelSpec, layer: int, op: str, measured_ms: float, setup: Setup):
        assert setup.gpu is not None
        self.spec, self.layer, self.op, self.measured_ms, self.setup = spec, layer, op, measured_ms, setup
        self.generation, self.precision = setup.gpu.generation, setup.precision

    def asks(self) -> set[str]:
        assert self.setup.gpu is not None
        asked = asked_by_layers(self.spec, self.setup.gpu, self.precision)
        # A run only knows F and I together; timed ops tell them apart.
        return asked | {"backward_passes"} | ({"moe_backward"} if "moe_passes" in asked else set())

    def log_ratio(self, rates: Mapping[str, Rates]) -> float:
        cost = price_layers_of(self.spec, self.setup, rates)[self.layer]
        return math.log(self.measured_ms / max(getattr(cost, f"{self.op}_ms"), 1e-9))


def price_layers_of(spec: ModelSpec, setup: Setup, rates: Mapping[str, Rates]) -> list[LayerCost]:
    return price_layers(spec, Pricing.of(setup, rates))[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A stack that was fitted to runs, with the errors of the fit."""

    stack: Stack
    errors: tuple[float, ...]
    """Predicted over measured speed, minus 1, of every measurement with the fit to all of them."""
    left_out: tuple[float, ...]
    """The same error with the fit to all other measurements; empty if there are too few."""


class Fit:
    """The fit of the rates of one stack."""

    def __init__(self, seen: Sequence[Seen]):
        if not seen:
            raise OctoPipeError("nothing to fit; give at least one run")
        self.seen = list(seen)
        self.rates = rates_to_fit(seen)
        self.pairs = sorted({(one.generation, one.precision) for one in seen})
        # Our profiles measure layers in torch, which has no kernel that adds grouped products into a gradient.
        self.fixed = {"separate_sum": 1.0} if all(isinstance(one, SeenLayer) for one in seen) else {}
        self.spread = np.array([SPREAD[rate.name] for rate in self.rates])
        # Factors are bounded such that no rate leaves its bounds under any of the priors it applies to.
        reach = [[getattr(prior_of(*pair), r.name) for pair in self._both(r)] for r in self.rates]
        self.low = np.log([BOUNDS[r.name][0] / max(min(p), 1e-9) for r, p in zip(self.rates, reach)])
        self.high = np.log([BOUNDS[r.name][1] / max(p) for r, p in zip(self.rates, reach)])

    def _both(self, rate: Rate) -> list[tuple[str, str]]:
        """Return the (generation, precision) pairs whose prior is scaled by a rate."""
        own = [p for p in self.pairs if rate.generation in ("", p[0]) and rate.precision in ("", p[1])]
        own = [p for p in own if rate.name != "cast_bytes" or p[1] != "bf16"]
        return own or self.pairs

    def rates_at(self, x: np.ndarray) -> dict[tuple[str, str], Rates]:
        """Return the rates of every (generation, precision) pair, and of bf16 for every generation, if the priors are
        scaled by the exponentials of `x`."""
        out = {}
        for generation in {g for g, _ in self.pairs}:
            for precision in {"bf16", *(p for g, p in self.pairs if g == generation)}:
                prior = replace(prior_of(generation, precision), **self.fixed)
                changes = {
                    rate.name: getattr(prior, rate.name) * math.exp(factor)
                    for rate, factor in zip(self.rates, x, strict=True)
                    if rate.generation in ("", generation) and rate.precision in ("", precision)
                }
                if precision == "bf16":
                    changes["cast_bytes"] = 0.0
                out[generation, precision] = replace(prior, **changes)
            if (generation, "bf16") not in self.pairs:
                # In these runs only heads and attention cores use bf16; scale its prior as that of the other precision.
                moved = [x[i] for i, r in enumerate(self.rates) if r.name == "gemm" and r.generation == generation]
                plain = out[generation, "bf16"]
                factor = min(MOST_DERIVED, math.exp(float(np.mean(moved))))
                out[generation, "bf16"] = replace(plain, gemm=min(BOUNDS["gemm"][1], plain.gemm * factor))
        return out

    def residual(self, i: int, rates: Mapping[tuple[str, str], Rates]) -> float:
        one = self.seen[i]
        return one.log_ratio({p: rates[one.generation, p] for p in {"bf16", one.precision}})

    def residuals(self, x: np.ndarray, kept: Sequence[int]) -> np.ndarray:
        rates = self.rates_at(x)
        return np.array([self.residual(i, rates) for i in kept])

    def slopes(self, x: np.ndarray, at: np.ndarray) -> np.ndarray:
        """The derivatives of every residual with respect to every rate."""
        out = np.zeros((len(self.seen), x.size))
        asked = [one.asks() for one in self.seen]
        for k, rate in enumerate(self.rates):
            step = -0.02 if x[k] + 0.02 > self.high[k] else 0.02
            moved = x.copy()
            moved[k] += step
            rates = self.rates_at(moved)
            for i, one in enumerate(self.seen):
                mine = rate.generation in ("", one.generation) and rate.name in {"gemm", "core", *asked[i]}
                if mine and (rate.name != "gemm" or rate.precision in ("bf16", one.precision)):
                    out[i, k] = (self.residual(i, rates) - at[i]) / step
        return out

    def _move(self, x: np.ndarray, at: np.ndarray, slope: np.ndarray, damping: float) -> np.ndarray:
        weight = np.minimum(1.0, ODD / np.maximum(abs(at), 1e-9)) / NOISE**2
        pull = 1.0 / self.spread**2
        normal = slope.T @ (slope * weight[:, None]) + np.diag(pull)
        move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -(slope.T @ (weight * at)) - pull * x)
        return np.clip(x + np.clip(move, -0.7, 0.7), self.low, self.high)

    def loss(self, x: np.ndarray, at: np.ndarray) -> float:
        size = abs(at)
        robust = np.where(size < ODD, size**2, 2 * ODD * size - ODD**2)
        return float(robust.sum() / NOISE**2 + ((x / self.spread) ** 2).sum())

    def solve(self, kept: Sequence[int] | None = None, rounds: int = ROUNDS) -> np.ndarray:
        """Fit the factors to some of the measurements (all by default), by damped Gauss-Newton steps from the prior;
        return their logarithms."""
        kept = list(range(len(self.seen))) if kept is None else list(kept)
        x = np.clip(np.zeros(len(self.rates)), self.low, self.high)
        damping, every = 1e-3, self.residuals(x, range(len(self.seen)))
        best = self.loss(x, every[kept])
        for _ in range(rounds):
            slope = self.slopes(x, every)[kept]
            for _ in range(5):
                trial = self._move(x, every[kept], slope, damping)
                there = self.residuals(trial, range(len(self.seen)))
                loss = self.loss(trial, there[kept])
                if loss < best:
                    break
                damping = max(4 * damping, 1e-2)
            else:
                break
            gained, x, every, best, damping = best - loss, trial, there, loss, damping / 4
            if gained < 1e-2:
                break
        return x

    def left_out(self, x: np.ndarray) -> list[float]:
        """Return the residual of every measurement with the fit to all others.

        Leaving out one measurement changes the fit little, so the residuals of the others are linearised around `x`.
        The residual of the left-out one is then computed exactly, with the new rates.
        """
        count = len(self.seen)
        every = self.residuals(x, range(count))
        slope = self.slopes(x, every)
        out = []
        for i in range(count):
            kept = [k for k in range(count) if k != i]
            y = x
            for _ in range(AGAIN):
                y = self._move(y, every[kept] + slope[kept] @ (y - x), slope[kept], 1e-3)
            out.append(self.residual(i, self.rates_at(y)))
        return out

    def stack(self, x: np.ndarray, name: str, about: str, errors: Errors | None) -> Stack:
        found = self.rates_at(x)
        rates = tuple((g, p, _rounded(r)) for (g, p), r in sorted(found.items()) if (g, p) in self.pairs or p == "bf16")
        derived = tuple((g, p) for g, p, _ in rates if (g, p) not in self.pairs)
        return Stack(name=name, about=about, rates=rates, derived=derived, errors=errors)


def _rounded(rates: Rates) -> Rates:
    return Rates(**{name: float(f"{getattr(rates, name):.3g}") for name in Rates.__dataclass_fields__})


def errors_of(residuals: Sequence[float], of: str = "runs") -> Errors:
    """Return number, median, 90 % quantile and maximum of the relative errors with these residuals."""
    sizes = np.array([abs(math.exp(r) - 1.0) for r in residuals])
    return Errors(len(sizes), float(np.median(sizes)), float(np.quantile(sizes, 0.9)), float(sizes.max()), of)


def fit_stack(seen: Sequence[Seen], name: str, about: str = "") -> Fitted:
    """The stack that is fitted to these measurements."""
    fit = Fit(seen)
    x = fit.solve()
    left_out = fit.left_out(x) if len(seen) >= FEWEST_TO_LEAVE_OUT else []
    of = "timed ops" if all(isinstance(one, SeenLayer) for one in seen) else "runs"
    return Fitted(
        stack=fit.stack(x, name, about, errors_of(left_out, of) if left_out else None),
        errors=tuple(math.exp(r) - 1.0 for r in fit.residuals(x, range(len(seen)))),
        left_out=tuple(math.exp(r) - 1.0 for r in left_out),
    )

"""The numbers of a split: costs, bound, estimate, simulation.

Knows: how the costs, the bound and the step time of one split are computed, each once. Does not know: which splits
there are (`splits.py`) or how a budget is spent on them (`search.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from octopipe.base.errors import DoesNotFitError, NotApplicableError
from octopipe.costs.analytic.calibration import rates_of
from octopipe.costs.analytic.footprint import WEIGHT_BYTES
from octopipe.costs.analytic.frozen import backward_share, layer_states, trained_share
from octopipe.costs.analytic.layer_pricing import strides_of
from octopipe.costs.analytic.pricing import Pricing
from octopipe.costs.analytic.table import price_layers
from octopipe.costs.analytic.traffic import ring_ms
from octopipe.costs.cluster.hardware import Cluster
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.layer_graph import LayerGraph
from octopipe.costs.resolve import costs_of_setup
from octopipe.costs.segments import together_ms
from octopipe.costs.table import CostTable
from octopipe.models.spec import ModelSpec, Moe
from octopipe.plans.branches import along_graph
from octopipe.plans.plan import Plan
from octopipe.search.planner.estimate import Estimate, estimate, sizes_by_speed
from octopipe.search.planner.runtimes import Checkpoints
from octopipe.search.planner.splits import Split, least_state_bytes
from octopipe.search.recompute import (
    Price,
    checkpointed_per_stage,
    least_recomputing,
    plan_under,
    recomputing,
)
from octopipe.search.restricted import with_cuts
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import GIB, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A split with its numbers, which are estimated, simulated or tuned."""

    split: Split
    setup: Setup
    how: str
    """estimated, tuned (any order), layout (layers per stage alone), or the published system it was simulated under."""
    step_ms: float
    tuned_ms: float
    """The estimated step time after tuning; for a simulated or tuned candidate, its own step time."""
    tokens_per_gpu_per_second: float
    mfu: float | None
    bubble: float
    peak_gib: float
    limit_gib: float
    fits: bool
    recompute: str
    plan: Plan | None = None
    costs: CostTable | None = None
    timeline: Timeline | None = None
    spec: ModelSpec | None = None

    def __post_init__(self) -> None:
        # Convert numpy scalars, which not every JSON writer accepts.
        for name in ("step_ms", "tuned_ms", "tokens_per_gpu_per_second", "mfu", "bubble", "peak_gib", "limit_gib"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))
        object.__setattr__(self, "fits", bool(self.fits))

    def as_dict(self) -> dict[str, object]:
        names = ("tp", "cp", "ep", "etp", "pp", "dp", "vp", "micro_batch_size", "zero", "hsdp")
        more = ("how", "step_ms", "tokens_per_gpu_per_second", "mfu", "bubble", "peak_gib", "limit_gib", "fits")
        return {
            **{n: getattr(self.split, n) for n in names},
            **{n: getattr(self, n) for n in more},
            "recompute": self.recompute,
            "setup": self.setup.as_dict(),
        }


def exchange_hidden(costs: CostTable) -> CostTable:
    """Return the costs with the exchange of every layer hidden behind its own computation, as far as a schedule of
    pairs could at best. They are used for estimates only."""
    if costs.segments is None:
        return costs
    share = [costs.segments.share(kind, "exchange") for kind in "FI"]
    exchange = np.minimum(share[0], 1.0) * costs.forward_ms + np.minimum(share[1], 1.0) * costs.input_ms
    slowing = costs.segments.slows_compute, costs.segments.slows_exchange
    whole = costs.forward_ms + costs.input_ms + costs.weight_ms
    both = np.array([together_ms(w - x, x, *slowing) for w, x in zip(whole, exchange, strict=True)])
    scale = np.divide(both, whole, out=np.ones_like(whole), where=whole > 0)
    times = {name: getattr(costs, name) * scale for name in ("forward_ms", "input_ms", "weight_ms")}
    return costs.replace(segments=None, **times)


def evenly_routed_ms(candidate: Candidate) -> float | None:
    """Return the step time of the candidate if every expert rank received the same number of tokens; None if the costs
    assume that already or the candidate was not simulated."""
    if candidate.spec is None or candidate.plan is None or not candidate.setup.imbalance or candidate.setup.ep == 1:
        return None
    even = costs_of_setup(candidate.spec, replace(candidate.setup, imbalance=()))
    return simulate(candidate.plan, even, check=False).step_ms


class _Work(NamedTuple):
    """The work of one micro-batch in the whole model, in milliseconds on one GPU of a rank."""

    forward_ms: float
    total_ms: float
    lane_ms: float
    """The time of the busier lane, compute or exchange; the sum of both if ops do not run in pairs."""
    way_ms: float
    """The part of the total that one micro-batch cannot run in parallel: all of it, unless the model's layers fork."""
    fastest: float
    """The slowdown factor of the fastest rank."""


class Pricer:
    """Computes the costs of splits, each only once."""

    def __init__(
        self,
        spec: ModelSpec,
        base: Setup,
        global_batch: int,
        *,
        recompute_ops: bool = False,
        pairs: bool = False,
        overlaps: tuple[str, ...] = (),
        layouts: bool = True,
        checkpoints: Checkpoints = "some",
    ):
        """`recompute_ops`: recomputation is done by R ops of the plan, not included in the costs of layers. `pairs`:
        orders may have pairs of ops that hide the experts' exchange, so bounds and estimates of tuning must not count
        it as exposed. `overlaps`: the published schedules that the runtime runs with such pairs. `layouts`: stages may
        differ in their number of layers. `checkpoints`: which layers the runtime can recompute whole."""
        self.layouts, self.checkpoints = layouts, checkpoints
        self.spec, self.base, self.global_batch, self.recompute_ops = spec, base, global_batch, recompute_ops
        self.pairs, self.overlaps = pairs or bool(overlaps), overlaps
        parts = [part for layer in spec for part in layer.parts]
        self.experts = float(sum(part.expert_parameters for part in parts if isinstance(part, Moe)))
        self.dense = float(spec.training_parameters) - self.experts
        self.trained, self.passed = trained_share(spec, base), backward_share(spec, base)
        assert base.gpu is not None
        self.rates = rates_of(base.gpu, base.precision, base.stack)
        self._known: dict[tuple[object, ...], CostTable] = {}
        self._work: dict[tuple[int, ...], _Work] = {}
        self._judged: dict[tuple[Split, tuple[str, ...]], Candidate] = {}

    def costs(self, split: Split, mode: str = "none", layers: int | None = None) -> CostTable:
        s = split  # costs do not depend on vp
        key = (s.tp, s.cp, s.ep, s.etp, s.pp, s.dp, s.micro_batch_size, s.zero, s.hsdp, mode, layers)
        found = self._known.get(key)
        if found is None:
            setup = split.setup(self.base, self.global_batch)
            setup = replace(setup, recompute=mode, recompute_layers=layers)  # type: ignore[arg-type]
            found = self._known[key] = costs_of_setup(self.spec, setup)
        return found

    def bound_ms(self, split: Split) -> float:
        """Return a lower bound on the step time of this split under any order: the work divided evenly over the ranks,
        plus the time that one micro-batch spends on the other ranks."""
        m = self.global_batch // (split.dp * split.micro_batch_size)
        # A layer's own time does not depend on how many ranks and replicas there are.
        key: tuple[int, ...] = (split.tp, split.cp, split.ep, split.etp, split.micro_batch_size)
        if self.base.nodes:  # which cards a rank has depends on how many there are
            key = (*key, split.zero, split.dp, split.pp, split.hsdp)
        if key not in self._work:
            self._work[key] = self._least_work(split)
        work = self._work[key]
        if split.zero >= 2 and not self.base.nodes:
            return m * self._sharded_ms(split, work)
        # In a pipeline, pairs may hide the exchange of all micro-batches together, but not on the way of a single one.
        lane = work.lane_ms if split.pp > 1 else work.total_ms
        way = (split.pp - 1) / (split.pp * split.vp) * work.way_ms
        return work.fastest * (m * lane / split.pp + way)

    def _least_work(self, split: Split) -> _Work:
        if self.base.nodes:
            costs = self.costs(split if split.zero >= 2 else replace(split, zero=0, hsdp=1))
            forward, total = float(costs.forward_ms.sum()), float(costs.layer_ms.sum())
            slow = float(min(costs.slowdown(r) for r in range(split.pp)))
            way = self._way_ms(costs.layer_ms.tolist())
            return _Work(forward_ms=forward, total_ms=total, lane_ms=total, way_ms=way or total, fastest=slow)
        setup = replace(split.setup(self.base, self.global_batch), zero=0, hsdp=1)
        layers = price_layers(self.spec, Pricing.of(setup))[0]
        forward = sum(x.forward_ms for x in layers)
        total = forward + sum(x.input_ms + x.weight_ms for x in layers)
        rows = [part for x in layers for part in (*x.forward_parts, *x.input_parts)]
        exchange = sum(ms for lane, ms in rows if lane == "exchange")
        return _Work(
            forward_ms=forward,
            total_ms=total,
            lane_ms=max(total - exchange, exchange) if self.pairs else total,
            way_ms=self._way_ms([x.forward_ms + x.input_ms + x.weight_ms for x in layers]) or total,
            fastest=1.0,
        )

    def _way_ms(self, layer_ms: Sequence[float]) -> float:
        """Return the time of the longest path through a model whose layers fork; 0 for a chain."""
        takes = self.spec.takes
        return sum(layer_ms[k] for k in LayerGraph(takes=takes).longest(layer_ms)) if takes else 0.0

    def _sharded_ms(self, split: Split, work: _Work) -> float:
        """Return a lower bound on the time of one micro-batch if replicas shard gradients or weights. The gathers and
        reductions of all layers together are overlapped with all of their work; layer by layer, no more can be
        hidden."""
        gpu = self.base.gpu
        assert gpu is not None
        cluster = Cluster(
            gpu=gpu,
            tp=split.tp,
            cp=split.cp,
            dp=split.dp,
            ep=split.ep,
            etp=split.etp,
            hsdp=split.hsdp,
            gpus_per_node=self.base.gpus_per_node,
        )
        gather = reduce = 0.0
        counts = (self.dense / split.tp, self.experts / (split.ep * split.etp))
        copies = (split.dp * split.cp // split.hsdp, cluster.expert_dp // split.hsdp)
        for count, n, stride in zip(counts, copies, strides_of(cluster), strict=True):
            gather += (
                ring_ms(cluster, WEIGHT_BYTES * count, n, stride, share=self.rates.link) if split.zero == 3 else 0.0
            )
            gradient = self.trained * self.base.gradient_bytes * count
            inside = ring_ms(cluster, gradient, n, stride, share=self.rates.link)
            between = ring_ms(cluster, gradient / n, split.hsdp, stride * n, share=self.rates.link)
            reduce += max(inside, 2 * between)
        forward, backward = work.forward_ms, work.total_ms - work.forward_ms
        pairs = ((forward, gather), (backward, self.passed * gather + reduce))
        return sum(max(pair) + self.rates.hidden * min(pair) for pair in pairs)

    def may_fit(self, split: Split) -> bool:
        """Whether memory suffices for the training state and for the layer inputs, which are kept even under full
        recomputation."""
        limit = max((self.base.rank_memory_bytes() if not self.base.nodes else ()) or (math.inf,))
        state = least_state_bytes(split, self.dense, self.experts, self.base, self.trained)
        m = self.global_batch // (split.dp * split.micro_batch_size)
        tokens = (self.base.seq or 1) * split.micro_batch_size / split.cp
        width = self.spec.hidden / (split.tp if self.base.sequence_parallel else 1)
        # The first rank has min(m, pp) micro-batches in flight, each with 1/pp of the layers (without embedding, head).
        # A tower's layers may keep less, and nothing for a micro-batch without an image.
        inner = range(max((last for _, last in self.spec.towers), default=0) + 1, self.spec.num_layers - 1)
        states = layer_states(self.spec.num_layers, self.base.frozen)
        layers = sum(states[i] != "idle" for i in inner)
        kept = 2.0 * tokens * width * layers * min(m, split.pp) / split.pp
        return state + kept < limit

    def candidate(self, split: Split, modes: tuple[str, ...]) -> Candidate:
        """Return the estimated candidate of a split. It is cached, so that a search can continue judging later."""
        if (split, modes) not in self._judged:
            self._judged[split, modes] = self._estimated(split, modes)
        return self._judged[split, modes]

    def _estimated(self, split: Split, modes: tuple[str, ...]) -> Candidate:
        m = self.global_batch // (split.dp * split.micro_batch_size)
        layouts = self.layouts and bool(self.base.nodes)

        def judged(price: Price, modes: tuple[str, ...], pairs: bool) -> Estimate:
            return estimate(price, split.pp, split.vp, m, modes=modes, pairs=pairs, layouts=layouts)

        found = judged(lambda *how: self.costs(split, *how), modes, self.pairs and split.pp > 1)
        interleaved = split.vp > 1 and "interleaved-overlap" in self.overlaps and m % split.pp == 0
        # The exchange is hidden where no whole layers are recomputed.
        if interleaved and split.ep > 1 and split.pp > 1 and found.fits and found.recompute in ("none", "selective"):
            hidden = judged(lambda *how: exchange_hidden(self.costs(split, *how)), (found.recompute,), False)
            found = replace(found, step_ms=hidden.step_ms, tuned_ms=min(found.tuned_ms, hidden.tuned_ms))
        return self._candidate(split, self.costs(split), "estimated", found)

    def _candidate(self, split: Split, costs: CostTable, how: str, found: Estimate) -> Candidate:
        m = self.global_batch // (split.dp * split.micro_batch_size)
        rate = costs.throughput(split.pp, m, found.step_ms)
        assert costs.setup is not None
        return Candidate(
            split=split,
            setup=costs.setup,
            how=how,
            step_ms=found.step_ms,
            tuned_ms=found.tuned_ms,
            tokens_per_gpu_per_second=float(rate["tokens_per_gpu_per_second"] or 0.0),
            mfu=rate["mfu"],
            bubble=found.bubble,
            peak_gib=found.peak_gib,
            limit_gib=found.limit_gib,
            fits=found.fits,
            recompute=found.recompute,
        )

    def simulated(self, split: Split, recompute: str = "auto") -> Candidate:
        """Return the split simulated under (interleaved) 1F1B; under `interleaved-overlap`, which hides the experts'
        exchange, if the runtime has it, it fits and it is faster."""
        plain = self._simulated(split, recompute)
        hides = "interleaved-overlap" in self.overlaps and split.vp > 1 and split.ep > 1 and recompute != "full"
        hidden = None
        if hides:
            hidden = self.scheduled(split, "interleaved-overlap", recompute=recompute, chunks=split.vp)
        return hidden if hidden is not None and (hidden.step_ms < plain.step_ms or not plain.fits) else plain

    def _simulated(self, split: Split, recompute: str) -> Candidate:
        m = self.global_batch // (split.dp * split.micro_batch_size)
        system = "interleaved" if split.vp > 1 else "1f1b"
        options: dict[str, Any] = {"chunks": split.vp} if split.vp > 1 else {}

        def build(costs: CostTable, micro_batches: int = m) -> Plan:
            return build_plan(system, costs, split.pp, micro_batches, **options)

        if self.base.offload_layers is not None:
            recompute = "none"  # offloaded activations are not recomputed
        if self.recompute_ops:
            costs = self.costs(split)
            plan = build(costs)
            if recompute != "none":
                plan = recomputing(plan) if recompute == "full" else least_recomputing(plan, costs)
            return self.of_plan(split, plan, costs, system)
        # Memory reaches its peak within three rounds of the pipeline, so a short step suffices to find out how much
        # must be recomputed.
        short = min(m, 3 * split.pp)
        _, costs = plan_under(recompute, lambda c: build(c, short), lambda *how: self.costs(split, *how))
        found = self.of_plan(split, build(costs), costs, system)
        if not found.fits and recompute == "auto" and short < m:
            plan, costs = plan_under(recompute, build, lambda *how: self.costs(split, *how))
            found = self.of_plan(split, plan, costs, system)
        layers = self._checkpointed(found)
        if layers != (found.setup.recompute_layers or 0):
            costs = self.costs(split, "full", layers if layers < self.spec.num_layers - 2 else None)
            found = self.of_plan(split, build(costs), costs, system)
        return self._by_speed(found, build)

    def _checkpointed(self, found: Candidate) -> int:
        """Return how many layers the runtime recomputes if the candidate needs some: exactly as many, all of them, or
        the same number in every stage (see `Runtime.checkpoints`)."""
        layers = found.setup.recompute_layers or 0
        if not layers or self.checkpoints == "some":
            return layers
        if self.checkpoints == "all":
            return self.spec.num_layers - 2
        assert found.plan is not None
        return checkpointed_per_stage(found.plan, layers)[1]

    def _by_speed(self, even: Candidate, build: Callable[[CostTable], Plan]) -> Candidate:
        """For ranks of unequal speed, return the same schedule with work per stage in proportion to the speed of the
        rank, if that is faster and fits; otherwise the candidate itself."""
        costs = even.costs
        assert even.plan is not None and costs is not None
        plan = even.plan if costs.graph is None else build(costs.as_chain())
        sizes = sizes_by_speed(costs, [stage.rank for stage in plan.stages]) if self.layouts else None
        if sizes is None:
            return even
        cuts = [0, *(int(cut) for cut in np.cumsum(sizes))]
        found = self.of_plan(even.split, along_graph(with_cuts(plan, cuts), costs.graph), costs, "layout")
        return found if found.fits >= even.fits and found.step_ms < even.step_ms else even

    def scheduled(self, split: Split, system: str, *, recompute: str = "auto", **options: Any) -> Candidate | None:
        """Return the split under a published schedule; None if the schedule does not apply or does not fit. With
        `recompute` "auto" and without R ops, selective recomputation is tried if it does not fit without any."""
        m = self.global_batch // (split.dp * split.micro_batch_size)
        recompute = "none" if self.base.offload_layers is not None else recompute
        modes = ("none", "selective") if recompute == "auto" else (recompute,)
        for mode in ("none",) if self.recompute_ops else modes:
            costs = self.costs(split, mode)
            try:
                plan = build_plan(system, costs, split.pp, m, **options)
            except (NotApplicableError, DoesNotFitError):
                return None
            if self.recompute_ops and recompute == "full":
                plan = recomputing(plan)
            found = self.of_plan(split, plan, costs, system)
            if found.fits:
                return found
        return None

    def of_plan(self, split: Split, plan: Plan, costs: CostTable, how: str) -> Candidate:
        timeline = simulate(plan, costs, check=False)
        rate = costs.throughput(plan.num_ranks, plan.num_micro_batches, timeline.step_ms)
        full = int(np.argmax(timeline.peak_bytes))
        assert costs.setup is not None
        again = sum(len(s.recomputed_layers) for s in plan.stages) + (costs.setup.recompute_layers or 0)
        mode = f"{again} layer{'s' if again > 1 else ''}" if again else costs.setup.recompute
        return Candidate(
            split=split,
            setup=costs.setup,
            how=how,
            step_ms=timeline.step_ms,
            tuned_ms=timeline.step_ms,
            tokens_per_gpu_per_second=float(rate["tokens_per_gpu_per_second"] or 0.0),
            mfu=rate["mfu"],
            bubble=timeline.bubble_ratio,
            peak_gib=float(timeline.peak_bytes[full]) / GIB,
            limit_gib=timeline.capacity_bytes[full] / GIB,
            fits=timeline.fits,
            recompute=mode,
            plan=plan,
            costs=costs,
            timeline=timeline,
            spec=self.spec,
        )

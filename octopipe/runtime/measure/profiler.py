"""The profiler: F, I and W of every distinct layer, timed through the code that trains.

Knows: how to time layers on a GPU or a CPU, alone and while other ranks are busy, and how the measurements of all ranks
become one profile. Does not know: how one layer runs and its memory (`one_layer.py`), plans or transports (`links.py`
measures those).

Every rank runs all layers of the model one by one, each starting at a different layer, round after round and without
device synchronisation in between. Each layer is thus measured while other ranks run the model's mix of layers, as in
training. The time of a layer is the median over rounds of its mean within a round, averaged over ranks.

    mine = profile_layers(layers, sample, loss_fn, target, group=group)      # any modules or factories
    profile = assemble(gather(mine, group), model="mine", symbols="EMML", links=links)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import Link, Network
from octopipe.costs.layer_graph import LayerGraph
from octopipe.costs.mode import Mode
from octopipe.costs.profile_file import Profile
from octopipe.costs.routing import Routing
from octopipe.costs.table import CostTable
from octopipe.runtime.measure.connections import ends_of, input_of, loss_of
from octopipe.runtime.measure.exchanges import MeasuredExchange, exchanges_of, segments_of
from octopipe.runtime.measure.one_layer import Layer, LayerMemory, memory_of, resident_bytes
from octopipe.runtime.measure.rounds import ROUNDS_END, Rounds, Tell, no_report
from octopipe.runtime.measure.routing import recorded_routing
from octopipe.runtime.measure.shards import Seen, counts_for, measure_shards, shard_times, worth_measuring
from octopipe.runtime.measure.timing import device_of, timed_rounds, wait_all
from octopipe.runtime.turns import exchange_ranks
from octopipe.runtime.values import flatten
from octopipe.runtime.wire.telling import gather_values

Floats = NDArray[np.float64]
KINDS = ("forward", "input", "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One rank's measurement of a list of layers; arrays have one row per distinct layer."""

    group_of: tuple[int, ...]
    """For every layer, the number of its distinct layer."""
    loaded_ms: Floats
    """[layers, 3]: medians of F, I, W with all ranks busy."""
    partial_ms: Mapping[int, Floats]
    """The same by number of busy ranks, while the other ranks are idle."""
    host_share: float
    """Time the host took to issue the work over the time the device took for it: below 1, the device is kept busy."""
    spread: Floats
    """Interquartile range over median of `loaded_ms`."""
    memory: tuple[LayerMemory, ...]
    repeatable: tuple[bool, ...]
    """Whether a second forward gave the same result as the first."""
    resident_bytes: float
    """Bytes that libraries allocate on the device for themselves (workspaces of matrix products), independent of the
    layers."""
    seconds: float
    exchanges: tuple[MeasuredExchange, ...] = ()
    """The parts of every distinct layer that exchange tokens; empty if no layer does."""
    tokens_per_expert: tuple[tuple[float, ...], ...] = ()
    """Tokens per expert in one micro-batch, by distinct layer; an empty row if a layer has no router."""
    expert_ranks: int = 0
    """The largest group in which layers exchange tokens; 0 if they do not, or if it is not known."""
    shards: Seen = field(default_factory=dict)
    """Times of shards of the first and the last layer; empty if they were not measured or cannot be cut."""


def groups_of_modules(modules: Sequence[nn.Module]) -> tuple[int, ...]:
    """Return a number per module; modules of one type, configuration and parameter shapes share it."""
    return _numbered(
        [
            (
                type(m).__qualname__,
                repr(m),
                tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in m.named_parameters()),
            )
            for m in modules
        ]
    )


def _numbered(keys: Sequence[Hashable]) -> tuple[int, ...]:
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


def profile_layers(
    layers: Sequence[nn.Module | Callable[[], nn.Module]],
    sample: Any,
    loss_fn: Callable[..., Tensor],
    target: Any,
    *,
    groups: Sequence[int] | None = None,
    repeats: int = 10,
    warm_up: int = 3,
    levels: Sequence[int] = (1,),
    group: dist.ProcessGroup | None = None,
    precision: str = "",
) -> Measured:
    """Measure a list of layers on this rank (collective over `group`; without a group, this process is the only rank).

    `groups` says which layers are equal (default: by type and shapes); a factory is only called for a layer of a new
    group. `sample` is one micro-batch's input, `target` what `loss_fn(output, target)` takes. `levels`: smaller numbers
    of busy ranks with which layers are also timed. `precision`: "bf16-main-fp32" keeps float32 gradients of bfloat16
    layers, "autocast-bf16" runs forwards under autocast; default: the layers as they are.
    """
    given = [p for layer in layers if isinstance(layer, nn.Module) for p in layer.parameters()]
    before = [(p, None if p.grad is None else p.grad.clone()) for p in given]
    try:
        ring = LayerRing(layers, sample, loss_fn, target, groups=groups, group=group, precision=precision)
        return ring.measure(repeats, warm_up, levels)
    finally:
        for parameter, gradient in before:  # gradients of the measurement must not be trained with
            parameter.grad = gradient


class LayerRing:
    """The distinct layers of a model on this rank, prepared for being timed round after round (all methods are
    collective)."""

    def __init__(
        self,
        layers: Sequence[nn.Module | Callable[[], nn.Module]],
        sample: Any,
        loss_fn: Callable[..., Tensor],
        target: Any,
        *,
        groups: Sequence[int] | None = None,
        takes: Sequence[Sequence[int]] = (),
        group: dist.ProcessGroup | None = None,
        tell: Tell = no_report,
        rounds: int = 0,
        precision: str = "",
        graphs: bool = False,
    ):
        """`takes`: the layers whose outputs every layer takes, if that is not the layer before it; `loss_fn` is then
        `PathLosses`. `tell` receives progress reports; `rounds`: the total number of rounds, if it is known."""
        self._tell = tell
        self._began = time.perf_counter()
        if not layers:
            raise OctoPipeError("no layers to profile; give at least one module")
        if groups is None:
            modules = [m if isinstance(m, nn.Module) else m() for m in layers]
            layers, groups = modules, groups_of_modules(modules)
        if len(groups) != len(layers):
            raise OctoPipeError(f"{len(groups)} groups for {len(layers)} layers; give one per layer")
        self._device, self._group = device_of(sample), group
        before = resident_bytes([], sample, target, self._device)
        # The last layer runs with the loss: it is never the same as an equal one in the middle.
        group_of = list(groups)
        if groups.count(groups[-1]) > 1:
            group_of[-1] = max(groups) + 1
        order = {g: i for i, g in enumerate(dict.fromkeys(group_of))}
        self._group_of = [order[g] for g in group_of]
        self._rounds = Rounds(self._group_of, tell, total=rounds)
        self._forks = bool(takes)
        self._ready, self._memory, self._tokens_per_expert = _prepare(
            layers,
            self._group_of,
            takes,
            sample,
            loss_fn,
            target,
            self._device,
            self._rounds,
            precision or "fp32",
            graphs,
        )
        self._rank = 0 if group is None else group.rank()
        self._ranks = 1 if group is None else group.size()
        # A round is the whole model, so that the mix of layers on other ranks (and the power it draws) is the model's
        # own; ranks start at different layers.
        turn = self._rank * len(self._group_of) // self._ranks
        self._ring = [*self._group_of[turn:], *self._group_of[:turn]]
        self._loaded: list[Floats] = []
        self._partial: dict[int, list[Floats | None]] = {}
        self._exchanges: tuple[MeasuredExchange, ...] = ()
        self._loss = loss_fn, target
        self._precision = precision or "fp32"
        self._shards: Seen = {}
        self._issued_ms = 0.0
        wait_all(group)
        self._run(1)
        # The difference is negative if something else was freed meanwhile.
        self._resident_bytes = max(0.0, resident_bytes(self._ready, sample, target, self._device) - before)

    def measure(self, repeats: int, warm_up: int, levels: Sequence[int]) -> Measured:
        """Warm up, run `repeats` rounds with all ranks busy, then some with fewer busy ranks for each of `levels`."""
        if repeats < 1 or warm_up < 0:
            raise OctoPipeError(f"{repeats} repeats after {warm_up} warm-ups; give at least one repeat")
        wait_all(self._group)
        self._run(warm_up)
        self._all_at_work(repeats)
        self._exchanges = exchanges_of(self._ready, self._ring, self._device, max(3, repeats // 2))
        wait_all(self._group)
        for level in levels:
            if 0 < level < self._ranks:
                self._some_at_work(level, max(3, repeats // 2), warm_up=1)
        self._measure_shards(max(3, repeats // 2))
        self._tell(f"{len(self._group_of)} layers measured", ROUNDS_END)
        return self.measured()

    def round(self, levels: Sequence[int], *, timed: bool = True) -> None:
        """Run one round with all ranks busy, and one with fewer busy ranks for each of `levels`."""
        if not timed:
            self._run(1)
            return
        self._all_at_work(1)
        for level in levels:
            self._some_at_work(level, 1)

    def _run(self, rounds: int, issued_s: list[float] | None = None) -> Floats:
        return timed_rounds(self._ready, rounds, self._ring, self._device, issued_s, self._rounds)

    def _all_at_work(self, rounds: int) -> None:
        wait_all(self._group)
        began, issued_s = time.perf_counter(), list[float]()
        self._loaded.append(self._run(rounds, issued_s))
        self._issued_ms += 1e3 * (issued_s[0] - began)
        wait_all(self._group)

    def _some_at_work(self, level: int, rounds: int, warm_up: int = 0) -> None:
        seen = None
        if self._rank < level:
            self._run(warm_up)
            seen = self._run(rounds)
        wait_all(self._group)
        self._partial.setdefault(level, []).append(seen)

    def _measure_shards(self, repeats: int) -> None:
        """Time parts of the embedding and of the head, if a plan could gain by cutting them (collective)."""
        if self._forks:
            return
        median = np.median(np.concatenate(self._loaded), axis=0)
        times = median.sum(axis=1)[self._group_of].tolist()

        def agree(holds: bool) -> bool:
            return holds if self._group is None else all(gather_values(self._group, holds))

        if not agree(worth_measuring(times, self._ranks)):
            return
        ends = {k: self._ready[self._group_of[k]] for k in (0, len(self._group_of) - 1)}

        def timed(shards: list[Layer]) -> Floats:
            wait_all(self._group)
            timed_rounds(shards, 1, [0], self._device)
            return np.median(timed_rounds(shards, repeats, [0] * 4, self._device), axis=0)

        self._shards = measure_shards(
            ends,
            *self._loss,
            whole_ms={k: median[self._group_of[k]] for k in ends},
            counts=counts_for(self._ranks),
            rank=self._rank,
            precision=self._precision,
            agree=agree,
            timed=timed,
        )
        wait_all(self._group)

    def measured(self) -> Measured:
        """Return the results of all rounds so far (collective)."""
        loaded = np.concatenate(self._loaded)
        busy = float((loaded.sum(axis=(0, 2)) * np.bincount(self._group_of)).sum())
        partial: dict[int, Floats] = {}
        for level, rounds in self._partial.items():
            mine = [r for r in rounds if r is not None]
            one = np.median(np.concatenate(mine), axis=0) if mine else None
            got: list[Any] = [one] if self._group is None else gather_values(self._group, one)
            partial[level] = np.mean(got[:level], axis=0)
        quarter = np.percentile(loaded, [25, 75], axis=0)
        median = np.median(loaded, axis=0)
        return Measured(
            group_of=tuple(self._group_of),
            loaded_ms=median,
            partial_ms=partial,
            spread=(quarter[1] - quarter[0]) / np.maximum(median, 1e-9),
            memory=tuple(self._memory),
            repeatable=tuple(layer.repeatable() for layer in self._ready),
            host_share=self._issued_ms / max(busy, 1e-9),
            resident_bytes=self._resident_bytes,
            exchanges=self._exchanges,
            tokens_per_expert=self._tokens_per_expert,
            expert_ranks=exchange_ranks() if self._exchanges else 0,
            shards=self._shards,
            seconds=time.perf_counter() - self._began,
        )


def _prepare(
    layers: Sequence[nn.Module | Callable[[], nn.Module]],
    group_of: Sequence[int],
    takes: Sequence[Sequence[int]],
    sample: Any,
    loss_fn: Callable[..., Tensor],
    target: Any,
    device: torch.device,
    rounds: Rounds,
    precision: str,
    graphs: bool,
) -> tuple[list[Layer], list[LayerMemory], tuple[tuple[float, ...], ...]]:
    """Build one layer per group, run each on the outputs of the layers that it takes, and measure its memory and its
    routing."""
    ready: dict[int, Layer] = {}
    memory: dict[int, LayerMemory] = {}
    routed: dict[int, tuple[float, ...]] = {}
    leaves: list[Any] = []
    flatten(sample, leaves)
    # Whether a layer's input gradient is needed: by trained parameters before it, or by a sample that requires grad.
    passes = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
    ends = {i: loss_of(loss_fn, i, target) for i in ends_of(len(group_of), takes)}
    outputs: dict[int, Any] = {-1: sample}
    for i, g in enumerate(group_of):
        value = input_of(i, takes, outputs)
        if g not in ready:
            made = layers[i]
            module = made if isinstance(made, nn.Module) else made()
            rounds.preparing(g, type(module).__name__)
            began = time.perf_counter()
            try:
                with recorded_routing() as heard:
                    ready[g] = Layer(module, value, ends.get(i), i == 0 or not passes, precision, graphs)
            except (RuntimeError, TypeError, ValueError) as error:
                why = " ".join(str(error).split())[:200]
                raise OctoPipeError(f"layer {i} ({type(module).__name__}) does not run on its input: {why}") from error
            rounds.first_run(g, time.perf_counter() - began)
            routed[g] = heard.tokens_per_expert(value)
            memory[g] = memory_of(ready[g], device)
            ready[g].capture()
        passes = passes or any(p.requires_grad for p in ready[g].module.parameters())
        outputs[i] = ready[g].output
    every = sorted(ready)
    return [ready[g] for g in every], [memory[g] for g in every], tuple(routed[g] for g in every)


def gather(mine: Measured, group: dist.ProcessGroup | None) -> list[Measured]:
    """Return the measurements of all ranks (collective)."""
    if group is None:
        return [mine]
    return gather_values(group, mine)


def assemble(
    ranks: Sequence[Measured],
    *,
    model: str,
    symbols: str,
    tokens: int | None = None,
    links: Mapping[tuple[int, int], Link] | None = None,
    state_factor: float = 2.0,
    memory_bytes: float | None = None,
    op_overhead_ms: float = 0.0,
    tied: bool = False,
    graph_of: Callable[[Sequence[float]], LayerGraph | None] | None = None,
    mode: Mode | None = None,
    about: Mapping[str, Any] | None = None,
) -> Profile:
    """Combine the measurements of all ranks into one profile. `state_factor`: the number of the optimizer's moments,
    each as large as what it updates (AdamW of torch: 2; none: 0, and no master weights). `tied`: the head's weights are
    the embedding's. `graph_of`: returns the connections of the layers, given the static bytes of each. `mode`: how the
    layers ran."""
    first = ranks[0]
    if len(symbols) != len(first.group_of):
        raise OctoPipeError(f"{len(symbols)} symbols for {len(first.group_of)} layers; give one character per layer")
    loaded = np.mean([m.loaded_ms for m in ranks], axis=0)
    of = np.array(first.group_of)
    slow = [float(m.loaded_ms[of].sum() / loaded[of].sum()) for m in ranks]
    resident = max(m.resident_bytes for m in ranks)

    def column(values: Sequence[float] | Floats) -> Floats:
        return np.asarray(values, np.float64)[of]

    def sizes(name: str) -> Floats:
        return column([getattr(m, name) for m in first.memory])

    stash = sizes("stash_bytes")
    static = sizes("parameter_bytes") + sizes("gradient_bytes")
    if state_factor:
        static = static + sizes("master_bytes") + state_factor * sizes("updated_bytes")
    pairs = dict(links or {})
    worst = max(pairs.values(), key=lambda x: x.transfer_ms(1 << 20), default=Link())
    costs = CostTable(
        model=model,
        symbols=symbols,
        forward_ms=column(loaded[:, 0]),
        input_ms=column(loaded[:, 1]),
        weight_ms=column(loaded[:, 2]),
        activation_bytes=np.maximum(sizes("activation_bytes"), stash),
        stash_bytes=stash,
        static_bytes=static,
        tied_bytes=float(min(static[0], static[-1])) if tied else 0.0,
        graph=None if graph_of is None else graph_of(static.tolist()),
        gradient_bytes=sizes("gradient_bytes"),
        boundary_bytes=sizes("boundary_bytes"),
        workspace_bytes=sizes("workspace_bytes") + resident,
        network=Network(intra=worst, inter=worst, pairs=pairs),
        rank_slowdown=tuple(slow) if len(ranks) > 1 else (),
        rank_memory_bytes=() if memory_bytes is None else (memory_bytes,),
        tokens_per_micro_batch=tokens,
        mode=mode,
        shard_times=shard_times([m.shards for m in ranks]),
        routing=_routing(ranks),
        segments=segments_of([m.exchanges for m in ranks], first.group_of),
        repeatable=tuple(all(m.repeatable[g] for m in ranks) for g in first.group_of),
    )
    partial = {}
    for level, times in first.partial_ms.items():
        # An op is not slower because fewer ranks are busy: such a measurement is noise.
        quick = np.minimum(times, loaded)
        partial[level] = costs.replace(
            forward_ms=column(quick[:, 0]), input_ms=column(quick[:, 1]), weight_ms=column(quick[:, 2])
        )
    told = {**_about(ranks), **(about or {})}
    return Profile(costs=costs, partial=partial, op_overhead_ms=op_overhead_ms, about=told)


def _about(ranks: Sequence[Measured]) -> dict[str, Any]:
    """Return the description of the measurement that a profile contains for its readers."""
    spread = np.median([m.spread for m in ranks], axis=0)[np.array(ranks[0].group_of)]
    return {
        "ranks": len(ranks),
        "seconds": max(m.seconds for m in ranks),
        "spread": {kind: spread[:, k].round(4).tolist() for k, kind in enumerate(KINDS)},
        "host_share": float(max(m.host_share for m in ranks)),
        "resident_mib": float(max(m.resident_bytes for m in ranks) / (1 << 20)),
    }


def _routing(ranks: Sequence[Measured]) -> Routing | None:
    """Return the first rank's routing: all ranks run the same layers on the same micro-batch. None if no layer routes,
    or if layers exchange tokens among a number of ranks that is not known or does not divide their experts."""
    first = ranks[0]
    tokens = tuple(first.tokens_per_expert[g] for g in first.group_of) if first.tokens_per_expert else ()
    among = first.expert_ranks if first.exchanges else 1
    if not any(tokens) or among == 0 or any(len(row) % among for row in tokens):
        return None
    return Routing(tokens=tokens, ranks=among)

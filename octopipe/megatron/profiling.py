"""A profile of Megatron-Core's chunks: F, I and W of every layer, measured on its rank with all ranks busy.

Knows: how parts of chunks are timed and how the measurements of all ranks become one `Profile` of the whole model. Does
not know: how a part of a chunk runs alone (`units.py`), plans, or how a plan runs on chunks (`driver.py`).

    profile = octopipe.megatron.profile(                    # on every rank, with the keywords of Megatron's schedules
        model, forward_step_func=forward_step, data_iterator=data, seq_length=4096, micro_batch_size=1)
    result = octopipe.tune(profile.costs, pp, num_micro_batches)
    profile.save("megatron.json")                           # or: octopipe tune megatron.json --pp 4 ...

The measurement uses the drop-in's own code (`weights.Split`, Megatron's `forward_step`), so it measures what runs.
There is no device synchronisation within a round: layers follow each other as in a step, where the host runs ahead of
the GPU. Whole chunks are timed in the same rounds, and layer times are scaled by one factor per op kind so that they
add up to them. Chunks with B instead of I and W are timed afterwards. When `profile` returns, the layers compute their
products as Megatron does again. On ranks that share a device, times with fewer busy ranks are measured too (`levels`),
and `simulation.contention.predict` uses them: a rank that is idle in a bubble leaves its share to the others.
"""

from __future__ import annotations

import string
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import Link, Network
from octopipe.costs.mode import Mode
from octopipe.costs.profile_file import Profile
from octopipe.costs.table import CostTable
from octopipe.megatron.placing import for_megatron
from octopipe.megatron.reduction import megatron_groups, no_sync
from octopipe.megatron.units import (
    EMBEDDING,
    HEAD,
    Chunk,
    ForwardStep,
    Unit,
    WholeBackward,
    gradients_apart,
    recorded_bytes,
    units_of,
)
from octopipe.plans.plan import Plan
from octopipe.runtime.measure.links import measure_links
from octopipe.runtime.measure.timing import Timed, timed_rounds, wait_all
from octopipe.runtime.ranks.world import World

FACTORS = 0.7, 1.4
"""The largest correction by which layer times are scaled to add up to the times of their chunks."""


def profile(
    model: Any,
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    seq_length: int,
    micro_batch_size: int,
    plan: Plan | None = None,
    name: str = "megatron",
    repeats: int = 8,
    warm_up: int = 2,
    levels: Sequence[int] = (1,),
    links: bool = True,
    transport: str | None = None,
    state_bytes_per_parameter: float | None = None,
    pg_collection: Any = None,
) -> Profile:
    """Measure this rank's chunks (collective over the pipeline's ranks); every rank gets the whole model's profile.

    `model`: a chunk or the list of them, as Megatron's schedules take them. `data_iterator`: one micro-batch is taken
    from it (from the first of a list). `plan`: the plan of the chunks, if their layers do not know their own numbers
    (hybrids built chunk by chunk). `links`: measure transfers between ranks too, over `transport` (default: as the
    drop-in chooses). `state_bytes_per_parameter`: of the optimizer on this rank (default: Adam's, in float32, with
    master weights under bf16 or fp16). Call it between steps: `main_grad` is zero afterwards.
    """
    from megatron.core.utils import get_model_config

    chunks = model if isinstance(model, list) else [model]
    if not chunks:
        raise OctoPipeError("no model chunk to profile; give Megatron's list of them")
    groups = pg_collection or megatron_groups()
    world = World(groups.pp if groups.pp.size() > 1 else None)
    config = get_model_config(chunks[0])
    batch = next(data_iterator[0] if isinstance(data_iterator, list) else data_iterator)
    began = time.perf_counter()
    device = next(p.device for c in chunks for p in c.parameters())
    before = _allocated(device)
    cp, tp = groups.cp.size(), groups.tp.size() if config.sequence_parallel else 1
    hidden = (seq_length // cp // tp, micro_batch_size, config.hidden_size)
    step = ForwardStep(forward_step_func, batch, config, cp_size=cp, hidden=hidden)
    firsts = _first_layers(plan, world.rank, chunks)
    units = [unit for k, chunk in enumerate(chunks) for unit in units_of(chunk, k, step, firsts[k])]
    wholes = [Chunk(chunk, k, step) for k, chunk in enumerate(chunks)]
    with gradients_apart(chunks), no_sync(config, chunks):
        try:
            memory = [unit.memory() for unit in units]
            loaded, partial = _times([*units, *wholes], world, device, repeats, warm_up, levels)
        finally:
            for unit in (*units, *wholes):
                unit.let_go()
        together, _ = _times([WholeBackward(whole) for whole in wholes], world, device, repeats, warm_up, ())
    kept_by_libraries = max(0.0, _allocated(device) - before - recorded_bytes([*units, *wholes]))
    mine = [
        _Row(unit, times, {level: some[i] for level, some in partial.items()}, memory[i])
        for i, (unit, times) in enumerate(zip(units, loaded))
    ]
    sums = (
        loaded[: len(units)].sum(0).tolist(),
        loaded[len(units) :].sum(0).tolist(),
        together.sum(0).tolist(),
    )
    rows, facts = [], []
    for theirs, its_sums in world.gather(([row.plain() for row in mine], sums)):
        rows += theirs
        facts.append(its_sums)
    parts, whole, backward = (np.sum([its_sums[i] for its_sums in facts], axis=0) for i in range(3))
    factors = np.clip(whole / np.maximum(parts, 1e-9), *FACTORS)
    # B is not I and W: Megatron's own backward rounds a weight's gradient and adds it up in a pass of its own.
    fused = float(np.clip(backward[1] / max(whole[1] + whole[2], 1e-9), *FACTORS))
    pairs = _links(rows, world, device, transport) if links and world.size > 1 else {}
    state = _state_bytes(config) if state_bytes_per_parameter is None else state_bytes_per_parameter
    resident = max(world.gather(kept_by_libraries))
    mode = Mode(precision=precision_of_chunks(config, chunks))
    costs, fewer = _table(rows, factors, name, pairs, state, resident, mode)
    about = _about(rows, factors, device) | {
        "ranks": world.size,
        "resident_mib": resident / (1 << 20),
        "total_seconds": max(world.gather(round(time.perf_counter() - began, 2))),
    }
    return Profile(costs=costs, partial=fewer, fused_factor=fused, about=about)


def _links(
    rows: Sequence[dict[str, Any]], world: World, device: torch.device, transport: str | None
) -> dict[tuple[int, int], Link]:
    """Measure the links between all ranks with tensors up to the size of those that stages exchange."""
    boundary = int(max(row["boundary_bytes"] for row in rows))
    sizes = sorted({1 << 12, max(1 << 13, boundary // 4), max(1 << 14, boundary)})
    return measure_links(world, device, sizes=sizes, transport=transport)


def _about(rows: Sequence[dict[str, Any]], factors: np.ndarray, device: torch.device) -> dict[str, Any]:
    """Return the description of the measurement that is stored in the profile."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "layers": [row["kind"] for row in sorted(rows, key=_place)],
        "chunk_factors": dict(zip("FIW", factors.round(4).tolist())),
        "model_code": "Megatron-Core chunks",
        "torch": str(torch.__version__),
    }


def _first_layers(plan: Plan | None, rank: int, chunks: Sequence[nn.Module]) -> list[int | None]:
    """Return the first decoder layer of every chunk according to the plan; None if the layers know their own
    numbers."""
    if plan is None:
        return [None] * len(chunks)
    plan = for_megatron(plan)
    stages = [plan.stages[s] for s in plan.stages_of_rank(rank)]
    if len(stages) != len(chunks):
        raise OctoPipeError(
            f"rank {rank} holds {len(stages)} stages of the plan but {len(chunks)} chunks; give its own"
        )
    return [max(stage.first, 1) for stage in stages]


# -- from measurements to a profile --------------------------------------------------------------------


def _times(
    units: Sequence[Timed], world: World, device: torch.device, repeats: int, warm_up: int, levels: Sequence[int]
) -> tuple[Any, dict[int, Any]]:
    """Return medians over rounds, [units, 3]: with all ranks busy, and for each smaller number of busy ranks that is
    measured."""
    ring = list(range(len(units)))
    wait_all(world.control)
    timed_rounds(units, max(1, warm_up), ring, device)
    wait_all(world.control)
    loaded = np.median(timed_rounds(units, repeats, ring, device), axis=0)
    wait_all(world.control)
    partial: dict[int, Any] = {}
    for level in levels:
        if not 0 < level < world.size:
            continue
        rows = loaded
        # Every rank has layers of its own, so each rank is among the busy ones once.
        for start in range(0, world.size, level):
            wait_all(world.control)
            if start <= world.rank < start + level:
                rows = np.median(timed_rounds(units, max(3, repeats // 2), ring, device), axis=0)
            wait_all(world.control)
        # An op is not slower because fewer ranks are busy: such a measurement is noise.
        partial[level] = np.minimum(rows, loaded)
    return loaded, partial


class _Row:
    """The measurements of one unit on the rank that holds it."""

    def __init__(self, unit: Unit, loaded: Any, partial: dict[int, Any], memory: dict[str, float]):
        self._unit, self._loaded, self._partial, self._memory = unit, loaded, partial, memory

    def plain(self) -> dict[str, Any]:
        shapes = tuple((n, tuple(p.shape)) for n, p in self._unit.module.named_parameters())
        return {
            "number": self._unit.number,
            "kind": self._unit.kind,
            "group": f"{self._unit.kind} {shapes if self._unit.number > 0 else ''}",
            "ms": [float(x) for x in self._loaded],
            "partial": {level: [float(x) for x in some] for level, some in self._partial.items()},
            **self._memory,
        }


def _place(row: dict[str, Any]) -> float:
    return float("inf") if row["number"] == HEAD else float(row["number"])


def _table(
    rows: list[dict[str, Any]],
    factors: Any,
    name: str,
    pairs: dict[tuple[int, int], Link],
    state: float,
    resident: float,
    mode: Mode,
) -> tuple[CostTable, dict[int, CostTable]]:
    """Return the whole model's costs; equal layers share their mean. `state`: bytes of the optimizer per parameter;
    `resident`: bytes that libraries keep on the device, whatever the layers."""
    rows = sorted(rows, key=_place)
    numbers = [row["number"] for row in rows]
    wanted = [EMBEDDING, *range(1, len(rows) - 1), HEAD]
    if numbers != wanted:
        raise OctoPipeError(
            f"the ranks' chunks hold layers {numbers[:12]}, which is not a whole model with an embedding, "
            f"{len(rows) - 2} decoder layers and a head; give every rank all of its chunks"
        )
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    letters = iter([c for c in string.ascii_letters if c not in "EL"])
    symbol = {key: "E" if some[0]["number"] == EMBEDDING else "L" if some[0]["number"] == HEAD else next(letters)
              for key, some in groups.items()}  # fmt: skip

    def times(level: int | None = None) -> Any:
        def own(row: dict[str, Any]) -> list[float]:
            found: list[float] = row["ms"] if level is None else row["partial"][level]
            return found

        mean = {key: np.mean([own(row) for row in some], axis=0) for key, some in groups.items()}
        return np.array([mean[row["group"]] for row in rows]) * factors

    def size(key: str) -> Any:
        return np.array([row[key] for row in rows])

    ms = times()
    worst = max(pairs.values(), key=lambda link: link.transfer_ms(1 << 20), default=Link())
    costs = CostTable(
        model=name,
        symbols="".join(symbol[row["group"]] for row in rows),
        forward_ms=ms[:, 0],
        input_ms=ms[:, 1],
        weight_ms=ms[:, 2],
        activation_bytes=size("activation_bytes"),
        stash_bytes=np.minimum(size("stash_bytes"), size("activation_bytes")),
        static_bytes=size("parameter_bytes") + size("gradient_bytes") + state * size("parameters"),
        gradient_bytes=size("gradient_bytes"),
        boundary_bytes=size("boundary_bytes"),
        workspace_bytes=size("workspace_bytes") + resident,
        network=Network(intra=worst, inter=worst, pairs=pairs),
        mode=mode,
    )
    fewer = {}
    for level in rows[0]["partial"]:
        some = np.minimum(times(level), ms)
        fewer[int(level)] = costs.replace(forward_ms=some[:, 0], input_ms=some[:, 1], weight_ms=some[:, 2])
    return costs, fewer


def _allocated(device: torch.device) -> float:
    """Bytes that tensors occupy on a GPU; 0 on a CPU, whose allocator does not report them."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    return float(torch.cuda.memory_allocated(device))


def precision_of_chunks(config: Any, chunks: Sequence[nn.Module]) -> str:
    """The name (`costs/mode.py`) of the precision that Megatron's flags and DDP select for the chunks."""
    if not (config.bf16 or config.fp16):
        return "fp64" if config.params_dtype is torch.float64 else "fp32"
    wide = any(getattr(p, "main_grad", p).dtype is torch.float32 for c in chunks for p in c.parameters())
    return "bf16-main-fp32" if wide else "bf16"


def _state_bytes(config: Any) -> float:
    """Return the bytes per parameter of Adam's two moments in float32, and of a master weight if weights are in half
    precision."""
    return 12.0 if config.bf16 or config.fp16 else 8.0

"""Parameters, activations and FLOPs of every layer of a model that is to be run, before any layer exists.

Knows: what a model's description says about the sizes of its layers. Does not know: what a run keeps of them
(`training/memory_check.py`), or what a profile needs (`forecast.py`).

Parameters are exact. Activations assume flash attention and fused losses (analytic sizes if the model's layers are
known, otherwise 34 bytes per token and hidden unit at 2 bytes a value).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octopipe.base.errors import OctoPipeError
from octopipe.costs.analytic.flops import layer_flops
from octopipe.costs.analytic.table import setup_costs
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import DEFAULT_GPU, Setup
from octopipe.costs.table import CostTable
from octopipe.models.readers.hf_config import from_config
from octopipe.models.spec import ModelSpec, Source

if TYPE_CHECKING:
    from octopipe.huggingface.described import HfModel
    from octopipe.huggingface.inputs import InputForm

VALUE_BYTES = {"fp64": 8.0, "fp32": 4.0}
"""Bytes of one value of an activation by precision; precisions that are not listed compute in 16 bits."""


def layer_parameters(spec: ModelSpec | HfModel) -> list[int]:
    """Return the number of parameters of every layer. A tied head counts the shared weights as well, for a rank that
    holds only the head."""
    if isinstance(spec, ModelSpec):
        tied = getattr(spec.layers[-1], "tied", False)
        counts = [layer.parameters for layer in spec]
        return [*counts[:-1], counts[-1] + (spec.vocab * spec.hidden if tied else 0)]
    if spec.layer_parameters:
        return list(spec.layer_parameters)
    return [spec.training_parameters // spec.num_layers] * spec.num_layers


def equal_costs(spec: ModelSpec | HfModel) -> CostTable:
    """Return costs of equal layers, connected as those of the model, for plans that are made before anything is
    measured."""
    graph = None if isinstance(spec, ModelSpec) else spec.graph()
    return CostTable.uniform(num_layers=spec.num_layers, model=spec.name).replace(graph=graph)


def layer_activations(
    spec: ModelSpec | HfModel, *, seq: int, micro_batch_size: int = 1, precision: str = "fp32"
) -> list[float]:
    """Return the bytes that every layer keeps for one micro-batch until its backward."""
    width = VALUE_BYTES.get(precision, 2.0)
    known = planned_spec(spec)
    if known is not None:
        costs = setup_costs(known, Setup(gpu=gpu(DEFAULT_GPU), seq=seq, micro_batch_size=micro_batch_size))
        held = (costs.activation_bytes * width / 2.0).tolist()
        return [*held[:-1], held[-1] + float(costs.workspace_bytes[-1])]
    tokens = seq * micro_batch_size
    inside = 17.0 * width * tokens * spec.hidden
    return [width * tokens * spec.hidden, *[inside] * (spec.num_layers - 2), (width + 4.0) * tokens * spec.vocab]


def step_flops(spec: ModelSpec | HfModel, *, seq: int, micro_batch_size: int = 1) -> list[float]:
    """Return the FLOPs of F, I and W together of every layer for one micro-batch."""
    known = planned_spec(spec)
    if known is not None:
        return [layer_flops(layer, seq=seq, micro_batch_size=micro_batch_size).total for layer in known]
    return [6.0 * count * seq * micro_batch_size for count in layer_parameters(spec)]


def _as_read(source: Source, form: InputForm) -> Source:
    """Return what a tower reads, with the size and number of the items that are given to the model."""
    source = source.of_size(form.positions) if form.positions and source.free else source
    if form.images and not source.is_attended:
        source = source.per(sequence=sum(form.images) / len(form.images))
    return source


def planned_spec(spec: ModelSpec | HfModel) -> ModelSpec | None:
    """Return the planner's description of a model; None unless it has one layer for each layer that runs."""
    if isinstance(spec, ModelSpec):
        return spec
    try:
        known = from_config(spec.source, known_families=True)
        known = known.without_mtp() if any(layer.symbol == "P" for layer in known) else known
    except OctoPipeError:
        return None
    if known.sources and spec.inputs is not None:
        heard = spec.inputs.beside if len(known.sources) > 1 else None
        forms = [heard if heard is not None and s.kind == "audio" else spec.inputs for s in known.sources]
        known = known.reading(*(_as_read(*pair) for pair in zip(known.sources, forms, strict=True)))
    return known if known.num_layers == spec.num_layers else None

"""Which layers' outputs a layer takes, if that is not simply the layer before it, and which layers share weights.

Knows: layers by number, in an order in which a forward could run them one after the other. Does not know: stages,
ranks or times. A model without such a graph is a chain.

Multi-token prediction is the usual case: behind the last block, the path of a micro-batch forks into the head and into
a layer that predicts one token more, which takes the embedding as well and has a head of its own with the same weight.

>>> graph = LayerGraph(takes=((), (0,), (1,), (0, 1), (3,)), shared=(((2, 4), 100.0),))
>>> graph.borders, graph.ends, graph.weights_held_twice((2, 3, 4))
((1, 2, 3), (2, 4), 100.0)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief, kind_of
from octopipe.base.limits import MAX_BYTES, finite

GIB = float(1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGraph:
    """The connections of a model's layers."""

    takes: tuple[tuple[int, ...], ...]
    """Per layer: the layers whose outputs it takes, in rising order; the first layer takes the batch."""
    shared: tuple[tuple[tuple[int, ...], float], ...] = ()
    """Groups of layers, and the static bytes that the layers of a group have in common. The static bytes of every layer
    include them; a rank that holds several layers of the group stores them once."""

    def __post_init__(self) -> None:
        for layer, taken in enumerate(self.takes):
            good = all(0 <= k < layer for k in taken) and list(taken) == sorted(set(taken))
            if not good or bool(taken) == (layer == 0):
                raise OctoPipeError(
                    f"layer {layer} takes the outputs of layers {brief(list(taken))}; give layers before it, each once "
                    "and in rising order, and none for layer 0"
                )
        for layers, nbytes in self.shared:
            known = len(layers) > 1 and all(0 <= k < len(self.takes) for k in layers)
            if not known or not 0 <= (-1.0 if finite(nbytes) is None else nbytes) <= MAX_BYTES:
                raise OctoPipeError(
                    f"layers {brief(list(layers))} share {brief(nbytes)} bytes; give two or more layers of the model "
                    "and a finite number of bytes"
                )

    @property
    def num_layers(self) -> int:
        return len(self.takes)

    @property
    def ends(self) -> tuple[int, ...]:
        """The layers whose output no layer takes: every one of them has a loss."""
        taken = {k for row in self.takes for k in row}
        return tuple(k for k in range(self.num_layers) if k not in taken)

    @property
    def borders(self) -> tuple[int, ...]:
        """Layers that must begin a stage, because a stage takes the outputs of whole stages and has one output."""
        found = set()
        for layer, taken in enumerate(self.takes):
            if layer and taken != (layer - 1,):
                found |= {layer, *(k + 1 for k in taken)}
        return tuple(sorted(found))

    def weights_held_twice(self, layers: Collection[int]) -> float:
        """Return the static bytes that are counted too often if those of these layers of one rank are added up."""
        return sum(nbytes * max(0, sum(k in layers for k in group) - 1) for group, nbytes in self.shared)

    def longest(self, layer_ms: Sequence[float]) -> tuple[int, ...]:
        """Return the layers of the path from the first layer to an end that takes longest."""
        best: list[tuple[float, int]] = []
        for layer, taken in enumerate(self.takes):
            before = max(((best[k][0], k) for k in taken), default=(0.0, -1))
            best.append((before[0] + float(layer_ms[layer]), before[1]))
        at = max(self.ends, key=lambda k: best[k][0])
        out = [at]
        while best[at][1] >= 0:
            at = best[at][1]
            out.append(at)
        return tuple(reversed(out))

    def record(self) -> dict[str, object]:
        """Return the graph as a profile stores it: the layers that do not take just the output of the layer before
        them, and shared weights in GiB."""
        rows = {str(k): list(row) for k, row in enumerate(self.takes) if k and row != (k - 1,)}
        shared = [{"layers": list(layers), "gib": nbytes / GIB} for layers, nbytes in self.shared]
        return {"takes": rows, "shared": shared}


def layer_graph_from_object(value: object, num_layers: int, where: str) -> LayerGraph | None:
    """Return the graph in a profile's "graph", an object with `takes` (layer -> layers) and optionally `shared`; None
    if there is none."""
    if value is None:
        return None
    what = f'{where}: "graph"'
    if not isinstance(value, dict) or not isinstance(value.get("takes"), dict):
        raise OctoPipeError(f'{what} is a JSON {kind_of(value)}; give an object with "takes" and "shared"')
    rows = [() if k == 0 else (k - 1,) for k in range(num_layers)]
    for name, taken in value["takes"].items():
        layer = int(name) if name.isascii() and name.isdigit() and len(name) <= 9 else num_layers
        if layer >= num_layers or not _whole(taken):
            raise OctoPipeError(f"{what}: layer {brief(name)} takes {brief(taken)}; give lists of layers of the model")
        rows[layer] = tuple(taken)
    try:
        return LayerGraph(takes=tuple(rows), shared=_shared(value.get("shared"), what))
    except OctoPipeError as error:
        raise OctoPipeError(f"{what}: {error}") from None


def _shared(value: object, what: str) -> tuple[tuple[tuple[int, ...], float], ...]:
    out = []
    entries: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    for entry in entries:
        size = finite(entry.get("gib")) if isinstance(entry, Mapping) else None
        if size is None or not _whole(entry.get("layers")):
            raise OctoPipeError(f'{what}: "shared" has {brief(entry)}; give objects with layers and gib')
        out.append((tuple(entry["layers"]), size * GIB))
    return tuple(out)


def _whole(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(k, int) and not isinstance(k, bool) for k in value)

"""Table II: the models, from our presets; the authors' own Jamba sizes beside ours."""

from __future__ import annotations

from octopipe.models.spec import Embedding, ModelSpec
from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.models import AUTHORS, TABLE, spec_of
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.row import Result, Row

NAMES = {"T": "attention and FFN blocks", "M": "Mamba", "-": "FFN", "*": "attention", "#": "MoE"}

CLOSE_TO_ITS_NAME = 0.13
"""Tolerance of a model's number of parameters against its name. Nemotron-H 4B has 4.49 billion parameters in its
published config; the others are closer to their names."""


def _words(layers: int, hidden: int, kinds: str) -> str:
    return f"{layers} layers of {hidden}: {', '.join(NAMES.get(k, k) for k in kinds)}"


def run(bench: Bench) -> Result:
    rows = []
    for entry in TABLE:
        spec = spec_of(entry.name, authors=False)
        kinds = "".join(sorted(set(spec.pattern[1:-1])))
        ours = (spec.num_layers - 2, spec.hidden, kinds)
        billions = spec.parameters / 1e9
        near = abs(billions / float(entry.size.removesuffix("B")) - 1.0) <= CLOSE_TO_ITS_NAME
        rows.append(
            Row.constructed(
                f"models.{entry.name}",
                f"{entry.family} {entry.size}",
                _words(entry.layers, entry.hidden, entry.kinds),
                f"{_words(*ours)}; {billions:.2f} B parameters",
                ours == (entry.layers, entry.hidden, entry.kinds) and near,
                source="Table II",
                group="models",
            )
        )
    lines = []
    for name, theirs in AUTHORS.items():
        for label, spec in ((f"{name}, ours", spec_of(name, authors=False)), (f"{name}, authors' configs", theirs)):
            lines.append((label, *_dimensions(spec)))
    columns = ("model", "parameters (B)", "layers", "vocabulary", "dense FFN", "experts", "expert FFN", "Mamba")
    text = (
        "The authors' public configurations of the two scaled Jambas are not those of Table II: 20B has 64 layers "
        "(the table prints 32) and experts of 4224, 100B a dense FFN of 24576 and 16 experts of 3456, both a "
        "vocabulary of 65536 and Mamba-2. Where their layer times are used, so are their sizes; our presets follow "
        "the table.",
    )
    tables = (("The two Jambas whose sizes the authors chose", columns, tuple(lines)),)
    return Result(rows=tuple(rows), costs="none needed", text=text, tables=tables)


def _dimensions(spec: ModelSpec) -> tuple[float | str, ...]:
    inner = {layer.symbol: layer for layer in spec.layers[1:-1]}
    moe, ffn, first = inner["#"], inner["-"], spec.layers[0]
    assert isinstance(first, Embedding)
    return (
        spec.parameters / 1e9,
        float(spec.num_layers - 2),
        float(first.vocab),
        float(getattr(ffn, "ffn", 0)),
        float(getattr(moe, "experts", 0)),
        float(getattr(moe, "ffn", 0)),
        type(inner["M"]).__name__,
    )


PART = Part(name="models", title="Table II: the models", labels=("tab:model_config",), run=run)

"""Layer-times files: measured per-symbol costs of a model, as JSON, turned into a CostTable.

Knows: the file format, and the one-line errors for invalid files. Does not know: models by name (`resolve.py`) or how
times are measured.

    {"pattern": "EM-M*-L",
     "forward_ms": {"E": 0.1, ...}, "backward_ms": {...}, "weight_ms": {...},     F, I and W of each symbol
     "activation_gib": {...}, "stash_gib": {...}, "params_gib": {...},            optional, 0 where absent
     "boundary_gib": 0.01, "workspace_gib": 0.1, "tokens": 4096,                  optional
     "segments": {"forward": {"X": [["compute", 1.0], ["exchange", 0.4]]}, "backward": {...},
                  "slows_compute": 0.1, "slows_exchange": 0.0}}                   optional, see docs/plan-format.md

`segments` says which parts of a layer's F and I (`backward`) exchange tokens between expert ranks, in milliseconds and
in the order in which they run; they must add up to the layer's time. A symbol that is not there only computes.
`boundary_gib` and `workspace_gib` are one number for all layers or one per symbol. Any table may be a list with
one number per layer instead. Other keys are ignored (`profile_file.py` reads more of them).

>>> file = {"pattern": "EL", "forward_ms": {"E": 1, "L": 2}, "backward_ms": {"E": 0, "L": 2}}
>>> costs_of_layer_times({**file, "weight_ms": {"E": 1, "L": 1}}, name="tiny").layer_ms.tolist()
[2.0, 5.0]
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief, check_format, kind_of, read_json_object, shown, stem_of
from octopipe.base.limits import MAX_LAYERS, MAX_TIME_MS, finite
from octopipe.costs.cluster.hardware import GIB
from octopipe.costs.segments import MAX_SEGMENTS, Part, Segments, alone_ms
from octopipe.costs.table import Array, CostTable

FORMAT = "octopipe.layer-times/1"
"""The "format" of such a file; it may be left out."""
TIMES = {"forward_ms": "forward_ms", "backward_ms": "input_ms", "weight_ms": "weight_ms"}
BYTES = {
    "activation_gib": "activation_bytes",
    "stash_gib": "stash_bytes",
    "params_gib": "static_bytes",
    "gradient_gib": "gradient_bytes",
    "boundary_gib": "boundary_bytes",
    "workspace_gib": "workspace_bytes",
}
"""File key -> CostTable field; every one is optional."""
MAX_TOKENS = 1 << 40
TOLERANCE = 0.01
"""The relative difference allowed between a layer's time and the time of its segments, which are measured separately
and never add up exactly."""
ONE_FOR_ALL = frozenset({"boundary_gib", "workspace_gib"})


def load_layer_times(path: str | Path) -> CostTable:
    """The costs in a layer-times file; the model is named after the file."""
    return costs_of_layer_times(read_json_object(path), name=stem_of(path), where=shown(path))


def costs_of_layer_times(file: Mapping[str, object], *, name: str, where: str = "layer times") -> CostTable:
    """The costs in an already decoded layer-times object; `where` opens every error line."""
    tag = file.get("format")
    if isinstance(tag, str) and tag.startswith("octopipe.layer-times"):
        check_format(tag, FORMAT, where)
    pattern = _pattern(file, where)
    arrays = {field: _column(file, key, pattern, where) for key, field in TIMES.items()}
    for key, field in BYTES.items():
        if file.get(key) is not None:
            arrays[field] = _column(file, key, pattern, where) * GIB
    activation, stash = arrays.get("activation_bytes"), arrays.get("stash_bytes")
    if stash is not None:
        held = np.zeros(len(pattern)) if activation is None else activation
        over = np.flatnonzero(stash > held)
        if over.size:
            i = int(over[0])
            raise OctoPipeError(
                f"{where}: stash_gib of {pattern[i]!r} ({stash[i] / GIB:g}) exceeds its activation_gib "
                f"({held[i] / GIB:g}); the stash is the part of it that W still needs"
            )
    segments = _segments(file.get("segments"), pattern, arrays, where)
    tokens = file.get("tokens")
    whole = isinstance(tokens, int) and not isinstance(tokens, bool)
    if tokens is not None and not (whole and 1 <= tokens <= MAX_TOKENS):  # type: ignore[operator]
        raise OctoPipeError(f"{where}: tokens is {brief(tokens)}; give a whole number >= 1, or leave it out")
    return CostTable(model=name, symbols=pattern, tokens_per_micro_batch=tokens, segments=segments, **arrays)  # type: ignore[arg-type]


def _pattern(file: Mapping[str, object], where: str) -> str:
    pattern = file.get("pattern")
    if not isinstance(pattern, str):
        missing = "is missing" if pattern is None else f"is a JSON {kind_of(pattern)}"
        raise OctoPipeError(f'{where}: "pattern" {missing}; give one symbol per layer, like "EM-M*-L"')
    if not pattern:
        raise OctoPipeError(f'{where}: "pattern" is empty; give one symbol per layer, like "EM-M*-L"')
    if len(pattern) > MAX_LAYERS:
        raise OctoPipeError(f'{where}: "pattern" has {len(pattern)} layers; at most {MAX_LAYERS} are allowed')
    for i, symbol in enumerate(pattern):
        if not symbol.isprintable() or symbol.isspace():
            raise OctoPipeError(
                f'{where}: "pattern" has {symbol!r} at position {i}; use one printable character per layer'
            )
    return pattern


def _column(file: Mapping[str, object], key: str, pattern: str, where: str) -> Array:
    """One table of the file, spread over the layers of the pattern."""
    table = file.get(key)
    if key in ONE_FOR_ALL and isinstance(table, int | float) and not isinstance(table, bool):
        return np.full(len(pattern), _number(table, f'{where}: "{key}"'))
    if isinstance(table, list):
        if len(table) != len(pattern):
            raise OctoPipeError(
                f'{where}: "{key}" is a list of {len(table)} for {len(pattern)} layers; give one number per layer'
            )
        return np.array([_number(value, f'{where}: "{key}" of layer {i}') for i, value in enumerate(table)])
    if not isinstance(table, dict):
        missing = "is missing" if table is None else f"is a JSON {kind_of(table)}"
        raise OctoPipeError(f'{where}: "{key}" {missing}; give an object with a number per symbol')
    values = {}
    for symbol in dict.fromkeys(pattern):
        if symbol not in table:
            raise OctoPipeError(f'{where}: "{key}" has no entry for {symbol!r}, which the pattern uses; add one')
        values[symbol] = _number(table[symbol], f'{where}: "{key}" of {symbol!r}')
    return np.array([values[symbol] for symbol in pattern])


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OctoPipeError(f"{what} is a JSON {kind_of(value)}; give a number >= 0")
    number = finite(value)
    if number is None or not 0 <= number <= MAX_TIME_MS:
        raise OctoPipeError(f"{what} is {brief(value)}; give a number between 0 and 1e15")
    return number


def segments_object(costs: CostTable) -> dict[str, object]:
    """Return the costs' segments as the value of "segments", one list per layer; empty if there is no exchange."""
    found = costs.segments
    if found is None or not found.any_exchange:
        return {}
    rows = {
        key: [[[lane, share * float(ms)] for lane, share in row] for row, ms in zip(parts, times, strict=True)]
        for key, parts, times in (
            ("forward", found.forward, costs.forward_ms),
            ("backward", found.input, costs.input_ms),
        )
    }
    return {**rows, "slows_compute": found.slows_compute, "slows_exchange": found.slows_exchange}


def _segments(value: object, pattern: str, arrays: Mapping[str, Array], where: str) -> Segments | None:
    if value is None:
        return None
    what = f'{where}: "segments"'
    if not isinstance(value, dict):
        raise OctoPipeError(f"{what} is a JSON {kind_of(value)}; give an object with forward and backward")
    slows = [_number(value.get(key, 0.0), f"{what}: {key}") for key in ("slows_compute", "slows_exchange")]
    columns = []
    for key, field in (("forward", "forward_ms"), ("backward", "input_ms")):
        table = value.get(key, {})
        if not isinstance(table, dict | list) or (isinstance(table, list) and len(table) != len(pattern)):
            raise OctoPipeError(f"{what}: {key}: give an object with a list per symbol, or a list with one per layer")
        rows = []
        for layer, symbol in enumerate(pattern):
            row = table[layer] if isinstance(table, list) else table.get(symbol, [])
            rows.append(_parts(row, f"{what}: {key} of {symbol!r}"))
            took = alone_ms(rows[-1], *slows)
            ms = float(arrays[field][layer])
            if rows[-1] and abs(took - ms) > TOLERANCE * max(ms, took):
                raise OctoPipeError(
                    f"{what}: {key} of {symbol!r} takes {took:g} ms alone, the layer {ms:g}; make them equal"
                )
        columns.append(rows)
    return Segments.from_ms(columns[0], columns[1], slows_compute=slows[0], slows_exchange=slows[1])


def _parts(row: object, what: str) -> list[Part]:
    if not isinstance(row, list) or len(row) > MAX_SEGMENTS:
        raise OctoPipeError(f"{what}: give a list of at most {MAX_SEGMENTS} [lane, ms]")
    out: list[Part] = []
    for part in row:
        if not isinstance(part, list) or len(part) != 2 or part[0] not in ("compute", "exchange", "beside"):
            raise OctoPipeError(f'{what} holds {brief(part)}; give ["compute", ms], ["exchange", ms] or ["beside", ms]')
        if part[0] == "beside" and (not out or out[-1][0] != "exchange"):
            raise OctoPipeError(f'{what}: "beside" must stand directly after the "exchange" that it may run beside')
        out.append((part[0], _number(part[1], f"{what}: {part[0]}")))
    return out

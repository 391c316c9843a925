"""Layer-times files: measured per-symbol costs of a model, as JSON, turned into a CostTable.

Knows: the file format, and how to refuse a bad file in one line. Does not know: models by name (`resolve.py`)
or how times are measured.

    {"pattern": "EM-M*-L",
     "forward_ms": {"E": 0.1, ...}, "backward_ms": {...}, "weight_ms": {...},     F, I and W of each symbol
     "activation_gib": {...}, "stash_gib": {...}, "params_gib": {...},            optional, 0 where absent
     "boundary_gib": 0.01, "workspace_gib": 0.1, "tokens": 4096}                  optional

`boundary_gib` and `workspace_gib` are one number for all layers or one per symbol. Other keys are ignored.

>>> file = {"pattern": "EL", "forward_ms": {"E": 1, "L": 2}, "backward_ms": {"E": 0, "L": 2}}
>>> costs_of_layer_times({**file, "weight_ms": {"E": 1, "L": 1}}, name="tiny").layer_ms.tolist()
[2.0, 5.0]
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from octopipe.cluster import GIB
from octopipe.cost import Array, CostTable
from octopipe.errors import OctoPipeError

MAX_FILE_BYTES = 16 << 20
MAX_LAYERS = 1 << 16
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
ONE_FOR_ALL = frozenset({"boundary_gib", "workspace_gib"})


def shown(path: str | Path) -> str:
    """A path as it stands in an error line: always one printable line."""
    text = str(path)
    text = text if len(text) <= 200 else text[:200] + "..."
    return text if text.isprintable() else repr(text)


def read_json_object(path: str | Path) -> dict[str, object]:
    """The JSON object in a file; anything else there raises one line that says what to do."""
    name = shown(path)
    try:
        info = Path(path).stat()
        if stat.S_ISDIR(info.st_mode):
            raise OctoPipeError(f"{name} is a directory; name a JSON file in it")
        if not stat.S_ISREG(info.st_mode):
            raise OctoPipeError(f"{name} is not a regular file; name a JSON file")
        if info.st_size > MAX_FILE_BYTES:
            raise OctoPipeError(f"{name} has {info.st_size} bytes; a model file has at most {MAX_FILE_BYTES}")
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise OctoPipeError(f"{name}: no such file; check the path") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise OctoPipeError(f"{name}: cannot be read ({why}); check the path") from None
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise OctoPipeError(f"{name}: nested too deeply for a model file; flatten it") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        value = _lenient(data)
        if value is None:
            raise OctoPipeError(f"{name}: not valid JSON ({error}); write the file again") from None
    if not isinstance(value, dict):
        raise OctoPipeError(f"{name}: holds a JSON {_kind(value)}; a model file is one object {{...}}")
    return value


def _lenient(data: bytes) -> object:
    """What Python's own decoder makes of it, or None.

    It takes NaN and Infinity, which are no JSON but which Python programs write: so the error that follows
    names the key that holds one instead of a byte offset.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def load_layer_times(path: str | Path) -> CostTable:
    """The costs in a layer-times file; the model is named after the file."""
    return costs_of_layer_times(read_json_object(path), name=Path(path).stem, where=shown(path))


def costs_of_layer_times(file: Mapping[str, object], *, name: str, where: str = "layer times") -> CostTable:
    """The costs in an already decoded layer-times object; `where` opens every error line."""
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
    tokens = file.get("tokens")
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
        raise OctoPipeError(f"{where}: tokens is {_brief(tokens)}; give a whole number >= 1, or leave it out")
    return CostTable(model=name, symbols=pattern, tokens_per_micro_batch=tokens, **arrays)  # type: ignore[arg-type]


def _pattern(file: Mapping[str, object], where: str) -> str:
    pattern = file.get("pattern")
    if not isinstance(pattern, str):
        missing = "is missing" if pattern is None else f"is a JSON {_kind(pattern)}"
        raise OctoPipeError(f'{where}: "pattern" {missing}; give one symbol per layer, like "EM-M*-L"')
    if not pattern:
        raise OctoPipeError(f'{where}: "pattern" is empty; give one symbol per layer, like "EM-M*-L"')
    if len(pattern) > MAX_LAYERS:
        raise OctoPipeError(f'{where}: "pattern" has {len(pattern)} layers; at most {MAX_LAYERS} are taken')
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
    if not isinstance(table, dict):
        missing = "is missing" if table is None else f"is a JSON {_kind(table)}"
        raise OctoPipeError(f'{where}: "{key}" {missing}; give an object with a number per symbol')
    values = {}
    for symbol in dict.fromkeys(pattern):
        if symbol not in table:
            raise OctoPipeError(
                f'{where}: "{key}" has no entry for {symbol!r}, which the pattern uses; add one'
            )
        values[symbol] = _number(table[symbol], f'{where}: "{key}" of {symbol!r}')
    return np.array([values[symbol] for symbol in pattern])


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OctoPipeError(f"{what} is a JSON {_kind(value)}; give a number >= 0")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < 0 or number > 1e15:
        raise OctoPipeError(f"{what} is {_brief(value)}; give a number between 0 and 1e15")
    return number


def _kind(value: object) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _brief(value: object) -> str:
    """A value in an error line: short, even where it is a number of a thousand digits."""
    if isinstance(value, int) and abs(value) > 10**20:
        return "a huge number"
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."

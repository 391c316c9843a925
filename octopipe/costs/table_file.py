"""A CostTable as a JSON object and back, without loss: stored in a plan whose costs have no name.

Knows: every field of a cost table by its type, and that reading restores the digest of what was written. Does not know:
files that people write (`layer_times.py`, `profile_file.py`).

>>> table = CostTable.uniform(num_layers=2, p2p_ms=0.5)
>>> costs_from_record(record_of(table)).digest() == table.digest()
True
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief
from octopipe.costs.table import CostTable


def record_of(costs: CostTable) -> dict[str, Any]:
    """Return the table as JSON values, without the fields that have their default value."""
    return _plain(costs)


def costs_from_record(record: Mapping[str, Any], where: str = "costs") -> CostTable:
    """Return the table that `record_of` wrote; `where` opens every error message."""
    try:
        return _read(CostTable, record)
    except OctoPipeError as error:
        raise OctoPipeError(f"{where}: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        why = " ".join(str(error).split())[:120]
        raise OctoPipeError(f"{where}: the costs stored in the plan cannot be read ({why}); name the model") from None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: _plain(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if not _is_default(f, getattr(value, f.name))
        }
    if isinstance(value, np.ndarray):
        # Micro-batch factors that are the same for every layer need one column.
        alike = value.ndim == 2 and value.shape[1] > 0 and bool((value == value[:, :1]).all())
        return (value[:, 0] if alike else value).tolist()
    if isinstance(value, Mapping):
        # Keys may be pairs of ranks, which a JSON object cannot have as keys.
        return [[_plain(k), _plain(v)] for k, v in value.items()]
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if isinstance(value, tuple) and any(isinstance(item, tuple) for item in value):
        return False
    if field.default is not dataclasses.MISSING:
        return bool(np.all(value is field.default or value == field.default)) if np.ndim(value) == 0 else False
    if isinstance(value, np.ndarray):
        return field.default_factory is not dataclasses.MISSING and not value.any()
    return False


def _read(kind: type[Any], record: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(record) - {f.name for f in dataclasses.fields(kind)})
    if unknown:
        raise OctoPipeError(f"unknown cost {brief(unknown[0])}; the plan was written by a newer version")
    return kind(**{name: _value(hints[name], value) for name, value in record.items()})


def _value(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _read(hint, value)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is np.ndarray:
        return np.array(value, np.float64)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _value(next(a for a in inner if a is not type(None)), value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {_hashable(k): _value(inner[1], v) for k, v in value}
    if hint in (str, bool, int, float) and not _is(hint, value):
        raise TypeError(f"{brief(value)} was found instead of a {hint.__name__}")
    return _hashable(value)


def _is(hint: type, value: Any) -> bool:
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def _hashable(value: Any) -> Any:
    return tuple(_hashable(v) for v in value) if isinstance(value, list) else value

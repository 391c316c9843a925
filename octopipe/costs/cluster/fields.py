"""Field types of the set-up: accepted values, stored values, and their form in JSON and as text.

Knows: whole numbers, choices, booleans, times, lists, GPUs, nodes, imbalances. Does not know: which fields there are
(`setup.py`).

Every field of `Setup` is declared with one of these types and its descriptions. Flags, keywords, JSON, plan files and
the form of the web page are generated from that declaration.

>>> Whole().of_text("4"), Numbers().read("speeds", [1, 0.5]), Choice(("bf16", "fp8")).accepts
(4, (1.0, 0.5), 'str')
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief, read_numbers, shown
from octopipe.base.limits import MAX_EXPERTS, MAX_SIZE, MAX_TIME_MS, finite
from octopipe.costs.analytic.calibration import Stack, stack_named, stack_names, stack_record
from octopipe.costs.cluster.file import Nodes, nodes_from_object, read_cluster
from octopipe.costs.cluster.hardware import Gpu, gpu, gpu_from, gpu_record
from octopipe.costs.cluster.hardware_file import read_hardware

Part = Literal["size", "hardware", "batch", "training", "ranks"]
"""The group of a field; flags are grouped accordingly."""
MAX_SPREAD = 1000.0
TOWERS = (-1, -1)
"""The range that stands for all layers of the model's towers; users write `towers`."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The type of a field's values."""

    accepts = "object"
    """The type annotation of its keyword."""

    def read(self, name: str, value: Any) -> Any:
        """Return the value to store for one from a caller or a JSON file; `name` is the caller's name for it."""
        raise NotImplementedError

    def of_text(self, text: str) -> Any:
        """The value of a flag or a form input given as text; errors do not name the field."""
        raise OctoPipeError(f"{text[:40]!r} is a text; give a list")

    def of_form(self, text: str) -> Any:
        """The value of a form input: as for a flag, except that files of the serving machine are not accepted."""
        return self.of_text(text)

    def as_json(self, value: Any) -> Any:
        """The stored value as a JSON value."""
        return value


@dataclass(frozen=True, slots=True)
class Whole(Kind):
    """A whole number of at least 1."""

    accepts = "int"

    def read(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
            raise OctoPipeError(f"{name} is {brief(value)}; give a whole number >= 1, at most {MAX_SIZE}")
        return value

    def of_text(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise OctoPipeError(f"{text[:40]!r} is not a whole number") from None
        if not 1 <= value <= 1 << 24:
            raise OctoPipeError(f"{text[:40]} is out of range; give a whole number from 1 to {1 << 24}")
        return value


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    """One of a few words or numbers."""

    of: tuple[str | int, ...]

    @property
    def accepts(self) -> str:  # type: ignore[override]
        return type(self.of[0]).__name__

    def read(self, name: str, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, str | int) or value not in self.of:
            raise OctoPipeError(f"{name} is {brief(value)}; one of {', '.join(self.words)}")
        return value

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(map(str, self.of))

    def of_text(self, text: str) -> Any:
        found = [value for value in self.of if str(value) == text]
        if not found:
            raise OctoPipeError(f"{text[:40]!r} is not one of {', '.join(self.words)}")
        return found[0]


@dataclass(frozen=True, slots=True)
class YesNo(Kind):
    accepts = "bool"

    def read(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise OctoPipeError(f"{name} is {brief(value)}; give true or false")
        return value

    def of_text(self, text: str) -> bool:
        if text not in ("yes", "no", "true", "false", "on"):
            raise OctoPipeError(f"{text[:40]!r} is neither yes nor no")
        return text not in ("no", "false")


@dataclass(frozen=True, slots=True)
class Number(Kind):
    """A finite number of at least 0."""

    accepts = "float"

    def read(self, name: str, value: Any) -> float:
        number = finite(value)
        if number is None or not 0 <= number <= MAX_TIME_MS:
            raise OctoPipeError(f"{name} is {brief(value)}; give a finite number >= 0, at most {MAX_TIME_MS:g}")
        return value if isinstance(value, int | float) else number

    def of_text(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise OctoPipeError(f"{text[:40]!r} is not a number") from None
        if not 0 <= value <= MAX_TIME_MS:
            raise OctoPipeError(f"{text[:40]} is not a finite number >= 0, at most {MAX_TIME_MS:g}")
        return value


@dataclass(frozen=True, slots=True)
class Share(Number):
    """A number from 0 to 1."""

    def read(self, name: str, value: Any) -> float:
        number = finite(value)
        if number is None or not 0 <= number <= 1:
            raise OctoPipeError(f"{name} is {brief(value)}; give a share from 0 to 1")
        return number

    def of_text(self, text: str) -> float:
        value = Number().of_text(text)
        if value > 1:
            raise OctoPipeError(f"{text[:40]} is not a share; give a number from 0 to 1")
        return value


@dataclass(frozen=True, slots=True)
class LayerRanges(Kind):
    """Layers by number, as ranges: `0-15,33`, or a list of [first, last]; `towers` stands for those of all towers."""

    accepts = "str | Sequence[Sequence[int]]"

    def read(self, name: str, value: Any) -> tuple[tuple[int, int], ...]:
        if isinstance(value, str):
            return self._read_text(name, value)
        pairs = [tuple(pair) if _is_list(pair) else pair for pair in value] if _is_list(value) else [value]
        for pair in pairs:
            whole = isinstance(pair, tuple) and all(isinstance(n, int) and not isinstance(n, bool) for n in pair)
            if pair != TOWERS and (not whole or len(pair) != 2 or not 0 <= pair[0] <= pair[1] <= MAX_SIZE):
                raise OctoPipeError(f"{name} is {brief(value)}; give ranges of layers like 0-15,33")
        return tuple(sorted(pairs))

    def _read_text(self, name: str, text: str) -> tuple[tuple[int, int], ...]:
        out = []
        for part in filter(None, (p.strip() for p in text.split(","))):
            if part in ("tower", "towers", "encoder"):
                out.append(TOWERS)
                continue
            first, _, last = part.partition("-")
            if not all(n.isascii() and n.isdecimal() and len(n) < 9 for n in (first, last or first)):
                raise OctoPipeError(f"{name} is {brief(text)}; give ranges of layers like 0-15,33")
            out.append((int(first), int(last or first)))
        return self.read(name, out)

    def of_text(self, text: str) -> str:
        return ranges_text(self._read_text("the text", text))

    def as_json(self, value: tuple[tuple[int, int], ...]) -> str | None:
        return ranges_text(value) or None


def ranges_text(ranges: Iterable[tuple[int, int]]) -> str:
    """Ranges of layers as users write them."""
    each = (str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return ",".join("towers" if text == str(TOWERS[0]) else text for text in each)


@dataclass(frozen=True, slots=True)
class Numbers(Kind):
    """Positive numbers, one for all pipeline ranks or one per rank."""

    accepts = "float | Sequence[float]"

    def read(self, name: str, value: Any) -> tuple[float, ...]:
        return tuple(self._above_zero(name, v) for v in (value if _is_list(value) else (value,)))

    def _above_zero(self, name: str, value: object) -> float:
        number = finite(value)
        if number is None or not 0 < number <= MAX_TIME_MS:
            each = "" if isinstance(value, (int, float)) else ", or a list of them, one per pipeline rank"
            raise OctoPipeError(f"{name} is {brief(value)}; give a finite number > 0, at most {MAX_TIME_MS:g}{each}")
        return number

    def of_text(self, text: str) -> list[float]:
        values = [Number().of_text(part) for part in text.split(",")]
        if any(v == 0 for v in values):
            raise OctoPipeError(f"{text[:40]}: every number must be > 0")
        return values

    def as_json(self, value: tuple[float, ...]) -> list[float] | None:
        return list(value) or None


@dataclass(frozen=True, slots=True)
class GpuName(Kind):
    """A GPU, the name of a preset, a hardware file, or all figures of a user-defined GPU."""

    accepts = "str | Path | Mapping[str, object]"

    def read(self, name: str, value: Any) -> Gpu:
        if isinstance(value, Gpu):
            return value
        if isinstance(value, os.PathLike) or (isinstance(value, str) and value.endswith((".toml", ".json"))):
            return read_hardware(Path(value))
        return gpu_from(value)

    def of_text(self, text: str) -> str:
        return text

    def of_form(self, text: str) -> str:
        return gpu(text).name

    def as_json(self, value: Gpu | None) -> str | dict[str, Any] | None:
        return None if value is None else gpu_record(value)


@dataclass(frozen=True, slots=True)
class StackName(Kind):
    """A training stack: a name, a file written by `octopipe calibrate`, or the contents of one."""

    accepts = "str | Path | Mapping[str, object]"

    def read(self, name: str, value: Any) -> Stack:
        return stack_named(value)

    def of_text(self, text: str) -> str:
        return text

    def of_form(self, text: str) -> str:
        if text not in stack_names():
            raise OctoPipeError(f"{text[:40]!r} is not one of {', '.join(stack_names())}")
        return text

    def as_json(self, value: Stack | None) -> str | dict[str, Any] | None:
        return None if value is None else stack_record(value)


@dataclass(frozen=True, slots=True)
class NodeGroups(Kind):
    """Unequal nodes: the path of a cluster file, or the contents of one."""

    accepts = "str | Path | Sequence[Mapping[str, object]]"

    def read(self, name: str, value: Any) -> Nodes:
        if isinstance(value, str | os.PathLike):
            return read_cluster(Path(value))
        if not _is_list(value):
            raise OctoPipeError(f"{name} is {brief(value)}; give a cluster file, or its list of nodes")
        found = list(value)
        if any(_is_list(group) for group in found):
            found = [dict(zip(("gpu", "count", "gpus_per_node"), group, strict=False)) for group in found]
        return nodes_from_object({"nodes": found}, name) if found else ()

    def of_text(self, text: str) -> str:
        return text

    def of_form(self, text: str) -> str:
        raise OctoPipeError("the page does not read files of this machine; give the list of nodes")

    def as_json(self, value: Nodes) -> list[dict[str, Any]] | None:
        return [{"gpu": g, "count": n, "gpus_per_node": k} for g, n, k in value] or None


@dataclass(frozen=True, slots=True)
class Words(Kind):
    accepts = "str"

    def read(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise OctoPipeError(f"{name} is {brief(value)}; give words, or leave it out")
        return value

    def of_text(self, text: str) -> str:
        return text


@dataclass(frozen=True, slots=True)
class Lengths(Kind):
    """Numbers of tokens in lists nested `depth` deep; `models/lengths.py` checks the batch that they form."""

    depth: int = 1

    @property
    def accepts(self) -> str:  # type: ignore[override]
        return "Sequence[" * self.depth + "int" + "]" * self.depth

    def read(self, name: str, value: Any) -> tuple[Any, ...]:
        if not _is_list(value):
            raise OctoPipeError(f"{name} is {brief(value)}; give a list of numbers of tokens")
        if self.depth > 1:
            return tuple(Lengths(self.depth - 1).read(f"{name}[{i}]", inner) for i, inner in enumerate(value))
        return tuple(Whole().read(f"{name}[{i}]", length) for i, length in enumerate(value))

    def as_json(self, value: tuple[Any, ...]) -> list[Any] | None:
        return [list(v) if isinstance(v, tuple) else v for v in value] or None


@dataclass(frozen=True, slots=True)
class Spread(Kind):
    """How unevenly tokens are routed to experts: tokens of the busiest rank over the mean, or the tokens of every
    expert, as a list or as a file (JSON, or one number per line)."""

    accepts = "float | str | Path | Sequence[float]"

    def read(self, name: str, value: Any) -> tuple[float, ...]:
        if isinstance(value, str | os.PathLike):
            return self._counts(shown(value), _numbers_in(Path(value)))
        if _is_list(value) and not value:
            return ()
        if _is_list(value) and len(value) > 1:
            return self._counts(name, list(value))
        number = finite(value[0] if _is_list(value) else value)
        if number is None or not 1 <= number <= MAX_SPREAD:
            wanted = f"tokens of the busiest expert rank over the mean (1 to {MAX_SPREAD:g})"
            raise OctoPipeError(f"{name} is {brief(value)}; give {wanted}, or a file with the tokens of every expert")
        return (number,) if number > 1 else ()

    def _counts(self, name: str, values: Sequence[Any]) -> tuple[float, ...]:
        counts = [finite(v) for v in values]
        if any(c is None or c < 0 for c in counts) or not any(counts):
            raise OctoPipeError(f"{name}: give the tokens of every expert, numbers >= 0 and not all 0")
        return tuple(float(c) for c in counts if c is not None)

    def of_text(self, text: str) -> float | str:
        try:
            return float(text)
        except ValueError:
            return text

    def as_json(self, value: tuple[float, ...]) -> list[float] | None:
        return list(value) or None


def _numbers_in(path: Path) -> list[float]:
    """A JSON list of numbers, or one number per line."""
    found = read_numbers(path)
    if not 1 < len(found) <= MAX_EXPERTS:
        raise OctoPipeError(
            f"{shown(path)}: give a JSON list of the tokens of every expert, or one number per line; at least 2"
        )
    return found


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


# -- a field ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupField:
    """How a field is presented to users, besides its name and its default."""

    kind: Kind
    part: Part = "size"
    flag: str = ""
    """The flag's name if it differs from the field's: `cluster` for `nodes`."""
    also: Mapping[str, Callable[[Any], Any]] = dataclasses.field(default_factory=dict)
    """Aliases, each with the function that converts its value."""
    words: str = ""
    """A short description: the help of the flag and the label in the form."""
    unless_given: str = ""
    """The default value, in words."""
    optional: bool = False
    """Whether None is allowed, which means "not known" or "derived from others"."""
    follows: bool = False
    """Whether the default is derived from the model or the GPU instead of the record's own default."""
    of_a_model: bool = False
    """Whether measured layer times already include its effect, so that it has none for a file of times."""
    has_flag: bool = True
    is_keyword: bool = True
    """Whether it is a keyword. Ranks and micro-batches belong to a plan; other fields are derived."""
    on_page: bool = False
    """Whether the form shows it at once; the others are in a collapsed section."""

    def read(self, name: str, value: Any) -> Any:
        if value is None and self.optional:
            return None
        return self.kind.read(name, value)


def of_text(name: str, how: SetupField, text: str) -> Any:
    """The value of a form input; errors name the field. Files of the serving machine are not accepted."""
    try:
        if isinstance(how.kind, GpuName):
            return gpu(text)
        if isinstance(how.kind, StackName) and text not in stack_names():
            raise OctoPipeError(f"{text[:40]!r} is not one of {', '.join(stack_names())}")
        return how.kind.of_form(text)
    except OctoPipeError as error:
        raise OctoPipeError(f"{name.replace('_', ' ')}: {error}") from None


def setup_field(default: Any, kind: Kind, **more: Any) -> Any:
    """Declare a field of `Setup` with its default, its type and the other fields of `SetupField`."""
    return dataclasses.field(default=default, metadata={"setup_field": SetupField(kind=kind, **more)})


def fields_of(record: type) -> dict[str, SetupField]:
    """Every field of a record that is declared with `setup_field`, in order."""
    return _fields_of(record)


@cache
def _fields_of(record: type) -> dict[str, SetupField]:
    return {f.name: f.metadata["setup_field"] for f in dataclasses.fields(record)}

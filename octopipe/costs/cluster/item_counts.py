"""The field type for numbers of items (images, recordings) per sequence.

Knows: one number for all sequences, a list with one number per sequence, and a file of such a list. Does not know: what
an item costs, or how sequences form micro-batches.

>>> ItemCounts().read("images", 2), ItemCounts().read("images", [0, 3])
((2.0,), (0.0, 3.0))
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octopipe.base.errors import MAX_MICRO_BATCHES, OctoPipeError
from octopipe.base.files import brief, read_numbers, shown
from octopipe.base.limits import finite
from octopipe.costs.cluster.fields import Kind

MAX_ITEMS = 100_000
"""The most items of one sequence."""


@dataclass(frozen=True, slots=True)
class ItemCounts(Kind):
    """A number per sequence: one for all, or one for each, as a list or as a file (JSON, or one per line)."""

    accepts = "float | str | Path | Sequence[float]"

    def read(self, name: str, value: Any) -> tuple[float, ...]:
        if isinstance(value, str | os.PathLike):
            return self._read_list(shown(value), _numbers_in(Path(value)))
        if isinstance(value, list | tuple):
            return self._read_list(name, list(value))
        return self._read_list(name, [value])

    def _read_list(self, name: str, values: Sequence[Any]) -> tuple[float, ...]:
        if len(values) > MAX_MICRO_BATCHES:
            raise OctoPipeError(f"{name}: numbers of {len(values)} sequences; at most {MAX_MICRO_BATCHES} make a step")
        out = []
        for i, value in enumerate(values):
            number = finite(value)
            if number is None or not 0 <= number <= MAX_ITEMS:
                where = name if len(values) == 1 else f"{name}, sequence {i}"
                raise OctoPipeError(f"{where}: {brief(value)} is not a number of items; give a number >= 0")
            out.append(float(number))
        return tuple(out)

    def of_text(self, text: str) -> float | list[float] | str:
        words = text.split(",")
        numbers = [number for number in map(_number, words) if number is not None]
        if len(numbers) < len(words):
            if numbers and not os.path.lexists(text):  # a list, with something in it that is no number
                wrong = next(word for word in words if _number(word) is None)
                remedy = "give numbers separated by commas, or a file"
                raise OctoPipeError(f"{brief(text)}: {brief(wrong)} is not a number of items; {remedy}")
            return text  # the name of a file
        return numbers[0] if len(numbers) == 1 else numbers

    def of_form(self, text: str) -> float | list[float]:
        value = self.of_text(text)
        if isinstance(value, str):
            raise OctoPipeError("the page does not read files of this machine; give numbers, separated by commas")
        return value

    def as_json(self, value: tuple[float, ...]) -> list[float] | None:
        return list(value) or None


def of_one_tower(
    images: tuple[float, ...],
    recordings: tuple[float, ...],
    name: str,
    words: tuple[str, str] = ("images", "recordings"),
) -> tuple[float, ...]:
    """Return the numbers of items of a model with one tower, for which `images` and `recordings` are two names."""
    if images and recordings:
        raise OctoPipeError(f"{name} has one tower, for which {words[0]} and {words[1]} are the same; give one of them")
    return images or recordings


def check_lists(images: tuple[float, ...], recordings: tuple[float, ...]) -> None:
    """Raise an error if images and recordings are listed for different numbers of sequences."""
    if len(images) > 1 and len(recordings) > 1 and len(images) != len(recordings):
        raise OctoPipeError(
            f"images of {len(images)} sequences and recordings of {len(recordings)}; give both for the same sequences"
        )


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _numbers_in(path: Path) -> list[float]:
    """A JSON list of numbers, or one number per line."""
    found = read_numbers(path)
    if not found:
        raise OctoPipeError(
            f"{shown(path)}: give a JSON list with the number of items of every sequence, or one per line"
        )
    return found

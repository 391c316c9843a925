"""Sequences of different length: read from a file, put into micro-batches.

Knows: the file format; padding and packing in the file's order; which of several pipelines gets which micro-batches.
Does not know: what a micro-batch costs (`analytic.py`), or DynaPipe's way of grouping (`batching.py`).

A file contains the lengths of one step's sequences, in tokens: one whole number per line (empty lines and everything
after a `#` are ignored), or a JSON list of them.

>>> padded_groups([5, 3, 8, 2], 2), packed_groups([5, 3, 8, 2], 8)
(((5, 3), (8, 2)), ((5, 3), (8,), (2,)))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octopipe.base.errors import MAX_MICRO_BATCHES, OctoPipeError
from octopipe.base.files import brief, decode_json, decode_text, kind_of, read_bytes, shown

MAX_LENGTH = 1 << 24
"""The most tokens of one sequence."""
Groups = tuple[tuple[int, ...], ...]
"""Per micro-batch, the lengths of its sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One pipeline's micro-batches in a step."""

    groups: Groups
    packed: bool = False
    """Whether sequences are packed one after the other, each attending only to itself; otherwise each is padded to the
    longest of its micro-batch."""

    def __post_init__(self) -> None:
        for m, group in enumerate(self.groups):
            for length in group:
                _whole(length, f"micro-batch {m}")
            if not group:
                raise OctoPipeError(f"micro-batch {m} has no sequence; leave it out")
        if not 1 <= len(self.groups) <= MAX_MICRO_BATCHES:
            raise OctoPipeError(f"{len(self.groups)} micro-batches; give 1 to {MAX_MICRO_BATCHES}")

    @property
    def samples(self) -> int:
        return sum(map(len, self.groups))

    @property
    def tokens(self) -> int:
        """Tokens of all sequences, without padding."""
        return sum(map(sum, self.groups))

    @property
    def computed_tokens(self) -> int:
        """Tokens of all micro-batches, with padding."""
        return sum(map(self.tokens_of, self.groups))

    def tokens_of(self, group: Sequence[int]) -> int:
        return sum(group) if self.packed else len(group) * max(group)

    def words(self) -> str:
        every = [length for group in self.groups for length in group]
        how = "packed" if self.packed else f"padded ({100 * (1 - self.tokens / self.computed_tokens):.0f} % padding)"
        return f"{len(self.groups)} micro-batches of {len(every)} sequences, {min(every)} to {max(every)} tokens, {how}"


def read_lengths(path: str | Path) -> tuple[int, ...]:
    """Read the lengths of one step's sequences from a file."""
    where = shown(path)
    text = decode_text(read_bytes(path), where)
    values: Sequence[Any]
    if text.lstrip()[:1] in ("[", "{"):
        found = decode_json(text, where)
        if not isinstance(found, list):
            raise OctoPipeError(f"{where}: holds a JSON {kind_of(found)}; give a list of lengths, [512, 1024, 96]")
        values = found
    else:
        values = []
        for number, line in enumerate(text.splitlines(), 1):
            word = line.split("#", 1)[0].strip()
            if not word:
                continue
            if not (word.isascii() and word.isdigit() and len(word) <= 12):
                raise OctoPipeError(f"{where}, line {number}: {brief(word)} is not a length; give a whole number")
            values.append(int(word))
    if not values:
        raise OctoPipeError(f"{where}: holds no lengths; give one per line, or a JSON list")
    if len(values) > MAX_MICRO_BATCHES:
        raise OctoPipeError(f"{where}: {len(values)} lengths; at most {MAX_MICRO_BATCHES} make one step")
    for i, value in enumerate(values):
        _whole(value, f"{where}: length {i}")
    return tuple(values)


def _whole(value: object, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_LENGTH:
        raise OctoPipeError(f"{where} is {brief(value)}; give a whole number of tokens from 1 to {MAX_LENGTH}")


def padded_groups(lengths: Sequence[int], size: int) -> Groups:
    """Return micro-batches of `size` consecutive sequences."""
    return tuple(tuple(lengths[i : i + size]) for i in range(0, len(lengths), size))


def packed_groups(lengths: Sequence[int], capacity: int) -> Groups:
    """Return micro-batches of consecutive sequences, each with as many as fit into `capacity` tokens."""
    groups: list[list[int]] = []
    room = 0
    for i, length in enumerate(lengths):
        if length > capacity:
            raise OctoPipeError(f"sequence {i} has {length} tokens, more than the {capacity} of --seq; raise it")
        if not groups or length > room:
            groups.append([])
            room = capacity
        groups[-1].append(length)
        room -= length
    return tuple(map(tuple, groups))


def distributed(groups: Groups, pipelines: int, work: Callable[[tuple[int, ...]], float]) -> list[Groups]:
    """Distribute micro-batches over pipelines, those with the most work first, each to the pipeline with the least.

    The micro-batches of a pipeline keep their order. The pipeline with the most work comes first in the result.
    """
    if len(groups) < pipelines:
        raise OctoPipeError(
            f"{len(groups)} micro-batches for {pipelines} pipelines; give more sequences, smaller micro-batches or a "
            "smaller --dp"
        )
    loads, mine = [0.0] * pipelines, [[] for _ in range(pipelines)]  # type: list[float], list[list[int]]
    for m in sorted(range(len(groups)), key=lambda m: -work(groups[m])):
        least = min(range(pipelines), key=lambda r: (loads[r], len(mine[r])))
        loads[least] += work(groups[m])
        mine[least].append(m)
    heaviest_first = sorted(range(pipelines), key=lambda r: -loads[r])
    return [tuple(groups[m] for m in sorted(mine[r])) for r in heaviest_first]


def distributed_evenly(groups: Groups, pipelines: int, work: Callable[[tuple[int, ...]], float]) -> list[Groups]:
    """Give every pipeline the same number of micro-batches, so that one plan fits all of them.

    Micro-batches are sorted by work and distributed over the pipelines in alternating direction.
    """
    if len(groups) % pipelines:
        raise OctoPipeError(
            f"{len(groups)} micro-batches do not make {pipelines} equal pipelines; change --micro-batch-size or --dp"
        )
    mine: list[list[int]] = [[] for _ in range(pipelines)]
    for place, m in enumerate(sorted(range(len(groups)), key=lambda m: -work(groups[m]))):
        lap, at = divmod(place, pipelines)
        mine[at if lap % 2 == 0 else pipelines - 1 - at].append(m)
    return [tuple(groups[m] for m in sorted(numbers)) for numbers in mine]


def sequence_numbers(lengths: Sequence[int], batches: Sequence[Groups]) -> list[list[list[int]]]:
    """Return the number of the sequence at every position: [pipeline][micro-batch][position].

    Sequences of equal length are used in the file's order. Sequence i has length i of the file however the step is
    divided.

    >>> sequence_numbers([5, 3, 5], [((3, 5), (5,))])
    [[[1, 0], [2]]]
    """
    waiting: dict[int, list[int]] = {}
    for i in range(len(lengths) - 1, -1, -1):
        waiting.setdefault(lengths[i], []).append(i)
    return [[[waiting[length].pop() for length in group] for group in groups] for groups in batches]

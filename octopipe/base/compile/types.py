"""Types of the kernels' language, and the conversion of Python values to the words with which a kernel is called.

Knows: numbers, arrays and named tuples of them. Does not know: statements or machine code.

A value is passed as one or several words: a number as itself, an array as its address and its lengths (an array that is
not contiguous is copied, and the copy is written back after the call), a tuple as its parts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

INT, UINT, FLOAT, BOOL = "int", "uint", "float", "bool"
LLVM = {INT: "i64", UINT: "i64", FLOAT: "double", BOOL: "i1"}
RANK = {BOOL: 0, INT: 1, UINT: 1, FLOAT: 2}
"""The result of an operation on two numbers has the type with the higher rank."""
ITEMS = {
    # element types of arrays by numpy's name: the LLVM type, the type as which it is read, the size in bytes
    "float64": ("double", FLOAT, 8),
    "float32": ("float", FLOAT, 4),
    "int64": ("i64", INT, 8),
    "int32": ("i32", INT, 4),
    "int16": ("i16", INT, 2),
    "int8": ("i8", INT, 1),
    "uint64": ("i64", UINT, 8),
    "uint32": ("i32", INT, 4),
    "uint16": ("i16", INT, 2),
    "uint8": ("i8", INT, 1),
    "bool": ("i8", BOOL, 1),
}


@dataclass(frozen=True, slots=True)
class Array:
    """A contiguous array with elements of one type."""

    item: str
    ndim: int
    origins: frozenset[int] = frozenset()
    """The numbers of the arrays among a kernel's arguments whose memory this may be."""


@dataclass(frozen=True, slots=True)
class Tuple:
    """A tuple of any types; `names` has the field names of a named tuple."""

    parts: tuple[Any, ...]
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """An object that is known when a kernel is compiled: a function, a module, a tuple of numbers.

    Unlike in Python, 1, 1.0 and True differ, and so do 0.0 and -0.0: a kernel is compiled for one of them.
    """

    thing: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Known):
            return NotImplemented
        return self.thing is other.thing or (self.thing == other.thing and repr(self.thing) == repr(other.thing))

    def __hash__(self) -> int:
        return hash(self.thing)


NUMBERS = {
    bool: BOOL, int: INT, np.int64: INT, np.int32: INT, np.int8: INT, float: FLOAT, np.float64: FLOAT,
}  # fmt: skip
_TRIAL = np.zeros(1)
Type = Any
"""INT, UINT, FLOAT, BOOL, an Array, a Tuple or a Known."""


def words(type_: Type) -> list[str]:
    """Return the LLVM types of the words as which a value is passed."""
    if isinstance(type_, Array):
        return ["ptr", *["i64"] * type_.ndim]
    if isinstance(type_, Tuple):
        return [word for part in type_.parts for word in words(part)]
    return [] if isinstance(type_, Known) else [LLVM[type_]]


def joined(a: Type, b: Type) -> Type:
    """Return the type of a variable that can hold values of both types, or None if there is none.

    No integer type holds both a number with a sign and one without. Tuples whose parts have other names are tuples
    whose parts have none.
    """
    if a == b:
        return a
    if isinstance(a, str) and isinstance(b, str):
        return a if RANK[a] > RANK[b] else b if RANK[b] > RANK[a] else None
    if isinstance(a, Tuple) and isinstance(b, Tuple) and len(a.parts) == len(b.parts):
        parts = tuple(joined(x, y) for x, y in zip(a.parts, b.parts, strict=True))
        return None if None in parts else Tuple(parts, a.names if a.names == b.names else ())
    if isinstance(a, Array) and isinstance(b, Array) and (a.item, a.ndim) == (b.item, b.ndim):
        return Array(a.item, a.ndim, a.origins | b.origins)
    return None


def arrays_in(types: Iterable[Type]) -> Iterator[Array]:
    """Yield the arrays of these types in the order in which they are passed."""
    for type_ in types:
        if isinstance(type_, Array):
            yield type_
        elif isinstance(type_, Tuple):
            yield from arrays_in(type_.parts)


def numbered(type_: Type, number: Callable[[], frozenset[int]]) -> Type:
    """Return the type with every array's origins replaced by the next that `number` returns."""
    if isinstance(type_, Array):
        return Array(type_.item, type_.ndim, number())
    if isinstance(type_, Tuple):
        return Tuple(tuple(numbered(part, number) for part in type_.parts), type_.names)
    return type_


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _address_in_object(array: np.ndarray) -> int:
    """Return the address of an array's data, much faster: numpy's array object begins with it."""
    return ctypes.c_size_t.from_address(id(array) + object.__basicsize__).value


address = _address if _address_in_object(_TRIAL) != _address(_TRIAL) else _address_in_object


class Arguments:
    """The arguments of one call: their types and words, and the arrays among them in this order."""

    __slots__ = ("arrays", "copies", "types", "words")

    def __init__(self, given: tuple[Any, ...]) -> None:
        self.words: list[Any] = []
        self.arrays: list[np.ndarray] = []
        self.copies: dict[int, np.ndarray] = {}
        """What is passed in place of arrays that are not contiguous, by their number."""
        self.types = self._take(given)

    def _take(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Append the words of these values; return their types in a form that is quick to compare."""
        words, types = self.words, list[Any]()
        for value in given:
            kind = type(value)
            if kind is np.ndarray:
                flags = value.flags
                self.arrays.append(value)
                if not (flags.c_contiguous and flags.aligned and value.dtype.isnative):
                    whole = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
                    whole = whole.copy() if whole is value or np.may_share_memory(whole, value) else whole
                    self.copies[len(self.arrays) - 1] = value = whole
                words.append(address(value))
                words.extend(value.shape)
                types.append((value.dtype.char, value.ndim))
            elif kind in NUMBERS:
                words.append(value)
                types.append(NUMBERS[kind])
            elif isinstance(value, tuple):
                types.append((kind, self._take(value)))
            elif kind is np.uint64:
                words.append(int(value.view(np.int64)))
                types.append(UINT)
            elif isinstance(value, np.memmap | np.generic):
                # Convert to the plain form: a memory map to an array, a number of another width to a Python number.
                plain = value.view(np.ndarray) if isinstance(value, np.memmap) else value.item()
                if type(plain) is kind:
                    raise TypeError(f"a kernel takes numbers, arrays and tuples of them, not {kind.__name__}")
                types += self._take((plain,))
            else:
                raise TypeError(f"a kernel takes numbers, arrays and tuples of them, not {kind.__name__}")
        return tuple(types)

    def refusal(self, number: int) -> str:
        """Say why a kernel cannot write into this array as Python would; empty if it can."""
        written = self.arrays[number]
        if not written.flags.writeable:
            return "the array that is written here is read-only"
        for other, array in enumerate(self.arrays if self.copies else ()):
            # A copy is passed of one of them, which would not see what is written into the other.
            if other != number and (other in self.copies or number in self.copies) and _overlap(array, written):
                return "the array that is written here overlaps another argument, and one is not contiguous; copy it"
        return ""

    def write_back(self, written: Iterable[int]) -> None:
        for number in written:
            if number in self.copies:
                self.arrays[number][...] = self.copies[number]


def _overlap(one: np.ndarray, other: np.ndarray) -> bool:
    try:
        return np.shares_memory(one, other, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def full_type(key: Any) -> Type:
    """Return the type for a key that `Arguments` made; such keys are quicker to make and to compare than types."""
    if isinstance(key, str):
        return key
    if isinstance(key[0], str):
        item = np.dtype(key[0]).name
        if item not in ITEMS:
            raise TypeError(f"a kernel takes arrays of {', '.join(ITEMS)}, not of {item}")
        if not key[1]:
            raise TypeError("a kernel takes arrays of at least one dimension, and numbers")
        return Array(item, key[1])
    return Tuple(tuple(full_type(part) for part in key[1]), getattr(key[0], "_fields", ()))


def as_plain(type_: Type) -> Any:
    """Return a type as values that JSON can represent.

    >>> from_plain(as_plain(Tuple((INT, Array("bool", 2)), ("a", "b"))))
    Tuple(parts=('int', Array(item='bool', ndim=2, origins=frozenset())), names=('a', 'b'))
    """
    if isinstance(type_, Array):
        return {"item": type_.item, "ndim": type_.ndim}
    if isinstance(type_, Tuple):
        return {"parts": [as_plain(part) for part in type_.parts], "names": list(type_.names)}
    if type_ not in LLVM:
        raise TypeError(f"{type_} is known only while a kernel is compiled")
    return type_


def from_plain(value: Any) -> Type:
    """Return the type that `as_plain` converted; raise ValueError for anything else."""
    if isinstance(value, str) and value in LLVM:
        return value
    if isinstance(value, dict) and value.keys() == {"item", "ndim"} and value["ndim"] in range(33):
        if value["item"] not in ITEMS:
            raise ValueError("no item of a kernel's arrays")
        return Array(value["item"], value["ndim"])
    if isinstance(value, dict) and value.keys() == {"parts", "names"}:
        return Tuple(tuple(from_plain(part) for part in value["parts"]), tuple(map(str, value["names"])))
    raise ValueError("no type of a kernel")

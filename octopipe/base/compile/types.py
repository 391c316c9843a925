"""Types of the kernels' language, and the conversion of Python values to the words with which a kernel is called.

Knows: numbers, arrays and named tuples of them. Does not know: statements or machine code.

A value is passed as one or several words: a number as itself, an array as its address and its lengths (an array that is
not contiguous is copied, and the copy is written back after the call), a tuple as its parts.
"""

from __future__ import annotations

import ctypes
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


@dataclass(frozen=True, slots=True)
class Tuple:
    """A tuple of any types; `names` has the field names of a named tuple."""

    parts: tuple[Any, ...]
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Known:
    """An object that is known when a kernel is compiled: a function, a module, a tuple of numbers."""

    thing: Any


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
    """Return the type of a variable that can hold values of both types, or None if there is none."""
    if a == b:
        return a
    if isinstance(a, str) and isinstance(b, str):
        return a if RANK[a] > RANK[b] else b if RANK[b] > RANK[a] else INT
    if isinstance(a, Tuple) and isinstance(b, Tuple) and len(a.parts) == len(b.parts):
        parts = tuple(joined(x, y) for x, y in zip(a.parts, b.parts, strict=True))
        return None if None in parts else Tuple(parts, a.names)
    return None


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _address_in_object(array: np.ndarray) -> int:
    """Return the address of an array's data, much faster: numpy's array object begins with it."""
    return ctypes.c_size_t.from_address(id(array) + object.__basicsize__).value


address = _address if _address_in_object(_TRIAL) != _address(_TRIAL) else _address_in_object


class Arguments:
    """The arguments of one call: their types and words, and the arrays that must be written back afterwards."""

    __slots__ = ("back", "types", "words")

    def __init__(self, given: tuple[Any, ...]) -> None:
        self.words: list[Any] = []
        self.back: list[tuple[np.ndarray, np.ndarray]] = []
        """Arrays that were not contiguous, with the copies that are passed instead."""
        self.types = self._take(given)

    def _take(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Append the words of these values; return their types in a form that is quick to compare."""
        words, types = self.words, list[Any]()
        for value in given:
            kind = type(value)
            if kind is np.ndarray:
                flags = value.flags
                if not (flags.c_contiguous and flags.aligned and value.dtype.isnative):
                    whole = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
                    whole = whole.copy() if whole is value or np.may_share_memory(whole, value) else whole
                    self.back.append((value, whole))
                    value = whole
                words.append(address(value))
                words.extend(value.shape)
                types.append((value.dtype.char, value.ndim))
            elif kind in NUMBERS:
                words.append(value)
                types.append(NUMBERS[kind])
            elif isinstance(value, tuple):
                types.append((kind, self._take(value)))
            elif isinstance(value, np.ndarray | np.generic):
                # Convert to the plain form: a memory map to an array, a number of another width to a Python number.
                plain = value.view(np.ndarray) if isinstance(value, np.ndarray) else value.item()
                if type(plain) is kind:
                    raise TypeError(f"a kernel takes numbers, arrays and tuples of them, not {kind.__name__}")
                types += self._take((plain,))
            else:
                raise TypeError(f"a kernel takes numbers, arrays and tuples of them, not {kind.__name__}")
        return tuple(types)

    def write_back(self) -> None:
        for given, copy in self.back:
            if given.flags.writeable:
                given[...] = copy


def full_type(key: Any) -> Type:
    """Return the type for a key that `Arguments` made; such keys are quicker to make and to compare than types."""
    if isinstance(key, str):
        return key
    if isinstance(key[0], str):
        item = np.dtype(key[0]).name
        if item not in ITEMS:
            raise TypeError(f"a kernel takes arrays of {', '.join(ITEMS)}, not of {item}")
        return Array(item, key[1])
    return Tuple(tuple(full_type(part) for part in key[1]), getattr(key[0], "_fields", ()))


def as_plain(type_: Type) -> Any:
    """Return a type as values that JSON can represent.

    >>> from_plain(as_plain(Tuple((INT, Array("bool", 2)), ("a", "b"))))
    Tuple(parts=('int', Array(item='bool', ndim=2)), names=('a', 'b'))
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

"""The Python and numpy functions that kernels may call, as LLVM.

Knows: one function each. Does not know: syntax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from octopipe.base.compile.text import Text, Value
from octopipe.base.compile.types import BOOL, FLOAT, INT, ITEMS, LLVM, UINT, Array, Known, Tuple, joined


def read_as(array: Value) -> str:
    return ITEMS[array.type.item][1]


def _extreme(less: bool) -> Callable[..., Value]:
    def make(text: Text, *values: Value) -> Value:
        if len(values) < 2:
            raise TypeError("min and max take two numbers or more")
        best = values[0]
        for other in values[1:]:
            type_, x, y = text.alike(best, other, INT)
            order = "lt" if less else "gt"
            how = f"fcmp o{order} double" if type_ == FLOAT else f"icmp {'u' if type_ == UINT else 's'}{order} i64"
            best = text.pick(text.reg(f"{how} {y}, {x}"), type_, y, x)
        return best

    return make


def _as(type_: str) -> Callable[..., Value]:
    def make(text: Text, value: Value) -> Value:
        if type_ == UINT and value.const is not None:
            if value.const < 0 or not isinstance(value.const, int):
                raise TypeError(f"{value.const} is not an unsigned whole number")
            return Value(UINT, [str(int(value.const))], int(value.const))
        return text.convert(value, type_)

    return make


def _real(intrinsic: str) -> Callable[..., Value]:
    def make(text: Text, value: Value) -> Value:
        x = text.convert(value, FLOAT).regs[0]
        return Value(FLOAT, [text.reg(f"call double @llvm.{intrinsic}.f64(double {x})")])

    return make


def _abs(text: Text, value: Value) -> Value:
    if value.type == FLOAT:
        return _real("fabs")(text, value)
    if value.type == UINT:
        return value
    x = text.convert(value, INT).regs[0]
    negative = text.reg(f"icmp slt i64 {x}, 0")
    return text.pick(negative, INT, text.reg(f"sub i64 0, {x}"), x)


def _item(dtype: Value | None, default: str) -> str:
    return default if dtype is None else np.dtype(dtype.type.thing).name


def _lengths(text: Any, shape: Value) -> list[str]:
    if text.loops:
        raise TypeError("an array cannot be created inside a loop; create it before the loop, or in a separate kernel")
    each = text.parts(shape) if isinstance(shape.type, Tuple | Known) else [shape]
    if any(n.type not in (INT, UINT) for n in each):
        raise TypeError("a length must be an integer")
    return [text.convert(n, INT).regs[0] for n in each]


def _zeros(text: Text, shape: Value, dtype: Value | None = None) -> Value:
    return text.new_array(_item(dtype, "float64"), _lengths(text, shape), zero=True)


def _empty(text: Text, shape: Value, dtype: Value | None = None) -> Value:
    return text.new_array(_item(dtype, "float64"), _lengths(text, shape))


def _full(text: Text, shape: Value, value: Value, dtype: Value | None = None) -> Value:
    if isinstance(value.type, Array):
        raise TypeError("np.full takes one number")
    default = {FLOAT: "float64", INT: "int64", UINT: "uint64", BOOL: "bool"}[value.type]
    array = text.new_array(_item(dtype, default), _lengths(text, shape))
    text.fill(array, text.convert(value, read_as(array)))
    return array


def _copy(text: Any, array: Value) -> Value:
    _lengths(text, Value(INT, ["0"], 0))
    copied: Value = text.copy(array)
    return copied


def _max(text: Text, array: Value) -> Value:
    """Return the largest element of an array; an empty array raises ValueError."""
    item = array.type.item
    stored, type_, _ = ITEMS[item]
    text.fail_if(text.reg(f"icmp eq i64 {text.size(array)}, 0"), ValueError, "the maximum of an empty array")
    at, best = text.room("i64"), text.room(LLVM[type_])
    text.line(f"store i64 1, ptr {at}")
    text.line(f"store {LLVM[type_]} {text.load(item, array.regs[0]).regs[0]}, ptr {best}")
    size, test, body, end = text.size(array), text.label(), text.label(), text.label()
    text.begin(test)
    i = text.reg(f"load i64, ptr {at}")
    text.branch(text.reg(f"icmp slt i64 {i}, {size}"), body, end)
    one = text.load(item, text.reg(f"getelementptr inbounds {stored}, ptr {array.regs[0]}, i64 {i}"))
    now = Value(type_, [text.reg(f"load {LLVM[type_]}, ptr {best}")])
    larger = text.convert(_extreme(False)(text, now, one), type_).regs[0]
    if type_ == FLOAT:  # as numpy does: if there is a NaN, it is the result
        larger = text.pick(text.reg(f"fcmp uno double {one.regs[0]}, 0.0"), FLOAT, one.regs[0], larger).regs[0]
    text.line(f"store {LLVM[type_]} {larger}, ptr {best}")
    text.line(f"store i64 {text.reg(f'add nsw i64 {i}, 1')}, ptr {at}")
    text.line(f"br label %{test}")
    text.lines.append(f"{end}:")
    return Value(type_, [text.reg(f"load {LLVM[type_]}, ptr {best}")])


def _search(text: Any, array: Value, value: Value, side: Value | None = None) -> Value:
    if not isinstance(array.type, Array) or array.type.ndim != 1:
        raise TypeError("np.searchsorted needs an array of one dimension")
    if side is not None and side.type not in (Known("left"), Known("right")):
        raise TypeError('the side is "left" or "right"')
    if not isinstance(value.type, str) or joined(value.type, read_as(array)) != read_as(array):
        raise TypeError(f"{value.type} is looked for in an array of {array.type.item}; convert it")
    right = side is not None and side.type == Known("right")
    found: Value = text.call(_after if right else _from, [array, text.convert(value, read_as(array))])
    return found


def _from(values, value):  # type: ignore[no-untyped-def]
    """Return the first index of the sorted `values` whose element is not less than `value`; NaN is the largest."""
    low, high = 0, values.size
    while low < high:
        middle = (low + high) >> 1
        if values[middle] < value or (value != value and values[middle] == values[middle]):
            low = middle + 1
        else:
            high = middle
    return low


def _after(values, value):  # type: ignore[no-untyped-def]
    """Return the first index of the sorted `values` whose element is greater than `value`; NaN is the largest."""
    low, high = 0, values.size
    while low < high:
        middle = (low + high) >> 1
        if value < values[middle] or (values[middle] != values[middle] and value == value):
            high = middle
        else:
            low = middle + 1
    return low


FUNCTIONS: dict[Any, Callable[..., Value]] = {
    min: _extreme(True),
    max: _extreme(False),
    abs: _abs,
    int: _as(INT),
    float: _as(FLOAT),
    bool: _as(BOOL),
    np.int64: _as(INT),
    np.uint64: _as(UINT),
    np.float64: _as(FLOAT),
    np.log: _real("log"),
    np.log2: _real("log2"),
    np.exp: _real("exp"),
    np.sqrt: _real("sqrt"),
    np.floor: _real("floor"),
    np.ceil: _real("ceil"),
    np.zeros: _zeros,
    np.empty: _empty,
    np.full: _full,
    np.searchsorted: _search,
}
METHODS: dict[str, Callable[..., Value]] = {"copy": _copy, "max": _max}

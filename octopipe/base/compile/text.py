"""The text of one LLVM function while it is being written: registers, blocks, variables, array elements.

Knows: how values are represented and converted, and how a line of LLVM IR is written. Does not know: Python's syntax.

Variables live in memory that LLVM turns into registers. A variable's type is the common type of all its assignments;
when a later assignment widens it, `changed` is set and the function is written again with the types known by then.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np

from octopipe.base.compile.types import (
    BOOL,
    FLOAT,
    INT,
    ITEMS,
    LLVM,
    RANK,
    UINT,
    Array,
    Known,
    Tuple,
    Type,
    joined,
    words,
)


class Value:
    """A type, and the registers (or constants) of the value; `const` is the value if it is a constant."""

    __slots__ = ("const", "regs", "type")

    def __init__(self, type_: Type, regs: list[str], const: Any = None) -> None:
        self.type, self.regs, self.const = type_, regs, const


def bounds_checked() -> bool:
    """Whether kernels compiled from now on check every index; kernels that are already compiled do not change."""
    return os.environ.get("OCTOPIPE_CHECK_BOUNDS", "") not in ("", "0")


def number(value: Any) -> Value:
    """Return a Python number as a constant; raise TypeError if an integer has more than 64 bits."""
    if isinstance(value, bool):
        return Value(BOOL, ["true" if value else "false"], value)
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise TypeError(f"{value} has more than 64 bits")
        return Value(INT, [str(int(value))], int(value))
    return Value(FLOAT, [f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016x}"], value)


class Text:
    """A function that is being written."""

    def __init__(self, types: dict[str, Type], module: Any, file: str) -> None:
        """`module` assigns numbers to possible errors (`module.site`)."""
        self.types = types
        """The types of the variables, from previous passes over the function."""
        self.module, self.file, self.at_line = module, file, 0
        self.checked: bool = module.checked
        self.may_fail = False
        self.changed = False
        self.stores: dict[int, str] = {}
        """Where arrays among the arguments are written, by their number."""
        self.slots: dict[str, list[str]] = {}
        self.entry: list[str] = []
        self.lines: list[str] = []
        self.count = 0
        self.made: list[str] = []
        """Stack slots with the addresses of the arrays allocated here, one for each allocation in the code."""

    # -- lines -----------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self.lines.append("  " + text)

    def reg(self, text: str) -> str:
        """Assign the result of an instruction to a new register; return its name."""
        self.count += 1
        self.lines.append(f"  %r{self.count} = {text}")
        return f"%r{self.count}"

    def label(self) -> str:
        self.count += 1
        return f"b{self.count}"

    def begin(self, label: str) -> None:
        """Begin a new block; the previous block falls through to it."""
        self.line(f"br label %{label}")
        self.lines.append(f"{label}:")

    def leave(self, text: str) -> None:
        """End the block with this jump; the Python code that follows in the same block is unreachable."""
        self.line(text)
        self.lines.append(f"{self.label()}:")

    def branch(self, condition: str, yes: str, no: str) -> None:
        """Branch to `yes`, which begins here, or to `no`."""
        self.line(f"br i1 {condition}, label %{yes}, label %{no}")
        self.lines.append(f"{yes}:")

    def room(self, word: str, value: str = "") -> str:
        """Allocate a stack slot in the function's entry block, with an initial value if given; return its name."""
        self.count += 1
        self.entry.append(f"  %v{self.count} = alloca {word}")
        if value:
            self.entry.append(f"  store {word} {value}, ptr %v{self.count}")
        return f"%v{self.count}"

    # -- failing ---------------------------------------------------------------------------------------

    def fail_if(self, condition: str, kind: type[Exception], text: str) -> None:
        """Leave the kernel with an error of this line if the condition is true; Python raises it after the call."""
        site = self.module.site(kind.__name__, self.file, self.at_line, text)
        bad, good = self.label(), self.label()
        self.line(f"br i1 {condition}, label %{bad}, label %{good}")
        self.lines.append(f"{bad}:")
        self.line(f"store i64 {site}, ptr %err")
        self.line("br label %fail")
        self.lines.append(f"{good}:")
        self.may_fail = True

    def fail_with_callee(self) -> None:
        """Leave the kernel if the function it has just called reported an error."""
        good = self.label()
        failed = self.reg(f"icmp ne i64 {self.reg('load i64, ptr %err')}, 0")
        self.line(f"br i1 {failed}, label %fail, label %{good}")
        self.lines.append(f"{good}:")
        self.may_fail = True

    def free_made(self) -> None:
        for slot in self.made:
            self.line(f"call void @free(ptr {self.reg(f'load ptr, ptr {slot}')})")

    # -- variables -------------------------------------------------------------------------------------

    def assign(self, name: str, value: Value) -> None:
        known = self.types.get(name)
        wanted = value.type if known is None else joined(known, value.type)
        if known == UINT and value.type == INT and value.const is not None:
            wanted = UINT
        if wanted is None:
            what = {"$returned": "what is returned"}.get(name, "`if ... else`" if name[0] == "$" else name)
            raise TypeError(f"{what} is {known} and {value.type}; one type holds all values of a variable")
        if wanted != known:
            self.changed = self.changed or known is not None
            self.types[name] = wanted
        if name not in self.slots or known is None:
            self.slots[name] = [self.room(word) for word in words(self.types[name])]
        elif wanted != known:
            return  # a type was widened: the function will be written again
        for word, slot, reg in zip(words(wanted), self.slots[name], self.convert(value, wanted).regs, strict=True):
            self.line(f"store {word} {reg}, ptr {slot}")

    def variable(self, name: str) -> Value:
        type_ = self.types[name]
        slots = self.slots[name]
        return Value(type_, [self.reg(f"load {w}, ptr {s}") for w, s in zip(words(type_), slots, strict=True)])

    # -- numbers ---------------------------------------------------------------------------------------

    def convert(self, value: Value, to: Type) -> Value:
        of = value.type
        if of == to:
            return value
        if isinstance(to, Tuple):
            regs, at = [], 0
            for part, wanted in zip(of.parts, to.parts, strict=True):
                n = len(words(part))
                regs += self.convert(Value(part, value.regs[at : at + n]), wanted).regs
                at += n
            return Value(to, regs)
        if isinstance(to, Array) and joined(of, to) == to:
            return Value(to, value.regs)
        if not isinstance(of, str) or not isinstance(to, str):
            raise TypeError(f"{of} cannot become {to}")
        reg = value.regs[0]
        if value.const is not None and to == FLOAT:
            return number(float(value.const))
        if value.const is not None and to in (INT, UINT):
            return self.whole(value, to)
        if to == BOOL:
            test = f"fcmp une double {reg}, 0.0" if of == FLOAT else f"icmp ne i64 {reg}, 0"
            return Value(BOOL, [self.reg(test)])
        if to == FLOAT:
            how = {BOOL: "uitofp i1", UINT: "uitofp i64", INT: "sitofp i64"}[of]
            return Value(FLOAT, [self.reg(f"{how} {reg} to double")])
        if of == FLOAT:
            if self.checked:
                self.check_whole(reg, "-0x1p63" if to == INT else "0.0")
            # Saturating conversion, which is defined for every float: out-of-range values are clipped, NaN gives 0.
            how = "fptosi" if to == INT else "fptoui"
            return Value(to, [self.reg(f"call i64 @llvm.{how}.sat.i64.f64(double {reg})")])
        if of == BOOL:
            return Value(to, [self.reg(f"zext i1 {reg} to i64")])
        if self.checked and of == UINT:
            too_large = self.reg(f"icmp slt i64 {reg}, 0")
            self.fail_if(too_large, ValueError, "a number that no number with a sign can hold")
        return Value(to, [reg])

    def whole(self, value: Value, to: str) -> Value:
        """Convert a constant to a whole number; raise TypeError or ValueError if none of 64 bits has its value."""
        found = number(int(value.const))
        if to == UINT and found.const < 0:
            raise TypeError(f"{value.const} in the place of a number without a sign")
        return Value(to, found.regs, found.const)

    def alike(self, a: Value, b: Value, least: str = BOOL) -> tuple[str, str, str]:
        """Convert two numbers to their common type, at least `least`; return that type and both registers."""
        if {a.type, b.type} == {INT, UINT}:
            # A literal takes the other's type.
            literal = a if a.const is not None else b
            if literal.const is None or literal.const < 0 or literal.type == UINT:
                raise TypeError(
                    "a signed and an unsigned integer cannot be mixed; convert one: np.uint64(), np.int64()"
                )
            to = b.type if literal is a else a.type
        else:
            to = joined(a.type, b.type)
        if not isinstance(to, str):
            raise TypeError(f"{a.type} with {b.type}")
        to = least if RANK[least] > RANK[to] else to
        return to, self.convert(a, to).regs[0], self.convert(b, to).regs[0]

    def check_whole(self, reg: str, least: str) -> None:
        low, high = (number(float.fromhex(x) if "x" in x else float(x)).regs[0] for x in (least, "0x1p63"))
        above = self.reg(f"fcmp oge double {reg}, {low}")
        below = self.reg(f"fcmp olt double {reg}, {high}")
        outside = self.reg(f"xor i1 {self.reg(f'and i1 {above}, {below}')}, true")
        self.fail_if(outside, ValueError, "a float outside the range of integers")

    def pick(self, condition: str, type_: str, a: str, b: str) -> Value:
        return Value(type_, [self.reg(f"select i1 {condition}, {LLVM[type_]} {a}, {LLVM[type_]} {b}")])

    # -- arrays ----------------------------------------------------------------------------------------

    def size(self, array: Value) -> str:
        """Return the number of elements."""
        size = array.regs[1]
        for length in array.regs[2:]:
            size = self.reg(f"mul nsw i64 {size}, {length}")
        return size

    def address(self, array: Value, indices: list[str], checked: bool = True) -> str:
        """Return the address of an element, or of the subarray that the first indices select."""
        lengths = array.regs[1:]
        if self.checked and checked:
            for index, length in zip(indices, lengths):
                self.fail_if(self.reg(f"icmp uge i64 {index}, {length}"), IndexError, "index out of bounds")
        at = indices[0] if indices else "0"
        for k in range(1, len(lengths)):
            if at != "0":
                at = self.reg(f"mul nsw i64 {at}, {lengths[k]}")
            if k < len(indices) and indices[k] != "0":
                at = indices[k] if at == "0" else self.reg(f"add nsw i64 {at}, {indices[k]}")
        return self.reg(f"getelementptr inbounds {ITEMS[array.type.item][0]}, ptr {array.regs[0]}, i64 {at}")

    def load(self, item: str, address: str) -> Value:
        stored, type_, _ = ITEMS[item]
        reg = self.reg(f"load {stored}, ptr {address}")
        if type_ == BOOL:
            return Value(BOOL, [self.reg(f"trunc i8 {reg} to i1")])
        if stored != LLVM[type_]:
            how = "fpext" if type_ == FLOAT else "zext" if item.startswith("u") else "sext"
            reg = self.reg(f"{how} {stored} {reg} to {LLVM[type_]}")
        return Value(type_, [reg])

    def store(self, item: str, address: str, value: Value) -> None:
        stored, type_, nbytes = ITEMS[item]
        reg = self.convert(value, type_).regs[0]
        if type_ == BOOL:
            reg = self.reg(f"zext i1 {reg} to i8")
        elif type_ == INT and nbytes < 8:
            self.check_width(item, value, reg)
        if type_ != BOOL and stored != LLVM[type_]:
            reg = self.reg(f"{'fptrunc' if type_ == FLOAT else 'trunc'} {LLVM[type_]} {reg} to {stored}")
        self.line(f"store {stored} {reg}, ptr {address}")

    def check_width(self, item: str, value: Value, reg: str) -> None:
        """Refuse a constant that elements of this width cannot hold; check other numbers if indices are checked."""
        limits = np.iinfo(item)
        low, high = int(limits.min), int(limits.max)
        if value.const is not None and not low <= int(value.const) <= high:
            raise TypeError(f"{value.const} does not fit into an element of {item}")
        if self.checked and value.const is None:
            inside = self.reg(f"icmp ule i64 {self.reg(f'sub i64 {reg}, {low}')}, {high - low}")
            self.fail_if(self.reg(f"xor i1 {inside}, true"), ValueError, f"a number that no element of {item} can hold")

    def new_array(self, item: str, lengths: list[str], zero: bool = False) -> Value:
        """Allocate an array that lives until the call ends."""
        slot = self.room("ptr", "null")
        self.made.append(slot)
        array = Value(Array(item, len(lengths)), ["", *lengths])
        nbytes = str(ITEMS[item][2])
        for length in lengths:
            if not length.isdecimal():
                self.fail_if(self.reg(f"icmp slt i64 {length}, 0"), ValueError, "a negative length")
            both = self.reg(f"call {{ i64, i1 }} @llvm.smul.with.overflow.i64(i64 {nbytes}, i64 {length})")
            nbytes = self.reg(f"extractvalue {{ i64, i1 }} {both}, 0")
            self.fail_if(self.reg(f"extractvalue {{ i64, i1 }} {both}, 1"), MemoryError, "no memory for an array")
        address = self.allocated(nbytes, zero)
        self.line(f"store ptr {address}, ptr {slot}")
        array.regs[0] = address
        return array

    def allocated(self, nbytes: str, zero: bool = False) -> str:
        """Return the address of this much new memory. One byte more is taken, so that an empty array has one too."""
        size = self.reg(f"add nuw i64 {nbytes}, 1")
        address = self.reg(f"call ptr @calloc(i64 {size}, i64 1)" if zero else f"call ptr @malloc(i64 {size})")
        self.fail_if(self.reg(f"icmp eq ptr {address}, null"), MemoryError, "no memory for an array")
        return address

    def note_store(self, array: Value) -> None:
        """Note that an array is written here."""
        for origin in array.type.origins:
            self.stores.setdefault(origin, f"{self.file}:{self.at_line}")

    def fill(self, array: Value, value: Value) -> None:
        at = self.room("i64")
        self.line(f"store i64 0, ptr {at}")
        size, test, body, end = self.size(array), self.label(), self.label(), self.label()
        self.begin(test)
        i = self.reg(f"load i64, ptr {at}")
        self.branch(self.reg(f"icmp slt i64 {i}, {size}"), body, end)
        item = array.type.item
        self.store(item, self.reg(f"getelementptr inbounds {ITEMS[item][0]}, ptr {array.regs[0]}, i64 {i}"), value)
        self.line(f"store i64 {self.reg(f'add nsw i64 {i}, 1')}, ptr {at}")
        self.line(f"br label %{test}")
        self.lines.append(f"{end}:")

    def copy(self, array: Value) -> Value:
        new = self.new_array(array.type.item, array.regs[1:])
        self.move(new, array)
        return new

    def move(self, to: Value, of: Value) -> None:
        """Copy all elements of the array `of` to the array `to`, which has the same size."""
        nbytes = self.reg(f"mul i64 {self.size(of)}, {ITEMS[of.type.item][2]}")
        self.line(f"call void @llvm.memmove.p0.p0.i64(ptr {to.regs[0]}, ptr {of.regs[0]}, i64 {nbytes}, i1 false)")

    def parts(self, value: Value) -> list[Value]:
        """Return the parts of a tuple."""
        if isinstance(value.type, Known) and isinstance(value.type.thing, tuple):
            if not all(isinstance(x, bool | int | float) for x in value.type.thing):
                raise TypeError("a tuple of constants may contain numbers only")
            return [number(x) for x in value.type.thing]
        if not isinstance(value.type, Tuple):
            raise TypeError(f"{value.type} has no elements")
        out, at = [], 0
        for part in value.type.parts:
            n = len(words(part))
            out.append(Value(part, value.regs[at : at + n]))
            at += n
        return out

    def tuple_of(self, values: list[Value]) -> Value:
        return Value(Tuple(tuple(v.type for v in values)), [r for v in values for r in v.regs])

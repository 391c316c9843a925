"""Translation of expressions to LLVM: names, numbers, arrays, tuples, operators, calls.

Knows: what an expression of the kernels' language means, and which Python expressions it rejects. Does not know:
statements (`language.py`), or what numpy's functions do (`functions.py`).

An expression whose value would differ from what Python and numpy compute is rejected during translation. Conditions
that only show at run time are errors of that call: integer division by zero, arrays of unequal size, no memory; and, if
OCTOPIPE_CHECK_BOUNDS is set, an index out of bounds or a float that does not fit an integer.
"""

from __future__ import annotations

import ast
import builtins
import operator
from typing import Any

import numpy as np

from octopipe.base.compile import functions
from octopipe.base.compile.constants import constant_text
from octopipe.base.compile.text import Text, Value, number
from octopipe.base.compile.types import BOOL, FLOAT, INT, LLVM, UINT, Array, Known, Tuple, arrays_in, words

INTS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor"}
BITS = (ast.BitAnd, ast.BitOr, ast.BitXor)
FLOATS = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}
FOLDED: dict[type[ast.operator], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip
"""Operators on two constants: Python computes them, since their result may be an index or have more than 64 bits."""
ORDERS = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}


class Expressions(Text):
    """A function whose expressions are being translated; `Body` sets the attributes declared here."""

    module: Any
    python: Any
    outer: dict[str, Any]
    locals: frozenset[str]
    """Names that the function assigns: as in Python, they shadow outer names even before the assignment."""
    defined: set[str] | None
    """Names that have a value on every control-flow path to this point; None if this point is unreachable."""

    def unknown(self, node: ast.AST) -> Any:
        raise TypeError(f"{type(node).__name__} is not supported in a kernel")

    def of(self, node: ast.expr) -> Value:
        value: Value = getattr(self, f"of_{type(node).__name__}", self.unknown)(node)
        return value

    def truth(self, node: ast.expr) -> str:
        """Translate an expression to its truth value; only here may `and` and `or` have operands that are numbers."""
        if isinstance(node, ast.BoolOp):
            return self.either(node, as_value=False).regs[0]
        return self.convert(self.of(node), BOOL).regs[0]

    def of_Constant(self, node: ast.Constant) -> Value:
        return python_value(node.value)

    def of_Name(self, node: ast.Name) -> Value:
        if node.id in self.locals:
            if self.defined is not None and node.id not in self.defined:
                raise TypeError(f"{node.id} may have no value here; assign it on every path that leads here")
            return self.variable(node.id)
        for place in (self.outer, self.python.__globals__, vars(builtins)):
            if node.id in place:
                return self.constant(node, place[node.id])
        raise TypeError(f"{node.id} is not defined here")

    def constant(self, node: ast.Name | ast.Attribute, thing: Any) -> Value:
        """Return a value from outside the kernel, and note it as a part of the kernel's code."""
        told = constant_text(thing)
        if told is not None:
            self.module.constants[self.python.__module__, ast.unparse(node)] = told
        return python_value(thing)

    def of_Attribute(self, node: ast.Attribute) -> Value:
        base = self.of(node.value)
        if isinstance(base.type, Known):
            return self.constant(node, getattr(base.type.thing, node.attr))
        if isinstance(base.type, Tuple) and node.attr in base.type.names:
            return self.parts(base)[base.type.names.index(node.attr)]
        if isinstance(base.type, Array) and node.attr == "size":
            return Value(INT, [self.size(base)])
        if isinstance(base.type, Array) and node.attr == "shape":
            return Value(Tuple((INT,) * base.type.ndim), base.regs[1:])
        raise TypeError(f"{base.type} has no {node.attr}")

    def of_Tuple(self, node: ast.Tuple) -> Value:
        return self.tuple_of([self.of(e) for e in node.elts])

    # -- elements --------------------------------------------------------------------------------------

    def of_Subscript(self, node: ast.Subscript, base: Value | None = None) -> Value:
        """`base`: the value of `node.value`, if it has been translated already."""
        base = self.of(node.value) if base is None else base
        if isinstance(base.type, Tuple | Known):
            return self.of_parts(base, node.slice)
        if isinstance(node.slice, ast.Slice):
            return self.part(base, node.slice)
        array, indices = self.element(node, base)
        address = self.address(array, indices)
        if len(indices) < array.type.ndim:
            left = Array(array.type.item, array.type.ndim - len(indices), array.type.origins)
            return Value(left, [address, *array.regs[1 + len(indices) :]])
        return self.load(array.type.item, address)

    def of_parts(self, base: Value, at: ast.expr) -> Value:
        """Return an element of a tuple, or of a table of constants; only a table may be indexed by a variable."""
        if isinstance(at, ast.Slice):
            raise TypeError("a tuple cannot be sliced; use its elements")
        index = self.of(at)
        if index.type not in (INT, UINT):
            raise TypeError("an index must be an integer")
        parts = self.parts(base)
        if index.const is not None:
            return parts[index.const]
        if not isinstance(base.type, Known):
            raise TypeError("the index of a tuple must be a constant")
        kinds = {part.type for part in parts}
        if kinds != {INT} and kinds != {FLOAT}:
            raise TypeError("a table must be a tuple of integers or of floats, not of both")
        item, place = self.module.table(tuple(part.const for part in parts))
        array = Value(Array(item, 1), [place, str(len(parts))])
        return self.load(item, self.address(array, [self.convert(index, INT).regs[0]]))

    def part(self, array: Value, cut: ast.Slice) -> Value:
        """Return a slice of an array's first dimension; its bounds are clipped to the array, as in numpy."""
        if cut.step is not None:
            raise TypeError("a slice cannot have a step")
        if not isinstance(array.type, Array):
            raise TypeError(f"{array.type} has no elements")
        length = array.regs[1]
        first = self.cut_at(cut.lower, length) if cut.lower else "0"
        stop = self.cut_at(cut.upper, length) if cut.upper else length
        size = self.reg(f"sub i64 {stop}, {first}")
        size = self.pick(self.reg(f"icmp slt i64 {size}, 0"), INT, "0", size).regs[0]
        # No bounds check: an empty slice may begin at the end of the array.
        return Value(array.type, [self.address(array, [first], checked=False), size, *array.regs[2:]])

    def cut_at(self, node: ast.expr, length: str) -> str:
        """Return one bound of a slice: a negative one counts from the end, and the result is clipped to the array."""
        value = self.of(node)
        if value.type not in (INT, UINT):
            raise TypeError("the bounds of a slice must be integers")
        at = self.convert(value, INT).regs[0]
        if value.const is None or value.const < 0:
            behind = self.reg(f"add i64 {at}, {length}")
            at = self.pick(self.reg(f"icmp slt i64 {at}, 0"), INT, behind, at).regs[0]
            at = self.pick(self.reg(f"icmp slt i64 {at}, 0"), INT, "0", at).regs[0]
        return self.pick(self.reg(f"icmp sgt i64 {at}, {length}"), INT, length, at).regs[0]

    def element(self, node: ast.Subscript, base: Value | None = None) -> tuple[Value, list[str]]:
        array = self.of(node.value) if base is None else base
        if not isinstance(array.type, Array):
            raise TypeError(f"{array.type} has no elements")
        places = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if len(places) > array.type.ndim:
            raise TypeError(f"{len(places)} indices of an array of {array.type.ndim} dimensions")
        return array, [self.index(array, k, place) for k, place in enumerate(places)]

    def index(self, array: Value, k: int, node: ast.expr) -> str:
        value = self.of(node)
        if value.type not in (INT, UINT):
            raise TypeError(f"an index must be an integer, not {value.type}")
        if value.const is not None and value.const < 0:
            return self.reg(f"add nsw i64 {array.regs[1 + k]}, {value.const}")
        return self.convert(value, INT).regs[0]

    # -- operators -------------------------------------------------------------------------------------

    def of_UnaryOp(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            return Value(BOOL, [self.reg(f"xor i1 {self.truth(node.operand)}, true")])
        value = self.of(node.operand)
        if not isinstance(node.op, ast.USub):
            self.unknown(node.op)
        if value.type == UINT:
            raise TypeError("an unsigned integer cannot be negated")
        if value.const is not None:
            return number(-value.const)
        if value.type == FLOAT:
            return Value(FLOAT, [self.reg(f"fneg double {value.regs[0]}")])
        return Value(INT, [self.reg(f"sub i64 0, {self.convert(value, INT).regs[0]}")])

    def of_BinOp(self, node: ast.BinOp) -> Value:
        return self.binary(type(node.op), self.of(node.left), self.of(node.right))

    def binary(self, op: type[ast.operator], a: Value, b: Value) -> Value:
        if a.type == b.type == BOOL:
            if op not in BITS:
                raise TypeError(f"{op.__name__} of two booleans differs between numpy and Python; use int()")
            return Value(BOOL, [self.reg(f"{INTS[op]} i1 {a.regs[0]}, {b.regs[0]}")])
        if op is ast.Pow:
            return self.power(a, b)
        if op in FOLDED and a.type == b.type == INT and a.const is not None and b.const is not None:
            return number(FOLDED[op](a.const, b.const))
        type_, x, y = self.alike(a, b, FLOAT if op is ast.Div else INT)
        if type_ == FLOAT:
            if op not in FLOATS:
                raise TypeError(f"{op.__name__} is defined for integers only")
            return Value(FLOAT, [self.reg(f"{FLOATS[op]} double {x}, {y}")])
        if op in INTS:
            return Value(type_, [self.reg(f"{INTS[op]} i64 {x}, {y}")])
        if op in (ast.LShift, ast.RShift):
            if type_ == INT and a.const is not None and b.const is not None and 0 <= b.const < 64:
                return number(a.const << b.const if op is ast.LShift else a.const >> b.const)
            return self.shift(op, type_, x, y, b.const)
        if op not in (ast.FloorDiv, ast.Mod):
            self.unknown(op())
        return self.divide(op, type_, x, y, b.const)

    def power(self, a: Value, b: Value) -> Value:
        if FLOAT not in (a.type, b.type):
            if b.const == 2 and not isinstance(b.const, bool):
                return self.binary(ast.Mult, a, a)
            raise TypeError("the only supported power of an integer is its square; use float()")
        # Call the C library's pow, as CPython does. "nobuiltin" keeps LLVM from recognising it: LLVM would turn a power
        # of 2 into a product, which is rounded differently (by 1 unit in the last place for about one number in a
        # thousand).
        x, y = self.convert(a, FLOAT).regs[0], self.convert(b, FLOAT).regs[0]
        how = "nobuiltin nounwind willreturn memory(none)"
        return Value(FLOAT, [self.reg(f"call double @pow(double {x}, double {y}) {how}")])

    def shift(self, op: type[ast.operator], type_: str, x: str, y: str, by: Any) -> Value:
        """Shift as numpy does: by 64 bits or more the result is 0, or -1 for a negative number shifted right."""
        left = op is ast.LShift
        how = "shl" if left else "lshr" if type_ == UINT else "ashr"
        if by is not None:
            if not 0 <= by < 64:
                raise TypeError(f"a shift by {by}; by 0 to 63 bits")
            return Value(type_, [self.reg(f"{how} i64 {x}, {y}")])
        fits = self.reg(f"icmp ult i64 {y}, 64")
        amount = self.pick(fits, INT, y, "63").regs[0]
        shifted = self.reg(f"{how} i64 {x}, {amount}")
        rest = shifted if how == "ashr" else "0"
        return Value(type_, self.pick(fits, INT, shifted, rest).regs)

    def divide(self, op: type[ast.operator], type_: str, x: str, y: str, by: Any) -> Value:
        if by is None or by == 0:
            self.fail_if(self.reg(f"icmp eq i64 {y}, 0"), ZeroDivisionError, "division of a whole number by zero")
        if type_ == UINT:
            return Value(UINT, [self.reg(f"{'udiv' if op is ast.FloorDiv else 'urem'} i64 {x}, {y}")])
        if by is None or by == -1:
            # The least 64-bit integer divided by -1 overflows and raises a signal, so -1 is handled separately, with
            # numpy's result.
            minus = self.reg(f"icmp eq i64 {y}, -1")
            y = self.pick(minus, INT, "1", y).regs[0]
        # Round down, as Python does; srem and sdiv round towards zero.
        rest = self.reg(f"srem i64 {x}, {y}")
        other = self.reg(f"icmp slt i64 {self.reg(f'xor i64 {rest}, {y}')}, 0")
        odd = self.reg(f"and i1 {self.reg(f'icmp ne i64 {rest}, 0')}, {other}")
        if op is ast.Mod:
            return self.pick(odd, INT, self.reg(f"add i64 {rest}, {y}"), rest)
        quotient = self.reg(f"sdiv i64 {x}, {y}")
        down = self.pick(odd, INT, self.reg(f"sub i64 {quotient}, 1"), quotient)
        if by is None or by == -1:
            return self.pick(minus, INT, self.reg(f"sub i64 0, {x}"), down.regs[0])
        return down

    def of_Compare(self, node: ast.Compare) -> Value:
        """Translate a comparison; a chain stops at the first comparison that is false, without evaluating the rest."""
        left = self.of(node.left)
        if len(node.ops) == 1:
            return Value(BOOL, [self.compared(node.ops[0], left, self.of(node.comparators[0]))])
        slot, end = self.room("i1"), self.label()
        for k, (op, comparator) in enumerate(zip(node.ops, node.comparators, strict=True)):
            right = self.of(comparator)
            holds = self.compared(op, left, right)
            self.line(f"store i1 {holds}, ptr {slot}")
            if k + 1 < len(node.ops):
                more = self.label()
                self.line(f"br i1 {holds}, label %{more}, label %{end}")
                self.lines.append(f"{more}:")
            left = right
        self.begin(end)
        return Value(BOOL, [self.reg(f"load i1, ptr {slot}")])

    def compared(self, op: ast.cmpop, left: Value, right: Value) -> str:
        if type(op) not in ORDERS and not isinstance(op, ast.Eq | ast.NotEq):
            raise TypeError(f"{type(op).__name__} is not supported in a kernel")
        type_, x, y = self.alike(left, right)
        if isinstance(op, ast.Eq | ast.NotEq):
            equal = isinstance(op, ast.Eq)
            how = ("fcmp oeq" if equal else "fcmp une") if type_ == FLOAT else f"icmp {'eq' if equal else 'ne'}"
        else:
            how = f"fcmp o{ORDERS[type(op)]}" if type_ == FLOAT else (
                f"icmp {'s' if type_ == INT else 'u'}{ORDERS[type(op)]}")  # fmt: skip
        return self.reg(f"{how} {LLVM[type_]} {x}, {y}")

    def of_BoolOp(self, node: ast.BoolOp) -> Value:
        return self.either(node, as_value=True)

    def either(self, node: ast.BoolOp, as_value: bool) -> Value:
        """Translate `and` or `or`. With `as_value` all operands must be bool, since Python returns one of them."""
        slot, end = self.room("i1"), self.label()
        for k, one in enumerate(node.values):
            if as_value:
                value = self.of(one)
                if value.type != BOOL:
                    raise TypeError(
                        "`and` and `or` of numbers return a number in Python; compare them, or use if ... else"
                    )
                reg = value.regs[0]
            else:
                reg = self.truth(one)
            self.line(f"store i1 {reg}, ptr {slot}")
            if k + 1 < len(node.values):
                more = self.label()
                ways = (more, end) if isinstance(node.op, ast.And) else (end, more)
                self.line(f"br i1 {reg}, label %{ways[0]}, label %{ways[1]}")
                self.lines.append(f"{more}:")
        self.begin(end)
        return Value(BOOL, [self.reg(f"load i1, ptr {slot}")])

    def of_IfExp(self, node: ast.IfExp) -> Value:
        name = f"$if {node.lineno} {node.col_offset}"
        yes, no, end = self.label(), self.label(), self.label()
        self.branch(self.truth(node.test), yes, no)
        self.assign(name, self.of(node.body))
        self.line(f"br label %{end}")
        self.lines.append(f"{no}:")
        self.assign(name, self.of(node.orelse))
        self.begin(end)
        return self.variable(name)

    # -- calls -----------------------------------------------------------------------------------------

    def of_Call(self, node: ast.Call) -> Value:
        if any(k.arg is None for k in node.keywords):
            raise TypeError("** is not supported in a kernel")
        if isinstance(node.func, ast.Attribute):
            base = self.of(node.func.value)
            if isinstance(base.type, Array):
                if node.args or node.keywords:
                    raise TypeError(f"{node.func.attr}() takes no arguments in a kernel")
                if node.func.attr not in functions.METHODS:
                    raise TypeError(f"an array's {node.func.attr}() is not supported in a kernel")
                return functions.METHODS[node.func.attr](self, base)
        called = self.of(node.func).type
        if not isinstance(called, Known):
            raise TypeError(f"{called} cannot be called")
        given = [self.of(a) for a in node.args]
        named = {str(k.arg): self.of(k.value) for k in node.keywords}
        if hasattr(called.thing, "kernel"):
            if named:
                raise TypeError("a kernel takes positional arguments only")
            return self.call(called.thing.kernel, given)
        if isinstance(called.thing, type) and issubclass(called.thing, tuple) and hasattr(called.thing, "_fields"):
            return self.named_tuple(called.thing, given, named)
        if called.thing not in functions.FUNCTIONS:
            raise TypeError(f"{getattr(called.thing, '__name__', called.thing)} is not supported in a kernel")
        return functions.FUNCTIONS[called.thing](self, *given, **named)

    def named_tuple(self, kind: Any, given: list[Value], named: dict[str, Value]) -> Value:
        """Construct a named tuple inside a kernel; every field needs a value."""
        fields: tuple[str, ...] = kind._fields
        values = dict(zip(fields, given)) | named
        if len(given) + len(named) != len(fields) or values.keys() != set(fields):
            raise TypeError(f"{kind.__name__} has the fields {', '.join(fields)}; give each of them once")
        made = self.tuple_of([values[field] for field in fields])
        return Value(Tuple(made.type.parts, fields), made.regs)

    def call(self, python: Any, given: list[Value]) -> Value:
        """Call another kernel."""
        made = self.module.function(python, [v.type for v in given])
        type_ = made.returned
        if type_ is None:
            raise TypeError(f"{python.__name__} calls itself, and kernels cannot be recursive")
        arrays = list(arrays_in(v.type for v in given))
        for written in made.stores:
            self.note_store(Value(arrays[written], []))
        if "ptr" in words(type_):
            raise TypeError(f"{python.__name__} returns an array, which only Python code can receive")
        struct = "{ " + ", ".join(words(type_)) + " }"
        passed = ["ptr %err", *(f"{w} {r}" for v in given for w, r in zip(words(v.type), v.regs, strict=True))]
        result = self.reg(f"call {struct} @{made.name}({', '.join(passed)})")
        if made.may_fail:
            self.fail_with_callee()
        if type_ == Tuple(()):
            return Value(Known(None), [])
        return Value(type_, [self.reg(f"extractvalue {struct} {result}, {i}") for i in range(len(words(type_)))])


def python_value(thing: Any) -> Value:
    """Return a Python object as a constant, or as an object that is known at compile time."""
    if isinstance(thing, bool | int | float):
        return number(thing)
    if isinstance(thing, np.generic) and thing.dtype.name in ("float64", "int64"):
        return number(thing.item())
    if isinstance(thing, np.uint64):
        return Value(UINT, [str(int(thing))], int(thing))
    return Value(Known(thing), [])

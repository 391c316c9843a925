"""From a Python function to LLVM's language: statements and expressions of the kernels' subset of Python.

Knows: names, numbers, arrays, tuples, `if`, `for`, `while`, assignments and calls of other kernels. Does not know:
machine code, or what numpy's functions do (`functions.py`).

The subset: no objects but arrays and (named) tuples, no exceptions, no negative indices but constant ones, no bounds
checks. Numbers are 64 bits wide and behave as in numpy. An array made in a kernel lives until the same line makes
another one or the kernel returns. Anything else is refused with its file and line.
"""

from __future__ import annotations

import ast
import builtins
import linecache
from functools import cache
from typing import Any

import numpy as np

from octopipe.base.compile import functions
from octopipe.base.compile.text import Text, Value, number
from octopipe.base.compile.types import BOOL, FLOAT, INT, LLVM, UINT, Array, Known, Tuple, Type, words

INTS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor"}
FLOATS = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}
ORDERS = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}
RETURNED = "$returned"


@cache
def _parsed(file: str) -> dict[tuple[str, int], ast.FunctionDef]:
    """A file's functions by name and first line."""
    found = {}
    for node in ast.walk(ast.parse("".join(linecache.getlines(file)))):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name, first] = node
    return found


class Body(Text):
    """One function being translated."""

    def __init__(self, module: Any, python: Any, types: dict[str, Type]) -> None:
        """`module` knows the other functions (`module.function`) and tables of constants (`module.table`)."""
        super().__init__(types)
        self.module, self.python = module, python
        code = python.__code__
        self.tree = _parsed(code.co_filename)[python.__name__, code.co_firstlineno]
        cells = python.__closure__ or ()
        self.outer = {n: c.cell_contents for n, c in zip(code.co_freevars, cells, strict=True)}
        self.loops: list[tuple[str, str]] = []
        """Where `continue` and `break` go."""
        self.text = ""

    def write(self, name: str, types: tuple[Type, ...]) -> bool:
        """Translate; True where it must be done once more."""
        names = [a.arg for a in self.tree.args.args]
        if len(names) != len(types):
            raise TypeError(f"{name} takes {len(names)} arguments, not {len(types)}")
        given, k = [], 0
        for parameter, type_ in zip(names, types, strict=True):
            regs = []
            for word in words(type_):
                given.append(f"{word} %a{k}")
                regs.append(f"%a{k}")
                k += 1
            self.assign(parameter, Value(type_, regs))
        self.block(self.tree.body)
        self.begin("exit")
        returned = self.types.setdefault(RETURNED, Tuple(()))
        result = self.variable(RETURNED) if RETURNED in self.slots else Value(returned, [])
        kept = [p.regs[0] for p in (self.parts(result) if isinstance(returned, Tuple) else [result])
                if isinstance(p.type, Array)]  # fmt: skip
        for slot in self.made:
            address = self.reg(f"load ptr, ptr {slot}")
            for other in kept:
                same = self.reg(f"icmp eq ptr {address}, {other}")
                address = self.reg(f"select i1 {same}, ptr null, ptr {address}")
            self.line(f"call void @free(ptr {address})")
        struct = "{ " + ", ".join(words(returned)) + " }"
        last = "undef"
        for i, (word, reg) in enumerate(zip(words(returned), result.regs, strict=True)):
            last = self.reg(f"insertvalue {struct} {last}, {word} {reg}, {i}")
        self.line(f"ret {struct} {last}")
        head = f"define internal {struct} @{name}({', '.join(given)}) {{"
        self.text = "\n".join([head, "entry:", *self.entry, *self.lines, "}"])
        return self.changed

    # -- statements ------------------------------------------------------------------------------------

    def block(self, statements: list[ast.stmt]) -> None:
        for node in statements:
            try:
                getattr(self, f"do_{type(node).__name__}", self.unknown)(node)
            except (TypeError, AttributeError, KeyError, IndexError) as error:
                where = f"{self.python.__code__.co_filename}:{node.lineno}"
                text = str(error)
                raise TypeError(text if ".py:" in text else f"{where}: a kernel cannot do this: {text}") from error

    def unknown(self, node: ast.AST) -> Any:
        raise TypeError(f"{type(node).__name__} is not part of the kernels' language")

    def do_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # not a docstring
            self.of(node.value)

    def do_Pass(self, node: ast.Pass) -> None:
        pass

    def do_Continue(self, node: ast.Continue) -> None:
        self.leave(f"br label %{self.loops[-1][0]}")

    def do_Break(self, node: ast.Break) -> None:
        self.leave(f"br label %{self.loops[-1][1]}")

    def do_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self.assign(RETURNED, self.of(node.value))
        self.leave("br label %exit")

    def do_Assign(self, node: ast.Assign) -> None:
        value = self.of(node.value)
        for target in node.targets:
            self.put(target, value)

    def do_AnnAssign(self, node: ast.AnnAssign) -> None:
        assert node.value is not None
        self.put(node.target, self.of(node.value))

    def do_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Subscript):
            array, indices = self.element(node.target)
            address = self.address(array, indices)
            now = self.load(array.type.item, address)
            self.store(array.type.item, address, self.binary(type(node.op), now, self.of(node.value)))
        else:
            self.put(node.target, self.binary(type(node.op), self.of(node.target), self.of(node.value)))

    def put(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self.assign(target.id, value)
        elif isinstance(target, ast.Tuple):
            for one, part in zip(target.elts, self.parts(value), strict=True):
                self.put(one, part)
        elif isinstance(target, ast.Subscript):
            array = self.of(target.value)
            if isinstance(target.slice, ast.Slice) or len(getattr(target.slice, "elts", "1")) < array.type.ndim:
                self.put_part(self.of(target), value)
                return
            array, indices = self.element(target, array)
            self.store(array.type.item, self.address(array, indices), value)
        else:
            self.unknown(target)

    def put_part(self, part: Value, value: Value) -> None:
        """A number into all elements of a part, or another array of its size."""
        if isinstance(value.type, Array):
            if value.type != part.type:
                raise TypeError(f"{value.type} into {part.type}")
            self.move(part, value)
        else:
            self.fill(part, self.convert(value, functions.read_as(part)))

    def do_If(self, node: ast.If) -> None:
        yes, no, end = self.label(), self.label(), self.label()
        self.branch(self.truth(node.test), yes, no)
        self.block(node.body)
        self.line(f"br label %{end}")
        self.lines.append(f"{no}:")
        self.block(node.orelse)
        self.begin(end)

    def do_While(self, node: ast.While) -> None:
        test, body, end = self.label(), self.label(), self.label()
        self.begin(test)
        self.branch(self.truth(node.test), body, end)
        self.inside(node.body, test, end)
        self.line(f"br label %{test}")
        self.lines.append(f"{end}:")

    def inside(self, statements: list[ast.stmt], again: str, end: str) -> None:
        """A loop's body."""
        self.loops.append((again, end))
        self.block(statements)
        self.loops.pop()

    def do_For(self, node: ast.For) -> None:
        end = self.label()
        if isinstance(node.iter, ast.Tuple):
            for value in self.parts(self.of(node.iter)):
                self.put(node.target, value)
                following = self.label()
                self.inside(node.body, following, end)
                self.begin(following)
            self.begin(end)
            return
        if not isinstance(node.iter, ast.Call) or self.of(node.iter.func).type != Known(range):
            raise TypeError("a loop runs over a range or over a tuple")
        given = [self.of(a) for a in node.iter.args]
        step = given[2].const if len(given) > 2 else 1
        if not isinstance(step, int):
            raise TypeError("the step of a range is a constant")
        type_, first, stop = self.alike(given[0] if len(given) > 1 else number(0), given[min(1, len(given) - 1)], INT)
        at = self.room("i64")
        self.line(f"store i64 {first}, ptr {at}")
        test, body, following = self.label(), self.label(), self.label()
        self.begin(test)
        now = self.reg(f"load i64, ptr {at}")
        sign = "u" if type_ == UINT else "s"
        self.branch(self.reg(f"icmp {sign}{'lt' if step > 0 else 'gt'} i64 {now}, {stop}"), body, end)
        self.put(node.target, Value(type_, [now]))
        self.inside(node.body, following, end)
        self.begin(following)
        self.line(f"store i64 {self.reg(f'add nsw i64 {now}, {step}')}, ptr {at}")
        self.line(f"br label %{test}")
        self.lines.append(f"{end}:")

    # -- expressions -----------------------------------------------------------------------------------

    def of(self, node: ast.expr) -> Value:
        value: Value = getattr(self, f"of_{type(node).__name__}", self.unknown)(node)
        return value

    def truth(self, node: ast.expr) -> str:
        return self.convert(self.of(node), BOOL).regs[0]

    def of_Constant(self, node: ast.Constant) -> Value:
        return python_value(node.value)

    def of_Name(self, node: ast.Name) -> Value:
        if node.id in self.slots:
            return self.variable(node.id)
        for place in (self.outer, self.python.__globals__, vars(builtins)):
            if node.id in place:
                return python_value(place[node.id])
        raise TypeError(f"{node.id} is not known here")

    def of_Attribute(self, node: ast.Attribute) -> Value:
        base = self.of(node.value)
        if isinstance(base.type, Known):
            return python_value(getattr(base.type.thing, node.attr))
        if isinstance(base.type, Tuple) and node.attr in base.type.names:
            return self.parts(base)[base.type.names.index(node.attr)]
        if isinstance(base.type, Array) and node.attr == "size":
            return Value(INT, [self.size(base)])
        if isinstance(base.type, Array) and node.attr == "shape":
            return Value(Tuple((INT,) * base.type.ndim), base.regs[1:])
        raise TypeError(f"{base.type} has no {node.attr}")

    def of_Tuple(self, node: ast.Tuple) -> Value:
        return self.tuple_of([self.of(e) for e in node.elts])

    def of_Subscript(self, node: ast.Subscript) -> Value:
        base = self.of(node.value)
        if isinstance(base.type, Tuple):
            return self.parts(base)[self.of(node.slice).const]
        if isinstance(base.type, Known):
            at = self.convert(self.of(node.slice), INT).regs[0]
            return self.load("float64", self.reg(
                f"getelementptr inbounds double, ptr {self.module.table(base.type.thing)}, i64 {at}"))  # fmt: skip
        if isinstance(node.slice, ast.Slice):
            return self.part(base, node.slice)
        array, indices = self.element(node, base)
        address = self.address(array, indices)
        if len(indices) < array.type.ndim:
            left = Array(array.type.item, array.type.ndim - len(indices))
            return Value(left, [address, *array.regs[1 + len(indices) :]])
        return self.load(array.type.item, address)

    def part(self, array: Value, cut: ast.Slice) -> Value:
        """From one index of the first dimension up to another."""
        first = self.convert(self.of(cut.lower), INT).regs[0] if cut.lower else "0"
        stop = self.index(array, 0, cut.upper) if cut.upper else array.regs[1]
        address = self.address(array, [first])
        return Value(array.type, [address, self.reg(f"sub nsw i64 {stop}, {first}"), *array.regs[2:]])

    def element(self, node: ast.Subscript, base: Value | None = None) -> tuple[Value, list[str]]:
        array = self.of(node.value) if base is None else base
        if not isinstance(array.type, Array):
            raise TypeError(f"{array.type} has no elements")
        places = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return array, [self.index(array, k, place) for k, place in enumerate(places)]

    def index(self, array: Value, k: int, node: ast.expr) -> str:
        value = self.of(node)
        if value.const is not None and value.const < 0:
            return self.reg(f"add nsw i64 {array.regs[1 + k]}, {value.const}")
        if value.type == FLOAT:
            raise TypeError("an index is a whole number")
        return self.convert(value, INT).regs[0]

    def of_UnaryOp(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            return Value(BOOL, [self.reg(f"xor i1 {self.truth(node.operand)}, true")])
        value = self.of(node.operand)
        if not isinstance(node.op, ast.USub):
            self.unknown(node.op)
        if value.const is not None:
            return number(-value.const)
        if value.type == FLOAT:
            return Value(FLOAT, [self.reg(f"fneg double {value.regs[0]}")])
        return Value(INT, [self.reg(f"sub i64 0, {self.convert(value, INT).regs[0]}")])

    def of_BinOp(self, node: ast.BinOp) -> Value:
        return self.binary(type(node.op), self.of(node.left), self.of(node.right))

    def binary(self, op: type[ast.operator], a: Value, b: Value) -> Value:
        if op is ast.Pow:
            if b.const == 2:
                return self.binary(ast.Mult, a, a)
            x, y = self.convert(a, FLOAT).regs[0], self.convert(b, FLOAT).regs[0]
            return Value(FLOAT, [self.reg(f"call double @llvm.pow.f64(double {x}, double {y})")])
        type_, x, y = self.alike(a, b, FLOAT if op is ast.Div else INT)
        if type_ == FLOAT:
            return Value(FLOAT, [self.reg(f"{FLOATS[op]} double {x}, {y}")])
        if op in INTS:
            return Value(type_, [self.reg(f"{INTS[op]} i64 {x}, {y}")])
        if op in (ast.LShift, ast.RShift):
            how = "shl" if op is ast.LShift else "lshr" if type_ == UINT else "ashr"
            return Value(type_, [self.reg(f"{how} i64 {x}, {y}")])
        if op not in (ast.FloorDiv, ast.Mod):
            self.unknown(op())
        if type_ == UINT:
            return Value(UINT, [self.reg(f"{'udiv' if op is ast.FloorDiv else 'urem'} i64 {x}, {y}")])
        # As Python rounds: down.
        rest = self.reg(f"srem i64 {x}, {y}")
        other = self.reg(f"icmp slt i64 {self.reg(f'xor i64 {rest}, {y}')}, 0")
        odd = self.reg(f"and i1 {self.reg(f'icmp ne i64 {rest}, 0')}, {other}")
        if op is ast.Mod:
            return self.pick(odd, INT, self.reg(f"add i64 {rest}, {y}"), rest)
        quotient = self.reg(f"sdiv i64 {x}, {y}")
        return self.pick(odd, INT, self.reg(f"sub i64 {quotient}, 1"), quotient)

    def of_Compare(self, node: ast.Compare) -> Value:
        left, found = self.of(node.left), ""
        for op, right in zip(node.ops, map(self.of, node.comparators), strict=True):
            type_, x, y = self.alike(left, right)
            if isinstance(op, ast.Eq | ast.NotEq):
                equal = isinstance(op, ast.Eq)
                how = ("fcmp oeq" if equal else "fcmp une") if type_ == FLOAT else f"icmp {'eq' if equal else 'ne'}"
            else:
                how = f"fcmp o{ORDERS[type(op)]}" if type_ == FLOAT else (
                    f"icmp {'s' if type_ == INT else 'u'}{ORDERS[type(op)]}")  # fmt: skip
            one = self.reg(f"{how} {LLVM[type_]} {x}, {y}")
            found = self.reg(f"and i1 {found}, {one}") if found else one
            left = right
        return Value(BOOL, [found])

    def of_BoolOp(self, node: ast.BoolOp) -> Value:
        slot, end = self.room("i1"), self.label()
        for k, one in enumerate(node.values):
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

    def of_Call(self, node: ast.Call) -> Value:
        if isinstance(node.func, ast.Attribute):
            base = self.of(node.func.value)
            if isinstance(base.type, Array):
                return functions.METHODS[node.func.attr](self, base)
        thing = self.of(node.func).type.thing
        given = [self.of(a) for a in node.args]
        named = {str(k.arg): self.of(k.value) for k in node.keywords}
        if hasattr(thing, "kernel"):
            return self.call(thing.kernel, given)
        return functions.FUNCTIONS[thing](self, *given, **named)

    def call(self, python: Any, given: list[Value]) -> Value:
        """Another kernel."""
        name, type_ = self.module.function(python, tuple(v.type for v in given))
        if isinstance(type_, Array):
            raise TypeError(f"{python.__name__} returns an array, which only Python can take")
        struct = "{ " + ", ".join(words(type_)) + " }"
        passed = ", ".join(f"{w} {r}" for v in given for w, r in zip(words(v.type), v.regs, strict=True))
        result = self.reg(f"call {struct} @{name}({passed})")
        return Value(type_, [self.reg(f"extractvalue {struct} {result}, {i}") for i in range(len(words(type_)))])


def python_value(thing: Any) -> Value:
    """A constant, or something that is known while compiling."""
    if isinstance(thing, bool | int | float):
        return number(thing)
    if isinstance(thing, np.generic) and thing.dtype.name in ("float64", "int64"):
        return number(thing.item())
    if isinstance(thing, np.uint64):
        return Value(UINT, [str(int(thing))], int(thing))
    return Value(Known(thing), [])

"""Translation of a Python function to LLVM IR: the statements of the kernels' subset of Python.

Knows: assignments, `if`, `for`, `while`, `return`, and which names have a value at which point. Does not know:
expressions (`expressions.py`), machine code, or what numpy's functions do (`functions.py`).

The subset: no objects except arrays and (named) tuples, no exceptions, no negative indices except constant ones. A
kernel may create arrays and named tuples; it returns numbers, arrays and plain tuples of them. Numbers are computed
with 64 bits, whatever the element type of an array, and behave as in numpy: integer sums wrap around, a float divided
by zero is infinite, and an integer beyond 2**53 is rounded where it meets a float. A variable has one type for all that
is assigned to it: an integer is a float as well if the variable holds a float anywhere. An array created in a kernel
lives until the kernel returns. Everything else that Python has is rejected with its file and line when the kernel is
first called; so are arguments whose memory cannot be written as Python would write it.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from functools import cache
from typing import Any

from octopipe.base.compile import functions
from octopipe.base.compile.expressions import Expressions
from octopipe.base.compile.text import Value
from octopipe.base.compile.types import INT, ITEMS, Array, Known, Tuple, Type, words

RETURNED = "$returned"


@cache
def _parsed(file: str) -> dict[tuple[str, int], ast.FunctionDef]:
    """Parse a file; return its functions by name and first line (that of the first decorator, if any)."""
    found = {}
    for node in ast.walk(ast.parse("".join(linecache.getlines(file)))):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name, first] = node
    return found


def _merged(ways: list[set[str] | None]) -> set[str] | None:
    """Return the names with a value on all reachable paths (an unreachable one is None); None if none is."""
    open_ones = [way for way in ways if way is not None]
    return set.intersection(*open_ones) if open_ones else None


class _Loop:
    """The labels that `continue` and `break` jump to, and the names that have a value at each such jump."""

    def __init__(self, again: str, end: str) -> None:
        self.again, self.end = again, end
        self.continued: list[set[str] | None] = []
        self.broken: list[set[str] | None] = []


class Body(Expressions):
    """The function that is being translated."""

    def __init__(self, module: Any, python: Any, types: dict[str, Type]) -> None:
        """`module` provides the other functions (`module.function`) and the tables of constants (`module.table`)."""
        code = python.__code__
        super().__init__(types, module, code.co_filename)
        self.python = python
        self.tree = self.source(code)
        cells = python.__closure__ or ()
        module.closed = module.closed or bool(cells)
        self.outer = {n: c.cell_contents for n, c in zip(code.co_freevars, cells, strict=True)}
        self.locals = frozenset(code.co_varnames + code.co_cellvars)
        self.defined = set()
        self.loops: list[_Loop] = []
        self.returns: set[bool] = set()
        """For the return statements seen so far: True if one has a value, False if one has none."""
        self.text = ""

    def write(self, name: str, types: tuple[Type, ...]) -> bool:
        """Translate the function; return True if a variable's type was widened, so that it must be translated again."""
        given, k = ["ptr noalias nocapture %err"], 0
        names = self.parameters(name, len(types))
        for parameter, type_ in zip(names, types, strict=True):
            regs = []
            for word in words(type_):
                given.append(f"{word} %a{k}")
                regs.append(f"%a{k}")
                k += 1
            self.put(ast.Name(parameter), Value(type_, regs))
        self.block(self.tree.body)
        if True in self.returns and (False in self.returns or self.defined is not None):
            raise TypeError(f"{self.file}:{self.tree.lineno}: a kernel cannot do this: not every path returns a value")
        self.begin("exit")
        returned = self.types.setdefault(RETURNED, Tuple(()))
        result = self.variable(RETURNED) if RETURNED in self.slots else Value(returned, [])
        regs = self.owned(result)
        self.free_made()
        struct = "{ " + ", ".join(words(returned)) + " }"
        last = "undef"
        for i, (word, reg) in enumerate(zip(words(returned), regs, strict=True)):
            last = self.reg(f"insertvalue {struct} {last}, {word} {reg}, {i}")
        self.line(f"ret {struct} {last}")
        if self.may_fail:
            self.lines.append("fail:")
            self.free_made()
            self.line(f"ret {struct} zeroinitializer")
        head = f"define internal {struct} @{name}({', '.join(given)}) {{"
        self.text = "\n".join([head, "entry:", *self.entry, *self.lines, "}"])
        return self.changed

    def source(self, code: Any) -> ast.FunctionDef:
        found = _parsed(code.co_filename).get((code.co_name, code.co_firstlineno))
        if found is None or code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            why = "only a function that a file defines with `def`, and that yields nothing, can be compiled"
            raise TypeError(f"{code.co_filename}:{code.co_firstlineno}: a kernel cannot do this: {why}")
        return found

    def parameters(self, name: str, count: int) -> list[str]:
        told = self.tree.args
        if told.posonlyargs or told.kwonlyargs or told.vararg or told.kwarg or told.defaults:
            raise TypeError(
                f"{self.file}:{self.tree.lineno}: a kernel cannot do this: "
                "its parameters must be plain names without defaults"
            )
        if len(told.args) != count:
            raise TypeError(f"{self.python.__name__} takes {len(told.args)} arguments, not {count}")
        return [a.arg for a in told.args]

    def owned(self, result: Value) -> list[str]:
        """Return the registers of a result, with its arrays copied: they may be views of other arrays or arguments."""
        regs: list[str] = []
        for part in self.parts(result) if isinstance(result.type, Tuple) else [result]:
            if isinstance(part.type, Tuple):
                regs += self.owned(part)
            elif isinstance(part.type, Array):
                nbytes = self.reg(f"mul i64 {self.size(part)}, {ITEMS[part.type.item][2]}")
                new = self.allocated(nbytes)
                self.line(f"call void @llvm.memmove.p0.p0.i64(ptr {new}, ptr {part.regs[0]}, i64 {nbytes}, i1 false)")
                regs += [new, *part.regs[1:]]
            else:
                regs += part.regs
        return regs

    # -- statements ------------------------------------------------------------------------------------

    def block(self, statements: list[ast.stmt]) -> None:
        for node in statements:
            if self.defined is None:  # unreachable code
                return
            self.at_line = node.lineno
            try:
                getattr(self, f"do_{type(node).__name__}", self.unknown)(node)
            except (
                TypeError,
                AttributeError,
                KeyError,
                IndexError,
                ValueError,
                OverflowError,
                RecursionError,
            ) as error:
                text = str(error)
                where = f"{self.file}:{node.lineno}: a kernel cannot do this: "
                raise TypeError(text if ".py:" in text else where + text) from error

    def do_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # not a docstring
            self.of(node.value)

    def do_Pass(self, node: ast.Pass) -> None:
        pass

    def do_Continue(self, node: ast.Continue) -> None:
        self.loops[-1].continued.append(self.defined)
        self.leave(f"br label %{self.loops[-1].again}")
        self.defined = None

    def do_Break(self, node: ast.Break) -> None:
        self.loops[-1].broken.append(self.defined)
        self.leave(f"br label %{self.loops[-1].end}")
        self.defined = None

    def do_Return(self, node: ast.Return) -> None:
        value = None if node.value is None else self.of(node.value)
        nothing = value is None or value.type == Known(None)
        self.returns.add(not nothing)
        if value is not None and not nothing:
            self.assign(RETURNED, self.returnable(value))
        self.leave("br label %exit")
        self.defined = None

    def returnable(self, value: Value) -> Value:
        """Return this value as numbers, arrays and plain tuples of them; raise TypeError for anything else."""
        if not isinstance(value.type, Known | Tuple):
            return value
        if isinstance(value.type, Tuple) and value.type.names:
            raise TypeError("a kernel cannot return a named tuple; return its elements")
        parts = self.parts(value) if isinstance(getattr(value.type, "thing", ()), tuple) else []
        if not parts:
            raise TypeError("only numbers, arrays and tuples of them can be returned, and no empty tuple")
        return self.tuple_of([self.returnable(part) for part in parts])

    def do_Assign(self, node: ast.Assign) -> None:
        value = self.of(node.value)
        for target in node.targets:
            self.put(target, value)

    def do_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.put(node.target, self.of(node.value))

    def do_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Subscript):
            array, indices = self.element(node.target)
            if len(indices) < array.type.ndim:
                raise TypeError("a whole row cannot be assigned; assign its elements")
            self.note_store(array)
            address = self.address(array, indices)
            now = self.load(array.type.item, address)
            self.store(array.type.item, address, self.binary(type(node.op), now, self.of(node.value)))
        else:
            self.put(node.target, self.binary(type(node.op), self.of(node.target), self.of(node.value)))

    def put(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self.assign(target.id, value)
            assert self.defined is not None
            self.defined.add(target.id)
        elif isinstance(target, ast.Tuple):
            for one, part in zip(target.elts, self.parts(value), strict=True):
                self.put(one, part)
        elif isinstance(target, ast.Subscript):
            array = self.of(target.value)
            if not isinstance(array.type, Array):
                raise TypeError(f"{array.type} has no elements to be set")
            self.note_store(array)
            if isinstance(target.slice, ast.Slice) or len(getattr(target.slice, "elts", "1")) < array.type.ndim:
                self.put_part(self.of_Subscript(target, array), value)
                return
            array, indices = self.element(target, array)
            self.store(array.type.item, self.address(array, indices), value)
        else:
            self.unknown(target)

    def put_part(self, part: Value, value: Value) -> None:
        """Assign to a slice or a row: a number fills all its elements, an array must have the same type and shape."""
        if isinstance(value.type, Array):
            if (value.type.item, value.type.ndim) != (part.type.item, part.type.ndim):
                raise TypeError(f"{value.type} into {part.type}")
            for have, want in zip(value.regs[1:], part.regs[1:], strict=True):
                if have != want:
                    self.fail_if(self.reg(f"icmp ne i64 {have}, {want}"), ValueError, "arrays of unequal shape")
            self.move(part, value)
        else:
            self.fill(part, self.convert(value, functions.read_as(part)))

    def do_If(self, node: ast.If) -> None:
        yes, no, end = self.label(), self.label(), self.label()
        self.branch(self.truth(node.test), yes, no)
        before = self.defined
        assert before is not None
        self.defined = set(before)
        self.block(node.body)
        self.line(f"br label %{end}")
        self.lines.append(f"{no}:")
        after, self.defined = self.defined, set(before)
        self.block(node.orelse)
        self.defined = _merged([after, self.defined])
        self.begin(end)

    def do_While(self, node: ast.While) -> None:
        if node.orelse:
            raise TypeError("a loop cannot have an else branch")
        test, body, end = self.label(), self.label(), self.label()
        self.begin(test)
        self.loops.append(_Loop(test, end))  # the condition is evaluated many times, too
        condition = self.truth(node.test)
        self.loops.pop()
        self.branch(condition, body, end)
        before = self.defined
        loop = self.inside(node.body, test, end)
        for_ever = isinstance(node.test, ast.Constant) and bool(node.test.value)
        self.defined = _merged(loop.broken if for_ever else [before, *loop.broken])
        self.line(f"br label %{test}")
        self.lines.append(f"{end}:")

    def inside(self, statements: list[ast.stmt], again: str, end: str) -> _Loop:
        """Translate a loop's body. Afterwards `self.defined` has the names with a value at the end of the body."""
        loop = _Loop(again, end)
        self.loops.append(loop)
        assert self.defined is not None
        self.defined = set(self.defined)
        self.block(statements)
        self.loops.pop()
        return loop

    def do_For(self, node: ast.For) -> None:
        if node.orelse:
            raise TypeError("a loop cannot have an else branch")
        if isinstance(node.iter, ast.Tuple):
            self.for_each(node, self.parts(self.of(node.iter)))
            return
        if not isinstance(node.iter, ast.Call) or self.of(node.iter.func).type != Known(range):
            raise TypeError("a loop must iterate over a range or a tuple")
        if node.iter.keywords or not 1 <= len(node.iter.args) <= 3:
            raise TypeError("range takes one to three arguments")
        given = [self.of(a) for a in node.iter.args]
        if any(value.type != INT for value in given):
            raise TypeError("the arguments of range must be integers with a sign")
        step = given[2].const if len(given) > 2 else 1
        if not isinstance(step, int) or isinstance(step, bool) or step == 0:
            raise TypeError("the step of a range must be a constant other than 0")
        first, stop = given[0].regs[0] if len(given) > 1 else "0", given[min(1, len(given) - 1)].regs[0]
        at, end = self.room("i64"), self.label()
        self.line(f"store i64 {first}, ptr {at}")
        test, body, following = self.label(), self.label(), self.label()
        self.begin(test)
        now = self.reg(f"load i64, ptr {at}")
        self.branch(self.reg(f"icmp {'slt' if step > 0 else 'sgt'} i64 {now}, {stop}"), body, end)
        before = self.defined
        assert before is not None
        self.defined = set(before)
        self.put(node.target, Value(INT, [now]))
        self.inside(node.body, following, end)
        self.defined = before  # the body may run zero times
        self.begin(following)
        if abs(step) > 1:  # the number after the last one may have more than 64 bits
            left = self.reg(f"sub i64 {stop}, {now}" if step > 0 else f"sub i64 {now}, {stop}")
            self.branch(self.reg(f"icmp ugt i64 {left}, {abs(step)}"), self.label(), end)
        self.line(f"store i64 {self.reg(f'add nsw i64 {now}, {step}')}, ptr {at}")
        self.line(f"br label %{test}")
        self.lines.append(f"{end}:")

    def for_each(self, node: ast.For, values: list[Value]) -> None:
        """Unroll a loop over a tuple."""
        end, broken = self.label(), list[set[str] | None]()
        for value in values:
            if self.defined is None:
                break
            self.put(node.target, value)
            following = self.label()
            loop = self.inside(node.body, following, end)
            self.defined = _merged([self.defined, *loop.continued])
            broken += loop.broken
            self.begin(following)
        self.defined = _merged([self.defined, *broken])
        self.begin(end)

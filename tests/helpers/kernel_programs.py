"""Random programs of the kernels' language, and whether machine code gives what CPython gives for them.

A program is a function of whole numbers, real numbers and arrays, drawn from all statements and operators of the
language. Numbers stay small, so that Python's unbounded ones and 64 bits are the same; what both must refuse alike (a
division by zero) is compared, too.
"""

from __future__ import annotations

import linecache
import random
import warnings
from typing import Any, NamedTuple

import numpy as np

from octopipe.base.compile import njit

SIZE, ROWS, WIDTH = 5, 3, 4
TABLE, COUNTS = (0.5, -1.25, 3.0), (7, -2, 11, 0)


@njit
def helped(a, x):
    """Another kernel: a number of two."""
    if a % 3 == 0:
        return x * 0.5 - a
    return x + a


@njit
def filled(values, a, x):
    """Another kernel that writes into an array."""
    for i in range(values.size):
        if i % 2 == a % 2:
            values[i] = x - i
    return a + values.size


class Program:
    """One random program."""

    def __init__(self, seed: int) -> None:
        self.lot = random.Random(seed)
        self.lines: list[str] = []
        self.loops = self.names = 0
        self.counters: list[str] = []

    def whole(self, depth: int = 2) -> str:
        """An expression of whole numbers."""
        lot = self.lot
        if depth == 0 or lot.random() < 0.25:
            leaf = lot.randrange(8)
            if leaf < 3:
                return lot.choice(["a", "b", "i0", "i1", "i2", *self.counters])
            if leaf == 3:
                return str(lot.randint(-9, 9))
            if leaf == 4:
                return f"int(g[{self.place(depth)}])"
            if leaf == 5:
                return lot.choice(["f.size", "m.shape[1]", "pair.n", "m.size", "f[1:3].size", "m.shape[0]"])
            if leaf == 6:
                return f"COUNTS[({self.whole(0)}) % 4]" if lot.random() < 0.5 else f"COUNTS[{lot.randint(-4, 3)}]"
            return f"int(n[{self.place(depth)}])"
        one, other = self.whole(depth - 1), self.whole(depth - 1)
        kind = lot.randrange(10)
        if kind < 4:
            return f"({one} {lot.choice(['+', '-', '*', '&', '|', '^'])} {other})"
        if kind == 4:
            return f"({one} {lot.choice(['//', '%'])} {other})"
        if kind == 5:
            return f"({one} {lot.choice(['//', '%'])} {lot.choice([-3, -1, 1, 2, 7])})"
        if kind == 6:
            return f"({one} {lot.choice(['<<', '>>'])} {lot.randint(0, 4)})"
        if kind == 7:
            return f"{lot.choice(['min', 'max'])}({one}, {other})"
        if kind == 8:
            return lot.choice([f"abs({one})", f"-({one})", f"int({self.real(depth - 1)})", f"int({self.test(1)})"])
        return f"({one} if {self.test(depth - 1)} else {other})"

    def real(self, depth: int = 2) -> str:
        """An expression of real numbers."""
        lot = self.lot
        if depth == 0 or lot.random() < 0.25:
            leaf = lot.randrange(7)
            if leaf < 3:
                return lot.choice(["x", "y", "x0", "x1"])
            if leaf == 3:
                return repr(round(lot.uniform(-4, 4), 2))
            if leaf == 4:
                return f"float(f[{self.place(depth)}])"
            if leaf == 5:
                return f"float(m[{self.place(depth, ROWS)}, {self.place(depth, WIDTH)}])"
            return f"TABLE[{lot.randint(-3, 2)}]" if lot.random() < 0.5 else f"TABLE[({self.whole(0)}) % 3]"
        one, other = self.real(depth - 1), self.real(depth - 1)
        kind = lot.randrange(8)
        if kind < 3:
            return f"({one} {lot.choice(['+', '-', '*'])} {other})"
        if kind == 3:
            return f"({one} / (abs({other}) + 1.0))"
        if kind == 4:
            return f"{lot.choice(['min', 'max'])}({one}, {self.whole(depth - 1)})"
        if kind == 5:
            return lot.choice(
                [f"np.floor({one})", f"np.ceil({one})", f"np.sqrt(abs({one}))", f"abs({one})", f"-({one})",
                 f"float({self.whole(depth - 1)})", f"({one}) ** 2", f"helped({self.whole(1)}, {one})"]
            )  # fmt: skip
        if kind == 6:
            return f"(({self.whole(depth - 1)}) / {lot.choice([3, 7, -2])})"
        return f"({one} if {self.test(depth - 1)} else {other})"

    def test(self, depth: int = 1) -> str:
        """An expression of truth values."""
        lot = self.lot
        kind = lot.randrange(7)
        orders = ["<", "<=", ">", ">=", "==", "!="]
        if kind < 2 or depth == 0:
            return f"({self.whole(1)} {lot.choice(orders)} {self.whole(1)})"
        if kind == 2:
            return f"({self.real(1)} {lot.choice(orders[:4])} {self.real(1)})"
        if kind == 3:
            return f"({self.whole(1)} {lot.choice(orders)} {self.whole(1)} {lot.choice(orders)} {self.whole(1)})"
        if kind == 4:
            return f"({self.test(depth - 1)} {lot.choice(['and', 'or'])} {self.test(depth - 1)})"
        if kind == 5:
            return f"(not {self.test(depth - 1)})"
        return lot.choice(["t0", f"bool({self.whole(1)})", f"bool(k[{lot.randint(-2, 1)}])"])

    def condition(self) -> str:
        """What stands behind `if`: numbers may, too."""
        if self.lot.random() < 0.2:
            return f"{self.whole(1)} {self.lot.choice(['and', 'or'])} {self.test(1)}"
        return self.whole(1) if self.lot.random() < 0.1 else self.test(2)

    def place(self, depth: int, size: int = SIZE) -> str:
        if self.lot.random() < 0.4:
            return str(self.lot.randint(-size, size - 1))
        return f"({self.whole(min(depth, 1))}) % {size}"

    def border(self) -> str:
        return self.lot.choice(["", str(self.lot.randint(-7, 7)), f"({self.whole(1)}) % 9", "i0", "-2"])

    def statement(self, depth: int) -> None:
        lot, pad = self.lot, "    " * depth
        kind = lot.randrange(20)
        add = self.lines.append
        if kind < 3:
            add(f"{pad}{lot.choice(['i0', 'i1', 'i2'])} = ({self.whole(3)}) % {lot.choice([1009, 97, -13])}")
        elif kind < 5:
            add(f"{pad}{lot.choice(['x0', 'x1'])} = max(min({self.real(3)}, 1e6), -1e6)")
        elif kind == 5:
            add(f"{pad}t0 = {self.test(2)}")
        elif kind == 6:
            add(f"{pad}g[{self.place(1)}] {lot.choice(['', '+', '-'])}= ({self.whole(2)}) % 1000")
        elif kind == 7:
            add(f"{pad}f[{self.place(1)}] {lot.choice(['', '+', '-'])}= max(min({self.real(2)}, 1e6), -1e6)")
        elif kind == 8:
            row, column = self.place(1, ROWS), self.place(1, WIDTH)
            add(f"{pad}m[{row}, {column}] = max(min({self.real(2)}, 1e6), -1e6)")
        elif kind == 9:
            add(f"{pad}{lot.choice(['f', 'g'])}[{self.border()}:{self.border()}] = {self.whole(1)} % 50")
        elif kind == 10:
            add(f"{pad}i1 = f[{self.border()}:{self.border()}].size + m[{self.border()}:{self.border()}].size")
        elif kind == 11:
            add(f"{pad}row = m[{self.place(1, ROWS)}]")
            add(f"{pad}row[{self.place(1, WIDTH)}] = max(min({self.real(1)}, 1e6), -1e6)")
            add(f"{pad}x0 = float(row.max()) + x0 * 0.5")
        elif kind == 12:
            add(f"{pad}m[{lot.randint(0, 2)}] = m[{lot.randint(-3, 2)}]")
        elif kind == 13:
            first = lot.randint(0, 2)
            second, length = lot.randint(0, 2), lot.randint(2, 3)
            add(f"{pad}f[{first}:{first + length}] = f[{second}:{second + length}]")
        elif kind == 14:
            add(f"{pad}i2 = filled({lot.choice(['f', 'm[1]', 'f[1:4]'])}, {self.whole(1)}, {self.real(0)}) % 91")
        elif kind == 15:
            add(f"{pad}i0, i1 = i1 + {lot.randint(0, 3)}, (i0 - {self.whole(1)}) % 77")
        elif kind == 16 and self.loops:
            add(f"{pad}if {self.test(1)}:")
            add(f"{pad}    {lot.choice(['continue', 'break'])}")
        elif kind < 19 and depth < 4:
            self.nested(depth)
        else:
            add(f"{pad}k[{lot.randint(-2, 1)}], n[{self.place(0)}] = {self.test(1)}, ({self.whole(1)}) % 100")

    def nested(self, depth: int) -> None:
        lot, pad = self.lot, "    " * depth
        kind = lot.randrange(5)
        if kind < 2:
            self.lines.append(f"{pad}if {self.condition()}:")
            self.body(depth + 1)
            if lot.random() < 0.3:
                self.lines.append(f"{pad}elif {self.condition()}:")
                self.body(depth + 1)
            if lot.random() < 0.6:
                self.lines.append(f"{pad}else:")
                self.body(depth + 1)
            return
        if self.loops >= 2:
            return
        self.loops += 1
        self.names += 1
        name = f"c{self.names}"
        if kind == 2:
            ends = [f"{lot.randint(0, 4)}", f"({self.whole(1)}) % 5", f"{lot.randint(-2, 2)}, {lot.randint(-2, 5)}",
                    f"{lot.randint(0, 5)}, {lot.randint(-3, 3)}, {lot.choice([-2, -1, 2])}"]  # fmt: skip
            self.lines.append(f"{pad}for {name} in range({lot.choice(ends)}):")
        elif kind == 3:
            self.lines.append(f"{pad}for {name} in ({self.whole(1)}, {lot.randint(-5, 5)}, i0):")
        else:
            self.lines.append(f"{pad}{name} = {lot.randint(1, 4)}")
            self.lines.append(f"{pad}while {name} > 0 and {self.test(1)}:")
            self.lines.append(f"{pad}    {name} -= 1")
        self.counters.append(name)
        self.body(depth + 1)
        self.counters.pop()
        self.loops -= 1

    def body(self, depth: int) -> None:
        for _ in range(self.lot.randint(1, 3)):
            self.statement(depth)
        self.lines.append("    " * depth + "pass")

    def text(self) -> str:
        self.lines = [
            "def program(a, b, x, y, f, g, m, k, n, pair):",
            "    i0, i1, i2 = 1, a, 3",
            "    x0, x1 = 0.5, y",
        ]
        self.lines += ["    t0 = a > b", "    made = np.zeros((2, f.size))", "    spare = f.copy()"]
        for _ in range(self.lot.randint(4, 9)):
            self.statement(1)
        self.lines += ["    made[1] = spare", "    made[0, 1] = x0", "    pair.v[0] = x1"]
        self.lines.append("    return i0, i1, i2, x0, x1, t0, made, f[1:3]")
        return "\n".join(self.lines) + "\n"


class Both(NamedTuple):
    v: Any
    n: int


def made(text: str, name: str, *, plain: bool = False) -> Any:
    """The program as a function whose source can be read; plain: the kernels it calls are run by Python, too."""
    file = f"{name}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    space: dict[str, Any] = {"np": np, "TABLE": TABLE, "COUNTS": COUNTS, "__name__": __name__}
    space |= {kernel.__name__: kernel.python if plain else kernel for kernel in (helped, filled)}
    exec(compile(text, file, "exec"), space)
    return space["program"]


def arguments(lot: random.Random) -> tuple[Any, ...]:
    dice = np.random.default_rng(lot.randrange(1 << 30))
    return (
        lot.randint(-9, 9), lot.randint(-9, 9), lot.uniform(-5, 5), lot.uniform(-5, 5), dice.uniform(-9, 9, SIZE),
        dice.integers(-99, 99, SIZE), dice.uniform(-9, 9, (ROWS, WIDTH)), dice.random(2) < 0.5,
        dice.integers(-99, 99, SIZE).astype(np.int32), Both(dice.random(2), lot.randint(0, 5)),
    )  # fmt: skip


def copied(given: Any) -> Any:
    if isinstance(given, np.ndarray):
        return given.copy()
    if isinstance(given, tuple):
        parts = [copied(part) for part in given]
        return type(given)(*parts) if hasattr(given, "_fields") else tuple(parts)
    return given


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True))
    return bool(one == other) or (one != one and other != other)


def outcome(function: Any, given: tuple[Any, ...]) -> tuple[Any, Any]:
    """What it returns (or the name of its error) and what it made of its arguments."""
    mine = copied(given)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*mine), mine
    except (ZeroDivisionError, ValueError) as error:
        return type(error).__name__, mine


def disagreement(seed: int) -> str:
    """A program for which the two differ, with what they give; empty where they agree."""
    text = Program(seed).text()
    function = made(text, f"program_{seed}", plain=True)
    kernel, lot = njit(made(text, f"program_{seed}")), random.Random(seed)
    for _ in range(3):
        given = arguments(lot)
        theirs, ours = outcome(function, given), outcome(kernel, given)
        if not same(theirs, ours):
            return f"seed {seed}\n{text}\ngiven {given}\nCPython {theirs}\nkernel  {ours}"
    return ""

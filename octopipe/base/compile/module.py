"""A kernel and all functions that it calls, as the text of one LLVM module.

Knows: which functions were translated for which types, and how Python calls the first of them. Does not know: syntax.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from octopipe.base.compile.language import RETURNED, Body
from octopipe.base.compile.text import number
from octopipe.base.compile.types import ITEMS, Type, numbered, words

WIDE = {"i1": "i64"}
"""The types that are widened when they are passed in a block of words."""


@dataclass(slots=True)
class Function:
    """A translated function. While it is being translated, `returned` is None."""

    name: str
    """Its name in the module's text."""
    returned: Type = None
    may_fail: bool = False
    stores: dict[int, str] = field(default_factory=dict)
    """Where it, or a function that it calls, writes into an array among its arguments, by the array's number."""


class Module:
    """A kernel and all functions that it calls, each translated once for every combination of types."""

    def __init__(self, checked: bool = False) -> None:
        """`checked`: whether to emit a bounds check for every index."""
        self.checked = checked
        self.functions: dict[Any, Function] = {}
        self.texts: list[str] = []
        self.tables: dict[str, tuple[str, str]] = {}
        self.sites: dict[tuple[str, str, int, str], int] = {}
        """The possible errors (kind, file, line, message), and the numbers by which the kernel reports them."""
        self.constants: dict[tuple[str, str], str] = {}
        """The values of global constants that the code contains, by module and name."""
        self.closed = False
        """Whether the code contains values of a function around a kernel, which no name leads to."""

    def site(self, *what: Any) -> int:
        """Return the number by which a kernel reports this error; 0 means no error."""
        return self.sites.setdefault(what, len(self.sites) + 1)

    def function(self, python: Any, types: Iterable[Type]) -> Function:
        """Translate a function for these argument types, if it has not been yet."""
        at = count()
        taken = tuple(numbered(type_, lambda: frozenset([next(at)])) for type_ in types)
        key = python, taken
        if key not in self.functions:
            readable = "".join(c if c.isascii() and c.isidentifier() else "_" for c in python.__name__)
            made = self.functions[key] = Function(f"{readable}.{len(self.functions)}")
            known: dict[str, Type] = {}
            while (body := Body(self, python, known)).write(made.name, taken):
                pass
            made.returned, made.may_fail = numbered(known[RETURNED], frozenset), body.may_fail
            made.stores = body.stores
            self.texts.append(body.text)
        return self.functions[key]

    def table(self, values: tuple[Any, ...]) -> tuple[str, str]:
        """Store a table of constants that is indexed by a variable; return its item type and its LLVM name."""
        item = "float64" if isinstance(values[0], float) else "int64"
        word = ITEMS[item][0]
        items = ", ".join(f"{word} {number(v).regs[0]}" for v in values)
        if items not in self.tables:
            name = f"@table.{len(self.tables)}"
            self.texts.append(f"{name} = internal constant [{len(values)} x {word}] [{items}]")
            self.tables[items] = item, name
        return self.tables[items]


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """A kernel as LLVM's text, and what its caller must know."""

    text: str
    returned: Type
    sites: list[list[Any]]
    """The possible errors by number, from 1: kind, file, line, message."""
    written: list[tuple[int, str]]
    """The numbers of the arrays among the arguments that may be written, each with the place of a store."""
    constants: list[list[str]] | None
    """The global constants that the text contains (module, name, value); None if it contains others as well."""


def translated(python: Any, types: tuple[Type, ...], checked: bool) -> Translated:
    """Translate a function and all that it calls to LLVM IR, with an `entry` function that takes one block of words (an
    error number, the arguments, the results)."""
    module = Module(checked)
    made = module.function(python, types)
    name, returned = made.name, made.returned
    passed, results = [w for t in types for w in words(t)], words(returned)
    lines, given = ["  store i64 0, ptr %block"], ["ptr %block"]
    for k, word in enumerate(passed):
        lines.append(f"  %p{k} = getelementptr i64, ptr %block, i64 {1 + k}")
        lines.append(f"  %w{k} = load {WIDE.get(word, word)}, ptr %p{k}")
        if word == "i1":
            lines.append(f"  %t{k} = trunc i64 %w{k} to i1")
        given.append(f"{word} %{'t' if word == 'i1' else 'w'}{k}")
    struct = "{ " + ", ".join(results) + " }"
    lines.append(f"  %result = call {struct} @{name}({', '.join(given)})")
    for i, word in enumerate(results):
        lines.append(f"  %r{i} = extractvalue {struct} %result, {i}")
        if word == "i1":
            lines.append(f"  %z{i} = zext i1 %r{i} to i64")
        lines.append(f"  %q{i} = getelementptr i64, ptr %block, i64 {1 + len(passed) + i}")
        lines.append(f"  store {WIDE.get(word, word)} %{'z' if word == 'i1' else 'r'}{i}, ptr %q{i}")
    entry = ["define void @entry(ptr %block) {", *lines, "  ret void", "}"]
    return Translated(
        text="\n".join([*module.texts, *entry]),
        returned=returned,
        sites=[list(what) for what in module.sites],
        written=sorted(made.stores.items()),
        constants=None if module.closed else [[*where, value] for where, value in module.constants.items()],
    )

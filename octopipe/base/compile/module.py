"""A kernel and all functions that it calls, as the text of one LLVM module.

Knows: which functions were translated for which types, and how Python calls the first of them. Does not know: syntax.
"""

from __future__ import annotations

from typing import Any

from octopipe.base.compile.language import RETURNED, Body
from octopipe.base.compile.text import number
from octopipe.base.compile.types import ITEMS, Type, words

WIDE = {"i1": "i64"}
"""The types that are widened when they are passed in a block of words."""


class Module:
    """A kernel and all functions that it calls, each translated once for every combination of types."""

    def __init__(self, checked: bool = False) -> None:
        """`checked`: whether to emit a bounds check for every index."""
        self.checked = checked
        self.written: dict[Any, tuple[str, Type, bool]] = {}
        self.texts: list[str] = []
        self.tables: dict[tuple[Any, ...], tuple[str, str]] = {}
        self.sites: dict[tuple[str, str, int, str], int] = {}
        """The possible errors (kind, file, line, message), and the numbers by which the kernel reports them."""

    def site(self, *what: Any) -> int:
        """Return the number by which a kernel reports this error; 0 means no error."""
        return self.sites.setdefault(what, len(self.sites) + 1)

    def function(self, python: Any, types: tuple[Type, ...]) -> tuple[str, Type, bool]:
        """Translate a function for these argument types, if it has not been yet; return its LLVM name, its return type
        and whether it may fail."""
        key = python, types
        if key not in self.written:
            name = f"{python.__name__}.{len(self.written)}"
            self.written[key] = name, None, False
            known: dict[str, Type] = {}
            while (body := Body(self, python, known)).write(name, types):
                pass
            self.written[key] = name, known[RETURNED], body.may_fail
            self.texts.append(body.text)
        return self.written[key]

    def table(self, values: tuple[Any, ...]) -> tuple[str, str]:
        """Store a table of constants that is indexed by a variable; return its item type and its LLVM name."""
        key = tuple((type(v), v) for v in values)
        if key not in self.tables:
            item = "float64" if isinstance(values[0], float) else "int64"
            name, word = f"@table.{len(self.tables)}", ITEMS[item][0]
            items = ", ".join(f"{word} {number(v).regs[0]}" for v in values)
            self.texts.append(f"{name} = internal constant [{len(values)} x {word}] [{items}]")
            self.tables[key] = item, name
        return self.tables[key]


def translated(python: Any, types: tuple[Type, ...], checked: bool) -> tuple[str, Type, list[list[Any]]]:
    """Translate a function and all that it calls to LLVM IR, with an `entry` function that takes one block of words (an
    error number, the arguments, the results). Returns the text, the return type, and the possible errors by number."""
    module = Module(checked)
    name, returned, _ = module.function(python, types)
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
    return "\n".join([*module.texts, *entry]), returned, [list(what) for what in module.sites]

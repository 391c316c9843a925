"""A kernel and all that it calls as one text in LLVM's language.

Knows: which functions were translated for which types, and how Python calls the first of them. Does not know: syntax.
"""

from __future__ import annotations

from typing import Any

from octopipe.base.compile.language import RETURNED, Body
from octopipe.base.compile.text import number
from octopipe.base.compile.types import ITEMS, Type, words

WIDE = {"i1": "i64"}
"""How a word is passed in a block."""


class Module:
    """A kernel and all that it calls, each written once for every combination of types."""

    def __init__(self, checked: bool = False) -> None:
        """`checked`: whether every index is looked at."""
        self.checked = checked
        self.written: dict[Any, tuple[str, Type, bool]] = {}
        self.texts: list[str] = []
        self.tables: dict[tuple[Any, ...], tuple[str, str]] = {}
        self.sites: dict[tuple[str, str, int, str], int] = {}
        """What can go wrong where (kind of error, file, line, words), and its number."""

    def site(self, *what: Any) -> int:
        """The number that a kernel returns when this goes wrong; 0 means that nothing did."""
        return self.sites.setdefault(what, len(self.sites) + 1)

    def function(self, python: Any, types: tuple[Type, ...]) -> tuple[str, Type, bool]:
        """The name and the return type of a function for arguments of these types, and whether it may fail."""
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
        """Constants that are looked up by a variable: what they are stored as, and where."""
        key = tuple((type(v), v) for v in values)
        if key not in self.tables:
            item = "float64" if isinstance(values[0], float) else "int64"
            name, word = f"@table.{len(self.tables)}", ITEMS[item][0]
            items = ", ".join(f"{word} {number(v).regs[0]}" for v in values)
            self.texts.append(f"{name} = internal constant [{len(values)} x {word}] [{items}]")
            self.tables[key] = item, name
        return self.tables[key]


def translated(python: Any, types: tuple[Type, ...], checked: bool) -> tuple[str, Type, list[list[Any]]]:
    """A function and all that it calls in LLVM's language, behind an `entry` that takes one block of words: the number
    of what went wrong, the arguments', then the results'; the type it returns; and what can go wrong, by number."""
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

"""A kernel and all that it calls as one text in LLVM's language.

Knows: which functions were translated for which types, and how Python calls the first of them. Does not know: syntax.
"""

from __future__ import annotations

from typing import Any

from octopipe.base.compile.language import RETURNED, Body
from octopipe.base.compile.text import number
from octopipe.base.compile.types import Type, words

WIDE = {"i1": "i64"}
"""How a word is passed in a block."""


class Module:
    """A kernel and all that it calls, each written once for every combination of types."""

    def __init__(self) -> None:
        self.written: dict[Any, tuple[str, Type]] = {}
        self.texts: list[str] = []
        self.tables: dict[tuple[Any, ...], str] = {}

    def function(self, python: Any, types: tuple[Type, ...]) -> tuple[str, Type]:
        """The name and the return type of a function for arguments of these types."""
        key = python, types
        if key not in self.written:
            name = f"{python.__name__}.{len(self.written)}"
            self.written[key] = name, None
            known: dict[str, Type] = {}
            while (body := Body(self, python, known)).write(name, types):
                pass
            self.written[key] = name, known[RETURNED]
            self.texts.append(body.text)
        return self.written[key]

    def table(self, values: tuple[Any, ...]) -> str:
        """Constants that are looked up by a variable."""
        if values not in self.tables:
            name = f"@table.{len(self.tables)}"
            items = ", ".join(f"double {number(float(v)).regs[0]}" for v in values)
            self.texts.append(f"{name} = internal constant [{len(values)} x double] [{items}]")
            self.tables[values] = name
        return self.tables[values]


def translated(python: Any, types: tuple[Type, ...]) -> tuple[str, Type]:
    """A function and all that it calls in LLVM's language, behind an `entry` that takes one block of words: the
    arguments', then the results'; and the type it returns."""
    module = Module()
    name, returned = module.function(python, types)
    passed, results = [w for t in types for w in words(t)], words(returned)
    lines, given = [], []
    for k, word in enumerate(passed):
        lines.append(f"  %p{k} = getelementptr i64, ptr %block, i64 {k}")
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
        lines.append(f"  %q{i} = getelementptr i64, ptr %block, i64 {len(passed) + i}")
        lines.append(f"  store {WIDE.get(word, word)} %{'z' if word == 'i1' else 'r'}{i}, ptr %q{i}")
    entry = ["define void @entry(ptr %block) {", *lines, "  ret void", "}"]
    return "\n".join([*module.texts, *entry]), returned

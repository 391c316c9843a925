"""The page's source files, and how texts and data are put into a template.

Knows: which scripts there are, how JSON stands inside a page. Does not know: what any page shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import msgspec

SCRIPTS = (
    "whatif.js", "decode.js", "words.js", "memory.js", "numbers.js", "gantt.js", "overlay.js", "pointer.js", "find.js",
    "panels.js", "paths.js", "strips.js", "whatif_panel.js", "main.js",
)  # fmt: skip
"""In this order; page.js (or serve.js) comes last and starts things."""


@cache
def asset(name: str) -> str:
    """A source file of the page."""
    return resources.files("octopipe.views.report").joinpath(name).read_text("utf-8")


def script(last: str) -> str:
    """All scripts in one closure, `last` at the end."""
    body = "\n".join(asset(name) for name in (*SCRIPTS, last))
    return f'(() => {{\n"use strict";\n{body}\n}})();'


def embed(value: Any) -> str:
    """JSON that can stand inside a script element, whatever its strings hold."""
    text = msgspec.json.encode(value).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Replace each {{name}} once, without looking at what was filled in."""
    out = []
    rest = template
    while "{{" in rest:
        before, _, after = rest.partition("{{")
        name, _, rest = after.partition("}}")
        out += [before, parts[name]]
    return "".join([*out, rest])

"""The page's source files, and how texts and data are inserted into a template.

Knows: which scripts there are, and how JSON is embedded in a page. Does not know: what any page shows.
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
"""The scripts in the order of loading; page.js (or serve.js) follows and starts them."""


@cache
def asset(name: str) -> str:
    """Return a source file of the page."""
    return resources.files("octopipe.views.report").joinpath(name).read_text("utf-8")


def script(last: str) -> str:
    """Return all scripts in one closure, with `last` at the end."""
    body = "\n".join(asset(name) for name in (*SCRIPTS, last))
    return f'(() => {{\n"use strict";\n{body}\n}})();'


def embed(value: Any) -> str:
    """Return JSON that is safe inside a script element, whatever its strings contain."""
    text = msgspec.json.encode(value).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Replace each {{name}} once; text that was inserted is not searched for names."""
    out = []
    rest = template
    while "{{" in rest:
        before, _, after = rest.partition("{{")
        name, _, rest = after.partition("}}")
        out += [before, parts[name]]
    return "".join([*out, rest])

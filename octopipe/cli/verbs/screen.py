"""The output layer of all verbs: shows users' text literally, on any terminal.

Knows: which markup tags our own lines use (every other bracket is text), that control characters in names must not
reach a terminal, and which ASCII text replaces a symbol that the terminal cannot show. Does not know: any verb.
"""

from __future__ import annotations

import codecs
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.status import Status
from rich.text import Text

from octopipe.cli.verbs.text import BRACKET

TAGS = frozenset(
    f"{weight}{colour}".strip()
    for weight in ("", "bold ", "dim ")
    for colour in ("", "red", "green", "yellow", "cyan", "blue", "magenta")
) - {""}
"""The styles that may be written in brackets, and closed by [/] or [/style]."""
LEAST_SIZES = {"COLUMNS": 20, "LINES": 1}
"""The smallest plausible sizes of a terminal; smaller values in the environment mean that the size is not known."""
LINE_EVERY_S = 10.0
"""Seconds between two lines of progress if stderr is not a terminal."""
_TAG = re.compile(r"\[(/?)([a-z ]*)\]")
_KEPT = "\n\t" + BRACKET


def printable(text: str) -> str:
    """Return the text with control characters (escape codes, bidirectional marks) escaped.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _KEPT else ascii(c)[1:-1] for c in text)


def json_without_control(text: str) -> str:
    """Return JSON text with characters that control a terminal (escape codes, bidirectional marks) as JSON escapes.

    The value of the JSON text stays the same.

    >>> json_without_control('{"a": "x\u202ey"}')
    '{"a": "x\\\\u202ey"}'
    """
    if text.replace("\n", "").isprintable():
        return text
    from json import dumps

    return "".join(c if c.isprintable() or c == "\n" else dumps(c)[1:-1] for c in text)


def marked(text: str) -> Text:
    """Return a line with markup as styled text: our own tags are styles, every other bracket is printed.

    >>> marked("pip install octopipe[exact], [bold]now[/]").plain
    'pip install octopipe[exact], now'
    >>> marked(f"[bold]{BRACKET}bold]name[/]").plain
    '[bold]name'
    """
    text = printable(text)
    out, at, styles = Text(), 0, [""]
    for found in _TAG.finditer(text):
        closing, name = bool(found[1]), found[2].strip()
        if not (name in TAGS if not closing else len(styles) > 1 and (not name or name in TAGS)):
            continue
        out.append(text[at : found.start()].replace(BRACKET, "["), style=styles[-1])
        at = found.end()
        if closing:
            styles.pop()
        else:
            styles.append(f"{styles[-1]} {name}".strip())
    return out.append(text[at:].replace(BRACKET, "["), style=styles[-1])


def _usable_sizes(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without implausible terminal sizes: with 0 columns nothing at all would be printed.

    >>> _usable_sizes({"COLUMNS": "0", "LINES": "²", "TERM": "x"}), _usable_sizes({"COLUMNS": "132"})
    ({'TERM': 'x'}, {'COLUMNS': '132'})
    """

    def usable(name: str, value: str) -> bool:
        number = int(value) if value.isascii() and value.isdigit() and len(value) < 6 else 0
        return name not in LEAST_SIZES or number >= LEAST_SIZES[name]

    return {name: value for name, value in environ.items() if usable(name, value)}


class Screen(Console):
    """A rich console for which only our own tags are markup; colour only on a terminal, never with NO_COLOR."""

    def __init__(self, *, stderr: bool = False, **options: Any):
        options.setdefault("_environ", _usable_sizes(os.environ))
        super().__init__(stderr=stderr, highlight=False, soft_wrap=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Style a string; rich calls this for every string that is printed or put into a table."""
        if options.get("markup") is False:
            rich = Text(printable(text))
        else:
            rich = marked(text)
        for name in ("justify", "overflow"):
            if options.get(name) is not None:
                setattr(rich, name, options[name])
        style = options.get("style")
        if style:
            rich.style = style
        return rich

    def status(self, status: RenderableType, **options: Any) -> Status:
        return _Line(marked(status) if isinstance(status, str) else status, console=self, **options)


class _Line(Status):
    """A live status line whose text is handled like all other text."""

    def update(self, status: RenderableType | None = None, **options: Any) -> None:
        super().update(marked(status) if isinstance(status, str) else status, **options)


_LETTER_FOR = {
    "●": "*", "·": ".", "✓": "+", "✗": "x", "█": "#", "░": ".", "≤": "<=", "≥": ">=", "→": "->", "←": "<-",
    "×": "x", "…": "~", "–": "-", "—": "-", "µ": "u", "─": "-", "━": "-", "│": "|", "╸": "-", "╺": "-",
    "“": '"', "”": '"', "‘": "'", "’": "'",
}  # fmt: skip


def _in_letters(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    # Spinners consist of Braille characters, which become *; all other characters are escaped.
    wanted = error.object[error.start : error.end]
    return "".join(_LETTER_FOR.get(c, "*" if "⠀" <= c <= "⣿" else ascii(c)[1:-1]) for c in wanted), error.end


def make_streams_safe() -> None:
    """Replace symbols that an output cannot encode with ASCII text, so that they cannot stop a verb."""
    codecs.register_error("octopipe", _in_letters)
    for stream in (sys.stdout, sys.stderr):
        encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "").replace("_", "")
        if not encoding.startswith("utf") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="octopipe")

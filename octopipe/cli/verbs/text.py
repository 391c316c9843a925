"""Text helpers of the verbs: users' names, and nouns with their number.

Knows: how a name is protected from being read as markup. Does not know: rich (screen.py), argparse (flags.py).
"""

from __future__ import annotations

BRACKET = "\ue000"
"""Stands for a literal "[" where it could be read as the start of a tag."""


def named(text: object) -> str:
    """Return a user's name or path for a line with markup, so that none of its brackets is read as a tag."""
    return str(text).replace("[", BRACKET)


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: `1 rank`, `2 ranks`, `2 micro-batches`."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"

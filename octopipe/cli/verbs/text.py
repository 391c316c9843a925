"""Text helpers of the verbs: users' names, and nouns with their number.

Knows: how a name is protected from being read as markup. Does not know: rich (screen.py), argparse (flags.py).
"""

from __future__ import annotations

BRACKET = "\ue000"
"""Stands for a "[" that is a letter, wherever it may look like the start of a tag."""


def named(text: object) -> str:
    """A name or path of a user's inside a line of ours: none of its brackets is a tag of ours."""
    return str(text).replace("[", BRACKET)


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `2 micro-batches`."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"

"""The constants that a kernel takes from its module, as text that tells whether they are still the same.

Knows: where a constant comes from, and how its value is written. Does not know: kernels, or what is done with a value.

Compiled code contains the values of global names. They may come from the environment, or be replaced by a test, and
then code that another run kept is that of another kernel, although not a line of the package differs.
"""

from __future__ import annotations

import sys
from typing import Any


def constant_now(module: str, name: str) -> str | None:
    """Return the text of a constant, given its module and its name there (`COLUMN.at` is an attribute of `COLUMN`).

    Returns None for what is not a constant: functions, modules, types, and names that do not exist.

    >>> constant_now("sys", "maxsize"), constant_now("sys", "path"), constant_now("sys", "nowhere.to.be")
    ('9223372036854775807', None, None)
    """
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return constant_text(found)


def constant_text(value: Any) -> str | None:
    """Return the text of a number, a string, or a tuple of them; None for anything else."""
    if isinstance(value, tuple):
        parts = [constant_text(part) for part in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    return repr(value) if isinstance(value, bool | int | float | str) else None

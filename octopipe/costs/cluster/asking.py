"""How users specify a set-up: which fields are keywords, flags or form inputs, and the aliases of fields.

Knows: which fields of `Setup` each interface offers, and under which other names a field is accepted. Does not know:
the values of a field (`fields.py`) or the meaning of a set-up (`setup.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief
from octopipe.costs.cluster.fields import NodeGroups, Part, SetupField, fields_of
from octopipe.costs.cluster.setup import Setup


def keyword_fields() -> dict[str, SetupField]:
    """Return the fields that users give by name: keywords of the package's functions, keys of a plan's "setting"."""
    return {name: how for name, how in fields_of(Setup).items() if how.is_keyword}


def flag_fields(*parts: Part) -> dict[str, SetupField]:
    """Return the fields that have a flag, or only those of the given parts."""
    every = fields_of(Setup).items()
    return {name: how for name, how in every if how.has_flag and (not parts or how.part in parts)}


def form_fields() -> dict[str, SetupField]:
    """Return the fields of a page's form: all that have a flag, except files of the machine that serves the page."""
    return {
        name: how for name, how in keyword_fields().items() if how.has_flag and not isinstance(how.kind, NodeGroups)
    }


def keywords(given: Mapping[str, Any], *, others: Iterable[str] = (), lenient: bool = False) -> dict[str, Any]:
    """Return the given keywords under the fields' own names, with the values of aliases converted.

    An unknown keyword, or two names of one field, raise an error; the error for an unknown keyword suggests the nearest
    known one, or one of `others`, which the caller knows. If `lenient`, unknown keywords are left out, and of two names
    of one field the first counts.
    """
    fields = keyword_fields()
    older = {other: (name, convert) for name, how in fields.items() for other, convert in how.also.items()}
    out: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for word, value in given.items():
        name, convert = (word, None) if word in fields else older.get(word, ("", None))
        if not name:
            if lenient:
                continue
            close = difflib.get_close_matches(word, [*others, *fields, *older], 1)
            raise OctoPipeError(f"unknown keyword {word!r}" + (f"; did you mean {close[0]}?" if close else ""))
        if name in out:
            if lenient:
                continue
            raise OctoPipeError(f"{spelled[name]} and {word} are the same keyword; give one of them")
        if convert is not None and value is not None:
            try:
                value = convert(value)
            except (TypeError, ValueError):
                raise OctoPipeError(f"{word} is {brief(value)}; give {name} instead") from None
        out[name], spelled[name] = value, word
    return out

"""Reads and writes Megatron-LM's two notations for a partition: `--pipeline-model-parallel-layout` and
`--hybrid-layer-pattern`.

Knows: both grammars, their rules and where a string violates them (errors name the character). A layout has the
letters E embedding, t decoder layer, m multi-token prediction, L loss; `|` separates stages, `x*n` and `(...)*n`
repeat, commas are ignored, and stages may be empty. A hybrid pattern has one letter per layer (M Mamba, G gated
delta net, * attention, D sparse attention, + latent attention, - MLP, E experts), `|` between stages, and `/`
before each prediction depth. Does not know: ranks, orders, plans (`foreign_plan.py`).

>>> read_layout("Et*3|(tt|)*2,m|L").stages
('Ettt', 'tt', 'tt', 'm', 'L')
>>> write_layout(("Ettt", "tt", "tt", "m", "L"))
'Et*3|(tt|)*2,m|L'
>>> read_hybrid("M-M*|-ME/M*/M*")
MegatronText(kind='hybrid', stages=('M-M*', '-ME'), depth_pattern='M*', depths=2)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief

LAYOUT_LETTERS = "EtmL"
HYBRID_LETTERS = "MG*D+-E"
MOST_LAYERS = 4096
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronText:
    """A partition as Megatron writes it: the letters of every stage, empty stages included."""

    kind: Literal["layout", "hybrid"]
    stages: tuple[str, ...]
    depth_pattern: str = ""
    """Hybrid only: the layers of one multi-token prediction depth."""
    depths: int = 0
    """Multi-token prediction depths (in a layout: its letters m)."""

    def text(self) -> str:
        """Return the shortest usual spelling; reading it gives this partition again."""
        return write_layout(self.stages) if self.kind == "layout" else write_hybrid(self)


def read_megatron(text: str) -> MegatronText:
    """Read a layout or a hybrid pattern, whichever the letters belong to."""
    plain = text.strip().strip("'\"")  # shells and scripts leave quotes behind
    if set(plain) & set("tmL"):
        return read_layout(plain)
    if plain and set(plain) <= set(HYBRID_LETTERS + "|/"):
        return read_hybrid(plain)
    raise OctoPipeError(
        f"{brief(plain)} is neither a layout (E t m L) nor a hybrid pattern ({' '.join(HYBRID_LETTERS)})"
    )


# -- layouts -------------------------------------------------------------------------------------------


def read_layout(text: str) -> MegatronText:
    """The stages of a `--pipeline-model-parallel-layout`; errors name the offending character."""
    letters = _unrolled(text)
    stages = "".join(c for c, _ in letters).split("|")
    layers = [(c, at) for c, at in letters if c != "|"]
    if not layers or layers[0][0] != "E":
        at = layers[0][1] if layers else 0
        raise _wrong(text, at, "a layout begins with E, the embedding")
    if layers[-1][0] != "L":
        raise _wrong(text, layers[-1][1], "a layout ends with L, the loss")
    for name, letter in (("embedding E", "E"), ("loss L", "L")):
        twice = [at for c, at in layers if c == letter]
        if len(twice) > 1:
            raise _wrong(text, twice[1], f"a second {name}; a layout has one")
    seen_m = False
    for c, at in layers:
        seen_m = seen_m or c == "m"
        if c == "t" and seen_m:
            raise _wrong(text, at, "a decoder layer t after multi-token prediction m; put every t before the m")
    if sum("m" in stage for stage in stages) > 1:
        second = [at for c, at in layers if c == "m"][-1]
        raise _wrong(text, second, "multi-token prediction m in two stages; Megatron requires all of it in one")
    return MegatronText(kind="layout", stages=tuple(stages), depths=sum(c == "m" for c, _ in layers))


def _unrolled(text: str) -> list[tuple[str, int]]:
    """Letters and bars with their positions, with repetitions expanded."""
    out: list[tuple[str, int]] = []
    group: list[tuple[str, int]] | None = None
    opened = at = 0
    while at < len(text):
        here, c = at, text[at]
        at += 1
        if c == ",":
            continue
        if c == "(":
            if group is not None:
                raise _wrong(text, here, "parentheses inside parentheses; Megatron's layouts have one level")
            group, opened = [], here
            continue
        if c == ")":
            if group is None:
                raise _wrong(text, here, "no ( before this )")
            if not group:
                raise _wrong(text, here, "nothing between ( and )")
            times, at = _times(text, at)
            if times is None:
                raise _wrong(text, here, "parentheses without *n behind them; write (tt|)*4")
            _check_count(text, here, len(out) + len(group) * times)  # before memory is taken for it
            out += group * times
            group = None
        elif c in LAYOUT_LETTERS or c == "|":
            times, at = _times(text, at)
            to = out if group is None else group
            count = 1 if times is None else times
            _check_count(text, here, len(to) + count)
            to.extend([(c, here)] * count)
        elif c == "*":
            raise _wrong(text, here, "* without a letter or ) before it")
        else:
            raise _wrong(text, here, f"no such letter; layouts have {' '.join(LAYOUT_LETTERS)}, | ( ) * and numbers")
    if group is not None:
        raise _wrong(text, opened, "this ( is never closed")
    return out


def _check_count(text: str, at: int, count: int) -> None:
    if count > MOST_LAYERS:
        raise _wrong(text, at, f"more than {MOST_LAYERS} layers and bars")


def _times(text: str, at: int) -> tuple[int | None, int]:
    """Return the n of `*n` at this position, or None if there is none, and the position after it."""
    if at >= len(text) or text[at] != "*":
        return None, at
    number = _NUMBER.match(text, at + 1)
    if number is None:
        raise _wrong(text, at, "* without a number behind it; write t*3")
    if len(number[0]) > 4:
        raise _wrong(text, at + 1, "repeated too often")
    return int(number[0]), number.end()


def write_layout(stages: Sequence[str]) -> str:
    """Stages as a layout string: runs as x*n, consecutive equal stages as (..|)*n."""
    out, at = "", 0
    while at < len(stages):
        same = at
        while same < len(stages) and stages[same] == stages[at]:
            same += 1
        inner = "".join(_run(c, len(list(g))) for c, g in groupby(stages[at]))
        last = same == len(stages)
        count = same - at - last  # the last stage has no bar behind it
        if count >= 2 and inner:
            out += f"({inner}|)*{count}"
        else:
            out += (inner + "|") * count
        if last:
            out += inner
        at = same
    return re.sub(r"(\)\*\d+)(?=[^|])", r"\1,", out)  # a comma for looks, as in Megatron's own examples


def _run(letter: str, times: int) -> str:
    return letter * times if times <= 2 else f"{letter}*{times}"


# -- hybrid patterns -----------------------------------------------------------------------------------


def read_hybrid(text: str) -> MegatronText:
    """The stages and prediction depths of a `--hybrid-layer-pattern`."""
    for at, c in enumerate(text):
        if c not in HYBRID_LETTERS and c not in "|/":
            raise _wrong(text, at, f"no such layer; hybrid patterns have {' '.join(HYBRID_LETTERS)}, | and /")
    main, *depths = text.split("/")
    if "*" in main and ("D" in main or "+" in main):
        at = min(k for k in (main.find("D"), main.find("+")) if k >= 0)
        raise _wrong(text, at, "latent or sparse attention (+, D) beside plain attention (*); Megatron takes one kind")
    if not main.strip("|"):
        raise _wrong(text, 0, "no layers before the first /")
    if len(main) > MOST_LAYERS:
        raise _wrong(text, MOST_LAYERS, f"more than {MOST_LAYERS} layers and bars")
    if depths and all(not d for d in depths):
        depths = []
    place = len(main) + 1
    for depth in depths:
        if "|" in depth:
            raise _wrong(text, place + depth.index("|"), "a bar behind /; prediction layers stay in the last stage")
        if depth != depths[0]:
            raise _wrong(text, place, f"prediction depths {brief(depths[0])} and {brief(depth)}; they must be equal")
        place += len(depth) + 1
    if depths and not depths[0]:
        raise _wrong(text, len(main), "no layers behind /")
    pattern = depths[0] if depths else ""
    return MegatronText(kind="hybrid", stages=tuple(main.split("|")), depth_pattern=pattern, depths=len(depths))


def write_hybrid(parsed: MegatronText) -> str:
    """The pattern string of a hybrid partition."""
    return "|".join(parsed.stages) + f"/{parsed.depth_pattern}" * parsed.depths


def _wrong(text: str, at: int, why: str) -> OctoPipeError:
    around = text[max(0, at - 8) : at] + "»" + text[at : at + 1] + "«" + text[at + 1 : at + 9]
    around = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in around)
    return OctoPipeError(f"character {at + 1} of the Megatron text ({around}): {why}")

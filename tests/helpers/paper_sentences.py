"""The sentences of the paper that state a number or an order, found by reading its source.

Knows: which lines are the abstract, the contributions of section I and sections III and VI to VIII, and which words
state an order or a complexity. Does not know: which row answers a sentence (docs/reproduction/sentences.json).
"""

from __future__ import annotations

import re
from typing import NamedTuple

RANGES = (
    (r"\begin{abstract}", r"\end{abstract}"),
    (r"To address \textbf{C1}", r"\section{Background}"),
    (r"\section{Motivation}", r"\section{\SysName{} System Overview}"),
    (r"\section{Iterative Bubble-Aware", r"\section{Related Work}"),
)
NOT_TEXT = re.compile(
    r"\s*(\\begin\{(figure|table|tabular|algorithm|align)|\\end|\\includegraphics|\\label|\\vspace|\\centering|\\toprule|%)"
)
ORDER = re.compile(
    r"\b(higher|lower|larger|largest|smaller|smallest|more|most|less|least|fewer|better|best|worse|faster|slower|"
    r"outperform\w*|exceed\w*|increas\w*|decreas\w*|declin\w*|reduc\w*|improv\w*|dominant|primary|grow\w*|surpass\w*|"
    r"highest|longer|shorter|consistent\w*|persist\w*|fail)\b|\bO\(|\bsmall local\b",
    re.I,
)


class Sentence(NamedTuple):
    line: int
    text: str


def sentences(source: str) -> list[Sentence]:
    """Every sentence of those parts that states a number or an order, with its line."""
    lines = source.split("\n")
    out = []
    for begin, end in RANGES:
        first = next(k for k, line in enumerate(lines) if line.startswith(begin))
        stop = next(k for k in range(first + 1, len(lines)) if lines[k].startswith(end))
        for k in range(first, stop):
            if NOT_TEXT.match(lines[k]):
                continue
            text = re.sub(r"~?\\cite\{[^}]*\}", "", lines[k])
            text = re.sub(r"\\(auto)?ref\{[^}]*\}", "REF", text).replace(r"\SysName{}", "OctoPipe")
            for part in re.split(r"(?<=[.;])\s+(?=[A-Z(\\])", text):
                bare = re.sub(r"REF|textsubscript\{.\}|H800", "", part)
                if re.search(r"\d", bare) or ORDER.search(part):
                    out.append(Sentence(k + 1, part.strip()))
    return out

"""What a reproduction says: rows of paper against ours with a verdict, gathered into the result of a part.

Knows: verdicts, ratios, and that a claim which does not hold must say why. Does not know: any table of the paper.

>>> Row.at_least("speed-up", 1.49, 1.70).verdict, Row.at_most("step", 1619.0, 1640.0, why="half the search").verdict
('better', 'not reproduced')
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from octopipe.base.errors import OctoPipeError

Verdict = Literal["reproduced", "better", "not reproduced", "shown"]
VERDICTS: tuple[Verdict, ...] = ("reproduced", "better", "not reproduced", "shown")
"""`shown`: a number of ours for which the paper prints none."""
Value = float | str | None
ROUNDING = 0.005
"""Half a unit of the second decimal, to which the paper rounds its ratios, as a share."""
CLEARLY = 0.02
"""Beyond this share a value is better, not merely reproduced."""
CLOSE = 0.10
"""Two values within this share of each other are the same measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One claim: what the paper says, what we get, and what follows."""

    claim: str
    paper: Value
    ours: Value
    ratio: float | None
    """ours / paper, where both are numbers."""
    verdict: Verdict
    note: str = ""
    unit: str = ""
    source: str = ""
    """Where the paper says it."""

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise OctoPipeError(f"{self.claim}: verdict {self.verdict!r}; one of {', '.join(VERDICTS)}")
        if self.verdict == "not reproduced" and not self.note:
            raise OctoPipeError(f"{self.claim}: not reproduced, and no word why; give a note")

    @classmethod
    def at_least(cls, claim: str, paper: float, ours: float | None, *, why: str = "", **more: Any) -> Row:
        """A value of which more is better: a speed-up, a throughput. `why` is told where ours is less."""
        return cls._ordered(claim, paper, ours, 1.0, why, more)

    @classmethod
    def at_most(cls, claim: str, paper: float, ours: float | None, *, why: str = "", **more: Any) -> Row:
        """A value of which less is better: a step time, an error."""
        return cls._ordered(claim, paper, ours, -1.0, why, more)

    @classmethod
    def _ordered(cls, claim: str, paper: float, ours: float | None, sign: float, why: str, more: dict[str, Any]) -> Row:
        if ours is None:
            return cls(claim=claim, paper=paper, ours=None, ratio=None, verdict="not reproduced", note=why, **more)
        ratio = ours / paper if paper else None
        gain = sign * ((ratio or 1.0) - 1.0)
        verdict: Verdict = "better" if gain > CLEARLY else "reproduced" if gain >= -ROUNDING else "not reproduced"
        note = more.pop("note", "")
        if verdict == "not reproduced":
            note = "; ".join(filter(None, (note, why)))
        return cls(claim=claim, paper=paper, ours=ours, ratio=ratio, verdict=verdict, note=note, **more)

    @classmethod
    def close(
        cls, claim: str, paper: float, ours: float | None, *, within: float = CLOSE, why: str = "", **more: Any
    ) -> Row:
        """A value that is to be the same, within a share of the paper's."""
        ratio = None if ours is None or not paper else ours / paper
        same = ratio is not None and abs(ratio - 1.0) <= within
        note = more.pop("note", "")
        if not same:
            note = "; ".join(filter(None, (note, why)))
        verdict: Verdict = "reproduced" if same else "not reproduced"
        return cls(claim=claim, paper=paper, ours=ours, ratio=ratio, verdict=verdict, note=note, **more)

    @classmethod
    def holds(cls, claim: str, paper: Value, ours: Value, truth: bool, *, why: str = "", **more: Any) -> Row:
        """A claim that is true or not: an order, a taxonomy, a deadlock."""
        numbers = isinstance(paper, int | float) and isinstance(ours, int | float) and bool(paper)
        ratio = ours / paper if numbers else None  # type: ignore[operator]
        note = more.pop("note", "")
        if not truth:
            note = "; ".join(filter(None, (note, why)))
        verdict: Verdict = "reproduced" if truth else "not reproduced"
        return cls(claim=claim, paper=paper, ours=ours, ratio=ratio, verdict=verdict, note=note, **more)

    @classmethod
    def shown(cls, claim: str, ours: Value, **more: Any) -> Row:
        """A number of ours for which the paper prints none."""
        return cls(claim=claim, paper=None, ours=ours, ratio=None, verdict="shown", **more)

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a part of the reproduction comes to."""

    rows: tuple[Row, ...]
    costs: str
    """Which costs were used, in words."""
    text: tuple[str, ...] = ()
    """Paragraphs of Markdown before the rows."""
    tables: tuple[tuple[str, tuple[str, ...], tuple[tuple[Value, ...], ...]], ...] = ()
    """Further tables: title, columns, lines."""
    pictures: dict[str, str] = field(default_factory=dict)
    """File name -> SVG."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "costs": self.costs,
            "text": list(self.text),
            "rows": [row.as_dict() for row in self.rows],
            "tables": [
                {"title": t, "columns": list(c), "lines": [list(x) for x in lines]} for t, c, lines in self.tables
            ],
            "pictures": sorted(self.pictures),
        }


def result_from(record: dict[str, Any], pictures: dict[str, str]) -> Result:
    """The result in a part's JSON file."""
    return Result(
        rows=tuple(Row(**row) for row in record["rows"]),
        costs=record["costs"],
        text=tuple(record["text"]),
        tables=tuple(
            (t["title"], tuple(t["columns"]), tuple(tuple(line) for line in t["lines"])) for t in record["tables"]
        ),
        pictures=pictures,
    )

"""What a reproduction says: one row per claim of the paper, our numbers beside it, and a verdict that can fail.

Knows: verdicts and how each follows from numbers. Does not know: any table of the paper.

Every number of ours stands under two readings of the head (its layer time as published; times the factor that fits the
paper's baselines) and, where a tuner made it, for two tuners (Algorithm 1, our search). The verdict is that of the
paper's own method on the published times: Algorithm 1, head as published. The fitted reading has a verdict of its own,
which is "fitted" for the numbers that chose the factor.

>>> Row.number("x", "speed-up", 1.49, Values(published=(1.40, 1.70), fitted=(1.48, 1.66))).verdicts
('agrees', 'agrees')
>>> Row.number("x", "speed-up", 1.10, Values(published=(1.40, 1.70), fitted=(1.48, 1.66)), why="tested").verdict
'differs, higher'
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from octopipe.base.errors import OctoPipeError

Verdict = Literal["agrees", "trend agrees", "differs, higher", "differs, lower", "by construction", "fitted", ""]
VERDICTS: tuple[Verdict, ...] = (
    "agrees",
    "trend agrees",
    "differs, higher",
    "differs, lower",
    "by construction",
    "fitted",
)
COUNTED = VERDICTS[:4]
"""Only these say something about the paper; the empty verdict is that of a number for which the paper prints none."""
Value = float | str | None
CLOSE = 0.10
"""Two values within this share of each other agree, unless a row states another tolerance."""
Pair = tuple[Value, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Ours: (Algorithm 1, our search) under each reading of the head; a baseline has no tuner and stands second."""

    published: Pair
    fitted: Pair = (None, None)

    @property
    def judged(self) -> tuple[Value, Value]:
        """Per reading the value that is held against the paper's: Algorithm 1's where it made one."""
        return self.published[0] if self.published[0] is not None else self.published[1], (
            self.fitted[0] if self.fitted[0] is not None else self.fitted[1]
        )


def baseline(published: Value, fitted: Value = None) -> Values:
    """A number that no tuner of ours made."""
    return Values(published=(None, published), fitted=(None, fitted))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One claim: what the paper says, what we get, and what follows."""

    id: str
    """Never changes; sentences.py names the rows that answer a sentence by it."""
    claim: str
    paper: Value
    published: Pair
    fitted: Pair
    verdict: Verdict
    """Of Algorithm 1 (or the baseline) with the head as published."""
    fitted_verdict: Verdict = ""
    unit: str = ""
    source: str = ""
    within: float | None = None
    """The share within which two numbers agree."""
    why: str = ""
    """Of a difference: the reason, which a row of the sensitivity part tests."""
    tested: str = ""
    """The id of that row."""
    group: str = ""
    """Rows of one group stand on one line of the page."""
    bound: Pair = (None, None)
    """The best value that a proven bound leaves to any plan, per reading of the head: of step times and throughputs."""

    def __post_init__(self) -> None:
        if self.verdict not in (*VERDICTS, "") or self.fitted_verdict not in (*VERDICTS, ""):
            raise OctoPipeError(f"{self.id}: verdict {self.verdict!r}; one of {', '.join(VERDICTS)}")
        if self.verdict.startswith("differs") and not self.why:
            raise OctoPipeError(f"{self.id}: it differs, and no word why; give a reason that is tested")

    @property
    def verdicts(self) -> tuple[Verdict, Verdict]:
        return self.verdict, self.fitted_verdict

    @classmethod
    def number(
        cls,
        id: str,
        claim: str,
        paper: float,
        ours: Values,
        *,
        within: float = CLOSE,
        absolute: bool = False,
        used_in_fit: bool = False,
        **more: Any,
    ) -> Row:
        """A number: it agrees within the tolerance (a share of the paper's, or `absolute`), or it differs.
        `used_in_fit`: it is one of those that chose the fitted reading."""
        verdicts = []
        for value in ours.judged:
            if not isinstance(value, int | float):
                verdicts.append("")
                continue
            off = value - paper if absolute else value / paper - 1.0
            verdicts.append(
                "agrees" if abs(off) <= within + 1e-12 else "differs, higher" if off > 0 else "differs, lower"
            )
        if used_in_fit:
            verdicts[1] = "fitted"
        return cls._made(id, claim, paper, ours, verdicts, within=within, **more)

    @classmethod
    def order(
        cls, id: str, claim: str, paper: Value, ours: Values, holds: tuple[bool, bool | None], **more: Any
    ) -> Row:
        """An order or a direction: the trend agrees, or there is less of it than the paper says."""
        verdicts = ["" if h is None else "trend agrees" if h else "differs, lower" for h in holds]
        if more.pop("used_in_fit", False):
            verdicts[1] = "fitted"
        return cls._made(id, claim, paper, ours, verdicts, **more)

    @classmethod
    def constructed(cls, id: str, claim: str, paper: Value, ours: Value, truth: bool, **more: Any) -> Row:
        """What our code was built to do. Where it does not, that is a defect of ours and no verdict."""
        if not truth:
            raise OctoPipeError(f"{id}: {claim}: built to be {paper}, and is {ours}; mend the code")
        return cls._made(id, claim, paper, baseline(ours), ["by construction", ""], **more)

    @classmethod
    def shown(cls, id: str, claim: str, ours: Values, **more: Any) -> Row:
        """A number of ours for which the paper prints none."""
        return cls._made(id, claim, more.pop("paper", None), ours, ["", ""], **more)

    @classmethod
    def _made(cls, id: str, claim: str, paper: Value, ours: Values, verdicts: list[Any], **more: Any) -> Row:
        return cls(
            id=id,
            claim=claim,
            paper=paper,
            published=ours.published,
            fitted=ours.fitted,
            verdict=verdicts[0],
            fitted_verdict=verdicts[1],
            **more,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


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
    pairs = ("published", "fitted", "bound")
    return Result(
        rows=tuple(_row({k: tuple(v) if k in pairs else v for k, v in row.items()}) for row in record["rows"]),
        costs=record["costs"],
        text=tuple(record["text"]),
        tables=tuple(
            (t["title"], tuple(t["columns"]), tuple(tuple(line) for line in t["lines"])) for t in record["tables"]
        ),
        pictures=pictures,
    )


def _row(given: dict[str, Any]) -> Row:
    return Row(**given)

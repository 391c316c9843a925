"""The results of a reproduction: one row per claim of the paper, with our numbers and a verdict that can be negative.

Knows: verdicts and how each follows from numbers. Does not know: any table of the paper.

Every number of ours is given under two readings of the head (its layer time as published; times the factor that fits
the paper's baselines) and, if a tuner produced it, for two tuners (Algorithm 1, our search). The verdict is that of the
paper's own method on the published times: Algorithm 1, head as published. The fitted reading has a verdict of its own,
which is "fitted" for the numbers that were used to choose the factor.

>>> Row.number("x", "speed-up", 1.49, Values(published=(1.40, 1.70), fitted=(1.48, 1.66))).verdicts
('agrees', 'agrees')
>>> Row.number("x", "speed-up", 1.10, Values(published=(1.40, 1.70), fitted=(1.48, 1.66)), why="tested").verdict
'differs, higher'
"""

from __future__ import annotations

from collections.abc import Callable
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
"""The verdicts that say something about the paper. A number that the paper does not print has an empty verdict."""
Outcome = Literal["explains it", "explains part of it", "does not explain it", "fitted to it"]
EXPLAINS: Outcome = "explains it"
PART_OF_IT: Outcome = "explains part of it"
NOT_EXPLAINED: Outcome = "does not explain it"
FITTED_TO_IT: Outcome = "fitted to it"
OUTCOMES = (EXPLAINS, PART_OF_IT, NOT_EXPLAINED, FITTED_TO_IT)
FITTED_HEAD = "fitted head"
"""The test by the fitted reading, which every row with two readings of the head already contains."""
Value = float | str | None
CLOSE = 0.10
"""Two values within this share of each other agree, unless a row states another tolerance."""
Pair = tuple[Value, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Our values, (Algorithm 1, our search), for each reading of the head; the value of a baseline is the second."""

    published: Pair
    fitted: Pair = (None, None)

    @property
    def judged(self) -> tuple[Value, Value]:
        """For each reading, the value that is compared with the paper's: Algorithm 1's if there is one."""
        return self.published[0] if self.published[0] is not None else self.published[1], (
            self.fitted[0] if self.fitted[0] is not None else self.fitted[1]
        )


def baseline(published: Value, fitted: Value = None) -> Values:
    """Return the values of a number that none of our tuners produced."""
    return Values(published=(None, published), fitted=(None, fitted))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One claim: what the paper says, what we get, and the verdict."""

    id: str
    """Never changes: sentences.json refers to rows by it."""
    claim: str
    paper: Value
    published: Pair
    fitted: Pair
    verdict: Verdict
    """The verdict on Algorithm 1 (or the baseline) with the head as published."""
    fitted_verdict: Verdict = ""
    unit: str = ""
    source: str = ""
    within: float | None = None
    """The share within which two numbers agree."""
    why: str = ""
    """The supposed reason of a difference."""
    test: str = ""
    """The change that was made to test the reason, in a few words."""
    test_value: Value = None
    """Our value with that change."""
    outcome: str = ""
    """Whether the change explains the difference: one of OUTCOMES."""
    tested: str = ""
    """The id of another row that shows the effect of the change elsewhere."""
    group: str = ""
    """Rows with the same group share a line of the page."""
    bound: Pair = (None, None)
    """A proven bound on any plan's step time or throughput, for each reading of the head."""

    def __post_init__(self) -> None:
        if self.verdict not in (*VERDICTS, "") or self.fitted_verdict not in (*VERDICTS, ""):
            raise OctoPipeError(f"{self.id}: verdict {self.verdict!r}; one of {', '.join(VERDICTS)}")
        if self.verdict.startswith("differs") and not (self.why and (self.outcome in OUTCOMES or self.tested)):
            raise OctoPipeError(
                f"{self.id}: it differs, and no tested reason why; give the change that would explain it"
            )

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
        test: str = "",
        trial: Callable[[], Value] | None = None,
        **more: Any,
    ) -> Row:
        """Return a row on a number that agrees within the tolerance (a share of the paper's, or `absolute`) or differs.

        `used_in_fit`: it is one of the numbers that were used to choose the fitted reading. A difference is tested by
        the fitted reading of the head if that explains it, else by the change that `test` names: `trial` computes our
        value with the change.
        """

        def off(value: float) -> float:
            return value - paper if absolute else value / paper - 1.0

        def close(value: Value) -> bool:
            return isinstance(value, int | float) and abs(off(value)) <= within + 1e-12

        def verdict(value: Value) -> str:
            if not isinstance(value, int | float):
                return ""
            return "agrees" if close(value) else "differs, higher" if off(value) > 0 else "differs, lower"

        first, second = ours.judged
        verdicts = [verdict(first), "fitted" if used_in_fit else verdict(second)]
        if verdicts[0].startswith("differs"):
            if second is not None and (close(second) or trial is None):
                test, trial = FITTED_HEAD, lambda: second
            if trial is not None:
                tried = trial()
                more |= {"test": test, "test_value": tried}
                if isinstance(tried, int | float) and isinstance(first, int | float):
                    nearer = abs(off(tried)) < abs(off(first)) - 1e-9
                    explained = FITTED_TO_IT if used_in_fit and test == FITTED_HEAD else EXPLAINS
                    more["outcome"] = explained if close(tried) else PART_OF_IT if nearer else NOT_EXPLAINED
        return cls._made(id, claim, paper, ours, verdicts, within=within, **more)

    @classmethod
    def order(
        cls,
        id: str,
        claim: str,
        paper: Value,
        ours: Values,
        holds: tuple[bool, bool | None],
        *,
        used_in_fit: bool = False,
        test: str = "",
        trial: Callable[[], tuple[Value, bool]] | None = None,
        **more: Any,
    ) -> Row:
        """Return a row on an order or a direction: the trend agrees, or it is weaker than the paper says.

        A difference is tested like that of a number; `trial` computes our value and whether the claim is then true.
        """
        verdicts = ["" if h is None else "trend agrees" if h else "differs, lower" for h in holds]
        if used_in_fit:
            verdicts[1] = "fitted"
        if verdicts[0].startswith("differs"):
            if holds[1] is not None and (holds[1] or trial is None):
                test, trial = FITTED_HEAD, lambda: (ours.judged[1], bool(holds[1]))
            if trial is not None:
                tried, true_then = trial()
                more |= {"test": test, "test_value": tried, "outcome": EXPLAINS if true_then else NOT_EXPLAINED}
        return cls._made(id, claim, paper, ours, verdicts, **more)

    @classmethod
    def constructed(cls, id: str, claim: str, paper: Value, ours: Value, truth: bool, **more: Any) -> Row:
        """Return a row on a property that our code is built to have; raise if it does not, which is a bug."""
        if not truth:
            raise OctoPipeError(f"{id}: {claim}: built to be {paper}, and is {ours}; remedy the code")
        return cls._made(id, claim, paper, baseline(ours), ["by construction", ""], **more)

    @classmethod
    def shown(cls, id: str, claim: str, ours: Values, **more: Any) -> Row:
        """Return a row on a number of ours that the paper does not print."""
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
    """The result of one part of the reproduction."""

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
    """Return the result stored in a part's JSON file."""
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

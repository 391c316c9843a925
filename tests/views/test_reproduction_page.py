"""docs/reproduction.md: short, whole, of today, and an answer to every sentence of the paper that states something."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from paper_sentences import sentences

from octopipe.search import tuner
from octopipe.search.tuner.mechanics import HIDE_MOVES
from octopipe.views.reproduce.bench import Bench, Options, find_measured, find_profiles
from octopipe.views.reproduce.page import PLANS, page_of_rows, rounded, stale
from octopipe.views.reproduce.parts import parts
from octopipe.views.reproduce.row import OUTCOMES
from octopipe.views.reproduce.runner import chosen
from octopipe.views.reproduce.store import ResultStore, read_kept

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FOLDER = DOCS / "reproduction.md", DOCS / "reproduction"
PAPER = os.environ.get("OCTOPIPE_PAPER")
NO_CLAIM = {"method", "setting", "layout"}
QUICK = ("two-stages", "taxonomy", "models", "deadlock", "traces", "fidelity", "illustrations")
"""Parts whose rows are made again from their plans in a second or two; the slow tier makes all of them."""


def _parts() -> dict[str, list[dict[str, Any]]]:
    return json.loads((FOLDER / "rows.json").read_text())["parts"]


def _rows() -> dict[str, dict[str, Any]]:
    return {row["id"]: row for rows in _parts().values() for row in rows}


def _answers() -> list[dict[str, Any]]:
    return json.loads((FOLDER / "sentences.json").read_text())["sentences"]


@cache
def _kept() -> Any:
    """The plans beside the page: reading them takes a second."""
    return read_kept(FOLDER / PLANS)


def _options() -> Options:
    return Options(profiles=find_profiles(None), measured=find_measured(None))


def test_the_page_is_short_and_shows_every_picture() -> None:
    text = PAGE.read_text()
    assert len(text.splitlines()) <= 150
    drawn = {file.name for file in FOLDER.glob("*.svg")}
    assert drawn and all(f"reproduction/{name}" in text for name in drawn)


def test_the_page_is_what_this_code_writes_of_its_rows() -> None:
    """Whoever edits the page by hand, or changes its words in the code and does not write it again, fails here."""
    assert page_of_rows(PAGE, _options(), parts()) == PAGE.read_text()


@pytest.mark.parametrize("name", QUICK)
def test_rows_come_out_again_of_the_kept_plans(name: str) -> None:
    bench = Bench(options=_options(), store=ResultStore(any_code=True, plans=_kept()), searches=False)
    made = [row.as_dict() for row in chosen([name], parts())[0].run(bench).rows]
    assert json.loads(json.dumps(rounded(made))) == _parts()[name]


def test_every_sentence_has_a_row_and_every_row_a_sentence() -> None:
    rows, answers = _rows(), _answers()
    named = {id for sentence in answers for id in sentence.get("rows", ())}
    assert all(sentence.get("rows") or sentence.get("no_claim") in NO_CLAIM for sentence in answers)
    assert named <= set(rows)
    assert {id for id, row in rows.items() if row["verdict"]} <= named


def test_every_difference_has_a_reason_that_was_tested() -> None:
    """By a change made to the row itself, or by a row of its own that is no claim of the paper."""
    rows = _rows()
    for id, row in rows.items():
        assert not row["tested"] or (row["tested"] in rows and not rows[row["tested"]]["verdict"]), id
        if row["verdict"].startswith("differs"):
            assert row["why"], id
            assert row["outcome"] in OUTCOMES and row["test_value"] is not None if row["outcome"] else row["tested"], id


def test_the_page_of_benchmarks_says_the_same_of_algorithm_1_and_random_search() -> None:
    said = _rows()["search.beats-random"]["published"][0]
    assert said in " ".join((DOCS / "benchmarks.md").read_text().split())


@pytest.mark.skipif(PAPER is None, reason="OCTOPIPE_PAPER names no source of the paper")
def test_no_sentence_of_the_paper_is_left_out() -> None:
    assert PAPER is not None
    listed = {(s["line"], s["quote"]) for s in _answers()}
    missing = [s for s in sentences(Path(PAPER).read_text()) if (s.line, s.text[:64]) not in listed]
    assert not missing


@pytest.mark.slow
def test_the_page_is_what_this_code_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number made again from the plans that are kept; the smallest searches searched again."""
    monkeypatch.setattr(tuner, "HIDE_MOVES", HIDE_MOVES)  # as users search, in the quick tier too
    assert stale(PAGE, _options(), parts(), search_again=True) == []

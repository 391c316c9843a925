"""docs/reproduction.md: short, whole, of today, and an answer to every sentence of the paper that states something."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from paper_sentences import sentences

from octopipe.views.reproduce.bench import Options, find_measured, find_profiles
from octopipe.views.reproduce.page import stale
from octopipe.views.reproduce.parts import parts

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FOLDER = DOCS / "reproduction.md", DOCS / "reproduction"
PAPER = os.environ.get("OCTOPIPE_PAPER")
NO_CLAIM = {"method", "setting", "layout"}
pytestmark = pytest.mark.skipif(
    not (FOLDER / "rows.json").exists(), reason="`make reproduce` has not written the page in its new form yet"
)


def _rows() -> dict[str, dict[str, object]]:
    record = json.loads((FOLDER / "rows.json").read_text())
    return {row["id"]: row for rows in record["parts"].values() for row in rows}


def _answers() -> list[dict[str, object]]:
    return json.loads((FOLDER / "sentences.json").read_text())["sentences"]


def test_the_page_is_short_and_shows_every_picture() -> None:
    text = PAGE.read_text()
    assert len(text.splitlines()) <= 150
    drawn = {file.name for file in FOLDER.glob("*.svg")}
    assert drawn and all(f"reproduction/{name}" in text for name in drawn)


def test_every_sentence_has_a_row_and_every_row_a_sentence() -> None:
    rows, answers = _rows(), _answers()
    named = {id for sentence in answers for id in sentence.get("rows", ())}  # type: ignore[attr-defined]
    assert all(sentence.get("rows") or sentence.get("no_claim") in NO_CLAIM for sentence in answers)
    assert named <= set(rows)
    assert {id for id, row in rows.items() if row["verdict"]} <= named


def test_every_difference_has_a_reason_and_the_row_that_tests_it() -> None:
    rows = _rows()
    for id, row in rows.items():
        if str(row["verdict"]).startswith("differs"):
            assert row["why"] and row["tested"] in rows, id


@pytest.mark.skipif(PAPER is None, reason="OCTOPIPE_PAPER names no source of the paper")
def test_no_sentence_of_the_paper_is_left_out() -> None:
    assert PAPER is not None
    listed = {(s["line"], s["quote"]) for s in _answers()}
    missing = [s for s in sentences(Path(PAPER).read_text()) if (s.line, s.text[:64]) not in listed]
    assert not missing


@pytest.mark.slow
def test_the_page_is_what_this_code_writes() -> None:
    """Every number made again from the plans that are kept; the smallest searches searched again."""
    options = Options(profiles=find_profiles(None), measured=find_measured(None))
    assert stale(PAGE, options, parts(), search_again=True) == []

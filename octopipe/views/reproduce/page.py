"""docs/reproduction.md: the whole reproduction on one page; appendix, raw rows, plans and pictures in its folder.

Knows: the text above the tables, and which files there are. Does not know: how a part is written (markdown.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import write_whole
from octopipe.costs.table import CostTable
from octopipe.views.reproduce.bench import Bench, Options, write_json
from octopipe.views.reproduce.markdown import appendix, whole_page
from octopipe.views.reproduce.models import costs_in_words
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.row import result_from
from octopipe.views.reproduce.runner import Finished
from octopipe.views.reproduce.store import ResultStore, read_kept, write_kept

COMMAND = "octopipe reproduce all --page docs/reproduction.md"
ROWS, PLANS, APPENDIX = "rows.json", "plans.b85", "appendix.md"
LEAST = 1e-12
"""Smaller absolute values are rounding errors and are written as zero."""


def preface(options: Options, *, complete: bool) -> list[str]:
    """Return what a reader must know before the numbers."""
    lines = [
        f"This page compares every number and every order that the OctoPipe paper states with ours. It is written by "
        f"`{COMMAND}` (`make reproduce`); do not edit it. **Algorithm 1** is the paper's tuner in our "
        "implementation; **our search** is what `octopipe tune` runs by default. Numbers that do not come from a tuner "
        "are in the column of our search. The paper measured step times on H800 GPUs; ours are predicted by the "
        "simulator from the layer times that its authors published.",
        "Verdicts. *agrees*: our number is within 10 % of the paper's (the appendix states other tolerances). *trend "
        "agrees*: the order or direction is the same as in the paper. **higher**, **lower**: our number differs; the "
        "last column names a change that might explain the difference, the number with that change, and whether it "
        "then agrees. *by construction*: true because we built it so. *fitted*: the number was used to choose an "
        "assumption. Only the first four verdicts say anything about the paper. They compare Algorithm 1 (or the "
        "baseline), with the published time of the head.",
        "The **fitted head** multiplies the published time of the head by 2.5 (LLaMA: 1.5). The factor is fitted to "
        "nine measurements of baselines in the paper, so it is no evidence for those. Every baseline runs at its "
        "best setting: Interleaved with its fastest number of chunks, Tessel in its fast mode, Mist with stages within "
        "two layers of the mean, all of them with W deferred into bubbles. The paper does not state PP 4, TP 8 and 16 "
        "micro-batches for Table V, nor 8 ranks for Figure 13; we inferred them.",
        f"Costs: {costs_in_words(options.profiles)}. Algorithm 1 makes {options.rounds} iterations from 1F1B, our "
        f"search {options.iterations} moves per lane, both with seed {options.seed}. No result depends on the clock, "
        "so every machine writes the same page. A percentage such as (≤ 9 %) after a time or throughput is the most "
        "that any plan could still gain, by a proven bound. Details: [every row with its "
        "reason](reproduction/appendix.md), [raw rows](reproduction/rows.json), [every sentence of the paper that "
        "states a number or an order, and the rows that answer it](reproduction/sentences.json).",
    ]
    if not complete:
        lines.append("**This page holds only some of the parts.**")
    return lines


def page_files(finished: Sequence[Finished], options: Options, *, complete: bool, folder: str) -> dict[str, bytes]:
    """Return the contents of all files but the plans, by file name (empty for the page itself)."""
    pairs = [(f.part, f.result) for f in finished]
    page = whole_page(pairs, preface=preface(options, complete=complete), pictures=f"{folder}/")
    files = {"": page.encode(), APPENDIX: appendix(pairs).encode()}
    for _, result in pairs:
        files |= {name: svg.encode() for name, svg in result.pictures.items()}
    return files


def write_page(
    path: Path, finished: Sequence[Finished], options: Options, store: ResultStore, *, complete: bool
) -> None:
    """Write the page and the files in the folder of its name; for a complete page also the plans behind it."""
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in page_files(finished, options, complete=complete, folder=folder.name).items():
        write_whole(path if not name else folder / name, data)
    rows = {f.part.name: [row.as_dict() for row in f.result.rows] for f in finished}
    drawn = {f.part.name: sorted(f.result.pictures) for f in finished}
    record = {"format": "octopipe.reproduction-rows/1", "parts": rows, "pictures": drawn}
    write_json(folder / ROWS, rounded(record))
    if complete:
        store.any_code = True
        keys = {key for f in finished for key in f.plans}
        write_kept(folder / PLANS, {key: plan for key in keys if (plan := store.get(key, "")) is not None})


def rounded(value: Any) -> Any:
    """Round every number to 12 significant digits, and below `LEAST` (such as differences of equals) to zero.

    The last digits differ between processors, but the page must not.

    >>> rounded({"ms": [1.1489007392538901, 1.1489007392538904], "rounds": 7})
    {'ms': [1.14890073925, 1.14890073925], 'rounds': 7}
    """
    if isinstance(value, float):
        return float(f"{value:.12g}") if abs(value) >= LEAST else 0.0
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


def page_of_rows(path: Path, options: Options, parts: Sequence[Part]) -> str:
    """Return the page as this code writes it from the raw rows stored next to it, without computing anything."""
    folder = path.with_suffix("")
    record = json.loads((folder / ROWS).read_text())
    pairs = []
    for part in parts:
        pictures = dict.fromkeys(record["pictures"][part.name], "")
        kept = {"rows": record["parts"][part.name], "costs": "", "text": [], "tables": []}
        pairs.append((part, result_from(kept, pictures)))
    return whole_page(pairs, preface=preface(options, complete=True), pictures=f"{folder.name}/")


def stale(path: Path, options: Options, parts: Sequence[Part], *, search_again: bool) -> list[str]:
    """Return the files of the page and its folder that this code would write differently from the stored plans.

    With `search_again` the quickest searches must also find their plans again.
    """
    folder = path.with_suffix("")
    if not (folder / PLANS).is_file():
        raise OctoPipeError(f"{path}: no plans are kept beside it in {folder.name}/{PLANS}; run make reproduce")
    store = ResultStore(any_code=True, plans=read_kept(folder / PLANS))
    again = QuickSearches() if search_again else never
    bench = Bench(options=options, store=store, searches=False, search_again=again)
    finished = []
    for part in parts:
        finished.append(Finished(part=part, result=part.run(bench), reused=False))
    out = []
    for name, data in page_files(finished, options, complete=True, folder=folder.name).items():
        file = path if not name else folder / name
        if not file.exists() or file.read_bytes() != data:
            out.append(file.name)
    return out


class QuickSearches:
    """Selects searches of a few seconds, for a check that today's code still finds the stored plans: those of the
    two-stage example, and the first search of each tuner on one model of the paper."""

    MODEL, METHODS = "nemotron-h-8b", ("algorithm1", "best")

    def __init__(self) -> None:
        self.done: set[str] = set()

    def __call__(self, costs: CostTable, method: str) -> bool:
        if costs.model.startswith("two stages"):
            return True
        if costs.model != self.MODEL or method not in self.METHODS or method in self.done:
            return False
        self.done.add(method)
        return True


def never(_: CostTable, __: str) -> bool:
    return False

"""docs/reproduction.md: the whole reproduction on one page; appendix, raw rows, plans and pictures in a folder beside.

Knows: what stands above the tables and which files there are. Does not know: how a part is told (markdown.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from octopipe.base.files import write_whole
from octopipe.costs.table import CostTable
from octopipe.views.reproduce.bench import Bench, Options, write_json
from octopipe.views.reproduce.markdown import appendix, whole_page
from octopipe.views.reproduce.models import costs_in_words
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.runner import Finished
from octopipe.views.reproduce.store import Shelf, read_kept, write_kept

COMMAND = "octopipe reproduce all --page docs/reproduction.md"
ROWS, PLANS, APPENDIX = "rows.json", "plans.b85", "appendix.md"


def preface(options: Options, *, complete: bool) -> list[str]:
    """What a reader must know before any number."""
    lines = [
        f"Made by `{COMMAND}` (`make reproduce`); do not edit. Each line holds the paper's numbers against ours: "
        "**Algorithm 1** is the paper's tuner in our implementation, **our search** is what `octopipe tune` does by "
        "default. *agrees*: within 10 % of the paper's number (or the tolerance in the appendix); *trend*: an order or "
        "direction holds; **higher** and **lower**: it does not, with a reason that is tested below; *built*: follows "
        "from how our code is made; *fitted*: the number chose the reading. Only the first four count.",
        "Verdicts are those of Algorithm 1 on the published layer times. The last reading multiplies the head's time "
        "(× 2.5; LLaMA × 1.5), which fits nine measured baselines of the paper and is fitted to them: it is no "
        "evidence for itself. Baselines stand at their best published setting: Interleaved with its best number of "
        "chunks, Tessel in its fast mode, Mist within two layers of the mean, W put off into bubbles for all.",
        f"Costs: {costs_in_words(options.profiles)}. Algorithm 1: {options.rounds} iterations from 1F1B; our search: "
        f"{options.iterations} moves a lane; seed {options.seed}: the same page on every machine. The paper's times "
        "were measured on H800s, ours are predicted; (≤ 9 %) beside a number is what "
        "a proven bound leaves to any plan. Every row with its reason: [appendix](reproduction/appendix.md), "
        "[rows](reproduction/rows.json); which sentence of the paper each row answers: "
        "[sentences](reproduction/sentences.json).",
    ]
    if not complete:
        lines.append("**This page holds some parts only.**")
    return lines


def page_files(finished: Sequence[Finished], options: Options, *, complete: bool, folder: str) -> dict[str, bytes]:
    """File name (the page's own is empty) -> contents; without the plans."""
    pairs = [(f.part, f.result) for f in finished]
    page = whole_page(pairs, preface=preface(options, complete=complete), pictures=f"{folder}/")
    files = {"": page.encode(), APPENDIX: appendix(pairs).encode()}
    for _, result in pairs:
        files |= {name: svg.encode() for name, svg in result.pictures.items()}
    return files


def write_page(path: Path, finished: Sequence[Finished], options: Options, shelf: Shelf, *, complete: bool) -> None:
    """The page, and everything else in the folder of its name; of a complete one also the plans behind it."""
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in page_files(finished, options, complete=complete, folder=folder.name).items():
        write_whole(path if not name else folder / name, data)
    rows = {f.part.name: [row.as_dict() for row in f.result.rows] for f in finished}
    write_json(folder / ROWS, {"format": "octopipe.reproduction-rows/1", "parts": rows})
    if complete:
        shelf.any_code = True
        keys = {key for f in finished for key in f.plans}
        write_kept(folder / PLANS, {key: plan for key in keys if (plan := shelf.get(key, "")) is not None})


def stale(path: Path, options: Options, parts: Sequence[Part], *, search_again: bool) -> list[str]:
    """What of the page and its folder this code would write differently, with the plans that are kept there; with
    `search_again` the quickest searches must find their plans again."""
    folder = path.with_suffix("")
    shelf = Shelf(any_code=True, plans=read_kept(folder / PLANS))
    again = quick if search_again else never
    bench = Bench(options=options, shelf=shelf, searches=False, search_again=again)
    finished = []
    for part in parts:
        finished.append(Finished(part=part, result=part.run(bench), reused=False))
    out = []
    for name, data in page_files(finished, options, complete=True, folder=folder.name).items():
        file = path if not name else folder / name
        if not file.exists() or file.read_bytes() != data:
            out.append(file.name)
    return out


def quick(costs: CostTable, method: str) -> bool:
    """Searches of seconds: those of the two-stage example, by every method."""
    return costs.model.startswith("two stages")


def never(_: CostTable, __: str) -> bool:
    return False

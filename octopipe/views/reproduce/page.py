"""docs/reproduction.md: the whole reproduction on one page, with its pictures in a folder beside it.

Knows: what stands above the parts. Does not know: how a part is told (markdown.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from octopipe.base.files import write_whole
from octopipe.views.reproduce.bench import Options
from octopipe.views.reproduce.markdown import whole_page
from octopipe.views.reproduce.models import costs_in_words
from octopipe.views.reproduce.reading import reading_of
from octopipe.views.reproduce.runner import Finished

COMMAND = "octopipe reproduce all --page docs/reproduction.md"


def preface(options: Options, *, complete: bool) -> list[str]:
    """What a reader must know before any number."""
    lines = [
        f"Made by `{COMMAND}` (`make reproduce`); do not edit. Every table and figure of the OctoPipe paper, its "
        "numbers beside ours, a verdict for each: **reproduced** (the same within the stated share, 10 % unless the "
        "note says otherwise, or as good), **better**, or **not reproduced** with the reason. Ratio is ours / paper.",
        f"Costs: {costs_in_words(options.profiles)}. Searches of {options.iterations} moves a lane, two lanes, seed "
        f"{options.seed}; Algorithm 1 with {options.rounds} iterations an ablation: the same numbers on every "
        "machine. Step times of the paper were measured on H800s; ours are predicted by the simulator, whose own "
        "fidelity is a part below.",
        f"How the paper is read: {reading_of(options.profiles is not None).words}. Why is the first part.",
    ]
    if not complete:
        lines.append("**This page holds some parts only.**")
    return lines


def write_page(path: Path, finished: Sequence[Finished], options: Options, *, complete: bool) -> None:
    """The page, and every picture in the folder of its name."""
    folder = path.with_suffix("")
    pairs = [(f.part, f.result) for f in finished]
    for _, result in pairs:
        for name, svg in result.pictures.items():
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, svg.encode())
    page = whole_page(pairs, preface=preface(options, complete=complete), pictures=f"{folder.name}/")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page.encode())

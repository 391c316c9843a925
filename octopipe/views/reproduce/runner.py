"""Runs the parts of the reproduction one after another, stores finished parts, and writes the results.

Knows: the folder of results, what makes a finished part still valid, Markdown. Does not know: any part.

A finished part leaves NAME.json with a digest of its options, of the files they name and of the code; while that digest
is the same, the file is read instead of running the part. Pictures are stored next to it as NAME-….svg. If Ctrl-C or
SIGTERM ends a part, only its finished searches are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import write_whole
from octopipe.base.stop import StopRequest
from octopipe.views.reproduce.bench import Bench, Options, code_digest, write_json
from octopipe.views.reproduce.markdown import part_page
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.row import Result, result_from
from octopipe.views.reproduce.store import ResultStore

FORMAT = "octopipe.reproduction/2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A part and its result."""

    part: Part
    result: Result
    reused: bool
    plans: tuple[str, ...] = ()
    """Keys of the plans that its rows were made from."""


Progress = Callable[[str, int, int], None]
"""Called with a text about the current work, the number of finished parts, and the number of all parts."""


def chosen(names: Sequence[str], parts: Sequence[Part]) -> list[Part]:
    """Return the parts with these names, in the paper's order; all parts for no names or "all"."""
    import difflib

    known = {part.name: part for part in parts}
    for name in names:
        if name not in known and name != "all":
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise OctoPipeError(f"unknown part {name[:60]!r}{hint} (all, or some of {', '.join(known)})")
    wanted = set(known) if not names or "all" in names else set(names)
    return [part for part in parts if part.name in wanted]


def run_parts(
    parts: Sequence[Part],
    options: Options,
    folder: Path,
    *,
    progress: Progress | None = None,
    fresh: bool = False,
    bench: Bench | None = None,
) -> list[Finished]:
    """Return every part's result, read from the folder if an earlier run finished it with the same options and code."""
    folder.mkdir(parents=True, exist_ok=True)
    bench = bench or Bench(options=options, store=ResultStore(folder=folder / "plans"), fresh=fresh)
    out = []
    for number, part in enumerate(parts):

        def say(words: str, part: Part = part, number: int = number) -> None:
            if progress is not None:
                progress(f"{part.name}: {words}" if words else part.name, number, len(parts))

        bench.say = say
        say("")
        finished = None if fresh else _kept(part, options, folder)
        if finished is None:
            bench.asked = set()
            # An interrupted search returns its best plan so far, which must not count as the result of this part.
            with StopRequest(grace_s=0.0) as stop:
                result = part.run(bench)
            stop.raise_if_requested()
            finished = Finished(part=part, result=result, reused=False, plans=tuple(sorted(bench.asked)))
            _keep(finished, options, folder)
        out.append(finished)
    if progress is not None:
        progress("done", len(parts), len(parts))
    return out


def digest_of(options: Options) -> str:
    return f"{options.digest()}-{code_digest()}"


def _keep(finished: Finished, options: Options, folder: Path) -> None:
    part, result = finished.part, finished.result
    for name, svg in result.pictures.items():
        write_whole(folder / name, svg.encode())
    write_whole(folder / f"{part.name}.md", part_page(part, result).encode())
    record: dict[str, Any] = {"format": FORMAT, "part": part.name, "title": part.title, "digest": digest_of(options)}
    record["plans"] = list(finished.plans)
    write_json(folder / f"{part.name}.json", record | result.as_dict())


def _kept(part: Part, options: Options, folder: Path) -> Finished | None:
    """Return the result of an earlier run; None if there is none, it is no longer valid, or its files are damaged."""
    try:
        record: dict[str, Any] = json.loads((folder / f"{part.name}.json").read_text())
        if record["format"] != FORMAT or record["digest"] != digest_of(options):
            return None
        pictures = {name: (folder / name).read_text() for name in record["pictures"]}
        result = result_from(record, pictures)
        return Finished(part=part, result=result, reused=True, plans=tuple(record["plans"]))
    except (OSError, ValueError, KeyError, TypeError, OctoPipeError):
        return None


def counted(results: Iterable[Finished]) -> dict[str, int]:
    """Return how many claims got each verdict."""
    out: dict[str, int] = {}
    for finished in results:
        for row in finished.result.rows:
            out[row.verdict] = out.get(row.verdict, 0) + 1
    return out

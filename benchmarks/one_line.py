"""What keeps a benchmark from running, in one line with exit code 2, as the commands of the package say it.

Knows: how a benchmark's `main` is started and ended, its lists of names are read and its results are written. Does not
know: what is measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from octopipe.base.errors import OctoPipeError


def needs_device(device: str) -> None:
    """Refuse a CUDA device where there is none, before anything is prepared for it.

    The devices are counted, which does not initialise CUDA: a process that has done so before MPS starts stays outside
    it.
    """
    import torch

    if device.startswith("cuda") and torch.cuda.device_count() == 0:
        raise OctoPipeError("no CUDA GPU here; run it on a machine that has one, or try it with --device cpu")


def known(words: Sequence[str], names: Collection[str], what: str) -> list[str]:
    """The words, each of which must be one of the names: another one would be left out without a word."""
    if unknown := [word for word in words if word not in names]:
        raise OctoPipeError(f"no such {what}: {', '.join(unknown)}; there are {', '.join(names)}")
    return list(words)


def place_for(path: str | Path) -> Path:
    """Where a file is written in the end: its folder is made now, not when there are results to lose."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OctoPipeError(f"{target.parent}: no folder can be made here: {error.strerror}") from None
    return target


def write_json(found: object, path: str | Path) -> None:
    """Write what was measured to a file, whose folder is made if it is missing."""
    place_for(path).write_text(json.dumps(found, indent=1) + "\n")


def end(failed: Sequence[str]) -> None:
    """End with exit code 1 if a part failed and the benchmark went on: code 0 means that all parts were measured."""
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}; the causes are above")


def start(main: Callable[[], object]) -> None:
    """Run a benchmark; what the package refuses is one line."""
    try:
        main()
    except OctoPipeError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)

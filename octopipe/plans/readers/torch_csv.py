"""The schedule CSVs of torch.distributed.pipelining and torchtitan, read as plain rows of ops.

Knows: both formats. `compute_only`: a row per rank, cells `2F0`, `1I3`, `1W3`, `0B2`, `(0F1;3B0)OVERLAP_F_B`,
empty cells for idle slots. `compute_comms`: the same with `0SEND_F2`, `1RECV_B0` and so on, and `0UNSHARD`,
`0RESHARD`, `0REDUCE_GRAD` where FSDP is used; from PyTorch 2.15 on `0WAIT_SEND_F2`, `0WAIT_REDUCE_GRAD` too. Does
not know: torch, stages' layers, plans.

>>> read_torch_csv("0F0,0SEND_F0,0RECV_B0,0B0\\n1RECV_F0,(1F0;1B0)OVERLAP_F_B,1SEND_B0\\n")
TorchSchedule(rows=(('0F0', '0B0'), ('1F0', '1B0')), communicates=True, pairs=(('1F0', '1B0'),))
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief

_COMPUTE = re.compile(r"[0-9]{1,9}[FIWB][0-9]{1,9}")
_TRANSFER = re.compile(r"[0-9]{1,9}(SEND_F|RECV_F|SEND_B|RECV_B)[0-9]{1,9}")
_OTHER = re.compile(r"[0-9]{1,9}(UNSHARD|RESHARD|REDUCE_GRAD|WAIT_REDUCE_GRAD|WAIT_SEND_F|WAIT_SEND_B)[0-9]{0,9}")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSchedule:
    """The ops of every rank in order, as text."""

    rows: tuple[tuple[str, ...], ...]
    communicates: bool
    """Whether the file contained sends and receives (a plan derives them again)."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Ops that run together as one OVERLAP_F_B; they are adjacent in the rows."""


def read_torch_csv(text: str, where: str = "schedule") -> TorchSchedule:
    """The compute ops of a schedule CSV; the error for an unknown cell names rank and position."""
    rows: list[tuple[str, ...]] = []
    communicates = False
    pairs: list[tuple[str, str]] = []
    try:
        lines = list(csv.reader(text.splitlines()))
    except csv.Error as error:  # a cell larger than the module's limit
        raise OctoPipeError(f"{where}: not a schedule CSV ({error})") from None
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()
    for rank, cells in enumerate(lines):
        row: list[str] = []
        for position, cell in enumerate(cells):
            word = cell.strip()
            if _COMPUTE.fullmatch(word):
                row.append(word)
            elif match := _OVERLAP.fullmatch(word):
                parts = [part.strip() for part in match[1].split(";")]
                if not all(_COMPUTE.fullmatch(part) for part in parts) or len(parts) > 2:
                    raise _unknown(where, rank, position, word)
                row += parts
                if len(parts) == 2:
                    pairs.append((parts[0], parts[1]))
            elif _TRANSFER.fullmatch(word):
                communicates = True
            elif word and not _OTHER.fullmatch(word):
                raise _unknown(where, rank, position, word)
        rows.append(tuple(row))
    if not any(rows):
        raise OctoPipeError(f"{where}: it contains no ops; a schedule has one line per rank with cells such as 2F0")
    return TorchSchedule(rows=tuple(rows), communicates=communicates, pairs=tuple(pairs))


def _unknown(where: str, rank: int, position: int, word: str) -> OctoPipeError:
    return OctoPipeError(
        f"{where}: line {rank + 1}, cell {position + 1}: {brief(word)} is not an op of PyTorch's schedules; "
        "write stage, kind and micro-batch: 2F0"
    )

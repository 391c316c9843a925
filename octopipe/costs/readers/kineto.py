"""Traces of torch.profiler (Kineto) in Chrome's format, as spans.

Knows: which events are ranges, modules, operators, launches and kernels. Does not know: layers (`spans.py`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from octopipe.base.errors import OctoPipeError
from octopipe.costs.readers.spans import Kernel, Recording, Span

MODULE = "nn.Module: "
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "privateuse1_runtime", "xpu_runtime"})
_COLLECTIVES = ("nccl", "rccl")


class _Args(msgspec.Struct):
    sequence: int | None = msgspec.field(default=None, name="Sequence number")
    correlation: int | str | None = None


class _Event(msgspec.Struct):
    ph: str = ""
    cat: str | None = None
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str | None = None
    pid: int | str | None = None
    args: _Args | None = None


class _Trace(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")


def looks_like_trace(head: bytes) -> bool:
    """Return whether a file with this beginning is a trace: a list of events, or an object with a key for events, which
    often follows other keys."""
    start = head.lstrip()
    return b'"traceEvents"' in head or b'"deviceProperties"' in head or start.startswith((b'[{"ph"', b'[\n{"ph"'))


def read_trace(data: bytes, where: str) -> Recording:
    """The spans of a trace."""
    try:
        if data.lstrip()[:1] == b"[":
            events = msgspec.json.decode(data, type=list[_Event])
        else:
            events = msgspec.json.decode(data, type=_Trace).events
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        why = " ".join(str(error).split())[:160]
        raise OctoPipeError(f"{where}: not a trace of torch.profiler ({why}); export it again") from None
    # Times count from the machine's start; added to such large numbers, a short event's length would be rounded away.
    first = min((event.ts for event in events if event.ph == "X"), default=0.0)
    marks: list[Span] = []
    modules: list[Span] = []
    operators: list[Span] = []
    launches: dict[Any, tuple[Any, float]] = {}
    kernels: list[_Event] = []
    for event in events:
        if event.ph != "X":
            continue
        event.ts -= first
        args = event.args
        if event.cat == "cpu_op":
            operators.append(_span(event, args.sequence if args else None))
        elif event.cat == "user_annotation":
            marks.append(_span(event))
        elif event.cat == "python_function" and event.name.startswith(MODULE):
            modules.append(_span(event, name=event.name.removeprefix(MODULE)))
        elif event.cat in _LAUNCHES and args and args.correlation is not None:
            launches[args.correlation] = ((event.pid, event.tid), event.ts)
        elif event.cat == "kernel" and not any(word in event.name.lower() for word in _COLLECTIVES):
            kernels.append(event)
    found = []
    for event in kernels:
        launch = launches.get(event.args.correlation if event.args else None)
        if launch is not None:
            found.append(Kernel(*launch, event.ts, event.ts + event.dur))
    return Recording(marks=marks, modules=modules, operators=operators, kernels=found)


def _span(event: _Event, sequence: int | None = None, name: str | None = None) -> Span:
    name = event.name if name is None else name
    return Span(name, (event.pid, event.tid), event.ts, event.ts + event.dur, sequence)

"""Layer times from the spans of a profiler trace, independent of the tool that recorded it.

Knows: which spans are layers (named with their phase, or the modules of a forward), which backward belongs to which
forward (autograd's sequence numbers), and which kernels a span launched. Does not know: file formats (`kineto.py`,
`nsight.py`), costs.

Layers are identified in one of two ways. *Named*: spans called "layer 3 forward" and "layer 3 backward" ("input" and
"weight" if they are timed separately), with any words before the phase. *Found*: spans without a phase (modules, or
record_function around each layer) on the thread that runs the forward; their backward is what autograd ran for their
operators.

>>> phase_of("layers.3.forward"), phase_of("head bwd"), phase_of("layers.3")
(('layers.3', 'forward'), ('head', 'backward'), None)
"""

from __future__ import annotations

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief
from octopipe.base.limits import MAX_LAYERS, over

HOW = "docs/guides/profiles.md says how to mark layers"
_PHASES = {
    "forward": "forward", "fwd": "forward", "f": "forward",
    "backward": "backward", "bwd": "backward", "b": "backward",
    "input": "input", "dgrad": "input", "i": "input",
    "weight": "weight", "wgrad": "weight", "w": "weight",
}  # fmt: skip
_NAMED = re.compile(rf"^(.+?)[\s._:/-]+({'|'.join(_PHASES)})$", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_STEP = re.compile(r"^ProfilerStep#\d+$")
BACKWARD = "autograd::engine::evaluate_function: "


@dataclass(frozen=True, slots=True)
class Span:
    """A named time range on one host thread; times in µs."""

    name: str
    thread: object
    start: float
    stop: float
    sequence: int | None = None
    """Autograd's sequence number of this operator, or of the forward operator whose backward this is."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Work on a device, and the host's call that launched it; times in µs."""

    thread: object
    launched: float
    start: float
    stop: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a profiler recorded."""

    marks: Sequence[Span] = ()
    """Ranges that users (record_function, NVTX) have named."""
    modules: Sequence[Span] = ()
    operators: Sequence[Span] = ()
    """Operators, forward and backward."""
    kernels: Sequence[Kernel] = ()
    """Computation on devices, without collectives; empty if all computation ran on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Times per layer as a tool reports them: `backward_ms` if I and W were not timed separately."""

    names: tuple[str, ...]
    forward_ms: tuple[float, ...] = ()
    backward_ms: tuple[float, ...] = ()
    input_ms: tuple[float, ...] = ()
    weight_ms: tuple[float, ...] = ()
    total_ms: tuple[float, ...] = ()
    """F plus B, if only their sum is known."""
    notes: tuple[str, ...] = field(default=())


def phase_of(name: str) -> tuple[str, str] | None:
    """Return the layer and the phase that a span's name states, or None if it states no phase."""
    found = _NAMED.match(name.strip())
    return (found[1].strip(), _PHASES[found[2].lower()]) if found else None


def layer_times(recording: Recording, where: str) -> LayerTimes:
    """Return the times of the layers in a recording. Raise an error that states what is missing if there are none."""
    named = [span for span in recording.marks if phase_of(span.name)]
    if len({phase_of(span.name)[0] for span in named if phase_of(span.name)[1] == "forward"}) >= 2:  # type: ignore[index]
        return _of_named(named, recording, where)
    for spans, what in ((_marks(recording), "marked ranges"), (list(recording.modules), "modules")):
        layers = _Found.layers_in(spans)
        if layers:
            return _Found(spans, layers, recording, where).times(what)
    raise OctoPipeError(
        f"{where}: it contains neither ranges named after layers nor modules; record with record_function around each "
        f"layer, or with_stack=True ({HOW})"
    )


# -- spans whose names state their phase ---------------------------------------------------------------


def _of_named(named: Sequence[Span], recording: Recording, where: str) -> LayerTimes:
    busy = _Busy(recording)
    times: dict[str, dict[str, list[float]]] = {}
    for span in sorted(named, key=lambda s: s.start):
        label, phase = phase_of(span.name)  # type: ignore[misc]
        times.setdefault(label, defaultdict(list))[phase].append(
            busy.kernels(span) if busy.on_device else (span.stop - span.start) / 1e3
        )
    order = [label for label in times if "forward" in times[label]]
    return named_times({label: {p: median(v) for p, v in times[label].items()} for label in order}, where)


def named_times(table: dict[str, dict[str, float]], where: str, notes: Sequence[str] = ()) -> LayerTimes:
    """Return the layer times of a table {label: {phase: ms}}, in its order. Raise an error if a phase is missing."""
    if not table:
        raise OctoPipeError(f"{where}: no range is named after a layer's forward; {HOW}")
    if over("layers", len(table), MAX_LAYERS):
        raise OctoPipeError(f"{where}: {over('layers', len(table), MAX_LAYERS)[0]}")
    for label, phases in table.items():
        for phase in phases:
            other = {"input": "weight", "weight": "input"}.get(phase)
            if other and other not in phases:
                raise OctoPipeError(f"{where}: {brief(label)} has a range for {phase} and none for {other}; mark both")
        if "forward" not in phases or not phases.keys() & {"backward", "input"}:
            missing = "backward" if "forward" in phases else "forward"
            wanted = brief(f"{label} {missing}")
            raise OctoPipeError(f"{where}: {brief(label)} has no range for its {missing}; name one {wanted} ({HOW})")
    rows, split = list(table.values()), all("input" in phases for phases in table.values())
    forward = tuple(phases["forward"] for phases in rows)
    if split:
        return LayerTimes(
            names=tuple(table),
            forward_ms=forward,
            input_ms=tuple(p["input"] for p in rows),
            weight_ms=tuple(p["weight"] for p in rows),
            notes=tuple(notes),
        )
    backward = tuple(p["input"] + p["weight"] if "input" in p else p["backward"] for p in rows)
    return LayerTimes(names=tuple(table), forward_ms=forward, backward_ms=backward, notes=tuple(notes))


# -- the time of a span --------------------------------------------------------------------------------


class _Busy:
    """The work in time ranges of a thread: the kernels launched there, or without a device the operators run there."""

    def __init__(self, recording: Recording):
        self.on_device = bool(recording.kernels)
        self._kernels: dict[object, list[Kernel]] = defaultdict(list)
        for kernel in sorted(recording.kernels, key=lambda k: k.launched):
            self._kernels[kernel.thread].append(kernel)
        self._launches = {thread: [k.launched for k in all_] for thread, all_ in self._kernels.items()}
        self._operators: dict[object, list[Span]] = defaultdict(list)
        for span in outermost(recording.operators):
            self._operators[span.thread].append(span)
        self._starts = {thread: [s.start for s in all_] for thread, all_ in self._operators.items()}

    def of(self, thread: object, start: float, stop: float) -> float:
        """Return the ms of work that began between the two times."""
        if self.on_device:
            return self._of_kernels(thread, start, stop)
        starts = self._starts.get(thread, [])
        inside = slice(bisect.bisect_left(starts, start), bisect.bisect_left(starts, stop))
        return sum(min(s.stop, stop) - s.start for s in self._operators.get(thread, [])[inside]) / 1e3

    def kernels(self, span: Span) -> float:
        return self._of_kernels(span.thread, span.start, span.stop)

    def _of_kernels(self, thread: object, start: float, stop: float) -> float:
        launches = self._launches.get(thread, [])
        inside = slice(bisect.bisect_left(launches, start), bisect.bisect_right(launches, stop))
        total, until = 0.0, float("-inf")
        for kernel in sorted(self._kernels.get(thread, [])[inside], key=lambda k: k.start):
            total += max(0.0, kernel.stop - max(kernel.start, until))
            until = max(until, kernel.stop)
        return total / 1e3


def outermost(spans: Iterable[Span]) -> list[Span]:
    """Return the spans that lie inside no other span of their thread."""
    out, until = [], dict[object, float]()
    for span in sorted(spans, key=lambda s: (s.start, -s.stop)):
        if span.start >= until.get(span.thread, float("-inf")):
            out.append(span)
            until[span.thread] = span.stop
    return out


# -- layers recognised by their position among nested spans --------------------------------------------


def _marks(recording: Recording) -> list[Span]:
    return [s for s in recording.marks if not _STEP.match(s.name) and "#" not in s.name]


@dataclass(slots=True)
class _Node:
    """A span name in the tree of nested spans; all calls of a name below the same parents are one node."""

    children: dict[str, _Node] = field(default_factory=dict)
    inside: int = 0


@dataclass(slots=True)
class _Call:
    """One pass through all layers."""

    spans: list[Span]
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)


class _Found:
    """Layers found among nested spans, and their times; autograd's sequence numbers link backward to forward."""

    def __init__(self, spans: list[Span], layers: list[str], recording: Recording, where: str):
        self.layers, self.where, self.busy = layers, where, _Busy(recording)
        wanted = set(layers)
        threads = Counter(s.thread for s in spans if s.name in wanted)
        self.thread = threads.most_common(1)[0][0]
        mine = sorted((s for s in spans if s.thread == self.thread), key=lambda s: (s.start, -s.stop))
        self.outer = outermost(mine)
        backward = [s for s in recording.operators if s.name.startswith(BACKWARD)]
        self.backward = outermost(backward)
        during = _inside(self.backward, self.thread)
        ran = outermost(s for s in mine if s.name in wanted)
        self.again = any(during(s.start) for s in ran)
        self.calls = _calls([s for s in ran if not during(s.start)], layers)
        self.operators = sorted(
            (s for s in recording.operators if s.thread == self.thread and not s.name.startswith(BACKWARD)),
            key=lambda s: s.start,
        )

    @staticmethod
    def layers_in(spans: Sequence[Span]) -> list[str]:
        """Return the names of the layers, or [] if none are found.

        They are children of the innermost span that contains most of the other spans: the largest ones, and those whose
        names differ from theirs only in numbers.
        """
        root = _Node()
        path: dict[object, list[tuple[float, _Node]]] = defaultdict(list)
        for span in sorted(spans, key=lambda s: (s.start, -s.stop)):
            open_ = path[span.thread]
            while open_ and open_[-1][0] <= span.start:
                open_.pop()
            above = open_[-1][1] if open_ else root
            node = above.children.get(span.name)
            if node is None:
                node = above.children[span.name] = _Node()
                for _, ancestor in open_:
                    ancestor.inside += 1
                root.inside += 1
            open_.append((span.stop, node))
        here = root
        while here.children:
            biggest = max(here.children.values(), key=lambda node: node.inside)
            if 2 * (biggest.inside + 1) <= here.inside:
                break
            here = biggest
        largest = max((node.inside for node in here.children.values()), default=0)
        blocks = {_family(name) for name, node in here.children.items() if 4 * node.inside >= largest}
        layers = [name for name in here.children if _family(name) in blocks]
        return layers if len(layers) >= 2 else []

    def times(self, what: str) -> LayerTimes:
        if not self.calls:
            raise OctoPipeError(
                f"{self.where}: it contains no complete pass through all {len(self.layers)} layers; record more"
            )
        if not self.backward:
            raise OctoPipeError(
                f"{self.where}: it contains no backward pass; record a training step, or name the "
                f"ranges of the backward "
                f"({HOW})"
            )
        owner: dict[int, tuple[_Call, int]] = {}
        for number, call in enumerate(self.calls):
            self._forward(call, self._limits(number), owner)
        self._backward(owner)
        calls = [call for call in self.calls if any(call.backward)]
        if not calls:
            raise OctoPipeError(f"{self.where}: no backward pass belongs to the layers in it; record a training step")
        columns = range(len(self.layers) + 2)
        forward = [median(call.forward[k] for call in calls) for k in columns]
        backward = [median(call.backward[k] for call in calls) for k in columns]
        names = ["embedding", *self.layers, "head"]
        keep = [k for k in columns if 0 < k <= len(self.layers) or forward[k] + backward[k] > 0.0]
        notes = [f"layers are the {len(self.layers)} {what} that {_few(self.layers)}; medians of {len(calls)}"]
        notes[0] += " pass" if len(calls) == 1 else " passes"
        if self.again:
            notes.append("layers ran again in the backward (activation checkpointing): B includes that time")
        return LayerTimes(
            names=tuple(names[k] for k in keep),
            forward_ms=tuple(forward[k] for k in keep),
            backward_ms=tuple(backward[k] for k in keep),
            notes=tuple(notes),
        )

    def _limits(self, number: int) -> tuple[float, float]:
        """Return the start and the end of a pass: what surrounds its layers, up to its backward."""
        spans = self.calls[number].spans
        first, last = spans[0].start, spans[-1].stop
        stop = min((s.start for s in self.backward if s.start >= last), default=float("inf"))
        if number + 1 < len(self.calls):
            stop = min(stop, self.calls[number + 1].spans[0].start)
        around = [s for s in self.outer if s.start <= first and s.stop >= last]
        begin = around[0].start if around else first
        before = max((s.stop for s in self.backward if s.stop <= first), default=float("-inf"))
        if number:
            before = max(before, self.calls[number - 1].spans[-1].stop)
        return max(begin, before) if around else before, stop

    def _forward(self, call: _Call, limits: tuple[float, float], owner: dict[int, tuple[_Call, int]]) -> None:
        starts = [limits[0], *(s.start for s in call.spans), call.spans[-1].stop]
        stops = [*(s.start for s in call.spans), call.spans[-1].stop, limits[1]]
        call.forward = [self.busy.of(self.thread, a, b) for a, b in zip(starts, stops)]
        call.backward = [0.0] * len(starts)
        at = bisect.bisect_left(self.operators, limits[0], key=lambda s: s.start)
        for span in self.operators[at:]:
            if span.start >= limits[1]:
                break
            if span.sequence is not None:  # the last operator with a number is the one that made the node
                owner[span.sequence] = (call, bisect.bisect_right(starts, span.start) - 1)

    def _backward(self, owner: dict[int, tuple[_Call, int]]) -> None:
        last: dict[object, tuple[_Call, int] | None] = {}
        for span in self.backward:
            found = owner.get(span.sequence) if span.sequence is not None else None
            if found is None and span.name.endswith("AccumulateGrad"):
                found = last.get(span.thread)  # accumulates what the backward function before it computed
            if found is not None:
                call, k = found
                call.backward[k] += self.busy.kernels(span) if self.busy.on_device else (span.stop - span.start) / 1e3
            last[span.thread] = found


def _family(name: str) -> str:
    return _NUMBER.sub("#", name)


def _few(names: Sequence[str]) -> str:
    return f"begin with {brief(names[0])} and end with {brief(names[-1])}"


def _inside(spans: Sequence[Span], thread: object) -> Callable[[float], bool]:
    mine = [s for s in spans if s.thread == thread]
    starts = [s.start for s in mine]

    def inside(time: float) -> bool:
        at = bisect.bisect_right(starts, time) - 1
        return at >= 0 and time < mine[at].stop

    return inside


def _calls(spans: Sequence[Span], layers: Sequence[str]) -> list[_Call]:
    """Return the passes through all layers in order; incomplete passes at the edges of a recording are left out."""
    calls: list[_Call] = []
    run: list[Span] = []
    for span in sorted(spans, key=lambda s: s.start):
        if span.name != layers[len(run)]:
            run = []
        if span.name == layers[len(run)]:
            run.append(span)
        if len(run) == len(layers):
            calls.append(_Call(run))
            run = []
    return calls

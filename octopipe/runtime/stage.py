"""One stage: modules run in sequence, one micro-batch at a time, in the ops F, R, I, W and B.

Knows: how a stage's forward is cut off from its neighbours' graphs, how values of any nesting cross that cut,
what is kept between the ops, and when it is let go. Does not know: ranks, transports, plans or losses'
meaning; the executor calls these methods in the order a plan says.

    stage = Stage([embedding, block], input_grad=False)
    run = stage.forward(tokens)                       # F: run.outputs go to the next stage
    run.backward_input(grads)                         # I: returns the input gradients
    run.backward_weight()                             # W
    run.backward_full(grads)                          # or B, the two at once

What is kept: after F the graph (or, with `recompute=True`, only the inputs, until R builds the graph);
after I the operands of the weight GEMMs; after W nothing. Outputs are not kept: the run remembers the graph
edge, so an output's memory is the receiver's to free.

Calls: a layer whose `forward` takes one positional argument gets the whole value (tensor, tuple or dict);
one that takes more gets a tuple unpacked as `layer(*value)` and a dict as `layer(**value)`.
Streams: call all methods of a stage under one CUDA stream. Autocast: enter it around `forward` and
`recompute` only.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from octopipe.errors import OctoPipeError
from octopipe.runtime.rerun import Rerun
from octopipe.runtime.wgrad import SplitMode, WeightQueue

_NOTHING = nullcontext()
_run_backward = getattr(torch.autograd.graph, "_engine_run_backward", None)
"""What `torch.autograd.backward` calls in the end; its checks of our own gradients cost as much as a small op."""
_run_on_host = getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", None)
"""What that calls in turn, once it has copied the context for the threads of devices: on the host there are none."""


def _backward(roots: tuple[Any, ...], gradients: tuple[Tensor, ...]) -> None:
    if _run_on_host is not None and gradients[0].is_cpu:
        _run_on_host(roots, gradients, False, False, (), True, True)
    elif _run_backward is None:
        torch.autograd.backward(roots, gradients)
    else:
        _run_backward(roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _edge(tensor: Tensor) -> Any:
    """Where the tensor's gradient enters the graph; keeps the graph, not the tensor, alive."""
    node = tensor.grad_fn
    # A node of a Function written in Python does not own its graph: torch's own way takes care of that.
    if node is None or isinstance(node, torch._C._FunctionBase):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


def flatten(value: Any, leaves: list[Any]) -> None:
    """Append the leaves of nested tuples, lists and dicts (in key order of insertion) to `leaves`."""
    if isinstance(value, Tensor):  # most values are one tensor: ask that first
        leaves.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            flatten(item, leaves)
    elif isinstance(value, dict):
        for item in value.values():
            flatten(item, leaves)
    else:
        leaves.append(value)


def rebuild(value: Any, leaves: Iterator[Any]) -> Any:
    """`value` with its leaves replaced, in order, by those of `leaves`.

    >>> rebuild({"a": 1, "b": (2, [3])}, iter("xyz"))
    {'a': 'x', 'b': ('y', ['z'])}
    """
    if isinstance(value, tuple):
        items = [rebuild(item, leaves) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [rebuild(item, leaves) for item in value]
    if isinstance(value, dict):
        return {key: rebuild(item, leaves) for key, item in value.items()}
    return next(leaves)


def _takes_one(module: nn.Module) -> bool:
    """Whether the module's forward takes exactly one positional argument."""
    module = getattr(module, "_orig_mod", module)  # behind torch.compile
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return True
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return False
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) == 1


class Stage:
    """Modules in sequence on one rank. `input_grad=False` marks a first stage: its I has no result."""

    def __init__(self, modules: Sequence[nn.Module], *, input_grad: bool = True, first_layer: int = 0):
        self.modules = tuple(modules)
        self.input_grad = input_grad
        self.first_layer = first_layer
        self._calls = tuple((first_layer + k, m, _takes_one(m)) for k, m in enumerate(self.modules))
        """Every module's layer, the module, and whether it takes one argument."""
        self.mode = SplitMode((p for m in self.modules for p in m.parameters()), WeightQueue())
        self.rerun = Rerun(self.mode)

    def forward(
        self,
        inputs: Any,
        *,
        then: Callable[[Any], Any] | None = None,
        recompute: bool = False,
        seed: int | None = None,
        input_grad: Sequence[bool] | None = None,
    ) -> StageRun:
        """F of one micro-batch. `then` (the loss, say) is applied to the last value, inside the graph.

        `seed` makes random draws depend on it and the layer's index alone; the caller restores the global
        generators when it wants to (`rng_kept`). `input_grad` says leaf by leaf which inputs want a gradient
        (default: floating ones).
        """
        return StageRun(self, inputs, then, seed, input_grad, not recompute)

    def end_step(self) -> None:
        """Forget what is only valid while the weights stand still (autocast's copies of them)."""
        self.mode.clear_casts()

    def _call(self, value: Any, then: Callable[[Any], Any] | None, seed: int | None) -> Any:
        for layer, module, one in self._calls:
            if seed is not None:
                _seed_all(_mix(seed, layer))
            if one or isinstance(value, Tensor):
                value = module(value)
            elif isinstance(value, tuple):
                value = module(*value)
            elif isinstance(value, dict):
                value = module(**value)
            else:
                value = module(value)
        if then is None:
            return value
        if seed is not None:
            _seed_all(_mix(seed, -1))
        return then(value)


class StageRun:
    """One micro-batch's passage through a stage: what `Stage.forward` makes, with the graph or for R to build it."""

    __slots__ = (
        "_edges", "_inputs", "_leaves", "_mode", "_queue", "_rng", "_seed", "_stage", "_then", "_wanted", "outputs",
        "outputs_need_grad",
    )  # fmt: skip

    def __init__(
        self,
        stage: Stage,
        inputs: Any,
        then: Callable[[Any], Any] | None,
        seed: int | None,
        input_grad: Sequence[bool] | None,
        graph: bool,
    ):
        self._stage, self._then, self._seed = stage, then, seed
        self._mode, self._queue = stage.mode, WeightQueue()
        self._edges: list[Any] | None = None
        self._rng: Any = None
        # Cut from the neighbour's graph: our leaves share its memory but not its history.
        if isinstance(inputs, Tensor):  # most values are one tensor
            self._inputs: Any = inputs.detach()
            self._leaves: list[Any] = [self._inputs]
            wanted = [stage.input_grad and inputs.is_floating_point()] if input_grad is None else input_grad
        else:
            leaves: list[Any] = []
            flatten(inputs, leaves)
            if input_grad is None:
                wanted = [stage.input_grad and isinstance(t, Tensor) and t.is_floating_point() for t in leaves]
            else:
                wanted = input_grad
            self._leaves = [t.detach() if isinstance(t, Tensor) else t for t in leaves]
            self._inputs = rebuild(inputs, iter(self._leaves))
        self._wanted: Sequence[bool] = wanted
        self.outputs: Any = None
        """What the last module (or `then`) returned, cut from the graph; set to None once passed on."""
        self.outputs_need_grad: list[bool] = []
        """Leaf by leaf of `outputs`: whether I and B take a gradient for it."""
        self._forward(graph)

    def _forward(self, grad: bool, mode: SplitMode | None = None) -> None:
        if grad:
            for leaf, wanted in zip(self._leaves, self._wanted):
                if wanted:
                    leaf.requires_grad_()
        mode, stage = mode or self._mode, self._stage
        mode.queue = self._queue
        if self._seed is None and not grad:
            self._rng = _rng_state()
        watch = mode if grad and mode.has_weights else _NOTHING  # it costs a few microseconds per call of torch
        if grad and torch.is_grad_enabled():  # what it mostly is: nothing to switch
            with watch:
                value = stage._call(self._inputs, self._then, self._seed)
        else:
            with torch.set_grad_enabled(grad), watch:
                value = stage._call(self._inputs, self._then, self._seed)
        if isinstance(value, Tensor):
            if grad:
                need = value.requires_grad
                self.outputs_need_grad = [need]
                self._edges = [_edge(value) if need else None]
            self.outputs = value.detach()
        else:
            self._cut(value, grad)
        if grad and True not in self._wanted:
            self._leaves, self._inputs = [], None  # the graph holds what it needs

    def _cut(self, value: Any, grad: bool) -> None:
        """The outputs, and the edges to their graph, of a value that is more than one tensor."""
        leaves: list[Any] = []
        flatten(value, leaves)
        if grad:
            self.outputs_need_grad = need = [isinstance(t, Tensor) and t.requires_grad for t in leaves]
            self._edges = [_edge(t) if n else None for t, n in zip(leaves, need)]
        cut = [t.detach() if isinstance(t, Tensor) else t for t in leaves]
        self.outputs = rebuild(value, iter(cut))

    def recompute(self) -> None:
        """R: build the graph that F with `recompute=True` did not keep."""
        if self._edges is not None:
            raise OctoPipeError("R of a run that kept its graph: pass recompute=True to its forward")
        inputs, leaves, rerun = self._inputs, self._leaves, self._stage.rerun
        while True:
            rerun.begin(self._queue)
            if self._rng is None:
                self._forward(True, rerun)
            else:
                with rng_kept():
                    _set_rng_state(self._rng)
                    self._forward(True, rerun)
            edge = self._edges[0] if self._edges and len(self._edges) == 1 else None
            if rerun.valid(edge and edge.node):
                break
            self._inputs, self._leaves, self._edges = inputs, leaves, None
        self._rng = self.outputs = None  # the next stage has had them

    def backward_input(self, grads: Any = None) -> list[Tensor | None]:
        """I: everything but the weight GEMMs, which wait for W. See `backward_full` for values."""
        self._queue.defer = True
        return self._backward(grads)

    def backward_weight(self) -> None:
        """W: the weight GEMMs that I left."""
        if self._edges is not None:
            raise OctoPipeError("W before I of the same micro-batch: run backward_input first")
        self._queue.run()

    def backward_full(self, grads: Any = None) -> list[Tensor | None]:
        """B: I and W at once. `grads` has the leaves of `outputs` (None where there is no gradient);
        left out, every output is a scalar loss. Returns one entry per input leaf, None where none is wanted.
        """
        self._queue.defer = False
        return self._backward(grads)

    def _backward(self, grads: Any) -> list[Tensor | None]:
        edges = self._edges
        if edges is None:
            raise OctoPipeError("backward of a run without a graph: run R first, and I or B only once")
        leaves: list[Any]
        if grads is None:
            leaves = [None if edge is None else _one(edge) for edge in edges]
        elif isinstance(grads, list) and len(grads) == 1 and isinstance(grads[0], Tensor):  # what it mostly is
            leaves = grads
        else:
            leaves = []
            flatten(grads, leaves)
        self._edges = None
        if len(edges) == len(leaves) == 1:
            roots, seeds = tuple(edges), tuple(leaves)
            if roots[0] is None or seeds[0] is None:
                roots = seeds = ()
        else:
            pairs = [(e, g) for e, g in zip(edges, leaves, strict=True) if e is not None and g is not None]
            roots, seeds = tuple(e for e, _ in pairs), tuple(g for _, g in pairs)
            del pairs
        del edges, leaves, grads
        if roots:
            if self._queue.reruns:
                self._mode.queue = self._queue
                with self._mode:
                    _backward(roots, seeds)
            else:
                _backward(roots, seeds)
        del roots, seeds
        inputs, self._leaves, self._inputs = self._leaves, [], None
        self.outputs = self._then = None
        result: list[Tensor | None] = []
        for leaf, wanted in zip(inputs, self._wanted):
            if not wanted:
                result.append(None)
            else:  # an input that nothing depends on still owes its sender a gradient
                result.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
                leaf.grad = None
        return result or [None] * len(self._wanted)

    def weight_bytes(self) -> int:
        """Bytes alive only because W has not run (after I)."""
        return _storage_bytes(self._queue.tensors(), {})


def _one(edge: Any) -> Tensor:
    """The gradient of a scalar loss whose gradient enters the graph here."""
    like = edge.node._input_metadata[edge.output_nr]
    if math.prod(like.shape) != 1:
        raise OctoPipeError(f"backward without gradients needs a scalar loss, not shape {tuple(like.shape)}")
    return torch.ones(like.shape, dtype=like.dtype, device=like.device)


# --- random numbers --------------------------------------------------------------------------------------


def _generators() -> list[torch.Generator]:
    if torch.cuda.is_initialized():
        return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]
    return [torch.default_generator]


def _rng_state() -> list[tuple[torch.Generator, Tensor]]:
    return [(g, g.get_state()) for g in _generators()]


def _set_rng_state(states: list[tuple[torch.Generator, Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


@contextmanager
def rng_kept() -> Iterator[None]:
    """Leaves the global generators as they were."""
    states = _rng_state()
    try:
        yield
    finally:
        _set_rng_state(states)


def _mix(seed: int, layer: int) -> int:
    """A seed per layer that neighbours do not share (splitmix64's finaliser)."""
    z = (seed * 0x9E3779B97F4A7C15 + (layer + 1) * 0xD1B54A32D192ED03) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) >> 1


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


# --- accounting ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Activation bytes of one micro-batch, parameters not counted, storage shared by tensors counted once."""

    until_input: int
    """Held from F until I."""
    until_weight: int
    """Held from I until W."""


def _storage_bytes(tensors: Sequence[Tensor], skip: dict[int, int]) -> int:
    seen = dict(skip)
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen[storage.data_ptr()] = 1
            total += storage.nbytes()
    return total


def held_bytes(stage: Stage, inputs: Any, *, then: Callable[[Any], Any] | None = None) -> HeldBytes:
    """Run F and I once with gradients of ones, counting what is held. Leaves `.grad` as it was."""
    parameters = [p for m in stage.modules for p in m.parameters()]
    buffers = [b for m in stage.modules for b in m.buffers()]
    own = {t.untyped_storage().data_ptr(): 1 for t in (*parameters, *buffers)}
    grads = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda t: t):
        run = stage.forward(inputs, then=then)
    until_input = _storage_bytes(saved, own)
    saved.clear()
    leaves: list[Any] = []
    flatten(run.outputs, leaves)
    run.backward_input([torch.ones_like(t) if n else None for t, n in zip(leaves, run.outputs_need_grad)])
    result = HeldBytes(until_input=until_input, until_weight=_storage_bytes(run._queue.tensors(), own))
    for p, grad in zip(parameters, grads):
        p.grad = grad
    return result

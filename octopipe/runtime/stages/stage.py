"""One stage: modules run in sequence, one micro-batch at a time, in the ops F, R, I, W and B.

Knows: how a stage's forward is cut off from its neighbours' graphs, what is kept between the ops, and when it is let
go. Does not know: ranks, transports, plans or losses' meaning; the executor calls these methods in the order a plan
says. How values are taken apart is in `values`, how R repeats F in `replay`.

    stage = Stage([embedding, block], input_grad=False)
    run = stage.forward(tokens)                       # F: run.outputs go to the next stage
    run.backward_input(grads)                         # I: returns the input gradients
    run.backward_weight()                             # W
    run.backward_full(grads)                          # or B, the two at once

What is kept: after F the graph (or, with `recompute=True`, only the inputs, until R builds the graph);
after I the operands of the weight GEMMs; after W nothing. Outputs are not kept: the run remembers the graph
edge, so an output's memory is the receiver's to free.

Calls: a layer whose `forward` takes one positional argument gets the whole value (tensor, tuple or dict);
one that takes more gets a tuple unpacked as `layer(*value)` and a dict as `layer(**value)`. Side inputs are the
arguments of these names, passed by keyword; they do not count as positional.
Streams: call all methods of a stage under one CUDA stream. Autocast: enter it around `forward` and
`recompute` only.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel as DDP

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.stages.replay import Found, Kept, Replay, undo
from octopipe.runtime.stages.rerun import Rerun
from octopipe.runtime.stages.rng import States, mix, rng_kept, rng_state, seed_all, set_rng_state
from octopipe.runtime.stages.wgrad import SplitMode, WeightQueue
from octopipe.runtime.stages.wgrad_ops import Restart
from octopipe.runtime.values import build, check_leaves, flatten
from octopipe.runtime.wire.buffers import storage_bytes
from octopipe.runtime.wire.messages import plain_gradient, takes_gradient

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


def _arguments(module: nn.Module, side: Sequence[str]) -> tuple[bool, tuple[str, ...]]:
    """Whether the module's forward takes exactly one positional argument, and which side inputs it names."""
    module = getattr(module, "_orig_mod", module)  # behind torch.compile
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return True, ()
    named = tuple(p.name for p in parameters if p.name in side and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return False, named
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.name not in named for p in positional) == 1, named


def _has_no_default(module: nn.Module, name: str) -> bool:
    parameter = inspect.signature(getattr(module, "_orig_mod", module).forward).parameters[name]
    return parameter.default is parameter.empty


class Loss:
    """A loss function with its target: what follows the last layer."""

    __slots__ = ("function", "target")

    def __init__(self, function: Callable[..., Any], target: Any):
        self.function, self.target = function, target

    def __call__(self, output: Any) -> Any:
        return self.function(output, self.target)


class Stage:
    """Modules in sequence on one rank. `input_grad=False` marks a first stage: its I has no result.

    `side`: names of side inputs; `forward` takes their values.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        input_grad: bool = True,
        first_layer: int = 0,
        side: Sequence[str] = (),
    ):
        self.modules = tuple(modules)
        self.input_grad = input_grad
        self.first_layer = first_layer
        self._calls = tuple((first_layer + k, m, *_arguments(m, side)) for k, m in enumerate(self.modules))
        """Every module's layer, the module, whether it takes one argument, and the side inputs it takes."""
        self.side = tuple(dict.fromkeys(name for *_, names in self._calls for name in names))
        """Side inputs that the modules name."""
        self.side_required = {n for _, m, _, names in self._calls for n in names if _has_no_default(m, n)}
        # DDP waits for autograd itself to add its parameters' gradients.
        waited = {id(p) for m in self.modules for d in m.modules() if isinstance(d, DDP) for p in d.parameters()}
        split = (p for m in self.modules for p in m.parameters() if id(p) not in waited)
        self.mode = SplitMode(split, WeightQueue(), quick=False)
        self.rerun = Rerun(self.mode)
        self.replay = Replay(self.modules, first_layer)
        self.settled = False
        """Whether a forward with a graph has run: what the forwards do is known then."""
        self.copies_inputs = False
        """Whether forwards change their inputs in place, which autograd forbids for those that take gradients."""
        self.grad_inside = False
        """Whether forwards need gradients also when none is wanted of them."""
        self.draws = True
        """Whether forwards may draw random numbers."""

    def forward(
        self,
        inputs: Any,
        *,
        then: Callable[[Any], Any] | None = None,
        recompute: bool = False,
        seed: int | None = None,
        input_grad: Sequence[bool] | None = None,
        side: Mapping[str, Any] | None = None,
    ) -> StageRun:
        """F of one micro-batch. `then` (the loss, say) is applied to the last value, inside the graph.

        `seed` makes random draws depend on it and the layer's index alone; the caller restores the global
        generators when it wants to (`rng_kept`). `input_grad` says leaf by leaf which inputs want a gradient
        (default: floating and complex ones).
        """
        return StageRun(self, inputs, then, seed, input_grad, not recompute, again=recompute, side=side)

    def end_step(self) -> None:
        """Forget what is only valid while the weights stand still (autocast's copies of them)."""
        self.mode.clear_casts()

    def place(self) -> str:
        """The last layer, in words."""
        return f"layer {self._calls[-1][0]} ({type(self.modules[-1]).__name__})"

    def call(
        self, value: Any, then: Callable[[Any], Any] | None, seed: int | None, side: Mapping[str, Any] | None = None
    ) -> Any:
        """The modules, one after the other, and `then`."""
        for layer, module, one, names in self._calls:
            if seed is not None:
                seed_all(mix(seed, layer))
            more = {name: side[name] for name in names if name in side} if names and side else {}
            if one or isinstance(value, Tensor):
                value = module(value, **more) if more else module(value)
            elif isinstance(value, tuple):
                value = module(*value, **more)
            elif isinstance(value, Mapping):
                value = module(**value, **more)
            else:
                value = module(value, **more)
        if then is None:
            return value
        if seed is not None:
            seed_all(mix(seed, -1))
        return then(value)

    def adapt(self, error: BaseException, found: Sequence[Found] | None) -> None:
        """Learn from a forward that broke off what the next attempt must do; raises where nothing helps.

        `found`: the buffers before it; None where they were not kept, which does no harm if forwards leave them alone.
        """
        if isinstance(error, Restart):
            self.mode.habits.quick = False
        elif "leaf Variable that requires grad" in str(error) and not self.copies_inputs:
            self.copies_inputs = True
        elif "does not require grad" in str(error) and not self.grad_inside:
            self.grad_inside = True
        else:
            raise error
        if found is not None:
            undo(found)
        elif self.replay.buffers.moving():
            raise OctoPipeError(
                f"layers up to {self.place()} run backward inside their forward, for the first time after forwards "
                "that did not, and change buffers: do so in the first micro-batch, too"
            ) from error


class StageRun:
    """One micro-batch's passage through a stage: what `Stage.forward` makes, with the graph or for R to build it."""

    __slots__ = (
        "_edges", "_inputs", "_kept", "_leaves", "_queue", "_rng", "_seed", "_side", "_stage", "_then", "_wanted",
        "outputs", "outputs_need_grad",
    )  # fmt: skip

    def __init__(
        self,
        stage: Stage,
        inputs: Any,
        then: Callable[[Any], Any] | None,
        seed: int | None,
        input_grad: Sequence[bool] | None,
        graph: bool,
        *,
        again: bool,
        side: Mapping[str, Any] | None = None,
    ):
        self._stage, self._then, self._seed, self._side, self._queue = stage, then, seed, side, WeightQueue()
        self._edges: list[Any] | None = None
        self._rng: States | None = None
        self._kept: Kept | None = None
        # Cut from the neighbour's graph: our leaves share its memory but not its history.
        if isinstance(inputs, Tensor):  # most values are one tensor
            self._inputs: Any = inputs.detach()
            self._leaves: list[Any] = [self._inputs]
            wanted = [stage.input_grad and takes_gradient(inputs)] if input_grad is None else input_grad
        else:
            leaves: list[Any] = []
            form = flatten(inputs, leaves)
            if input_grad is None:
                wanted = [stage.input_grad and isinstance(t, Tensor) and takes_gradient(t) for t in leaves]
            else:
                wanted = input_grad
            self._leaves = [t.detach() if isinstance(t, Tensor) else t for t in leaves]
            self._inputs = build(form, iter(self._leaves))
        self._wanted: Sequence[bool] = wanted
        self.outputs: Any = None
        """What the last module (or `then`) returned, cut from the graph; set to None once passed on."""
        self.outputs_need_grad: list[bool] = []
        """Leaf by leaf of `outputs`: whether I and B take a gradient for it."""
        if again:
            start = stage.replay.before(self._given())
            if seed is None and stage.draws:
                self._rng = rng_state()
            self._forward(False)
            self._kept = stage.replay.after(start)
        else:
            self._forward(graph)

    def _given(self) -> list[Tensor]:
        """All tensors that the forward is given."""
        leaves = list(self._leaves)
        flatten((self._side, self._then.target if isinstance(self._then, Loss) else None), leaves)
        return [t for t in leaves if isinstance(t, Tensor)]

    def _take(self, tensors: Sequence[Tensor]) -> None:
        """Put these in the place of `_given()`."""
        it = iter(tensors)
        form = flatten(self._inputs, [])
        self._leaves = [next(it) if isinstance(t, Tensor) else t for t in self._leaves]
        self._inputs = build(form, iter(self._leaves))
        others: list[Any] = []
        form = flatten((self._side, self._then.target if isinstance(self._then, Loss) else None), others)
        self._side, target = build(form, iter([next(it) if isinstance(t, Tensor) else t for t in others]))
        if isinstance(self._then, Loss):
            self._then = Loss(self._then.function, target)

    def _forward(self, grad: bool, mode: SplitMode | None = None) -> None:
        stage = self._stage
        mode = mode or stage.mode
        mode.queue, mode.hooked, self._queue.shut = self._queue, False, True
        if stage.settled and not stage.copies_inputs and grad and torch.is_grad_enabled():  # what it mostly is
            for leaf, wanted in zip(self._leaves, self._wanted):
                if wanted:
                    leaf.requires_grad_()
            try:
                # The mode costs a few microseconds per call of torch: frozen layers do without.
                with mode if mode.has_weights else _NOTHING:
                    value = stage.call(self._inputs, self._then, self._seed, self._side)
            except (Restart, RuntimeError) as error:
                stage.adapt(error, None)
                value = self._attempts(grad, mode)
        else:
            value = self._attempts(grad, mode)
        self._queue.shut = False
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

    def _attempts(self, grad: bool, mode: SplitMode) -> Any:
        """The forward, repeated where it shows that it must run another way."""
        stage = self._stage
        found = None if stage.settled else stage.replay.buffers.learn()
        rng = None if stage.settled or self._seed is not None else rng_state()
        while True:
            graph = grad or stage.grad_inside
            if graph:
                for leaf, wanted in zip(self._leaves, self._wanted):
                    if wanted:
                        leaf.requires_grad_()
            inputs = self._inputs
            if graph and stage.copies_inputs:
                copies = [t.clone() if isinstance(t, Tensor) and t.requires_grad else t for t in self._leaves]
                inputs = build(flatten(inputs, []), iter(copies))
            mode.hooked = False
            try:
                with torch.set_grad_enabled(graph), mode if grad and mode.has_weights else _NOTHING:
                    value = stage.call(inputs, self._then, self._seed, self._side)
                break
            except (Restart, RuntimeError) as error:
                stage.adapt(error, found)
            if rng is not None:
                set_rng_state(rng)
        if grad and not stage.settled:
            stage.settled = True
            mode.habits.quick = not mode.habits.backward_inside
        return value

    def _cut(self, value: Any, grad: bool) -> None:
        """The outputs, and the edges to their graph, of a value that is more than one tensor."""
        leaves: list[Any] = []
        form = flatten(value, leaves)
        check_leaves(leaves, lambda: f"{self._stage.place() if self._then is None else 'loss_fn'} returned")
        if grad:
            self.outputs_need_grad = need = [isinstance(t, Tensor) and t.requires_grad for t in leaves]
            self._edges = [_edge(t) if n else None for t, n in zip(leaves, need)]
        self.outputs = build(form, iter([t.detach() if isinstance(t, Tensor) else t for t in leaves]))

    def recompute(self) -> None:
        """R: build the graph that F with `recompute=True` did not keep."""
        if self._edges is not None or self._kept is None:
            raise OctoPipeError("R of a run that kept its graph: pass recompute=True to its forward")
        rerun, kept = self._stage.rerun, self._kept
        given = self._given()
        while True:
            rerun.begin(self._queue)
            with kept.again(given) as tensors:
                if kept.copies:
                    self._take(tensors)
                inputs, leaves = self._inputs, self._leaves
                if self._rng is None:
                    self._forward(True, rerun)
                else:
                    with rng_kept():
                        set_rng_state(self._rng)
                        self._forward(True, rerun)
            edge = self._edges[0] if self._edges and len(self._edges) == 1 else None
            if rerun.valid(edge and edge.node):
                break
            self._inputs, self._leaves, self._edges = inputs, leaves, None
        self._rng = self._kept = self.outputs = None  # the next stage has had them

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
        left out, every output is a scalar loss. Returns one entry per input leaf, None where none is wanted
        or nothing depends on it.
        """
        self._queue.defer = False
        return self._backward(grads)

    def _backward(self, grads: Any) -> list[Tensor | None]:
        edges = self._edges
        if edges is None:
            raise OctoPipeError("backward of a run without a graph: run R first, and I or B only once")
        if self._then is not None and True not in self.outputs_need_grad:
            why = "a layer or loss_fn detaches it, or every parameter is frozen"
            raise OctoPipeError(f"the loss depends on nothing that takes a gradient: {why}")
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
                mode = self._stage.mode
                mode.queue, mode.hooked, mode.in_backward = self._queue, False, True
                try:
                    with mode:
                        _backward(roots, seeds)
                finally:
                    mode.in_backward = False
            else:
                _backward(roots, seeds)
        del roots, seeds
        inputs, self._leaves, self._inputs = self._leaves, [], None
        self.outputs = self._then = self._side = None
        result: list[Tensor | None] = []
        for leaf, wanted in zip(inputs, self._wanted):
            if not wanted:
                result.append(None)
            else:
                grad = leaf.grad
                result.append(None if grad is None else plain_gradient(grad))
                leaf.grad = None
        return result or [None] * len(self._wanted)

    def weight_bytes(self) -> int:
        """Bytes alive only because W has not run (after I)."""
        return storage_bytes(self._queue.tensors(), {})


def _one(edge: Any) -> Tensor:
    """The gradient of a scalar loss whose gradient enters the graph here."""
    like = edge.node._input_metadata[edge.output_nr]
    if math.prod(like.shape) != 1:
        raise OctoPipeError(f"backward without gradients needs a scalar loss, not shape {tuple(like.shape)}")
    return torch.ones(like.shape, dtype=like.dtype, device=like.device)

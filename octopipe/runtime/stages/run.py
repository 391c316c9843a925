"""One micro-batch in a stage: what F, R, I, W and B do, and what is kept between them.

Knows: how a forward is separated from the graphs of adjacent stages, how R repeats it, and how backward runs. Does not
know: what all micro-batches of a stage share (`stage.py`), or plans.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.stages.calling import Loss, layers_text
from octopipe.runtime.stages.graph import Dropped, Enter, edge_of, gradient_of_one, run_backward
from octopipe.runtime.stages.offload import Parcel
from octopipe.runtime.stages.repeatable import (
    Digest,
    first_difference,
    is_noise,
    refuse_difference,
    refuse_side_effect,
)
from octopipe.runtime.stages.replay import Kept, Start
from octopipe.runtime.stages.rng import States, rng_kept, rng_state, set_rng_state
from octopipe.runtime.stages.silent_changes import Prints
from octopipe.runtime.stages.weight_queue import Between, OperandChanged, WeightQueue
from octopipe.runtime.stages.wgrad import SplitMode
from octopipe.runtime.stages.wgrad_ops import Restart
from octopipe.runtime.values import build, check_leaves, flatten, own_containers
from octopipe.runtime.wire.buffers import storage_bytes
from octopipe.runtime.wire.messages import plain_gradient, takes_gradient

_NOTHING = nullcontext()


class StageRun:
    """One micro-batch in a stage, created by `Stage.forward`: with its graph, or without one if R will build it."""

    __slots__ = (
        "_digests", "_edges", "_inputs", "_kept", "_leaves", "_parcel", "_prints", "_queue", "_rng", "_seed", "_side",
        "_stage", "_then", "_wanted", "outputs", "outputs_need_grad",
    )  # fmt: skip

    def __init__(
        self,
        stage: Any,
        inputs: Any,
        then: Callable[[Any], Any] | None,
        seed: int | None,
        input_grad: Sequence[bool] | None,
        graph: bool,
        *,
        again: bool,
        side: Mapping[str, Any] | None = None,
        parcel: Parcel | None = None,
    ):
        self._stage, self._then, self._seed, self._side, self._parcel = stage, then, seed, side, parcel
        self._queue = WeightQueue()
        self._edges: list[Any] | None = None
        self._rng: States | None = None
        self._kept: Kept | None = None
        self._digests: list[Digest] | None = None
        self._prints: Prints | None = None
        # Detached from the preceding stage's graph: the leaves share the memory but not the autograd history.
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
        """The detached result of the last module (or of `then`); set to None once it has been passed on."""
        self.outputs_need_grad: list[bool] = []
        """For each leaf of `outputs`: whether I and B take a gradient for it."""
        if (graph or again) and not stage._step_begun:
            stage.begin_step()
        if again:
            if seed is None and stage.draws:
                self._rng = rng_state()
            if stage.checking:
                self._digests = []
            self._forward(True, stage.mode, again=True)
            self._edges = None  # R makes the graph
        else:
            self._forward(graph, stage.mode)
            if graph:
                self._let_go()
        if stage.watches_weights and (graph or again) and stage.checking:
            self._prints = stage.silent.look()
        stage.check_given_away()
        stage.give_away(self.outputs)

    def _given(self) -> list[Tensor]:
        """All tensors that the forward receives."""
        leaves = list(self._leaves)
        flatten((self._side, self._then.target if isinstance(self._then, Loss) else None), leaves)
        return [t for t in leaves if isinstance(t, Tensor)]

    def _take(self, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors of `_given()` by these."""
        it = iter(tensors)
        form = flatten(self._inputs, [])
        self._leaves = [next(it) if isinstance(t, Tensor) else t for t in self._leaves]
        self._inputs = build(form, iter(self._leaves))
        others: list[Any] = []
        form = flatten((self._side, self._then.target if isinstance(self._then, Loss) else None), others)
        self._side, target = build(form, iter([next(it) if isinstance(t, Tensor) else t for t in others]))
        if isinstance(self._then, Loss):
            self._then = Loss(self._then.function, target)

    def _entered(self, graph: bool) -> Any:
        """The inputs as the layers see them: inside a graph if a gradient is required, and in containers of this run of
        the forward, which may change them (`pop`, `append`)."""
        if isinstance(self._inputs, Tensor):
            return Enter.apply(self._inputs.requires_grad_()) if graph and self._wanted[0] else self._inputs
        inner = [
            Enter.apply(t.requires_grad_()) if wanted and graph else own_containers(t)
            for t, wanted in zip(self._leaves, self._wanted)
        ]
        return build(flatten(self._inputs, []), iter(inner))

    def _beside(self) -> tuple[Any, Any]:
        """Side inputs and `then` for one run of the forward, which may change their containers; the next run gets
        copies of what is there now."""
        side, then = self._side, self._then
        if side:
            self._side = {name: own_containers(value) for name, value in side.items()}
        if isinstance(then, Loss) and isinstance(then.target, tuple | list | dict | set):
            self._then = copy.copy(then)
            self._then.target = own_containers(then.target)
        return side, then

    def _forward(self, grad: bool, mode: SplitMode, *, again: bool = False) -> None:
        """Run F once. `again`: R will follow, which needs the state that F found."""
        stage, then = self._stage, self._then
        mode.queue, self._queue.shut = self._queue, True
        loss = then.function if isinstance(then, Loss) else then
        tensors = self._given() if again or stage.replay.moving() or not stage.replay.is_known() else []
        start = stage.replay.before(tensors, loss, again=again, checking=again and stage.checking)
        try:
            value = self._attempts(grad, mode, start, again=again)
            self._kept = stage.replay.after(start)
        except BaseException:
            if start is not None and start.standing:
                start.undo()
            raise
        self._end_forward(value, grad)

    def _end_forward(self, value: Any, grad: bool) -> None:
        self._queue.shut = False
        if isinstance(value, Tensor):
            if grad:
                need = value.requires_grad
                self.outputs_need_grad = [need]
                self._edges = [self._exit(value) if need else None]
            self.outputs = value.detach()
        else:
            self._cut(value, grad)

    def _attempts(self, grad: bool, mode: SplitMode, start: Start | None, *, again: bool = False) -> Any:
        """Run the forward, again and again as long as `Stage.adapt` finds that it must run differently."""
        stage, digests = self._stage, self._digests
        rng = None if start is None or self._seed is not None or not stage.draws else rng_state()
        while True:
            graph = grad or stage.grad_inside
            mode.hooked, mode.keeps_nothing = False, again and not stage.needs_saved
            saved: Dropped | Parcel | None = Dropped(stage.place()) if mode.keeps_nothing else self._parcel
            if isinstance(saved, Parcel):
                saved.begin([*self._given(), *stage.held()])
            try:
                # The mode costs a few microseconds per call of torch, so frozen layers run without it.
                with (
                    torch.set_grad_enabled(graph),
                    _NOTHING if saved is None else saved_tensors_hooks(saved.pack, saved.unpack),
                    mode if grad and mode.has_weights else _NOTHING,
                ):
                    side, then = self._beside()
                    return stage.call(self._entered(graph), then, self._seed, side, digests)
            except (Restart, RuntimeError) as error:
                if isinstance(saved, Parcel) and "saved tensor hooks" in str(error):
                    raise OctoPipeError(
                        f"layers up to {stage.place()} differentiate inside their forward (torch.func), so what they "
                        "save cannot be moved to host memory; plan without offload there"
                    ) from error
                stage.adapt(error, start)
            finally:
                mode.keeps_nothing = False
                if isinstance(saved, Dropped):
                    saved.running = False
            if rng is not None:
                set_rng_state(rng)
            if digests is not None:
                digests.clear()
            if start is not None:
                start.stand_again()

    def _exit(self, output: Tensor) -> Any:
        """The edge at which the gradient of an output enters. It precedes any hook of the user, which may run a
        backward of its own."""
        return edge_of(Enter.apply(output) if output._backward_hooks or self._stage.hooked.backwards else output)

    def _cut(self, value: Any, grad: bool) -> None:
        """Set the detached outputs of a nested value and, with `grad`, the edges to their graph."""
        leaves: list[Any] = []
        form = flatten(value, leaves)
        check_leaves(leaves, lambda: f"{self._stage.place() if self._then is None else 'loss_fn'} returned")
        if grad:
            self.outputs_need_grad = need = [isinstance(t, Tensor) and t.requires_grad for t in leaves]
            self._edges = [self._exit(t) if n else None for t, n in zip(leaves, need)]
        self.outputs = build(form, iter([t.detach() if isinstance(t, Tensor) else t for t in leaves]))

    def recompute(self) -> None:
        """R: build the graph that F, with `recompute=True`, did not keep."""
        if self._edges is not None or self._kept is None:
            raise OctoPipeError("R of a run that kept its graph: pass recompute=True to its forward")
        stage, first = self._stage, self._digests
        if self._prints is not None:
            stage.silent.check(self._prints)
        self._again(first is not None)
        if first is not None:
            second = self._digests or []
            differs = first_difference(first, second)
            # Ranks that communicate inside the layers do not know each other's result, so all of them run a third time.
            if differs is not None or stage.in_step_with_others:
                self._again(True)
            if differs is not None:
                third = self._digests or []
                if not all(is_noise(*run) for run in zip(first, second, third, strict=True)):
                    refuse_difference(stage.layer_name(differs), stage.hooked.changed())
        self._rng = self._kept = self._digests = self.outputs = None  # the next stage received F's outputs
        self._let_go()

    def _let_go(self) -> None:
        if True not in self._wanted:
            self._leaves, self._inputs = [], None  # the graph holds what it needs

    def _again(self, checking: bool) -> None:
        """Runs the forward again from the state that F saw; everything else is left unchanged."""
        stage, kept, then = self._stage, self._kept, self._then
        assert kept is not None
        rerun, given = stage.rerun, self._given()
        loss = then.function if isinstance(then, Loss) else then
        while True:
            rerun.begin(self._queue, whole=checking or stage.replay.moving() or stage.hooked.forwards)
            self._digests = [] if checking else None
            before = stage.replay.look(loss) if checking else None
            with kept.again(given) as tensors:
                if kept.inputs:
                    self._take(tensors)
                inputs, leaves = self._inputs, self._leaves
                with _NOTHING if self._rng is None else rng_kept():
                    if self._rng is not None:
                        set_rng_state(self._rng)
                    self._queue.shut = True
                    value = self._attempts(True, rerun, None)
                    self._end_forward(value, True)
            if before is not None:
                for what in before.changed_names({id(box.thing) for box, _ in kept.boxes}):
                    refuse_side_effect(layers_text(stage.first_layer, stage._calls[-1][0]), what)
            edge = self._edges[0] if self._edges and len(self._edges) == 1 else None
            refs, self.outputs = _references(value), None
            del value
            if rerun.valid(edge and edge.node, kept=any(ref() is not None for ref in refs)):
                break
            self._inputs, self._leaves, self._edges = inputs, leaves, None

    def backward_input(self, grads: Any = None) -> list[Tensor | None]:
        """I: the backward except the weight products, which wait for W. Arguments and result are those of
        `backward_full`."""
        self._queue.defer = True
        return self._backward(grads)

    def weight_work(self) -> int:
        """The number of multiplications that W would compute now."""
        return self._queue.work()

    def weight_so_far(self) -> None:
        """Compute the weight products that the I in progress has deferred so far."""
        try:
            self._queue.run()
        except OperandChanged as error:
            self._stage.hooked.refuse_operand(error)

    def backward_weight(self, between: Between = None) -> None:
        """W: compute the weight products that I deferred. `between` is called after each of them (see
        `WeightQueue.run`)."""
        if self._edges is not None:
            raise OctoPipeError("W before I of the same micro-batch: run backward_input first")
        try:
            self._queue.run(between)
        except OperandChanged as error:
            self._stage.hooked.refuse_operand(error)

    def backward_full(self, grads: Any = None) -> list[Tensor | None]:
        """B: I and W at once. `grads` has one entry per leaf of `outputs` (None if there is no gradient); by default
        every output is a scalar loss. Returns one entry per leaf of the input, None if no gradient is requested or
        nothing depends on it."""
        self._queue.defer = False
        return self._backward(grads)

    def _backward(self, grads: Any) -> list[Tensor | None]:
        edges = self._edges
        if edges is None:
            raise OctoPipeError("backward of a run without a graph: run R first, and I or B only once")
        if self._then is not None and True not in self.outputs_need_grad:
            why = "a layer or loss_fn detaches it, or every parameter is frozen"
            raise OctoPipeError(f"the loss depends on nothing that takes a gradient: {why}")
        if self._prints is not None:
            self._stage.silent.check(self._prints)
        leaves: list[Any]
        if grads is None:
            leaves = [None if edge is None else gradient_of_one(edge) for edge in edges]
        elif isinstance(grads, list) and len(grads) == 1 and isinstance(grads[0], Tensor):  # the usual case
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
            self._walk(roots, seeds)
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
        """Bytes that are kept after I only for W."""
        return storage_bytes(self._queue.tensors(), {})

    def _walk(self, roots: tuple[Any, ...], seeds: tuple[Tensor, ...]) -> None:
        """Runs backward from these edges to the stage's inputs and parameters."""
        stage, queue = self._stage, self._queue
        stepping = stage.hooked.before_backward()
        handles = [edge.node.register_prehook(queue.begin) for edge in roots]
        mode = stage.mode if queue.reruns else None
        if mode is not None:
            mode.queue, mode.hooked, mode.in_backward = queue, False, True
        try:
            with mode or _NOTHING:
                run_backward(roots, seeds)
        except OperandChanged as error:
            stage.hooked.refuse_operand(error)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            stage.hooked.refuse_in_place(error, stage.first_layer, stage._calls[-1][0])
        finally:
            for handle in handles:
                handle.remove()
            queue.task = None
            if mode is not None:
                mode.in_backward = False
        if queue.asked:
            stage.mode.habits.backward_inside, stage.mode.habits.quick = True, False
        if not stage._tried_backward:
            stage._tried_backward = True
            stage.mode.habits.quick = not stage.mode.habits.backward_inside
        if not stage.may_step_inside:
            stage.hooked.refuse_stepping(stepping)


def _references(value: Any) -> list[weakref.ref[Tensor]]:
    leaves: list[Any] = []
    flatten(value, leaves)
    return [weakref.ref(t) for t in leaves if isinstance(t, Tensor)]

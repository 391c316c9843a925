"""One layer prepared for measurement, and its memory.

Knows: how a layer runs as a single stage, F, I and W one after the other, eagerly or replayed from CUDA graphs, and how
many bytes it holds in between. Does not know: times, ranks (`profiler.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.fp8 import float8_copies
from octopipe.runtime.precision import (
    LOW,
    autocast_context,
    autocast_dtype,
    gradient_dtype,
    has_main_gradients,
    keep_main_gradients,
)
from octopipe.runtime.slots import Cell
from octopipe.runtime.stages.activation_bytes import held_bytes
from octopipe.runtime.stages.chain import StageChain
from octopipe.runtime.stages.cuda_graphs import GraphedOps
from octopipe.runtime.stages.graph_memory import viewed
from octopipe.runtime.stages.run import StageRun
from octopipe.runtime.stages.stage import Stage
from octopipe.runtime.values import build, flatten, rebuild


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """Bytes of one layer and one micro-batch."""

    activation_bytes: float
    """Bytes held from F until I, including the layer's input but not its output."""
    stash_bytes: float
    """Bytes held from I until W."""
    workspace_bytes: float
    """Additional bytes while an op runs (zero if the device does not report them)."""
    boundary_bytes: float
    """Bytes of the output tensors."""
    parameter_bytes: float
    gradient_bytes: float
    master_bytes: float = 0.0
    """Bytes of float32 master weights of low-precision parameters, if an optimizer keeps them."""
    updated_bytes: float = 0.0
    """Bytes of what an optimizer updates (master weights or parameters); each of its moments has this size."""


class Layer:
    """One distinct layer, prepared to run."""

    def __init__(
        self,
        module: nn.Module,
        value: Any,
        then: Callable[[Any], Any] | None,
        first: bool,
        precision: str = "fp32",
        graphs: bool = False,
        *,
        ends_in_loss: bool = True,
    ):
        """`graphs`: F, I and W are replayed from CUDA graphs once `capture` was called, if they can be. `ends_in_loss`:
        `then` returns the loss; otherwise it returns tensors to which gradients come back."""
        self.module, self.value, self.then = module, value, then
        self._replayed: _Replayed | None = None
        self._graphs = graphs
        self.main_gradients = has_main_gradients(precision)
        if self.main_gradients:
            keep_main_gradients(module.parameters())
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self.autocast = autocast_context(autocast_dtype(precision), device)
        self.context: Callable[[], Any] = self.autocast or nullcontext
        """The context in which the layer's forwards run."""
        self.stage = Stage([module], input_grad=not first)
        run = self.forward()
        leaves: list[Any] = []
        flatten(run.outputs, leaves)
        self.output = run.outputs
        self.output_leaves = [t for t in leaves if isinstance(t, Tensor)]
        self.grads: Any = None
        if then is None or not ends_in_loss:
            self.grads = [
                torch.randn_like(t) * 1e-3 if need else None for t, need in zip(leaves, run.outputs_need_grad)
            ]
        # Gradients exist from here on, as in every training step but the first.
        run.backward_input(self.grads)
        run.backward_weight()
        for p in module.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p, dtype=gradient_dtype(p))

    def forward(self, value: Any = None) -> StageRun:
        """Run F with the layer's own input or with another value of the same form."""
        with self.context():
            return self.stage.forward(self.value if value is None else value, then=self.then)

    def capture(self) -> None:
        """Make `once` replay CUDA graphs from now on, if graphs were requested and the layer can be captured."""
        if self._graphs and self._replayed is None:
            self._replayed = _Replayed(self)

    def repeatable(self) -> bool:
        """Return whether a second forward gives the result of the first, as R requires (`stages/repeatable.py`)."""
        stage = Stage([self.module], input_grad=self.stage.input_grad)
        try:
            stage.check_repeatable()
            run = stage.forward(self.value, then=self.then, recompute=True)
            stage.forward(self.value, then=self.then)  # as another micro-batch does in between
            run.recompute()
        except OctoPipeError:
            return False
        return True

    def once(self, mark: Callable[[], None]) -> None:
        if self._replayed is not None:
            self._replayed.once(mark)
            return
        mark()
        run = self.forward()
        run.outputs = None
        mark()
        run.backward_input(self.grads)
        mark()
        run.backward_weight()
        mark()


class _Replayed:
    """The ops of a layer as the executor replays them, with input and gradient at the addresses that the graphs
    read."""

    def __init__(self, layer: Layer):
        self._then = layer.then
        leaves: list[Any] = []
        form = flatten(layer.value, leaves)
        self._value = build(form, iter([viewed(leaf) for leaf in leaves]))
        grads = [torch.ones_like(t) for t in layer.output_leaves] if layer.grads is None else layer.grads
        self._kept = (layer.value, grads)  # views do not own memory
        self._grads = [viewed(grad) for grad in grads]
        self._cell = Cell(0, 0, False, layer.then is not None, False)
        self._ops = GraphedOps({0: StageChain([(layer.stage, False)])}, layer.autocast, layer.output_leaves[0].device)
        for _ in range(self._ops.warm_up_steps):
            self._ops.begin_step()
            self.once(lambda: None)
            self._ops.end_step(whole=True)
        self.reason = self._ops.reasons.get(0, "")
        """The reason why the layer runs eagerly after all; empty if it is replayed."""

    def once(self, mark: Callable[[], None]) -> None:
        ops, cell = self._ops, self._cell
        mark()
        cell.runs, _, _ = ops.forward(cell, self._value, None, self._then, None, None)
        mark()
        ops.backward(cell, self._grads, fused=False)
        mark()
        ops.weight(cell)
        mark()


def memory_of(layer: Layer, device: torch.device) -> LayerMemory:
    parameters = list(layer.module.parameters())
    boundary = float(sum(t.nbytes for t in layer.output_leaves))
    sizes = {
        "boundary_bytes": boundary,
        "parameter_bytes": float(sum(t.nbytes for t in (*parameters, *float8_copies([layer.module])))),
        "gradient_bytes": float(sum(p.numel() * gradient_dtype(p).itemsize for p in parameters if p.requires_grad)),
        "master_bytes": float(sum(4 * p.numel() for p in parameters if _has_master(layer, p))),
        "updated_bytes": float(
            sum(4 * p.numel() if _has_master(layer, p) else p.nbytes for p in parameters if p.requires_grad)
        ),
    }
    if device.type == "cuda":
        activation, stash, workspace = _allocated(layer)
    else:
        with layer.context():
            held = held_bytes(layer.stage, layer.value, then=layer.then)
        activation, stash, workspace = float(held.until_input), float(held.until_weight), 0.0
    # What W needs counts as held from F on, because the cost table cannot state anything else.
    return LayerMemory(activation_bytes=max(activation, stash), stash_bytes=stash, workspace_bytes=workspace, **sizes)


def _has_master(layer: Layer, parameter: nn.Parameter) -> bool:
    return layer.main_gradients and parameter.requires_grad and parameter.dtype in LOW


def _allocated(layer: Layer) -> tuple[float, float, float]:
    """Return activation, stash and workspace bytes according to the caching allocator, with newly created input and
    gradient."""
    cuda = torch.cuda
    cuda.synchronize()
    used = cuda.memory_allocated

    def fresh(value: Any) -> Any:
        leaves: list[Any] = []
        flatten(value, leaves)
        return rebuild(value, iter([t.clone() if isinstance(t, Tensor) else t for t in leaves]))

    base = used()
    cuda.reset_peak_memory_stats()
    value = fresh(layer.value)
    given = used() - base
    run = layer.forward(value)
    del value
    output = used() - base
    peak_f = cuda.max_memory_allocated() - base
    run.outputs = None
    held = used() - base
    grads = fresh(layer.grads)
    cuda.reset_peak_memory_stats()
    result = run.backward_input(grads)
    peak_i = cuda.max_memory_allocated() - base
    del grads, result
    stash = used() - base
    cuda.reset_peak_memory_stats()
    run.backward_weight()
    peak_w = cuda.max_memory_allocated() - base
    del run
    boundary = output - held
    incoming = float(sum(t.nbytes for t in layer.grads or () if t is not None))
    # The incoming gradient and the output are counted as tensors between stages, not here.
    extra = max(peak_f - held - boundary, peak_i - held - incoming, peak_w - stash, 0, given - held)
    return float(held), float(stash), float(extra)


def resident_bytes(ready: Sequence[Layer], sample: Any, target: Any, device: torch.device) -> float:
    """Return the allocated bytes that belong to none of these layers and samples."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    tensors: list[Any] = []
    flatten([sample, target], tensors)
    for layer in ready:
        flatten([layer.value, layer.output, layer.grads or []], tensors)
        for p in layer.module.parameters():
            tensors += [p, p.grad]
        tensors += [*layer.module.buffers(), *float8_copies([layer.module])]
    own = {}
    for t in tensors:
        if isinstance(t, Tensor) and t.device.type == "cuda":
            storage = t.untyped_storage()
            own[storage.data_ptr()] = storage.nbytes()
    return float(torch.cuda.memory_allocated(device) - sum(own.values()))

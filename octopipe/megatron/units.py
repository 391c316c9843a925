"""Parts of Megatron-Core's chunks that run alone: the embedding, a decoder layer, the head, a whole chunk.

Knows: how a layer is called with the arguments that its own block gave it, how a chunk without its decoder layers is
its embedding or its head, and how many bytes each keeps. Does not know: how they are timed (`profiling.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.megatron.weights import Split
from octopipe.runtime.stages.weight_queue import WeightQueue
from octopipe.runtime.values import flatten, rebuild
from octopipe.runtime.wire.buffers import storage_bytes

EMBEDDING, HEAD = 0, -1
"""Numbers of the units that are not decoder layers. Decoder layers have Megatron's own numbers, which begin at 1."""


class ForwardStep:
    """Megatron's own forward step of a chunk on one micro-batch."""

    def __init__(
        self, function: Callable[..., Any], batch: Any, config: Any, *, cp_size: int, hidden: tuple[int, int, int]
    ):
        from megatron.core.pipeline_parallel import schedules

        self._schedules, self._function, self._batch = schedules, function, batch
        self.config, self._cp_size, self._hidden = config, cp_size, hidden

    def hidden_states(self, device: torch.device) -> Tensor:
        """Return random hidden states of the shape that a chunk receives from the preceding one: [tokens, batch,
        width]."""
        dtype = self.config.pipeline_dtype or self.config.params_dtype
        return torch.randn(self._hidden, dtype=dtype, device=device).requires_grad_()

    def __call__(self, chunk: nn.Module, number: int, value: Tensor | None, *, last: bool) -> Tensor:
        out, _ = self._schedules.forward_step(
            self._function, iter([self._batch]), chunk, 1, value, [], self.config, self._cp_size,
            collect_non_loss_data=False, is_first_microbatch=False, current_microbatch=0,
            vp_stage=number if self.config.virtual_pipeline_model_parallel_size else None, is_last_stage=last,
        )  # fmt: skip
        return out[0] if isinstance(out, list) else out


class Unit:
    """A part of a chunk whose F, I and W run alone, through the same code as in the drop-in."""

    number = EMBEDDING
    kind = ""

    def __init__(self, module: nn.Module):
        self.module = module
        self._split = Split(module)
        self._slope: Tensor | None = None

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the input that requires a gradient (None: none does)."""
        raise NotImplementedError

    def once(self, mark: Callable[[], None]) -> None:
        self._split.take_over()
        mark()
        output, _ = self.forward()
        mark()
        queue = self._split.queue = WeightQueue()
        queue.defer = True
        self._backward(output)
        del output
        mark()
        self._split.weight(queue)
        mark()

    def let_go(self) -> None:
        """Restore Megatron's own products in the layers."""
        self._split.let_go()

    def _backward(self, output: Tensor) -> None:
        if output.requires_grad:
            if self._slope is None or self._slope.shape != output.shape:
                self._slope = torch.ones_like(output) if output.numel() == 1 else torch.randn_like(output) * 1e-3
            torch.autograd.backward(output, self._slope)

    def memory(self) -> dict[str, float]:
        """Return the bytes that are kept from F to I and from I to W, and the bytes of parameters, of their gradients
        and of the output."""
        self._split.take_over()
        parameters = list(self.module.parameters())
        # Called on the class, because Megatron's DDP has a list of its own under the name `buffers`.
        own = {t.untyped_storage().data_ptr() for t in (*parameters, *nn.Module.buffers(self.module))}
        held: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            if t.untyped_storage().data_ptr() not in own:
                held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            output, given = self.forward()
        if given is not None:
            held[given.untyped_storage().data_ptr()] = given.untyped_storage().nbytes()
        boundary = float(output.nbytes)
        queue = self._split.queue = WeightQueue()
        queue.defer = True
        self._backward(output)
        del output
        stash = float(storage_bytes(queue.tensors(), {}))
        self._split.weight(queue)
        activation, workspace = float(sum(held.values())), 0.0
        if parameters and parameters[0].is_cuda:
            activation, stash, workspace = self._allocated()
        gradients = [getattr(p, "main_grad", p) for p in parameters if p.requires_grad]
        return {
            "activation_bytes": max(activation, stash),
            "stash_bytes": stash,
            "workspace_bytes": workspace,
            "boundary_bytes": boundary,
            "parameter_bytes": float(sum(p.nbytes for p in parameters)),
            "gradient_bytes": float(sum(t.nbytes for t in gradients)),
            "parameters": float(sum(p.numel() for p in parameters if p.requires_grad)),
        }

    def _allocated(self) -> tuple[float, float, float]:
        """Return activation, stash and workspace bytes according to the caching allocator. Workspace is what an op
        needs only while it runs: the largest of F, I, W and of B, which computes a weight's gradient in the weight's
        own dtype before it is accumulated."""
        used, peak = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated
        self.once(lambda: None)  # allocates what libraries keep and the incoming gradient before anything is counted
        torch.cuda.synchronize()
        base = used()

        def forward() -> tuple[Tensor, float, float]:
            torch.cuda.reset_peak_memory_stats()
            output, given = self.forward()
            boundary = float(output.untyped_storage().nbytes())
            held = used() - base - boundary
            extra = peak() - base - boundary - held
            if given is not None and _old(given, self.recorded()):
                held += given.untyped_storage().nbytes()
            torch.cuda.reset_peak_memory_stats()
            return output, held, extra

        output, held, extra = forward()
        queue = self._split.queue = WeightQueue()
        queue.defer = True
        before = used()
        self._backward(output)
        extra = max(extra, peak() - before)
        del output
        stash = float(used() - base)
        torch.cuda.reset_peak_memory_stats()
        self._split.weight(queue)
        extra = max(extra, peak() - base - stash)
        self._split.let_go()
        output, *_ = forward()
        before = used()
        self._backward(output)
        extra = max(extra, peak() - before)
        del output
        self._split.take_over()
        return float(held), stash, float(extra)

    def recorded(self) -> list[Tensor]:
        """Return the tensors that the unit keeps in order to run again."""
        return [] if self._slope is None else [self._slope]


class Layer(Unit):
    """A decoder layer, called with the arguments that its block passed to it."""

    def __init__(self, module: nn.Module, number: int, arguments: tuple[Any, ...], named: dict[str, Any]):
        super().__init__(module)
        self.number, self.kind = number, _kind_of(module)
        self._called = (arguments, named)

    def forward(self) -> tuple[Tensor, Tensor | None]:
        leaves: list[Any] = []
        flatten(self._called, leaves)
        first: Tensor | None = None
        fresh = []
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and first is None:
                leaf = first = leaf.detach().requires_grad_()  # the hidden states come first
            fresh.append(leaf)
        arguments, named = rebuild(self._called, iter(fresh))
        out: list[Any] = []
        flatten(self.module(*arguments, **named), out)
        return next(t for t in out if isinstance(t, Tensor) and t.requires_grad), first

    def recorded(self) -> list[Tensor]:
        leaves: list[Any] = []
        flatten(self._called, leaves)
        return [*super().recorded(), *(t for t in leaves if isinstance(t, Tensor))]


class Chunk(Unit):
    """A whole chunk, through Megatron's forward step."""

    def __init__(self, chunk: nn.Module, index: int, step: ForwardStep):
        super().__init__(chunk)
        self._index, self._step, self._inner = index, step, _inside(chunk)
        self.first, self.last = bool(self._inner.pre_process), bool(self._inner.post_process)

    def forward(self) -> tuple[Tensor, Tensor | None]:
        value = None if self.first else self._step.hidden_states(_device(self._inner))
        return self._step(self.module, self._index, value, last=self.last), value


class WholeBackward:
    """A chunk with F and B, as plans with a fused backward run it: with Megatron's own products instead of the split
    ones."""

    def __init__(self, chunk: Chunk):
        self._chunk = chunk

    def once(self, mark: Callable[[], None]) -> None:
        mark()
        output, _ = self._chunk.forward()
        mark()
        self._chunk._backward(output)
        del output
        mark()
        mark()


class End(Chunk):
    """The embedding or the head: a chunk without its decoder layers, and without its other end."""

    def __init__(self, chunk: nn.Module, index: int, step: ForwardStep, *, head: bool):
        super().__init__(chunk, index, step)
        self.number, self.kind = (HEAD, "head and loss") if head else (EMBEDDING, "embedding")
        self.first, self.last = not head, head
        # Weight gradients of the removed layers are not this unit's: their products do not run, so nothing is queued.
        self._owns = [p for n, p in self._inner.named_parameters() if not n.startswith("decoder.layers.")]

    def forward(self) -> tuple[Tensor, Tensor | None]:
        with _without_layers(self._inner, first=self.first, last=self.last):
            return super().forward()

    def memory(self) -> dict[str, float]:
        found = super().memory()
        own = [p for p in self._owns if self.last or not _is_head(self._inner, p)]
        own = [p for p in own if self.first or not _is_embedding(self._inner, p)]
        gradients = [getattr(p, "main_grad", p) for p in own if p.requires_grad]
        found["parameter_bytes"] = float(sum(p.nbytes for p in own))
        found["gradient_bytes"] = float(sum(t.nbytes for t in gradients))
        found["parameters"] = float(sum(p.numel() for p in own if p.requires_grad))
        if self.last:
            found["boundary_bytes"] = 0.0
        return found


def units_of(chunk: nn.Module, index: int, step: ForwardStep, first: int | None = None) -> list[Unit]:
    """Return a chunk's embedding, decoder layers and head, as far as it has them. `first`: the number of its first
    decoder layer in the whole model (default: as its layers say)."""
    inner = _inside(chunk)
    if getattr(inner, "mtp", None) is not None and len(list(inner.mtp.parameters())):
        raise OctoPipeError("multi-token prediction runs inside the head's chunk; profile without mtp_num_layers")
    layers = list(inner.decoder.layers)
    called: dict[int, tuple[Any, Any]] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda module, arguments, named, k=k: called.setdefault(k, (arguments, named)) and None, with_kwargs=True
        )
        for k, layer in enumerate(layers)
    ]
    whole = Chunk(chunk, index, step)
    try:
        with torch.no_grad():
            whole.forward()
    finally:
        for hook in hooks:
            hook.remove()
    units: list[Unit] = [End(chunk, index, step, head=False)] if inner.pre_process else []
    for k, layer in enumerate(layers):
        if k not in called:
            raise OctoPipeError(f"layer {k} of a chunk is not run by its block's forward; it cannot be measured alone")
        number = int(getattr(layer, "layer_number", k + 1)) if first is None else first + k
        units.append(Layer(layer, number, *called[k]))
    if inner.post_process:
        units.append(End(chunk, index, step, head=True))
    return units


def _inside(chunk: nn.Module) -> Any:
    """Return the model behind Megatron's wrappers (DDP, Float16Module)."""
    while not hasattr(chunk, "decoder") and hasattr(chunk, "module"):
        chunk = chunk.module  # type: ignore[assignment]
    if not hasattr(chunk, "decoder") or not hasattr(chunk.decoder, "layers"):
        raise OctoPipeError(
            f"a {type(chunk).__name__} has no decoder.layers; octopipe.megatron.profile measures GPT and hybrid models"
        )
    return chunk


def _is_head(inner: Any, parameter: Tensor) -> bool:
    parts = [getattr(inner, "output_layer", None), getattr(inner.decoder, "final_layernorm", None)]
    parts.append(getattr(inner.decoder, "final_norm", None))
    return any(p is parameter for part in parts if part is not None for p in part.parameters())


def _is_embedding(inner: Any, parameter: Tensor) -> bool:
    part = getattr(inner, "embedding", None)
    return part is not None and any(p is parameter for p in part.parameters())


def _old(tensor: Tensor, known: Sequence[Tensor]) -> bool:
    """Return whether a tensor shares memory with one of these tensors."""
    where = tensor.untyped_storage().data_ptr()
    return any(t.untyped_storage().data_ptr() == where for t in known)


def recorded_bytes(units: Sequence[Unit]) -> float:
    """Return the bytes that all units keep in order to run again; shared memory is counted once."""
    return float(storage_bytes([t for unit in units for t in unit.recorded()], {}))


def _device(module: nn.Module) -> torch.device:
    return next(p.device for p in module.parameters())


@contextmanager
def _without_layers(inner: Any, *, first: bool, last: bool) -> Iterator[None]:
    """The model with an empty decoder and only the requested ends (embedding or head)."""
    decoder = inner.decoder
    kept = decoder.layers, inner.pre_process, inner.post_process, decoder.pre_process
    decoder.layers = nn.ModuleList()
    inner.pre_process = decoder.pre_process = first
    inner.post_process = last
    inside = getattr(decoder, "post_process", None)
    if inside is not None:
        decoder.post_process = last
    try:
        yield
    finally:
        decoder.layers, inner.pre_process, inner.post_process, decoder.pre_process = kept
        if inside is not None:
            decoder.post_process = inside


@contextmanager
def gradients_apart(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """A context that restores `.grad` at its end and sets to zero what Megatron's DDP accumulated in `main_grad`."""
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(parameters, before):
            p.grad = grad
            if getattr(p, "main_grad", None) is not None:
                p.main_grad.zero_()  # type: ignore[attr-defined]


def _kind_of(layer: nn.Module) -> str:
    """Return a description of a layer: its class, and its parts if the class alone does not identify it."""
    parts = []
    for name, word in (("self_attention", "attention"), ("mixer", "mixer"), ("mlp", "mlp")):
        part = getattr(layer, name, None)
        if part is not None and any(True for _ in part.parameters()):
            parts.append("experts" if word == "mlp" and "moe" in type(part).__name__.lower() else word)
    return type(layer).__name__ + (f" ({', '.join(parts)})" if parts else "")

"""A plan's stages as `PipelineStage` objects of torch.distributed.pipelining.

Knows: how a list of layers becomes the modules of this rank's stages, recomputation inside them, and a `PipelineStage`
with our own I and W: the weight-gradient GEMMs are deferred (`runtime/stages/wgrad.py`). PyTorch's own split instead
runs the forward of a checkpointed stage once per group of parameters, and leaves all of the first stage's backward to
W. Does not know: orders, losses, sends.

Between stages PyTorch passes a tensor or a flat tuple of tensors, of the same shapes for every micro-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from octopipe.base.errors import OctoPipeError
from octopipe.plans.plan import Plan
from octopipe.plans.setting import checkpointed_by_prices
from octopipe.runtime.stages.wgrad import SplitMode, WeightQueue
from octopipe.torch_engine.torch_private import run_backward

Layer = nn.Module | Callable[[], nn.Module]


class LayerSequence(nn.Module):
    """Consecutive layers of a model; parameters are named `layer.name`, as in `octopipe.Pipeline`."""

    def __init__(self, modules: Mapping[int, nn.Module], recompute: Sequence[int] = ()):
        super().__init__()
        self.layers = nn.ModuleDict({str(k): m for k, m in modules.items()})
        self.recompute = frozenset(recompute)
        self._one = {k: _takes_one(m) for k, m in modules.items()}

    def forward(self, *args: Any) -> Any:
        value: Any = args[0] if len(args) == 1 else args
        for name, layer in self.layers.items():
            k = int(name)
            args = value if isinstance(value, tuple) and not self._one[k] else (value,)
            if k in self.recompute and torch.is_grad_enabled():
                value = checkpoint(layer, *args, use_reentrant=False)
            else:
                value = layer(*args)
        if isinstance(value, Tensor):
            return value.contiguous()  # a send needs it, and a view would keep its whole base
        if not isinstance(value, tuple | list) or not all(isinstance(v, Tensor) for v in value):
            raise OctoPipeError(
                f"layer {list(self.layers)[-1]} gives {type(value).__name__}; PyTorch's runtime passes a tensor "
                "or a tuple of tensors between stages: `octopipe.Pipeline` takes any nesting"
            )
        return tuple(v.contiguous() for v in value)


def _takes_one(module: nn.Module) -> bool:
    """Whether the module's forward takes exactly one positional argument, so that a tuple is passed as one value."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return True
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return False
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) == 1


class _StageMode(SplitMode):
    """A split mode that stays active inside the backward that PyTorch's stage calls.

    PyTorch disables torch-function modes while it handles a call of `torch.autograd.backward`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.backward and self.in_backward:
            return self._outer_backward(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _outer_backward(
        self, tensors: Any, grad_tensors: Any = None, retain_graph: Any = None, create_graph: bool = False, **_: Any
    ) -> None:
        with self:
            run_backward(tensors, grad_tensors, retain_graph, create_graph)


class PlanStage(PipelineStage):
    """A `PipelineStage` with our weight-gradient split; under DDP and FSDP it uses PyTorch's own split."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self._mode: _StageMode | None = None
        self._queues: dict[int, WeightQueue] = {}

    def _split(self) -> _StageMode | None:
        """Return the mode to run under, or None if DDP or FSDP relies on hooks on the gradients."""
        if not self.has_backward or isinstance(self.submod, DistributedDataParallel | FSDPModule):
            return None
        if self._mode is None:
            self._mode = _StageMode(self.submod.parameters(), WeightQueue(), quick=False)
        return self._mode

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._queues.clear()
        if self._mode is not None:
            self._mode.clear_casts()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **more: Any) -> Any:
        mode = self._split()
        if mode is None:
            return super().forward_one_chunk(fwd_chunk_id, *args, **more)
        queue = mode.queue = self._queues[fwd_chunk_id] = WeightQueue()
        queue.shut = True  # a backward call inside this forward belongs to the layer itself and is not deferred
        try:
            with mode:
                return super().forward_one_chunk(fwd_chunk_id, *args, **more)
        finally:
            queue.shut = False

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        queue = self._queues.get(bwd_chunk_id)
        if queue is None or self._mode is None:
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            return
        queue.defer = not full_backward
        self._mode.queue, self._mode.in_backward = queue, True
        try:
            # Checkpointing reruns forwards during the backward; these must run under the same mode.
            with self._mode if queue.reruns else nullcontext():
                super().backward_one_chunk(bwd_chunk_id, loss, True, last_backward)
        finally:
            self._mode.in_backward = False
        self.bwd_cache[bwd_chunk_id] = _contiguous(self.bwd_cache[bwd_chunk_id])

    def _compute_input_grads(self, *args: Any, **more: Any) -> tuple[Any, ...]:
        # The shape inference of the first step uses this result: receive buffers get its strides.
        return _contiguous(super()._compute_input_grads(*args, **more))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        queue = self._queues.pop(bwd_chunk_id, None)
        if queue is None:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        else:
            queue.run()


def _contiguous(grads: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(g.contiguous() if isinstance(g, Tensor) else g for g in grads)


def make_stages(
    plan: Plan,
    layers: Sequence[Layer],
    *,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    tied: Sequence[Sequence[str]] = (),
) -> list[PipelineStage]:
    """Return this rank's stages of the plan. `layers`: one module or factory per layer of the plan.

    Factories are called for this rank's layers only. Tied parameters are found if they are the same object in several
    modules; others must be named with `tied`: `[("0.weight", "9.weight")]`. The schedule adds up their gradients after
    every step.
    """
    from octopipe.torch_engine.ties import TIES, Tie, find_ties
    from octopipe.views.export.pytorch import torch_order

    if len(layers) != plan.num_layers:
        raise OctoPipeError(f"{len(layers)} layers for a plan of {plan.num_layers}; use the plan's own model")
    torch_order(plan)  # raises if PyTorch cannot run the plan
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size != plan.num_ranks:
        raise OctoPipeError(f"the plan has {plan.num_ranks} ranks, the process group {size}; use as many")
    idle = [r for r in range(size) if not plan.stages_of_rank(r)]
    if idle:
        raise OctoPipeError(
            f"rank {idle[0]} holds no stage; PyTorch's runtime needs one on every rank: use fewer ranks"
        )
    place = torch.device(device) if device is not None else _default_device(group)
    route = plan.routes[0]
    built: dict[int, nn.Module] = {}
    stages: list[PipelineStage] = []
    ties: list[Tie] = find_ties(plan, layers, tied)
    for index, number in enumerate(route):
        stage = plan.stages[number]
        if stage.rank != rank:
            continue
        modules = {}
        for k in range(stage.first, stage.stop):
            layer = layers[k]
            modules[k] = built[k] = (layer if isinstance(layer, nn.Module) else layer()).to(place)
        sequence = LayerSequence(modules, (*stage.recomputed_layers, *checkpointed_by_prices(plan)))
        stages.append(PlanStage(sequence, index, len(route), place, group=group))
    for tie in ties:
        tie.join(built)
    setattr(stages[0], TIES, ties)
    return stages


def _default_device(group: dist.ProcessGroup | None) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

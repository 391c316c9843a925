"""What captured graphs depend on besides their inputs, and whether it still holds.

Knows: torch's global settings, the parameters, buffers, attributes and hooks of modules (`Facts`), and everything else
in which forwards and losses may read Python values (`Surroundings`). Does not know: which stages can be captured
(`capturable.py`), how graphs are captured or replayed (`cuda_graphs.py`).

Every value that the host reads while a stage is captured becomes a constant of its graphs. Whatever the host could read
is therefore compared before every step with what it was at the decision to capture.

Not compared: values that a forward asks the system for (the time, the environment), state inside libraries, and what
`places.py` does not find.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.runtime.stages.chain import StageChain
from octopipe.runtime.stages.state import Box, is_changed
from octopipe.runtime.torch_private import has_global_hooks

_SCALARS = (int, float, bool, str, type(None))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has: its parameters, buffers, submodules and hooks."""
_HOOKS_OF_TORCH = frozenset(HOOKS)


def modules_of(chain: StageChain) -> list[nn.Module]:
    """All modules of a stage with their submodules, each once."""
    return list(dict.fromkeys(m for stage, _ in chain.parts for top in stage.modules for m in top.modules()))


class Facts:
    """The conditions that a graph of some modules depends on, as a list that stays equal while they hold."""

    def __init__(self, modules: Sequence[nn.Module]):
        self._modules = list(dict.fromkeys(modules))

    def read(self) -> list[Any]:
        """The current facts; takes about a millisecond for two hundred modules."""
        seen = _settings_of_torch()
        add = seen.append
        opened: set[int] = set()
        for module in self._modules:
            own = module.__dict__
            add(type(module).forward)
            for name, value in own.items():
                if isinstance(value, _SCALARS):
                    add(value)
                elif name in _OF_TORCH:
                    continue
                elif type(value) in (tuple, list):
                    seen.extend(v if isinstance(v, _SCALARS) else id(v) for v in value)
                elif isinstance(value, Tensor):
                    self._tensor(value, add)
                else:
                    add(id(value))
                    if id(value) not in opened:
                        opened.add(id(value))
                        self._object(value, add)
            for inner in own["_modules"].values():
                add(id(inner))
            for parameter in own["_parameters"].values():
                add(id(parameter))
                if parameter is not None:
                    self._parameter(parameter, add)
            for buffer in own["_buffers"].values():
                if buffer is not None:
                    self._tensor(buffer, add)
            for hooks in HOOKS:
                add(len(own.get(hooks) or ()))
        return seen

    @staticmethod
    def _parameter(parameter: Tensor, add: Callable[[Any], None]) -> None:
        add(parameter.requires_grad)
        add(parameter.data_ptr())
        add(parameter.shape)
        add(parameter.stride())
        add(len(parameter._backward_hooks or ()))
        add(len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()))

    @staticmethod
    def _tensor(value: Tensor, add: Callable[[Any], None]) -> None:
        add(id(value))
        if value.is_cpu:
            add(value._version)  # a value on the host becomes a kernel argument, which is constant in the graph
        else:
            add(value.data_ptr())
            add(value.shape)
            add(value.stride())

    @staticmethod
    def _object(value: Any, add: Callable[[Any], None]) -> None:
        """The constants in an object that modules refer to, such as a config."""
        if isinstance(value, (nn.Module, type, types.FunctionType, types.MethodType)):
            return
        if type(value).__module__.partition(".")[0] in ("torch", "octopipe"):
            return
        for part in getattr(value, "__dict__", {}).values():
            if isinstance(part, _SCALARS):
                add(part)


def _settings_of_torch() -> list[Any]:
    """Global settings of torch that select kernels or precisions."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
        has_global_hooks(),
    ]


class Surroundings:
    """Where the forwards and losses of some stages may read Python values outside the attributes of their modules.

    Containers and objects that modules hold, losses with their attributes, variables of closures, class attributes, and
    global variables that a user's functions refer to.
    """

    def __init__(self, chains: Iterable[StageChain]):
        self._kept: list[tuple[Box, Any]] = []
        self._on_host: list[tuple[Tensor, int]] = []
        found: dict[tuple[int, str, tuple[str, ...]], tuple[Box, Any]] = {}
        tensors: dict[int, Tensor] = {}
        elsewhere: set[int] = set()
        """Ids of what `Facts` compares, and of torch's own dicts in modules that the stages do not consist of."""
        for chain in chains:
            elsewhere.update(id(vars(module)) for module in modules_of(chain))
            for stage, _ in chain.parts:
                snapshot = stage.replay.look_at_all()
                found.update(((id(b.thing), b.kind, b.names), (b, contents)) for b, contents in snapshot.boxes)
                tensors.update((key, held.tensor) for key, held in snapshot.tensors.items())
        for box, contents in found.values():
            if box.kind == "attributes" and contents.keys() >= _HOOKS_OF_TORCH:
                elsewhere.update(id(contents[name]) for name in _OF_TORCH & contents.keys())
        self._kept = [(box, contents) for box, contents in found.values() if id(box.thing) not in elsewhere]
        self._on_host = [(t, t._version) for t in tensors.values() if t.is_cpu and not t.requires_grad]

    def changed(self) -> str:
        """What has changed since, by its name; empty if nothing has."""
        for box, before in self._kept:
            if is_changed(box, before):
                return box.label
        return next(("a tensor on the host" for tensor, version in self._on_host if tensor._version != version), "")

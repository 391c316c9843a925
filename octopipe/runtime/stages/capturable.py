"""Which stages can be replayed from a CUDA graph, and when a captured graph is out of date.

Knows: what a graph cannot repeat (decisions of the host, random numbers, collectives, hooks, state that layers keep),
how to detect each of these while a stage runs, and everything outside a stage that a graph depends on. Does not know:
how graphs are captured or replayed (`cuda_graphs.py`).

A graph repeats the kernels of one run on the same memory. Every decision of the host in that run becomes permanent, so
a stage qualifies only if an observed run shows that its host code decides nothing: no waiting for device values, no
random numbers, no collectives, no attribute that changes between forwards. What was fixed before the run (addresses of
weights, `training`, attributes) is checked before every step; if it has changed, graphs are captured again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from octopipe.runtime.stages.chain import StageChain
from octopipe.runtime.stages.weight_queue import is_distributed
from octopipe.runtime.torch_private import known_groups
from octopipe.runtime.turns import exchanges_started

_SCALARS = (int, float, bool, str, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def modules_of(chain: StageChain) -> list[nn.Module]:
    """All modules of a stage with their submodules, each once."""
    return list(dict.fromkeys(m for stage, _ in chain.parts for top in stage.modules for m in top.modules()))


def fixed_reason(chain: StageChain) -> str:
    """Why a stage can never be captured, judging by what it consists of; empty if there is no such reason."""
    if any(recomputes and stage.always_check for stage, recomputes in chain.parts):
        return 'R is compared with F in every step (verify=True; verify="first-step" does so in the first ones)'
    for module in modules_of(chain):
        name = type(module).__name__
        if isinstance(module, DistributedDataParallel) or type(module).__name__.startswith("FSDP"):
            return f"{name} communicates inside the stage"
        if any(vars(module).get(hooks) for hooks in _HOOKS):
            return f"{name} has hooks, which a graph would not call"
        for parameter in module.parameters(recurse=False):
            if is_distributed(parameter):
                return f"{name} has sharded parameters"
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                return f"{name} has a parameter with hooks, which a graph would not call"
            if not parameter.is_cuda:
                return f"{name} has a parameter on the host"
    return ""


def reasons_of_shared_parameters(chains: Mapping[int, StageChain], reasons: Mapping[int, str]) -> dict[int, str]:
    """Why further stages stay eager: they share a parameter with a stage that does (a copy of a layer, a tied weight).

    torch adds a parameter's gradient through one node, on the stream on which the node was made. While an eager
    micro-batch is in flight that node is the default stream's, and a capture of another stage that differentiates the
    same parameter would have to wait for that stream, which CUDA does not allow.
    """
    held = {number: {id(p) for m in modules_of(c) for p in m.parameters(recurse=False)} for number, c in chains.items()}
    found: dict[int, str] = {}
    eager = list(reasons)
    while eager:
        origin = eager.pop()
        for number, mine in held.items():
            if number not in reasons and number not in found and mine & held[origin]:
                found[number] = f"it shares a parameter with stage {origin}, which runs without graphs"
                eager.append(number)
    return found


class Facts:
    """The conditions that a graph of some modules depends on, as a list that stays equal while they hold."""

    def __init__(self, modules: Sequence[nn.Module]):
        self._modules = list(dict.fromkeys(modules))

    def read(self) -> list[Any]:
        """The current facts; takes a fraction of a millisecond for a hundred modules."""
        seen: list[Any] = [
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        ]
        add = seen.append
        for module in self._modules:
            own = module.__dict__
            for value in own.values():
                if isinstance(value, _SCALARS):
                    add(value)
                elif type(value) in (tuple, list):
                    seen.extend(v if isinstance(v, _SCALARS) else id(v) for v in value)
                elif isinstance(value, Tensor):
                    self._tensor(value, add)
            for inner in own["_modules"].values():
                add(id(inner))
            for parameter in own["_parameters"].values():
                if parameter is not None:
                    add(parameter.requires_grad)
                    add(parameter.data_ptr())
                add(id(parameter))
            for buffer in own["_buffers"].values():
                if buffer is not None:
                    self._tensor(buffer, add)
            for hooks in _HOOKS:
                add(len(own.get(hooks) or ()))
        return seen

    @staticmethod
    def _tensor(value: Tensor, add: Callable[[Any], None]) -> None:
        add(id(value))
        if value.is_cpu:
            add(value._version)  # a value on the host becomes a kernel argument, which is constant in the graph
        else:
            add(value.data_ptr())


class Watch:
    """Observes stages while they run eagerly; `reasons` states per stage why it cannot be captured."""

    def __init__(self, chains: dict[int, StageChain]):
        self._chains = chains
        self._facts = {number: Facts(modules_of(chain)) for number, chain in chains.items()}
        self.reasons: dict[int, str] = {}

    @contextmanager
    def op(self, stage: int, *, seeded: bool) -> Iterator[None]:
        """Context of one op of a stage. `seeded`: generators are seeded before every layer and the loss."""
        if stage in self.reasons:
            yield
            return
        facts = self._facts[stage].read()
        collectives, draws = _collectives(), _Draws(self._chains[stage], seeded)
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as heard, draws:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)
        waits = ""
        for warning in heard:
            text = str(warning.message)
            if "synchronizing CUDA operation" in text:
                waits = waits or f"{'/'.join(Path(warning.filename).parts[-2:])}:{warning.lineno}"
            elif "Synchronization debug mode" not in text:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        if waits:
            self.reasons[stage] = (
                f"the host waits for values of the device (sizes that depend on the data, .item()) in {waits}"
            )
        elif draws.found:
            self.reasons[stage] = f"{draws.found} draws random numbers"
        elif _collectives() != collectives:
            self.reasons[stage] = "it communicates with other ranks inside the stage"
        elif self._facts[stage].read() != facts:
            self.reasons[stage] = "a layer changes its own attributes, or puts another tensor in a buffer's place"


class _Draws:
    """Detects which layer of a stage draws random numbers, on the host or on the device."""

    octopipe_no_state = True  # reachable through the layers' hooks, but not their state (`places.py`)

    def __init__(self, chain: StageChain, seeded: bool):
        self._layers = [
            (stage.first_layer + k, module) for stage, _ in chain.parts for k, module in enumerate(stage.modules)
        ]
        self._seeded = seeded
        self._handles: list[Any] = []
        self.found = ""
        self._device = torch.cuda.default_generators[torch.cuda.current_device()]
        self._was = self._now()

    def _now(self) -> tuple[int, bytes]:
        return self._device.get_offset(), torch.default_generator.get_state().numpy().tobytes()

    def _before(self, *_: Any) -> None:
        self._was = self._now()

    def _after(self, layer: int, module: nn.Module, *_: Any) -> None:
        if self._now() != self._was and not self.found:
            self.found = f"layer {layer} ({type(module).__name__})"

    def __enter__(self) -> _Draws:
        for layer, module in self._layers:
            self._handles += [
                module.register_forward_pre_hook(self._before),
                module.register_forward_hook(partial(self._after, layer)),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        if not self._seeded and not self.found and self._now() != self._was:
            self.found = "the loss or a backward"


def _collectives() -> int:
    """The number of collectives that this process has started, as far as its process groups count them, plus exchanges
    that use no process group (DeepEP, rings between ranks that share a GPU)."""
    total = exchanges_started()
    if not (dist.is_available() and dist.is_initialized()):
        return total
    for group in known_groups():
        try:
            total += int(group._get_sequence_number_for_group())
        except (RuntimeError, AttributeError):
            continue
    return total

"""Which stages can be replayed from a CUDA graph.

Knows: what a graph cannot repeat (decisions of the host, random numbers, collectives, hooks, state that layers keep),
and how to detect each of these while a stage runs. Does not know: what captured graphs depend on (`graph_facts.py`),
how they are captured or replayed (`cuda_graphs.py`).

A graph repeats the kernels of one run on the same memory. Every decision of the host in that run becomes permanent, so
a stage qualifies only if an observed run shows that its host code decides nothing: no waiting for device values, no
random numbers, no collectives, no attribute that changes between forwards. What was fixed before the run (addresses of
weights, `training`, attributes) is checked before every step (`graph_facts.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from octopipe.runtime.stages.chain import StageChain
from octopipe.runtime.stages.graph_facts import HOOKS, Facts, modules_of
from octopipe.runtime.stages.state import host_state
from octopipe.runtime.stages.weight_queue import is_distributed
from octopipe.runtime.torch_private import has_global_hooks, known_groups
from octopipe.runtime.turns import exchanges_started


def fixed_reason(chain: StageChain) -> str:
    """Why a stage can never be captured, judging by what it consists of; empty if there is no such reason."""
    if any(recomputes and stage.always_check for stage, recomputes in chain.parts):
        return 'R is compared with F in every step (verify=True; verify="first-step" does so in the first ones)'
    if has_global_hooks():
        return "a hook is registered for all modules, which a graph would not call"
    for stage, _ in chain.parts:
        if name := stage.hooked.listened_to():
            return f"something waits for the gradient of parameter {name}, which a graph would not tell it"
    for module in modules_of(chain):
        name = type(module).__name__
        if isinstance(module, DistributedDataParallel) or type(module).__name__.startswith("FSDP"):
            return f"{name} communicates inside the stage"
        if any(vars(module).get(hooks) for hooks in HOOKS):
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


class Watch:
    """Observes stages while they run eagerly; `reasons` states per stage why it cannot be captured."""

    def __init__(self, chains: dict[int, StageChain]):
        self._chains = chains
        self._facts = {number: Facts(modules_of(chain)) for number, chain in chains.items()}
        self.reasons: dict[int, str] = {}

    @contextmanager
    def op(self, stage: int, *, seeded: bool, seeds_loss: bool = False) -> Iterator[None]:
        """Context of one op of a stage. `seeded`: generators are seeded before every layer and before the loss;
        `seeds_loss`: the op ends with the loss."""
        if stage in self.reasons:
            yield
            return
        facts = self._facts[stage].read()
        device = torch.cuda.default_generators[torch.cuda.current_device()]
        collectives, draws = _collectives(), _Draws(self._chains[stage], seeded, device, seeds_loss=seeds_loss)
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
    """Detects which layer of a stage draws random numbers, on the host or on the device, or whether the loss does."""

    octopipe_no_state = True  # reachable through the layers' hooks, but not their state (`places.py`)

    def __init__(self, chain: StageChain, seeded: bool, device: Any, *, seeds_loss: bool = False):
        """`device`: the device's generator. `seeds_loss`: the op ends with a loss, before which torch's generators are
        seeded."""
        self._stages = [stage for stage, _ in chain.parts]
        self._layers = [(stage.first_layer + k, m) for stage in self._stages for k, m in enumerate(stage.modules)]
        self._seeded, self._seeds_loss, self._device = seeded, seeds_loss, device
        self._handles: list[Any] = []
        self.found = ""
        self._was, self._others_at_start = self._now(), self._others()

    def _now(self) -> tuple[Any, ...]:
        """The state of every generator."""
        return self._device.get_offset(), torch.default_generator.get_state().numpy().tobytes(), self._others()

    def _others(self) -> list[Any]:
        """The state of the generators that no seed of ours reaches: Python's, numpy's and those of the layers."""
        return [host_state(), *(s.comparable() for stage in self._stages for s in stage.replay.generators())]

    def _as_seeded(self) -> bool:
        """Whether nothing has been drawn from torch's generators since they were seeded."""
        fresh = torch.Generator().manual_seed(torch.default_generator.initial_seed()).get_state()
        return self._device.get_offset() == 0 and torch.equal(fresh, torch.default_generator.get_state())

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
        if self.found:
            return
        drew = self._others() != self._others_at_start if self._seeded else self._now() != self._was
        if drew or (self._seeds_loss and not self._as_seeded()):
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

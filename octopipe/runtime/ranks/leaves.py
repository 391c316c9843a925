"""Trainable tensors that a layer uses but does not register: detected in the autograd graph of its first forwards.

Knows: how to find the leaves of an autograd graph, and which of them belong to this rank's layers. Does not know: how
gradients are reduced (`reduce`) or what layers compute.

A weight that is kept in a list, a closure or a global variable does not appear in `parameters()`. In one process this
is harmless if another module registers it. On several ranks, every rank has its own copy, and the gradient of this copy
would be lost silently. The autograd graph shows every use, however the layer holds the weight. A leaf that a forward
creates itself (a detached input that is differentiated again) is a different object each time, so only leaves that
occur in two forwards count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.stages.calling import layers_text
from octopipe.runtime.stages.foreign_reads import ForeignReads, Known

LOOKS = 2
"""Number of forwards of every stage that are inspected."""


class LeafWatch:
    """Inspects the first forwards of an executor's stages; `finish`, called after every step, reports the findings."""

    def __init__(
        self,
        executor: Any,
        own: Mapping[int, str],
        others: Mapping[int, Known],
        used_elsewhere: Callable[[Tensor, Sequence[int]], None],
    ):
        """`own`: the names of this rank's parameters, by id. `others`: the parameters of all layers that are given as
        modules, by id. `used_elsewhere` is called with a parameter of this rank and layers that use but do not register
        it."""
        self._executor, self._own, self._others, self._used = executor, own, others, used_elsewhere
        self._found = ""
        self._watched: dict[int, _Watching] = {}
        for number, chain in list(executor.chains.items()):
            modules = [m for stage, _ in chain.parts for m in stage.modules]
            if any(isinstance(inner, FSDPModule) for m in modules for inner in m.modules()):
                continue  # FSDP2 creates its leaves anew for every forward
            self._watched[number] = executor.chains[number] = _Watching(chain, self._look)
            if foreign := {key: known for key, known in others.items() if key not in own}:
                for stage, _ in chain.parts:
                    stage.mode.reads = ForeignReads(foreign)

    def finish(self, world: Any) -> bool:
        """Whether the inspection is complete; every rank raises the findings of all ranks (collective)."""
        told = [text for text in world.gather(self._found) if text]
        done = bool(told) or all(w.looks >= LOOKS for w in self._watched.values())
        if done:
            self.stop()
        if told:
            raise OctoPipeError(told[0])
        return all(world.gather(done))

    def stop(self) -> None:
        """Stop inspecting, and release everything: an executor that is no longer used is then freed at once, with the
        threads and sockets of its groups, and not when Python next collects reference cycles."""
        for number, watching in self._watched.items():
            if self._executor.chains.get(number) is watching:
                self._executor.chains[number] = watching.chain
            for stage, _ in watching.parts:
                stage.mode.reads = None
        self._watched = {}

    def _look(self, watching: _Watching, stage: Any, run: Any) -> None:
        registered = {id(p) for m in stage.modules for p in m.parameters()}
        given = {id(t) for t in run._leaves}
        layers = range(stage.first_layer, stage.first_layer + len(stage.modules))
        for leaf in _leaves(run._edges or ()):
            if id(leaf) in registered or id(leaf) in given:
                continue
            if id(leaf) in self._own:
                self._used(leaf, layers)
            elif watching.seen_before(leaf) and not self._found:
                self._found = self._problem(leaf, stage, layers)

        read = "" if stage.mode.reads is None else stage.mode.reads.found
        if read and not self._found:
            self._found = (
                f"{_who(layers)} (or the loss after it) reads parameter {read}, of a layer on another rank, without "
                "its gradient: on this rank nothing would ever update it; register it in the layer that uses it (as a "
                "parameter or a submodule), and it is tied, or plan both on one rank"
            )

    def _problem(self, leaf: Tensor, stage: Any, layers: range) -> str:
        known = self._others.get(id(leaf))
        name = "" if known is None or known.ref() is not leaf else known.name
        what = f"parameter {name}, of a layer on another rank" if name else f"a trainable tensor {list(leaf.shape)}"
        return (
            f"{_who(layers)} (or the loss after it) uses {what}, and does not register it: on this rank it would get "
            "none of the other ranks' gradients and would not be trained; register it in the layer that uses it (as "
            "a parameter or a submodule; the loss: as an nn.Module), which ties it"
        )


def _who(layers: range) -> str:
    return f"{'one of ' * (len(layers) > 1)}{layers_text(layers[0], layers[-1])}"


class _Watching:
    """A chain whose first forwards with a graph are inspected."""

    def __init__(self, chain: Any, look: Callable[..., None]):
        self.chain, self.parts, self._call = chain, chain.parts, look
        self.looks = 0
        self._kept: dict[int, Tensor] = {}
        """Unregistered leaves of the first inspected forward, kept so that their ids are not reused."""

    def seen_before(self, leaf: Tensor) -> bool:
        if self.looks:
            return id(leaf) in self._kept
        self._kept[id(leaf)] = leaf
        return False

    def forward(self, *args: Any, **more: Any) -> Any:
        out = self.chain.forward(*args, **more)
        # A part that is recomputed has its graph only after R.
        later = any(recompute and more.get("again") for _, recompute in self.parts)
        if self.looks < LOOKS and more.get("keep", True) and not later:
            self._see(out[0])
        return out

    def recompute(self, runs: list[Any]) -> None:
        self.chain.recompute(runs)
        if self.looks < LOOKS:
            self._see(runs)

    def _see(self, runs: list[Any]) -> None:
        for run, (stage, _) in zip(runs, self.parts):
            self._call(self, stage, run)
        self.looks += 1

    def end_step(self) -> None:
        self.chain.end_step()


def _leaves(edges: Sequence[Any]) -> list[Tensor]:
    """Leaf tensors of the graph behind these edges."""
    stack = [edge.node for edge in edges if edge is not None]
    seen, out = set(stack), []
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and not node.next_functions:
            out.append(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return out


def names_by_id(layers: Sequence[Any]) -> dict[int, Known]:
    """The trainable parameters of all layers that are given as modules, by id."""
    return {
        id(p): Known(weakref.ref(p), f"{k}.{name}")
        for k, layer in enumerate(layers)
        if isinstance(layer, nn.Module)
        for name, p in layer.named_parameters()
        if p.requires_grad
    }

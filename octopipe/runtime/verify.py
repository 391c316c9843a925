"""The self-check of the first step: compares the gradients of one micro-batch with plain autograd on the same layers.

Knows: how the ops of a stage are recorded while a step runs, and how its layers run again in plain PyTorch with the
same inputs, buffers, random numbers and output gradients. Does not know: plans or transports; every rank checks only
its own stages, so values received from another rank are taken as given.

The plain run takes place after the step, before an optimizer changes a weight. Layers run forward once more from the
state of the recorded forward (`stages/replay.py`), and their state is restored afterwards. Stages with sharded
parameters (DTensor) are not checked.

A step that fits must not fail because it is checked: recorded gradients of parameters are kept in host memory, they are
compared piece by piece, and a stage for whose second run the device has too little memory is named and passed over.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.stages.offload import Parcel
from octopipe.runtime.stages.places import snapshot_of_modules
from octopipe.runtime.stages.replay import Kept, everything_as
from octopipe.runtime.stages.rng import rng_kept, rng_state, set_rng_state
from octopipe.runtime.stages.weight_queue import Between
from octopipe.runtime.values import build, flatten
from octopipe.runtime.wire.messages import takes_gradient

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-2}
"""The allowed difference as a share of a gradient's norm, by the coarsest dtype involved; `HALF_TOLERANCE` for all
others."""
HALF_TOLERANCE = 0.1
PIECE = 1 << 24
"""The number of values that are compared at a time, in float64."""


class Verifier:
    """Records one micro-batch of every stage of an executor during one step; `finish` compares it with plain
    autograd."""

    def __init__(self, executor: Any, named: Mapping[str, nn.Parameter]):
        self._executor = executor
        self._names = {id(p): name for name, p in named.items()}
        self._all = list(named.values())
        plan = executor.program.plan
        of_loss = [p for name, p in named.items() if int(name.split(".", 1)[0]) == plan.num_layers]
        self._watched: dict[int, _Watched] = {}
        executor.pairs.apart = True
        first: dict[int, int] = {}
        for step in executor.program.steps:
            if step.op is not None and step.code in (2, 4):  # I, B
                first.setdefault(step.op.stage, step.op.micro_batch)
        for number, chain in list(executor.chains.items()):
            if number not in first:
                continue
            modules = [m for stage, _ in chain.parts for m in stage.modules]
            held = [p for m in modules for p in m.parameters()]
            held += of_loss if plan.stages[number].stop == plan.num_layers else []
            parameters = list(dict.fromkeys(p for p in held if p.requires_grad))
            if any(type(p) not in (nn.Parameter, Tensor) for p in parameters):
                warnings.warn(f"stage {number} has sharded parameters and is not verified", stacklevel=2)
                continue
            # Forwards of a stage run in the order of their cells' steps, so counting them identifies the micro-batch.
            ops = [s.op for s in executor.program.steps if s.op is not None and s.code == 0]
            order = [op.micro_batch for op in ops if op.stage == number]
            self._watched[number] = watched = _Watched(chain, modules, parameters, order.index(first[number]))
            executor.chains[number] = watched

    def finish(self, world: Any) -> None:
        """Compare; if any rank finds a difference, every rank raises an error with the first finding (collective)."""
        found = ""
        self._executor.pairs.apart = False
        for number, watched in self._watched.items():
            self._executor.chains[number] = watched.chain
            if not found:
                try:
                    found = watched.compare(self._names, self._executor._autocast or nullcontext, self._all)
                except torch.OutOfMemoryError:
                    watched.forget()
                    warnings.warn(
                        f"the layers up to {watched.parts[-1][0].place()} were not verified: the device has too little "
                        "memory to run them a second time",
                        stacklevel=2,
                    )
                except Exception as error:  # the other ranks wait for this rank's result
                    why = " ".join(str(error).split())[:160]
                    place = watched.parts[-1][0].place()
                    found = (
                        f"verify: the layers up to {place} cannot run a second time ({type(error).__name__}: {why}); "
                        "leave verify out, or fix their forward"
                    )
            watched.forget()
        if torch.cuda.is_initialized():  # a run's reported memory is that of its steps
            torch.cuda.reset_peak_memory_stats()
        everybody = [text for text in world.gather(found) if text]
        if everybody:
            raise OctoPipeError(everybody[0])


class _Watched:
    """A chain that records the inputs of one micro-batch, and the gradients that its ops added to `.grad`."""

    def __init__(self, chain: Any, modules: Sequence[nn.Module], parameters: list[nn.Parameter], which: int):
        self.chain, self._modules, self.parameters, self._which = chain, modules, parameters, which
        self.parts = chain.parts
        self._forwards = 0
        self._given: tuple[Any, Any, Any, Any, Any] | None = None
        self._found: Kept | None = None
        self._rng: Any = None
        self._output: Any = None
        self.gradients: list[Tensor | None] = []
        self.returned: list[Tensor | None] = []
        self.added: dict[int, Tensor] = {}

    def forward(
        self,
        value: Any,
        needs: Sequence[bool] | None,
        then: Callable[[Any], Any] | None,
        seed: int | None,
        *,
        again: bool,
        keep: bool = True,
        side: Mapping[str, Any] | None = None,
        parcel: Parcel | None = None,
    ) -> Any:
        mine = self._forwards == self._which
        self._forwards += 1
        if mine:
            self._given = (_copied(value), needs, copy.copy(then), seed, _copied(side))
            if hasattr(then, "target"):
                self._given[2].target = _copied(then.target)  # type: ignore[union-attr]
            loss = getattr(then, "function", then)
            found = snapshot_of_modules([(str(k), m) for k, m in enumerate(self._modules)], [("loss_fn", loss)])
            found.copy_tensors(lambda _: True)
            self._found = everything_as(found)
            self._rng = rng_state()
        how: dict[str, Any] = {"again": again, "keep": keep, "side": side, "parcel": parcel}
        runs, out, out_needs = self.chain.forward(value, needs, then, seed, **how)
        if mine:
            self._output = _copied(out)
            runs = [_WatchedRun(self, runs)]
        return runs, out, out_needs

    def recompute(self, runs: list[Any]) -> None:
        self.chain.recompute(runs[0].runs if runs and isinstance(runs[0], _WatchedRun) else runs)

    def end_step(self) -> None:
        self.chain.end_step()

    def forget(self) -> None:
        """Release everything that was kept for the comparison."""
        self._given = self._found = self._output = None
        self.gradients, self.returned = [], []
        self.added.clear()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A context that records what is added to `.grad` within it."""
        before = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        yield
        for p, grad in zip(self.parameters, before):
            if p.grad is not None:
                new = p.grad.detach().to("cpu", copy=True)
                self.added[id(p)] = self.added[id(p)] + new if id(p) in self.added else new
            if grad is not None:
                p.grad = grad if p.grad is None else grad.add_(p.grad)

    def compare(self, names: Mapping[int, str], autocast: Callable[[], Any], others: Sequence[Tensor]) -> str:
        """Return the first difference in one line; empty if there is none. `others`: all parameters of this rank."""
        if self._given is None or self._found is None:
            return ""
        value, needs, then, seed, side = self._given
        leaves: list[Any] = []
        form = flatten(value, leaves)
        if needs is None:
            first = self.parts[0][0].input_grad
            needs = [first and isinstance(t, Tensor) and takes_gradient(t) for t in leaves]
        leaves = [t.requires_grad_() if need else t for t, need in zip(leaves, needs)]
        passed = [t.clone() if need else t for t, need in zip(leaves, needs)]  # may be changed in place
        with rng_kept(), self._found.again(()), torch.enable_grad(), autocast():
            set_rng_state(self._rng)
            coarse = {torch.get_autocast_dtype(k) for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)}
            out = build(form, iter(passed))
            for stage, _ in self.parts:
                out = stage.call(out, then if stage is self.parts[-1][0] else None, seed, side)
        outputs: list[Any] = []
        flatten(out, outputs)
        ours: list[Any] = []
        flatten(self._output, ours)
        dtypes = {t.dtype for t in (*self.parameters, *outputs) if isinstance(t, Tensor) and takes_gradient(t)} | coarse
        limit = max((TOLERANCE.get(_real(d), HALF_TOLERANCE) for d in dtypes), default=1e-2)
        place = self.parts[-1][0].place()
        for a, b in zip(ours, outputs, strict=True):
            if isinstance(b, Tensor) and takes_gradient(b) and _far(a, b.detach(), limit, 0.0):
                what = "the loss" if then is not None else f"the output of {place}"
                return f"verify: {what} differs from plain torch's; a layer depends on something outside it"
        pairs = [
            (o, g) for o, g in zip(outputs, self.gradients, strict=True)
            if isinstance(o, Tensor) and o.requires_grad and g is not None
        ]  # fmt: skip
        wanted = [*self.parameters, *(t for t, need in zip(leaves, needs) if need)]
        if pairs and wanted:
            plain = _gradients([o for o, _ in pairs], wanted, [g for _, g in pairs], others)
        else:
            plain = (None,) * len(wanted)
        # Where the true gradient is zero (a bias before batch norm) both are noise.
        floor = 4 * max((torch.finfo(d).eps for d in dtypes), default=0.0)
        floor *= max((_norm(g) for g in map(_dense, plain) if g is not None), default=0.0)
        got = [self.added.get(id(p)) for p in self.parameters]
        got += [g for g, need in zip(self.returned, needs) if need]
        titles = [f"parameter {names.get(id(p), '?')}" for p in self.parameters]
        titles += [f"an input of layer {self.parts[0][0].first_layer}"] * (len(wanted) - len(titles))
        for title, ours_, theirs in zip(titles, got, plain, strict=True):
            a, b = _dense(ours_), _dense(theirs)
            if a is None and b is not None and bool((b != 0).any()):
                return f"verify: {title} got no gradient, where plain torch gives one; report its layer's forward"
            if a is None or b is None:
                either = a if b is None else b
                far = either is not None and _far(either, torch.zeros_like(either), limit, floor)
            else:
                far = _far(a, b, limit, floor)
            if far:
                return f"verify: the gradient of {title} differs from plain torch's; report its layer's forward"
        return ""


class _WatchedRun:
    """Presents the runs of one micro-batch through all parts of a chain as one run."""

    def __init__(self, watched: _Watched, runs: list[Any]):
        self._watched, self.runs = watched, runs

    def _keep(self, result: list[Tensor | None]) -> list[Tensor | None]:
        self._watched.returned = [None if g is None else g.detach().clone() for g in result]
        return result

    def backward_input(self, gradients: Any) -> list[Tensor | None]:
        self._watched.gradients = [None if g is None else g.clone() for g in gradients]
        with self._watched.counting():
            for run in reversed(self.runs):
                gradients = run.backward_input(gradients)
        return self._keep(gradients)

    def backward_full(self, gradients: Any) -> list[Tensor | None]:
        self._watched.gradients = [None if g is None else g.clone() for g in gradients]
        with self._watched.counting():
            while self.runs:
                gradients = self.runs.pop().backward_full(gradients)
        return self._keep(gradients)

    def backward_weight(self, between: Between = None) -> None:
        with self._watched.counting():
            while self.runs:
                self.runs.pop().backward_weight(between)

    def weight_so_far(self) -> None:
        for run in self.runs:
            run.weight_so_far()

    def weight_work(self) -> int:
        return sum(run.weight_work() for run in self.runs)


def _gradients(
    outputs: list[Tensor], wanted: list[Tensor], given: list[Tensor], others: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Return the gradients of `wanted` without changing any `.grad`, also not that of `others`."""
    try:
        return torch.autograd.grad(outputs, wanted, given, allow_unused=True, retain_graph=True)
    except RuntimeError as error:
        if "donated buffers" in str(error):  # a compiled layer reuses what its backward reads: it runs only once
            return torch.autograd.grad(outputs, wanted, given, allow_unused=True)
        if "compatible with .grad()" not in str(error):
            raise
    # Reentrant checkpoints run a backward inside the backward, whose results are only available in `.grad`.
    before = [(t, t.grad) for t in (*others, *wanted)]
    try:
        for t, _ in before:
            t.grad = None
        torch.autograd.backward(outputs, given)
        return [t.grad for t in wanted]
    finally:
        for t, grad in before:
            t.grad = grad


def _copied(value: Any) -> Any:
    leaves: list[Any] = []
    form = flatten(value, leaves)
    return build(form, iter([t.detach().clone() if isinstance(t, Tensor) else t for t in leaves]))


def _dense(grad: Tensor | None) -> Tensor | None:
    return grad.to_dense() if grad is not None and grad.layout is not torch.strided else grad


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real()


def _far(a: Tensor, b: Tensor, limit: float, floor: float) -> bool:
    return a.shape != b.shape or not _norm(b, a) <= limit * _norm(b) + floor + 1e-30


def _norm(x: Tensor, away_from: Tensor | None = None) -> float:
    """Return the norm of a tensor, or of its difference from another tensor, which may be on another device."""
    wide = torch.complex128 if x.is_complex() or (away_from is not None and away_from.is_complex()) else torch.float64
    other = None if away_from is None else away_from.detach().reshape(-1)
    squares = torch.zeros((), dtype=torch.float64, device=x.device)
    for at, piece in enumerate(x.detach().reshape(-1).split(PIECE)):
        values = piece.to(wide)
        if other is not None:
            values = values - other[at * PIECE : at * PIECE + piece.numel()].to(x.device).to(wide)
        squares += values.abs().square().sum()
    return float(squares) ** 0.5

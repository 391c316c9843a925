"""Ops as CUDA graphs: captured once in the order of the plan and replayed in every following step.

Knows: how F, R, I, W and B of every stage and micro-batch become graphs that share one memory pool, how their inputs
are copied to the addresses that a graph reads. Does not know: which stages qualify (`capturable.py`), where gradients
accumulate (`graph_gradients.py`), plans or transports.

Layers that take only a few milliseconds are bound by the host that launches their kernels; a graph launches all kernels
at once.

*Memory.* A rank runs its ops in the same order in every step. One whole step is captured in that order, op by op, from
one pool: memory that an op frees is reused by later ops, exactly as without graphs. Activations of all micro-batches in
flight therefore need the same memory as without graphs, and replaying in that order never overwrites data that is still
needed. Tensors that graphs pass to each other, to transports and to the loss are kept as views that do not own memory.

*Steps.* The first two steps run eagerly. The third runs under `Watch`, which reports what cannot be captured; every
stage that qualifies is then captured once as a trial. The fourth step captures each graph and replays it immediately;
from then on, ops are replayed. An op whose inputs differ in form from the captured ones runs eagerly, together with its
whole micro-batch. When something changes that graphs depend on (`Facts`), they are dropped and the procedure restarts.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octopipe.runtime.slots import Cell
from octopipe.runtime.stages.calling import Loss, layers_text
from octopipe.runtime.stages.capturable import Watch, fixed_reason, reasons_of_shared_parameters
from octopipe.runtime.stages.captured import REPLAYED, Captured, Passage
from octopipe.runtime.stages.chain import Autocast, Between, Forward, Ops, StageChain
from octopipe.runtime.stages.graph_facts import Facts, Surroundings, modules_of
from octopipe.runtime.stages.graph_gradients import GradientBuffers
from octopipe.runtime.stages.graph_inputs import Inputs
from octopipe.runtime.stages.graph_launch import Graph
from octopipe.runtime.stages.graph_memory import Pool, viewed
from octopipe.runtime.values import build, flatten

COLD_STEPS = 2
"""Number of eager steps, in which the state of forwards is learned and R is compared with F."""
WARM_UP_STEPS = COLD_STEPS + 2
"""The eager steps, the observed one and the captured one: steps before the first that only replays."""
MOST_CAPTURES = 4
"""How often graphs are captured before all stages stay eager, because something changes all the time."""
COLD, WATCHED, CAPTURING, REPLAYING, OFF = range(5)
PAIRED = "its ops run in pairs with others"
_log = logging.getLogger("octopipe.graphs")


_ONE_TENSOR, _TENSOR_AND_TARGET = (tuple, True, False, False), (tuple, True, False, True)
"""Forms of the usual inputs of F (one tensor, no side inputs), so that `flatten` need not run for them."""
NO_INPUTS = Inputs(None, None)


class Seen(NamedTuple):
    """The first micro-batch of a stage in the observed step, used for the trial capture."""

    kinds: list[str]
    given: dict[str, Any]
    """For each op, the forms of its inputs, leaf by leaf."""


class GraphedOps(Ops):
    """Runs ops, replaying them from graphs where that is safe."""

    warm_up_steps = WARM_UP_STEPS

    def __init__(
        self,
        chains: dict[int, StageChain],
        autocast: Autocast,
        device: torch.device,
        paired: Collection[int] = (),
    ):
        """`paired`: stages with ops that the plan runs in pairs. They run eagerly: the two ops of a pair alternate, so
        they cannot be observed separately, and ranks that exchange tokens must agree on whether they are captured."""
        super().__init__(chains, autocast)
        self._paired = frozenset(paired)
        self._device = device
        self._phase, self._cold = COLD, 0
        self._captures = 0
        self.reasons: dict[int, str] = {}
        """For each stage that runs eagerly, the reason."""
        self.peak_bytes = 0
        """Peak allocation in the captured step; replays allocate nothing, so torch's statistics do not show it."""
        self._reported: set[str] = set()
        self._watch: Watch | None = None
        self._pool: Pool | None = None
        self._cells: dict[Cell, None] = {}
        """Cells whose ops have graphs."""
        self._seen: dict[int, Seen] = {}
        self._facts = Facts([])
        """What the graphs of the captured stages depend on; `_known` has the values at the decision to capture."""
        self._surroundings = Surroundings([])
        self._known: list[Any] = []
        self._gradients = GradientBuffers()
        self._by_calls: set[int] = set()
        """Stages that run eagerly for the rest of this step."""

    @property
    def captured(self) -> int:  # type: ignore[override]
        """The number of ops that are currently replayed from graphs."""
        return sum(len(cell.graphs) for cell in self._cells) if self._phase == REPLAYING else 0

    # -- steps ------------------------------------------------------------------------------------------

    def on_device(self) -> AbstractContextManager[Any]:
        """Make this rank's device current: calls of the driver go to the current device, unlike torch's own."""
        return torch.cuda.device(self._device)

    def begin_step(self) -> None:
        if self._phase == OFF:
            return
        self._by_calls.clear()
        if self._phase in (CAPTURING, REPLAYING) and (
            self._facts.read() != self._known or self._surroundings.changed()
        ):
            self._drop()
        if self._phase == WATCHED:
            self.reasons = {
                s: r for s, chain in self.chains.items() if (r := PAIRED if s in self._paired else fixed_reason(chain))
            }
            self._watch = Watch(self.chains)
            self._watch.reasons.update(self.reasons)
            for number, chain in self.chains.items():
                for stage, _ in chain.parts:
                    stage.replay.observe()
                    stage.under_capture = number not in self.reasons
        elif self._phase == CAPTURING:
            torch.cuda.synchronize(self._device)
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            self._pool = Pool(self._device)
            self._gradients.bind()
        elif self._phase == REPLAYING:
            self._gradients.bind()

    def end_step(self, *, whole: bool) -> None:
        if not whole:
            if self._phase in (WATCHED, CAPTURING):
                self._drop()
            return
        if self._phase == COLD:
            self._cold += 1
            if self._cold >= COLD_STEPS:
                self._cold, self._phase = 0, WATCHED
        elif self._phase == WATCHED:
            self._decide()
        elif self._phase == CAPTURING:
            if self._gradients.rescue():
                self._drop()  # the next graphs will have buffers for these gradients
                return
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
            self._phase = REPLAYING

    def _decide(self) -> None:
        """After the observed step: try to capture every stage, and report which ones stay eager."""
        assert self._watch is not None
        self.reasons = self._watch.reasons
        self._watch = None
        self._captures += 1
        if self._captures > MOST_CAPTURES:
            self.reasons = dict.fromkeys(self.chains, "its layers change again and again between steps")
        for number, chain in self.chains.items():
            if any(stage.replay.changes_state() for stage, _ in chain.parts):
                self.reasons.setdefault(number, "its forwards change what the next ones read (statistics, counters)")
            if number not in self.reasons:
                if number in self._seen:
                    self._trial(number, chain)
                else:
                    self.reasons[number] = "it ran no op in the watched step"
        self._seen.clear()
        self.reasons.update(reasons_of_shared_parameters(self.chains, self.reasons))
        for number, reason in self.reasons.items():
            self._tell(number, reason)
            for stage, _ in self.chains[number].parts:
                stage.under_capture = False
        if all(number in self.reasons for number in self.chains):
            self._phase = OFF
            return
        for number, chain in self.chains.items():
            for stage, _ in chain.parts:
                stage.draws = number in self.reasons
        captured = [chain for s, chain in self.chains.items() if s not in self.reasons]
        modules = [m for chain in captured for m in modules_of(chain)]
        self._gradients.make(modules)
        self._surroundings = Surroundings(captured)
        self._facts = Facts(modules)
        self._known, self._phase = self._facts.read(), CAPTURING

    def _tell(self, stage: int, reason: str) -> None:
        if reason not in self._reported:
            self._reported.add(reason)
            first = self.chains[stage].parts[0][0].first_layer
            last = self.chains[stage].parts[-1][0]
            layers = layers_text(first, last.first_layer + len(last.modules) - 1)
            _log.warning("stage %d (%s) runs without CUDA graphs: %s", stage, layers, reason)

    def _drop(self) -> None:
        """Drop the graphs and start again, because something they depend on has changed."""
        if self._pool is not None:
            torch.cuda.synchronize(self._device)
        for cell in self._cells:
            cell.graphs = None
        self._cells.clear()
        self._pool, self._watch = None, None
        self._surroundings = Surroundings([])
        self._seen.clear()
        for chain in self.chains.values():
            for stage, _ in chain.parts:
                stage.draws, stage.under_capture = True, False
        self._phase = COLD

    def close(self) -> None:
        """Release the graphs and their memory."""
        self._drop()
        self._gradients.release()
        self._phase = OFF

    # -- ops --------------------------------------------------------------------------------------------

    def forward(
        self,
        cell: Cell,
        value: Any,
        needs: Sequence[bool] | None,
        then: Callable[[Any], Any] | None,
        seed: int | None,
        side: Mapping[str, Any] | None,
    ) -> Forward:
        phase, stage, graphs = self._phase, cell.stage, cell.graphs
        if stage in self._by_calls:
            return super().forward(cell, value, needs, then, seed, side)
        if phase == REPLAYING and graphs is not None and then is None and side is None:
            known = graphs["F"]
            same_form = known.input_message is not None and known.input_message is cell.input_message
            if same_form and torch.is_grad_enabled():
                node, address = known.node, value.data_ptr()
                if address != node.address:
                    node.move(address)
                known.graph.replay()
                return REPLAYED, known.outputs[0], known.needs
        if phase == WATCHED and self._watch is not None:
            self._note(cell, "F", (value, side, _target(then)), (needs, then))
            with self._watch.op(stage, seeded=seed is not None, seeds_loss=None not in (seed, then)):
                return super().forward(cell, value, needs, then, seed, side)
        if phase < CAPTURING or phase == OFF or stage in self.reasons:
            return super().forward(cell, value, needs, then, seed, side)
        target = _target(then)
        given: list[Any]
        if side is None and isinstance(value, Tensor) and (target is None or isinstance(target, Tensor)):
            given, form = [value, None, target], _ONE_TENSOR if target is None else _TENSOR_AND_TARGET
        else:
            given = []
            form = flatten((value, side, target), given)
        if phase == REPLAYING:
            known = None if graphs is None else graphs["F"]
            if (
                known is None
                or known.then is not _function(then)
                or not torch.is_grad_enabled()
                or not known.inputs.fit(form, given, needs)
            ):
                if self._autocast is not None:
                    # Only the graph of a step's first F casts the weights; without it, later graphs use old casts.
                    self._by_calls.add(stage)
                return super().forward(cell, value, needs, then, seed, side)
            known.learn(cell, value)
            known.inputs.fill(given)
            known.graph.replay()
            out = known.outputs[0] if known.form is True else build(known.form, iter(known.outputs))
            return REPLAYED, out, known.needs
        if cell.takes_batch and needs and True in needs:
            return super().forward(cell, value, needs, then, seed, side)  # the caller gets its input's gradient
        inputs = self._inputs(form, needs)
        graph, (runs, out, out_needs) = self._capture(
            lambda: self._forward_body(stage, cell.recomputes, inputs, form, given, needs, then), inputs
        )
        outputs: list[Any] = []
        out_form = flatten(out, outputs)
        views = [viewed(leaf) for leaf in outputs]
        self._cells[cell] = None
        cell.graphs = {"F": Captured(graph, inputs, out_form, views, out_needs, _function(then))}
        inputs.fill(given)
        graph.replay_first()
        return Passage(runs), out, out_needs

    def recompute(self, cell: Cell) -> None:
        passage = cell.runs
        if not isinstance(passage, Passage):
            with self._watching(cell, "R"):
                super().recompute(cell)
            return
        if passage.runs is not None:
            runs = passage.runs
            graph, _ = self._capture(lambda: self._recompute_body(cell.stage, runs))
            cell.graphs["R"] = Captured(graph, NO_INPUTS, None, [], None, None)
            graph.replay_first()
        else:
            cell.graphs["R"].graph.replay()

    def backward(self, cell: Cell, gradients: list[Any], *, fused: bool) -> list[Any]:
        passage, kind = cell.runs, "B" if fused else "I"
        if not isinstance(passage, Passage):
            with self._watching(cell, kind, gradients):
                return super().backward(cell, gradients, fused=fused)
        if fused:
            cell.runs = None
        if passage.runs is None:
            known = cell.graphs[kind]
            node, first = known.node, gradients[0] if gradients else None
            if node is None or first is None:
                known.inputs.fill_gradients(gradients)  # already a flat list
                known.learn_gradients(cell)
            else:
                address = first.data_ptr()
                if address != node.address:
                    node.move(address)
            known.graph.replay()
            return known.outputs.copy()
        given: list[Any] = []
        form = flatten(gradients, given)
        inputs, runs = self._inputs(form, None), passage.runs
        graph, out = self._capture(lambda: self._backward_body(inputs, given, runs, fused), inputs)
        self._gradients.check(modules_of(self.chains[cell.stage]))
        cell.graphs[kind] = Captured(graph, inputs, None, [viewed(leaf) for leaf in out], None, None)
        inputs.fill(given)
        graph.replay_first()
        return out

    def weight(self, cell: Cell, between: Between = None) -> None:
        passage = cell.runs
        if not isinstance(passage, Passage):
            with self._watching(cell, "W"):
                super().weight(cell, between)
            return
        cell.runs = None
        if passage.runs is not None:
            runs = passage.runs
            graph, _ = self._capture(lambda: StageChain.weight(runs))
            self._gradients.check(modules_of(self.chains[cell.stage]))
            cell.graphs["W"] = Captured(graph, NO_INPUTS, None, [], None, None)
            graph.replay_first()
        else:
            cell.graphs["W"].graph.replay()

    # -- what is captured ---------------------------------------------------------------------------------

    def _capture(self, body: Callable[[], Any], inputs: Inputs = NO_INPUTS) -> tuple[Graph, Any]:
        assert self._pool is not None
        graph, made = self._pool.capture(body)
        inputs.bind(graph)
        return graph, made

    def _inputs(self, form: Any, needs: Sequence[bool] | None) -> Inputs:
        assert self._pool is not None
        return Inputs(form, needs, inside=self._pool.copies_inside)

    def _forward_body(
        self, stage: int, again: bool, inputs: Inputs, form: Any, given: list[Any], needs: Any, then: Any
    ) -> Any:
        value, side, target = build(form, iter(inputs.placed(given)))
        if isinstance(then, Loss):
            then = Loss(then.function, target)
        with nullcontext() if self._autocast is None else self._autocast():
            return self.chains[stage].forward(value, needs, then, None, again=again, side=side)

    def _recompute_body(self, stage: int, runs: list[Any]) -> None:
        with nullcontext() if self._autocast is None else self._autocast():
            self.chains[stage].recompute(runs)

    @staticmethod
    def _backward_body(inputs: Inputs, given: list[Any], runs: list[Any], fused: bool) -> list[Any]:
        return StageChain.backward(runs, inputs.placed(given), fused=fused)

    # -- the watched step, and the trial after it ---------------------------------------------------------

    @contextmanager
    def _watching(self, cell: Cell, kind: str, given: Any = None) -> Iterator[None]:
        if self._phase != WATCHED or self._watch is None:
            yield
            return
        self._note(cell, kind, given)
        with self._watch.op(cell.stage, seeded=kind == "R"):  # R is seeded like its F
            yield
        self._gradients.observe(modules_of(self.chains[cell.stage]))

    def _note(self, cell: Cell, kind: str, value: Any, more: Any = None) -> None:
        """Record the forms (not the values) of the inputs of a stage's first micro-batch."""
        seen = self._seen.get(cell.stage)
        if seen is None:
            seen = self._seen[cell.stage] = Seen([], {"cell": cell})
        if seen.given["cell"] is not cell:
            return
        leaves: list[Any] = []
        form = flatten(value, leaves)
        host = any(isinstance(t, Tensor) and not t.is_cuda for t in leaves)
        if host and self._watch is not None:
            self._watch.reasons.setdefault(cell.stage, "an input lies on the host")
        seen.kinds.append(kind)
        seen.given[kind] = (form, [t.to("meta") if isinstance(t, Tensor) else t for t in leaves], more)

    def _trial(self, number: int, chain: StageChain) -> None:
        """Capture the stage's ops once without running them, so that failures occur before graphs are used."""
        for stage, _ in chain.parts:
            stage.draws = False
        grads = [(p, p.grad) for m in modules_of(chain) for p in m.parameters(recurse=False)]
        try:
            self._try_ops(number, self._seen[number], Pool(self._device))
        except Exception as error:
            why = " ".join(str(error).split("\n")[0].split())[:160] or type(error).__name__
            self.reasons[number] = f"it cannot be captured ({why})"
        finally:
            for parameter, grad in grads:
                parameter.grad = grad
            for stage, _ in chain.parts:
                stage.draws = True
            chain.end_step()

    def _try_ops(self, number: int, seen: Seen, pool: Pool) -> None:
        runs: list[Any] = []
        again = seen.given["cell"].recomputes
        for kind in seen.kinds:
            form, leaves, more = seen.given[kind]
            inputs = Inputs(form, None)
            if kind == "F":
                body = partial(self._forward_body, number, again, inputs, form, leaves, *more)
                _, (runs, _, _) = pool.capture(body)
            elif kind == "R":
                pool.capture(partial(self._recompute_body, number, runs))
            elif kind == "W":
                pool.capture(partial(StageChain.weight, runs))
            else:
                pool.capture(partial(self._backward_body, inputs, leaves, runs, kind == "B"))


def _target(then: Any) -> Any:
    return then.target if isinstance(then, Loss) else None


def _function(then: Any) -> Any:
    return then.function if isinstance(then, Loss) else then

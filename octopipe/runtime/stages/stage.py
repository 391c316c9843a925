"""One stage: modules run in sequence, one micro-batch at a time, in the ops F, R, I, W and B.

Knows: how a stage's forward is separated from the graphs of adjacent stages, what is kept between the ops, and when it
is released. Does not know: ranks, transports, plans or the meaning of losses; the executor calls these methods in the
order of a plan. `values` flattens nested values, `calling` calls layers, `replay` handles state and repeats F as R, and
`repeatable` compares the two.

    stage = Stage([embedding, block], input_grad=False)
    run = stage.forward(tokens)                       # F: run.outputs go to the next stage
    run.backward_input(grads)                         # I: returns the input gradients
    run.backward_weight()                             # W
    run.backward_full(grads)                          # or B, the two at once

What is kept: after F the graph (or, with `recompute=True`, only the inputs, until R builds the graph); after I the
operands of the weight GEMMs; after W nothing. Outputs are not kept: the run keeps only the edge of the graph, so the
receiver frees an output's memory.

With recomputation, F runs with gradients enabled, as in plain PyTorch, so that layers which check
`torch.is_grad_enabled()` behave equally both times; what autograd would save is dropped immediately.

Streams: call all methods of a stage under one CUDA stream. Autocast: enter it around `forward` and
`recompute` only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.stages.calling import Loss, arguments, called, has_no_default, layers_text
from octopipe.runtime.stages.hooked_parameters import HookedParameters
from octopipe.runtime.stages.repeatable import CHECKED_STEPS, LOOKS_AGAIN_AT, Digest, digest_of
from octopipe.runtime.stages.replay import Replay, Start
from octopipe.runtime.stages.rerun import Rerun
from octopipe.runtime.stages.rng import mix, seed_all
from octopipe.runtime.stages.run import StageRun
from octopipe.runtime.stages.silent_changes import SilentChanges
from octopipe.runtime.stages.wgrad import SplitMode, WeightQueue
from octopipe.runtime.stages.wgrad_ops import Restart
from octopipe.runtime.values import flatten

__all__ = ["Loss", "Stage", "StageRun"]


class Stage:
    """Modules in sequence on one rank. `input_grad=False` marks a first stage, whose I has no result.

    `side`: names of side inputs, whose values `forward` takes.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        input_grad: bool = True,
        first_layer: int = 0,
        side: Sequence[str] = (),
    ):
        self.modules = tuple(modules)
        self.input_grad = input_grad
        self.first_layer = first_layer
        self._calls = tuple((first_layer + k, m, *arguments(m, side)) for k, m in enumerate(self.modules))
        """Every module's layer, the module, whether it takes one argument, and the side inputs it takes."""
        self.side = tuple(dict.fromkeys(name for *_, names in self._calls for name in names))
        """Side inputs that the modules name."""
        self.side_required = {n for _, m, _, names in self._calls for n in names if has_no_default(m, n)}
        # DDP waits for autograd itself to add its parameters' gradients.
        waited = {id(p) for m in self.modules for d in m.modules() if isinstance(d, DDP) for p in d.parameters()}
        split = (p for m in self.modules for p in m.parameters() if id(p) not in waited)
        self.mode = SplitMode(split, WeightQueue(), quick=False)
        self.rerun = Rerun(self.mode)
        self.replay = Replay(self.modules, first_layer)
        self.hooked = HookedParameters(self.modules, first_layer)
        self.silent = SilentChanges(self.modules, first_layer)
        self.grad_inside = False
        """Whether forwards need gradients enabled even if none are required."""
        self.draws = True
        """Whether forwards may draw random numbers."""
        self.needs_saved = False
        """Whether forwards run backward themselves, so that F must keep what autograd saves until it ends."""
        self.always_check = False
        """Whether R is compared with F in every step, not only in the first ones."""
        self.under_capture = False
        """Whether CUDA graphs of the ops are being prepared or replayed: a check makes the host wait for the device,
        which would be taken for the layers' own doing, and fails inside a capture."""
        self.watches_weights = False
        """Whether parameters that a forward changes through `.data` are looked for (in the steps of `checking`)."""
        self.in_step_with_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        """Whether forwards may communicate with processes outside the pipeline (experts' exchange, tensor parallelism).
        All of them must then run a forward equally often: how often must not depend on the values of one of them."""
        self.may_step_inside = True
        """Whether an optimizer may step inside backward: only where no other micro-batch uses the weights."""
        self._steps_checked, self._step_begun = 0, False
        self._tried_backward = False
        self._given_away: list[tuple[weakref.ref[Tensor], int]] = []
        """Outputs that may still be in use, with their versions."""

    @property
    def checking(self) -> bool:
        """Whether R is compared with F in this step.

        After the first steps this becomes rarer and rarer, so late changes are found at a negligible cost.
        """
        n = self._steps_checked
        if self.under_capture:
            return False
        return self.always_check or n < CHECKED_STEPS or (n >= LOOKS_AGAIN_AT and n & (n - 1) == 0)

    def forward(
        self,
        inputs: Any,
        *,
        then: Callable[[Any], Any] | None = None,
        recompute: bool = False,
        seed: int | None = None,
        input_grad: Sequence[bool] | None = None,
        side: Mapping[str, Any] | None = None,
    ) -> StageRun:
        """F of one micro-batch. `then` (such as the loss) is applied to the last value, inside the graph.

        `seed` makes random draws depend only on it and the layer's index; the caller restores the global generators if
        needed (`rng_kept`). `input_grad` states for each leaf of the input whether it takes a gradient (default:
        floating-point and complex ones).
        """
        return StageRun(self, inputs, then, seed, input_grad, not recompute, again=recompute, side=side)

    def held(self) -> list[Tensor]:
        """Parameters and buffers: tensors that stay on the device in any case, so they are not offloaded."""
        return [t for module in self.modules for t in (*module.parameters(), *module.buffers())]

    def begin_step(self) -> None:
        """Check what may have changed since the last step (called by the first forward of a step)."""
        self._step_begun = True
        self.mode.left_alone.clear()
        self.mode.left_alone.update(self.hooked.look(self.mode.parameters()))
        self.replay.begin_step()
        if not self.replay.is_known():
            self._steps_checked = 0

    def end_step(self) -> None:
        """Drop everything that is valid only while the weights do not change (autocast's copies of them)."""
        self.mode.clear_casts()
        self._given_away.clear()
        self._steps_checked += self._step_begun
        self._step_begun = False

    def check_repeatable(self) -> None:
        """Raise if a layer that declares itself not repeatable would be recomputed."""
        for k, top in enumerate(self.modules):
            for module in top.modules():
                if getattr(module, "repeatable", True) is False:
                    raise OctoPipeError(
                        f"{self.layer_name(k)} is recomputed in this plan, but {type(module).__name__} says "
                        "`repeatable = False`; plan without recomputation there (octopipe tune --no-recompute)"
                    )

    def layer_name(self, k: int) -> str:
        """A description of the k-th module; the loss follows the last one."""
        if k == len(self.modules):
            return "loss_fn"
        return f"layer {self._calls[k][0]} ({type(self.modules[k]).__name__})"

    def place(self) -> str:
        """A description of the last layer."""
        return self.layer_name(len(self.modules) - 1)

    def call(
        self,
        value: Any,
        then: Callable[[Any], Any] | None,
        seed: int | None,
        side: Mapping[str, Any] | None = None,
        digests: list[Digest] | None = None,
    ) -> Any:
        """Run the modules one after the other, and `then`. `digests` receives a digest of every value."""
        for layer, module, one, names in self._calls:
            if seed is not None:
                seed_all(mix(seed, layer))
            value = called(module, value, one, names, side)
            if digests is not None:
                digests.append(digest_of(value))
        if then is None:
            return value
        if seed is not None:
            seed_all(mix(seed, -1))
        value = then(value)
        if digests is not None:
            digests.append(digest_of(value))
        return value

    def adapt(self, error: BaseException, start: Start | None) -> None:
        """Learn from a failed forward what the next attempt must do differently; raises the error if nothing helps.

        `start`: the state that the forward found; None if it was not kept, which does no harm if forwards change
        nothing.
        """
        if isinstance(error, Restart):
            self.mode.habits.quick, self.needs_saved = False, True
        elif "saved tensor hooks" in str(error) and not self.needs_saved:  # torch.func does not take them
            self.needs_saved = True
        elif "does not require grad" in str(error) and not self.grad_inside:
            self.grad_inside = True
        else:
            raise error
        if start is not None:
            start.undo()
        elif self.replay.moving():
            raise OctoPipeError(
                f"layers up to {self.place()} run backward inside their forward, for the first time after forwards "
                "that did not, and keep something between forwards: do so in the first micro-batch, too"
            ) from error

    def give_away(self, outputs: Any) -> None:
        """Record outputs that are passed on, to check that no later forward writes to them."""
        leaves = [outputs]
        if not isinstance(outputs, Tensor):
            leaves = []
            flatten(outputs, leaves)
        self._given_away = [(ref, v) for ref, v in self._given_away if ref() is not None]
        self._given_away += [(weakref.ref(t), t._version) for t in leaves if isinstance(t, Tensor)]

    def check_given_away(self) -> None:
        """Raise if a forward has written to an earlier micro-batch's output that is still needed."""
        for ref, version in self._given_away:
            tensor = ref()
            if tensor is not None and tensor._version != version:
                layers = layers_text(self.first_layer, self._calls[-1][0])
                raise OctoPipeError(
                    f"{layers}: a forward changed in place an output of shape "
                    f"{tuple(tensor.shape)} that an earlier micro-batch's next stage still needs; return a copy of it "
                    "(`.clone()`), or do not change it in place"
                )

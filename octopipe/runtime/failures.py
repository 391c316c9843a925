"""Interrupted steps: ranks are out of step afterwards, so no further step may run until the pipeline has recovered.

Knows: whether the last step of a pipeline was complete, the error if it was not, which op and layer an error came from,
and what to warn about after the first step. Does not know: how to recover.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import nn

from octopipe.base.errors import OctoPipeError
from octopipe.plans.plan import KINDS
from octopipe.runtime.ranks.reduce import Shared
from octopipe.runtime.ranks.world import World
from octopipe.runtime.slots import SEND, RankProgram, Step
from octopipe.runtime.stages.calling import layers_text
from octopipe.runtime.stages.stage import Stage
from octopipe.runtime.wire.telling import PeerError, moment, naming_lost_peers

_WORDS = {"F": "forward", "I": "input gradient", "W": "weight gradient", "B": "backward", "R": "recomputation"}
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")


class Failures:
    """The failures of one pipeline."""

    def __init__(self) -> None:
        self._broken = ""
        self.closed = False
        """Whether the pipeline's transport and groups have been released."""

    def check(self) -> None:
        """Raise an error unless every step so far was completed and the pipeline is open."""
        if self.closed and not self._broken:
            raise OctoPipeError("this pipeline was closed; make a new Pipeline (octopipe.switch closes the old one)")
        if self._broken:
            raise OctoPipeError(
                f"{self._broken}, and its ranks have been out of step since: call recover() on all ranks and then "
                "zero_grad(), or build a new Pipeline"
            )

    @contextmanager
    def watched(
        self,
        step: int,
        begun: Callable[[], int],
        last_words: Callable[[BaseException], str],
        timeout_s: float,
        *give_up: Callable[[], None],
    ) -> Iterator[None]:
        """Context of a step: if the step raises, discard what it leaves behind.

        `begun` counts started steps: an error that is raised before the step has started changes nothing. `last_words`
        reports an error to the other ranks and returns their reports. The loss of a peer is reported as such, wherever
        in the step it is noticed.
        """
        before = begun()
        try:
            with moment(f"in step {step}"), naming_lost_peers(timeout_s):
                yield
        except BaseException as error:
            if begun() == before:
                raise
            others = last_words(error)
            why = " ".join(str(error).split())[:160] or type(error).__name__
            self._broken = f"step {step} was interrupted ({why})"
            for one in give_up:
                one()
            if others:
                raise PeerError(f"{error}; {others}") from error
            raise

    def forget(self) -> None:
        """Make the pipeline usable again after it has recovered."""
        self._broken, self.closed = "", False


def check_steps(completed: int, world: World, timeout_s: float) -> None:
    """Raise an error unless all ranks have completed equally many steps (collective over pipelines and replicas).

    The exchange of losses ends a step on all ranks or on none; without it, a rank may have gone on to its optimizer."""
    counts = [n for steps in world.gather_replicas(world.gather(completed), timeout_s) for n in steps]
    if len(set(counts)) > 1:
        raise OctoPipeError(
            f"some ranks have completed {max(counts)} steps and others {min(counts)} (with reduce_loss=False, a rank "
            "hears of another's failure only in its next step), so their parameters may belong to different steps; "
            "load a checkpoint on all ranks and call recover() again"
        )


def warn_of_gradients(rank: int, named: Iterable[tuple[str, nn.Parameter]], shared: Iterable[Shared]) -> None:
    """Warn, after the first step, about trainable parameters without a gradient, and about hooks that saw only a part
    of one. In one process, a tensor's hook sees the sum over all layers that use the parameter."""
    for parameter in shared:
        hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
        if parameter.in_parts and any(getattr(parameter.parameter, name, None) for name in hooks):
            warnings.warn(
                f"rank {rank}: parameter {parameter.key} is used in several stages, and a hook on it is called with "
                "the part of its gradient that each of them computes, not with their sum; if the hook does more than "
                "scale gradients, change `.grad` after Pipeline.step() instead",
                stacklevel=3,
            )
    silent = [name for name, p in named if p.requires_grad and p.grad is None]
    if silent:
        more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
        warnings.warn(
            f"rank {rank}: {silent[0]}{more} got no gradient in the first step; "
            "Pipeline(..., verify=True) tells whether plain torch gives one",
            stacklevel=3,
        )


def note_op(error: BaseException, program: RankProgram, at: Step | None) -> None:
    """Add a note to an error of a step that states where it happened; its type, text and traceback do not change."""
    if at is None or at.code >= SEND:
        return
    stage, rank = program.plan.stages[at.cell.stage], program.rank
    layer = _layer_of(error.__traceback__)
    if not layer:
        layer = layers_text(stage.first, stage.stop - 1)
    word = _WORDS[KINDS[at.code]]
    text = f"in {at.op}: {word} of micro-batch {at.cell.micro_batch} in stage {at.cell.stage} on rank {rank}, {layer}"
    if _is_out_of_memory(error):
        text += "; use smaller micro-batches, recomputation, or a plan tuned for less memory"
    elif isinstance(error, IndexError) and "index out of range in self" in str(error):
        text += "; an id is beyond the rows of an embedding: a token of a larger vocabulary, or a sequence with more "
        text += "positions than the model has"
    with contextlib.suppress(Exception):  # an error that accepts no notes is raised without
        error.add_note(text)


def _layer_of(trace: TracebackType | None) -> str:
    """Return the layer whose forward was running, according to the traceback; "" in a backward pass."""
    found = ""
    end = max(line for _, _, line in Stage.call.__code__.co_lines() if line)
    while trace is not None:
        if trace.tb_frame.f_code is Stage.call.__code__:
            known = trace.tb_frame.f_locals
            found = f"layer {known.get('layer')} ({type(known.get('module')).__name__})"
            if trace.tb_lineno == end:
                found = "the loss function"
        trace = trace.tb_next
    return found


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _OUT_OF_MEMORY)

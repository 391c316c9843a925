"""Every private name of PyTorch that the torch engine uses, in one file, for every supported version (2.9 to 2.15).

Knows: the class of PyTorch's pipeline runtime, the actions its schedules are made of, which of them the installed
version has, and how to start the autograd engine without `torch.autograd.backward`. Does not know: plans.

`tests/adapters/test_torch_private.py` has a test for every name in this file and for every private method that
`engine.py` and `stages.py` override, so that a new version of PyTorch which renames one
of them fails there, by its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.distributed.pipelining import PipelineStage, schedules

PipelineRuntime = schedules._PipelineScheduleRuntime
"""The class that executes a schedule of computations, sends and receives."""


def known_actions() -> frozenset[str]:
    """Return the kinds of action that the installed version has: `F`, `SEND_F`, `REDUCE_GRAD`, ..."""
    # In PyTorch 2.9 the values are numbers and `str` gives the text; later versions have the text as their value.
    return frozenset(k.value if isinstance(k.value, str) else str(k) for k in schedules._ComputationType)


def parsed_actions(words: Iterable[str]) -> list[Any]:
    """Parse actions in text form: `2F0`, `3SEND_F1`, `0UNSHARD`."""
    return [schedules._Action.from_str(word) for word in words]


def load_actions(runtime: Any, rows: Sequence[Sequence[str]]) -> None:
    """Load one row of actions per rank, sends and receives included, into a runtime."""
    actions = {rank: parsed_actions(row) for rank, row in enumerate(rows)}
    runtime.pipeline_order = {rank: [a for a in row if a.is_compute_op] for rank, row in actions.items()}
    runtime._prepare_schedule_with_comms(actions, format="compute_comms")


def mesh_argument(get_mesh: Callable[..., Any]) -> dict[str, Any]:
    """Return `get_mesh` as a keyword of `PipelineStage`; empty before 2.12, which does not accept it."""
    taken = inspect.signature(PipelineStage.__init__).parameters
    return {"get_mesh": get_mesh} if "get_mesh" in taken else {}


def repair_first_contact(stage: Any) -> None:
    """Fix the first message between neighbouring stages of PyTorch 2.9: it is int64, but the receiver expects float32,
    which crashes a process that uses gloo.

    Later versions send the type that they receive; the latest ones do not send such a message. Messages of a stage to a
    neighbour on the same rank are left out, because gloo cannot send from a rank to itself.
    """
    greetings = getattr(stage, "_get_init_p2p_neighbors_ops", None)
    if greetings is None:
        return

    def repaired() -> list[Any]:
        out = [op for op in greetings() if op.group_peer != stage.group_rank]
        for op in out:
            op.tensor = op.tensor.to(torch.float32).reshape(1)
        return out

    stage._get_init_p2p_neighbors_ops = repaired


def run_backward(roots: Any, seeds: Any = None, retain_graph: bool | None = None, create_graph: bool = False) -> None:
    """Do what `torch.autograd.backward(roots, seeds, ...)` does, without its handling of torch-function modes.

    PyTorch disables a mode while it handles a call of `torch.autograd.backward`. Calling the autograd engine directly
    leaves the mode enabled, so that it also applies to what runs inside that backward (the forwards of checkpointed
    layers). A root is a tensor or, from PyTorch 2.15 on, the gradient edge of an output that was released after it had
    been sent.
    """
    pairs = [(root, seed) for root, seed in _paired(roots, seeds) if _wants_gradient(root)]
    torch.autograd.graph._engine_run_backward(
        tuple(root for root, _ in pairs),
        tuple(torch.ones_like(root) if seed is None else seed for root, seed in pairs),
        bool(retain_graph),
        create_graph,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _paired(roots: Any, seeds: Any) -> list[tuple[Any, Tensor | None]]:
    one_root = isinstance(roots, Tensor | GradientEdge)
    all_roots = (roots,) if one_root else tuple(roots)
    if seeds is None:
        return [(root, None) for root in all_roots]
    all_seeds = (seeds,) if isinstance(seeds, Tensor) else tuple(seeds)
    return list(zip(all_roots, all_seeds, strict=True))


def _wants_gradient(root: Any) -> bool:
    return isinstance(root, GradientEdge) or root.requires_grad

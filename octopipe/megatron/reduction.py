"""Megatron's data-parallel reduction around our order of ops.

Knows: its process groups, how reductions are held back while gradients are incomplete and started when they are
complete. Does not know: plans or ops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any


def megatron_groups() -> Any:
    """Return Megatron's process groups, as its own schedules collect them."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    out = ProcessGroupCollection()
    out.tp = parallel_state.get_tensor_model_parallel_group()
    out.cp = parallel_state.get_context_parallel_group()
    out.pp = parallel_state.get_pipeline_model_parallel_group()
    out.embd = parallel_state.get_embedding_group(check_initialized=False)
    out.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    out.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return out


@contextlib.contextmanager
def no_sync(config: Any, models: Sequence[Any]) -> Iterator[None]:
    """A context without gradient reduction, for incomplete gradients: `no_sync_func` of the config, or the chunks'
    own."""
    known = config.no_sync_func
    makers = known if isinstance(known, list) else [known] if known is not None else []
    if not makers:
        makers = [m.no_sync for m in models if hasattr(m, "no_sync")]
    with contextlib.ExitStack() as stack:
        for maker in makers:
            stack.enter_context(maker())
        yield


def start_reduction(model: Any, force_all_reduce: bool) -> None:
    """Start the overlapped reduction of a chunk. Megatron's hooks start a bucket with its last gradient, but the
    deferred gradients of a chunk become complete together."""
    if not getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False):
        return
    for group in [*model.bucket_groups, *model.expert_parallel_bucket_groups]:
        if getattr(group, "grad_reduce_handle", None) is not None:
            continue
        group.is_first_batch = False  # else finish_grad_sync would start a second reduction
        more = {"force_all_reduce": force_all_reduce} if force_all_reduce else {}
        group.start_grad_sync(**more)

"""Megatron-Core without CUDA: replaces what it expects of a GPU, so that a plan can be tried on any machine.

Knows: the few places where Megatron-Core 0.16 requires CUDA while it builds and runs local layers (the name of the
device, its streams, `.cuda()`, the device of a few counters, the random state). Does not know: plans. It changes
`torch` and `megatron.core` for the whole process and is meant for trials and tests, not for a process that uses a GPU.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError

_DONE: list[bool] = []


def use_cpu() -> None:
    """Make Megatron-Core use the CPU as its device; a second call does nothing."""
    if _DONE:
        return
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        raise OctoPipeError("this process uses a GPU already; call octopipe.megatron.use_cpu() first, or not at all")
    if importlib.util.find_spec("megatron") is None:
        raise OctoPipeError("Megatron-Core is not installed: pip install megatron-core")
    _DONE.append(True)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment]
    Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    for name in ("zeros", "ones", "empty", "tensor"):
        setattr(torch, name, _on_host(getattr(torch, name)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.ssm import mamba_block
        from megatron.core.tensor_parallel import random as states
        from megatron.core.transformer.moe import moe_utils, token_dispatcher
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if not hasattr(moe_utils, "te_general_gemm"):  # the name is missing if Transformer Engine is not installed
        moe_utils.te_general_gemm = None
    mamba_block.TENorm = WrappedTorchNorm
    # The alltoall dispatcher copies numbers of tokens to the host on a stream of its own; here they are on the host.
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _HostStream()
    token_dispatcher.maybe_move_tensor_to_cpu = _counted
    states._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    states._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


class _HostStream:
    """Replaces a CUDA stream on a CPU, where queued work has already been done."""

    def record_event(self) -> _HostStream:
        return self

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, _HostStream)

    def __hash__(self) -> int:
        return 0


def _counted(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return what `maybe_move_tensor_to_cpu` returns for a tensor on a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _on_host(usual: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function, in which the device "cuda" means the CPU."""

    def made(*args: Any, **more: Any) -> Any:
        if str(more.get("device", "")).startswith("cuda"):
            more["device"] = "cpu"
        return usual(*args, **more)

    return made

"""Megatron-Core without CUDA: replaces what it expects of a GPU, so that a plan can be tried on any machine.

Knows: the few places where Megatron-Core 0.16 requires CUDA while it builds and runs local layers (the name of the
device, its stream, `.cuda()`, the device of a few counters, the random state). Does not know: plans. It changes `torch`
and `megatron.core` for the whole process and is meant for trials and tests, not for a process that uses a GPU.
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
    """Make Megatron-Core take the host's memory for its device; a second call does nothing."""
    if _DONE:
        return
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        raise OctoPipeError("this process uses a GPU already; call octopipe.megatron.use_cpu() first, or not at all")
    if importlib.util.find_spec("megatron") is None:
        raise OctoPipeError("Megatron-Core is not installed: pip install megatron-core")
    _DONE.append(True)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment,return-value]
    Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    for name in ("zeros", "ones", "empty", "tensor"):
        setattr(torch, name, _on_host(getattr(torch, name)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.ssm import mamba_block
        from megatron.core.tensor_parallel import random as states
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if not hasattr(moe_utils, "te_general_gemm"):  # the name is missing where Transformer Engine is
        moe_utils.te_general_gemm = None
    mamba_block.TENorm = WrappedTorchNorm
    states._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    states._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _on_host(usual: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which takes "cuda" for the host."""

    def made(*args: Any, **more: Any) -> Any:
        if str(more.get("device", "")).startswith("cuda"):
            more["device"] = "cpu"
        return usual(*args, **more)

    return made

"""Every private name of PyTorch that the package uses (PyTorch's pipelining apart), for every supported version.

Knows: the name, what it is used for, and what replaces it in a version that does not have it. Does not know: who
uses it. `tests/runtime/test_runtime_private.py` has a test for every name and every attribute below, and checks that
no other module names one: a version of PyTorch that renames one of them fails there, by its name.

Attributes of tensors, modules and groups are read where they are needed: a function around each would cost more than
some of the ops that are timed. ATTRIBUTES lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.nn.modules import module as _module
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree

# -- interception of function calls (stages/wgrad.py) -------------------------------------------------------------

push_function_mode, pop_function_mode = torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack
function_mode_stack: Callable[[], list[Any]] = _get_current_function_mode_stack
WithoutFunctionModes = torch._C.DisableTorchFunction
"""A context in which no torch-function mode sees a call."""
is_autocast_on = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
is_functorch_active = torch._C._are_functorch_transforms_active
top_saved_tensor_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
"""The default hooks on saved tensors, on which checkpointing is built; None if this torch cannot tell."""
set_grad_enabled = torch._C._set_grad_enabled
"""The function that `torch.no_grad()` calls: a function mode sees this one, not the public one."""


def forward_mode_level() -> int:
    """Return the number of open forward-mode differentiations, less one."""
    return forward_ad._current_level


# -- autograd's engine --------------------------------------------------------------------------------------------

engine_task_id = torch._C._current_graph_task_id
"""Returns the number of the call of autograd's engine that is running."""
will_engine_execute = torch._C._will_engine_execute_node
PythonFunctionNode = torch._C._FunctionBase
"""The node of a `Function` that is written in Python."""
engine_run_backward = getattr(torch.autograd.graph, "_engine_run_backward", None)
"""The function that `torch.autograd.backward` ends in. The checks before it, of our own gradients, cost as much as a
small op."""
run_engine: Any = getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", None)
"""The function that `engine_run_backward` calls, after copying the context for the threads of devices (without devices
there are none). Unlike the public function it does not compare shapes."""

# -- products and memory ------------------------------------------------------------------------------------------

grouped_mm = torch._grouped_mm
scaled_mm = torch._scaled_mm
"""The product of two float8 matrices with a scale each; the second one is stored column by column."""
clear_blas_workspaces: Callable[[], None] = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
"""Frees the memory that cuBLAS keeps between products. A torch without CUDA does not have the function."""
unsafe_view = torch.ops.aten._unsafe_view
"""The same numbers in another shape, as a tensor that autograd does not treat as a view."""
foreach_copy_, foreach_zero_ = torch._foreach_copy_, torch._foreach_zero_
storage_use_count = torch._C._storage_Use_Count
"""The number of tensors that share a storage, given the storage's `_cdata`."""


def flash_attention_on_host() -> tuple[Any, Any]:
    """Return the forward and the backward of flash attention on a CPU."""
    ops = torch.ops.aten
    return (
        ops._scaled_dot_product_flash_attention_for_cpu,
        ops._scaled_dot_product_flash_attention_for_cpu_backward,
    )


def flash_attention_on_device() -> tuple[Any, Any]:
    """Return the forward and the backward of flash attention on a CUDA device, for packed sequences."""
    return torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward


def end_allocating_to_pool(device: int, pool: Any) -> None:
    """End the allocation to a graph's pool, which an interrupted capture leaves open. A build without CUDA has no such
    function (AttributeError)."""
    torch._C._cuda_endAllocateToPool(device, pool)


current_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""Returns the handle of a device's current stream, given the device's number, without creating an object; None without
CUDA."""


def inductor_config() -> Any:
    """Return the settings of torch.compile's backend, which this imports."""
    from torch._inductor import config

    return config


def load_compiler() -> None:
    """Load torch.compile's front end, which optimizers otherwise import in their first step."""
    import torch._dynamo  # noqa: F401


# -- hooks and process groups -------------------------------------------------------------------------------------


def has_global_forward_hooks() -> bool:
    """Return whether a hook is registered for the forwards of all modules."""
    return bool(_module._global_forward_hooks or _module._global_forward_pre_hooks)


def has_global_hooks() -> bool:
    """Return whether a hook is registered for the forwards or the backwards of all modules."""
    return has_global_forward_hooks() or bool(_module._global_backward_hooks or _module._global_backward_pre_hooks)


def default_store() -> Any:
    """Return the store through which the ranks of the default process group found each other."""
    return dist.distributed_c10d._get_default_store()


def known_groups() -> list[Any]:
    """Return all process groups of this process."""
    return list(getattr(dist.distributed_c10d._world, "pg_map", ()))


def functional_collectives() -> Any:
    """Return the module of collectives that return new tensors."""
    from torch.distributed import _functional_collectives

    return _functional_collectives


ATTRIBUTES = {
    "tensor": ("_version", "_base", "_is_view", "_backward_hooks", "_post_accumulate_grad_hooks"),
    "module": ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
               "_backward_pre_hooks"),
    "compiled module": ("_orig_mod",),
    "node": ("_input_metadata",),
    "storage": ("_cdata",),
    "group": ("_get_backend", "_get_sequence_number_for_group"),
    "options of a group": ("_timeout",),
    "mesh": ("_flatten",),
    "sharded module": ("_get_fsdp_state",),
    "state of a sharded module": ("_fsdp_param_groups", "_fsdp_param_group"),
    "gradient scaler": ("_unscale_grads_",),
}  # fmt: skip
"""Private attributes that the runtime reads or overrides, by the kind of object that has them."""

__all__ = [
    "ATTRIBUTES",
    "PythonFunctionNode",
    "WithoutFunctionModes",
    "default_store",
    "end_allocating_to_pool",
    "engine_run_backward",
    "engine_task_id",
    "flash_attention_on_device",
    "flash_attention_on_host",
    "foreach_copy_",
    "foreach_zero_",
    "forward_mode_level",
    "function_mode_stack",
    "functional_collectives",
    "grouped_mm",
    "has_global_forward_hooks",
    "has_global_hooks",
    "inductor_config",
    "is_autocast_on",
    "is_functorch_active",
    "known_groups",
    "load_compiler",
    "pop_function_mode",
    "push_function_mode",
    "pytree",
    "run_engine",
    "set_grad_enabled",
    "storage_use_count",
    "top_saved_tensor_hooks",
    "unsafe_view",
    "will_engine_execute",
]

"""Checks the arguments of a `Pipeline`, so that a mistake is reported in one line where it was made.

Knows: what layers, plans, losses and contexts look like, and what is often passed by mistake. Does not know: what
they are used for.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from numbers import Integral
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.runtime.wire.transports import NAMES
from octopipe.simulation.lowering import Program


def check_arguments(layers: Any, plan: Any, loss_fn: Any) -> None:
    """Raise an error if an argument of a `Pipeline` is of the wrong kind."""
    listed = hasattr(layers, "__len__") and hasattr(layers, "__getitem__")
    if not listed or isinstance(layers, Mapping | nn.ModuleDict):
        raise OctoPipeError(
            f"layers is a {type(layers).__name__}; give a list with a module or factory for every layer"
        )
    if not isinstance(plan, Plan | Program):
        remedy = "give a Plan"
        if isinstance(plan, str | PathLike):
            remedy = "load the file (octopipe.load_plan), or make a plan (octopipe.build_plan)"
        elif isinstance(getattr(plan, "plan", None), Plan):
            remedy = "give its .plan"
        raise OctoPipeError(f"plan is a {type(plan).__name__}; {remedy}")
    if isinstance(loss_fn, type):
        raise OctoPipeError(f"loss_fn is the class {loss_fn.__name__}; give an object of it ({loss_fn.__name__}())")
    if not callable(loss_fn):
        raise OctoPipeError(f"loss_fn is a {type(loss_fn).__name__}; give a function of (output, target)")


def check_options(
    timeout_s: Any, seed: Any, tied: Any, side_inputs: Any, sharded: Any, transport: Any, costs: Any
) -> tuple[Any, Any, Any]:
    """Raise an error for options of a `Pipeline` that have another type than the one that they are used as.

    Returns `tied`, `side_inputs` and `sharded` with lists in the place of iterators, which can be read only once.
    """
    tied, side_inputs, sharded = map(_lasting, (tied, side_inputs, sharded))
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise OctoPipeError(f"timeout_s is {timeout_s!r}; give a number of seconds > 0")
    if seed is not None and not isinstance(seed, Integral):
        raise OctoPipeError(f"seed is {seed!r}; give an integer, or None for the global random generators")
    if isinstance(tied, str) or not all(_lists_names(tie) for tie in _listed(tied, "tied")):
        raise OctoPipeError("tied holds something else than lists of names; write [('0.weight', '9.weight')]")
    if isinstance(side_inputs, str) or not _lists_names(side_inputs):
        raise OctoPipeError(f"side_inputs is {side_inputs!r}; give a list of names of arguments, such as ['mask']")
    if sharded is not None and not (
        isinstance(sharded, Mapping) and all(_lists_names(names) for names in sharded.values())
    ):
        raise OctoPipeError("sharded is not a mapping to lists of names; write {'ep': ['*.experts.*']}")
    if isinstance(transport, str) and transport not in NAMES:
        raise OctoPipeError(f"unknown transport {transport!r}; one of {', '.join(NAMES)}")
    if costs is not None and not isinstance(costs, CostTable):
        remedy = "give its .costs" if isinstance(getattr(costs, "costs", None), CostTable) else "give a CostTable"
        raise OctoPipeError(f"costs is a {type(costs).__name__}; {remedy}")
    return tied, side_inputs, sharded


def device_of(given: Any) -> torch.device:
    """Return the device that a user named; raise an error if there is no such device on this machine."""
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        raise OctoPipeError(f"unknown device {given!r}; give cpu, cuda, cuda:0 or a torch.device") from None
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise OctoPipeError(f"device {device}: this process sees {count} GPU{'s' * (count != 1)}; name another one")
    return device


def _lasting(given: Any) -> Any:
    """Return the value with all iterators in it as lists."""
    if isinstance(given, Mapping):
        return {key: _lasting(value) for key, value in given.items()}
    if isinstance(given, Iterator | list | tuple):
        return [_lasting(one) for one in given]
    return given


def _listed(given: Any, name: str) -> Iterable[Any]:
    if not isinstance(given, Iterable):
        raise OctoPipeError(f"{name} is a {type(given).__name__}; give a list")
    return given


def _lists_names(given: Any) -> bool:
    """Whether this is a collection of strings, and not one string, whose letters would be taken for names."""
    return not isinstance(given, str) and isinstance(given, Iterable) and all(isinstance(one, str) for one in given)


def check_factory(layer: Callable[..., Any], number: int) -> None:
    """Raise an error if a function is not a factory because it takes arguments, such as a layer without a module."""
    try:
        inspect.signature(layer).bind()
    except TypeError:
        needs = True
    except ValueError:  # without a signature, as torch's own functions are
        needs = not isinstance(layer, type)
    else:
        needs = False
    if needs:
        name = getattr(layer, "__name__", type(layer).__name__)
        raise OctoPipeError(
            f"layer {number} is {name}, which takes arguments; give a module (an nn.Module around a function), or a "
            "factory without arguments"
        )


def check_built(module: nn.Module, number: int, device: torch.device) -> None:
    """Raise an error if a module has tensors that cannot be trained or sent as they are."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        what = ""
        if torch.nn.parameter.is_lazy(tensor):
            what = "has no shape yet (a lazy module); run the layer once on an example before"
        elif tensor.is_meta and device.type != "meta":
            what = "is on the meta device and has no values; give it some (to_empty() and an initialisation)"
        elif tensor.is_inference():
            what = "was made in torch.inference_mode(); make the layer outside of it"
        if what:
            raise OctoPipeError(f"layer {number}: {name} {what}")


def check_context(autocast: Any) -> None:
    """Raise an error if `autocast` is neither a dtype nor a function that makes a context."""
    if autocast is None or isinstance(autocast, torch.dtype):
        return
    if isinstance(autocast, AbstractContextManager) or hasattr(type(autocast), "__enter__") or not callable(autocast):
        raise OctoPipeError(
            f"autocast is a {type(autocast).__name__}; give a dtype (torch.bfloat16), or what makes a context"
        )


def takes_target(loss_fn: Any) -> bool:
    """Return whether a loss function cannot be called without a target, as far as its signature tells."""
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    if not isinstance(function, types.FunctionType | types.MethodType | functools.partial):
        return False
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False
    try:
        signature.bind(None)
    except TypeError:
        return True
    return False


def check_loss(loss: Any) -> None:
    """Raise an error if the loss of one micro-batch is not one real number."""
    if isinstance(loss, int | float):
        return
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise OctoPipeError("loss_fn must return one scalar tensor per micro-batch; take a mean or a sum in it")
    if loss.is_complex():
        raise OctoPipeError(
            "loss_fn returned a complex number, which cannot be minimised; take its modulus or real part"
        )

"""Mixed precision: float32 main gradients and master weights around low-precision layers.

Knows: which parameters are low precision, how their gradients are kept in float32, and how any torch optimizer updates
float32 master copies of them. Does not know: how a gradient is computed (`stages/wgrad_ops.py`), pipelines' schedules,
or what a precision costs (`costs/mode.py`).

    pipe = octopipe.Pipeline(layers, plan, loss_fn, main_grads=True)      # layers in bfloat16; .grad in float32
    optimizer = octopipe.MixedPrecisionOptimizer(lambda params: torch.optim.AdamW(params, lr=3e-4), pipe)
    for batch, target in data:
        loss = pipe.step(batch, target)
        pipe.clip_grad_norm_(1.0)                                         # over the float32 gradients
        optimizer.step()                                                  # masters updated, weights rounded from them
        optimizer.zero_grad()

With `shard=True`, every data-parallel pipeline keeps master weights and optimizer state only for its share of the
parameters. It updates those and broadcasts the new values (ZeRO-1); `step` is then collective over the pipelines.
With `host=1.0`, master weights and moments are in host memory, and the CPU updates them (`host_state.py`).

bfloat16 has the range of float32, so no loss scaling is needed. A checkpoint stores the master weights instead of the
rounded ones, so a run resumes exactly, in this precision or another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.costs.mode import Mode
from octopipe.runtime.arguments import check_context
from octopipe.runtime.host_state import HOST, HostState, hosted
from octopipe.runtime.ranks.owners import Owners
from octopipe.runtime.torch_private import foreach_copy_

PARAMETER_DTYPES = {
    "bf16-main-fp32": torch.bfloat16,
    "fp8": torch.bfloat16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "autocast-bf16": torch.float32,
    "fp64": torch.float64,
}
LOW = (torch.bfloat16, torch.float16)
FIRST_STEPS = 4
"""The optimizer steps in which changes that torch has not recorded are looked for on a GPU."""
Autocast = torch.dtype | Callable[[], AbstractContextManager[Any]] | None


def autocast_context(wanted: Autocast, device: torch.device) -> Callable[[], AbstractContextManager[Any]] | None:
    """Return a function that makes the context of forwards; for a dtype, torch.autocast to it."""
    check_context(wanted)
    if isinstance(wanted, torch.dtype):
        return partial(torch.autocast, device.type, dtype=wanted)
    return wanted


def has_main_gradients(precision: str) -> bool:
    return Mode(precision=precision).precision in ("bf16-main-fp32", "fp8")


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the value for `Pipeline(autocast=...)`."""
    return torch.bfloat16 if precision == "autocast-bf16" else None


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's `.grad`."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def keep_main_gradients(parameters: Iterable[Tensor]) -> None:
    """Accumulate the gradients of trainable low-precision parameters in float32 from now on."""
    for parameter in parameters:
        if parameter.dtype in LOW and parameter.requires_grad and gradient_dtype(parameter) is not torch.float32:
            if not hasattr(parameter, "grad_dtype"):
                raise OctoPipeError(
                    f"float32 gradients of {str(parameter.dtype)[6:]} weights need torch 2.10 or newer, this is "
                    f"{torch.__version__}; install a newer torch, or use --precision autocast-bf16"
                )
            parameter.grad = None
            parameter.grad_dtype = torch.float32


def optimizer_kind(optimizer: torch.optim.Optimizer) -> str:
    """Return the class name of the updating optimizer, which must match that of a checkpoint."""
    inner = optimizer.inner if isinstance(optimizer, MixedPrecisionOptimizer) else optimizer
    return type(inner).__name__


class Trained(Protocol):
    """An object with named parameters: a pipeline or a module."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


class MixedPrecisionOptimizer(torch.optim.Optimizer):
    """Any torch optimizer, run on float32 master copies of low-precision parameters.

    `make` receives the list of tensors to update: a float32 master weight for every trainable low-precision parameter
    of `model` (a `Pipeline` or a module), or the parameter itself if it is float32. Each has a `.layer_name`, for
    building groups by name. Learning-rate schedulers, hooks and `param_groups` are those of the inner optimizer.
    `state` is keyed by the model's parameters.

    `shard`: shard master weights and state over the data-parallel replicas of `model`, which must be a `Pipeline`;
    `make` then receives this replica's share. Float32 parameters are sharded in the same way.

    `host`: the share of master weights and optimizer state that is kept in host memory and updated by the CPU (0 to
    1). For float32 parameters, the copy that is updated is kept there. `make` receives CPU tensors for this share.

    Weights that are changed between two steps (loaded, reset, clipped) are taken over: a master weight is updated from
    its parameter whenever the parameter is no longer the rounded master weight. Torch does not record changes in place
    through `.data`; on a CPU values are compared in every step, on a GPU in the first steps, then in steps whose number
    is a power of two, and in every step once such a change has been found.

    A parameter that is frozen when the optimizer is made has no master weight, so `step` refuses to leave it out once
    it is trained: make a new optimizer then.
    """

    _step_supports_amp_scaling = False
    """What torch's GradScaler asks: the inner optimizer's own handling of a scale would not see the model's
    gradients."""

    def __init__(
        self,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        model: Trained,
        *,
        shard: bool = False,
        host: float = 0.0,
    ):
        # Not torch's own constructor: groups, state and hooks are those of `inner`.
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        """The tensor that is updated for each parameter of the model: a master weight, or the parameter itself."""
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._trained = [p for _, p in trained]
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self.owners = _owners(model, self._trained) if shard else None
        """Which replica updates which parameter, if state is sharded."""
        away = hosted([p for p in self._trained if self.owns(p)], host)
        for name, parameter in trained:
            if hasattr(parameter, "device_mesh") and (shard or host or parameter.dtype in LOW):
                raise OctoPipeError(
                    f"{name} is sharded (a DTensor): its mixed precision is fully_shard's; "
                    "give that a MixedPrecisionPolicy, and a plain optimizer here"
                )
            if not self.owns(parameter):
                continue
            master = parameter
            if parameter.dtype in LOW or parameter in away:
                dtype = torch.float32 if parameter.dtype in LOW else parameter.dtype
                place = HOST if parameter in away else parameter.device
                master = nn.Parameter(parameter.detach().to(place, dtype, copy=True))
            master.layer_name = name  # type: ignore[attr-defined]
            self._masters[parameter] = master
        self._models = {id(m): p for p, m in self._masters.items()}
        self._pairs = [(p, m) for p, m in self._masters.items() if p is not m]
        self._here = [pair for pair in self._pairs if pair[0] not in away]
        self._away = HostState([pair for pair in self._pairs if pair[0] in away])
        self._versions: dict[nn.Parameter, tuple[int, int]] = {}
        """Of every parameter, version and address when it was last equal to its rounded master weight."""
        self._steps, self._changed_unseen = 0, False
        """The number of steps, and whether a change in place through `.data` has been found."""
        self._note_versions()
        # torch's optimizers reject an empty list, and the share of a replica may be empty.
        updated = list(self._masters.values()) or [_nothing()]
        self.inner = make(updated)
        """The optimizer returned by `make`."""
        known = {id(m) for m in updated}
        if any(id(p) not in known for group in self.inner.param_groups for p in group["params"]):
            raise OctoPipeError(
                "the optimizer was built on other parameters than those passed to the function; build it on the "
                "function's argument"
            )

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "_masters"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"MixedPrecisionOptimizer of {len(self._pairs)} master weights: {self.inner!r}"

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> _State:  # type: ignore[override]
        return _State(self)

    def owns(self, parameter: nn.Parameter) -> bool:
        """Return whether this replica updates the parameter; without sharding, all replicas do."""
        return self.owners is None or self.owners.owns(parameter)

    def updates(self, parameter: Tensor) -> bool:
        """Return whether this optimizer has one of the model's parameters: it is trained, and this replica owns it."""
        return parameter in self._masters

    def master(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the float32 master weight of one of the model's parameters, or None."""
        found = self._masters.get(parameter)
        if found is None or found is parameter:
            return None
        self._take_over(parameter, found)
        return found

    def trained(self) -> list[nn.Parameter]:
        """Return the model's parameters, which hold the gradients, also those that other replicas update."""
        return self._trained

    def place_of(self, parameter: nn.Parameter) -> torch.device:
        """Return the device that holds the state of one of the model's parameters."""
        return self._masters[parameter].device

    def parameter_of(self, updated: Tensor) -> Tensor:
        """Return the model's parameter for one of the tensors in the parameter groups."""
        return self._models.get(id(updated), updated)

    def set_master(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set a parameter's master weight to these values, and the parameter to the rounded values."""
        found = self._masters.get(parameter)
        with torch.no_grad():
            parameter.copy_(values)
            if found is not None and found is not parameter:
                found.copy_(values)
                self._versions[parameter] = _version(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one update. A closure is called with gradients enabled, as in torch's optimizers."""
        self._check_frozen()
        for parameter, master in self._pairs:
            self._follow(parameter, master)
        self._follow_unseen()
        self._lend_gradients()
        result = self.inner.step(None if closure is None else self._around(closure))
        self._round()
        for _, master in self._pairs:
            master.grad = None
        if self.owners is not None:
            self.owners.spread()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._trained:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise OctoPipeError("parameters cannot be added to a MixedPrecisionOptimizer; make it after they are trainable")

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state and this rank's master weights, by name."""
        masters = {m.layer_name: m.detach() for _, m in self._pairs}  # type: ignore[attr-defined]
        return {"inner": self.inner.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        names = {m.layer_name: p for p, m in self._pairs}  # type: ignore[attr-defined]
        if set(state_dict.get("masters", ())) != set(names):
            raise OctoPipeError("the optimizer state belongs to other parameters; load it under the plan that saved it")
        self.inner.load_state_dict(state_dict["inner"])
        for name, values in state_dict["masters"].items():
            self.set_master(names[name], values)

    # -- what keeps the two sides together --------------------------------------------------------------

    def _lend_gradients(self) -> None:
        for parameter, master in self._here:
            grad = parameter.grad
            master.grad = grad if grad is None or grad.dtype is torch.float32 else grad.float()
        self._away.bring_gradients()

    def _around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def called() -> Any:
            self._round()
            with torch.enable_grad():
                loss = closure()
            self._lend_gradients()
            return loss

        return called

    @torch.no_grad()
    def _round(self) -> None:
        """Set the parameters to their rounded master weights."""
        if self._here:
            foreach_copy_([p for p, _ in self._here], [m for _, m in self._here])
        self._away.return_weights()
        self._note_versions()

    def _note_versions(self) -> None:
        for parameter, _ in self._pairs:
            self._versions[parameter] = _version(parameter)

    def _follow(self, parameter: nn.Parameter, master: nn.Parameter) -> None:
        if _version(parameter) != self._versions[parameter]:
            self._take_over(parameter, master)

    @torch.no_grad()
    def _take_over(self, parameter: nn.Parameter, master: nn.Parameter) -> None:
        values = parameter.detach().to(master.device)
        changed = values != master.to(values.dtype)
        master.copy_(torch.where(changed, values.to(master.dtype), master))
        self._versions[parameter] = _version(parameter)

    def _follow_unseen(self) -> None:
        """Take over what was written in place through `.data` since the last step. On a GPU, to compare all values in
        every step would cost as much as a part of the update itself, and the host would wait for the answer."""
        n = self._steps = self._steps + 1
        everywhere = self._changed_unseen or n <= FIRST_STEPS or n & (n - 1) == 0
        pairs = [pair for pair in self._pairs if everywhere or pair[0].device.type == "cpu"]
        if not pairs:
            return
        for (parameter, master), differs in zip(pairs, _differing(pairs), strict=True):
            if differs:
                self._changed_unseen = True
                self._take_over(parameter, master)

    def _check_frozen(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise OctoPipeError(
                    f"parameter {name} is trained now, but was frozen when the MixedPrecisionOptimizer was made, so it "
                    "has no master weight; make a new optimizer after unfreezing, or freeze parameters only after "
                    "making it"
                )


def _version(parameter: Tensor) -> tuple[int, int]:
    """Return what changes when a parameter is written to or gets other memory. Subclasses may have no address."""
    return parameter._version, parameter.data_ptr() if type(parameter) in (Tensor, nn.Parameter) else 0


def _differing(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """For every parameter, whether it is not its rounded master weight. The values of all of them are read at once."""
    found = []
    for parameter, master in pairs:
        values = parameter.detach()
        rounded = master.to(values.device, values.dtype)
        found.append(((values != rounded) & ~(values.isnan() & rounded.isnan())).any())
    return torch.stack([flag.to(found[0].device) for flag in found]).tolist()


def _owners(model: Trained, parameters: list[nn.Parameter]) -> Owners | None:
    world = getattr(model, "world", None)
    if world is None:
        raise OctoPipeError(
            "shard=True divides state over the data-parallel replicas of a Pipeline; give the Pipeline as the model"
        )
    return None if world.dp_group is None else Owners(parameters, world)


def _nothing() -> nn.Parameter:
    empty = nn.Parameter(torch.zeros(0))
    empty.layer_name = ""  # type: ignore[attr-defined]
    return empty


class _State(MutableMapping[nn.Parameter, dict[str, Any]]):
    """The inner optimizer's state, keyed by the model's parameters."""

    def __init__(self, optimizer: MixedPrecisionOptimizer):
        self._inner, self._masters = optimizer.inner.state, optimizer._masters

    def __getitem__(self, parameter: nn.Parameter) -> dict[str, Any]:
        found: dict[str, Any] = self._inner[self._masters[parameter]]
        return found

    def get(self, parameter: nn.Parameter, default: Any = None) -> Any:  # does not insert the default
        found = self._masters.get(parameter)
        return default if found is None else self._inner.get(found, default)

    def __setitem__(self, parameter: nn.Parameter, value: dict[str, Any]) -> None:
        self._inner[self._masters[parameter]] = value

    def __delitem__(self, parameter: nn.Parameter) -> None:
        del self._inner[self._masters[parameter]]

    def __contains__(self, parameter: object) -> bool:
        return self._masters.get(parameter) in self._inner  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (p for p, m in self._masters.items() if m in self._inner)

    def __len__(self) -> int:
        return sum(m in self._inner for m in self._masters.values())

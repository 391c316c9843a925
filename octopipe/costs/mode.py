"""How a run computes: its precision, and whether its ops are replayed as CUDA graphs.

Knows: the names of the precisions, the bytes per parameter of each, and when two modes must not be compared. Does not
know: how a precision is implemented (`runtime/precision.py`) or measured.

    bf16-main-fp32   bfloat16 weights and activations; gradients of all micro-batches added up in float32; the optimizer
                     updates float32 master weights. What Megatron-LM and most large runs do, and the default on a GPU.
    fp8              the same, with the matrix products of linear layers in float8, except those of weight gradients, of
                     the head, of routers and of grouped experts; on GPUs of compute capability 8.9 or newer
    bf16             everything in bfloat16, gradients and optimizer state too
    fp32             everything in float32; the default on a CPU
    autocast-bf16    float32 weights and gradients, products in bfloat16 under torch.autocast
    fp64             everything in float64, for exact comparisons

>>> Mode(precision="bf16-main-fp32").bytes_per_parameter(state_factor=2)
18.0
>>> Mode(precision="fp32").bytes_per_parameter(state_factor=2)
16.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief

DEFAULT_GPU, DEFAULT_CPU = "bf16-main-fp32", "fp32"
_BYTES = {
    "bf16-main-fp32": (2.0, 4.0, 4.0, 4.0),
    "fp8": (4.0, 4.0, 4.0, 4.0),
    "bf16": (2.0, 2.0, 0.0, 2.0),
    "fp32": (4.0, 4.0, 0.0, 4.0),
    "autocast-bf16": (4.0, 4.0, 0.0, 4.0),
    "fp64": (8.0, 8.0, 0.0, 8.0),
}
"""Bytes per parameter: of the weight (for fp8 with its two float8 copies), its gradient, its master weight, and one
moment of the optimizer."""
PRECISIONS = tuple(_BYTES)
FLOAT32_UPDATES = frozenset({"bf16-main-fp32", "fp8", "fp32", "autocast-bf16"})
"""Precisions whose optimizer updates float32 weights. A checkpointed run may be resumed in another one of them."""
OLDER_NAMES = {"float32": "fp32", "bfloat16": "bf16-main-fp32", "float64": "fp64"}
"""The values of the older flag `--dtype`, with the precision that each one stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How layers ran when they were measured, or will run."""

    precision: str
    """One of `PRECISIONS`."""
    graphs: bool = False
    """Ops are captured once as CUDA graphs and replayed."""

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise OctoPipeError(f"precision {brief(self.precision)}; one of {', '.join(PRECISIONS)}")

    def __str__(self) -> str:
        return self.precision + (" with CUDA graphs" if self.graphs else "")

    def bytes_per_parameter(self, *, state_factor: float, shards: int = 1) -> float:
        """Return the bytes of one parameter's weight, gradient and optimizer state.

        `state_factor`: the optimizer's moments per parameter; 0: no optimizer, and therefore no master weight.
        `shards`: data-parallel replicas that divide master weights and moments among themselves.
        """
        weight, gradient, master, moment = _BYTES[self.precision]
        return weight + gradient + ((master + state_factor * moment) / shards if state_factor else 0.0)

    def record(self) -> dict[str, object]:
        """Return the mode as files store it."""
        return {"precision": self.precision, "graphs": self.graphs}


def default_precision(device: str) -> str:
    """Return the precision of a run on this kind of device if none is given."""
    return DEFAULT_GPU if device.startswith("cuda") else DEFAULT_CPU


def precision_of(precision: str | None, dtype: str | None, device: str, own: str | None = None) -> str:
    """Return the precision that the flags select, by name or by the older `--dtype`.

    If they select none, return that of the model's own config (`own`, a dtype's name) on a GPU if it is float32 or
    float64, otherwise the device's default. Raise an error if the two flags contradict each other.

    >>> precision_of(None, None, "cuda"), precision_of(None, None, "cuda", "float32"), precision_of(None, None, "cpu")
    ('bf16-main-fp32', 'fp32', 'fp32')
    """
    if precision is not None and dtype is not None and OLDER_NAMES.get(dtype) != precision:
        raise OctoPipeError(
            f"dtype {dtype} is the older name of a precision and differs from {precision}; give one of them"
        )
    if precision is None and dtype is not None:
        if dtype not in OLDER_NAMES:
            raise OctoPipeError(f"dtype is {brief(dtype)}; one of {', '.join(OLDER_NAMES)}")
        return OLDER_NAMES[dtype]
    if precision is None and device.startswith("cuda") and own in ("float32", "float64"):
        return OLDER_NAMES[own]
    return Mode(precision=precision or default_precision(device)).precision


FLOAT8_REMEDY = "it needs an NVIDIA GPU of compute capability 8.9 or newer; use --precision bf16-main-fp32"


def refuse_on_cpu(precision: str, device: str) -> None:
    """Raise an error if the device is a CPU and does not support the precision."""
    if precision == "fp8" and not device.startswith("cuda"):
        raise OctoPipeError(f"precision fp8 on a CPU: {FLOAT8_REMEDY}")


def mode_from_object(value: object, where: str) -> Mode | None:
    """Return the mode in a decoded file, or None if the file states none."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get("precision"), str):
        raise OctoPipeError(f'{where}: "mode" is {brief(value)}; give {{"precision": "bf16", "graphs": false}}')
    if value["precision"] not in PRECISIONS:
        given = brief(value["precision"])
        raise OctoPipeError(f'{where}: "mode" has precision {given}; one of {", ".join(PRECISIONS)}')
    graphs = value.get("graphs", False)
    if not isinstance(graphs, bool):
        raise OctoPipeError(f'{where}: "mode" has graphs {brief(graphs)}; give true or false')
    return Mode(precision=value["precision"], graphs=graphs)


def refuse_other_precision(measured: Mode | None, running: str, where: str) -> None:
    """Raise an error if times were measured in another precision than the run's, to which they do not apply."""
    if measured is not None and measured.precision != running:
        raise OctoPipeError(
            f"{where} was measured in {measured.precision}, and this run computes in {running}: its times do not "
            f"apply to this run; add --precision {measured.precision}, or measure again: octopipe profile "
            f"--precision {running}"
        )


def refuse_other_graphs(measured: Mode | None, running: bool, where: str) -> None:
    """Raise an error if times were measured with CUDA graphs and the run does not use them, or the reverse."""
    if measured is not None and measured.graphs != running:
        how = ("with", "without") if measured.graphs else ("without", "with")
        flag = "--graphs" if measured.graphs else "--no-graphs"
        raise OctoPipeError(
            f"{where} was measured {how[0]} CUDA graphs, and this run is {how[1]} them: its times do not apply to "
            f"this run; use {flag}, or measure again"
        )

"""Workloads: a model with the size of its micro-batches on the devices of its ranks.

Knows: how to make a model's layers and random tokens on a device. Does not know: plans or what is measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octopipe.base.errors import OctoPipeError
from octopipe.costs.mode import Mode, refuse_on_cpu
from octopipe.huggingface import LayerList
from octopipe.huggingface.described import HfModel
from octopipe.models.spec import Block, Layer, ModelSpec
from octopipe.runtime.fp8 import compute_in_float8, require_float8
from octopipe.runtime.nn import build_layers, cross_entropy
from octopipe.runtime.nn.kernels import PACKAGES, Kernels, choose, installed
from octopipe.runtime.precision import PARAMETER_DTYPES
from octopipe.runtime.ranks.gpu_share import check_products
from octopipe.runtime.ranks.world import World

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}
"""The precision that a dtype stands for if no precision is given: everything is in that dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model with the size of its micro-batches and the device of its ranks."""

    spec: ModelSpec | HfModel
    """The model: sizes of octopipe's own layers, or a transformers model."""
    tokens: int
    """Tokens per sequence."""
    micro_batch_size: int = 1
    device: str = "cpu"
    """"cpu", "cuda" (one GPU per rank), or "cuda" on fewer GPUs than ranks (shared)."""
    dtype: str = "float32"
    """The dtype of everything, if no precision is given."""
    precision: str = ""
    """The precision of layers and gradients (`costs/mode.py`); default: that of the dtype."""
    compile_scans: bool | None = None
    """Whether our Mamba-2's scan runs through `torch.compile`; default: on a GPU, unless there are faster kernels."""
    asked_kernels: tuple[str, ...] = ()
    """Kernels of octopipe's own layers by name (`kernels.PARTS`); a transformers model has already selected its own."""
    seed: int = 0
    graphs: bool = False
    """Whether ops are captured as CUDA graphs and replayed, if possible."""
    checkpointed: tuple[int, ...] = ()
    """Layers that keep only their input and run again inside their backward."""
    frozen: tuple[int, ...] = ()
    """Layers whose parameters are not trained."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise OctoPipeError(f"dtype {self.dtype!r}; one of {', '.join(DTYPES)}")
        if not self.precision:
            object.__setattr__(self, "precision", DTYPES[self.dtype])
        Mode(precision=self.precision)
        refuse_on_cpu(self.precision, self.device)
        if self.graphs and self.device == "cpu":
            raise OctoPipeError("CUDA graphs on a CPU; leave --graphs out, or use --device cuda")
        if self.tokens < 1 or self.micro_batch_size < 1:
            raise OctoPipeError(f"{self.micro_batch_size} x {self.tokens} tokens; give at least one of each")

    def place(self, rank: int) -> torch.device:
        """Select this rank's device and return it."""
        if self.device == "cpu":
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise OctoPipeError("no CUDA device here; use --device cpu")
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        check_products(device)
        if self.precision == "fp8":
            require_float8(device)
        return device

    def transport(self, world: World) -> str | None:
        """Return "cuda_ipc" if ranks share a GPU, otherwise None: the transport that fits the device."""
        if self.device == "cpu":
            return None
        return "cuda_ipc" if torch.cuda.device_count() < world.size else None

    @property
    def mode(self) -> Mode:
        """How the layers run: precision, and whether CUDA graphs are used."""
        return Mode(precision=self.precision, graphs=self.graphs)

    @property
    def kernels(self) -> Kernels:
        return choose(self.device, compiled=self.compile_scans, asked=self.asked_kernels)

    def kernel_names(self) -> dict[str, str]:
        """Return the kernels that the layers use, as recorded in a profile, whose times are valid for these kernels
        only."""
        if isinstance(self.spec, ModelSpec):
            return self.kernels.names()
        there = [name for name in PACKAGES if self.device == "cuda" and installed(name)]
        told = {"attention": self.spec.attention or "transformers' default", "packages": ", ".join(there) or "none"}
        return {**told, "liger": "on"} if self.spec.liger else told

    @property
    def compiles(self) -> bool:
        """Whether the first run of a layer compiles something."""
        return isinstance(self.spec, ModelSpec) and (self.kernels.scan == "compiled" or self.kernels.loss == "fused")

    def layers(self, device: torch.device) -> Sequence[Callable[[], nn.Module] | nn.Module]:
        dtype = PARAMETER_DTYPES[self.precision]
        layers: Sequence[Callable[[], nn.Module] | nn.Module]
        if isinstance(self.spec, ModelSpec):
            layers = build_layers(self.spec, dtype=dtype, device=device, seed=self.seed, kernels=self.kernels)
        else:
            layers = self.spec.layers(dtype=dtype, device=device, seed=self.seed)
        if self.precision == "fp8":
            layers = _changed(layers, range(len(layers) - 1), compute_in_float8)  # the last one is the head
        return with_frozen(with_checkpoints(layers, self.checkpointed), self.frozen)

    @staticmethod
    def loss(layers: Sequence[Callable[[], nn.Module] | nn.Module]) -> Callable[..., Tensor]:
        """Return the loss of the last layer's output against the next tokens."""
        return layers.shifted_loss if isinstance(layers, LayerList) else cross_entropy

    @property
    def groups(self) -> tuple[int, ...]:
        """For every layer, a number that equal layers share."""
        groups = self.spec.groups if isinstance(self.spec, HfModel) else groups_of_spec(self.spec)
        # A layer that is checkpointed takes longer than one that is not, and one that is frozen has no W, or, before
        # all layers that are trained, no backward at all.
        again = max(groups, default=0) + 1
        first = next((k for k in range(len(groups)) if k not in self.frozen), 0)
        more = ((k in self.checkpointed) + 2 * (k in self.frozen) + 4 * (k < first) for k in range(len(groups)))
        return tuple(g + again * extra for g, extra in zip(groups, more, strict=True))

    @property
    def kinds(self) -> tuple[str, ...]:
        """A description of every layer."""
        return self.spec.kinds if isinstance(self.spec, HfModel) else tuple(kind_of(layer) for layer in self.spec)

    def batch(self, device: torch.device, count: int) -> list[Any]:
        """Return synthetic inputs of `count` micro-batches, the same on every rank: random tokens, and if the model has
        an encoder, as many images or recordings as there are on average."""
        form = self.spec.inputs if isinstance(self.spec, HfModel) else None
        if form is None:
            return self._tokens(device, count, step=0, length=self.tokens)
        out = []
        items = [kind.typical(self.micro_batch_size) for kind in form.kinds]
        for m, tokens in enumerate(self._tokens(torch.device("cpu"), count, step=0, length=self.tokens + 1)):
            seeds = [self.seed + m * self.micro_batch_size + row for row in range(self.micro_batch_size)]
            inputs, _ = form.made_up(tokens, *items, seed=seeds, dtype=PARAMETER_DTYPES[self.precision])
            out.append({name: value.to(device) for name, value in inputs.items()})
        return out

    def targets(self, device: torch.device, count: int) -> list[Tensor]:
        """Return random next tokens of `count` micro-batches."""
        return self._tokens(device, count, step=1, length=self.tokens)

    def _tokens(self, device: torch.device, count: int, *, step: int, length: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed + 7919 * step)
        shape = (self.micro_batch_size, length)
        return [torch.randint(self.spec.vocab, shape, generator=generator).to(device) for _ in range(count)]


def with_checkpoints(
    layers: Sequence[Callable[[], nn.Module] | nn.Module], which: Sequence[int]
) -> Sequence[Callable[[], nn.Module] | nn.Module]:
    """Return the layers, of which the chosen ones run again inside their backward. They remain the same modules: names,
    hooks and saved state do not change, only what `forward` keeps."""

    def checkpoints(module: nn.Module) -> None:
        module.forward = _again(module.forward)

    return _changed(layers, which, checkpoints)


def with_frozen(
    layers: Sequence[Callable[[], nn.Module] | nn.Module], which: Sequence[int]
) -> Sequence[Callable[[], nn.Module] | nn.Module]:
    """Return the layers, of which the chosen ones are not trained."""
    return _changed(layers, which, lambda module: module.requires_grad_(False))


def _changed(
    layers: Sequence[Callable[[], nn.Module] | nn.Module], which: Sequence[int], change: Callable[[nn.Module], Any]
) -> Sequence[Callable[[], nn.Module] | nn.Module]:
    if not which:
        return layers

    def wrapped(make: Callable[[], nn.Module] | nn.Module) -> Callable[[], nn.Module] | nn.Module:
        if isinstance(make, nn.Module):
            change(make)
            return make

        def made() -> nn.Module:
            module = make()
            change(module)
            return module

        return made

    out = [wrapped(layer) if k in which else layer for k, layer in enumerate(layers)]
    if not isinstance(layers, LayerList):
        return out
    layers[:] = out  # a LayerList also has the model's loss and names
    return layers


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **keywords)
        return checkpoint(forward, *args, use_reentrant=False, **keywords)

    return call


def groups_of_spec(spec: ModelSpec) -> tuple[int, ...]:
    """Return a number for every layer, which equal layers share."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(layer, len(numbers)) for layer in spec)


def kind_of(layer: Layer) -> str:
    """Return a description of one of octopipe's own layers."""
    if isinstance(layer, Block):
        return " + ".join(type(part).__name__ for part in layer.parts)
    return type(layer).__name__

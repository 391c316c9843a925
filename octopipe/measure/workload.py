"""Workloads: a model with the size of its micro-batches on the devices of its ranks.

Knows: how to make a model's layers and random tokens on a device. Does not know: plans or what is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octopipe.errors import OctoPipeError
from octopipe.model import ModelSpec
from octopipe.nn import build_layers
from octopipe.runtime.world import World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model with the size of its micro-batches and the device of its ranks."""

    spec: ModelSpec
    tokens: int
    """Per sequence."""
    micro_batch_size: int = 1
    device: str = "cpu"
    """"cpu", "cuda" (one GPU per rank), or "cuda" on fewer GPUs than ranks (shared)."""
    dtype: str = "float32"
    compile_scans: bool = False
    """Mamba-2's scan through `torch.compile`: fused kernels, as models are trained with."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise OctoPipeError(f"dtype {self.dtype!r}; one of {', '.join(DTYPES)}")
        if self.tokens < 1 or self.micro_batch_size < 1:
            raise OctoPipeError(f"{self.micro_batch_size} x {self.tokens} tokens; give at least one of each")

    def place(self, rank: int) -> torch.device:
        """This rank's device, made current."""
        if self.device == "cpu":
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise OctoPipeError("no CUDA device here; use --device cpu")
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def transport(self, world: World) -> str | None:
        """CUDA IPC where ranks share a GPU; otherwise what fits the device."""
        if self.device == "cpu":
            return None
        return "cuda_ipc" if torch.cuda.device_count() < world.size else None

    def layers(self, device: torch.device) -> list[Callable[[], nn.Module]]:
        return build_layers(
            self.spec, dtype=DTYPES[self.dtype], device=device, seed=self.seed, compile_scans=self.compile_scans
        )

    def batch(self, device: torch.device, count: int, step: int = 0) -> list[Tensor]:
        """Random tokens of `count` micro-batches, the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed + 7919 * step)
        shape = (self.micro_batch_size, self.tokens)
        return [torch.randint(self.spec.vocab, shape, generator=generator).to(device) for _ in range(count)]

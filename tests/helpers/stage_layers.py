"""What the tests of stages share: a layer of any signature, and inputs for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Call(nn.Module):
    """A layer with a linear in front of any function of its inputs."""

    def __init__(self, function: Any):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 3).double()
        self.forward = function  # its signature is the layer's


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.float64)

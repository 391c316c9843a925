"""`torch.autograd.Function` with the type of `apply`, which torch leaves without one.

Knows: what a type checker must be told. Does not know: any function. At run time it is torch's own class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]
"""What a backward returns: one entry for each argument of forward, None where there is no gradient."""

if TYPE_CHECKING:

    class Function(torch.autograd.Function):
        @classmethod
        def apply(cls, *args: Any, **kwargs: Any) -> Any: ...

else:
    Function = torch.autograd.Function

"""Optimizer state in host memory: which parameters are updated there, and how gradients and weights are transferred.

Knows: the choice of parameters for a share of the state, the pinned buffers in which gradients arrive and from which
updated weights leave. Does not know: how weights are updated (any torch optimizer, which runs on the CPU for tensors
that are there), master weights' precision (`precision.py`), or activations in host memory (`stages/offload.py`).

Master weights and moments are ordinary host memory, because only the CPU touches them. A parameter's gradient and its
updated value use the same pinned buffer one after the other: the gradient is no longer needed when the weight leaves.
On a CPU nothing is transferred, and the same values are copied in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError

HOST = torch.device("cpu")
POOL_BYTES = 1 << 30
"""Buffers are cut out of pinned pieces of this size: torch rounds every pinned piece up to a power of two."""
ALIGNED_BYTES = 64


def hosted(parameters: Sequence[nn.Parameter], share: float) -> set[nn.Parameter]:
    """Return the parameters whose state goes to host memory: at least this share of all values, and little more."""
    if not share:
        return set()
    wanted = share * sum(p.numel() for p in parameters)
    chosen: set[nn.Parameter] = set()
    held, passed_over = 0, []
    for parameter in sorted(parameters, key=lambda p: -p.numel()):
        if held + parameter.numel() <= wanted:
            chosen.add(parameter)
            held += parameter.numel()
        else:
            passed_over.append(parameter)
    if held < wanted:  # all of these exceed what is missing: add the smallest, then drop what is no longer needed
        chosen.add(passed_over[-1])
        held += passed_over[-1].numel()
        for parameter in sorted(chosen, key=lambda p: -p.numel()):
            if held - parameter.numel() >= wanted:
                chosen.remove(parameter)
                held -= parameter.numel()
    return chosen


class HostState:
    """Parameters on a device, each with the tensor in host memory that is updated in its place."""

    def __init__(self, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]):
        self._pairs = list(pairs)
        self._crosses = any(parameter.is_cuda for parameter, _ in pairs)
        self._buffers: list[Tensor] = []
        """One buffer per pair, with as many values as it has, in the dtype of the updated tensor; allocated on first
        use."""

    def bring_gradients(self) -> None:
        """Copy the gradient of every parameter to the tensor that is updated for it, and wait until it has arrived."""
        if not self._buffers:
            self._buffers = _buffers([master for _, master in self._pairs], pinned=self._crosses)
        for (parameter, master), buffer in zip(self._pairs, self._buffers, strict=True):
            master.grad = None
            if parameter.grad is not None:
                buffer.copy_(parameter.grad, non_blocking=True)
                master.grad = buffer
        self._wait()

    def return_weights(self) -> None:
        """Set the parameters to the updated values, rounded on the host so that no more than needed is moved."""
        for k, (parameter, master) in enumerate(self._pairs):
            if not self._crosses or not self._buffers:
                parameter.copy_(master)
                continue
            leaving = _as_dtype(self._buffers[k], parameter.dtype)
            leaving.copy_(master)
            parameter.copy_(leaving, non_blocking=True)  # the next gradient into this buffer is behind it in the stream

    def _wait(self) -> None:
        for device in {parameter.device for parameter, _ in self._pairs if parameter.is_cuda}:
            torch.cuda.current_stream(device).synchronize()


def _as_dtype(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the beginning of a buffer's memory as values of another dtype that is not wider."""
    return buffer.view(-1).view(dtype)[: buffer.numel()].view(buffer.shape)


def _buffers(like: Sequence[Tensor], *, pinned: bool) -> list[Tensor]:
    """Return a contiguous buffer for each tensor, cut out of a few pieces of memory."""
    places: list[tuple[int, int]] = []
    pieces: list[int] = []
    for tensor in like:
        size = -(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        if not pieces or pieces[-1] + size > POOL_BYTES:
            pieces.append(0)
        places.append((len(pieces) - 1, pieces[-1]))
        pieces[-1] += size
    try:
        memory = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in pieces]
    except RuntimeError as error:
        raise OctoPipeError(
            f"the host cannot provide {sum(pieces) / 2**30:.1f} GiB of pinned memory for the gradients of optimizer "
            f"state in host memory ({' '.join(str(error).split())[:120]}); use a smaller --offload-optimizer"
        ) from None
    return [
        memory[piece][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, (piece, start) in zip(like, places, strict=True)
    ]

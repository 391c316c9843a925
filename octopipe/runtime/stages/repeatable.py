"""Whether a forward gives the same result when it runs again: compares outputs layer by layer, and changed state.

Knows: digests of values, how to compare them, and the error messages. Does not know: who runs forwards, or when.

On a CPU, a digest is a hash of the bytes, so equality is bitwise. On a GPU, some kernels add in a different order each
time, so the digest is a random projection: 64 sums of the values with position-dependent signs, whose difference
estimates the norm of the difference of the values. If the projections differ, the forward runs a third time. (Forwards
that may communicate with other processes always do, because all of them must run it equally often.) If the second
and third run agree, the first was a different forward. Otherwise the first may differ from the second by at most
`NOISE_FACTOR` times the difference between those two, which itself may be at most `NOISE` of the values' norm. A
difference caused by state is not of that size: it appears only in the first of the runs, or is as large as the random
values drawn.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.torch_private import WithoutFunctionModes
from octopipe.runtime.values import flatten

CHECKED_STEPS = 2
"""Number of training steps (restarted by `train()` or `eval()`) in which every R is compared with its F."""
LOOKS_AGAIN_AT = 64
"""From this step on, R is also compared with F in steps whose number is a power of two."""
NOISE_FACTOR = 8.0
NOISE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.complex64: 1e-4}
"""The largest difference between runs of one forward on a GPU, as a share of the value's norm, by dtype; `HALF_NOISE`
for other dtypes."""
HALF_NOISE = 3e-2
_SKETCH = 64

Digest = tuple[Any, ...]


def digest_of(value: Any) -> Digest:
    """A digest of a nested value, with one entry per leaf."""
    leaves: list[Any] = []
    flatten(value, leaves)
    with WithoutFunctionModes(), torch.no_grad():  # no function mode, ours or a user's, intercepts these calls
        return tuple([_digest(leaf) for leaf in leaves])


def _digest(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__
    form = (tuple(leaf.shape), leaf.dtype)
    if type(leaf) not in (Tensor, torch.nn.Parameter) or leaf.layout is not torch.strided:
        return form
    flat = leaf.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.device.type == "cpu":
        data: Any = flat.view(torch.uint8).numpy()
        return form, hashlib.blake2b(data, digest_size=16).digest()
    return form, sketch(flat), torch.linalg.vector_norm(_wide(flat))


def _wide(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat).reshape(-1).double() if flat.is_complex() else flat.double()


def sketch(flat: Tensor) -> Tensor:
    """Project a vector of any length onto 64 numbers: a linear map that preserves the norm on average."""
    flat = _wide(flat)
    if flat.numel() % _SKETCH:
        flat = torch.nn.functional.pad(flat, (0, _SKETCH - flat.numel() % _SKETCH))
    place = torch.arange(flat.numel(), device=flat.device, dtype=torch.int64)
    # A multiplicative hash of the place; its top bit is the sign.
    signs = 1.0 - 2.0 * ((place * 0x9E3779B1 >> 31) & 1).double()
    return (flat * signs).view(-1, _SKETCH).sum(0)


def first_difference(one: list[Digest], other: list[Digest]) -> int | None:
    """The index of the first layer whose digests differ; None if all are the same."""
    for k, (a, b) in enumerate(zip(one, other, strict=True)):
        if len(a) != len(b) or not all(map(_same, a, b)):
            return k
    return None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == 3 == len(b):
        return a[0] == b[0] and bool(torch.equal(a[1], b[1]) or (a[1].isnan() & b[1].isnan()).any())
    return bool(a == b) or (a != a and b != b)


def is_noise(first: Digest, second: Digest, third: Digest) -> bool:
    """Whether the first run's values differ from the second's no more than runs of one forward do (GPU)."""
    if not len(first) == len(second) == len(third):
        return False
    for a, b, c in zip(first, second, third):
        if _same(a, b):
            continue
        if not (isinstance(a, tuple) and len(a) == 3 and a[0] == b[0] == c[0]):
            return False  # tensors on the host and constants have no noise
        noise, apart = float((b[1] - c[1]).norm()), float((a[1] - b[1]).norm())
        if not (apart <= NOISE_FACTOR * noise and noise <= NOISE.get(a[0][1], HALF_NOISE) * float(b[2])):
            return False
    return True


def refuse_difference(layer: str, changed: str) -> None:
    """Raise the error for a layer whose R differs from F. `changed`: a parameter or buffer that changed in this step
    (or ""), which is named as the likely cause."""
    cause = (
        f"{changed} was changed in place since then (by a forward, most likely)"
        if changed
        else "it depends on something outside its attributes, buffers and generators that changed in between (an "
        "iterator, random numbers or a counter inside a library, a file, an object among its arguments that it "
        "changes, two tensors in one memory)"
    )
    raise OctoPipeError(
        f"{layer} gives another output when its forward runs again (R), so its gradients would be wrong: {cause}; keep "
        "such state in a buffer or an attribute, or say `repeatable = False` in its class and plan without "
        "recomputation there (octopipe tune --no-recompute)"
    )


def refuse_side_effect(place: str, what: str) -> None:
    raise OctoPipeError(
        f"{place}: the forward changes {what} when it runs again (R), but did not the first time (F), so it is not "
        "the same forward; change it in both, or say `repeatable = False` in the layer's class and plan without "
        "recomputation there (octopipe tune --no-recompute)"
    )

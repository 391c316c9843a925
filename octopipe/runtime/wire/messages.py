"""Messages between stages, with a description that lets the receiver allocate buffers.

Knows: how a value (a tensor, or containers of tensors and constants, see `values`) becomes a `Spec` and a small header,
and back; which tensors are not plain memory. Does not know: how bytes are transferred (`transports`).

A forward message consists of a header and the tensors; small tensors are included in the header. A gradient message has
no header: it contains one gradient for each tensor of the forward message that requires one, in order.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.values import ATOMS, Form, build, flatten, tensor_flags
from octopipe.runtime.wire.encoding import check_way, decoded, encoded, torch_name

HEAD_BYTES = 4096
"""Maximum size of a header with the tensors inside it."""
FIXED_BYTES = 32
"""Bytes of a header's fixed part: length of the description, bytes of the tensors inside, digest of the description."""
MOST_FORMS = 4096
"""Forms that never recur (changing shapes) must not accumulate."""
ALIGNED = 64
"""Tensors inside a header are aligned like torch's own, because the rounding of some kernels depends on it."""


class Leaf(NamedTuple):
    """One tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wanted: bool
    """Whether the sender needs a gradient for it."""
    nbytes: int
    padded: int
    """`nbytes` rounded up, so that tensors inside a header are aligned (`ALIGNED`)."""


class Spec:
    """The form of a value: its nesting and its tensors. Equal forms share one object on each rank."""

    __slots__ = (
        "asking", "bare", "constants", "flags", "form", "header", "inline", "leaves", "long", "message_bytes",
        "nbytes", "offset", "padded", "text", "wanted",
    )  # fmt: skip

    def __init__(self, form: Form, leaves: tuple[Leaf, ...], constants: tuple[Any, ...]):
        self.form = form
        self.leaves, self.constants = leaves, constants
        self.asking = tuple(x for x in leaves if x.wanted)
        """The tensors for which the receiver sends gradients back."""
        self.bare = form is True
        self.flags = tensor_flags(form, [])
        """For each leaf, whether it is a tensor."""
        tensors = iter(leaves)
        self.wanted = [next(tensors).wanted if flag else False for flag in self.flags]
        """For each leaf, whether it takes a gradient (False for constants): the `input_grad` of `Stage.forward`."""
        described = (form, [(tuple(x.shape), str(x.dtype)[6:], x.wanted) for x in leaves], constants)
        try:
            self.text = encoded(described)
        except OctoPipeError as error:
            raise OctoPipeError(f"a stage's output holds something that cannot be sent: {error}") from None
        self.nbytes = sum(x.nbytes for x in leaves)
        self.offset = -(-(FIXED_BYTES + len(self.text)) // ALIGNED) * ALIGNED
        self.padded = size = sum(x.padded for x in leaves)
        self.inline = self.offset + size <= HEAD_BYTES
        """Whether the tensors are inside the header message, from `offset` on, each padded."""
        self.message_bytes = self.offset + size
        self.long = FIXED_BYTES + len(self.text) > HEAD_BYTES
        """Whether the description needs a message of its own."""
        fixed = len(self.text).to_bytes(8, "little") + (size if self.inline else 0).to_bytes(8, "little")
        digest = hashlib.blake2b(self.text, digest_size=16).digest()
        self.header = fixed + digest + (b"" if self.long else self.text)

    def inside(self, head: memoryview) -> list[Tensor]:
        """The tensors that are contained in a header, in its memory; each has a storage (and a version) of its own."""
        parts, at = [], self.offset
        for leaf in self.leaves:
            if leaf.nbytes:
                count = leaf.nbytes // leaf.dtype.itemsize
                parts.append(torch.frombuffer(head, dtype=leaf.dtype, count=count, offset=at).view(leaf.shape))
            else:
                parts.append(torch.empty(leaf.shape, dtype=leaf.dtype))
            at += leaf.padded
        return parts

    def value(self, tensors: list[Tensor]) -> Any:
        """The value built from these tensors."""
        if self.bare:
            return tensors[0]
        it, constants = iter(tensors), iter(self.constants)
        return build(self.form, (next(it) if flag else next(constants) for flag in self.flags))


class Specs:
    """The forms that this rank knows, by key for sending and by digest for receiving."""

    def __init__(self) -> None:
        self._by_key: dict[Any, Spec] = {}
        self._by_digest: dict[bytes, Spec] = {}

    def of(self, value: Any, needs: list[bool] | None) -> tuple[Spec, list[Tensor]]:
        """The form and the tensors of a value; `needs` states for each leaf whether it takes a gradient."""
        if isinstance(value, Tensor):
            value = _memory(value)
            need = takes_gradient(value) if needs is None else needs[0]
            key: Any = (value.shape, value.dtype, need)
            spec = self._by_key.get(key)
            if spec is None:
                spec = Spec(True, (_leaf(tuple(value.shape), value.dtype, need),), ())
                self._keep(key, spec)
            return spec, [value]
        flat: list[Any] = []
        form = flatten(value, flat)
        tensors, leaves, constants = [], [], []
        for k, x in enumerate(flat):
            if isinstance(x, Tensor):
                x = _memory(x)
                tensors.append(x)
                leaves.append(_leaf(tuple(x.shape), x.dtype, takes_gradient(x) if needs is None else needs[k]))
            else:
                constants.append(x)
        return self._find(form, tuple(leaves), tuple(constants)), tensors

    def _find(self, form: Form, leaves: tuple[Leaf, ...], constants: tuple[Any, ...]) -> Spec:
        # The key has types and texts, because 1, 1.0 and True compare equal, and so do 0.0 and -0.0.
        key = (form, leaves, tuple((type(x), repr(x) if isinstance(x, float | complex) else x) for x in constants))
        try:
            spec = self._by_key.get(key)
        except TypeError:  # a constant that cannot be hashed: describe it every time
            return Spec(form, leaves, constants)
        if spec is None:
            spec = Spec(form, leaves, constants)
            self._keep(key, spec)
        return spec

    def _keep(self, key: Any, spec: Spec) -> None:
        if len(self._by_key) >= MOST_FORMS:
            self._by_key.clear()
        self._by_key[key] = spec

    def read(self, head: bytes, text: bytes | None = None) -> Spec:
        """The form that a header announces; `text` is its description if that was sent separately."""
        digest = head[16:FIXED_BYTES]
        spec = self._by_digest.get(digest)
        if spec is None:
            length = int.from_bytes(head[:8], "little")
            if text is None:
                text = head[FIXED_BYTES : FIXED_BYTES + length]
            form, leaves, constants = _described(text)
            spec = Spec(form, leaves, constants)
            if all(type(x) in ATOMS for x in constants):  # the receiver may modify other constants
                if len(self._by_digest) > 4096:
                    self._by_digest.clear()
                self._by_digest[digest] = spec
        return spec


def _described(text: bytes) -> tuple[Form, tuple[Leaf, ...], tuple[Any, ...]]:
    """The form, tensors and constants of a description, which is checked because another process has sent it."""
    try:
        form, leaves, constants = decoded(text)
        flags = _checked_flags(form, 0)
        if flags.count(True) != len(leaves) or flags.count(False) != len(constants) or type(constants) is not tuple:
            raise ValueError("as many tensors and constants as its form")
        for shape, _, wanted in leaves:
            if not all(type(n) is int and n >= 0 for n in shape) or type(wanted) is not bool:
                raise ValueError(f"the shape {shape!r}")
        return form, tuple(_leaf(tuple(s), torch_name(d, torch.dtype), w) for s, d, w in leaves), constants
    except (OctoPipeError, TypeError, ValueError) as error:
        raise OctoPipeError(f"a message's description cannot be read: {error}") from None


def _checked_flags(form: Form, depth: int) -> list[bool]:
    """`tensor_flags` of a form that comes from another process."""
    if form is True or form is False:
        return [form]
    if type(form) is not tuple or not form or depth > 200:
        raise ValueError("an unknown form")
    if form[0] is not tuple and form[0] is not list:
        check_way(form[0])
    return [flag for part in form[1:] for flag in _checked_flags(part, depth + 1)]


def takes_gradient(tensor: Tensor) -> bool:
    """Whether a tensor may take a gradient, judging by its dtype."""
    return tensor.is_floating_point() or tensor.is_complex()


def plain_gradient(grad: Tensor) -> Tensor:
    """A gradient in the form in which it can be sent: dense, without a pending conjugation or negation."""
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    if grad.is_conj():
        grad = grad.resolve_conj()
    return grad.resolve_neg() if grad.is_neg() else grad


def _memory(tensor: Tensor) -> Tensor:
    """The tensor as a plain one without a pending negation or conjugation; raises an error for kinds of tensors that
    cannot be sent."""
    if type(tensor) is not Tensor:
        if type(tensor) in (torch.nn.Parameter, torch.nn.Buffer):
            tensor = tensor.detach()
        elif type(tensor).__name__ == "AsyncCollectiveTensor":  # a plain tensor, once its collective has ended
            tensor = tensor.wait()  # type: ignore[attr-defined]
        else:
            raise OctoPipeError(
                f"a stage's output holds a {type(tensor).__name__}, which cannot be sent to another rank; "
                "return plain tensors (DTensor: to_local())"
            )
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantised tensor" if tensor.is_quantized else f"tensor of layout {str(tensor.layout)[6:]}"
        kind = "nested tensor" if tensor.is_nested else kind
        raise OctoPipeError(f"a stage's output holds a {kind}, which cannot be sent to another rank; make it dense")
    return tensor


def padded(nbytes: int) -> int:
    """The distance in bytes from the start of one tensor to the start of the next if several are stored one after the
    other."""
    return -(-nbytes // ALIGNED) * ALIGNED


def text_bytes(head: bytes) -> int:
    """The length of the description that a header announces."""
    return int.from_bytes(head[:8], "little")


def _leaf(shape: tuple[int, ...], dtype: torch.dtype, wanted: bool) -> Leaf:
    nbytes = math.prod(shape) * dtype.itemsize
    return Leaf(shape, dtype, wanted, nbytes, padded(nbytes))

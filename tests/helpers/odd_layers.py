"""Layers that do something odd, each with micro-batches: plain torch trains them all, so a pipeline must.

Every case is a list of four layers in float64; the odd ones stand where plans cut.
"""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

WIDTH = 6
Point = namedtuple("Point", "x y")


class Do(nn.Module):
    """`expression(self, x)` with two linears, a norm and a vector to use."""

    def __init__(self, expression: Callable[[Any, Any], Any]):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.v = nn.Parameter(torch.randn(WIDTH))
        self.expression = expression

    def forward(self, x):
        return self.expression(self, x)


@dataclasses.dataclass
class Boxed:
    x: Tensor
    scale: float = 1.0
    extra: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor


class Bag:
    """Known to pytree only."""

    def __init__(self, x: Tensor):
        self.inside = x


pytree.register_pytree_node(Bag, lambda b: ([b.inside], None), lambda parts, _: Bag(parts[0]))


class More(dict):
    pass


def unbox(x: Any) -> Tensor:
    """The main tensor of whatever a layer below returned."""
    if isinstance(x, Tensor):
        return x.real + x.imag if x.is_complex() else x
    if isinstance(x, Boxed | Frozen):
        return unbox(x.x) * getattr(x, "scale", 1.0)
    if isinstance(x, Bag):
        return x.inside
    if isinstance(x, dict):
        return unbox(x["x"])
    return unbox(x[0])


def assign(y: Tensor, value: float) -> Tensor:
    y[..., 0] = value
    return y


def add_in_place(y: Tensor, x: Tensor) -> Tensor:
    y += x
    return y


def forces(m: Do, x: Tensor, create: bool) -> Tensor:
    with torch.enable_grad():
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        energy = torch.tanh(m.a(x)).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=create, retain_graph=True)
    return m.b(x) + force


def penalty(m: Do, x: Tensor) -> Tensor:
    y = torch.tanh(m.a(x))
    (g,) = torch.autograd.grad(y.square().sum(), m.a.weight, create_graph=True)
    return m.b(y) * g.square().sum()


class Doubled(torch.autograd.Function):
    """Builds a graph of its own in forward and walks it in backward."""

    @staticmethod
    def forward(ctx, x, layer, *params):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = torch.tanh(layer(ctx.x))
        ctx.params = params
        return ctx.y.detach() * 2

    @staticmethod
    def backward(ctx, g):
        gx, *rest = torch.autograd.grad(ctx.y, [ctx.x, *ctx.params], 2 * g)
        return gx, None, *rest


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.a, self.norm = nn.Linear(WIDTH, WIDTH), norm

    def forward(self, x):
        return torch.tanh(self.norm(self.a(x).transpose(1, 2)).transpose(1, 2))


class Running(nn.Module):
    """A buffer that takes a new tensor in every forward, and enters the result."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("cache", None)

    def forward(self, x):
        y = self.a(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean((0, 1))
        if self.cache is None:
            self.cache = torch.arange(WIDTH, dtype=x.dtype)
        return torch.tanh(y - self.mean) + 0.1 * self.cache


class Counted(nn.Module):
    """A buffer changed in place that decides the way."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.a(x) if int(self.calls) % 2 else self.b(x))


class Drawing(nn.Module):
    """Random numbers that torch's global generators do not know."""

    def __init__(self, source: str):
        super().__init__()
        self.a, self.source = nn.Linear(WIDTH, WIDTH), source
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x):
        if self.source == "python":
            factor: Any = random.random()
        else:
            factor = torch.rand(WIDTH, generator=self.generator, dtype=x.dtype)
        return torch.tanh(self.a(x)) * factor


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))) + torch.tanh(x) @ self.a.weight.t()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return F.relu(self.conv(x.transpose(1, 2)), inplace=True).transpose(1, 2)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

    def forward(self, x):
        return F.linear(torch.complex(x, torch.sin(x)), self.w)


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.a.weight.register_hook(lambda g: 2 * g)
        self.b.register_full_backward_hook(lambda m, gi, go: (3 * gi[0],))
        self.b.register_forward_hook(lambda m, i, o: o * 0.5)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Sometimes(nn.Module):
    """Its second layer is used in every other micro-batch only, and frozen in part."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.bias.requires_grad_(False)

    def forward(self, x):
        y = torch.tanh(self.a(x))
        return self.b(y) if x.flatten()[0].item() > 0 else y


def checkpointed(reentrant: bool) -> Callable[[Do, Tensor], Tensor]:
    return lambda m, x: checkpoint(lambda z: m.b(F.relu(m.a(z), inplace=True)), x, use_reentrant=reentrant)


def autocast(m: Do, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (torch.relu_(m.a(x)) * add_in_place(m.b(x), m.a(x))).to(x.dtype)


def without(m: Do, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(m.a(x))
    return m.b(x) * gate + m.norm(x).detach()


OUTPUTS: dict[str, Callable[[Do, Tensor], Any]] = {
    "relu in place": lambda m, x: m.b(F.relu(m.a(x), inplace=True)),
    "dropout in place": lambda m, x: m.b(F.dropout(m.a(x), 0.4, inplace=True)),
    "sum in place": lambda m, x: add_in_place(m.a(x), x),
    "item in place": lambda m, x: m.b(assign(m.a(x), 0.0)),
    "masked in place": lambda m, x: m.a(x).masked_fill_(x > 0.5, 0.0),
    "in place on a view": lambda m, x: (y := m.a(x), y.view(-1).mul_(2), torch.tanh(y))[2],
    "input in place": lambda m, x: F.relu(x * 1, inplace=True) + m.a(x),
    "stage input in place": lambda m, x: m.a(x.mul_(2)),
    "a vector for a weight": lambda m, x: m.a(x) * F.linear(x, m.v)[..., None],
    "weights by weights": lambda m, x: F.linear(x, F.linear(m.a.weight, m.b.weight)),
    "a bias in two dimensions": lambda m, x: m.b(F.linear(x[0], m.a.weight, m.a.weight[: x.shape[1]]))[None],
    "expanded bias": lambda m, x: F.linear(x, m.a.weight, m.v[:1].expand(WIDTH)),
    "einsum and baddbmm": lambda m, x: torch.baddbmm(
        m.v.expand(x.shape[0], 1, WIDTH), torch.einsum("btk,nk->btn", x, m.a.weight), m.b.weight.expand(len(x), -1, -1)
    ),
    "vmap": lambda m, x: torch.vmap(m.a)(x) + m.b(x),
    "func.grad": lambda m, x: m.b(x) + torch.func.grad(lambda z: torch.tanh(m.a(z)).sum())(x),
    "checkpoint": checkpointed(False),
    "reentrant checkpoint": checkpointed(True),
    "autocast": autocast,
    "forces": lambda m, x: forces(m, x, False),
    "forces, differentiated": lambda m, x: forces(m, x, True),
    "penalty on a weight": penalty,
    "graph of its own": lambda m, x: Doubled.apply(x, m.a, *m.a.parameters()) + m.b(x),
    "no_grad and detach": without,
    "input cut off": lambda m, x: m.a(x.detach()),
    "two outputs, one unused": lambda m, x: (m.a(x), m.b(x)),
    "two outputs, both cut off": lambda m, x: (m.a(x.detach()), (m.b(x.detach()), m.norm(x).detach())),
    "cut off for some data": lambda m, x: m.a(x if x.sum().item() > 0 else x.detach()),
    "unchanged": lambda m, x: x,
    "twice": lambda m, x: ((y := m.a(x)), y),
    "views of the input": lambda m, x: (x.transpose(0, 1).transpose(0, 1), x[..., :2], m.a(x)),
    "dataclass": lambda m, x: Boxed(m.a(x), 0.5, {"ids": torch.arange(3)}),
    "frozen dataclass": lambda m, x: Frozen(m.a(x)),
    "registered": lambda m, x: Bag(m.a(x)),
    "named tuple": lambda m, x: Point(m.a(x), None),
    "dict subclass": lambda m, x: More(x=m.a(x), n=3),
    "ordered dict": lambda m, x: OrderedDict(x=m.a(x), flag=True),
    "return type": lambda m, x: torch.max(m.a(x)[..., None], -1),
    "nested": lambda m, x: [({"x": [Boxed(m.a(x))]},), "text", 1.5],
    "complex": lambda m, x: torch.complex(m.a(x), m.b(x)),
    "conjugate": lambda m, x: torch.complex(m.a(x), m.b(x)).conj(),
    "negative view": lambda m, x: torch.complex(m.a(x), m.b(x)).conj().imag,
    "expanded": lambda m, x: m.a(x)[:, :1].expand_as(x),
    "empty and scalar": lambda m, x: (m.a(x), m.v.sum(), x.new_zeros(0, 3), x.new_zeros(()) > 1),
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "lora": Lora,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "batch norm": lambda: Normed(nn.BatchNorm1d(WIDTH)),
    "instance norm": lambda: Normed(nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)),
    "a new tensor for a buffer": Running,
    "a counter in a buffer": Counted,
    "python's random numbers": lambda: Drawing("python"),
    "a generator of its own": lambda: Drawing("generator"),
    "shared weight": Shared,
    "attention": Attention,
    "lstm": Recurrent,
    "convolution": Convolved,
    "complex weight": Complex,
    "hooks": Hooked,
    "sometimes": Sometimes,
    "relu in place alone": lambda: nn.ReLU(inplace=True),
    "identity": nn.Identity,
}
CASES = (*OUTPUTS, *MODULES)


class Unbox(nn.Module):
    """Takes whatever the layer before gives."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        return 1.5 * torch.tanh(self.inner(unbox(value)))


def make(name: str) -> list[nn.Module]:
    """linear, the odd one, linear, the odd one: both cuts of two ranks and of four stages meet it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        build = MODULES.get(name) or (lambda: Do(OUTPUTS[name]))
        return [layer.double() for layer in (nn.Linear(WIDTH, WIDTH), build(), Unbox(), build())]


def batches(count: int) -> tuple[list[Tensor], list[Tensor]]:
    g = torch.Generator().manual_seed(1)
    data = [torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=g) for _ in range(2 * count)]
    return data[:count], data[count:]


def loss(output: Any, target: Tensor) -> Tensor:
    extra = output[1] if isinstance(output, tuple) and isinstance(output[1], Tensor) and output[1].ndim == 0 else 0.0
    return (unbox(output) - target).square().mean() + 0.1 * extra

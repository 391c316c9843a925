"""Layers and losses that keep something, hook something or reach past their outputs; plain torch trains them all.

Every kind is a layer (built twice into four layers, where plans cut) or a loss, in float64, with what plain torch must
agree on besides losses, gradients and buffers: `observe` says what the layer has counted or kept. Kinds that no
pipeline can run as plain torch does are marked with the words by which they are refused.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from odd_layers import WIDTH
from torch import Tensor, nn

Observed = Callable[[nn.Module], Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of layer (or loss) and what is expected of it."""

    build: Callable[[], nn.Module]
    observe: Observed | None = None
    """What plain torch and the pipeline must agree on."""
    in_order: bool = True
    """Whether every layer's state is its own: only then several ranks can run its forwards in plain torch's order."""
    refused: str = ""
    """Words of the error where a plan recomputes; it trains under others."""
    refused_always: str = ""
    """Words of the error under every plan with more than one micro-batch."""
    loss: Callable[[], Any] | None = None
    """A loss in the place of the usual one."""


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Layer(nn.Module):
    """Two linears, and whatever `setup` puts in; `run(self, x)` is the forward."""

    def __init__(self, run: Callable[[Any, Tensor], Any], setup: Callable[[Any], Any] | None = None):
        super().__init__()
        self.a, self.b = linear(), linear()
        self.run = run
        if setup is not None:
            setup(self)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def kind(run: Callable[[Any, Tensor], Any], setup: Callable[[Any], Any] | None = None, **more: Any) -> Kind:
    return Kind(build=lambda: Layer(run, setup), **more)


def set_up(**values: Any) -> Callable[[Any], None]:
    """Attributes, each made anew by a call."""

    def setup(m: Any) -> None:
        for name, make in values.items():
            setattr(m, name, make() if callable(make) else make)

    return setup


def buffers(**values: Tensor) -> Callable[[Any], None]:
    def setup(m: Any) -> None:
        for name, value in values.items():
            m.register_buffer(name, value.clone())

    return setup


def add(m: Any, name: str, value: Any) -> Any:
    """`m.name += value`, and its new value."""
    setattr(m, name, getattr(m, name) + value)
    return getattr(m, name)


def then(*values: Any) -> Any:
    """The last of values that are computed one after the other."""
    return values[-1]


def mean(y: Tensor) -> Tensor:
    return y.detach().mean((0, 1))


# --- Python state that decides the result ---------------------------------------------------------------------------


class ClassCounter(nn.Module):
    """Counts in its class, over all layers."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).calls = 0
        self.a = linear()

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return torch.tanh(self.a(x)) * (1 + 0.1 * (type(self).calls % 3))


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


@dataclasses.dataclass
class Statistics:
    total: float = 0.0
    seen: int = 0
    history: list[float] = dataclasses.field(default_factory=list)


COUNT = {"calls": 0}


def with_global(m: Any, x: Tensor) -> Tensor:
    COUNT["calls"] += 1
    return torch.tanh(m.a(x)) * (1 + 0.1 * (COUNT["calls"] % 2))


def reset_global(m: Any) -> None:
    COUNT["calls"] = 0


def closure_counter() -> nn.Module:
    count = 0

    def run(m: Any, x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return m.a(x) * (1 + 0.1 * (count % 3))

    return Layer(run)


def default_cache() -> nn.Module:
    def run(m: Any, x: Tensor, cache: dict[str, int] = {}) -> Tensor:  # noqa: B006
        cache["calls"] = cache.get("calls", 0) + 1
        return m.a(x) * (1 + 0.1 * (cache["calls"] % 3))

    def fresh(m: Any, x: Tensor, cache: dict[str, int]) -> Tensor:
        return run(m, x, cache)

    return Layer(functools.partial(_reordered, fresh, {}))


def _reordered(function: Callable[..., Tensor], cache: dict[str, int], m: Any, x: Tensor) -> Tensor:
    return function(m, x, cache)


class FirstForward(nn.Module):
    """Makes what it needs in its first forward."""

    def __init__(self, how: str):
        super().__init__()
        self.a, self.how = linear(), how

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            value = 1 + x.detach().abs().mean()
            if self.how == "buffer":
                self.register_buffer("scale", value)
            else:
                self.scale = value
        self.scale = self.scale * 1.01
        return torch.tanh(self.a(x)) * self.scale


def iterator_of_its_own(m: Any, x: Tensor) -> Tensor:
    return m.a(x) * next(m.factors)


STATE: dict[str, Kind] = {
    "a counter in an attribute": kind(
        lambda m, x: then(add(m, "calls", 1), m.a(x) if m.calls % 2 else m.b(x)),
        set_up(calls=0), observe=lambda m: m.calls,
    ),
    "a counter in a list": kind(
        lambda m, x: then(m.calls.append(1), m.a(x) * (1 + 0.1 * (len(m.calls) % 3))),
        set_up(calls=list), observe=lambda m: len(m.calls),
    ),
    "a counter in a dict": kind(
        lambda m, x: then(m.calls.update(n=m.calls["n"] + 1), m.a(x) * m.calls["n"]),
        set_up(calls=lambda: {"n": 0}), observe=lambda m: m.calls,
    ),
    "a Counter": kind(
        lambda m, x: then(m.calls.update(["x"]), m.a(x) * m.calls["x"]),
        set_up(calls=collections.Counter), observe=lambda m: dict(m.calls),
    ),
    "a set": kind(
        lambda m, x: then(m.seen.add(len(m.seen)), m.a(x) * len(m.seen)), set_up(seen=set), observe=lambda m: m.seen,
    ),
    "a queue": kind(
        lambda m, x: then(m.window.append(float(x.detach().mean())), m.a(x) + sum(m.window)),
        set_up(window=lambda: collections.deque(maxlen=2)), observe=lambda m: list(m.window),
    ),
    "an object": kind(
        lambda m, x: then(add(m.stats, "seen", 1), m.a(x) * m.stats.seen),
        set_up(stats=Statistics), observe=lambda m: m.stats.seen,
    ),
    "an object with slots": kind(
        lambda m, x: then(add(m.stats, "count", 1), m.a(x) * m.stats.count),
        set_up(stats=Slotted), observe=lambda m: m.stats.count,
    ),
    "an object in a list in a dict": kind(
        lambda m, x: then(add(m.tree["deep"][0], "total", float(x.detach().sum())), m.a(x) + m.tree["deep"][0].total),
        set_up(tree=lambda: {"deep": [Statistics()]}), observe=lambda m: m.tree["deep"][0].total,
    ),
    "a history in an object": kind(
        lambda m, x: then(m.stats.history.append(float(x.detach().mean())), m.a(x) + sum(m.stats.history)),
        set_up(stats=Statistics), observe=lambda m: m.stats.history,
    ),
    "a numpy array": kind(
        lambda m, x: then(m.count.__iadd__(1), m.a(x) * float(m.count[0])),
        set_up(count=lambda: np.zeros(2)), observe=lambda m: m.count.tolist(),
    ),
    "a class's attribute": Kind(build=ClassCounter, in_order=False),
    "a closure's variable": Kind(build=closure_counter),
    "a default argument": Kind(build=default_cache),
    "a global dict": kind(with_global, reset_global, in_order=False),
    "an iterator": kind(
        iterator_of_its_own, set_up(factors=lambda: itertools.cycle((1.0, 2.0, 3.0))), refused="another output",
    ),
    "a buffer of the first forward": Kind(build=lambda: FirstForward("buffer"), observe=lambda m: float(m.scale)),
    "an attribute of the first forward": Kind(build=lambda: FirstForward("plain"), observe=lambda m: float(m.scale)),
    "a warm-up": kind(
        lambda m, x: then(add(m, "calls", 1), m.a(x) * min(1.0, m.calls / 5)),
        set_up(calls=0), observe=lambda m: m.calls,
    ),
    "the last output": kind(
        lambda m, x: then(y := torch.tanh(m.a(x)), z := y + 0.1 * m.last, setattr(m, "last", mean(y)), z),
        set_up(last=lambda: torch.zeros(WIDTH, dtype=torch.float64)), observe=lambda m: m.last.tolist(),
    ),
    "the last output in a list": kind(
        lambda m, x: then(y := torch.tanh(m.a(x)), z := y + 0.1 * m.last[0], m.last.__setitem__(0, mean(y)), z),
        set_up(last=lambda: [torch.zeros(WIDTH, dtype=torch.float64)]), observe=lambda m: m.last[0].tolist(),
    ),
    "the last output in a tuple": kind(
        lambda m, x: then(y := torch.tanh(m.a(x)), z := y + 0.1 * m.last[0], setattr(m, "last", (mean(y),)), z),
        set_up(last=lambda: (torch.zeros(WIDTH, dtype=torch.float64),)), observe=lambda m: m.last[0].tolist(),
    ),
    "a hidden module": kind(
        lambda m, x: then(m.hidden[0].num.add_(1), m.a(x) * m.hidden[0].num),
        lambda m: setattr(m, "hidden", [_counting()]), observe=lambda m: float(m.hidden[0].num),
    ),
    "looks at grad_enabled": kind(
        lambda m, x: then(torch.is_grad_enabled() and add(m, "calls", 1), m.a(x) * (1 + m.calls)),
        set_up(calls=0), observe=lambda m: m.calls,
    ),
    "looks at requires_grad": kind(lambda m, x: m.a(x) * (2.0 if x.requires_grad else 1.0)),
    "looks at training": kind(lambda m, x: m.a(x) * (2.0 if m.training else 1.0)),
    "switches its own mode": kind(
        lambda m, x: then(setattr(m, "flip", not m.flip), m.a(x) if m.flip else m.b(x)), set_up(flip=False),
        observe=lambda m: m.flip,
    ),
}  # fmt: skip


def _counting() -> nn.Module:
    module = nn.Module()
    module.register_buffer("num", torch.zeros((), dtype=torch.float64))
    return module


# --- tensors changed in place while earlier micro-batches need them ---------------------------------------------------

ZEROS = torch.zeros(WIDTH, dtype=torch.float64)
ONES = torch.ones(2, 3, WIDTH, dtype=torch.float64)


def batch_norm(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).transpose(1, 2)
    return torch.tanh(F.batch_norm(y, m.mean, m.var, training=True).transpose(1, 2)) + 0.1 * m.mean


def table(m: Any, x: Tensor) -> Tensor:
    m.ids.add_(1).remainder_(4)
    return m.a(x) + F.embedding(m.ids, m.rows)


def returns_its_buffer(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    m.ema.lerp_(mean(x), 0.5)
    return m.a(x), m.ema


IN_PLACE: dict[str, Kind] = {
    "a mean into a linear": kind(
        lambda m, x: then(m.ema.lerp_(mean(x), 0.5), m.a(x) + m.b(m.ema)), buffers(ema=ZEROS),
    ),
    "a plain mean into a linear": kind(
        lambda m, x: then(m.ema.lerp_(mean(x), 0.5), m.a(x) + m.b(m.ema)),
        set_up(ema=ZEROS.clone), observe=lambda m: m.ema.tolist(),
    ),
    "a mean in a list into a linear": kind(
        lambda m, x: then(m.ema[0].lerp_(mean(x), 0.5), m.a(x) + m.b(m.ema[0])),
        set_up(ema=lambda: [ZEROS.clone()]), observe=lambda m: m.ema[0].tolist(),
    ),
    "a counter into an embedding": Kind(
        build=lambda: Layer(table, lambda m: then(
            m.register_buffer("ids", torch.zeros(3, dtype=torch.long)),
            setattr(m, "rows", nn.Parameter(torch.randn(4, WIDTH))),
        )),
    ),
    "a mean multiplied": kind(
        lambda m, x: then(m.ema.lerp_(mean(x), 0.5), torch.tanh(m.a(x)) * m.ema), buffers(ema=ZEROS),
    ),
    "a mean behind tanh": kind(
        lambda m, x: then(m.ema.mul_(0.5).add_(mean(x)), m.a(x) * torch.tanh(m.ema) + m.b(m.ema).mean()),
        buffers(ema=ZEROS),
    ),
    "statistics of F.batch_norm": kind(batch_norm, buffers(mean=ZEROS, var=ZEROS + 1)),
    "plain statistics of F.batch_norm": kind(
        batch_norm, set_up(mean=ZEROS.clone, var=lambda: ZEROS + 1), observe=lambda m: m.mean.tolist(),
    ),
    "returns its buffer": kind(returns_its_buffer, buffers(ema=ZEROS)),
    "returns a view of its buffer": kind(
        lambda m, x: then(m.ema.lerp_(mean(x), 0.5), (m.a(x) + m.ema[:1], m.ema[:2])), buffers(ema=ZEROS),
    ),
    "returns a buffer that it replaces": kind(
        lambda m, x: then(setattr(m, "ema", m.ema.lerp(mean(x), 0.5)), (m.a(x), m.ema)), buffers(ema=ZEROS),
    ),
    "a scratch buffer": kind(
        lambda m, x: then(m.scratch.copy_(torch.tanh(m.a(x)).detach()), m.b(m.scratch) + m.a(x)), buffers(scratch=ONES),
    ),
    "a scratch buffer returned": kind(
        lambda m, x: then(m.scratch.copy_(x.detach()), (m.a(x) * m.scratch, m.scratch)), buffers(scratch=ONES),
    ),
    "a ring of rows": kind(
        lambda m, x: then(m.ring[int(m.at) % 3].copy_(mean(x)), m.at.add_(1), m.a(x) + m.b(m.ring).mean(0)),
        lambda m: then(buffers(ring=torch.zeros(3, WIDTH, dtype=torch.float64))(m), buffers(at=torch.zeros(()))(m)),
    ),
    "input changed in place": kind(lambda m, x: then(x.mul_(2), m.a(x)), observe=lambda m: None),
    "input changed in place and counted": kind(
        lambda m, x: then(add(m, "calls", 1), x.mul_(2), m.a(x)), set_up(calls=0), observe=lambda m: m.calls,
    ),
    "input sliced in place": kind(lambda m, x: then(x[..., 0].add_(1), m.a(x))),
    "input under no_grad in place": kind(
        lambda m, x: then(y := m.a(x), y.detach().clamp_(-1, 1), torch.tanh(m.b(y.clone()))),
    ),
    "a weight's data in every forward": kind(
        lambda m, x: then(m.a.weight.data.mul_(0.97), m.b(torch.tanh(m.a(x)))), refused_always="through `.data`",
    ),
    "a weight's data replaced in every forward": kind(
        lambda m, x: then(setattr(m.a.weight, "data", m.a.weight.data * 0.97), m.b(torch.tanh(m.a(x)))),
        refused_always="through `.data`",
    ),
    "a weight's data clipped": kind(
        lambda m, x: then(m.a.weight.data.clamp_(-0.1, 0.1), m.b(torch.tanh(m.a(x)))),
    ),
    "a weight's data normalised again": kind(
        lambda m, x: then(
            setattr(m.a.weight, "data", F.normalize(m.a.weight.data, dim=1)), m.b(torch.tanh(m.a(x))),
        ),
        refused="another output",
    ),
    "momentum of outputs": kind(
        lambda m, x: then(y := m.a(x), m.velocity.mul_(0.9).add_(y.detach().mean(0)), y + 0.1 * m.velocity),
        set_up(velocity=lambda: torch.zeros(3, WIDTH, dtype=torch.float64)), observe=lambda m: m.velocity.tolist(),
    ),
    "a tied buffer": Kind(
        build=lambda: Layer(
            lambda m, x: then(m.one.add_(0.1), m.a(x) * m.two), lambda m: then(
                m.register_buffer("one", ZEROS.clone()), m.register_buffer("two", m.one),
            ),
        ),
    ),
    "two views of one memory": kind(
        lambda m, x: then(m.whole.add_(0.1), m.a(x) * m.part.detach().sum().item()),
        lambda m: then(buffers(whole=ZEROS)(m), setattr(m, "part", m.whole[:2])),
        observe=lambda m: m.whole.tolist(), refused="another output",
    ),
}  # fmt: skip


# --- random numbers ----------------------------------------------------------------------------------------------


DRAWS: dict[str, Kind] = {
    "python's generator": kind(lambda m, x: m.a(x) * (1 + random.random()), in_order=False),
    "numpy's generator": kind(lambda m, x: m.a(x) * (1 + np.random.rand()), in_order=False),
    "an own Random": kind(lambda m, x: m.a(x) * (1 + m.rng.random()), set_up(rng=lambda: random.Random(1))),
    "an own numpy Generator": kind(
        lambda m, x: m.a(x) * (1 + m.rng.random()), set_up(rng=lambda: np.random.default_rng(1)),
    ),
    "an own RandomState": kind(
        lambda m, x: m.a(x) * (1 + m.rng.rand()), set_up(rng=lambda: np.random.RandomState(1)),
    ),
    "an own Generator in a list": kind(
        lambda m, x: m.a(x) * torch.rand((), generator=m.rng[0], dtype=x.dtype),
        set_up(rng=lambda: [torch.Generator().manual_seed(1)]),
    ),
    "a Generator behind a method": kind(
        lambda m, x: m.a(x) * torch.rand((), generator=m.holder.rng, dtype=x.dtype),
        lambda m: setattr(m, "holder", _holding(torch.Generator().manual_seed(2))),
    ),
    "dropout": kind(lambda m, x: m.b(F.dropout(torch.tanh(m.a(x)), 0.3))),
    "alpha dropout in a module": kind(lambda m, x: m.b(m.drop(m.a(x))), set_up(drop=lambda: nn.AlphaDropout(0.2))),
    "stochastic depth": kind(lambda m, x: x + m.a(x) if float(torch.rand(())) > 0.5 else x + m.b(x)),
    "gumbel routing": kind(lambda m, x: F.gumbel_softmax(m.a(x), hard=True) * m.b(x)),
    "noise of a parameter": kind(lambda m, x: F.linear(x, m.a.weight + 0.1 * torch.randn_like(m.a.weight))),
}  # fmt: skip


def _holding(rng: Any) -> Any:
    holder = Statistics()
    holder.rng = rng  # type: ignore[attr-defined]
    return holder

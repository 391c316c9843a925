"""More kinds (`odd_state.Kind`): modules as people write them, and losses that count."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from odd_layers import WIDTH
from odd_state import ZEROS, Kind, Layer, Statistics, add, buffers, kind, linear, mean, set_up, then
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

# --- modules as people write them ------------------------------------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


def parametrized(how: nn.Module) -> nn.Module:
    layer = linear()
    parametrize.register_parametrization(layer, "weight", how)
    return layer


class Recurrence(nn.Module):
    def __init__(self, cell: Callable[[], nn.Module]):
        super().__init__()
        self.cell = cell()

    def forward(self, x: Tensor) -> Tensor:
        state = None
        out = []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            out.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(out, 1)


class Wrapped(nn.Module):
    """A module applied over the last dimension as channels, or as a sequence."""

    def __init__(self, inner: nn.Module, how: str = "plain"):
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x: Tensor) -> Any:
        if self.how == "channels":
            return self.inner(x.transpose(1, 2)).transpose(1, 2)
        if self.how == "image":
            return self.inner(x[:, None])[:, 0]
        out = self.inner(x)
        return out[0] if isinstance(out, tuple) else out


class Mamba(nn.Module):
    """A scan with a state that is carried from step to step, in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 2 * WIDTH), linear()
        self.decay = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.into(x).chunk(2, -1)
        h, rows = torch.zeros_like(u[:, 0]), []
        for t in range(x.shape[1]):
            h = torch.sigmoid(self.decay) * h + u[:, t]
            rows.append(h)
        return self.out(torch.stack(rows, 1) * F.silu(gate))


class Rotary(nn.Module):
    """A table that grows with the longest sequence seen, kept as a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.a = linear()
        self.register_buffer("table", torch.zeros(0, WIDTH, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < x.shape[1]:
            at = torch.arange(x.shape[1], dtype=x.dtype)
            self.table = torch.sin(at[:, None] * torch.linspace(0.1, 1, WIDTH, dtype=x.dtype))
        return self.a(x) + self.table[: x.shape[1]]


class Sparse(nn.Module):
    """A sparse gradient for an embedding beside a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.table = linear(), nn.Embedding(5, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.table((x.detach() * 10).long().remainder(5)[..., 0])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.detach() * 10).long().remainder(5)[..., 0]
        return self.head(x + self.table(ids)).softmax(-1) @ self.table.weight


def scanned(m: Any, x: Tensor) -> Tensor:
    return torch.stack(list(itertools.accumulate(x.unbind(1), lambda h, u: torch.tanh(m.a(h) + m.b(u)))), 1)


def lazily(m: Any, x: Tensor) -> Tensor:
    return m.lazy(x)


def scripted() -> nn.Module:
    return Wrapped(torch.jit.script(nn.Sequential(linear(), nn.Tanh(), linear()).double()))


def frozen_part(m: Any) -> None:
    m.b.requires_grad_(False)


def norm(build: Callable[[], nn.Module], how: str) -> Kind:
    return Kind(build=lambda: nn.Sequential(linear(), Wrapped(build(), how)))


def plain(build: Callable[[], nn.Module]) -> Kind:
    return Kind(build=build)


MODULES: dict[str, Kind] = {
    "batch norm twice": norm(
        lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)), "channels",
    ),
    "batch norm without statistics": norm(lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False), "channels"),
    "batch norm read by a linear": kind(
        lambda m, x: then(y := m.norm(m.a(x).transpose(1, 2)).transpose(1, 2), y + m.b(m.norm.running_mean)),
        set_up(norm=lambda: nn.BatchNorm1d(WIDTH).double()),
    ),
    "group norm": norm(lambda: nn.GroupNorm(2, WIDTH), "channels"),
    "rms norm": plain(lambda: nn.Sequential(linear(), nn.RMSNorm(WIDTH))),
    "local response norm": plain(lambda: nn.Sequential(linear(), nn.LocalResponseNorm(2))),
    "orthogonal": plain(lambda: parametrizations.orthogonal(linear())),
    "symmetric": plain(lambda: parametrized(Symmetric())),
    "old weight norm": plain(lambda: nn.utils.weight_norm(linear())),
    "spectral norm on a convolution": norm(
        lambda: parametrizations.spectral_norm(nn.Conv1d(WIDTH, WIDTH, 1)), "channels"
    ),
    "pruned": plain(lambda: _pruned()),
    "rnn": plain(lambda: Wrapped(nn.RNN(WIDTH, WIDTH, batch_first=True))),
    "gru of two layers": plain(lambda: Wrapped(nn.GRU(WIDTH, WIDTH, 2, batch_first=True, dropout=0.2))),
    "lstm both ways": plain(lambda: Wrapped(nn.LSTM(WIDTH, 3, batch_first=True, bidirectional=True))),
    "lstm cell": plain(lambda: Recurrence(lambda: nn.LSTMCell(WIDTH, WIDTH))),
    "gru cell": plain(lambda: Recurrence(lambda: nn.GRUCell(WIDTH, WIDTH))),
    "depthwise convolution": norm(lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH), "channels"),
    "transposed convolution": norm(lambda: nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1), "channels"),
    "convolution of two dimensions": norm(lambda: nn.Conv2d(1, 1, 3, padding=1), "image"),
    "encoder layer": plain(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.1, batch_first=True)),
    "attention by scaled_dot_product": kind(
        lambda m, x: F.scaled_dot_product_attention(m.a(x), m.b(x), x, is_causal=True) + x,
    ),
    "attention with dropout": kind(lambda m, x: x + F.scaled_dot_product_attention(m.a(x), m.b(x), x, dropout_p=0.2)),
    "a scan in a loop": plain(Mamba),
    "an accumulated scan": kind(scanned),
    "a table that grows": plain(Rotary),
    "a sparse embedding": plain(Sparse),
    "tied inside": plain(Tied),
    "embedding with max_norm": kind(
        lambda m, x: m.a(x) + m.table((x.detach() * 10).long().remainder(5)[..., 0]),
        set_up(table=lambda: nn.Embedding(5, WIDTH, padding_idx=0, max_norm=1.0)),
    ),
    "embedding bag": kind(
        lambda m, x: m.a(x) + m.table((x.detach() * 10).long().remainder(5)[..., 0])[:, None],
        set_up(table=lambda: nn.EmbeddingBag(5, WIDTH)),
    ),
    "bilinear": plain(lambda: _Twice(nn.Bilinear(WIDTH, WIDTH, WIDTH))),
    "prelu": plain(lambda: nn.Sequential(linear(), nn.PReLU())),
    "relu in place after a linear": plain(lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear())),
    "dropout in place": plain(lambda: nn.Sequential(linear(), nn.Dropout(0.3, inplace=True), linear())),
    "a list of modules": plain(lambda: _Listed()),
    "a dict of modules": plain(lambda: _Chosen()),
    "low rank beside frozen": kind(
        lambda m, x: m.b(x) + (x @ m.down.T) @ m.up.T,
        lambda m: then(
            frozen_part(m), setattr(m, "down", nn.Parameter(torch.randn(2, WIDTH))),
            setattr(m, "up", nn.Parameter(torch.randn(WIDTH, 2))),
        ),
    ),
    "frozen": kind(lambda m, x: m.b(torch.tanh(m.a(x))), lambda m: then(frozen_part(m), m.a.requires_grad_(False))),
    "einsum of three": kind(lambda m, x: torch.einsum("bti,ij,jk->btk", x, m.a.weight, m.b.weight)),
    "a weight used three times": kind(
        lambda m, x: m.a(torch.tanh(m.a(x))) + F.linear(x, m.a.weight[:, :]) + x @ m.a.weight,
    ),
    "slices of a weight": kind(lambda m, x: torch.cat([F.linear(x, w) for w in m.a.weight.chunk(2)], -1)),
    "a weight computed": kind(lambda m, x: F.linear(x, m.a.weight * torch.sigmoid(m.b.weight), m.b.bias)),
    "a stack of weights": kind(lambda m, x: torch.bmm(x, torch.stack([m.a.weight, m.b.weight])[: len(x)])),
    "checkpoint that counts": kind(
        lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False)), set_up(calls=0),
    ),
    "checkpoint with dropout": kind(
        lambda m, x: checkpoint(lambda z: m.b(F.dropout(m.a(z), 0.3)), x, use_reentrant=False),
    ),
    "checkpoint in a checkpoint": kind(
        lambda m, x: checkpoint(lambda z: m.b(checkpoint(m.a, z, use_reentrant=False)), x, use_reentrant=False),
    ),
    "fourier": kind(lambda m, x: m.b(torch.fft.irfft(torch.fft.rfft(m.a(x), dim=-1), n=WIDTH, dim=-1))),
    "complex weight and its modulus": kind(
        lambda m, x: F.linear(torch.complex(x, x), torch.complex(m.a.weight, m.b.weight)).abs(),
    ),
    "sort and gather": kind(lambda m, x: then(y := m.a(x), i := y.argsort(-1), m.b(y.gather(-1, i)))),
    "straight through": kind(lambda m, x: then(y := m.a(x), m.b(y + (y.round() - y).detach()))),
    "padding by where": kind(lambda m, x: torch.where(x > 0, m.a(x), m.b(x))),
    "cumulative product": kind(lambda m, x: torch.sigmoid(m.a(x)).cumprod(1) * m.b(x)),
    "a solve": kind(lambda m, x: torch.linalg.solve(m.a.weight + 3 * torch.eye(WIDTH, dtype=x.dtype), x.mT).mT),
    "an inverse": kind(lambda m, x: x @ torch.linalg.inv(m.a.weight + 4 * torch.eye(WIDTH, dtype=x.dtype)) + m.b(x)),
    "jit": plain(scripted),
    "quantised in training": kind(
        lambda m, x: m.b(torch.fake_quantize_per_tensor_affine(m.a(x), 0.01, 0, -128, 127)),
    ),
    "target network": kind(
        lambda m, x: then(_follow(m), m.a(x) + m.b(x).detach()), frozen_part,
        observe=lambda m: round(float(m.b.weight.detach().sum()), 9), refused="b.weight was changed in place",
    ),
    "queue of negatives": kind(
        lambda m, x: then(
            y := F.normalize(m.a(x), dim=-1), out := y @ m.queue.clone(), m.queue.copy_(torch.roll(m.queue, 1, 1)), out,
        ),
        buffers(queue=torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))),
    ),
    "mean and deviation kept": kind(
        lambda m, x: then(
            y := m.a(x), setattr(m, "mean", 0.9 * m.mean + 0.1 * mean(y)), (y - m.mean) / (1 + m.mean.abs()),
        ),
        set_up(mean=ZEROS.clone), observe=lambda m: m.mean.tolist(),
    ),
}  # fmt: skip


def _follow(m: Any) -> None:
    """A slow copy of a trained weight, changed under no_grad in every forward."""
    with torch.no_grad():
        m.b.weight.copy_(0.9 * m.b.weight + 0.1 * m.a.weight)


def _pruned() -> nn.Module:
    import torch.nn.utils.prune as prune

    return prune.l1_unstructured(linear(), "weight", amount=0.3)


class _Twice(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, torch.tanh(x))


class _Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([linear() for _ in range(3)])
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for part, scale in zip(self.parts, self.scales):
            x = x + torch.tanh(part(x)) * scale
        return x


class _Chosen(nn.Module):
    """One of its parts by the data: the other gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"warm": linear(), "cold": linear()})

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.parts["warm" if float(x.detach().sum()) > 0 else "cold"](x))


# --- losses -----------------------------------------------------------------------------------------------------------


class CountingLoss(nn.Module):
    """Counts in every way that losses do."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.calls, self.log = how, 0, []
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.meter = Statistics()

    def forward(self, output: Any, target: Tensor) -> Tensor:
        output = output[0] if isinstance(output, tuple) else output
        loss = (output - target).square().mean()
        if self.how == "attribute":
            self.calls += 1
            loss = loss * (1 + 0.1 * (self.calls % 2))
        elif self.how == "list":
            self.log.append(round(float(loss.detach()), 9))
        elif self.how == "buffer":
            self.total += loss.detach()
            loss = loss * (1 + self.total)
        else:
            self.meter.seen += 1
            self.meter.total += float(loss.detach())
            loss = loss + 0.1 * self.meter.total / self.meter.seen
        return loss


def counting_function() -> Any:
    log: list[float] = []

    def loss(output: Any, target: Tensor) -> Tensor:
        value = (output - target).square().mean()
        log.append(round(float(value.detach()), 9))
        return value * (1 + 0.01 * len(log))

    loss.observe = lambda: list(log)  # type: ignore[attr-defined]
    return loss


def metered(how: str) -> Callable[[], Any]:
    def make() -> Any:
        loss = CountingLoss(how)
        loss.observe = lambda: (loss.calls, loss.log, round(float(loss.total), 9), loss.meter.seen)
        return loss

    return make


LOSSES: dict[str, Kind] = {
    f"a loss that counts in its {how}": Kind(build=linear, loss=metered(how))
    for how in ("attribute", "list", "buffer", "meter")
} | {"a loss that counts in a closure": Kind(build=linear, loss=counting_function)}
LOSSES |= {
    "the last layer and the loss count": Kind(
        build=lambda: Layer(lambda m, x: then(add(m, "calls", 1), m.a(x) * (1 + 0.1 * (m.calls % 3))), set_up(calls=0)),
        observe=lambda m: m.calls, loss=metered("meter"),
    )
}  # fmt: skip

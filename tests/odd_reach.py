"""More kinds (`odd_state.Kind`): hooks of every sort, side effects, losses with state, gradients taken inside backward,
and modules as people write them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from odd_layers import WIDTH
from odd_state import ZEROS, Kind, Layer, Statistics, add, buffers, kind, linear, mean, set_up, then
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

# --- what a forward leaves behind -------------------------------------------------------------------------------------


class AuxList(nn.Module):
    """Appends an auxiliary loss to a list of its own and adds what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.aux = linear(), []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.aux.clear()
        y = torch.tanh(self.a(x))
        self.aux.append(y.square().mean())
        return y, sum(self.aux)


def routed(m: Any, x: Tensor) -> Tensor:
    """A mixture of two experts with a router's statistics and its loss in attributes."""
    weights = m.gate(x).softmax(-1)
    m.load += weights.detach().mean((0, 1))
    m.aux = (weights.mean((0, 1)) ** 2).sum()
    return weights[..., :1] * m.a(x) + weights[..., 1:] * m.b(x) + 0.01 * m.aux


def top_one(m: Any, x: Tensor) -> Tensor:
    flat = x.reshape(-1, WIDTH)
    scores = m.gate(flat).softmax(-1)
    best, which = scores.max(-1)
    out = torch.zeros_like(flat)
    for k, expert in enumerate((m.a, m.b)):
        rows = (which == k).nonzero()[:, 0]
        m.tokens[k] += len(rows)
        out = out.index_add(0, rows, expert(flat[rows]) * best[rows, None])
    return out.view_as(x)


def gated(m: Any) -> None:
    m.gate = nn.Linear(WIDTH, 2)


LEFT: dict[str, Kind] = {
    "an auxiliary loss in a list": Kind(build=AuxList, observe=lambda m: len(m.aux)),
    "calls in a list": kind(
        lambda m, x: then(m.log.append(float(x.detach().sum())), m.a(x)), set_up(log=list), observe=lambda m: m.log,
    ),
    "values in a dict of lists": kind(
        lambda m, x: then(m.log.setdefault("x", []).append(x.detach().sum().item()), m.a(x)),
        set_up(log=dict), observe=lambda m: m.log,
    ),
    "the number of tokens": kind(
        lambda m, x: then(add(m, "tokens", x.numel()), m.a(x)), set_up(tokens=0), observe=lambda m: m.tokens,
    ),
    "tokens in a buffer": kind(
        lambda m, x: then(m.tokens.add_(x.numel()), m.a(x)), buffers(tokens=torch.zeros((), dtype=torch.long)),
    ),
    "tokens in a plain tensor": kind(
        lambda m, x: then(m.tokens.add_(x.numel()), m.a(x)),
        set_up(tokens=lambda: torch.zeros(())), observe=lambda m: float(m.tokens),
    ),
    "a router's load and loss": kind(
        routed, lambda m: then(gated(m), buffers(load=torch.zeros(2, dtype=torch.float64))(m)),
        observe=lambda m: float(m.aux.detach()),
    ),
    "experts by their best": kind(
        top_one, lambda m: then(gated(m), buffers(tokens=torch.zeros(2, dtype=torch.long))(m)),
    ),
    "keeps its output": kind(
        lambda m, x: then(y := m.a(x), setattr(m, "out", y.detach().sum().item()), y), set_up(out=None),
        observe=lambda m: round(m.out, 9),
    ),
    "keeps its output with its graph": kind(
        lambda m, x: then(y := torch.tanh(m.a(x)), setattr(m, "out", y), y + m.b(x)), set_up(out=None),
        observe=lambda m: round(float(m.out.detach().sum()), 9),
    ),
    "memory of one shape": kind(
        lambda m, x: m.a(x) * m.cache.setdefault(tuple(x.shape), torch.linspace(1, 2, WIDTH, dtype=x.dtype)),
        set_up(cache=dict), observe=lambda m: len(m.cache),
    ),
    "memory by functools": kind(
        lambda m, x: m.a(x) * m.factor(x.shape[-1]),
        lambda m: setattr(m, "factor", functools.lru_cache(lambda n: torch.linspace(1, 2, n, dtype=torch.float64))),
    ),
    "an observer for quantisation": kind(
        lambda m, x: then(
            y := m.a(x), m.low.copy_(torch.minimum(m.low, y.detach().min())),
            m.high.copy_(torch.maximum(m.high, y.detach().max())),
            torch.fake_quantize_per_tensor_affine(y, float((m.high - m.low).clamp(min=1e-3)) / 255, 0, -128, 127),
        ),
        buffers(low=torch.zeros((), dtype=torch.float64), high=torch.zeros((), dtype=torch.float64)),
    ),
    "a mean of its weights": kind(
        lambda m, x: then(m.shadow.lerp_(m.a.weight.detach(), 0.1), m.a(x) + F.linear(x, m.shadow)),
        buffers(shadow=torch.zeros(WIDTH, WIDTH, dtype=torch.float64)),
    ),
}  # fmt: skip


# --- hooks ------------------------------------------------------------------------------------------------------------


def forward_hook_counts(m: Any) -> None:
    m.stats = Statistics()
    m.b.register_forward_hook(lambda mod, i, o: m.stats.history.append(round(float(o.detach().sum()), 9)))


def kept_by_hook(m: Any) -> None:
    kept: list[Tensor] = []
    m.kept = kept
    m.b.register_forward_hook(lambda mod, i, o: then(kept.clear(), kept.append(o.detach())))


def hook_once(m: Any) -> None:
    """A hook that takes itself away when it has run."""
    m.stats = Statistics()

    def run(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        handle.remove()
        m.stats.seen += 1
        return output * 1.0

    handle = m.a.register_forward_hook(run)


def counts_gradients(m: Any) -> None:
    m.stats = Statistics()
    m.a.weight.register_hook(lambda g: add(m.stats, "seen", 1) and None)


def after_accumulation(m: Any) -> None:
    m.stats = Statistics()
    m.a.weight.register_post_accumulate_grad_hook(lambda p: add(m.stats, "seen", 1) and None)


def on_the_adding_node(m: Any) -> None:
    """As Megatron, apex, Horovod and DeepSpeed do."""
    m.stats, m.nodes = Statistics(), []
    for p in (m.a.weight, m.b.weight):
        node = p.expand_as(p).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: add(m.stats, "seen", 1) and None)
        m.nodes.append(node)


def prehook_on_the_adding_node(m: Any) -> None:
    m.stats, m.nodes = Statistics(), [torch.autograd.graph.get_gradient_edge(m.a.weight).node]
    m.nodes[0].register_prehook(lambda g: then(add(m.stats, "seen", 1), (2 * g[0],)))


def retains(m: Any, x: Tensor) -> Tensor:
    if x.requires_grad and not x.is_leaf:
        x.retain_grad()
        m.kept = x
    return torch.tanh(m.a(x)) + 0.1 * x


def kept_gradient(m: Any) -> Any:
    grad = m.kept.grad
    return None if grad is None else [round(v, 9) for v in grad.flatten().tolist()]


def hook_on_input(m: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda g: then(add(m.stats, "seen", 1), 2 * g))
    return torch.tanh(m.a(x))


def hook_on_output(m: Any, x: Tensor) -> Tensor:
    y = torch.tanh(m.a(x))
    if y.requires_grad:
        y.register_hook(lambda g: then(add(m.stats, "seen", 1), 0.5 * g))
    return y


def grad_in_place_hook(m: Any, x: Tensor) -> Tensor:
    """A hook that changes the gradient it is given, which two branches share."""
    y = m.a(x)
    z = y.clone()
    z.register_hook(lambda g: g.clone().mul_(2))
    return z + m.b(y)


HOOKS: dict[str, Kind] = {
    "a forward hook that counts": kind(
        lambda m, x: x + m.b(torch.tanh(m.a(x))), forward_hook_counts, observe=lambda m: m.stats.history,
    ),
    "a forward hook that keeps": kind(
        lambda m, x: x + m.b(torch.tanh(m.a(x))), kept_by_hook,
        observe=lambda m: [round(float(t.sum()), 9) for t in m.kept],
    ),
    "a forward hook that runs once": kind(lambda m, x: m.a(x), hook_once, observe=lambda m: m.stats.seen),
    "a forward pre-hook": kind(
        lambda m, x: m.b(m.a(x)), lambda m: m.b.register_forward_pre_hook(lambda mod, i: (2 * i[0],)),
    ),
    "a hook on a weight that counts": kind(lambda m, x: m.b(m.a(x)), counts_gradients, observe=lambda m: m.stats.seen),
    "a hook after accumulation": kind(lambda m, x: m.b(m.a(x)), after_accumulation, observe=lambda m: m.stats.seen),
    "a hook on the adding node": kind(lambda m, x: m.b(m.a(x)), on_the_adding_node, observe=lambda m: m.stats.seen),
    "a pre-hook on the adding node": kind(
        lambda m, x: m.b(m.a(x)), prehook_on_the_adding_node, observe=lambda m: m.stats.seen,
    ),
    "a full backward hook": kind(
        lambda m, x: m.b(m.a(x)), lambda m: m.b.register_full_backward_hook(lambda mod, gi, go: (3 * gi[0],)),
    ),
    "a full backward pre-hook": kind(
        lambda m, x: m.b(m.a(x)), lambda m: m.a.register_full_backward_pre_hook(lambda mod, go: (2 * go[0],)),
    ),
    "the gradient of its input": kind(retains, set_up(kept=None), observe=kept_gradient),
    "a hook on its input": kind(hook_on_input, set_up(stats=Statistics), observe=lambda m: m.stats.seen),
    "a hook on its output": kind(hook_on_output, set_up(stats=Statistics), observe=lambda m: m.stats.seen),
    "a gradient changed by a hook": kind(grad_in_place_hook),
    "an optimizer inside backward": kind(
        lambda m, x: m.b(m.a(x)),
        lambda m: m.a.weight.register_post_accumulate_grad_hook(
            lambda p: then(p.data.add_(p.grad, alpha=-0.1), p.add_(0) if not p.requires_grad else None, _bump(p))
        ),
        refused_always="changed inside backward",
    ),
}  # fmt: skip


def _bump(p: Tensor) -> None:
    with torch.no_grad():
        p.mul_(1.0)


# --- gradients taken inside backward ------------------------------------------------------------------------------


def fixed_point(m: Any, x: Tensor) -> Tensor:
    """A deep equilibrium layer: the backward solves a fixed point by `autograd.grad` in a tensor hook."""

    def f(z: Tensor) -> Tensor:
        return torch.tanh(0.3 * m.a(z) + x)

    with torch.no_grad():
        z = torch.zeros_like(x)
        for _ in range(20):
            z = f(z)
    z = f(z)
    if torch.is_grad_enabled() and z.requires_grad:
        start = z.detach().requires_grad_()
        again = f(start)

        def solve(g: Tensor) -> Tensor:
            u = g
            for _ in range(10):
                u = torch.autograd.grad(again, start, u, retain_graph=True)[0] + g
            return u

        z.register_hook(solve)
    return z


def asks_for_weights(m: Any, x: Tensor) -> Tensor:
    """A tensor hook that wants the gradient of a weight, for its norm."""
    y = torch.tanh(m.a(x))
    z = m.b(y.detach().requires_grad_()) if torch.is_grad_enabled() else m.b(y)
    out = m.b(y)
    if torch.is_grad_enabled() and out.requires_grad:

        def scaled(g: Tensor) -> Tensor:
            (gw,) = torch.autograd.grad(z, m.b.weight, g, retain_graph=True)
            return g / (1 + gw.norm())

        out.register_hook(scaled)
    return out


def adjoint(m: Any, x: Tensor) -> Tensor:
    """A reversible-style function: its backward builds a graph and differentiates it."""
    return Reversed.apply(x, m.a, *m.a.parameters())


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, *params: Tensor) -> Tensor:
        ctx.layer, ctx.params = layer, params
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x + torch.tanh(layer(x))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x + torch.tanh(ctx.layer(x))
        gx, *rest = torch.autograd.grad(y, [x, *ctx.params], g)
        return gx, None, *rest


def energy(m: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        z = x if x.requires_grad else x.detach().requires_grad_()
        (force,) = torch.autograd.grad(m.a(z).square().sum(), z, create_graph=True)
    return m.b(x) + force


INSIDE: dict[str, Kind] = {
    "a fixed point solved in backward": kind(fixed_point),
    "a hook that asks for a weight's gradient": kind(asks_for_weights),
    "a function that runs again in backward": kind(adjoint),
    "forces counted": kind(
        lambda m, x: then(add(m, "calls", 1), energy(m, x)), set_up(calls=0), observe=lambda m: m.calls,
    ),
    "a jacobian": kind(lambda m, x: m.a(x) + 0.1 * vmap(jacrev(m.b))(x.reshape(-1, WIDTH)).sum(1).view_as(x)),
    "a forward derivative": kind(lambda m, x: jvp(m.a, (x,), (torch.ones_like(x),))[1] + m.b(x)),
    "functional_call": kind(
        lambda m, x: functional_call(m.a, {"weight": m.a.weight * 2, "bias": m.a.bias + m.b.bias}, (x,)),
    ),
    "an ensemble by vmap": kind(
        lambda m, x: vmap(lambda w: torch.tanh(x @ w.T))(torch.stack([m.a.weight, m.b.weight])).mean(0),
    ),
}  # fmt: skip


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

"""More kinds (`odd_state.Kind`): side effects, hooks of every sort, gradients taken inside backward."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from odd_layers import WIDTH
from odd_state import Kind, Statistics, add, buffers, kind, linear, set_up, then
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vmap

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

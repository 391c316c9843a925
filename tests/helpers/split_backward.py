"""The split backward of some modules beside plain autograd, in float64."""

import pytest

torch = pytest.importorskip("torch")

from octopipe.runtime.stages.stage import Stage  # noqa: E402

TOLERANCE = 1e-12


def parameters_of(modules):
    return list(dict.fromkeys(p for m in modules for p in m.parameters()))


def close(a, b, tolerance=TOLERANCE):
    if a is None or b is None:
        return a is None and b is None
    return bool((a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max())))


def plain_gradients(modules, batches, then=None):
    """Gradients of a plain run: (of every parameter, of every input)."""
    for p in parameters_of(modules):
        p.grad = None
    input_grads = []
    for seed, x in enumerate(batches):
        torch.manual_seed(seed)
        y = x = x.detach().clone().requires_grad_(x.is_floating_point())
        for m in modules:
            y = m(y)
        y = (y if then is None else then(y)).double().square().sum()
        y.backward()
        input_grads.append(x.grad)
    return [p.grad for p in parameters_of(modules)], input_grads


def split_gradients(modules, batches, ops, then=None):
    """The same through a Stage. `ops` is "B", "IW" or "RIW"; I and W of all micro-batches are far apart."""
    for p in parameters_of(modules):
        p.grad = None
    stage = Stage(modules)
    runs, input_grads = [], []
    for seed, x in enumerate(batches):
        torch.manual_seed(seed)
        runs.append(stage.forward(x, then=then, recompute="R" in ops))
    for run in runs:
        y = run.outputs
        if "R" in ops:
            run.recompute()
        grads = run.backward_full(2 * y) if ops == "B" else run.backward_input(2 * y)
        input_grads.append(grads[0])
    if ops != "B":
        for run in runs:
            run.backward_weight()
    return [p.grad for p in parameters_of(modules)], input_grads


def check_split(modules, batches, then=None, *, deferred=None):
    modules = [m.double() for m in modules]
    want, want_inputs = plain_gradients(modules, batches, then)
    for ops in ("B", "IW", "RIW"):
        got, got_inputs = split_gradients(modules, batches, ops, then)
        assert all(close(a, b) for a, b in zip(got, want, strict=True)), ops
        assert all(close(a, b) for a, b in zip(got_inputs, want_inputs, strict=True)), ops
    if deferred is not None:
        assert count_deferred(modules, batches[0], then) == deferred


def count_deferred(modules, x, then=None):
    run = Stage(modules).forward(x, then=then)
    run.backward_input(torch.ones_like(run.outputs))
    count = len(run._queue)
    run.backward_weight()
    return count


def random_batches(*shape, n=3):
    g = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, dtype=torch.float64, generator=g) for _ in range(n)]

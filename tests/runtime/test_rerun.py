"""R leaves out the stage's last product where nobody reads it, and nowhere else; gradients never change."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402

from octopipe.runtime.stages.stage import Stage, StageRun  # noqa: E402

WIDTH = 6


class Odd(torch.autograd.Function):
    """A function that no mode sees; its backward reads its input."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return 2 * g * ctx.saved_tensors[0]


class Layer(nn.Module):
    def __init__(self, end: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(x, self.down(torch.tanh(self.up(x))))


UNREAD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "alone": lambda x, y: y,
    "added": lambda x, y: x + y,
    "added twice": lambda x, y: torch.add(x + y, y, alpha=3),
    "viewed": lambda x, y: (x + y).view(-1, WIDTH // 2),
}
READ: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "activation": lambda x, y: x + torch.tanh(y),
    "norm of the sum": lambda x, y: torch.nn.functional.layer_norm(x + y, (WIDTH,)),
    "also squared": lambda x, y: x + y + y * y,
    "a factor without gradient": lambda x, y: x * y.detach() + y,
    "own function": lambda x, y: x + Odd.apply(y),
    "own function beside": lambda x, y: x + y + Odd.apply(y),
    "own functions beside": lambda x, y: x + y + Odd.apply(Odd.apply(y)),
}


def run(stage: Stage, x: Tensor, again: bool, split: bool) -> Tensor | None:
    passed: StageRun = stage.forward(x, recompute=again)
    g = torch.linspace(-1, 1, passed.outputs.numel(), dtype=x.dtype).view_as(passed.outputs)
    if again:
        passed.recompute()
    if split:
        found = passed.backward_input([g])
        passed.backward_weight()
    else:
        found = passed.backward_full([g])
    stage.end_step()
    return found[0]


def same_gradients(modules: list[nn.Module], *, input_grad: bool = True, rounds: int = 5) -> Stage:
    """Several micro-batches with R against the same without; returns the stage that ran again."""
    plain, again = Stage(modules, input_grad=input_grad), Stage(modules, input_grad=input_grad)
    for k in range(rounds):
        x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        results = []
        for stage, recompute in ((plain, False), (again, True)):
            for module in modules:
                module.zero_grad()
                module.round = k
            torch.manual_seed(k)
            dx = run(stage, x, recompute, split=bool(k % 2))
            results.append([dx, *(p.grad for m in modules for p in m.parameters())])
        for a, b in zip(*results, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(b, a, rtol=1e-13, atol=1e-13)
    return again


def layers(end: Callable[[Tensor, Tensor], Tensor]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Layer(UNREAD["added"]).double(), Layer(end).double()]


@pytest.mark.parametrize("end", UNREAD)
@pytest.mark.parametrize("input_grad", [True, False])
def test_a_product_nobody_reads_is_left_out(end: str, input_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from octopipe.runtime.stages import rerun

    left_out = []
    apply = rerun.LeftOut.apply
    monkeypatch.setattr(rerun.LeftOut, "apply", lambda *a: (left_out.append(a[1]), apply(*a))[1])
    modules = layers(UNREAD[end])
    same_gradients(modules, input_grad=input_grad)
    # In the first two of five steps R is compared with F.
    assert len(left_out) == 3 and all(w is modules[1].down.weight for w in left_out)


@pytest.mark.parametrize("end", READ)
def test_a_product_somebody_reads_is_computed(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from octopipe.runtime.stages import rerun

    monkeypatch.setattr(rerun.LeftOut, "apply", lambda *a: pytest.fail("left out"))
    same_gradients(layers(READ[end]))


class Changing(nn.Module):
    """Ends otherwise in the fourth step."""

    def __init__(self, other: Callable[[Tensor, Tensor], Tensor], dropout: float = 0.0):
        super().__init__()
        self.inner, self.other, self.round = Layer(UNREAD["added"]), other, 0
        self.more, self.dropout = nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        y = torch.dropout(x, self.dropout, self.dropout > 0)
        return self.other(y, self.inner(y)) if self.round == 3 else self.inner(y)


@pytest.mark.parametrize("input_grad", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("other", ["activation", "own function", "another linear"])
def test_a_forward_that_takes_another_way_is_repeated_in_full(other: str, dropout: float, input_grad: bool) -> None:
    module = Changing(READ.get(other, lambda x, y: x), dropout)
    if other == "another linear":
        module.other = lambda x, y: module.more(y)
    modules: list[nn.Module] = [module.double()]
    stage = same_gradients(modules, input_grad=input_grad, rounds=6)
    assert stage.rerun._leave_out == 0


def test_autocast_computes_all() -> None:
    torch.manual_seed(0)
    stage = Stage([Layer(UNREAD["added"])])
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run(stage, torch.randn(4, WIDTH), True, True)
    assert all(p.grad is not None for p in stage.modules[0].parameters())

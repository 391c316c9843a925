"""A loss with parameters of its own is trained, clipped and saved like a layer, as in one process."""

from __future__ import annotations

import pytest
from effort import some

torch = pytest.importorskip("torch")
from mesh_checks import mesh_of  # noqa: E402
from ranks import PATIENCE_S  # noqa: E402
from small_pipelines import COUNT, EXACT, LAYERS, WIDTH, data, linears, plainly, plan_of, square  # noqa: E402
from torch import nn  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.ranks.loss_parts import loss_module  # noqa: E402
from octopipe.runtime.training.checkpoint import checkpoints, load_checkpoint, save_checkpoint  # noqa: E402

# -- a loss with parameters -----------------------------------------------------------------------------


class Weighted(nn.Module):
    """A loss that learns what every column counts."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

    def forward(self, output, target):
        return ((output - target) * self.scale).square().mean() - self.scale.log().mean()


def make_loss(kind, layers):
    """The loss as a module, a function that closes over one, and one tied to the first layer."""
    module = Weighted()
    if kind == "module":
        return module, lambda m: m
    if kind == "closure":
        return (lambda output, target: module(output, target)), lambda m: module
    if kind == "method":
        return module.forward, lambda m: module

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = layers[0].weight

        def forward(self, output, target):
            return (output @ self.weight - target).square().mean()

    return Tied(), lambda m: m


def _apart(ours, keep, name):
    """A closure names the module it holds."""
    return float((ours - keep[name.replace("module.", "")]).detach().abs().max())


def loss_trained(world, kind, name, dp, folder):
    mesh = mesh_of((2, 2), ("dp", "pp")) if dp else None
    total = COUNT * (2 if dp else 1)
    twin = linears()
    plain_loss, inner = make_loss(kind, twin)
    module = inner(plain_loss)
    every = list(dict.fromkeys([*(p for m in twin for p in m.parameters()), *module.parameters()]))
    norms = []
    optimizer = torch.optim.AdamW(every, lr=0.05)
    batches = data(total)
    for _ in range(3):
        optimizer.zero_grad()
        expected = plainly(twin, plain_loss, batches)
        norms.append(float(torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in every]))))
        torch.nn.utils.clip_grad_norm_(every, 0.5)
        optimizer.step()
    layers = linears()
    loss_fn, inner = make_loss(kind, layers)
    options = {"mesh": mesh} if dp else {"group": world}
    out = []
    with Pipeline(layers, plan_of(name), loss_fn, timeout_s=PATIENCE_S, **options) as pipe:
        mine = batches[COUNT * pipe.world.replica :][:COUNT]
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            loss = float(pipe.step(mine, mine))
            out.append(abs(float(pipe.clip_grad_norm_(0.5)) - norms[step]))
            optimizer.step()
            if step == 1:
                save_checkpoint(folder, pipe, optimizer, step=2)
        out.append(abs(loss - expected[0]))
        keep = {f"{k}.{n}": p for k, m in enumerate([*twin, module]) for n, p in m.named_parameters()}
        for number, part in pipe.modules().items():
            out += [_apart(p, keep, f"{number}.{n}") for n, p in part.named_parameters()]
        has = LAYERS in pipe.modules()
    # The same from the checkpoint, under another plan.
    layers = linears(seed=7)
    loss_fn, _ = make_loss(kind, layers)
    other = "1f1b" if name != "1f1b" else "zb-h1"
    with Pipeline(layers, plan_of(other), loss_fn, timeout_s=PATIENCE_S, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        load_checkpoint(checkpoints(folder)[-1], pipe, optimizer)
        loss = float(pipe.step(mine, mine))
        pipe.clip_grad_norm_(0.5)
        optimizer.step()
        out.append(abs(loss - expected[0]))
        for number, part in pipe.modules().items():
            out += [_apart(p, keep, f"{number}.{n}") for n, p in part.named_parameters()]
    return has, max(out)


TRAINED = [
    (kind, name, dp)
    for name, dp in (("chimera", False), ("1f1b", True), ("1f1b", False), ("zb-v", False))
    for kind in ("module", "closure", "method", "tied")
]


@pytest.mark.parametrize(
    "case", some(TRAINED, quick=[TRAINED[0], TRAINED[3], TRAINED[5], TRAINED[6], TRAINED[7]]), ids=str
)
def test_a_loss_with_parameters_is_trained_like_a_layer(case, two, four, tmp_path):
    kind, name, dp = case
    results = (four if dp else two).run(loss_trained, kind, name, dp, tmp_path)
    assert any(has for has, _ in results)
    for _, apart in results:
        assert apart <= EXACT


def test_what_a_loss_only_refers_to_is_not_its_own():
    layers = linears()
    model = nn.Sequential(*layers)
    teacher = nn.Linear(2, 2).requires_grad_(False)
    assert loss_module(lambda o, t: model.training and square(o, t), layers) is None
    assert loss_module(lambda o, t: teacher(o).sum(), layers) is None
    assert loss_module(square, layers) is None
    assert loss_module(nn.MSELoss(), layers) is None

    def again(output, target):
        return again if target is None else square(output, target)

    assert loss_module(again, layers) is None


def without_loss(world, folder):
    texts = []
    for kind, saves in (("module", True), (None, False)):
        layers = linears()
        loss_fn = square if kind is None else make_loss(kind, layers)[0]
        with Pipeline(layers, plan_of("1f1b"), loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
            try:
                if saves:
                    save_checkpoint(folder, pipe, step=1)
                else:
                    load_checkpoint(checkpoints(folder)[0], pipe)
            except OctoPipeError as error:
                texts.append(str(error))
    return texts


def test_a_checkpoint_of_another_loss_is_refused(two, tmp_path):
    for texts in two.run(without_loss, tmp_path):
        assert len(texts) == 1 and "use the same loss_fn" in texts[0]

"""What a Pipeline is given by mistake is told in one line, before anything runs or is lost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import numpy as np  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.ranks.world import World  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

WIDTH, LAYERS, COUNT = 4, 3, 4
PLAN = build_plan("1f1b", CostTable.uniform(num_layers=LAYERS), 1, COUNT)


def linears() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS)]


def square(output: Tensor, target: Any) -> Tensor:
    return (output - torch.as_tensor(target)).square().mean()


def batch(rows: int = 2 * COUNT) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, rows, WIDTH, dtype=torch.float64, generator=generator)
    return x, y


def pipeline(layers: Any = None, plan: Any = PLAN, loss: Any = square, **more: Any) -> Pipeline:
    return Pipeline(linears() if layers is None else layers, plan, loss, group=World(None), **more)


def in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.BatchNorm1d(WIDTH)


GIVEN: dict[str, tuple[Callable[[], Any], str]] = {
    "a generator": (lambda: pipeline(layer for layer in linears()), "layers is a generator; give a list"),
    "one module": (lambda: pipeline(nn.Linear(2, 2)), "layers is a Linear; give a list"),
    "a dict of layers": (lambda: pipeline(dict(enumerate(linears()))), "layers is a dict; give a list"),
    "a function for a layer": (lambda: pipeline([*linears()[1:], torch.tanh]), "layer 2 is tanh, which takes arg"),
    "a lambda for a layer": (lambda: pipeline([*linears()[1:], lambda x: x]), "layer 2 is <lambda>, which takes"),
    "a path": (lambda: pipeline(plan="plan.json"), "plan is a str; load the file"),
    "no plan": (lambda: pipeline(plan=None), "plan is a NoneType; give a Plan"),
    "a class of losses": (lambda: pipeline(loss=nn.MSELoss), r"give an object of it \(MSELoss\(\)\)"),
    "no loss": (lambda: pipeline(loss=None), "loss_fn is a NoneType; give a function"),
    "a lazy layer": (lambda: pipeline([nn.LazyLinear(4), *linears()[1:]]), "layer 0: weight has no shape yet"),
    "a layer without values": (
        lambda: pipeline([nn.Linear(4, 4, device="meta"), *linears()[1:]]), "layer 0: weight is on the meta device",
    ),
    "a layer of inference mode": (lambda: pipeline([in_inference_mode(), *linears()[1:]]), "made in torch.inference_m"),
    "the name of a dtype": (lambda: pipeline(autocast="bf16"), "autocast is a str; give a dtype"),
    "a context": (lambda: pipeline(autocast=torch.autocast("cpu")), "autocast is a autocast; give a dtype"),
    "no target": (lambda: pipeline().step(batch()[0]), "rank 0 holds a last stage.*give it the target"),
    "no target to evaluate": (lambda: pipeline().evaluate(batch()[0]), "rank 0 holds a last stage"),
    "numbers for ties": (lambda: pipeline(tied=[0, 1]), r"tied holds something else.*write \[\('0.weight'"),
    "one tie without its list": (lambda: pipeline(tied=("0.weight", "1.weight")), "tied holds something else"),
    "text for seconds": (lambda: pipeline(timeout_s="30"), "timeout_s is '30'; give a number of seconds > 0"),
    "seconds that are no number": (lambda: pipeline(timeout_s=float("nan")), "timeout_s is nan; give a number"),
    "text for a seed": (lambda: pipeline(seed="1"), "seed is '1'; give an integer"),
    "an unknown device": (lambda: pipeline(device="gpu"), "unknown device 'gpu'; give cpu"),
    "a GPU too many": (lambda: pipeline(device="cuda:99"), "device cuda:99: this process sees"),
    "one name for side inputs": (lambda: pipeline(side_inputs="mask"), "side_inputs is 'mask'; give a list"),
    "a list of sharded names": (lambda: pipeline(sharded=["a"]), "sharded is not a mapping"),
    "one sharded name": (lambda: pipeline(sharded={"ep": "*.w"}), "sharded is not a mapping to lists"),
    "an unknown transport": (lambda: pipeline(transport="tcp"), "unknown transport 'tcp'; one of gloo"),
    "a number for costs": (lambda: pipeline(costs=3), "costs is a int; give a CostTable"),
    "a number for a group": (lambda: Pipeline(linears(), PLAN, square, group=3), "group is a int; give a proc"),
    "a name for a mesh": (lambda: Pipeline(linears(), PLAN, square, mesh="pp"), "mesh is a str; give a DeviceMesh"),
    "a norm of order 0": (lambda: pipeline().clip_grad_norm_(1.0, 0), "norm_type is 0; give a number > 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_a_slip_is_told_where_it_was_made(name: str) -> None:
    make, words = GIVEN[name]
    with pytest.raises(OctoPipeError, match=words):
        make()


LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a pair": lambda o, y: (square(o, y), 1),
    "a dict": lambda o, y: {"loss": square(o, y)},
    "nothing": lambda o, y: None,
    "one for every row": lambda o, y: (o - y).square().mean(1),
    "complex": lambda o, y: torch.complex(square(o, y), square(o, y)),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("way", ["step", "evaluate"])
def test_a_loss_that_is_not_one_real_number_is_refused(name: str, way: str) -> None:
    with (
        pipeline(loss=LOSSES[name]) as pipe,
        pytest.raises(OctoPipeError, match=r"loss_fn (must return|returned a comp)"),
    ):
        getattr(pipe, way)(*batch())


@pytest.mark.parametrize("way", ["step", "evaluate"])
def test_one_row_of_a_target_is_not_repeated_for_a_micro_batch(way: str) -> None:
    x, y = batch()
    with pipeline() as pipe, pytest.raises(OctoPipeError, match="2 rows of output and one of the target"):
        getattr(pipe, way)(x, y[:COUNT])  # (8, 4) - (4, 4) is an error without micro-batches


def test_a_target_may_have_rows_of_its_own() -> None:
    """As many as the output has where a layer pools rows, and one for each micro-batch where the user says so."""
    x, y = batch()
    pool = nn.Unflatten(0, (-1, 2))
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), pool, Mean()), *linears()[1:]]
    with pipeline(layers) as pipe:
        whole = square(layers[2](layers[1](layers[0](x))), y[:COUNT])
        assert torch.allclose(pipe.step(x, y[:COUNT]), whole)
    layers = linears()
    with pipeline(layers) as pipe:
        parts = [square(layers[2](layers[1](layers[0](a))), b) for a, b in zip(x.split(2), y[:COUNT].split(1))]
        assert torch.allclose(pipe.step(x, list(y[:COUNT].split(1))), torch.stack(parts).mean())


@pytest.mark.parametrize("way", ["step", "evaluate"])
def test_one_row_of_output_is_not_repeated_for_a_micro_batch(way: str) -> None:
    x, y = batch()
    with pipeline() as pipe, pytest.raises(OctoPipeError, match="one row of output and 2 of the target"):
        getattr(pipe, way)(x[:COUNT], y)


def pooled(output: Tensor, target: Tensor) -> Tensor:
    return square(output.unflatten(0, (len(target), -1)).mean(1), target)


class Pooled(nn.Module):
    calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return pooled(output, target)


@pytest.mark.parametrize("loss", [pooled, Pooled(), functools.partial(pooled)])
def test_a_loss_may_pool_the_rows_of_a_target(loss: Any) -> None:
    """With one row of the target in every micro-batch as with several."""
    x, y = batch()
    layers = linears()
    with pipeline(layers, loss=loss) as pipe:
        whole = pooled(layers[2](layers[1](layers[0](x))), y[:COUNT])
        assert torch.allclose(pipe.step(x, y[:COUNT]), whole)
        assert torch.allclose(pipe.evaluate(x, y[:COUNT]), whole)
    assert not isinstance(loss, Pooled) or loss.calls == 2 * COUNT


def test_options_may_be_read_only_once() -> None:
    """Iterators count as the lists of what they yield."""
    with pipeline(tied=zip(["0.weight"], ["2.weight"])) as pipe:
        pipe.step(*batch())
        named = dict(pipe.named_parameters())
        assert "2.weight" not in named or named["2.weight"] is named["0.weight"]
    with pipeline(tied=((f"{k}.weight" for k in (0, 2)) for _ in range(1))) as pipe:
        named = dict(pipe.named_parameters())
        assert "2.weight" not in named or named["2.weight"] is named["0.weight"]
    layers = [Masked(), *linears()[1:]]
    with pipeline(layers, side_inputs=iter(["mask"])) as pipe:
        assert pipe.side_inputs == ("mask",)


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if mask is None else x * mask


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def test_a_loss_without_a_target_needs_none() -> None:
    with pipeline(loss=lambda output: output.square().mean()) as pipe:
        assert float(pipe.step(batch()[0])) > 0
        assert pipe.forward(batch()[0]).shape == (2 * COUNT, WIDTH)


def test_a_closed_pipeline_takes_no_steps() -> None:
    pipe = pipeline()
    pipe.close()
    pipe.close()
    for call in (pipe.step, pipe.evaluate):
        with pytest.raises(OctoPipeError, match="this pipeline was closed; make a new"):
            call(*batch())


def test_gradients_are_set_to_zero_or_taken_away() -> None:
    with pipeline() as pipe:
        pipe.step(*batch())
        pipe.zero_grad(set_to_none=False)
        assert all(p.grad is not None and not p.grad.any() for p in pipe.parameters())
        pipe.zero_grad()
        assert all(p.grad is None for p in pipe.parameters())


class FromNumpy(nn.Module):
    def forward(self, x: Any) -> Tensor:
        return torch.as_tensor(x)


@pytest.mark.parametrize("rows", [7, 2])
@pytest.mark.parametrize("which", ["batch", "target", "both"])
def test_rows_of_arrays_count_as_those_of_tensors(which: str, rows: int) -> None:
    """Micro-batches of 2, 2, 2 and 1 rows, and copies of a row that do not count."""
    x, y = batch(rows)
    layers = [FromNumpy(), *linears()[1:]]
    given: list[Any] = [t.numpy() if which in (name, "both") else t for t, name in ((x, "batch"), (y, "target"))]
    assert isinstance(given[0], np.ndarray) or isinstance(given[1], np.ndarray)
    with pipeline(layers) as pipe:
        loss = float(pipe.step(*given))
        want = square(layers[2](layers[1](x)), y)
        assert abs(loss - float(want.detach())) < 1e-12
        (gradient,) = torch.autograd.grad(want, layers[1].weight)
        assert torch.allclose(layers[1].weight.grad, gradient, rtol=0, atol=1e-12)


def test_sparse_gradients_have_a_norm_and_are_clipped() -> None:
    table = nn.Embedding(5, WIDTH, sparse=True, dtype=torch.float64)
    ids = torch.arange(2 * COUNT) % 3
    with pipeline([table, *linears()[1:]]) as pipe:
        pipe.step(ids, batch()[1])
        gradients = [p.grad.to_dense() for p in pipe.parameters()]
        want = torch.stack([g.norm() for g in gradients]).norm()
        assert abs(float(pipe.clip_grad_norm_(0.1)) - float(want)) < 1e-12
        assert abs(float(pipe.grad_norm()) - 0.1) < 1e-5


def test_an_id_beyond_its_table_is_told_with_what_mostly_is_the_cause() -> None:
    layers = [nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    with pipeline(layers, loss=lambda out, _: out.mean()) as pipe, pytest.raises(IndexError) as caught:
        pipe.step([torch.tensor([3, 11])] * COUNT, [torch.zeros(1)] * COUNT)
    assert "an id is beyond the rows of an embedding" in " ".join(caught.value.__notes__)

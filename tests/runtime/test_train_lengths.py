"""Training on sequences of different length: the same gradients as one process on every sequence by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_train import job, tiny

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.models.lengths import distributed_evenly, padded_groups
from octopipe.search.systems.dynapipe import micro_batch_samples

torch = pytest.importorskip("torch")
from octopipe.runtime.nn.build import build_layers  # noqa: E402
from octopipe.runtime.nn.head import cross_entropy  # noqa: E402
from octopipe.runtime.training import train as trainer  # noqa: E402
from octopipe.runtime.training.data.batches import StepLoss, length_micro_batches  # noqa: E402
from octopipe.runtime.training.data.synthetic import SyntheticTokens  # noqa: E402
from octopipe.runtime.training.job import TrainJob  # noqa: E402

LENGTHS = (16, 3, 9, 5, 12, 16, 2, 7)


def by_time(pp: int) -> tuple[tuple[int, ...], ...]:
    found = micro_batch_samples(LENGTHS, pp, lambda count, length: 4.0 + count * length)
    return tuple(tuple(LENGTHS[i] for i in group) for group in found)


def of_lengths(groups: Any, **more: Any) -> TrainJob:
    mine = {"lengths": LENGTHS, "groups": groups, "micro_batches": None, "dtype": "float64", "optimizer": "sgd"}
    return job(**{**mine, "clip": None, **more})


def test_weights_make_the_mean_over_all_tokens() -> None:
    """Gradients of padded, weighted micro-batches against plain torch on every sequence alone."""
    source = SyntheticTokens(vocab=64, seq=16, seed=0)
    layers = [make().double() for make in build_layers(tiny(), dtype=torch.float64, device="cpu", seed=0)]
    parameters = [p for layer in layers for p in layer.parameters()]

    def run(tokens: Any) -> Any:
        for layer in layers:
            tokens = layer(tokens)
        return tokens

    total = sum(LENGTHS)
    losses = []
    for i, length in enumerate(LENGTHS):
        sample = torch.from_numpy(source.sample(i)[: length + 1])[None]
        losses.append(cross_entropy(run(sample[:, :-1]), sample[:, 1:]) * (length / total))
    expected = torch.autograd.grad(sum(losses), parameters)
    numbers = [[0, 2], [1, 3, 6], [4], [5, 7]]
    inputs, targets = length_micro_batches(source, 0, numbers, LENGTHS, 1)
    loss = StepLoss(cross_entropy, shifted=False)
    mean = sum(loss(run(x), y) for x, y in zip(inputs, targets, strict=True)) / len(numbers)
    found = torch.autograd.grad(mean, parameters)
    assert mean.item() == pytest.approx(sum(losses).item(), rel=1e-12)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_every_cut_and_order_trains_alike() -> None:
    """One process and a sequence per micro-batch; two ranks and DynaPipe's groups and order; two pipelines."""
    alone = trainer.train(of_lengths((padded_groups(LENGTHS, 1),), nproc=1))
    assert alone is not None
    groups = by_time(2)
    assert 1 < len(groups) < len(LENGTHS)
    dynamic = trainer.train(of_lengths((groups,), nproc=2, system="dynapipe"))
    assert dynamic is not None and dynamic.plan.num_micro_batches == len(groups)
    np.testing.assert_allclose(dynamic.losses, alone.losses, rtol=1e-9)
    cut = padded_groups(LENGTHS, 2)
    distributed = tuple(distributed_evenly(cut, 2, lambda g: float(len(g) * max(g))))
    twice = trainer.train(of_lengths(distributed, nproc=2, dp=2))
    assert twice is not None
    np.testing.assert_allclose(twice.losses, alone.losses, rtol=1e-9)


def test_dynapipe_takes_long_micro_batches_in_another_order() -> None:
    from octopipe.runtime.training.run_parts import plan_of

    groups = padded_groups((2, 16, 3, 16, 2, 16, 3, 16), 1)
    asked = of_lengths((groups,), lengths=(2, 16, 3, 16, 2, 16, 3, 16), nproc=2, system="dynapipe")
    plan = plan_of(asked, None, lambda phase: None)
    first = [op.micro_batch for op in plan.orders[0] if op.kind == "F"]
    assert sorted(first) == list(range(8)) and first != list(range(8))


def test_jobs_that_do_not_hold_every_sequence_are_refused() -> None:
    with pytest.raises(OctoPipeError, match="each of the step's sequences once"):
        of_lengths((padded_groups(LENGTHS[:-1], 1),), nproc=1)
    with pytest.raises(OctoPipeError, match="for dp 2"):
        of_lengths((padded_groups(LENGTHS, 1),), nproc=2, dp=2)
    with pytest.raises(OctoPipeError, match="the longest sequence has 16"):
        of_lengths((padded_groups(LENGTHS, 1),), nproc=1, seq=8)


def test_train_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(map(str, LENGTHS)))
    words = ["train", "llama3-8b", "--scale", "0.01", "--layers", "4", "--nproc", "1", "--steps", "2", "--no-measure"]
    assert main([*words, "--lengths", str(file), "--dynamic", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["steps"] == 2 and numbers["num_micro_batches"] < len(LENGTHS) and numbers["loss"] > 0
    for more, said in (
        (["--pack"], "train pads"),
        (["--seq", "64"], "leave it out"),
        (["--micro-batches", "2"], "leave"),
    ):
        assert main([*words, "--lengths", str(file), *more]) == 2
        assert said in capsys.readouterr().err
    assert main([*words, "--dynamic"]) == 2
    assert "give --lengths" in capsys.readouterr().err

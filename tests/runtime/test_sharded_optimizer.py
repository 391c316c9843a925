"""Optimizer state divided over data-parallel pipelines: the same training, a share of the state, whole checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.costs.mode import Mode

torch = pytest.importorskip("torch")
from test_train import job, run_all  # noqa: E402
from torch import nn  # noqa: E402

from octopipe.runtime.precision import MixedPrecisionOptimizer  # noqa: E402
from octopipe.runtime.ranks.owners import Owners  # noqa: E402
from octopipe.runtime.training.checkpoint import latest, read_layer, read_record  # noqa: E402

needs_main_gradients = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs torch 2.10")


def twins(folder: Path, **more: Any) -> list[Any]:
    """Two replicas of one pipeline rank each, without and with shares; both saved."""
    return [
        job(nproc=2, dp=2, checkpoint=str(folder / name), save_every=2, shard_optimizer=shard, **more)
        for name, shard in (("whole", False), ("shared", True))
    ]


@pytest.mark.parametrize(
    "precision",
    [pytest.param("fp32", marks=pytest.mark.slow), pytest.param("bf16-main-fp32", marks=needs_main_gradients)],
)
def test_losses_and_checkpoints_are_those_of_whole_state(precision: str, tmp_path: Path) -> None:
    whole, shared = run_all(*twins(tmp_path, precision=precision))
    assert shared.losses == whole.losses
    found = [latest(tmp_path / name) for name in ("whole", "shared")]
    assert all(folder is not None for folder in found)
    for k in range(whole.plan.num_layers if hasattr(whole, "plan") else 8):
        a, b = (read_layer(folder, k, read_record(folder)) for folder in found)  # type: ignore[arg-type]
        assert a["state"].keys() == b["state"].keys() and a["optimizer"].keys() == b["optimizer"].keys()
        assert all(torch.equal(a["state"][name], b["state"][name]) for name in a["state"])
        assert a["settings"] == b["settings"]
        for name, moments in a["optimizer"].items():
            assert moments.keys() == b["optimizer"][name].keys() and moments
            assert all(
                torch.equal(torch.as_tensor(moments[key]), torch.as_tensor(b["optimizer"][name][key]))
                for key in moments
            )


def test_a_run_goes_on_from_shares_with_whole_state_and_back(tmp_path: Path) -> None:
    through, first = run_all(
        job(nproc=2, dp=2, steps=6),
        job(nproc=2, dp=2, steps=3, shard_optimizer=True, checkpoint=str(tmp_path), save_every=3),
    )
    assert first.losses == through.losses[:3]
    whole = run_all(job(nproc=2, dp=2, steps=4, checkpoint=str(tmp_path), resume=True, save_every=1))[0]
    shared = run_all(job(nproc=2, dp=2, steps=6, checkpoint=str(tmp_path), resume=True, shard_optimizer=True))[0]
    assert [*whole.losses[-1:], *shared.losses[-2:]] == through.losses[3:]


@pytest.mark.slow
def test_two_pipelines_of_two_ranks_divide_state_rank_by_rank(tmp_path: Path) -> None:
    jobs = [job(nproc=4, dp=2, system="zb-h1", shard_optimizer=shard) for shard in (False, True)]
    whole, shared = run_all(*jobs)
    assert shared.losses == whole.losses


class _World:
    def __init__(self, replica: int, count: int):
        self.replica, self.num_replicas, self.dp_group = replica, count, object()


@pytest.mark.parametrize("sizes", [[5, 5, 5, 5], [100, 1, 1, 1], [7], [3, 9, 2, 8, 4, 6]])
def test_every_parameter_has_one_owner_and_shares_are_even(sizes: list[int]) -> None:
    parameters = [nn.Parameter(torch.zeros(n)) for n in sizes]
    seen = [Owners(parameters, _World(r, 3)) for r in range(3)]  # type: ignore[arg-type]
    assert all(sum(owners.owns(p) for owners in seen) == 1 for p in parameters)
    held = [sum(p.numel() for p in parameters if owners.owns(p)) for owners in seen]
    assert max(held) - min(held) <= max(sizes)


def test_a_share_without_parameters_still_makes_an_optimizer() -> None:
    class Model:
        world = _World(1, 2)
        weight = nn.Parameter(torch.zeros(4))

        def named_parameters(self) -> Any:
            return iter([("0.weight", self.weight)])

    made = MixedPrecisionOptimizer(lambda params: torch.optim.AdamW(params, lr=0.1), Model(), shard=True)
    assert not made.owns(Model.weight) and len(made.state) == 0
    made.zero_grad()


def test_sharding_wants_replicas_and_a_pipeline() -> None:
    with pytest.raises(OctoPipeError, match="give --dp"):
        job(shard_optimizer=True)
    with pytest.raises(OctoPipeError, match="give the Pipeline"):
        MixedPrecisionOptimizer(lambda params: torch.optim.SGD(params, lr=0.1), nn.Linear(2, 2), shard=True)


def test_bytes_per_parameter_count_the_share() -> None:
    mode = Mode(precision="bf16-main-fp32")
    assert mode.bytes_per_parameter(state_factor=2, shards=4) == 2 + 4 + (4 + 8) / 4

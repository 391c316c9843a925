"""Optimizer state in host memory: the same training, state that is really there, checkpoints that fit both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.table import CostTable
from octopipe.plans.file import save_plan
from octopipe.search.systems import build_plan

torch = pytest.importorskip("torch")
from test_train import job, run_all  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from octopipe.runtime.host_state import HostState, hosted  # noqa: E402
from octopipe.runtime.precision import MixedPrecisionOptimizer  # noqa: E402
from octopipe.runtime.training import memory_check  # noqa: E402
from octopipe.runtime.training.checkpoint import latest, read_layer, read_record  # noqa: E402
from octopipe.runtime.training.saved_state import put_state  # noqa: E402

needs_main_gradients = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs torch 2.10")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def adamw(parameters: list[Any]) -> Any:
    return torch.optim.AdamW(parameters, lr=0.1)


def layer(dtype: Any, device: str = "cpu") -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 5, dtype=dtype).to(device)


def trained(optimizer: Any, module: nn.Linear, steps: int = 4) -> None:
    for k in range(steps):
        for number, p in enumerate(module.parameters()):
            p.grad = torch.full_like(p, 0.25 * (k + 1) - 0.5 * number)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_updates_are_those_of_state_on_the_device(dtype: Any, share: float) -> None:
    here, away = layer(dtype), layer(dtype)
    there = MixedPrecisionOptimizer(adamw, away, host=share)
    trained(MixedPrecisionOptimizer(adamw, here), here)
    trained(there, away)
    assert all(torch.equal(a, b) for a, b in zip(here.parameters(), away.parameters(), strict=True))
    # The weight is the larger part: its updated copy is another tensor, and the parameter follows it.
    master = there.master(away.weight)
    assert master is not None and master.data_ptr() != away.weight.data_ptr()
    assert torch.equal(master.to(dtype), away.weight)
    if dtype is not torch.bfloat16:
        assert (there.master(away.bias) is None) == (share == 0.5)


def elsewhere(dtype: Any) -> nn.Linear:
    """A layer on a GPU, under a mode in which nothing has memory."""
    module = nn.Linear(6, 5, device="meta")
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="cuda")))
    return module


def test_state_is_on_the_host_and_weights_are_not() -> None:
    """On a device that does not exist: fake tensors know where they would be."""
    with FakeTensorMode():
        module = elsewhere(torch.bfloat16)
        whole, half = (MixedPrecisionOptimizer(adamw, module, host=share) for share in (1.0, 0.8))
        for parameter, all_there, some_there in zip(module.parameters(), ("cpu", "cpu"), ("cpu", "cuda"), strict=True):
            assert parameter.device.type == "cuda"
            assert whole.place_of(parameter).type == all_there
            assert half.place_of(parameter).type == some_there
            put_state(whole, parameter, {"exp_avg": torch.zeros(parameter.shape), "step": torch.zeros(())})
            put_state(half, parameter, {"exp_avg": torch.zeros(parameter.shape), "step": torch.zeros(())})
            assert whole.state[parameter]["exp_avg"].device.type == all_there
            assert half.state[parameter]["exp_avg"].device.type == some_there


def test_a_fused_optimizer_finds_its_step_count_where_it_updates() -> None:
    with FakeTensorMode():
        module = elsewhere(torch.float32)
        for fused, place in ((True, "cuda"), (None, "cpu")):
            optimizer = torch.optim.AdamW(module.parameters(), fused=fused)
            put_state(optimizer, module.weight, {"step": torch.zeros(())})
            assert optimizer.state[module.weight]["step"].device.type == place


@pytest.mark.parametrize("sizes", [[4, 4, 4, 4], [100, 1, 1, 1], [7], [3, 9, 2, 8, 4, 6]])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_at_least_the_share_goes_and_no_parameter_could_stay(sizes: list[int], share: float) -> None:
    parameters = [nn.Parameter(torch.zeros(n)) for n in sizes]
    chosen = hosted(parameters, share)
    held, wanted = sum(p.numel() for p in chosen), share * sum(sizes)
    assert held >= wanted
    assert all(held - p.numel() < wanted for p in chosen) or held == wanted


def test_gradients_and_weights_share_buffers_in_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octopipe.runtime.host_state.POOL_BYTES", 256)
    pairs = [(nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))) for n in (20, 30, 100, 3)]
    state = HostState(pairs)
    for number, (parameter, _) in enumerate(pairs):
        parameter.grad = None if number == 3 else torch.full_like(parameter, float(number))
    state.bring_gradients()
    assert pairs[3][1].grad is None
    assert all(bool((master.grad == number).all()) for number, (_, master) in enumerate(pairs[:3]))
    pieces = {master.grad.untyped_storage().data_ptr() for _, master in pairs[:3]}  # type: ignore[union-attr]
    assert len(pieces) == 2  # 80 and 120 bytes together, 400 bytes alone


@pytest.mark.parametrize(
    "precision",
    [pytest.param("fp32", marks=pytest.mark.slow), pytest.param("bf16-main-fp32", marks=needs_main_gradients)],
)
def test_losses_and_checkpoints_are_those_of_state_on_the_device(precision: str, tmp_path: Path) -> None:
    jobs = [
        job(precision=precision, checkpoint=str(tmp_path / name), save_every=2, offload_optimizer=share)
        for name, share in (("here", 0.0), ("half", 0.5), ("away", 1.0))
    ]
    here, half, away = run_all(*jobs)
    assert here.losses == half.losses == away.losses
    files = [latest(tmp_path / name) for name in ("here", "half", "away")]
    for k in range(8):
        first, *others = (read_layer(folder, k, read_record(folder)) for folder in files)  # type: ignore[arg-type]
        for other in others:
            assert all(torch.equal(first["state"][name], other["state"][name]) for name in first["state"])
            for name, moments in first["optimizer"].items():
                assert moments.keys() == other["optimizer"][name].keys()
                assert all(torch.equal(moments[key], other["optimizer"][name][key]) for key in moments)


def test_a_run_goes_on_with_its_state_elsewhere(tmp_path: Path) -> None:
    through, first = run_all(job(steps=6), job(steps=3, offload_optimizer=1.0, checkpoint=str(tmp_path), save_every=3))
    assert first.losses == through.losses[:3]
    here = run_all(job(steps=4, checkpoint=str(tmp_path), resume=True, save_every=1))[0]
    away = run_all(job(steps=6, checkpoint=str(tmp_path), resume=True, offload_optimizer=0.7))[0]
    assert [*here.losses[-1:], *away.losses[-2:]] == through.losses[3:]


def test_state_may_be_divided_over_replicas_and_kept_by_their_hosts() -> None:
    whole, both = run_all(job(nproc=2, dp=2), job(nproc=2, dp=2, shard_optimizer=True, offload_optimizer=1.0))
    assert both.losses == whole.losses


def test_the_memory_check_counts_state_where_it_is() -> None:
    here, half, away = (job(device="cuda", offload_optimizer=share) for share in (0.0, 0.5, 1.0))
    per = [memory_check.bytes_per_parameter(asked) for asked in (here, half, away)]
    assert per == [2 + 4 + 12, 2 + 4 + 6, 2 + 4]
    assert [memory_check.host_bytes_per_parameter(asked) for asked in (here, half, away)] == [0, 8, 16]
    plan = memory_check.stand_in_plan(away)
    needed = memory_check.host_bytes(away, plan)
    seat = {"place": "GPU 0", "free": 1e15, "host": "node", "host_free": 1.1 * sum(needed)}
    seats = [{**seat, "pp_rank": 0}, {**seat, "pp_rank": 1}]
    assert memory_check.check_places(away, plan, None, seats) == ""
    short = [{**one, "host_free": 0.9 * sum(needed)} for one in seats]
    assert "of the memory of node" in memory_check.check_places(away, plan, None, short)
    assert memory_check.check_places(here, plan, None, short) == ""


def test_train_takes_the_share_from_its_plan_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = CostTable.uniform(num_layers=4)
    plan = build_plan("1f1b", costs, 1, 2).with_extra(setting={"offload_optimizer": 0.5})
    save_plan(plan, tmp_path / "plan.json")
    flags = ["--scale", "0.02", "--layers", "4", "--steps", "1", "--seq", "8", "--no-measure", "--nproc", "1"]
    assert main(["train", "llama3-8b", "--plan", str(tmp_path / "plan.json"), *flags]) == 0
    assert "0.5: this share of the optimizer state is kept in host memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--offload-optimizer", "1.5"], "--offload-optimizer is 1.5; give a share from 0 to 1"),
        (["--offload-optimizer", "--precision", "bf16"], "use --precision bf16-main-fp32"),
    ],
)
def test_what_cannot_be_kept_there_is_refused(flags: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "llama3-8b", "--scale", "0.02", "--layers", "4", *flags]) == 2
    err = capsys.readouterr().err.strip()
    assert why in err and len(err.splitlines()) == 1


def test_a_sharded_tensor_is_refused_by_name() -> None:
    module = layer(torch.float32)
    module.weight.device_mesh = object()  # type: ignore[assignment]
    with pytest.raises(OctoPipeError, match="weight is sharded"):
        MixedPrecisionOptimizer(adamw, module, host=1.0)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_state_takes_no_device_memory(dtype: Any) -> None:
    def fused(parameters: list[Any]) -> Any:
        return torch.optim.AdamW(parameters, lr=0.1, fused=True)

    here, away = layer(dtype, "cuda"), layer(dtype, "cuda")
    there = MixedPrecisionOptimizer(fused, away, host=1.0)
    trained(MixedPrecisionOptimizer(fused, here), here)
    trained(there, away)
    for a, b in zip(here.parameters(), away.parameters(), strict=True):
        torch.testing.assert_close(a, b)
        assert all(value.device.type == "cpu" for value in there.state[b].values())

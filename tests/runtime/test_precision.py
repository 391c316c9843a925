"""Mixed precision: gradients add up in float32, masters take updates that bfloat16 would lose, files agree."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from effort import WHOLE, some

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.mode import Mode, mode_from_object, precision_of
from octopipe.costs.profile_file import load_profile
from octopipe.costs.table import CostTable
from octopipe.models.spec import Attention, Embedding, GatedDeltaNet, Head, Mamba2, Mlp, ModelSpec, Moe
from octopipe.plans.file import load_plan
from octopipe.search.systems import build_plan

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from octopipe.runtime.nn import build_layers, cross_entropy  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.precision import MixedPrecisionOptimizer, gradient_dtype  # noqa: E402
from octopipe.runtime.ranks import launch  # noqa: E402
from octopipe.runtime.training import train as trainer  # noqa: E402
from octopipe.runtime.training.checkpoint import latest, read_layer, read_record  # noqa: E402
from octopipe.runtime.training.job import TrainJob, TrainResult  # noqa: E402

pytestmark = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs torch 2.10")
H, VOCAB, MANY = 16, 64, 32


def tiny() -> ModelSpec:
    return ModelSpec(
        name="tiny",
        layers=(
            Embedding(hidden=H, vocab=VOCAB),
            Attention(hidden=H, heads=2, kv_heads=1, head_dim=8),
            Mlp(hidden=H, ffn=32),
            Mamba2(hidden=H, heads=2, head_dim=16, state=8, groups=1, conv=4, chunk=8),
            Moe(hidden=H, ffn=16, experts=4, top_k=2),
            GatedDeltaNet(hidden=H, key_heads=1, value_heads=2, key_dim=8, value_dim=8, conv=4, chunk=8),
            Head(hidden=H, vocab=VOCAB),
        ),
    )


def pipe_of(system: str, *, dtype: Any, main_grads: bool = False, micro_batches: int = MANY) -> Pipeline:
    spec = tiny()
    plan = build_plan(system, CostTable.uniform(num_layers=spec.num_layers), 1, micro_batches)
    made = [make() for make in build_layers(spec, dtype=torch.bfloat16)]
    layers = [module.to(dtype) if dtype is torch.float64 else module for module in made]
    return Pipeline(layers, plan, cross_entropy, main_grads=main_grads, seed=None)


def batch() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randint(VOCAB, (MANY, 12), generator=generator)
    return inputs, torch.randint(VOCAB, (MANY, 12), generator=generator)


def far(pipe: Pipeline, exact: dict[str, Any]) -> float:
    """How far all gradients together are from the exact ones, in parts of their norm."""
    apart = sum(float((p.grad.double() - exact[name]).norm()) ** 2 for name, p in pipe.named_parameters())
    return (apart / sum(float(g.norm()) ** 2 for g in exact.values())) ** 0.5  # type: ignore[no-any-return]


@pytest.mark.parametrize("system", some(["zb-h1", "gpipe"]))
def test_gradients_of_many_micro_batches_add_up_in_float32(system: str) -> None:
    """Against the same bfloat16 layers run micro-batch by micro-batch, their gradients summed in float64."""
    inputs, targets = batch()
    wide = pipe_of(system, dtype=torch.bfloat16, main_grads=True)
    narrow = pipe_of(system, dtype=torch.bfloat16)
    one = pipe_of(system, dtype=torch.bfloat16, main_grads=True, micro_batches=1)
    exact: dict[str, Any] = {}
    for m in range(MANY):
        one.zero_grad()
        one.step(inputs[m : m + 1], targets[m : m + 1])
        for name, p in one.named_parameters():
            exact[name] = exact.get(name, 0) + p.grad.double() / MANY
    for pipe in (wide, narrow):
        pipe.step(inputs, targets)
    assert {p.grad.dtype for p in wide.parameters()} == {torch.float32}
    assert torch.bfloat16 in {p.grad.dtype for p in narrow.parameters()}
    # float32 sums differ from float64 ones by rounding alone; bfloat16 sums by what 8 bits lose 32 times over.
    assert far(wide, exact) < 2e-3
    assert far(narrow, exact) > 4 * far(wide, exact)


def test_weight_products_are_not_rounded_to_bfloat16() -> None:
    layer = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    plan = build_plan("gpipe", CostTable.uniform(num_layers=1), 1, 4)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 8, generator=generator).bfloat16()
    slope = torch.randn(4, 8, generator=generator).bfloat16()
    pipe = Pipeline([layer], plan, lambda y, g: (y.float() * g.float()).sum(), main_grads=True, seed=None)
    pipe.step(x, slope)
    exact = (slope / 4).double().mT @ x.double()  # products of bfloat16 numbers are exact in float64
    assert torch.allclose(layer.weight.grad.double(), exact, rtol=1e-6, atol=1e-7)


def test_updates_too_small_for_bfloat16_are_kept_in_the_masters() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    plain = copy.deepcopy(model)
    ours = MixedPrecisionOptimizer(lambda params: torch.optim.SGD(params, lr=1e-4), model)
    theirs = torch.optim.SGD(plain.parameters(), lr=1e-4)
    for _ in range(100):
        for m, optimizer in ((model, ours), (plain, theirs)):
            m.weight.grad = torch.ones_like(m.weight)
            optimizer.step()
            optimizer.zero_grad()
    assert plain.weight.item() == 1.0  # every update was rounded away
    assert ours.master(model.weight).item() == pytest.approx(0.99, abs=1e-5)  # 100 float32 roundings
    assert model.weight.item() == torch.tensor(0.99).bfloat16().item() and model.weight.grad is None


def test_any_optimizer_and_scheduler_gives_what_it_gives_on_float32_parameters() -> None:
    """Against torch's optimizer on float32 parameters that are fed the same gradients."""
    makes = [
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adafactor(p, lr=1e-2),
        lambda p: torch.optim.RMSprop(p, lr=1e-3),
    ]
    for make in makes:
        model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)).bfloat16()
        model[1].float()
        twins = [nn.Parameter(p.detach().float()) for p in model.parameters()]
        ours, theirs = MixedPrecisionOptimizer(make, model), make(twins)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (ours, theirs)]
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            for p, twin in zip(model.parameters(), twins):
                twin.grad = torch.randn(p.shape, generator=generator).to(p.dtype).float()
                p.grad = twin.grad.to(p.dtype)
            for optimizer, schedule in zip((ours, theirs), schedules):
                optimizer.step()
                schedule.step()
            for p, twin in zip(model.parameters(), twins):
                master = ours.master(p)
                assert torch.equal(p.detach() if master is None else master, twin)
                assert torch.equal(p, twin.to(p.dtype))


def test_a_closure_sees_the_updated_weights() -> None:
    model = nn.Linear(3, 1, bias=False, dtype=torch.bfloat16)
    optimizer = MixedPrecisionOptimizer(lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=8), model)
    x, y = torch.randn(20, 3).bfloat16(), torch.randn(20, 1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (model(x).float() - y).square().mean()
        loss.backward()
        return loss

    before = float(closure().detach())
    for _ in range(3):
        optimizer.step(closure)
    assert float(closure().detach()) < before


def test_weights_changed_from_outside_reach_the_masters() -> None:
    model = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    optimizer = MixedPrecisionOptimizer(lambda p: torch.optim.SGD(p, lr=1e-4), model)
    model.weight.grad = torch.ones(2, 2, dtype=torch.bfloat16)
    optimizer.step()
    fine = optimizer.master(model.weight).detach().clone()
    with torch.no_grad():
        model.weight[0] = 7.0
    now = optimizer.master(model.weight)
    assert torch.equal(now[0], torch.full((2,), 7.0)) and torch.equal(now[1], fine[1])


def _zeroed(parameter: Any) -> None:
    parameter.data = torch.zeros_like(parameter)


@pytest.mark.parametrize("host", [0.0, 1.0])
@pytest.mark.parametrize(
    ("change", "most"), [(_zeroed, 0.0), (lambda p: p.data.zero_(), 0.0), (lambda p: p.data.clamp_(-0.25, 0.25), 0.25)]
)
def test_weights_that_are_changed_through_data_reach_the_masters(change: Any, most: float, host: float) -> None:
    """As a clipped critic or a reset head is written; torch does not count such a change."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    optimizer = MixedPrecisionOptimizer(lambda p: torch.optim.SGD(p, lr=0.0), model, host=host)
    for step in range(5):
        if change is not _zeroed or step == 4:  # a new address is noticed in every step
            change(model.weight)
        model.weight.grad = torch.ones(4, 4, dtype=torch.bfloat16)
        optimizer.step()
    assert float(model.weight.detach().abs().max()) == most
    assert float(optimizer.master(model.weight).detach().abs().max()) == most


def test_state_dicts_travel_and_wrong_ones_are_refused() -> None:
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    twin = copy.deepcopy(model)
    make = lambda p: torch.optim.AdamW(p, lr=1e-3)  # noqa: E731
    one = MixedPrecisionOptimizer(make, model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    one.step()
    other = MixedPrecisionOptimizer(make, twin)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for p, q in zip(model.parameters(), twin.parameters()):
        assert torch.equal(one.master(p), other.master(q)) and torch.equal(p, q)
        assert torch.equal(one.state[p]["exp_avg"], other.state[q]["exp_avg"])
    with pytest.raises(OctoPipeError, match="other parameters"):
        MixedPrecisionOptimizer(make, nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)).load_state_dict(
            one.state_dict()
        )


def test_norms_of_bfloat16_gradients_are_taken_in_float32() -> None:
    pipe = pipe_of("gpipe", dtype=torch.bfloat16)
    pipe.step(*batch())
    exact = sum(float(p.grad.double().square().sum()) for p in pipe.parameters()) ** 0.5
    assert float(pipe.grad_norm()) == pytest.approx(exact, rel=1e-5)


# -- runs ----------------------------------------------------------------------------------------------


def job(**changes: Any) -> TrainJob:
    base = {"spec": tiny(), "steps": 6, "seq": 16, "lr": 0.01, "micro_batches": 4, "precision": "bf16-main-fp32"}
    return TrainJob(**{**base, "measure": False, "threads": 1, "timeout_s": 60.0, **changes})


def several(seat: launch.Seat, jobs: list[TrainJob]) -> list[TrainResult | None]:
    return [trainer.train_rank(seat, j) for j in jobs]


def run_all(*jobs: TrainJob) -> list[TrainResult]:
    return launch.run_ranks(several, jobs[0].nproc, list(jobs), threads=1)[0]  # type: ignore[no-any-return]


@pytest.mark.slow
def test_runs_resume_exactly_and_go_on_in_another_precision(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    first = job(steps=3, checkpoint=folder, nproc=1)
    run_all(first)
    saved = latest(folder)
    assert saved is not None and read_record(saved)["precision"] == "bf16-main-fp32"
    weights = read_layer(saved, 2, read_record(saved))["state"]["up.weight"]
    assert weights.dtype is torch.float32 and not torch.equal(weights, weights.bfloat16().float())
    # Under two ranks and another schedule: bit for bit what one uninterrupted run does.
    whole = run_all(job(nproc=1))[0]
    again = run_all(job(nproc=2, system="zb-h1", checkpoint=folder, resume=True))[0]
    assert again.losses == whole.losses[3:]
    other = tmp_path / "other"
    run_all(replace(first, checkpoint=str(other)))
    wide = run_all(job(nproc=1, precision="fp32", checkpoint=str(other), resume=True))[0]
    assert wide.losses == pytest.approx(whole.losses[3:], rel=0.02)
    with pytest.raises(OctoPipeError, match="was trained in fp32, this run is in bf16; use --precision fp32"):
        run_all(job(nproc=1, precision="bf16", steps=7, checkpoint=str(other), resume=True))


def test_copies_and_data_parallel_pipelines_add_up_in_float32() -> None:
    """Of two pipelines, and of a plan that holds every layer twice, the losses of one rank with the whole batch."""
    steps = 6 if WHOLE else 3
    alone = run_all(job(nproc=1, steps=steps))[0]
    two = run_all(job(nproc=2, dp=2, micro_batches=2, steps=steps), job(nproc=2, system="chimera", steps=steps))
    for run in two:
        assert run.losses == pytest.approx(alone.losses, rel=3e-3)


@pytest.mark.slow
def test_a_profile_counts_the_bytes_of_its_precision_and_other_runs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {}
    for precision in ("bf16-main-fp32", "fp32"):
        files[precision] = str(tmp_path / f"{precision}.json")
        flags = ["--scale", "0.02", "--layers", "4", "--seq", "16", "--repeats", "1", "-o", files[precision]]
        assert main(["profile", "llama3-8b", "--precision", precision, *flags]) == 0
        profile = load_profile(files[precision])
        assert profile.mode == Mode(precision=precision)
        # AdamW: every parameter of a layer without float32 ones costs this many bytes.
        each = Mode(precision=precision).bytes_per_parameter(state_factor=2)
        gradients = {"bf16-main-fp32": 4.0, "fp32": 4.0}[precision]
        assert profile.costs.static_bytes == pytest.approx(profile.costs.gradient_bytes * each / gradients)
    plan = str(tmp_path / "plan.json")
    assert main(["simulate", files["fp32"], "--system", "1f1b", "--pp", "2", "--micro-batches", "4", "-o", plan]) == 0
    assert load_plan(plan).extra["mode"] == {"precision": "fp32", "graphs": False}
    capsys.readouterr()
    small = ["--scale", "0.02", "--layers", "4", "--seq", "16", "--steps", "1", "--plan", plan]
    run = ["train", "llama3-8b", *small, "--precision", "bf16-main-fp32"]
    assert main([*run, "--profile", files["fp32"]]) == 2
    assert "was measured in fp32, and this run computes in bf16-main-fp32" in capsys.readouterr().err
    assert main([*run, "--no-measure"]) == 0
    assert "was made from times measured in fp32" in " ".join(capsys.readouterr().err.split())
    assert main(["validate", plan, "--profile", files["fp32"], "--precision", "bf16-main-fp32"]) == 2
    assert "--precision fp32" in capsys.readouterr().err


def test_modes_are_read_and_wrong_ones_are_one_line() -> None:
    assert mode_from_object(None, "x") is None
    assert mode_from_object({"precision": "bf16", "graphs": True}, "x") == Mode(precision="bf16", graphs=True)
    for wrong in (3, {}, {"precision": "int8"}, {"precision": "bf16", "graphs": 1}, {"precision": ["bf16"]}):
        with pytest.raises(OctoPipeError, match='x: "mode"'):
            mode_from_object(wrong, "x")
    with pytest.raises(OctoPipeError, match="give one"):
        precision_of("bf16", "float32", "cpu")
    assert precision_of(None, "bfloat16", "cpu") == "bf16-main-fp32"


def test_gradients_of_frozen_and_wide_parameters_stay_as_they_are() -> None:
    layer = nn.Linear(4, 4, dtype=torch.bfloat16)
    layer.bias.requires_grad_(False)
    pipe = Pipeline(
        [layer, nn.Linear(4, 4)],
        build_plan("gpipe", CostTable.uniform(num_layers=2), 1, 2),
        lambda y, t: y.float().square().mean(),
        autocast=torch.bfloat16,
        main_grads=True,
    )
    pipe.step(torch.randn(4, 4).bfloat16(), torch.zeros(4))
    kinds = {name: gradient_dtype(p) for name, p in pipe.named_parameters()}
    assert kinds == {
        "0.weight": torch.float32, "0.bias": torch.bfloat16, "1.weight": torch.float32, "1.bias": torch.float32
    }  # fmt: skip
    assert pipe.layers.modules[0].bias.grad is None


@pytest.mark.slow
def test_two_hundred_steps_have_the_losses_of_float32() -> None:
    """The losses follow float32's; plain bfloat16 loses what its updates round away."""
    plain = ModelSpec(
        name="plain",
        layers=(
            Embedding(hidden=H, vocab=VOCAB),
            Attention(hidden=H, heads=2, kv_heads=1, head_dim=8),
            Mlp(hidden=H, ffn=32),
            Head(hidden=H, vocab=VOCAB),
        ),
    )
    usual = {"spec": plain, "steps": 200, "lr": 3e-3, "nproc": 1, "micro_batches": 2, "micro_batch_size": 4}
    exact, mixed, narrow = run_all(*(job(precision=p, **usual) for p in ("fp32", "bf16-main-fp32", "bf16")))
    ends = [sum(run.losses[-20:]) / 20 for run in (exact, mixed, narrow)]
    assert ends[0] < exact.losses[0] - 0.5
    assert ends[1] == pytest.approx(ends[0], rel=0.01)
    assert abs(ends[2] - ends[0]) > abs(ends[1] - ends[0])


def test_a_configs_own_dtype_is_read_from_the_file_not_from_what_transformers_makes_of_it(tmp_path) -> None:  # type: ignore[no-untyped-def]
    import json

    from octopipe.huggingface.described import _dtype

    path = tmp_path / "config.json"
    for file, found in (
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.float32"}, "float32"),
        ({"text_config": {"dtype": "float16"}}, "float16"),
        ({}, None),
    ):
        path.write_text(json.dumps({"model_type": "qwen3", **file}))
        assert _dtype(path) == _dtype(tmp_path) == found

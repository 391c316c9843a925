"""Products that are wrong on a part of a GPU are noticed before anything computes, and non-finite gradients after."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from effort import some

torch = pytest.importorskip("torch")

import octopipe  # noqa: E402
from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.profile_file import Profile  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.models.zoo import preset  # noqa: E402
from octopipe.runtime.measure.mps import equal_share  # noqa: E402
from octopipe.runtime.measure.timed_run import TimedRun  # noqa: E402
from octopipe.runtime.measure.workload import Workload  # noqa: E402
from octopipe.runtime.ranks import gpu_share  # noqa: E402
from octopipe.runtime.ranks.world import World  # noqa: E402
from octopipe.runtime.wire import transports  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PLAN = build_plan("gpipe", CostTable.uniform(num_layers=1), 1, 1)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(gpu_share, "sizes", lambda: [(64, 40, 24), (48, 4104, 16)])
    return monkeypatch


def test_right_products_are_right(small) -> None:
    assert gpu_share.wrong_products(CPU) == (0, 10)


def test_products_in_float16_are_exact_as_well(small) -> None:
    """GPUs without bfloat16 try those."""
    small.setattr(gpu_share, "_dtype", lambda device: torch.float16)
    small.setattr(gpu_share, "sizes", lambda: [(8, k, 8) for _, k, _ in gpu_share.KNOWN])
    assert gpu_share.wrong_products(CPU) == (0, 5 * len(gpu_share.KNOWN))


@pytest.mark.parametrize("what", ["unwritten", "of another product"])
def test_a_tile_of_a_result_that_is_wrong_is_noticed(small, what) -> None:
    real = torch.matmul

    def product(a, b, *, out):
        before = out.clone()
        real(a, b, out=out)
        if a.shape[-1] == 40:
            out[..., 2:9, :4] = before[..., 2:9, :4] if what == "unwritten" else 39.0

    small.setattr(torch, "matmul", product)
    assert gpu_share.wrong_products(CPU) == (5, 10)  # both layouts of both operands, and a batch


def test_a_share_with_wrong_products_is_refused_with_a_better_one(monkeypatch) -> None:
    tried = []
    monkeypatch.setattr(gpu_share, "wrong_products", lambda device: tried.append(device) or (9, 32))
    monkeypatch.setattr(gpu_share, "_checked", set())
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=42))
    monkeypatch.setenv(gpu_share.SHARE, "33.33")
    with pytest.raises(OctoPipeError, match=r"9 of 32 .* 42 of this GPU's .*=33.33\).* set CUDA_MPS\w+=25$"):
        gpu_share.check_products(GPU)
    monkeypatch.setattr(gpu_share, "wrong_products", lambda device: tried.append(device) or (0, 32))
    gpu_share.check_products(GPU)  # a refusal is not remembered, a pass is
    gpu_share.check_products(GPU)
    gpu_share.check_products(CPU)
    assert tried == [GPU, GPU]


@pytest.mark.parametrize("share", [None, "33.33"])
def test_a_pipeline_with_a_share_of_a_gpu_tries_products_first(monkeypatch, share) -> None:
    """Whatever its transport: a rank may be alone on its part of a GPU."""
    tried = []
    monkeypatch.setattr(transports, "check_products", tried.append)
    if share:
        monkeypatch.setenv(gpu_share.SHARE, share)
    else:
        monkeypatch.delenv(gpu_share.SHARE, raising=False)
    pipe = octopipe.Pipeline([torch.nn.Linear(4, 4)], PLAN, torch.sum)
    pipe.close()
    assert tried == ([pipe.device] if share else [])


def test_the_sizes_that_showed_every_bad_share_are_tried() -> None:
    tried = list(gpu_share.sizes())
    assert len(tried) == len(gpu_share.KNOWN) + gpu_share.DRAWN
    assert {(4096, 2560, 1440), (1024, 8192, 1024), (512, 1440, 1440), (104, 3152, 1800)} <= set(tried)


def test_ranks_get_shares_that_fit_together_and_halve() -> None:
    for n in range(1, 40):
        share = equal_share(n)
        assert share * n <= 100 < 2 * share * n and (100 / share).is_integer()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_products_are_right_here() -> None:
    gpu_share.check_products(GPU)


@pytest.mark.parametrize(
    "case", some(itertools.product([True, False], ["none", "adamw"]), quick=[(True, "adamw"), (False, "none")]), ids=str
)
def test_a_timed_run_with_gradients_that_are_not_finite_is_refused(case) -> None:
    broken, optimizer = case
    work = Workload(spec=preset("gpt-oss-20b").scaled(0.02, num_layers=4), tokens=8)
    costs = CostTable.uniform(num_layers=4)
    plan = build_plan("1f1b", costs, 1, 2, split_backward=True)
    run = TimedRun(work, plan, World.make(None, None, None), Profile(costs=costs), optimizer=optimizer)
    if broken:
        weight = dict(run.pipe.named_parameters())["2.ffn.up"]
        weight.data[0, 0, 0] = float("nan")
    run.step()
    if broken:
        with pytest.raises(OctoPipeError, match=r"the gradient of \d.* \(rank 0\) is not finite in a timed step"):
            run.trial()
    else:
        assert run.trial().loss > 0
    run.close()

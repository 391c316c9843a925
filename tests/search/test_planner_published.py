"""Published systems on a whole cluster: where each differs from the others, their programmes against brute force."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octopipe.base.errors import DoesNotFitError, OctoPipeError
from octopipe.cli import main
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.resolve import costs_of_setup
from octopipe.models.spec import ModelSpec
from octopipe.models.zoo import preset
from octopipe.plans.file import load_plan
from octopipe.plans.setting import costs_of_plan
from octopipe.search.planner.published import plan_by
from octopipe.search.planner.published.alpa import alpa, alpa_ms, intra_operator_meshes
from octopipe.search.planner.published.arrangement import Offload, StageChoice, judged, stitched
from octopipe.search.planner.published.dapple import dapple_ms
from octopipe.search.planner.published.meshes import Devices, Mesh, MeshPricer
from octopipe.search.planner.published.metis import balanced, metis, orders
from octopipe.search.planner.published.mist import mist_ms
from octopipe.search.planner.published.query import query_of
from octopipe.search.planner.published.submeshes import layer_runs
from octopipe.simulation.simulator import simulate


def shortened(name: str, blocks: int) -> ModelSpec:
    """A preset with fewer layers between embedding and head."""
    spec = preset(name)
    return replace(spec, layers=(spec.layers[0], *spec.layers[1 : blocks + 1], spec.layers[-1]))


def setup(kind: str = "h100", **more: Any) -> Setup:
    return Setup(gpu=gpu(kind), **more)


# -- the stitched table -------------------------------------------------------------------------------------------


def test_equal_meshes_make_the_table_of_the_same_set_up() -> None:
    """Stages that all have one mesh must cost what every other verb says of that set-up, reduction aside."""
    spec, base = shortened("llama3-8b", 6), setup(gpus_per_node=8)
    pricer = MeshPricer(spec, base)
    query = query_of(pricer, 8, 16, "none")
    mesh = Mesh(kinds=("h100", "h100"), shares=(1, 1), tp=2, zero=1)
    stages = (StageChoice(first=0, stop=4, mesh=mesh, start=0), StageChoice(first=4, stop=8, mesh=mesh, start=4))
    found = alpa(query, pricer, 2, 0.0, float("inf"))
    assert found is not None
    table = stitched(pricer, replace(found, stages=stages))
    twin = costs_of_setup(spec, replace(base, tp=2, pp=2, dp=2, micro_batch_size=1))
    for name in ("forward_ms", "input_ms", "weight_ms", "activation_bytes", "static_bytes", "boundary_bytes"):
        np.testing.assert_allclose(getattr(table, name), getattr(twin, name), rtol=1e-12, err_msg=name)
    assert table.rank_memory_bytes[0] == pytest.approx(twin.rank_memory_bytes[0])
    # Two replicas of one sample each: both tables say the same tokens per GPU and second.
    ours, theirs = table.throughput(2, 8, 1000.0), twin.throughput(2, 8, 1000.0)
    assert ours["tokens_per_gpu_per_second"] == pytest.approx(theirs["tokens_per_gpu_per_second"])
    assert table.setup is not None and table.setup.num_gpus == 8


def test_offloading_frees_memory_and_costs_what_the_hosts_link_takes() -> None:
    spec = shortened("llama3-8b", 4)
    pricer = MeshPricer(spec, setup())
    mesh = Mesh(kinds=("h100",), shares=(1,), tp=1, zero=1)
    stage = StageChoice(first=0, stop=6, mesh=mesh, start=0)
    query = query_of(pricer, 1, 4, "none")
    found = alpa(query, pricer, 1, 0.0, float("inf"))
    assert found is not None
    plain = stitched(pricer, replace(found, stages=(stage,)))
    prices = pricer.price(mesh)
    moved = stitched(pricer, replace(found, stages=(replace(stage, offload=Offload(optimizer=1.0)),)))
    assert (plain.static_bytes - moved.static_bytes).sum() == pytest.approx(prices.held_state_bytes.sum())
    assert moved.forward_ms.sum() == pytest.approx(plain.forward_ms.sum())  # once a step, not with every micro-batch
    assert moved.optimizer_ms.sum() > plain.optimizer_ms.sum()
    each = stitched(pricer, replace(found, stages=(replace(stage, offload=Offload(activations=1.0)),)))
    assert not each.activation_bytes.any()
    host_ms = prices.activation_bytes.sum() / (gpu("h100").host_gb_per_s * 1e6)
    work = plain.layer_ms.sum()
    assert each.layer_ms.sum() == pytest.approx(max(work, host_ms) + 0.2 * min(work, host_ms))


# -- the programmes against brute force -----------------------------------------------------------------------------


def test_alpas_programme_is_the_best_of_all_submeshes_and_cuts() -> None:
    spec = shortened("llama3-8b", 3)
    pricer = MeshPricer(spec, setup(memory_gib=(60.0,)))
    for samples in (2, 4):
        query = query_of(pricer, 4, 16, "none")
        found = alpa(query, pricer, samples, 0.0, float("inf"))
        m = 16 // samples
        best = float("inf")
        layers = spec.num_layers
        for count in range(1, 5):
            for cuts in combinations(range(1, layers), count - 1):
                edges = (0, *cuts, layers)
                for sizes in product((1, 2, 4), repeat=count):
                    if sum(sizes) != 4:
                        continue
                    options = [list(intra_operator_meshes(query, pricer, n, samples)) for n in sizes]
                    for meshes in product(*options):
                        stages = [
                            StageChoice(first=a, stop=b, mesh=mesh, start=0)
                            for a, b, mesh in zip(edges, edges[1:], meshes, strict=False)
                        ]
                        if all(fits(pricer, s, min(count - i, m)) for i, s in enumerate(stages)):
                            best = min(best, alpa_ms(pricer, stages, m))
        assert found is not None
        assert best * (1 - 1e-9) <= found.objective_ms <= best * 1.011  # t_max grows by steps of 1 %


def fits(pricer: MeshPricer, stage: StageChoice, held: int) -> bool:
    p, here = pricer.price(stage.mesh), slice(stage.first, stage.stop)
    ends = sum(
        float(p.boundary_bytes[k]) for k in (stage.first - 1, stage.stop - 1) if 0 <= k < p.boundary_bytes.size - 1
    )
    total = p.static_bytes[here].sum() + held * p.activation_bytes[here].sum() + p.workspace_bytes[here].max() + ends
    return bool(total <= p.capacity_bytes)


def test_runs_of_layers_are_even_and_keep_the_ends_apart() -> None:
    edges = layer_runs(np.array([0.1, *[1.0] * 80, 3.0]))
    assert edges[:2] == [0, 1] and edges[-2:] == [81, 82] and len(edges) <= 34
    assert max(np.diff(edges)) <= 3
    assert layer_runs(np.ones(5)) == [0, 1, 2, 3, 4, 5]


def test_mists_objective_is_its_formula() -> None:
    # (m-1) max t + sum t + max(d_0, d_1 - t_0): the first stage's extra work has nothing to hide behind.
    assert mist_ms([(3.0, 5.0), (4.0, 1.0)], 4) == 3 * 4.0 + 7.0 + 5.0
    assert mist_ms([(3.0, 0.0), (4.0, 9.0)], 4) == 3 * 4.0 + 7.0 + 6.0


# -- where each differs, as its paper says --------------------------------------------------------------------------


SLOW_LINKS = setup("l40s", gpus_per_node=1, memory_gib=(300.0,))
"""GPUs far apart: reducing the whole model's gradients among all of them takes longer than a pipeline's bubbles."""


def heavy_head() -> ModelSpec:
    """A vocabulary as costly as the rest of the model cannot be cut over a pipeline, but over GPUs."""
    spec = shortened("llama3-8b", 6)
    return replace(spec, layers=(*spec.layers[:-1], replace(spec.layers[-1], vocab=1_000_000)))


def test_alpa_gives_stages_submeshes_of_different_size() -> None:
    found = plan_by("alpa", heavy_head(), SLOW_LINKS, gpus=6, global_batch=48, budget_s=10)
    sizes = [s.gpus for s in found.arrangement.stages]
    assert sum(sizes) == 6 and sizes[-1] > sizes[0]
    assert found.fits


def test_dapple_replicates_the_heavy_stage_and_nothing_else_is_tensor_parallel() -> None:
    heavy = heavy_head()
    found = plan_by("dapple", heavy, SLOW_LINKS, gpus=6, global_batch=16)
    stages = found.arrangement.stages
    assert all(s.mesh.tp == 1 and s.mesh.zero == 0 for s in stages)
    assert len(stages) > 1 and stages[-1].mesh.dp > stages[0].mesh.dp
    pricer = MeshPricer(heavy, SLOW_LINKS)
    query = query_of(pricer, 6, 16, "none")
    even = [replace(s, mesh=replace(s.mesh, kinds=("l40s",), shares=(found.arrangement.samples,))) for s in stages]
    assert dapple_ms(query, pricer, list(stages), found.arrangement.micro_batches) < dapple_ms(
        query, pricer, even, found.arrangement.micro_batches
    )


def test_metis_gives_unequal_gpus_unequal_shares_and_layers() -> None:
    nodes = (("h100", 1, 2), ("a100", 1, 2))
    base = setup(nodes=nodes)
    spec = shortened("llama3-8b", 8)
    pricer = MeshPricer(spec, base)
    mixed = Mesh(kinds=("h100", "a100"), shares=(1, 1), tp=2)
    shares = balanced(pricer, mixed, 16)
    assert shares is not None and sum(shares) == 16 and shares[0] > 2 * shares[1]

    def slowest(split: tuple[int, ...]) -> float:
        return float(pricer.price(replace(mixed, shares=split)).layer_ms.sum())

    assert slowest(shares) == min(slowest((n, 16 - n)) for n in range(1, 16))
    found = plan_by("metis", spec, base, gpus=4, global_batch=64)
    blind = plan_by("alpa", spec, base, gpus=4, global_batch=64, fixed={"zero": 0})
    assert found.step_ms < 0.8 * blind.step_ms
    uneven = [s for s in found.arrangement.stages if len(set(s.mesh.shares)) > 1]
    pure = {s.mesh.kinds[0]: s.stop - s.first for s in found.arrangement.stages if len(set(s.mesh.kinds)) == 1}
    assert uneven or pure["h100"] > pure["a100"]


def test_metis_shares_data_where_it_cannot_cut_layers() -> None:
    """One block: a pipeline of unequal GPUs has nothing to balance, data shares do."""
    base = setup(nodes=(("h100", 1, 1), ("a100", 1, 1)), memory_gib=(300.0,))
    pricer = MeshPricer(shortened("llama3-8b", 1), base)
    found = metis(query_of(pricer, 2, 64, "none"), pricer, 32, 0.0, float("inf"))
    assert found is not None and len(found.stages) == 1
    by_kind = dict(zip(found.stages[0].mesh.kinds, found.stages[0].mesh.shares, strict=True))
    assert sum(by_kind.values()) == 32 and by_kind["h100"] > by_kind["a100"] > 0


def test_metis_tries_every_order_of_kinds() -> None:
    devices = Devices.of(setup(nodes=(("h100", 1, 2), ("a100", 1, 2), ("h100", 1, 2))), 6)
    tried = [d.kinds for d in orders(devices)]
    h, a = "h100", "a100"
    assert tried == [(h, h, a, a, h, h), (h, h, h, h, a, a), (a, a, h, h, h, h)]


def test_mist_fits_where_the_others_do_not() -> None:
    """Memory for a third of what ZeRO-1 with all layers recomputed needs: only Mist's shards and host memory do it."""
    spec, base = preset("llama3-8b"), setup(memory_gib=(14.0,))
    for name in ("alpa", "dapple", "metis"):
        with pytest.raises(DoesNotFitError, match=f"{name}: no arrangement of llama3-8b on 8 GPUs fits"):
            plan_by(name, spec, base, gpus=8, global_batch=32, budget_s=5)
    found = plan_by("mist", spec, base, gpus=8, global_batch=32, budget_s=10)
    assert found.fits and found.peak_gib <= 14.0
    stages = found.arrangement.stages
    assert any(s.offload != Offload() or s.again for s in stages) or all(s.mesh.zero >= 2 for s in stages)


def test_mist_saves_no_memory_that_it_has() -> None:
    found = plan_by("mist", shortened("llama3-8b", 4), setup("b200"), gpus=4, global_batch=16)
    assert all(s.again == 0 and s.offload == Offload() for s in found.arrangement.stages)


def test_systems_for_equal_gpus_are_priced_on_the_gpus_that_are_there() -> None:
    nodes = (("h100", 1, 2), ("a100", 1, 2))
    found = plan_by("alpa", shortened("llama3-8b", 4), setup(nodes=nodes), gpus=4, global_batch=16)
    kinds = [kind for s in found.arrangement.stages for kind in s.mesh.kinds for _ in range(s.mesh.tp)]
    assert sorted(kinds) == ["a100", "a100", "h100", "h100"]


# -- on the command line ---------------------------------------------------------------------------------------------


def test_plan_by_systems_prints_rows_and_writes_a_plan_that_prices_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "llama3-8b", "--gpus", "8", "--gpu", "h100", "--global-batch", "16", "--json", "--budget", "3"]
    out = tmp_path / "plan.json"
    assert main([*words, "--system", "alpa,mist", "-o", str(out)]) == 0
    numbers = json.loads(capsys.readouterr().out)
    rows = {row["system"]: row for row in numbers["systems"]}
    assert set(rows) == {"alpa", "mist"} and all(row["fits"] for row in rows.values())
    for row in rows.values():
        assert sum(stage["gpus"] for stage in row["stages"]) == 8
        tokens = 16 * 4096 / 8 / (row["step_ms"] / 1e3)
        assert row["tokens_per_gpu_per_second"] == pytest.approx(tokens)
    plan = load_plan(out)
    best = min(rows.values(), key=lambda row: row["step_ms"])
    assert simulate(plan, costs_of_plan(plan)).step_ms == pytest.approx(best["step_ms"])


def test_a_search_of_ours_that_fits_nowhere_leaves_the_others_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """One GPU: no shard helps, only Mist's host memory does."""
    words = ["plan", "llama3-8b", "--gpus", "1", "--gpu", "h100", "--global-batch", "4", "--budget", "3", "--json"]
    assert main([*words, "--system", "octopipe,alpa,mist"]) == 0
    rows = {row["system"]: row for row in json.loads(capsys.readouterr().out)["systems"]}
    assert rows["mist"]["fits"] and rows["mist"]["stages"][0]["offload"]["optimizer"] > 0
    assert not rows["octopipe"]["fits"] and "no split" in rows["octopipe"]["reason"]
    assert not rows["alpa"]["fits"] and "fits as it was published" in rows["alpa"]["reason"]
    assert main([*words, "--system", "alpa"]) == 3


def test_flags_that_systems_have_no_use_for_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama3-8b", "--gpus", "8", "--gpu", "h100", "--global-batch", "16", "--system", "alpa"]
    for more, said in (
        ("--pp 4", "choose it for each stage"),
        ("--for torch", "their own runtimes"),
        ("--today tp=8", "add octopipe"),
    ):
        assert main([*words, *more.split()]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words[:-1], "gpipe"])
    assert "does not plan clusters" in capsys.readouterr().err
    with pytest.raises(OctoPipeError, match="does not plan clusters"):
        plan_by("gpipe", preset("llama3-8b"), setup(), gpus=8, global_batch=16)


def test_what_a_system_returns_fits_and_uses_every_gpu_once() -> None:
    spec = shortened("llama3-8b", 8)
    for name in ("alpa", "dapple", "metis", "mist"):
        found = plan_by(name, spec, setup(), gpus=8, global_batch=32, budget_s=5)
        stages = found.arrangement.stages
        assert found.fits and sum(s.gpus for s in stages) == 8
        assert [s.first for s in stages[1:]] == [s.stop for s in stages[:-1]]
        assert stages[0].first == 0 and stages[-1].stop == spec.num_layers
        again = judged(MeshPricer(spec, setup()), found.arrangement)
        assert again.step_ms == pytest.approx(found.step_ms)
        # The system's own formula is near what its plan takes.
        assert found.arrangement.objective_ms == pytest.approx(found.step_ms, rel=0.25)

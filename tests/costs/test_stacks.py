"""Stack files, tables of runs, hardware files and `octopipe calibrate`: read, refused in one line, and used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.analytic.calibration import stack_from, stack_named
from octopipe.costs.cluster.hardware import gpu, gpu_from, gpu_record
from octopipe.costs.cluster.hardware_file import hardware_from, read_hardware
from octopipe.costs.cluster.setup import Setup, setup_from
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.runs import read_runs

RUNS = """system,model,gpus,tp,pp,gbs,seq,tokens_per_s_per_gpu
h100,llama3-8b,16,2,2,64,8192,7120
h100,llama3-8b,8,1,1,64,8192,8120
h100,llama3-70b,64,4,4,128,8192,790
h100,llama3-70b,64,8,2,128,8192,760
"""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text(RUNS)
    return path


def test_a_table_of_runs_is_read(runs: Path) -> None:
    found = read_runs(runs)
    assert [run.setup.num_gpus for run in found] == [16, 8, 64, 64]
    assert found[2].setup.micro_batches == 32 and found[0].recompute == "auto"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("tokens_per_s_per_gpu", "speed", "no column tokens_per_s_per_gpu"),
        ("seq", "colour", "unknown column 'colour'"),
        ("seq", "tp", "column tp appears twice"),
        ("h100,llama3-8b,16", "h1000,llama3-8b,16", "line 2: unknown GPU"),
        ("llama3-8b,16", "llama9,16", "line 2: unknown model"),
        ("llama3-8b,16,2,2", "llama3-8b,16,3,2", "line 2: tp x pp x cp = 6 does not divide 16 GPUs"),
        ("7120", "-3", "line 2: tokens_per_s_per_gpu is '-3'"),
        ("7120", "nan", "line 2: tokens_per_s_per_gpu is 'nan'"),
        ("64,8192,7120", "2,8192,7120", "line 2: gbs 2 is less"),
        ("8192,7120", "8192", "line 2 has 7 cells for 8 columns"),
    ],
)
def test_a_wrong_table_is_refused_with_its_line(runs: Path, old: str, new: str, said: str) -> None:
    runs.write_text(RUNS.replace(old, new, 1))
    with pytest.raises(OctoPipeError, match=r"runs\.csv: ") as caught:
        read_runs(runs, model=lambda name: None)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_calibrate_writes_a_stack_that_the_other_verbs_take(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.json"
    assert main(["calibrate", str(runs), "-o", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["rows"]) == 4 and all(abs(row["error"]) < 0.3 for row in told["rows"])
    assert told["stack"]["errors"]["runs"] == 4
    setup = ["llama3-8b", "--pp", "2", "--tp", "2", "--gpu", "h100", "--json"]
    assert main(["simulate", *setup]) == 0
    plain = json.loads(capsys.readouterr().out)
    plan = tmp_path / "plan.json"
    assert main(["simulate", *setup, "--stack", str(out), "-o", str(plan)]) == 0
    mine = json.loads(capsys.readouterr().out)
    assert mine["setup"]["stack"]["name"] == "mine" and mine["step_ms"] > 1.05 * plain["step_ms"]
    out.unlink()  # the plan carries the rates it was made with
    assert main(["simulate", "--plan", str(plan), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_ms"] == pytest.approx(mine["step_ms"])


def test_calibrate_says_what_it_needs(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate"]) == 2
    assert main(["calibrate", str(runs), "--name", "torchtitan", "-o", str(tmp_path / "x.json")]) == 2
    assert main(["calibrate", str(tmp_path / "none.csv"), "-o", str(tmp_path / "x.json")]) == 2
    assert all(line.startswith("octopipe") for line in capsys.readouterr().err.splitlines())
    assert main(["calibrate", "--list"]) == 0
    assert "torchtitan" in capsys.readouterr().out


def test_calibrate_learns_from_a_profile_of_one_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers timed by a stack whose products are slow: their share of the peak comes out near it."""
    from octopipe.costs.profile_file import Profile

    slow = stack_named("nvidia-2025")
    slow = replace(slow, name="slow", rates=tuple((g, p, replace(r, gemm=0.5 * r.gemm)) for g, p, r in slow.rates))
    costs = resolve_costs("llama3-8b", pp=1, tp=1, gpu="h100", stack=slow)
    about = {"recipe": {"model": "llama3-8b", "tokens": 4096, "micro_batch_size": 1}, "device": "NVIDIA H100 80GB"}
    file = tmp_path / "profile.json"
    Profile(costs=costs, about=about).save(file)
    assert main(["calibrate", str(file), "-o", str(tmp_path / "s.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rates = next(r for r in found["stack"]["rates"] if r["generation"] == "hopper" and r["precision"] == "bf16")
    assert rates["gemm"] == pytest.approx(0.39, rel=0.15)
    assert max(abs(row["error"]) for row in found["rows"]) < 0.25


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rates": []}, "no rates"),
        ({"name": 3}, "name is 3"),
        ({"format": "octopipe.stack/9"}, "octopipe.stack/9"),
        (
            {"rates": [{"generation": "hopper", "precision": "bf16", "gemm": 2.0, "half": 200, "core": 0.5}]},
            "gemm is 2",
        ),
        (
            {"rates": [{"generation": "hopper", "precision": "int4", "gemm": 0.7, "half": 200, "core": 0.5}]},
            "precision",
        ),
        ({"rates": [{"generation": "hopper", "precision": "bf16", "gemm": 0.7, "half": 200}]}, "core is missing"),
        ({"errors": {"runs": 3}}, "errors has no"),
    ],
)
def test_a_wrong_stack_file_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(OctoPipeError, match="mine") as caught:
        stack_from(stack_named("torchtitan").as_dict() | {"name": "mine"} | change, "mine.json")
    assert said in str(caught.value)


def test_a_stack_and_a_set_up_survive_being_written() -> None:
    own = replace(stack_named("torchtitan"), name="own")
    assert stack_from(own.as_dict(), "own") == own
    for stack in (None, stack_named("torchtitan"), own):
        for kind in (gpu("h100"), replace(gpu("h100"), name="mine", memory_gib=64.0)):
            setup = Setup(gpu=kind, stack=stack, tp=2)
            assert setup_from(json.loads(json.dumps(setup.as_dict()))) == setup
    assert gpu_record(gpu("h100")) == "h100" and gpu_from("h100") == gpu("h100")


def test_an_unknown_stack_is_named_with_the_nearest() -> None:
    with pytest.raises(OctoPipeError, match="did you mean torchtitan"):
        stack_named("torchtitn")


# -- hardware files --------------------------------------------------------------------------------------------------

HARDWARE = {
    "gpu": {"like": "h100", "name": "mine", "power_watts": 500},
    "network": {"nics_per_node": 4, "nic_gb_per_s": 50, "pod_nodes": 4, "oversubscription": 2.0},
}


def test_a_hardware_file_changes_what_it_names() -> None:
    found, board = hardware_from(HARDWARE), gpu("h100")
    assert found.clock == pytest.approx((500 / 700) ** (1 / 3)) and found.watts == 500
    assert found.inter_gb_per_s == 25.0 and found.intra_gb_per_s == board.intra_gb_per_s
    assert found.pod_gpus == 32 and found.memory_gib == board.memory_gib


def test_slower_hardware_is_slower_and_pods_count_only_beyond_them() -> None:
    def step(kind: object, dp: int, seq: int = 1024) -> float:
        costs = resolve_costs("llama3-70b", pp=1, tp=8, dp=dp, gpu=kind, zero=3, seq=seq)  # type: ignore[arg-type]
        return float(costs.layer_ms.sum())

    slow_clock = hardware_from({"gpu": {"like": "h100", "power_watts": 350}})
    assert step(slow_clock, 4, 16384) > 1.1 * step(gpu("h100"), 4, 16384)
    pods = hardware_from({"gpu": {"like": "h100"}, "network": {"pod_nodes": 4, "oversubscription": 4.0}})
    assert step(pods, 4) == pytest.approx(step(gpu("h100"), 4))
    assert step(pods, 16) > 1.2 * step(gpu("h100"), 16)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({}, "no [gpu]"),
        ({"gpu": {"like": "h1000"}}, "unknown GPU"),
        ({"gpu": {"memory_gib": 80}}, "has no name, generation"),
        ({"gpu": {"like": "h100", "colour": 1}}, "unknown key 'colour'"),
        ({"gpu": {"like": "h100", "memory_gib": -1}}, "memory_gib is -1"),
        ({"gpu": {"like": "h100", "name": "b200"}}, "is the name of a preset"),
        ({"gpu": {"like": "h100"}, "network": {"nics_per_node": 4}}, "without nic_gb_per_s"),
        ({"gpu": {"like": "h100"}, "network": {"oversubscription": 2}}, "belong together"),
        ({"gpu": {"like": "h100"}, "network": {"pod_nodes": 2, "oversubscription": 0.5}}, "give 1 or more"),
        ({"gpu": {"like": "h100"}, "network": {"gpus_per_node": 2.5}}, "gpus_per_node is 2.5"),
        ({"gpu": {"like": "h100"}, "network": {"flows_per_connection": 4}}, "needs pods; give pod_nodes too"),
    ],
)
def test_a_wrong_hardware_file_is_refused(raw: dict[str, object], said: str) -> None:
    with pytest.raises(OctoPipeError, match="hw") as caught:
        hardware_from(raw, "hw")
    assert said in str(caught.value)


def test_hardware_reaches_every_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "h.toml"
    file.write_text('[gpu]\nlike = "h100"\nname = "mine"\npower_watts = 350\n')
    assert read_hardware(file).name == "mine"
    common = ["llama3-8b", "--hardware", str(file), "--json"]
    for words in (
        ["simulate", *common, "--pp", "2", "--tp", "2"],
        ["tune", *common, "--pp", "2", "--tp", "2", "--budget", "1s"],
        ["scale", *common, "--pp", "2", "--tp", "2", "--gpus", "8,16"],
        ["plan", *common, "--gpus", "8", "--global-batch", "16", "--budget", "2s"],
    ):
        assert main(words) == 0, words
        told = json.loads(capsys.readouterr().out)
        assert told["setup"]["gpu"]["name"] == "mine", words[0]
    assert main(["plan", *common, "--gpus", "8", "--global-batch", "16", "--cluster", str(file)]) == 2
    assert "leave --gpu" in capsys.readouterr().err


def test_nvfp4_is_faster_where_the_card_has_it_and_refused_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    def step(precision: str) -> float:
        costs = resolve_costs("llama3.1-405b", pp=8, tp=4, gpu="gb300", precision=precision, seq=8192)
        return float(costs.layer_ms.sum())

    assert step("nvfp4") < 0.9 * step("fp8") < 0.9 * step("bf16")
    assert main(["simulate", "llama3-8b", "--pp", "2", "--gpu", "h100", "--precision", "nvfp4"]) == 2
    assert "no nvfp4 matrix units" in capsys.readouterr().err

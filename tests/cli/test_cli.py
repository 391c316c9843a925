"""The command line: numbers users will check, and one clear line for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from effort import some
from verbs import run, simulated

from octopipe.cli import VERBS, main


def times_file(folder: Path, pattern: str, f: float, i: float, w: float, **more: object) -> str:
    symbols = sorted(set(pattern))
    path = folder / "times.json"
    tables = {"forward_ms": f, "backward_ms": i, "weight_ms": w}
    path.write_text(json.dumps({"pattern": pattern} | {k: dict.fromkeys(symbols, v) for k, v in tables.items()} | more))
    return str(path)


ZERO_BUBBLE_TABLE = [
    # p, m, F, B, W, c (ms), published 1F1B bubble rate (Zero Bubble, ICLR 2024)
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352),
]


@pytest.mark.parametrize("row", some(ZERO_BUBBLE_TABLE, 3))
def test_published_1f1b_bubble_rates(capsys: pytest.CaptureFixture[str], tmp_path: Path, row: tuple[Any, ...]) -> None:
    p, m, f, b, w, c, rate = row
    path = times_file(tmp_path, "T" * p, f, b, w)
    numbers = simulated(capsys, path, "--system", "1f1b", "--pp", str(p), "--micro-batches", str(m), "--p2p-ms", str(c))
    assert round(float(numbers["span_bubble_ratio"]), 4) == rate  # type: ignore[arg-type]


def test_authors_layer_times_give_the_known_1f1b_steps(capsys: pytest.CaptureFixture[str], profiles: Path) -> None:
    nano = simulated(
        capsys, str(profiles / "nemotron-nano-v2-9b.json"), "--pp", "4", "--micro-batches", "8", "--p2p-ms", "0"
    )
    assert nano["step_ms"] == pytest.approx(1330.3, abs=0.1)
    large = simulated(
        capsys, str(profiles / "nemotron-h-56b.json"), "--pp", "8", "--micro-batches", "8", "--p2p-ms", "0.34"
    )
    assert large["step_ms"] == pytest.approx(2425, abs=2)


def test_json_has_the_promised_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = {"activation_gib": 1, "stash_gib": 0.5, "params_gib": 2}
    path = times_file(tmp_path, "ETTTTL", 1, 1, 1, **{k: dict.fromkeys("ETL", v) for k, v in sizes.items()})
    numbers = simulated(capsys, path, "--pp", "2", "--micro-batches", "4", "--memory-gib", "9")
    assert numbers["step_ms"] == 5 * 9
    assert numbers["peak_memory_gib"] == [12.0, 9.0]
    assert numbers["fits"] is False
    assert numbers["communications"] == 4 * 4 * 1
    expected = {
        "span_ms",
        "bubble_ratio",
        "span_bubble_ratio",
        "lower_bound_ms",
        "overlapped",
        "tokens_per_gpu_per_second",
    }
    assert expected <= set(numbers)
    assert numbers["bubble_ratio"] == pytest.approx(1 - 36 / 45)


def test_splitting_the_backward_never_slows_1f1b(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = times_file(tmp_path, "ETTTTTTL", 1, 1, 1)
    fused = simulated(capsys, path, "--pp", "4", "--micro-batches", "8")
    split = simulated(capsys, path, "--pp", "4", "--micro-batches", "8", "--split-backward")
    assert float(split["step_ms"]) < float(fused["step_ms"])  # type: ignore[arg-type]


def test_a_saved_plan_simulates_to_the_same_step_and_passes_check(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = times_file(tmp_path, "ETTTTTTL", 1, 2, 1)
    plan = str(tmp_path / "plan.json")
    timeline = str(tmp_path / "timeline.json")
    first = simulated(capsys, path, "--pp", "2", "--micro-batches", "3", "-o", plan, "--timeline", timeline)
    again = simulated(capsys, path, "--plan", plan)
    assert again["step_ms"] == first["step_ms"]
    code, out, _ = run(capsys, "check", plan)
    assert code == 0 and "can run" in out
    from octopipe.simulation.timeline import load_timeline

    assert load_timeline(timeline).step_ms == first["step_ms"]


def test_human_output_leads_with_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "simulate", "nemotron-h-56b", "--gpu", "h800", "--tp", "8", "--pp", "8", "--micro-batches", "8"
    )
    assert code == 0
    assert "ms a step" in out.splitlines()[0] and "bubble" in out.splitlines()[0]
    assert "\x1b[" not in out  # a pipe gets no colours


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "no-such-model", "--pp", "2"),
        ("simulate", "llama3-8b", "--pp", "2", "--gpu", "h9000"),
        ("simulate", "llama3-8b", "--pp", "2", "--system", "1f2b"),
        ("simulate", "llama3-8b", "--pp", "0"),
        ("simulate", "llama3-8b", "--pp", "-3"),
        ("simulate", "llama3-8b", "--pp", "two"),
        ("simulate", "llama3-8b"),
        ("simulate", "llama3-8b", "--pp", "100"),
        ("simulate", "llama3-8b", "--pp", "2", "--p2p-ms", "nan"),
        ("simulate", "llama3-8b", "--pp", "2", "--p2p-ms", "-1"),
        ("simulate", "llama3-8b", "--pp", "2", "--memory-gib", "0"),
        ("simulate", "llama3-8b", "--pp", "2", "--memory-gib", "1,2,3"),
        ("simulate", "llama3-8b", "--pp", "3", "--micro-batches", "4", "--system", "interleaved"),
        ("simulate", "llama3-8b", "--plan", "/no/such/plan.json"),
        ("simulate", "llama3-8b", "--pp", "2", "-o", "/no/such/folder/plan.json"),
        ("check", "/no/such/plan.json"),
        ("models", "no-such-model"),
        ("tea",),
    ],
)
def test_mistakes_give_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("octopipe") and "Traceback" not in err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '"x"',
        "[" * 50_000,
        '{"pattern": "TT"}',
        '{"pattern": "", "forward_ms": {}, "backward_ms": {}, "weight_ms": {}}',
        '{"pattern": "TT", "forward_ms": {"T": -1}, "backward_ms": {"T": 1}, "weight_ms": {"T": 1}}',
        '{"pattern": "TT", "forward_ms": {"T": NaN}, "backward_ms": {"T": 1}, "weight_ms": {"T": 1}}',
        '{"pattern": "TT", "forward_ms": {"T": 1e999}, "backward_ms": {"T": 1}, "weight_ms": {"T": 1}}',
        '{"pattern": "TM", "forward_ms": {"T": 1}, "backward_ms": {"T": 1}, "weight_ms": {"T": 1}}',
        '{"pattern": "TT", "forward_ms": [1], "backward_ms": {"T": 1}, "weight_ms": {"T": 1}}',
        '{"pattern": ["T"], "forward_ms": {"T": 1}, "backward_ms": {"T": 1}, "weight_ms": {"T": 1}}',
    ],
)
def test_hostile_layer_times_give_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    code, out, err = run(capsys, "simulate", str(path), "--pp", "2")
    assert code == 2 and out == ""
    assert err.startswith("octopipe: ") and len(err.strip().splitlines()) == 1
    assert "times.json" in err


@pytest.mark.parametrize(
    ("verb", "defaults"),
    [
        ("plan", {"zero": "searched", "recompute": "auto"}),
        ("tune", {"zero": "1", "recompute": "searched, stage by stage"}),
        ("simulate", {"zero": "1", "recompute": "none"}),
    ],
)
def test_help_says_what_a_verb_does_without_the_flag(
    capsys: pytest.CaptureFixture[str], verb: str, defaults: dict[str, str]
) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    words = " ".join(capsys.readouterr().out.split())
    for name, default in defaults.items():
        described = words.rpartition(f" --{name} {{")[2].partition(" --")[0]
        assert described.endswith(f"(default: {default})")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from octopipe.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit(1 if {'numpy', 'numba', 'torch', 'rich', 'msgspec'} & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(verb in done.stdout for verb in VERBS)


# -- tune: what one gains, in which set-up ------------------------------------------------------------------


def tuned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, err = run(capsys, "tune", *words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_tune_says_what_one_gains_and_in_which_set_up(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    setting = ("nemotron-h-8b", "--pp", "2", "--tp", "2", "--micro-batches", "8", "--memory-gib", "60")
    how = ("--method", "octopipe", "--iterations", "1", "--budget", "60s")
    found = tuned(capsys, *setting, *how, "-o", str(plan))
    for name, mode in (("baseline", ()), ("baseline_split", ("--split-backward",))):
        reference = simulated(capsys, *setting, "--system", "1f1b", *mode)
        assert found[name]["split_backward"] == reference["split_backward"] == bool(mode)
        assert found[name]["step_ms"] == pytest.approx(reference["step_ms"])
        assert found[name]["speedup"] == pytest.approx(reference["step_ms"] / found["step_ms"])
    assert found["best_system"]["speedup"] >= 1.0 - 1e-9 and found["best_system"]["system"]
    setup = found["setup"]
    assert (setup["gpu"], setup["tp"], setup["pp"], setup["micro_batches"], setup["seq"]) == ("h800", 2, 2, 8, 4096)
    assert setup["memory_gib_per_rank"] == pytest.approx([60.0] * 2)
    own = simulated(capsys, "--plan", str(plan))
    assert found["peak_memory_gib"] == pytest.approx(own["peak_memory_gib"])
    for name in ("tokens_per_gpu_per_second", "mfu", "model_tflops_per_gpu"):
        assert found[name] == pytest.approx(own[name]) and found[name] > 0
    # Eight micro-batches of 4096 tokens on 2 x 2 GPUs.
    assert found["tokens_per_gpu_per_second"] == pytest.approx(2 * 4096 / (found["step_ms"] / 1e3))
    assert found["bound_of"]["words"] == "plans that hold each layer once and may recompute"
    code, out, _ = run(capsys, "tune", *setting, *how, "-o", str(plan))
    words = " ".join(out.split())
    assert (
        code == 0 and "the speed of 1F1B as published" in words and "published system" in words and "of 60.0" in words
    )
    assert "octopipe report" in words and "octopipe train nemotron-h-8b" in words and "octopipe export" in words
    assert "tokens/s per GPU" in words and "% MFU" in words
    assert "tp 2" in words and "for plans that hold each layer once" in words and "-0.00" not in words


def test_tune_holds_no_layer_twice_where_weights_are_not_known(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Copies cost nothing in such a file; with one heavy layer they would always win."""
    path = times_file(tmp_path, "TTTL", 1.0, 1.0, 1.0)
    file = json.loads(Path(path).read_text())
    file["forward_ms"]["L"] = file["backward_ms"]["L"] = 8.0
    Path(path).write_text(json.dumps(file))
    setting = (path, "--pp", "2", "--micro-batches", "4", "--iterations", "300", "--workers", "1")
    found = tuned(capsys, *setting)
    assert found["bound_of"]["copies"] is False and any("--copies" in note for note in found["notes"])
    asked = tuned(capsys, *setting, "--copies")
    assert asked["bound_of"]["copies"] is True and asked["notes"] == []
    assert asked["step_ms"] < found["step_ms"] and asked["lower_bound_ms"] < found["lower_bound_ms"]


def test_tune_switches_phases_of_algorithm_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = times_file(tmp_path, "TTTTTTTL", 1.0, 1.0, 1.0)
    common = (path, "--pp", "2", "--micro-batches", "4", "--method", "octopipe", "--iterations", "4")
    found = tuned(capsys, *common, "--phases", "partition,schedule")
    assert found["phase_iterations"]["placement"] == 0
    code, _, err = run(capsys, "tune", *common, "--phases", "partition,schedules")
    assert code == 2 and "partition, placement, schedule" in err
    code, _, err = run(capsys, "tune", path, "--pp", "2", "--phases", "partition")
    assert code == 2 and "--method octopipe" in err


@pytest.mark.parametrize("name", some(["SIGTERM", "SIGINT"]))
def test_a_signal_ends_tune_with_the_best_plan_on_disk(tmp_path: Path, name: str) -> None:
    path, plan = times_file(tmp_path, "TTTTTTTTTTTL", 1.0, 1.5, 0.5), tmp_path / "plan.json"
    words = ("tune", path, "--pp", "4", "--micro-batches", "8", "--method", "random", "--budget", "500s")
    program = (
        "import os, signal, sys\n"
        "from octopipe.cli import main\n"
        "from octopipe.cli.verbs import tune\n"
        "show = tune.progress_line\n"
        "def line(p):\n"
        f"    os.kill(os.getpid(), signal.{name})\n"
        "    return show(p)\n"
        "class Screen:\n"
        "    is_terminal = True\n"
        "    def status(self, _): return self\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *_): pass\n"
        "    def update(self, _): pass\n"
        "real = tune.console\n"
        "tune.console = lambda *, stderr=False: Screen() if stderr else real()\n"
        "tune.progress_line = line\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words, "-o", str(plan)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == {"SIGINT": 130, "SIGTERM": 143}[name], done.stderr
    assert "interrupted" in done.stdout and plan.exists()


def test_tune_for_another_runtime_says_what_that_costs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("tune", "nemotron-h-8b", "--gpu", "h800", "--tp", "8", "--pp", "2", "--micro-batches", "4")
    assert main([*words, "--budget", "2s", "--for", "megatron", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert any("only plans that megatron can run were searched" in note for note in told["notes"])

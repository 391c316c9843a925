"""The command line: numbers users will check, and one clear line for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from octopipe.cli import VERBS, main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def simulate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    code, out, err = run(capsys, "simulate", *words, "--json")
    assert code in (0, 3), err
    return json.loads(out)


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


@pytest.mark.parametrize(("p", "m", "f", "b", "w", "c", "rate"), ZERO_BUBBLE_TABLE)
def test_published_1f1b_bubble_rates(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    p: int,
    m: int,
    f: float,
    b: float,
    w: float,
    c: float,
    rate: float,
) -> None:
    path = times_file(tmp_path, "T" * p, f, b, w)
    numbers = simulate(capsys, path, "--system", "1f1b", "--pp", str(p), "--micro-batches", str(m), "--p2p-ms", str(c))
    assert round(float(numbers["span_bubble_ratio"]), 4) == rate  # type: ignore[arg-type]


def test_authors_layer_times_give_the_known_1f1b_steps(capsys: pytest.CaptureFixture[str], profiles: Path) -> None:
    nano = simulate(
        capsys, str(profiles / "nemotron-nano-v2-9b.json"), "--pp", "4", "--micro-batches", "8", "--p2p-ms", "0"
    )
    assert nano["step_ms"] == pytest.approx(1330.3, abs=0.1)
    large = simulate(
        capsys, str(profiles / "nemotron-h-56b.json"), "--pp", "8", "--micro-batches", "8", "--p2p-ms", "0.34"
    )
    assert large["step_ms"] == pytest.approx(2425, abs=2)


def test_json_has_the_promised_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = {"activation_gib": 1, "stash_gib": 0.5, "params_gib": 2}
    path = times_file(tmp_path, "ETTTTL", 1, 1, 1, **{k: dict.fromkeys("ETL", v) for k, v in sizes.items()})
    numbers = simulate(capsys, path, "--pp", "2", "--micro-batches", "4", "--memory-gib", "9")
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
    fused = simulate(capsys, path, "--pp", "4", "--micro-batches", "8")
    split = simulate(capsys, path, "--pp", "4", "--micro-batches", "8", "--split-backward")
    assert float(split["step_ms"]) < float(fused["step_ms"])  # type: ignore[arg-type]


def test_a_saved_plan_simulates_to_the_same_step_and_passes_check(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = times_file(tmp_path, "ETTTTTTL", 1, 2, 1)
    plan = str(tmp_path / "plan.json")
    timeline = str(tmp_path / "timeline.json")
    first = simulate(capsys, path, "--pp", "2", "--micro-batches", "3", "-o", plan, "--timeline", timeline)
    again = simulate(capsys, path, "--plan", plan)
    assert again["step_ms"] == first["step_ms"]
    code, out, _ = run(capsys, "check", plan)
    assert code == 0 and "can run" in out
    from octopipe.timeline import load_timeline

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


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from octopipe.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit(1 if {'numpy', 'numba', 'torch', 'rich', 'msgspec'} & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(verb in done.stdout for verb in VERBS)

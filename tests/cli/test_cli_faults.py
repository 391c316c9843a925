"""What goes wrong on the command line: one line, the right exit code, whatever the terminal and the names."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from ranks import PATIENCE_S
from verbs import run

from octopipe import cli
from octopipe.base.errors import DoesNotFitError
from octopipe.cli import EXIT_CODES, VERBS, main
from octopipe.cli.verbs import models as models_verb
from octopipe.cli.verbs.screen import Screen, marked, printable

TIMES = {
    "pattern": "ETTTTL",
    "forward_ms": dict.fromkeys("ETL", 1.0),
    "backward_ms": dict.fromkeys("ETL", 1.0),
    "weight_ms": dict.fromkeys("ETL", 1.0),
}


def shell(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octopipe", *words],
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.fixture
def times(tmp_path: Path) -> str:
    path = tmp_path / "times.json"
    path.write_text(json.dumps(TIMES))
    return str(path)


# -- words mistyped ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("simulat", "llama3-8b"), "did you mean simulate?"),
        (("tunes",), "did you mean tune?"),
        (("--pp", "2", "simulate"), "octopipe VERB --pp"),
        (("simulate", "llama3-8b", "--pp", "2", "--micro-batchs", "4"), "did you mean --micro-batches"),
        (("simulate", "llama3-8b", "--pp", "2", "--sistem", "1f1b"), "did you mean --system"),
        (("simulate", "llama3-8b", "--pp", "2", "--channel", "dirceted"), "did you mean directed?"),
        (("simulate", "lama3-8b", "--pp", "2"), "llama3-8b"),
        (("simulate", "llama3-8b", "--pp", "2", "--system", "zb-h"), "zb-h1"),
        (("simulate", "llama3-8b", "--pp", "2", "--gpu", "h10"), "h100"),
        (("export", "plan.json", "--to", "pgn"), "did you mean png?"),
        (("export", "plan.json"), "missing --to"),
        (("simulate", "llama3-8b", "--pp", "2", "--micro-batches", "100000000"), "at most 65536"),
        (("tune", "llama3-8b", "--pp", "2", "--micro-batches", "9" * 400), "at most 65536"),
        (("help", "tee"), "unknown verb 'tee'"),
    ],
)
def test_a_mistyped_word_gives_one_line_with_the_nearest(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], hint: str
) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2 and out == "" and err.count("\n") == 1 and len(err) < 400
    assert err.startswith("octopipe") and hint in err and "usage:" not in err


def test_a_flags_error_names_the_help_of_its_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert "octopipe simulate --help" in run(capsys, "simulate", "llama3-8b", "--pp", "two")[2]
    code, out, _ = run(capsys, "help", "simulate")
    assert code == 0 and "--micro-batches" in out


# -- exit codes ----------------------------------------------------------------------------------------


def test_exit_codes_are_these_and_help_says_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(EXIT_CODES) == [0, 1, 2, 3, 70, 130, 143]
    out = run(capsys, "--help")[1]
    assert all(f"  {code} " in out and text in out for code, text in EXIT_CODES.items())


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (DoesNotFitError("rank 0 lacks 3 GiB"), 3, "lacks 3 GiB"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (cli.Terminated(), 143, "terminated"),
        (ModuleNotFoundError("No module named 'torch'", name="torch.distributed"), 2, 'pip install "octopipe[torch]"'),
        (ModuleNotFoundError("No module named 'ortools'", name="ortools"), 2, 'pip install "octopipe[exact]"'),
        (OSError(24, "Too many open files"), 2, "ulimit -n"),
        (OSError(28, "No space left on device", "/tmp/x"), 2, "/tmp/x"),
        (OSError(30, "Read-only file system", "/x"), 2, "read-only"),
        (OSError(12, "Cannot allocate memory"), 2, "out of memory"),
        (ImportError("libtorch.so: failed to map segment from shared object"), 2, "out of memory"),
        (RuntimeError("can't start new thread"), 2, "ulimit -u"),
        (FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"), 2, "TMPDIR"),
        (MemoryError(), 2, "out of memory"),
        (ZeroDivisionError("integer division"), 70, "octopipe models --debug llama3-8b"),
        (ModuleNotFoundError("No module named 'x'", name="x"), 70, "report it"),
    ],
)
def test_what_stops_a_verb_is_one_line_and_its_own_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.delenv("OCTOPIPE_TRACEBACK", raising=False)
    monkeypatch.setattr(models_verb, "run", fail)
    found, out, err = run(capsys, "models", "llama3-8b")
    assert (found, out, err.count("\n")) == (code, "", 1) and words in err and "Traceback" not in err


def test_a_traceback_shows_where_it_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_verb, "run", lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["models", "--debug"])
    monkeypatch.setenv("OCTOPIPE_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["models"])


def test_a_reader_that_goes_away_costs_no_traceback() -> None:
    command = f"{sys.executable} -m octopipe models --json; echo code $? >&2"
    done = subprocess.run(
        ["bash", "-c", f"({command}) | head -c 1 >/dev/null"], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr and ("code 1" in done.stderr or "code 0" in done.stderr)


SWALLOWED = """
import signal, sys, time, weakref
from octopipe.cli import _Signals

class Thing: pass

signals, thing = _Signals(), Thing()
callback = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
try:
    del thing
    for _ in range(2000):
        time.sleep(0.01)
    print("forgotten")
except KeyboardInterrupt:
    print("heard", signals.number)
"""


def test_ctrl_c_in_the_callback_of_a_weak_reference_is_not_forgotten() -> None:
    """Python drops exceptions there, and imports are full of such callbacks: `train` went on as if nothing had come."""
    # Where tests run in the background, a shell has told them to ignore Ctrl-C.
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWED], preexec_fn=hears, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.stdout, done.stderr) == ("heard 2\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_stops_in_good_order(number: signal.Signals) -> None:
    # Where tests run in the background, a shell has told them to ignore Ctrl-C.
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    words = [sys.executable, "-m", "octopipe", "serve", "--port", "0"]
    server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, preexec_fn=hears)
    assert server.stderr is not None
    first = server.stderr.readline()
    assert "http://" in first
    server.send_signal(number)
    rest = server.communicate(timeout=PATIENCE_S)[1]
    assert "stopped" in rest and "Traceback" not in rest and server.returncode == 128 + number


def test_no_gpu_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, _, err = run(capsys, "train", "nemotron-h-4b", "--scale", "0.05", "--steps", "1", "--device", "cuda")
    assert code == 2 and "no CUDA device here" in err and err.count("\n") == 1


def test_measuring_without_torch_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\nfrom octopipe.cli import main\n"
        "sys.exit(main(['profile', 'nemotron-h-4b', '--scale', '0.05']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "octopipe[torch]" in done.stderr and done.stderr.count("\n") == 1, done.stderr


# -- terminals without symbols, names with anything in them --------------------------------------------


def test_every_table_prints_where_there_are_only_ascii_letters(times: str, tmp_path: Path) -> None:
    code = (
        "import sys; from octopipe.cli import main\n"
        "for line in sys.argv[1:]:\n"
        "    words = line.split()\n"
        "    assert main(words) == (2 if words[0] == 'check' else 0), words"
    )
    lines = ["models", "models jamba-20b", "systems", f"simulate {times} --pp 2", f"check {tmp_path}/é.json"]
    lines.append(f"compare {times} --pp 2 --systems 1f1b,gpipe,interleaved")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, *lines], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).isascii() and "* decides this itself" in done.stdout


def test_json_survives_ascii(tmp_path: Path) -> None:
    path = tmp_path / "modèle→.json"
    path.write_text(json.dumps(TIMES))
    done = shell("simulate", str(path), "--pp", "2", "--json", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and json.loads(done.stdout)["model"] == "modèle→"


@pytest.mark.parametrize(
    "name", ["a[/]b", "[bold]x", "x[/bold]", "[exact]", "[link=http://e]x", "\\[x]", "[/][/]", "a\\", "[red", ":smile:"]
)
def test_brackets_in_names_are_letters(name: str) -> None:
    out = io.StringIO()
    Screen(file=out, width=200).print(f"[bold]model[/]: {name} [red]ms[/]")
    plain = out.getvalue()
    assert "model: " in plain and "ms" in plain
    if name not in ("[bold]x", "x[/bold]"):  # our own tags are the one exception, and only ever change a style
        assert name in plain


def test_control_characters_in_names_never_reach_a_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert printable("a\x1b]0;b\x07\u202e") == "a\\x1b]0;b\\x07\\u202e"
    assert "\x1b" not in marked("x\x1b[2Jy").plain
    path = tmp_path / "x\x1b[2Jy.json"
    path.write_text(json.dumps(TIMES))
    for words in (("simulate", str(path), "--pp", "2"), ("check", str(path)), ("models", str(path))):
        _, out, err = run(capsys, *words)
        assert "\x1b" not in out + err and ("\\x1b" in out + err)


def test_a_missing_extra_is_named_in_full(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`octopipe[exact]` looks like markup to rich: `compare` once told users to install octopipe."""
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    code, out, err = run(capsys, "compare", "llama3-8b", "--pp", "2", "--micro-batches", "4", "--systems", "tessel")
    assert code == 0 and "octopipe[exact]" in (out + err).replace("\n", "")


def test_what_the_library_logs_is_a_line_of_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("octopipe.plan")
    monkeypatch.setattr(models_verb, "run", lambda _: log.warning("costs changed") or log.debug("a detail"))
    for _ in range(2):
        assert run(capsys, "models")[2] == "octopipe: costs changed\n"
    assert "octopipe: a detail\n" in run(capsys, "models", "--debug")[2]


# -- narrow screens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80])
def test_tables_are_whole_on_narrow_screens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    from octopipe.models.zoo import names, preset
    from octopipe.search.systems.registry import systems

    out = run(capsys, "models")[1]
    assert "…" not in out and all(len(line) <= width for line in out.splitlines())
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    for name in names():
        spec = preset(name)
        assert f"{spec.parameters / 1e9:.2f} B" in rows[name] and str(spec.hidden) in rows[name]
    out = run(capsys, "systems")[1]
    assert "…" not in out and all(len(line.rstrip()) <= width for line in out.splitlines())
    words = "".join(out.split())
    for known in systems().values():
        assert known.name in out
        assert all(word in words for word in known.constraint.split()), known.constraint


def test_the_legend_of_models_knows_every_letter(capsys: pytest.CaptureFixture[str]) -> None:
    from octopipe.models.zoo import names, preset

    out = run(capsys, "models")[1]
    legend = out.split("\n\n")[1]  # below the table
    for symbol in {symbol for name in names() for symbol in preset(name).pattern}:
        assert f"{symbol} " in legend, symbol


# -- completion ----------------------------------------------------------------------------------------


def _complete(script: str, *words: str) -> list[str]:
    array = " ".join(f"'{w}'" for w in ("octopipe", *words))
    ask = f'{script}\nCOMP_WORDS=({array}); COMP_CWORD={len(words)}; _octopipe; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_verbs_flags_models_and_systems(capsys: pytest.CaptureFixture[str]) -> None:
    script = run(capsys, "completion", "bash")[1]
    assert _complete(script, "sim") == ["simulate"]
    assert _complete(script, "simulate", "nemotron-h-5") == ["nemotron-h-56b"]
    assert _complete(script, "simulate", "x", "--micro-batche") == ["--micro-batches"]
    assert _complete(script, "simulate", "x", "--system", "zb-v") == ["zb-v"]
    assert _complete(script, "simulate", "x", "--channel", "pa") == ["pair"]


@pytest.mark.parametrize("kind", ["bash", "zsh", "fish"])
def test_completion_knows_every_verb_and_flag(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    code, out, _ = run(capsys, "completion", kind)
    assert code == 0 and all(verb in out for verb in VERBS)
    assert ("-l micro-batches" if kind == "fish" else "--micro-batches") in out


# -- flags that verbs share ----------------------------------------------------------------------------


def test_verbs_take_these_flags() -> None:
    """Scripts depend on them: a flag that goes or is renamed has to change this list."""
    from octopipe.cli.verbs.completion import described

    known = {verb: {f.name for f in found.flags} for verb, found in described().items()}
    assert all("--help" in flags for flags in known.values())
    for verb in ("models", "simulate", "check", "systems", "compare", "tune", "train", "profile", "validate"):
        assert "--json" in known[verb], verb
    for verb in ("simulate", "compare", "tune"):
        setting = {"--pp", "--micro-batches", "--gpu", "--tp", "--dp", "--seq", "--p2p-ms", "--memory-gib", "--speeds"}
        assert setting | {"--profile"} <= known[verb], verb
    for verb in ("simulate", "tune", "report", "export", "train", "profile"):
        assert {"-o", "--output"} <= known[verb], verb
    assert {"--budget", "--seed", "--method", "--start", "--workers"} <= known["tune"]


FLAGS = Path(__file__).resolve().parents[1] / "golden" / "flags.txt"


def _flags() -> list[str]:
    import importlib

    from octopipe.cli import MODULES, parser_of

    found = []
    for verb in VERBS:
        module = importlib.import_module(f"octopipe.cli.verbs.{MODULES.get(verb, verb)}")
        for action in parser_of(verb, module)._actions:
            found += [f"{verb} {flag}" for flag in action.option_strings if flag not in ("-h", "--help")]
    return sorted(found)


def test_no_flag_is_ever_taken_away() -> None:
    """New ones are welcome: add them with `python -c "import test_cli_faults as t; t.write_flags()"` in tests/."""
    assert set(FLAGS.read_text().split("\n")) - {""} <= set(_flags())


def write_flags() -> None:
    FLAGS.write_text("\n".join(_flags()) + "\n")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("train", "nemotron-h-4b", "--scale", "0.02", "--layers", "4", "--data", "none.jsonl"), 2, "no such file"),
        (("train", "nemotron-h-4b", "--scale", "0"), 2, "above 0 and at most 1"),
        (("profile", "nemotron-h-4b", "--scale", "0"), 2, "above 0 and at most 1"),
        (("profile", "llama3.1-405b", "--nproc", "64"), 3, "measuring its layers on 64 ranks needs about"),
        (("train", "llama3.1-405b", "--nproc", "2"), 3, "does not fit in memory: the run needs about"),
        (("simulate", "my.csv"), 2, "my.csv: no such file"),
        (("tune", "times.sqlite", "--pp", "2"), 2, "times.sqlite: no such file"),
        (("import", "empty.csv", "--pp", "2"), 2, "empty.csv is empty"),
        (("check", "config.json"), 2, 'config.json: it has no "format"; expected'),
        (("tune", "--profile", "none.json", "--pp", "2"), 2, "none.json: no such file"),
    ],
)
def test_beginners_mistakes_are_found_before_any_work(
    words: tuple[str, ...],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if words[0] in ("train", "profile"):
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    Path("empty.csv").touch()
    Path("config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    found, out, error = run(capsys, *words)
    assert (found, out) == (code, "") and said in error and error.count("\n") == 1, error


# -- texts longer than a file's name, cells and numbers too large, empty values ------------------------------------


def test_a_text_of_any_length_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file's name has at most 255 bytes; the layout of a large model has more."""
    layout = "Et|" + "tt|" * 94 + "tt|L"
    plan = tmp_path / "plan.json"
    code, _, err = run(capsys, "import", layout, "--pp", "97", "-o", str(plan))
    assert code == 0 and len(layout) > 255, err
    assert run(capsys, "check", str(plan))[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "llama3-8b", "--pp", "2", "--stack", "x" * 300),
        ("tune", "x" * 300, "--measure", "--pp", "2"),
        ("import", "x" * 300, "--pp", "2"),
        ("serve", "--no-browser", "x" * 300),
    ],
)
def test_a_name_longer_than_a_file_may_have_is_one_line(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *words)
    assert code == 2 and err.count("\n") == 1, err


def test_a_system_with_a_long_name_is_refused_in_python() -> None:
    import octopipe

    with pytest.raises(octopipe.OctoPipeError, match="unknown system"):
        octopipe.simulate("x" * 300, "llama3-8b", 2)


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        (b"[1" + b"0" * 400 + b",1,1,1]", "--imbalance"),
        (b"[" * 100_000 + b"]" * 100_000, "--imbalance"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "--imbalance"),
        (b"nan 1\n", "--imbalance"),
        (b"[1" + b"0" * 400 + b",1,1,1]", "--images"),
        (b"1e999\n", "--images"),
    ],
)
def test_lists_of_numbers_that_are_none(
    text: bytes, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "numbers.json"
    path.write_bytes(text)
    model = "qwen3-30b-a3b" if flag == "--imbalance" else "llava-1.5-7b"
    sizes = ("--tp", "8", "--ep", "8", "--dp", "2") if flag == "--imbalance" else ("--tp", "8")
    code, _, err = run(capsys, "simulate", model, "--pp", "1", *sizes, flag, str(path))
    assert code == 2 and err.count("\n") == 1 and "numbers.json" in err, err


@pytest.mark.parametrize("text", ["0F0," + "9" * 200_000, "a,b\n1," + "9" * 200_000 + "\n"])
def test_a_table_with_a_huge_cell_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    code, _, err = run(capsys, "import", str(path), "-o", str(tmp_path / "out.json"))
    assert code == 2 and err.count("\n") == 1 and len(err) < 1000, err


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "llama3-8b", "--gpus", "8", "--global-batch", "8", "--today", ""),
        ("tune", "llama3-8b", "--pp", "2", "--start", ""),
        ("simulate", "llama3-8b", "--pp", "2", "-o", ""),
        ("simulate", "llama3-8b", "--pp", "2", "--cluster="),
    ],
)
def test_an_empty_value_is_not_taken_for_a_flag_that_was_not_given(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *words)
    assert code == 2 and "its value is empty; give one, or leave the flag out" in err and err.count("\n") == 1

"""What a profile needs before it starts, and how far it has come: sizes counted by hand, and a clock of our own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from octopipe.base.errors import DoesNotFitError  # noqa: E402
from octopipe.cli import main  # noqa: E402
from octopipe.cli.verbs import profile as verb  # noqa: E402
from octopipe.cli.verbs import train_result  # noqa: E402
from octopipe.costs.profile_file import Profile  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.models.layers import Embedding, Head, Mlp  # noqa: E402
from octopipe.models.spec import ModelSpec  # noqa: E402
from octopipe.runtime.measure import forecast  # noqa: E402
from octopipe.runtime.measure.profiler import LayerRing  # noqa: E402
from octopipe.runtime.measure.rounds import Rounds, rounds_of  # noqa: E402
from octopipe.runtime.measure.workload import Workload  # noqa: E402
from octopipe.runtime.training.job import Phase  # noqa: E402

GIB = float(1 << 30)
SMALL = ["profile", "llama3-8b", "--scale", "0.02", "--layers", "4", "--seq", "16", "--repeats", "1"]


def work(layers: int = 10, precision: str = "fp32", tokens: int = 8) -> Workload:
    parts = (Embedding(hidden=64, vocab=1001), *[Mlp(hidden=64, ffn=256)] * layers, Head(hidden=64, vocab=1001))
    return Workload(spec=ModelSpec(name="tiny", layers=parts), tokens=tokens, precision=precision)


# -- memory --------------------------------------------------------------------------------------------


def test_a_rank_holds_one_layer_of_each_kind_and_several_ranks_the_whole_model() -> None:
    """Weights and gradients at four bytes each, counted by hand; activations of eight tokens are next to nothing."""
    few = work(10)
    embedding, mlp, head = (few.spec.layers[i].parameters for i in (0, 1, -1))  # type: ignore[union-attr]
    kinds = 8 * (embedding + mlp + head)
    alone = forecast.profile_bytes(few, 1) - forecast.PROCESS_BYTES
    assert kinds < alone < 1.5 * kinds
    assert forecast.profile_bytes(work(1000), 1) == forecast.profile_bytes(few, 1)
    many = 8 * (embedding + 1000 * mlp + head)
    together = forecast.profile_bytes(work(1000), 2) - 2 * forecast.PROCESS_BYTES
    assert many < together < 1.5 * many
    halves = forecast.profile_bytes(work(1000, "bf16"), 2) - 2 * forecast.PROCESS_BYTES
    assert halves == pytest.approx(together / 2, rel=0.05)


def test_a_long_head_counts_its_logits() -> None:
    more = forecast.profile_bytes(work(tokens=4096), 1) - forecast.profile_bytes(work(tokens=8), 1)
    assert more > 4 * 4096 * 1001


def test_a_profile_that_cannot_fit_stops_before_its_ranks_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forecast, "free_host_bytes", lambda: 2.0 * GIB)
    for ranks, words in ((1, "on 1 rank needs"), (2, "on 2 ranks needs")):
        assert main(["profile", "llama3-8b", "--nproc", str(ranks)]) == 3
        err = capsys.readouterr().err.strip()
        assert len(err.splitlines()) == 1 and words in err and "2.0 GiB are free" in err and "--no-memory-check" in err
        assert ("fewer --nproc" in err) == (ranks > 1)
    # Two matrices of the vocabulary and their gradients are 7.8 GiB, before one block and the logits of 4096 tokens.
    big = Workload(spec=forecast_spec("llama3-8b"), tokens=4096)
    assert 7.8 * GIB < forecast.profile_bytes(big, 1) < 20 * GIB
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(forecast, "free_host_bytes", lambda: None)
    forecast.check_host_memory(work(), 1)


def forecast_spec(name: str) -> ModelSpec:
    from octopipe.models.zoo import preset

    return preset(name)


def test_a_gpu_is_asked_by_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Workload(spec=work().spec, tokens=8, device="cuda")
    needed = forecast.profile_bytes(asked, 4) / 4
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2.1 * needed, 3 * needed))
    forecast.check_device_memory(asked, 4, device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1.9 * needed, 3 * needed))
    with pytest.raises(DoesNotFitError, match=r"on 2 ranks needs .* of GPU 1"):
        forecast.check_device_memory(asked, 4, device)
    forecast.check_device_memory(asked, 4, torch.device("cpu"))


# -- time ----------------------------------------------------------------------------------------------


def test_a_long_profile_is_announced_with_what_is_quicker_and_may_take_its_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    limits: list[float] = []

    def no_ranks(*_: object, timeout_s: float, **__: object) -> list[object]:
        limits.append(timeout_s)
        raise DoesNotFitError("enough seen")

    monkeypatch.setattr("octopipe.runtime.measure.trial.on_ranks", no_ranks)
    monkeypatch.setattr(forecast, "free_host_bytes", lambda: None)
    monkeypatch.setattr(forecast, "matrix_speed", lambda dtype, threads: 1e11)
    assert main(["profile", "llama3-8b"]) == 3
    err = capsys.readouterr().err
    assert "measuring 34 layers (3 kinds) at 4096 tokens takes" in err and " h or more on this CPU" in err
    for quicker in ("--repeats 2", "--seq 1024", "--layers or --scale", "octopipe tune llama3-8b"):
        assert quicker in err
    # Six FLOPs per parameter and token, fourteen rounds: the least of it by hand.
    assert limits[0] > 10 * 14 * 6 * 7.5e9 * 4096 / 1e11
    assert main(SMALL) == 3
    assert "or more on this CPU" not in capsys.readouterr().err and limits[1] == 900.0


def test_the_speed_of_this_machine_leaves_its_threads_alone() -> None:
    before = torch.get_num_threads()
    assert 1e7 < forecast.matrix_speed(torch.float32, before + 1) < 1e15
    assert torch.get_num_threads() == before


def test_rounds_tell_the_kind_the_layer_and_what_is_left() -> None:
    """Three layers of two kinds that take one and five seconds: eleven seconds a round, four rounds."""
    now, heard = [0.0], list[tuple[str, float]]()
    told = Rounds([0, 1, 1], lambda *word: heard.append(word), total=4, clock=lambda: now[0])
    for kind, seconds, name in ((0, 1.0, "Embedding"), (1, 5.0, "Mlp")):
        told.preparing(kind, name)
        told.first_run(kind, seconds)
    assert heard[0] == ("layer kind 1 of 2 (Embedding), memory", 0.0)
    assert heard[1][0] == "layer kind 2 of 2 (Mlp), memory, at least 4 s to go"
    del heard[:]
    for _ in range(4):
        told.begin()
        for kind, seconds in ((0, 1.0), (1, 5.0), (1, 5.0)):
            now[0] += seconds
            told.done(kind)
        now[0] += 100.0  # a barrier is no layer's time
    assert len(heard) == 12
    assert heard[4][0] == "round 2 of 4, layer 2 of 3 (Mlp), about 26 s to go"
    shares = [share for _, share in heard]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(0.8)


def test_as_many_rounds_are_announced_as_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(Rounds, "done", lambda self, kind: ran.append(kind))
    x = torch.randn(2, 4)
    layers = [torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)]
    LayerRing(layers, x, lambda out, y: (out - y).square().mean(), x).measure(5, 2, (1,))
    assert len(ran) == 3 * rounds_of(5, 2, (1,), 1) == 24


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(verb.time, "monotonic", lambda: now[0])
    with verb.progress("tiny on 1 rank") as listen:
        for second in range(1, 26):
            now[0] = float(second)
            listen([f"round {second} of 25", second / 25])
    said = capsys.readouterr()
    assert said.err.splitlines() == ["tiny on 1 rank: round 10 of 25 (40%)", "tiny on 1 rank: round 20 of 25 (80%)"]
    assert said.out == ""


def test_a_plan_that_cannot_fit_is_not_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "free_host_bytes", lambda: 4.0 * GIB)
    forecast.check_plan_memory([1.0 * GIB, 2.0 * GIB], "plan.json")
    with pytest.raises(DoesNotFitError, match=r"plan.json does not fit in memory: its 2 ranks need about 4.5 GiB"):
        forecast.check_plan_memory([2.0 * GIB, 2.0 * GIB], "plan.json")


def test_a_run_that_measures_for_long_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a pipe, too: minutes without a word look like a hang."""
    now = [0.0]
    monkeypatch.setattr(train_result.time, "monotonic", lambda: now[0])
    for quiet, lines in ((False, 2), (True, 0)):
        now[0] = 0.0
        with train_result.Screen(SimpleNamespace(steps=5), quiet=quiet) as screen:  # type: ignore[arg-type]
            for second in range(1, 26):
                now[0] = float(second)
                screen.show(Phase(text=f"measuring layers and links: round {second} of 25"))
        assert len(capsys.readouterr().err.splitlines()) == lines


@pytest.mark.parametrize("width", [70, 80, 100])
def test_every_number_of_a_profile_is_whole_on_a_narrow_screen(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of layers give way: 25.363 ms was shown as 25.…, and the last column was cut off."""
    monkeypatch.setenv("COLUMNS", str(width))
    names = ["embedding", "LlamaDecoderLayer (LlamaAttention+LlamaMLP)", "norm, head and loss"]
    costs = CostTable.uniform(num_layers=3).replace(
        symbols="ETL",
        forward_ms=np.array([9.4301, 25.3631, 31.3042]),
        static_bytes=np.array([3.2, 4.7, 1234.5]) * (1 << 20),
    )
    verb._show(Profile(costs=costs, about={"layers": names}), "profile.json")
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line[:2] in ("E ", "T ", "L ")]
    assert len(rows) == 3 and max(map(len, lines)) <= width
    for row, forward, static in zip(rows, ("9.430", "25.363", "31.304"), ("3.2", "4.7", "1234.5"), strict=True):
        assert f" {forward} " in row and row.split()[-1] == static
    assert any(line.split()[-1:] == ["static"] for line in lines)

"""Where the time of a step goes: the parts add up, and each follows the resource it is named after."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octopipe.cli import main
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.models.zoo import preset
from octopipe.search.planner.pricing import Pricer
from octopipe.search.planner.splits import Split
from octopipe.search.planner.why import TITLES, Why, difference_words, why
from octopipe.views.report.why_picture import why_svg

SIZES = {"tp": 1, "cp": 1, "ep": 1, "pp": 1, "dp": 1, "vp": 1, "micro_batch_size": 1, "zero": 1}
CASES: tuple[tuple[str, str, dict[str, int], str], ...] = (
    ("llama3-8b", "h100", {"dp": 8, "zero": 3}, "none"),
    ("llama3-8b", "a100", {"tp": 2, "pp": 4, "vp": 2, "dp": 2}, "selective"),
    ("llama3-8b", "h100", {"cp": 4, "pp": 2}, "full"),
    ("qwen3-30b-a3b", "h100", {"ep": 8, "pp": 2, "dp": 8}, "none"),
    ("qwen3-30b-a3b", "b200", {"tp": 2, "ep": 4, "pp": 4, "vp": 3, "dp": 2}, "full"),
    ("nemotron-h-8b", "h100", {"tp": 2, "pp": 4, "dp": 2}, "none"),
)


def reason(model: str, kind: str, sizes: dict[str, int], recompute: str = "none", **faster: float) -> Why:
    """Why of a split; `faster` multiplies resources of the GPU."""
    card = gpu(kind)
    card = replace(card, **{name: times * getattr(card, name) for name, times in faster.items()})
    spec = preset(model)
    found = Pricer(spec, Setup(gpu=card, seq=4096), 16).simulated(Split(**SIZES | sizes), recompute)
    out = why(found, spec)
    assert out is not None
    assert out.step_ms == found.step_ms
    return out


@pytest.mark.parametrize(("model", "tp"), [("qwen3-30b-a3b", 1), ("qwen3-30b-a3b", 2), ("deepseek-v3", 2)])
def test_ops_that_run_together_leave_no_part_below_zero(model: str, tp: int) -> None:
    """What pairs save is exchange: compute and the other collectives take what they take one after the other."""
    spec, split = preset(model), Split(**SIZES | {"tp": tp, "ep": 8, "pp": 4, "vp": 4, "dp": 8})
    pricer = Pricer(spec, Setup(gpu=gpu("h800"), seq=4096, memory_gib=(1000.0,)), 64, overlaps=("interleaved-overlap",))
    found = pricer.simulated(split, "none")
    assert found.how == "interleaved-overlap" and found.timeline is not None
    together, apart = why(found, spec), why(pricer._simulated(split, "none"), spec)
    assert together is not None and apart is not None
    assert sum(s.ms for s in together.shares) == pytest.approx(together.step_ms, rel=1e-9)
    assert all(s.ms >= 0 and s.hidden_ms >= 0 for s in together.shares), together.words()
    for name in ("products", "cores", "memory", "launches", "tp"):
        assert together.of(name).ms == pytest.approx(apart.of(name).ms, rel=1e-6), name
    assert together.of("ep").ms < apart.of("ep").ms and together.of("ep").hidden_ms > 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_the_parts_of_a_step_add_up_to_it(case: tuple[Any, ...]) -> None:
    out = reason(*case)
    assert sum(s.ms for s in out.shares) == pytest.approx(out.step_ms, rel=1e-9)
    assert [s.name for s in out.shares] == list(TITLES)
    assert all(s.ms >= 0 and s.hidden_ms >= 0 for s in out.shares)
    assert sum(out.waits.values()) == pytest.approx(out.of("bubble").ms, rel=1e-6, abs=1e-6)
    split = case[2]
    for name in ("tp", "cp", "ep"):
        present = out.of(name).ms + out.of(name).hidden_ms > 0
        assert present == (split.get(name, 1) > 1), name
    assert (out.of("recomputation").ms > 0) == (case[3] != "none")
    assert (out.of("bubble").ms > 0) == (split.get("pp", 1) > 1)


@pytest.mark.parametrize(
    ("resource", "halved", "same"),
    [
        ("bf16_tflops", ("products", "cores"), ("tp", "ep", "launches")),
        ("hbm_tb_per_s", ("memory", "optimizer"), ("products", "cores", "tp", "ep")),
    ],
)
def test_a_resource_of_twice_the_speed_halves_its_parts_and_no_other(
    resource: str, halved: tuple[str, ...], same: tuple[str, ...]
) -> None:
    for model, kind, sizes, _ in CASES[3:]:
        before, after = (reason(model, kind, sizes, **{resource: times}) for times in (1.0, 2.0))
        for name in halved:
            # A product whose weights take as long to read as it takes to compute halves less.
            assert after.of(name).ms <= before.of(name).ms * 0.56, (model, name)
        for name in same:
            assert after.of(name).ms == pytest.approx(before.of(name).ms, rel=1e-9), (model, name)


def test_faster_links_shorten_the_collectives_that_use_them() -> None:
    """Tensor parallelism inside a node follows the fast links alone; experts across nodes follow both."""
    inside = {"tp": 8, "pp": 2}
    before, after = (reason("llama3-8b", "h100", inside, intra_gb_per_s=times) for times in (1.0, 2.0))
    assert 0.5 <= after.of("tp").ms / before.of("tp").ms < 0.75
    assert after.of("products").ms == pytest.approx(before.of("products").ms)
    across = {"ep": 16, "pp": 2, "dp": 16}
    before, after = (
        reason("qwen3-30b-a3b", "h100", across, inter_gb_per_s=times, intra_gb_per_s=times) for times in (1.0, 2.0)
    )
    assert 0.5 <= after.of("ep").ms / before.of("ep").ms < 0.75
    assert after.of("products").ms == pytest.approx(before.of("products").ms)


def test_what_is_hidden_is_told_and_does_not_count() -> None:
    out = reason("llama3-8b", "h100", {"dp": 8, "zero": 3})
    data = out.of("dp")
    assert data.hidden_ms > data.ms > 0
    slow = reason("llama3-8b", "h100", {"dp": 8, "zero": 3}, intra_gb_per_s=0.02)
    assert slow.of("dp").ms > slow.of("dp").hidden_ms, "links too slow to hide behind anything"


def test_two_splits_are_compared_in_words() -> None:
    wide, deep = reason("llama3-8b", "h100", {"tp": 8}), reason("llama3-8b", "h100", {"dp": 8, "zero": 2})
    text = difference_words(deep, wide)
    saved = wide.step_ms - deep.step_ms
    assert saved > 100 and f"saves {saved:.1f} ms" in text and " s," not in text and "tensor parallelism -" in text
    assert difference_words(wide, deep).startswith("It costs")


def test_bars_are_as_long_as_the_steps_and_their_parts() -> None:
    whys = [reason(*case) for case in CASES[:2]]
    text = why_svg([("<one>", whys[0].as_dict()), ("two", whys[1].as_dict())], alone=True)
    assert "<one>" not in text and "&lt;one&gt;" in text
    widths: dict[str, list[float]] = {"one": [], "two": []}
    for width, height, title in re.findall(r'width="([\d.]+)" height="(\d+)" fill="#\w+"><title>(.*?)</title>', text):
        if height == "26":
            widths["one" if "one" in title else "two"].append(float(width))
    ratio = sum(widths["one"]) / sum(widths["two"])
    assert ratio == pytest.approx(whys[0].step_ms / whys[1].step_ms, rel=0.02)


def test_the_verb_tells_why_in_words_in_json_and_as_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "llama3-8b", "--gpus", "8", "--gpu", "h100", "--global-batch", "16", "--budget", "1s"]
    words += ["--today", "tp=8"]
    picture = tmp_path / "why.svg"
    assert main([*words, "--why", str(picture), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    for name in ("best", "today"):
        parts = data["why"][name]["parts"]
        assert sum(p["ms"] for p in parts.values()) == pytest.approx(data[name]["step_ms"], rel=1e-9)
        assert sum(p["share"] for p in parts.values()) == pytest.approx(1.0)
    assert any(line.startswith("why: ") for line in data["changes"])
    assert picture.read_text().startswith("<svg") and "today:" in picture.read_text()
    assert 0 < data["expected_error"] < 0.5
    assert main([*words, "--why"]) == 0
    said = capsys.readouterr().out
    assert "where the time goes" in said and "±: " in said
    bar = data["expected_error"] * data["today"]["tokens_per_gpu_per_second"]
    assert re.search(rf"\b{data['today']['tokens_per_gpu_per_second']:.0f} +{bar:.0f}\b", said), said

"""One plan, one number: whatever two verbs, or a verb and the Python functions, say about a plan is equal.

The table below has a row per number and a column per verb; `python tests/cli/test_one_number.py` prints it.
"""

from __future__ import annotations

import html
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from effort import some

import octopipe
from octopipe.cli import main

CASES = {
    "dense": ("llama3-8b", ("--pp", "4", "--tp", "2", "--micro-batches", "8"), {"tp": 2}),
    "hybrid, data parallel": (
        "nemotron-h-8b",
        ("--pp", "4", "--tp", "2", "--dp", "2", "--micro-batches", "8", "--memory-gib", "40"),
        {"tp": 2, "dp": 2, "memory_gib": 40.0},
    ),
    "unequal ranks": (
        "nemotron-h-4b",
        ("--pp", "2", "--micro-batches", "4", "--speeds", "1,0.5"),
        {"rank_speed": (1.0, 0.5)},
    ),
}
SEARCH = ("--method", "octopipe", "--iterations", "1", "--budget", "60s")
NUMBERS = (
    "step_ms", "makespan_ms", "lower_bound_ms", "bubble_ratio", "peak_memory_gib", "tokens_per_gpu_per_second", "mfu",
)  # fmt: skip


def said(capsys: Any, *words: str) -> dict[str, Any]:
    """The JSON of a verb."""
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


class Shown(float):
    """A number as a person reads it, rounded to the digits that are shown."""

    def __new__(cls, text: str, unit: float = 1.0) -> Shown:
        found = super().__new__(cls, float(text) * unit)
        found.rounding = 0.501 * unit * 10.0 ** -len(text.partition(".")[2])
        return found

    rounding: float


def flat(value: Any) -> list[float]:
    return list(value) if isinstance(value, list | tuple) else [value]


def assert_equal(by_verb: dict[str, Any], *place: str) -> None:
    """All verbs say the first one's number, to six digits or to those that they show."""
    (first, value), *others = by_verb.items()
    for verb, other in others:
        for a, b in zip(flat(value), flat(other), strict=True):
            shown = max(getattr(x, "rounding", 0.0) for x in (a, b))
            assert float(b) == pytest.approx(float(a), rel=1e-6, abs=shown), (*place, first, verb)


def rows_of(capsys: Any, case: str, folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """{plan: {number: {verb: value}}} of 1F1B as published, 1F1B with its backward split, and a tuned plan."""
    model, flags, keywords = CASES[case]
    ranks, count = int(flags[1]), int(flags[flags.index("--micro-batches") + 1])
    tuned_file, plain_file, split_file = (str(folder / f"{name}.json") for name in ("tuned", "plain", "split"))
    tuned = said(capsys, "tune", model, *flags, *SEARCH, "-o", tuned_file)
    out: dict[str, dict[str, dict[str, Any]]] = {}

    def note(plan: str, verb: str, numbers: dict[str, Any]) -> None:
        for name in NUMBERS:
            if numbers.get(name) is not None:
                out.setdefault(plan, {}).setdefault(name, {})[verb] = numbers[name]

    note("tuned", "tune", tuned)
    note("tuned", "simulate --plan", said(capsys, "simulate", "--plan", tuned_file))
    note("1F1B", "tune, its baseline", tuned["baseline"])
    note("1F1B, split", "tune, its split baseline", tuned["baseline_split"])
    for plan, mode, path in (("1F1B", (), plain_file), ("1F1B, split", ("--split-backward",), split_file)):
        note(plan, "simulate", said(capsys, "simulate", model, *flags, *mode, "-o", path))
        compared = said(capsys, "compare", model, *flags, *mode, "--systems", "1f1b")
        note(plan, "compare", compared["results"][0])
        note(plan, "compare", {"lower_bound_ms": compared["lower_bound_ms"]})
        result = octopipe.compare(model, ranks, count, names=["1f1b"], split_backward=bool(mode), **keywords).results[0]
        note(plan, "octopipe.compare", result.as_dict())
        timeline = octopipe.simulate("1f1b", model, ranks, count, split_backward=bool(mode) or None, **keywords)
        note(plan, "octopipe.simulate", timeline.summary())
        note(plan, "a timeline in a notebook", _in_a_notebook(timeline))
    shown = octopipe.compare(model, ranks, count, names=["1f1b"], **keywords)
    note("1F1B", "a comparison in a notebook", _compared_in_a_notebook(shown))
    if "rank_speed" not in keywords:  # the page's form has no speeds of single ranks
        for plan, numbers in zip(("1F1B", "tuned"), _served(model, ranks, count, keywords, tuned, tuned_file)):
            note(plan, "serve", numbers)
    for plan, path in (("tuned", tuned_file), ("1F1B", plain_file), ("1F1B, split", split_file)):
        note(plan, "simulate of the file", said(capsys, "simulate", "--plan", path))
        note(plan, "octopipe.simulate of the file", octopipe.simulate(path).summary())
        note(plan, "report", _reported(capsys, path, folder))
        note(plan, "export to csv", _exported(capsys, path))
        note(plan, "export to svg", _drawn(capsys, path))
        note(plan, "a notebook", _in_a_notebook(octopipe.load_plan(path)))
    kept = json.loads(Path(tuned_file).read_text())
    note("tuned", "the plan file", {k: kept[k] for k in ("step_ms", "lower_bound_ms")})
    return out


DEMO = Path(__file__).resolve().parents[2] / "scripts" / "demo.py"


def demo_rows(capsys: Any, folder: Path, budget_s: float = 1.0) -> dict[str, dict[str, dict[str, Any]]]:
    """The same of the demo's words: what `make demo` prints about 1F1B and its tuned plan, and what other verbs say."""
    found = importlib.util.spec_from_file_location("demo", DEMO)
    assert found is not None and found.loader is not None
    demo: Any = importlib.util.module_from_spec(found)
    found.loader.exec_module(demo)
    every, demo.OUT = demo.compare, folder
    demo.compare = lambda costs, ranks, count, **_: every(costs, ranks, count, names=["1f1b", "zb-h1"])
    costs, published = demo.published_systems()
    capsys.readouterr()
    demo.tuned_plan(costs, published, budget_s)
    words = " ".join(capsys.readouterr().out.split())
    tuned, base, bound = (
        re.search(pattern, words)
        for pattern in (r"([\d.]+) ms a step", r"1F1B \(([\d.]+) ms\)", r": ([\d.]+) ms, this")
    )
    assert tuned and base and bound, words
    model, path = demo.SETTING["model"], str(folder / "plan.json")
    flags = ("--gpu", demo.SETTING["gpu"], "--tp", str(demo.SETTING["tp"]), "--pp", str(demo.PP))
    flags += ("--micro-batches", str(demo.MICRO_BATCHES))
    said_of_1f1b = said(capsys, "simulate", model, *flags)
    compared = said(capsys, "compare", model, *flags, "--systems", "1f1b")["results"][0]
    said_of_it, reported = said(capsys, "simulate", "--plan", path), _reported(capsys, path, folder)
    of_1f1b = {"simulate": said_of_1f1b, "compare": compared}
    of_it = {"simulate of the file": said_of_it, "report": reported}
    return {
        "1F1B": {"step_ms": {"demo": Shown(base[1]), **{verb: n["step_ms"] for verb, n in of_1f1b.items()}}},
        "tuned": {
            "step_ms": {"demo": Shown(tuned[1]), **{verb: n["step_ms"] for verb, n in of_it.items()}},
            "lower_bound_ms": {"demo": Shown(bound[1]), "simulate of the file": said_of_it["lower_bound_ms"]},
        },
    }


def test_the_demo_says_the_same_as_the_verbs(capsys: Any, tmp_path: Path) -> None:
    for plan, table in demo_rows(capsys, tmp_path).items():
        for number, by_verb in table.items():
            assert_equal(by_verb, plan, number)


SPLIT = ("llama3-8b", "--gpu", "h100", "--tp", "2", "--pp", "4")


def cluster_rows(capsys: Any, folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The same of the verbs for whole clusters: the plan that `plan` chose, and `scale` without jitter."""
    path = str(folder / "cluster.json")
    words = ("--gpus", "8", "--global-batch", "16", "--budget", "1s")
    best = said(capsys, "plan", *SPLIT, *words, "-o", path)["best"]
    asked = ("--micro-batches", "8")
    weak = said(capsys, "scale", *SPLIT, *asked, "--gpus", "8", "--jitter", "0")["weak"][0]
    out: dict[str, dict[str, dict[str, Any]]] = {}
    for plan, by_verb in {
        "of plan": {
            "plan": best | {"bubble_ratio": best["bubble"], "peak_memory_gib": [best["peak_gib"]]},
            "simulate of the file": _fullest(said(capsys, "simulate", "--plan", path)),
            "octopipe.simulate of the file": _fullest(octopipe.simulate(path).summary()),
            "report": _fullest(_reported(capsys, path, folder)),
        },
        "1F1B": {
            "scale": weak | {"peak_memory_gib": [weak["peak_gib"]]},
            "simulate": _fullest(said(capsys, "simulate", *SPLIT, *asked)),
        },
    }.items():
        for verb, numbers in by_verb.items():
            for name in NUMBERS:
                if numbers.get(name) is not None:
                    out.setdefault(plan, {}).setdefault(name, {})[verb] = numbers[name]
    return out


def _fullest(numbers: dict[str, Any]) -> dict[str, Any]:
    """Verbs for clusters tell the memory of the fullest GPU alone."""
    return numbers | {"peak_memory_gib": [max(numbers["peak_memory_gib"])]}


def _reported(capsys: Any, path: str, folder: Path) -> dict[str, Any]:
    """What the page holds for its table."""
    from octopipe.views.report.entry import entry_data
    from octopipe.views.report.load import load_entry
    from octopipe.views.report.pack import Packer

    page = folder / "page.html"
    assert main(["report", path, "-o", str(page)]) == 0
    line = capsys.readouterr().err
    numbers = entry_data(load_entry(path, {}), Packer())["numbers"]
    # The line on the terminal is the page's own number, rounded.
    assert f"{numbers['step_ms']:.1f}" in " ".join(line.split()) or f"{numbers['step_ms']:.2f}" in line
    return _of_the_page(numbers)


def _of_the_page(numbers: dict[str, Any]) -> dict[str, Any]:
    gib = [b / (1 << 30) for b in numbers["peak_bytes"]]
    return {k: numbers[k] for k in ("step_ms", "makespan_ms", "bubble_ratio")} | {"peak_memory_gib": gib}


def _served(
    model: str, ranks: int, count: int, keywords: dict[str, Any], tuned: dict[str, Any], tuned_file: str
) -> list[dict[str, Any]]:
    """What the local page gets for 1F1B and for a search that finds the tuned plan."""
    from octopipe.views.report.entry import entry_data
    from octopipe.views.report.jobs import Job, Request
    from octopipe.views.report.pack import Packer

    def found(*_: Any, **__: Any) -> SimpleNamespace:
        known = {name: tuned[name] for name in ("step_ms", "lower_bound_ms")}
        return SimpleNamespace(plan=octopipe.load_plan(tuned_file), seconds=1.0, iterations=1, **known)

    job = Job(1, Request(model=model, pp=ranks, micro_batches=count, systems=["1f1b"], **keywords), model, found)
    job.run()
    assert job.status()["state"] == "done", job.status()
    return [_of_the_page(entry_data(entry, Packer())["numbers"]) for entry in job.entries()]


def _in_a_notebook(what: Any) -> dict[str, Any]:
    """The numbers below the picture of a plan, a timeline or a search."""
    words = html.unescape(what._repr_html_())
    step, bubble = re.search(r"step ([\d.]+) ms", words), re.search(r"bubble ([\d.]+) %", words)
    assert step and bubble, words[-300:]
    return {"step_ms": Shown(step[1]), "bubble_ratio": Shown(bubble[1], 0.01)}


def _compared_in_a_notebook(comparison: Any) -> dict[str, Any]:
    words = html.unescape(comparison._repr_html_())
    row = re.findall(r"<td[^>]*>([^<]*)</td>", words)
    bound = re.search(r"lower bound ([\d.]+) ms", words)
    assert row[0] == "1f1b" and bound, words[:300]
    percent = row[3].removesuffix(" %")
    return {"step_ms": Shown(row[1]), "bubble_ratio": Shown(percent, 0.01), "lower_bound_ms": Shown(bound[1])}


def _drawn(capsys: Any, path: str) -> dict[str, Any]:
    """The words above the lanes of a picture."""
    assert main(["export", path, "--to", "svg"]) == 0
    words = re.search(r": ([\d.,]+) ms, ([\d.]+) % bubble", html.unescape(capsys.readouterr().out))
    assert words
    return {"step_ms": Shown(words[1].replace(",", "")), "bubble_ratio": Shown(words[2], 0.01)}


def _exported(capsys: Any, path: str) -> dict[str, Any]:
    assert main(["export", path, "--to", "csv"]) == 0
    rows = [line.split(",") for line in capsys.readouterr().out.splitlines()]
    what, end = rows[0].index("what"), rows[0].index("end_ms")
    return {"makespan_ms": max(float(r[end]) for r in rows[1:] if r[what] == "compute")}


@pytest.mark.parametrize("case", some(CASES, quick=["hybrid, data parallel", "unequal ranks"]))
def test_every_number_that_two_verbs_say_about_one_plan_is_equal(case: str, capsys: Any, tmp_path: Path) -> None:
    for plan, table in rows_of(capsys, case, tmp_path).items():
        for number, by_verb in table.items():
            assert number == "lower_bound_ms" or len(by_verb) > 1, (plan, number)
            assert_equal(by_verb, plan, number)
        assert {"a notebook", "export to svg", "report", "simulate of the file"} <= set(table["step_ms"])
        assert "serve" in table["step_ms"] or case == "unequal ranks" or plan == "1F1B, split"


def test_verbs_for_clusters_say_the_same_about_a_plan_as_the_others(capsys: Any, tmp_path: Path) -> None:
    for plan, table in cluster_rows(capsys, tmp_path).items():
        assert {"step_ms", "tokens_per_gpu_per_second", "mfu", "peak_memory_gib"} <= set(table)
        for number, by_verb in table.items():
            assert_equal(by_verb, plan, number)


def test_busy_and_bubble_are_shares_of_the_same_step(capsys: Any, tmp_path: Path) -> None:
    """The picture's shares of busy time and the bubble add up; the words about the busiest rank name the same share."""
    path = str(tmp_path / "tuned.json")
    search = ("--method", "octopipe", "--iterations", "1", "--budget", "60s")
    assert main(["tune", "llama3-8b", "--pp", "2", "--micro-batches", "4", *search, "-o", path]) == 0
    words = " ".join(capsys.readouterr().out.split())
    busiest = float(words.partition("is busiest (")[2].partition(" %")[0])
    bubble = said(capsys, "simulate", "--plan", path)["bubble_ratio"]
    assert main(["simulate", "--plan", path]) == 0
    shares = [float(line.split()[-2].rstrip("%")) for line in capsys.readouterr().out.splitlines() if "% busy" in line]
    assert len(shares) == 2 and max(shares) == pytest.approx(busiest, abs=0.11)
    assert sum(shares) / 2 + 100 * bubble == pytest.approx(100.0, abs=0.1)


def test_words_on_the_terminal_are_the_numbers_of_the_json(capsys: Any, tmp_path: Path) -> None:
    model, flags = (
        "nemotron-h-8b",
        ("--pp", "2", "--tp", "2", "--dp", "2", "--micro-batches", "4", "--memory-gib", "70"),
    )
    path = str(tmp_path / "tuned.json")
    tuned = said(capsys, "tune", model, *flags, *SEARCH, "-o", path)
    assert main(["tune", model, *flags, *SEARCH, "-o", path]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert f"step {tuned['step_ms']:.1f} ms (pipeline {tuned['makespan_ms']:.1f} ms, then gradient reduction" in words
    assert f"1F1B as published ({tuned['baseline']['step_ms']:.1f} ms)" in words
    assert f"1F1B with its backward split into I and W ({tuned['baseline_split']['step_ms']:.1f} ms)" in words
    assert f"lower bound {tuned['lower_bound_ms']:.1f} ms" in words
    assert main(["simulate", "--plan", path]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert f"{tuned['step_ms']:.1f} ms a step" in words and f"pipeline {tuned['makespan_ms']:.1f} ms" in words
    assert f"lower bound {tuned['lower_bound_ms']:.1f} ms for {tuned['bound_of']['words']}" in words


def test_every_bound_names_the_plans_it_holds_for(capsys: Any) -> None:
    flags = ("nemotron-h-8b", "--pp", "2", "--tp", "4", "--micro-batches", "4")
    once = said(capsys, "simulate", *flags)["bound_of"]
    twice = said(capsys, "simulate", *flags, "--system", "chimera")
    assert once["copies"] is False and twice["bound_of"]["copies"] is True
    assert twice["lower_bound_ms"] <= twice["step_ms"] * (1 + 1e-9)
    assert said(capsys, "compare", *flags, "--systems", "1f1b")["bound_of"] == once


def test_contention_is_a_number_of_its_own_and_the_same_in_every_verb(capsys: Any, tmp_path: Path) -> None:
    """A profile of ranks that slow each other down: `step_ms` is with all ranks at work."""
    from octopipe.costs.cluster.hardware import Link, Network
    from octopipe.costs.profile_file import TIMES, Profile
    from octopipe.costs.resolve import resolve_costs
    from octopipe.plans.file import load_plan
    from octopipe.simulation.contention import predict

    link = Link(latency_ms=0.01, ms_per_byte=1e-8)
    costs = resolve_costs("nemotron-h-4b", pp=2, micro_batches=4)
    pairs = {(0, 1): link, (1, 0): link}  # a profile has measured its links
    costs = costs.replace(network=Network(intra=link, inter=link, pairs=pairs))
    times = {name: getattr(costs, name) * 0.6 for name in TIMES.values()}
    profile = Profile(costs=costs, partial={1: costs.replace(**times)}, op_overhead_ms=0.05, fused_factor=0.95)
    path, plan, published = (str(tmp_path / f"{name}.json") for name in ("profile", "plan", "published"))
    Path(path).write_bytes(profile.to_json())
    flags = ("--pp", "2", "--micro-batches", "4")
    found = said(capsys, "tune", path, *flags, *SEARCH, "-o", plan)
    made = said(capsys, "simulate", path, *flags, "-o", published)
    # 1F1B leaves ranks alone while the others wait, so its ops are faster than step_ms counts them. How much a tuned
    # plan leaves is the search's affair: the tighter it is, the nearer the two numbers are.
    assert made["contended_step_ms"] < 0.9 * made["step_ms"]
    for numbers, file in ((found, plan), (made, published)):
        again = said(capsys, "simulate", path, "--plan", file)
        own = predict(load_plan(file), octopipe.load_profile(path))
        assert again["contended_step_ms"] <= again["step_ms"] * (1 + 1e-9)
        for name, value in (("contended_step_ms", own.step_ms), ("contended_makespan_ms", own.makespan_ms)):
            assert numbers[name] == pytest.approx(again[name], rel=1e-6) == pytest.approx(value, rel=1e-6)
        assert main(["simulate", path, "--plan", file]) == 0
        words = " ".join(capsys.readouterr().out.split())
        assert f"with contention as the profile measured it {again['contended_step_ms']:.1f} ms a step" in words


RUN = ("nemotron-h-4b", "--scale", "0.02", "--layers", "4", "--seq", "16")
RUN_NUMBERS = ("step_ms", "makespan_ms", "contended_step_ms", "contended_makespan_ms")


def run_rows(capsys: Any, folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The same of the verbs that run a plan, on measured times: what `train` and `validate` predict is what the verbs
    that only plan say about that plan."""
    from octopipe.plans.file import load_plan
    from octopipe.simulation.contention import predict

    profile, tuned, published = (str(folder / f"{name}.json") for name in ("profile", "tuned", "published"))
    assert main(["profile", *RUN, "--nproc", "2", "--repeats", "3", "-o", profile]) == 0
    capsys.readouterr()
    flags = (profile, "--pp", "2", "--micro-batches", "4")
    out: dict[str, dict[str, dict[str, Any]]] = {}
    said_first = {
        "tuned": ("tune", said(capsys, "tune", *flags, *SEARCH, "-o", tuned)),
        "1F1B": ("simulate", said(capsys, "simulate", *flags, "-o", published)),
    }
    for plan, path in (("tuned", tuned), ("1F1B", published)):
        verb, numbers = said_first[plan]
        once = octopipe.simulate(path)
        shared = predict(load_plan(path), octopipe.load_profile(profile))
        by_verb = {
            verb: numbers,
            "simulate of the file": said(capsys, "simulate", profile, "--plan", path),
            "validate": said(capsys, "validate", path, "--profile", profile, "--steps", "1", "--warmup", "1"),
            "train": said(capsys, "train", *RUN, "--plan", path, "--profile", profile, "--steps", "2")["predicted"],
            "octopipe.simulate of the file": {"step_ms": once.step_ms, "makespan_ms": once.makespan_ms},
            "predict": {"contended_step_ms": shared.step_ms, "contended_makespan_ms": shared.makespan_ms},
        }
        for who, found in by_verb.items():
            for name in RUN_NUMBERS:
                if found.get(name) is not None:
                    out.setdefault(plan, {}).setdefault(name, {})[who] = found[name]
    return out


@pytest.mark.slow
def test_what_train_and_validate_predict_is_what_the_verbs_that_plan_say(capsys: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for plan, table in run_rows(capsys, tmp_path).items():
        for number, by_verb in table.items():
            assert {"train", "validate", "simulate of the file"} <= set(by_verb), (plan, number)
            assert_equal(by_verb, plan, number)


def _print_table() -> None:
    """The table in Markdown, for people."""
    import contextlib
    import io
    import tempfile
    from functools import partial

    class Capture:
        """What pytest's `capsys` does, outside pytest."""

        def __init__(self) -> None:
            # Some verbs write bytes: there must be a buffer below.
            self.out, self.err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))

        def readouterr(self) -> SimpleNamespace:
            found = {}
            for name, stream in (("out", self.out), ("err", self.err)):
                found[name] = stream.buffer.getvalue().decode()
                stream.buffer.seek(0)
                stream.buffer.truncate(0)
            return SimpleNamespace(**found)

    runs = " ".join((*RUN, "--nproc 2, measured"))
    cases = {f"{model} {' '.join(flags)}": partial(rows_of, case=case) for case, (model, flags, _) in CASES.items()}
    clusters = f"{' '.join(SPLIT)} --gpus 8, the plan of `plan` and `scale` without jitter"
    demo = "nemotron-h-56b --gpu h800 --tp 8 --pp 8 --micro-batches 8, the plans of `make demo`"
    for title, rows in {**cases, demo: demo_rows, clusters: cluster_rows, runs: run_rows}.items():
        capture = Capture()
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(capture.out),
            contextlib.redirect_stderr(capture.err),
        ):
            table = rows(capture, folder=Path(folder))
        print(f"\n{title}\n\n| plan | number | value | said by |\n|---|---|---|---|")
        for plan, numbers in table.items():
            for number, by_verb in numbers.items():
                value = max(flat(next(iter(by_verb.values()))))
                print(f"| {plan} | {number} | {value:.4f} | {', '.join(by_verb)} |")


if __name__ == "__main__":
    sys.exit(_print_table())

"""One record of the set-up: a field is one edit, and flags, keywords, JSON, plan files and the page have it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import octopipe
from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.cluster.asking import flag_fields, keyword_fields
from octopipe.costs.cluster.fields import (
    Choice,
    GpuName,
    Lengths,
    NodeGroups,
    Number,
    Numbers,
    Spread,
    StackName,
    Whole,
    YesNo,
    fields_of,
)
from octopipe.costs.cluster.setup import Setup, setup_from
from octopipe.costs.resolve import resolve_costs
from octopipe.plans.file import load_plan
from octopipe.plans.setting import costs_of_plan
from octopipe.views.report.jobs import Job, parse_request
from octopipe.views.report.serve import page

ROOT = Path(__file__).resolve().parents[2]
NODES = [{"gpu": "h100", "count": 1, "gpus_per_node": 8}, {"gpu": "a100", "count": 1, "gpus_per_node": 8}]
MODELS = {
    "etp": "qwen3-30b-a3b",
    "nodes_per_token": "qwen3-30b-a3b",
    "images": "qwen2.5-vl-7b",
    "recordings": "qwen2.5-omni-7b",
    "encoder_seq": "qwen2.5-vl-7b",
}
"""Fields that a plain decoder without experts has no use for."""
OTHER: dict[str, Any] = {
    "ep": 1,
    "frozen": "0-1",
    "offload_optimizer": 0.5,
    "recompute_layers": 2,
    "speeds": [1.0, 0.5],
    "memory_gib": [70.0, 75.0],
    "precision": "fp8",
    "images": [1.5],
    "recordings": [0.5],
    "encoder_seq": 1024,
}
"""Values where one of the kind alone would not be a set-up of the model below."""
BESIDE: dict[str, dict[str, Any]] = {
    "hsdp": {"dp": 2},
    "lora_on": {"lora": 4},
    "nodes_per_token": {"dp": 2, "ep": 2},
    "recompute_layers": {"recompute": "full"},
    "packed": {"micro_batch_lengths": [[512], [256, 256]]},
}
"""What a field needs beside it to count."""


def value_of(name: str) -> Any:
    """A value of a field that is not its default, as JSON has it."""
    kind = fields_of(Setup)[name].kind
    default = next(f.default for f in Setup.__dataclass_fields__.values() if f.name == name)
    if name in OTHER:
        return OTHER[name]
    match kind:
        case Choice():
            return next(v for v in reversed(kind.of) if v not in (default, "auto"))
        case YesNo():
            return not default
        case Number():
            return 2.5
        case Numbers():
            return [60.0, 61.0]
        case Spread():
            return [1.25]
        case GpuName():
            return "gb200"
        case StackName():
            return "megatron-2024"
        case NodeGroups():
            return NODES
        case Lengths():
            return [[512], [300, 200]] if kind.depth == 2 else [512, 1024]
        case Whole():
            return 2 if name != "seq" else 512
    raise AssertionError(f"no value for {name}: add its kind")


RANKS = {"offload_layers": 1}
"""Fields that a pipeline of several ranks has no use for."""


def ranks_of(name: str) -> int:
    return RANKS.get(name, 2)


def model_of(name: str) -> str:
    return MODELS.get(name, "llama3-8b")


def asked_with(name: str) -> dict[str, Any]:
    beside = {"seq": 2048, "tp": 2} if name not in ("seq", "tp", "micro_batch_lengths", "packed") else {}
    return {**beside, **BESIDE.get(name, {}), name: value_of(name)}


@pytest.mark.parametrize("name", sorted(keyword_fields()))
def test_every_field_is_a_keyword_that_a_plan_carries(name: str, tmp_path: Path) -> None:
    """Keyword, the plan's setting, the plan file and the JSON of the set-up all hold it."""
    asked = asked_with(name)
    plan = octopipe.build_plan("1f1b", model_of(name), ranks_of(name), 2, **asked)
    plan.save(tmp_path / "plan.json")
    costs = costs_of_plan(load_plan(tmp_path / "plan.json"))
    assert (
        costs.setup is not None
        and costs.digest() == resolve_costs(model_of(name), pp=ranks_of(name), micro_batches=2, **asked).digest()
    )
    how = fields_of(Setup)[name]
    held = getattr(costs.setup, name)
    assert held == how.read(name, value_of(name)) or name in ("seq", "micro_batch_size"), (
        "a batch of lengths says these"
    )
    assert setup_from(json.loads(json.dumps(costs.setup.as_dict()))) == costs.setup


@pytest.mark.parametrize("name", sorted(keyword_fields()))
def test_every_field_can_be_asked_for_on_the_page(name: str) -> None:
    """As JSON has it and, where the form has an input, as the text that is typed there."""
    asked = asked_with(name)
    request = parse_request(
        json.dumps({"model": model_of(name), "pp": ranks_of(name), "micro_batches": 2, **asked}).encode()
    )
    job = Job(1, request, model_of(name), lambda *a, **k: None)
    assert job.costs.digest() == resolve_costs(model_of(name), pp=ranks_of(name), micro_batches=2, **asked).digest()
    if name not in flag_fields() or name == "nodes":
        return
    assert json.dumps(name) in page({"llama3-8b": "llama3-8b"})
    typed = {k: spelled(v) for k, v in asked.items()}
    request = parse_request(
        json.dumps({"model": model_of(name), "pp": ranks_of(name), "micro_batches": 2, **typed}).encode()
    )
    assert Job(1, request, model_of(name), lambda *a, **k: None).costs.digest() == job.costs.digest()


@pytest.mark.parametrize(("name", "path"), [("gpu", "own.toml"), ("stack", "own.json"), ("nodes", "nodes.json")])
def test_the_page_reads_no_file_that_a_request_names(name: str, path: str, tmp_path: Path) -> None:
    (tmp_path / path).write_text("{}")
    request = parse_request(
        json.dumps({"model": "llama3-8b", "pp": 2, "micro_batches": 2, name: str(tmp_path / path)}).encode()
    )
    with pytest.raises(OctoPipeError, match=f"^{name}: "):
        request.setup()


def spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


@pytest.mark.parametrize("name", sorted(set(flag_fields()) & set(keyword_fields())))
def test_every_flag_is_the_keyword(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = asked_with(name)
    words = [
        "simulate",
        model_of(name),
        "--pp",
        str(ranks_of(name)),
        "--micro-batches",
        "2",
        "--json",
        "-o",
        str(tmp_path / "plan.json"),
    ]
    for field, value in asked.items():
        flag = "--" + field.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-"))
        elif field == "nodes":
            (tmp_path / "nodes.json").write_text(json.dumps({"nodes": value}))
            words += ["--cluster", str(tmp_path / "nodes.json"), "--dp", "1", "--gpus", "4"]
        else:
            words += [flag, spelled(value)]
    assert main(words) in (0, 3), capsys.readouterr().err
    said = json.loads(capsys.readouterr().out)
    more = {"dp": 1} if name == "nodes" else {}
    costs = resolve_costs(model_of(name), pp=ranks_of(name), micro_batches=2, **asked, **more)
    assert costs.setup is not None and said["setup"] == json.loads(json.dumps(costs.setup.as_dict()))
    assert costs_of_plan(load_plan(tmp_path / "plan.json")).digest() == costs.digest()


def test_the_keywords_that_type_checkers_see_are_the_fields() -> None:
    found = importlib.util.spec_from_file_location("write_keywords", ROOT / "scripts" / "write_keywords.py")
    assert found is not None and found.loader is not None
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    assert script.FILE.read_text() == script.text(), "run python scripts/write_keywords.py"


FIELD = """    colour: str = setup_field(
        "grey", Choice(("grey", "blue")), part="training", words="the colour of the racks"
    )
"""
NEXT_FIELD = "    samples: int | None = setup_field("
USES = """
import json, sys
import octopipe
from octopipe.cli import main
from octopipe.costs.cluster.setup import Setup, setup_from
from octopipe.plans.setting import costs_of_plan
from octopipe.views.report.jobs import Job, parse_request
from octopipe.views.report.serve import page

def colour(plan):
    return costs_of_plan(plan).setup.colour

made = octopipe.build_plan("1f1b", "llama3-8b", 2, 2, tp=2, colour="blue")
made.save("keyword.json")
main(["simulate", "llama3-8b", "--pp", "2", "--tp", "2", "--colour", "blue", "-o", "flag.json", "--json"])
cluster = ["--gpus", "4", "--global-batch", "4", "--budget", "1s"]
main(["plan", "llama3-8b", *cluster, "--colour", "blue", "-o", "cluster.json", "--json"])
form = {"model": "llama3-8b", "pp": 2, "micro_batches": 2, "tp": "2", "colour": "blue"}
job = Job(1, parse_request(json.dumps(form).encode()), "llama3-8b", None)
try:
    octopipe.build_plan("1f1b", "llama3-8b", 2, 2, tp=2, colour="mauve")
    refused = ""
except octopipe.OctoPipeError as error:
    refused = str(error)
print("FOUND", json.dumps({
    "keyword": colour(made), "plan file": colour(octopipe.load_plan("keyword.json")),
    "flag": colour(octopipe.load_plan("flag.json")), "plan of a cluster": colour(octopipe.load_plan("cluster.json")),
    "json": setup_from(Setup(colour="blue").as_dict()).colour, "page": job.costs.setup.colour,
    "form": "colour of the racks" in page({"m": "m"}), "refused": refused,
}))
"""


def test_a_new_field_is_one_edit(tmp_path: Path) -> None:
    """A copy of the package with one line more knows the field everywhere."""
    shutil.copytree(ROOT / "octopipe", tmp_path / "octopipe", ignore=shutil.ignore_patterns("runtime", "megatron"))
    file = tmp_path / "octopipe" / "costs" / "cluster" / "setup.py"
    text = file.read_text()
    assert text.count(NEXT_FIELD) == 1
    file.write_text(text.replace(NEXT_FIELD, FIELD + NEXT_FIELD, 1))
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", USES], cwd=tmp_path, env={**_environment(), "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), None)
    assert line is not None, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(line.removeprefix("FOUND "))
    assert found.pop("refused") == "colour is 'mauve'; one of grey, blue" and found.pop("form") is True
    assert set(found.values()) == {"blue"} and len(found) == 6


def _environment() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

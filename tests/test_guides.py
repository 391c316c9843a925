"""Guides are true: every command in them runs, and what cannot run here is declared with its reason."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from torchrun import torchrun

from octopipe.cli import VERBS, main

GUIDES = Path(__file__).resolve().parents[1] / "docs" / "guides"

RUN = {
    "huggingface.md": {"sh": 7, "python": 1},  # here, below
    "plain-torch.md": {"console": 3},  # test_guides_frameworks.py
    "torchtitan.md": {"console": 3},
    "megatron.md": {"console": 5},
    "profiles.md": {"console": 3, "csv": 1},  # test_foreign_times.py
    "two-hosts.md": {"sh": 2},  # test_two_hosts.py
}
"""Commands of one language in a guide are run by a test, one after another, as they stand there: so many blocks."""

NOT_RUN = {
    ("huggingface.md", "accelerate launch"): "the reader's own command, before octopipe",
    ("plain-torch.md", "stage = PipelineStage"): "the reader's own script, before octopipe",
}
"""Blocks that no test runs, by their first words."""


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", text, flags=re.S | re.M)


def test_every_command_of_the_hugging_face_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from hf_families import tiny_config

    text = (GUIDES / "huggingface.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    transformers.AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained("my-model")
    for script in blocks(text, "python"):
        Path(script.splitlines()[0].removeprefix("# ")).write_text(script)
    commands = [line for block in blocks(text, "sh") for line in block.splitlines() if line.strip()]
    assert len(commands) == 7
    said = []
    for command in commands:
        program, *arguments = shlex.split(command, comments=True)
        capsys.readouterr()
        if program == "torchrun":
            said.append(torchrun(arguments, tmp_path, tmp_path / "logs"))
        else:
            assert program == "octopipe" and main(arguments) == 0, command
            said.append(capsys.readouterr().out)
    assert "transformers' LlamaForCausalLM, weights of its folder" in said[0]
    assert "LlamaDecoderLayer" in said[1]
    assert "predicted" in said[3]
    assert said[4].count("loss") == 3
    again = transformers.AutoModelForCausalLM.from_pretrained("exported")
    start = transformers.AutoModelForCausalLM.from_pretrained("my-model")
    moved = [not torch.equal(a, b) for a, b in zip(again.parameters(), start.parameters())]
    assert all(moved)  # what was trained, not what it began with

"""Guides are true: every command in them runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from hf_families import tiny_config  # noqa: E402

GUIDES = Path(__file__).resolve().parents[1] / "docs" / "guides"


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", text, flags=re.S | re.M)


def test_every_command_of_the_hugging_face_guide_runs(tmp_path: Path) -> None:
    text = (GUIDES / "huggingface.md").read_text()
    transformers.AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(tmp_path / "my-model")
    for script in blocks(text, "python"):
        (tmp_path / script.splitlines()[0].removeprefix("# ")).write_text(script)
    commands = [line for block in blocks(text, "sh") for line in block.splitlines() if line.strip()]
    assert len(commands) == 7
    said = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(GUIDES.parents[1])}
    for command in commands:
        program, *arguments = shlex.split(command, comments=True)
        module = {"octopipe": "octopipe", "torchrun": "torch.distributed.run"}[program]
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        said.append(done.stdout)
    assert "transformers' LlamaForCausalLM, weights of its folder" in said[0]
    assert "LlamaDecoderLayer" in said[1]
    assert "predicted" in said[3]
    assert said[4].count("loss") == 3
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    start = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "my-model")
    moved = [not torch.equal(a, b) for a, b in zip(again.parameters(), start.parameters())]
    assert all(moved)  # what was trained, not what it began with

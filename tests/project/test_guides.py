"""Guides are true: every command in them runs, and what cannot run here is declared with its reason."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
from torchrun import torchrun

from octopipe.cli import MODULES, VERBS, main, parser_of

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"

RUN = {
    ("huggingface.md", "sh"): "test_guides.py",
    ("huggingface.md", "python"): "test_guides.py",
    ("experts.md", "sh"): "test_guides.py",
    ("fine-tune.md", "sh"): "test_guides.py",
    ("fine-tune.md", "python"): "test_guides.py",
    ("plain-torch.md", "console"): "test_guides_frameworks.py",
    ("torchtitan.md", "console"): "test_guides_frameworks.py",
    ("megatron.md", "console"): "test_guides_frameworks.py",
    ("profiles.md", "console"): "test_foreign_times.py",
    ("profiles.md", "csv"): "test_foreign_times.py",
    ("two-hosts.md", "sh"): "test_two_hosts.py",
}
"""Where all blocks of one language in a guide are run, as they stand there."""

READERS = "what the reader has: his command or script before octopipe"
IN_HIS_SCRIPT = "lines for the reader's own script; their names are looked up in test_guides_frameworks.py"
NOT_RUN = {
    ("huggingface.md", "accelerate launch"): READERS,
    ("experts.md", "with octopipe.exchange():"): "lines for the reader's own layer; test_pairs_run.py marks so",
    ("experts.md", "# experts.py"): "the script that a command of the guide starts; test_guides.py",
    ("plain-torch.md", "stage = PipelineStage"): READERS,
    ("torchtitan.md", "# needs GPUs"): READERS,
    ("megatron.md", "# needs GPUs"): READERS,
    ("plain-torch.md", "from octopipe import torch_engine"): IN_HIS_SCRIPT + "; run in test_torch_engine.py",
    ("plain-torch.md", "runtime = _PipelineScheduleRuntime"): IN_HIS_SCRIPT + "; run in test_torch_engine.py",
    ("torchtitan.md", "import dataclasses, octopipe.torchtitan"): IN_HIS_SCRIPT + "; run in test_torchtitan.py",
    ("megatron.md", "import octopipe.megatron"): IN_HIS_SCRIPT + "; run in test_megatron.py",
    ("megatron.md", "profile = octopipe.megatron.profile("): IN_HIS_SCRIPT + "; run in test_megatron.py",
    ("megatron.md", "outcome = octopipe.megatron.tune_measured("): IN_HIS_SCRIPT + "; run in test_megatron.py",
    ("megatron.md", "pip install megatron-core"): "installs a package; test_examples.py runs the script",
    ("torchtitan.md", "pip install torchtitan"): "installs a package; test_examples.py runs the script",
    ("profiles.md", "with torch.profiler.profile"): "lines for the reader's script; test_foreign_times.py records so",
    ("profiles.md", "torch.cuda.nvtx.range_push"): "needs a GPU and Nsight Systems",
    ("two-hosts.md", "#!/bin/bash"): "needs Slurm; its variables and its syntax are in test_two_hosts.py",
    ("two-hosts.md", "num_nodes: 2"): "needs SkyPilot; its script's syntax is in test_two_hosts.py",
    ("two-hosts.md", "from ray.train"): "needs Ray; its syntax is in test_two_hosts.py",
}
"""Blocks that no test runs as they stand, by their first words, and why."""


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", text, flags=re.S | re.M)


def commands_of(text: str) -> list[str]:
    """All lines of the page's shell blocks."""
    return [line for block in blocks(text, "sh") for line in block.splitlines() if line.strip()]


def outputs_of(commands: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What every command prints, ours in this process and torchrun's in processes of its own."""
    said = []
    for command in commands:
        program, *arguments = shlex.split(command, comments=True)
        capsys.readouterr()
        if program == "torchrun":
            said.append(torchrun(arguments, folder, folder / "logs"))
        else:
            assert program == "octopipe" and main(arguments) == 0, command
            said.append(capsys.readouterr().out)
    return said


@pytest.mark.slow
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
    commands = commands_of(text.partition("## Multi-token prediction")[0])  # which asks for a model of its own
    assert len(commands) == 7
    said = outputs_of(commands, tmp_path, capsys)
    assert "transformers' LlamaForCausalLM, weights of its folder" in said[0]
    assert "LlamaDecoderLayer" in said[1]
    assert "predicted" in said[3]
    assert said[4].count("loss") == 3
    again = transformers.AutoModelForCausalLM.from_pretrained("exported")
    start = transformers.AutoModelForCausalLM.from_pretrained("my-model")
    moved = [not torch.equal(a, b) for a, b in zip(again.parameters(), start.parameters())]
    assert all(moved)  # what was trained, not what it began with


@pytest.mark.slow
def test_every_command_of_the_fine_tune_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    text = (GUIDES / "fine-tune.md").read_text()
    monkeypatch.chdir(tmp_path)
    (script,) = blocks(text, "python")
    exec(compile(script, "make_material.py", "exec"), {})
    commands = [line for block in blocks(text, "sh") for line in block.splitlines()]
    assert commands[0].startswith("pip install") and len(commands) == 6
    said = []
    for command in commands[1:]:
        program, *arguments = shlex.split(command)
        capsys.readouterr()
        assert program == "octopipe" and main(arguments) == 0, command
        said.append(capsys.readouterr())
    assert "nothing is broken" in said[0].out
    assert said[1].out.count("perplexity") == 3 and "documents kept apart" in said[1].err
    assert "steps 11 to 12: zb-h1" in said[2].out and "schedule_steps 10 -> 12" in said[2].err
    again = transformers.AutoModelForCausalLM.from_pretrained("exported")
    assert transformers.AutoTokenizer.from_pretrained("exported").eos_token == "<|endoftext|>"
    assert again.config.vocab_size == 320


@pytest.mark.slow
def test_every_command_of_the_guide_on_experts_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    text = (GUIDES / "experts.md").read_text()
    monkeypatch.chdir(tmp_path)
    (script,) = [block for block in blocks(text, "python") if block.startswith("# experts.py")]
    Path("experts.py").write_text(script)
    said = outputs_of(commands_of(text), tmp_path, capsys)
    assert "% of a forward" in said[0] and said[0].count("loss") == 3
    losses = [float(line.rpartition(" ")[2]) for line in said[0].splitlines() if "loss" in line]
    assert losses[0] > losses[1] > losses[2]
    assert "Experts exchange tokens for" in " ".join(said[1].split())


def test_every_block_of_every_guide_is_run_or_declared() -> None:
    undeclared, declared = [], set()
    for path in sorted(GUIDES.glob("*.md")):
        for language, block in re.findall(r"^```(\w+)\n(.*?)^```", path.read_text(), flags=re.S | re.M):
            why = [key for key in NOT_RUN if key[0] == path.name and block.startswith(key[1])]
            if (path.name, language) in RUN:
                assert not why, f"{path.name}: {why} is run"
            elif not why:
                undeclared.append(f"{path.name}: {block.splitlines()[0]}")
            declared |= {*why, (path.name, language)}
    assert undeclared == [], "run these in a test, or say in NOT_RUN why that cannot be"
    assert set(NOT_RUN) | set(RUN) <= declared, (set(NOT_RUN) | set(RUN)) - declared


def test_commands_in_the_text_of_guides_have_flags_that_exist() -> None:
    for path in sorted(GUIDES.glob("*.md")):
        prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
        for verb, rest in re.findall(r"`octopipe (\w+)([^`]*)`", prose):
            assert verb in VERBS, f"{path.name}: octopipe {verb}"
            module = importlib.import_module(f"octopipe.cli.verbs.{MODULES.get(verb, verb)}")
            known = parser_of(verb, module)._option_string_actions
            for flag in re.findall(r"(?<=\s)--?[a-z][a-z-]*", rest):
                assert flag in known, f"{path.name}: octopipe {verb} {flag}"


def test_every_page_says_how_its_blocks_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`scripts/run_guides.py` runs them all in a fresh environment; here it only has to understand them."""
    monkeypatch.syspath_prepend(str(GUIDES.parents[1] / "scripts"))
    import run_guides

    found = {page: run_guides.blocks(page) for page in run_guides.pages()}
    assert sum(len(run_guides.commands(b)) for b in found["README.md"] if b.language == "sh") > 15
    for page, all_blocks in found.items():
        text = (run_guides.ROOT / page).read_text()
        assert text.count("\n```") == 2 * sum(
            not b.directive or b.directive not in ("given", "check") for b in all_blocks
        )
        for block in all_blocks:
            if block.language == "python" and block.directive not in ("skip",):
                compile(run_guides.script_of(block), f"{page}:{block.line}", "exec")
    wrong = "<!-- block: jump -->\n```sh\nls\n```\n"
    monkeypatch.setattr(Path, "read_text", lambda self, *_, **__: wrong)
    with pytest.raises(ValueError, match="'jump' is not a directive"):
        run_guides.blocks("README.md")

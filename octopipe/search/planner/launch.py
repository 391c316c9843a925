"""The launch folder of a split: the script, a Slurm file, and a README that states what was priced.

Knows: how a runtime's command becomes `train.sh`, what Slurm needs in addition, and the contents of the README. Does
not know: the commands (`commands.py`), the plan file, or where files are written (cli/verbs/plan.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octopipe.base.display import milliseconds
from octopipe.search.planner.commands import nodes_of
from octopipe.search.planner.pricing import Candidate
from octopipe.search.planner.runtimes import RUNTIMES

PREFERRED = ("megatron", "torchtitan", "torch", "octopipe", "deepspeed")
"""The order of preference among the runtimes that can run a split: those with the most complete command first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The contents of every file in the folder except the plan."""

    runtime: str
    files: Mapping[str, str]


def launch_of(
    candidate: Candidate, lines: Mapping[str, str], *, title: str, words: Sequence[str], skipped: Sequence[str]
) -> Launch:
    """Return the files of the folder for the first of the preferred runtimes that has a command. If none has one, there
    is only the README, which gives the reasons."""
    runs = [name for name in PREFERRED if not lines.get(name, "none: ").startswith("none: ")]
    page = _page(candidate, lines, runs[0] if runs else "", title, words, skipped)
    if not runs:
        return Launch(runtime="", files={"README.md": page})
    name = runs[0]
    files = {"train.sh": _script(candidate, name, lines[name]), "job.sbatch": _slurm(candidate, title)}
    return Launch(runtime=name, files={**files, "README.md": page})


def _command(line: str) -> tuple[str, str]:
    """Split a line into its command and the comment after it."""
    command, _, comment = line.partition("  # ")
    return command, comment


def _script(candidate: Candidate, name: str, line: str) -> str:
    command, comment = _command(line)
    # One flag per line, so that changes show up in a diff.
    command = re.sub(r" (--[a-z])", r" \\\n  \1", command)
    before = "export HEAD=${HEAD:-localhost}\n"
    if "$NODE_RANK" in command:
        numbers = "set NODE_RANK to the number of this node, from 0 in the order of the cluster file"
        before += f'export NODE_RANK="${{NODE_RANK:-${{SLURM_NODEID:?{numbers}}}}}"\n'
    if name == "megatron":
        before += ': "${MEGATRON_LM:?set MEGATRON_LM to a checkout of Megatron-LM}"\n'
        command = re.sub(r"(?<= )(pretrain_\w+\.py)", r'"$MEGATRON_LM"/\1', command)
    elif name == "torchtitan" and "${MODULE}" in command:
        before += ': "${MODULE:?set MODULE and CONFIG to your torchtitan module and config}"\n'
    if comment:
        before += f"# {comment}\n"
    version = RUNTIMES[name].version
    # A subcommand ends the flags, so further flags must come before it.
    command, subcommand, policy = command.partition(" activation_checkpoint:")
    return (
        "#!/usr/bin/env bash\n"
        f"# {candidate.split.words()}, for {version}. Run it on every node, with HEAD naming the first of them.\n"
        "set -euo pipefail\n"
        'cd "$(dirname "${BASH_SOURCE[0]}")"\n'
        f'{before}\n{command} "$@"{subcommand}{policy}\n'
    )


def _slurm(candidate: Candidate, title: str) -> str:
    nodes, per_node = nodes_of(candidate)
    gpus = "" if per_node is None else f"#SBATCH --gpus-per-node={per_node}\n"
    if candidate.setup.nodes:
        gpus += "# Nodes differ: list them in the order of the cluster file (--nodelist, --distribution=arbitrary).\n"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", title)[:40].strip("-") or "train"
    return (
        "#!/usr/bin/env bash\n"
        f"#SBATCH --job-name={name}\n"
        f"#SBATCH --nodes={nodes}\n"
        "#SBATCH --ntasks-per-node=1\n"
        f"{gpus}"
        "#SBATCH --exclusive\n"
        "#SBATCH --output=%x-%j.log\n"
        "# Account, partition, time and container are your cluster's: add them here or to the sbatch command.\n"
        "set -euo pipefail\n"
        'export HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        'srun --kill-on-bad-exit=1 bash "$SLURM_SUBMIT_DIR/train.sh" "$@"\n'
    )


def _page(
    candidate: Candidate, lines: Mapping[str, str], name: str, title: str, words: Sequence[str], skipped: Sequence[str]
) -> str:
    setup = candidate.setup
    share = "" if candidate.mfu is None else f", {100 * candidate.mfu:.1f} % MFU"
    out = [f"# {title}", "", f"{setup.words()}.", "", "## What was priced", ""]
    out += [
        f"- split: {candidate.split.words()} ({candidate.how})",
        f"- a step: {milliseconds(candidate.step_ms)}, {candidate.tokens_per_gpu_per_second:.0f} tokens/GPU/s{share}",
        f"- bubble: {100 * candidate.bubble:.1f} %",
        f"- memory of the fullest GPU: {candidate.peak_gib:.1f} of {candidate.limit_gib:.1f} GiB",
        f"- recomputation: {candidate.recompute}",
        f"- gradients: {'bf16' if setup.gradient_bytes == 2 else 'fp32'}; products: {setup.precision}",
    ]
    out += ["", *words, *skipped, "", "## Files", "", "- `plan.json`: the plan; `octopipe report plan.json` shows it"]
    if name:
        out += [
            f"- `train.sh`: the command for {RUNTIMES[name].version}; further flags are passed on",
            "- `job.sbatch`: the same under Slurm: `sbatch job.sbatch`",
            "",
            "Add your data, learning-rate schedule and checkpoints: as written, the command starts a run that "
            "measures speed.",
        ]
    out += ["", "## Every runtime", ""]
    for other, line in lines.items():
        command, comment = _command(line)
        if line.startswith("none: "):
            out.append(f"- {other}: no command, because {line.removeprefix('none: ')}")
        else:
            out += [f"- {other}{': ' + comment if comment else ''}", "", "  ```bash", f"  {command}", "  ```"]
    return "\n".join([*out, ""])

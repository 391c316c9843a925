"""Two hosts, made of network namespaces, each with its own name and shared memory; Slurm's variables."""

from __future__ import annotations

import ast
import contextlib
import json
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import start_server

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.runtime.ranks.slurm import environment, first_host

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guides" / "two-hosts.md"
ADDRESS = "10.213.7"


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two network namespaces that reach each other over one cable."""
    pytest.importorskip("torch")
    names = f"octo-a{os.getpid()}", f"octo-b{os.getpid()}"
    ends = f"oa{os.getpid()}", f"ob{os.getpid()}"
    if not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("no ip or unshare here: two hosts cannot be made")
    made = ip("netns", "add", names[0])
    if made.returncode:
        pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        cable = ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        if cable.returncode:
            pytest.skip(f"no cable between namespaces here: {cable.stderr.strip()}")
        for k, (name, end) in enumerate(zip(names, ends)):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "link", "set", end, "name", "wire")
            ip("-n", name, "addr", "add", f"{ADDRESS}.{k + 1}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def on_both(hosts: tuple[str, str], arguments: list[str], folder: Path, limit_s: float = 900.0) -> list[str]:
    """What torchrun prints on each host. Hosts have names, processes and memory of their own and share the network."""
    inside = "mount -t tmpfs none /dev/shm && hostname {host} && exec " + shlex.join(
        [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank"]
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "wire"}
    running = []
    for k, host in enumerate(hosts):
        rest = ["--master-addr", f"{ADDRESS}.1", "--master-port", "29511", *arguments]
        command = f"{inside.format(host=host)} {k} {shlex.join(rest)}"
        apart = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words = ["ip", "netns", "exec", host, *apart, "sh", "-c", command]
        running.append(
            subprocess.Popen(
                words, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    end, said = time.monotonic() + limit_s, []
    try:
        for process in running:
            said.append(process.communicate(timeout=max(end - time.monotonic(), 1)))
    except subprocess.TimeoutExpired:
        # A machine with two cores for several test workers takes minutes to start torchrun twice: tell hosts apart.
        for process in running[len(said) :]:
            process.kill()
            said.append(process.communicate())
        pytest.fail(f"not done within {limit_s:g} s: {said}")
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], said
    return [out for out, _ in said]


def commands() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


@pytest.mark.slow
def test_train_on_two_hosts_has_the_losses_of_one(
    hosts: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, both = commands()
    capsys.readouterr()
    assert main([*alone[1:], "--json"]) == 0
    losses = json.loads(capsys.readouterr().out)["losses"]
    arguments = both[both.index("-m") :]
    shared = ["--checkpoint", str(tmp_path / "run"), "--save-every", "1", "--json"]
    first, second = on_both(hosts, [*arguments, *shared], tmp_path)
    assert json.loads(first)["losses"] == pytest.approx(losses, rel=1e-6)
    assert second == ""  # one rank speaks
    assert sorted(p.name for p in (tmp_path / "run").glob("step-*")) == ["step-00000001", "step-00000002"]


PIPELINE = """
    import json, os, socket
    import torch, torch.distributed as dist
    from octopipe import CostTable, Pipeline, build_plan

    dist.init_process_group("gloo")
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8).double() for _ in range(6)]
    plan = build_plan("zb-v", CostTable.uniform(num_layers=6, p2p_ms=0.1), dist.get_world_size(), 4)
    x, y = torch.randn(8, 8).double(), torch.randn(8, 8).double()
    with Pipeline(layers, plan, torch.nn.functional.mse_loss) as pipe:
        loss = pipe.step(x, y)
        grads = {n: p.grad.abs().sum().item() for n, p in pipe.named_parameters()}
        timeline = pipe.timeline()
    print(json.dumps({"hosts": names, "loss": float(loss), "grads": grads, "ms": timeline.makespan_ms}))
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_pipeline_over_two_hosts_equals_one_process(hosts: tuple[str, str], tmp_path: Path) -> None:
    import torch

    (tmp_path / "script.py").write_text(textwrap.dedent(PIPELINE))
    said = [json.loads(text) for text in on_both(hosts, ["script.py"], tmp_path)]
    assert said[0]["hosts"] == list(hosts)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8).double() for _ in range(6)))
    x, y = torch.randn(8, 8).double(), torch.randn(8, 8).double()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    expected = {n: p.grad.abs().sum().item() for n, p in model.named_parameters()}
    assert said[0]["loss"] == said[1]["loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert {**said[0]["grads"], **said[1]["grads"]} == pytest.approx(expected, rel=1e-12)
    assert said[0]["grads"].keys().isdisjoint(said[1]["grads"]) and said[0]["ms"] > 0


FIRST_STEP = """
    import json, time
    import torch, torch.distributed as dist
    from octopipe import CostTable, Pipeline, build_plan

    dist.init_process_group("gloo")

    class Bad(torch.nn.Linear):
        bad_rank = None

        def forward(self, x):
            if dist.get_rank() == Bad.bad_rank:
                raise ValueError("a bad start")
            return super().forward(x)

    torch.manual_seed(0)
    layers = [Bad(8, 8).double() for _ in range(4)]
    plan = build_plan("1f1b", CostTable.uniform(num_layers=4, p2p_ms=0.1), 2, 4)
    x, y = torch.randn(8, 8).double(), torch.randn(8, 8).double()
    said = []
    for bad_rank in (0, 1):
        with Pipeline(layers, plan, torch.nn.functional.mse_loss, timeout_s=800) as pipe:
            Bad.bad_rank, begin = bad_rank, time.monotonic()
            try:
                pipe.step(x, y)
            except Exception as error:
                said.append((str(error), time.monotonic() - begin))
            Bad.bad_rank = None
            pipe.recover()
            pipe.zero_grad()
            said.append(float(pipe.step(x, y)))
    print(json.dumps(said))
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_an_error_in_the_first_step_on_one_host_ends_the_step_on_the_other(
    hosts: tuple[str, str], tmp_path: Path
) -> None:
    """Whichever host it is on, long before the timeout; and both go on together."""
    import torch

    (tmp_path / "script.py").write_text(textwrap.dedent(FIRST_STEP))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8).double() for _ in range(4)))
    x, y = torch.randn(8, 8).double(), torch.randn(8, 8).double()
    expected = torch.nn.functional.mse_loss(model(x), y).item()
    for text in on_both(hosts, ["script.py"], tmp_path):
        for (said, seconds), loss in zip(*[iter(json.loads(text))] * 2):
            assert "a bad start" in said
            assert seconds < 400  # half of the timeout, however busy the machine is
            assert loss == pytest.approx(expected, rel=1e-12)


# -- Slurm ---------------------------------------------------------------------------------------------

SRUN = {
    "SLURM_PROCID": "9", "SLURM_NTASKS": "12", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_JOB_NODELIST": "n[001-002,7],m9", "SLURM_TASKS_PER_NODE": "4(x2),2(x2)", "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2", "ENVIRONMENT": "BATCH",
}  # fmt: skip


def test_sruns_variables_are_torchruns() -> None:
    assert environment(SRUN) == {
        "RANK": "9",
        "WORLD_SIZE": "12",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "n001",
        "MASTER_PORT": str(20_000 + (123456 + 202) % 20_000),
    }
    # What somebody has chosen stays; a smaller step of the job counts for itself.
    chosen = environment({**SRUN, "MASTER_ADDR": "x", "MASTER_PORT": "1", "SLURM_STEP_NUM_TASKS": "10"})
    assert chosen["WORLD_SIZE"] == "10" and not {"MASTER_ADDR", "MASTER_PORT"} & set(chosen)


@pytest.mark.parametrize(
    "known",
    [
        {},
        {**SRUN, "RANK": "0", "WORLD_SIZE": "2"},  # torchrun under srun
        {**SRUN, "SLURM_NTASKS": "1"},
        {k: v for k, v in {**SRUN, "SLURM_PROCID": "0"}.items() if k != "SLURM_STEP_ID"},  # the batch script itself
    ],
)
def test_other_starters_and_batch_scripts_are_left_alone(known: dict[str, str]) -> None:
    assert environment(known) == {}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x'"),
        ({"SLURM_PROCID": "12"}, "12 of 12 tasks"),
        ({"SLURM_JOB_NODELIST": ""}, "names no nodes"),
        ({"SLURM_JOB_NODELIST": ",,"}, "not a list of Slurm nodes"),
    ],
)
def test_variables_that_cannot_be_are_told(change: dict[str, str], why: str) -> None:
    with pytest.raises(OctoPipeError, match=why):
        environment({**SRUN, **change})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a1", "a1"), ("a1,a2", "a1"), ("a[1-3]", "a1"), ("a[08-11,3]", "a08"), ("r2-n[5]-ib,z", "r2-n5-ib")],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def as_srun_starts(slurm: dict[str, str], words: list[str], said: Path) -> None:
    os.environ.update(slurm)
    with said.open("w") as out, contextlib.redirect_stdout(out):
        code = main(words)
    sys.exit(code)


def test_train_under_srun_joins_the_others(tmp_path: Path) -> None:
    """Two processes with srun's variables and nothing else."""
    pytest.importorskip("torch")
    alone, _ = commands()
    at = alone.index("--nproc")
    words = [*alone[1:at], *alone[at + 2 :], "--json"]
    start_server()
    running = []
    for rank in range(2):
        slurm = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0",
                 "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid())}  # fmt: skip
        given = slurm, words, tmp_path / f"said-{rank}"
        running.append(multiprocessing.get_context("forkserver").Process(target=as_srun_starts, args=given))
        running[-1].start()
    for process in running:
        process.join(timeout=240)
    assert [process.exitcode for process in running] == [0, 0]
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(2)]
    assert json.loads(said[0])["num_ranks"] == 2 and said[1] == ""


def test_the_recipes_are_programs() -> None:
    text = GUIDE.read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        ast.parse(block)
    for language in ("bash", "yaml"):
        for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL):
            script = block if language == "bash" else block.split("run: |\n")[1]
            assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
            assert "octopipe train" in script

"""Soak: a long run on two ranks, with plans that change and ranks that die, against one that is left alone.

    make soak                                     2,000 steps, some twenty faults
    python scripts/soak.py --steps 60 --faults 2 --seed 3

The run is cut into lives: each trains on from the newest checkpoint under a plan drawn anew, switches plans at random
steps in the middle, and ends with a fault (kill -9 or an exception, at a random step, in F or while saving) until the
last step is reached. Every loss must be the one of an uninterrupted run on one rank, to rounding; memory of the ranks
must not grow within a life; no process, lock or shared memory may be left. Exit code 1 if any of it does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.models.layers import Embedding, Head, Mlp  # noqa: E402
from octopipe.models.spec import ModelSpec  # noqa: E402
from octopipe.plans.plan import Plan  # noqa: E402
from octopipe.runtime.ranks import launch  # noqa: E402
from octopipe.runtime.training import train as trainer  # noqa: E402
from octopipe.runtime.training.checkpoint import checkpoints  # noqa: E402
from octopipe.runtime.training.checkpoint_folder import damage  # noqa: E402
from octopipe.runtime.training.job import EvalReport, Phase, StepReport, TrainJob, TrainResult  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

SYSTEMS = ("1f1b", "gpipe", "zb-h1", "interleaved", "chimera")
MICRO_BATCHES = 4
RATE = 0.001
"""At ten times this rate, differences of rounding grow to 1e-7 after 1,600 steps; at this one to 1e-11 after 2,000."""
TOLERANCE = 1e-9
"""Of a loss: plans add gradients up in different orders, in float64."""
GROWTH_MIB = 24.0
"""Of a rank within one life, after its first steps: allocators settle, nothing else may add up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What happens between two starts of the ranks."""

    switches: tuple[tuple[int, str], ...]
    """After these steps, go on under these systems' plans."""
    fault: str
    """"kill", "raise", "kill while saving" or "" for none."""
    at: int
    """The step of the fault."""
    rank: int


def tiny() -> ModelSpec:
    hidden, vocab = 8, 32
    inner = tuple(Mlp(hidden=hidden, ffn=16) for _ in range(6))
    ends = Embedding(hidden=hidden, vocab=vocab), Head(hidden=hidden, vocab=vocab)
    return ModelSpec(name="soak", layers=(ends[0], *inner, ends[1]))


def plan_of(system: str) -> Plan:
    return build_plan(system, CostTable.uniform(num_layers=tiny().num_layers), 2, MICRO_BATCHES)


def live(life: Life, seat: launch.Seat, job: TrainJob) -> TrainResult | None:
    """One rank's part of a life."""
    from octopipe.runtime.training import checkpoint as saving

    switches = dict(life.switches)

    def adapt(self: trainer._Run, step: int) -> None:
        if step in switches:
            self.pipe, optimizer = trainer.switch(
                self.pipe,
                self.optimizer,
                plan_of(switches[step]),
                make_pipe=self._make_pipe,
                make_optimizer=partial(trainer.optimizer_of, self.job),
            )
            assert optimizer is not None
            self.optimizer = optimizer

    trainer._Run._adapt = adapt  # type: ignore[method-assign]
    if seat.rank == life.rank and life.fault:
        if life.fault == "kill while saving":
            write = saving._write_layers

            def dying(folder: Path, contents: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
                if int(folder.name[5:13]) >= life.at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return write(folder, contents)

            saving._write_layers = dying
        else:
            step_of = trainer._Run._step

            def failing(self: trainer._Run, step: int) -> Tensor:
                if step == life.at:
                    if life.fault == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise ValueError("an injected fault")
                return step_of(self, step)

            trainer._Run._step = failing  # type: ignore[method-assign]
    return trainer.train_rank(seat, job)


class Heard:
    """What a life told: losses by step, and memory of every rank."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.memory: list[tuple[float, ...]] = []

    def __call__(self, word: Phase | StepReport | EvalReport) -> None:
        if isinstance(word, StepReport):
            self.losses[word.step] = word.loss
            self.memory.append(word.memory_bytes)

    def growth_mib(self) -> float:
        """Of the rank that grew most, from the end of the first quarter of a life to its end."""
        rows = self.memory[len(self.memory) // 4 :]
        if len(rows) < 20:
            return 0.0
        return max(b - a for a, b in zip(rows[0], rows[-1], strict=True)) / 2**20


def lives_of(rng: random.Random, first: int, steps: int, left: int) -> Life:
    """Drawn: the next life, with a fault while there are faults left."""
    # Short enough on average that no fault is left when the run ends.
    end = steps if left == 0 else min(steps, first + rng.randint(1, max(2, int(1.5 * (steps - first) / (left + 1)))))
    count = rng.randint(1, 3)
    switches = sorted({rng.randint(first, max(first, end - 1)) for _ in range(count)})
    fault = rng.choice(("kill", "raise", "kill while saving")) if left and end < steps else ""
    return Life(
        switches=tuple((step, rng.choice(SYSTEMS)) for step in switches), fault=fault, at=end, rank=rng.randrange(2)
    )


def soak(steps: int, faults: int, seed: int, folder: Path, say: Callable[[str], None] = print) -> list[str]:
    """All problems found, one line each."""
    rng = random.Random(seed)
    base = TrainJob(
        spec=tiny(), nproc=2, steps=steps, seq=8, micro_batches=MICRO_BATCHES, lr=RATE, measure=False, threads=1,
        dtype="float64", timeout_s=60.0, seed=seed,
    )  # fmt: skip
    alone = trainer.train(replace(base, nproc=1))
    assert alone is not None
    expected = {r.step: r.loss for r in alone.reports}
    job = replace(base, checkpoint=str(folder / "run"), save_every=max(1, steps // 100), adapt_every=1, measure=True)
    problems: list[str] = []
    seen: dict[int, float] = {}
    injected, switched, number, growth, worst = 0, 0, 0, 0.0, 0.0
    began = time.monotonic()
    while True:
        number += 1
        found = checkpoints(folder / "run") if (folder / "run").exists() else []
        first = int(found[-1].name[5:]) + 1 if found else 1
        life = lives_of(rng, first, steps, faults - injected)
        heard = Heard()
        asked = replace(job, plan=plan_of(rng.choice(SYSTEMS)), resume=bool(found), measure=False, adapt_every=None)
        object.__setattr__(asked, "adapt_every", 1)  # plans are switched by `live`, not by measured times
        ended = ""
        try:
            _train(life, asked, heard)
        except OctoPipeError as error:
            ended = str(error)
        injected += bool(ended)
        switched += sum(step in heard.losses for step, _ in life.switches)
        growth = max(growth, heard.growth_mib())
        off = {step: abs(loss - expected[step]) / max(1.0, expected[step]) for step, loss in heard.losses.items()}
        worst = max(worst, *off.values()) if off else worst
        for step, loss in heard.losses.items():
            if not off[step] <= TOLERANCE:
                problems.append(f"life {number}: the loss of step {step} is {loss!r}, alone {expected[step]!r}")
        seen.update(heard.losses)
        if bool(ended) != bool(life.fault) or (ended and not any(word in ended for word in ("SIGKILL", "an injected"))):
            problems.append(f"life {number}: {life.fault or 'no fault'} at step {life.at}, but {ended or 'it went on'}")
        problems += [f"life {number}: {why}" for path in checkpoints(folder / "run") if (why := damage(path))]
        last = max(heard.losses, default=first)
        far = max(off.values(), default=0.0)
        say(f"life {number}: steps {first} to {last}, off by {far:.0e}, {life.fault or 'to the end'}; {ended[:90]}")
        if not ended or len(problems) > 20:
            break
    if sorted(seen) != list(range(1, steps + 1)):
        problems.append(f"{steps - len(seen)} of {steps} steps were never made")
    if growth > GROWTH_MIB:
        problems.append(f"a rank grew by {growth:.1f} MiB within one life")
    left = [path for path in glob.glob("/dev/shm/*") if f"_{os.getpid()}_" in path]
    problems += [f"{path} is left" for path in left]
    say(
        f"{steps} steps, {number} lives, {injected} faults, {switched} plan switches, largest growth of a rank "
        f"{growth:.1f} MiB, losses off by {worst:.0e} at most, {len(problems)} problems, "
        f"{time.monotonic() - began:.0f} s"
    )
    return problems


def _train(life: Life, job: TrainJob, heard: Heard) -> None:
    real = trainer.train_rank
    trainer.train_rank = partial(live, life)
    try:
        trainer.train(job, heard)
    finally:
        trainer.train_rank = real


def main() -> int:
    parser = argparse.ArgumentParser(description="Train long, with faults; every loss must be that of a quiet run.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for the checkpoints (default: a temporary one)")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="octopipe-soak-")))
        problems = soak(args.steps, args.faults, args.seed, folder, partial(print, flush=True))
    for line in problems:
        print(line, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

"""Logs of a run: JSON lines, TensorBoard, Weights & Biases.

Knows: which values of a report are logged under which names, and how each log is written. Does not know: runs; it
receives the reports of the first rank. TensorBoard and wandb are loaded only if they are requested.

    {"kind": "run", "time": ..., "model": ..., ...}                       once per start
    {"kind": "step", "time": ..., "step": 10, "loss": 2.1, "lr": ..., "tokens_per_s": ..., "bubble_ratio": ..., ...}
    {"kind": "evaluation", "time": ..., "step": 10, "loss": 2.3, "perplexity": 9.97, "tokens": 4096}
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, Any

import msgspec

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import plain, shown
from octopipe.runtime.training.data.tokenizer import INSTALL
from octopipe.runtime.training.job import EvalReport, StepReport

GIB = float(1 << 30)


class Logs:
    """All logs that a run was asked to write; every one of them is opened before the run starts."""

    def __init__(
        self,
        file: str | None = None,
        *,
        tensorboard: str | None = None,
        wandb: str | None = None,
        about: Mapping[str, Any],
    ):
        self._about = dict(about)
        self._file: IO[bytes] | None = None
        self._board: Any = None
        self._wandb: Any = None
        first = os.environ.get("RANK", "0") == "0"  # under torchrun one rank is enough
        if first and file is not None:
            try:
                self._file = open(file, "ab")  # noqa: SIM115
            except OSError as error:
                raise OctoPipeError(
                    f"{shown(file)}: cannot be written ({error.strerror}); name another --log"
                ) from None
            self._line("run", self._about)
        if first and tensorboard is not None:
            self._board = _board(tensorboard)
        if first and wandb is not None:
            self._wandb = _wandb(wandb, self._about)

    def __enter__(self) -> Logs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for close in self._closers():
            close()

    def _closers(self) -> list[Callable[[], Any]]:
        out: list[Callable[[], Any]] = []
        if self._file is not None:
            out.append(self._file.close)
        if self._board is not None:
            out.append(self._board.close)
        if self._wandb is not None:
            out.append(self._wandb.finish)
        return out

    def show(self, news: Any) -> None:
        """Log a report when it arrives; other values are not logged."""
        if isinstance(news, StepReport):
            kind, values = "step", step_values(news)
        elif isinstance(news, EvalReport):
            kind, values = "evaluation", eval_values(news)
        else:
            return
        self._line(kind, {"step": news.step, **values})
        prefix = "train" if kind == "step" else "eval"
        scalars = {f"{prefix}/{name}": v for name, v in values.items() if isinstance(v, int | float)}
        scalars |= {
            f"{prefix}/{name}/rank{k}": v
            for name, row in values.items()
            if isinstance(row, list)
            for k, v in enumerate(row)
        }
        if self._board is not None:
            for name, number in scalars.items():
                self._board.add_scalar(name, number, news.step)
        if self._wandb is not None:
            self._wandb.log({**scalars, "step": news.step})

    def _line(self, kind: str, values: Mapping[str, Any]) -> None:
        if self._file is not None:
            line = {"kind": kind, "time": round(time.time(), 3), **values}
            self._file.write(msgspec.json.encode(line, enc_hook=plain) + b"\n")
            self._file.flush()


def step_values(r: StepReport) -> dict[str, Any]:
    """Return the values of a report under the names by which they are logged."""
    out = {
        "loss": r.loss,
        "lr": r.lr,
        "grad_norm": r.grad_norm,
        "step_ms": r.step_ms,
        "pipeline_ms": r.pipeline_ms,
        "reduced_ms": r.reduced_ms,
        "tokens_per_s": r.tokens_per_s,
        "bubble_ratio": r.bubble_ratio,
        "memory_gib": [b / GIB for b in r.memory_bytes],
        "samples": r.samples,
    }
    return {**out, **{name: v for name, v in (("mfu", r.mfu), ("epoch", r.epoch)) if v is not None}}


def eval_values(r: EvalReport) -> dict[str, Any]:
    return {"loss": r.loss, "perplexity": r.perplexity, "tokens": r.tokens}


def _board(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except (ModuleNotFoundError, ImportError):
        raise OctoPipeError(f"--tensorboard needs the tensorboard library: {INSTALL}") from None
    try:
        return SummaryWriter(folder)
    except OSError as error:
        raise OctoPipeError(f"{shown(folder)}: cannot be written ({error.strerror}); name another folder") from None


def _wandb(project: str, about: Mapping[str, Any]) -> Any:
    try:
        import wandb
    except ModuleNotFoundError:
        raise OctoPipeError('--wandb needs the wandb library: pip install "octopipe[wandb]"') from None
    try:
        # Nothing leaves this machine unless the environment says so; `wandb sync` sends it later.
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        run = wandb.init(project=project, config=dict(about), mode=mode, settings=wandb.Settings(silent=True))
        run.define_metric("*", step_metric="step")
        return run
    except Exception as error:  # the library has exceptions of its own
        why = " ".join(str(error).split())[:160]
        raise OctoPipeError(f"--wandb {project}: {why}") from None

"""Training runs as rows of a table: what was run, on what, and the tokens per second that it reached.

Knows: the columns, the published runs that are included in the package, a user's table of the same form, and how a row
becomes a model and a set-up. Does not know: how runs are predicted or rates are fitted to them.

A table has one line per run. `system`, `model`, `gpus`, `gbs` and `tokens_per_s_per_gpu` are required; the rest may be
omitted or empty. Defaults: sizes 1, `seq` 4096, `precision` bf16, `zero` 1, and as little recomputation as fits.

    system,model,gpus,tp,pp,gbs,seq,tokens_per_s_per_gpu
    h100,llama3-8b,16,2,2,64,8192,9120

>>> len(published_runs()) >= 80 and len({run.stack for run in published_runs()}) >= 5
True
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief, decode_text, read_bytes, shown
from octopipe.base.limits import MAX_GPUS, MAX_SIZE
from octopipe.costs.cluster.hardware import Gpu, gpu
from octopipe.costs.cluster.setup import DEFAULT_SEQ, Setup
from octopipe.costs.measured import PUBLISHED_MODELS, PUBLISHED_RUNS
from octopipe.models.spec import ModelSpec
from octopipe.models.zoo import PRESETS, gpt, preset

COLUMNS = (
    "stack",
    "source",
    "release",
    "date",
    "system",
    "model",
    "gpus",
    "precision",
    "gbs",
    "mbs",
    "seq",
    "zero",
    "tp",
    "pp",
    "cp",
    "vp",
    "ep",
    "etp",
    "recompute",
    "gradients",
    "states",
    "mtp",
    "exchange",
    "layout",
    "tokens_per_s_per_gpu",
    "model_tflops_per_gpu",
    "note",
)
NEEDED = ("system", "model", "gpus", "gbs", "tokens_per_s_per_gpu")
SIZES = ("mbs", "tp", "pp", "cp", "vp", "ep")
PRECISIONS = {"": "bf16", "bf16": "bf16", "fp8": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
EXCHANGES = ("", "exposed", "paired", "hidden")
"""How experts exchanged tokens. Empty: not stated; exposed: without overlapping with compute; paired: overlapping with
compute of the other direction in Megatron's combined schedule, which hides a part of it (priced like "exposed");
hidden: all of it behind compute."""
MOST_RUNS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run."""

    name: str
    stack: str
    source: str
    spec: ModelSpec
    setup: Setup
    chunks: int
    """Stages per pipeline rank."""
    recompute: str
    """none, selective, full, or auto if the table does not say: as little as fits."""
    exchange: str
    balanced: bool
    """Whether layers were distributed over stages by their times (a custom layout), not by their number."""
    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float | None = None
    """As published, by the publisher's own count."""


def read_runs(
    path: str | Path,
    *,
    model: Callable[[str], ModelSpec | None] | None = None,
    gpus: Mapping[str, Gpu] | None = None,
) -> list[Run]:
    """Read the runs in a table. `model` finds models that are neither presets nor published models; `gpus` are GPUs by
    name, in addition to the presets."""
    where = shown(path)
    try:
        lines = list(csv.reader(decode_text(read_bytes(path), where).splitlines(), strict=True))
    except csv.Error as error:
        raise OctoPipeError(f"{where}: not a table with commas ({' '.join(str(error).split())[:100]})") from None
    lines = [line for line in lines if any(cell.strip() for cell in line)]
    header = [cell.strip() for cell in lines[0]] if lines else []
    missing = [name for name in NEEDED if name not in header]
    if missing:
        raise OctoPipeError(f"{where}: no column {', '.join(missing)}; the first line names the columns")
    unknown = [name for name in header if name not in COLUMNS]
    twice = [name for i, name in enumerate(header) if name in header[:i]]
    if unknown or twice:
        what = f"unknown column {brief(unknown[0])}" if unknown else f"column {twice[0]} appears twice"
        raise OctoPipeError(f"{where}: {what}; known columns: {', '.join(COLUMNS)}")
    if not 1 <= len(lines) - 1 <= MOST_RUNS:
        raise OctoPipeError(f"{where}: {len(lines) - 1} runs; give 1 to {MOST_RUNS}, one per line")
    out = []
    for i, line in enumerate(lines[1:], 2):
        if len(line) != len(header):
            raise OctoPipeError(f"{where}: line {i} has {len(line)} cells for {len(header)} columns; give one each")
        cells = dict(zip(header, (cell.strip() for cell in line), strict=True))
        try:
            out.append(_run(cells, model or (lambda name: None), gpus or {}))
        except OctoPipeError as error:
            raise OctoPipeError(f"{where}: line {i}: {error}") from None
    return out


def _run(cells: Mapping[str, str], model: Callable[[str], ModelSpec | None], gpus: Mapping[str, Gpu]) -> Run:
    number = {name: _whole(name, cells.get(name, ""), 1) for name in SIZES}
    count, batch = _whole("gpus", cells["gpus"]), _whole("gbs", cells["gbs"])
    if count > MAX_GPUS:
        raise OctoPipeError(f"gpus is {count}; at most {MAX_GPUS} are allowed")
    per_pipeline = number["tp"] * number["pp"] * number["cp"]
    if count % per_pipeline:
        raise OctoPipeError(f"tp x pp x cp = {per_pipeline} does not divide {count} GPUs; correct one of them")
    dp = count // per_pipeline
    if batch < dp * number["mbs"]:
        raise OctoPipeError(f"gbs {batch} is less than mbs {number['mbs']} x dp {dp}; correct one of them")
    precision = PRECISIONS.get(cells.get("precision", "").lower())
    if precision is None:
        raise OctoPipeError(f"precision is {brief(cells['precision'])}; one of bf16, fp8, mxfp8, nvfp4")
    recompute = cells.get("recompute", "") or "auto"
    if recompute not in ("none", "selective", "full", "auto"):
        raise OctoPipeError(f"recompute is {brief(recompute)}; one of none, selective, full, or empty")
    exchange = cells.get("exchange", "")
    if exchange not in EXCHANGES:
        raise OctoPipeError(f"exchange is {brief(exchange)}; one of exposed, paired, hidden, or empty")
    if cells.get("layout", "") not in ("", "balanced"):
        raise OctoPipeError(f"layout is {brief(cells['layout'])}; balanced, or empty: as many layers on every stage")
    zero, gradients = cells.get("zero", "") or "1", cells.get("gradients", "") or None
    if zero not in ("0", "1", "2", "3"):
        raise OctoPipeError(f"zero is {brief(zero)}; one of 0, 1, 2, 3")
    system = cells["system"]
    setup = Setup(
        gpu=gpus.get(system) or gpu(system),
        tp=number["tp"],
        cp=number["cp"],
        ep=number["ep"],
        etp=_whole("etp", cells["etp"]) if cells.get("etp") else None,
        pp=number["pp"],
        dp=dp,
        micro_batch_size=number["mbs"],
        # A batch that is not a multiple of the micro-batch size ends with a smaller micro-batch.
        micro_batches=max(1, round(batch / (number["mbs"] * dp))),
        seq=_whole("seq", cells.get("seq", ""), DEFAULT_SEQ),
        zero=int(zero),
        precision=precision,  # type: ignore[arg-type]
        gradients=gradients,  # type: ignore[arg-type]
        states=cells.get("states") or "fp32",  # type: ignore[arg-type]
    )
    setup.cluster()  # raises an error if one size does not divide another
    spec = _spec(cells["model"]) or model(cells["model"])
    if spec is None:
        raise OctoPipeError(
            f"unknown model {brief(cells['model'])}; give a preset (`octopipe models`) or a config.json"
        )
    if not cells.get("mtp"):
        spec = spec.without_mtp()
    return Run(
        name=f"{system} {cells['model']} {cells.get('precision') or 'bf16'} x{count}",
        stack=cells.get("stack", ""),
        source=cells.get("source", ""),
        spec=spec,
        setup=setup,
        chunks=number["vp"] if number["pp"] > 1 else 1,
        recompute=recompute,
        exchange=exchange,
        balanced=cells.get("layout") == "balanced",
        tokens_per_s_per_gpu=_positive("tokens_per_s_per_gpu", cells["tokens_per_s_per_gpu"]),
        model_tflops_per_gpu=_positive("model_tflops_per_gpu", cells["model_tflops_per_gpu"])
        if cells.get("model_tflops_per_gpu")
        else None,
    )


def _whole(name: str, text: str, default: int | None = None) -> int:
    if not text and default is not None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 15 or not 1 <= int(text) <= MAX_SIZE:
        raise OctoPipeError(f"{name} is {brief(text)}; give a whole number >= 1")
    return int(text)


def _positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e12:
        raise OctoPipeError(f"{name} is {brief(text)}; give a number > 0")
    return value


def _spec(name: str) -> ModelSpec | None:
    if name in PRESETS:
        return preset(name)
    return _published_models().get(name)


@lru_cache(maxsize=1)
def _published_models() -> Mapping[str, ModelSpec]:
    out = {}
    with PUBLISHED_MODELS.open() as file:
        for row in csv.DictReader(file):
            sizes = {key: int(row[key]) for key in ("blocks", "hidden", "heads", "vocab", "positions")}
            out[row["name"]] = gpt(row["name"], bias=row["family"] == "gpt", **sizes)
    return out


@lru_cache(maxsize=1)
def published_runs() -> tuple[Run, ...]:
    """The published runs that come with the package."""
    return tuple(read_runs(PUBLISHED_RUNS))


def under(run: Run, recompute: str, layers: int | None = None) -> Setup:
    """Return the run's set-up with this recomputation; `layers`: how many layers full recomputation recomputes."""
    return replace(run.setup, recompute=recompute, recompute_layers=layers)  # type: ignore[arg-type]

"""The records of a training run: its configuration, its progress reports, its result.

Knows: the records, and which configurations are invalid. Does not know: how to train (`train.py`); imports no torch.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octopipe.base.errors import OctoPipeError
from octopipe.costs.mode import Mode, precision_of, refuse_on_cpu, refuse_other_graphs, refuse_other_precision
from octopipe.costs.profile_file import Profile
from octopipe.models.lengths import Groups
from octopipe.models.spec import ModelSpec
from octopipe.plans.branches import along_graph, chain_of, check_connections
from octopipe.plans.plan import Plan
from octopipe.plans.setting import checkpointed_by_prices
from octopipe.runtime.training.data.opening import Reading
from octopipe.runtime.training.schedule import SCHEDULES, Schedule
from octopipe.simulation.timeline import Timeline

if TYPE_CHECKING:
    from octopipe.huggingface.described import HfModel
    from octopipe.huggingface.inputs import InputForm

OPTIMIZERS = ("adamw", "adam", "sgd")
WARM_UP_STEPS = 2
"""The first steps of a run allocate new memory, so they do not count as measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """The complete configuration of a training run."""

    spec: ModelSpec | HfModel
    """Our own layers of these sizes, or a transformers model."""
    nproc: int = 2
    steps: int = 50
    """The step to train to, counted from the beginning of the run, not from where it resumes."""
    plan: Plan | None = None
    system: str = "1f1b"
    """The published system whose plan is used if no plan is given."""
    tune_s: float | None = None
    """Seconds of tuning for a plan if none is given; None: use the system's plan."""
    tune_measured: bool = False
    """Whether tuning also runs its plans, corrects costs by the runs, and keeps the plan that was measured fastest."""
    graphs: bool | None = None
    """Whether ops are replayed from CUDA graphs, if possible; default: as the profile was measured, otherwise not."""
    dp: int = 1
    seq: int = 128
    micro_batches: int | None = None
    """Default: the plan's number, or twice the pipeline's ranks."""
    micro_batch_size: int = 1
    lr: float = 1e-3
    schedule: str = "constant"
    """The course of the learning rate after the warm-up (`schedule.py`)."""
    schedule_steps: int | None = None
    """The step at which the schedule ends; default: the last step of the run."""
    min_lr: float = 0.0
    warmup: int = 0
    decay_steps: int | None = None
    """Steps of the last part of WSD; default: a tenth of all."""
    optimizer: str = "adamw"
    weight_decay: float = 0.1
    """Applies to matrices; norms, biases and other vectors do not decay (`run_parts.decays`)."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float | None = 1.0
    shard_optimizer: bool = False
    """Whether data-parallel pipelines divide optimizer state and master weights among themselves (ZeRO-1)."""
    offload_optimizer: float = 0.0
    """Share of optimizer state and master weights that is kept in host memory and updated by the CPU."""
    precision: str | None = None
    """How layers compute and gradients are accumulated (`costs/mode.py`); default: on a GPU, a transformers config's
    own dtype, or bf16-main-fp32 without one; on a CPU, fp32."""
    dtype: str | None = None
    """An older option for the same: float32, bfloat16 (bf16-main-fp32) or float64."""
    device: str = "cpu"
    threads: int | None = None
    """CPU threads per rank; default: the cores, shared equally."""
    compile_scans: bool | None = None
    """Whether our Mamba-2's scan runs through `torch.compile`; default: on a GPU, unless there are faster kernels."""
    kernels: tuple[str, ...] = ()
    """Kernels of our own layers by name; a transformers model has already selected its own."""
    data: str | None = None
    """Path of tokens or text; None: synthetic text."""
    reading: Reading = field(default_factory=Reading)
    """How data is read."""
    new_data: bool = False
    """Whether a resumed run takes other data than before, from its beginning."""
    eval_data: str | None = None
    eval_every: int | None = None
    """Steps between two evaluations; the last step is always followed by one."""
    eval_samples: int | None = None
    """The most samples of an evaluation; default: all of the data."""
    log_every: int | None = None
    """Steps between two reports; default: every one on a CPU, every hundredth of the run on a GPU."""
    frozen: tuple[int, ...] = ()
    """Layers whose parameters are not trained."""
    memory_check: bool = True
    """Whether the memory that the run needs is compared with the free memory before it starts."""
    seed: int = 0
    profile: Profile | None = None
    measure: bool = True
    """Whether, without a profile, one is measured before training, for the tuner and the prediction."""
    checkpoint: str | None = None
    save_every: int | None = None
    keep: int = 3
    async_save: bool = False
    """Copy checkpoints to the host and write them during the next steps; a failure is reported at the next step."""
    resume: bool = False
    resume_step: int | None = None
    """Continue from this step's checkpoint instead of the newest valid one."""
    elastic: bool = False
    """Resume if the folder contains a checkpoint, otherwise start a new run. This is for launchers that restart ranks,
    with as many of them as are left."""
    timeline: bool = False
    adapt_every: int | None = None
    """Steps between two searches for a plan, tuned on the measured times, that is worth switching to."""
    adapt_gain: float = 0.05
    """The least predicted gain for which a switch is worthwhile."""
    adapt_s: float = 5.0
    """Seconds of one such search."""
    timeout_s: float = 300.0
    lengths: tuple[int, ...] = ()
    """The lengths of every step's sequences, if they differ; `seq` is then the longest."""
    groups: tuple[Groups, ...] = ()
    """With lengths: the micro-batches of every pipeline, padded to their longest sequences."""

    def __post_init__(self) -> None:
        if self.lengths:
            self._check_lengths()
        form = self.inputs
        if form is not None:
            if self.lengths:
                raise OctoPipeError(
                    f"{self.spec.name} has a tower or an encoder, and --lengths is for models with tokens alone; leave "
                    "it out"
                )
            for kind in form.kinds:
                kind.items(self.num_micro_batches * self.micro_batch_size)
        choices = (("optimizer", OPTIMIZERS), ("device", ("cpu", "cuda")), ("schedule", SCHEDULES))
        for name, known in choices:
            if getattr(self, name) not in known:
                raise OctoPipeError(f"{name} is {getattr(self, name)!r}; one of {', '.join(known)}")
        refuse_on_cpu(self.mode.precision, self.device)
        if self.profile is not None:
            refuse_other_precision(self.profile.mode, self.mode.precision, "the profile")
            refuse_other_graphs(self.profile.mode, self.replays, "the profile")
        for name in ("nproc", "steps", "dp", "seq", "micro_batch_size", "keep"):
            if getattr(self, name) < 1:
                raise OctoPipeError(f"{name} is {getattr(self, name)}; give a whole number from 1 on")
        _ = self.learning_rate
        self._check_training()
        if self.nproc % self.dp:
            raise OctoPipeError(f"{self.nproc} ranks do not make {self.dp} equal pipelines; use a multiple of --dp")
        if self.graphs and self.device == "cpu":
            raise OctoPipeError("CUDA graphs on a CPU; leave --graphs out, or use --device cuda")
        if self.shard_optimizer and self.dp == 1:
            raise OctoPipeError(
                "--shard-optimizer divides state over data-parallel pipelines; give --dp, or leave it out"
            )
        if self.tune_measured and (self.tune_s is None or self.dp > 1 or self.lengths):
            raise OctoPipeError(
                "measuring while tuning supports one pipeline of equal micro-batches only; give "
                "--tune TIME, without --dp and "
                "--lengths"
            )
        if self.adapt_every is not None:
            if self.adapt_every < 1 or self.adapt_gain <= 0 or self.adapt_s <= 0:
                raise OctoPipeError("adapt: give whole steps from 1 on, and a gain and a time above 0")
            if self.dp > 1:
                raise OctoPipeError("adapt supports one pipeline only; leave --dp out")
            if self.profile is None and not self.measure:
                raise OctoPipeError("adapt needs measured costs; give --profile or leave --no-measure out")
        if self.plan is not None and self.plan.num_layers == self.spec.num_layers:
            graph = None if isinstance(self.spec, ModelSpec) else self.spec.graph()
            if graph is None and self.plan.forks:
                check_connections(self.plan, chain_of(self.spec.num_layers))
            object.__setattr__(self, "plan", along_graph(self.plan, graph))
        if self.plan is not None:
            if self.plan.num_ranks != self.pp:
                raise OctoPipeError(
                    f"the plan has {self.plan.num_ranks} ranks, the run {self.pp} per pipeline; "
                    f"use --nproc {self.plan.num_ranks * self.dp}"
                )
            if self.plan.num_layers != self.spec.num_layers:
                raise OctoPipeError(self._other_layers(self.plan))
            if self.micro_batches not in (None, self.plan.num_micro_batches):
                raise OctoPipeError(
                    f"the plan has {self.plan.num_micro_batches} micro-batches, not {self.micro_batches}; "
                    "leave --micro-batches out"
                )
        if self.elastic and (self.checkpoint is None or (self.micro_batches is None and self.plan is None)):
            raise OctoPipeError(
                "an elastic run needs --checkpoint and --micro-batches: the default number of micro-batches depends on "
                "how many ranks are left"
            )
        if self.elastic and self.resume:
            raise OctoPipeError("an elastic run resumes automatically; leave --resume out")
        if self.resume_step is not None and not self.resume:
            raise OctoPipeError("a step to resume from has no effect on a new run; add --resume")
        if self.seed < 0:
            raise OctoPipeError(f"the seed is {self.seed}; give a whole number from 0 on")
        if self.resume and self.checkpoint is None:
            raise OctoPipeError("resuming needs the folder of the checkpoints; add --checkpoint DIR")

    def _other_layers(self, plan: Plan) -> str:
        """Describe the difference between the layers of the plan and those of the run, and what to do about it."""
        words = f"the plan has {plan.num_layers} layers, {self.spec.name} has {self.spec.num_layers}; "
        predicts = getattr(self.spec, "untrained_predictions", 0)
        if predicts and plan.num_layers == self.spec.num_layers + predicts:
            return (
                f"{words}the plan counts its multi-token prediction as a config says it; plan the layers that run: "
                "octopipe tune --mtp, or octopipe profile --mtp, then tune the profile; and train with --mtp"
            )
        if predicts and plan.num_layers == self.spec.num_layers + 2 * predicts:
            return f"{words}the plan was made with its multi-token prediction; add --mtp"
        if hasattr(self.spec, "class_name"):
            return f"{words}plan its own layers: octopipe profile, then tune the profile"
        return f"{words}train the plan's own model (--scale and --layers as it was planned)"

    @property
    def inputs(self) -> InputForm | None:
        """The inputs of a micro-batch if they are more than tokens."""
        return None if isinstance(self.spec, ModelSpec) else self.spec.inputs

    @property
    def checkpointed(self) -> tuple[int, ...]:
        """Layers that run again inside their backward, because the plan was priced in this way."""
        return () if self.plan is None else checkpointed_by_prices(self.plan)

    def _check_training(self) -> None:
        for name in ("eval_every", "eval_samples", "log_every", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OctoPipeError(f"{name} is {value}; give a whole number from 1 on")
        if self.weight_decay < 0 or self.eps <= 0 or not all(0 <= beta < 1 for beta in self.betas):
            raise OctoPipeError(
                f"weight decay {self.weight_decay}, betas {self.betas}, eps {self.eps}; give a decay from 0 on, betas "
                "from 0 to below 1 and an eps above 0"
            )
        if not 0 <= self.offload_optimizer <= 1:
            raise OctoPipeError(f"--offload-optimizer is {self.offload_optimizer:g}; give a share from 0 to 1")
        if self.offload_optimizer and self.mode.precision == "bf16":
            raise OctoPipeError(
                "--offload-optimizer keeps float32 master weights in host memory, and --precision bf16 has none; use "
                "--precision bf16-main-fp32"
            )
        if self.eval_data is None and (self.eval_every or self.eval_samples):
            raise OctoPipeError("evaluation needs held-out data; add --eval-data")
        if self.new_data and not self.resume:
            raise OctoPipeError("--new-data is for a run that is resumed; add --resume, or leave it out")

    def _check_lengths(self) -> None:
        if len(self.groups) != self.dp:
            raise OctoPipeError(f"micro-batches of {len(self.groups)} pipelines for dp {self.dp}; give one each")
        inside = sorted(length for groups in self.groups for group in groups for length in group)
        if inside != sorted(self.lengths):
            raise OctoPipeError("the micro-batches do not hold each of the step's sequences once")
        counts = {len(groups) for groups in self.groups}
        if len(counts) != 1 or (self.plan is not None and counts != {self.plan.num_micro_batches}):
            have = "" if self.plan is None else f"; the plan has {self.plan.num_micro_batches}"
            raise OctoPipeError(f"pipelines of {' and '.join(map(str, sorted(counts)))} micro-batches{have}")
        if self.seq != max(self.lengths):
            raise OctoPipeError(f"seq is {self.seq}; the longest sequence has {max(self.lengths)} tokens")
        if self.adapt_every is not None:
            raise OctoPipeError("adapt supports micro-batches of one length only; leave --adapt or --lengths out")

    @property
    def replays(self) -> bool:
        """Whether ops are to be replayed from CUDA graphs."""
        if self.graphs is not None or self.device == "cpu":
            return bool(self.graphs)
        return self.profile is not None and self.profile.mode is not None and self.profile.mode.graphs

    @property
    def mode(self) -> Mode:
        """How the run computes: precision, and whether it uses CUDA graphs."""
        own = getattr(self.spec, "dtype", None)
        return Mode(precision=precision_of(self.precision, self.dtype, self.device, own), graphs=self.replays)

    @property
    def learning_rate(self) -> Schedule:
        return Schedule(
            kind=self.schedule,
            rate=self.lr,
            least=self.min_lr,
            warmup=self.warmup,
            steps=self.schedule_steps or self.steps,
            decay=self.decay_steps,
        )

    @property
    def pp(self) -> int:
        """The number of ranks of one pipeline."""
        return self.nproc // self.dp

    @property
    def num_micro_batches(self) -> int:
        if self.groups:
            return len(self.groups[0])
        return self.plan.num_micro_batches if self.plan is not None else self.micro_batches or 2 * self.pp

    @property
    def tokens_per_step(self) -> int:
        if self.lengths:
            return sum(self.lengths)
        return self.dp * self.num_micro_batches * self.micro_batch_size * self.seq


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """An activity of a run besides its steps, for a progress line."""

    text: str
    notice: bool = False
    """Whether it must be shown wherever the output goes, such as a checkpoint that was passed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The report on one training step."""

    step: int
    """Counted from 1."""
    loss: float
    step_ms: float
    """Data, pipeline, clipping and optimizer."""
    pipeline_ms: float
    """First op to last op over all ranks, which is what a prediction states."""
    reduced_ms: float
    """First op to the end of the gradient reductions; `pipeline_ms` if there are none."""
    bubble_ratio: float
    memory_bytes: tuple[float, ...]
    """Per rank: the allocator's peak on a GPU, the process's resident memory on a CPU."""
    tokens_per_s: float
    lr: float = math.nan
    grad_norm: float = math.nan
    """Before clipping."""
    mfu: float | None = None
    """The model's own FLOPs divided by the GPUs' data-sheet peak in the same time; None if the peak is not known."""
    epoch: float | None = None
    """Passes over the data so far; None for synthetic text."""
    samples: int = 0
    """Samples trained on so far, by all pipelines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """The report on an evaluation after a step."""

    step: int
    loss: float
    """Mean over all tokens of the evaluation."""
    tokens: int
    samples: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The result of a finished run."""

    plan: Plan
    reports: tuple[StepReport, ...]
    first_step: int
    """1, or the first step of a resumed run."""
    parameters: int
    profile: Profile | None = None
    predicted: Timeline | None = None
    measured: Timeline | None = None
    """The timeline of the last step, if it was requested."""
    checkpoint: str | None = None
    notices: tuple[str, ...] = ()
    """Events that the user must know of: damaged checkpoints passed over, branches set aside."""
    stopped_by: int = 0
    """The signal that ended the run before its last step, or 0."""
    evaluations: tuple[EvalReport, ...] = ()
    warm_up: int = WARM_UP_STEPS
    """The number of first steps that do not count as measurements; more than usual if CUDA graphs are captured."""

    @property
    def losses(self) -> list[float]:
        return [r.loss for r in self.reports]

    @property
    def _steady(self) -> tuple[StepReport, ...]:
        return self.reports[self.warm_up :] or self.reports

    @property
    def step_ms(self) -> float:
        """The median over the steps after the warm-up."""
        return statistics.median(r.step_ms for r in self._steady) if self.reports else math.nan

    @property
    def pipeline_ms(self) -> float:
        return statistics.median(r.pipeline_ms for r in self._steady) if self.reports else math.nan

    @property
    def reduced_ms(self) -> float:
        return statistics.median(r.reduced_ms for r in self._steady) if self.reports else math.nan

    @property
    def bubble_ratio(self) -> float:
        return statistics.median(r.bubble_ratio for r in self._steady) if self.reports else math.nan

    @property
    def predicted_ms(self) -> float | None:
        """The predicted pipeline time, to be compared with `pipeline_ms`."""
        return None if self.predicted is None else self.predicted.makespan_ms

    @property
    def predicted_reduced_ms(self) -> float | None:
        """The predicted time with gradient reductions, to be compared with `reduced_ms`."""
        return None if self.predicted is None else self.predicted.reduced_ms

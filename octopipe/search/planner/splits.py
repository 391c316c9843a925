"""Which ways of dividing a model over a cluster there are.

Knows: what must divide what, what the user has fixed, and what a runtime can run. Does not know: which split is good
(`estimate.py`, `search.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import Gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.models.spec import Attention, LatentAttention, ModelSpec, Moe

CHUNKS = (1, 2, 4, 8)
FINER_CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24)
"""Stages per rank that are judged, and those that are tried of the best splits."""
MICRO_BATCH_SIZES = (1, 2, 4, 8)
LEAST_SLICE = 4096
"""Fewer tokens per GPU than this are not worth a context-parallel group."""
MOST_PP = 64
FIXABLE = ("tp", "cp", "ep", "pp", "dp", "vp", "micro_batch_size", "zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What a training runtime can run."""

    name: str
    zero: tuple[int, ...]
    zero_3_with_pipeline: bool = True
    most: Mapping[str, int] = field(default_factory=dict)
    """Sizes it does not go beyond."""
    tuned: bool = True
    """Runs any order of ops, so that a tuned plan means something to it."""
    placed: bool = True
    """Runs stages on any rank; otherwise stage i is on rank i mod pp."""
    recomputes_by_ops: bool = False
    """Recomputes what the plan's R ops say, and nothing else; the others know checkpointed layers."""


RUNTIMES: Mapping[str, Runtime] = MappingProxyType(
    {
        # Megatron-LM: (interleaved) 1F1B with stages in turn; its FSDP replaces the pipeline.
        "megatron": Runtime(name="megatron", zero=(1, 3), zero_3_with_pipeline=False, tuned=False, placed=False),
        # torch.distributed.pipelining with FSDP2, DTensor TP, ring attention and expert parallelism (torchtitan).
        "torch": Runtime(name="torch", zero=(1, 2, 3)),
        # `octopipe train` divides models over pipelines and replicas; it shards no tensor and no state.
        "octopipe": Runtime(name="octopipe", zero=(0,), most={"tp": 1, "cp": 1, "ep": 1}, recomputes_by_ops=True),
        "any": Runtime(name="any", zero=(1, 2, 3)),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Split:
    """One way of using all GPUs."""

    tp: int
    cp: int
    ep: int
    pp: int
    dp: int
    vp: int
    """Stages per pipeline rank."""
    micro_batch_size: int
    zero: int

    def setup(self, base: Setup, global_batch: int) -> Setup:
        return replace(
            base,
            tp=self.tp,
            cp=self.cp,
            ep=self.ep,
            pp=self.pp,
            dp=self.dp,
            zero=self.zero,
            micro_batch_size=self.micro_batch_size,
            micro_batches=global_batch // (self.dp * self.micro_batch_size),
        )

    def words(self) -> str:
        named = {"tp": self.tp, "cp": self.cp, "ep": self.ep, "pp": self.pp, "vp": self.vp, "dp": self.dp}
        text = ", ".join(f"{k} {v}" for k, v in named.items() if v > 1 or k in ("tp", "pp"))
        return f"{text}, micro-batch {self.micro_batch_size}" + (", FSDP" if self.zero == 3 else "")


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def splits(
    spec: ModelSpec,
    base: Setup,
    *,
    gpus: int,
    global_batch: int,
    fixed: Mapping[str, int] | None = None,
    runtime: Runtime = RUNTIMES["any"],
) -> Iterator[Split]:
    """Every split of the GPUs that divides the model and the batch."""
    fixed = dict(fixed or {})
    assert base.gpu is not None and base.seq is not None
    blocks = spec.num_layers - 2
    experts = [part.experts for layer in spec for part in layer.parts if isinstance(part, Moe)]
    softmax = any(isinstance(part, Attention | LatentAttention) for layer in spec for part in layer.parts)

    def allowed(name: str, values: list[int]) -> list[int]:
        most = runtime.most.get(name)
        kept = [v for v in values if most is None or v <= most]
        return [v for v in kept if v == fixed[name]] if name in fixed else kept

    for tp in allowed("tp", tensor_sizes(spec, base.gpu, base.gpus_per_node)):
        slices = [1, *(c for c in (2, 4, 8, 16, 32) if softmax and base.seq % (2 * c) == 0)]
        for cp in allowed("cp", [c for c in slices if c == 1 or base.seq // c >= LEAST_SLICE or "cp" in fixed]):
            if gpus % (tp * cp):
                continue
            most_pp = min(MOST_PP, blocks)
            for pp in allowed("pp", [p for p in divisors(gpus // (tp * cp)) if p <= most_pp]):
                dp = gpus // (tp * cp * pp)
                if dp not in allowed("dp", [dp]) or global_batch % dp:
                    continue
                yield from _finer(base, tp, cp, pp, dp, blocks, experts, global_batch, fixed, allowed, runtime)


def _finer(  # type: ignore[no-untyped-def]
    base, tp, cp, pp, dp, blocks, experts, global_batch, fixed, allowed, runtime
) -> Iterator[Split]:
    """Micro-batch size, experts, stages per rank and sharding of one (tp, cp, pp, dp)."""
    share = global_batch // dp
    eps = [1]
    if experts:
        eps = [e for e in divisors(tp * cp * dp) if all(n % e == 0 for n in experts) and e & (e - 1) == 0]
        eps = sorted({*eps, *([fixed["ep"]] if "ep" in fixed and tp * cp * dp % fixed["ep"] == 0 else [])})
    zeros = [z for z in runtime.zero if z < 3 or (dp * cp > 1 and (pp == 1 or runtime.zero_3_with_pipeline))]
    if "zero" in fixed:
        zeros = [fixed["zero"]]
    sizes = list(MICRO_BATCH_SIZES) if "micro_batch_size" not in fixed else [fixed["micro_batch_size"]]
    for size in sizes:
        if share % size:
            continue
        micro_batches = share // size
        chunks = [v for v in CHUNKS if v == 1 or (pp > 1 and v * pp <= blocks and micro_batches % pp == 0)]
        if "vp" in fixed:
            chunks = [v for v in [fixed["vp"]] if v == 1 or (v * pp <= blocks and micro_batches % pp == 0)]
        for ep in allowed("ep", eps):
            for zero in zeros:
                for vp in chunks:
                    yield Split(tp=tp, cp=cp, ep=ep, pp=pp, dp=dp, vp=vp, micro_batch_size=size, zero=zero)


def finer(split: Split, blocks: int, micro_batches: int) -> list[Split]:
    """The same split with every number of stages per rank."""
    return [
        replace(split, vp=v)
        for v in FINER_CHUNKS
        if v == 1 or (split.pp > 1 and v * split.pp <= blocks and micro_batches % split.pp == 0)
    ]


def least_state_bytes(split: Split, dense: float, experts: float, gradient_bytes: float) -> float:
    """State that a GPU of the fullest rank holds at least: an even share of everything, sharded as far as ZeRO may."""
    stage = split.tp * split.cp * split.dp
    # Experts may also be divided by tensor parallelism: counted as if they always were.
    shared = min(stage, split.ep * split.tp)
    copies = {"dense": split.dp * split.cp, "experts": max(1, stage // shared)}
    counts = {"dense": dense / (split.tp * split.pp), "experts": experts / (shared * split.pp)}
    total = 0.0
    for name, count in counts.items():
        n = copies[name]
        if split.zero == 3:
            total += count * (gradient_bytes + 12.0) / n
        else:
            total += count * (
                2.0 + gradient_bytes / (n if split.zero == 2 else 1) + 12.0 / (n if split.zero >= 1 else 1)
            )
    return total


def tensor_sizes(spec: ModelSpec, gpu: Gpu, gpus_per_node: int | None) -> list[int]:
    """Tensor-parallel sizes that divide every layer and stay on the fast links."""
    node = gpus_per_node or gpu.gpus_per_node
    names = ("heads", "value_heads", "inner", "ffn", "shared_ffn")
    sizes = {getattr(part, n, None) for layer in spec for part in layer.parts for n in names}
    widths = [size for size in sizes if isinstance(size, int) and size > 0]
    return [tp for tp in (1, 2, 4, 8, 16, 32) if node % tp == 0 and all(w % tp == 0 for w in widths)]


def parse_split(text: str) -> dict[str, int]:
    """`tp=4,pp=8,vp=5` as sizes; `mbs` stands for micro_batch_size."""
    out: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = part.partition("=")
        name = {"mbs": "micro_batch_size", "chunks": "vp"}.get(name.strip(), name.strip().replace("-", "_"))
        if name not in FIXABLE or not value.strip().isdigit() or (int(value) < 1 and name != "zero"):
            raise OctoPipeError(f"{part!r} is no size; write tp=4,pp=8,vp=5 with {', '.join(FIXABLE)} (or mbs)")
        out[name] = int(value)
    if not out:
        raise OctoPipeError("no sizes; write tp=4,pp=8,vp=5")
    return out

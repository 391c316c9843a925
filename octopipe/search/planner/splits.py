"""Enumeration of the ways to split a model over a cluster.

Knows: the divisibility rules, what the user has fixed, and what a runtime can run. Does not know: which split is good
(`estimate.py`, `search.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import Gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.models.spec import Attention, LatentAttention, ModelSpec, Moe
from octopipe.search.planner.runtimes import RUNTIMES, Runtime

CHUNKS = (1, 2, 4, 8)
MOST_CHUNKS = 32
"""Stages per rank that every split is judged with, and the most that are tried of the best splits."""
MICRO_BATCH_SIZES = (1, 2, 4, 8)
LEAST_SLICE = 512
"""Fewer tokens of a sequence per GPU than this are not tried with context parallelism."""
MOST_PP = 64
FIXABLE = ("tp", "cp", "ep", "pp", "dp", "vp", "micro_batch_size", "zero")


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
        sharding = {2: ", ZeRO-2", 3: ", FSDP"}.get(self.zero, "")
        return f"{text}, micro-batch {self.micro_batch_size}{sharding}"


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
    layers = spec.num_layers  # embedding and head may be stages of their own
    experts = [part.experts for layer in spec for part in layer.parts if isinstance(part, Moe)]
    softmax = any(isinstance(part, Attention | LatentAttention) for layer in spec for part in layer.parts)

    # All-to-alls divide heads over the context-parallel group as well.
    heads = [getattr(part, "heads", 0) for layer in spec for part in layer.parts] if base.cp_kind == "ulysses" else []

    def allowed(name: str, values: list[int]) -> list[int]:
        most = runtime.most.get(name)
        kept = [v for v in values if most is None or v <= most]
        return [v for v in kept if v == fixed[name]] if name in fixed else kept

    for tp in allowed("tp", tensor_sizes(spec, base.gpu, base.gpus_per_node)):
        slices = [1, *(c for c in (2, 4, 8, 16, 32) if softmax and base.seq % (2 * c) == 0)]
        for cp in allowed("cp", [c for c in slices if c == 1 or base.seq // c >= LEAST_SLICE or "cp" in fixed]):
            if gpus % (tp * cp) or (cp > 1 and any(number % (tp * cp) for number in heads)):
                continue
            most_pp = min(MOST_PP, layers)
            for pp in allowed("pp", [p for p in divisors(gpus // (tp * cp)) if p <= most_pp]):
                dp = gpus // (tp * cp * pp)
                if dp not in allowed("dp", [dp]) or global_batch % dp:
                    continue
                yield from _finer(base, tp, cp, pp, dp, layers, experts, global_batch, fixed, allowed, runtime)


def _finer(  # type: ignore[no-untyped-def]
    base, tp, cp, pp, dp, layers, experts, global_batch, fixed, allowed, runtime
) -> Iterator[Split]:
    """Micro-batch size, experts, stages per rank and sharding of one (tp, cp, pp, dp)."""
    share = global_batch // dp
    eps = [1]
    if experts:
        eps = [e for e in divisors(tp * cp * dp) if all(n % e == 0 for n in experts) and e & (e - 1) == 0]
        eps = sorted({*eps, *([fixed["ep"]] if "ep" in fixed and tp * cp * dp % fixed["ep"] == 0 else [])})
    # Where there is one replica nothing is divided: the levels are the same, and the first stands for all.
    zeros = list(runtime.zero_levels(pp)) if dp * cp > 1 else list(runtime.zero_levels(pp)[:1])
    if "zero" in fixed:
        zeros = [z for z in [fixed["zero"]] if z < 2 or pp == 1]
    sizes = list(MICRO_BATCH_SIZES) if "micro_batch_size" not in fixed else [fixed["micro_batch_size"]]
    for size in sizes:
        if share % size:
            continue
        micro_batches = share // size
        chunks = [v for v in CHUNKS if v == 1 or (pp > 1 and v * pp <= layers and micro_batches % pp == 0)]
        if "vp" in fixed:
            chunks = [v for v in [fixed["vp"]] if v == 1 or (v * pp <= layers and micro_batches % pp == 0)]
        chunks = allowed("vp", chunks)
        for ep in allowed("ep", eps):
            for zero in zeros:
                for vp in chunks:
                    yield Split(tp=tp, cp=cp, ep=ep, pp=pp, dp=dp, vp=vp, micro_batch_size=size, zero=zero)


def finer(split: Split, layers: int, micro_batches: int, runtime: Runtime = RUNTIMES["any"]) -> list[Split]:
    """The same split with every number of stages per rank."""
    most = min(runtime.most.get("vp", MOST_CHUNKS), MOST_CHUNKS, layers // split.pp)
    if split.pp == 1 or micro_batches % split.pp:
        most = 1
    return [replace(split, vp=v) for v in range(1, max(most, 1) + 1)]


def least_state_bytes(
    split: Split, dense: float, experts: float, gradient_bytes: float, state_bytes: float = 12.0
) -> float:
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
            total += count * (gradient_bytes + state_bytes) / n
        else:
            total += count * (
                2.0 + gradient_bytes / (n if split.zero == 2 else 1) + state_bytes / (n if split.zero >= 1 else 1)
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
            raise OctoPipeError(
                f"cannot read {part!r}; write sizes like tp=4,pp=8,vp=5, of {', '.join(FIXABLE)} (or mbs)"
            )
        out[name] = int(value)
    if not out:
        raise OctoPipeError("no sizes; write tp=4,pp=8,vp=5")
    return out

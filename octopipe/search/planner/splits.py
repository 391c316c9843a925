"""Enumeration of the ways to split a model over a cluster.

Knows: the divisibility rules, what the user has fixed, and what a runtime can run. Does not know: which split is good
(`estimate.py`, `search.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.file import node_gpus
from octopipe.costs.cluster.hardware import Gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.models.spec import Attention, LatentAttention, ModelSpec, Moe
from octopipe.search.planner.runtimes import RUNTIMES, Runtime

CHUNKS = (1, 2, 4, 8)
MOST_CHUNKS = 32
"""Stages per rank with which every split is judged, and the largest number that is tried for the best splits."""
MICRO_BATCH_SIZES = (1, 2, 4, 8)
LEAST_SLICE = 512
"""Context parallelism that leaves a GPU fewer tokens of a sequence than this is not tried."""
MOST_PP = 64
SHARDED_NODES = (1, 2, 4, 8)
"""Numbers of nodes over which one copy of the model's state is sharded with HSDP."""
FIXABLE = ("tp", "cp", "ep", "etp", "pp", "dp", "vp", "micro_batch_size", "zero", "hsdp")


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
    etp: int = 1
    """GPUs that divide one expert's matrices; 1 for a model without experts."""
    hsdp: int = 1
    """Number of copies of the training state, each of which ZeRO shards (HSDP)."""

    def setup(self, base: Setup, global_batch: int) -> Setup:
        return replace(
            base,
            tp=self.tp,
            cp=self.cp,
            ep=self.ep,
            etp=self.etp,
            pp=self.pp,
            dp=self.dp,
            hsdp=self.hsdp,
            zero=self.zero,
            micro_batch_size=self.micro_batch_size,
            micro_batches=global_batch // (self.dp * self.micro_batch_size),
        )

    @property
    def whole_layers(self) -> bool:
        """Whether neither tensors nor training state are sharded, so that `octopipe train` runs the split."""
        return self.tp * self.cp * self.ep == 1 and (self.zero == 0 or self.dp == 1)

    @property
    def coarse(self) -> Split:
        """The split without its number of stages per rank."""
        return replace(self, vp=1)

    def words(self) -> str:
        names = ("tp", "cp", "ep", "etp", "pp", "vp", "dp", "hsdp")
        named = {name: getattr(self, name) for name in names}
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
    """Yield every split of the GPUs that divides the model and the batch, has the fixed sizes and suits the runtime."""
    fixed = dict(fixed or {})
    assert base.gpu is not None and base.seq is not None
    layers = spec.num_layers  # embedding and head may be stages of their own
    routed = [part for layer in spec for part in layer.parts if isinstance(part, Moe)]
    experts, widths = [part.experts for part in routed], sorted({part.ffn for part in routed})
    softmax = any(isinstance(part, Attention | LatentAttention) for layer in spec for part in layer.parts)

    # Ulysses divides heads, including those of keys and values, over the context-parallel group as well.
    names = ("heads", "kv_heads") if base.cp_kind == "ulysses" else ()
    heads = [getattr(part, name, 0) for layer in spec for part in layer.parts for name in names]

    def allowed(name: str, values: list[int]) -> list[int]:
        most = runtime.most.get(name)
        kept = [v for v in values if most is None or v <= most]
        return [v for v in kept if v == fixed[name]] if name in fixed else kept

    node = base.gpus_per_node or math.gcd(*(size for _, _, size in base.nodes)) or None
    for tp in allowed("tp", tensor_sizes(spec, base.gpu, node)):
        slices = [1, *(c for c in (2, 4, 8, 16, 32) if softmax and base.seq % (2 * c) == 0)]
        for cp in allowed("cp", [c for c in slices if c == 1 or base.seq // c >= LEAST_SLICE or "cp" in fixed]):
            if gpus % (tp * cp) or (cp > 1 and any(number % (tp * cp) for number in heads)):
                continue
            most_pp = min(MOST_PP, layers) if base.offload_layers is None else 1
            for pp in allowed("pp", [p for p in divisors(gpus // (tp * cp)) if p <= most_pp]):
                dp = gpus // (tp * cp * pp)
                if dp not in allowed("dp", [dp]) or global_batch % dp:
                    continue
                yield from _finer(base, tp, cp, pp, dp, layers, experts, widths, global_batch, fixed, allowed, runtime)


def _finer(  # type: ignore[no-untyped-def]
    base, tp, cp, pp, dp, layers, experts, widths, global_batch, fixed, allowed, runtime
) -> Iterator[Split]:
    """Yield the splits of one (tp, cp, pp, dp): micro-batch sizes, expert sizes, stages per rank and sharding."""
    share = global_batch // dp
    eps = [1]
    if experts:
        eps = [e for e in divisors(tp * cp * dp) if all(n % e == 0 for n in experts) and e & (e - 1) == 0]
        eps = sorted({*eps, *([fixed["ep"]] if "ep" in fixed and tp * cp * dp % fixed["ep"] == 0 else [])})
    # With one replica nothing is sharded: all ZeRO levels are equivalent, and the first one stands for all.
    zeros = list(runtime.zero_levels(pp)) if dp * cp > 1 else list(runtime.zero_levels(pp)[:1])
    if base.offload_optimizer:
        zeros = [z for z in zeros if z < 2]
    if "zero" in fixed:
        runs = runtime.zero_asked(pp) if dp * cp > 1 else (0, 1, 2, 3)
        zeros = [z for z in [fixed["zero"]] if (z < 2 or pp == 1) and z in runs]
    sizes = list(MICRO_BATCH_SIZES) if "micro_batch_size" not in fixed else [fixed["micro_batch_size"]]
    for size in sizes:
        if share % size:
            continue
        micro_batches = share // size
        chunks = [v for v in CHUNKS if v == 1 or (pp > 1 and v * pp <= layers and micro_batches % pp == 0)]
        if "vp" in fixed:
            chunks = [v for v in [fixed["vp"]] if v == 1 or (v * pp <= layers and micro_batches % pp == 0)]
        chunks = allowed("vp", chunks)
        one = Split(tp=tp, cp=cp, ep=1, pp=pp, dp=dp, vp=1, micro_batch_size=size, zero=zeros[0] if zeros else 1)
        for ep in allowed("ep", eps):
            for etp in allowed("etp", expert_tensor_sizes(tp, cp * dp, ep, widths, fixed.get("etp"))):
                for zero in zeros:
                    part = replace(one, ep=ep, etp=etp, zero=zero)
                    for hsdp in allowed("hsdp", copies_of(part, base, fixed.get("hsdp"))):
                        for vp in chunks:
                            yield replace(part, hsdp=hsdp, vp=vp)


def expert_tensor_sizes(tp: int, replicas: int, ep: int, widths: list[int], given: int | None) -> list[int]:
    """Return the numbers of GPUs that may shard one expert: 1 or `tp` (only `given`, if it is not None), as far as the
    GPUs of a stage and the width of the experts are divisible."""
    if not widths:
        return [1]
    sizes = {1, tp} if given is None else {given}
    return sorted(n for n in sizes if tp * replicas % (ep * n) == 0 and all(width % n == 0 for width in widths))


def copies_of(split: Split, base: Setup, given: int | None) -> list[int]:
    """Return the numbers of copies of the sharded state to try: one and, from ZeRO-2 on, the numbers with which each
    copy is sharded over `SHARDED_NODES` nodes. A `given` number is the only one, if it is possible."""
    replicas = split.cp * split.dp
    experts = split.tp * replicas // (split.ep * split.etp)
    if given is not None:
        return [given] if split.dp % given == 0 and experts % given == 0 and (given == 1 or split.zero) else []
    found = {1}
    if split.zero >= 2 and base.gpu is not None:
        node = base.gpus_per_node or node_gpus(base.nodes) or base.gpu.gpus_per_node
        for nodes in SHARDED_NODES:
            sharded = max(1, nodes * node // split.tp)
            if replicas % sharded == 0:
                found.add(replicas // sharded)
    return sorted(n for n in found if split.dp % n == 0 and experts % n == 0)


def finer(split: Split, layers: int, micro_batches: int, runtime: Runtime = RUNTIMES["any"]) -> list[Split]:
    """Return the split with every number of stages per rank that is possible."""
    most = min(runtime.most.get("vp", MOST_CHUNKS), MOST_CHUNKS, layers // split.pp)
    if split.pp == 1 or micro_batches % split.pp:
        most = 1
    return [replace(split, vp=v) for v in range(1, max(most, 1) + 1)]


def least_state_bytes(split: Split, dense: float, experts: float, base: Setup, trained: float = 1.0) -> float:
    """Return a lower bound on the bytes of training state on a GPU of the fullest rank: an even share of everything,
    sharded according to the ZeRO level. `trained` is the share of weights with gradients and optimizer state."""
    stage, shared = split.tp * split.cp * split.dp, split.ep * split.etp
    copies = {"dense": split.dp * split.cp // split.hsdp, "experts": max(1, stage // shared // split.hsdp)}
    counts = {"dense": dense / (split.tp * split.pp), "experts": experts / (shared * split.pp)}
    gradient, state = trained * base.gradient_bytes, trained * (1.0 - base.offload_optimizer) * base.state_bytes
    total = 0.0
    for name, count in counts.items():
        n = copies[name]
        if split.zero == 3:
            total += count * (gradient + state + 2.0 * (1.0 - trained)) / n
        else:
            total += count * (2.0 + gradient / (n if split.zero == 2 else 1) + state / (n if split.zero >= 1 else 1))
    return total


def tensor_sizes(spec: ModelSpec, gpu: Gpu, gpus_per_node: int | None) -> list[int]:
    """Return the tensor-parallel sizes that divide every layer and a node."""
    node = gpus_per_node or gpu.gpus_per_node
    names = ("heads", "value_heads", "inner", "ffn", "shared_ffn")
    sizes = {getattr(part, n, None) for layer in spec for part in layer.parts for n in names}
    widths = [size for size in sizes if isinstance(size, int) and size > 0]
    return [tp for tp in (1, 2, 4, 8, 16, 32) if node % tp == 0 and all(w % tp == 0 for w in widths)]


def why_no_split(
    spec: ModelSpec, base: Setup, gpus: int, global_batch: int, fixed: Mapping[str, int], runtime: Runtime
) -> str:
    """Explain in one line why there is no split with the given sizes, and which of them to leave out."""
    if fixed.get("zero", 0) >= 2 and fixed.get("pp", 1) > 1:
        return (
            f"no runtime keeps weights or gradients sharded in a pipeline, so zero {fixed['zero']} and pp "
            f"{fixed['pp']} exclude each other; give zero 1, which is what runtimes use in that case, or pp 1"
        )

    def exists(sizes: Mapping[str, int], on: Runtime = runtime) -> bool:
        found = splits(spec, base, gpus=gpus, global_batch=global_batch, fixed=sizes, runtime=on)
        return next(found, None) is not None

    given = ", ".join(f"{k} {v}" for k, v in fixed.items())
    words = f"no split of {gpus} GPUs divides {spec.name} and a global batch of {global_batch}"
    words += f" with {given}" if given else ""
    needless = [name for name in fixed if exists({k: v for k, v in fixed.items() if k != name})]
    if needless:
        return f"{words}; leave {' or '.join(needless)} out"
    if len(fixed) > 1 and exists({}):
        return f"{words}; give fewer sizes"
    if runtime.name != "any" and exists(fixed, RUNTIMES["any"]):
        return f"{words} on {runtime.title}; leave --for out, or change the batch or the GPUs"
    return f"{words}; change the batch or the GPUs"


def parse_split(text: str) -> dict[str, int]:
    """Parse sizes like `tp=4,pp=8,vp=5`; `mbs` stands for micro_batch_size and `chunks` for vp."""
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

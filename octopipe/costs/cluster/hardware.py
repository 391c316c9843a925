"""Devices and links: the GPUs of a rank and the cost of a transfer between two ranks.

Knows: GPU presets, node sizes, parallel sizes, per-rank speed and memory, the alpha-beta cost of a link. Does not know:
models, layers, plans, or how a training run uses the hardware (`setup.py`).

>>> Network.constant(0.3).transfer_ms(0, 1, 8 << 20)
0.3
>>> Network.constant(0.3).transfer_ms(2, 2, 8 << 20)
0.0
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief
from octopipe.base.limits import MAX_GPUS, MAX_RATIO, MAX_TIME_MS, finite

GIB = float(1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a connection between two ranks: latency_ms + bytes * ms_per_byte."""

    latency_ms: float = 0.0
    ms_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency_ms", "ms_per_byte"):
            value = getattr(self, name)
            if not 0 <= (-1.0 if finite(value) is None else value) <= MAX_TIME_MS:
                raise OctoPipeError(f"link {name} is {brief(value)}; give a finite number >= 0 up to {MAX_TIME_MS:g}")

    @classmethod
    @lru_cache(maxsize=256)
    def of_bandwidth(cls, gb_per_s: float, latency_ms: float = 0.0) -> Link:
        """A link of `gb_per_s` (10^9 bytes a second) in each direction."""
        return cls(latency_ms=latency_ms, ms_per_byte=1e3 / (gb_per_s * 1e9))

    def transfer_ms(self, nbytes: float) -> float:
        return self.latency_ms + nbytes * self.ms_per_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The links between pipeline ranks: one inside nodes, one between nodes, and exceptions for single pairs."""

    intra: Link
    inter: Link
    ranks_per_node: int = 1 << 30
    """Consecutive ranks that share a node; ranks r and s are in one node when r // n == s // n."""
    pairs: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    """Measured links of single (source, destination) pairs; they override intra and inter."""

    def __post_init__(self) -> None:
        if not (finite(self.ranks_per_node) or 0) >= 1:
            raise OctoPipeError(f"ranks_per_node is {brief(self.ranks_per_node)}; give a whole number >= 1")

    @classmethod
    def constant(cls, latency_ms: float) -> Network:
        """Return a network in which every transfer between two ranks takes `latency_ms`, whatever its size."""
        link = Link(latency_ms=latency_ms)
        return cls(intra=link, inter=link)

    def link(self, source: int, destination: int) -> Link:
        pair = self.pairs.get((source, destination))
        if pair is not None:
            return pair
        same = source // self.ranks_per_node == destination // self.ranks_per_node
        return self.intra if same else self.inter

    def transfer_ms(self, source: int, destination: int, nbytes: float) -> float:
        """Time of one transfer; zero within a rank."""
        return 0.0 if source == destination else self.link(source, destination).transfer_ms(nbytes)


MOST_FLOWS = 700.0
"""The mean number of flows on one link up to which `busiest_uplink` sums the Poisson distribution term by term."""
INTRA_LATENCY_MS = 0.003
INTER_LATENCY_MS = 0.005
"""Start-up time of one transfer inside a node and across nodes. Our choice (no source): a few microseconds,
small against the transfer of any real activation; measure your own cluster where it matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU model: peak speed, memory, and its share of the links, per direction."""

    name: str
    bf16_tflops: float
    """Dense bf16 peak of the data sheet."""
    memory_gib: float
    hbm_tb_per_s: float
    intra_gb_per_s: float
    """Bandwidth to another GPU of the same node."""
    inter_gb_per_s: float
    """Bandwidth to a GPU of another node."""
    gpus_per_node: int = 8
    """GPUs joined by the fast links."""
    fp8_tflops: float | None = None
    """Dense fp8; None: the GPU has no fp8 matrix units."""
    fp4_tflops: float | None = None
    """Dense NVFP4 (fp4 with block scales); None: the GPU has no fp4 matrix units."""
    generation: str = "hopper"
    """The generation whose calibrated rates are used (`calibration.py`)."""
    clock: float = 1.0
    """Clock under load, relative to the reference board of its generation."""
    host_gb_per_s: float = 50.0
    """Bandwidth to host memory, for offloading."""
    watts: float | None = None
    """The board's power limit; None: not known."""
    pod_gpus: int | None = None
    """GPUs that reach each other over the network at full speed; None: all."""
    oversubscription: float = 1.0
    """How much slower links are between GPUs of different pods."""
    flows: int | None = None
    """Flows per connection that switches spread at random over the uplinks of a pod (ECMP by hash); None: switches
    route by load, so that uplinks are used evenly."""

    def __post_init__(self) -> None:
        for name in ("name", "generation"):
            if not isinstance(getattr(self, name), str):
                raise OctoPipeError(f"gpu: {name} is {brief(getattr(self, name))}; give a word")
        speeds = ("bf16_tflops", "hbm_tb_per_s", "intra_gb_per_s", "inter_gb_per_s", "clock", "host_gb_per_s")
        optional = [name for name in ("fp8_tflops", "fp4_tflops", "watts") if getattr(self, name) is not None]
        for name in ("memory_gib", *speeds, *optional):
            value = finite(getattr(self, name))
            if value is None or not 1 / MAX_RATIO <= value <= MAX_RATIO:
                raise OctoPipeError(
                    f"gpu {self.name}: {name} is {brief(getattr(self, name))}; give a finite number > 0"
                )
        for name in ("gpus_per_node", "pod_gpus", "flows"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_GPUS
            if not whole and (value is not None or name == "gpus_per_node"):
                raise OctoPipeError(f"gpu {self.name}: {name} is {brief(value)}; give a whole number >= 1")
        if not 1.0 <= (finite(self.oversubscription) or 0.0) <= MAX_RATIO:
            raise OctoPipeError(f"gpu {self.name}: oversubscription is {brief(self.oversubscription)}; give 1 or more")

    def peak_flops_per_ms(self, precision: str = "bf16") -> float:
        """The data sheet's dense peak in this precision."""
        if precision == "bf16":
            return self.flops_per_ms
        peak = self.fp4_tflops if precision == "nvfp4" else self.fp8_tflops
        if precision == "mxfp8" and self.generation in ("hopper", "ada", "ampere"):
            peak = None  # scales per block of 32 came with Blackwell
        if peak is None:
            raise OctoPipeError(f"gpu {self.name} has no {precision} matrix units; use bf16 or another GPU")
        return peak * 1e9

    @property
    def flops_per_ms(self) -> float:
        return self.bf16_tflops * 1e9

    @property
    def between_pods(self) -> float:
        """How much slower a link is between pods, because of oversubscription and of flows that share an uplink."""
        if self.pod_gpus is None or self.flows is None:
            return self.oversubscription
        nodes = max(1, self.pod_gpus // self.gpus_per_node)
        return busiest_uplink(nodes, self.oversubscription, self.flows)

    @property
    def hbm_bytes_per_ms(self) -> float:
        return self.hbm_tb_per_s * 1e9


@lru_cache(maxsize=256)
def busiest_uplink(nodes: int, oversubscription: float, flows: int) -> float:
    """Return the load of the busiest uplink of a pod, which a collective waits for, as a multiple of a link's rate.

    Every node sends at full speed, and each of its `flows` takes an uplink at random. Loads are assumed to be
    independent and Poisson distributed.

    >>> [round(busiest_uplink(32, 1.0, flows), 1) for flows in (1, 16, 1024)]
    [3.5, 1.6, 1.1]
    """
    uplinks, mean = max(1.0, nodes / oversubscription), flows * oversubscription
    if mean > MOST_FLOWS:  # the excess over the mean falls with the square root of the number of flows
        few = max(1, int(MOST_FLOWS / oversubscription))
        above = busiest_uplink(nodes, oversubscription, few) - oversubscription if few < flows else 0.0
        return oversubscription + above * math.sqrt(few / flows)
    # The expected maximum is the sum over k of the probability that it exceeds k.
    total, term, below = 0.0, math.exp(-mean), 0.0
    for k in range(int(mean + 20 * math.sqrt(mean) + 40)):
        below = min(1.0, below + term)
        total += 1.0 - below**uplinks
        term *= mean / (k + 1)
    return max(oversubscription, min(total, flows * nodes) / flows)


def _gpus() -> Mapping[str, Gpu]:
    # Columns: dense bf16 and fp8 TFLOP/s, HBM (vendors' "GB" are GiB to within a percent of what the driver
    # shows), HBM TB/s, intra-node and inter-node GB/s per direction, GPUs on the fast links, generation, clock.
    # H800: data sheet, links as the paper's cluster. H100, H200, B200, GB200, GB300, MI300X: secondary sources.
    # B300, MI355X, A100-40G: the vendors' data sheets. A100, L40S: from memory. An NVL72 rack has 72 GPUs; jobs take
    # 64 of them, which powers of two divide.
    # To the host: PCIe 5 (4 for A100, L40S) x16 at about 80 % of its rate, NVLink-C2C for GB200 and GB300.
    # GB300 boards may draw 1400 W where GB200 draws 1200: at power ~ clock^3 that is a clock 5 % higher. H100-96G: the
    # boards of Meta's Grand Teton, HBM2e and 500 W instead of 700 (torchtitan's benchmarks/ say so).
    rows = {
        "h800": (989, 1979, 80, 3.35, 200, 25, 8, "hopper", 1.0),
        "h100": (989, 1979, 80, 3.35, 450, 50, 8, "hopper", 1.0),
        "h100-96g": (989, 1979, 96, 2.4, 450, 50, 8, "hopper", 0.894),
        "h200": (989, 1979, 141, 4.8, 450, 50, 8, "hopper", 1.0),
        "a100": (312, None, 80, 2.04, 300, 25, 8, "ampere", 1.0),
        "a100-40g": (312, None, 40, 1.555, 300, 25, 8, "ampere", 1.0),
        "b200": (2250, 4500, 180, 7.7, 900, 50, 8, "blackwell", 1.0),
        "gb200": (2500, 5000, 186, 8.0, 900, 50, 64, "blackwell", 1.0),
        "gb300": (2500, 5000, 277, 8.0, 900, 100, 64, "blackwell", 1.05),
        "b300": (2250, 4500, 270, 8.0, 900, 100, 8, "blackwell", 1.0),
        "mi300x": (1307, 2615, 192, 5.3, 448, 50, 8, "cdna3", 1.0),
        "mi355x": (2500, 5000, 288, 8.0, 537, 50, 8, "cdna4", 1.0),
        "l40s": (362, 733, 48, 0.864, 32, 12, 8, "ada", 1.0),
    }
    # Dense NVFP4 and the board's power: the vendors' data sheets.
    fp4 = {"b200": 9000, "gb200": 10000, "b300": 14000, "gb300": 15000}
    watts = {"h800": 700, "h100": 700, "h100-96g": 500, "h200": 700, "a100": 400, "a100-40g": 400, "b200": 1000}
    watts |= {"gb200": 1200, "b300": 1100, "gb300": 1400, "mi300x": 750, "mi355x": 1400, "l40s": 350}
    host = {"a100": 25.0, "a100-40g": 25.0, "l40s": 25.0, "gb200": 360.0, "gb300": 360.0}
    return MappingProxyType(
        {
            name: Gpu(
                name=name,
                host_gb_per_s=host.get(name, 50.0),
                bf16_tflops=bf16,
                fp8_tflops=fp8,
                fp4_tflops=fp4.get(name),
                watts=watts.get(name),
                memory_gib=memory,
                hbm_tb_per_s=hbm,
                intra_gb_per_s=intra,
                inter_gb_per_s=inter,
                gpus_per_node=node,
                generation=generation,
                clock=clock,
            )
            for name, (bf16, fp8, memory, hbm, intra, inter, node, generation, clock) in rows.items()
        }
    )


GPUS: Mapping[str, Gpu] = _gpus()


def gpu(name: str) -> Gpu:
    """Return the GPU preset with this name; an unknown name raises an error with the nearest names."""
    found = GPUS.get(str(name).strip().lower())
    if found is None:
        shown = str(name)[:80]
        close = difflib.get_close_matches(shown.lower(), GPUS, n=2, cutoff=0.5)
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise OctoPipeError(f"unknown GPU {shown!r}{hint}; one of {', '.join(GPUS)}")
    return found


def gpu_record(kind: Gpu) -> str | dict[str, Any]:
    """A GPU as plain JSON values: a preset's name, or all figures of one that a user described."""
    return kind.name if GPUS.get(kind.name) == kind else asdict(kind)


def gpu_from(record: object) -> Gpu:
    """The GPU that `gpu_record` wrote."""
    if not isinstance(record, Mapping):
        return gpu(str(record))
    known = {f.name for f in fields(Gpu)}
    unknown = sorted(str(key) for key in set(record) - known)
    if unknown or not isinstance(record.get("name"), str):
        raise OctoPipeError(f"gpu: {brief(unknown[0]) if unknown else 'no name'}; give {', '.join(sorted(known))}")
    try:
        return Gpu(**record)
    except TypeError as error:
        raise OctoPipeError(f"gpu {brief(record['name'])}: {' '.join(str(error).split())[:120]}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The layout of a job on its GPUs: a pipeline rank is a group of tp * cp GPUs, replicated `dp` times.

    GPUs are numbered as Megatron does: tensor-parallel ranks innermost, then context-parallel ones, then
    data-parallel replicas, then pipeline ranks; expert-parallel groups are formed inside the tp * cp * dp GPUs
    of one pipeline rank.

    >>> Cluster(gpu=gpu("h800"), tp=8, pp=4).network().link(0, 1) == Link.of_bandwidth(25, INTER_LATENCY_MS)
    True
    """

    gpu: Gpu
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    etp: int | None = None
    """GPUs that one expert's matrices are sharded over; None: derived (`expert_tp`)."""
    hsdp: int = 1
    """Copies of what ZeRO divides: each is divided over dp * cp / hsdp GPUs."""
    gpus_per_node: int | None = None
    """None: as the GPU's usual node."""
    rank_speed: tuple[float, ...] = ()
    """Relative speed of each pipeline rank; empty: all 1, 0.5 is half as fast."""
    rank_memory_gib: tuple[float, ...] = ()
    """Memory of a GPU of each pipeline rank; empty: the GPU's own, one entry: the same for all."""

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "pp", "dp", "ep", "etp", "hsdp", "gpus_per_node"):
            value = getattr(self, name)
            if name in ("etp", "gpus_per_node") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OctoPipeError(f"{name} is {value!r}; give a whole number >= 1")
        if self.tp > 1 and self.node_size % self.tp and self.tp % self.node_size:
            raise OctoPipeError(f"tp {self.tp} does not divide a node of {self.node_size} GPUs; give a divisor of it")
        if self.gpus_per_stage % self.ep:
            product = "tp * dp" if self.cp == 1 else "tp * cp * dp"
            raise OctoPipeError(
                f"ep {self.ep} does not divide {product} = {self.gpus_per_stage}; give a divisor or raise dp"
            )
        if self.gpus_per_stage % (self.ep * self.expert_tp):
            raise OctoPipeError(
                f"ep {self.ep} x etp {self.etp} does not divide tp * cp * dp = {self.gpus_per_stage}; lower one of them"
            )
        if self.dp % self.hsdp or self.expert_dp % self.hsdp:
            what = f"dp {self.dp}" if self.dp % self.hsdp else f"the {self.expert_dp} replicas of an expert"
            raise OctoPipeError(f"hsdp {self.hsdp} does not divide {what}; give a divisor")
        for name, lengths in (("rank_speed", (0, self.pp)), ("rank_memory_gib", (0, 1, self.pp))):
            values = getattr(self, name)
            if len(values) not in lengths:
                raise OctoPipeError(f"{name} has {len(values)} entries for {self.pp} ranks; give one per rank")
            if any(not 1 / MAX_RATIO <= (finite(v) or 0.0) <= MAX_TIME_MS for v in values):
                raise OctoPipeError(f"{name} {brief(values)}: give finite numbers > 0 ({1 / MAX_RATIO:g} to 1e15)")

    @property
    def node_size(self) -> int:
        return self.gpus_per_node or self.gpu.gpus_per_node

    @property
    def gpus_per_rank(self) -> int:
        """GPUs that work together on one micro-batch of one pipeline rank."""
        return self.tp * self.cp

    @property
    def gpus_per_stage(self) -> int:
        """All GPUs that hold one pipeline rank's layers."""
        return self.tp * self.cp * self.dp

    @property
    def num_gpus(self) -> int:
        return self.gpus_per_stage * self.pp

    @property
    def expert_tp(self) -> int:
        """GPUs that share one expert: `etp` if given, otherwise the tensor-parallel group, or fewer if ep does not
        divide cp * dp."""
        if self.etp is not None:
            return self.etp
        if (self.cp * self.dp) % self.ep == 0:
            return self.tp
        return math.gcd(self.tp, self.gpus_per_stage // self.ep)

    @property
    def expert_dp(self) -> int:
        """Replicas of one expert."""
        return self.gpus_per_stage // (self.ep * self.expert_tp)

    def gpus_of(self, rank: int, replica: int = 0) -> range:
        """The GPU numbers of one pipeline rank of one replica."""
        first = (rank * self.dp + replica) * self.gpus_per_rank
        return range(first, first + self.gpus_per_rank)

    def group_link(self, size: int) -> Link:
        """The link that bounds a collective among `size` consecutive GPUs."""
        return self.intra_link if size <= self.node_size else self.inter_link

    def members_per_node(self, size: int, stride: int = 1) -> int:
        """Return how many GPUs of a group of `size` GPUs, `stride` apart, share a node."""
        return max(1, min(size, self.node_size // stride))

    @property
    def intra_link(self) -> Link:
        return Link.of_bandwidth(self.gpu.intra_gb_per_s, INTRA_LATENCY_MS)

    @property
    def inter_link(self) -> Link:
        return Link.of_bandwidth(self.gpu.inter_gb_per_s, INTER_LATENCY_MS)

    def link_across(self, span: int) -> Link:
        """Return the link between nodes for GPUs whose numbers are up to `span` apart; it is slower beyond a pod."""
        if self.gpu.pod_gpus is None or span <= self.gpu.pod_gpus:
            return self.inter_link
        return Link.of_bandwidth(self.gpu.inter_gb_per_s / self.gpu.between_pods, INTER_LATENCY_MS)

    @property
    def host_link(self) -> Link:
        """The link between a GPU and its host's memory."""
        return Link.of_bandwidth(self.gpu.host_gb_per_s, INTER_LATENCY_MS)

    def network(self) -> Network:
        """Return the links between pipeline ranks; each GPU of a rank sends its share over its own link to its peer."""
        per_node = max(1, self.node_size // self.gpus_per_stage)
        inter = self.link_across(2 * self.gpus_per_stage)
        return Network(intra=self.intra_link, inter=inter, ranks_per_node=per_node)

    def rank_slowdown(self) -> tuple[float, ...]:
        return tuple(1.0 / speed for speed in self.rank_speed)

    def rank_memory_bytes(self) -> tuple[float, ...]:
        return tuple(gib * GIB for gib in self.rank_memory_gib or (self.gpu.memory_gib,))

"""The input of a whole-cluster system: a model, GPUs, a batch, and the sizes that the user has fixed.

Knows: the input in the form that all four systems take. Does not know: any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import gpu
from octopipe.search.planner.published.meshes import Devices, Mesh, MeshPricer, powers_of_two
from octopipe.search.planner.published.submeshes import layer_runs, unit_of

MOST_SAMPLES_PER_GPU = 4
FIXABLE = ("tp", "zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A cluster to be planned: model, GPUs and batch."""

    devices: Devices
    global_batch: int
    recompute: str
    """none, selective or full, on every stage. Mist chooses per stage which layers it recomputes whole."""
    edges: tuple[int, ...]
    """Bounds of the runs of layers from which stages are made: the first layer of every run, and the number of
    layers."""
    fixed: Mapping[str, int] = field(default_factory=dict)

    @property
    def unit(self) -> int:
        return unit_of(len(self.devices.kinds))

    @property
    def tp(self) -> int | None:
        return self.fixed.get("tp")

    @property
    def zero(self) -> int | None:
        return self.fixed.get("zero")

    @property
    def assumed(self) -> str:
        """The GPU that systems designed for equal GPUs assume everywhere: the slowest one, because the others wait for
        it."""
        return min(self.devices.types, key=lambda name: gpu(name).bf16_tflops * gpu(name).clock)

    def tensor_sizes(self, pricer: MeshPricer, gpus: int) -> list[int]:
        sizes = pricer.tensor_sizes(self.assumed, self.devices.node_size)
        return [tp for tp in sizes if gpus % tp == 0 and self.tp in (None, tp)]

    def sample_counts(self) -> list[int]:
        """Return the numbers of samples per micro-batch (over all replicas) to try: powers of two that divide the
        batch."""
        most = MOST_SAMPLES_PER_GPU * len(self.devices.kinds)
        found = [n for n in powers_of_two(most) if self.global_batch % n == 0]
        if not found:
            raise OctoPipeError(f"a global batch of {self.global_batch} cannot be divided; give a larger one")
        return found


def query_of(
    pricer: MeshPricer, gpus: int, global_batch: int, recompute: str, fixed: Mapping[str, int] | None = None
) -> Query:
    devices = Devices.of(pricer.base, gpus)
    if len(devices.kinds) != gpus:
        raise OctoPipeError(f"the cluster has {len(devices.kinds)} GPUs, not {gpus}; leave --gpus out")
    given = dict(fixed or {})
    for name in given:
        if name not in FIXABLE:
            raise OctoPipeError(f"published systems choose {name} themselves; leave --{name} out")
    slowest = min(devices.types, key=lambda name: gpu(name).bf16_tflops * gpu(name).clock)
    tp = given.get("tp", 1)
    mesh = Mesh(kinds=(slowest,), shares=(1,), tp=tp)
    return Query(
        devices=devices,
        global_batch=global_batch,
        recompute=recompute,
        edges=tuple(layer_runs(pricer.price(mesh).layer_ms)),
        fixed=given,
    )

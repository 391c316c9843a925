"""Physics of partial training, host memory, shared experts, copies of state and pods, on the random set-ups of
`test_physics`: nothing is gained for nothing.

Every test compares a set-up with the same one but for a single thing, and says in which direction time and memory may
move. A draw to which a thing does not apply (no experts, one replica) is left out; each test counts what remains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from effort import draws
from test_physics import cases

from octopipe.costs.cluster.setup import Setup
from octopipe.costs.resolve import costs_of_setup
from octopipe.models.spec import ModelSpec, Moe
from octopipe.search.planner.estimate import Estimate, estimate
from octopipe.search.planner.splits import Split

SLACK = 1 + 1e-9


def judged(spec: ModelSpec, setup: Setup, split: Split) -> Estimate:
    """The step under (interleaved) 1F1B without recomputation."""
    assert setup.micro_batches is not None
    costs = costs_of_setup(spec, setup)
    return estimate(lambda *how: costs, split.pp, split.vp, setup.micro_batches, modes=("none",))


def setups(every: int = 5) -> Iterator[tuple[ModelSpec, Setup, Split]]:
    for spec, base, split, batch in cases()[::every]:
        yield spec, split.setup(base, batch), split


def static_gib(spec: ModelSpec, setup: Setup) -> float:
    return float(costs_of_setup(spec, setup).static_bytes.sum()) / 2**30


def experts_of(spec: ModelSpec) -> list[Moe]:
    return [part for layer in spec for part in layer.parts if isinstance(part, Moe)]


@pytest.mark.parametrize("rank", [4, 64])
def test_adapters_are_never_slower_nor_larger_than_training_everything(rank: int) -> None:
    """Two thin products per matrix are added, and the weight gradients of all matrices are not computed. Thin products
    read and write about as much as they would for a wide matrix: on experts of a few hundred columns they may cost
    what the weight gradient saves, and a little more."""
    for spec, setup, split in setups():
        whole, adapted = judged(spec, setup, split), judged(spec, replace(setup, lora=rank), split)
        narrow = any(part.ffn // split.etp < 1024 for part in experts_of(spec))
        assert adapted.step_ms <= whole.step_ms * (1.05 if narrow else SLACK), (spec.name, split, rank)
        assert adapted.peak_gib <= whole.peak_gib * SLACK, (spec.name, split, rank)
        assert adapted.step_ms >= 0.3 * whole.step_ms, "forward and input gradients remain"


def test_the_more_layers_are_frozen_the_faster_and_smaller() -> None:
    for spec, setup, split in setups():
        last = spec.num_layers - 2
        before = judged(spec, setup, split)
        for frozen in ("0", f"0-{last // 2}", f"0-{last}"):
            now = judged(spec, replace(setup, frozen=frozen), split)  # type: ignore[arg-type]
            assert now.step_ms <= before.step_ms * SLACK, (spec.name, split, frozen)
            assert now.peak_gib <= before.peak_gib * SLACK, (spec.name, split, frozen)
            before = now


def test_a_gradient_passes_frozen_layers_behind_a_trained_one() -> None:
    """The same number of frozen layers saves less at the end of a model than at its beginning."""
    for spec, setup, _ in setups():
        half = (spec.num_layers - 2) // 2
        front, back = f"0-{half}", f"{spec.num_layers - 1 - half}-{spec.num_layers - 1}"
        first = costs_of_setup(spec, replace(setup, frozen=front))  # type: ignore[arg-type]
        later = costs_of_setup(spec, replace(setup, frozen=back))  # type: ignore[arg-type]
        assert first.input_ms[: half + 1].sum() == 0 == first.activation_bytes[: half + 1].sum()
        assert (later.input_ms[-half - 1 : -1] > 0).all() and later.weight_ms[-half - 1 :].sum() == 0


def test_optimizer_state_on_the_host_saves_memory_and_never_time() -> None:
    for spec, setup, split in setups():
        before = judged(spec, setup, split)
        for part in (0.25, 0.5, 1.0):
            now = judged(spec, replace(setup, offload_optimizer=part), split)
            assert now.step_ms >= before.step_ms / SLACK, (spec.name, split, part)
            assert now.peak_gib <= before.peak_gib * SLACK, (spec.name, split, part)
            before = now


def test_activations_on_the_host_save_memory_and_never_time() -> None:
    seen = 0
    for spec, setup, split in setups(every=1):
        if split.pp > 1:
            continue
        seen += 1
        before = judged(spec, setup, split)
        for layers in (1, 4, spec.num_layers - 3):
            now = judged(spec, replace(setup, offload_layers=layers), split)
            assert now.step_ms >= before.step_ms / SLACK, (spec.name, split, layers)
            held = [
                float(costs_of_setup(spec, s).activation_bytes.sum())
                for s in (setup, replace(setup, offload_layers=layers))
            ]
            assert held[1] <= held[0] * SLACK, (spec.name, split, layers)
            before = now
    assert seen >= draws(5, least=1)


def test_a_faster_host_link_is_never_slower() -> None:
    for spec, setup, split in setups():
        assert setup.gpu is not None
        host = replace(setup, offload_optimizer=1.0)
        fast = replace(host, gpu=replace(setup.gpu, host_gb_per_s=2 * setup.gpu.host_gb_per_s))
        assert judged(spec, fast, split).step_ms <= judged(spec, host, split).step_ms * SLACK, (spec.name, split)


def test_shared_experts_use_the_same_gpus_and_divide_the_same_weights() -> None:
    """ep x etp GPUs hold all experts once: doubling etp instead of ep leaves the state of a GPU as it was, and any
    size that does not divide the GPUs is refused."""
    seen = 0
    for spec, setup, split in setups(every=1):
        routed = experts_of(spec)
        if not routed or split.tp == 1 or split.ep == 1 or split.etp != 1:
            continue
        shared = replace(setup, ep=split.ep // 2, etp=2)
        if any(part.ffn % 2 for part in routed):
            continue
        seen += 1
        assert shared.num_gpus == setup.num_gpus
        cluster, other = setup.cluster(), shared.cluster()
        assert cluster.ep * cluster.expert_tp * cluster.expert_dp == cluster.tp * cluster.cp * cluster.dp
        assert other.ep * other.expert_tp * other.expert_dp == other.tp * other.cp * other.dp
        assert static_gib(spec, shared) == pytest.approx(static_gib(spec, setup), rel=1e-6), (spec.name, split)
    assert seen >= draws(3, least=1)


def test_copies_of_the_state_cost_memory() -> None:
    seen = 0
    for spec, setup, split in setups(every=1):
        zero = 3 if split.pp == 1 else 1
        before = static_gib(spec, replace(setup, zero=zero))
        stage = split.tp * split.cp * split.dp // (split.ep * split.etp)
        for copies in (2, 4, 8):
            if split.dp % copies or stage % copies:
                continue
            seen += 1
            now = static_gib(spec, replace(setup, zero=zero, hsdp=copies))
            assert now >= before / SLACK, (spec.name, split, copies)
            before = now
    assert seen >= draws(25, least=1)


def test_narrower_networks_between_pods_are_never_faster() -> None:
    for spec, setup, split in setups():
        kind: Any = setup.gpu
        before = judged(spec, setup, split).step_ms
        pod = 2 * kind.gpus_per_node
        for ratio, flows in ((1.0, None), (2.0, None), (4.0, None), (4.0, 16), (4.0, 1)):
            card = replace(kind, pod_gpus=pod, oversubscription=ratio, flows=flows)
            now = judged(spec, replace(setup, gpu=card), split).step_ms
            assert now >= before / SLACK, (spec.name, split, ratio, flows)
            before = now
        wide = replace(kind, pod_gpus=4 * pod, oversubscription=4.0, flows=None)
        narrow = replace(kind, pod_gpus=pod, oversubscription=4.0, flows=None)
        times = [judged(spec, replace(setup, gpu=card), split).step_ms for card in (wide, narrow)]
        assert times[0] <= times[1] * SLACK, (spec.name, split, "larger pods")


def test_tokens_that_stay_on_fewer_nodes_are_never_slower() -> None:
    seen = 0
    for spec, setup, split in setups(every=1):
        if not experts_of(spec) or split.ep == 1:
            continue
        seen += 1
        before = judged(spec, setup, split).step_ms
        for nodes in (8, 4, 2, 1):
            now = judged(spec, replace(setup, nodes_per_token=nodes), split).step_ms
            assert now <= before * SLACK, (spec.name, split, nodes)
            before = now
    assert seen >= draws(5, least=1)


def test_busier_expert_ranks_are_never_faster() -> None:
    for spec, setup, split in setups():
        if not experts_of(spec) or split.ep == 1:
            continue
        before = judged(spec, setup, split).step_ms
        for load in (1.1, 1.5, 2.0):
            now = judged(spec, replace(setup, imbalance=(load,)), split).step_ms
            assert now >= before / SLACK, (spec.name, split, load)
            before = now

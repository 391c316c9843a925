"""Every bound against the sentence of its proof, written out with plain loops over layers, ranks and micro-batches."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from octopipe.costs.cluster.hardware import Link, Network
from octopipe.costs.table import CostTable
from octopipe.simulation.bounds import bounds as module
from octopipe.simulation.bounds import ramp
from octopipe.simulation.bounds.bounds import (
    PlanClass,
    bounds,
    chain_bound_ms,
    copied_bound,
    heads_bound_ms,
    loads_bound_ms,
    lower_bound,
    lower_bound_ms,
    ramp_bound_ms,
    work_bound_ms,
)
from octopipe.simulation.bounds.ramp import Ramp

SEEDS = range(12)


@pytest.fixture(autouse=True)
def _few_times_and_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weaker *ramp*, in a tenth of the time: what it is given is what is looked at here."""
    for name, value in (("_TIMES", 12), ("_FINER", 4), ("_PRICES", 8)):
        monkeypatch.setattr(ramp, name, value)


def drawn(seed: int) -> tuple[CostTable, int, int]:
    """Uneven layers; some with ranks of different speed, micro-batches of different size, a memory limit, links."""
    lot = np.random.default_rng(seed)
    layers, ranks, micro_batches = int(lot.integers(3, 7)), int(lot.integers(2, 4)), int(lot.integers(1, 6))
    activation = lot.uniform(0.5, 2.0, layers)
    static = lot.uniform(0.2, 1.0, layers)
    heavy = np.ones(layers)
    heavy[[0, -1, 1, layers // 2][seed % 4]] = [1.0, 6.0, 12.0][seed % 3]
    pair = Link(latency_ms=0.05, ms_per_byte=0.02)
    costs = CostTable(
        model="drawn",
        symbols="T" * layers,
        forward_ms=lot.uniform(0.2, 3.0, layers) * heavy,
        input_ms=lot.uniform(0.2, 3.0, layers) * heavy,
        weight_ms=lot.uniform(0.2, 2.0, layers),
        optimizer_ms=lot.uniform(0.0, 0.5, layers),
        activation_bytes=activation,
        stash_bytes=activation / 2,
        static_bytes=static,
        gradient_bytes=lot.uniform(0.5, 4.0, layers),
        boundary_bytes=lot.uniform(1.0, 3.0, layers),
        network=Network(
            intra=Link(latency_ms=float(lot.uniform(0.2, 0.6)), ms_per_byte=float(lot.uniform(0.1, 0.4))),
            inter=Link(latency_ms=1.0, ms_per_byte=0.5),
            ranks_per_node=2,
            pairs={(1, 0): pair} if seed % 4 == 3 else {},
        ),
        rank_slowdown=tuple(lot.uniform(0.5, 2.0, ranks)) if seed % 2 else (),
        micro_batch_factor=lot.uniform(0.5, 2.0, (micro_batches, layers)) if seed % 3 == 2 else None,
    )
    if seed % 3 == 1:
        most = float(static.sum()) / ranks + float(lot.uniform(0.3, 1.5)) * float(static.max())
        costs = costs.replace(rank_memory_bytes=(most,))
    return costs, ranks, micro_batches


class Twin:
    """The bounds of one setting, from their definitions."""

    def __init__(self, costs: CostTable, ranks: int, micro_batches: int) -> None:
        self.costs, self.ranks, self.count, self.layers = costs, ranks, micro_batches, range(costs.num_layers)
        self.slow = [costs.rank_slowdown[r] if costs.rank_slowdown else 1.0 for r in range(ranks)]
        factor = costs.micro_batch_factor
        self.size = [
            [1.0 if factor is None else float(factor[m, l]) for l in self.layers] for m in range(micro_batches)
        ]
        self.least = [min(row[l] for row in self.size) for l in self.layers]
        self.total = [sum(row[l] for row in self.size) for l in self.layers]
        self.f, self.i, self.w = ([float(x) for x in a] for a in (costs.forward_ms, costs.input_ms, costs.weight_ms))
        self.work = [
            self.total[l] * (self.f[l] + self.i[l] + self.w[l]) + float(costs.optimizer_ms[l]) for l in self.layers
        ]
        pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
        sizes = [float(costs.boundary_bytes[l]) * self.least[l] for l in self.layers][:-1]
        self.hop = min(costs.network.transfer_ms(a, b, s) for a, b in pairs for s in sizes)
        self.links = [costs.network.link(a, b) for a, b in pairs]
        self.rates = sorted((1 / s for s in self.slow), reverse=True)

    def work_ms(self, used: int) -> float:
        return sum(self.work) / sum(self.rates[:used])

    def lead(self, l: int) -> float:
        return sum(self.least[k] * self.f[k] for k in range(l))

    def tail(self, l: int) -> float:
        return sum(self.least[k] * self.i[k] for k in range(l))

    def chain_ms(self) -> float:
        cases = []
        for used in range(1, self.ranks + 1):
            chains = []
            for l in self.layers:
                alone = self.lead(l) + self.total[l] * (self.f[l] + self.i[l]) + self.tail(l)
                crossings = 2 * max(used - 1 - (len(self.layers) - 1 - l), 0)
                chains.append(min(self.slow) * (alone + self.least[0] * self.w[0]) + crossings * self.hop)
            cases.append(max(max(chains), self.work_ms(used)))
        return min(cases)

    def heads(self) -> list[float]:
        return [min(self.slow) * self.lead(j) + j * self.hop for j in range(self.ranks)]

    def idle_ms(self, heads: list[float]) -> float:
        return (sum(self.work) + sum(r * h for r, h in zip(self.rates, heads, strict=True))) / sum(self.rates)

    def ramp_ms(self, heads: list[float], recompute: bool, copies: list[int] | None = None) -> float:
        hop, shared = (self.hop, None) if copies is None else (0.0, np.array(copies, np.int64))
        ramp = Ramp(self.costs, self.ranks, self.count, hop, recompute, shared)
        return ramp.bound_ms(sum(self.work), np.array(self.rates), np.array(heads))

    def loads_ms(self) -> float:
        """Every way to deal whole layers out; a rank that holds none waits for nobody."""
        even = len(set(self.slow)) == 1
        heads = self.heads() if even else [0.0] * self.ranks
        best = math.inf
        for home in itertools.product(range(self.ranks), repeat=len(self.layers)):
            if even and home[0] != 0:
                continue
            ends = [
                heads[r] + self.slow[r] * sum(self.work[l] for l in self.layers if home[l] == r)
                for r in range(self.ranks)
                if r in home
            ]
            best = min(best, max(ends))
        return best

    def single(self, recompute: bool) -> dict[str, float]:
        work, cap = self.work_ms(self.ranks), self.work_ms(self.ranks - 1)
        return {
            "work": work,
            "chain": max(self.chain_ms(), work),
            "heads": min(self.idle_ms(self.heads()), cap),
            "ramp": min(self.ramp_ms(self.heads(), recompute), cap),
            "loads": min(self.loads_ms(), cap),
        }

    # -- layers on several ranks

    def room(self) -> float:
        static = float(self.costs.static_bytes.sum())
        return sum(self.costs.capacity_bytes(r) for r in range(self.ranks)) - static

    def most_copies(self) -> list[int]:
        found = []
        for l in self.layers:
            copies = 1
            while copies < self.ranks and copies * float(self.costs.static_bytes[l]) <= self.room():
                copies += 1
            found.append(copies)
        return found

    def share(self, l: int, copies: int) -> float:
        """What the busiest of a layer's ranks has at least; equal micro-batches cannot be cut."""
        return self.total[l] / copies if self.costs.micro_batch_factor is not None else -(-self.count // copies)

    def reduced_ms(self, l: int) -> float:
        nbytes = float(self.costs.gradient_bytes[l])
        return min(2 * k.latency_ms + nbytes * k.ms_per_byte for k in self.links)  # twice half the bytes

    def ends_ms(self, l: int) -> float:
        busiest = self.lead(l) + self.share(l, self.most_copies()[l]) * (self.f[l] + self.i[l] + self.w[l])
        back = sum(self.least[k] * self.i[k] for k in self.layers if k >= l)
        once = self.lead(len(self.layers)) + back + self.least[l] * self.w[l]
        return min(self.slow) * max(busiest, once) + self.reduced_ms(l)

    def shared_heads(self, copies: list[int]) -> list[float]:
        heads: list[float] = []
        for k in self.layers:
            # Layers up to k lie on one rank each and on as many more as there is memory for, the lightest first.
            room, more = self.room(), 0
            for nbytes in sorted(float(self.costs.static_bytes[l]) for l in range(k + 1) for _ in range(copies[l] - 1)):
                room -= nbytes
                more += room >= -1e-9
            while len(heads) < min(k + 1 + more, self.ranks):
                heads.append(min(self.slow) * self.lead(k) + (self.hop if k > 0 else 0.0))
        return heads + [heads[-1]] * (self.ranks - len(heads))

    def shared(self, copies: list[int], recompute: bool, ramp: bool) -> dict[str, float]:
        alone = max(
            self.lead(l) + self.share(l, copies[l]) * (self.f[l] + self.i[l]) + self.tail(l) for l in self.layers
        )
        work, cap, heads = self.work_ms(self.ranks), self.work_ms(self.ranks - 1), self.shared_heads(copies)
        found = {
            "work": work,
            "chain": max(min(self.slow) * (alone + self.least[0] * self.w[0]), work),
            "heads": min(self.idle_ms(heads), cap),
        }
        return found | ({"ramp": min(self.ramp_ms(heads, recompute, copies), cap)} if ramp else {})

    def copied_ms(self, recompute: bool) -> float:
        most = self.most_copies()
        order = sorted((l for l in self.layers if most[l] > 1), key=self.ends_ms)

        def copied(k: int) -> list[int]:
            return [most[l] if l in order[:k] else 1 for l in self.layers]

        low = 0
        for k in range(1, len(order) + 1):
            if self.ends_ms(order[k - 1]) < max(self.shared(copied(k), recompute, False).values()):
                low = k
        best = max((self.single(recompute) if low == 0 else self.shared(copied(low), recompute, True)).values())
        if low == len(order):
            return best
        beyond = max(self.shared(copied(len(order)), recompute, True).values())
        return min(best, max(beyond, self.ends_ms(order[low])))


@pytest.mark.parametrize("seed", range(40))
def test_bounds_on_plans_that_hold_each_layer_once_are_their_sums(seed: int) -> None:
    setting = drawn(seed)
    twin = Twin(*setting)
    assert work_bound_ms(*setting) == pytest.approx(twin.work_ms(twin.ranks))
    assert chain_bound_ms(*setting) == pytest.approx(twin.chain_ms())
    assert heads_bound_ms(*setting) == pytest.approx(twin.idle_ms(twin.heads()))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_bound_is_told_with_its_name_the_strongest_first(seed: int) -> None:
    setting = drawn(seed)
    twin = Twin(*setting)
    recompute = seed % 4 < 2
    assert ramp_bound_ms(*setting, recompute) == pytest.approx(twin.ramp_ms(twin.heads(), recompute))
    want = twin.single(recompute)
    found = bounds(*setting, recompute)
    assert {b.name: b.ms for b in found} == pytest.approx(want, rel=2e-5)
    assert [b.ms for b in found] == sorted((b.ms for b in found), reverse=True)


@pytest.mark.parametrize("seed", range(60))
def test_whole_layers_are_dealt_out_as_well_as_any_way_of_dealing(seed: int) -> None:
    costs, ranks, micro_batches = drawn(seed)
    if seed % 5 == 4:  # a few kinds of layers, some of them without work
        kinds = np.random.default_rng(seed).choice([0.0, 0.0, 1.0, 1.5, 4.0], costs.num_layers)
        kinds[0] = [0.0, 0.3, 1.0][seed % 3] / micro_batches
        nothing = np.zeros(costs.num_layers)
        costs = costs.replace(forward_ms=kinds, input_ms=nothing, weight_ms=nothing, optimizer_ms=nothing)
    exact = Twin(costs, ranks, micro_batches).loads_ms()
    assert exact * (1 - 2e-5) <= loads_bound_ms(costs, ranks, micro_batches) <= exact * (1 + 1e-9)


def test_layers_without_work_take_no_time() -> None:
    nothing = np.zeros(3)
    costs = CostTable.uniform(num_layers=3).replace(forward_ms=nothing, input_ms=nothing, weight_ms=nothing)
    assert loads_bound_ms(costs, 2, 4) == work_bound_ms(costs, 2, 4) == 0.0


@pytest.mark.parametrize(("more", "exact"), [(0, True), (-1, False)])
def test_dealing_is_left_out_beyond_its_number_of_steps(
    more: int, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, one micro-batch; five layers of 2 ms, two of 3 ms and one of 5 ms."""
    work = [3.0, 2.0, 2.0, 5.0, 2.0, 2.0, 3.0, 2.0]
    nothing = np.zeros(8)
    costs = CostTable.uniform(num_layers=8).replace(forward_ms=np.array(work), input_ms=nothing, weight_ms=nothing)
    monkeypatch.setattr(module, "_MAX_STEPS", (5 + 1) * (2 + 1) * (1 + 1) * 3 + more)
    assert (loads_bound_ms(costs, 2, 1) > work_bound_ms(costs, 2, 1)) is exact


@pytest.mark.parametrize("seed", range(60))
def test_what_copies_cost_and_bring_is_counted_one_by_one(seed: int) -> None:
    """How many there is room for, when their reduction ends, when ranks are first reached, what follows from these."""
    costs, ranks, micro_batches = drawn(seed)
    if seed % 2:  # hardly any room, more ranks
        ranks = 4
        room = float(np.random.default_rng(seed).uniform(0.0, 2.2)) * float(costs.static_bytes.mean())
        costs = costs.replace(
            rank_slowdown=(),
            static_bytes=np.where(np.arange(costs.num_layers) % 3 == 2, 0.0, costs.static_bytes)
            if seed % 5 == 0
            else costs.static_bytes,
        )
        costs = costs.replace(rank_memory_bytes=((float(costs.static_bytes.sum()) + room) / ranks,))
    twin = Twin(costs, ranks, micro_batches)
    most = module._most_copies(costs, ranks)
    assert most.tolist() == twin.most_copies()
    ends = module._copied_ms(costs, ranks, micro_batches, most)
    assert ends == pytest.approx([twin.ends_ms(l) for l in twin.layers])
    for copies in (most, np.where(np.arange(costs.num_layers) % 2, most, 1)):
        assert module._shared_heads(costs, ranks, copies) == pytest.approx(twin.shared_heads(copies.tolist()))
        found = module._shared(costs, ranks, micro_batches, True, copies, ramp=False)
        assert found.ms == pytest.approx(max(twin.shared(copies.tolist(), True, False).values()))


@pytest.mark.parametrize("seed", range(24))
def test_bounds_on_plans_that_may_copy_layers_are_their_sums(seed: int) -> None:
    costs, ranks, micro_batches = drawn(seed)
    if seed >= 12:  # reductions so slow that some copies end too late, or only just in time
        costs = costs.replace(gradient_bytes=costs.gradient_bytes * [1.0, 5.0, 20.0][seed % 3])
    twin = Twin(costs, ranks, micro_batches)
    recompute = seed % 4 < 2
    found = bounds(costs, ranks, micro_batches, recompute, True)
    assert found[0].ms == pytest.approx(twin.copied_ms(recompute), rel=2e-5)
    assert found[1].name == "work" and found[1].ms == pytest.approx(twin.work_ms(ranks))


def test_a_bound_speaks_of_recomputing_plans_that_hold_each_layer_once_unless_told_otherwise() -> None:
    costs = CostTable.uniform(num_layers=8, activation_bytes=1.0).replace(
        stash_bytes=np.full(8, 0.6), rank_memory_bytes=(3.0,), forward_ms=np.full(8, 0.1)
    )
    setting = costs, 4, 8
    with_it, without = ramp_bound_ms(*setting, True), ramp_bound_ms(*setting, False)
    assert ramp_bound_ms(*setting) == with_it < without
    found = bounds(*setting)
    assert {b.name: b.ms for b in found}["ramp"] == with_it and len(found) == 5
    assert lower_bound(*setting) == found[0] and lower_bound_ms(*setting) == found[0].ms
    assert copied_bound(*setting) == copied_bound(*setting, True) == lower_bound(*setting, True, True)


def test_memory_that_is_just_enough_for_a_copy_is_enough() -> None:
    costs = CostTable.uniform(num_layers=3, p2p_ms=0.5).replace(static_bytes=np.array([1.0, 0.0, 1.0]))
    full = costs.replace(rank_memory_bytes=(1.0,))  # no byte is left: what weighs nothing lies anywhere
    assert module._most_copies(full, 2).tolist() == [1, 2, 1]
    just = costs.replace(rank_memory_bytes=(1.5,))
    assert module._most_copies(just, 2).tolist() == [2, 2, 2]
    assert module._shared_heads(just, 2, np.array([2, 1, 1])).tolist() == [0.0, 0.0]
    less = costs.replace(rank_memory_bytes=(1.4,))
    assert module._shared_heads(less, 2, np.array([2, 1, 1])).tolist() == [0.0, 1.5]


def test_ranks_too_far_apart_leave_the_work_to_one() -> None:
    costs = CostTable.uniform(num_layers=4, p2p_ms=1000.0)
    assert chain_bound_ms(costs, 3, 2) == pytest.approx(24.0)
    assert PlanClass() == (True, False, False, False)


def test_one_rank_has_no_transfers_and_no_rank_fewer() -> None:
    costs = CostTable.uniform(num_layers=3, p2p_ms=7.0)
    assert {b.ms for b in bounds(costs, 1, 2)} == {18.0}
    one = CostTable.uniform(num_layers=1, p2p_ms=7.0)
    assert heads_bound_ms(one, 2, 2) == (6.0 + 1.0) / 2  # there is nothing to send between two layers
    assert copied_bound(costs, 1, 2).ms == 18.0

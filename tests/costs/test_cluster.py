"""Links, GPU presets and how pipeline ranks lie on nodes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import GPUS, INTER_LATENCY_MS, Cluster, Link, Network, busiest_uplink, gpu

H800 = gpu("h800")


def test_a_transfer_costs_latency_plus_bytes_over_bandwidth():
    link = Link.of_bandwidth(25, latency_ms=0.01)
    assert link.transfer_ms(25e6) == pytest.approx(1.01)
    # The paper's cluster: the 56B model's 8 MiB share at 25 GB/s takes about 0.34 ms.
    network = Cluster(gpu=H800, tp=8, pp=8).network()
    assert network.transfer_ms(0, 1, 8 << 20) == pytest.approx(0.34, abs=0.005)
    assert network.transfer_ms(3, 3, 8 << 20) == 0.0


def test_a_measured_pair_wins_over_its_node():
    pair = Link(latency_ms=7.0)
    network = Network(intra=Link(), inter=Link(latency_ms=1.0), ranks_per_node=2, pairs={(0, 1): pair})
    assert [network.transfer_ms(a, b, 1) for a, b in ((0, 1), (1, 0), (2, 3), (1, 2))] == [7.0, 0.0, 0.0, 1.0]


def node_of(cluster, rank):
    nodes = {g // cluster.node_size for g in cluster.gpus_of(rank)}
    return nodes.pop() if len(nodes) == 1 else None


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_ranks_share_a_node_exactly_when_their_gpus_do(tp, dp):
    cluster = Cluster(gpu=H800, tp=tp, dp=dp, pp=16)
    network = cluster.network()
    for a in range(16):
        for b in range(16):
            same = node_of(cluster, a) is not None and node_of(cluster, a) == node_of(cluster, b)
            if a != b:
                assert (network.link(a, b) == network.intra) == same


def test_every_gpu_belongs_to_one_rank_of_one_replica():
    cluster = Cluster(gpu=H800, tp=2, dp=3, pp=4)
    seen = [g for rank in range(4) for replica in range(3) for g in cluster.gpus_of(rank, replica)]
    assert sorted(seen) == list(range(cluster.num_gpus))


def test_speed_and_memory_per_rank():
    cluster = Cluster(gpu=H800, pp=2, rank_speed=(1.0, 0.5), rank_memory_gib=(80, 40))
    assert cluster.rank_slowdown() == (1.0, 2.0)
    assert cluster.rank_memory_bytes() == (80 * 2.0**30, 40 * 2.0**30)
    assert Cluster(gpu=H800, pp=2).rank_memory_bytes() == (80 * 2.0**30,)


@pytest.mark.parametrize(("tp", "dp", "ep", "expected"), [(8, 8, 8, (8, 1)), (8, 1, 8, (1, 1)), (2, 8, 4, (2, 2))])
def test_experts_share_what_data_parallelism_leaves(tp, dp, ep, expected):
    cluster = Cluster(gpu=H800, tp=tp, dp=dp, ep=ep)
    assert (cluster.expert_tp, cluster.expert_dp) == expected
    assert cluster.expert_tp * cluster.expert_dp * ep == tp * dp


def test_collectives_beyond_a_node_use_the_slow_link():
    cluster = Cluster(gpu=H800)
    assert cluster.group_link(8).ms_per_byte < cluster.group_link(16).ms_per_byte
    assert cluster.group_link(16).latency_ms == INTER_LATENCY_MS
    assert Cluster(gpu=gpu("gb200")).group_link(64) == Cluster(gpu=gpu("gb200")).group_link(2)


@pytest.mark.parametrize("name", ["h800", "h100", "h200", "a100", "b200", "gb200", "mi300x", "l40s"])
def test_gpu_presets_exist_in_any_case(name):
    assert gpu(name.upper()) is GPUS[name]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: gpu("h80"), ["h80", "h800"]),
        (lambda: gpu("x\ny"), ["one of"]),
        (lambda: Cluster(gpu=H800, pp=0), ["pp is 0"]),
        (lambda: Cluster(gpu=H800, tp=-1), ["tp is -1"]),
        (lambda: Cluster(gpu=H800, tp=3), ["tp 3", "8 GPUs"]),
        (lambda: Cluster(gpu=H800, ep=3), ["ep 3"]),
        (lambda: Cluster(gpu=H800, dp=1.5), ["dp is 1.5"]),
        (lambda: Cluster(gpu=H800, pp=2, rank_speed=(1.0,)), ["rank_speed", "2 ranks"]),
        (lambda: Cluster(gpu=H800, pp=2, rank_speed=(1.0, float("nan"))), ["rank_speed"]),
        (lambda: Cluster(gpu=H800, pp=2, rank_memory_gib=(0.0,)), ["rank_memory_gib"]),
        (lambda: Link(latency_ms=-1.0), ["latency_ms"]),
        (lambda: Link(ms_per_byte=float("inf")), ["ms_per_byte"]),
    ],
)
def test_bad_numbers_are_one_line(build, words):
    with pytest.raises(OctoPipeError) as caught:
        build()
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "ratio", "flows"), [(32, 1.0, 1), (32, 1.0, 16), (32, 2.0, 4), (8, 1.0, 4), (64, 4.0, 8)]
)
def test_the_busiest_uplink_is_that_of_flows_dealt_at_random(nodes, ratio, flows):
    dice, uplinks, draws = random.Random(nodes * flows), int(nodes / ratio), 200
    total = 0.0
    for _ in range(draws):
        loads = [0] * uplinks
        for _ in range(nodes * flows):
            loads[dice.randrange(uplinks)] += 1
        total += max(loads) / flows
    assert busiest_uplink(nodes, ratio, flows) == pytest.approx(total / draws, rel=0.05)


def test_more_flows_come_nearer_to_even_uplinks_and_never_below():
    loads = [busiest_uplink(32, 2.0, flows) for flows in (1, 4, 16, 64, 256, 349, 351, 1024, 65536)]
    assert loads == sorted(loads, reverse=True) and 2.0 < loads[-1] < 2.02


def test_links_are_slower_beyond_a_pod_alone():
    pods = replace(gpu("h100"), pod_gpus=64, oversubscription=2.0, flows=4)
    cluster = Cluster(gpu=pods, tp=8, dp=32)
    assert cluster.link_across(64) == cluster.inter_link
    assert cluster.link_across(65).ms_per_byte == pytest.approx(
        busiest_uplink(8, 2.0, 4) * cluster.inter_link.ms_per_byte
    )
    evenly = Cluster(gpu=replace(pods, flows=None), tp=8, dp=32)
    assert evenly.link_across(65).ms_per_byte == pytest.approx(2 * cluster.inter_link.ms_per_byte)

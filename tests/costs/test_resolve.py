"""Whatever a user names as MODEL becomes a CostTable, or one line about what to name instead."""

from __future__ import annotations

import json

import numpy as np
import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.costs.analytic.table import analytic_costs
from octopipe.costs.cluster.hardware import Cluster, gpu
from octopipe.costs.resolve import resolve_costs, resolve_spec
from octopipe.models.zoo import preset

TIMES = {
    "pattern": "E--L",
    "forward_ms": {"E": 1, "-": 2, "L": 3},
    "backward_ms": {"E": 1, "-": 2, "L": 3},
    "weight_ms": {"E": 1, "-": 2, "L": 3},
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def times(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(TIMES))
    return path


def test_a_preset_is_priced_on_its_cluster():
    table = resolve_costs("nemotron-h-56b", pp=8, tp=8, seq=2048)
    direct = analytic_costs(preset("nemotron-h-56b"), Cluster(gpu=gpu("h800"), tp=8, pp=8), seq=2048)
    assert table.digest() == direct.digest()
    assert table.capacity_bytes(0) == pytest.approx(0.94 * 80 * 2.0**30)
    assert resolve_costs("nemotron-h-56b", pp=8, tp=8, reserve_gib=0).capacity_bytes(0) == 80 * 2.0**30
    assert resolve_costs("nemotron-h-56b", pp=8, tp=8).tokens_per_micro_batch == 4096


def test_a_layer_times_file_keeps_its_times_and_has_no_limits(times):
    table = resolve_costs(str(times), pp=2)
    assert (table.model, table.symbols) == ("mine", "E--L")
    assert table.capacity_bytes(0) == float("inf") and table.tokens_per_micro_batch is None
    assert table.network.transfer_ms(0, 1, 1e9) == 0.0
    assert resolve_spec(times) is None
    limited = resolve_costs(times, pp=2, memory_gib=[1, 2], p2p_ms=0.34, seq=4096, tp=8, rank_speed=[1, 0.5])
    assert (limited.capacity_bytes(0), limited.capacity_bytes(1)) == (2.0**30, 2.0**31)
    assert limited.network.transfer_ms(0, 1, 123) == 0.34
    assert (limited.tokens_per_micro_batch, limited.gpus_per_rank) == (4096, 8)
    assert limited.rank_slowdown == (1.0, 2.0)


def test_known_boundary_sizes_use_the_gpus_links(tmp_path):
    path = tmp_path / "sized.json"
    path.write_text(json.dumps({**TIMES, "boundary_gib": 1 / 128, "tokens": 2048}))
    table = resolve_costs(path, pp=4, tp=8)
    assert table.network.transfer_ms(0, 1, table.boundary_bytes[0]) == pytest.approx(0.34, abs=0.005)
    assert table.tokens_per_micro_batch == 2048


def test_pipelines_sum_measured_gradients_over_a_known_link_or_not_at_all(tmp_path):
    """Without a GPU the sum took no time, and nothing said so."""
    path = tmp_path / "sized.json"
    path.write_text(json.dumps({**TIMES, "gradient_gib": {"E": 1, "-": 1, "L": 1}}))
    with pytest.raises(OctoPipeError, match=r"the link over which 4 pipelines sum.*give --gpu"):
        resolve_costs(path, pp=2, dp=4)
    table = resolve_costs(path, pp=2, dp=4, gpu="h100")
    assert table.reduction.transfer_ms(50e9) == pytest.approx(1e3, rel=1e-3)
    assert resolve_costs(path, pp=2).data_parallel == 1


def test_a_config_file_and_its_folder_read_alike(tmp_path):
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    by_file, by_folder = (resolve_costs(p, pp=2, tp=1) for p in (folder / "config.json", folder))
    assert by_file.digest() == by_folder.digest()
    assert (by_file.model, by_file.symbols) == ("my-llama", "ETTTL")


def test_a_format_key_says_what_a_file_is(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"format": "octopipe.profile/1", "device": "x", **TIMES}))
    assert resolve_costs(path, pp=2).symbols == "E--L"
    path.write_text(json.dumps({"format": "octopipe.plan/1"}))
    with pytest.raises(OctoPipeError, match="this is a plan, not a model; give it as --plan"):
        resolve_costs(path, pp=2)


def test_a_preset_wins_over_a_folder_of_its_name(tmp_path, monkeypatch):
    (tmp_path / "llama3-8b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_costs("llama3-8b", pp=2, tp=8).num_layers == 34


def test_the_chosen_tensor_parallel_size_makes_the_model_fit_where_it_can():
    assert resolve_costs("llama3-8b", pp=4).gpus_per_rank == 1
    for name in ("nemotron-h-56b", "llama3-70b", "deepseek-v3", "gpt-oss-20b"):
        table = resolve_costs(name, pp=8)
        share = table.static_bytes.sum() / 8
        assert share <= 40.5 * 2.0**30 or table.gpus_per_rank == 8


def test_p2p_overrides_only_the_network():
    plain, fixed = resolve_costs("llama3-8b", pp=4, tp=8), resolve_costs("llama3-8b", pp=4, tp=8, p2p_ms=0)
    assert np.array_equal(plain.layer_ms, fixed.layer_ms)
    assert fixed.network.transfer_ms(0, 3, 1e9) == 0.0 < plain.network.transfer_ms(0, 3, 1e9)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("nemotron-h-56", {}, ["nemotron-h-56b", "octopipe models"]),
        ("", {}, ["octopipe models"]),
        ("a\nb", {}, ["octopipe models"]),
        ("nope.json", {}, ["nope.json", "no such file"]),
        ("some/where", {}, ["some/where", "no such file"]),
        ("x" * 5000 + ".json", {}, ["check the path"]),
        ("llama3-8b", {"gpu": "h8000"}, ["h8000", "h800"]),
        ("llama3-8b", {"pp": 0}, ["pp is 0"]),
        ("llama3-8b", {"pp": -2}, ["pp is -2"]),
        ("llama3-8b", {"pp": 2.0}, ["pp is 2.0"]),
        ("llama3-8b", {"pp": 35}, ["pp 35", "34 layers"]),
        ("llama3-8b", {"tp": 0}, ["tp is 0"]),
        ("llama3-8b", {"tp": 3}, ["tp 3"]),
        ("nemotron-nano-v2-9b", {"tp": 16}, ["tp 16", "40 heads"]),
        ("llama3-8b", {"dp": 0}, ["dp is 0"]),
        ("llama3-8b", {"ep": 3, "tp": 8}, ["ep 3"]),
        ("llama3-8b", {"seq": 0}, ["seq is 0"]),
        ("llama3-8b", {"seq": True}, ["seq is True"]),
        ("llama3-8b", {"micro_batch_size": -1}, ["micro_batch_size is -1"]),
        ("llama3-8b", {"p2p_ms": -1}, ["p2p_ms is -1"]),
        ("llama3-8b", {"p2p_ms": NAN}, ["p2p_ms is nan"]),
        ("llama3-8b", {"p2p_ms": INF}, ["p2p_ms is inf"]),
        ("llama3-8b", {"memory_gib": 0}, ["memory_gib is 0"]),
        ("llama3-8b", {"memory_gib": NAN}, ["memory_gib is nan"]),
        ("llama3-8b", {"memory_gib": [1, 2, 3]}, ["memory_gib has 3"]),
        ("llama3-8b", {"rank_speed": [1, 0]}, ["rank_speed"]),
        ("llama3-8b", {"gpus_per_node": 0}, ["gpus_per_node is 0"]),
        ("llama3-8b", {"micro_batch_tokens": [1, -1]}, ["micro_batch_tokens[1]"]),
    ],
)
def test_bad_input_is_one_line(model, options, words):
    with pytest.raises(OctoPipeError) as caught:
        resolve_costs(model, **{"pp": 2, **options})
    line = str(caught.value)
    assert all(word in line for word in words) and "\n" not in line and len(line) < 600


def test_a_file_that_is_no_model_is_named(tmp_path, times):
    other = tmp_path / "other.json"
    other.write_text('{"hello": 1}')
    with pytest.raises(OctoPipeError, match=r"other\.json: neither"):
        resolve_costs(other, pp=2)
    with pytest.raises(OctoPipeError, match="directory"):
        resolve_costs(tmp_path, pp=2)
    with pytest.raises(OctoPipeError, match="pp 5"):
        resolve_costs(times, pp=5)
    with pytest.raises(OctoPipeError, match="micro_batch_tokens"):
        resolve_costs(times, pp=2, micro_batch_tokens=[1, 2])


def test_a_plan_given_as_a_model_says_where_plans_are_given(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"format": "octopipe.plan/2", "num_layers": 1}))
    with pytest.raises(OctoPipeError, match="this is a plan, not a model; give it as --plan"):
        resolve_costs(str(path), pp=2)

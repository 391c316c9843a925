"""The set-up: sizes that follow from each other, flags that count or are refused, numbers that move the right way."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from verbs import run, simulated

from octopipe.base.errors import OctoPipeError
from octopipe.costs.analytic.calibration import Rates
from octopipe.costs.analytic.footprint import megatron_activation_bytes
from octopipe.costs.analytic.table import setup_costs
from octopipe.costs.analytic.traffic import exchange_ms, pass_round_ms, ring_ms
from octopipe.costs.cluster.file import nodes_from_object
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup, default_reserve_gib, setup_from
from octopipe.costs.cluster.sizes import derived_sizes, micro_batches_of
from octopipe.costs.resolve import resolve_costs
from octopipe.models.zoo import preset
from octopipe.plans.file import load_plan
from octopipe.search.planner.splits import splits
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import simulate

GIB = 2.0**30
TIMES = {
    "pattern": "ETTL",
    "forward_ms": dict.fromkeys("ETL", 1),
    "backward_ms": dict.fromkeys("ETL", 1),
    "weight_ms": dict.fromkeys("ETL", 1),
}
PLAIN = {p: Rates(gemm=0.5, half=0.0, core=0.5, launch_ms=0.0, link=1.0) for p in ("bf16", "fp8")}


# -- the record -----------------------------------------------------------------------------------------------------


def test_what_the_gpus_leave_open_follows() -> None:
    assert derived_sizes(gpus=64, tp=4, cp=None, pp=8, dp=None)["dp"] == 2
    assert derived_sizes(gpus=64, tp=4, cp=2, pp=None, dp=2)["pp"] == 4
    assert derived_sizes(gpus=64, tp=None, cp=1, pp=8, dp=1)["tp"] == 8
    with pytest.raises(OctoPipeError, match="does not make 64 GPUs"):
        derived_sizes(gpus=64, tp=3, cp=1, pp=8, dp=None)
    with pytest.raises(OctoPipeError, match="octopipe plan"):
        derived_sizes(gpus=64, tp=4, cp=1, pp=None, dp=None)


def test_the_global_batch_makes_micro_batches() -> None:
    assert micro_batches_of(global_batch=128, micro_batch_size=2, dp=4, pp=2, given=None) == 16
    assert micro_batches_of(global_batch=None, micro_batch_size=2, dp=4, pp=3, given=None) == 6
    with pytest.raises(OctoPipeError, match="not a multiple"):
        micro_batches_of(global_batch=100, micro_batch_size=8, dp=4, pp=2, given=None)
    with pytest.raises(OctoPipeError, match="16 micro-batches, not 3"):
        micro_batches_of(global_batch=128, micro_batch_size=2, dp=4, pp=2, given=3)


def test_the_record_survives_its_json() -> None:
    setup = Setup(
        gpu=gpu("gb300"), tp=2, cp=2, ep=4, pp=2, dp=2, micro_batches=8, zero=3, precision="fp8", recompute="full",
        recompute_layers=3, reserve_gib=2.0, speeds=(1.0, 0.5), seq=8192,
    )  # fmt: skip
    assert setup_from(json.loads(json.dumps(setup.as_dict()))) == setup
    assert setup.as_dict()["gpus"] == 16 and setup.as_dict()["global_batch"] == 16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"zero": 4}, "zero is 4"),
        ({"precision": "fp4"}, "precision is 'fp4'"),
        ({"recompute": "some"}, "recompute is 'some'"),
        ({"gpu": gpu("a100"), "precision": "fp8"}, "a100 has no fp8"),
        ({"reserve_gib": 90.0}, "leaves nothing"),
        ({"reserve_gib": -1.0}, "reserve_gib is -1"),
        ({"cp": 3}, "cp 3"),
        ({"recompute_layers": 3}, "recompute_layers"),
        ({"gradients": "fp16"}, "gradients is 'fp16'"),
        ({"speeds": "1,0.5"}, "or a list of them, one per pipeline rank"),
    ],
)
def test_a_bad_set_up_is_one_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(OctoPipeError) as caught:
        Setup(**{"gpu": gpu("h100"), **change})
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_plan_never_gets_the_whole_card() -> None:
    costs = resolve_costs("llama3-8b", pp=2, gpu="h100")
    assert costs.capacity_bytes(0) == pytest.approx((80 - default_reserve_gib(80)) * GIB)
    assert resolve_costs("llama3-8b", pp=2, gpu="h100", reserve_gib=10).capacity_bytes(0) == pytest.approx(70 * GIB)
    # A capacity that is given outright is meant to be used.
    assert resolve_costs("llama3-8b", pp=2, memory_gib=40).capacity_bytes(0) == 40 * GIB
    assert resolve_costs("llama3-8b", pp=2, memory_gib=40, reserve_gib=1).capacity_bytes(0) == 39 * GIB


# -- Megatron's activation formulas ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("s", "b", "h", "a", "t"), [(2048, 1, 12288, 96, 8), (2048, 4, 6144, 64, 4), (512, 1, 256, 8, 2)]
)
def test_activations_are_korthikantis_to_the_byte(s: int, b: int, h: int, a: int, t: int) -> None:
    sbh = s * b * h
    shape = {"seq": s, "batch": b, "hidden": h, "heads": a}
    assert megatron_activation_bytes(**shape) == sbh * 34 + 5 * a * s * s * b
    assert megatron_activation_bytes(**shape, tp=t) == sbh * 10 + (sbh * 24 + 5 * a * s * s * b) / t
    assert megatron_activation_bytes(**shape, tp=t, sequence_parallel=True) == (sbh * 34 + 5 * a * s * s * b) / t
    assert megatron_activation_bytes(**shape, tp=t, recompute="selective") == sbh * (10 + 24 / t)
    both = megatron_activation_bytes(**shape, tp=t, sequence_parallel=True, recompute="selective")
    assert both == 34 * sbh / t
    assert megatron_activation_bytes(**shape, tp=t, recompute="full") == 2 * sbh


# -- every flag moves the numbers the right way ---------------------------------------------------------------------


def table(model: str = "llama3-8b", **changes: Any) -> Any:
    base = {"gpu": gpu("h100"), "seq": 4096}
    return setup_costs(preset(model), Setup(**{**base, **changes}), rates=PLAIN)


def test_zero_divides_what_it_says() -> None:
    parameters = preset("llama3-8b").parameters
    n = 8
    expected = {0: 18, 1: 6 + 12 / n, 2: 2 + 16 / n, 3: 16 / n}
    for zero, per_parameter in expected.items():
        found = table(dp=n, zero=zero)
        assert found.static_bytes.sum() == pytest.approx(per_parameter * parameters)
    updates = [table(dp=n, zero=zero).optimizer_ms.sum() for zero in (0, 1)]
    assert updates[0] == pytest.approx(n * updates[1])
    bf16 = table(dp=n, zero=0, gradients="bf16").static_bytes.sum()
    assert bf16 == pytest.approx(16 * parameters)


def test_zero_2_reduces_gradients_in_every_micro_batch_and_zero_1_once() -> None:
    """A gradient held in parts cannot be added to whole: its reduction comes back with every micro-batch."""
    plain = {z: table(dp=64, zero=z, seq=64) for z in (1, 2, 3)}
    extra = {z: plain[z].layer_ms[1:-1].sum() - plain[1].layer_ms[1:-1].sum() for z in (2, 3)}
    assert 0 < extra[2] < extra[3], "gathered weights come on top with ZeRO-3"
    assert plain[2].forward_ms == pytest.approx(plain[1].forward_ms)
    # Once a step: gradient and weights with ZeRO-1, weights alone with ZeRO-2.
    once = {z: plain[z].reduction.ms_per_byte * plain[z].gradient_bytes.sum() for z in (1, 2)}
    assert 0 < once[2] < once[1]
    workspace = plain[2].workspace_bytes - plain[1].workspace_bytes
    assert workspace[1:-1] == pytest.approx(plain[2].gradient_bytes[1:-1]), "a whole gradient before it is divided"


def test_zero_3_pays_for_its_gathers_only_where_compute_does_not_hide_them() -> None:
    few, many = ({z: table(dp=64, zero=z, seq=seq).layer_ms[1:-1].sum() for z in (1, 3)} for seq in (64, 16384))
    assert few[3] > 1.5 * few[1]
    assert many[1] < many[3] < 1.05 * many[1]


def test_data_parallelism_reduces_gradients_after_the_pipeline() -> None:
    steps = {}
    for dp in (1, 2, 8, 64):
        costs = resolve_costs("llama3-8b", pp=2, tp=1, dp=dp, gpu="h800", zero=0, seq=256)
        timeline = simulate(build_plan("1f1b", costs, 2, 4), costs)
        steps[dp] = timeline.step_ms
        reductions = [e for e in timeline.extras if e.name.startswith("reduce")]
        assert bool(reductions) == (dp > 1)
        if dp > 1:
            # At most a ring all-reduce of the gradients, which the last backward hides in part.
            gradient = float(costs.gradient_bytes.sum())
            link = 200e6 if 2 * dp <= 8 else 25e6
            ring = 2 * (dp - 1) / dp * gradient / (0.9 * link)
            assert 0 < sum(e.end_ms - e.start_ms for e in reductions) < 1.01 * ring
    assert steps[1] < steps[2] <= steps[8] <= steps[64]


def test_a_ring_and_an_exchange_follow_their_closed_forms() -> None:
    cluster = Setup(gpu=gpu("h100")).cluster()
    n, nbytes = 8, 1e9
    assert ring_ms(cluster, nbytes, n, share=1.0) == pytest.approx(3 * 0.003 + 7 / 8 * nbytes / 450e6)
    # One member per node: all of it leaves over one link.
    assert ring_ms(cluster, nbytes, n, 8, share=1.0) == pytest.approx(3 * 0.005 + 7 / 8 * nbytes / 50e6)
    # Two nodes of eight: half of the tensor enters each node over eight links.
    assert ring_ms(cluster, nbytes, 16, share=1.0) == pytest.approx(4 * 0.005 + 15 / 16 * nbytes / 450e6)
    inside = exchange_ms(cluster, nbytes, 8, copies=4, share=1.0)
    assert inside == pytest.approx(0.003 + 7 / 8 * nbytes / 450e6)
    # Two nodes, one copy: half of the tokens cross, over the GPU's own link.
    assert exchange_ms(cluster, nbytes, 16, copies=1, share=1.0) == pytest.approx(0.005 + 0.5 * nbytes / 50e6)
    # Many copies cross once: 1 - 2^-8 of the tokens visit the other node.
    many = exchange_ms(cluster, nbytes, 16, copies=8, share=1.0)
    assert many == pytest.approx(0.005 + max(15 / 16 / 450e6, (1 - 2**-8) / 8 / 50e6) * nbytes)
    assert pass_round_ms(cluster, nbytes, 4, 2, share=1.0) == pytest.approx(3 * (0.003 + nbytes / 450e6))


def test_context_parallelism_divides_tokens_and_work() -> None:
    one, four = table(seq=8192), table(seq=8192, cp=4)
    assert four.activation_bytes[1] == pytest.approx(one.activation_bytes[1] / 4)
    assert four.boundary_bytes[1] == pytest.approx(one.boundary_bytes[1] / 4)
    # Rings hide behind attention on the fast links: a block costs a quarter.
    assert four.forward_ms[1] == pytest.approx(one.forward_ms[1] / 4, rel=1e-3)
    assert four.gpus_per_rank == 4 and four.tokens_per_micro_batch == one.tokens_per_micro_batch
    assert four.static_bytes.sum() < one.static_bytes.sum()  # ZeRO-1 divides over context-parallel GPUs too
    # Across nodes the ring is longer than the attention it hides behind.
    assert table(seq=8192, cp=4, gpus_per_node=2).forward_ms[1] > four.forward_ms[1]


def test_expert_parallelism_divides_experts_only() -> None:
    model = "qwen3-30b-a3b"
    alone, spread = table(model, dp=8, zero=0), table(model, dp=8, ep=8, zero=0)
    experts = 48 * preset(model).layers[1].parts[1].expert_parameters  # type: ignore[attr-defined]
    assert alone.static_bytes.sum() - spread.static_bytes.sum() == pytest.approx(18 * experts * 7 / 8)
    assert spread.forward_ms[1] > alone.forward_ms[1]
    far = table(model, dp=8, ep=8, zero=0, gpus_per_node=2)
    assert far.forward_ms[1] > spread.forward_ms[1]
    with pytest.raises(OctoPipeError, match="ep 3 does not divide"):
        table(model, dp=9, ep=3)
    with pytest.raises(OctoPipeError, match="no experts"):
        table(dp=8, ep=8)


def test_micro_batch_size_scales_work_and_activations() -> None:
    one, four = table(micro_batch_size=1), table(micro_batch_size=4)
    assert four.activation_bytes.sum() == pytest.approx(4 * one.activation_bytes.sum())
    assert four.forward_ms[1] == pytest.approx(4 * one.forward_ms[1])
    assert four.tokens_per_micro_batch == 4 * 4096
    assert four.static_bytes.sum() == one.static_bytes.sum()


def test_larger_micro_batches_use_products_better() -> None:
    rates = [resolve_costs("qwen3-30b-a3b", pp=1, tp=1, dp=8, ep=8, seq=1024, micro_batch_size=n) for n in (1, 4)]
    assert rates[1].layer_ms.sum() < 4 * rates[0].layer_ms.sum()


def test_fp8_halves_products_and_keeps_the_rest() -> None:
    bf16, fp8 = table(), table(precision="fp8")
    assert fp8.weight_ms[1] == pytest.approx(bf16.weight_ms[1] / 2, rel=1e-3)  # 1979 is not quite 2 x 989
    assert fp8.weight_ms[-1] == pytest.approx(bf16.weight_ms[-1])  # the vocabulary projection stays in bf16
    assert fp8.activation_bytes[1] < bf16.activation_bytes[1]
    assert fp8.gradient_bytes.sum() == bf16.gradient_bytes.sum() / 2


def test_recomputation_trades_time_for_memory() -> None:
    none, selective, full = (table(recompute=r) for r in ("none", "selective", "full"))
    assert none.activation_bytes[1] > selective.activation_bytes[1] > full.activation_bytes[1]
    assert full.activation_bytes[1] == none.boundary_bytes[0]
    assert none.input_ms[1] < selective.input_ms[1] < full.input_ms[1]
    assert full.input_ms[1] == pytest.approx(none.input_ms[1] + none.forward_ms[1])
    half = table(recompute="full", recompute_layers=16)
    again = [i for i in range(1, 33) if half.activation_bytes[i] == full.activation_bytes[i]]
    assert len(again) == 16 and max(b - a for a, b in pairwise(again)) == 2


def test_sequence_parallelism_divides_the_stream() -> None:
    with_, without = (table(tp=4, sequence_parallel=on) for on in (True, False))
    hidden = preset("llama3-8b").hidden
    # Inputs of both norms and of both products, whole instead of a quarter.
    assert without.activation_bytes[1] - with_.activation_bytes[1] == pytest.approx(2 * 4096 * 4 * hidden * 3 / 4)


def test_a_vocabulary_over_all_ranks_leaves_no_wall_at_the_head() -> None:
    plain, spread = table(pp=4), table(pp=4, vocab_parallel=True)
    assert spread.weight_ms[-1] == pytest.approx(plain.weight_ms[-1] / 4)
    assert spread.weight_ms.sum() == pytest.approx(plain.weight_ms.sum())
    assert spread.static_bytes.sum() == pytest.approx(plain.static_bytes.sum())


# -- unequal nodes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_nodes_of_a_cluster_file_are_as_large_as_it_says(size: int) -> None:
    """Eight GPUs of a tensor-parallel group on several small nodes talk over the network."""
    nodes = [{"gpu": "h100", "count": 32 // size, "gpus_per_node": size}]
    told = resolve_costs("llama3-8b", pp=2, tp=8, dp=2, nodes=nodes)
    flags = resolve_costs("llama3-8b", pp=2, tp=8, dp=2, gpu="h100", gpus_per_node=size)
    assert told.layer_ms.tolist() == flags.layer_ms.tolist() and set(told.rank_slowdown) == {1.0}
    if size < 8:  # the ranks on small nodes are slower than those on large ones
        mixed = [{"gpu": "h100", "count": 2}, {"gpu": "h100", "count": 16 // size, "gpus_per_node": size}]
        fast, slow = resolve_costs("llama3-8b", pp=2, tp=8, dp=2, nodes=mixed).rank_slowdown
        assert fast < slow == pytest.approx(1.0)
    base = Setup(gpu=gpu("h100"), nodes=tuple(tuple(n.values()) for n in nodes))
    assert max(split.tp for split in splits(preset("llama3-8b"), base, gpus=32, global_batch=32)) == size


def test_32_gpus_of_two_kinds_in_one_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text('[[nodes]]\ngpu = "h100"\ncount = 2\n[[nodes]]\ngpu = "a100"\ncount = 2\n')
    numbers = simulated(capsys, "llama3-8b", "--cluster", str(path), "--pp", "4", "--tp", "2")
    assert numbers["setup"]["gpus"] == 32 and numbers["setup"]["dp"] == 4
    assert numbers["setup"]["nodes"][1] == {"gpu": "a100", "count": 2, "gpus_per_node": 8}
    busy = numbers["busy_ms"]
    assert busy[3] > 2 * busy[0]  # an A100 has a third of the peak
    costs = resolve_costs("llama3-8b", pp=4, tp=2, dp=4, nodes=path)
    assert costs.rank_slowdown[:2] == (1.0, 1.0) and 2 < costs.rank_slowdown[2] < 4
    # Each rank fills a node of its own; the A100's way out is the slower one.
    assert costs.network.link(0, 1).ms_per_byte == pytest.approx(1e3 / 50e9)
    assert costs.network.link(1, 2).ms_per_byte == pytest.approx(1e3 / 25e9)
    code, out, _ = run(capsys, "simulate", "llama3-8b", "--cluster", str(path), "--pp", "4", "--tp", "2")
    assert code == 0 and "16 x h100 + 16 x a100" in " ".join(out.split())


def test_the_line_about_a_set_up_counts_the_gpus_in_use(tmp_path: Path) -> None:
    nodes = [{"gpu": "h100", "count": 1}, {"gpu": "a100", "count": 2}, {"gpu": "l40s", "count": 1}]
    setup = resolve_costs("llama3-8b", pp=3, tp=2, dp=2, nodes=nodes).setup
    assert setup is not None and setup.words().startswith("8 x h100 + 4 x a100: tp 2, pp 3, dp 2")
    assert setup.peak_flops_per_ms == pytest.approx((8 * 989e9 + 4 * 312e9) / 12)


def test_scale_refuses_sequences_of_different_length(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("100\n200\n300\n400\n")
    sizes = ("--pp", "2", "--tp", "2", "--gpus", "4,8")
    code, _, err = run(capsys, "scale", "llama3-8b", *sizes, "--lengths", str(tmp_path / "lengths.txt"))
    assert code == 2 and "leave --lengths out" in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes = 3", "no nodes"),
        ("[[nodes]]\ngpu = 'h1000'", "h1000"),
        ("[[nodes]]\ngpu = 'h100'\ncount = 0", "count is 0"),
        ("[[nodes]]\ngpu = 'h100'\nkount = 2", "kount"),
        ("[[nodes", "not valid TOML"),
    ],
)
def test_a_bad_cluster_file_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(OctoPipeError) as caught:
        resolve_costs("llama3-8b", pp=2, nodes=path)
    assert words in str(caught.value) and "bad.toml" in str(caught.value) and "\n" not in str(caught.value)


# -- flags count or are refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ("--tp", "2"),
        ("--cp", "2"),
        ("--ep", "2"),
        ("--dp", "2"),
        ("--gpu", "h100"),
        ("--zero", "1"),
        ("--precision", "fp8"),
        ("--recompute", "full"),
        ("--micro-batch-size", "2"),
        ("--reserve-gib", "3"),
        ("--gpus-per-node", "4"),
        ("--gpus", "8"),
        ("--no-sequence-parallel",),
        ("--gradients", "bf16"),
    ],
)
def test_measured_times_refuse_what_they_already_hold(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps(TIMES))
    for verb in ("simulate", "compare"):
        code, out, err = run(capsys, verb, str(path), "--pp", "2", *flags)
        assert code == 2 and out == "" and flags[0].replace("--no-", "--") in err and err.count("\n") == 1


def test_a_length_is_refused_only_where_the_file_says_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps(TIMES))
    assert simulated(capsys, str(path), "--pp", "2", "--seq", "256")["tokens_per_gpu_per_second"] > 0
    path.write_text(json.dumps({**TIMES, "tokens": 128}))
    code, _, err = run(capsys, "simulate", str(path), "--pp", "2", "--seq", "256")
    assert code == 2 and "--seq 256" in err


def test_options_a_system_does_not_have_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "simulate", "llama3-8b", "--pp", "2", "--chunks", "99")
    assert code == 2 and "1f1b has no option chunks" in err


def test_every_output_says_its_set_up(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("llama3-8b", "--pp", "2", "--gpus", "8", "--gpu", "h100", "--global-batch", "32")
    numbers = simulated(capsys, *words)
    assert numbers["setup"]["gpu"] == "h100" and numbers["setup"]["global_batch"] == 32
    assert {"tokens_per_gpu_per_second", "mfu", "fits"} <= set(numbers) and 0.1 < numbers["mfu"] < 0.8
    for verb in ("simulate", "compare"):
        more = ("--systems", "1f1b") if verb == "compare" else ()
        _, out, _ = run(capsys, verb, *words, *more)
        assert "8 x h100: tp" in " ".join(out.split())


def test_simulate_and_compare_agree_on_the_backward(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("llama3-8b", "--pp", "4", "--tp", "1", "--micro-batches", "8")
    alone = simulated(capsys, *words)
    _, out, _ = run(capsys, "compare", *words, "--systems", "1f1b", "--json")
    row = json.loads(out)["results"][0]
    assert row["step_ms"] == alone["step_ms"] and row["splits_backward"] == alone["split_backward"] is False
    _, shown, _ = run(capsys, "compare", *words, "--systems", "1f1b,zb-h1")
    assert "fused" in shown and "split" in shown


def test_a_plan_file_needs_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    words = ("llama3-8b", "--pp", "2", "--gpus", "8", "--gpu", "h100", "--precision", "fp8", "--micro-batch-size", "2")
    made = simulated(capsys, *words, "-o", path)
    again = simulated(capsys, "--plan", path)
    assert again["step_ms"] == made["step_ms"] and again["setup"] == made["setup"]
    assert load_plan(path).extra["setup"]["precision"] == "fp8"
    other = simulated(capsys, "--plan", path, "--precision", "bf16")
    assert other["step_ms"] > made["step_ms"]


def test_what_does_not_fit_has_its_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("llama3-70b", "--pp", "2", "--tp", "1", "--gpu", "h100")
    assert run(capsys, "simulate", *words)[0] == 3
    assert run(capsys, "compare", *words, "--systems", "1f1b")[0] == 3
    assert run(capsys, "simulate", "llama3-8b", "--pp", "4", "--tp", "1", "--gpu", "h100")[0] == 0


def test_auto_recomputes_no_more_than_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("llama3-8b", "--pp", "2", "--tp", "1", "--gpu", "h100", "--micro-batches", "8", "--seq", "8192")
    none = simulated(capsys, *words)
    auto = simulated(capsys, *words, "--recompute", "auto")
    full = simulated(capsys, *words, "--recompute", "full")
    assert not none["fits"] and auto["fits"]
    assert none["step_ms"] < auto["step_ms"] <= full["step_ms"]


def test_compare_recomputes_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("compare", "llama3-8b", "--pp", "2", "--tp", "1", "--gpu", "h100", "--micro-batches", "8", "--seq", "8192")
    code, out, _ = run(capsys, *words, "--systems", "1f1b,gpipe", "--json")
    assert code == 3 and not any(row["fits"] for row in json.loads(out)["results"])
    code, out, err = run(capsys, *words, "--systems", "1f1b,gpipe", "--recompute", "auto", "--json")
    assert code == 0 and {row["system"]: row["fits"] for row in json.loads(out)["results"]}["1f1b"], err


def test_profile_and_train_have_one_word_for_layers(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("profile", "train"):
        code, out, _ = run(capsys, verb, "--help")
        assert code == 0 and "--layers" in out and "--num-layers" not in out


def test_a_byte_over_the_limit_does_not_fit() -> None:
    """One byte per layer: no slack may hide a layer."""
    costs = resolve_costs("llama3-8b", pp=2, tp=1)
    ones = {name: [1.0] * 34 for name in ("activation_bytes",)}
    none = {n: [0.0] * 34 for n in ("static_bytes", "stash_bytes", "boundary_bytes", "workspace_bytes")}
    costs = costs.replace(**ones, **none)
    plan = build_plan("1f1b", costs, 2, 1)
    assert max(simulate(plan, costs).peak_bytes) == 17.0
    assert simulate(plan, costs.replace(rank_memory_bytes=(17.0,))).fits
    assert not simulate(plan, costs.replace(rank_memory_bytes=(16.5,))).fits


def test_gpus_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "gpus", "--json")
    names = {g["name"] for g in json.loads(out)["gpus"]}
    assert code == 0 and {"h100", "b200", "gb200", "gb300"} <= names
    assert "gb300" in run(capsys, "gpus")[1]


def test_nodes_of_two_vendors_are_refused_because_no_collective_library_connects_them() -> None:
    with pytest.raises(OctoPipeError, match="connects h200 and mi300x"):
        nodes_from_object({"nodes": [{"gpu": "h200"}, {"gpu": "mi300x"}]})
    assert len(nodes_from_object({"nodes": [{"gpu": "mi300x"}, {"gpu": "mi355x"}]})) == 2

"""Plans and timelines as CSV, for PyTorch and for Megatron, each against the other's own loader or rules."""

from __future__ import annotations

import csv
import itertools
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from export_cases import small_case, small_costs
from plans import from_csv

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.table import CostTable
from octopipe.plans.file import save_plan
from octopipe.plans.plan import Op, Plan, Stage, parse_slots
from octopipe.plans.readers.megatron_text import read_megatron
from octopipe.plans.readers.torch_csv import read_torch_csv
from octopipe.search.foreign_plan import megatron_plan, torch_plan
from octopipe.search.systems import build_plan
from octopipe.views.export.megatron import megatron_arguments, megatron_layout
from octopipe.views.export.pytorch import actions_of_version, pytorch_csv, pytorch_csv_with_communication
from octopipe.views.export.table import timeline_csv

# -- CSV, PyTorch, Megatron ----------------------------------------------------------------------------


def test_csv_holds_every_op_and_transfer_exactly() -> None:
    plan, timeline = small_case("interleaved")
    rows = list(csv.DictReader(timeline_csv(timeline, plan).splitlines()))
    ops = [r for r in rows if r["what"] == "compute"]
    assert [float(r["start_ms"]) for r in ops] == timeline.spans.start_ms.tolist()
    assert [float(r["end_ms"]) for r in ops] == timeline.spans.end_ms.tolist()
    assert [Op.parse(r["op"]) for r in ops] == [op for order in plan.orders for op in order]
    moves = [r for r in rows if r["what"] == "transfer"]
    assert [int(r["to_rank"]) for r in moves] == timeline.transfers.destination.tolist()
    stage = plan.stages[int(ops[-1]["stage"])]
    assert (int(ops[-1]["first_layer"]), int(ops[-1]["stop_layer"])) == (stage.first, stage.stop)


@pytest.mark.parametrize("system", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_torch_loads_the_schedule(system: str) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    plan, _ = small_case(system)
    rows = list(csv.reader(pytorch_csv(plan).splitlines()))
    actions = {rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    mapping = schedules._validate_schedule(actions, plan.num_ranks, len(plan.stages), plan.num_micro_batches)
    assert mapping == {i: s.rank for i, s in enumerate(plan.stages)}
    lowered = schedules._add_send_recv(actions, lambda s: mapping[s], len(plan.stages))
    # PyTorch leaves the very same compute order, and sends one tensor per transfer of ours.
    for rank in actions:
        compute = [str(a) for a in lowered[rank] if "SEND" not in str(a) and "RECV" not in str(a)]
        assert compute == [str(a) for a in actions[rank]]
    sends = sum("SEND" in str(a) for row in lowered.values() for a in row)
    assert sends == small_case(system)[1].transfers.source.size


def test_pytorch_text_leaves_recomputation_to_the_modules() -> None:
    plan = Plan(
        num_layers=1,
        num_ranks=1,
        num_micro_batches=1,
        stages=(Stage(first=0, stop=1, rank=0, recompute=True),),
        orders=((Op(0, "F", 0), Op(0, "R", 0), Op(0, "B", 0)),),
    ).check()
    assert pytorch_csv(plan) == "0F0,0B0\n"
    assert from_csv(pytorch_csv(plan)) == ((Op(0, "F", 0), Op(0, "B", 0)),)


def test_pytorch_text_refuses_two_routes() -> None:
    costs = small_costs()
    with pytest.raises(OctoPipeError, match="routes"):
        pytorch_csv(build_plan("chimera", costs, 4, 4))


def _expand(layout: str) -> list[str]:
    """Megatron's layout grammar: (..)*n and x*n repeat, commas are nothing, | ends a stage."""
    text = layout.replace(",", "")
    while match := re.search(r"\(([^()]*)\)\*(\d+)|([^|()*])\*(\d+)", text):
        body, times = (match[1], match[2]) if match[1] is not None else (match[3], match[4])
        text = text[: match.start()] + body * int(times) + text[match.end() :]
    return text.split("|")


def _partitioned(symbols: str, sizes: list[int], ranks: int) -> Plan:
    edges = [0, *itertools.accumulate(sizes)]
    stages = tuple(Stage(first=a, stop=b, rank=i % ranks) for i, (a, b) in enumerate(itertools.pairwise(edges)))
    orders = tuple(
        tuple(Op(s, "F", 0) for s in range(r, len(stages), ranks))
        + tuple(Op(s, "B", 0) for s in reversed(range(r, len(stages), ranks)))
        for r in range(ranks)
    )
    return Plan(num_layers=len(symbols), num_ranks=ranks, num_micro_batches=1, stages=stages, orders=orders).check()


def test_megatron_layout_is_the_documented_one_for_deepseek_v3() -> None:
    symbols = "E" + "T" * 3 + "X" * 58 + "P" + "L"
    plan = _partitioned(symbols, [4] + [2] * 29 + [1, 1], 16)
    text = megatron_arguments(plan, symbols)
    assert "--pipeline-model-parallel-size 16" in text
    layout = re.search(r'layout "(.*)"', text)
    assert layout is not None and _expand(layout[1]) == _expand("Et*3|(tt|)*29,m|L")


def test_megatron_gets_a_hybrid_pattern_for_hybrids() -> None:
    symbols = "EM-M*#L"
    text = megatron_arguments(_partitioned(symbols, [3, 4], 2), symbols)
    assert text.endswith('--hybrid-layer-pattern "M-|M*E"')


def test_megatron_refuses_placements_it_cannot_say() -> None:
    costs = small_costs()
    with pytest.raises(OctoPipeError, match="embedding and loss are both on rank 0"):
        megatron_arguments(build_plan("zb-v", costs, 4, 8), costs.symbols)


def _placed(sizes: list[int], ranks: list[int]) -> Plan:
    """One micro-batch through stages of these sizes on these ranks."""
    edges = [0, *itertools.accumulate(sizes)]
    pairs = enumerate(zip(itertools.pairwise(edges), ranks))
    stages = tuple(Stage(first=a, stop=b, rank=r) for _, ((a, b), r) in pairs)
    orders = tuple(
        tuple(Op(s, "F", 0) for s, at in enumerate(ranks) if at == r)
        + tuple(Op(s, "B", 0) for s, at in reversed(list(enumerate(ranks))) if at == r)
        for r in range(max(ranks) + 1)
    )
    return Plan(
        num_layers=edges[-1], num_ranks=max(ranks) + 1, num_micro_batches=1, stages=stages, orders=orders
    ).check()


def test_megatron_carries_other_placements_with_empty_stages_and_renamed_ranks() -> None:
    found = megatron_layout(_placed([2, 1, 1, 1, 2], [0, 2, 1, 2, 1]), "ETTTTTL")
    assert found.ranks == (0, 2, 1)
    assert found.text.stages == ("Et", "t", "t", "", "t", "tL")
    assert any("renamed" in note for note in found.notes) and any("empty" in note for note in found.notes)
    # Read back, the stages lie where the plan had them.
    back = megatron_plan(found.text, pp=3, num_micro_batches=3).plan
    assert [found.ranks[s.rank] for s in back.stages] == [0, 2, 1, 2, 1]
    assert back.partition == (2, 1, 1, 1, 2)


def test_megatron_joins_neighbours_on_one_rank() -> None:
    found = megatron_layout(_placed([2, 1, 2], [0, 0, 1]), "EM-*L")
    assert found.text.text() == "M-|*"


def test_megatron_pattern_has_delta_nets_latent_attention_and_predictions() -> None:
    assert megatron_layout(_placed([3, 3], [0, 1]), "EDM@#L").text.text() == "GM|+E"
    with pytest.raises(OctoPipeError, match="not both"):
        megatron_layout(_placed([3, 3], [0, 1]), "E*M@#L")
    plan = megatron_plan(read_megatron("M-|*E/M*/M*"), pp=2, num_micro_batches=2).plan
    assert megatron_layout(plan, "EM-*#PPL").text.text() == "M-|*E/M*/M*"


def test_megatron_refuses_predictions_where_megatron_does() -> None:
    with pytest.raises(OctoPipeError, match="last stage of its rank"):
        megatron_layout(_placed([2, 1, 1, 1], [0, 1, 0, 1]), "ETTPL")


def test_torch_csv_renames_micro_batches_the_last_stage_runs_out_of_order(tmp_path: Path, capsys) -> None:
    order = (0, 2, 1)
    stages = (Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=1))
    orders = (
        tuple(Op(0, "F", m) for m in order) + tuple(Op(0, "B", m) for m in order),
        tuple(op for m in order for op in (Op(1, "F", m), Op(1, "B", m))),
    )
    plan = Plan(num_layers=2, num_ranks=2, num_micro_batches=3, stages=stages, orders=orders).check()
    assert pytorch_csv(plan).splitlines()[1] == "1F0,1B0,1F1,1B1,1F2,1B2"
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    assert main(["export", str(path), "--to", "torch-csv"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0].startswith("0F0,0F1,0F2")
    assert "renamed" in captured.err


@pytest.mark.parametrize("system", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_torch_csv_with_communication_is_what_pytorchs_own_simulator_accepts(system: str) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    plan, _ = small_case(system)
    text = pytorch_csv_with_communication(plan, version=version("torch"))
    rows = [[schedules._Action.from_str(c) for c in row] for row in csv.reader(text.splitlines())]
    # Its simulator has no waits: they come after a receive that has been posted, which is checked below.
    unmoving = ("SHARD", "REDUCE", "WAIT")
    moves = {rank: [a for a in row if not any(u in str(a) for u in unmoving)] for rank, row in enumerate(rows)}
    home = {i: s.rank for i, s in enumerate(plan.stages)}
    # Its simulator raises where an action waits for ever.
    schedules._simulate_comms_compute(moves, lambda s: home[s], len(plan.stages))
    for rank, row in enumerate(rows):
        words = [str(a) for a in row]
        for s in plan.stages_of_rank(rank):
            assert words.count(f"{s}REDUCE_GRAD") == ("REDUCE_GRAD" in actions_of_version(version("torch")))
            assert words.count(f"{s}UNSHARD") == words.count(f"{s}RESHARD") >= 1
    assert read_torch_csv(text).rows == tuple(tuple(map(str, order)) for order in plan.orders)


@pytest.mark.parametrize("system", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_torch_csv_of_the_newest_version_waits_once_for_every_send_and_reduction(system: str) -> None:
    plan, _ = small_case(system)
    for row in csv.reader(pytorch_csv_with_communication(plan).splitlines()):
        at = {word: k for k, word in enumerate(row)}
        assert len(at) == len(set(row))
        sends = [word for word in row if re.fullmatch(r"\d+SEND_[FB]\d+", word)]
        assert sends or plan.num_ranks == 1
        assert sum("WAIT_SEND" in word for word in row) == len(sends)
        for word in sends:
            stage, kind, micro_batch = re.fullmatch(r"(\d+)SEND_([FB])(\d+)", word).groups()
            wait = at[f"{stage}WAIT_SEND_{kind}{micro_batch}"]
            assert wait > at[word]
            if kind == "F":  # the gradient proves that the output was received
                assert wait > min(at.get(f"{stage}{k}{micro_batch}", len(row)) for k in "BI")
        reductions = [word for word in row if "REDUCE_GRAD" in word]
        for start, wait in zip(reductions[::2], reductions[1::2], strict=True):
            assert wait == start.replace("REDUCE", "WAIT_REDUCE")


def test_torch_csv_is_written_for_the_version_that_is_asked_for(tmp_path: Path, capsys) -> None:
    plan, _ = small_case("1f1b")
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    found = {}
    for number in ("2.9", "2.14.1", "2.15.0+cu130"):
        assert main(["export", str(path), "--to", "torch-csv", "--with-communication", "--torch", number]) == 0
        captured = capsys.readouterr()
        assert f"written for PyTorch {number}" in captured.err
        found[number] = {word.strip("0123456789") for word in captured.out.replace("\n", ",").split(",") if word}
    assert "REDUCE_GRAD" not in found["2.9"]
    assert found["2.14.1"] - found["2.9"] == {"REDUCE_GRAD"}
    assert found["2.15.0+cu130"] - found["2.14.1"] == {"WAIT_REDUCE_GRAD", "WAIT_SEND_F", "WAIT_SEND_B"}
    for wrong in ("2.8", "new"):
        assert main(["export", str(path), "--to", "torch-csv", "--with-communication", "--torch", wrong]) == 2
        assert "not a version of PyTorch" in capsys.readouterr().err
    assert main(["export", str(path), "--to", "svg", "--torch", "2.13"]) == 2


def test_pairs_travel_through_pytorchs_csv() -> None:
    stages = (Stage(first=0, stop=1, rank=0), Stage(first=1, stop=2, rank=1))
    orders, pairs = parse_slots([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1+1B0", "1B1"]])
    plan = Plan(num_layers=2, num_ranks=2, num_micro_batches=2, stages=stages, orders=orders, pairs=pairs).check()
    text = pytorch_csv(plan)
    assert text.splitlines()[1] == "1F0,(1F1;1B0)OVERLAP_F_B,1B1"
    assert torch_plan(read_torch_csv(text)).plan.pairs == plan.pairs
    rows = [row.split(",") for row in pytorch_csv_with_communication(plan).splitlines()]
    at = rows[1].index("(1F1;1B0)OVERLAP_F_B")
    assert rows[1].index("1RECV_F1") < at < rows[1].index("1SEND_B0")
    assert torch_plan(read_torch_csv(pytorch_csv_with_communication(plan))).plan.pairs == plan.pairs
    layout = megatron_layout(plan, "EL")
    assert any("pairs are left out" in note for note in layout.notes)


@pytest.mark.parametrize(
    ("numbers", "flags", "note"),
    [
        ({}, "", ""),
        ({"recompute": "full"}, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", ""),
        # Five layers spread over four stages of eight: one of the stages holds two of them.
        (
            {"recompute": "full", "recompute_layers": 5},
            "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
            "the plan recomputes 5 layers; Megatron-LM recomputes the first 2 of every stage, 8 in all",
        ),
        ({"recompute": "selective"}, "--recompute-granularity selective --recompute-modules layernorm", "mla_up_proj"),
    ],
)
def test_what_prices_recompute_is_exported_and_told(
    numbers: dict, flags: str, note: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A plan made with --recompute says so to every runtime that it is exported to."""
    path = str(tmp_path / "plan.json")
    given = [word for name, value in numbers.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["simulate", "llama3-8b", "--pp", "4", "--tp", "2", "--micro-batches", "8", *given, "-o", path]) == 0
    capsys.readouterr()
    assert main(["export", path, "--to", "megatron"]) == 0
    found = capsys.readouterr()
    assert found.out.strip().endswith(flags or '"') and ("recompute" in found.out) == bool(flags)
    assert note in " ".join(found.err.split())
    for target in ("torch-csv", "torchtitan"):
        assert main(["export", path, "--to", target, "-o", str(tmp_path / "out.csv")]) == 0
        words = " ".join(capsys.readouterr().err.split())
        assert (f"priced with --recompute {numbers.get('recompute')}" in words) == bool(numbers), (target, words)


def test_ops_that_recompute_become_flags_of_megatron() -> None:
    """R of whole stages: of all, as Megatron does layer by layer; of one, as many in every stage."""
    costs = CostTable.uniform(num_layers=10)
    plan = build_plan("1f1b", costs, 2, 2)
    symbols = "E" + "T" * 8 + "L"
    for again, flags in (((0, 1), "uniform --recompute-num-layers 1"), ((0,), "block --recompute-num-layers 4")):
        stages = tuple(
            Stage(first=s.first, stop=s.stop, rank=s.rank, recompute=k in again) for k, s in enumerate(plan.stages)
        )
        layout = megatron_layout(
            Plan(num_layers=10, num_ranks=2, num_micro_batches=2, stages=stages, orders=plan.orders), symbols
        )
        assert layout.recompute.endswith(flags)
        assert any("4 layers" in note and "8 in all" in note for note in layout.notes) == (again == (0,))

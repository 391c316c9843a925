"""What other tools run, read as plans: published Megatron texts, its orders, PyTorch's schedule CSVs, the verb."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.plans.file import load_plan
from octopipe.plans.readers.megatron_text import read_hybrid, read_layout, read_megatron
from octopipe.plans.readers.torch_csv import read_torch_csv
from octopipe.search.foreign_plan import megatron_order, megatron_plan, torch_plan
from octopipe.search.systems import build_plan
from octopipe.search.systems.interleaved import interleaved_plan

PUBLISHED = [
    # text, stages, decoder layers, prediction depths: from Megatron's documents and public recipes
    ("Et*3|(tt|)*29,m|L", 32, 61, 1),
    ("Ettt|(tt|)*29,m|L", 32, 61, 1),
    ("Et|(tt|)*30mL", 32, 61, 1),
    ("Et|(tt|)*30L", 32, 61, 0),
    ("Et*2|(tt|)*22t|(tt|)*7mL", 32, 61, 1),
    ("Et|t|(tt|)*29tL", 32, 61, 0),
    ("E(tt|)*3mL", 4, 6, 1),
    ("Ett|(tt|)*6L", 8, 14, 0),
    ("Et*16|t*16|t*16|t*12,m,L", 4, 60, 1),
    ("Et*6|t*6|t*6|t*5|t*5|t*5|t*5|t*5L", 8, 43, 0),
    ("E,t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4,L", 8, 32, 0),
    ("Et|(t|)*30tL", 32, 32, 0),
    ("Et*1|t*1|" + "t*2|" * 29 + "t*1,L", 32, 61, 0),
    ("M-M-M-M*-M-M-M-M*-M-M-M-M*", 1, 26, 0),
    ("MEME*MEME*MEME*MEME*MEME", 1, 24, 0),
    ("MEME", 1, 4, 0),
    ("M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", 1, 56, 0),
    ("MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*"
     "EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 1, 108, 0),
    ("*-*-|*-*-", 2, 8, 0),
    ("M-M-|M-M*-/MM/MM", 2, 9, 2),
    ("M*M*/MM/MM", 1, 4, 2),
]  # fmt: skip


@pytest.mark.parametrize(("text", "stages", "layers", "depths"), PUBLISHED)
def test_published_texts_are_read_and_printed_back(text: str, stages: int, layers: int, depths: int) -> None:
    found = read_megatron(text)
    letters = "".join(found.stages)
    assert len(found.stages) == stages
    assert found.depths == depths
    assert (letters.count("t") if found.kind == "layout" else len(letters)) == layers
    printed = found.text()
    assert read_megatron(printed) == found
    assert read_megatron(printed).text() == printed
    if found.kind == "hybrid":
        assert printed == text


@pytest.mark.parametrize("text", ["Et*3|(tt|)*29,m|L", "Et|(tt|)*30,mL", "Et|(t|)*30,tL", "E||t*4|L", "Et|||L"])
def test_the_usual_spelling_is_printed_letter_by_letter(text: str) -> None:
    assert read_layout(text).text() == text


def test_texts_mean_what_megatrons_own_reader_says() -> None:
    layout = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    names = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
    for text, *_ in PUBLISHED:
        if read_megatron(text).kind == "layout":
            rows = layout.PipelineParallelLayerLayout.parse_str_to_list(text)
            assert [[x.name for x in row] for row in rows] == [[names[c] for c in s] for s in read_layout(text).stages]


@pytest.mark.parametrize(
    ("text", "place", "why"),
    [
        ("t*3|L", 1, "begins with E"),
        ("Et|tt", 5, "ends with L"),
        ("Et|(tt|*2,L", 4, "never closed"),
        ("Et|tt)*2|L", 6, "no ( before"),
        ("Et|((tt|)*2)*2L", 5, "inside parentheses"),
        ("Et|(tt|)L", 8, "without *n"),
        ("Et*|L", 3, "without a number"),
        ("E*2t|L", 1, "second embedding"),
        ("Ett|m|tL", 7, "after multi-token prediction"),
        ("Em|mL", 4, "two stages"),
        ("Et|x|L", 4, "no such letter"),
        ("Et||*99999L", 6, "too often"),
    ],
)
def test_layout_errors_name_the_character(text: str, place: int, why: str) -> None:
    with pytest.raises(OctoPipeError) as caught:
        read_layout(text)
    assert str(caught.value).startswith(f"character {place} of")
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("text", "place", "why"),
    [
        ("M-X", 3, "no such layer"),
        ("M*|+", 4, "one kind"),
        ("M|M/M|", 6, "bar behind /"),
        ("M/M*/MM", 6, "must be equal"),
        ("|/M", 1, "no layers"),
    ],
)
def test_hybrid_errors_name_the_character(text: str, place: int, why: str) -> None:
    with pytest.raises(OctoPipeError) as caught:
        read_hybrid(text)
    assert str(caught.value).startswith(f"character {place} of")
    assert why in str(caught.value)


# -- Megatron's orders ---------------------------------------------------------------------------------


def test_megatrons_orders_are_the_published_ones_where_groups_are_pp() -> None:
    costs = CostTable.uniform(num_layers=8)
    plain = build_plan("1f1b", costs, 4, 8)
    assert tuple(megatron_order(r, 4, 1, 8, 4) for r in range(4)) == plain.orders
    assert tuple(megatron_order(r, 4, 2, 8, 4) for r in range(4)) == interleaved_plan(costs, 4, 8, 2).orders


def test_larger_and_uneven_groups_follow_megatrons_table() -> None:
    # Megatron's own example: PP 2, groups of 3, 5 micro-batches, 2 chunks.
    forward = [(op.micro_batch, op.stage // 2) for op in megatron_order(0, 2, 2, 5, 3) if op.kind == "F"]
    assert [m for m, _ in forward] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [c for _, c in forward] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


def test_empty_stages_are_left_out_and_said() -> None:
    found = megatron_plan(read_megatron("E|tttt||ttL"), pp=2, num_micro_batches=4)
    assert found.plan.partition == (1, 4, 3)
    assert [s.rank for s in found.plan.stages] == [0, 1, 1]
    assert "stages 2 hold no layers" in found.notes[0]


def test_hybrids_without_bars_are_split_evenly_as_megatron_does() -> None:
    found = megatron_plan(read_megatron("M-M*M-M*"), pp=2, num_micro_batches=4)
    assert found.plan.partition == (5, 5)
    with pytest.raises(OctoPipeError, match="evenly"):
        megatron_plan(read_megatron("M-M*M"), pp=2, num_micro_batches=4)


@pytest.mark.parametrize(
    ("text", "more", "why"),
    [
        ("Et|t|tL", {}, "3 stages on 2 ranks"),
        ("Et|t|t|L", {"vp": 4}, "--vp 4"),
        ("Et|t|t|L", {"schedule": "1f1b"}, "interleaved"),
        ("Et|tL", {"schedule": "interleaved"}, "1f1b"),
        ("Et|t|t|L", {"group_size": 1}, "groups of 1"),
        ("Et|t|t|L", {"num_micro_batches": 5}, "last group of 1"),
        ("Et|m|t*0|L", {}, "multi-token"),
    ],
)
def test_what_megatron_would_refuse_is_refused(text: str, more: dict, why: str) -> None:
    with pytest.raises(OctoPipeError, match=why):
        megatron_plan(read_megatron(text), **{"pp": 2, "num_micro_batches": 4} | more)


def test_the_model_must_have_the_texts_layers() -> None:
    costs = resolve_costs("nemotron-h-8b", pp=4)
    pattern = costs.symbols[1:-1]
    cuts = "|".join((pattern[:13], pattern[13:26], pattern[26:39], pattern[39:]))
    plan = megatron_plan(read_megatron(cuts), pp=4, num_micro_batches=8, costs=costs).plan
    assert (plan.model, plan.num_layers) == ("nemotron-h-8b", costs.num_layers)
    wrong = cuts.replace("*", "-", 1)
    with pytest.raises(OctoPipeError, match=r"layer 8 is - in the text and \* in nemotron-h-8b"):
        megatron_plan(read_megatron(wrong), pp=4, num_micro_batches=8, costs=costs)
    with pytest.raises(OctoPipeError, match="53 layers"):
        megatron_plan(read_megatron(cuts[1:]), pp=4, num_micro_batches=8, costs=costs)


# -- PyTorch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_schedules_pytorch_writes_itself_become_plans(name: str, form: str, tmp_path: Path) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    from unittest.mock import MagicMock

    v_shaped = name in ("ZBVZeroBubble", "DualPipeV")
    stages = []
    for k in range(2):
        stage = MagicMock(stage_index=k, num_stages=8, group_size=4, group_rank=0, is_first=k == 0, is_last=False)
        stages.append(stage)
    made = getattr(schedules, f"Schedule{name}")(stages, n_microbatches=8, loss_fn=lambda a, b: a)
    path = tmp_path / "schedule.csv"
    made._dump_csv(str(path), format=form)
    found = torch_plan(read_torch_csv(path.read_text(), "schedule.csv"))
    plan = found.plan
    assert (plan.num_ranks, plan.num_micro_batches, len(plan.stages)) == (4, 8, 8)
    assert [s.rank for s in plan.stages] == ([0, 1, 2, 3, 3, 2, 1, 0] if v_shaped else [0, 1, 2, 3] * 2)
    assert any("derived again" in n for n in found.notes) == (form == "compute_comms")
    assert any("OVERLAP_F_B" in n for n in found.notes) == (name == "DualPipeV")


def test_csv_mistakes_name_their_cell() -> None:
    with pytest.raises(OctoPipeError, match="line 2, cell 2: '1X0'"):
        read_torch_csv("0F0,0B0\n1F0,1X0\n")
    with pytest.raises(OctoPipeError, match="no ops"):
        read_torch_csv(",,\n,,\n")
    with pytest.raises(OctoPipeError, match="stage 0 runs on ranks 0 and 1"):
        torch_plan(read_torch_csv("0F0,0B0\n0F1,0B1\n"))
    with pytest.raises(OctoPipeError, match="rank 0 has no backward"):
        torch_plan(read_torch_csv("0F0\n1F0,1B0\n"))


def test_a_csv_that_mixes_up_losses_is_pointed_out() -> None:
    found = torch_plan(read_torch_csv("0F1,0F0,0B1,0B0\n1F1,1B1,1F0,1B0\n"))
    assert any("silently assigns their losses" in note for note in found.notes)


# -- the verb ------------------------------------------------------------------------------------------


def test_import_reads_simulates_and_exports_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "plan.json")
    assert main(["import", "Et*3|(tt|)*29,m|L", "--pp", "16", "--model", "deepseek-v3", "-o", path, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["layers"], said["pp"], said["system"]) == (64, 16, "megatron interleaved")
    assert main(["simulate", "deepseek-v3", "--plan", path, "--json"]) in (0, 3)  # 3: does not fit the default GPU
    assert json.loads(capsys.readouterr().out)["step_ms"] > 0
    assert main(["export", path, "--to", "megatron"]) == 0
    assert '"Et*3|(tt|)*29,m|L"' in capsys.readouterr().out
    table = str(tmp_path / "schedule.csv")
    assert main(["export", path, "--to", "torch-csv", "--with-communication", "-o", table]) == 0
    sizes = ",".join(map(str, load_plan(path).partition))
    again = str(tmp_path / "again.json")
    assert main(["import", table, "--model", "deepseek-v3", "--partition", sizes, "-o", again]) == 0
    assert load_plan(again).orders == load_plan(path).orders
    assert load_plan(again).stages == load_plan(path).stages


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["Et|tL"], "needs --pp"),
        (["Et|tL", "--pp", "2", "--partition", "1,2"], "leave it out"),
        (["Et|qL", "--pp", "2"], "no such file"),
        (["nothing.csv"], "no such file"),
        (["Et|tL", "--pp", "2", "--gpu", "h200"], "give --model"),
        (["Et|tL", "--pp", "2", "--json"], "give -o"),
    ],
)
def test_import_mistakes_are_one_line(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", *words]) == 2
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1

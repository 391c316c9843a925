"""The reproduction of the paper: verdicts, readings, what is kept and deterministic, and that nothing is left out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.cli.verbs.reproduce import NAMES
from octopipe.costs.measured import AUTHORS as MEASURED_TIMES
from octopipe.costs.table import CostTable
from octopipe.search.systems import build_plan
from octopipe.simulation.simulator import simulate
from octopipe.views.reproduce.bench import Bench, Options, costs_key, find_measured, find_profiles
from octopipe.views.reproduce.markdown import grouped, part_page, whole_page
from octopipe.views.reproduce.models import AUTHORS, TABLE, model_costs, recomputed
from octopipe.views.reproduce.overlap import overlapping_more, share_of
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.parts import parts
from octopipe.views.reproduce.parts.deadlock import naive_deadlocks
from octopipe.views.reproduce.parts.large_scale import slowest_ms
from octopipe.views.reproduce.parts.search import LAYERS, rank_test, stretched
from octopipe.views.reproduce.reading import (
    READING,
    Reading,
    baseline,
    in_place,
    interleaved_by_chunks,
    read,
    transfer_ms,
    whole_plan,
)
from octopipe.views.reproduce.row import Result, Row, Values
from octopipe.views.reproduce.row import baseline as plain
from octopipe.views.reproduce.runner import chosen, run_parts
from octopipe.views.reproduce.store import ResultStore, read_kept, write_kept

LABELS = {
    "fig:pipeline_phases", "tab:existing_methods", "fig:combined_1f1b_heter_bubble", "fig:3_co_opt",
    "fig:3_deadlock_bubble", "fig:overview", "fig:5_sim", "fig:pipeline_tuner", "alg:tuning", "fig:e2etgs",
    "tab:model_config", "fig:realtraces", "fig:across_pp_nemotron_47b_mb_2xPP", "tab:comm_nemotron",
    "fig:ablation_study", "fig:sim_thro_mem", "tab:detail_search_overhead", "fig:convergency_nemotronh",
    "tab:scaling_res", "tab:throughput_results", "tab:recompute_throughput",
}  # fmt: skip


def tiny_model(layers: int = 8) -> CostTable:
    """A heterogeneous model with a heavy head."""
    times = np.array([1.0 + 0.5 * (k % 3) for k in range(layers)])
    times[-1] = 5.0
    return CostTable(
        model="tiny", symbols="E" + "M-*" * ((layers - 2) // 3) + "M" * ((layers - 2) % 3) + "L", forward_ms=times,
        input_ms=times, weight_ms=times / 2, activation_bytes=np.ones(layers), boundary_bytes=np.full(layers, 0.5),
    )  # fmt: skip


# -- nothing is left out -------------------------------------------------------------------------------


def test_every_label_of_the_paper_has_a_part() -> None:
    assert {label for part in parts() for label in part.labels} == LABELS


def test_the_verb_names_every_part_in_order() -> None:
    assert ("all", *(part.name for part in parts())) == NAMES


def test_the_models_are_those_of_the_paper_and_the_authors_jambas_have_their_sizes() -> None:
    assert len(TABLE) == 10
    small, large = AUTHORS["jamba-20b"], AUTHORS["jamba-100b"]
    assert (small.num_layers, large.num_layers) == (66, 146)
    assert small.parameters == pytest.approx(20e9, rel=0.03)
    assert large.parameters == pytest.approx(100e9, rel=0.03)


# -- rows ----------------------------------------------------------------------------------------------


def test_verdicts_follow_from_the_numbers_in_both_directions() -> None:
    def verdict(paper: float, ours: float, **more: object) -> str:
        return Row.number("x", "x", paper, plain(ours), why="said", tested="y", **more).verdict  # type: ignore[arg-type]

    assert [verdict(100.0, ours) for ours in (90.0, 110.0)] == ["agrees", "agrees"]
    assert [verdict(100.0, ours) for ours in (89.9, 110.1)] == ["differs, lower", "differs, higher"]
    assert verdict(0.50, 0.58, within=0.1, absolute=True) == "agrees"
    row = Row.order("x", "x", "yes", plain("no"), (False, None), why="said", tested="y")
    assert row.verdict == "differs, lower"
    assert Row.order("x", "x", "yes", plain("yes"), (True, True)).verdicts == ("trend agrees", "trend agrees")


def test_the_paper_s_tuner_on_the_published_times_is_judged() -> None:
    """Our search may be as good as it likes: the verdict is Algorithm 1's, head as published."""
    row = Row.number("x", "x", 1.0, Values(published=(1.0, 9.0), fitted=(9.0, 1.0)), why="said")
    assert row.verdicts == ("agrees", "differs, higher")
    assert Row.number("x", "x", 1.0, Values(published=(1.0, 9.0), fitted=(9.0, 1.0)), used_in_fit=True).verdicts == (
        "agrees",
        "fitted",
    )


def test_a_claim_that_differs_must_say_why_and_a_construction_that_fails_is_a_defect() -> None:
    with pytest.raises(OctoPipeError, match="no tested reason why"):
        Row.number("x", "x", 2.0, plain(1.0))
    with pytest.raises(OctoPipeError, match="no tested reason why"):
        Row.number("x", "x", 2.0, plain(1.0), why="said, and not tested")
    with pytest.raises(OctoPipeError, match="remedy the code"):
        Row.constructed("x", "x", 8.0, 7.0, False)


def test_a_reason_explains_a_difference_as_far_as_its_change_mends_it() -> None:
    def outcome(then: float, **more: object) -> str:
        ours = Values(published=(None, 2.0), **more)  # type: ignore[arg-type]
        return Row.number("x", "x", 1.0, ours, why="said", test="half of it", trial=lambda: then).outcome

    assert [outcome(v) for v in (1.1, 1.5, 2.5)] == ["explains it", "explains part of it", "does not explain it"]
    both = Values(published=(None, 2.0), fitted=(None, 1.05))
    row = Row.number("x", "x", 1.0, both, why="said", test="half of it", trial=lambda: 1.0)
    assert (row.test, row.test_value, row.outcome) == ("fitted head", 1.05, "explains it")
    fitted = Row.number("x", "x", 1.0, both, why="said", used_in_fit=True)
    assert fitted.outcome == "fitted to it"
    order = Row.order("x", "x", "a", plain("b"), (False, False), why="said", test="t", trial=lambda: ("a", True))
    assert (order.test_value, order.outcome) == ("a", "explains it")
    of_numpy = (np.bool_(False), None)
    other = Row.order("x", "x", "a", plain("b"), of_numpy, why="said", test="t", trial=lambda: ("b", False))  # type: ignore[arg-type]
    assert other.outcome == "does not explain it"


def test_no_trial_is_made_where_nothing_differs() -> None:
    def never() -> float:
        raise AssertionError

    assert Row.number("x", "x", 1.0, plain(1.0), test="t", trial=never).outcome == ""


# -- readings ------------------------------------------------------------------------------------------


def test_a_reading_changes_the_head_and_the_transfers_alone() -> None:
    costs = tiny_model()
    table = read(costs, Reading(head=2.5, sent="whole"), hidden=8192)
    assert table.forward_ms[-1] == 12.5 and table.forward_ms[:-1].tolist() == costs.forward_ms[:-1].tolist()
    assert transfer_ms(8192, tp=8, sent="whole") == pytest.approx(8 * transfer_ms(8192, tp=8, sent="share"))
    plan = build_plan("1f1b", table, 2, 2)
    timeline = simulate(plan, table)
    took = timeline.transfers.end_ms - timeline.transfers.start_ms
    assert took == pytest.approx(np.full(took.size, 2.0 * 4096 * 8192 / 25e9 * 1e3))


def test_in_place_lets_the_gradient_go_before_the_weights() -> None:
    """Two equal stages, two micro-batches, all ops 1: the last backward need not wait for the other stage's W."""
    costs = CostTable.uniform(num_layers=2)
    whole = build_plan("1f1b", costs, 2, 2)
    assert simulate(whole, costs).step_ms == 9.0
    assert simulate(in_place(whole), costs).step_ms == 8.0
    assert in_place(whole).splits_backward


def test_mists_stages_stay_within_the_slack() -> None:
    costs = tiny_model(26)
    sizes = [s.num_layers for s in whole_plan("mist", costs, 4, 8, mist_slack=1).stages]
    assert all(abs(n - round(26 / 4)) <= 1 for n in sizes)
    free = simulate(whole_plan("mist", costs, 4, 8), costs).step_ms
    assert free <= simulate(whole_plan("mist", costs, 4, 8, mist_slack=1), costs).step_ms


def test_the_baselines_of_table_three_are_within_ten_per_cent_and_with_seven_chunks_in_order() -> None:
    costs = read(model_costs("nemotron-h-56b", MEASURED_TIMES, pp=8, micro_batches=8), READING, hidden=8192)
    paper = {"1f1b": 2406, "tessel": 2142, "interleaved": 2116, "mist": 1996}
    ours = {name: baseline(name, costs, 8, 8, READING).step_ms for name in paper}
    assert all(abs(ours[name] / paper[name] - 1) < 0.1 for name in paper)
    by_chunks = {k: ms for k, (_, ms) in interleaved_by_chunks(costs, 8, 8, READING).items()}
    assert ours["interleaved"] == min(by_chunks.values()) < by_chunks[7]
    seven = ours | {"interleaved": by_chunks[7]}
    assert list(seven.values()) == sorted(seven.values(), reverse=True)


def test_measured_times_stand_in_the_authors_sizes() -> None:
    costs = model_costs("jamba-20b", MEASURED_TIMES, pp=8, micro_batches=8)
    assert costs.num_layers == 66 and costs.static_bytes.all()
    assert model_costs("jamba-20b", MEASURED_TIMES, pp=8, micro_batches=8, authors=False).num_layers == 34


def test_recomputation_runs_every_layer_but_the_head_again() -> None:
    costs = tiny_model()
    again = recomputed(costs)
    assert (again.input_ms - costs.input_ms).tolist() == [*costs.forward_ms[:-1].tolist(), 0.0]
    assert again.activation_bytes.tolist() == [0.5] * 7 + [1.0]


def test_a_profile_of_other_layers_is_refused(tmp_path: Path) -> None:
    table = {"E": 1.0, "M": 1.0, "L": 1.0}
    file = {"pattern": "EMML", "forward_ms": table, "backward_ms": table, "weight_ms": table}
    (tmp_path / "llama3-8b.json").write_text(json.dumps(file))
    with pytest.raises(OctoPipeError, match="another order"):
        model_costs("llama3-8b", tmp_path, pp=4, micro_batches=4)


# -- parts that need no search -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["taxonomy", "models", "illustrations"])
def test_what_our_code_was_built_to_be_is_called_so(name: str) -> None:
    result = chosen([name], parts())[0].run(Bench(options=Options()))
    assert result.rows and all(row.verdict in ("by construction", "agrees") for row in result.rows)


def test_fidelity_counts_ranks_whose_memory_was_under_predicted() -> None:
    result = chosen(["fidelity"], parts())[0].run(Bench(options=Options(measured=find_measured(None))))
    over = next(row for row in result.rows if row.id == "fidelity.memory.over")
    assert over.verdict == "differs, lower" and "57 of 136" in str(over.published[1])


def test_the_optimum_of_two_stages_is_proven(tmp_path: Path) -> None:
    pytest.importorskip("ortools")
    result = chosen(["two-stages"], parts())[0].run(Bench(options=Options(iterations=200)))
    ours = {row.id: row.published for row in result.rows}
    assert ours["two.optimum"][1] == 19.0 and ours["two.joint"][0] in (19.0, 20.0)


def test_without_layer_times_analytic_costs_are_used_and_said() -> None:
    bench = Bench(options=Options())
    result = chosen(["bubbles"], parts())[0].run(bench)
    assert "analytic" in result.costs and bench.reading.head == 1.0
    assert all(row.fitted == (None, None) for row in result.rows)


def test_the_rank_test_knows_chance_from_difference() -> None:
    same = [float(k) for k in range(10)]
    assert rank_test(same, same) == pytest.approx(0.5, abs=0.05)
    assert rank_test(same, [x + 20 for x in same]) < 0.001 < 0.999 < rank_test([x + 20 for x in same], same)


def test_only_sends_overlap_where_receives_are_posted_when_needed() -> None:
    """1F1B on two equal stages: each rank's sends are followed by a computation, as W is split off."""
    costs = CostTable.uniform(num_layers=4, p2p_ms=0.1)
    plan = in_place(build_plan("1f1b", costs, 2, 4))
    shares = [share_of(plan, costs, receives=how) for how in ("when needed", "one ahead", "early")]  # type: ignore[arg-type]
    assert shares[0] == 0.5 and shares == sorted(shares)
    # One micro-batch: the second rank has nothing to compute while it waits for the only tensor, nor has the first.
    alone = in_place(build_plan("gpipe", costs, 2, 1))
    assert share_of(alone, costs) == share_of(alone, costs, receives="when needed") == 0.5


def test_a_walk_that_overlaps_more_stays_within_its_slack() -> None:
    costs = CostTable.uniform(num_layers=8, p2p_ms=0.2)
    plan = build_plan("zb-v", costs, 4, 8)
    more = overlapping_more(plan, costs, moves=200, slack=0.05, seed=0)
    assert share_of(more, costs) >= share_of(plan, costs)
    assert simulate(more, costs).makespan_ms <= 1.05 * simulate(plan, costs).makespan_ms + 1e-6


def test_naive_coordination_deadlocks_where_two_ranks_send_at_once() -> None:
    from octopipe.simulation.lowering import lower

    costs = CostTable.uniform(num_layers=4, p2p_ms=0.1)
    interleaved = build_plan("interleaved", costs, 2, 4, chunks=2)
    assert naive_deadlocks(lower(interleaved, costs))
    assert not naive_deadlocks(lower(build_plan("gpipe", costs, 2, 1), costs))


def test_many_replicas_wait_for_the_slowest() -> None:
    costs = tiny_model()
    plan = build_plan("1f1b", costs, 2, 4)
    one, many = (slowest_ms(plan, costs, dp, "directed", 0) for dp in (1, 128))
    assert simulate(plan, costs).step_ms * 0.99 < one < many < 1.2 * one


def test_the_stretched_model_repeats_the_inner_layers() -> None:
    table = stretched(tiny_model())
    assert table.num_layers == LAYERS + 2 and table.symbols[:8] == "EM-*M-*M" and table.symbols[-1] == "L"


# -- running -------------------------------------------------------------------------------------------


def _counting(calls: list[str], value: float = 2.0) -> Part:
    def run(bench: Bench) -> Result:
        calls.append("run")
        row = Row.number("speed", "speed", 1.0, plain(value), why="said", tested="other")
        return Result(rows=(row,), costs="none", pictures={"counting.svg": "<svg/>"})

    return Part(name="counting", title="Counting", labels=("fig:x",), run=run)


def test_a_finished_part_is_reused_until_an_option_or_a_file_changes(tmp_path: Path) -> None:
    calls: list[str] = []
    part, options = _counting(calls), Options()
    first = run_parts([part], options, tmp_path)
    again = run_parts([part], options, tmp_path)
    assert calls == ["run"] and again[0].reused and again[0].result == first[0].result
    run_parts([part], replace(options, iterations=7), tmp_path)
    run_parts([part], replace(options, iterations=7), tmp_path, fresh=True)
    assert len(calls) == 3
    data = tmp_path / "runs.jsonl"
    data.write_text("{}")
    with_file = replace(options, measured=data)
    run_parts([part], with_file, tmp_path)
    data.write_text("{ }")
    run_parts([part], with_file, tmp_path)
    assert len(calls) == 5


def test_a_damaged_or_half_deleted_result_is_made_again(tmp_path: Path) -> None:
    calls: list[str] = []
    part = _counting(calls)
    run_parts([part], Options(), tmp_path)
    (tmp_path / "counting.svg").unlink()
    run_parts([part], Options(), tmp_path)
    (tmp_path / "counting.json").write_text("{")
    run_parts([part], Options(), tmp_path)
    assert len(calls) == 3
    record = json.loads((tmp_path / "counting.json").read_text())
    assert record["rows"][0]["verdict"] == "differs, higher"
    assert "| **higher** |" in (tmp_path / "counting.md").read_text()


def test_a_search_is_the_same_twice_and_kept_on_disk(tmp_path: Path) -> None:
    costs = tiny_model()
    options = Options(iterations=40, rounds=5)
    for tuner in ("search", "algorithm1"):
        first = Bench(options=options, store=ResultStore(folder=tmp_path / "a")).plan(tuner, costs, 2, 4)  # type: ignore[arg-type]
        second = Bench(options=options, store=ResultStore(folder=tmp_path / "b")).plan(tuner, costs, 2, 4)  # type: ignore[arg-type]
        assert (first.stages, first.orders) == (second.stages, second.orders)
        said: list[str] = []
        store = ResultStore(folder=tmp_path / "a")
        kept = Bench(options=options, store=store, say=said.append).plan(tuner, costs, 2, 4)  # type: ignore[arg-type]
        assert (kept.stages, kept.orders, said) == (first.stages, first.orders, [])
    other = Bench(options=options, store=ResultStore(folder=tmp_path / "a"), say=said.append)
    other.plan("search", read(costs, Reading(head=2.0), hidden=64), 2, 4)
    assert len(said) == 1


def test_the_last_bit_of_a_cost_is_no_other_question() -> None:
    costs = tiny_model()
    nearly = costs.replace(forward_ms=np.nextafter(costs.forward_ms, 9.0))
    assert nearly.digest() != costs.digest() and costs_key(nearly) == costs_key(costs)
    assert costs_key(costs.replace(forward_ms=costs.forward_ms * (1 + 1e-7))) != costs_key(costs)
    assert costs_key(costs.replace(rank_slowdown=(1.0, 1.2))) != costs_key(costs)


def test_kept_plans_come_back_and_plans_of_other_code_only_where_asked(tmp_path: Path) -> None:
    plan = build_plan("1f1b", tiny_model(), 2, 4)
    store = ResultStore(folder=tmp_path)
    store.put("key", "yesterday", plan, {"optimal": True})
    assert ResultStore(folder=tmp_path).get("key", "today") is None
    assert ResultStore(folder=tmp_path).get("key", "yesterday") is not None
    assert ResultStore(folder=tmp_path, any_code=True).get("key", "today") is not None
    write_kept(tmp_path / "kept", store.plans)
    first = (tmp_path / "kept").read_bytes()
    again = read_kept(tmp_path / "kept")["key"]
    assert (again.stages, again.orders, again.extra["optimal"]) == (plan.stages, plan.orders, True)
    write_kept(tmp_path / "kept", store.plans)
    assert (tmp_path / "kept").read_bytes() == first


def test_a_check_searches_nothing_that_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(OctoPipeError, match="make reproduce"):
        Bench(options=Options(), searches=False).plan("search", tiny_model(), 2, 4)


def test_a_plan_that_is_searched_again_must_be_the_same(tmp_path: Path) -> None:
    costs, options = tiny_model(), Options(rounds=5)
    store = ResultStore(any_code=True)
    bench = Bench(options=options, store=store)
    bench.plan("algorithm1", costs, 2, 4)
    Bench(options=options, store=store, search_again=lambda c, m: True).plan("algorithm1", costs, 2, 4)
    (key,) = bench.asked
    store.plans[key] = build_plan("gpipe", costs, 2, 4)
    with pytest.raises(OctoPipeError, match="another plan"):
        Bench(options=options, store=store, search_again=lambda c, m: True).plan("algorithm1", costs, 2, 4)


# -- words ---------------------------------------------------------------------------------------------


def test_the_page_counts_verdicts_and_joins_rows_of_a_group() -> None:
    part = _counting([])
    rows = (
        Row.number(
            "a", "least | gain", 1.0, plain(2.0), unit="×", group="g", why="half the moves",
            test="all moves", trial=lambda: 1.5, bound=(4.0, None), tested="c",
        ),
        Row.shown("c", "with all moves", plain(2.0)),
        Row.number("b", "most | gain", 2.0, plain(2.0), unit="×", group="g", bound=(2.0, None)),
    )  # fmt: skip
    result = Result(rows=rows, costs="none", pictures={"x.svg": ""})
    page = whole_page([(part, result)], preface=["Words."], pictures="here/")
    assert "| published head | 1 | 0 | 1 | 0 | 0 | 0 | 2 |" in page
    assert "| 1.00 / 2.00 × |" in page and "1 agrees, 1 **higher**" in page and "2.00 / 2.00 × (≤ 50 / 0 %)" in page
    assert "all moves: 1.50× (explains part of it)" in page
    assert "| with all moves |" in page and "![Counting](here/x.svg)" in page
    assert len(grouped(rows)) == 2 and "| half the moves | `c` |" in part_page(part, result)


def test_the_verb_runs_parts_writes_files_and_refuses_unknown_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "out", tmp_path / "docs" / "reproduction.md"
    assert main(["reproduce", "taxonomy", "models", "-o", str(out), "--profiles", "none", "--page", str(page)]) == 0
    assert "agree in number or trend" in capsys.readouterr().out
    assert {"taxonomy.json", "taxonomy.md", "models.json"} <= {p.name for p in out.iterdir()}
    assert "only some of the parts" in page.read_text()
    assert "Table II" in (page.with_suffix("") / "appendix.md").read_text()
    assert main(["reproduce", "taxonomy", "-o", str(out), "--profiles", "none", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["taxonomy"]["rows"]) == 14
    with pytest.raises(SystemExit):
        main(["reproduce", "taxonomi", "-o", str(out)])
    assert "did you mean taxonomy" in capsys.readouterr().err
    assert main(["reproduce", "taxonomy", "-o", str(out), "--profiles", str(tmp_path / "no")]) == 2
    assert "--profiles none" in capsys.readouterr().err


def test_a_check_needs_no_names_of_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--check", str(tmp_path / "page.md")]) == 2
    assert "page.md" in capsys.readouterr().err


def test_the_environment_names_the_folder_of_layer_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.json").write_text("{}")
    monkeypatch.setenv("OCTOPIPE_PROFILES", str(tmp_path))
    assert find_profiles(None) == tmp_path and find_profiles("none") is None

"""Files from strangers: read, or refused in one line before memory or time is spent; nothing else."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from effort import draws
from fuzz_cases import CONFIGS, LAYER_TIMES, NASTY, PROFILE, SETTING, Reader, damaged, outcome, readers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octopipe.base import limits
from octopipe.base.errors import OctoPipeError
from octopipe.base.files import decode_json, read_bytes, write_whole
from octopipe.cli import main
from octopipe.costs.cluster.file import read_cluster
from octopipe.costs.layer_times import load_layer_times
from octopipe.costs.profile_file import load_profile, profile_from_object
from octopipe.costs.table import CostTable
from octopipe.models.readers.hf_config import from_config
from octopipe.plans.file import load_plan, plan_from_json
from octopipe.plans.plan import Plan, Stage, parse_orders
from octopipe.plans.readers.megatron_text import read_megatron
from octopipe.plans.setting import costs_of_plan
from octopipe.search.systems import build_plan
from octopipe.search.tuner import tune
from octopipe.simulation.simulator import jitter_ms, simulate
from octopipe.simulation.timeline import timeline_from_json


def _of_training() -> tuple[Reader, ...]:
    if importlib.util.find_spec("torch") is None:
        return ()
    import fuzz_training

    return fuzz_training.readers()


ALL = {reader.name: reader for reader in (*readers(), *_of_training())}
TIMELINE = json.loads(ALL["timeline"].valid[0])
PLAN = json.loads(ALL["plan"].valid[0])


# -- any damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_every_valid_file_is_read(name: str, tmp_path: Path) -> None:
    for number, data in enumerate(ALL[name].valid):
        path = tmp_path / f"{number}{ALL[name].suffix}"
        path.write_bytes(data)
        assert outcome(ALL[name], path) == "read"


@pytest.mark.parametrize("name", ALL)
def test_a_damaged_file_is_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    reader, path = ALL[name], tmp_path / f"case{ALL[name].suffix}"

    @settings(
        max_examples=draws(60), deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(st.data())
    def any_damage(data: st.DataObject) -> None:
        valid = reader.valid[data.draw(st.integers(0, len(reader.valid) - 1))]
        path.write_bytes(damaged(valid, lambda n: data.draw(st.integers(0, n - 1))))
        assert outcome(reader, path) in ("read", "refused")

    any_damage()


def _places(value: object) -> list[tuple[object, ...]]:
    """The way to every value inside."""
    keys = value if isinstance(value, dict) else range(min(2, len(value))) if isinstance(value, list) else ()
    return [(), *((key, *rest) for key in keys for rest in _places(value[key]))]  # type: ignore[index]


@pytest.mark.parametrize("name", ["timeline", "profile", "config", "setup"])
def test_each_value_of_a_file_may_be_anything(name: str, tmp_path: Path) -> None:
    reader, path = ALL[name], tmp_path / "case.json"
    valid = json.loads(reader.valid[0])
    for number, (*way, last) in enumerate(place for place in _places(valid) if place):
        for shift in range(4):  # every value is tried somewhere, every place with some
            changed = json.loads(reader.valid[0])
            here = changed
            for key in way:
                here = here[key]
            here[last] = NASTY[(4 * number + shift) % len(NASTY)]
            path.write_text(json.dumps(changed))
            assert outcome(reader, path) in ("read", "refused")


# -- timelines -----------------------------------------------------------------------------------------


def _timeline(**changes: object) -> bytes:
    return json.dumps({**TIMELINE, **changes}).encode()


def _column(part: str, name: str, values: object) -> bytes:
    return _timeline(**{part: {**TIMELINE[part], name: values}})


SPANS, NODES = len(TIMELINE["spans"]["rank"]), len(TIMELINE["binding"])
BAD_TIMELINES = {
    "a circle": (_timeline(binding=[1, 0, *TIMELINE["binding"][2:]]), "cycle"),
    "its own predecessor": (_timeline(binding=[0] * NODES), "cycle"),
    "unequal columns": (_column("spans", "stage", [0]), "differ in length"),
    "a rank that is not there": (_column("spans", "rank", [0] * (SPANS - 1) + [7]), "rank of an op is 7"),
    "a negative time": (_column("spans", "start_ms", [-1.0] * SPANS), "start_ms"),
    "an end before its start": (_column("spans", "end_ms", [0.0] * SPANS), "ends before it starts"),
    "a time of 1e308": (_column("spans", "end_ms", [1e308] * SPANS), "1000000000000000"),
    "text for a number": (_column("spans", "stage", ["0"] * SPANS), "Expected `int`"),
    "half a stage": (_column("spans", "stage", [0.5] * SPANS), "Expected `int`"),
    "a consumer that is not there": (_column("transfers", "consumer", [99] * (NODES - SPANS)), "consumer"),
    "a billion ranks": (_timeline(num_ranks=10**9), "num_ranks"),
    "no spans": (json.dumps({k: v for k, v in TIMELINE.items() if k != "spans"}).encode(), "spans"),
    "a later version": (_timeline(format="octopipe.timeline/2"), "newer"),
    "ops out of order": (
        _timeline(spans={k: v[::-1] for k, v in TIMELINE["spans"].items()}, binding=[]),
        "rank after rank",
    ),
    "memory of one rank": (_timeline(memory=TIMELINE["memory"][:1]), "1 rows for 2 ranks"),
    "an extra on no rank": (
        _timeline(extras=[{"name": "x", "rank": 5, "start_ms": 0, "end_ms": 1}]),
        "rank of an extra is 5",
    ),
}


@pytest.mark.parametrize("name", BAD_TIMELINES)
def test_a_timeline_that_cannot_have_happened_is_refused(name: str) -> None:
    data, words = BAD_TIMELINES[name]
    with pytest.raises(OctoPipeError) as caught:
        timeline_from_json(data, "t.json")
    assert str(caught.value).startswith("t.json: ") and words in str(caught.value)


def test_a_timeline_read_back_is_the_one_that_was_written() -> None:
    costs = CostTable.uniform(num_layers=8, activation_bytes=1e6, p2p_ms=0.25)
    made = simulate(build_plan("zb-h1", costs, 4, 8), costs)
    back = timeline_from_json(made.to_json())
    assert back.to_json() == made.to_json() and back.critical_path() == made.critical_path()
    assert all(np.array_equal(a, b) for a, b in zip(made.spans, back.spans, strict=True))


# -- caps ----------------------------------------------------------------------------------------------


def _plan_text(**changes: object) -> bytes:
    return json.dumps({**PLAN, **changes}).encode()


ROUTES = 4_000
LARGE_PLANS = {
    "layers": (_plan_text(num_layers=10**9, stages=[{"layers": [0, 10**9], "rank": 0}]), "1000000000 layers"),
    "ranks": (_plan_text(num_ranks=50_000, orders=[[]] * 50_000), "50000 ranks"),
    "micro-batches": (_plan_text(num_micro_batches=10**9, route_of_micro_batch=[0]), "1000000000 micro-batches"),
    "routes": (
        _plan_text(
            num_layers=1,
            stages=[{"layers": [0, 1], "rank": 0}] * ROUTES,
            routes=[[i] for i in range(ROUTES)],
            route_of_micro_batch=[0] * PLAN["num_micro_batches"],
        ),
        "16000000 cells of routes x stages",
    ),
    "stages": (_plan_text(stages=[{"layers": [0, 1], "rank": 0}] * 40_000, routes=[[0]]), "40000 stages"),
    "a number beyond any machine's": (_plan_text(num_layers=10**400), "layers"),
}


@pytest.mark.parametrize("name", LARGE_PLANS)
def test_a_plan_above_a_cap_is_refused_before_memory_is_taken(name: str) -> None:
    data, words = LARGE_PLANS[name]
    tracemalloc.start()
    try:
        with pytest.raises(OctoPipeError) as caught:
            plan_from_json(data, "p.json")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert words in str(caught.value) and "at most" in str(caught.value)
    assert peak < 40 * len(data) + (1 << 20)  # what decoding takes, and nothing of the sizes it speaks of


def test_more_ops_than_the_cap_are_refused_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octopipe.plans.plan_json.MAX_OPS", 100)
    with pytest.raises(OctoPipeError, match="130 ops in orders; at most 100 are allowed"):
        plan_from_json(_plan_text(orders=[["not an op"] * 130]))


def test_a_plan_of_8192_ranks_is_within_every_cap() -> None:
    ranks, micro_batches = 8192, 128
    assert ranks <= limits.MAX_RANKS and 3 * ranks * micro_batches <= limits.MAX_OPS
    limits.refuse_too_large(ranks, micro_batches)
    stages = tuple(Stage(first=i, stop=i + 1, rank=i) for i in range(ranks))
    orders = tuple(parse_orders([[f"{i}F0", f"{i}B0"]])[0] for i in range(ranks))
    plan = Plan(num_layers=ranks, num_ranks=ranks, num_micro_batches=1, stages=stages, orders=orders)
    assert plan.problems() == []


@pytest.mark.parametrize(("ranks", "micro_batches"), [(20_000, 1), (2, 10**6), (16_000, 10_000)])
def test_no_plan_is_built_that_would_be_too_large(ranks: int, micro_batches: int) -> None:
    costs = CostTable.uniform(num_layers=60_000)
    for make in (build_plan, None):
        with pytest.raises(OctoPipeError, match="at most"):
            if make is None:
                tune(costs, ranks, micro_batches, budget_s=0.1)
            else:
                make("1f1b", costs, ranks, micro_batches)


def test_a_small_file_with_too_many_values_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(OctoPipeError, match="values; a file of this kind may have at most 1000"):
        decode_json(b"[" + b"[]," * 600 + b"[]]", "x.json", most_values=1000)


@pytest.mark.parametrize("key", ["forward_ms", "rank_slowdown", "op_overhead_ms", "fused_factor", "memory_gib"])
@pytest.mark.parametrize("value", [1e308, 10**400, float("nan"), -1.0])
def test_a_profile_with_a_number_no_sum_survives_is_refused(key: str, value: float) -> None:
    old = PROFILE[key]
    with pytest.raises(OctoPipeError, match=key):
        profile_from_object({**PROFILE, key: [value, *old[1:]] if isinstance(old, list) else value}, name="x")


@pytest.mark.parametrize("link", [{"latency_ms": 1e308}, {"gb_per_s": 1e-308}, {"source": 1 << 40}, {"source": True}])
def test_a_link_with_such_a_number_is_refused(link: dict[str, object]) -> None:
    with pytest.raises(OctoPipeError, match='"links" entry 0'):
        profile_from_object({**PROFILE, "links": [{**PROFILE["links"][0], **link}]}, name="x")


@pytest.mark.parametrize("level", ["²", "٣", "0", "-1", "9" * 400, "1.0", ""])
def test_partial_times_are_for_a_plain_number_of_ranks(level: str) -> None:
    with pytest.raises(OctoPipeError, match="number of ranks"):
        profile_from_object({**PROFILE, "partial": {level: PROFILE["partial"]["1"]}}, name="x")


def test_a_link_or_a_level_given_twice_is_refused() -> None:
    with pytest.raises(OctoPipeError, match="given before"):
        profile_from_object({**PROFILE, "links": PROFILE["links"][:1] * 2}, name="x")
    with pytest.raises(OctoPipeError, match="once"):
        profile_from_object({**PROFILE, "partial": dict.fromkeys(("1", "01"), PROFILE["partial"]["1"])}, name="x")


def test_a_stage_names_a_recomputed_layer_once() -> None:
    """Named twice its time would be counted twice."""
    with pytest.raises(OctoPipeError, match="stage 0 recomputes layers"):
        plan_from_json(_plan_text(stages=[{**PLAN["stages"][0], "recompute": [0, 0]}, *PLAN["stages"][1:]]))


@pytest.mark.parametrize("text", ["²F0", "٣F0", "0F٣", "+1F0", "1_0F0"])
def test_an_op_is_written_in_plain_digits(text: str) -> None:
    with pytest.raises(OctoPipeError, match="is not an op"):
        parse_orders([[text]])


# -- settings and configs ------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [k for k in SETTING if k != "model"])
def test_a_plan_setting_of_any_value_prices_or_is_refused(key: str) -> None:
    named = plan_from_json(next(d for d in ALL["plan"].valid if b'"setting"' in d))
    for value in NASTY:
        try:
            costs = costs_of_plan(named.with_extra(setting={**SETTING, key: value}))
        except OctoPipeError as error:
            assert len(str(error).splitlines()) == 1 and len(str(error)) < 1000
        else:
            assert np.isfinite(costs.layer_ms).all()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 10**400), ("hidden_size", -64), ("num_hidden_layers", 10**9), ("rope_theta", 10**400),
        ("rope_theta", "²"), ("rms_norm_eps", float("inf")), ("tie_word_embeddings", "no"), ("vocab_size", True),
        ("architectures", "LlamaForCausalLM"), ("rope_parameters", [1]), ("partial_rotary_factor", 1e9),
    ],
)  # fmt: skip
def test_a_config_with_a_wrong_value_names_the_key(key: str, value: object) -> None:
    with pytest.raises(OctoPipeError, match=key):
        from_config({**json.loads(CONFIGS[0]), key: value})


def test_half_a_letter_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(CONFIGS[0].replace(b"LlamaForCausalLM", b"Llama\\ud800ForCausalLM"))
    with pytest.raises(OctoPipeError, match="not valid JSON"):
        from_config(path)


def test_a_name_that_is_no_text_can_still_be_told(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.json")
    path.write_text(json.dumps(LAYER_TIMES))
    load_layer_times(path).model.encode()
    load_profile(path).to_json()
    with pytest.raises(OctoPipeError, match="not UTF-8"):
        costs_of_plan(plan_from_json(_plan_text(setting={"model": "x"})), {"model": str(path)})


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": ["x"]}, {"symbols": 5}, {"data_parallel": 0}, {"data_parallel": 10**400}, {"gpus_per_rank": True},
        {"gpus_per_rank": 0.5}, {"tokens_per_micro_batch": -1}, {"model_flops": 10**400}, {"forward_ms": "x"},
        {"network": {"intra": {}, "inter": {}, "ranks_per_node": 0}}, {"network": []},
        {"reduction": {"latency_ms": "1"}},
        {"micro_batch_factor": [[[1.0]]]}, {"rank_slowdown": [0.0]}, {"unheard": 1},
    ],
)  # fmt: skip
def test_costs_beside_a_plan_are_refused_where_they_cannot_be(wrong: dict[str, object]) -> None:
    text = next(d for d in ALL["plan"].valid if b'"cost_table"' in d)
    raw = json.loads(text)
    costs_of_plan(plan_from_json(text))
    plan = plan_from_json(json.dumps({**raw, "cost_table": {**raw["cost_table"], **wrong}}))
    with pytest.raises(OctoPipeError) as caught:
        costs_of_plan(plan)
    assert len(str(caught.value).splitlines()) == 1


# -- keys and versions ---------------------------------------------------------------------------------

TWICE = {
    "plan": (ALL["plan"].valid[0], b'"num_layers":', b'"num_layers": 6, "num_layers":'),
    "timeline": (ALL["timeline"].valid[0], b'"label":', b'"label":"a: b","label":'),
    "profile": (ALL["profile"].valid[0], b'"pattern":', b'"pattern": "EML", "pattern":'),
    "layer-times": (ALL["layer-times"].valid[0], b'{"E": ', b'{"E": 2, "E": '),
    "config": (CONFIGS[0], b'"hidden_size":', b'"hidden_size": 32, "hidden_size":'),
    "cluster.json": (ALL["cluster.json"].valid[0], b'"count": 2', b'"count": 2, "count": 3'),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_key_that_stands_twice_is_refused(name: str, tmp_path: Path) -> None:
    valid, old, new = TWICE[name]
    assert old in valid
    path = tmp_path / "case.json"
    path.write_bytes(valid.replace(old, new, 1))
    with pytest.raises(OctoPipeError, match="appears twice"):
        ALL[name].use(path)


def test_colons_escapes_and_brackets_in_text_are_no_keys() -> None:
    value = {"a:b": ':"x"\\', 'c"d': [{"e": "\\u003a: {"}], "::": {"::": ":"}}
    assert decode_json(json.dumps(value), "x.json") == value
    assert decode_json('{"\\u003a": 1, ":b": "\\u003a"}', "x.json") == {":": 1, ":b": ":"}
    with pytest.raises(OctoPipeError, match="appears twice"):
        decode_json('{"a": "\\u003a", "\\u0061": 2}', "x.json")


TEXT = st.text(':"\\{ab')


@given(st.recursive(TEXT | st.integers(), lambda v: st.lists(v) | st.dictionaries(TEXT, v), max_leaves=6))
@settings(max_examples=draws(40), deadline=None, database=None, derandomize=True)
def test_every_object_with_distinct_keys_is_decoded_as_it_is(value: object) -> None:
    assert decode_json(json.dumps(value), "x.json") == json.loads(json.dumps(value))


@pytest.mark.parametrize("name, newer", [("plan", 3), ("timeline", 2), ("profile", 2), ("layer-times", 2)])
def test_formats_carry_a_version_and_a_newer_one_says_so(name: str, newer: int, tmp_path: Path) -> None:
    family = f"octopipe.{name}"
    path = tmp_path / "case.json"
    path.write_bytes(ALL[name].valid[0].replace(f"{family}/1".encode(), f"{family}/{newer}".encode()))
    with pytest.raises(OctoPipeError, match=f"{family}/{newer}' is newer.*update octopipe"):
        ALL[name].use(path)


def test_version_1_files_are_read_as_they_were_written() -> None:
    """These files stand for all that were ever written as version 1: no key may be asked of them that they lack."""
    step_ms = 3 * 6 + 2 * 0.1 + 1  # 2 micro-batches over 2 ranks, F 2 and B 4; two transfers; the optimizer
    folder = Path(__file__).parents[1] / "golden" / "formats"
    assert load_plan(folder / "plan-1.json").orders[1][0].stage == 1
    assert timeline_from_json((folder / "timeline-1.json").read_bytes()).step_ms == pytest.approx(step_ms)
    assert load_profile(folder / "profile-1.json").costs.network.transfer_ms(0, 1, 1e6) == pytest.approx(0.01 + 1 / 40)
    assert load_layer_times(folder / "layer-times-1.json").symbols == "EM-M*-L"
    assert read_cluster(folder / "cluster-1.toml") == (("h100", 2, 8), ("a100", 1, 8))


# -- what is written -----------------------------------------------------------------------------------


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    write_whole(link, b"new")
    assert link.is_symlink() and real.read_text() == "new"
    dangling = tmp_path / "dangling.json"
    dangling.symlink_to(tmp_path / "made.json")
    write_whole(dangling, b"new")
    assert dangling.is_symlink() and (tmp_path / "made.json").read_text() == "new"


def test_what_is_no_regular_file_is_left_alone(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "to-pipe"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for target in (pipe, link, loop, tmp_path, "/dev/null", "/dev/stdout", "", "a\x00b"):
        with pytest.raises(OctoPipeError) as caught:
            write_whole(target, b"x")
        assert len(str(caught.value).splitlines()) == 1
    assert stat.S_ISFIFO(pipe.lstat().st_mode) and stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loop", "pipe", "to-pipe"]


def test_a_link_laid_where_the_partial_file_goes_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "out.json.partial").symlink_to(victim)
    write_whole(tmp_path / "out.json", b"new")
    assert victim.read_text() == "mine" and (tmp_path / "out.json").read_bytes() == b"new"


def test_a_file_written_again_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    path.chmod(0o640)
    write_whole(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(OctoPipeError, match="not a regular file"):
        read_bytes(tmp_path / "pipe.json")


# -- names ---------------------------------------------------------------------------------------------


def test_a_name_with_escape_codes_and_markup_stays_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b[31m[bold]x[/bold][/][link=http://a]y"
    path, plan = tmp_path / "[red]times.json", tmp_path / "[dim]plan.json"
    path.write_text(json.dumps({**PROFILE, "model": name}))
    assert main(["simulate", str(path), "--system", "1f1b", "--pp", "2", "-o", str(plan)]) == 0
    assert main(["export", str(plan), "--to", "svg", "-o", str(tmp_path / "[bold]a.svg")]) == 0
    said = capsys.readouterr()
    assert "[31m[bold]x[/bold][/][link=http://a]y" in "".join(said.out.split("\n")) and "\x1b" not in said.out
    assert "[bold]a.svg: svg" in said.err and "\x1b" not in said.err


# -- seeds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["tune", "train"])
@pytest.mark.parametrize("seed", ["-1", "1.5", "x", str(1 << 31), "9" * 5000, "²", ""])
def test_a_seed_no_generator_takes_is_refused(verb: str, seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "llama3-8b", f"--seed={seed}"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and len(said.splitlines()) == 1 and "seed" in said


@pytest.mark.parametrize("seed", [-1, 1 << 31, 10**400, 0.5, True, None])
def test_a_library_call_refuses_such_a_seed_too(seed: object) -> None:
    costs = CostTable.uniform(num_layers=4)
    with pytest.raises(OctoPipeError, match="seed is"):
        tune(costs, 2, 2, budget_s=0.1, seed=seed)  # type: ignore[arg-type]
    from octopipe.simulation.lowering import lower

    with pytest.raises(OctoPipeError, match="seed is"):
        jitter_ms(lower(build_plan("1f1b", costs, 2, 2), costs), costs, seed=seed)  # type: ignore[arg-type]


def test_the_readers_of_the_fuzzer_are_all_of_them() -> None:
    assert all(isinstance(reader, Reader) and reader.valid for reader in ALL.values())
    assert {"plan", "timeline", "profile", "layer-times", "config", "setup", "cluster.json", "torch.csv"} <= set(ALL)


@pytest.mark.parametrize("text", ["(t*4000)*9999", "(" + "t*4000" * 500 + ")*1", "E" + "(t*999|)*9999" * 3, "t*9999"])
def test_repetitions_of_a_megatron_text_are_refused_before_memory_is_taken(text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(OctoPipeError, match="more than 4096 layers and bars"):
            read_megatron(text)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()

"""Megatron-Core on the CPU under our plans, against its own result without a pipeline."""

from __future__ import annotations

import importlib.util
import json
import random
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
from effort import WHOLE, some

torch = pytest.importorskip("torch")
if importlib.util.find_spec("megatron") is None:  # importing it takes seconds, and only its ranks need it
    pytest.skip("Megatron-Core is not installed", allow_module_level=True)

import megatron_models as mm  # noqa: E402
import numpy as np  # noqa: E402
from megatron_dispatchers import EXPERT_LAYERS, paired_and_not  # noqa: E402
from megatron_jobs import (  # noqa: E402
    IMPORTS,
    LAYERS,
    PATTERN,
    TOLERANCE,
    drawn,
    has_blocks_in_every_stage,
    model_of,
    plan_of,
    run_many,
    tuned,
)
from ranks import PATIENCE_S, Ranks, shared_ranks  # noqa: E402
from sleep_clock import SleepClock  # noqa: E402
from test_pairs import with_pairs  # noqa: E402

from octopipe import megatron  # noqa: E402
from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.costs.profile_file import profile_from_object  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.megatron.driver import PlanDriver  # noqa: E402
from octopipe.plans.plan import Op, Plan, Stage  # noqa: E402
from octopipe.runtime.measure import timing  # noqa: E402
from octopipe.search.restricted import runs_on_megatron  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402
from octopipe.search.tuner import tune  # noqa: E402


@pytest.fixture
def four() -> Ranks:
    """Ranks of our own: what Megatron-Core needs on a CPU must not reach other tests' processes."""
    return shared_ranks(4, IMPORTS)


def _run(ranks, function, *args):
    """Megatron-Core takes a while to be imported: more patience than for our own ops."""
    ranks.start(function, *args)
    results = ranks.results(timeout_s=400.0)
    ranks.broken = not all(worked for worked, _ in results)
    assert not ranks.broken, "\n".join(text for worked, text in results if not worked)
    return [result for _, result in results]


def _assert_equal(results, jobs):
    for per_rank in results:
        for (plan, more), (gradient, loss) in zip(jobs, per_rank):
            assert gradient <= TOLERANCE, (more, [str(o) for o in plan.orders], gradient)
            assert loss <= TOLERANCE, (more, loss)


# -- equal to Megatron without a pipeline --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt", "moe", "hybrid"])
def test_published_orders_and_irregular_plans_equal_megatron_without_a_pipeline(kind, four):
    plans = [
        plan_of("1f1b", 4),
        plan_of("interleaved", 4, chunks=2),
        plan_of("zb-v", 4),
        plan_of("zb-h1", 2),
        tuned(4),
        tuned(2),
        *(drawn(seed, 4, recompute=False) for seed in range(3)),
        drawn(9, 2, recompute=False),
    ]
    if not WHOLE and kind != "hybrid":  # which runs few of them in any case
        plans = plans[1:7:3] + plans[2:3] if kind == "gpt" else plans[2:3]
    if kind == "hybrid":
        plans = [p for p in plans if has_blocks_in_every_stage(p)]
        assert len(plans) > 1
    jobs = [(plan, {"kind": kind}) for plan in plans]
    _assert_equal(_run(four, run_many, jobs), jobs)


@pytest.mark.parametrize("kind", some(["gpt", "hybrid"]))
def test_split_plans_run_in_the_precision_that_megatrons_cross_entropy_changes_in_place(kind, four):
    """Its `logits -= maximum` is on the head's own output where that is fp32 already."""
    single = {"params_dtype": torch.float32, "pipeline_dtype": torch.float32, "kind": kind}
    plans = [tuned(2), tuned(4), *(drawn(seed, 2, recompute=False) for seed in range(20))]
    irregular = next(p for p in plans if kind != "hybrid" or has_blocks_in_every_stage(p))
    jobs = [(plan_of("zb-h1", 2), single), (irregular, {**single, "add_bias_linear": False})]
    for per_rank in _run(four, run_many, jobs):
        assert max(max(errors) for errors in per_rank) <= 1e-4


def test_tied_embeddings_are_one_wherever_they_lie(four):
    jobs = [
        (plan_of("zb-v", 2), {"tied": True}),
        (plan_of("1f1b", 4), {"tied": True, "ddp": "plain"}),
        (plan_of("interleaved", 2, chunks=2), {"tied": True, "ddp": "overlapped"}),
        (plan_of("zb-v", 2), {"tied": True, "kind": "hybrid"}),
        (plan_of("zb-v", 4), {"tied": True, "ddp": "plain"}),
    ]
    jobs = jobs if WHOLE else jobs[1:-1]
    _assert_equal(_run(four, run_many, jobs), jobs)


@pytest.mark.parametrize("ddp", some(["overlapped", "plain"]))
def test_data_parallel_reduction_with_and_without_overlap(ddp, four):
    jobs = [(plan_of("zb-h1", 2), {"ddp": ddp, "steps": 3}), (drawn(4, 2, recompute=False), {"ddp": ddp, "steps": 2})]
    _assert_equal(_run(four, run_many, jobs), jobs)


def test_recomputed_stages_give_the_same_gradients(four):
    plans = [drawn(seed, 4) for seed in range(20, 60)]
    plans = [p for p in plans if any(s.recompute for s in p.stages)][:2]
    full = {"recompute_granularity": "full", "recompute_num_layers": 1}
    own = [
        {**full, "recompute_method": "block"},
        {"recompute_granularity": "selective"},  # of the core attention, if nothing else is named
        {**full, "recompute_method": "uniform"},
    ]
    if not WHOLE:
        plans, own = plans[:1], own[:1]
    jobs = [*((plan, {}) for plan in plans), *((plan_of("zb-h1", 4), more) for more in own)]
    _assert_equal(_run(four, run_many, jobs), jobs)


def test_multi_token_prediction(four):
    costs = CostTable.uniform(num_layers=LAYERS + 1)
    names = ("1f1b", "zb-h1") if WHOLE else ("zb-h1",)
    jobs = [(build_plan(name, costs, 2, 4), {"mtp_num_layers": 1, "ddp": "plain"}) for name in names]
    _assert_equal(_run(four, run_many, jobs), jobs)


def test_megatrons_dispatchers_give_the_same_gradients_inside_pairs(four):
    """Inside pairs, ep 2 x pp 2: the gradients of the same plan without pairs."""
    plan = build_plan("zb-v", CostTable.uniform(num_layers=EXPERT_LAYERS), 2, 4 if WHOLE else 2)
    plan = with_pairs(random.Random(2), plan, share=1.0)
    assert plan.pairs
    for found in four.run(paired_and_not, plan, ("alltoall", "allgather")):
        for paired, plain, _ in found.values():
            assert paired.keys() == plain.keys() and paired
            assert all(torch.equal(paired[name], plain[name]) for name in plain)
            assert any(float(g.abs().max()) > 1e-3 for name, g in plain.items() if "local_experts" in name)
        # The two exchange tokens in different ways, and have the same gradients.
        one, other = found["alltoall"][0], found["allgather"][0]
        assert all(torch.allclose(one[name], other[name], rtol=1e-10, atol=1e-12) for name in one)
        assert found["alltoall"][2] > 0, "no exchange of the dispatcher was found"


# -- what it refuses -----------------------------------------------------------------------------------


def test_ranks_are_renamed_so_that_megatron_finds_first_and_last():
    stages = tuple(Stage(first=2 * k, stop=2 * k + 2, rank=r) for k, r in enumerate((2, 0, 1)))
    orders = tuple((Op(s, "F", 0), Op(s, "B", 0)) for s in (1, 2, 0))
    plan = Plan(num_layers=6, num_ranks=3, num_micro_batches=1, stages=stages, orders=orders).check()
    named = megatron.for_megatron(plan)
    assert [s.rank for s in named.stages] == [0, 1, 2]
    named.check()
    assert megatron.embedding_ranks(named)([4, 5, 6]) == [4, 6]
    assert megatron.embedding_ranks(plan_of("zb-v", 2))([4, 5]) == [4]


@pytest.mark.parametrize(("make", "why"), [
    (lambda: plan_of("chimera", 4), "routes"),
    (lambda: Plan(
        num_layers=LAYERS, num_ranks=2, num_micro_batches=1, stages=(Stage(first=0, stop=LAYERS, rank=0),),
        orders=((Op(0, "F", 0), Op(0, "B", 0)), ()),
    ), "holds no stage"),
    (lambda: Plan(
        num_layers=LAYERS, num_ranks=1, num_micro_batches=1,
        stages=(Stage(first=0, stop=LAYERS, rank=0, recompute=(1,)),),
        orders=((Op(0, "F", 0), Op(0, "R", 0), Op(0, "B", 0)),),
    ), "whole stages"),
])  # fmt: skip
def test_plans_megatron_cannot_run_are_refused_in_one_line(make, why):
    with pytest.raises(OctoPipeError, match=why):
        megatron.forward_backward_func(make())


def wrong_chunks(world, plan):
    mm.start(2)
    step = megatron.forward_backward_func(plan)
    call = partial(step, forward_step_func=None, data_iterator=None, seq_length=1, micro_batch_size=1)
    said = []
    for model, count in ((torch.nn.Linear(1, 1), plan.num_micro_batches), (torch.nn.Linear(1, 1), 3)):
        try:
            call(model=[model] * 5, num_microbatches=count)
        except OctoPipeError as error:
            said.append(str(error))
    return said


def test_chunks_and_micro_batches_must_be_the_plans(four):
    for said in _run(four, wrong_chunks, plan_of("1f1b", 2)):
        assert "5 model chunks" in said[0]
        assert "this step 3" in said[1]


def test_what_the_prices_recompute_must_be_recomputed_by_megatron():
    """Otherwise a run holds more than its plan promised. A plan whose prices recompute nothing asks for nothing."""
    none = {"recompute_granularity": None}
    selective = {"recompute_granularity": "selective"}
    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    block = {**whole, "recompute_method": "block"}
    configs = [none, selective, whole, block, {**block, "recompute_num_layers": mm.DECODERS}]
    expected = {
        "none": [None] * 5,
        "selective": ["recompute_granularity is None", None, None, None, None],
        "full": ["recompute_granularity is None", "recompute_granularity is selective", None, "layers is 1", None],
    }
    for priced, words in expected.items():
        plan = plan_of("1f1b", 2).with_extra(setting={"recompute": priced})
        costs = CostTable.uniform(num_layers=LAYERS)
        driver = PlanDriver(plan, costs=costs, channel="directed", transport=None, timeout_s=PATIENCE_S)
        for config, word in zip(configs, words, strict=True):
            chunk = torch.nn.Linear(1, 1)
            chunk.config = SimpleNamespace(**config)
            if word is None:
                driver._check_models([chunk], 0)
            else:
                with pytest.raises(OctoPipeError, match=f"--recompute {priced}.*{word}.* set recompute_granularity="):
                    driver._check_models([chunk], 0)


def test_layout_says_the_flags_or_why_not():
    assert megatron.layout(plan_of("1f1b", 4)).arguments.endswith('"Et|(tt|)*2,tL"')
    with pytest.raises(OctoPipeError, match="forward_backward_func"):
        megatron.layout(plan_of("zb-v", 4))


# -- Transformer Engine --------------------------------------------------------------------------------


class Engine(torch.nn.Module):
    """A layer that keeps its own queue of weight gradients, first in first out, as Transformer Engine's do."""

    def __init__(self, delayed):
        super().__init__()
        self.config = type("Config", (), {"delay_wgrad_compute": delayed})()
        self.waiting, self.done = [1, 2], []

    def backward_dw(self):
        self.done.append(self.waiting.pop(0))


def test_transformer_engines_own_queue_is_emptied_by_w():
    from octopipe.megatron.weights import Split
    from octopipe.runtime.stages.wgrad_ops import WeightQueue

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.eager = Engine(True), Engine(False)

        def backward_dw(self):
            raise AssertionError("the innermost module's is the one to call")

    chunk = Outer()
    split = Split(chunk)
    split.weight(WeightQueue())
    assert (chunk.inner.done, chunk.eager.done) == ([1], [])


def test_transformer_engine_wants_w_in_the_order_of_i():
    from octopipe.megatron.driver import PlanDriver

    order = (Op(0, "F", 0), Op(0, "F", 1), Op(0, "I", 0), Op(0, "I", 1), Op(0, "W", 1), Op(0, "W", 0))
    plan = Plan(
        num_layers=2, num_ranks=1, num_micro_batches=2, stages=(Stage(first=0, stop=2, rank=0),), orders=(order,)
    ).check()
    driver = PlanDriver(plan, costs=None, channel="directed", transport=None, timeout_s=1.0)
    with pytest.raises(OctoPipeError, match="first in, first out"):
        driver._check_models([Engine(True)], 0)


# -- the profile ---------------------------------------------------------------------------------------

SLEEP_S = 0.1


def measure(world, kind, virtual, ddp=False):
    """A profile on two ranks, of chunks whose third decoder layer sleeps, by a clock of its own."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    plan = megatron.for_megatron(plan_of("interleaved" if virtual else "1f1b", 2))
    mm.start(2, virtual=megatron.virtual_size(plan), embedding_ranks=megatron.embedding_ranks(plan))
    layout = None if kind == "hybrid" else megatron.placement(plan)
    config = mm.gpt_config(2, megatron.virtual_size(plan), layout, kind=kind)
    if kind == "hybrid":
        mm.alone()
    clock = SleepClock()

    def provider(pre_process, post_process, vp_stage, layers):
        more = {"layers": layers} if kind == "hybrid" else {}
        flags = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
        model = model_of(kind, config, False, **flags, **more)
        for k, layer in zip((k for k in layers if 1 <= k <= mm.DECODERS), model.decoder.layers):
            if k == 3:
                layer.register_forward_pre_hook(lambda *_: clock.sleep(SLEEP_S))
        return model

    chunks = megatron.build_chunks(plan, provider)
    if ddp:
        options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        chunks = [DistributedDataParallel(config=config, ddp_config=options, module=c) for c in chunks]
    before = [p.detach().clone() for c in chunks for p in c.parameters()]
    with mock.patch.object(timing, "time", clock):
        profile = megatron.profile(
            chunks,
            forward_step_func=mm.forward_step,
            data_iterator=iter(mm.batches(1)),
            seq_length=mm.LENGTH,
            micro_batch_size=2,
            plan=plan if kind == "hybrid" else None,
            repeats=2,
            warm_up=1,
        )
    after = [p for c in chunks for p in c.parameters()]
    same = all(torch.equal(a, b) and b.grad is None for a, b in zip(before, after))
    return profile.to_json().decode(), same, sum(p.numel() for p in after)


@pytest.mark.parametrize(
    "chunks", some([("gpt", True), ("hybrid", False), ("gpt", False), ("moe", False)], quick=2), ids=str
)
def test_a_profile_of_chunks_knows_the_whole_model(chunks, four):
    """Against what is known beforehand: which layer sleeps, how many parameters there are, what differs by kind."""
    kind, virtual = chunks
    results = _run(four, measure, kind, virtual)[::2]  # one of two pipelines side by side
    texts, same, counts = zip(*results)
    assert texts[0] == texts[1] and all(same)
    profile = profile_from_object(json.loads(texts[0]), name="x")
    costs = profile.costs
    assert costs.num_layers == LAYERS and costs.symbols[0] == "E" and costs.symbols[-1] == "L"
    kinds = len(set(PATTERN)) if kind == "hybrid" else 1
    assert len(set(costs.symbols[1:-1])) == kinds
    # Layers of a kind share their mean: one of six sleeps (of the hybrid, one of its kind).
    twins = sum(c == costs.symbols[3] for c in costs.symbols)
    assert costs.forward_ms[3] > 1e3 * SLEEP_S / twins * 0.9
    if kind == "hybrid":
        others = [k for k in range(LAYERS) if costs.symbols[k] != costs.symbols[3]]
        assert all(costs.forward_ms[k] < 1e3 * SLEEP_S / twins for k in others)
    # float64 weights, their gradients, and Adam's 8 bytes.
    assert costs.static_bytes.sum() == pytest.approx(sum(counts) * (8 + 8 + 8))
    assert np.all(costs.boundary_bytes[:-1] == 8 * 2 * mm.LENGTH * mm.WIDTH)
    assert np.all(costs.stash_bytes <= costs.activation_bytes) and np.all(costs.activation_bytes[1:] > 0)
    # Every decoder layer and the head have products that wait for W: what they hold until then is theirs.
    assert np.all(costs.stash_bytes[1:] > 0)
    assert profile.partial.keys() == {1} and profile.mode.precision == "fp64"
    plan = tune(costs, 2, 4, iterations=50, copies=False, recompute=False).plan
    assert megatron.for_megatron(plan).num_layers == LAYERS


def profile_between_steps(world, system):
    """Whether a step after a profile gives the gradients of one before it."""
    plan = megatron.for_megatron(plan_of(system, 2))
    mm.start(2, embedding_ranks=megatron.embedding_ranks(plan))
    config = mm.gpt_config(2, None, megatron.placement(plan))
    chunks = megatron.build_chunks(plan, lambda pre_process, post_process: mm.gpt(
        config, pre_process=pre_process, post_process=post_process))  # fmt: skip
    step = megatron.forward_backward_func(plan, timeout_s=PATIENCE_S)
    usual = {"forward_step_func": mm.forward_step, "model": chunks, "seq_length": mm.LENGTH, "micro_batch_size": 2}
    found = []
    for again in (False, True):
        if again:
            megatron.profile(**usual, data_iterator=iter(mm.batches(1)), repeats=1, warm_up=1, links=False)
        for chunk in chunks:
            chunk.zero_grad(set_to_none=True)
        step(**usual, data_iterator=iter(mm.batches(4)), num_microbatches=4)
        found.append([p.grad.clone() for chunk in chunks for p in chunk.parameters()])
    step.close()
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("system", some(["zb-h1", "1f1b"]))
def test_a_profile_between_two_steps_changes_no_gradient(system, four):
    """Where the plan splits backward, the drop-in has its layers again; where it does not, Megatron has."""
    assert all(_run(four, profile_between_steps, system))


def test_a_profile_of_chunks_under_megatrons_ddp(four):
    """Its list of buffers has the name of a module's method; gradients are collected in float32 buffers."""
    texts, same, counts = zip(*_run(four, measure, "gpt", False, True)[::2])
    assert texts[0] == texts[1] and all(same)
    costs = profile_from_object(json.loads(texts[0]), name="x").costs
    assert costs.static_bytes.sum() == pytest.approx(sum(counts) * (8 + 4 + 8))


# -- tuning by running ---------------------------------------------------------------------------------


def tune_by_running(world):
    """What the loop finds on two ranks, as plain values; and the gradients' memory after it."""
    plan = megatron.for_megatron(plan_of("1f1b", 2))
    mm.start(2, embedding_ranks=megatron.embedding_ranks(plan))

    def build(plan):
        config = mm.gpt_config(2, megatron.virtual_size(plan), megatron.placement(plan))

        def provider(pre_process, post_process, vp_stage):
            return mm.gpt(config, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)

        return megatron.build_chunks(plan, provider)

    usual = {"forward_step_func": mm.forward_step, "seq_length": mm.LENGTH, "micro_batch_size": 2}
    profile = megatron.profile(build(plan), data_iterator=iter(mm.batches(1)), repeats=2, warm_up=1, **usual)
    outcome = megatron.tune_measured(
        profile,
        build,
        data=lambda: iter(mm.batches(4)),
        num_micro_batches=4,
        tune_s=0.2,
        rounds=1,
        steps=2,
        systems=("1f1b", "zb-h1"),
        flags_too=True,
        **usual,
    )
    assert runs_on_megatron(outcome.rows[-1].plan)
    rows = [(row.name, row.ran.step_ms, len(row.ran.op_ms), len(row.plan.table().stage)) for row in outcome.rows]
    return rows, outcome.best.name, [str(op) for order in outcome.best.plan.orders for op in order]


@pytest.mark.slow
def test_tuning_by_running_measures_published_and_tuned_plans_and_keeps_the_fastest(four):
    results = _run(four, tune_by_running)[::2]
    assert results[0] == results[1]
    rows, best, _ = results[0]
    assert [name for name, *_ in rows] == ["1f1b", "zb-h1", "tuned 1", "tuned 1 by flags"]
    assert all(measured == ops and step_ms > 0 for _, step_ms, measured, ops in rows)
    assert best == min(rows, key=lambda row: row[1])[0]


def warned_of_precision(world, precision):
    """What the drop-in says about a plan whose times were measured in this precision, to chunks in float64."""
    import logging

    plan = megatron.for_megatron(plan_of("1f1b", 2)).with_extra(mode={"precision": precision, "graphs": False})
    mm.start(2, embedding_ranks=megatron.embedding_ranks(plan))
    config = mm.gpt_config(2, None, megatron.placement(plan))
    chunks = megatron.build_chunks(plan, lambda pre_process, post_process: mm.gpt(
        config, pre_process=pre_process, post_process=post_process))  # fmt: skip
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("octopipe.megatron").addHandler(handler)
    step = megatron.forward_backward_func(plan, timeout_s=PATIENCE_S)
    usual = {"forward_step_func": mm.forward_step, "seq_length": mm.LENGTH, "micro_batch_size": 2}
    for _ in range(2):
        step(**usual, model=chunks, data_iterator=iter(mm.batches(4)), num_microbatches=4)
    step.close()
    logging.getLogger("octopipe.megatron").removeHandler(handler)
    return said


def test_a_plan_of_another_precision_is_named_once(four):
    assert not any(_run(four, warned_of_precision, "fp64"))
    first = _run(four, warned_of_precision, "bf16-main-fp32")[0]
    assert len(first) == 1 and "bf16-main-fp32" in first[0] and "fp64" in first[0]


def test_ops_that_were_not_timed_have_no_timeline():
    step = megatron.forward_backward_func(plan_of("1f1b", 2))
    with pytest.raises(OctoPipeError, match="record=True"):
        step.timeline()

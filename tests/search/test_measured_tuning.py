"""The loop of tuning and measuring, against a machine whose true costs only the test knows."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from octopipe.costs.cluster.hardware import Link, Network
from octopipe.costs.profile_file import Profile
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.search.measured_tuning import Outcome, Ran, corrected, tune_measured
from octopipe.search.systems import build_plan
from octopipe.search.tuner import tune
from octopipe.simulation.contention import predict

SYMBOLS = "E" + "MA" * 8 + "H"
RANKS, COUNT = 2, 4
WRONG = {"M": (1.5, 1.2, 0.9), "A": (0.8, 1.0, 1.3), "E": (1.0, 1.0, 1.0), "H": (1.0, 1.4, 1.0)}
"""What the machine really takes for F, I and W, over what was profiled."""


def profile_of(factors: dict[str, tuple[float, float, float]] | None = None, *, overhead_ms: float = 0.0) -> Profile:
    base = {"E": (0.2, 0.1, 0.1), "M": (2.0, 2.2, 1.0), "A": (1.0, 1.8, 1.5), "H": (3.0, 3.0, 3.0)}
    times = np.array([base[s] for s in SYMBOLS])
    if factors:
        times = times * np.array([factors[s] for s in SYMBOLS])
    link = Link(latency_ms=0.05)
    costs = CostTable(
        model="made up",
        symbols=SYMBOLS,
        forward_ms=times[:, 0],
        input_ms=times[:, 1],
        weight_ms=times[:, 2],
        activation_bytes=np.full(len(SYMBOLS), 1e6),
        stash_bytes=np.full(len(SYMBOLS), 1e6),
        static_bytes=np.full(len(SYMBOLS), 1e6),
        gradient_bytes=np.full(len(SYMBOLS), 1e6),
        boundary_bytes=np.full(len(SYMBOLS), 1e5),
        workspace_bytes=np.zeros(len(SYMBOLS)),
        network=Network(intra=link, inter=link, pairs={}),
    )
    alone = costs.replace(forward_ms=0.8 * costs.forward_ms)
    return Profile(costs=costs, partial={1: alone}, op_overhead_ms=overhead_ms)


class Machine:
    """Runs plans by its own costs, with some noise."""

    def __init__(self, truth: Profile, noise: float = 0.0, seed: int = 0):
        self.truth, self.noise, self.ran = truth, noise, []
        self._random = np.random.default_rng(seed)

    def run(self, name: str, plan: Plan, _: Profile) -> Ran:
        self.ran.append(name)
        timeline = predict(plan, self.truth)
        took = timeline.spans.end_ms - timeline.spans.start_ms
        took = took * (1 + self.noise * self._random.standard_normal(took.size))
        return Ran(steps_ms=(timeline.makespan_ms,) * 3, op_ms=took, gap_ms=self.truth.op_overhead_ms)


def search(costs: CostTable, copies: bool) -> Plan:
    return tune(costs, RANKS, COUNT, budget_s=5.0, iterations=300, workers=1, copies=copies).plan


def loop(machine: Machine, known: Profile, **more: object) -> Outcome:
    return tune_measured(known, RANKS, COUNT, run=machine.run, search=search, copies=(False,), **more)  # type: ignore[arg-type]


def test_costs_that_are_wrong_by_layer_kind_are_found_and_the_prediction_agrees() -> None:
    machine = Machine(profile_of(WRONG, overhead_ms=0.03), noise=0.01)
    out = loop(machine, profile_of())
    found = {c.kind: (c.forward, c.input, c.weight) for c in out.corrections}
    for kind in "MAH":
        assert found[kind] == pytest.approx(WRONG[kind], rel=0.05), kind
    assert out.agreed
    assert out.predicted_ms == pytest.approx(out.best.ran.step_ms, rel=0.02)
    assert abs(out.rows[0].error) > 0.05  # the profile itself was far off


def test_the_result_is_the_plan_measured_fastest_published_ones_among_them() -> None:
    machine = Machine(profile_of(WRONG))
    out = loop(machine, profile_of(), rounds=2)
    assert out.best.ran.step_ms == min(r.ran.step_ms for r in out.rows)
    published = out.best_published
    assert published is not None and out.best.ran.step_ms <= published.ran.step_ms
    assert {r.name for r in out.rows if r.round == 0} <= {"1f1b", "interleaved", "zb-v"}


def test_a_published_plan_wins_where_every_tuned_one_is_slower() -> None:
    machine = Machine(profile_of())
    slow = build_plan("gpipe", profile_of().costs, RANKS, COUNT)
    out = tune_measured(profile_of(), RANKS, COUNT, run=machine.run, search=lambda costs, copies: slow, copies=(False,))
    assert out.best.round == 0 and out.best.name in ("1f1b", "interleaved", "zb-v")


def test_right_costs_agree_at_once_and_stay_what_they_are() -> None:
    machine = Machine(profile_of())
    out = loop(machine, profile_of())
    assert out.agreed and max(r.round for r in out.rows) == 1
    assert all(c.forward == pytest.approx(1.0, abs=1e-6) for c in out.corrections)


def test_a_budget_that_is_spent_ends_after_the_first_round() -> None:
    machine = Machine(profile_of(WRONG), noise=0.2)
    out = loop(machine, profile_of(), budget_s=1e-3, tolerance=0.0, rounds=5)
    assert max(r.round for r in out.rows) == 1


def test_fused_runs_alone_correct_both_halves_of_the_backward() -> None:
    truth = profile_of(dict.fromkeys("EMAH", (1.0, 1.3, 1.3)))
    known, machine = profile_of(), Machine(truth)
    out = tune_measured(
        known, RANKS, COUNT, run=machine.run, search=lambda c, t: build_plan("1f1b", c, RANKS, COUNT),
        systems=("gpipe",), copies=(False,), rounds=1,
    )  # fmt: skip
    now, told = corrected(known, out.rows, tuple(SYMBOLS))
    assert all(c.input == pytest.approx(1.3, rel=0.02) and c.weight == c.input for c in told)
    assert predict(out.best.plan, now).makespan_ms == pytest.approx(out.best.ran.step_ms, rel=0.02)


def test_what_does_not_apply_is_skipped_and_told() -> None:
    machine = Machine(profile_of())
    out = loop(machine, profile_of(), systems=("1f1b", "no-such-system"), rounds=1)
    assert len(out.skipped) == 1 and "no-such-system" in out.skipped[0]
    assert out.as_dict()["gain_over_published"] >= 1.0


def test_noise_of_one_step_is_not_taken_for_a_cost() -> None:
    """Of several machines: how often each layer is measured alone depends on the plans that the search finds."""
    noise = 0.05
    found: dict[str, list[float]] = {}
    for seed in range(9):
        out = loop(Machine(profile_of(), noise=noise, seed=seed), profile_of(), rounds=1)
        for c in out.corrections:
            found.setdefault(c.kind, []).append(max(abs(c.forward - 1), abs(c.input - 1)))
        found.setdefault("fused", []).append(abs(replace(out.profile, about={}).fused_factor - 1))
    assert {*"EMAH", "fused"} <= found.keys()
    assert all(np.median(errors) < noise for errors in found.values()), found


def test_a_plan_with_copies_is_judged_with_its_reductions() -> None:
    """And everything that is told of it is plain JSON."""
    profile = profile_of()
    slow = Link(latency_ms=0.05, ms_per_byte=1e-6)
    profile = profile.with_costs(profile.costs.replace(network=Network(intra=slow, inter=slow, pairs={})))
    plan = build_plan("chimera", profile.costs, RANKS, COUNT)
    timeline = predict(plan, profile)
    whole = timeline.reduced_ms
    assert whole > timeline.makespan_ms + 1.0
    assert whole == max(e.end_ms for e in timeline.extras if e.name.startswith("reduce"))
    out = tune_measured(
        profile, RANKS, COUNT, systems=("1f1b", "chimera"), copies=(True,), rounds=1,
        run=Machine(profile).run, search=lambda costs, copies: plan,
    )  # fmt: skip
    assert json.loads(json.dumps(out.as_dict()))["rows"][-1]["predicted_ms"] == pytest.approx(whole)

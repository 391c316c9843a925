"""A profile's record of its routing, and prices for another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.profile_file import Profile, load_profile, profile_from_object
from octopipe.costs.resolve import resolve_costs
from octopipe.costs.routing import Routing, busiest_rank
from octopipe.costs.segments import Segments
from octopipe.costs.table import CostTable
from octopipe.costs.table_file import costs_from_record, record_of

COUNTS = (60.0, 20.0, 10.0, 10.0)
"""Tokens of four experts; on two ranks the busier one has 80 of 100."""


def measured(ranks: int = 2, *, exchange: bool = True, partial: bool = False) -> Profile:
    """Two layers of which the second has experts: F and I of 10 and 20 ms, a fifth attention, the rest routed."""
    routed = [("compute", 2.0), ("exchange", 2.0), ("compute", 4.0), ("exchange", 2.0)]
    back = [("exchange", 4.0), ("compute", 8.0), ("exchange", 4.0), ("compute", 4.0)]
    plain = [("compute", 1.0)]
    costs = CostTable(
        model="two",
        symbols="EL",
        forward_ms=np.array([1.0, 10.0]),
        input_ms=np.array([1.0, 20.0]),
        weight_ms=np.array([1.0, 6.0]),
        segments=Segments.from_ms([plain, routed], [plain, back]) if exchange else None,
        routing=Routing(tokens=((), COUNTS), ranks=ranks),
    )
    alone = {1: costs.replace(forward_ms=0.5 * costs.forward_ms, input_ms=0.5 * costs.input_ms)} if partial else {}
    return Profile(costs=costs, partial=alone)


def saved(folder: Path, profile: Profile) -> str:
    path = folder / "two.json"
    profile.save(path)
    return str(path)


def test_a_profile_and_a_plan_keep_the_record(tmp_path: Path) -> None:
    profile = measured()
    again = load_profile(saved(tmp_path, profile))
    assert again.costs.routing == profile.costs.routing
    assert costs_from_record(json.loads(json.dumps(record_of(profile.costs)))).routing == profile.costs.routing


def test_the_record_is_no_part_of_what_tells_costs_apart() -> None:
    costs = measured().costs
    assert costs.digest() == costs.replace(routing=None).digest()


def test_what_was_measured_is_priced_as_measured(tmp_path: Path) -> None:
    path, costs = saved(tmp_path, measured()), measured().costs
    same = resolve_costs(path, pp=2, imbalance=busiest_rank(COUNTS, 2))
    for name in ("forward_ms", "input_ms", "weight_ms"):
        np.testing.assert_allclose(getattr(same, name), getattr(costs, name), rtol=1e-12)
    untouched = resolve_costs(path, pp=2)
    assert np.array_equal(untouched.forward_ms, costs.forward_ms) and untouched.segments == costs.segments


def test_the_slowest_rank_is_priced_once(tmp_path: Path) -> None:
    """By hand: with all tokens even, the busier rank has 50 of 100 instead of 80; attention does not change."""
    path = saved(tmp_path, measured())
    even = resolve_costs(path, pp=2, imbalance=1)
    np.testing.assert_allclose(even.forward_ms, [1.0, 2.0 + 8.0 * 50 / 80])
    np.testing.assert_allclose(even.input_ms, [1.0, 4.0 + 16.0 * 50 / 80])
    # Four of the six milliseconds that F computes are the experts'.
    np.testing.assert_allclose(even.weight_ms, [1.0, 2.0 + 4.0 * 50 / 80])
    assert even.segments is not None
    np.testing.assert_allclose(even.segments.share("F", "exchange")[1] * even.forward_ms[1], 4.0 * 50 / 80)
    # The tokens of every expert, on the ranks that the profile had.
    counted = resolve_costs(path, pp=2, imbalance=(50.0, 20.0, 20.0, 10.0))
    np.testing.assert_allclose(counted.forward_ms, [1.0, 2.0 + 8.0 * 70 / 80])


@pytest.mark.parametrize(
    ("profile", "why"),
    [
        (measured(1), "every rank held all experts"),
        (measured(exchange=False), "which parts of its layers exchange"),
        (Profile(costs=measured().costs.replace(routing=None)), "does not say with which routing"),
    ],
)
def test_a_profile_that_cannot_tell_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], profile: Profile, why: str
) -> None:
    path = saved(tmp_path, profile)
    assert main(["simulate", path, "--pp", "2", "--micro-batches", "4", "--system", "1f1b", "--imbalance", "1.2"]) == 2
    assert why in capsys.readouterr().err
    assert np.array_equal(resolve_costs(path, pp=2, imbalance=1.2).forward_ms, profile.costs.forward_ms)


def test_simulate_says_what_uneven_routing_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, measured(partial=True))
    flags = ["simulate", path, "--pp", "2", "--micro-batches", "4", "--system", "1f1b", "--json"]

    def numbers(*more: str) -> dict[str, Any]:
        assert main([*flags, *more]) == 0
        return dict(json.loads(capsys.readouterr().out))

    as_measured, worse, even = numbers(), numbers("--imbalance", "2"), numbers("--imbalance", "1")
    assert even["step_ms"] < as_measured["step_ms"] < worse["step_ms"]
    assert worse["evenly_routed_ms"] == pytest.approx(even["step_ms"], rel=1e-12)
    assert even["contended_step_ms"] < as_measured["contended_step_ms"] < worse["contended_step_ms"]


def test_as_many_experts_as_were_measured() -> None:
    with pytest.raises(OctoPipeError, match="tokens of 3 experts, and layer 1 has 4"):
        measured().costs.with_imbalance((1.0, 2.0, 3.0))


@pytest.mark.parametrize(
    ("routing", "word"),
    [
        ([], "give an object"),
        ({"counted": [{"layers": [2], "tokens": [1, 2]}]}, "from 0 to 1"),
        ({"counted": [{"layers": [1], "tokens": [0, 0]}]}, "not all 0"),
        ({"counted": [{"layers": [1], "tokens": [1, 2]}], "ranks": 0}, "ranks is 0"),
        ({"counted": [{"layers": [1], "tokens": [1, 2, 3]}], "ranks": 2}, "a divisor"),
    ],
)
def test_a_wrong_record_is_told_in_one_line(routing: object, word: str) -> None:
    file = {"pattern": "EL", "forward_ms": [1, 2], "backward_ms": [0, 2], "weight_ms": [1, 1], "routing": routing}
    with pytest.raises(OctoPipeError, match=f'profile: "routing".*{word}'):
        profile_from_object(file, name="two")


def test_words_name_the_busiest_and_the_idle() -> None:
    [line] = Routing(tokens=((), (6.0, 2.0, 0.0, 0.0)), ranks=2).words()
    assert "4 experts: 2 tokens in the mean, 6 for the busiest (3.00 times the mean)" in line
    assert "none for 2" in line and "busiest of 2 ranks has 2.00 times" in line

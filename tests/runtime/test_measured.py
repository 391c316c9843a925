"""Measured facts kept with the package: layer times by name, published runs."""

from __future__ import annotations

import csv
import json

import pytest

import octopipe
from octopipe.base.errors import OctoPipeError
from octopipe.costs.measured import AUTHORS, PUBLISHED_RUNS, measured_models
from octopipe.costs.resolve import resolve_costs


@pytest.mark.parametrize("name", measured_models())
def test_measured_times_are_a_model_by_name(name: str) -> None:
    file = json.loads((AUTHORS / f"{name.split('/')[1]}.json").read_text())
    costs = resolve_costs(name, pp=4)
    assert costs.num_layers == len(file["pattern"])
    assert costs.forward_ms.tolist() == [file["forward_ms"][symbol] for symbol in file["pattern"]]
    assert "SimPipe" in file["source"]


def test_a_plan_of_measured_times_simulates() -> None:
    assert octopipe.simulate("1f1b", "h800/nemotron-nano-v2-9b", 4, 8).makespan_ms == pytest.approx(1330.3, abs=0.1)


def test_an_unknown_measured_name_suggests_a_known_one() -> None:
    with pytest.raises(OctoPipeError, match=r"did you mean.*h800/nemotron-h-"):
        resolve_costs("h800/nemotron-h-9b", pp=4)


def test_every_published_run_has_a_source_and_a_rate() -> None:
    with PUBLISHED_RUNS.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 29
    assert all(row["source"] and float(row["tokens_per_s_per_gpu"]) > 0 for row in rows)

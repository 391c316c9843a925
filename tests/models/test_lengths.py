"""Sequences of different length: files, micro-batches, their prices, and DynaPipe on them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.resolve import resolve_costs
from octopipe.models.lengths import (
    Batch,
    distributed,
    distributed_evenly,
    packed_groups,
    padded_groups,
    read_lengths,
    sequence_numbers,
)
from octopipe.models.zoo import preset
from octopipe.search.batching import dynamic_groups, prices

MIXED = (4096, 1024, 512, 100, 2048, 300, 800, 64, 3000, 1500, 90, 700, 256, 2500, 600, 128)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, MIXED)) + "\n")
    return path


def test_lines_and_json_are_the_same_lengths(tmp_path: Path) -> None:
    lines, listed = tmp_path / "a.txt", tmp_path / "b.json"
    lines.write_text("# one step\n512\n\n96   # short\n1024\n")
    listed.write_text("[512, 96, 1024]")
    assert read_lengths(lines) == read_lengths(listed) == (512, 96, 1024)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no lengths"),
        ("512\n-3\n", "line 2"),
        ("512\n1e3\n", "line 2"),
        ("0\n", "whole number of tokens"),
        ("99999999999\n", "from 1 to"),
        ("[512, 2.5]", "length 1 is 2.5"),
        ("[512, true]", "length 1 is"),
        ('{"lengths": [1]}', "give a list"),
        ("[1, 2", "JSON"),
        ("\udcff\udcfe\udcff", "not a text in UTF-8"),
    ],
)
def test_what_is_no_length_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "lengths"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(OctoPipeError) as error:
        read_lengths(path)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_too_many_lengths_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("1\n" * 2_000_000)
    with pytest.raises(OctoPipeError, match="at most"):
        read_lengths(path)


def test_every_sequence_is_in_one_micro_batch() -> None:
    for groups in (padded_groups(MIXED, 3), packed_groups(MIXED, 4096)):
        assert sorted(x for g in groups for x in g) == sorted(MIXED)
    assert all(sum(g) <= 4096 for g in packed_groups(MIXED, 4096))
    with pytest.raises(OctoPipeError, match="sequence 0 has 4096 tokens, more than the 1000"):
        packed_groups(MIXED, 1000)


def test_pipelines_share_micro_batches_by_work() -> None:
    groups = padded_groups(MIXED, 1)
    shares = distributed(groups, 4, lambda g: float(sum(g)))
    assert sorted(x for share in shares for g in share for x in g) == sorted(MIXED)
    loads = [sum(map(sum, share)) for share in shares]
    assert loads[0] == max(loads) <= 1.05 * sum(MIXED) / 4
    even = distributed_evenly(groups, 4, lambda g: float(sum(g)))
    assert {len(share) for share in even} == {4}
    with pytest.raises(OctoPipeError, match="do not make 3 equal pipelines"):
        distributed_evenly(groups, 3, lambda g: float(sum(g)))
    numbers = sequence_numbers(MIXED, even)
    assert sorted(i for p in numbers for g in p for i in g) == list(range(16))
    assert all(MIXED[i] == x for p, q in zip(numbers, even, strict=True) for g, h in zip(p, q) for i, x in zip(g, h))


# -- prices ---------------------------------------------------------------------------------------------------------


def costs(lengths: list[list[int]], **more: object):  # type: ignore[no-untyped-def]
    return resolve_costs("llama3-8b", pp=2, tp=2, gpu="h100", micro_batch_lengths=lengths, **more)  # type: ignore[arg-type]


def test_a_micro_batch_costs_what_its_own_set_up_costs() -> None:
    groups = [[1024, 512], [4096], [256]]
    table = costs(groups)
    assert table.micro_batch_factor is not None
    for m, (count, length) in enumerate(((2, 1024), (1, 4096), (1, 256))):
        alone = resolve_costs("llama3-8b", pp=2, tp=2, gpu="h100", seq=length, micro_batch_size=count)
        np.testing.assert_allclose(table.layer_ms * table.micro_batch_factor[m], alone.layer_ms, rtol=1e-12)
        # Bytes follow the same factor and are never below the truth.
        assert np.all(table.activation_bytes * table.micro_batch_factor[m] >= alone.activation_bytes * (1 - 1e-12))
        assert np.all(table.boundary_bytes * table.micro_batch_factor[m] >= alone.boundary_bytes * (1 - 1e-12))
    assert table.tokens_per_micro_batch == round((1024 + 512 + 4096 + 256) / 3)  # padding is not counted


def test_recomputation_counts_for_every_length() -> None:
    table = costs([[4096], [1024]], recompute="full")
    alone = resolve_costs("llama3-8b", pp=2, tp=2, gpu="h100", seq=1024, recompute="full")
    assert table.micro_batch_factor is not None
    np.testing.assert_allclose(table.layer_ms * table.micro_batch_factor[1], alone.layer_ms, rtol=1e-12)


def test_packed_sequences_attend_to_themselves_alone() -> None:
    whole, packed = costs([[4096]]), costs([[1024] * 4], packed=True)
    padded = costs([[1024] * 4])

    def total(table):  # type: ignore[no-untyped-def]
        return float((table.layer_ms * table.micro_batch_factor[0]).sum())

    assert total(packed) < total(whole)
    assert total(packed) == pytest.approx(total(padded), rel=0.01)  # the same tokens, the same attention


def test_the_set_up_says_how_the_batch_is_made() -> None:
    setup = costs([[1024, 512], [4096]]).setup
    assert setup is not None and setup.samples == 3 and setup.global_batch == 3
    assert "2 micro-batches of 3 sequences, 512 to 4096 tokens, padded (8 % padding)" in setup.words()
    assert Batch(groups=((3, 5),), packed=True).words().endswith("packed")


# -- DynaPipe -------------------------------------------------------------------------------------------------------


def test_dynamic_groups_hold_every_sequence_and_are_no_worse_than_any_even_cut() -> None:
    spec, setup = preset("llama3-8b"), Setup(gpu=gpu("h100"), tp=2, pp=4)
    groups = dynamic_groups(spec, setup, MIXED)
    assert sorted(x for g in groups for x in g) == sorted(MIXED)
    time_ms, room = prices(spec, setup, max(MIXED))

    def value(cut: tuple[tuple[int, ...], ...]) -> float:
        times = [time_ms(len(g), max(g)) for g in cut]
        return 3 * max(times) + sum(times)

    assert all(len(g) * max(g) <= room for g in groups if len(g) > 1)
    by_length = tuple(sorted(MIXED))
    for size in (1, 2, 3, 4, 8, 16):
        cut = padded_groups(by_length, size)
        if all(len(g) * max(g) <= room for g in cut):
            assert value(groups) <= value(cut) * (1 + 1e-9)


def test_the_fitted_time_is_near_the_price() -> None:
    spec, setup = preset("llama3-8b"), Setup(gpu=gpu("h100"), tp=2, pp=2)
    time_ms, _ = prices(spec, setup, 4096)
    for count, length in ((1, 4096), (1, 1024), (4, 1024), (8, 512)):
        exact = resolve_costs("llama3-8b", pp=2, tp=2, gpu="h100", seq=length, micro_batch_size=count)
        assert time_ms(count, length) == pytest.approx(exact.layer_ms.sum() / 2, rel=0.12)


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict:  # type: ignore[type-arg]
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


COMMON = ["llama3-8b", "--pp", "4", "--tp", "2", "--gpu", "h100"]


def test_dynapipe_groups_and_orders_by_itself(file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["simulate", *COMMON, "--lengths", str(file)]
    plain = run([*words, "--system", "1f1b"], capsys)
    out = tmp_path / "plan.json"
    own = run([*words, "--system", "dynapipe", "-o", str(out)], capsys)
    assert own["micro_batches"] < plain["micro_batches"] == 16
    assert own["step_ms"] < 0.9 * plain["step_ms"]
    tokens = sum(MIXED) / 8
    for row in (plain, own):
        assert row["tokens_per_gpu_per_second"] == pytest.approx(tokens / (row["step_ms"] / 1e3), rel=1e-3)
    again = run(["simulate", "--plan", str(out)], capsys)
    assert again["step_ms"] == pytest.approx(own["step_ms"])
    assert again["setup"]["samples"] == 16


def test_compare_gives_dynapipe_its_own_micro_batches(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", *COMMON, "--lengths", str(file), "--systems", "1f1b,dynapipe"]
    rows = {row["system"]: row for row in run(words, capsys)["results"]}
    assert rows["dynapipe"]["micro_batches"] < rows["1f1b"]["micro_batches"] == 16
    assert rows["dynapipe"]["speedup"] > 1.1
    packed = {row["system"]: row for row in run([*words, "--pack"], capsys)["results"]}
    assert packed["1f1b"]["micro_batches"] == packed["dynapipe"]["micro_batches"] < 16


def test_pipelines_side_by_side_count_all_their_tokens(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pipeline with most to do sets the pace; tokens are those of all."""
    row = run(["simulate", *COMMON, "--dp", "3", "--lengths", str(file)], capsys)
    tokens = sum(MIXED) / (8 * 3)
    assert row["tokens_per_gpu_per_second"] == pytest.approx(tokens / (row["step_ms"] / 1e3), rel=1e-3)


def test_tune_takes_lengths(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", *COMMON, "--lengths", str(file), "--dynamic", "--budget", "2s"]
    found = run(words, capsys)
    assert found["setup"]["samples"] == 16


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--global-batch", "8"], "leave --global-batch out"),
        (["--micro-batches", "8"], "leave --micro-batches out"),
        (["--dynamic", "--micro-batch-size", "2"], "applies to --pad only"),
        (["--pad", "--seq", "2048"], "applies to --pack only"),
        (["--pack", "--seq", "1000"], "raise it"),
    ],
)
def test_flags_that_lengths_decide_are_refused(
    file: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert main(["simulate", *COMMON, "--lengths", str(file), *more]) == 2
    assert said in capsys.readouterr().err


def test_batching_without_lengths_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *COMMON, "--pack"]) == 2
    assert "give --lengths" in capsys.readouterr().err

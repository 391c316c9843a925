"""What a runtime cannot run of today's split and of the sizes that are asked for; the remedies that refusals name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from octopipe.base.errors import DoesNotFitError, OctoPipeError
from octopipe.cli.verbs.plan_answer import changes
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.models.zoo import preset
from octopipe.search.planner.judging import modes_of
from octopipe.search.planner.pricing import Pricer
from octopipe.search.planner.runtimes import RUNTIMES
from octopipe.search.planner.search import search
from octopipe.search.planner.splits import splits
from octopipe.search.planner.today import split_of_today
from octopipe.search.planner.unfit import PROBED, nothing_fits

MODEL = preset("llama3-8b")


def base(kind: str = "h100", **more: Any) -> Setup:
    return Setup(gpu=gpu(kind), **{"seq": 4096, **more})


@pytest.mark.parametrize(
    ("runtime", "cluster", "batch", "today", "why"),
    [
        ("deepspeed", base("a100", gpus_per_node=1, seq=32768), 1, {"tp": 1, "cp": 8}, "DeepSpeed does not run cp 8"),
        ("octopipe", base("h200", seq=8192), 2, {"tp": 8}, "`octopipe train` does not run tp 8"),
    ],
)
def test_a_split_of_today_that_the_runtime_cannot_run_is_no_answer(
    runtime: str, cluster: Setup, batch: int, today: dict[str, int], why: str
) -> None:
    asked: dict[str, Any] = {"gpus": 8, "global_batch": batch, "today": today, "budget_s": 2.0, "published": False}
    found = search(MODEL, cluster, runtime=RUNTIMES[runtime], **asked)
    assert found.today is not None and found.today.fits
    assert found.best.step_ms > found.today.step_ms and found.best.split != found.today.split
    assert found.unrun_today == why and f"{why}, so it cannot be the answer" in " ".join(changes(found))
    assert not RUNTIMES[runtime].refuses_sizes({k: getattr(found.best.split, k) for k in ("tp", "cp", "pp", "zero")})
    free = search(MODEL, cluster, **asked)
    assert free.best.step_ms <= found.today.step_ms and not free.unrun_today


def test_state_of_today_is_divided_as_the_runtime_divides_it() -> None:
    """Where the user does not say it."""

    def level(runtime: str, **today: int) -> int:
        known = RUNTIMES[runtime]
        return split_of_today(Pricer(MODEL, base(), 16), 8, today, "auto", known).split.zero

    assert level("octopipe", pp=4) == 0 and level("megatron", pp=4) == level("any", tp=2) == 1
    assert level("torchtitan", tp=2) == 2 and level("torchtitan", tp=2, zero=3) == 3 and level("torchtitan", pp=4) == 1


@pytest.mark.parametrize(
    ("runtime", "fixed", "said"),
    [
        ("octopipe", {"zero": 3}, "`octopipe train` runs ZeRO-0, not ZeRO-3"),
        ("octopipe", {"zero": 1, "pp": 2}, "`octopipe train` runs ZeRO-0 with a pipeline, not ZeRO-1"),
        ("torchtitan", {"zero": 1, "pp": 1}, "torchtitan runs ZeRO-2 or ZeRO-3 without a pipeline, not ZeRO-1"),
        ("torchtitan", {"zero": 0}, "not ZeRO-0"),
        ("megatron", {"zero": 2, "pp": 2}, "zero 2 and pp 2 exclude each other"),
    ],
)
def test_a_level_of_zero_that_the_runtime_does_not_run_is_refused(
    runtime: str, fixed: dict[str, int], said: str
) -> None:
    with pytest.raises(OctoPipeError, match=re.escape(said)):
        search(MODEL, base(), gpus=8, global_batch=16, fixed=fixed, runtime=RUNTIMES[runtime], budget_s=2.0)


def test_a_level_of_zero_that_the_runtime_runs_is_searched() -> None:
    def every(runtime: str, zero: int) -> list[Any]:
        asked = {"gpus": 8, "global_batch": 16, "fixed": {"zero": zero}, "runtime": RUNTIMES[runtime]}
        return list(splits(MODEL, base(), **asked))  # type: ignore[arg-type]

    assert all(s.pp > 1 or s.dp * s.cp == 1 for s in every("torchtitan", 1)) and every("torchtitan", 1)
    assert all(s.pp == 1 for s in every("torchtitan", 3)) and every("torchtitan", 3)
    for runtime in ("megatron", "torch", "deepspeed", "any", "octopipe"):
        assert any(s.dp > 1 for s in every(runtime, 0)), runtime
    assert all(s.dp * s.cp == 1 for s in every("octopipe", 1))


@pytest.mark.parametrize(
    ("gpus", "batch", "fixed", "runtime", "remedy"),
    [
        (12, 256, {"vp": 2}, "any", "leave vp out"),
        (6, 64, {"vp": 3, "micro_batch_size": 2}, "any", "leave vp out"),
        (8, 64, {"tp": 8, "pp": 8}, "any", "leave tp or pp out"),
        (48, 64, {"pp": 5, "tp": 3}, "any", "give fewer sizes"),
        (1000, 4, {"micro_batch_size": 2}, "octopipe", "change the batch or the GPUs"),
        (1000, 4, {}, "any", "change the batch or the GPUs"),
        (64, 3, {}, "octopipe", "leave --for out, or change the batch or the GPUs"),
    ],
)
def test_where_no_split_divides_the_mend_that_is_named_helps(
    gpus: int, batch: int, fixed: dict[str, int], runtime: str, remedy: str
) -> None:
    def every(sizes: dict[str, int], on: str = runtime) -> list[Any]:
        return list(splits(MODEL, base(), gpus=gpus, global_batch=batch, fixed=sizes, runtime=RUNTIMES[on]))

    with pytest.raises(OctoPipeError, match=r"no split of .* GPUs divides") as caught:
        search(MODEL, base(), gpus=gpus, global_batch=batch, fixed=fixed, runtime=RUNTIMES[runtime], budget_s=2.0)
    assert str(caught.value).endswith(f"; {remedy}")
    needless = [name for name in fixed if f"{name} " in f"{remedy} "]
    if needless:
        assert all(every({k: v for k, v in fixed.items() if k != name}) for name in needless)
    elif "fewer" in remedy:
        assert every({})
    else:
        assert not every({}) and bool(every(fixed, "any")) == ("--for" in remedy)


@pytest.mark.parametrize(
    ("model", "kind", "gpus", "seq"), [("llama3-70b", "l40s", 8, 32768), ("glm-4.5", "a100", 32, 8192)]
)
def test_the_split_that_needs_least_is_the_one_that_is_named(model: str, kind: str, gpus: int, seq: int) -> None:
    """Of splits with equal training state, those that divide activations and gathered weights need less."""
    spec, runtime = preset(model), RUNTIMES["any"]
    pricer = Pricer(spec, base(kind, seq=seq), 64)
    every, modes = list(splits(spec, pricer.base, gpus=gpus, global_batch=64)), modes_of("auto", runtime)
    words = nothing_fits(pricer, every, modes, runtime)
    needs = float(re.search(r"needs ([\d.]+) of", words)[1])  # type: ignore[index]
    largest = max(
        every, key=lambda s: s.tp * s.cp * (s.pp == 1 and s.zero == 3 and s.micro_batch_size == 1 and s.dp == 1)
    )
    assert needs <= pricer.candidate(largest, modes).peak_gib + 0.1 and len(every) > PROBED


def test_mends_for_what_does_not_fit_are_named_only_where_they_help() -> None:
    big, small = preset("llama3-70b"), preset("llama3-8b")
    with pytest.raises(DoesNotFitError) as caught:
        search(big, base(), gpus=2, global_batch=8, budget_s=2.0)
    assert str(caught.value).endswith("GiB; take more GPUs")  # its state alone is too large
    with pytest.raises(DoesNotFitError, match="give --recompute auto"):
        search(small, base(seq=16384), gpus=8, global_batch=8, fixed={"tp": 1, "cp": 1}, recompute="none", budget_s=2.0)
    one = {"gpus": 8, "global_batch": 8, "fixed": {"tp": 1, "cp": 1}, "budget_s": 2.0}
    assert search(small, base(seq=16384), **one).best.fits  # type: ignore[arg-type]
    with pytest.raises(DoesNotFitError, match="keep a smaller --reserve-gib"):
        search(small, base(reserve_gib=70.0), gpus=4, global_batch=8, budget_s=2.0)
    with pytest.raises(OctoPipeError, match=r"^today's split: .* tp 8 does not divide the 20 heads"):
        search(preset("whisper-large-v3"), base(), gpus=8, global_batch=8, today={"tp": 8}, budget_s=2.0)

"""The split that the user runs today: its price beside the search's answer, and whether it may be the answer itself.

Knows: the defaults of sizes that are not named, and what a runtime cannot run of it. Does not know: how splits are
priced (`pricing.py`) or searched (`search.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import Cluster
from octopipe.search.planner.pricing import Candidate, Pricer
from octopipe.search.planner.runtimes import Runtime
from octopipe.search.planner.splits import FIXABLE, Split


def split_of_today(pricer: Pricer, gpus: int, today: Mapping[str, int], recompute: str, runtime: Runtime) -> Candidate:
    """Return the split that the user runs today, priced with the same cost model. Missing sizes get their defaults."""
    try:
        return _priced(pricer, gpus, today, recompute, runtime)
    except OctoPipeError as error:
        words = str(error)
        raise OctoPipeError(words if words.startswith("today's") else f"today's split: {words}") from None


def _priced(pricer: Pricer, gpus: int, today: Mapping[str, int], recompute: str, runtime: Runtime) -> Candidate:
    base = pricer.base
    assert base.gpu is not None
    pp = today.get("pp", 1)
    zero = base.zero if base.zero in runtime.zero_asked(pp) else runtime.zero_levels(pp)[0]
    sizes = {"tp": 1, "cp": 1, "ep": 1, "pp": 1, "vp": 1, "micro_batch_size": 1, "zero": zero, **today}
    product = sizes["tp"] * sizes["cp"] * sizes["pp"]
    dp = sizes.pop("dp", 0) or gpus // product
    if product * dp != gpus:
        named = ", ".join(f"{k} {today[k]}" for k in ("tp", "cp", "pp", "dp") if k in today) or "one GPU"
        need = f"is of {product * dp}" if "dp" in today else f"needs multiples of {product}"
        raise OctoPipeError(f"today's split ({named}) {need} GPUs, the cluster has {gpus}; check its sizes")
    if sizes["vp"] > 1 and sizes["pp"] == 1:
        raise OctoPipeError(f"today's split has vp {sizes['vp']} but no pipeline (pp 1); leave vp out, or give pp")
    if sizes["pp"] > 1:
        sizes["zero"] = min(sizes["zero"], 1)  # with a pipeline, runtimes shard only optimizer state
    if "etp" not in sizes:
        sizes["etp"] = Cluster(gpu=base.gpu, tp=sizes["tp"], cp=sizes["cp"], dp=dp, ep=sizes["ep"]).expert_tp
        sizes["etp"] = sizes["etp"] if pricer.experts else 1
    split = Split(dp=dp, **sizes)
    if pricer.global_batch % (dp * split.micro_batch_size):
        raise OctoPipeError(
            f"today's dp {dp} and micro-batch size {split.micro_batch_size} do not divide the global batch "
            f"{pricer.global_batch}"
        )
    if split.vp == 2 and pricer.global_batch // (dp * split.micro_batch_size) % split.pp:
        # Interleaved 1F1B cannot run this; the two stages per rank are taken for those of a V-shaped schedule.
        one = replace(split, vp=1)
        found = [c for name in ("dualpipev", "zb-v") if (c := pricer.scheduled(one, name, recompute=recompute))]
        if found:
            return min(found, key=lambda c: c.step_ms)
    return pricer.simulated(split, recompute)


def refuses_today(today: Candidate, runtime: Runtime) -> str:
    """Return the reason why the runtime that was asked for cannot run the split that runs today; empty if it can, or if
    none was asked for."""
    if runtime.name == "any":
        return ""
    reason = runtime.refuses_sizes({name: getattr(today.split, name) for name in FIXABLE})
    pairs = today.plan is not None and bool(today.plan.pairs)
    if not reason and not runtime.any_order and today.how not in ("1f1b", "interleaved", "layout", *runtime.overlaps):
        reason = f"{runtime.title} has no orders of ops like {today.how}'s"
    if not reason and pairs and not runtime.runs_pairs:
        reason = f"{runtime.title} runs the two ops of a pair one after the other"
    return reason

"""Where a vision tower goes in a pipeline: in the first stage, in a stage of its own, or where the tuner puts it.

    python benchmarks/bench_encoders.py --budget 30

The costs are those of the presets (`octopipe models`), analytic, on H800 GPUs. Qwen2.5-VL 7B has a tower of 32 layers
over patches of 14 pixels, four of them with attention over the whole image and the others within windows of 64 patches,
in front of a language model of 28 layers. An image of 1036 x 1036 pixels is 5,476 patches and 1,369 tokens.
Micro-batches have as many tokens each and different numbers of images, drawn with a seed from a geometric distribution,
as many at most as their tokens can hold; every layer of the tower is priced for each of them. Both rivals run 1F1B with
their backward split and the best partition that their rule allows. The tower is trained, or frozen (no backward).
"""

from __future__ import annotations

import argparse

import numpy as np
from one_line import start

from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.search.systems.layer_ranges import one_f_one_b_plan
from octopipe.search.systems.split import split_backward
from octopipe.search.tuner import tune
from octopipe.simulation.simulator import simulate

TOWERS: dict[str, tuple[int, int | None]] = {
    "qwen2.5-vl-7b": (1369, 5476),
    "llava-1.5-7b": (576, None),
    "gemma-3-27b-vision": (256, None),
}
"""By preset: an image's tokens in the language model, and its positions in the tower where the model fixes none."""


def costs_of(model: str, counts: np.ndarray, pp: int, seq: int, frozen: bool) -> CostTable:
    """The preset's costs for micro-batches with these images."""
    return resolve_costs(
        model, pp=pp, tp=1, seq=seq, micro_batches=counts.size, images=[int(n) for n in counts],
        frozen="towers" if frozen else "", encoder_seq=TOWERS[model][1],
    )  # fmt: skip


def work_of(costs: CostTable) -> np.ndarray:
    """Time of every layer, on average over micro-batches."""
    return np.asarray(costs.layer_ms * np.asarray(costs.micro_batch_factor).mean(axis=0))


def balanced(work: np.ndarray, parts: int) -> list[int]:
    """Sizes of `parts` runs of consecutive layers whose largest sum is as small as possible."""
    low, high = float(work.max()), float(work.sum())
    for _ in range(60):
        middle = (low + high) / 2
        if len(_runs(work, middle)) <= parts:
            high = middle
        else:
            low = middle
    sizes = _runs(work, high * (1 + 1e-9))
    while len(sizes) < parts:  # a run more changes nothing about the largest
        k = int(np.argmax(sizes))
        sizes[k : k + 1] = [sizes[k] // 2, sizes[k] - sizes[k] // 2]
    return sizes


def _runs(work: np.ndarray, most: float) -> list[int]:
    sizes, total = [0], 0.0
    for ms in work:
        if total + ms > most and sizes[-1]:
            sizes.append(0)
            total = 0.0
        sizes[-1] += 1
        total += ms
    return sizes


def rivals(costs: CostTable, pp: int, micro_batches: int) -> dict[str, float]:
    """Step times of the tower in the first stage, and in a stage of its own."""
    number, work = costs.symbols.index("J"), work_of(costs)
    first = np.concatenate(([work[:number].sum()], work[number:]))
    with_tower = balanced(first, pp)
    partitions = {
        "in the first stage": [with_tower[0] - 1 + number, *with_tower[1:]],
        "a stage of its own": [number, *balanced(work[number:], pp - 1)],
    }
    out = {}
    for name, sizes in partitions.items():
        plan = split_backward(one_f_one_b_plan(costs, pp, micro_batches, tuple(sizes)), costs)
        out[name] = simulate(plan, costs).step_ms
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=30.0)
    parser.add_argument("--pp", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--model", choices=tuple(TOWERS), default="qwen2.5-vl-7b")
    parser.add_argument("--images", type=float, default=3.0, help="mean number of a micro-batch, before the most")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    drawn = np.random.default_rng(args.seed).geometric(1.0 / (args.images + 1.0), args.micro_batches) - 1
    counts = np.minimum(drawn, args.seq // TOWERS[args.model][0])
    print(f"images per micro-batch: {', '.join(map(str, counts))}\n")
    print("| tower | its share of the work | in the first stage ms | a stage of its own ms | tuned ms | faster |")
    print("|---|--:|--:|--:|--:|--:|")
    for frozen in (False, True):
        costs = costs_of(args.model, counts, args.pp, args.seq, frozen)
        found = rivals(costs, args.pp, args.micro_batches)
        result = tune(costs, args.pp, args.micro_batches, budget_s=args.budget, seed=args.seed, copies=False)
        work = work_of(costs)
        share = work[: costs.symbols.index("J")].sum() / work.sum()
        gains = " and ".join(f"{ms / result.step_ms:.2f}x" for ms in found.values())
        print(
            f"| {'frozen' if frozen else 'trained'} | {share:.0%} | "
            f"{' | '.join(f'{ms:.1f}' for ms in found.values())} | {result.step_ms:.1f} | {gains} |",
            flush=True,
        )


if __name__ == "__main__":
    start(main)

"""Where a vision tower goes in a pipeline: in the first stage, in a stage of its own, or where the tuner puts it.

    python benchmarks/bench_encoders.py --budget 30

The sizes are those of Qwen2.5-VL 7B (arXiv 2502.13923 and its config.json): a tower of 32 layers over patches of 14
pixels, four of them with attention over the whole image and the others within windows of 64 patches, in front of a
language model of 28 layers. An image of 1036 x 1036 pixels is 5,476 patches and 1,369 tokens. With `--tower vit-l`, a
ViT-L/14 at 336 pixels (24 layers, 576 tokens an image) stands in front of LLaMA 3 8B. Analytic costs of H800 GPUs.
Micro-batches have as many tokens each and different numbers of images, drawn with a seed from a geometric distribution,
as many at most as their tokens can hold; the tower's time grows with the images. Both rivals run 1F1B with their
backward split and the best partition that their rule allows. The tower is trained, or frozen and without backward.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import PER_LAYER, CostTable
from octopipe.models.spec import Attention, Block, Embedding, Head, Layer, Mlp, ModelSpec
from octopipe.models.zoo import preset
from octopipe.search.systems.layer_ranges import one_f_one_b_plan
from octopipe.search.systems.split import split_backward
from octopipe.search.tuner import tune
from octopipe.simulation.simulator import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Eyes:
    """A tower: its layers, and what an image is to it and to the language model."""

    width: int
    layers: tuple[Layer, ...]
    patches: int
    tokens: int
    language: ModelSpec


def qwen_vl() -> Eyes:
    """Qwen2.5-VL 7B."""
    width, tower = 1280, []
    for number in range(32):
        window = None if number in (7, 15, 23, 31) else 64
        tower += [
            Attention(hidden=width, heads=16, kv_heads=16, head_dim=80, window=window, qkv_bias=True),
            Mlp(hidden=width, ffn=3420, activation="swiglu"),
        ]
    block = Block(
        mixer=Attention(hidden=3584, heads=28, kv_heads=4, head_dim=128, rope_theta=1e6, qkv_bias=True),
        ffn=Mlp(hidden=3584, ffn=18944, activation="swiglu"),
    )
    ends = Embedding(hidden=3584, vocab=152064), Head(hidden=3584, vocab=152064)
    language = ModelSpec(name="qwen2.5-7b", layers=(ends[0], *[block] * 28, ends[1]), norm_eps=1e-6)
    return Eyes(width=width, layers=tuple(tower), patches=5476, tokens=1369, language=language)


def vit_l() -> Eyes:
    """A ViT-L/14 in front of LLaMA 3 8B."""
    width = 1024
    pair = (
        Attention(hidden=width, heads=16, kv_heads=16, head_dim=64),
        Mlp(hidden=width, ffn=4 * width, activation="gelu", norm="layer"),
    )
    return Eyes(width=width, layers=pair * 24, patches=576, tokens=576, language=preset("llama3-8b"))


TOWERS = {"qwen2.5-vl": qwen_vl, "vit-l": vit_l}


def tower(eyes: Eyes, images: int, pp: int) -> CostTable:
    """The tower on so many images: attention within an image."""
    ends = Embedding(hidden=eyes.width, vocab=1), Head(hidden=eyes.width, vocab=1)
    spec = ModelSpec(name="tower", layers=(ends[0], *eyes.layers, ends[1]), norm_eps=1e-5)
    return resolve_costs(spec, pp=pp, tp=1, seq=eyes.patches, micro_batch_size=images)


def joined(eyes: Eyes, counts: np.ndarray, pp: int, seq: int, frozen: bool) -> CostTable:
    """Tower and language model one after the other; micro-batches differ in their images."""
    mean = max(1, round(float(counts.mean())))
    sees, words = tower(eyes, mean, pp), resolve_costs(eyes.language, pp=pp, tp=1, seq=seq)
    kept = slice(1, sees.num_layers - 1)
    columns = {}
    for name in PER_LAYER:
        first = getattr(sees, name)[kept].copy()
        if frozen and name in (
            "input_ms",
            "weight_ms",
            "gradient_bytes",
            "optimizer_ms",
            "activation_bytes",
            "stash_bytes",
        ):
            first[:] = 0.0
        columns[name] = np.concatenate((first, getattr(words, name)))
    number = len(eyes.layers)
    factor = np.ones((counts.size, number + words.num_layers))
    factor[:, :number] = np.maximum(counts[:, None] / mean, 1e-3)
    return CostTable(
        model=f"tower + {eyes.language.name}", symbols="V" * number + words.symbols, network=words.network,
        micro_batch_factor=factor, **columns,
    )  # fmt: skip


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
    number = costs.symbols.count("V")
    work = costs.layer_ms * np.asarray(costs.micro_batch_factor).mean(axis=0)
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
    parser.add_argument("--tower", choices=tuple(TOWERS), default="qwen2.5-vl")
    parser.add_argument("--images", type=float, default=3.0, help="mean number of a micro-batch, before the most")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    eyes = TOWERS[args.tower]()
    drawn = np.random.default_rng(args.seed).geometric(1.0 / (args.images + 1.0), args.micro_batches) - 1
    counts = np.minimum(drawn, args.seq // eyes.tokens)
    print(f"images per micro-batch: {', '.join(map(str, counts))}\n")
    print("| tower | its share of the work | in the first stage ms | a stage of its own ms | tuned ms | faster |")
    print("|---|--:|--:|--:|--:|--:|")
    for frozen in (False, True):
        costs = joined(eyes, counts, args.pp, args.seq, frozen)
        found = rivals(costs, args.pp, args.micro_batches)
        result = tune(costs, args.pp, args.micro_batches, budget_s=args.budget, seed=args.seed, copies=False)
        work = costs.layer_ms * np.asarray(costs.micro_batch_factor).mean(axis=0)
        share = work[: costs.symbols.count("V")].sum() / work.sum()
        gains = " and ".join(f"{ms / result.step_ms:.2f}x" for ms in found.values())
        print(
            f"| {'frozen' if frozen else 'trained'} | {share:.0%} | "
            f"{' | '.join(f'{ms:.1f}' for ms in found.values())} | {result.step_ms:.1f} | {gains} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

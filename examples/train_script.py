"""Your own training loop on a pipeline: `torchrun --nproc-per-node 2 examples/train_script.py`.

The layers are any list of modules or factories, the plan any plan file, system or tuned plan. Each rank builds only
the layers it holds; the gradients are those of a single device.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import octopipe

WORDS, WIDTH, STEPS, MICRO_BATCHES = 64, 64, 20, 4


class Block(nn.Module):
    """Any module will do; this one mixes along the sequence, then along the width."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        wide = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), *wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        past = self.norm(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        x = x + self.mix(past)
        return x + self.mlp(x)


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    layers = [lambda: nn.Embedding(WORDS, WIDTH), *[Block] * 6, lambda: nn.Linear(WIDTH, WORDS)]

    # What a layer costs may come from `octopipe profile`; here all layers count as equal.
    costs = octopipe.CostTable.uniform(num_layers=len(layers))
    plan = octopipe.build_plan("zb-h1", costs, dist.get_world_size(), MICRO_BATCHES)  # or octopipe.tune(...).plan

    with octopipe.Pipeline(layers, plan, loss_fn) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
        generator = torch.Generator().manual_seed(0)  # the same data on every rank; each uses what it needs
        for step in range(STEPS):
            start = torch.randint(WORDS, (8, 1), generator=generator)
            text = (start + 3 * torch.arange(33)) % WORDS
            loss = pipe.step(text[:, :-1], text[:, 1:])
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if pipe.rank == 0:
                print(f"step {step + 1}  loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

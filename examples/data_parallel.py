"""Two pipelines of two ranks side by side: `torchrun --nproc-per-node 4 examples/data_parallel.py`.

On several nodes the same file: `torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500`.
Gradients are averaged over the pipelines; each pipeline trains on its own part of the batch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import octopipe

WIDTH, STEPS, MICRO_BATCHES, PIPELINES = 32, 8, 4, 2


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size() // PIPELINES
    # The pipeline is the last dimension: its ranks are neighbours, so that transfers stay inside a node.
    mesh = init_device_mesh("cpu", (PIPELINES, ranks), mesh_dim_names=("dp", "pp"))
    layers = [lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())] * 5 + [lambda: nn.Linear(WIDTH, 1)]

    costs = octopipe.CostTable.uniform(num_layers=len(layers))
    plan = octopipe.build_plan("1f1b", costs, ranks, MICRO_BATCHES)
    with octopipe.Pipeline(layers, plan, nn.functional.mse_loss, mesh=mesh) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(0)
        for step in range(STEPS):
            batch = torch.randn(8 * PIPELINES, WIDTH, generator=generator)
            mine = batch.chunk(PIPELINES)[mesh.get_local_rank("dp")]
            loss = pipe.step(mine, mine.mean(1, keepdim=True))  # the mean over both pipelines
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"step {step + 1}  loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

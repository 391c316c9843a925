"""torchtitan's llama3 under any plan: `torchrun --nproc-per-node 2 examples/torchtitan_train.py`, on CPUs.

Needs `pip install torchtitan` (written for 0.3.0). The model and its cut by module names are torchtitan's own; the hook
that its model spec has for pipelines runs our plan. torchtitan's trainer itself needs an accelerator (it takes "cuda"
where it finds none), so this script calls the hook as the trainer does, without FSDP, compilation and its data loader,
and with an attention that trains on a CPU (its own, FlexAttention, has no backward there). With GPUs set the same hook
in the config function that you train with, and leave the loop to torchtitan:

    config.model_spec = dataclasses.replace(config.model_spec, pipelining_fn=octopipe.torchtitan.pipelining_fn(plan))
"""

import dataclasses
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.module import Module

import octopipe
import octopipe.torchtitan

LENGTH, BATCH, MICRO_BATCHES, STEPS = 32, 8, 4, 6


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    spec = model_registry("debugmodel")
    blocks = len(spec.model.layers)

    # An embedding, the blocks, norm and head; what a layer costs may come from `octopipe profile`.
    times = [0.2, *[1.0] * blocks, 2.0]
    costs = octopipe.CostTable.uniform(num_layers=blocks + 2, p2p_ms=0.05)
    costs = costs.replace(forward_ms=times, input_ms=times, weight_ms=times)
    plan = octopipe.tune(costs, dist.get_world_size(), MICRO_BATCHES, iterations=200, copies=False).plan
    spec = dataclasses.replace(spec, pipelining_fn=octopipe.torchtitan.pipelining_fn(plan))

    with torch.device("meta"):
        model = spec.model.build()
    for module in list(model.modules()):
        if hasattr(module, "inner_attention"):
            module.inner_attention = CausalAttention()
    schedule, parts, has_first, has_last = spec.pipelining_fn(
        model,
        parallel_dims=SimpleNamespace(get_mesh=lambda name: mesh),
        training=SimpleNamespace(local_batch_size=BATCH),
        parallelism=SimpleNamespace(pipeline_parallel_microbatch_size=BATCH // MICRO_BATCHES),
        device=torch.device("cpu"),
        model_config=spec.model,
        parallelize_fn=lambda part, **_: part,
        loss_fn=loss_fn,
    )
    torch.manual_seed(dist.get_rank())
    for part in parts:
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights(buffer_device=None)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        text = (torch.randint(64, (BATCH, 1), generator=generator) + 3 * torch.arange(LENGTH + 1)) % 64
        losses: list[torch.Tensor] = []
        given = (text[:, :-1],) if has_first else ()
        schedule.step(*given, target=text[:, 1:] if has_last else None, losses=losses if has_last else None)
        optimizer.step()
        optimizer.zero_grad()
        if has_last:
            print(f"step {step + 1}  loss {torch.stack(losses).mean():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


class CausalAttention(Module):
    """torch's own attention in the place of FlexAttention; (batch, length, heads, width) in and out."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        **more: object,
    ) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # heads before the length
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2)


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


if __name__ == "__main__":
    main()

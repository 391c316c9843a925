"""A GPT of Megatron-Core under any plan: `torchrun --nproc-per-node 2 examples/megatron_train.py`, on CPUs or GPUs.

The model, its process groups and its `forward_step` are Megatron's own; `octopipe.megatron` places the layers as the
plan says and takes the place of `get_forward_backward_func`. With a plan file of yours: PLAN=tuned.json torchrun ...
"""

import os
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import octopipe
import octopipe.megatron

VOCAB, WIDTH, LENGTH, DECODERS, MICRO_BATCHES, STEPS = 64, 64, 16, 6, 4, 12
Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""What is differentiated, and what is reported."""


def select_device() -> bool:
    """One GPU per rank if there are enough of them, else CPUs; returns whether it is GPUs."""
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
        octopipe.megatron.use_cpu()
    return on_gpu


def main() -> None:
    warnings.simplefilter("ignore")  # Megatron-Core says at length which of its extensions are missing
    on_gpu = select_device()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    dist.init_process_group("nccl" if on_gpu else "gloo")
    plan = octopipe.megatron.for_megatron(the_plan(dist.get_world_size()))  # ranks named as Megatron wants them
    virtual = octopipe.megatron.virtual_size(plan)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=plan.num_ranks,
        virtual_pipeline_model_parallel_size=virtual,
        create_gloo_process_groups=False,
        get_embedding_ranks=octopipe.megatron.embedding_ranks(plan),
    )
    if on_gpu:
        model_parallel_cuda_manual_seed(1)
    else:
        initialize_rng_tracker(inference_rng_tracker=True)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=DECODERS,
        hidden_size=WIDTH,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_model_parallel_size=plan.num_ranks,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_model_parallel_layout=octopipe.megatron.placement(plan),
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
    )

    def model_provider(pre_process: bool, post_process: bool, vp_stage: int | None, layers: range) -> GPTModel:
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCAB,
            max_sequence_length=LENGTH,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        return model.cuda() if on_gpu else model

    chunks = octopipe.megatron.build_chunks(plan, model_provider)
    forward_backward = octopipe.megatron.forward_backward_func(plan)  # in the place of get_forward_backward_func()
    optimizer = torch.optim.AdamW([p for chunk in chunks for p in chunk.parameters()], lr=3e-3)
    for step in range(STEPS):
        losses = forward_backward(
            forward_step_func=forward_step,
            data_iterator=[batches(step, on_gpu) for _ in chunks],
            model=chunks,
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=4,
        )
        optimizer.step()
        optimizer.zero_grad()
        if losses:  # the rank of the last stage has them
            print(f"step {step + 1}  loss {sum(float(x['loss']) for x in losses) / len(losses):.4f}", flush=True)
    forward_backward.close()
    dist.destroy_process_group()


def the_plan(ranks: int) -> octopipe.Plan:
    """The plan of the file in PLAN, else one tuned for layers whose head is the largest."""
    if path := os.environ.get("PLAN"):
        return octopipe.load_plan(path)
    times = [0.2, *[1.0] * DECODERS, 2.0]
    costs = octopipe.CostTable.uniform(num_layers=DECODERS + 2, p2p_ms=0.05)
    costs = costs.replace(forward_ms=times, input_ms=times, weight_ms=times)
    # Counted moves instead of seconds: every rank finds the same plan.
    return octopipe.tune(costs, ranks, MICRO_BATCHES, iterations=300, copies=False, recompute="none").plan


def batches(step: int, on_gpu: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Sequences that count in threes from a random start, one micro-batch after the other."""
    generator = torch.Generator().manual_seed(step)
    for _ in range(MICRO_BATCHES):
        text = (torch.randint(VOCAB, (4, 1), generator=generator) + 3 * torch.arange(LENGTH + 1)) % VOCAB
        text = text.cuda() if on_gpu else text
        yield {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Loss]]:
    """As in any Megatron script: one micro-batch through a chunk, and the loss of its output."""
    batch = next(data_iterator)
    tokens = batch["tokens"]
    positions = torch.arange(LENGTH, device=tokens.device).expand_as(tokens)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).triu(1)
    output = model(tokens, positions, mask, labels=batch["labels"])

    def loss(values: torch.Tensor) -> Loss:
        mean = values.mean()
        return mean, {"loss": mean.detach().clone()}

    return output, loss


if __name__ == "__main__":
    main()

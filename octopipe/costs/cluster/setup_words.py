"""A set-up as one line of text.

Knows: which fields are mentioned, and when. Does not know: what they mean for costs (`analytic/`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octopipe.costs.cluster.fields import ranges_text

if TYPE_CHECKING:
    from octopipe.costs.cluster.setup import Setup


def words_of(setup: Setup) -> str:
    """Describe a set-up in one line, which is shown with the numbers that it applies to."""
    if setup.gpu is None:
        where = f"measured times: pp {setup.pp}" + (f", dp {setup.dp}" if setup.dp > 1 else "")
    else:
        known = {name: getattr(setup, name) for name in ("tp", "cp", "ep", "etp", "pp", "dp")}
        sizes = [f"{name} {size}" for name, size in known.items() if name in ("tp", "pp") or (size or 1) > 1]
        used = setup.used_gpus or [(setup.gpu.name, setup.num_gpus)]
        kinds = " + ".join(f"{number} x {name}" for name, number in used)
        where = f"{kinds}: {', '.join(sizes)}"
    length = "" if setup.seq is None else f" x {setup.seq} tokens"
    batch = "" if setup.gpu is None and setup.seq is None else f"micro-batches of {setup.micro_batch_size}{length}"
    if setup.batch is not None:
        batch = setup.batch
    elif setup.micro_batches is not None:
        batch = f"{setup.micro_batches} {batch or 'micro-batches'}, global batch {setup.global_batch}"
        batch = batch.replace("micro-batches", "micro-batch", 1) if setup.micro_batches == 1 else batch
    batch += _items(setup)
    how = []
    if setup.gpu is not None:
        how = [setup.precision] + ([f"ZeRO-{setup.zero}"] if setup.dp * setup.cp > 1 else [])
        how += [f"{setup.hsdp} copies of it (HSDP)"] * (setup.hsdp > 1)
        how += [] if setup.lora is None else [f"LoRA of rank {setup.lora}{' on attention' * (setup.lora_on != 'all')}"]
        how += [f"layers {ranges_text(setup.frozen)} frozen"] * bool(setup.frozen)
        how += [f"{setup.offload_optimizer:.0%} of the optimizer state on the host"] * (setup.offload_optimizer > 0)
        how += [] if setup.offload_layers is None else [f"activations of {setup.offload_layers} layers on the host"]
        if setup.nodes_per_token is not None and setup.ep > 1:
            how.append(f"experts of a token on at most {setup.nodes_per_token} nodes")
        how += [setup.recompute_words()] * (setup.recompute != "none")
        how += ["no sequence parallelism"] * (not setup.sequence_parallel and setup.tp > 1)
        how += ["vocabulary parallel"] * setup.vocab_parallel
        if setup.imbalance and setup.ep > 1:
            spread = f"{setup.imbalance[0]:g} x the mean" if len(setup.imbalance) == 1 else "as counted"
            how.append(f"tokens of the busiest expert rank {spread}")
        how += [f"{setup.cp_kind} context parallelism"] * (setup.cp > 1 and setup.cp_kind != "ring")
        how += [f"{setup.states} optimizer state"] * (setup.states != "fp32")
        how += [] if setup.stack is None else [f"{setup.stack.name} rates"]
    return "; ".join(part for part in (where, batch, ", ".join(how)) if part)


def _items(setup: Setup) -> str:
    """Describe what the model's encoder reads; empty if the set-up states nothing about an encoder."""
    size = "" if setup.encoder_seq is None else f", {setup.encoder_seq} positions each"
    count = _count(setup.images)
    if setup.recordings:
        return f", images: {count} per sequence{size}, recordings: {_count(setup.recordings)} per sequence"
    return f", encoder inputs: {count} per sequence{size}" if size or setup.images else ""


def _count(counts: tuple[float, ...]) -> str:
    low, high = min(counts, default=1.0), max(counts, default=1.0)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"

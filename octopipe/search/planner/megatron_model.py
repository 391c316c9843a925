"""A model as the flags of Megatron-LM's pretraining scripts.

Knows: the flags that describe layers, at the version `runtimes.py` names, and what Megatron-LM builds from them. Does
not know: splits (`megatron_line.py`), and constants that change no cost, such as the scale of a router or of a rotary
embedding.

The flags describe a model with exactly the layers that were priced, apart from the padding of its vocabulary.
Megatron-LM has one value per flag for all layers; a model that its flags cannot describe (norms behind its layers,
biases in some matrices alone, windows of several widths) is refused with the reason, because the command would train
another model.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NoReturn, TypeVar

from octopipe.base.errors import OctoPipeError
from octopipe.models.spec import (
    Attention,
    Block,
    Embedding,
    Head,
    LatentAttention,
    Layer,
    Mamba2,
    Mlp,
    ModelSpec,
    Moe,
    Mtp,
)

ACTIVATIONS = {"swiglu": ["--swiglu"], "gelu": [], "relu2": ["--squared-relu"]}
_T = TypeVar("_T", bound=Hashable)


def model_flags(spec: ModelSpec, seq: int) -> tuple[str, list[str]]:
    """Return the script that builds the model, and its flags."""
    embedding, head = spec.layers[0], spec.layers[-1]
    if spec.source is not None:
        raise OctoPipeError(f"no Megatron-LM flags are known here for {spec.name}, which has a tower or an encoder")
    if not isinstance(embedding, Embedding) or not isinstance(head, Head):
        raise OctoPipeError(f"{spec.name} does not begin with an embedding and end with a head")
    inner = [layer for layer in spec.layers[1:-1] if not isinstance(layer, Mtp)]
    predictions = sum(isinstance(layer, Mtp) for layer in spec.layers)
    parts = [part for layer in inner for part in layer.parts]
    blocks = all(isinstance(layer, Block) for layer in inner)
    attention = [p for p in parts if isinstance(p, Attention | LatentAttention)]
    if blocks and (unknown := sorted({p.kind for p in parts} - {"attention", "latent_attention", "mlp", "moe"})):
        raise OctoPipeError(f"no Megatron-LM flags are known here for {', '.join(unknown)} layers; add your own")
    dense, experts = [p for p in parts if isinstance(p, Mlp)], [p for p in parts if isinstance(p, Moe)]
    feed_forward = _feed_forward(dense, experts, spec.name)
    learned = max(embedding.positions, seq)
    flags = [f"--hidden-size {embedding.hidden} --seq-length {seq} --max-position-embeddings {learned}"]
    flags.append(f"--vocab-size {embedding.vocab - 1}")  # NullTokenizer adds one token
    flags += [] if head.tied else ["--untie-embeddings-and-output-weights"]
    flags += _norm(embedding, head, parts, spec.name)
    flags += _biases(parts, spec.name)
    flags += _attention(attention, blocks, spec.name)
    flags += _positions(embedding, attention, blocks, spec.name)
    flags += feed_forward
    if blocks:
        flags.insert(0, f"--num-layers {len(inner)}")
        flags += _moe_frequency(inner)
        flags += [f"--mtp-num-layers {predictions}"] if predictions else []
        return "pretrain_gpt.py", flags
    return "pretrain_hybrid.py", [*flags, *_hybrid(inner, spec.name)]


def _refuse(name: str, why: str) -> NoReturn:
    raise OctoPipeError(f"{name}: {why}; add your own flags")


def _one(values: Iterable[_T], what: str, name: str) -> _T:
    """The value that all layers have."""
    found = list(values)
    if len(set(found)) > 1:
        _refuse(name, f"Megatron-LM has one {what} for all layers, and these differ")
    return found[0]


def _runs(values: Sequence[bool]) -> str:
    """A value per layer as the list expression that Megatron-LM's flags take.

    >>> _runs([False, True, True])
    "'[0]*1+[1]*2'"
    """
    runs: list[tuple[int, int]] = []
    for value in map(int, values):
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return f"'{'+'.join(f'[{value}]*{count}' for value, count in runs)}'"


def _norm(embedding: Embedding, head: Head, parts: list[Layer], name: str) -> list[str]:
    if any(getattr(p, "post_norm", False) for p in parts):
        _refuse(name, "Megatron-LM has no flag for norms behind attention and feed-forward layers")
    if embedding.multiplier != 1.0:
        _refuse(name, "Megatron-LM has no flag for embeddings that are multiplied by a number")
    norm = _one([head.norm, *(getattr(p, "norm", "rms") for p in parts)], "kind of norm", name)
    return [f"--normalization {'RMSNorm' if norm == 'rms' else 'LayerNorm'}"]


def _biases(parts: list[Layer], name: str) -> list[str]:
    """The flags for biases. Megatron-LM has them in all matrices by default, in none, or in those of queries, keys and
    values alone."""
    plain = [p for p in parts if isinstance(p, Attention)]
    experts = [p for p in parts if isinstance(p, Moe)]
    others = {p.out_bias for p in plain} | {p.bias for p in parts if isinstance(p, Mlp | Moe)}
    queries = {p.qkv_bias for p in plain}
    if any(p.bias for p in parts if isinstance(p, LatentAttention)):
        _refuse(name, "Megatron-LM's latent attention has no biases")
    if others | queries == {True} and not any(p.shared_ffn for p in experts):
        # Grouped experts with biases do not run with the fused addition of a bias and dropout.
        return ["--no-bias-dropout-fusion"] if experts else []
    if True in others or len(queries) > 1:
        _refuse(name, "Megatron-LM has biases in all matrices, in none, or in those of queries, keys and values alone")
    return ["--disable-bias-linear", *(["--add-qkv-bias"] if queries == {True} else [])]


def _attention(found: list[Attention | LatentAttention], blocks: bool, name: str) -> list[str]:
    if not found:
        return ["--num-attention-heads 8"]
    heads = _one((p.heads for p in found), "number of heads", name)
    flags = [f"--num-attention-heads {heads}"]
    latent = [p for p in found if isinstance(p, LatentAttention)]
    plain = [p for p in found if isinstance(p, Attention)]
    if latent and plain:
        raise OctoPipeError(f"{name}: Megatron-LM has latent or plain attention in all layers, not both")
    if latent:
        p = _one(latent, "latent attention", name)
        flags.append(f"--multi-latent-attention --kv-lora-rank {p.kv_rank} --qk-head-dim {p.nope_dim}")
        flags.append(f"--qk-pos-emb-head-dim {p.rope_dim} --v-head-dim {p.v_dim} --qk-layernorm")
        return [*flags, *([f"--q-lora-rank {p.q_rank}"] if p.q_rank else [])]
    groups = _one((p.kv_heads for p in plain), "number of key-value heads", name)
    flags += [f"--group-query-attention --num-query-groups {groups}"] if groups != heads else []
    flags.append(f"--kv-channels {_one((p.head_dim for p in plain), 'head width', name)}")
    for flag, has, what in (
        ("--qk-layernorm", [p.qk_norm for p in plain], "norm of queries and keys"),
        ("--softmax-type learnable", [p.sinks for p in plain], "kind of softmax"),
        ("--attention-output-gate", [p.gated for p in plain], "output of attention"),
    ):
        flags += [flag] if _one(has, what, name) else []
    return [*flags, *_windows(plain, blocks, name)]


def _windows(plain: list[Attention], blocks: bool, name: str) -> list[str]:
    """The flags for sliding windows, and for the layers that attend to everything."""
    windows = [p.window for p in plain if p.window is not None]
    if not windows:
        return []
    flags = [f"--window-size {_one(windows, 'width of windows', name) - 1},0"]
    slides = [p.window is not None for p in plain]
    if all(slides):
        return flags
    if not blocks:
        _refuse(name, "Megatron-LM's hybrid models have windows in all attention layers or in none")
    every = slides.index(False) + 1
    regular = all(slide == ((number + 1) % every != 0) for number, slide in enumerate(slides))
    return [*flags, f"--window-attn-skip-freq {every if regular else _runs(slides)}"]


def _positions(embedding: Embedding, found: list[Attention | LatentAttention], blocks: bool, name: str) -> list[str]:
    """The flags for positions: learned ones, rotary ones in all or some layers, or none in a hybrid model."""
    rotary = [p for p in found if p.rope_theta is not None]
    if embedding.positions and rotary:
        _refuse(name, "Megatron-LM has learned or rotary positions, not both")
    if embedding.positions:
        return ["--position-embedding-type learned_absolute"]
    if not rotary:
        if blocks:
            _refuse(name, "how its attention learns positions (rotary, ALiBi) is not known here")
        return ["--position-embedding-type none"]
    base = _one((p.rope_theta for p in rotary), "base of rotary positions", name) or 0
    flags = [f"--position-embedding-type rope --rotary-base {int(base)}"]
    shares = [(p.rotary_dim or p.head_dim) / p.head_dim for p in rotary if isinstance(p, Attention)]
    if shares and (share := _one(shares, "width of rotary positions", name)) != 1:
        flags.append(f"--rotary-percent {share:g}")
    if len(rotary) < len(found):
        if not blocks:
            _refuse(name, "Megatron-LM's hybrid models have rotary positions in all attention layers or in none")
        flags.append(f"--no-rope-freq {_runs([p.rope_theta is None for p in found])}")
    return flags


def _feed_forward(dense: list[Mlp], experts: list[Moe], name: str) -> list[str]:
    flags: list[str] = []
    kinds = sorted({*(p.activation for p in dense), *(p.activation for p in experts)})
    if len(kinds) > 1 or (kinds and kinds[0] not in ACTIVATIONS):
        raise OctoPipeError(f"{name}: no Megatron-LM flag is known here for {', '.join(kinds)}; add your own")
    flags += ACTIVATIONS[kinds[0]] if kinds else []
    if dense:
        flags.append(f"--ffn-hidden-size {_one((p.ffn for p in dense), 'feed-forward width', name)}")
    if experts:
        p = _one(experts, "kind of experts", name)
        flags.append(f"--num-experts {p.experts} --moe-router-topk {p.top_k} --moe-ffn-hidden-size {p.ffn}")
        flags.append("--moe-grouped-gemm --moe-router-load-balancing-type aux_loss")
        flags += [] if dense else [f"--ffn-hidden-size {p.ffn}"]
        flags += [f"--moe-shared-expert-intermediate-size {p.shared_ffn}"] if p.shared_ffn else []
        flags += ["--moe-shared-expert-gate"] if p.shared_gate else []
        flags += [f"--moe-latent-size {p.latent}"] if p.latent else []
    return flags


def _moe_frequency(inner: list[Layer]) -> list[str]:
    """The flag that says which blocks have experts, if not all of them do."""
    has = [any(isinstance(p, Moe) for p in layer.parts) for layer in inner]
    return [] if all(has) or not any(has) else [f"--moe-layer-freq {_runs(has)}"]


def _hybrid(inner: list[Layer], name: str) -> list[str]:
    mamba = [layer for layer in inner if isinstance(layer, Mamba2)]
    others = sorted({layer.kind for layer in inner} - {"mamba2", "attention", "latent_attention", "mlp", "moe"})
    if others or not mamba:
        what = ", ".join(others) or "separate attention and feed-forward layers without Mamba"
        raise OctoPipeError(f"{name}: no Megatron-LM flags are known here for {what}; add your own")
    m = _one(mamba, "kind of Mamba layer", name)
    if m.conv != 4:
        _refuse(name, f"Megatron-LM's Mamba layers have a convolution of width 4, not {m.conv}")
    sizes = f"--mamba-state-dim {m.state} --mamba-head-dim {m.head_dim} --mamba-num-heads {m.heads}"
    spec = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
    return [spec, f"{sizes} --mamba-num-groups {m.groups}"]

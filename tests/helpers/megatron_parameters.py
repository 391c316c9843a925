"""How many parameters the model has that Megatron-LM builds for its flags, counted module by module from them alone.

Knows: the modules of Megatron-Core's GPT and hybrid models and their defaults. Does not know: our layers, or the
padding of the vocabulary, which is left out.
"""

from __future__ import annotations

from collections.abc import Mapping


def gpt_parameters(flags: Mapping[str, list[str]]) -> int:
    """Parameters of `pretrain_gpt.py` with these flags."""
    blocks = int(flags["--num-layers"][0])
    experts = _experts_per_block(flags, blocks)
    attention, dense, sparse = _attention(flags), _dense(flags), _sparse(flags)
    inner = sum(attention + (sparse if has else dense) for has in experts)
    predictions = int(flags.get("--mtp-num-layers", ["0"])[0])
    h = int(flags["--hidden-size"][0])
    # A prediction layer: two norms of its inputs, their projection, a block as the last one, a final norm.
    one = 2 * _norm(flags) + 2 * h * h + attention + (sparse if experts[-1] else dense) + _norm(flags)
    return _frame(flags) + inner + predictions * one


def hybrid_parameters(flags: Mapping[str, list[str]], pattern: str) -> int:
    """Parameters of `pretrain_hybrid.py` with these flags and this pattern of layers (M, -, *, E)."""
    of = {"M": _mamba(flags), "*": _attention(flags), "-": _dense(flags), "E": _sparse(flags)}
    return _frame(flags) + sum(of[letter] for letter in pattern)


def _number(flags: Mapping[str, list[str]], name: str, default: int | None = None) -> int:
    return int(flags[name][0]) if name in flags or default is None else default


def _biased(flags: Mapping[str, list[str]]) -> bool:
    return "--disable-bias-linear" not in flags


def _norm(flags: Mapping[str, list[str]]) -> int:
    return _number(flags, "--hidden-size") * (2 if flags["--normalization"] == ["LayerNorm"] else 1)


def _frame(flags: Mapping[str, list[str]]) -> int:
    """Embedding, learned positions, final norm and head."""
    h, words = _number(flags, "--hidden-size"), _number(flags, "--vocab-size") + 1
    count = words * h + _norm(flags)
    count += words * h if "--untie-embeddings-and-output-weights" in flags else 0
    learned = flags.get("--position-embedding-type", ["learned_absolute"]) == ["learned_absolute"]
    return count + (_number(flags, "--max-position-embeddings") * h if learned else 0)


def _experts_per_block(flags: Mapping[str, list[str]], blocks: int) -> list[bool]:
    if "--num-experts" not in flags:
        return [False] * blocks
    out: list[bool] = []
    for run in flags.get("--moe-layer-freq", [f"[1]*{blocks}"])[0].split("+"):
        value, count = run.split("*")
        out += [value == "[1]"] * int(count)
    assert len(out) == blocks
    return out


def _attention(flags: Mapping[str, list[str]]) -> int:
    h, heads = _number(flags, "--hidden-size"), _number(flags, "--num-attention-heads")
    if "--multi-latent-attention" in flags:
        rope, nope, v = (_number(flags, f"--{what}-dim") for what in ("qk-pos-emb-head", "qk-head", "v-head"))
        rank, q_rank = _number(flags, "--kv-lora-rank"), _number(flags, "--q-lora-rank", 0)
        norms = (rank + q_rank) if "--qk-layernorm" in flags else 0
        queries = (h * q_rank + q_rank * heads * (nope + rope)) if q_rank else h * heads * (nope + rope)
        return _norm(flags) + norms + queries + h * (rank + rope) + rank * heads * (nope + v) + heads * v * h
    groups = _number(flags, "--num-query-groups", heads) if "--group-query-attention" in flags else heads
    width = _number(flags, "--kv-channels", h // heads)
    rows = (heads + 2 * groups) * width + (heads * width if "--attention-output-gate" in flags else 0)
    count = _norm(flags) + h * rows + heads * width * h
    count += rows if _biased(flags) or "--add-qkv-bias" in flags else 0
    count += h if _biased(flags) else 0
    count += 2 * width if "--qk-layernorm" in flags else 0
    return count + (heads if flags.get("--softmax-type") == ["learnable"] else 0)


def _matrices(flags: Mapping[str, list[str]], h: int, ffn: int) -> int:
    rows = 2 * ffn if "--swiglu" in flags else ffn
    return h * rows + ffn * h + (rows + h if _biased(flags) else 0)


def _dense(flags: Mapping[str, list[str]]) -> int:
    h = _number(flags, "--hidden-size")
    return _norm(flags) + _matrices(flags, h, _number(flags, "--ffn-hidden-size"))


def _sparse(flags: Mapping[str, list[str]]) -> int:
    if "--num-experts" not in flags:
        return 0
    h, experts, latent = (_number(flags, f"--{n}", 0) for n in ("hidden-size", "num-experts", "moe-latent-size"))
    count = _norm(flags) + experts * h + (experts if _biased(flags) else 0)
    count += experts * _matrices(flags, latent or h, _number(flags, "--moe-ffn-hidden-size")) + 2 * h * latent
    if shared := _number(flags, "--moe-shared-expert-intermediate-size", 0):
        assert not _biased(flags), "Megatron-Core's shared experts assert that there are no biases"
        count += _matrices(flags, h, shared) + (h if "--moe-shared-expert-gate" in flags else 0)
    return count


def _mamba(flags: Mapping[str, list[str]]) -> int:
    if "--mamba-state-dim" not in flags:
        return 0
    h, state = _number(flags, "--hidden-size"), _number(flags, "--mamba-state-dim")
    width, groups = _number(flags, "--mamba-head-dim", 64), _number(flags, "--mamba-num-groups", 8)
    heads = _number(flags, "--mamba-num-heads", 2 * h // width)
    inner = heads * width
    convolved = inner + 2 * groups * state
    # in_proj (z, x, B, C, dt), the convolution and its bias, A, D and dt's bias, the gated norm, out_proj
    return _norm(flags) + h * (inner + convolved + heads) + 5 * convolved + 3 * heads + inner + inner * h

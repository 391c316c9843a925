"""A fine-tune from end to end, compared step by step with the same run in plain torch.

    python scripts/fine_tune.py                 # 300 steps, float32
    python scripts/fine_tune.py --dtype float64

A small transformers model with random weights and a tokenizer trained on made-up text are written to a folder. Then:

1. `octopipe train` on the jsonl text with 2 ranks under 1F1B, evaluated, interrupted (SIGINT) in the middle;
2. resumed under another plan (ZB-H1), to the last step;
3. `octopipe convert --to huggingface`, loaded with `from_pretrained`;
4. the same run as a plain loop over transformers' own model, with torch's AdamW, clipping and a schedule of its own.

Compared are every step's loss, the evaluations, and the weights at the end. The plain loop reads the jsonl itself; of
octopipe it takes only the function that names the order of the samples.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

SEQ, MICRO_BATCHES, LR, WARMUP, DECAY, BETAS, CLIP, SEED = 48, 4, 3e-3, 20, 0.1, (0.9, 0.95), 1.0, 3
VOCAB, END = 320, "<|endoftext|>"
FLAGS = [
    *("--seq", str(SEQ), "--micro-batches", str(MICRO_BATCHES), "--lr", str(LR), "--schedule", "cosine"),
    *("--warmup", str(WARMUP), "--weight-decay", str(DECAY), "--clip", str(CLIP), "--seed", str(SEED), "--no-measure"),
]

Sample = tuple[list[int], list[int], list[int]]
"""Its tokens, their positions and the next tokens."""


# -- what a user has -----------------------------------------------------------------------------------


def make_material(home: Path, family: str = "llama") -> None:
    """`corpus.jsonl`, `held.jsonl`, and `model/`: a tokenizer and a model with random weights."""
    import tokenizers
    import torch
    import transformers

    rng = random.Random(0)
    nouns = ("octopus", "pipe", "stage", "rank", "layer", "loss", "token", "plan")
    verbs, looks = ("moves", "holds", "sees", "sends", "keeps", "trains"), ("small", "late", "deep", "idle", "busy")
    for name, count in (("corpus", 500), ("held", 40)):
        with open(home / f"{name}.jsonl", "w") as file:
            for _ in range(count):
                said = [
                    f"the {rng.choice(looks)} {rng.choice(nouns)} {rng.choice(verbs)} the {rng.choice(nouns)}."
                    for _ in range(rng.randint(1, 7))
                ]
                file.write(json.dumps({"text": " ".join(said)}) + "\n")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts_of(home, "corpus"), trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END).save_pretrained(home / "model")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32, n_layer=4, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes
        )
    else:
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64, **sizes,
        )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(home / "model")


def texts_of(home: Path, name: str) -> list[str]:
    return [json.loads(line)["text"] for line in (home / f"{name}.jsonl").read_text().splitlines()]


def train(home: Path, *words: str, interrupt_after: int | None = None) -> tuple[int, str]:
    """Exit code and stderr of `octopipe train`; with `interrupt_after`, Ctrl-C once that step is in the log."""
    log = home / "log.jsonl"
    command = [sys.executable, "-m", "octopipe", "train", str(home / "model"), *FLAGS, "--log", str(log), *words]
    command += ["--data", str(home / "corpus.jsonl"), "--eval-data", str(home / "held.jsonl"), "--eval-every", "100"]
    process = subprocess.Popen(
        [*command, "--checkpoint", str(home / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts background jobs with SIGINT ignored, and their children inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    if interrupt_after is not None:
        while process.poll() is None:
            if any(r["kind"] == "step" and r["step"] >= interrupt_after for r in logged(log)):
                process.send_signal(signal.SIGINT)
                break
            time.sleep(0.05)
    _, err = process.communicate(timeout=3600)
    return process.returncode, err


def logged(log: Path) -> list[dict[str, Any]]:
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


# -- the same run without octopipe ---------------------------------------------------------------------


def windows_of(home: Path, name: str) -> list[Sample]:
    """Every sample, by a plain walk over the documents."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(home / "model" / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    assert end is not None
    row: list[int] = []
    begins: list[bool] = []
    for text in texts_of(home, name):
        ids = [*tokenizer.encode(text).ids, end]
        row += ids
        begins += [True] + [False] * (len(ids) - 1)
    found = []
    for first in range(0, len(row) - SEQ, SEQ):
        positions, targets, position = [], [], 0
        for at in range(first, first + SEQ):
            position = 0 if begins[at] or at == first else position + 1
            positions.append(position)
            targets.append(-100 if begins[at + 1] else row[at + 1])
        found.append((row[first : first + SEQ], positions, targets))
    return found


def plain_run(home: Path, steps: int, dtype: str) -> tuple[list[float], dict[int, float], nn.Module]:
    """Losses by step, evaluations, and the trained model."""
    import torch
    import transformers

    from octopipe.runtime.training.data.source import shuffled

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "model", dtype=getattr(torch, dtype))
    model.train()
    decay: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (rest if name.endswith("bias") or "norm" in name or ".ln_" in name else decay).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}], lr=LR, betas=BETAS, eps=1e-8
    )
    samples, held = windows_of(home, "corpus"), windows_of(home, "held")

    losses: list[float] = []
    evaluations: dict[int, float] = {}
    for step in range(1, steps + 1):
        taken = []
        for number in range((step - 1) * MICRO_BATCHES, step * MICRO_BATCHES):
            lap, at = divmod(number, len(samples))
            taken.append(samples[shuffled(at, len(samples), SEED + lap)])
        items = sum(t != -100 for *_, targets in taken for t in targets)
        total = 0.0
        for sample in taken:
            ids, positions, targets = (torch.tensor([column]) for column in sample)
            loss = model(
                input_ids=ids, position_ids=positions, labels=ids, shift_labels=targets, use_cache=False,
                num_items_in_batch=torch.tensor(items / MICRO_BATCHES, dtype=torch.float64),
            ).loss  # fmt: skip
            (loss / MICRO_BATCHES).backward()
            total += float(loss.detach()) / MICRO_BATCHES
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        part = (step - 1 - WARMUP) / (steps - WARMUP)
        rate = LR * step / WARMUP if step <= WARMUP else LR * (1 + math.cos(math.pi * part)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps:
            evaluations[step] = plain_loss(model, held)
    return losses, evaluations, model


def plain_loss(model: nn.Module, rows: list[Sample]) -> float:
    """Mean loss over all targets, by transformers' own forward."""
    import torch

    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for ids, positions, targets in rows:
            # Without a cache: with one, transformers' masks do not look at positions.
            inputs = {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([positions])}
            logits = model(**inputs, use_cache=False).logits[0].double()
            wanted = torch.tensor(targets)
            total += float(torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum"))
            count += int((wanted != -100).sum())
    model.train()
    return total / count


# -- all of it -----------------------------------------------------------------------------------------


def journey(home: Path, *, steps: int = 300, dtype: str = "float32", family: str = "llama") -> dict[str, Any]:
    """Run everything; what was found."""
    import transformers

    make_material(home, family)
    stop = 2 * steps // 5
    common = ("--nproc", "2", "--steps", str(steps), "--dtype", dtype)
    code, err = train(home, *common, "--system", "1f1b", interrupt_after=stop)
    stopped = max(r["step"] for r in logged(home / "log.jsonl") if r["kind"] == "step")
    resumed, more = train(home, *common, "--system", "zb-h1", "--resume")
    target = home / "exported"
    words = ["convert", str(home / "run"), "--to", "huggingface", "--model", str(home / "model"), "-o", str(target)]
    converted = subprocess.run([sys.executable, "-m", "octopipe", *words], capture_output=True, text=True)
    if resumed or converted.returncode:
        raise SystemExit(f"{err}{more}{converted.stderr}")
    ours = {r["step"]: r["loss"] for r in logged(home / "log.jsonl") if r["kind"] == "step"}
    judged = {r["step"]: r["loss"] for r in logged(home / "log.jsonl") if r["kind"] == "evaluation"}
    losses, evaluations, twin = plain_run(home, steps, dtype)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(target)
    parameters = dict(twin.named_parameters())
    return {
        "steps": steps,
        "dtype": dtype,
        "exit_when_interrupted": code,
        "said_when_interrupted": err.strip().splitlines()[-1],
        "interrupted_after_step": stopped,
        "every_step_once": sorted(ours) == list(range(1, steps + 1)),
        "first_loss": ours[1],
        "last_loss": ours[steps],
        "plain_last_loss": losses[-1],
        "largest_loss_difference": max(abs(ours[k + 1] - loss) for k, loss in enumerate(losses)),
        "evaluations": judged,
        "plain_evaluations": evaluations,
        "largest_evaluation_difference": max(abs(judged[k] - loss) for k, loss in evaluations.items()),
        "exported_loss": plain_loss(loaded, windows_of(home, "held")),
        "largest_weight_difference": max(
            float((p - parameters[name]).detach().abs().max()) for name, p in loaded.named_parameters()
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--family", choices=("llama", "gpt2"), default="llama")
    args = parser.parse_args()
    if args.steps < 5:
        parser.error("the run is interrupted after two fifths of its steps; give at least 5")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(journey(Path(folder), steps=args.steps, dtype=args.dtype, family=args.family), indent=1))


if __name__ == "__main__":
    main()

"""After a step that one rank broke off, all ranks are at the same step: the numbers that follow are those of a run in
which nothing failed, whichever ranks had already finished their part."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from ranks import PATIENCE_S, Ranks  # noqa: E402
from small_pipelines import COUNT, EXACT, LAYERS, WIDTH, data, plan_of, square, worst  # noqa: E402
from torch import nn  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.runtime.pipeline import Pipeline  # noqa: E402
from octopipe.runtime.stages.rng import micro_batch_seed, mix  # noqa: E402

FAILS_IN = 3
"""The fourth step: before it, ranks exchange more than afterwards."""


class Masked(nn.Module):
    """Draws in every forward, and has a constant that layers on other ranks hold, too."""

    def __init__(self, mask):
        super().__init__()
        self.inner, self.drop = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Dropout(0.4)
        self.register_buffer("mask", mask)

    def forward(self, x):
        return self.drop(torch.tanh(self.inner(x))) * self.mask


def masked_layers():
    torch.manual_seed(0)
    mask = torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64)
    return [Masked(mask) for _ in range(LAYERS)]


def plain_steps(layers, steps):
    """Losses of one process, and the gradients of the last step."""
    losses = []
    for step in range(steps):
        total = 0.0
        for m, x in enumerate(data()):
            out, seed = x, micro_batch_seed(0, step, 0, m)
            for k, layer in enumerate(layers):
                torch.manual_seed(mix(seed, k))
                out = layer(out)
            loss = square(out, x)
            grads = step == steps - 1
            if grads:
                (loss / COUNT).backward()
            total += float(loss.detach())
        losses.append(total / COUNT)
    return losses, {f"{k}.{n}": p.grad for k, layer in enumerate(layers) for n, p in layer.named_parameters()}


def spoiled_last_product(pipe):
    """Makes the last weight product of the first layer fail, after which no other rank needs this one's tensors."""
    calls = iter(range(1, 100))

    def bad(_):
        if next(calls) == COUNT:
            raise ValueError("a bad end")

    return pipe.modules()[0].inner.weight.register_post_accumulate_grad_hook(bad) if 0 in pipe.modules() else None


def fails_at_its_end(world):
    steps = FAILS_IN + 3
    wanted, grads = plain_steps(masked_layers(), steps)
    losses, numbers = [], []
    with Pipeline(masked_layers(), plan_of("zb-h1"), square, group=world, timeout_s=PATIENCE_S) as pipe:
        for step in range(steps):
            if step == FAILS_IN:
                hook = spoiled_last_product(pipe)
                with pytest.raises((ValueError, OctoPipeError), match="a bad end"):
                    pipe.step(data(), data())
                if hook is not None:
                    hook.remove()
                numbers.append(pipe.step_number)
                pipe.recover()
            pipe.zero_grad()
            losses.append(float(pipe.step(data(), data())))
        apart = worst((n, p.grad, grads[n]) for n, p in pipe.named_parameters())
    return numbers, max(abs(a - b) for a, b in zip(losses, wanted, strict=True)), apart


def test_a_step_that_failed_on_the_last_rank_to_end_has_run_on_no_rank():
    ranks = Ranks(2)
    try:
        for numbers, loss, gradient in ranks.run(fails_at_its_end):
            assert numbers == [FAILS_IN]
            assert max(loss, gradient) <= EXACT
    finally:
        ranks.close()


def without_the_exchange_of_losses(world):
    """Nobody waits for the first rank's last product; what ranks say, and whether the remedy helps."""
    with Pipeline(masked_layers(), plan_of("zb-h1"), square, group=world, timeout_s=PATIENCE_S) as pipe:
        for _ in range(FAILS_IN + 2):
            pipe.step(data(), data(), reduce_loss=False)
        hook = spoiled_last_product(pipe)
        with pytest.raises((ValueError, OctoPipeError)):
            for _ in range(2):
                pipe.step(data(), data(), reduce_loss=False)
        if hook is not None:
            hook.remove()
        number = pipe.step_number
        with pytest.raises(OctoPipeError) as caught:
            pipe.recover()
        pipe.step_number = FAILS_IN  # no optimizer has changed a parameter
        pipe.recover()
        pipe.zero_grad()
        wanted, _ = plain_steps(masked_layers(), FAILS_IN + 1)
        return number, str(caught.value), abs(float(pipe.step(data(), data())) - wanted[FAILS_IN])


def test_ranks_that_completed_a_step_which_others_did_not_are_not_put_together_in_silence():
    ranks = Ranks(2)
    try:
        for rank, (number, words, away) in enumerate(ranks.run(without_the_exchange_of_losses)):
            assert number == FAILS_IN + 2 + rank
            assert f"completed {FAILS_IN + 3} steps and others {FAILS_IN + 2}" in words
            assert away <= EXACT
    finally:
        ranks.close()

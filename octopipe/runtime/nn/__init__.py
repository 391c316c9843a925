"""Layers to train with: ordinary modules for every common layer kind of a `ModelSpec`.

    layers = octopipe.runtime.nn.build_layers(spec, dtype=torch.bfloat16, device="cuda", seed=0)   # factories
    pipe = octopipe.Pipeline(layers, plan, loss_fn=octopipe.runtime.nn.cross_entropy)

The contract, for these modules and for your own:
- The first layer takes token ids [batch, tokens]; layers between take and give hidden states [batch,
  tokens, hidden], with pre-norm and residual inside; the last gives what `loss_fn(output, target)` takes.
- `Head` gives `LazyLogits`, which `cross_entropy` turns into the loss without full-precision logits. For a
  loss of your own, either call `output.logits()` in it, or build with `lean_head=False` and get a plain
  tensor; `cross_entropy` takes that too. The loss runs inside the last stage (`Stage.forward(...,
  then=...)`), so its weight gradient is split as well.
- Tied parameters: a module may have `tied_to: dict[str, str]`, from the name of one of its own parameters
  to a tie name ("embedding"). Parameters of one tie name, wherever they live, are one parameter: they start
  equal (the tied head draws what the embedding drew), their gradients are to be summed, and `tie(modules)`
  makes them one object where they live together.
- A layer's parameters start the same whichever rank builds it.
"""

from octopipe.runtime.nn.build import build_layers, tie
from octopipe.runtime.nn.head import Head, LazyLogits, cross_entropy

__all__ = ["Head", "LazyLogits", "build_layers", "cross_entropy", "tie"]

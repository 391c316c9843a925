"""The training loop: data, checkpoints, plans that change while training."""

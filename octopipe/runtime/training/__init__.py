"""The training loop: data, checkpoints, changing the plan during training."""

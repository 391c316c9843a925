"""One stage on one rank: forward, gradients, deferred weight gradients, recomputation."""

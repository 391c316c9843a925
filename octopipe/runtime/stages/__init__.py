"""One stage on one rank: its forward, its gradients, its deferred weight gradients, its recomputation."""

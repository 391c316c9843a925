"""Other tools' recordings of layer times, read: torch.profiler, Nsight Systems, CSV."""

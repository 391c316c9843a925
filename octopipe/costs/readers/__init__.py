"""Readers for layer times from other tools: torch.profiler, Nsight Systems, CSV."""

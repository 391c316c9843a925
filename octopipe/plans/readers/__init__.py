"""Readers for the plans of other tools: Megatron's layout strings, PyTorch's schedule CSVs."""

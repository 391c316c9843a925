"""Other people's descriptions of plans, read: Megatron's texts, PyTorch's schedule CSVs."""
